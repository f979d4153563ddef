/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool enqueues on CUDA streams, and what it asks of captures, for the device table in
 * cuda.c: copies, fills, the id of a capture, and a notice when a captured graph is gone. Keeps no
 * list of captures and never waits.
 */
#include "cuda_device.h"

#include <stdatomic.h>

#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

/* ---- copies and fills ------------------------------------------------------------------------ */

/* What both begin with: the stream is the one meant, and its context is current. */
static gp_status begin_work(const struct gp__cuda_device *cuda, const struct gp__stream_key *stream,
                            struct gp__cuda_scope *scope, gp_error *error)
{
    bool captures = false;
    gp__assert_no_lock();
    gp_status status = gp__check_process(error);
    if (status == GP_OK)
        status = gp__cuda_check_work(cuda, stream, &captures, error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = gp__cuda_scope_enter(cuda->api, (gp__cu_context)stream->context, scope);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuCtxPushCurrent", code, 0, 0);
    return GP_OK;
}

static gp_status end_work(const struct gp__cuda_device *cuda, const struct gp__cuda_scope *scope,
                          const char *call, gp__cu_result code, uintptr_t va, size_t bytes,
                          gp_error *error)
{
    gp__cuda_scope_leave(cuda->api, scope);
    if (code == GP__CUDA_SUCCESS)
        return GP_OK;
    return gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code), call, code, va, bytes);
}

gp_status gp__cuda_copy(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                        const struct gp__stream_key *stream, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct gp__cuda_scope scope;
    if (bytes == 0)
        return gp__check_process(error);
    gp_status status = begin_work(cuda, stream, &scope, error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemcpyAsync(to, from, bytes, (gp__cu_stream)stream->handle);
    return end_work(cuda, &scope, "cuMemcpyAsync", code, to, bytes, error);
}

gp_status gp__cuda_fill(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                        const struct gp__stream_key *stream, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct gp__cuda_scope scope;
    if (bytes == 0)
        return gp__check_process(error);
    gp_status status = begin_work(cuda, stream, &scope, error);
    if (status != GP_OK)
        return status;
    gp__cu_result code =
        cuda->api->cuMemsetD8Async(va, value, bytes, (gp__cu_stream)stream->handle);
    return end_work(cuda, &scope, "cuMemsetD8Async", code, va, bytes, error);
}

/* ---- captures -------------------------------------------------------------------------------- */

struct capture {
    gp__cu_capture_status status;
    uint64_t id; /* this and the graph are written for an active capture only */
    gp__cu_graph graph;
};

/* Goes by the handle, since the id of a capturing stream cannot be asked for. */
static gp__cu_result ask_capture(const struct gp__cuda_device *cuda,
                                 const struct gp__stream_key *stream, struct capture *capture)
{
    struct gp__cuda_scope scope = {false};
    *capture = (struct capture){.status = GP__CU_STREAM_CAPTURE_STATUS_NONE};
    gp__cu_result code = gp__cuda_scope_enter(cuda->api, (gp__cu_context)stream->context, &scope);
    if (code == GP__CUDA_SUCCESS)
        code = cuda->api->cuStreamGetCaptureInfo((gp__cu_stream)stream->handle, &capture->status,
                                                 &capture->id, &capture->graph, NULL, NULL);
    gp__cuda_scope_leave(cuda->api, &scope);
    return code;
}

static gp_status invalidated(const struct gp__stream_key *stream, gp_error *error)
{
    return gp_error_set(error, GP_ERR_CAPTURE,
                        "the capture on stream 0x%zx was invalidated; end it, and capture again",
                        (size_t)stream->handle);
}

gp_status gp__cuda_capture_id(gp_device *device, const struct gp__stream_key *stream, uint64_t *id,
                              gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct capture capture;
    bool captures = false;
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = ask_capture(cuda, stream, &capture);
    bool none = code == GP__CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || gp__cuda_is_dead(code);
    if (code != GP__CUDA_SUCCESS && !none)
        return gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code),
                              "cuStreamGetCaptureInfo", code, stream->handle, 0);
    if (!none && capture.status == GP__CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return invalidated(stream, error);
    /* On a foreign thread a per-thread default stream answers for that thread's own stream. */
    if (!none && capture.status == GP__CU_STREAM_CAPTURE_STATUS_NONE && stream->thread_bound)
        status = gp__cuda_check_work(cuda, stream, &captures, error);
    if (status != GP_OK)
        return status;
    bool active = !none && capture.status == GP__CU_STREAM_CAPTURE_STATUS_ACTIVE;
    *id = active ? capture.id : 0;
    return GP_OK;
}

/* What a graph's user object carries. The object outlives a failed retain until its release, and
 * then it is destroyed like any other: `wanted` says that nobody is to be told. */
struct keep {
    void (*gone)(void *context);
    void *context;
    _Atomic bool wanted;
};

/* Context: a thread of the driver, which forbids driver calls here. */
static void user_object_destroyed(void *context)
{
    struct keep *keep = context;
    if (atomic_load_explicit(&keep->wanted, memory_order_acquire))
        keep->gone(keep->context);
    gp__free(keep);
}

/* The graph takes over the one reference. A release that fails leaks `keep`, and calls nothing. */
static gp_status give_to_graph(const struct gp__cuda_device *cuda, gp__cu_graph graph,
                               struct keep *keep, gp_error *error)
{
    gp__cu_user_object object = NULL;
    gp__cu_result code = cuda->api->cuUserObjectCreate(&object, keep, user_object_destroyed, 1,
                                                       GP__CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    if (code != GP__CUDA_SUCCESS) {
        gp__free(keep);
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuUserObjectCreate", code, 0, 0);
    }
    code = cuda->api->cuGraphRetainUserObject(graph, object, 1, GP__CU_GRAPH_USER_OBJECT_MOVE);
    if (code == GP__CUDA_SUCCESS)
        return GP_OK;
    gp_status status = gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code),
                                      "cuGraphRetainUserObject", code, 0, 0);
    atomic_store_explicit(&keep->wanted, false, memory_order_release);
    (void)cuda->api->cuUserObjectRelease(object, 1);
    return status;
}

gp_status gp__cuda_capture_keep(gp_device *device, const struct gp__stream_key *stream,
                                void (*gone)(void *context), void *context, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct capture capture;
    gp__assert_no_lock();
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = ask_capture(cuda, stream, &capture);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, gp__cuda_stream_status(code),
                              "cuStreamGetCaptureInfo", code, stream->handle, 0);
    if (capture.status == GP__CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return invalidated(stream, error);
    if (capture.status == GP__CU_STREAM_CAPTURE_STATUS_NONE)
        return gp_error_set(error, GP_ERR_CAPTURE,
                            "stream 0x%zx is not being captured, so there is no graph to keep "
                            "memory for",
                            (size_t)stream->handle);
    struct keep *keep = gp__calloc(1, sizeof *keep);
    if (keep == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory to note the end of a graph (%zu bytes)", sizeof *keep);
    keep->gone = gone;
    keep->context = context;
    atomic_init(&keep->wanted, true);
    return give_to_graph(cuda, capture.graph, keep, error);
}
