/* SPDX-License-Identifier: Apache-2.0
 *
 * The reaper's work beside that of users: recording while a stream is forgotten, two recorders on
 * one stream, closing and draining while chunks are under way, other pools, pools that nobody
 * holds. A second thread does what the reaper would do and stops at a chosen call, so that the
 * order is always the same.
 */
#include "tests/support/world.h"

#include "vmm/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define MIB CHECK_MIB

static struct world world;

/* The device's table with one call replaced; set while no other thread exists. */
static struct gp__driver table;
static const struct gp__driver *real;

/* What the threads tell each other. */
static _Atomic bool recording; /* the other thread stands before a record */
static _Atomic bool delivering; /* the other thread is inside the backing's free */
static _Atomic bool waiting; /* a pool call was seen waiting for another thread */
static _Atomic bool go_on; /* whoever stands still may go on */
static _Atomic bool finished;
static _Atomic bool armed;

static _Thread_local bool stop_my_waits; /* answers this thread's interrupt hook */

static void nap(void)
{
    struct timespec pause = {0, 100000};

    nanosleep(&pause, NULL);
}

/* The bound only turns a hang into a failure; nothing in a passing run depends on it. */
static bool await(_Atomic bool *flag)
{
    for (int i = 0; i < 100000 && !atomic_load(flag); i++)
        nap();
    return atomic_load(flag);
}

static int note_wait(void *context)
{
    (void)context;
    atomic_store(&waiting, true);
    return stop_my_waits;
}

static void open_world(bool with_reaper)
{
    recording = delivering = waiting = go_on = finished = armed = false;
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB,
                                                .with_reaper = with_reaper,
                                                .interrupted = note_wait});
    real = world.device->driver;
    table = *real;
    world.device->driver = &table;
    world_open(&world);
}

static int tear_down(void **state)
{
    (void)state;
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
    gp__sim_complete_all(world.sim);
    world_end(&world);
    return 0;
}

static gp_status trim(unsigned flags)
{
    return gp_pool_trim(world.pool, 0, flags, NULL, &world.error);
}

/* A chunk that retires and waits for stream 0. */
static void retire_busy_chunk(void)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);

    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_OK(trim(GP_TRIM_NO_WAIT), &world.error);
}

static void free_exported(uintptr_t va)
{
    CHECK_OK(gp_pool_pin(world.pool, va, true, &world.error), &world.error);
    gp_pool_unpin(world.pool, va);
    world_free(&world, va, -1);
}

/* The reaper's work, on a thread of the test's own. */
static void *serve(void *context)
{
    (void)context;
    gp__pool_service(world.pool);
    return NULL;
}

/* ---- a stream that is forgotten while a fence goes into it ---- */

/* The first record on stream 0 stands still until somebody waits for it, or need not any more. */
static gp_status record_slowly(gp_device *device, gp__event *event,
                               const struct gp__stream_key *key, gp_error *error)
{
    if (key->handle == world.handle[0] && atomic_exchange(&armed, false)) {
        atomic_store(&recording, true);
        for (int i = 0; i < 100000 && !atomic_load(&waiting) && !atomic_load(&go_on); i++)
            nap();
    }
    return real->event_record(device, event, key, error);
}

static void forget_during_a_record(bool destroy)
{
    pthread_t other;
    gp_status status;

    open_world(false);
    table.event_record = record_slowly;
    retire_busy_chunk();
    atomic_store(&armed, true);
    assert_int_equal(pthread_create(&other, NULL, serve, NULL), 0);
    assert_true(await(&recording));
    status = gp_pool_forget_stream(world.pool, world.handle[0], &world.error);
    if (destroy)
        gp__sim_stream_destroy(world.sim, world.handle[0]);
    atomic_store(&go_on, true);
    pthread_join(other, NULL);
    CHECK_OK(status, &world.error);
    CHECK(waiting, "the stream was let go while a fence was on its way into it");
}

/* Whoever forgot a stream may destroy it: no fence is recorded in it any more. */
static void nothing_is_recorded_in_a_forgotten_stream(void **state)
{
    (void)state;
    forget_during_a_record(true);
}

/* The fence that was under way is still the pool's, and goes with it: world_end() counts events. */
static void a_fence_under_way_is_not_lost_with_its_stream(void **state)
{
    (void)state;
    forget_during_a_record(false);
    gp__sim_complete_all(world.sim);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    assert_int_equal(world_ledger(&world).event_count, 0);
}

/* ---- two threads that record on one stream ---- */

static pthread_t second;

/* Puts a fence on stream 0, as another thread's ladder or the reaper would. */
static void *record_too(void *context)
{
    gp_device *device = world.device;
    struct gp__entry entry;

    (void)context;
    if (device->driver->enter(device, &entry, NULL) != GP_OK)
        return NULL;
    gp__mutex_lock(&world.pool->lock);
    struct gp__owners owners = {UINT64_C(1) << world.stream[0]->slot,
                                gp__timeline_now(&world.pool->timeline)};
    gp__mutex_unlock(&world.pool->lock);
    gp__timeline_record(&world.pool->timeline, owners, NULL);
    device->driver->leave(device, &entry);
    return NULL;
}

/* While the first thread records on stream 1, the second begins to record on stream 0 and stands
 * still there until the first is done with everything. */
static gp_status record_in_turns(gp_device *device, gp__event *event,
                                 const struct gp__stream_key *key, gp_error *error)
{
    if (key->handle == world.handle[1] && atomic_exchange(&armed, false)) {
        if (pthread_create(&second, NULL, record_too, NULL) == 0)
            await(&recording);
    } else if (key->handle == world.handle[0] && !atomic_exchange(&recording, true)) {
        await(&go_on);
    }
    return real->event_record(device, event, key, error);
}

/* A fence that another thread is still recording is not one's own: a trim that needs it records
 * another, instead of falling back on the whole context, which would end a capture that is not
 * involved. */
static void each_recorder_records_what_it_needs(void **state)
{
    uintptr_t va;
    gp_status status;

    (void)state;
    open_world(false);
    table.event_record = record_in_turns;
    va = world_malloc(&world, 2 * MIB, 0);
    CHECK_OK(gp_pool_record_stream(world.pool, va, world.stream[1], NULL), NULL);
    world_launch(&world, 0, va, 512);
    world_launch(&world, 1, va, 512);
    world_free(&world, va, -1);
    gp__sim_capture_begin(world.sim, world.handle[2], GP__SIM_CAPTURE_RELAXED);
    atomic_store(&armed, true);
    status = trim(0);
    assert_true(recording);
    atomic_store(&go_on, true);
    pthread_join(second, NULL);
    CHECK_OK(status, &world.error);
    assert_true(gp__sim_capture_end(world.sim, world.handle[2]));
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

/* ---- chunks under way ---- */

static void free_slowly(struct world *where, const gp_request *request)
{
    (void)where;
    (void)request;
    atomic_store(&delivering, true);
    for (int i = 0; i < 100000 && !atomic_load(&waiting) && !atomic_load(&go_on); i++)
        nap();
}

/* A chunk in the hands of the reaper has its own owners and no others: a capture on a stream that
 * owns nothing does not keep the pool from closing. The close waits for the chunk. */
static void a_chunk_under_way_does_not_make_captures_matter(void **state)
{
    pthread_t other;
    gp_status status;

    (void)state;
    open_world(false);
    world_free(&world, world_malloc(&world, 2 * MIB, 3), -1);
    CHECK_OK(trim(0), &world.error);
    gp__sim_capture_begin(world.sim, world.handle[3], GP__SIM_CAPTURE_RELAXED);
    retire_busy_chunk();
    gp__pool_service(world.pool);
    gp__sim_complete_all(world.sim);
    world.before_free = free_slowly;
    assert_int_equal(pthread_create(&other, NULL, serve, NULL), 0);
    assert_true(await(&delivering));
    status = gp_pool_close(world.pool, &world.error);
    atomic_store(&go_on, true);
    pthread_join(other, NULL);
    CHECK_OK(status, &world.error);
    assert_true(waiting);
    assert_true(gp__sim_capture_end(world.sim, world.handle[3]));
    assert_int_equal(world.supplied_chunks, 0);
}

static void *forget_busy_stream(void *context)
{
    *(gp_status *)context = gp_pool_forget_stream(world.pool, world.handle[0], NULL);
    return NULL;
}

/* A drain waits for chunks. A thread that waits for a stream holds none. */
static void a_drain_does_not_wait_for_a_thread_that_forgets(void **state)
{
    pthread_t other;
    gp_status drained, forgotten = GP_NOT_READY;

    (void)state;
    open_world(false);
    world_launch(&world, 0, world_malloc(&world, 512, 0), 512);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    assert_int_equal(pthread_create(&other, NULL, forget_busy_stream, &forgotten), 0);
    assert_true(await(&waiting));
    stop_my_waits = true; /* a drain that waits reports so instead of hanging */
    drained = gp_pool_drain(world.pool, &world.error);
    stop_my_waits = false;
    gp__sim_complete_all(world.sim);
    pthread_join(other, NULL);
    CHECK_OK(drained, &world.error);
    CHECK_OK(forgotten, NULL);
}

/* ---- several pools, one reaper ---- */

static gp_pool *neighbour;
static _Atomic int neighbour_status;

static void trim_the_neighbour(struct world *where, const gp_request *request)
{
    (void)where;
    (void)request;
    if (!atomic_exchange(&armed, false))
        return;
    atomic_store(&neighbour_status, gp_pool_trim(neighbour, 0, GP_TRIM_NO_WAIT, NULL, NULL));
    atomic_store(&delivering, true);
}

static void open_neighbour(void)
{
    gp_pool_options options = {.name = "neighbour",
                               .device = world.device,
                               .backing = world.inner,
                               .limit = GP_NO_LIMIT,
                               .chunk_size = 2 * MIB};
    gp_stream *stream = NULL;
    uintptr_t va = 0;

    CHECK_OK(gp_pool_create(&options, &neighbour, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(neighbour, world.handle[1], &stream, NULL), NULL);
    CHECK_OK(gp_pool_malloc(neighbour, 2 * MIB, stream, 0, &va, NULL), NULL);
    CHECK_OK(gp_pool_free(neighbour, va, NULL, 0, NULL), NULL);
    gp_stream_release(stream);
}

/* A callback on the reaper's thread may set another pool's chunks retiring: the reaper comes for
 * them. */
static void the_reaper_serves_a_pool_that_it_touched_itself(void **state)
{
    gp_pool_stats stats;

    (void)state;
    open_world(true);
    open_neighbour();
    world.before_free = trim_the_neighbour;
    atomic_store(&armed, true);
    retire_busy_chunk();
    for (int i = 0; i < 50000 && !atomic_load(&delivering); i++) {
        gp__sim_complete_all(world.sim);
        nap();
    }
    assert_true(delivering);
    assert_int_equal(neighbour_status, GP_OK);
    gp_pool_get_stats(neighbour, &stats);
    for (int i = 0; i < 50000 && stats.retiring_bytes > 0; i++) {
        gp__sim_complete_all(world.sim);
        nap();
        gp_pool_get_stats(neighbour, &stats);
    }
    CHECK(stats.retiring_bytes == 0, "%zu bytes still wait for the reaper", stats.retiring_bytes);
    CHECK_OK(gp_pool_close(neighbour, &world.error), &world.error);
    gp_pool_release(neighbour);
}

/* ---- what only an explicit call can finish ---- */

/* Retiring memory with unseen users: the reaper looks once and does not come again by itself. */
static void unseen_memory_does_not_keep_the_reaper_busy(void **state)
{
    uintptr_t va;

    (void)state;
    open_world(false);
    va = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va, 512);
    free_exported(va);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    stop_my_waits = true;
    CHECK_STATUS(GP_ERR_INTERRUPTED, trim(0), &world.error);
    stop_my_waits = false;
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
    gp__sim_complete_all(world.sim);
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * MIB);
    assert_true(gp__pool_service(world.pool) == UINT64_MAX);
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * MIB);
    CHECK_OK(trim(0), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

static bool log_has(const char *word)
{
    for (size_t i = 0; i < gp__sim_log_count(world.sim); i++)
        if (strstr(gp__sim_log_line(world.sim, i), word) != NULL)
            return true;
    return false;
}

/* S3: a pool that nobody holds has no caller who answers for captures on streams that growpool
 * does not know. What only a context-wide fence could cover stays until the process ends, and is
 * left alone. */
static void an_orphan_leaves_unseen_memory_alone(void **state)
{
    uintptr_t stranger;

    (void)state;
    open_world(false);
    stranger = gp__sim_stream_create(world.sim, 0);
    free_exported(world_malloc(&world, 2 * MIB, 0));
    gp__sim_capture_begin(world.sim, stranger, GP__SIM_CAPTURE_RELAXED);
    gp__sim_log_clear(world.sim);
    __atomic_store_n(&world.pool->orphaned, true, __ATOMIC_RELEASE);
    assert_true(gp__pool_service(world.pool) == UINT64_MAX);
    assert_true(gp__sim_capture_end(world.sim, stranger));
    assert_false(log_has("event_record_context") || log_has("unmap"));
    assert_int_equal(world.supplied_chunks, 1);
    assert_false(gp_pool_is_closed(world.pool));
    /* Somebody holds it after all, and may close it. */
    __atomic_store_n(&world.pool->orphaned, false, __ATOMIC_RELEASE);
    gp_pool_retain(world.pool); /* the list of left pools holds what is no orphan */
    world.pool->interrupt = (struct gp__interrupt){NULL, NULL};
}

#define TEST(name) cmocka_unit_test_teardown(name, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(nothing_is_recorded_in_a_forgotten_stream),
        TEST(a_fence_under_way_is_not_lost_with_its_stream),
        TEST(each_recorder_records_what_it_needs),
        TEST(a_chunk_under_way_does_not_make_captures_matter),
        TEST(a_drain_does_not_wait_for_a_thread_that_forgets),
        TEST(the_reaper_serves_a_pool_that_it_touched_itself),
        TEST(unseen_memory_does_not_keep_the_reaper_busy),
        TEST(an_orphan_leaves_unseen_memory_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
