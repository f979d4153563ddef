/* SPDX-License-Identifier: Apache-2.0
 *
 * A few CUDA stream operations for language faces, tests and demos on machines without another CUDA
 * library: streams, a fill and a copy. Not a CUDA binding, and not needed to use growpool with one.
 *
 * Every function works from any thread and needs no current context; the caller's is left as it was.
 * All fail with GP_ERR_ARGUMENT for a device that is not CUDA, and with GP_ERR_STATE in a forked
 * child and after gp_begin_exit().
 */
#ifndef GP_CUDA_STREAM_H
#define GP_CUDA_STREAM_H

#include "backing.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GP_CUDA_STREAM_NON_BLOCKING = 1 /* does not synchronise with the legacy default stream */
};

/* Makes a stream in the device's primary context. May block. */
gp_status gp_cuda_stream_create(gp_device *device, unsigned flags, uintptr_t *handle,
                                gp_error *error);
/* Destroys a stream made above; its pending work still runs. Pools that used it come first: see
 * gp_pool_forget_stream(). Using the handle afterwards can crash the process. */
gp_status gp_cuda_stream_destroy(gp_device *device, uintptr_t handle, gp_error *error);
/* GP_OK when all work of the stream is complete, GP_NOT_READY while it is not. Never blocks.
 * GP_ERR_CAPTURE when the stream captures (which is asked first, so the capture survives). */
gp_status gp_cuda_stream_query(gp_device *device, uintptr_t handle, gp_error *error);
/* Enqueues "set `bytes` bytes at `va` to `value`". */
gp_status gp_cuda_fill(gp_device *device, uintptr_t stream, uintptr_t va, unsigned char value,
                       size_t bytes, gp_error *error);
/* Enqueues a copy between any two addresses that CUDA knows, device or host. Copies from pageable
 * host memory may block until the data is staged. */
gp_status gp_cuda_copy(gp_device *device, uintptr_t stream, uintptr_t to, uintptr_t from,
                       size_t bytes, gp_error *error);

#ifdef __cplusplus
}
#endif
#endif
