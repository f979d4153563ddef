/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams of the host device: a worker thread that runs functions in order. Work submitted here can
 * touch pool memory, and a fence recorded in the stream completes only when that work has finished.
 *
 * Stream id 0 is "the calling thread": its work is complete whenever a call returns.
 */
#ifndef GP_HOST_STREAM_H
#define GP_HOST_STREAM_H

#include "backing.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gp_host_stream gp_host_stream;

/* Starts the worker. */
gp_status gp_host_stream_create(gp_host_stream **out, gp_error *error);
/* The id to use as a stream handle on the "host" device; never reused in the process; not 0. */
uint64_t gp_host_stream_id(const gp_host_stream *stream);
/* Runs function(context) on the worker after everything submitted before. Any thread. The function
 * must return (no longjmp, no pthread_exit). GP_ERR_STATE in a forked child. */
gp_status gp_host_stream_submit(gp_host_stream *stream, void (*function)(void *context),
                                void *context, gp_error *error);
/* Waits at most timeout_ns for all work submitted before the call: GP_OK or GP_NOT_READY; at once
 * GP_NOT_READY on the stream's own worker, GP_ERR_STATE in a forked child. */
gp_status gp_host_stream_wait(gp_host_stream *stream, uint64_t timeout_ns);
/* Takes no more work; the worker ends when the queue is empty. Does not wait. The id stays known to
 * growpool until its work is done, so fences stay valid. Frees the object. Any thread, the worker
 * itself included. */
void gp_host_stream_close(gp_host_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
