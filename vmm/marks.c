/* SPDX-License-Identifier: Apache-2.0
 *
 * Sets of page numbers, as bits over bits: see marks.h. It knows no pages.
 */
#include "marks.h"

#include "../backing/memory.h"

#define BITS 64

bool gp__marks_init(struct gp__marks *marks, size_t count)
{
    size_t words[GP__MARK_LEVELS], total = 0;
    int levels = 0;
    do {
        count = count / BITS +
                1; /* one bit more than numbers, so that a look may begin behind the last */
        total += words[levels++] = count;
    } while (count > 1 && levels < GP__MARK_LEVELS);
    uint64_t *all = count == 1 ? gp__calloc(total, sizeof *all) : NULL;
    *marks = (struct gp__marks){.levels = all != NULL ? levels : 0};
    for (int level = 0; level < marks->levels; level++) {
        marks->level[level] = all;
        all += words[level];
    }
    return marks->levels > 0;
}

void gp__marks_free(struct gp__marks *marks)
{
    gp__free(marks->level[0]);
    *marks = (struct gp__marks){.levels = 0};
}

void gp__marks_add(struct gp__marks *marks, size_t number)
{
    for (int level = 0; level < marks->levels; level++, number /= BITS) {
        uint64_t *word = &marks->level[level][number / BITS];
        uint64_t before = *word;
        *word |= UINT64_C(1) << (number % BITS);
        if (before != 0)
            return; /* the levels above know */
    }
}

void gp__marks_remove(struct gp__marks *marks, size_t number)
{
    for (int level = 0; level < marks->levels; level++, number /= BITS) {
        uint64_t *word = &marks->level[level][number / BITS];
        *word &= ~(UINT64_C(1) << (number % BITS));
        if (*word != 0)
            return;
    }
}

static size_t highest(uint64_t word)
{
    return BITS - 1 - (size_t)__builtin_clzll(word);
}

static size_t lowest(uint64_t word)
{
    return (size_t)__builtin_ctzll(word);
}

size_t gp__marks_last(const struct gp__marks *marks, size_t number)
{
    for (int level = 0; level < marks->levels; level++) {
        size_t word = number / BITS;
        uint64_t bits = marks->level[level][word] & (~UINT64_C(0) >> (BITS - 1 - number % BITS));
        if (bits != 0) {
            number = word * BITS + highest(bits);
            while (level-- > 0)
                number = number * BITS + highest(marks->level[level][number]);
            return number;
        }
        if (word == 0)
            break;
        number = word - 1;
    }
    return SIZE_MAX;
}

size_t gp__marks_next(const struct gp__marks *marks, size_t number)
{
    for (int level = 0; level < marks->levels; level++) {
        size_t word = number / BITS;
        uint64_t bits = marks->level[level][word] & (~UINT64_C(0) << number % BITS);
        if (bits != 0) {
            number = word * BITS + lowest(bits);
            while (level-- > 0)
                number = number * BITS + lowest(marks->level[level][number]);
            return number;
        }
        number = word + 1;
    }
    return SIZE_MAX;
}
