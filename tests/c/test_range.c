/* SPDX-License-Identifier: Apache-2.0
 *
 * What a range promises to its one user: what is committed, what a cut keeps, all or nothing.
 * Limits, pins and endings are in test_range_ends.c, streams in test_range_streams.c, calls that
 * meet in test_range_busy_threads.c, contents in test_range_host.c. Cases of others' bug reports
 * are named as project and number.
 */
#include "range_case.h"

/* ---- making ---- */

static void a_new_range_has_addresses_and_no_memory(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    CHECK(gp_range_address(range) != 0 && gp_range_address(range) % PAGE == 0, "at %#zx",
          (size_t)gp_range_address(range));
    assert_int_equal(gp_range_max_bytes(range), 8 * PAGE);
    assert_int_equal(gp_range_granularity(range), PAGE);
    assert_int_equal(gp_range_size(range), 0);
    assert_int_equal(gp_range_physical_bytes(range), 0);
    assert_ptr_equal(gp_range_pool(range), world.pool);
    assert_ptr_equal(gp_range_stream(range), world.stream[0]);
    assert_false(gp_range_is_closed(range));
    assert_int_equal(world_stats(&world).address_bytes, 8 * PAGE);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    expect_committed(range, "");
    end_range(range);
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

/* cuda-python 2910: size zero is defined everywhere. */
static void a_range_of_nothing_is_valid(void **state)
{
    gp_range *range = make_range(0, 0);
    gp_release_result result = {1, 1};
    gp_interval nothing = {0, 0};
    size_t added = 1;

    (void)state;
    assert_int_equal(gp_range_address(range), 0);
    CHECK_OK(gp_range_commit(range, &nothing, 1, NULL, &added, &world.error), &world.error);
    assert_int_equal(added, 0);
    CHECK_OK(gp_range_commit(range, NULL, 0, NULL, &added, &world.error), &world.error);
    CHECK_OK(gp_range_decommit(range, &nothing, 1, NULL, 0, &result, &world.error), &world.error);
    CHECK(result.released_bytes == 0 && result.kept_bytes == 0, "something was released");
    CHECK_OK(gp_range_resize(range, 0, NULL, 0, &result, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, try_commit(range, 0, 1, -1), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_resize(range, 1, NULL, 0, NULL, &world.error), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_pin(range, 0, 1, false, &world.error), NULL);
    CHECK_OK(gp_range_pin(range, 0, 0, false, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_PINNED, gp_range_close(range, NULL, &world.error), NULL);
    gp_range_unpin(range, 0, 0);
    CHECK_OK(gp_range_record_stream(range, world.stream[1], &world.error), &world.error);
    check_all();
    end_range(range);
}

static void absurd_ranges_are_refused_in_words(void **state)
{
    const size_t sizes[] = {SIZE_MAX,
                            SIZE_MAX - PAGE,
                            (size_t)PTRDIFF_MAX,
                            PTRDIFF_MAX - PAGE + 1,
                            (size_t)PTRDIFF_MAX - PAGE,
                            (size_t)1 << 50};
    gp_range *range = (gp_range *)1;

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        gp_status status =
            gp_range_create(world.pool, sizes[i], world.stream[0], &range, &world.error);

        CHECK(status == GP_ERR_ARGUMENT || status == GP_ERR_ADDRESS_SPACE, "%zu bytes: %s",
              sizes[i], gp_status_text(status));
        CHECK(world.error.message[0] != '\0', "no words");
    }
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_create(world.pool, PAGE, NULL, &range, NULL), NULL);
    assert_ptr_equal(range, (gp_range *)1);
    check_all();
}

static void addresses_that_run_out_are_said_to_be_addresses(void **state)
{
    gp_range *first, *range = NULL;

    begin_with(state, (struct world_options){.chunk_size = PAGE, .largest_reserve = 8 * PAGE});
    first = make_range(8, 0);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE,
                 gp_range_create(world.pool, 8 * PAGE + 1, world.stream[0], &range, &world.error),
                 NULL);
    CHECK(strstr(world.error.message, "addresses, not memory") != NULL, "\"%s\"",
          world.error.message);
    CHECK(range == NULL, "a failure wrote its output");
    assert_int_equal(world_stats(&world).address_bytes, 8 * PAGE);
    end_range(first);
}

/* All addresses of the device are taken; what comes back can be had again. */
static void addresses_of_a_closed_range_come_back(void **state)
{
    gp_range *a, *b, *range = NULL;

    begin_with(state, (struct world_options){.chunk_size = PAGE, .device_addresses = 16 * PAGE});
    a = make_range(8, 0);
    b = make_range(8, 1);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE,
                 gp_range_create(world.pool, PAGE, world.stream[0], &range, &world.error), NULL);
    commit(a, 0, 8, -1);
    end_range(a);
    drain();
    range = make_range(8, 0);
    assert_int_equal(world_stats(&world).address_bytes, 16 * PAGE);
    end_range(range);
    end_range(b);
}

/* pytorch 186213: many ranges are cheap, whatever they may become. */
static void a_thousand_ranges_in_one_pool(void **state)
{
    static gp_range *ranges[1000];

    (void)state;
    gp__sim_log_enable(world.sim, false);
    for (size_t i = 0; i < 1000; i++) {
        ranges[i] = make_range(64, (int)i % WORLD_STREAMS);
        commit(ranges[i], i % 60, 2, -1);
    }
    assert_int_equal(world_stats(&world).used_bytes, 2000 * PAGE);
    for (size_t i = 0; i < 1000; i += 7)
        decommit(ranges[i], i % 60, 1, 0, 1, 0);
    check_all();
    for (size_t i = 0; i < 1000; i++)
        end_range(ranges[i * 7 % 1000]);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

/* ---- committing ---- */

static void committing_twice_adds_nothing(void **state)
{
    gp_range *range = make_range(8, 0);
    uint64_t asked;

    (void)state;
    assert_int_equal(commit(range, 2, 3, -1), 3);
    asked = world.alloc_calls;
    assert_int_equal(commit(range, 2, 3, -1), 0);
    assert_int_equal(commit(range, 3, 1, 1), 0);
    assert_int_equal(world.alloc_calls, asked);
    assert_int_equal(commit(range, 1, 5, -1), 2);
    expect_committed(range, ".#####");
    assert_int_equal(world_stats(&world).used_bytes, 5 * PAGE);
    assert_int_equal(world_stats(&world).peak_used_bytes, 5 * PAGE);
    assert_int_equal(gp_range_physical_bytes(range), 5 * PAGE);
    end_range(range);
}

static void intervals_may_come_in_any_order(void **state)
{
    gp_range *range = make_range(16, 0);
    const gp_interval parts[] = {{9 * PAGE, 2 * PAGE}, {0, PAGE},        {5 * PAGE, 0},
                                 {4 * PAGE, 3 * PAGE}, {6 * PAGE, PAGE}, {7 * PAGE, PAGE},
                                 {4 * PAGE, PAGE}};
    gp_release_result result;
    size_t added = 0;

    (void)state;
    CHECK_OK(gp_range_commit(range, parts, 7, NULL, &added, &world.error), &world.error);
    assert_int_equal(added, 7 * PAGE);
    expect_committed(range, "#...####.##");
    CHECK_OK(gp_range_commit(range, parts, 7, NULL, &added, &world.error), &world.error);
    assert_int_equal(added, 0);
    CHECK_OK(gp_range_decommit(range, parts, 7, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 7 * PAGE);
    assert_int_equal(result.kept_bytes, 0);
    expect_committed(range, "");
    end_range(range);
}

static void wrong_intervals_change_nothing(void **state)
{
    gp_range *range = make_range(7, 0);
    const gp_interval wrong[] = {{1, PAGE},
                                 {0, 1},
                                 {PAGE, PAGE - 1},
                                 {0, 8 * PAGE},
                                 {7 * PAGE, PAGE},
                                 {8 * PAGE, 0},
                                 {PAGE, SIZE_MAX - PAGE + 1},
                                 {SIZE_MAX - PAGE + 1, PAGE},
                                 {SIZE_MAX - PAGE + 1, 0}};
    gp_range_release(gp_range_retain(range));
    commit(range, 1, 2, -1);
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const gp_interval both[] = {{4 * PAGE, PAGE}, wrong[i]};

        CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_commit(range, both, 2, NULL, NULL, &world.error),
                     NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT,
                     gp_range_commit(range, &wrong[i], 1, NULL, NULL, &world.error), NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT,
                     gp_range_decommit(range, &wrong[i], 1, NULL, 0, NULL, &world.error), NULL);
        CHECK(strstr(world.error.message, "range") != NULL, "\"%s\"", world.error.message);
    }
    expect_committed(range, ".##");
    end_range(range);
}

static void neighbours_become_one(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_interval parts[2] = {{7, 7}, {7, 7}};

    (void)state;
    commit(range, 0, 1, -1);
    commit(range, 2, 1, -1);
    commit(range, 4, 1, -1);
    assert_int_equal(gp_range_committed(range, NULL, 0), 3);
    assert_int_equal(gp_range_committed(range, parts, 1), 3);
    CHECK(parts[0].offset == 0 && parts[0].bytes == PAGE && parts[1].offset == 7,
          "one place was given");
    commit(range, 1, 1, -1); /* between two */
    assert_int_equal(gp_range_committed(range, NULL, 0), 2);
    commit(range, 3, 3, -1); /* between two, across one, and beyond */
    expect_committed(range, "######");
    assert_int_equal(gp_range_committed(range, parts, 2), 1);
    end_range(range);
}

/* A max_bytes off the granularity is rounded up, and its last page is as good as any. */
static void the_last_page_counts_whole(void **state)
{
    gp_range *range = NULL;

    (void)state;
    CHECK_OK(gp_range_create(world.pool, 2 * PAGE + 1, world.stream[0], &range, NULL), NULL);
    assert_int_equal(gp_range_max_bytes(range), 2 * PAGE + 1);
    commit(range, 0, 3, -1);
    expect_committed(range, "###");
    CHECK_OK(gp_range_resize(range, 2 * PAGE + 1, NULL, 0, NULL, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_resize(range, 2 * PAGE + 2, NULL, 0, NULL, &world.error),
                 NULL);
    assert_int_equal(gp_range_size(range), 2 * PAGE + 1);
    end_range(range);
}

/* ---- cuts ---- */

static void decommitting_what_is_not_committed_is_nothing(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    decommit(range, 0, 8, 0, 0, 0);
    commit(range, 3, 2, -1);
    decommit(range, 0, 4, 0, 1, 0);
    expect_committed(range, "....#");
    decommit(range, 0, 4, 0, 0, 0);
    decommit(range, 0, 8, 0, 1, 0);
    decommit(range, 0, 8, 0, 0, 0);
    expect_committed(range, "");
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    end_range(range);
}

static void chunks_of_one_page_are_exact(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 8, -1);
    for (size_t i = 1; i < 8; i += 2) {
        decommit(range, i, 1, 0, 1, 0);
        assert_int_equal(gp_range_physical_bytes(range), (8 - (i + 1) / 2) * PAGE);
    }
    expect_committed(range, "#.#.#.#");
    end_range(range);
}

/* One chunk of eight pages: it stays until its last page goes, and says so each time. */
static void a_cut_keeps_the_chunk_and_says_so(void **state)
{
    gp_range *range = make_range(16, 0);
    uint64_t asked;

    (void)state;
    commit(range, 0, 8, -1);
    assert_int_equal(world_stats(&world).chunk_count, 1);
    decommit(range, 2, 2, 0, 0, 2);
    expect_committed(range, "##..####");
    assert_int_equal(world_stats(&world).free_bytes, 2 * PAGE);
    assert_int_equal(gp_range_physical_bytes(range), 8 * PAGE);
    asked = world.alloc_calls;
    assert_int_equal(commit(range, 1, 2, -1), 1); /* part of what was kept */
    assert_int_equal(world.alloc_calls, asked);
    expect_committed(range, "###.####");
    decommit(range, 0, 6, 0, 0, 6);
    decommit(range, 6, 2, 0, 8, 0); /* with the last page all of it */
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    end_range(range);
}

static void a_decommit_of_many_parts_counts_each_chunk_once(void **state)
{
    gp_range *range = make_range(32, 0);
    const gp_interval parts[] = {{0, 2 * PAGE}, {3 * PAGE, 9 * PAGE}, {14 * PAGE, 2 * PAGE}};
    const gp_interval rest[] = {{13 * PAGE, PAGE}, {2 * PAGE, PAGE}, {12 * PAGE, PAGE}};
    gp_release_result result;

    (void)state;
    commit(range, 0, 8, -1);
    commit(range, 8, 4, -1);
    commit(range, 12, 4, -1);
    assert_int_equal(world_stats(&world).chunk_count, 3);
    CHECK_OK(gp_range_decommit(range, parts, 3, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 4 * PAGE); /* the chunk in the middle */
    assert_int_equal(result.kept_bytes, 9 * PAGE); /* seven of the first, two of the last */
    expect_committed(range, "..#.........##");
    CHECK_OK(gp_range_decommit(range, rest, 3, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 12 * PAGE);
    assert_int_equal(result.kept_bytes, 0);
    end_range(range);
}

/* A commit that finds part of what it wants in a kept chunk asks for the holes only. */
static void a_commit_takes_what_was_kept(void **state)
{
    gp_range *range = make_range(16, 0);

    (void)state;
    commit(range, 2, 4, -1);
    decommit(range, 3, 2, 0, 0, 2);
    assert_int_equal(commit(range, 0, 8, -1), 6);
    assert_int_equal(world_stats(&world).physical_bytes, 8 * PAGE);
    expect_committed(range, "########");
    end_range(range);
}

static void a_doubling_is_one_chunk(void **state)
{
    gp_range *range = make_range(512, 0);

    (void)state;
    for (size_t pages = 1, chunks = 1; pages <= 512; pages *= 2, chunks++) {
        CHECK_OK(gp_range_resize(range, pages * PAGE, NULL, 0, NULL, &world.error), &world.error);
        assert_int_equal(world_stats(&world).chunk_count, chunks);
        assert_int_equal(world_stats(&world).physical_bytes, pages * PAGE);
    }
    end_range(range);
}

/* ---- resizing ---- */

static void a_resize_commits_from_the_start(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result = {1, 1};

    (void)state;
    CHECK_OK(gp_range_resize(range, 3 * PAGE - 5, NULL, 0, &result, &world.error), &world.error);
    CHECK(result.released_bytes == 0 && result.kept_bytes == 0, "growing released something");
    assert_int_equal(gp_range_size(range), 3 * PAGE - 5);
    expect_committed(range, "###");
    CHECK_OK(gp_range_resize(range, 3 * PAGE - 4, NULL, 0, &result, &world.error), &world.error);
    expect_committed(range, "###");
    decommit(range, 1, 1, 0, 1, 0);
    CHECK_OK(gp_range_resize(range, 4 * PAGE, NULL, 0, &result, &world.error), &world.error);
    expect_committed(range, "####"); /* the hole too */
    CHECK_OK(gp_range_resize(range, PAGE + 1, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 2 * PAGE);
    expect_committed(range, "##");
    CHECK_OK(gp_range_resize(range, PAGE + 1, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 0);
    CHECK_OK(gp_range_resize(range, 0, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 2 * PAGE);
    assert_int_equal(gp_range_size(range), 0);
    expect_committed(range, "");
    end_range(range);
}

/* What was committed behind the size goes with a shrink: "decommits what lies behind". */
static void a_shrink_takes_all_that_lies_behind(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result;

    (void)state;
    CHECK_OK(gp_range_resize(range, 3 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    commit(range, 6, 2, -1);
    CHECK_OK(gp_range_resize(range, 2 * PAGE, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 3 * PAGE);
    expect_committed(range, "##");
    end_range(range);
}

static void a_shrink_through_a_chunk_keeps_it(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result;

    (void)state;
    CHECK_OK(gp_range_resize(range, 8 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    CHECK_OK(gp_range_resize(range, 3 * PAGE, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 0);
    assert_int_equal(result.kept_bytes, 5 * PAGE);
    expect_committed(range, "###");
    CHECK_OK(gp_range_resize(range, 0, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 8 * PAGE);
    end_range(range);
}

static void a_resize_that_fails_keeps_the_size(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result = {7, 7};

    (void)state;
    CHECK_OK(gp_range_resize(range, 3 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_LIMIT, gp_range_resize(range, 5 * PAGE, NULL, 0, &result, &world.error),
                 NULL);
    assert_int_equal(gp_range_size(range), 3 * PAGE);
    assert_int_equal(result.released_bytes, 7);
    expect_committed(range, "###");
    CHECK_OK(gp_range_resize(range, 4 * PAGE, NULL, 0, &result, &world.error), &world.error);
    end_range(range);
}

/* ---- all or nothing ---- */

static bool refuse_from(struct world *unused, size_t size)
{
    uint64_t *left = world.knob;

    (void)unused;
    (void)size;
    if (*left == 1)
        return true;
    --*left;
    return false;
}

/* pytorch 188008, for every k: the k-th chunk of a commit of many holes is refused for good. */
static void a_refusal_at_any_chunk_undoes_all(void **state)
{
    gp_range *range = make_range(16, 0);
    const gp_interval parts[] = {{0, 2 * PAGE}, {4 * PAGE, 3 * PAGE}, {8 * PAGE, 6 * PAGE}};
    uint64_t left;
    size_t added = 77;

    (void)state;
    commit(range, 5, 1, -1);
    commit(range, 9, 1, -1);
    world.knob = &left;
    world.refuse = refuse_from;
    for (uint64_t k = 1; k <= 9; k++) {
        left = k;
        CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                     gp_range_commit(range, parts, 3, NULL, &added, &world.error), NULL);
        assert_int_equal(added, 77);
        expect_committed(range, ".....#...#");
        assert_int_equal(world_stats(&world).physical_bytes, 2 * PAGE);
    }
    left = 10;
    CHECK_OK(gp_range_commit(range, parts, 3, NULL, &added, &world.error), &world.error);
    assert_int_equal(added, 9 * PAGE);
    expect_committed(range, "##..###.######");
    world.refuse = NULL;
    end_range(range);
}

/* Large chunks are refused and small ones serve: the ladder halves, as it does for blocks. */
static bool refuse_large(struct world *unused, size_t size)
{
    (void)unused;
    return size > 2 * PAGE;
}

static void refused_chunks_are_halved(void **state)
{
    gp_range *range = make_range(32, 0);

    (void)state;
    world.refuse = refuse_large;
    assert_int_equal(commit(range, 0, 16, -1), 16);
    assert_int_equal(world_stats(&world).chunk_count, 8);
    expect_committed(range, "################");
    end_range(range);
}

static void another_failure_of_the_backing_passes_through(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    world.alloc_status = GP_ERR_CALLBACK;
    CHECK_STATUS(GP_ERR_CALLBACK, try_commit(range, 0, 2, -1), NULL);
    CHECK_STATUS(GP_ERR_CALLBACK, gp_range_resize(range, PAGE, NULL, 0, NULL, &world.error), NULL);
    expect_committed(range, "");
    world.alloc_status = GP_OK;
    assert_int_equal(commit(range, 0, 2, -1), 2);
    end_range(range);
}

/* A commit that fails keeps nothing: memory that was about to go goes on its way. */
static void a_failed_commit_lets_go_of_what_was_leaving(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    decommit(range, 0, 2, GP_TRIM_NO_WAIT, 2, 0);
    world.alloc_status = GP_ERR_CALLBACK;
    CHECK_STATUS(GP_ERR_CALLBACK, try_commit(range, 0, 4, -1), NULL);
    world.alloc_status = GP_OK;
    assert_int_equal(world_stats(&world).retiring_bytes, refusals() > 0 ? 0 : 2 * PAGE);
    drain();
    assert_int_equal(gp_range_physical_bytes(range), 0);
    expect_committed(range, "");
    end_range(range);
}

#define TEST(name)         cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_PLANNED(name) cmocka_unit_test_setup_teardown(name, set_up_planned, tear_down)
#define TEST_LIMITED(name) cmocka_unit_test_setup_teardown(name, set_up_limited, tear_down)
#define TEST_OWN(name)     cmocka_unit_test_setup_teardown(name, NULL, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_new_range_has_addresses_and_no_memory),
        TEST(a_range_of_nothing_is_valid),
        TEST(absurd_ranges_are_refused_in_words),
        TEST_OWN(addresses_that_run_out_are_said_to_be_addresses),
        TEST_OWN(addresses_of_a_closed_range_come_back),
        TEST(a_thousand_ranges_in_one_pool),
        TEST(committing_twice_adds_nothing),
        TEST(intervals_may_come_in_any_order),
        TEST(wrong_intervals_change_nothing),
        TEST(neighbours_become_one),
        TEST(the_last_page_counts_whole),
        TEST(decommitting_what_is_not_committed_is_nothing),
        TEST(chunks_of_one_page_are_exact),
        TEST_PLANNED(a_cut_keeps_the_chunk_and_says_so),
        TEST_PLANNED(a_decommit_of_many_parts_counts_each_chunk_once),
        TEST_PLANNED(a_commit_takes_what_was_kept),
        TEST_PLANNED(a_doubling_is_one_chunk),
        TEST(a_resize_commits_from_the_start),
        TEST(a_shrink_takes_all_that_lies_behind),
        TEST_PLANNED(a_shrink_through_a_chunk_keeps_it),
        TEST_LIMITED(a_resize_that_fails_keeps_the_size),
        TEST(a_refusal_at_any_chunk_undoes_all),
        TEST_PLANNED(refused_chunks_are_halved),
        TEST(another_failure_of_the_backing_passes_through),
        TEST(a_failed_commit_lets_go_of_what_was_leaving),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
