/* SPDX-License-Identifier: Apache-2.0
 *
 * When memory may be used again: streams, recorded users, reused handles, per-thread streams, captures,
 * streams that are forgotten or destroyed. Cases of others' bug reports are named as project and number.
 *
 * Mutations that this file catches: removing the wait (each test that launches work, by a violation),
 * removing the ticket check (another_stream_waits_for_the_ticket, two_users_are_both_waited_for),
 * waiting for one owner only, asking a stream by its handle alone.
 */
#include "tests/support/model.h"

#include <pthread.h>

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
    gp__sim_complete_all(world.sim);
    world_end(*state);
    return 0;
}

static gp_status try_malloc(size_t bytes, gp_stream *stream, uintptr_t *va)
{
    return gp_pool_try_malloc(world.pool, bytes, stream, 0, va, &world.error);
}

static gp_status trim(size_t *released)
{
    return gp_pool_trim(world.pool, 0, 0, released, &world.error);
}

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

/* ---- reuse ---- */

static void the_same_stream_reuses_at_once(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0), again = 0;

    (void)state;
    for (int i = 0; i < 10; i++) {
        world_launch(&world, 0, va, 2 * MIB);
        world_free(&world, va, i % 2 == 0 ? 0 : -1);
        CHECK_OK(try_malloc(2 * MIB, world.stream[0], &again), NULL);
        assert_int_equal(again, va);
    }
    assert_int_equal(gp__sim_pending(world.sim, world.handle[0]), 10);
}

static void another_stream_waits_for_the_ticket(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0), got = 0;

    (void)state;
    CHECK_OK(gp_pool_set_limit(world.pool, 2 * MIB, NULL, NULL), NULL);
    world_launch(&world, 0, va, 2 * MIB);
    world_free(&world, va, -1);
    CHECK_STATUS(GP_NOT_READY, try_malloc(2 * MIB, world.stream[1], &got), NULL);
    CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, world.stream[1], 0, &got, &world.error),
             &world.error);
    CHECK(!gp__sim_busy(world.sim, got, 2 * MIB, 0), "handed out under pending work");
    CHECK(world_stats(&world).wait_count > 0, "nobody waited");
    assert_int_equal(got, va);
}

/* cuda-python 2906: with users on two streams, the last one named is not the only one waited for. */
static void two_users_are_both_waited_for(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0), got = 0;
    size_t released = 0;

    (void)state;
    CHECK_OK(gp_pool_record_stream(world.pool, va, world.stream[1], NULL), NULL);
    world_launch(&world, 0, va, 512);
    world_launch(&world, 1, va, 512);
    world_launch(&world, 2, va, 512);
    world_free(&world, va, 2);
    for (int s = 0; s < 3; s++)
        CHECK_STATUS(GP_NOT_READY, try_malloc(2 * MIB, world.stream[s], &got), NULL);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
    assert_int_equal(gp__sim_pending_all(world.sim), 0);
}

/* vllm 43020: allocate, launch, free, in a pool that unmaps at once. */
static void unmapping_at_once_is_never_too_early(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        size_t released = 0;
        int s = i % WORLD_STREAMS;
        uintptr_t va = world_malloc(&world, 2 * MIB, s);

        world_launch(&world, s, va, 2 * MIB);
        world_free(&world, va, -1);
        CHECK_OK(trim(&released), &world.error);
        assert_int_equal(released, 2 * MIB);
    }
}

/* A trim that may not wait leaves busy memory mapped, and a later one takes it. */
static void busy_memory_stays_mapped_until_it_passed(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, &released, NULL), NULL);
    assert_true(gp__sim_is_accessible(world.sim, va, 2 * MIB));
    assert_int_equal(world_stats(&world).physical_bytes, 2 * MIB);
    CHECK_OK(gp_pool_drain(world.pool, NULL), NULL);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

static int complete_and_go_on(void *context)
{
    gp__sim_complete(((struct world *)context)->sim, ((struct world *)context)->handle[0], 1);
    return 0;
}

static int stop_at_once(void *context)
{
    (void)context;
    return 1;
}

static void open_interruptible(int (*hook)(void *context))
{
    world_end(&world);
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB,
                                                .interrupted = hook,
                                                .interrupted_context = &world});
    world_open(&world);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
}

static void a_wait_goes_on_while_work_goes_on(void **state)
{
    uintptr_t va;
    size_t released = 0;

    (void)state;
    open_interruptible(complete_and_go_on);
    va = world_malloc(&world, 2 * MIB, 0);
    for (int i = 0; i < 20; i++)
        world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
}

static void an_interrupted_wait_loses_nothing(void **state)
{
    uintptr_t va;
    size_t released = 77;

    (void)state;
    open_interruptible(stop_at_once);
    va = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_STATUS(GP_ERR_INTERRUPTED, trim(&released), NULL);
    assert_int_equal(released, 77);
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * MIB);
    CHECK_STATUS(GP_ERR_INTERRUPTED, gp_pool_drain(world.pool, NULL), NULL);
    CHECK_STATUS(GP_ERR_INTERRUPTED, gp_pool_close(world.pool, NULL), NULL);
    check_all();
    gp__sim_complete_all(world.sim);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
}

/* ---- identity ---- */

/* rmm 2251, 649: a handle that is reused by a new stream says nothing about the old one's work. */
static void a_reused_handle_is_another_stream(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0), got = 0;
    gp_stream *next = NULL;
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    gp__sim_stream_destroy(world.sim, world.handle[0]);
    assert_int_equal(gp__sim_stream_create(world.sim, 0), world.handle[0]);
    CHECK_OK(gp_pool_stream(world.pool, world.handle[0], &next, NULL), NULL);
    assert_ptr_not_equal(next, world.stream[0]);
    assert_int_not_equal(gp_stream_id(next), gp_stream_id(world.stream[0]));
    CHECK_STATUS(GP_NOT_READY, try_malloc(2 * MIB, next, &got), NULL);
    CHECK_OK(trim(&released), &world.error); /* by a fence of the whole context */
    assert_int_equal(released, 2 * MIB);
    assert_int_equal(gp__sim_pending_all(world.sim), 0);
    gp_stream_release(next);
}

/* The pool has not met the new stream behind the handle when it wants to fence the old one. */
static void a_reuse_behind_the_pools_back_is_noticed(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    gp__sim_stream_destroy(world.sim, world.handle[0]);
    gp__sim_stream_create(world.sim, 0);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
}

/* Asking a capturing stream for its id would invalidate the capture: it is known by its handle. */
static void a_capturing_stream_is_found_by_its_handle(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    uintptr_t stranger = gp__sim_stream_create(world.sim, 0);
    gp_stream *found = NULL, *again = NULL;

    (void)state;
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    gp__sim_capture_begin(world.sim, stranger, GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(gp_pool_stream(world.pool, world.handle[0], &found, NULL), NULL);
    assert_ptr_equal(found, world.stream[0]);
    CHECK_OK(gp_pool_free(world.pool, va, found, 0, NULL), NULL);
    gp_stream_release(found);
    /* One that is met while it captures gets its name later. */
    CHECK_OK(gp_pool_stream(world.pool, stranger, &found, NULL), NULL);
    CHECK_OK(gp_pool_stream(world.pool, stranger, &again, NULL), NULL);
    assert_ptr_equal(found, again);
    gp_stream_release(again);
    assert_true(gp__sim_capture_end(world.sim, world.handle[0]));
    assert_true(gp__sim_capture_end(world.sim, stranger));
    CHECK_OK(gp_pool_stream(world.pool, stranger, &again, NULL), NULL);
    assert_ptr_equal(found, again);
    assert_int_equal(gp_stream_id(found), gp__sim_stream_id(world.sim, stranger));
    gp_stream_release(again);
    gp_stream_release(found);
}

/* The fence that memory of an unnamed stream waits for names it too. */
static void a_fence_names_a_stream_that_was_met_capturing(void **state)
{
    uintptr_t stranger = gp__sim_stream_create(world.sim, 0), va = world_malloc(&world, 2 * MIB, 0);
    gp_stream *found = NULL;
    size_t released = 0;

    (void)state;
    gp__sim_capture_begin(world.sim, stranger, GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(gp_pool_stream(world.pool, stranger, &found, NULL), NULL);
    CHECK_OK(gp_pool_record_stream(world.pool, va, found, NULL), NULL);
    world_free(&world, va, -1);
    CHECK_STATUS(GP_ERR_CAPTURE, trim(&released), NULL);
    assert_true(gp__sim_capture_end(world.sim, stranger));
    gp__sim_launch(world.sim, stranger, va, 512);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
    assert_int_equal(gp_stream_id(found), gp__sim_stream_id(world.sim, stranger));
    gp_stream_release(found);
}

/* A free is always accepted: a dead context cannot say who its streams are, but they are known. */
static void a_dead_contexts_streams_are_found_by_handle(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    gp_stream *found = NULL;

    (void)state;
    world_launch(&world, 0, va, 512);
    gp__sim_kill_context(world.sim);
    CHECK_OK(gp_pool_stream(world.pool, world.handle[0], &found, NULL), NULL);
    assert_ptr_equal(found, world.stream[0]);
    CHECK_OK(gp_pool_free(world.pool, va, found, 0, NULL), NULL);
    gp_stream_release(found);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
}

static void forgetting_waits_and_lets_go(void **state)
{
    uintptr_t live = world_malloc(&world, 512, 0), idle = world_malloc(&world, 2 * MIB, 0), got = 0;
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, live, 512);
    world_launch(&world, 0, idle, 512);
    world_free(&world, idle, -1);
    CHECK_OK(gp_pool_forget_stream(world.pool, world.handle[0], &world.error), &world.error);
    assert_int_equal(gp__sim_pending(world.sim, world.handle[0]), 0);
    gp__sim_stream_destroy(world.sim, world.handle[0]);
    CHECK_OK(try_malloc(2 * MIB, world.stream[1], &got), NULL); /* passed: free for all */
    CHECK_OK(gp_pool_free(world.pool, got, NULL, 0, NULL), NULL);
    CHECK_OK(gp_pool_free(world.pool, live, NULL, 0, NULL), NULL);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 4 * MIB);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_forget_stream(world.pool, 0x998, NULL), NULL);
    world.handle[0] = gp__sim_stream_create(world.sim, 0);
}

/* A block of a forgotten stream that another stream frees belongs to that one. */
static void a_forgotten_streams_block_can_be_freed_elsewhere(void **state)
{
    uintptr_t live = world_malloc(&world, 2 * MIB, 0), got = 0;

    (void)state;
    CHECK_OK(gp_pool_forget_stream(world.pool, world.handle[0], NULL), NULL);
    world_launch(&world, 1, live, 512);
    world_free(&world, live, 1);
    CHECK_STATUS(GP_NOT_READY, try_malloc(2 * MIB, world.stream[2], &got), NULL);
    CHECK_OK(try_malloc(2 * MIB, world.stream[1], &got), NULL);
    assert_int_equal(got, live);
}

/* More streams than owner sets have bits for: the last bit is shared, which costs waits, no more. */
static void many_streams_share_the_last_slot(void **state)
{
    enum { COUNT = 90 };
    gp_stream *stream[COUNT];
    uintptr_t handle[COUNT], va[COUNT], got = 0;
    size_t released = 0;

    (void)state;
    for (int i = 0; i < COUNT; i++) {
        handle[i] = gp__sim_stream_create(world.sim, 0);
        CHECK_OK(gp_pool_stream(world.pool, handle[i], &stream[i], NULL), NULL);
        CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, stream[i], 0, &va[i], NULL), NULL);
        gp__sim_launch(world.sim, handle[i], va[i], 2 * MIB);
    }
    for (int i = 0; i < COUNT; i++)
        CHECK_OK(gp_pool_free(world.pool, va[i], NULL, 0, NULL), NULL);
    for (int i = COUNT - 20; i < COUNT; i++)
        while (try_malloc(2 * MIB, stream[i], &got) == GP_OK)
            CHECK(!gp__sim_busy(world.sim, got, 2 * MIB, gp_stream_id(stream[i])),
                  "stream %d got memory that another stream works on", i);
    CHECK_OK(trim(&released), &world.error);
    check_all();
    for (int i = 0; i < COUNT; i++)
        gp_stream_release(stream[i]);
}

/* ---- per-thread default streams ---- */

struct visit {
    uintptr_t va;
    gp_status status;
    gp_error error;
    bool free_here;
};

/* Allocates and works on this thread's default stream, and perhaps frees there. */
static void *visit_thread(void *context)
{
    struct visit *visit = context;
    gp_stream *stream = NULL;

    visit->status = gp_pool_stream(world.pool, 2, &stream, &visit->error);
    if (visit->status == GP_OK)
        visit->status = gp_pool_malloc(world.pool, 2 * MIB, stream, 0, &visit->va, &visit->error);
    if (visit->status == GP_OK)
        gp__sim_launch(world.sim, 2, visit->va, 2 * MIB);
    if (visit->status == GP_OK && visit->free_here)
        visit->status = gp_pool_free(world.pool, visit->va, NULL, 0, &visit->error);
    gp_stream_release(stream);
    return NULL;
}

static struct visit visit_another_thread(bool free_here)
{
    struct visit visit = {.free_here = free_here};
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, visit_thread, &visit), 0);
    pthread_join(thread, NULL);
    CHECK_OK(visit.status, &visit.error);
    return visit;
}

/* Freed where it was used: the fence was recorded there, so any thread may wait for it. */
static void a_threads_stream_is_fenced_on_its_thread(void **state)
{
    struct visit visit = visit_another_thread(true);
    size_t released = 0;

    (void)state;
    assert_true(gp__sim_busy(world.sim, visit.va, 2 * MIB, 0));
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
}

/* Freed on another thread: nobody here can fence that stream, so nothing short of an explicit trim
 * takes the memory, and that fences the whole context. */
static void a_threads_stream_is_unknown_elsewhere(void **state)
{
    struct visit visit = visit_another_thread(false);
    uintptr_t got = 0;
    size_t released = 0;

    (void)state;
    CHECK_OK(gp_pool_free(world.pool, visit.va, NULL, 0, NULL), NULL);
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, &released, NULL), NULL);
    assert_int_equal(released, 0);
    CHECK_OK(gp_pool_set_limit(world.pool, 2 * MIB, NULL, NULL), NULL);
    CHECK_STATUS(GP_NOT_READY, try_malloc(2 * MIB, world.stream[0], &got), NULL);
    CHECK_STATUS(GP_ERR_LIMIT, gp_pool_malloc(world.pool, 2 * MIB, world.stream[0], 0, &got, NULL),
                 NULL);
    assert_true(gp__sim_busy(world.sim, visit.va, 2 * MIB, 0));
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
    assert_false(gp__sim_busy(world.sim, visit.va, 2 * MIB, 0));
}

/* ---- captures ---- */

/* pytorch 159594: growth, cross-stream waits and trims beside a capture of another stream. */
static void captures_survive_growth_and_trims(void **state)
{
    uintptr_t capturing = gp__sim_stream_create(world.sim, GP__SIM_STREAM_BLOCKING);
    size_t released = 0;

    (void)state;
    for (int mode = GP__SIM_CAPTURE_GLOBAL; mode <= GP__SIM_CAPTURE_RELAXED; mode++) {
        uintptr_t va;

        gp__sim_capture_begin(world.sim, capturing, (enum gp__sim_capture_mode)mode);
        va = world_malloc(&world, 5 * MIB, 0);
        world_launch(&world, 0, va, 5 * MIB);
        world_free(&world, va, -1);
        CHECK_OK(trim(&released), &world.error);
        assert_true(released > 0);
        CHECK(gp__sim_capture_end(world.sim, capturing), "mode %d: the capture was invalidated",
              mode);
    }
}

static void check_refused_by_capture(gp_pool_stats *before)
{
    gp_pool_stats after;
    size_t released = 77;

    CHECK_STATUS(GP_ERR_CAPTURE, trim(&released), NULL);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_pool_close(world.pool, NULL), NULL);
    after = world_stats(&world);
    after.wait_count = before->wait_count;
    assert_memory_equal(before, &after, sizeof after);
    assert_int_equal(released, 77);
    assert_false(gp_pool_is_closed(world.pool));
}

/* An explicit trim or close that needs the capturing stream changes nothing, idle memory of others
 * included; the ladder does without it. */
static void a_trim_that_needs_a_capturing_stream_changes_nothing(void **state)
{
    uintptr_t a = world_malloc(&world, 2 * MIB, 0), b = world_malloc(&world, 2 * MIB, 1), got = 0;
    gp_pool_stats before;
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, a, 512);
    world_free(&world, a, -1);
    world_free(&world, b, -1);
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    before = world_stats(&world);
    check_refused_by_capture(&before);
    CHECK_OK(gp_pool_set_limit(world.pool, 4 * MIB, NULL, NULL), NULL);
    CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, world.stream[2], 0, &got, &world.error),
             &world.error);
    assert_int_not_equal(got, a);
    CHECK_STATUS(GP_ERR_LIMIT, gp_pool_malloc(world.pool, 2 * MIB, world.stream[2], 0, &got, NULL),
                 NULL);
    assert_true(gp__sim_capture_end(world.sim, world.handle[0]));
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
}

/* A blocking stream captures while the legacy stream owns memory: even relaxed calls on the legacy
 * stream would kill the capture. */
static void a_blocking_capture_survives_the_legacy_stream(void **state)
{
    uintptr_t capturing = gp__sim_stream_create(world.sim, GP__SIM_STREAM_BLOCKING), va = 0;
    gp_stream *legacy = NULL;
    gp_pool_stats before;
    size_t released = 0;

    (void)state;
    CHECK_OK(gp_pool_stream(world.pool, 1, &legacy, NULL), NULL);
    assert_int_equal(gp_stream_handle(legacy), 0);
    CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, legacy, 0, &va, NULL), NULL);
    gp__sim_launch(world.sim, 0, va, 512);
    CHECK_OK(gp_pool_free(world.pool, va, NULL, 0, NULL), NULL);
    gp__sim_capture_begin(world.sim, capturing, GP__SIM_CAPTURE_RELAXED);
    before = world_stats(&world);
    check_refused_by_capture(&before);
    /* The legacy stream is part of no capture, so what it gets is an ordinary block. */
    CHECK_OK(try_malloc(512, legacy, &va), NULL);
    CHECK_OK(gp_pool_free(world.pool, va, NULL, 0, NULL), NULL);
    assert_true(gp__sim_capture_end(world.sim, capturing));
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
    gp_stream_release(legacy);
}

/* Unknown users take a fence of the whole context, which any capture on a known stream forbids. */
static void unknown_users_wait_for_captures(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    gp_pool_stats before;
    size_t released = 0;

    (void)state;
    CHECK_OK(gp_pool_pin(world.pool, va, true, NULL), NULL);
    gp_pool_unpin(world.pool, va);
    world_free(&world, va, -1);
    gp__sim_capture_begin(world.sim, world.handle[3], GP__SIM_CAPTURE_RELAXED);
    before = world_stats(&world);
    check_refused_by_capture(&before);
    assert_true(gp__sim_capture_end(world.sim, world.handle[3]));
    /* Work of a stream the pool has never met is waited for. */
    gp__sim_launch(world.sim, 0, va, 512);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
    assert_int_equal(gp__sim_pending_all(world.sim), 0);
}

/* ---- the end of a context ---- */

static void a_dead_context_holds_nothing_back(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, &released, NULL), NULL);
    gp__sim_kill_context(world.sim);
    CHECK_OK(trim(&released), &world.error);
    assert_int_equal(released, 2 * MIB);
    check_all();
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    assert_int_equal(world_ledger(&world).physical_bytes, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_same_stream_reuses_at_once),
        TEST(another_stream_waits_for_the_ticket),
        TEST(two_users_are_both_waited_for),
        TEST(unmapping_at_once_is_never_too_early),
        TEST(busy_memory_stays_mapped_until_it_passed),
        TEST(a_wait_goes_on_while_work_goes_on),
        TEST(an_interrupted_wait_loses_nothing),
        TEST(a_reused_handle_is_another_stream),
        TEST(a_reuse_behind_the_pools_back_is_noticed),
        TEST(a_capturing_stream_is_found_by_its_handle),
        TEST(a_fence_names_a_stream_that_was_met_capturing),
        TEST(a_dead_contexts_streams_are_found_by_handle),
        TEST(forgetting_waits_and_lets_go),
        TEST(a_forgotten_streams_block_can_be_freed_elsewhere),
        TEST(many_streams_share_the_last_slot),
        TEST(a_threads_stream_is_fenced_on_its_thread),
        TEST(a_threads_stream_is_unknown_elsewhere),
        TEST(captures_survive_growth_and_trims),
        TEST(a_trim_that_needs_a_capturing_stream_changes_nothing),
        TEST(a_blocking_capture_survives_the_legacy_stream),
        TEST(unknown_users_wait_for_captures),
        TEST(a_dead_context_holds_nothing_back),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
