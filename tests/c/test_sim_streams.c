/* SPDX-License-Identifier: Apache-2.0
 *
 * Illegal calls on streams, events and captures, in a forked child or under a lock: each must reach
 * the simulated driver's violation hook (or the lock witness) with the right words.
 */
#include "tests/support/sim_fixture.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backing/lock.h"

static void record_on_a_destroyed_stream(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    bool capturing;

    gp__sim_stream_destroy(f->sim, e.stream);
    expect_refusal(f, f->driver->event_record(f->device, e.event, &e.key, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed stream");
    CHECK_STATUS(GP_ERR_DRIVER, f->driver->stream_capturing(f->device, &e.key, &capturing, NULL),
                 NULL);
    expect_violation(f, "a destroyed stream");
    CHECK_STATUS(GP_ERR_ARGUMENT, f->driver->stream_resolve(f->device, e.stream, &e.key, NULL),
                 NULL);
    expect_violation(f, "a destroyed stream");
    end_events(f, &e);
}

static void record_on_a_reused_handle(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct gp__stream_key next;

    CHECK_OK(f->driver->stream_confirm(f->device, &e.key), NULL);
    gp__sim_stream_destroy(f->sim, e.stream);
    CHECK_STATUS(GP_NOT_READY, f->driver->stream_confirm(f->device, &e.key), NULL);
    expect_violation(f, "a destroyed stream");
    assert_int_equal(gp__sim_stream_create(f->sim, 0), e.stream);
    CHECK_STATUS(GP_NOT_READY, f->driver->stream_confirm(f->device, &e.key), NULL);
    CHECK_OK(f->driver->stream_resolve(f->device, e.stream, &next, NULL), NULL);
    assert_int_not_equal(next.id, e.key.id);
    f->driver->event_record(f->device, e.event, &e.key, NULL);
    expect_violation(f, "the handle names stream id");
    end_events(f, &e);
}

static void destroy_a_stream_twice(void **state)
{
    struct fixture *f = *state;
    uintptr_t stream = gp__sim_stream_create(f->sim, 0);

    gp__sim_stream_destroy(f->sim, stream);
    expect_none(f);
    gp__sim_stream_destroy(f->sim, stream);
    expect_violation(f, "destroyed already");
}

static void launch_on_a_destroyed_stream(void **state)
{
    struct fixture *f = *state;
    uintptr_t stream = gp__sim_stream_create(f->sim, 0);

    gp__sim_stream_destroy(f->sim, stream);
    gp__sim_launch(f->sim, stream, f->va, 512);
    expect_violation(f, "a destroyed stream");
}

static void record_in_a_capturing_stream(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    expect_violation(f, "a stream that captures");
    expect_refusal(f, f->driver->event_query(f->device, e.event, &f->error),
                   "CUDA_ERROR_CAPTURED_EVENT");
    expect_violation(f, "recorded into a capture");
    gp__sim_capture_end(f->sim, e.stream);
    end_events(f, &e);
}

static void query_outside_relaxed_mode_beside_a_capture(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);

    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    f->driver->leave(f->device, &e.entry);
    gp__sim_capture_begin(f->sim, other, GP__SIM_CAPTURE_GLOBAL);
    expect_refusal(f, f->driver->event_query(f->device, e.event, &f->error),
                   "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    expect_violation(f, "invalidates a capture");
    assert_false(gp__sim_capture_end(f->sim, other));
    gp__sim_capture_begin(f->sim, other, GP__SIM_CAPTURE_THREAD_LOCAL);
    expect_refusal(f, f->driver->event_wait(f->device, e.event, 1, &f->error),
                   "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    expect_violation(f, "invalidates a capture");
    assert_false(gp__sim_capture_end(f->sim, other));
    CHECK_OK(f->driver->enter(f->device, &e.entry, NULL), NULL);
    end_events(f, &e);
}

static void record_outside_enter(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    f->driver->leave(f->device, &e.entry);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    expect_violation(f, "outside enter()");
    gp__sim_complete_all(f->sim);
    CHECK_OK(f->driver->event_query(f->device, e.event, NULL), NULL);
    expect_violation(f, "outside enter()");
    CHECK_OK(f->driver->enter(f->device, &e.entry, NULL), NULL);
    end_events(f, &e);
}

static void context_record_invalidates_any_capture(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
    expect_refusal(f, f->driver->event_record_context(f->device, e.event, &f->error),
                   "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    expect_violation(f, "invalidates a capture of the context");
    assert_false(gp__sim_capture_end(f->sim, e.stream));
    end_events(f, &e);
}

static void legacy_record_beside_a_blocking_capture(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, GP__SIM_STREAM_BLOCKING);
    struct gp__stream_key legacy;
    bool capturing = false;

    CHECK_OK(f->driver->stream_resolve(f->device, 1, &legacy, NULL), NULL);
    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
    /* Asking is safe and says so; recording kills the capture even in relaxed mode. */
    CHECK_OK(f->driver->stream_capturing(f->device, &legacy, &capturing, NULL), NULL);
    assert_true(capturing);
    expect_none(f);
    expect_refusal(f, f->driver->event_record(f->device, e.event, &legacy, &f->error),
                   "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT");
    expect_violation(f, "beside a blocking stream that captures");
    assert_false(gp__sim_capture_end(f->sim, e.stream));
    end_events(f, &e);
}

static void destroy_an_event_twice(void **state)
{
    struct fixture *f = *state;
    gp__event *event;

    CHECK_OK(f->driver->event_create(f->device, f->device->context, &event, NULL), NULL);
    f->driver->event_destroy(f->device, event);
    expect_none(f);
    f->driver->event_destroy(f->device, event);
    expect_violation(f, "a destroyed event");
}

static void query_a_destroyed_event(void **state)
{
    struct fixture *f = *state;
    struct gp__entry entry;
    gp__event *event;

    CHECK_OK(f->driver->event_create(f->device, f->device->context, &event, NULL), NULL);
    CHECK_OK(f->driver->enter(f->device, &entry, NULL), NULL);
    f->driver->event_destroy(f->device, event);
    expect_refusal(f, f->driver->event_query(f->device, event, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed event");
    f->driver->leave(f->device, &entry);
    expect_none(f);
}

static void leave_without_enter(void **state)
{
    struct fixture *f = *state;
    struct gp__entry outer, inner;

    CHECK_OK(f->driver->enter(f->device, &outer, NULL), NULL);
    CHECK_OK(f->driver->enter(f->device, &inner, NULL), NULL);
    f->driver->leave(f->device, &outer);
    expect_violation(f, "does not match the latest enter");
    f->driver->leave(f->device, &inner);
    f->driver->leave(f->device, &outer);
    expect_none(f);
    f->driver->leave(f->device, &outer);
    expect_violation(f, "does not match the latest enter");
}

struct other_thread {
    struct fixture *f;
    struct gp__stream_key key;
};

static void *resolve_elsewhere(void *context)
{
    struct other_thread *other = context;

    other->f->driver->stream_resolve(other->f->device, 2, &other->key, NULL);
    return NULL;
}

static void record_on_another_threads_stream(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct other_thread other = {.f = f};
    struct gp__stream_key mine;
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, resolve_elsewhere, &other), 0);
    pthread_join(thread, NULL);
    CHECK_OK(f->driver->stream_resolve(f->device, 2, &mine, NULL), NULL);
    assert_true(mine.thread_bound && other.key.thread_bound);
    assert_int_not_equal(mine.id, other.key.id);
    CHECK_OK(f->driver->event_record(f->device, e.event, &mine, NULL), NULL);
    expect_none(f);
    f->driver->event_record(f->device, e.event, &other.key, NULL);
    expect_violation(f, "bound to another thread");
    end_events(f, &e);
}

/* A child that calls the driver must be told off; it reports through its exit status. */
static void any_call_in_a_forked_child(void **state)
{
    struct fixture *f = *state;
    pid_t child = fork();
    int status = 0;

    if (child == 0) {
        size_t free_bytes, total_bytes;
        gp_status got = f->driver->memory_info(f->device, &free_bytes, &total_bytes, &f->error);

        _exit(got == GP_ERR_DRIVER && f->reported == 1 && strstr(f->text, "forked child") != NULL
                  ? 77
                  : 1);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 77);
}

static void default_handler_prints_and_aborts(void **state)
{
    struct fixture *f = *state;
    int ends[2], status = 0;
    char text[4096] = "";
    size_t got = 0;
    ssize_t part;
    pid_t child;

    gp__sim_on_violation(f->sim, NULL, NULL);
    assert_int_equal(pipe(ends), 0);
    child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        gp__sim_launch(f->sim, 0, 512, 512);
        _exit(1);
    }
    close(ends[1]);
    while ((part = read(ends[0], text + got, sizeof text - 1 - got)) > 0)
        got += (size_t)part;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(text, "VIOLATION"));
    assert_non_null(strstr(text, "forked child"));
    assert_non_null(strstr(text, "set_access va=")); /* the calls that led there */
}

static unsigned witnessed;

static void note_witness(const char *message)
{
    (void)message;
    witnessed++;
}

static void blocking_call_under_a_lock(void **state)
{
    struct fixture *f = *state;
    struct gp__mutex mutex;
    size_t free_bytes, total_bytes;
    struct gp__stream_key key;
    bool capturing;

    witnessed = 0;
    gp__mutex_init(&mutex, GP__RANK_POOL);
    gp__witness_set_handler(note_witness);
    gp__mutex_lock(&mutex);
    CHECK_OK(f->driver->stream_resolve(f->device, 0, &key, NULL), NULL);
    CHECK_OK(f->driver->stream_capturing(f->device, &key, &capturing, NULL), NULL);
    assert_int_equal(witnessed, 0);
    CHECK_OK(f->driver->memory_info(f->device, &free_bytes, &total_bytes, NULL), NULL);
    assert_int_equal(witnessed, 1);
    gp__mutex_unlock(&mutex);
    gp__witness_set_handler(NULL);
    gp__mutex_destroy(&mutex);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(record_on_a_destroyed_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(record_on_a_reused_handle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(destroy_a_stream_twice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(launch_on_a_destroyed_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(record_in_a_capturing_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(query_outside_relaxed_mode_beside_a_capture, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(record_outside_enter, set_up, tear_down),
        cmocka_unit_test_setup_teardown(context_record_invalidates_any_capture, set_up, tear_down),
        cmocka_unit_test_setup_teardown(legacy_record_beside_a_blocking_capture, set_up, tear_down),
        cmocka_unit_test_setup_teardown(destroy_an_event_twice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(query_a_destroyed_event, set_up, tear_down),
        cmocka_unit_test_setup_teardown(leave_without_enter, set_up, tear_down),
        cmocka_unit_test_setup_teardown(record_on_another_threads_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(any_call_in_a_forked_child, set_up, tear_down),
        cmocka_unit_test_setup_teardown(default_handler_prints_and_aborts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(blocking_call_under_a_lock, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
