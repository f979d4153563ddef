/* SPDX-License-Identifier: Apache-2.0
 *
 * Who uses a range, and when its memory may go or come back: owners, unknown users, captures,
 * interrupted waits. Cases of others' bug reports are named as project and number.
 *
 * Mutations that this file catches: leaving an owner out of gp__range_stamp (a violation), taking
 * retiring memory back for the wrong stream (a_commit_by_another_stream_waits), asking for unknown
 * users for ever or never (unknown_users_cost_one_fence), checking for captures after the change.
 */
#include <time.h>

#include "range_case.h"
#include "vmm/pool.h"

static void launch(gp_range *range, int s, size_t first, size_t count)
{
    world_launch(&world, s, gp_range_address(range) + first * PAGE, count * PAGE);
}

static bool busy(gp_range *range, size_t first, size_t count)
{
    return gp__sim_busy(world.sim, gp_range_address(range) + first * PAGE, count * PAGE, 0);
}

static size_t log_count(const char *name)
{
    size_t found = 0, length = strlen(name);

    for (size_t i = 0; i < gp__sim_log_count(world.sim); i++) {
        const char *line = gp__sim_log_line(world.sim, i);

        found += strncmp(line, name, length) == 0 && line[length] == ' ';
    }
    return found;
}

/* ---- owners ---- */

/* TensorRT-LLM 11641, cuda-python 2906: everybody who committed, was recorded, or is named is
 * waited for. */
static void a_decommit_waits_for_every_owner(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_interval part = {0, 4 * PAGE};

    (void)state;
    commit(range, 0, 2, -1);
    commit(range, 2, 2, 1);
    CHECK_OK(gp_range_record_stream(range, world.stream[2], NULL), NULL);
    for (int s = 0; s < 4; s++)
        launch(range, s, (size_t)s, 1);
    CHECK_OK(gp_range_decommit(range, &part, 1, world.stream[3], 0, NULL, &world.error),
             &world.error);
    CHECK(!busy(range, 0, 4), "unmapped under pending work");
    expect_committed(range, "");
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    end_range(range);
}

/* cuda-python 2886: the stream that a shrink or a close names is the one of the last use. */
static void the_named_stream_is_waited_for(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result;

    (void)state;
    CHECK_OK(gp_range_resize(range, 4 * PAGE, world.stream[1], 0, NULL, NULL), NULL);
    launch(range, 2, 0, 4);
    CHECK_OK(gp_range_resize(range, 2 * PAGE, world.stream[2], 0, &result, &world.error),
             &world.error);
    assert_int_equal(result.released_bytes, 2 * PAGE);
    launch(range, 3, 0, 2);
    CHECK_OK(gp_range_close(range, world.stream[3], &world.error), &world.error);
    assert_int_equal(gp__sim_pending(world.sim, world.handle[3]), 1); /* closing waits for nobody */
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * PAGE);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
    gp_range_release(range);
}

/* TensorRT-LLM 11641: destroyed under queued work, by a release alone. */
static void a_release_waits_for_nobody_and_loses_nothing(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 4, 1);
    launch(range, 0, 0, 4);
    launch(range, 1, 0, 4);
    gp_range_release(range);
    assert_int_equal(gp__sim_pending_all(world.sim), 2);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    check_all();
    drain();
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

static void without_waiting_memory_goes_when_it_passed(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 4, -1);
    launch(range, 0, 0, 4);
    decommit(range, 0, 4, GP_TRIM_NO_WAIT, 4, 0);
    CHECK(busy(range, 0, 4), "a decommit that does not wait waited");
    assert_int_equal(gp_range_physical_bytes(range), 4 * PAGE);
    expect_committed(range, "");
    gp__pool_service(world.pool);
    assert_int_equal(gp_range_physical_bytes(range), 4 * PAGE);
    gp__sim_complete_all(world.sim);
    gp__pool_service(world.pool); /* a turn of the reaper */
    assert_int_equal(gp_range_physical_bytes(range), 0);
    check_all();
    end_range(range);
}

static bool is_buried(void)
{
    return world_stats(&world).address_bytes == 0;
}

/* With a reaper a closed range goes by itself. */
static void the_reaper_buries_what_was_closed(void **state)
{
    gp_range *range;

    begin_with(state, (struct world_options){.chunk_size = PAGE, .with_reaper = true});
    range = make_range(8, 0);
    commit(range, 0, 4, -1);
    launch(range, 0, 0, 4);
    end_range(range);
    gp__sim_complete_all(world.sim);
    for (int i = 0; i < 4000 && !is_buried(); i++) {
        gp__sim_complete_all(world.sim);
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
    CHECK(is_buried(), "the reaper left %zu bytes of addresses", world_stats(&world).address_bytes);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

static void streams_of_other_pools_are_refused(void **state)
{
    gp_range *range = make_range(8, 0), *none = NULL;
    gp_pool_options options = {
        .device = world.device, .limit = GP_NO_LIMIT, .flags = GP_POOL_NO_REAPER};
    gp_interval part = {0, PAGE};
    gp_stream *stream = NULL;
    gp_pool *pool;

    (void)state;
    CHECK_OK(gp_pool_create(&options, &pool, NULL), NULL);
    CHECK_OK(gp_pool_stream(pool, world.handle[0], &stream, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_create(world.pool, PAGE, stream, &none, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_commit(range, &part, 1, stream, NULL, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_decommit(range, &part, 1, stream, 0, NULL, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_resize(range, PAGE, stream, 0, NULL, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_record_stream(range, stream, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_record_stream(range, NULL, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_range_close(range, stream, NULL), NULL);
    CHECK_OK(gp_pool_close(pool, NULL), NULL);
    gp_stream_release(stream);
    gp_pool_release(pool);
    expect_committed(range, "");
    end_range(range);
}

/* A stream that was forgotten is no owner any more, though the range was made for it. */
static void a_forgotten_stream_is_no_owner(void **state)
{
    gp_range *range = make_range(8, 3);

    (void)state;
    commit(range, 0, 4, -1);
    launch(range, 3, 0, 4);
    CHECK_OK(gp_pool_forget_stream(world.pool, world.handle[3], NULL), NULL);
    gp__sim_stream_destroy(world.sim, world.handle[3]);
    decommit(range, 0, 2, 0, 2, 0);
    expect_committed(range, "..##");
    CHECK_STATUS(GP_ERR_ARGUMENT, try_commit(range, 0, 1, -1), NULL); /* its handle is dead */
    CHECK(strstr(world.error.message, "was forgotten") != NULL, "\"%s\"", world.error.message);
    assert_int_equal(commit(range, 0, 1, 0), 1);
    launch(range, 0, 0, 1);
    CHECK_OK(gp_range_resize(range, 0, NULL, 0, NULL, NULL), NULL); /* nothing shrinks */
    decommit(range, 0, 4, 0, 3, 0);
    end_range(range);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

/* ---- a thread's own stream ---- */

#define PER_THREAD ((uintptr_t)2)

static gp_range *make_per_thread(gp_stream **own)
{
    gp_interval part = {0, 4 * PAGE};
    gp_range *range = NULL;

    CHECK_OK(gp_pool_stream(world.pool, PER_THREAD, own, NULL), NULL);
    CHECK_OK(gp_range_create(world.pool, 8 * PAGE, *own, &range, NULL), NULL);
    CHECK_OK(gp_range_commit(range, &part, 1, NULL, NULL, &world.error), &world.error);
    gp__sim_launch(world.sim, PER_THREAD, gp_range_address(range), 4 * PAGE);
    return range;
}

/* The fence is recorded by the very call, so that any thread can wait for it. */
static void a_threads_stream_is_fenced_at_once(void **state)
{
    gp_stream *own = NULL;
    gp_range *range = make_per_thread(&own);

    (void)state;
    gp__sim_log_clear(world.sim);
    decommit(range, 0, 1, GP_TRIM_NO_WAIT, 1, 0);
    assert_int_equal(log_count("event_record"), 1);
    decommit(range, 1, 1, 0, 1, 0);
    end_range(range);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
    assert_int_equal(log_count("event_record_context"), 0);
    gp_stream_release(own);
}

static void *close_elsewhere(void *range)
{
    gp_range_release(range);
    return NULL;
}

/* Let go of by another thread, it has users that only an explicit call may wait for. */
static void a_threads_stream_is_unknown_elsewhere(void **state)
{
    gp_stream *own = NULL;
    gp_range *range = make_per_thread(&own);
    size_t released = 0;
    pthread_t thread;

    (void)state;
    CHECK(pthread_create(&thread, NULL, close_elsewhere, range) == 0, "no thread");
    pthread_join(thread, NULL);
    gp__pool_service(world.pool);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * PAGE);
    check_all();
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    assert_int_equal(released, 4 * PAGE);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    gp_stream_release(own);
}

/* ---- coming back ---- */

/* Memory that still retires is taken back by its only owner, and nobody is asked for anything. */
static void a_commit_by_the_owner_takes_it_back(void **state)
{
    gp_range *range = make_range(8, 0);
    uint64_t asked;

    (void)state;
    commit(range, 0, 4, -1);
    launch(range, 0, 0, 4);
    decommit(range, 0, 4, GP_TRIM_NO_WAIT, 4, 0);
    asked = world.alloc_calls;
    gp__sim_log_clear(world.sim);
    assert_int_equal(commit(range, 1, 2, -1), 2);
    assert_int_equal(world.alloc_calls, asked);
    CHECK(gp__sim_log_count(world.sim) ==
              log_count("stream_capturing") + log_count("enter") + log_count("leave"),
          "%zu driver calls to take memory back", gp__sim_log_count(world.sim));
    assert_int_equal(gp__sim_pending_all(world.sim), 1);
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * PAGE);
    expect_committed(range, ".##");
    end_range(range);
}

static void a_commit_by_another_stream_waits(void **state)
{
    gp_range *range = make_range(8, 0);
    uint64_t asked;

    (void)state;
    commit(range, 0, 4, -1);
    launch(range, 0, 0, 4);
    decommit(range, 0, 4, GP_TRIM_NO_WAIT, 4, 0);
    asked = world.alloc_calls;
    assert_int_equal(commit(range, 1, 2, 1), 2);
    CHECK(!busy(range, 1, 2), "handed out under pending work of another stream");
    CHECK(world_stats(&world).wait_count > 0, "nobody waited");
    assert_int_equal(world.alloc_calls, asked);
    expect_committed(range, ".##");
    end_range(range);
}

/* The rest of a cut chunk has owners too. */
static void kept_memory_waits_for_its_owners(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 8, -1);
    launch(range, 0, 2, 2);
    decommit(range, 2, 2, GP_TRIM_NO_WAIT, 0, 2);
    assert_int_equal(commit(range, 2, 1, 0), 1); /* its own stream: at once */
    CHECK(busy(range, 2, 1), "the owner waited for itself");
    assert_int_equal(commit(range, 3, 1, 1), 1);
    CHECK(!busy(range, 3, 1), "handed out under pending work");
    expect_committed(range, "########");
    end_range(range);
}

/* Two owners are both waited for, whoever asks. */
static void memory_of_two_is_nobodys_alone(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    CHECK_OK(gp_range_record_stream(range, world.stream[1], NULL), NULL);
    launch(range, 0, 0, 1);
    launch(range, 1, 1, 1);
    decommit(range, 0, 2, GP_TRIM_NO_WAIT, 2, 0);
    assert_int_equal(commit(range, 0, 2, 0), 2);
    CHECK(!gp__sim_busy(world.sim, gp_range_address(range), 2 * PAGE,
                        gp__sim_stream_id(world.sim, world.handle[0])),
          "handed out under pending work of the other owner");
    end_range(range);
}

/* A cut of a retiring chunk comes back whole; what is not wanted of it is kept, and then goes. */
static void part_of_a_retiring_chunk_is_wanted_back(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 8, -1);
    launch(range, 0, 0, 8);
    decommit(range, 0, 8, GP_TRIM_NO_WAIT, 8, 0);
    assert_int_equal(commit(range, 3, 1, -1), 1);
    assert_int_equal(world_stats(&world).free_bytes, 7 * PAGE);
    assert_int_equal(world_stats(&world).chunk_count, 1);
    expect_committed(range, "...#");
    decommit(range, 0, 8, 0, 8, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    end_range(range);
}

/* ---- unknown users ---- */

static void unknown_users_cost_one_fence(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 8, -1);
    CHECK_OK(gp_range_pin(range, 0, PAGE, true, NULL), NULL);
    launch(range, 3, 0, 1); /* a stream that the pool knows nothing of in this range */
    gp_range_unpin(range, 0, PAGE);
    gp__sim_log_clear(world.sim);
    decommit(range, 0, 1, 0, 1, 0);
    assert_int_equal(log_count("event_record_context"), 1);
    CHECK(!busy(range, 0, 1), "an unknown user was not waited for");
    for (size_t page = 1; page < 4; page++)
        decommit(range, page, 1, 0, 1, 0);
    assert_int_equal(log_count("event_record_context"), 1);
    CHECK_OK(gp_range_pin(range, 4 * PAGE, PAGE, true, NULL), NULL);
    decommit(range, 5, 1, 0, 1, 0); /* pinned elsewhere, by users who are unknown now */
    assert_int_equal(log_count("event_record_context"), 2);
    decommit(range, 6, 1, 0, 1, 0);
    assert_int_equal(log_count("event_record_context"), 3);
    gp_range_unpin(range, 4 * PAGE, PAGE);
    decommit(range, 4, 1, 0, 1, 0);
    assert_int_equal(log_count("event_record_context"), 4);
    decommit(range, 7, 1, 0, 1, 0);
    assert_int_equal(log_count("event_record_context"), 4);
    expect_committed(range, "");
    end_range(range);
}

/* Without a wait nobody may fence the context: the memory stays, says so, and goes with a trim. */
static void unknown_users_wait_for_an_explicit_call(void **state)
{
    gp_range *range = make_range(8, 0);
    size_t released = 0;

    (void)state;
    commit(range, 0, 4, -1);
    CHECK_OK(gp_range_pin(range, 0, PAGE, true, NULL), NULL);
    launch(range, 2, 0, 4);
    gp_range_unpin(range, 0, PAGE);
    gp__sim_log_clear(world.sim);
    decommit(range, 0, 4, GP_TRIM_NO_WAIT, 0, 4);
    gp__pool_service(world.pool);
    end_range(range);
    gp__pool_service(world.pool);
    assert_int_equal(log_count("event_record_context"), 0);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * PAGE);
    check_all();
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, 4 * PAGE);
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

/* A commit over memory that unknown users may still touch waits for them: the addresses are
 * given. */
static void a_commit_waits_for_unknown_users(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    CHECK_OK(gp_range_pin(range, 0, PAGE, true, NULL), NULL);
    launch(range, 2, 0, 2);
    gp_range_unpin(range, 0, PAGE);
    decommit(range, 0, 2, GP_TRIM_NO_WAIT, 0, 2);
    assert_int_equal(commit(range, 0, 2, -1), 2);
    CHECK(!busy(range, 0, 2), "handed out under an unknown user's work");
    expect_committed(range, "##");
    end_range(range);
}

static void known_users_cost_no_wide_fence(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 4, -1);
    CHECK_OK(gp_range_pin(range, 0, PAGE, false, NULL), NULL);
    gp_range_unpin(range, 0, PAGE);
    launch(range, 0, 0, 4);
    gp__sim_log_clear(world.sim);
    decommit(range, 0, 4, 0, 4, 0);
    assert_int_equal(log_count("event_record_context"), 0);
    assert_int_equal(log_count("event_record"), 1);
    end_range(range);
}

/* ---- captures ---- */

static void an_owner_that_captures_forbids_a_decommit(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result = {7, 7};
    gp_interval part = {0, 2 * PAGE};

    (void)state;
    CHECK_OK(gp_range_resize(range, 4 * PAGE, NULL, 0, NULL, NULL), NULL);
    CHECK_OK(gp_range_record_stream(range, world.stream[1], NULL), NULL);
    gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_GLOBAL);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_range_decommit(range, &part, 1, NULL, 0, &result, &world.error),
                 NULL);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_range_resize(range, PAGE, NULL, 0, &result, &world.error),
                 NULL);
    assert_int_equal(result.released_bytes, 7);
    assert_int_equal(gp_range_size(range), 4 * PAGE);
    expect_committed(range, "####");
    assert_int_equal(world_stats(&world).retiring_bytes, 0);
    assert_int_equal(commit(range, 6, 1, -1), 1); /* growing is allowed */
    decommit(range, 6, 1, GP_TRIM_NO_WAIT, 1, 0); /* and so is not to wait */
    CHECK_STATUS(GP_ERR_CAPTURE, try_commit(range, 6, 1, -1), NULL);
    CHECK_OK(gp_range_close(range, NULL, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_pool_drain(world.pool, &world.error), NULL);
    CHECK(gp__sim_capture_end(world.sim, world.handle[1]), "the capture was invalidated");
    gp_range_release(range);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

/* A stream that captures may commit new memory, but not take back what others, or itself, just
 * left. */
static void a_capturing_stream_takes_only_what_passed(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    launch(range, 0, 0, 2);
    decommit(range, 0, 2, GP_TRIM_NO_WAIT, 2, 0);
    gp__sim_capture_begin(world.sim, world.handle[1], GP__SIM_CAPTURE_THREAD_LOCAL);
    assert_int_equal(commit(range, 4, 1, 1), 1);
    assert_int_equal(commit(range, 0, 1, 1), 1); /* waits for stream 0, which does not capture */
    CHECK(!busy(range, 0, 1), "handed to a capture under pending work");
    CHECK(gp__sim_capture_end(world.sim, world.handle[1]), "the capture was invalidated");
    gp__sim_capture_begin(world.sim, world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    CHECK_STATUS(GP_ERR_CAPTURE, try_decommit(range, 4, 1, -1, 0), NULL);
    CHECK(gp__sim_capture_end(world.sim, world.handle[0]), "the capture was invalidated");
    expect_committed(range, "#...#");
    end_range(range);
}

/* ---- interrupted waits ---- */

struct knob {
    int left; /* questions until the answer is "stop" */
    bool complete; /* instead of stopping, work completes then */
};

static struct knob knob;

static int interrupt(void *context)
{
    (void)context;
    if (knob.left == 0 || --knob.left > 0)
        return 0;
    if (!knob.complete)
        return 1;
    gp__sim_complete_all(world.sim);
    return 0;
}

static int set_up_interruptible(void **state)
{
    knob = (struct knob){0, false};
    begin_with(state, (struct world_options){.chunk_size = PAGE, .interrupted = interrupt});
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    return 0;
}

static void an_interrupted_decommit_is_done_and_goes_later(void **state)
{
    gp_range *range = make_range(8, 0);
    gp_release_result result = {7, 7};

    (void)state;
    CHECK_OK(gp_range_resize(range, 4 * PAGE, NULL, 0, NULL, NULL), NULL);
    launch(range, 0, 0, 4);
    knob.left = 3;
    CHECK_STATUS(GP_ERR_INTERRUPTED, gp_range_resize(range, PAGE, NULL, 0, &result, &world.error),
                 NULL);
    assert_int_equal(result.released_bytes, 7);
    assert_int_equal(gp_range_size(range), PAGE);
    expect_committed(range, "#");
    assert_int_equal(world_stats(&world).retiring_bytes, 3 * PAGE);
    knob = (struct knob){3, true};
    drain();
    assert_int_equal(world_stats(&world).retiring_bytes, 0);
    assert_int_equal(gp_range_physical_bytes(range), PAGE);
    end_range(range);
}

static void an_interrupted_commit_changes_nothing(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    launch(range, 0, 0, 2);
    decommit(range, 0, 2, GP_TRIM_NO_WAIT, 2, 0);
    knob.left = 2;
    CHECK_STATUS(GP_ERR_INTERRUPTED, try_commit(range, 0, 3, 1), NULL);
    expect_committed(range, "");
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * PAGE);
    knob = (struct knob){2, true};
    assert_int_equal(commit(range, 0, 3, 1), 3);
    expect_committed(range, "###");
    end_range(range);
}

#define TEST(name)           cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_PLANNED(name)   cmocka_unit_test_setup_teardown(name, set_up_planned, tear_down)
#define TEST_INTERRUPT(name) cmocka_unit_test_setup_teardown(name, set_up_interruptible, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_decommit_waits_for_every_owner),
        TEST(the_named_stream_is_waited_for),
        TEST(a_release_waits_for_nobody_and_loses_nothing),
        TEST(without_waiting_memory_goes_when_it_passed),
        cmocka_unit_test_setup_teardown(the_reaper_buries_what_was_closed, NULL, tear_down),
        TEST(streams_of_other_pools_are_refused),
        TEST(a_forgotten_stream_is_no_owner),
        TEST(a_threads_stream_is_fenced_at_once),
        TEST(a_threads_stream_is_unknown_elsewhere),
        TEST(a_commit_by_the_owner_takes_it_back),
        TEST(a_commit_by_another_stream_waits),
        TEST_PLANNED(kept_memory_waits_for_its_owners),
        TEST(memory_of_two_is_nobodys_alone),
        TEST_PLANNED(part_of_a_retiring_chunk_is_wanted_back),
        TEST(unknown_users_cost_one_fence),
        TEST(unknown_users_wait_for_an_explicit_call),
        TEST(a_commit_waits_for_unknown_users),
        TEST(known_users_cost_no_wide_fence),
        TEST(an_owner_that_captures_forbids_a_decommit),
        TEST(a_capturing_stream_takes_only_what_passed),
        TEST_INTERRUPT(an_interrupted_decommit_is_done_and_goes_later),
        TEST_INTERRUPT(an_interrupted_commit_changes_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
