/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams, a fill and a copy for the language faces. Owns nothing: handles belong to the caller.
 */
#include "cuda_stream.h"

#include "cuda_device.h"

static gp_status begin(gp_device *device, struct gp__entry *entry, gp_error *error)
{
    if (device->kind != GP_DEVICE_CUDA)
        return gp_error_set(error, GP_ERR_ARGUMENT, "%s is not a CUDA device", device->name);
    return gp__cuda_enter(device, entry, error);
}

/* Leaves the device and turns a driver result into a status. */
static gp_status end(gp_device *device, const struct gp__entry *entry, const char *call,
                     gp__cu_result code, uintptr_t va, size_t bytes, gp_error *error)
{
    gp__cuda_leave(device, entry);
    if (code == GP__CUDA_SUCCESS)
        return GP_OK;
    return gp__cuda_error(gp__cuda_of(device)->api, error, gp__cuda_stream_status(code), call, code,
                          va, bytes);
}

gp_status gp_cuda_stream_create(gp_device *device, unsigned flags, uintptr_t *handle,
                                gp_error *error)
{
    struct gp__entry entry;
    gp__cu_stream stream = NULL;
    if ((flags & ~(unsigned)GP_CUDA_STREAM_NON_BLOCKING) != 0)
        return gp_error_set(error, GP_ERR_ARGUMENT, "unknown stream flags 0x%x", flags);
    gp_status status = begin(device, &entry, error);
    if (status != GP_OK)
        return status;
    unsigned native =
        flags & GP_CUDA_STREAM_NON_BLOCKING ? GP__CU_STREAM_NON_BLOCKING : GP__CU_STREAM_DEFAULT;
    gp__cu_result code = gp__cuda_of(device)->api->cuStreamCreate(&stream, native);
    status = end(device, &entry, "cuStreamCreate", code, 0, 0, error);
    if (status == GP_OK)
        *handle = (uintptr_t)stream;
    return status;
}

gp_status gp_cuda_stream_destroy(gp_device *device, uintptr_t handle, gp_error *error)
{
    struct gp__entry entry;
    if (handle <= GP__CU_STREAM_PER_THREAD)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "stream %zu is a default stream and cannot be destroyed",
                            (size_t)handle);
    gp_status status = begin(device, &entry, error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = gp__cuda_of(device)->api->cuStreamDestroy((gp__cu_stream)handle);
    return end(device, &entry, "cuStreamDestroy", code, handle, 0, error);
}

gp_status gp_cuda_stream_query(gp_device *device, uintptr_t handle, gp_error *error)
{
    struct gp__entry entry;
    gp__cu_capture_status capture = GP__CU_STREAM_CAPTURE_STATUS_NONE;
    gp_status status = begin(device, &entry, error);
    if (status != GP_OK)
        return status;
    const struct gp__cuda_api *api = gp__cuda_of(device)->api;
    gp__cu_result code = api->cuStreamIsCapturing((gp__cu_stream)handle, &capture);
    if (code == GP__CUDA_SUCCESS && capture != GP__CU_STREAM_CAPTURE_STATUS_NONE)
        code = GP__CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* what the query would answer */
    if (code != GP__CUDA_SUCCESS)
        return end(device, &entry, "cuStreamIsCapturing", code, handle, 0, error);
    code = api->cuStreamQuery((gp__cu_stream)handle);
    if (code != GP__CUDA_ERROR_NOT_READY)
        return end(device, &entry, "cuStreamQuery", code, handle, 0, error);
    gp__cuda_leave(device, &entry);
    return GP_NOT_READY;
}

/* Enters the device and finds the stream; one that captures is known by its handle. */
static gp_status begin_work(gp_device *device, uintptr_t handle, struct gp__entry *entry,
                            struct gp__stream_key *key, gp_error *error)
{
    gp_status status = begin(device, entry, error);
    if (status != GP_OK)
        return status;
    status = gp__cuda_stream_resolve(device, handle, key, error);
    if (status == GP_OK || status == GP_ERR_CAPTURE)
        return GP_OK;
    gp__cuda_leave(device, entry);
    return status;
}

gp_status gp_cuda_fill(gp_device *device, uintptr_t stream, uintptr_t va, unsigned char value,
                       size_t bytes, gp_error *error)
{
    struct gp__entry entry;
    struct gp__stream_key key;
    if (bytes == 0)
        return GP_OK;
    gp_status status = begin_work(device, stream, &entry, &key, error);
    if (status != GP_OK)
        return status;
    status = gp__cuda_fill(device, va, bytes, value, &key, error);
    gp__cuda_leave(device, &entry);
    return status;
}

gp_status gp_cuda_copy(gp_device *device, uintptr_t stream, uintptr_t to, uintptr_t from,
                       size_t bytes, gp_error *error)
{
    struct gp__entry entry;
    struct gp__stream_key key;
    if (bytes == 0)
        return GP_OK;
    gp_status status = begin_work(device, stream, &entry, &key, error);
    if (status != GP_OK)
        return status;
    status = gp__cuda_copy(device, to, from, bytes, &key, error);
    gp__cuda_leave(device, &entry);
    return status;
}
