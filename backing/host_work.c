/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool enqueues on host streams, for the device table in host.c: copies, fills and
 * waits as items of a stream's queue, or done at once on the calling thread. Says for captures that
 * there are none.
 */
#include "host_internal.h"
#include "lock.h"
#include "memory.h"

#include <string.h>

struct work {
    uintptr_t to;
    uintptr_t from; /* 0: a fill */
    size_t bytes;
    unsigned char value;
};

static void do_work(const struct work *work)
{
    if (work->from != 0) {
        memmove((void *)work->to, (const void *)work->from, work->bytes);
    } else {
        memset((void *)work->to, work->value, work->bytes);
    }
}

/* Context: the stream's worker. */
static void run_work(void *context)
{
    do_work(context);
    gp__free(context);
}

static gp_status submit(const struct work *work, const struct gp__stream_key *stream,
                        gp_error *error)
{
    gp__assert_no_lock();
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK || work->bytes == 0) {
        return status;
    }
    if (stream->always_passed) {
        do_work(work);
        return GP_OK;
    }
    struct work *copy = gp__calloc(1, sizeof *copy);
    if (copy == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory to queue work on %zu bytes (%zu bytes)", work->bytes,
                            sizeof *copy);
    }
    *copy = *work;
    status = gp__host_submit(stream, run_work, copy, error);
    if (status != GP_OK) {
        gp__free(copy);
    }
    return status;
}

gp_status gp__host_copy(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                        const struct gp__stream_key *stream, gp_error *error)
{
    (void)device;
    return submit(&(struct work){.to = to, .from = from, .bytes = bytes}, stream, error);
}

gp_status gp__host_fill(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                        const struct gp__stream_key *stream, gp_error *error)
{
    (void)device;
    return submit(&(struct work){.to = va, .bytes = bytes, .value = value}, stream, error);
}

/* Context: the stream's worker. Blocks it and no other: all that came before the wait on this very
 * stream is done, so the event can only be held up by others. */
static void run_wait(void *context)
{
    gp__event *event = context;
    (void)gp__host_event_wait(NULL, event, UINT64_MAX, NULL);
    gp__host_event_destroy(NULL, event);
}

/* On the calling thread, which has no later moment to wait at. */
static gp_status wait_here(gp_device *device, gp__event *event, gp_error *error)
{
    gp_status status = gp__host_event_wait(device, event, UINT64_MAX, error);
    if (status == GP_NOT_READY) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "work on a host stream cannot wait for its own stream: it would wait "
                            "for itself");
    }
    return status;
}

gp_status gp__host_stream_wait(gp_device *device, const struct gp__stream_key *stream,
                               gp__event *event, gp_error *error)
{
    gp__event *copy = NULL;
    gp__assert_no_lock();
    gp_status status = gp__host_event_query(device, event, error);
    if (status != GP_NOT_READY) {
        return status; /* passed: nothing to wait for */
    }
    if (stream->always_passed) {
        return wait_here(device, event, error);
    }
    /* The event may be recorded again meanwhile, so the wait has a copy of its own. */
    status = gp__host_event_copy(event, &copy, error);
    if (status != GP_OK) {
        return status;
    }
    status = gp__host_submit(stream, run_wait, copy, error);
    if (status != GP_OK) {
        gp__host_event_destroy(device, copy);
    }
    return status;
}

gp_status gp__host_capture_id(gp_device *device, const struct gp__stream_key *stream, uint64_t *id,
                              gp_error *error)
{
    (void)device;
    (void)stream;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        *id = 0; /* host streams cannot be captured */
    }
    return status;
}

gp_status gp__host_capture_keep(gp_device *device, const struct gp__stream_key *stream,
                                void (*gone)(void *context), void *context, gp_error *error)
{
    (void)stream;
    (void)gone;
    (void)context;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    return gp_error_set(error, GP_ERR_UNAVAILABLE,
                        "streams of device %s cannot be captured, so there is no graph to keep "
                        "memory for",
                        device->name);
}
