/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the host device share: the table entries of host_stream.c, host_work.c and
 * host_info.c, with the preconditions that driver.h states, and what several of them use.
 */
#ifndef GP__HOST_INTERNAL_H
#define GP__HOST_INTERNAL_H

#include "driver.h"

#include <sys/mman.h>

/* Pages that a reservation, or a chunk nobody has touched, consists of. */
#define GP__HOST_PRIVATE_PAGES (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

/* How bringing pages to a place ended. */
enum gp__host_move {
    GP__HOST_MOVED,
    GP__HOST_NOT_MOVED, /* errno says why; both ranges are as they were */
    GP__HOST_TARGET_LOST /* the same, but the target's addresses are no longer ours */
};

/* GP_ERR_STATE in a forked child. Takes no lock. */
gp_status gp__host_check_fork(gp_error *error);
/* Bytes of memory in the machine, whatever a control group allows. */
size_t gp__host_physical_bytes(void);

/* host.c, for host_share.c: describes memory in a file; takes over the descriptor on GP_OK. */
gp_status gp__host_share_wrap(int descriptor, size_t bytes, gp__memory *out, gp_error *error);
/* The memory file of such memory. */
int gp__host_descriptor(gp__memory memory);

/* host_share.c, for host.c. */
gp_status gp__host_share_create(size_t bytes, int *descriptor, gp_error *error);
/* Maps the file, out of reach, over a reservation's own pages. */
enum gp__host_move gp__host_share_map(int descriptor, uintptr_t va, size_t bytes);
/* Puts a reservation's own pages in its place. 0 or errno; *lost: the addresses are no longer ours. */
int gp__host_share_unmap(uintptr_t va, size_t bytes, bool *lost);
gp_status gp__host_export_fd(gp_device *device, gp__memory memory, size_t bytes, int *fd,
                             gp_error *error);
gp_status gp__host_import_fd(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                             gp_error *error);
gp_status gp__host_can_access(gp_device *device, gp_device *peer, bool *can, gp_error *error);

gp_status gp__host_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                               gp_error *error);
gp_status gp__host_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                  gp_error *error);
gp_status gp__host_stream_confirm(gp_device *device, const struct gp__stream_key *stream);
gp_status gp__host_stream_capturing(gp_device *device, const struct gp__stream_key *stream,
                                    bool *capturing, gp_error *error);
gp_status gp__host_event_create(gp_device *device, uintptr_t context, gp__event **out,
                                gp_error *error);
void gp__host_event_destroy(gp_device *device, gp__event *event);
gp_status gp__host_event_record(gp_device *device, gp__event *event,
                                const struct gp__stream_key *stream, gp_error *error);
gp_status gp__host_event_record_context(gp_device *device, gp__event *event, gp_error *error);
gp_status gp__host_event_query(gp_device *device, gp__event *event, gp_error *error);
gp_status gp__host_event_wait(gp_device *device, gp__event *event, uint64_t timeout_ns,
                              gp_error *error);

/* An event with the same record, for the caller to destroy. GP_ERR_HOST_MEMORY. */
gp_status gp__host_event_copy(const gp__event *event, gp__event **out, gp_error *error);
/* gp_host_stream_submit() for a stream that was resolved and does not always pass. GP_ERR_STATE when
 * it takes no work any more. Any thread; takes the stream's lock. */
gp_status gp__host_submit(const struct gp__stream_key *stream, void (*function)(void *context),
                          void *context, gp_error *error);

gp_status gp__host_copy(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                        const struct gp__stream_key *stream, gp_error *error);
gp_status gp__host_fill(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                        const struct gp__stream_key *stream, gp_error *error);
gp_status gp__host_capture_id(gp_device *device, const struct gp__stream_key *stream, uint64_t *id,
                              gp_error *error);
gp_status gp__host_capture_keep(gp_device *device, const struct gp__stream_key *stream,
                                void (*gone)(void *context), void *context, gp_error *error);
gp_status gp__host_stream_wait(gp_device *device, const struct gp__stream_key *stream,
                               gp__event *event, gp_error *error);

#endif
