/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of captures: what a captured block may be made of, who gets it afterwards, and when the graph
 * lets go of it. Captures that must survive what pools do otherwise are in test_pool_streams.c.
 */
#include "tests/support/model.h"

#include "backing/memory.h"
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

static int set_up_with_reaper(void **state)
{
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB, .with_reaper = true});
    world_open(&world);
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    world_end(*state);
    return 0;
}

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

static void begin(int s)
{
    gp__sim_capture_begin(world.sim, world.handle[s], GP__SIM_CAPTURE_GLOBAL);
}

static gp__sim_graph *end(int s)
{
    gp__sim_graph *graph = gp__sim_capture_end_graph(world.sim, world.handle[s]);

    CHECK(graph != NULL, "the capture on stream %d was invalidated", s);
    return graph;
}

static size_t trim(void)
{
    size_t released = 0;

    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    return released;
}

/* ---- what a captured block is made of ---- */

static void a_capture_grows_the_pool(void **state)
{
    (void)state;
    for (int mode = GP__SIM_CAPTURE_GLOBAL; mode <= GP__SIM_CAPTURE_RELAXED; mode++) {
        gp__sim_capture_begin(world.sim, world.handle[0], (enum gp__sim_capture_mode)mode);
        uintptr_t va = world_malloc(&world, 5 * MIB, 0);
        world_launch(&world, 0, va, 5 * MIB);
        world_free(&world, va, -1);
        check_all();
        gp__sim_graph_destroy(world.sim, end(0));
        assert_int_equal(trim(), 6 * MIB);
    }
}

/* Memory with pending work is for its own stream only, and a capture is nobody's stream: a replay comes
 * later, from anywhere. */
static void a_capture_takes_only_what_everybody_has_passed(void **state)
{
    uintptr_t own = world_malloc(&world, 2 * MIB, 0), other = world_malloc(&world, 2 * MIB, 1);
    uintptr_t idle = world_malloc(&world, 4 * MIB, 2); /* too large to melt into its neighbour */

    (void)state;
    world_launch(&world, 0, own, 2 * MIB);
    world_launch(&world, 1, other, 2 * MIB);
    world_launch(&world, 2, idle, 2 * MIB);
    world_free(&world, own, -1);
    world_free(&world, other, -1);
    world_free(&world, idle, -1);
    CHECK_OK(gp_pool_synchronize(world.pool, world.stream[2], true, NULL), NULL);
    begin(0);
    assert_int_equal(world_malloc(&world, 2 * MIB, 0), idle);
    assert_int_equal(world_malloc(&world, 2 * MIB, 0), idle + 2 * MIB);
    uintptr_t fresh = world_malloc(&world, 2 * MIB, 0);
    assert_int_not_equal(fresh, own);
    assert_int_not_equal(fresh, other);
    check_all();
    gp__sim_graph_destroy(world.sim, end(0));
}

/* ---- inside the capture ---- */

static void a_capture_reuses_its_own_memory_on_one_stream(void **state)
{
    (void)state;
    begin(0);
    gp__sim_capture_join(world.sim, world.handle[1], world.handle[0]);
    uintptr_t a = world_malloc(&world, MIB, 0), b = world_malloc(&world, MIB, 0);
    world_free(&world, a, -1);
    world_free(&world, b, -1);
    uintptr_t whole = world_malloc(&world, 2 * MIB, 0);
    assert_int_equal(whole, a); /* neighbours of one stream melted */
    world_free(&world, whole, -1);
    /* The two streams of the capture are not ordered with each other. */
    uintptr_t elsewhere = world_malloc(&world, 512, 1);
    assert_true(elsewhere < a || elsewhere >= a + 2 * MIB);
    uintptr_t part = world_malloc(&world, 512, 0);
    assert_int_equal(part, a);
    check_all();
    gp__sim_graph_destroy(world.sim, end(0));
    world_free(&world, part, -1);
    world_free(&world, elsewhere, -1);
    check_all();
}

static void the_first_block_of_a_capture_is_no_fast_path(void **state)
{
    uintptr_t va = 0, again = 0;

    (void)state;
    world_free(&world, world_malloc(&world, MIB, 0), -1);
    begin(0);
    CHECK_STATUS(GP_NOT_READY, gp_pool_try_malloc(world.pool, 512, world.stream[0], 0, &va, NULL),
                 NULL);
    va = world_malloc(&world, 512, 0);
    world_free(&world, va, -1);
    CHECK_OK(gp_pool_try_malloc(world.pool, 512, world.stream[0], 0, &again, NULL), NULL);
    assert_int_equal(va, again);
    gp__sim_graph_destroy(world.sim, end(0));
}

static void an_invalidated_capture_gets_no_memory(void **state)
{
    uintptr_t va = 0;
    size_t released = 0;

    (void)state;
    begin(0);
    uintptr_t early = world_malloc(&world, 2 * MIB, 0);
    world_free(&world, early, -1);
    uintptr_t joined = gp__sim_stream_create(world.sim, 0);
    gp__sim_capture_join(world.sim, joined, world.handle[0]);
    gp__sim_stream_destroy(world.sim, joined); /* a capture that loses a stream is invalid */
    CHECK_STATUS(GP_ERR_CAPTURE,
                 gp_pool_malloc(world.pool, 512, world.stream[0], 0, &va, &world.error), NULL);
    assert_false(gp__sim_capture_end(world.sim, world.handle[0]));
    /* Nothing can replay it, so its memory is free again. */
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    assert_int_equal(released, 2 * MIB);
}

/* ---- while the graph lives ---- */

static void a_graph_keeps_its_memory_and_replays_after_a_trim_of_the_rest(void **state)
{
    (void)state;
    uintptr_t rest = world_malloc(&world, 2 * MIB, 1);
    begin(0);
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va, 2 * MIB);
    world_free(&world, va, -1);
    gp__sim_graph *graph = end(0);
    world_free(&world, rest, -1);
    assert_int_equal(trim(), 2 * MIB);
    /* Neither the stream that captured nor another one gets it. */
    for (int s = 0; s < 2; s++)
        assert_int_not_equal(world_malloc(&world, 2 * MIB, s), va);
    gp__sim_graph_launch(world.sim, graph, world.handle[3]);
    gp__sim_complete_all(world.sim);
    gp__sim_graph_launch(world.sim, graph, world.handle[3]);
    gp__sim_graph_destroy(world.sim, graph);
    assert_int_equal(trim(), 0); /* a launch is under way */
    check_all();
    gp__sim_complete_all(world.sim);
    assert_int_equal(trim(), 2 * MIB);
    check_all();
}

static void a_block_may_outlive_its_graph(void **state)
{
    (void)state;
    begin(0);
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    gp__sim_graph_destroy(world.sim, end(0));
    assert_int_equal(trim(), 0);
    world_launch(&world, 1, va, 512);
    world_free(&world, va, 1);
    assert_int_equal(trim(), 2 * MIB); /* an ordinary block by now: it waits for stream 1 */
    assert_int_equal(gp__sim_pending(world.sim, world.handle[1]), 0);
    check_all();
}

static void a_block_freed_after_the_capture_is_the_graphs(void **state)
{
    (void)state;
    begin(0);
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va, 2 * MIB);
    gp__sim_graph *graph = end(0);
    world_launch(&world, 1, va, 512);
    world_free(&world, va, 1);
    assert_int_not_equal(world_malloc(&world, 2 * MIB, 1), va);
    gp__sim_graph_launch(world.sim, graph, world.handle[2]);
    gp__sim_complete(world.sim, world.handle[2], 100);
    gp__sim_graph_destroy(world.sim, graph);
    trim(); /* waits for stream 1, which used it outside the graph */
    assert_int_equal(gp__sim_pending(world.sim, world.handle[1]), 0);
    check_all();
}

static void two_captures_share_nothing(void **state)
{
    (void)state;
    begin(0);
    begin(1);
    uintptr_t a = world_malloc(&world, MIB, 0), b = world_malloc(&world, MIB, 1);
    world_free(&world, a, -1);
    world_free(&world, b, -1);
    assert_int_equal(world_malloc(&world, MIB, 1), b);
    assert_int_equal(world_malloc(&world, MIB, 0), a);
    check_all();
    gp__sim_graph *first = end(0), *second = end(1);
    gp__sim_graph_destroy(world.sim, first);
    world_free(&world, a, -1);
    assert_int_equal(world_malloc(&world, MIB, 0), a); /* free again */
    world_free(&world, b, -1);
    assert_int_not_equal(world_malloc(&world, MIB, 1), b); /* still the second graph's */
    gp__sim_graph_destroy(world.sim, second);
    check_all();
}

static void a_pool_with_living_graphs_does_not_close(void **state)
{
    (void)state;
    begin(0);
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_pool_close(world.pool, &world.error), NULL);
    world_free(&world, va, -1);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_pool_close(world.pool, &world.error), NULL);
    gp__sim_graph *graph = end(0);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_pool_close(world.pool, &world.error), NULL);
    CHECK(strstr(world.error.message, "graph") != NULL, "\"%s\"", world.error.message);
    assert_false(gp_pool_is_closed(world.pool));
    assert_int_not_equal(world_malloc(&world, 512, 0), 0); /* nothing changed */
    gp__sim_graph_destroy(world.sim, graph);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
}

/* ---- a pool that is let go ---- */

static void drop_pool(void)
{
    for (int s = 0; s < WORLD_STREAMS; s++) {
        gp_stream_release(world.stream[s]);
        world.stream[s] = NULL;
    }
    gp_pool_release(world.pool);
    world.pool = NULL;
}

/* Runs until the reaper gave everything back. */
static void wait_until_empty(void)
{
    while (__atomic_load_n(&world.supplied_chunks, __ATOMIC_ACQUIRE) > 0 ||
           gp__memory_live() != world.live_before + 2) /* the two backings */
        sched_yield();
}

static void an_orphan_waits_for_its_graphs(void **state)
{
    (void)state;
    begin(0);
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va, 512);
    gp__sim_graph *graph = end(0);
    drop_pool();
    gp__sim_graph_launch(world.sim, graph, world.handle[1]); /* a violation were it unmapped */
    gp__sim_complete_all(world.sim);
    gp__sim_graph_destroy(world.sim, graph);
    wait_until_empty();
}

static void a_finished_pool_waits_for_its_pins(void **state)
{
    (void)state;
    uintptr_t va = world_malloc(&world, 2 * MIB, 0), other = 0;
    CHECK_OK(gp_pool_pin(world.pool, va, false, NULL), NULL);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_close(world.pool, NULL), NULL);
    CHECK_OK(gp_pool_finish(world.pool, NULL), NULL);
    CHECK_STATUS(GP_ERR_STATE,
                 gp_pool_malloc(world.pool, 512, world.stream[0], 0, &other, &world.error), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    gp_pool_unpin(world.pool, va);
    while (!gp_pool_is_closed(world.pool))
        sched_yield();
    CHECK_OK(gp_pool_close(world.pool, NULL), NULL);
    drop_pool();
    wait_until_empty();
}

/* Nobody answers for captures in the background, so unknown users' memory goes with the next explicit
 * call, of whichever pool of the device. */
static void what_unknown_users_leave_goes_with_the_next_explicit_call(void **state)
{
    (void)state;
    gp_pool *other = NULL;
    gp_pool_options options = {.device = world.device, .limit = GP_NO_LIMIT};
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    CHECK_OK(gp_pool_pin(world.pool, va, true, NULL), NULL);
    gp_pool_unpin(world.pool, va);
    uintptr_t stranger = gp__sim_stream_create(world.sim, 0);
    gp__sim_launch(world.sim, stranger, va, 512);
    drop_pool();
    CHECK_OK(gp_pool_create(&options, &other, NULL), NULL);
    do {
        assert_int_equal(gp__sim_pending(world.sim, stranger) > 0,
                         __atomic_load_n(&world.supplied_chunks, __ATOMIC_ACQUIRE) > 0);
        CHECK_OK(gp_pool_trim(other, 0, 0, NULL, NULL), NULL);
    } while (__atomic_load_n(&world.supplied_chunks, __ATOMIC_ACQUIRE) > 0);
    assert_int_equal(gp__sim_pending(world.sim, stranger), 0);
    CHECK_OK(gp_pool_close(other, NULL), NULL);
    gp_pool_release(other);
    wait_until_empty();
}

static void an_abandoned_block_ends_with_its_last_pin(void **state)
{
    (void)state;
    uintptr_t va = world_malloc(&world, 2 * MIB, 0), free_at_once = world_malloc(&world, 512, 0);
    CHECK_OK(gp_pool_pin(world.pool, va, true, NULL), NULL);
    CHECK_OK(gp_pool_pin(world.pool, va, true, NULL), NULL);
    gp_pool_abandon(world.pool, va, 0);
    gp_pool_abandon(world.pool, free_at_once, 0);
    gp_pool_abandon(world.pool, 0, 0);
    assert_int_equal(world_stats(&world).used_bytes, 2 * MIB);
    gp_pool_unpin(world.pool, va);
    assert_int_equal(world_stats(&world).used_bytes, 2 * MIB);
    uintptr_t stranger = gp__sim_stream_create(world.sim, 0);
    gp__sim_launch(world.sim, stranger, va, 512);
    gp_pool_unpin(world.pool, va);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    assert_int_equal(trim(), 4 * MIB); /* after a fence of the whole context */
    assert_int_equal(gp__sim_pending(world.sim, stranger), 0);
    check_all();
}

/* ---- failures ---- */

/* Everything that a first captured block calls fails once; the pool is as it was, and the retry works. */
static void every_failure_of_a_first_captured_block_is_undone(void **state)
{
    (void)state;
    for (uint64_t n = 1;; n++) {
        uintptr_t va = 0;
        begin(0);
        gp_pool_stats before = world_stats(&world);
        gp__sim_fail_at(world.sim, n, false);
        gp_status status = gp_pool_malloc(world.pool, 3 * MIB, world.stream[0], 0, &va, NULL);
        uint64_t fired = gp__sim_faults_fired(world.sim);
        gp__sim_fail_at(world.sim, 0, false);
        check_all();
        if (status != GP_OK) {
            assert_int_equal(world_stats(&world).used_bytes, before.used_bytes);
            va = world_malloc(&world, 3 * MIB, 0);
        }
        world_free(&world, va, -1);
        gp__sim_graph_destroy(world.sim, end(0));
        trim();
        assert_int_equal(world_stats(&world).physical_bytes, 0);
        if (fired == 0)
            break;
    }
}

/* From the n-th call on everything fails: what the driver would not undo is counted, the rest is back. */
static void a_driver_that_fails_for_ever_leaves_what_is_counted(void **state)
{
    (void)state;
    for (uint64_t n = 1;; n++) {
        char message[400];
        uintptr_t va = 0;
        world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB});
        world_open(&world);
        begin(0);
        gp__sim_fail_at(world.sim, n, true);
        gp_status status = gp_pool_malloc(world.pool, 3 * MIB, world.stream[0], 0, &va, NULL);
        uint64_t fired = gp__sim_faults_fired(world.sim);
        gp__sim_fail_at(world.sim, 0, false);
        CHECK(gp__pool_check(world.pool, message, sizeof message), "n %llu: %s",
              (unsigned long long)n, message);
        gp_pool_stats stats = world_stats(&world);
        assert_int_equal(status == GP_OK, fired == 0);
        if (status != GP_OK)
            assert_int_equal(stats.physical_bytes, stats.abandoned_bytes + stats.unreturned_bytes);
        gp__sim_graph_destroy(world.sim, end(0));
        world_abandon(&world);
        if (fired == 0)
            break;
    }
}

static void no_host_memory_for_an_arena_changes_nothing(void **state)
{
    (void)state;
    for (uint64_t n = 1;; n++) {
        uintptr_t va = 0;
        begin(0);
        gp__memory_fail_at(n, false);
        gp_status status = gp_pool_malloc(world.pool, 512, world.stream[0], 0, &va, NULL);
        bool fired = gp__memory_fail_at(0, false) >= n;
        check_all();
        if (status == GP_OK)
            world_free(&world, va, -1);
        else
            assert_int_equal(status, GP_ERR_HOST_MEMORY);
        gp__sim_graph_destroy(world.sim, end(0));
        trim();
        if (!fired)
            break;
    }
}

#define TEST(name)        cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define REAPER_TEST(name) cmocka_unit_test_setup_teardown(name, set_up_with_reaper, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_capture_grows_the_pool),
        TEST(a_capture_takes_only_what_everybody_has_passed),
        TEST(a_capture_reuses_its_own_memory_on_one_stream),
        TEST(the_first_block_of_a_capture_is_no_fast_path),
        TEST(an_invalidated_capture_gets_no_memory),
        TEST(a_graph_keeps_its_memory_and_replays_after_a_trim_of_the_rest),
        TEST(a_block_may_outlive_its_graph),
        TEST(a_block_freed_after_the_capture_is_the_graphs),
        TEST(two_captures_share_nothing),
        TEST(a_pool_with_living_graphs_does_not_close),
        REAPER_TEST(an_orphan_waits_for_its_graphs),
        REAPER_TEST(a_finished_pool_waits_for_its_pins),
        REAPER_TEST(what_unknown_users_leave_goes_with_the_next_explicit_call),
        TEST(an_abandoned_block_ends_with_its_last_pin),
        TEST(every_failure_of_a_first_captured_block_is_undone),
        cmocka_unit_test(a_driver_that_fails_for_ever_leaves_what_is_counted),
        TEST(no_host_memory_for_an_arena_changes_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
