/* SPDX-License-Identifier: Apache-2.0
 *
 * Slots and fences: more streams than slots, streams that ended, tickets out of order, fences that
 * must not pile up, captures that are nobody's business. The reaper's part is run by hand.
 */
#include "tests/support/model.h"

#include "vmm/pool.h"

#include <pthread.h>

#define MIB CHECK_MIB

static struct world world;

/* The pool's interrupt hook: runs `step` on the waiting thread, with no lock held. */
static int (*step)(void);

static int interrupted(void *context)
{
    (void)context;
    return step == NULL ? 0 : step();
}

static void open_world(size_t limit, size_t chunk_size)
{
    step = NULL;
    world_begin(&world, &(struct world_options){
                            .chunk_size = chunk_size, .limit = limit, .interrupted = interrupted});
    world_open(&world);
}

static int tear_down(void **state)
{
    (void)state;
    step = NULL;
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
    gp__sim_complete_all(world.sim);
    world_end(&world);
    return 0;
}

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

static gp_stream *meet(uintptr_t handle)
{
    gp_stream *stream = NULL;

    CHECK_OK(gp_pool_stream(world.pool, handle, &stream, &world.error), &world.error);
    return stream;
}

static gp_stream *meet_new(void)
{
    return meet(gp__sim_stream_create(world.sim, 0));
}

static uintptr_t malloc_on(gp_stream *stream, size_t bytes)
{
    uintptr_t va = 0;

    CHECK_OK(gp_pool_malloc(world.pool, bytes, stream, 0, &va, &world.error), &world.error);
    return va;
}

static gp_status trim(void)
{
    return gp_pool_trim(world.pool, 0, 0, NULL, &world.error);
}

/* Puts a fence on the stream that covers everything stamped until now, as the reaper does. */
static void fence_now(gp_stream *stream)
{
    gp_device *device = world.device;
    struct gp__entry entry;

    CHECK_OK(device->driver->enter(device, &entry, &world.error), &world.error);
    CHECK_OK(gp__timeline_record(&world.pool->timeline,
                                 (struct gp__owners){UINT64_C(1) << stream->slot,
                                                     gp__timeline_now(&world.pool->timeline)},
                                 &world.error),
             &world.error);
    device->driver->leave(device, &entry);
}

/* ---- more streams than slots ---- */

#define CROWD (GP__SLOT_COUNT + 7)

/* What happens while a request waits with a retiring chunk of stream 0 in its own hands. */
static struct {
    gp_stream *crowd[CROWD];
    int calls;
    int served; /* of the crowd */
    gp_status drained;
    size_t retiring; /* when the drain returned */
} meanwhile;

/* First many streams ask for memory, and so for slots; then stream 1 gets on, then stream 0. */
static int crowd_the_slots(void)
{
    uintptr_t va;

    if (meanwhile.calls++ == 0) {
        for (int i = 0; i < CROWD; i++)
            meanwhile.served +=
                gp_pool_try_malloc(world.pool, 512, meanwhile.crowd[i], 0, &va, NULL) == GP_OK;
        gp__sim_complete(world.sim, world.handle[1], SIZE_MAX);
    } else {
        gp__sim_complete(world.sim, world.handle[0], SIZE_MAX);
    }
    return 0;
}

/* Makes a request of stream 2 wait for stream 1 while it holds stream 0's retiring chunk. `aside`
 * is some memory that has passed, so that others can be served meanwhile. */
static void prepare_a_wait(void)
{
    uintptr_t busy = world_malloc(&world, 2 * MIB, 0), cut = world_malloc(&world, 2 * MIB, 1),
              aside;

    memset(&meanwhile, 0, sizeof meanwhile);
    world_malloc(&world, MIB, 1);
    aside = world_malloc(&world, MIB, 1);
    world_free(&world, aside, -1);
    fence_now(world.stream[1]);
    gp__sim_complete_all(world.sim);
    gp__pool_poll(world.pool);
    world_launch(&world, 0, busy, 512);
    world_free(&world, busy, -1);
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, NULL, NULL), NULL);
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * MIB);
    /* What stream 1 leaves of its block is free memory that waits for it. */
    world_free(&world, cut, -1);
    assert_int_equal(world_malloc(&world, MIB + 512, 1), cut);
    world_launch(&world, 1, cut, 512);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
}

/* S1: the owner of a chunk in a thread's hands, on no list of the pool's, keeps its slot. */
static void a_chunk_in_hand_keeps_its_owners_slot(void **state)
{
    uintptr_t got = 0;

    (void)state;
    open_world(6 * MIB, 2 * MIB);
    prepare_a_wait();
    for (int i = 0; i < CROWD; i++)
        meanwhile.crowd[i] = meet_new();
    step = crowd_the_slots;
    got = malloc_on(world.stream[2], 2 * MIB);
    step = NULL;
    assert_int_equal(meanwhile.served, CROWD);
    CHECK(!gp__sim_busy(world.sim, got, 2 * MIB, 0), "handed out under pending work");
    check_all();
    for (int i = 0; i < CROWD; i++)
        gp_stream_release(meanwhile.crowd[i]);
}

static _Thread_local bool drains;

static void *drain_elsewhere(void *unused)
{
    (void)unused;
    drains = true;
    meanwhile.drained = gp_pool_drain(world.pool, NULL);
    meanwhile.retiring = world_stats(&world).retiring_bytes;
    return NULL;
}

/* Another thread drains; its wait is interrupted, so that one that rightly waits for the chunk still
 * returns. */
static int drain_once(void)
{
    pthread_t thread;

    if (drains)
        return 1;
    if (meanwhile.calls++ == 0) {
        assert_int_equal(pthread_create(&thread, NULL, drain_elsewhere, NULL), 0);
        pthread_join(thread, NULL);
    }
    gp__sim_complete_all(world.sim);
    return 0;
}

static void a_drain_waits_for_a_chunk_in_hand(void **state)
{
    (void)state;
    open_world(6 * MIB, 2 * MIB);
    prepare_a_wait();
    step = drain_once;
    malloc_on(world.stream[2], 2 * MIB);
    step = NULL;
    CHECK(meanwhile.calls > 0, "nobody waited");
    CHECK_STATUS(GP_ERR_INTERRUPTED, meanwhile.drained, NULL);
    assert_int_equal(meanwhile.retiring, 2 * MIB);
}

/* Each round's streams own nothing when the next one begins, but were wanted by the reaper that
 * never ran; their slots are free again all the same. */
static void slots_come_back_without_a_reaper(void **state)
{
    (void)state;
    open_world(0, 2 * MIB);
    for (int i = 0; i < GP__SLOT_COUNT + 17; i++) {
        gp_stream *stream = meet_new(), *other = meet_new();
        uintptr_t kept = malloc_on(stream, 2 * MIB), waits = malloc_on(stream, 2 * MIB), va;

        world_free(&world, waits, -1);
        va = malloc_on(other, 2 * MIB); /* grows beside memory that waits for the first stream */
        world_free(&world, va, -1);
        world_free(&world, kept, -1);
        CHECK_OK(trim(), &world.error);
        CHECK(stream->slot >= 0 && world.pool->timeline.slot_streams[stream->slot] == 1,
              "round %d: slot %d is shared by %u streams", i, stream->slot,
              world.pool->timeline.slot_streams[stream->slot]);
        gp_stream_release(stream);
        gp_stream_release(other);
    }
}

/* Only the stream that is forgotten is waited for, not those that share its slot. */
static void forgetting_asks_nothing_of_streams_that_share_the_slot(void **state)
{
    uintptr_t handle[CROWD];
    gp_stream *stream[CROWD];

    (void)state;
    open_world(0, 2 * MIB);
    for (int i = 0; i < CROWD; i++) {
        handle[i] = gp__sim_stream_create(world.sim, 0);
        stream[i] = meet(handle[i]);
        malloc_on(stream[i], 512);
    }
    assert_int_equal(stream[CROWD - 1]->slot, stream[CROWD - 2]->slot);
    gp__sim_capture_begin(world.sim, handle[CROWD - 1], GP__SIM_CAPTURE_RELAXED);
    CHECK_OK(gp_pool_forget_stream(world.pool, handle[CROWD - 2], &world.error), &world.error);
    assert_true(gp__sim_capture_end(world.sim, handle[CROWD - 1]));
    for (int i = 0; i < CROWD; i++)
        gp_stream_release(stream[i]);
}

/* A program that makes a stream for each task and never says when it ends: handles are reused at
 * once, and what the pool remembers stays bounded. */
static void streams_that_come_and_go_are_not_all_remembered(void **state)
{
    const unsigned bound = GP__SLOT_COUNT + 2 * WORLD_STREAMS;
    unsigned most = 0;

    (void)state;
    open_world(0, 2 * MIB);
    for (int i = 0; i < 10 * GP__SLOT_COUNT; i++) {
        uintptr_t handle = gp__sim_stream_create(world.sim, 0);
        gp_stream *stream = meet(handle);

        world_free(&world, malloc_on(stream, 512), -1);
        gp_stream_release(stream);
        gp__sim_stream_destroy(world.sim, handle);
        if (most < world.pool->timeline.stream_count)
            most = world.pool->timeline.stream_count;
    }
    CHECK(most <= bound, "%u streams are remembered, more than %u", most, bound);
    gp__sim_stream_create(world.sim, 0); /* the latest handle names a stream again */
    CHECK_OK(trim(), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    check_all();
}

/* ---- streams that ended unseen ---- */

/* A stream ended unseen with busy memory, and its handle names a new one. Until a trim or close
 * looks, nothing in the pool tells that only a fence of the whole context can cover its work. */
static uintptr_t lose_a_stream(void)
{
    uintptr_t live = world_malloc(&world, 2 * MIB, 2), lost = world_malloc(&world, 2 * MIB, 0);

    world_launch(&world, 0, lost, 512);
    world_free(&world, lost, -1);
    gp__sim_stream_destroy(world.sim, world.handle[0]);
    assert_int_equal(gp__sim_stream_create(world.sim, 0), world.handle[0]);
    return live;
}

static void check_refused(gp_status status, uintptr_t live)
{
    gp_pool_stats stats = world_stats(&world);

    CHECK_STATUS(GP_ERR_CAPTURE, status, NULL);
    assert_int_equal(stats.used_bytes, 2 * MIB);
    assert_int_equal(stats.retiring_bytes, 0);
    assert_false(gp_pool_is_closed(world.pool));
    world_free(&world, live, -1);
    check_all();
}

static void a_close_that_finds_a_lost_stream_changes_nothing_under_a_capture(void **state)
{
    uintptr_t live;

    (void)state;
    open_world(0, 2 * MIB);
    live = lose_a_stream();
    gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_RELAXED);
    check_refused(gp_pool_close(world.pool, NULL), live);
    assert_true(gp__sim_capture_end(world.sim, world.handle[1]));
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    assert_int_equal(gp__sim_pending_all(world.sim), 0);
}

static void a_trim_that_finds_a_lost_stream_changes_nothing_under_a_capture(void **state)
{
    uintptr_t live;

    (void)state;
    open_world(0, 2 * MIB);
    live = lose_a_stream();
    gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_RELAXED);
    check_refused(trim(), live);
    assert_true(gp__sim_capture_end(world.sim, world.handle[1]));
    CHECK_OK(trim(), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

/* Memory that anybody may use is waited for with a fence of the whole context, which would break a capture
 * on a stream that only another pool has met. A pool that is closed knows no streams any more. */
static void a_capture_that_only_another_pool_knows_of_is_not_broken(void **state)
{
    gp_pool_options options = {0};
    gp_pool *other = NULL;
    gp_stream *stream = NULL;
    uintptr_t handle, va;

    (void)state;
    open_world(0, 2 * MIB);
    handle = gp__sim_stream_create(world.sim, 0);
    options.device = world.device;
    CHECK_OK(gp_pool_create(&options, &other, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(other, handle, &stream, &world.error), &world.error);
    va = world_malloc(&world, MIB, 0);
    CHECK_OK(gp_pool_pin(world.pool, va, true, NULL), NULL);
    gp_pool_unpin(world.pool, va);
    world_free(&world, va, -1);
    gp__sim_capture_begin(world.sim, handle, GP__SIM_CAPTURE_RELAXED);
    CHECK_STATUS(GP_ERR_CAPTURE, trim(), NULL);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_pool_close(world.pool, NULL), NULL);
    assert_true(gp__sim_capture_end(world.sim, handle));
    check_all();
    CHECK_OK(gp_pool_close(other, &world.error), &world.error);
    gp__sim_stream_destroy(world.sim, handle); /* nobody asks about it any more */
    CHECK_OK(trim(), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    gp_stream_release(stream);
    gp_pool_release(other);
}

/* A driver that cannot say whether a stream captures is not taken to say no: least by a commit of pages
 * that a cut left mapped, which asks only once. */
static void a_capture_survives_whichever_driver_call_fails(void **state)
{
    bool hit = true;

    (void)state;
    for (uint64_t n = 1; hit; n++) {
        const gp_interval all = {0, 4 * MIB}, half = {2 * MIB, 2 * MIB};
        gp_range *range = NULL;
        open_world(0, 0);
        CHECK_OK(gp_range_create(world.pool, 4 * MIB, world.stream[0], &range, NULL), NULL);
        CHECK_OK(gp_range_commit(range, &all, 1, NULL, NULL, NULL), NULL);
        CHECK_OK(gp_range_pin(range, 0, MIB, true, NULL), NULL);
        gp_range_unpin(range, 0, MIB);
        CHECK_OK(gp_range_decommit(range, &half, 1, NULL, 0, NULL, NULL), NULL);
        gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_RELAXED);
        gp__sim_fail_at(world.sim, n, false);
        gp_status status = gp_range_commit(range, &half, 1, NULL, NULL, NULL);
        hit = gp__sim_faults_fired(world.sim) > 0;
        gp__sim_fail_at(world.sim, 0, false);
        CHECK(status == GP_ERR_CAPTURE || (hit && status == GP_ERR_DRIVER), "call %llu: status %d",
              (unsigned long long)n, (int)status);
        assert_true(gp__sim_capture_end(world.sim, world.handle[1]));
        CHECK_OK(gp_range_commit(range, &half, 1, NULL, NULL, NULL), NULL);
        gp_range_release(range);
        world_end(&world);
    }
    open_world(0, 2 * MIB); /* for tear_down */
}

static int stop(void)
{
    return 1;
}

/* Whichever driver call fails around an interrupted wait, the error says what the status says. */
static void an_interrupted_request_says_so_whichever_driver_call_fails(void **state)
{
    bool hit = true, interrupted_once = false;

    (void)state;
    for (uint64_t n = 1; hit; n++) {
        open_world(4 * MIB, 2 * MIB);
        uintptr_t busy = world_malloc(&world, MIB, 0), va = 0;
        world_malloc(&world, MIB, 0);
        uintptr_t passed = world_malloc(&world, 2 * MIB, 1);
        world_launch(&world, 0, busy, 512);
        world_free(&world, busy, -1);
        world_free(&world, passed, -1);
        CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, NULL, NULL), NULL);
        step = stop;
        gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
        gp__sim_fail_at(world.sim, n, false);
        world.error = (gp_error){0};
        gp_status status =
            gp_pool_malloc(world.pool, 2 * MIB, world.stream[2], 0, &va, &world.error);
        hit = gp__sim_faults_fired(world.sim) > 0;
        gp__sim_fail_at(world.sim, 0, false);
        CHECK(status == GP_OK || world.error.status == status,
              "call %llu: status %d, the error says %d", (unsigned long long)n, (int)status,
              (int)world.error.status);
        interrupted_once = interrupted_once || status == GP_ERR_INTERRUPTED;
        check_all();
        step = NULL;
        gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
        gp__sim_complete_all(world.sim);
        world_end(&world);
    }
    open_world(0, 2 * MIB); /* for tear_down */
    assert_true(interrupted_once);
}

/* ---- tickets and fences ---- */

/* The rest of a cut range keeps its old ticket though it is filed late: it must not wait behind a
 * range with a later ticket that cannot pass. */
static void an_old_ticket_that_is_filed_late_passes_first(void **state)
{
    uintptr_t early, late, cut;

    (void)state;
    open_world(4 * MIB, 4 * MIB);
    world_malloc(&world, 512, 0);
    early = world_malloc(&world, 2 * MIB, 0);
    world_malloc(&world, 512, 0);
    late = world_malloc(&world, MIB, 0);
    world_malloc(&world, 512, 0);
    world_malloc(&world, MIB - 3 * 512, 0);
    world_free(&world, early, -1);
    fence_now(world.stream[0]);
    gp__sim_complete_all(world.sim);
    world_free(&world, late, -1);
    cut = world_malloc(&world, MIB + MIB / 2, 0);
    CHECK(cut >= early && cut < early + 2 * MIB, "the early range was not cut");
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_RELAXED);
    world_malloc(&world, MIB / 4, 1);
    assert_true(gp__sim_capture_end(world.sim, world.handle[0]));
    check_all();
}

/* However often the reaper looks at a chunk that waits for a busy stream, one fence is enough. */
static void one_fence_waits_for_a_busy_stream(void **state)
{
    uintptr_t va;

    (void)state;
    open_world(0, 2 * MIB);
    va = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, NULL, NULL), NULL);
    for (int i = 0; i < 20; i++) {
        assert_true(gp__pool_service(world.pool) != UINT64_MAX);
        assert_int_equal(world_ledger(&world).event_count, 1);
        assert_int_equal(gp__sim_pending(world.sim, world.handle[0]), 2);
    }
    gp__sim_complete_all(world.sim);
    gp__pool_service(world.pool);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

static void *free_on_its_own_stream(void *context)
{
    gp_stream *stream = NULL;
    uintptr_t va = 0;
    bool ok = gp_pool_stream(world.pool, 2, &stream, NULL) == GP_OK &&
              gp_pool_malloc(world.pool, 2 * MIB, stream, 0, &va, NULL) == GP_OK;

    if (ok)
        gp__sim_launch(world.sim, 2, va, 512);
    ok = ok && gp_pool_free(world.pool, va, NULL, 0, NULL) == GP_OK;
    gp_stream_release(stream);
    *(bool *)context = ok;
    return NULL;
}

/* The fence that a thread left on its own stream is all that a trim elsewhere needs; captures on
 * other streams are none of its business. */
static void a_threads_own_fence_spares_uninvolved_captures(void **state)
{
    pthread_t thread;
    bool ok = false;

    (void)state;
    open_world(0, 2 * MIB);
    assert_int_equal(pthread_create(&thread, NULL, free_on_its_own_stream, &ok), 0);
    pthread_join(thread, NULL);
    assert_true(ok);
    gp__sim_capture_begin(world.sim, world.handle[3], GP__SIM_CAPTURE_RELAXED);
    CHECK_OK(trim(), &world.error);
    assert_true(gp__sim_capture_end(world.sim, world.handle[3]));
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

/* pytorch 196258: another device is current while a pool waits for its own device's legacy stream. */
static void a_trim_waits_on_its_own_device(void **state)
{
    gp__sim *other = gp__sim_create(&(struct gp__sim_options){.ordinal = 1});
    gp_device *elsewhere = gp__sim_device(other);
    struct gp__entry entry;
    struct gp__sim_ledger ledger;
    gp_stream *legacy = NULL;
    uintptr_t va = 0;

    (void)state;
    open_world(0, 2 * MIB);
    CHECK_OK(elsewhere->driver->enter(elsewhere, &entry, NULL), NULL);
    CHECK_OK(gp_pool_stream(world.pool, 0, &legacy, NULL), NULL);
    CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, legacy, 0, &va, NULL), NULL);
    gp__sim_launch(world.sim, 0, va, 2 * MIB);
    CHECK_OK(gp_pool_free(world.pool, va, NULL, 0, NULL), NULL);
    CHECK_OK(trim(), &world.error);
    gp__sim_get_ledger(other, &ledger);
    assert_int_equal(gp__sim_pending_all(world.sim), 0);
    assert_int_equal(ledger.event_count, 0); /* nothing was asked of the other device */
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    gp_stream_release(legacy);
    elsewhere->driver->leave(elsewhere, &entry);
    gp__sim_destroy(other);
}

#define TEST(name) cmocka_unit_test_teardown(name, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_trim_waits_on_its_own_device),
        TEST(a_chunk_in_hand_keeps_its_owners_slot),
        TEST(a_drain_waits_for_a_chunk_in_hand),
        TEST(slots_come_back_without_a_reaper),
        TEST(forgetting_asks_nothing_of_streams_that_share_the_slot),
        TEST(streams_that_come_and_go_are_not_all_remembered),
        TEST(a_close_that_finds_a_lost_stream_changes_nothing_under_a_capture),
        TEST(a_trim_that_finds_a_lost_stream_changes_nothing_under_a_capture),
        TEST(a_capture_that_only_another_pool_knows_of_is_not_broken),
        TEST(a_capture_survives_whichever_driver_call_fails),
        TEST(an_interrupted_request_says_so_whichever_driver_call_fails),
        TEST(an_old_ticket_that_is_filed_late_passes_first),
        TEST(one_fence_waits_for_a_busy_stream),
        TEST(a_threads_own_fence_spares_uninvolved_captures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
