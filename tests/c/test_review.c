/* SPDX-License-Identifier: Apache-2.0
 *
 * Promises of ranges, captures and pools that are let go, each under the one circumstance that once broke
 * it. What they do otherwise is in the tests named after them.
 */
#include "tests/support/model.h"

#include <sched.h>
#include <time.h>

#include "backing/memory.h"
#include "vmm/pool.h"

#define MIB CHECK_MIB

static struct world world;

static int set_up(void **state)
{
    world_begin(&world, NULL);
    world_open(&world);
    *state = &world;
    return 0;
}

static int set_up_with_a_limit(void **state)
{
    world_begin(&world, &(struct world_options){.limit = 8 * MIB});
    world_open(&world);
    *state = &world;
    return 0;
}

static int set_up_with_pages(void **state)
{
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB});
    world_open(&world);
    *state = &world;
    return 0;
}

/* The host's device stays once it is open, so it is there before the world counts. */
static int set_up_with_the_host(void **state)
{
    gp_device *host = NULL;

    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, NULL), NULL);
    return set_up(state);
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

static gp_range *make_range(size_t bytes, int s)
{
    gp_range *range = NULL;

    CHECK_OK(gp_range_create(world.pool, bytes, world.stream[s], &range, &world.error),
             &world.error);
    return range;
}

static void commit(gp_range *range, size_t offset, size_t bytes, int s)
{
    gp_interval part = {offset, bytes};

    CHECK_OK(gp_range_commit(range, &part, 1, world.stream[s], NULL, &world.error), &world.error);
}

static gp_status decommit(gp_range *range, size_t offset, size_t bytes, int s, unsigned flags)
{
    gp_interval part = {offset, bytes};

    return gp_range_decommit(range, &part, 1, world.stream[s], flags, NULL, &world.error);
}

/* ---- blocks of captures ---- */

/* A fast path that cannot enter the device has no block to give, and says so. */
static void a_captured_fast_path_that_fails_gives_no_block(void **state)
{
    (void)state;
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    world_free(&world, world_malloc(&world, MIB, 0), -1);
    for (uint64_t at = 1; at <= 3; at++) {
        uintptr_t va = 1;

        gp__sim_fail_at(world.sim, at, false);
        gp_status status = gp_pool_try_malloc(world.pool, 512, world.stream[0], 0, &va, NULL);
        CHECK(status != GP_OK, "call %d failed (%s), and a block at %#zx was reported", (int)at,
              gp__sim_fault_name(world.sim), (size_t)va);
    }
    gp__sim_fail_at(world.sim, 0, false);
    gp__sim_graph_destroy(world.sim, gp__sim_capture_end_graph(world.sim, world.handle[0]));
}

/* ---- ranges ---- */

static gp_range *closed_meanwhile;

static gp_status close_and_fail(struct world *w, const gp_request *request, gp_chunk **out,
                                gp_error *error)
{
    (void)w;
    (void)request;
    (void)out;
    CHECK_OK(gp_range_close(closed_meanwhile, NULL, error), error);
    return gp_error_set(error, GP_ERR_CALLBACK, "no memory, and no range any more");
}

/* The commit has a claim on memory that the close therefore leaves; its undo must not forget it. */
static void a_range_closed_under_a_commit_lets_go_of_everything(void **state)
{
    gp_interval parts[2] = {{0, 4 * MIB}, {8 * MIB, 4 * MIB}};

    (void)state;
    closed_meanwhile = make_range(16 * MIB, 0);
    commit(closed_meanwhile, 0, 8 * MIB, 0);
    CHECK_OK(decommit(closed_meanwhile, 0, 4 * MIB, 0, 0), &world.error);
    world.answer = close_and_fail;
    assert_int_not_equal(gp_range_commit(closed_meanwhile, parts, 2, NULL, NULL, &world.error),
                         GP_OK);
    world.answer = NULL;
    check_all();
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    gp_range_release(closed_meanwhile);
}

/* What the chunk still waits for is not only the owners that the range has now. */
static void a_decommit_refused_for_a_capture_changes_nothing(void **state)
{
    gp_range *range = make_range(16 * MIB, 0);

    (void)state;
    commit(range, 0, 8 * MIB, 0);
    world_launch(&world, 1, gp_range_address(range), 4 * MIB);
    CHECK_OK(decommit(range, 0, 4 * MIB, 1, 0), &world.error);
    gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_GLOBAL);
    CHECK_STATUS(GP_ERR_CAPTURE, decommit(range, 4 * MIB, 4 * MIB, 0, 0), &world.error);
    assert_int_equal(gp_range_committed_bytes(range), 4 * MIB);
    assert_true(gp__sim_capture_end(world.sim, world.handle[1]));
    CHECK_OK(decommit(range, 4 * MIB, 4 * MIB, 0, 0), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    gp_range_release(range);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
}

/* A chunk that stays is not waited for, so a capture among its other owners is none of its business. */
static void a_decommit_that_gives_nothing_back_asks_its_own_owners_only(void **state)
{
    gp_range *range = make_range(16 * MIB, 0);

    (void)state;
    commit(range, 0, 8 * MIB, 0);
    world_launch(&world, 1, gp_range_address(range), 2 * MIB);
    CHECK_OK(decommit(range, 0, 2 * MIB, 1, 0), &world.error);
    gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(decommit(range, 2 * MIB, 2 * MIB, 0, 0), &world.error);
    assert_true(gp__sim_capture_end(world.sim, world.handle[1]));
    gp_range_release(range);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
}

/* The same ladder for ranges as for blocks. */
static void a_commit_under_the_limit_finds_the_memory_of_graphs_that_are_gone(void **state)
{
    gp_range *range = make_range(8 * MIB, 1);

    (void)state;
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    world_free(&world, world_malloc(&world, 8 * MIB, 0), -1);
    gp__sim_graph_destroy(world.sim, gp__sim_capture_end_graph(world.sim, world.handle[0]));
    commit(range, 0, 8 * MIB, 1);
    gp_range_release(range);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
}

/* A long-lived range that many short-lived streams worked on does not keep their slots for ever. */
static void forgotten_streams_leave_a_range(void **state)
{
    gp_range *range = make_range(4 * MIB, 0);
    uintptr_t again = 0;

    (void)state;
    for (int i = 0; i < 70; i++) {
        uintptr_t handle = gp__sim_stream_create(world.sim, 0);
        gp_stream *stream = NULL;
        CHECK_OK(gp_pool_stream(world.pool, handle, &stream, NULL), NULL);
        CHECK_OK(gp_range_record_stream(range, stream, NULL), NULL);
        CHECK_OK(gp_pool_forget_stream(world.pool, handle, NULL), NULL);
        gp_stream_release(stream);
        gp__sim_stream_destroy(world.sim, handle);
    }
    /* A stream of its own slot takes back what it freed; one of a shared slot would have to wait. */
    for (int s = 1; s < 3; s++) {
        uintptr_t va = world_malloc(&world, 2 * MIB, s);
        world_launch(&world, s, va, 2 * MIB);
        world_free(&world, va, -1);
        CHECK_OK(gp_pool_try_malloc(world.pool, 2 * MIB, world.stream[s], 0, &again, NULL), NULL);
        assert_int_equal(again, va);
    }
    gp_range_release(range);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
}

/* Such a stream may be destroyed: nobody asks the device about it any more. */
static void a_block_for_a_forgotten_stream_is_refused(void **state)
{
    uintptr_t va = 0;

    (void)state;
    CHECK_OK(gp_pool_forget_stream(world.pool, world.handle[0], &world.error), &world.error);
    gp__sim_stream_destroy(world.sim, world.handle[0]);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_pool_malloc(world.pool, MIB, world.stream[0], 0, &va, &world.error), NULL);
}

/* ---- work ---- */

static void work_on_address_0_is_refused(void **state)
{
    gp_device *device = NULL;
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    char bytes[8] = "unhurt";

    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &device, &world.error), &world.error);
    gp_pool_options options = {.name = "host", .device = device, .limit = GP_NO_LIMIT};
    CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(pool, 0, &stream, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_copy(pool, (uintptr_t)bytes, 0, 4, stream, &world.error),
                 NULL);
    assert_string_equal(bytes, "unhurt");
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_copy(pool, 0, (uintptr_t)bytes, 4, stream, &world.error),
                 NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_fill(pool, 0, 4, 1, stream, &world.error), NULL);
    CHECK_OK(gp_pool_copy(pool, 0, 0, 0, stream, &world.error), &world.error);
    CHECK_OK(gp_pool_fill(pool, 0, 0, 1, stream, &world.error), &world.error);
    gp_stream_release(stream);
    CHECK_OK(gp_pool_close(pool, &world.error), &world.error);
    gp_pool_release(pool);
}

/* ---- joins ---- */

static void a_join_never_pretends_to_wait_for_a_stream_that_is_gone(void **state)
{
    (void)state;
    uintptr_t va = world_malloc(&world, 2 * MIB, 3);
    world_launch(&world, 0, va, 2 * MIB);
    gp__sim_stream_destroy(world.sim, world.handle[0]);
    assert_int_equal(gp__sim_stream_create(world.sim, 0), world.handle[0]);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_pool_join(world.pool, world.stream[0], world.stream[1], &world.error), NULL);
    gp__sim_complete_all(world.sim);
}

/* ---- pools that are let go ---- */

static const struct gp__driver *real;
static struct gp__driver hooked;
static gp_pool *hooked_pool;

static void hook(void)
{
    real = world.device->driver;
    hooked = *real;
    world.device->driver = &hooked;
}

static gp_status finish_then_free_address(gp_device *device, uintptr_t va, size_t bytes,
                                          gp_error *error)
{
    CHECK_OK(gp_pool_finish(hooked_pool, error), error);
    return real->free_address(device, va, bytes, error);
}

/* There is nothing to finish any more, so finish() holds nothing that close() could drop. */
static void a_finish_beside_the_end_of_a_close_drops_no_reference(void **state)
{
    (void)state;
    world_free(&world, world_malloc(&world, MIB, 0), -1);
    hooked_pool = gp_pool_retain(world.pool);
    hook();
    hooked.free_address = finish_then_free_address;
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    world.device->driver = real;
    assert_int_equal(hooked_pool->references, 2);
    gp_pool_release(hooked_pool);
}

/* A pool whose memory streams that growpool cannot see have used, let go of and left by the reaper. */
static void leave_a_pool(void)
{
    gp_pool_options options = {
        .name = "left", .device = world.device, .backing = world.backing, .limit = GP_NO_LIMIT};
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    uintptr_t va = 0;

    CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(pool, world.handle[3], &stream, &world.error), &world.error);
    CHECK_OK(gp_pool_malloc(pool, MIB, stream, 0, &va, &world.error), &world.error);
    CHECK_OK(gp_pool_pin(pool, va, true, &world.error), &world.error);
    gp_pool_unpin(pool, va);
    gp_stream_release(stream);
    gp_pool_release(pool);
    while (!__atomic_load_n(&pool->left, __ATOMIC_RELAXED))
        sched_yield();
}

/* The trim itself has nothing to wait for on that stream, so its caller has no reason to end the capture. */
static void what_other_pools_left_is_not_worth_a_capture(void **state)
{
    (void)state;
    leave_a_pool();
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, NULL, &world.error), &world.error);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
    assert_int_equal(world_ledger(&world).chunk_count, 1);
    assert_true(gp__sim_capture_end(world.sim, world.handle[0]));
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, NULL, &world.error), &world.error);
    assert_int_equal(world_ledger(&world).chunk_count, 0);
}

static void a_close_spares_captures_from_what_other_pools_left(void **state)
{
    (void)state;
    leave_a_pool();
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    assert_int_equal(world_ledger(&world).chunk_count, 1);
    assert_true(gp__sim_capture_end(world.sim, world.handle[0]));
    world_close(&world);
    world_open(&world);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
    assert_int_equal(world_ledger(&world).chunk_count, 0);
}

static gp_pool *finishing; /* what its user closes while another thread's call is about to */

static int close_meanwhile(void *context)
{
    (void)context;
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
    if (finishing == NULL)
        return 0;
    CHECK_OK(gp_pool_close(finishing, &world.error), &world.error);
    gp_pool_release(finishing);
    finishing = NULL;
    return 1;
}

static int set_up_with_an_interrupt(void **state)
{
    world_begin(&world, &(struct world_options){.interrupted = close_meanwhile});
    world_open(&world);
    *state = &world;
    return 0;
}

/* The call that is interrupted before it came to such a pool does not keep it. */
static void a_pool_closed_by_its_user_is_not_left_again(void **state)
{
    gp_pool_options options = {.device = world.device, .limit = GP_NO_LIMIT};
    gp_stream *stream = NULL;
    uintptr_t va = 0;

    (void)state;
    leave_a_pool();
    CHECK_OK(gp_pool_create(&options, &finishing, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(finishing, world.handle[3], &stream, &world.error), &world.error);
    CHECK_OK(gp_pool_malloc(finishing, MIB, stream, 0, &va, &world.error), &world.error);
    CHECK_OK(gp_pool_pin(finishing, va, true, &world.error), &world.error);
    gp_pool_unpin(finishing, va);
    gp_stream_release(stream);
    CHECK_OK(gp_pool_finish(finishing, &world.error), &world.error);
    while (gp__orphans_left(world.device) != 2)
        sched_yield();
    gp__sim_launch(world.sim, world.handle[0], va, MIB);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    CHECK_STATUS(GP_ERR_INTERRUPTED, gp_pool_trim(world.pool, 0, 0, NULL, &world.error), NULL);
    assert_null(finishing);
    assert_int_equal(gp__orphans_left(world.device), 1);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, NULL, &world.error), &world.error);
    assert_int_equal(gp__orphans_left(world.device), 0);
}

/* Nobody is left to make an explicit call, whatever the flags of the pool say. */
static void a_finished_pool_without_a_reaper_is_closed_after_its_last_pin(void **state)
{
    struct timespec pause = {0, 1000000};

    (void)state;
    world_close(&world);
    int64_t live = gp__memory_live();
    world_open(&world);
    uintptr_t va = world_malloc(&world, MIB, 0);
    CHECK_OK(gp_pool_pin(world.pool, va, false, &world.error), &world.error);
    CHECK_OK(gp_pool_finish(world.pool, &world.error), &world.error);
    gp_pool *pool = world.pool;
    for (int s = 0; s < WORLD_STREAMS; s++) {
        gp_stream_release(world.stream[s]);
        world.stream[s] = NULL;
    }
    world.pool = NULL;
    gp_pool_release(pool);
    gp_pool_unpin(pool, va);
    for (int i = 0; i < 20000 && gp__memory_live() != live; i++)
        nanosleep(&pause, NULL);
    assert_int_equal(gp__memory_live(), live);
}

/* One stuck stream with many chunks must not hold up the others': a chunk that has passed is taken in one of
 * the next looks, whatever waits before it. */
static void a_passed_chunk_does_not_wait_its_turn(void **state)
{
    gp_range *slow = NULL, *quick = NULL;
    gp_interval many = {0, 3200 * MIB}, one = {0, 2 * MIB};
    unsigned looks = 0;

    (void)state;
    CHECK_OK(gp_range_create(world.pool, many.bytes, world.stream[0], &slow, NULL), NULL);
    CHECK_OK(gp_range_create(world.pool, one.bytes, world.stream[1], &quick, NULL), NULL);
    CHECK_OK(gp_range_commit(slow, &many, 1, NULL, NULL, &world.error), &world.error);
    CHECK_OK(gp_range_commit(quick, &one, 1, NULL, NULL, &world.error), &world.error);
    world_launch(&world, 0, gp_range_address(slow), 2 * MIB);
    world_launch(&world, 1, gp_range_address(quick), 2 * MIB);
    CHECK_OK(gp_range_decommit(slow, &many, 1, NULL, GP_TRIM_NO_WAIT, NULL, NULL), NULL);
    CHECK_OK(gp_range_decommit(quick, &one, 1, NULL, GP_TRIM_NO_WAIT, NULL, NULL), NULL);
    for (int look = 0; look < 4; look++)
        gp__pool_service(world.pool); /* the last of which has recorded what both wait for */
    gp__sim_complete(world.sim, world.handle[1], 9);
    for (; looks < 8 && gp_range_physical_bytes(quick) > 0; looks++)
        gp__pool_service(world.pool);
    CHECK(gp_range_physical_bytes(quick) == 0, "not in %u looks", looks);
    gp_range_release(slow);
    gp_range_release(quick);
}

/* Forgotten or not, a stream of another pool says nothing about this one's work. */
static void a_join_with_another_pools_stream_is_refused(void **state)
{
    gp_pool_options options = {.device = world.device, .limit = GP_NO_LIMIT};
    gp_pool *other = NULL;
    gp_stream *foreign = NULL;

    (void)state;
    CHECK_OK(gp_pool_create(&options, &other, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(other, world.handle[0], &foreign, &world.error), &world.error);
    for (int forgotten = 0; forgotten < 2; forgotten++) {
        CHECK_STATUS(GP_ERR_ARGUMENT,
                     gp_pool_join(world.pool, foreign, world.stream[1], &world.error), NULL);
        CHECK(strstr(world.error.message, "another pool") != NULL, "\"%s\"", world.error.message);
        CHECK_OK(gp_pool_forget_stream(other, world.handle[0], &world.error), &world.error);
    }
    gp_stream_release(foreign);
    CHECK_OK(gp_pool_close(other, &world.error), &world.error);
    gp_pool_release(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_captured_fast_path_that_fails_gives_no_block, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_range_closed_under_a_commit_lets_go_of_everything, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_decommit_refused_for_a_capture_changes_nothing, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_decommit_that_gives_nothing_back_asks_its_own_owners_only,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(
            a_commit_under_the_limit_finds_the_memory_of_graphs_that_are_gone, set_up_with_a_limit,
            tear_down),
        cmocka_unit_test_setup_teardown(forgotten_streams_leave_a_range, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_block_for_a_forgotten_stream_is_refused, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(work_on_address_0_is_refused, set_up_with_the_host,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_join_with_another_pools_stream_is_refused, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_passed_chunk_does_not_wait_its_turn, set_up_with_pages,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_join_never_pretends_to_wait_for_a_stream_that_is_gone,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_finish_beside_the_end_of_a_close_drops_no_reference,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_other_pools_left_is_not_worth_a_capture, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_close_spares_captures_from_what_other_pools_left, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_pool_closed_by_its_user_is_not_left_again,
                                        set_up_with_an_interrupt, tear_down),
        cmocka_unit_test_setup_teardown(
            a_finished_pool_without_a_reaper_is_closed_after_its_last_pin, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("promises once broken", tests, NULL, NULL);
}
