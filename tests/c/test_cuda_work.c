/* SPDX-License-Identifier: Apache-2.0
 *
 * backing/cuda_work.c, and the waits of cuda_time.c, against a stand-in for the driver: what is
 * enqueued where, what a capture is asked and what it never is, and who is told when a graph is gone.
 */
#include "tests/support/cuda_case.h"

#include "backing/cuda_abi.h"
#include "backing/cuda_stream.h"
#include "backing/memory.h"

#define ACTIVE      GP__CU_STREAM_CAPTURE_STATUS_ACTIVE
#define INVALIDATED GP__CU_STREAM_CAPTURE_STATUS_INVALIDATED

static struct gp__stream_key resolve(gp_device *device, uintptr_t handle)
{
    struct gp__stream_key key;
    gp_error error;
    CHECK_OK(device->driver->stream_resolve(device, handle, &key, &error), &error);
    return key;
}

static struct gp__stream_key make_stream(gp_device *device)
{
    uintptr_t handle = 0;
    gp_error error;
    CHECK_OK(gp_cuda_stream_create(device, 0, &handle, &error), &error);
    return resolve(device, handle);
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

static unsigned long drop_graph(void)
{
    fake_cuda_drop_graph_function drop;
    *(void **)&drop = case_symbol("fake_cuda_drop_graph");
    assert_non_null(drop);
    return drop();
}

static unsigned long user_objects(void)
{
    fake_cuda_user_objects_function live;
    *(void **)&live = case_symbol("fake_cuda_user_objects");
    assert_non_null(live);
    return live();
}

/* ---- copies, fills, waits ------------------------------------------------------------------------ */

static const char *const work_calls[] = {"cuMemcpyAsync", "cuMemsetD8Async", "cuStreamWaitEvent"};

/* The i-th of them, with arguments that work. */
static gp_status enqueue(gp_device *device, size_t i, const struct gp__stream_key *key,
                         gp__event *event, gp_error *error)
{
    switch (i) {
    case 0:
        return device->driver->copy(device, 4096, 8192, 100, key, error);
    case 1:
        return device->driver->fill(device, 4096, 100, 0xAB, key, error);
    default:
        return device->driver->stream_wait(device, key, event, error);
    }
}

static void work_is_passed_on(void **state)
{
    gp_device *device = open_device(1);
    struct gp__stream_key key = make_stream(device);
    gp__event *event = make_event(device);
    char expected[128];
    (void)state;
    const struct gp__stream_key keys[] = {key, resolve(device, 0), resolve(device, 2)};
    for (size_t i = 0; i < CASE_COUNT(keys); i++) {
        void *stream = (void *)keys[i].handle;
        for (size_t call = 0; call < CASE_COUNT(work_calls); call++) {
            gp_error error;
            CHECK_OK(enqueue(device, call, &keys[i], event, &error), &error);
        }
        snprintf(expected, sizeof expected, "to=4096 from=8192 size=100 stream=%p", stream);
        assert_string_equal(fake_last("cuMemcpyAsync"), expected);
        snprintf(expected, sizeof expected, "va=4096 value=171 size=100 stream=%p", stream);
        assert_string_equal(fake_last("cuMemsetD8Async"), expected);
        snprintf(expected, sizeof expected, "stream=%p flags=0 device=1", stream);
        assert_string_equal(fake_last("cuStreamWaitEvent"), expected);
    }
    unsigned long before = fake_calls(NULL);
    CHECK_OK(device->driver->copy(device, 4096, 8192, 0, &key, NULL), NULL);
    CHECK_OK(device->driver->fill(device, 4096, 0, 1, &key, NULL), NULL);
    assert_int_equal(fake_calls(NULL), before);
    device->driver->event_destroy(device, event);
    expect_contexts_balanced();
}

static void every_work_error_is_reported(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(work_calls); i++) {
        fake_set(work_calls[i], GP__CUDA_ERROR_INVALID_VALUE);
        CHECK_STATUS(GP_ERR_DRIVER, enqueue(device, i, &key, event, &error), &error);
        expect_driver_error(&error, work_calls[i], 1, "CUDA_ERROR_INVALID_VALUE");
        if (i < 2)
            expect_text(error.message, "100 bytes at 0x1000");
        fake_set(work_calls[i], GP__CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        CHECK_STATUS(GP_ERR_CAPTURE, enqueue(device, i, &key, event, &error), &error);
        expect_driver_error(&error, work_calls[i], 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION");
        fake_set(work_calls[i], 0);
        fake_set("cuStreamIsCapturing", GP__CUDA_ERROR_INVALID_VALUE);
        CHECK_STATUS(GP_ERR_DRIVER, enqueue(device, i, &key, event, &error), &error);
        assert_string_equal(error.call, "cuStreamIsCapturing");
        fake_set("cuStreamIsCapturing", 0);
        fake_set("cuCtxPushCurrent", GP__CUDA_ERROR_INVALID_VALUE);
        CHECK_STATUS(GP_ERR_DRIVER, enqueue(device, i, &key, event, &error), &error);
        fake_set("cuCtxPushCurrent", 0);
    }
    device->driver->event_destroy(device, event);
    assert_int_equal(fake_calls("cuCtxPushCurrent"), fake_calls("cuCtxPopCurrent") + 3);
}

/* Work on the wrong stream would run too early, and nothing else would notice. */
static void a_reused_handle_takes_no_work(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    fake_set("reused", 1);
    for (size_t i = 0; i < CASE_COUNT(work_calls); i++) {
        CHECK_STATUS(GP_ERR_ARGUMENT, enqueue(device, i, &key, event, &error), &error);
        expect_text(error.message, "forget_stream");
        assert_int_equal(fake_calls(work_calls[i]), 0);
    }
    device->driver->event_destroy(device, event);
}

/* A capture takes work, is not asked for its stream's id, and is never made to wait. */
static void a_capture_takes_work_and_no_waits(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device), bare;
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    unsigned long asked = fake_calls("cuStreamGetId");
    fake_set("capture", ACTIVE);
    CHECK_STATUS(GP_ERR_CAPTURE, device->driver->stream_resolve(device, key.handle, &bare, &error),
                 &error);
    const struct gp__stream_key *keys[] = {&key, &bare};
    for (size_t i = 0; i < CASE_COUNT(keys); i++) {
        CHECK_OK(enqueue(device, 0, keys[i], event, &error), &error);
        CHECK_OK(enqueue(device, 1, keys[i], event, &error), &error);
        CHECK_STATUS(GP_ERR_CAPTURE, enqueue(device, 2, keys[i], event, &error), &error);
        expect_text(error.message, "invalidate");
    }
    fake_set("capture", 0);
    CHECK_OK(enqueue(device, 1, &bare, event, &error), &error); /* no id to compare */
    assert_int_equal(fake_calls("cuStreamGetId"), asked);
    assert_int_equal(fake_calls("cuMemcpyAsync"), 2);
    assert_int_equal(fake_calls("cuMemsetD8Async"), 3);
    assert_int_equal(fake_calls("cuStreamWaitEvent"), 0);
    device->driver->event_destroy(device, event);
    expect_contexts_balanced();
}

/* Any work on the legacy stream beside a blocking capture would invalidate it. */
static void the_legacy_stream_beside_a_capture(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 0);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    fake_set("cuStreamIsCapturing", GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    for (size_t i = 0; i < CASE_COUNT(work_calls); i++) {
        CHECK_STATUS(GP_ERR_CAPTURE, enqueue(device, i, &key, event, &error), &error);
        expect_text(error.message, "legacy default stream");
        assert_int_equal(fake_calls(work_calls[i]), 0);
    }
    device->driver->event_destroy(device, event);
    expect_contexts_balanced();
}

static const int dead_codes[] = {4,   214, 220, 226, 700, 702, 709, 710, 714,
                                 715, 716, 717, 718, 719, 721, 810, 911};

/* Nothing is left to wait for, but work that was asked for is not done. */
static void a_dead_context_has_nothing_to_wait_for(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    gp__event *event = make_event(device);
    gp_error error;
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(dead_codes); i++) {
        fake_set("cuStreamIsCapturing", dead_codes[i]);
        fake_set("cuStreamGetId", dead_codes[i]);
        for (size_t call = 0; call < CASE_COUNT(work_calls); call++) {
            fake_set(work_calls[call], dead_codes[i]);
            CHECK_STATUS(call < 2 ? GP_ERR_DRIVER : GP_OK,
                         enqueue(device, call, &key, event, &error), &error);
            fake_set(work_calls[call], 0);
        }
        fake_set("cuStreamIsCapturing", 0);
        fake_set("cuStreamGetId", 0);
        unsigned long before = fake_calls("cuStreamWaitEvent");
        fake_set("cuEventRecord", dead_codes[i]);
        CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
        fake_set("cuEventRecord", 0);
        CHECK_OK(enqueue(device, 2, &key, event, &error), &error); /* it has passed */
        fake_set("cuEventCreate", dead_codes[i]);
        gp__event *never = make_event(device);
        fake_set("cuEventCreate", 0);
        CHECK_OK(enqueue(device, 2, &key, never, &error), &error);
        assert_int_equal(fake_calls("cuStreamWaitEvent"), before);
        device->driver->event_destroy(device, never);
        CHECK_OK(device->driver->event_record(device, event, &key, &error), &error);
    }
    device->driver->event_destroy(device, event);
    expect_contexts_balanced();
}

/* The context that an event was made in was destroyed by its owner: what it stood for is over. */
static void a_destroyed_context_has_nothing_to_wait_for(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    gp__event *event = make_event(device);
    struct gp__entry entry;
    gp_error error;
    (void)state;
    CHECK_OK(device->driver->enter(device, &entry, &error), &error);
    fake_set("cuStreamWaitEvent", GP__CUDA_ERROR_INVALID_HANDLE);
    CHECK_STATUS(GP_ERR_DRIVER, enqueue(device, 2, &key, event, &error), &error);
    fake_set("cuCtxPushCurrent", GP__CUDA_ERROR_INVALID_CONTEXT);
    CHECK_OK(enqueue(device, 2, &key, event, &error), &error);
    fake_set("cuCtxPushCurrent", 0);
    device->driver->leave(device, &entry);
    device->driver->event_destroy(device, event);
}

/* ---- the id of a capture --------------------------------------------------------------------------- */

static gp_status ask_id(gp_device *device, const struct gp__stream_key *key, uint64_t *id,
                        gp_error *error)
{
    return device->driver->capture_id(device, key, id, error);
}

static void capture_ids_are_the_drivers(void **state)
{
    gp_device *device = open_device(1);
    struct gp__stream_key made = make_stream(device);
    const struct gp__stream_key keys[] = {made, resolve(device, 0), resolve(device, 2)};
    gp_error error;
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(keys); i++) {
        uint64_t id = 99;
        CHECK_OK(ask_id(device, &keys[i], &id, &error), &error);
        assert_int_equal(id, 0);
        fake_set("capture", ACTIVE);
        fake_set("capture_id", 1000 + (long)i);
        CHECK_OK(ask_id(device, &keys[i], &id, &error), &error);
        assert_int_equal(id, 1000 + i);
        fake_set("capture", INVALIDATED);
        CHECK_STATUS(GP_ERR_CAPTURE, ask_id(device, &keys[i], &id, &error), &error);
        expect_text(error.message, "was invalidated");
        fake_set("capture", 0);
        fake_set("cuStreamGetCaptureInfo", GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        CHECK_OK(ask_id(device, &keys[i], &id, &error), &error);
        assert_int_equal(id, 0);
        id = 99;
        fake_set("cuStreamGetCaptureInfo", GP__CUDA_ERROR_INVALID_VALUE);
        CHECK_STATUS(GP_ERR_DRIVER, ask_id(device, &keys[i], &id, &error), &error);
        expect_driver_error(&error, "cuStreamGetCaptureInfo", 1, "CUDA_ERROR_INVALID_VALUE");
        assert_int_equal(id, 99);
        for (size_t dead = 0; dead < CASE_COUNT(dead_codes); dead++) {
            id = 99;
            fake_set("cuStreamGetCaptureInfo", dead_codes[dead]);
            CHECK_OK(ask_id(device, &keys[i], &id, &error), &error);
            assert_int_equal(id, 0);
        }
        fake_set("cuStreamGetCaptureInfo", 0);
    }
    expect_contexts_balanced();
}

/* A stream that is resolved while it captures is known but for its id, and never asked for that. */
static void a_capturing_stream_resolves_but_for_its_id(void **state)
{
    gp_device *device = open_device(1);
    struct gp__stream_key made = make_stream(device);
    const uintptr_t handles[] = {made.handle, GP__CU_STREAM_PER_THREAD};
    uint64_t id = 0;
    gp_error error;
    (void)state;
    unsigned long asked = fake_calls("cuStreamGetId");
    fake_set("capture", ACTIVE);
    for (size_t i = 0; i < CASE_COUNT(handles); i++) {
        struct gp__stream_key key = {.id = 5, .always_passed = true};
        CHECK_STATUS(GP_ERR_CAPTURE,
                     device->driver->stream_resolve(device, handles[i], &key, &error), &error);
        assert_int_equal(key.handle, handles[i]);
        assert_int_equal(key.context, device->context);
        assert_int_equal(key.id, 0);
        assert_false(key.always_passed);
        assert_true(key.thread_bound == (i == 1));
        CHECK_OK(ask_id(device, &key, &id, &error), &error);
        assert_int_equal(id, 31);
    }
    assert_int_equal(fake_calls("cuStreamGetId"), asked);
    expect_contexts_balanced();
}

/* On a foreign thread the handle stands for that thread's own stream. */
static void a_foreign_threads_stream_is_not_asked(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = resolve(device, 2);
    uint64_t id = 99;
    gp_error error;
    (void)state;
    key.id += 1;
    CHECK_STATUS(GP_ERR_ARGUMENT, ask_id(device, &key, &id, &error), &error);
    expect_text(error.message, "its own thread");
    assert_int_equal(id, 99);
    expect_contexts_balanced();
}

/* ---- keeping memory for a graph ---------------------------------------------------------------------- */

static void count_gone(void *context)
{
    ++*(unsigned *)context;
}

static gp_status keep(gp_device *device, const struct gp__stream_key *key, unsigned *gone,
                      gp_error *error)
{
    return device->driver->capture_keep(device, key, count_gone, gone, error);
}

static void the_graphs_end_is_told_once(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    int64_t live = gp__memory_live();
    unsigned first = 0, second = 0;
    gp_error error;
    (void)state;
    fake_set("capture", ACTIVE);
    CHECK_OK(keep(device, &key, &first, &error), &error);
    CHECK_OK(keep(device, &key, &second, &error), &error);
    /* One reference each, and the graph has it: none is left for us to give back. */
    assert_string_equal(fake_last("cuUserObjectCreate"), "count=1 flags=1");
    assert_string_equal(fake_last("cuGraphRetainUserObject"), "count=1 flags=1");
    assert_int_equal(fake_calls("cuUserObjectRelease"), 0);
    fake_set("capture", 0);
    assert_int_equal(first + second, 0);
    assert_int_equal(drop_graph(), 2);
    assert_int_equal(first, 1);
    assert_int_equal(second, 1);
    assert_int_equal(user_objects(), 0);
    assert_int_equal(gp__memory_live(), live);
    expect_contexts_balanced();
}

static void nothing_is_kept_without_a_capture(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    unsigned gone = 0;
    gp_error error;
    (void)state;
    CHECK_STATUS(GP_ERR_CAPTURE, keep(device, &key, &gone, &error), &error);
    expect_text(error.message, "is not being captured");
    fake_set("capture", INVALIDATED);
    CHECK_STATUS(GP_ERR_CAPTURE, keep(device, &key, &gone, &error), &error);
    expect_text(error.message, "was invalidated");
    fake_set("cuStreamGetCaptureInfo", GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK_STATUS(GP_ERR_CAPTURE, keep(device, &key, &gone, &error), &error);
    fake_set("cuStreamGetCaptureInfo", GP__CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_STATUS(GP_ERR_DRIVER, keep(device, &key, &gone, &error), &error);
    expect_driver_error(&error, "cuStreamGetCaptureInfo", 700, "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_int_equal(fake_calls("cuUserObjectCreate"), 0);
    assert_int_equal(gone, 0);
    expect_contexts_balanced();
}

static void a_failed_keep_tells_nobody(void **state)
{
    gp_device *device = open_device(0);
    struct gp__stream_key key = make_stream(device);
    int64_t live = gp__memory_live();
    unsigned gone = 0;
    gp_error error;
    (void)state;
    fake_set("capture", ACTIVE);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, keep(device, &key, &gone, &error), &error);
    gp__memory_fail_at(0, 0);
    fake_set("cuUserObjectCreate", GP__CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_STATUS(GP_ERR_DRIVER, keep(device, &key, &gone, &error), &error);
    expect_driver_error(&error, "cuUserObjectCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY");
    fake_set("cuUserObjectCreate", 0);
    assert_int_equal(gp__memory_live(), live);
    fake_set("cuGraphRetainUserObject", GP__CUDA_ERROR_INVALID_VALUE);
    CHECK_STATUS(GP_ERR_DRIVER, keep(device, &key, &gone, &error), &error);
    expect_driver_error(&error, "cuGraphRetainUserObject", 1, "CUDA_ERROR_INVALID_VALUE");
    assert_int_equal(fake_calls("cuUserObjectRelease"), 1);
    assert_int_equal(user_objects(), 0); /* destroyed, and it told nobody */
    assert_int_equal(gone, 0);
    assert_int_equal(gp__memory_live(), live);
    /* The first error is the one reported, and what cannot be undone only leaks a few bytes. */
    fake_set("cuUserObjectRelease", GP__CUDA_ERROR_UNKNOWN);
    CHECK_STATUS(GP_ERR_DRIVER, keep(device, &key, &gone, &error), &error);
    assert_string_equal(error.call, "cuGraphRetainUserObject");
    assert_int_equal(gp__memory_live(), live + 1);
    assert_int_equal(gone, 0);
    expect_contexts_balanced();
}

#define CASE(function, ...)                                                                        \
    {                                                                                              \
        .name = #function, .run = function, __VA_ARGS__                                            \
    }

int main(int argc, char **argv)
{
    static const struct cuda_case cases[] = {
        CASE(work_is_passed_on, .settings = NULL),
        CASE(every_work_error_is_reported, .settings = NULL),
        CASE(a_reused_handle_takes_no_work, .settings = NULL),
        CASE(a_capture_takes_work_and_no_waits, .settings = NULL),
        CASE(the_legacy_stream_beside_a_capture, .settings = NULL),
        CASE(a_dead_context_has_nothing_to_wait_for, .settings = NULL),
        CASE(a_destroyed_context_has_nothing_to_wait_for, .settings = NULL),
        CASE(capture_ids_are_the_drivers, .settings = NULL),
        CASE(a_capturing_stream_resolves_but_for_its_id, .settings = NULL),
        CASE(a_foreign_threads_stream_is_not_asked, .settings = NULL),
        CASE(the_graphs_end_is_told_once, .settings = NULL),
        CASE(nothing_is_kept_without_a_capture, .settings = NULL),
        CASE(a_failed_keep_tells_nobody, .settings = NULL),
    };
    return run_cases(argc, argv, cases, CASE_COUNT(cases));
}
