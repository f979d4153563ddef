/* SPDX-License-Identifier: Apache-2.0
 *
 * Before a pool grows: memory of other streams that has passed, and idle chunks that move to where they are
 * needed. What moves, what does not, what is asked of nobody, and what becomes of chunks that find no place.
 */
#include "tests/support/model.h"

#include "vmm/pool.h"

#define MIB CHECK_MIB

static struct world world;

static int set_up(void **state)
{
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB});
    world_open(&world);
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    char message[400];

    if (!gp_pool_is_closed(world.pool))
        CHECK(checker_compare(&world, message, sizeof message), "%s", message);
    world_end(*state);
    return 0;
}

/* Four pages in a row, blocks of stream 0, of which the first and the third are free again. */
static void scatter(uintptr_t va[4])
{
    for (int i = 0; i < 4; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    world_free(&world, va[0], 0);
    world_free(&world, va[2], 0);
    /* The simulator completes nothing by itself, fences of idle streams included. */
    CHECK_OK(gp_pool_synchronize(world.pool, world.stream[0], true, &world.error), &world.error);
}

static void idle_chunks_move_and_nobody_is_asked(void **state)
{
    uintptr_t va[4], got;

    (void)state;
    scatter(va);
    uint64_t asked = world.alloc_calls, waits = world_stats(&world).wait_count;
    got = world_malloc(&world, 4 * MIB, 0);
    world_launch(&world, 0, got, 4 * MIB); /* mapped and accessible, says the simulator */
    assert_int_equal(world.alloc_calls, asked);
    assert_int_equal(world.free_calls, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 8 * MIB);
    assert_int_equal(world_stats(&world).peak_physical_bytes, 8 * MIB);
    assert_int_equal(world_stats(&world).wait_count, waits);
    assert_int_equal(world_stats(&world).chunk_count, 4);
    world_free(&world, got, 0);
    gp__sim_complete_all(world.sim);
}

static void what_is_lacking_beyond_them_is_asked_for(void **state)
{
    uintptr_t va[4];

    (void)state;
    scatter(va);
    uint64_t asked = world.alloc_calls;
    world_malloc(&world, 8 * MIB, 0);
    assert_int_equal(world.alloc_calls, asked + 2);
    assert_int_equal(world_stats(&world).physical_bytes, 12 * MIB);
}

static void nobody_waits_for_a_stream_at_work(void **state)
{
    uintptr_t va[4];

    (void)state;
    for (int i = 0; i < 4; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va[0], 2 * MIB);
    world_free(&world, va[0], 0);
    world_free(&world, va[2], 0);
    uint64_t asked = world.alloc_calls;
    world_malloc(&world, 4 * MIB, 0);
    assert_int_equal(world.alloc_calls, asked + 2);
    assert_int_equal(world_stats(&world).wait_count, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 12 * MIB);
    gp__sim_complete_all(world.sim);
}

static void memory_of_users_that_nobody_sees_stays(void **state)
{
    uintptr_t va[4];

    (void)state;
    for (int i = 0; i < 4; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    for (int i = 0; i < 4; i += 2) {
        CHECK_OK(gp_pool_pin(world.pool, va[i], true, &world.error), &world.error);
        gp_pool_unpin(world.pool, va[i]);
        world_free(&world, va[i], 0);
    }
    world_malloc(&world, 4 * MIB, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 12 * MIB);
}

static void what_another_stream_left_is_had_once_it_rests(void **state)
{
    uintptr_t va = world_malloc(&world, 4 * MIB, 0);

    (void)state;
    world_launch(&world, 0, va, 4 * MIB);
    world_free(&world, va, 0);
    assert_int_not_equal(world_malloc(&world, 2 * MIB, 1), va); /* it works still */
    gp__sim_complete_all(world.sim);
    assert_int_equal(world_malloc(&world, 4 * MIB, 1), va); /* nobody recorded a fence before */
    assert_int_equal(world_stats(&world).wait_count, 0);
}

static void a_pool_that_is_no_larger_than_it_was_used_keeps_its_shape(void **state)
{
    uintptr_t va[8];

    (void)state;
    for (int i = 0; i < 8; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    size_t unused;
    for (int i = 0; i < 8; i += 2)
        world_free(&world, va[i], 0);
    CHECK_OK(gp_pool_trim(world.pool, 4 * MIB, 0, &unused, &world.error), &world.error);
    gp_pool_stats before = world_stats(&world);
    /* Growing again to what was once used at most gives nothing away. */
    while (world_stats(&world).physical_bytes + 2 * MIB <= before.peak_used_bytes)
        world_malloc(&world, 2 * MIB, 1);
    assert_int_equal(world.free_calls, before.trim_count);
}

/* The backing has nothing for the rest: what had moved goes back, and the pool is as it was but for what is
 * idle. */
static bool refuse_all(struct world *where, size_t size)
{
    (void)where;
    (void)size;
    return true;
}

static void what_moved_for_a_request_that_fails_goes_back(void **state)
{
    uintptr_t va[4], got = 7;

    (void)state;
    scatter(va);
    world.refuse = refuse_all;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 gp_pool_malloc(world.pool, 8 * MIB, world.stream[0], 0, &got, &world.error),
                 &world.error);
    assert_int_equal(got, 7);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * MIB);
    assert_int_equal(world.supplied_bytes, 4 * MIB);
    assert_int_equal(world.free_calls, 2);
}

/* Under a limit the ladder waits for streams, and then moves as well. */
static void a_limit_is_met_by_moving(void **state)
{
    uintptr_t va[4], got;

    (void)state;
    CHECK_OK(gp_pool_set_limit(world.pool, 8 * MIB, NULL, &world.error), &world.error);
    for (int i = 0; i < 4; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va[0], 2 * MIB);
    world_free(&world, va[0], 0);
    world_free(&world, va[2], 0);
    got = world_malloc(&world, 4 * MIB, 1);
    world_launch(&world, 1, got, 4 * MIB);
    assert_int_equal(world.alloc_calls, 4);
    assert_int_equal(world.free_calls, 0);
    assert_true(world_stats(&world).wait_count > 0);
    gp__sim_complete_all(world.sim);
}

/* A chunk is accepted once and given back once, however often it moved. */
static void a_chunk_that_moved_goes_back_like_any_other(void **state)
{
    uintptr_t va[4];
    size_t released = 0;

    (void)state;
    for (int round = 0; round < 3; round++) {
        scatter(va);
        uintptr_t got = world_malloc(&world, 4 * MIB, 0);
        world_free(&world, got, 0);
        world_free(&world, va[1], 0);
        world_free(&world, va[3], 0);
    }
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world.supplied_bytes, 0);
    assert_int_equal(world.alloc_calls, world.free_calls);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
        TEST(idle_chunks_move_and_nobody_is_asked),
        TEST(what_is_lacking_beyond_them_is_asked_for),
        TEST(nobody_waits_for_a_stream_at_work),
        TEST(memory_of_users_that_nobody_sees_stays),
        TEST(what_another_stream_left_is_had_once_it_rests),
        TEST(a_pool_that_is_no_larger_than_it_was_used_keeps_its_shape),
        TEST(what_moved_for_a_request_that_fails_goes_back),
        TEST(a_limit_is_met_by_moving),
        TEST(a_chunk_that_moved_goes_back_like_any_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
