/* SPDX-License-Identifier: Apache-2.0
 *
 * Sets of page numbers beside an array of flags, at the counts where a level begins or ends.
 */
#include "tests/support/check.h"

#include "backing/memory.h"
#include "vmm/marks.h"

#include <stdlib.h>

static uint64_t seed = 1;

static size_t below(size_t bound)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % bound;
}

static size_t model_last(const bool *flags, size_t number)
{
    for (;; number--) {
        if (flags[number])
            return number;
        if (number == 0)
            return SIZE_MAX;
    }
}

static size_t model_next(const bool *flags, size_t count, size_t number)
{
    while (number < count && !flags[number])
        number++;
    return number < count ? number : SIZE_MAX;
}

/* Every question about every number. */
static void compare(const struct gp__marks *marks, const bool *flags, size_t count)
{
    for (size_t number = 0; number < count; number++) {
        assert_int_equal(gp__marks_last(marks, number), model_last(flags, number));
        assert_int_equal(gp__marks_next(marks, number), model_next(flags, count, number));
    }
    assert_int_equal(gp__marks_next(marks, count), SIZE_MAX);
}

static void small_sets_answer_as_flags_do(void **state)
{
    static const size_t counts[] = {1, 2, 63, 64, 65, 127, 128, 129, 640};
    (void)state;

    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        size_t count = counts[i];
        struct gp__marks marks;
        bool *flags = calloc(count, sizeof *flags);
        assert_true(gp__marks_init(&marks, count));
        compare(&marks, flags, count);
        for (int step = 0; step < 300; step++) {
            size_t number = below(count);
            flags[number] = !flags[number];
            if (flags[number])
                gp__marks_add(&marks, number);
            else
                gp__marks_remove(&marks, number);
            if (step % 20 == 0 || count < 3)
                compare(&marks, flags, count);
        }
        gp__marks_free(&marks);
        free(flags);
    }
}

/* A few marks far apart: the way leads up over empty words and down again. */
static void sparse_sets_of_any_size(void **state)
{
    static const size_t counts[] = {4095, 4096, 4097, 262144, 262145, 20000000};
    (void)state;

    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        size_t count = counts[i];
        size_t at[] = {0, 63, 64, 4000, count - 50, count - 1};
        struct gp__marks marks;
        assert_true(gp__marks_init(&marks, count));
        assert_int_equal(gp__marks_last(&marks, count - 1), SIZE_MAX);
        assert_int_equal(gp__marks_next(&marks, 0), SIZE_MAX);
        for (size_t one = 0; one < 6; one++) {
            gp__marks_add(&marks, at[one]);
            gp__marks_add(&marks, at[one]); /* twice is once */
        }
        assert_int_equal(gp__marks_last(&marks, 62), 0);
        assert_int_equal(gp__marks_last(&marks, 3999), 64);
        assert_int_equal(gp__marks_next(&marks, count - 49), count - 1);
        assert_int_equal(gp__marks_next(&marks, count), SIZE_MAX);
        gp__marks_remove(&marks, count - 50);
        assert_int_equal(gp__marks_last(&marks, count - 2), 4000);
        for (size_t one = 1; one < 6; one++)
            gp__marks_remove(&marks, at[one]);
        assert_int_equal(gp__marks_last(&marks, count - 1), 0);
        assert_int_equal(gp__marks_next(&marks, 1), SIZE_MAX);
        gp__marks_remove(&marks, 0);
        assert_int_equal(gp__marks_last(&marks, count - 1), SIZE_MAX);
        gp__marks_free(&marks);
    }
}

static void no_memory_is_said(void **state)
{
    struct gp__marks marks;
    (void)state;

    gp__memory_fail_at(1, 0);
    assert_false(gp__marks_init(&marks, 1000));
    gp__memory_fail_at(0, 0);
    gp__marks_free(&marks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_sets_answer_as_flags_do),
        cmocka_unit_test(sparse_sets_of_any_size),
        cmocka_unit_test(no_memory_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
