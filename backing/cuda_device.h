/* SPDX-License-Identifier: Apache-2.0
 *
 * What the CUDA files share about an open device: cuda.c owns memory and entering, cuda_time.c owns
 * streams and events, cuda_work.c enqueues work and keeps what captures need, cuda_stream.c makes
 * streams for the language faces.
 *
 * DRIVER FACTS RELIED ON (H200, driver 580.159, CUDA 13.0)
 *   - A stream or event call without its context current may answer for the wrong context, so each
 *     is made with the context of its stream or event current.
 *   - Handles 0 and 1 are the legacy default stream of the current context, handle 2 the calling
 *     thread's own default stream; every other handle knows its context.
 *   - A driver call in a forked child answers NOT_INITIALIZED at best: none is made.
 *   - cuStreamGetCaptureInfo harms no capture in any mode. After an invalidation it writes the status
 *     alone; on the legacy stream beside a blocking capture it answers CAPTURE_IMPLICIT.
 *   - cuStreamWaitEvent on the legacy stream beside a blocking capture, or in a capturing stream for
 *     an event from outside of the capture, fails and invalidates the capture as well.
 *   - A user object that was moved into a captured graph is destroyed, on a thread of the driver, when
 *     the graph, all executables and all their launches are over, at the end of an invalidated
 *     capture, and with a stream that is destroyed while it captures.
 */
#ifndef GP__CUDA_DEVICE_H
#define GP__CUDA_DEVICE_H

#include "cuda_load.h"
#include "driver.h"

struct gp__cuda_device {
    gp_device base; /* base.state points back here */
    const struct gp__cuda_api *api;
    gp__cu_device native;
    gp__cu_context context; /* the primary context, retained until the process ends */
    uint64_t legacy_id; /* of the legacy default stream in that context */
    int host_node; /* NUMA node of host memory near the device */
    bool host_supported; /* chunks in host memory can be made */
};

static inline struct gp__cuda_device *gp__cuda_of(gp_device *device)
{
    return device->state;
}

/* A context made current for a few calls; a no-op where it is current already. */
struct gp__cuda_scope {
    bool pushed;
};
gp__cu_result gp__cuda_scope_enter(const struct gp__cuda_api *api, gp__cu_context context,
                                   struct gp__cuda_scope *scope);
void gp__cuda_scope_leave(const struct gp__cuda_api *api, const struct gp__cuda_scope *scope);

/* True for results after which nothing in the context can run any more: a sticky error (the device
 * stopped it) or a destroyed context. */
bool gp__cuda_is_dead(gp__cu_result code);
/* The status of a failed stream or event call: GP_ERR_CAPTURE for those a capture causes. */
gp_status gp__cuda_stream_status(gp__cu_result code);

/* cuda.c */
gp_status gp__cuda_enter(gp_device *device, struct gp__entry *entry, gp_error *error);
void gp__cuda_leave(gp_device *device, const struct gp__entry *entry);

/* Whether work enqueued on the stream now lands where the caller means it. GP_ERR_CAPTURE for the
 * legacy stream beside a blocking capture, which any work there would invalidate; GP_ERR_ARGUMENT
 * for a handle that names another stream by now, as far as that can be asked: not while the stream
 * captures, nor without an id in the key. A dead context is left for the work itself to find. */
gp_status gp__cuda_check_work(const struct gp__cuda_device *cuda,
                              const struct gp__stream_key *stream, bool *captures, gp_error *error);
/* cuda_share.c, for the table in cuda.c: contracts in driver.h. */
gp_status gp__cuda_export_fd(gp_device *device, gp__memory memory, size_t bytes, int *fd,
                             gp_error *error);
gp_status gp__cuda_import_fd(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                             gp_error *error);
gp_status gp__cuda_can_access(gp_device *device, gp_device *peer, bool *can, gp_error *error);
/* GP_CHUNK_* that the device says it supports. */
unsigned gp__cuda_chunk_flags(const struct gp__cuda_api *api, gp__cu_device device);

/* cuda_time.c, for the table in cuda.c: contracts in driver.h. */
gp_status gp__cuda_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                  gp_error *error);
gp_status gp__cuda_stream_confirm(gp_device *device, const struct gp__stream_key *stream);
gp_status gp__cuda_stream_capturing(gp_device *device, const struct gp__stream_key *stream,
                                    bool *capturing, gp_error *error);
gp_status gp__cuda_event_create(gp_device *device, uintptr_t context, gp__event **out,
                                gp_error *error);
void gp__cuda_event_destroy(gp_device *device, gp__event *event);
gp_status gp__cuda_event_record(gp_device *device, gp__event *event,
                                const struct gp__stream_key *stream, gp_error *error);
gp_status gp__cuda_event_record_context(gp_device *device, gp__event *event, gp_error *error);
gp_status gp__cuda_event_query(gp_device *device, gp__event *event, gp_error *error);
gp_status gp__cuda_event_wait(gp_device *device, gp__event *event, uint64_t timeout_ns,
                              gp_error *error);
gp_status gp__cuda_stream_wait(gp_device *device, const struct gp__stream_key *stream,
                               gp__event *event, gp_error *error);

/* cuda_work.c, likewise. */
gp_status gp__cuda_copy(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                        const struct gp__stream_key *stream, gp_error *error);
gp_status gp__cuda_fill(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                        const struct gp__stream_key *stream, gp_error *error);
gp_status gp__cuda_capture_id(gp_device *device, const struct gp__stream_key *stream, uint64_t *id,
                              gp_error *error);
gp_status gp__cuda_capture_keep(gp_device *device, const struct gp__stream_key *stream,
                                void (*gone)(void *context), void *context, gp_error *error);

#endif
