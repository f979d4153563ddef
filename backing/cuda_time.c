/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events of CUDA devices, for the device table in cuda.c: who a stream is, whether it
 * captures, and fences in it. Knows nothing of memory and never waits inside the driver.
 */
#include "cuda_device.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

struct gp__event {
    gp__cu_event native;
    gp__cu_context context;
    _Atomic bool dead; /* recorded into a context in which nothing can run: it has passed */
};

gp_status gp__cuda_stream_status(gp__cu_result code)
{
    if (code >= GP__CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
        code <= GP__CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        return GP_ERR_CAPTURE;
    return GP_ERR_DRIVER;
}

/* ---- streams ------------------------------------------------------------------------------- */

static gp__cu_stream stream_of(uintptr_t handle)
{
    return (gp__cu_stream)handle;
}

static gp_status not_a_stream(const struct gp__cuda_device *cuda, uintptr_t handle,
                              const char *call, gp__cu_result code, gp_error *error)
{
    gp_status status = code == GP__CUDA_ERROR_INVALID_HANDLE ||
                               code == GP__CUDA_ERROR_INVALID_CONTEXT ||
                               code == GP__CUDA_ERROR_INVALID_VALUE
                           ? GP_ERR_ARGUMENT
                           : GP_ERR_DRIVER;
    return gp__cuda_error(cuda->api, error, status, call, code, handle, 0);
}

/* Two contexts can share a device; a stream of either may use its memory. */
static gp_status check_device(const struct gp__cuda_device *cuda, uintptr_t handle,
                              gp__cu_context context, gp_error *error)
{
    struct gp__cuda_scope scope;
    gp__cu_device device = 0;
    if (context == cuda->context)
        return GP_OK;
    gp__cu_result code = gp__cuda_scope_enter(cuda->api, context, &scope);
    if (code != GP__CUDA_SUCCESS)
        return not_a_stream(cuda, handle, "cuCtxPushCurrent", code, error);
    code = cuda->api->cuCtxGetDevice(&device);
    gp__cuda_scope_leave(cuda->api, &scope);
    if (code != GP__CUDA_SUCCESS)
        return not_a_stream(cuda, handle, "cuCtxGetDevice", code, error);
    if (device != cuda->native)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "stream 0x%zx belongs to another device (number %d) and not to %s; use "
                            "a stream of the pool's device",
                            (size_t)handle, device, cuda->base.name);
    return GP_OK;
}

/* The id of `handle` with `context` current, which only the calling thread's own default stream
 * needs. */
static gp__cu_result stream_id(const struct gp__cuda_device *cuda, uintptr_t handle,
                               gp__cu_context context, unsigned long long *id)
{
    struct gp__cuda_scope scope;
    if (handle != GP__CU_STREAM_PER_THREAD)
        return cuda->api->cuStreamGetId(stream_of(handle), id);
    gp__cu_result code = gp__cuda_scope_enter(cuda->api, context, &scope);
    if (code != GP__CUDA_SUCCESS)
        return code;
    code = cuda->api->cuStreamGetId(stream_of(handle), id);
    gp__cuda_scope_leave(cuda->api, &scope);
    return code;
}

/* Whether the stream captures; the default streams need their context current for the question. */
static gp__cu_result capture_status(const struct gp__cuda_device *cuda,
                                    const struct gp__stream_key *stream,
                                    gp__cu_capture_status *capture)
{
    struct gp__cuda_scope scope = {false};
    gp__cu_result code = GP__CUDA_SUCCESS;
    if (stream->handle <= GP__CU_STREAM_PER_THREAD)
        code = gp__cuda_scope_enter(cuda->api, (gp__cu_context)stream->context, &scope);
    if (code == GP__CUDA_SUCCESS)
        code = cuda->api->cuStreamIsCapturing(stream_of(stream->handle), capture);
    gp__cuda_scope_leave(cuda->api, &scope);
    return code;
}

/* Asking a capturing stream for its id would invalidate the capture. */
static gp_status refuse_capturing(const struct gp__cuda_device *cuda,
                                  const struct gp__stream_key *stream, gp_error *error)
{
    gp__cu_capture_status capture = GP__CU_STREAM_CAPTURE_STATUS_NONE;
    gp__cu_result code = capture_status(cuda, stream, &capture);
    if (code != GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT &&
        capture == GP__CU_STREAM_CAPTURE_STATUS_NONE)
        return GP_OK; /* whatever else is wrong shows in the next call */
    return gp_error_set(error, GP_ERR_CAPTURE,
                        "stream 0x%zx is being captured, so it cannot be identified; use it with "
                        "the pool before the capture begins, or end the capture first",
                        (size_t)stream->handle);
}

gp_status gp__cuda_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                  gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp__cu_context context = cuda->context;
    unsigned long long id = cuda->legacy_id;
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    if (handle == GP__CU_STREAM_LEGACY)
        handle = 0;
    if (handle > GP__CU_STREAM_PER_THREAD) {
        gp__cu_result code = cuda->api->cuStreamGetCtx(stream_of(handle), &context);
        if (code != GP__CUDA_SUCCESS)
            return not_a_stream(cuda, handle, "cuStreamGetCtx", code, error);
        status = check_device(cuda, handle, context, error);
        if (status != GP_OK)
            return status;
    }
    struct gp__stream_key key = {.handle = handle,
                                 .context = (uintptr_t)context,
                                 .thread_bound = handle == GP__CU_STREAM_PER_THREAD};
    if (handle != 0) {
        status = refuse_capturing(cuda, &key, error);
        if (status != GP_OK) {
            *out = key; /* all but the id, which the capture's own memory can do without */
            return status;
        }
        gp__cu_result code = stream_id(cuda, handle, context, &id);
        if (code != GP__CUDA_SUCCESS)
            return not_a_stream(cuda, handle, "cuStreamGetId", code, error);
    }
    key.id = id;
    *out = key;
    return GP_OK;
}

gp_status gp__cuda_stream_confirm(gp_device *device, const struct gp__stream_key *stream)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    unsigned long long id = 0;
    if (refuse_capturing(cuda, stream, NULL) != GP_OK ||
        stream_id(cuda, stream->handle, (gp__cu_context)stream->context, &id) != GP__CUDA_SUCCESS)
        return GP_NOT_READY;
    return id == stream->id ? GP_OK : GP_NOT_READY;
}

/* Refuses when the handle stands for another stream than the one that was resolved: a per-thread
 * default stream on a foreign thread, or a handle that the driver gave to a new stream. A fence on
 * the wrong stream would let memory go too early, and nothing else would notice. */
static gp_status check_identity(const struct gp__cuda_device *cuda,
                                const struct gp__stream_key *stream, gp_error *error)
{
    unsigned long long id = 0;
    if (stream->handle == 0)
        return GP_OK;
    gp__cu_result code = stream_id(cuda, stream->handle, (gp__cu_context)stream->context, &id);
    if (gp__cuda_is_dead(code))
        return GP_OK; /* the caller's own call says so again */
    if (code != GP__CUDA_SUCCESS)
        return not_a_stream(cuda, stream->handle, "cuStreamGetId", code, error);
    if (id == stream->id)
        return GP_OK;
    if (stream->thread_bound)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "a per-thread default stream (id %llu) can only be reached on its own "
                            "thread",
                            (unsigned long long)stream->id);
    return gp_error_set(error, GP_ERR_ARGUMENT,
                        "stream 0x%zx (id %llu) was destroyed and its handle now names stream "
                        "%llu; call forget_stream before destroying a stream",
                        (size_t)stream->handle, (unsigned long long)stream->id, id);
}

static gp__cu_result enter_stream(const struct gp__cuda_device *cuda,
                                  const struct gp__stream_key *stream, struct gp__cuda_scope *scope)
{
    return gp__cuda_scope_enter(cuda->api, (gp__cu_context)stream->context, scope);
}

gp_status gp__cuda_stream_capturing(gp_device *device, const struct gp__stream_key *stream,
                                    bool *capturing, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp__cu_capture_status capture = GP__CU_STREAM_CAPTURE_STATUS_NONE;
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = capture_status(cuda, stream, &capture);
    if (code == GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || gp__cuda_is_dead(code)) {
        /* Nothing captures in a dead context, and its pools must still close. */
        *capturing = !gp__cuda_is_dead(code);
        return GP_OK;
    }
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuStreamIsCapturing", code,
                              stream->handle, 0);
    /* An invalidated capture still holds its stream until it is ended. */
    bool captures = capture != GP__CU_STREAM_CAPTURE_STATUS_NONE;
    if (!captures && stream->thread_bound)
        status = check_identity(cuda, stream, error); /* safe now, and not before */
    if (status == GP_OK)
        *capturing = captures;
    return status;
}

gp_status gp__cuda_check_work(const struct gp__cuda_device *cuda,
                              const struct gp__stream_key *stream, bool *captures, gp_error *error)
{
    gp__cu_capture_status capture = GP__CU_STREAM_CAPTURE_STATUS_NONE;
    gp__cu_result code = capture_status(cuda, stream, &capture);
    if (code == GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return gp_error_set(error, GP_ERR_CAPTURE,
                            "a stream that synchronises with the legacy default stream is being "
                            "captured, and any work on the default stream would invalidate the "
                            "capture; end the capture first, or use another stream");
    if (code != GP__CUDA_SUCCESS && !gp__cuda_is_dead(code))
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuStreamIsCapturing", code,
                              stream->handle, 0);
    *captures = capture != GP__CU_STREAM_CAPTURE_STATUS_NONE;
    return *captures || stream->id == 0 ? GP_OK : check_identity(cuda, stream, error);
}

/* ---- events -------------------------------------------------------------------------------- */

gp_status gp__cuda_event_create(gp_device *device, uintptr_t context, gp__event **out,
                                gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct gp__cuda_scope scope = {false};
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    gp__event *event = gp__calloc(1, sizeof *event);
    if (event == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for an event (%zu bytes)",
                            sizeof *event);
    event->context = (gp__cu_context)context;
    gp__cu_result code = gp__cuda_scope_enter(cuda->api, event->context, &scope);
    if (code == GP__CUDA_SUCCESS)
        code = cuda->api->cuEventCreate(&event->native, GP__CU_EVENT_DISABLE_TIMING);
    gp__cuda_scope_leave(cuda->api, &scope);
    /* In a dead context an event that was never made still has an answer: passed. */
    if (gp__cuda_is_dead(code)) {
        event->native = NULL;
    } else if (code != GP__CUDA_SUCCESS) {
        gp__free(event);
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuEventCreate", code, 0, 0);
    }
    *out = event;
    return GP_OK;
}

void gp__cuda_event_destroy(gp_device *device, gp__event *event)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    if (event->native != NULL && gp__check_process(NULL) == GP_OK)
        (void)cuda->api->cuEventDestroy(event->native);
    gp__free(event);
}

/* An event handle, or a context, that the driver no longer knows: only the end of the context takes
 * ours away, so what remains to find out is whether it has ended. */
static bool context_is_gone(const struct gp__cuda_device *cuda, gp__cu_context context)
{
    struct gp__cuda_scope scope;
    gp__cu_result code = cuda->api->cuCtxPushCurrent(context);
    if (code == GP__CUDA_SUCCESS) {
        scope.pushed = true;
        gp__cuda_scope_leave(cuda->api, &scope);
    }
    return gp__cuda_is_dead(code) || code == GP__CUDA_ERROR_INVALID_CONTEXT;
}

static bool has_ended(const struct gp__cuda_device *cuda, const gp__event *event,
                      gp__cu_result code)
{
    if (gp__cuda_is_dead(code))
        return true;
    return (code == GP__CUDA_ERROR_INVALID_HANDLE || code == GP__CUDA_ERROR_INVALID_CONTEXT) &&
           context_is_gone(cuda, event->context);
}

/* The end of both record functions. */
static gp_status recorded(const struct gp__cuda_device *cuda, gp__event *event, const char *call,
                          gp__cu_result code, uintptr_t handle, gp_error *error)
{
    bool dead = has_ended(cuda, event, code);
    if (code != GP__CUDA_SUCCESS && !dead)
        return gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code), call, code, handle,
                              0);
    atomic_store_explicit(&event->dead, dead, memory_order_release);
    return GP_OK;
}

gp_status gp__cuda_event_record(gp_device *device, gp__event *event,
                                const struct gp__stream_key *stream, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct gp__cuda_scope scope = {false};
    gp__assert_no_lock();
    gp_status status = gp__check_process(error);
    if (status == GP_OK)
        status = check_identity(cuda, stream, error);
    if (status != GP_OK)
        return status;
    if (event->native == NULL)
        return recorded(cuda, event, "cuEventRecord", GP__CUDA_ERROR_CONTEXT_IS_DESTROYED,
                        stream->handle, error);
    gp__cu_result code = enter_stream(cuda, stream, &scope);
    if (code == GP__CUDA_SUCCESS)
        code = cuda->api->cuEventRecord(event->native, stream_of(stream->handle));
    gp__cuda_scope_leave(cuda->api, &scope);
    return recorded(cuda, event, "cuEventRecord", code, stream->handle, error);
}

gp_status gp__cuda_event_record_context(gp_device *device, gp__event *event, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp__assert_no_lock();
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    if (cuda->api->cuCtxRecordEvent == NULL)
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "memory used by streams that growpool cannot see needs "
                            "cuCtxRecordEvent to be given back: a driver for CUDA 12.5 or newer");
    if (event->native == NULL)
        return recorded(cuda, event, "cuCtxRecordEvent", GP__CUDA_ERROR_CONTEXT_IS_DESTROYED, 0,
                        error);
    gp__cu_result code = cuda->api->cuCtxRecordEvent(event->context, event->native);
    return recorded(cuda, event, "cuCtxRecordEvent", code, 0, error);
}

gp_status gp__cuda_event_query(gp_device *device, gp__event *event, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    if (event->native == NULL || atomic_load_explicit(&event->dead, memory_order_acquire))
        return GP_OK;
    gp__cu_result code = cuda->api->cuEventQuery(event->native);
    if (code == GP__CUDA_SUCCESS || has_ended(cuda, event, code))
        return GP_OK;
    if (code == GP__CUDA_ERROR_NOT_READY)
        return GP_NOT_READY;
    return gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code), "cuEventQuery", code, 0,
                          0);
}

/* What has passed needs no wait, and a context in which nothing can run has nothing to wait. */
gp_status gp__cuda_stream_wait(gp_device *device, const struct gp__stream_key *stream,
                               gp__event *event, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct gp__cuda_scope scope = {false};
    bool captures = false;
    gp__assert_no_lock();
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    if (event->native == NULL || atomic_load_explicit(&event->dead, memory_order_acquire))
        return GP_OK;
    status = gp__cuda_check_work(cuda, stream, &captures, error);
    if (status != GP_OK)
        return status;
    if (captures)
        return gp_error_set(error, GP_ERR_CAPTURE,
                            "stream 0x%zx is being captured, and waiting there for work outside of "
                            "the capture would invalidate it",
                            (size_t)stream->handle);
    gp__cu_result code = enter_stream(cuda, stream, &scope);
    if (code == GP__CUDA_SUCCESS)
        code = cuda->api->cuStreamWaitEvent(stream_of(stream->handle), event->native,
                                            GP__CU_EVENT_WAIT_DEFAULT);
    gp__cuda_scope_leave(cuda->api, &scope);
    if (code == GP__CUDA_SUCCESS || has_ended(cuda, event, code))
        return GP_OK;
    return gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code), "cuStreamWaitEvent", code,
                          stream->handle, 0);
}

/* ---- waiting ------------------------------------------------------------------------------- */

#define YIELD_NS       50000u /* a fence this near is worth a spinning thread */
#define LEAST_PAUSE_NS 20000u
#define MOST_PAUSE_NS  500000u /* what a long wait may be late by */

static void pause_ns(uint64_t ns)
{
    struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u),
                             .tv_nsec = (long)(ns % 1000000000u)};
    (void)nanosleep(&pause, NULL); /* a signal may cut it short: the caller looks again anyway */
}

/* Queries with growing pauses and never calls cuEventSynchronize: that cannot be interrupted, and
 * on an event of a destroyed stream it may never return. */
gp_status gp__cuda_event_wait(gp_device *device, gp__event *event, uint64_t timeout_ns,
                              gp_error *error)
{
    uint64_t start = gp__monotonic_ns();
    uint64_t pause = LEAST_PAUSE_NS;
    gp__assert_no_lock();
    for (;;) {
        gp_status status = gp__cuda_event_query(device, event, error);
        uint64_t elapsed = gp__monotonic_ns() - start;
        if (status != GP_NOT_READY || elapsed >= timeout_ns)
            return status;
        if (elapsed < YIELD_NS) {
            sched_yield();
            continue;
        }
        uint64_t left = timeout_ns - elapsed;
        pause_ns(pause < left ? pause : left);
        pause = pause * 2 < MOST_PAUSE_NS ? pause * 2 : MOST_PAUSE_NS;
    }
}
