/* SPDX-License-Identifier: Apache-2.0
 *
 * A set of numbers below a fixed count, with one question: which is the last of them up to here? A segment
 * keeps two, of pages: where a span starts, and where a chunk does.
 *
 * PICTURE. Level 0 has a bit for each number, each level above a bit for each word below that is not zero, up
 * to a level of one word. So every call looks at no more than two words of each level: 5 levels for the
 * 64 Mi pages of 128 TiB. A run of pages costs nothing but its first: a chunk of any size is one bit and
 * one entry of the page map, and only what is touched of the two becomes memory.
 *
 * Not a tree: it would have to be allocated, and a free must not. No lock of its own.
 */
#ifndef GP__MARKS_H
#define GP__MARKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GP__MARK_LEVELS 6 /* 64 to the power of this many numbers */

struct gp__marks {
    uint64_t *level[GP__MARK_LEVELS]; /* one allocation, level[0] its start */
    int levels;
};

/* An empty set for numbers below `count`, of which there is at least one; false without memory. */
bool gp__marks_init(struct gp__marks *marks, size_t count);
/* Also for one that is all zeros. */
void gp__marks_free(struct gp__marks *marks);
void gp__marks_add(struct gp__marks *marks, size_t number);
void gp__marks_remove(struct gp__marks *marks, size_t number);
/* The largest of the set that is at most `number`; SIZE_MAX if there is none. */
size_t gp__marks_last(const struct gp__marks *marks, size_t number);
/* The smallest of the set that is at least `number`; SIZE_MAX if there is none. For those who list it. */
size_t gp__marks_next(const struct gp__marks *marks, size_t number);

#endif
