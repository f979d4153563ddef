/* SPDX-License-Identifier: Apache-2.0
 *
 * A range under the pool's limit, its pins, and every way in which it ends.
 */
#include <time.h>

#include "range_case.h"

/* ---- the limit ---- */

/* Paddle 79605: what a range commits is counted where every chunk is. */
static void the_limit_is_exact(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 3, -1);
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(range, 0, 5, -1), NULL);
    assert_int_equal(world.error.physical, 3 * PAGE);
    assert_int_equal(world.error.limit, 4 * PAGE);
    assert_int_equal(commit(range, 0, 4, -1), 1);
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(range, 7, 1, -1), NULL);
    expect_committed(range, "####");
    assert_int_equal(world_stats(&world).peak_physical_bytes, 4 * PAGE);
    end_range(range);
}

static void idle_blocks_make_room_for_a_range(void **state)
{
    uintptr_t va[4];
    gp_range *range = make_range(8, 1);

    (void)state;
    for (int i = 0; i < 4; i++)
        va[i] = world_malloc(&world, PAGE, 0);
    world_launch(&world, 0, va[0], 512);
    world_free(&world, va[0], -1);
    world_free(&world, va[2], -1);
    commit(range, 3, 2, -1);
    expect_committed(range, "...##");
    assert_int_equal(world_stats(&world).physical_bytes, 4 * PAGE);
    assert_int_equal(world_stats(&world).peak_physical_bytes, 4 * PAGE);
    end_range(range);
}

static void retiring_memory_of_a_range_makes_room_for_blocks(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 4, -1);
    world_launch(&world, 0, gp_range_address(range), 4 * PAGE);
    decommit(range, 1, 3, GP_TRIM_NO_WAIT, 3, 0);
    assert_int_equal(world_stats(&world).retiring_bytes, 3 * PAGE);
    world_malloc(&world, 2 * PAGE, 1);
    CHECK(world_stats(&world).peak_physical_bytes <= 4 * PAGE, "the peak passed the limit");
    expect_committed(range, "#");
    end_range(range);
}

/* Its own retiring memory at other addresses, and another range's, serve a commit too. */
static void retiring_memory_elsewhere_makes_room_for_a_commit(void **state)
{
    gp_range *a = make_range(8, 0), *b = make_range(8, 1);

    (void)state;
    commit(a, 0, 2, -1);
    commit(b, 0, 2, -1);
    world_launch(&world, 0, gp_range_address(a), 2 * PAGE);
    world_launch(&world, 1, gp_range_address(b), 2 * PAGE);
    decommit(a, 0, 1, GP_TRIM_NO_WAIT, 1, 0);
    decommit(b, 0, 1, GP_TRIM_NO_WAIT, 1, 0);
    assert_int_equal(commit(a, 4, 2, -1), 2);
    expect_committed(a, ".#..##");
    expect_committed(b, ".#");
    end_range(a);
    end_range(b);
}

/* What reclaiming everything idle could not make room for fails at once, and trims nothing. */
static void a_hopeless_commit_trims_nothing(void **state)
{
    gp_range *range = make_range(8, 0), *other = make_range(8, 0);
    uint64_t calls;

    (void)state;
    commit(range, 0, 3, -1);
    commit(other, 0, 1, -1);
    decommit(range, 0, 1, GP_TRIM_NO_WAIT, 1, 0);
    calls = world.alloc_calls;
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(other, 2, 3, -1), NULL);
    CHECK(strstr(world.error.message, "a limit of 8 MiB") != NULL, "\"%s\"", world.error.message);
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(range, 0, 4, -1), NULL);
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(range, 0, 8, -1), NULL);
    assert_int_equal(world.free_calls, 0);
    assert_int_equal(world.alloc_calls, calls);
    assert_int_equal(world_stats(&world).trim_count, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * PAGE);
    expect_committed(range, ".##");
    end_range(range);
    end_range(other);
}

/* kvcached 406 and 377: a limit below what is committed is legal, and nothing underflows. */
static void a_limit_below_what_is_committed(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_limit_result result;

    (void)state;
    commit(range, 0, 4, -1);
    CHECK_OK(gp_pool_set_limit(world.pool, PAGE, &result, NULL), NULL);
    assert_int_equal(result.overage_bytes, 3 * PAGE);
    assert_int_equal(result.deferred_bytes, 0);
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(range, 4, 1, -1), NULL);
    decommit(range, 1, 2, GP_TRIM_NO_WAIT, 2, 0);
    CHECK_OK(gp_pool_set_limit(world.pool, PAGE, &result, NULL), NULL);
    assert_int_equal(result.deferred_bytes, 2 * PAGE);
    drain();
    CHECK_STATUS(GP_ERR_LIMIT, try_commit(range, 1, 1, -1), NULL);
    assert_int_equal(commit(range, 3, 1, -1), 0); /* nothing new: no question of a limit */
    decommit(range, 3, 1, 0, 1, 0);
    expect_committed(range, "#");
    end_range(range);
}

/* kvcached 319: what a range leaves idle goes with the pool's trim, and only that. */
static void a_trim_takes_nothing_that_is_committed(void **state)
{
    gp_range *range = make_range(8, 0);
    size_t released = 1;

    (void)state;
    commit(range, 0, 4, -1);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, 0);
    decommit(range, 0, 1, GP_TRIM_NO_WAIT, 1, 0);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, PAGE);
    expect_committed(range, ".###");
    end_range(range);
}

/* Blocks never land in a range, nor a range's memory in blocks. */
static void blocks_and_ranges_keep_apart(void **state)
{
    gp_range *range = make_range(64, 0);
    uintptr_t low = gp_range_address(range), high = low + 64 * PAGE, va[20];
    gp_pool_snapshot snapshot;

    (void)state;
    commit(range, 0, 8, -1);
    decommit(range, 1, 6, 0, 0, 6);
    for (size_t i = 0; i < 20; i++) {
        va[i] = world_malloc(&world, (i + 1) * 100000, 0);
        CHECK(va[i] + (i + 1) * 100000 <= low || va[i] >= high, "a block inside the range");
    }
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, low, NULL, 0, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_pin(world.pool, low, false, NULL), NULL);
    CHECK_OK(gp_pool_take_snapshot(world.pool, &snapshot, NULL), NULL);
    for (size_t i = 0; i < snapshot.span_count; i++)
        CHECK(snapshot.spans[i].in_range ==
                  (snapshot.spans[i].address >= low && snapshot.spans[i].address < high),
              "span %zu says in_range %d", i, snapshot.spans[i].in_range);
    gp_pool_snapshot_free(&snapshot);
    for (size_t i = 0; i < 20; i++)
        world_free(&world, va[i], -1);
    check_all();
    end_range(range);
}

/* ---- pins ---- */

static void a_pin_forbids_what_overlaps_it(void **state)
{
    gp_range *range = make_range(12, 0);
    const struct {
        size_t first, count;
        bool refused;
    } cases[] = {
        {3, 1, false}, {6, 2, false}, {2, 2, false}, {3, 2, true}, {4, 1, true},
        {5, 1, true},  {5, 3, true},  {0, 12, true}, {4, 2, true}, {8, 1, false},
    };

    (void)state;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_pin(range, 4 * PAGE, PAGE, false, &world.error), NULL);
    CHECK(strstr(world.error.message, "commit") != NULL, "\"%s\"", world.error.message);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        commit(range, 2, 8, -1);
        /* Off the granularity: the last byte of page 4 to the first of page 5. */
        CHECK_OK(gp_range_pin(range, 5 * PAGE - 1, 2, false, &world.error), &world.error);
        CHECK_STATUS(cases[i].refused ? GP_ERR_PINNED : GP_OK,
                     try_decommit(range, cases[i].first, cases[i].count, -1, 0), &world.error);
        CHECK_STATUS(cases[i].refused ? GP_ERR_PINNED : GP_OK,
                     try_decommit(range, cases[i].first, cases[i].count, -1, GP_TRIM_NO_WAIT),
                     &world.error);
        if (cases[i].refused)
            expect_committed(range, "..########");
        gp_range_unpin(range, 5 * PAGE - 1, 2);
        CHECK_OK(try_decommit(range, cases[i].first, cases[i].count, -1, 0), &world.error);
    }
    end_range(range);
}

static void a_pin_forbids_shrinking_and_closing(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    CHECK_OK(gp_range_resize(range, 4 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    CHECK_OK(gp_range_pin(range, PAGE, 512, false, &world.error), &world.error);
    CHECK_OK(gp_range_pin(range, PAGE, 512, false, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_PINNED, gp_range_resize(range, PAGE, NULL, 0, NULL, &world.error), NULL);
    CHECK_STATUS(GP_ERR_PINNED, gp_range_close(range, NULL, &world.error), NULL);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_close(world.pool, &world.error), NULL);
    assert_int_equal(gp_range_size(range), 4 * PAGE);
    expect_committed(range, "####");
    CHECK_OK(gp_range_resize(range, 2 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    CHECK_OK(gp_range_resize(range, 6 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    gp_range_unpin(range, PAGE, 512);
    CHECK_STATUS(GP_ERR_PINNED, gp_range_close(range, NULL, &world.error), NULL);
    gp_range_unpin(range, PAGE, 511); /* no such pin */
    CHECK_STATUS(GP_ERR_PINNED, gp_range_close(range, NULL, &world.error), NULL);
    gp_range_unpin(range, PAGE, 512);
    end_range(range);
}

/* A pin of no bytes overlaps nothing; but a range with any pin stays open. */
static void an_empty_pin_overlaps_nothing(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 8, -1);
    CHECK_OK(gp_range_pin(range, 4 * PAGE, 0, false, &world.error), &world.error);
    decommit(range, 3, 3, 0, 3, 0);
    CHECK_STATUS(GP_ERR_PINNED, gp_range_close(range, NULL, &world.error), NULL);
    gp_range_unpin(range, 4 * PAGE, 0);
    end_range(range);
}

/* A range that is let go while exports live ends with the last of them. */
static void the_last_unpin_ends_what_was_let_go(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    CHECK_OK(gp_range_pin(range, 0, PAGE, false, &world.error), &world.error);
    gp_range_release(range);
    assert_int_equal(world_stats(&world).used_bytes, 2 * PAGE);
    gp_range_unpin(range, 0, PAGE);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
    check_all();
}

/* ---- ending ---- */

static void a_closed_range_says_so(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    CHECK_OK(gp_range_close(range, NULL, &world.error), &world.error);
    CHECK_OK(gp_range_close(range, NULL, &world.error), &world.error);
    assert_true(gp_range_is_closed(range));
    assert_int_equal(gp_range_committed_bytes(range), 0);
    assert_int_equal(gp_range_committed(range, NULL, 0), 0);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 0, 1, -1), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    CHECK_STATUS(GP_ERR_STATE, try_decommit(range, 0, 1, -1, 0), NULL);
    CHECK_STATUS(GP_ERR_STATE, try_decommit(range, 0, 1, -1, GP_TRIM_NO_WAIT), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_range_resize(range, PAGE, NULL, 0, NULL, &world.error), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    CHECK_STATUS(GP_ERR_STATE, gp_range_pin(range, 0, 0, false, &world.error), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_range_record_stream(range, world.stream[1], &world.error), NULL);
    gp_range_unpin(range, 0, 0);
    check_all();
    drain();
    assert_int_equal(gp_range_physical_bytes(range), 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 0, 1, -1), NULL);
    CHECK_OK(gp_range_close(range, NULL, &world.error), &world.error);
    gp_range_release(range);
    check_all();
}

/* Four things end: the range (c), the pool (p), the pin (u), the last reference (r); in every order
 * that is allowed, with memory that has passed or not. Nothing is left, and nobody is used
 * after. */
static void end_in_order(const char *order, bool busy)
{
    gp_range *range;
    bool pinned = true, released = false;
    char line[80];

    snprintf(line, sizeof line, "test_range  # order %s, busy %d", order, busy);
    check_context(line);
    world_begin(&world, &(struct world_options){.chunk_size = PAGE});
    world_open(&world);
    range = make_range(8, 0);
    commit(range, 0, 3, -1);
    if (busy)
        world_launch(&world, 0, gp_range_address(range), 3 * PAGE);
    CHECK_OK(gp_range_pin(range, 0, PAGE, true, &world.error), &world.error);
    for (const char *step = order; *step != '\0'; step++) {
        gp_status want = pinned ? GP_ERR_PINNED : GP_OK;

        if (*step == 'c' && !(released && !pinned))
            CHECK_STATUS(want, gp_range_close(range, NULL, &world.error), &world.error);
        if (*step == 'p')
            CHECK_STATUS(want, gp_pool_close(world.pool, &world.error), &world.error);
        if (*step == 'u')
            gp_range_unpin(range, 0, PAGE);
        if (*step == 'r')
            gp_range_release(range);
        pinned = pinned && *step != 'u';
        released = released || *step == 'r';
    }
    world_end(&world);
    check_context(NULL);
}

static void for_each_order(char *order, size_t done)
{
    if (order[done] == '\0') {
        end_in_order(order, false);
        end_in_order(order, true);
        return;
    }
    for (size_t i = done; order[i] != '\0'; i++) {
        char kept = order[done];

        order[done] = order[i];
        order[i] = kept;
        for_each_order(order, done + 1);
        order[i] = order[done];
        order[done] = kept;
    }
}

static void every_order_of_ending(void **state)
{
    char order[] = "cpur";

    (void)state;
    for_each_order(order, 0);
}

/* The range outlives its pool's last other reference: it holds the pool. */
static void a_range_holds_its_pool(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    gp_pool_release(world.pool);
    world.pool = NULL;
    assert_true(gp_range_is_closed(range));
    assert_int_equal(gp_range_committed_bytes(range), 0);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 0, 1, -1), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_range_resize(range, PAGE, NULL, 0, NULL, &world.error), NULL);
    CHECK_OK(gp_range_close(range, NULL, &world.error), &world.error);
    gp_range_release(range);
}

static bool is_closed(void)
{
    return gp_pool_is_closed(world.pool);
}

/* A pool that was finished while a range of it is exported closes after the last export. */
static void a_finished_pool_waits_for_the_last_pin(void **state)
{
    gp_range *range;

    begin_with(state, (struct world_options){.chunk_size = PAGE, .with_reaper = true});
    range = make_range(8, 0);
    commit(range, 0, 3, -1);
    CHECK_OK(gp_range_pin(range, 0, PAGE, false, &world.error), &world.error);
    CHECK_OK(gp_pool_finish(world.pool, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 3, 1, -1), NULL);
    CHECK_STATUS(GP_ERR_STATE, try_decommit(range, 0, 1, -1, GP_TRIM_NO_WAIT), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_range_pin(range, 0, PAGE, false, &world.error), NULL);
    CHECK_STATUS(GP_ERR_PINNED, gp_range_close(range, NULL, &world.error), NULL);
    gp_range_release(range);
    assert_int_equal(world_stats(&world).used_bytes, 3 * PAGE);
    gp_range_unpin(range, 0, PAGE);
    for (int i = 0; i < 4000 && !is_closed(); i++)
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    CHECK(is_closed(), "the reaper did not close a pool that was finished");
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

static bool refuse_frees(struct world *unused, size_t size)
{
    (void)unused;
    (void)size;
    return true;
}

/* A chunk that the backing will not take back outlives the range; the addresses go all the same. */
static void a_chunk_that_cannot_go_back_does_not_hold_the_range(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result = {7, 7};
    gp_interval part = {0, PAGE};

    (void)state;
    commit(range, 0, 2, -1);
    world.fail_free = refuse_frees;
    CHECK_OK(gp_range_decommit(range, &part, 1, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 0);
    assert_int_equal(gp_pool_unreturned(world.pool, NULL, 0), 1);
    end_range(range);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
    assert_int_equal(world_stats(&world).unreturned_bytes, 2 * PAGE);
    world.fail_free = NULL;
    CHECK_OK(gp_pool_return_unreturned(world.pool, NULL, NULL), NULL);
    check_all();
}

#define TEST(name)         cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_PLANNED(name) cmocka_unit_test_setup_teardown(name, set_up_planned, tear_down)
#define TEST_LIMITED(name) cmocka_unit_test_setup_teardown(name, set_up_limited, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST_LIMITED(the_limit_is_exact),
        TEST_LIMITED(idle_blocks_make_room_for_a_range),
        TEST_LIMITED(retiring_memory_of_a_range_makes_room_for_blocks),
        TEST_LIMITED(retiring_memory_elsewhere_makes_room_for_a_commit),
        TEST_LIMITED(a_hopeless_commit_trims_nothing),
        TEST_LIMITED(a_limit_below_what_is_committed),
        TEST(a_trim_takes_nothing_that_is_committed),
        TEST_PLANNED(blocks_and_ranges_keep_apart),
        TEST(a_pin_forbids_what_overlaps_it),
        TEST(a_pin_forbids_shrinking_and_closing),
        TEST(an_empty_pin_overlaps_nothing),
        TEST(the_last_unpin_ends_what_was_let_go),
        TEST(a_closed_range_says_so),
        TEST(a_range_holds_its_pool),
        cmocka_unit_test_setup_teardown(a_finished_pool_waits_for_the_last_pin, NULL, tear_down),
        TEST(a_chunk_that_cannot_go_back_does_not_hold_the_range),
        cmocka_unit_test(every_order_of_ending),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
