/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's copies, fills and waits inside streams: what they must allow, that each
 * illegal use reaches the violation hook with the right words, and that each new call can fail.
 */
#include "tests/support/sim_fixture.h"

#define HOST_ADDRESS ((uintptr_t)0x1000)

/* ---- copies and fills ------------------------------------------------------------------------------ */

static void copies_and_fills_are_pending_work(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    CHECK_OK(f->driver->copy(f->device, f->va, f->va + 4096, 512, &e.key, NULL), NULL);
    fill(f, f->va + 8192, 512, &e.key);
    assert_int_equal(gp__sim_pending(f->sim, e.stream), 2);
    assert_true(gp__sim_busy(f->sim, f->va + 511, 1, 0));
    assert_false(gp__sim_busy(f->sim, f->va + 512, 512, 0));
    assert_true(gp__sim_busy(f->sim, f->va + 4096, 1, 0));
    assert_true(gp__sim_busy(f->sim, f->va + 8192, 1, 0));
    assert_false(gp__sim_busy(f->sim, f->va, PAGE, e.key.id));
    assert_int_equal(gp__sim_complete(f->sim, e.stream, 1), 1);
    assert_false(gp__sim_busy(f->sim, f->va, 8192, 0));
    assert_int_equal(gp__sim_complete(f->sim, e.stream, 5), 1);
    CHECK_OK(f->driver->copy(f->device, f->va, f->va, 0, &e.key, NULL), NULL);
    CHECK_OK(f->driver->fill(f->device, 0, 0, 0, &e.key, NULL), NULL);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    end_events(f, &e);
}

static void host_addresses_are_not_looked_at(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    CHECK_OK(f->driver->copy(f->device, f->va, HOST_ADDRESS, 512, &e.key, NULL), NULL);
    CHECK_OK(f->driver->copy(f->device, HOST_ADDRESS, f->va + 4096, 512, &e.key, NULL), NULL);
    assert_true(gp__sim_busy(f->sim, f->va, 512, 0));
    assert_true(gp__sim_busy(f->sim, f->va + 4096, 512, 0));
    assert_false(gp__sim_busy(f->sim, HOST_ADDRESS, 512, 0));
    gp__sim_complete_all(f->sim);
    end_events(f, &e);
}

static void copies_of_unmapped_addresses(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    expect_refusal(f, f->driver->copy(f->device, f->va + PAGE, f->va, 64, &e.key, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "is not mapped with access");
    expect_refusal(f, f->driver->copy(f->device, f->va, f->va + PAGE, 64, &e.key, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "is not mapped with access");
    expect_refusal(f, f->driver->fill(f->device, f->va + PAGE - 64, 128, 0, &e.key, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "is not mapped with access");
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    end_events(f, &e);
}

static void unmap_under_a_copy(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    CHECK_OK(f->driver->copy(f->device, HOST_ADDRESS, f->va, 64, &e.key, NULL), NULL);
    f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL);
    expect_violation(f, "under pending work");
    gp__sim_complete_all(f->sim);
    expect_violation(f, "unmapped since");
    end_events(f, &e);
}

static void work_goes_by_the_handle(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);

    gp__sim_stream_destroy(f->sim, e.stream);
    expect_refusal(f, f->driver->fill(f->device, f->va, 64, 0, &e.key, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed stream");
    expect_refusal(f, f->driver->stream_wait(f->device, &e.key, e.event, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed stream");
    assert_int_equal(gp__sim_stream_create(f->sim, 0), e.stream);
    CHECK_STATUS(GP_ERR_ARGUMENT, f->driver->fill(f->device, f->va, 64, 0, &e.key, NULL), NULL);
    expect_violation(f, "the handle names stream id");
    e.key = resolve(f, other);
    fill(f, f->va, 64, &e.key);
    gp__sim_complete_all(f->sim);
    end_events(f, &e);
}

static void work_outside_enter(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uint64_t id;

    f->driver->leave(f->device, &e.entry);
    f->driver->copy(f->device, f->va, f->va, 64, &e.key, NULL);
    expect_violation(f, "outside enter()");
    f->driver->fill(f->device, f->va, 64, 0, &e.key, NULL);
    expect_violation(f, "outside enter()");
    f->driver->stream_wait(f->device, &e.key, e.event, NULL);
    expect_violation(f, "outside enter()");
    f->driver->capture_id(f->device, &e.key, &id, NULL);
    expect_violation(f, "outside enter()");
    f->driver->capture_keep(f->device, &e.key, note_gone, NULL, NULL);
    expect_violation(f, "outside enter()");
    gp__sim_complete_all(f->sim);
    CHECK_OK(f->driver->enter(f->device, &e.entry, NULL), NULL);
    end_events(f, &e);
}

static void work_beside_a_blocking_capture(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, GP__SIM_STREAM_BLOCKING);
    struct gp__stream_key legacy = resolve(f, 0);

    for (int i = 0; i < 3; i++) {
        gp_status got;

        gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
        assert_int_equal(capture_id(f, &legacy), 0); /* safe, and part of nothing */
        expect_none(f);
        if (i == 0)
            got = f->driver->copy(f->device, f->va, f->va, 64, &legacy, &f->error);
        else if (i == 1)
            got = f->driver->fill(f->device, f->va, 64, 0, &legacy, &f->error);
        else
            got = f->driver->stream_wait(f->device, &legacy, e.event, &f->error);
        expect_capture_refusal(f, got, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT");
        expect_violation(f, "beside a blocking stream that captures");
        assert_false(gp__sim_capture_end(f->sim, e.stream));
    }
    end_events(f, &e);
}

/* ---- waits inside streams ------------------------------------------------------------------------ */

static void a_wait_holds_the_stream_back(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);
    struct gp__stream_key key = resolve(f, other);

    fill(f, f->va, 64, &e.key);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    CHECK_OK(f->driver->stream_wait(f->device, &key, e.event, NULL), NULL);
    fill(f, f->va + 4096, 64, &key);
    assert_int_equal(gp__sim_complete(f->sim, other, 9), 0);
    assert_int_equal(gp__sim_complete(f->sim, e.stream, 1), 1);
    assert_int_equal(gp__sim_complete(f->sim, other, 9), 0);
    /* Neither a later record nor the end of the event lets it go earlier. */
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    f->driver->event_destroy(f->device, e.event);
    assert_int_equal(gp__sim_complete(f->sim, other, 9), 0);
    assert_int_equal(gp__sim_complete(f->sim, e.stream, 1), 1);
    assert_int_equal(gp__sim_complete(f->sim, other, 9), 2);
    CHECK_OK(f->driver->event_create(f->device, f->device->context, &e.event, NULL), NULL);
    CHECK_OK(f->driver->stream_wait(f->device, &key, e.event, NULL), NULL); /* never recorded */
    assert_int_equal(gp__sim_complete(f->sim, other, 9), 1);
    end_events(f, &e);
}

/* Growpool waits for c, which waits for b, which waits for a. */
static void a_wait_for_an_event_runs_what_its_stream_waits_for(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct gp__stream_key keys[3];
    gp__event *events[3];

    for (int i = 0; i < 3; i++) {
        keys[i] = resolve(f, gp__sim_stream_create(f->sim, 0));
        CHECK_OK(f->driver->event_create(f->device, f->device->context, &events[i], NULL), NULL);
        if (i > 0)
            CHECK_OK(f->driver->stream_wait(f->device, &keys[i], events[i - 1], NULL), NULL);
        fill(f, f->va + (uintptr_t)i * 4096, 64, &keys[i]);
        CHECK_OK(f->driver->event_record(f->device, events[i], &keys[i], NULL), NULL);
        fill(f, f->va + (uintptr_t)i * 4096, 64, &keys[i]);
    }
    CHECK_STATUS(GP_NOT_READY, f->driver->event_query(f->device, events[2], NULL), NULL);
    CHECK_OK(f->driver->event_wait(f->device, events[2], 1, NULL), NULL);
    assert_int_equal(gp__sim_pending_all(f->sim), 3); /* just far enough, on each of them */
    CHECK_OK(f->driver->stream_wait(f->device, &keys[0], events[2], NULL), NULL);
    gp__sim_complete_all(f->sim);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    for (int i = 0; i < 3; i++)
        f->driver->event_destroy(f->device, events[i]);
    end_events(f, &e);
}

static void complete_all_follows_the_waits(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);
    struct gp__stream_key key = resolve(f, other);

    for (int i = 0; i < 4; i++) { /* to and fro */
        const struct gp__stream_key *from = i % 2 == 0 ? &e.key : &key;

        fill(f, f->va, 64, from);
        CHECK_OK(f->driver->event_record(f->device, e.event, from, NULL), NULL);
        CHECK_OK(f->driver->stream_wait(f->device, from == &key ? &e.key : &key, e.event, NULL),
                 NULL);
    }
    gp__sim_complete_all(f->sim);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    end_events(f, &e);
}

static void a_capturing_stream_cannot_wait(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);
    struct gp__stream_key key = resolve(f, other);

    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    gp__sim_capture_begin(f->sim, other, GP__SIM_CAPTURE_RELAXED);
    expect_capture_refusal(f, f->driver->stream_wait(f->device, &key, e.event, &f->error),
                           "CUDA_ERROR_STREAM_CAPTURE_ISOLATION");
    expect_violation(f, "a stream that captures");
    assert_false(gp__sim_capture_end(f->sim, other));
    gp__sim_complete_all(f->sim);
    end_events(f, &e);
}

static void no_stream_waits_for_a_captured_event(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct gp__stream_key other = resolve(f, gp__sim_stream_create(f->sim, 0));

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
    f->driver->event_record(f->device, e.event, &e.key, NULL);
    expect_violation(f, "a stream that captures");
    expect_capture_refusal(f, f->driver->stream_wait(f->device, &other, e.event, &f->error),
                           "CUDA_ERROR_CAPTURED_EVENT");
    expect_violation(f, "recorded into a capture");
    gp__sim_capture_end(f->sim, e.stream);
    f->driver->event_destroy(f->device, e.event);
    expect_refusal(f, f->driver->stream_wait(f->device, &other, e.event, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed event");
    f->driver->leave(f->device, &e.entry);
    expect_none(f);
}

static void a_dead_context_takes_no_work(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0};

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
    keep(f, &e.key, &told);
    gp__sim_kill_context(f->sim);
    assert_int_equal(told.count, 1);
    assert_int_equal(capture_id(f, &e.key), 0);
    CHECK_OK(f->driver->stream_wait(f->device, &e.key, e.event, NULL), NULL);
    expect_refusal(f, f->driver->fill(f->device, f->va, 64, 0, &e.key, &f->error),
                   "CUDA_ERROR_ILLEGAL_ADDRESS");
    expect_refusal(f, f->driver->copy(f->device, f->va, f->va, 64, &e.key, &f->error),
                   "CUDA_ERROR_ILLEGAL_ADDRESS");
    CHECK_STATUS(GP_ERR_CAPTURE,
                 f->driver->capture_keep(f->device, &e.key, note_gone, &told, &f->error), NULL);
    end_events(f, &e);
}

/* ---- faults and the log ----------------------------------------------------------------------------- */

static void each_of_the_five_can_fail(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    static const char *const names[] = {"copy", "fill", "stream_wait", "capture_id",
                                        "capture_keep"};
    struct told told = {.count = 0};
    uint64_t id = 99;

    for (size_t i = 0; i < 5; i++) {
        gp_status got = GP_OK;

        gp__sim_fail_at(f->sim, 1, false);
        if (i == 0)
            got = f->driver->copy(f->device, f->va, f->va, 64, &e.key, &f->error);
        if (i == 1)
            got = f->driver->fill(f->device, f->va, 64, 0, &e.key, &f->error);
        if (i == 2)
            got = f->driver->stream_wait(f->device, &e.key, e.event, &f->error);
        if (i == 3)
            got = f->driver->capture_id(f->device, &e.key, &id, &f->error);
        if (i == 4)
            got = f->driver->capture_keep(f->device, &e.key, note_gone, &told, &f->error);
        CHECK_STATUS(GP_ERR_DRIVER, got, &f->error);
        assert_string_equal(gp__sim_fault_name(f->sim), names[i]);
        assert_string_equal(f->error.call, names[i]);
        assert_int_equal(gp__sim_fault_calls(f->sim), 1);
    }
    assert_int_equal(id, 99);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    assert_int_equal(keep_count(f), 0);
    end_events(f, &e);
    assert_int_equal(told.count, 0);
}

static void the_log_names_the_addresses(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    char want[160];

    gp__sim_log_clear(f->sim);
    CHECK_OK(f->driver->copy(f->device, f->va, f->va + 64, 32, &e.key, NULL), NULL);
    snprintf(want, sizeof want, "copy handle=0x%zx va=0x%zx from=0x%zx bytes=32 -> ok",
             (size_t)e.stream, (size_t)f->va, (size_t)f->va + 64);
    assert_string_equal(gp__sim_log_line(f->sim, 0), want);
    gp__sim_complete_all(f->sim);
    end_events(f, &e);
}

static unsigned witnessed;

static void note_witness(const char *message)
{
    (void)message;
    witnessed++;
}

/* capture_id never blocks; the others may. */
static void only_capture_id_may_run_under_a_lock(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.sim = f->sim};
    struct gp__mutex mutex;

    witnessed = 0;
    gp__mutex_init(&mutex, GP__RANK_POOL);
    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_RELAXED);
    gp__witness_set_handler(note_witness);
    gp__mutex_lock(&mutex);
    assert_int_not_equal(capture_id(f, &e.key), 0);
    assert_int_equal(witnessed, 0);
    f->driver->copy(f->device, f->va, f->va, 64, &e.key, NULL);
    assert_int_equal(witnessed, 1);
    f->driver->fill(f->device, f->va, 64, 0, &e.key, NULL);
    assert_int_equal(witnessed, 2);
    f->driver->capture_keep(f->device, &e.key, note_gone, &told, NULL);
    assert_int_equal(witnessed, 3);
    gp__mutex_unlock(&mutex);
    assert_true(gp__sim_capture_end(f->sim, e.stream));
    gp__mutex_lock(&mutex);
    CHECK_OK(f->driver->stream_wait(f->device, &e.key, e.event, NULL), NULL);
    assert_int_equal(witnessed, 4);
    gp__mutex_unlock(&mutex);
    gp__witness_set_handler(NULL);
    gp__mutex_destroy(&mutex);
    gp__sim_complete_all(f->sim);
    end_events(f, &e);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(copies_and_fills_are_pending_work),
        TEST(host_addresses_are_not_looked_at),
        TEST(copies_of_unmapped_addresses),
        TEST(unmap_under_a_copy),
        TEST(work_goes_by_the_handle),
        TEST(work_outside_enter),
        TEST(work_beside_a_blocking_capture),
        TEST(a_wait_holds_the_stream_back),
        TEST(a_wait_for_an_event_runs_what_its_stream_waits_for),
        TEST(complete_all_follows_the_waits),
        TEST(a_capturing_stream_cannot_wait),
        TEST(no_stream_waits_for_a_captured_event),
        TEST(a_dead_context_takes_no_work),
        TEST(each_of_the_five_can_fail),
        TEST(the_log_names_the_addresses),
        TEST(only_capture_id_may_run_under_a_lock),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
