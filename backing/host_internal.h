/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the host device share: the table entries of host_stream.c and host_info.c, with
 * the preconditions that driver.h states, and two questions that several of them ask.
 */
#ifndef GP__HOST_INTERNAL_H
#define GP__HOST_INTERNAL_H

#include "driver.h"

/* GP_ERR_STATE in a forked child. Takes no lock. */
gp_status gp__host_check_fork(gp_error *error);
/* Bytes of memory in the machine, whatever a control group allows. */
size_t gp__host_physical_bytes(void);

gp_status gp__host_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                               gp_error *error);
gp_status gp__host_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                  gp_error *error);
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

#endif
