/* SPDX-License-Identifier: Apache-2.0
 *
 * backing/cuda_time.c and cuda_stream.c against a stand-in for the driver: who a stream is, captures,
 * what fences say when a context has died, and that a thread's context and capture mode come back.
 */
#include "tests/support/cuda_case.h"

#include <pthread.h>
#include <time.h>

#include "backing/cuda_abi.h"
#include "backing/cuda_stream.h"
#include "backing/memory.h"

#define PAGE ((size_t)2 << 20)

static struct gp__stream_key resolve(gp_device *device, uintptr_t handle)
{
    struct gp__stream_key key;
    gp_error error;
    CHECK_OK(device->driver->stream_resolve(device, handle, &key, &error), &error);
    return key;
}

static uintptr_t make_stream(gp_device *device)
{
    uintptr_t handle = 0;
    gp_error error;
    CHECK_OK(gp_cuda_stream_create(device, 0, &handle, &error), &error);
    return handle;
}

static gp__event *make_event(gp_device *device)
{
    gp__event *event = NULL;
    gp_error error;
    CHECK_OK(device->driver->event_create(device, device->context, &event, &error), &error);
    return event;
}

static void expect_contexts_balanced(void)
{
    assert_int_equal(fake_calls("cuCtxPushCurrent"), fake_calls("cuCtxPopCurrent"));
}

/* ---- who a stream is --------------------------------------------------------------------------- */

static void zero_and_one_are_one_stream(void **state)
{
    gp_device *device = open_device(0);
    unsigned long before = fake_calls(NULL);
    struct gp__stream_key zero = resolve(device, 0);
    struct gp__stream_key one = resolve(device, 1);
    (void)state;
    assert_int_equal(fake_calls(NULL), before); /* known since the device was opened */
    assert_int_equal(zero.handle, 0);
    assert_int_equal(one.handle, 0);
    assert_int_equal(zero.id, 7);
    assert_int_equal(zero.id, one.id);
    assert_int_equal(zero.context, device->context);
    assert_false(zero.thread_bound);
    assert_false(zero.always_passed);
}

/* Opening must not ask the legacy stream for its id while a capture makes it answer with errors. */
static void legacy_id_while_another_library_captures(void **state)
{
    gp_device *device = open_device(0);
    (void)state;
    assert_int_equal(fake_calls("cuStreamGetId"), 0);
    assert_true(resolve(device, 0).id == UINT64_MAX);
    expect_contexts_balanced();
}

static void *resolve_on_thread(void *context)
{
    gp_device *device = context;
    static struct gp__stream_key key;
    key = resolve(device, 2);
    return &key;
}

static void per_thread_stream_is_bound(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key mine = resolve(device, 2), again = resolve(device, 2);
    gp__event *event = make_event(device);
    gp_error error;
    pthread_t thread;
    void *result;
    bool capturing = false;
    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, resolve_on_thread, device), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    struct gp__stream_key theirs = *(struct gp__stream_key *)result;
    assert_true(mine.thread_bound && theirs.thread_bound);
    assert_int_equal(mine.id, again.id);
    assert_true(mine.id != theirs.id);
    CHECK_OK(device->driver->event_record(device, event, &mine, &error), &error);
    /* The other thread's stream cannot be reached from here: a fence on ours would say nothing. */
    CHECK_STATUS(GP_ERR_ARGUMENT, device->driver->event_record(device, event, &theirs, &error),
                 &error);
    expect_text(error.message, "its own thread");
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 device->driver->stream_capturing(device, &theirs, &capturing, &error), &error);
    device->driver->event_destroy(device, event);
    expect_contexts_balanced();
}

static void stream_of_another_device_is_refused(void **state)
{
    gp_device *device = open_device(0), *other = open_device(1);
    uintptr_t stream = make_stream(other);
    struct gp__stream_key key;
    gp_error error;
    (void)state;
    assert_int_equal(resolve(other, stream).context, other->context);
    CHECK_STATUS(GP_ERR_ARGUMENT, device->driver->stream_resolve(device, stream, &key, &error),
                 &error);
    expect_text(error.message, "belongs to another device");
    CHECK_OK(gp_cuda_stream_destroy(other, stream, &error), &error);
    expect_contexts_balanced();
}

static void junk_stream_is_refused(void **state)
{
    gp_device *device = open_device(0);
    uintptr_t stream = make_stream(device);
    struct gp__stream_key key = {.handle = 99};
    gp_error error;
    (void)state;
    fake_set("cuStreamGetCtx", GP__CUDA_ERROR_INVALID_HANDLE);
    CHECK_STATUS(GP_ERR_ARGUMENT, device->driver->stream_resolve(device, stream, &key, &error),
                 &error);
    expect_driver_error(&error, "cuStreamGetCtx", 400, "CUDA_ERROR_INVALID_HANDLE");
    fake_set("cuStreamGetCtx", GP__CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_STATUS(GP_ERR_DRIVER, device->driver->stream_resolve(device, stream, &key, &error),
                 &error);
    fake_set("cuStreamGetCtx", 0);
    fake_set("cuStreamGetId", GP__CUDA_ERROR_INVALID_VALUE);
    CHECK_STATUS(GP_ERR_ARGUMENT, device->driver->stream_resolve(device, stream, &key, &error),
                 &error);
    assert_int_equal(key.handle, 99);
    CHECK_OK(gp_cuda_stream_destroy(device, stream, NULL), NULL);
}

/* The driver gave the handle of a destroyed stream to a new one. */
static void reused_handle_is_not_fenced(void **state)
{
    gp_device *device = open_device(0);
    uintptr_t stream = make_stream(device);
    struct gp__stream_key key = resolve(device, stream);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    fake_set("reused", 1);
    CHECK_STATUS(GP_ERR_ARGUMENT, device->driver->event_record(device, event, &key, &error),
                 &error);
    expect_text(error.message, "forget_stream");
    assert_int_equal(fake_calls("cuEventRecord"), 0);
    device->driver->event_destroy(device, event);
    CHECK_OK(gp_cuda_stream_destroy(device, stream, NULL), NULL);
}

/* ---- captures ---------------------------------------------------------------------------------- */

static void captures_are_seen(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 0);
    bool capturing = true;
    gp_error error;
    (void)state;
    CHECK_OK(device->driver->stream_capturing(device, &key, &capturing, &error), &error);
    assert_false(capturing);
    for (long status = 1; status <= 2; status++) { /* active, invalidated */
        capturing = false;
        fake_set("capture", status);
        CHECK_OK(device->driver->stream_capturing(device, &key, &capturing, &error), &error);
        assert_true(capturing);
    }
    fake_set("capture", 0);
    fake_set("cuStreamIsCapturing", GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    capturing = false;
    CHECK_OK(device->driver->stream_capturing(device, &key, &capturing, &error), &error);
    assert_true(capturing);
    fake_set("cuStreamIsCapturing", GP__CUDA_ERROR_INVALID_VALUE);
    CHECK_STATUS(GP_ERR_DRIVER, device->driver->stream_capturing(device, &key, &capturing, &error),
                 &error);
    expect_contexts_balanced();
}

/* By two calls, of which a capturing stream sees one. */
static void a_stream_is_confirmed_by_its_id(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, make_stream(device));
    struct gp__stream_key bound = resolve(device, GP__CU_STREAM_PER_THREAD), other = key;
    unsigned long contexts = fake_calls("cuStreamGetCtx"), ids = fake_calls("cuStreamGetId");
    (void)state;
    other.id++; /* the one that had the handle before */
    CHECK_OK(device->driver->stream_confirm(device, &key), NULL);
    CHECK_OK(device->driver->stream_confirm(device, &bound), NULL);
    CHECK_STATUS(GP_NOT_READY, device->driver->stream_confirm(device, &other), NULL);
    assert_int_equal(fake_calls("cuStreamGetCtx"), contexts);
    assert_int_equal(fake_calls("cuStreamGetId"), ids + 3);
    fake_set("capture", 1);
    CHECK_STATUS(GP_NOT_READY, device->driver->stream_confirm(device, &key), NULL);
    assert_int_equal(fake_calls("cuStreamGetId"), ids + 3);
    fake_set("capture", 0);
    fake_set("cuStreamGetId", GP__CUDA_ERROR_INVALID_HANDLE);
    CHECK_STATUS(GP_NOT_READY, device->driver->stream_confirm(device, &key), NULL);
    fake_set("cuStreamGetId", 0);
    expect_contexts_balanced();
    CHECK_OK(gp_cuda_stream_destroy(device, key.handle, NULL), NULL);
}

/* Measured on an H200: the id of a capturing stream costs the capture, whatever the mode. */
static void capturing_stream_is_not_asked_for_its_id(void **state)
{
    gp_device *device = open_device(0);
    uintptr_t stream = 0;
    struct gp__stream_key key;
    bool capturing = false;
    gp_error error;
    (void)state;
    CHECK_OK(gp_cuda_stream_create(device, 0, &stream, &error), &error);
    struct gp__stream_key bound = resolve(device, GP__CU_STREAM_PER_THREAD);
    unsigned long asked = fake_calls("cuStreamGetId");
    fake_set("capture", 1);
    CHECK_STATUS(GP_ERR_CAPTURE, device->driver->stream_resolve(device, stream, &key, &error),
                 &error);
    CHECK_STATUS(GP_ERR_CAPTURE,
                 device->driver->stream_resolve(device, GP__CU_STREAM_PER_THREAD, &key, &error),
                 &error);
    CHECK_OK(device->driver->stream_capturing(device, &bound, &capturing, &error), &error);
    assert_true(capturing);
    assert_int_equal(fake_calls("cuStreamGetId"), asked);
    fake_set("capture", 0);
    CHECK_OK(device->driver->stream_resolve(device, stream, &key, &error), &error);
    CHECK_OK(gp_cuda_stream_destroy(device, stream, &error), &error);
    expect_contexts_balanced();
}

static void capture_errors_have_their_status(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 0);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    fake_set("cuEventRecord", GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK_STATUS(GP_ERR_CAPTURE, device->driver->event_record(device, event, &key, &error), &error);
    fake_set("cuCtxRecordEvent", GP__CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_STATUS(GP_ERR_CAPTURE, device->driver->event_record_context(device, event, &error),
                 &error);
    fake_set("cuEventQuery", GP__CUDA_ERROR_CAPTURED_EVENT);
    CHECK_STATUS(GP_ERR_CAPTURE, device->driver->event_query(device, event, &error), &error);
    expect_driver_error(&error, "cuEventQuery", 907, "CUDA_ERROR_CAPTURED_EVENT");
    device->driver->event_destroy(device, event);
}

/* ---- fences ------------------------------------------------------------------------------------ */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *complete_soon(void *unused)
{
    const struct timespec pause = {.tv_nsec = 20000000};
    nanosleep(&pause, NULL);
    fake_set("busy", 0);
    return unused;
}

static void fence_completes(void **state)
{
    gp_device *device = open_device(1);
    uintptr_t stream = make_stream(device);
    struct gp__stream_key key = resolve(device, stream);
    gp__event *event = make_event(device);
    pthread_t thread;
    gp_error error;
    (void)state;
    expect_text(fake_last("cuEventCreate"), "flags=2 device=1");
    CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
    expect_text(fake_last("cuEventRecord"), "device=1");
    fake_set("busy", 1);
    CHECK_STATUS(GP_NOT_READY, device->driver->event_query(device, event, &error), &error);
    CHECK_STATUS(GP_NOT_READY, device->driver->event_wait(device, event, 0, &error), &error);
    uint64_t start = now_ns();
    CHECK_STATUS(GP_NOT_READY, device->driver->event_wait(device, event, 5000000, &error), &error);
    uint64_t waited = now_ns() - start;
    assert_in_range(waited, 5000000, 2000000000);
    unsigned long before = fake_calls("cuEventQuery");
    assert_int_equal(pthread_create(&thread, NULL, complete_soon, NULL), 0);
    CHECK_OK(device->driver->event_wait(device, event, UINT64_MAX, &error), &error);
    assert_int_equal(pthread_join(thread, NULL), 0);
    /* 20 ms at one query for each pause, and not one for each turn of a busy loop. The spinning
     * start is bounded by time, so it is left a generous share. */
    assert_in_range(fake_calls("cuEventQuery") - before, 2, 20000);
    device->driver->event_destroy(device, event);
    assert_int_equal(fake_calls("cuEventDestroy"), 1);
    CHECK_OK(gp_cuda_stream_destroy(device, stream, NULL), NULL);
    expect_contexts_balanced();
}

static const int dead_codes[] = {4,   214, 220, 226, 700, 702, 709, 710, 714,
                                 715, 716, 717, 718, 719, 721, 810, 911};

/* Nothing can still run in a context that is dead, so its fences have passed (driver.h). */
static void dead_context_has_passed(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 0);
    gp_error error;
    (void)state;
    fake_set("busy", 1);
    for (size_t i = 0; i < CASE_COUNT(dead_codes); i++) {
        gp__event *event = make_event(device);
        fake_set("cuEventQuery", dead_codes[i]);
        CHECK_OK(device->driver->event_query(device, event, &error), &error);
        CHECK_OK(device->driver->event_wait(device, event, 1000, &error), &error);
        fake_set("cuEventQuery", 0);
        CHECK_STATUS(GP_NOT_READY, device->driver->event_query(device, event, &error), &error);
        fake_set("cuEventRecord", dead_codes[i]);
        CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
        CHECK_OK(device->driver->event_query(device, event, &error), &error);
        fake_set("cuEventRecord", 0);
        CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
        CHECK_STATUS(GP_NOT_READY, device->driver->event_query(device, event, &error), &error);
        fake_set("cuCtxRecordEvent", dead_codes[i]);
        CHECK_OK(device->driver->event_record_context(device, event, &error), &error);
        CHECK_OK(device->driver->event_query(device, event, &error), &error);
        fake_set("cuCtxRecordEvent", 0);
        device->driver->event_destroy(device, event);
        fake_set("cuEventCreate", dead_codes[i]);
        event = make_event(device);
        CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
        CHECK_OK(device->driver->event_record_context(device, event, &error), &error);
        CHECK_OK(device->driver->event_query(device, event, &error), &error);
        device->driver->event_destroy(device, event);
        fake_set("cuEventCreate", 0);
    }
    expect_contexts_balanced();
}

/* An error that says nothing of the context's death must not be taken for completion. */
static void other_errors_have_not_passed(void **state)
{
    static const int codes[] = {1, 2, 3, 201, 400, 701, 720, 801, 999};
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 0);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(codes); i++) {
        fake_set("cuEventQuery", codes[i]);
        CHECK_STATUS(GP_ERR_DRIVER, device->driver->event_query(device, event, &error), &error);
        assert_int_equal(error.code, codes[i]);
        CHECK_STATUS(GP_ERR_DRIVER, device->driver->event_wait(device, event, UINT64_MAX, &error),
                     &error);
        fake_set("cuEventQuery", 0);
        fake_set("cuEventRecord", codes[i]);
        CHECK_STATUS(GP_ERR_DRIVER, device->driver->event_record(device, event, &key, &error),
                     &error);
        assert_string_equal(error.call, "cuEventRecord");
        fake_set("cuEventRecord", 0);
    }
    device->driver->event_destroy(device, event);
    expect_contexts_balanced();
}

/* The context that an event was made in was destroyed by its owner: the driver knows neither. */
static void destroyed_context_has_passed(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 0);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    fake_set("cuEventQuery", GP__CUDA_ERROR_INVALID_HANDLE);
    fake_set("cuCtxPushCurrent", GP__CUDA_ERROR_INVALID_CONTEXT);
    CHECK_OK(device->driver->event_query(device, event, &error), &error);
    CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
    device->driver->event_destroy(device, event);
}

static void old_driver_cannot_fence_a_context(void **state)
{
    gp_device *device = open_device(0);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    CHECK_STATUS(GP_ERR_UNAVAILABLE, device->driver->event_record_context(device, event, &error),
                 &error);
    expect_text(error.message, "CUDA 12.5");
    device->driver->event_destroy(device, event);
}

static void event_creation_fails(void **state)
{
    gp_device *device = open_device(0);
    int64_t live = gp__memory_live();
    gp__event *event = NULL;
    gp_error error;
    (void)state;
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY,
                 device->driver->event_create(device, device->context, &event, &error), &error);
    gp__memory_fail_at(0, 0);
    fake_set("cuEventCreate", GP__CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_STATUS(GP_ERR_DRIVER,
                 device->driver->event_create(device, device->context, &event, &error), &error);
    fake_set("cuEventCreate", 0);
    expect_contexts_balanced();
    fake_set("cuCtxPushCurrent", GP__CUDA_ERROR_INVALID_CONTEXT);
    CHECK_STATUS(GP_ERR_DRIVER,
                 device->driver->event_create(device, device->context, &event, &error), &error);
    assert_null(event);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- entering and leaving ----------------------------------------------------------------------- */

static void expect_mode(const char *mode)
{
    assert_string_equal(fake_last("cuThreadExchangeStreamCaptureMode"), mode);
}

static void entering_is_undone(void **state)
{
    gp_device *device = open_device(0), *other = open_device(1);
    struct gp__entry outer, inner;
    gp_error error;
    (void)state;
    CHECK_OK(device->driver->enter(device, &outer, &error), &error);
    expect_mode("mode=2");
    CHECK_OK(other->driver->enter(other, &inner, &error), &error);
    size_t available, total = 0;
    CHECK_OK(device->driver->memory_info(device, &available, &total, &error), &error);
    assert_int_equal(total, (size_t)4 << 30); /* device 0's, though device 1 is current */
    other->driver->leave(other, &inner);
    expect_mode("mode=2"); /* the outer entry's */
    device->driver->leave(device, &outer);
    expect_mode("mode=0");
    expect_contexts_balanced();
}

static void entering_fails(void **state)
{
    gp_device *device = open_device(0);
    struct gp__entry entry = {.previous_mode = 77, .pushed = false};
    gp_error error;
    (void)state;
    fake_set("cuThreadExchangeStreamCaptureMode", GP__CUDA_ERROR_INVALID_VALUE);
    CHECK_STATUS(GP_ERR_DRIVER, device->driver->enter(device, &entry, &error), &error);
    assert_string_equal(error.call, "cuThreadExchangeStreamCaptureMode");
    fake_set("cuThreadExchangeStreamCaptureMode", 0);
    fake_set("cuCtxPushCurrent", GP__CUDA_ERROR_INVALID_CONTEXT);
    CHECK_STATUS(GP_ERR_DRIVER, device->driver->enter(device, &entry, &error), &error);
    assert_string_equal(error.call, "cuCtxPushCurrent");
    expect_mode("mode=0"); /* put back */
    assert_int_equal(entry.previous_mode, 77);
}

/* A pool over a dead context must still be able to close. */
static void entering_a_dead_context_succeeds(void **state)
{
    gp_device *device = open_device(0);
    struct gp__entry entry;
    gp_error error;
    (void)state;
    fake_set("cuThreadExchangeStreamCaptureMode", GP__CUDA_ERROR_ILLEGAL_ADDRESS);
    fake_set("cuCtxPushCurrent", GP__CUDA_ERROR_LAUNCH_FAILED);
    unsigned long pops = fake_calls("cuCtxPopCurrent");
    CHECK_OK(device->driver->enter(device, &entry, &error), &error);
    device->driver->leave(device, &entry);
    assert_int_equal(fake_calls("cuCtxPopCurrent"), pops);
    assert_int_equal(fake_calls("cuThreadExchangeStreamCaptureMode"), 1);
}

/* ---- streams for the language faces ---------------------------------------------------------------- */

static void streams_fill_and_copy(void **state)
{
    gp_device *device = open_device(1);
    uintptr_t stream = make_stream(device), other = 0;
    char expected[128];
    gp_error error;
    (void)state;
    assert_string_equal(fake_last("cuStreamCreate"), "flags=0");
    CHECK_OK(gp_cuda_stream_create(device, GP_CUDA_STREAM_NON_BLOCKING, &other, &error), &error);
    assert_string_equal(fake_last("cuStreamCreate"), "flags=1");
    CHECK_OK(gp_cuda_fill(device, stream, 4096, 0xAB, 100, &error), &error);
    snprintf(expected, sizeof expected, "va=4096 value=171 size=100 stream=%p", (void *)stream);
    assert_string_equal(fake_last("cuMemsetD8Async"), expected);
    CHECK_OK(gp_cuda_copy(device, stream, 4096, 8192, 100, &error), &error);
    snprintf(expected, sizeof expected, "to=4096 from=8192 size=100 stream=%p", (void *)stream);
    assert_string_equal(fake_last("cuMemcpyAsync"), expected);
    unsigned long before = fake_calls(NULL);
    CHECK_OK(gp_cuda_fill(device, stream, 4096, 1, 0, &error), &error);
    CHECK_OK(gp_cuda_copy(device, stream, 4096, 8192, 0, &error), &error);
    assert_int_equal(fake_calls(NULL), before);
    fake_set("busy", 1);
    CHECK_STATUS(GP_NOT_READY, gp_cuda_stream_query(device, stream, &error), &error);
    fake_set("busy", 0);
    CHECK_OK(gp_cuda_stream_query(device, stream, &error), &error);
    CHECK_OK(gp_cuda_stream_destroy(device, stream, &error), &error);
    CHECK_OK(gp_cuda_stream_destroy(device, other, &error), &error);
    expect_contexts_balanced();
}

static void stream_errors(void **state)
{
    gp_device *device = open_device(0), *host = NULL;
    uintptr_t stream = 0;
    gp_error error;
    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, &error), &error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_cuda_stream_create(host, 0, &stream, &error), &error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_cuda_stream_create(device, 2, &stream, &error), &error);
    for (uintptr_t handle = 0; handle <= 2; handle++)
        CHECK_STATUS(GP_ERR_ARGUMENT, gp_cuda_stream_destroy(device, handle, &error), &error);
    fake_set("cuStreamCreate", GP__CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_STATUS(GP_ERR_DRIVER, gp_cuda_stream_create(device, 0, &stream, &error), &error);
    assert_int_equal(stream, 0);
    fake_set("cuMemsetD8Async", GP__CUDA_ERROR_INVALID_VALUE);
    CHECK_STATUS(GP_ERR_DRIVER, gp_cuda_fill(device, 0, 4096, 1, 64, &error), &error);
    expect_driver_error(&error, "cuMemsetD8Async", 1, "CUDA_ERROR_INVALID_VALUE");
    expect_text(error.message, "64 bytes at 0x1000");
    fake_set("cuStreamQuery", GP__CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_STATUS(GP_ERR_DRIVER, gp_cuda_stream_query(device, 0, &error), &error);
    expect_contexts_balanced();
}

/* A query would invalidate the capture, so it is not made. */
static void capturing_stream_is_not_queried(void **state)
{
    gp_device *device = open_device(0);
    gp_error error;
    (void)state;
    fake_set("capture", 1);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_cuda_stream_query(device, 0, &error), &error);
    fake_set("capture", 0);
    fake_set("cuStreamIsCapturing", GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_cuda_stream_query(device, 0, &error), &error);
    assert_int_equal(fake_calls("cuStreamQuery"), 0);
}

#define CASE(function, ...)                                                                        \
    {                                                                                              \
        .name = #function, .run = function, __VA_ARGS__                                            \
    }

int main(int argc, char **argv)
{
    static const struct cuda_case cases[] = {
        CASE(zero_and_one_are_one_stream, .settings = NULL),
        CASE(legacy_id_while_another_library_captures, .settings = "cuStreamIsCapturing=906"),
        CASE(per_thread_stream_is_bound, .settings = NULL),
        CASE(stream_of_another_device_is_refused, .settings = NULL),
        CASE(junk_stream_is_refused, .settings = NULL),
        CASE(reused_handle_is_not_fenced, .settings = NULL),
        CASE(captures_are_seen, .settings = NULL),
        CASE(a_stream_is_confirmed_by_its_id, .settings = NULL),
        CASE(capturing_stream_is_not_asked_for_its_id, .settings = NULL),
        CASE(capture_errors_have_their_status, .settings = NULL),
        CASE(fence_completes, .settings = NULL),
        CASE(dead_context_has_passed, .settings = NULL),
        CASE(other_errors_have_not_passed, .settings = NULL),
        CASE(destroyed_context_has_passed, .settings = NULL),
        CASE(old_driver_cannot_fence_a_context, .settings = "version=12040"),
        CASE(event_creation_fails, .settings = NULL),
        CASE(entering_is_undone, .settings = NULL),
        CASE(entering_fails, .settings = NULL),
        CASE(entering_a_dead_context_succeeds, .settings = NULL),
        CASE(streams_fill_and_copy, .settings = NULL),
        CASE(stream_errors, .settings = NULL),
        CASE(capturing_stream_is_not_queried, .settings = NULL),
    };
    return run_cases(argc, argv, cases, CASE_COUNT(cases));
}
