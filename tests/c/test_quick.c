/* SPDX-License-Identifier: Apache-2.0
 *
 * What a stream has freed and may have back at once (vmm/quick.c): who gets it, who does not, and that
 * to everybody else it is free memory. Two threads at it are in test_quick_threads.c.
 */
#include "tests/support/model.h"

#include "vmm/quick.h"

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
        CHECK(gp__pool_check(world.pool, message, sizeof message), "%s", message);
    world_end(*state);
    return 0;
}

static size_t known(void)
{
    gp__mutex_lock(&world.pool->lock);
    size_t count = gp__quick_count(world.pool);
    gp__mutex_unlock(&world.pool->lock);
    return count;
}

/* A block that was freed once: its stream's list keeps it. */
static uintptr_t keep(size_t bytes, int s)
{
    uintptr_t va = world_malloc(&world, bytes, s);

    world_free(&world, va, s);
    return va;
}

/* ---- the fast path ---- */

static void a_kept_block_comes_and_goes_without_the_pools_lock(void **state)
{
    (void)state;
    uintptr_t va = keep(MIB, 0);

    gp__mutex_lock(&world.pool->lock); /* the witness ends the test if anybody takes it again */
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(world_malloc(&world, MIB - i * 100, 0), va);
        world_free(&world, va, 0);
    }
    gp__mutex_unlock(&world.pool->lock);
    assert_int_equal(world_stats(&world).used_bytes, 0);
}

static void only_its_own_stream_gets_it_and_only_the_same_bytes(void **state)
{
    (void)state;
    uintptr_t kept = keep(MIB, 0), other;

    world_launch(&world, 0, kept, MIB); /* the simulator objects if stream 1 gets it now */
    other = world_malloc(&world, MIB, 1);
    assert_int_not_equal(other, kept);
    assert_int_not_equal(world_malloc(&world, MIB / 2, 2), kept);
    CHECK_OK(
        gp_pool_malloc(world.pool, MIB, world.stream[0], GP_BLOCK_OBJECT, &other, &world.error),
        &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, other, world.stream[0], 0, &world.error),
                 &world.error);
    CHECK_OK(gp_pool_free(world.pool, other, world.stream[0], GP_BLOCK_OBJECT, &world.error),
             &world.error);
}

static void bytes_that_share_a_bucket_are_told_apart(void **state)
{
    (void)state;
    for (size_t lines = 2; lines < 80; lines++) {
        keep(512, 0);
        uintptr_t va = world_malloc(&world, lines * 512, 0);
        assert_int_equal(world_stats(&world).used_bytes, lines * 512);
        world_free(&world, va, 0);
    }
}

static void no_list_grows_without_end(void **state)
{
    (void)state;
    uintptr_t va[100];

    for (int i = 0; i < 100; i++)
        va[i] = world_malloc(&world, (size_t)(i + 1) * 1024, 0);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 100; i++)
            world_free(&world, va[i], 0);
        assert_true(known() <= 32);
        assert_int_equal(world_stats(&world).used_bytes, 0);
        for (int i = 99; i >= 0; i--)
            va[i] = world_malloc(&world, (size_t)(i + 1) * 1024, 0);
    }
    assert_int_equal(world_stats(&world).physical_bytes, 6 * MIB);
}

/* ---- to everybody else it is free ---- */

static void a_kept_block_is_no_block_in_use(void **state)
{
    (void)state;
    gp_stream *stream = NULL;
    uintptr_t va = keep(MIB, 0);

    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, va, world.stream[0], 0, &world.error),
                 &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, va, NULL, 0, &world.error),
                 &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, va, world.stream[1], 0, &world.error),
                 &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_pool_record_stream(world.pool, va, world.stream[1], &world.error),
                 &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_pin(world.pool, va, false, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_block_stream(world.pool, va, &stream, &world.error),
                 &world.error);
    gp_pool_abandon(world.pool, va, 0);
    gp_pool_unpin(world.pool, va);
    assert_int_equal(known(), 1);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    assert_int_equal(world_stats(&world).free_bytes, 2 * MIB);
}

static void a_request_that_the_list_cannot_serve_sees_its_memory_melted(void **state)
{
    (void)state;
    uintptr_t a = world_malloc(&world, MIB, 0), b = world_malloc(&world, MIB, 0);

    world_free(&world, a, 0);
    world_free(&world, b, 0);
    assert_int_equal(world_malloc(&world, 2 * MIB, 0), a < b ? a : b);
    assert_int_equal(world_stats(&world).physical_bytes, 2 * MIB);
}

static void other_streams_get_it_once_it_has_passed(void **state)
{
    (void)state;
    uintptr_t va = world_malloc(&world, MIB, 0);

    world_launch(&world, 0, va, MIB);
    world_free(&world, va, 0);
    gp__sim_complete_all(world.sim);
    /* This fence came after the free, so it covers it, whenever the list is given up. */
    CHECK_OK(gp_pool_synchronize(world.pool, world.stream[0], true, &world.error), &world.error);
    gp_pool_stats before = world_stats(&world);
    (void)world_malloc(&world, 2 * MIB, 1);
    assert_int_equal(world_stats(&world).physical_bytes, 2 * MIB);
    assert_int_equal(world_stats(&world).wait_count, before.wait_count);
}

static void trim_limit_and_snapshot_see_it(void **state)
{
    (void)state;
    gp_limit_result result;
    gp_pool_snapshot snapshot;
    size_t released = 0;

    keep(MIB, 0);
    CHECK_OK(gp_pool_take_snapshot(world.pool, &snapshot, &world.error), &world.error);
    assert_int_equal(snapshot.spans[0].state, GP_SPAN_FREE);
    assert_int_equal(snapshot.spans[0].bytes, 2 * MIB);
    gp_pool_snapshot_free(&snapshot);
    keep(MIB, 1);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    assert_int_equal(released, 4 * MIB);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    keep(MIB, 2);
    CHECK_OK(gp_pool_set_limit(world.pool, 0, &result, &world.error), &world.error);
    assert_int_equal(result.deferred_bytes, 2 * MIB);
}

static void a_limit_is_met_by_what_lists_keep(void **state)
{
    (void)state;
    gp_limit_result result;

    keep(MIB, 0);
    keep(2 * MIB, 1);
    CHECK_OK(gp_pool_set_limit(world.pool, 4 * MIB, &result, &world.error), &world.error);
    (void)world_malloc(&world, 4 * MIB, 2);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * MIB);
}

/* ---- lent blocks that become ordinary ones ---- */

static void an_owner_more_ends_the_short_way(void **state)
{
    (void)state;
    uintptr_t va = keep(MIB, 0);

    assert_int_equal(world_malloc(&world, MIB, 0), va);
    CHECK_OK(gp_pool_record_stream(world.pool, va, world.stream[1], &world.error), &world.error);
    assert_int_equal(known(), 0);
    world_launch(&world, 1, va, MIB);
    world_free(&world, va, 0);
    assert_int_not_equal(world_malloc(&world, MIB, 0), va); /* stream 1 still works on it */
    gp__sim_complete_all(world.sim);
}

static void a_pin_or_a_free_on_another_stream_does_too(void **state)
{
    (void)state;
    uintptr_t va = keep(MIB, 0);

    assert_int_equal(world_malloc(&world, MIB, 0), va);
    CHECK_OK(gp_pool_pin(world.pool, va, false, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_free(world.pool, va, world.stream[0], 0, &world.error),
                 &world.error);
    gp_pool_unpin(world.pool, va);
    world_free(&world, va, 0);
    assert_int_equal(known(), 1);
    assert_int_equal(world_malloc(&world, MIB, 0), va);
    world_free(&world, va, 1);
    assert_int_equal(known(), 0);
    assert_int_equal(world_malloc(&world, MIB, 0),
                     va + MIB); /* the rest, not two streams' memory */
}

/* ---- ends ---- */

static void a_stream_that_is_forgotten_leaves_its_memory_to_all(void **state)
{
    (void)state;
    uintptr_t va = keep(2 * MIB, 0), again;

    CHECK_OK(gp_pool_forget_stream(world.pool, world.handle[0], &world.error), &world.error);
    assert_int_equal(known(), 0);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_pool_malloc(world.pool, 2 * MIB, world.stream[0], 0, &again, &world.error),
                 &world.error);
    assert_int_equal(world_malloc(&world, 2 * MIB, 1), va);
    world_free(&world, va, 0); /* its work was waited for: this names nobody */
    assert_int_equal(known(), 0);
}

static int stop_at_once(void *context)
{
    return *(int *)context;
}

static void a_forgetting_that_was_interrupted_changes_nothing(void **state)
{
    (void)state;
    int stop = 1;
    uintptr_t va;

    world_close(&world);
    world.options.interrupted = stop_at_once;
    world.options.interrupted_context = &stop;
    world_open(&world);
    va = world_malloc(&world, MIB, 0);
    world_launch(&world, 0, va, MIB);
    world_free(&world, va, 0);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    CHECK_STATUS(GP_ERR_INTERRUPTED,
                 gp_pool_forget_stream(world.pool, world.handle[0], &world.error), &world.error);
    stop = 0;
    assert_int_equal(known(), 1);
    assert_int_equal(world_malloc(&world, MIB, 0), va);
    gp__mutex_lock(&world.pool->lock);
    gp__quick_end(world.pool, world.stream[0]); /* as when it is interrupted later on */
    gp__mutex_unlock(&world.pool->lock);
    assert_int_equal(known(), 0);
    world_free(&world, va, 0);
    assert_int_equal(known(), 0);
    assert_int_equal(world_malloc(&world, MIB, 0), va);
    world_free(&world, va, 0);
    assert_int_equal(known(), 1);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
}

static void a_handle_that_changes_hands_ends_the_list(void **state)
{
    (void)state;
    gp_stream *next = NULL;
    uintptr_t handle = gp__sim_stream_create(world.sim, 0), va;
    gp_stream *gone = NULL;

    CHECK_OK(gp_pool_stream(world.pool, handle, &gone, &world.error), &world.error);
    CHECK_OK(gp_pool_malloc(world.pool, MIB, gone, 0, &va, &world.error), &world.error);
    CHECK_OK(gp_pool_free(world.pool, va, gone, 0, &world.error), &world.error);
    assert_int_equal(known(), 1);
    gp__sim_stream_destroy(world.sim, handle);
    assert_int_equal(gp__sim_stream_create(world.sim, 0), handle);
    CHECK_OK(gp_pool_stream(world.pool, handle, &next, &world.error), &world.error);
    assert_ptr_not_equal(next, gone);
    assert_int_equal(known(), 0);
    gp_stream_release(next);
    gp_stream_release(gone);
}

static void a_close_ends_what_is_kept_and_what_is_lent(void **state)
{
    (void)state;
    uintptr_t va = keep(MIB, 0), lent = keep(2 * MIB, 1);

    assert_int_equal(world_malloc(&world, 2 * MIB, 1), lent);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_STATE,
                 gp_pool_malloc(world.pool, MIB, world.stream[0], 0, &va, &world.error),
                 &world.error);
    CHECK_STATUS(GP_ERR_STATE, gp_pool_free(world.pool, lent, world.stream[1], 0, &world.error),
                 &world.error);
    assert_int_equal(world.supplied_bytes, 0);
}

static void a_pool_that_finishes_gives_no_kept_block_away(void **state)
{
    (void)state;
    uintptr_t pinned = world_malloc(&world, 512, 0), va = keep(MIB, 0);

    CHECK_OK(gp_pool_pin(world.pool, pinned, false, &world.error), &world.error);
    CHECK_OK(gp_pool_finish(world.pool, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_STATE,
                 gp_pool_malloc(world.pool, MIB, world.stream[0], 0, &va, &world.error),
                 &world.error);
    gp_pool_unpin(world.pool, pinned);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
}

/* ---- figures ---- */

static void the_peak_of_what_is_used_is_exact(void **state)
{
    (void)state;
    uintptr_t a = keep(2 * MIB, 0), b = world_malloc(&world, MIB, 0);

    assert_int_equal(world_stats(&world).peak_used_bytes, 2 * MIB);
    world_free(&world, b, 0);
    gp_pool_reset_peak_stats(world.pool);
    assert_int_equal(world_stats(&world).peak_used_bytes, 0);
    b = world_malloc(&world, MIB, 0);
    assert_int_equal(world_stats(&world).peak_used_bytes, MIB);
    a = world_malloc(&world, 2 * MIB, 0);
    world_free(&world, a, 0);
    world_free(&world, b, 0);
    assert_int_equal(world_stats(&world).peak_used_bytes, 3 * MIB);
    gp_pool_reset_peak_stats(world.pool);
    assert_int_equal(world_malloc(&world, MIB, 0), b); /* by the fast path */
    world_free(&world, b, 0);
    (void)world_malloc(&world, 512, 0); /* gives the list up */
    assert_int_equal(world_stats(&world).peak_used_bytes, MIB);
}

/* Found by the fuzz target: with more streams than owner sets have bits, two share one, and a block that one of
 * them had used too looked like the other's alone. */
static void a_bit_that_two_streams_share_keeps_nothing(void **state)
{
    enum { COUNT = 70 };
    gp_stream *stream[COUNT];
    uintptr_t handle[COUNT], va = 0, got = 0;

    (void)state;
    for (int i = 0; i < COUNT; i++) {
        handle[i] = gp__sim_stream_create(world.sim, 0);
        CHECK_OK(gp_pool_stream(world.pool, handle[i], &stream[i], NULL), NULL);
        CHECK_OK(gp_pool_malloc(world.pool, 512, stream[i], 0, &va, NULL), NULL);
    }
    gp_stream *own = stream[COUNT - 2], *other = stream[COUNT - 1];
    assert_int_equal(own->slot, other->slot);
    CHECK_OK(gp_pool_malloc(world.pool, MIB, own, 0, &va, NULL), NULL);
    CHECK_OK(gp_pool_record_stream(world.pool, va, other, NULL), NULL);
    gp__sim_launch(world.sim, handle[COUNT - 1], va, MIB);
    CHECK_OK(gp_pool_free(world.pool, va, NULL, 0, NULL), NULL);
    CHECK_OK(gp_pool_malloc(world.pool, MIB, own, 0, &got, NULL), NULL);
    CHECK(!gp__sim_busy(world.sim, got, MIB, gp_stream_id(own)),
          "the stream got memory that another works on");
    for (int i = 0; i < COUNT; i++)
        gp_stream_release(stream[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
        TEST(a_kept_block_comes_and_goes_without_the_pools_lock),
        TEST(only_its_own_stream_gets_it_and_only_the_same_bytes),
        TEST(bytes_that_share_a_bucket_are_told_apart),
        TEST(no_list_grows_without_end),
        TEST(a_kept_block_is_no_block_in_use),
        TEST(a_request_that_the_list_cannot_serve_sees_its_memory_melted),
        TEST(other_streams_get_it_once_it_has_passed),
        TEST(trim_limit_and_snapshot_see_it),
        TEST(a_limit_is_met_by_what_lists_keep),
        TEST(an_owner_more_ends_the_short_way),
        TEST(a_pin_or_a_free_on_another_stream_does_too),
        TEST(a_stream_that_is_forgotten_leaves_its_memory_to_all),
        TEST(a_forgetting_that_was_interrupted_changes_nothing),
        TEST(a_handle_that_changes_hands_ends_the_list),
        TEST(a_close_ends_what_is_kept_and_what_is_lent),
        TEST(a_pool_that_finishes_gives_no_kept_block_away),
        TEST(the_peak_of_what_is_used_is_exact),
        TEST(a_bit_that_two_streams_share_keeps_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
