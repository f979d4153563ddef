/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool itself enqueues on the simulated driver's streams: copies, fills, waits. It moves no
 * byte: made-up addresses hold none.
 */
#include "sim_internal.h"

static const struct gp__sim_kind kinds[] = {
    {"copy", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"fill", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"stream_wait", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
};
enum { COPY, FILL, STREAM_WAIT };

#define ADDRESS_SPAN (UINT64_C(1) << 42) /* between the first addresses of two devices */

/* All other addresses are the host's. */
static bool is_simulated(const gp__sim *sim, uintptr_t va)
{
    uintptr_t first = GP__SIM_BASE_VA + (uintptr_t)sim->options.ordinal * ADDRESS_SPAN;

    return va >= first && va - first < ADDRESS_SPAN;
}

/* The stream to enqueue on, or NULL with the status and code to answer. */
static struct gp__sim_stream *stream_for(struct gp__sim_call *call,
                                         const struct gp__stream_key *key, gp_status *status,
                                         int *code)
{
    struct gp__sim_stream *stream = gp__sim_find(call->sim, key->handle);

    gp__sim_check_stream(call, stream, key);
    *status = GP_ERR_DRIVER;
    *code = GP__SIM_INVALID_HANDLE;
    if (stream == NULL)
        return NULL;
    if (key->id != 0 && stream->id != key->id) {
        *status = GP_ERR_ARGUMENT;
        return NULL;
    }
    if (gp__sim_hits_implicit(call, stream)) {
        *status = GP_ERR_CAPTURE;
        *code = GP__SIM_CAPTURE_IMPLICIT;
        return NULL;
    }
    return stream;
}

/* The end of a copy or fill: into the queue, or into the graph. */
static gp_status enqueue(struct gp__sim_call *call, const struct gp__stream_key *key,
                         const struct gp__sim_item *item)
{
    struct gp__sim_stream *stream;
    gp_status status;
    int code;

    if (call->sim->dead) {
        gp__sim_require_entered(call);
        return gp__sim_end(call, GP_ERR_DRIVER, GP__SIM_ILLEGAL_ADDRESS, 0, 0);
    }
    stream = stream_for(call, key, &status, &code);
    if (stream == NULL)
        return gp__sim_end(call, status, code, 0, 0);
    for (size_t i = 0; i < 2; i++) {
        const struct gp__sim_range *range = &item->ranges[i];

        if (range->bytes == 0 || gp__sim_covered(call->sim, range->va, range->bytes))
            continue;
        gp__sim_violate(call, "va=0x%zx bytes=%zu is not mapped with access", (size_t)range->va,
                        range->bytes);
        return gp__sim_end(call, GP_ERR_DRIVER, GP__SIM_INVALID_VALUE, range->va, range->bytes);
    }
    if (stream->capture == NULL) {
        gp__sim_push(stream, item);
        return gp__sim_end_ok(call);
    }
    if (!stream->capture->valid)
        return gp__sim_end(call, GP_ERR_CAPTURE, GP__SIM_CAPTURE_INVALIDATED, 0, 0);
    for (size_t i = 0; i < 2; i++)
        gp__sim_add_range(stream->capture, &item->ranges[i]);
    return gp__sim_end_ok(call);
}

static struct gp__sim_range range_of(const gp__sim *sim, uintptr_t va, size_t bytes)
{
    return (struct gp__sim_range){va, is_simulated(sim, va) ? bytes : 0, NULL};
}

gp_status gp__sim_copy(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                       const struct gp__stream_key *key, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_item item = {
        .ranges = {range_of(sim, to, bytes), range_of(sim, from, bytes)},
    };

    if (!gp__sim_begin(&call, sim, &kinds[COPY], error,
                       "copy handle=0x%zx va=0x%zx from=0x%zx bytes=%zu", (size_t)key->handle,
                       (size_t)to, (size_t)from, bytes))
        return gp__sim_decided(&call);
    return bytes == 0 ? gp__sim_end_ok(&call) : enqueue(&call, key, &item);
}

gp_status gp__sim_fill(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                       const struct gp__stream_key *key, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_item item = {.ranges = {range_of(sim, va, bytes)}};

    if (!gp__sim_begin(&call, sim, &kinds[FILL], error,
                       "fill handle=0x%zx va=0x%zx bytes=%zu value=%u", (size_t)key->handle,
                       (size_t)va, bytes, value))
        return gp__sim_decided(&call);
    return bytes == 0 ? gp__sim_end_ok(&call) : enqueue(&call, key, &item);
}

/* A wait that invalidates the stream's capture, or that would draw the stream into one. */
static gp_status refuse_wait(struct gp__sim_call *call, struct gp__sim_stream *stream)
{
    if (stream->capture != NULL) {
        gp__sim_violate(call, "a stream that captures");
        stream->capture->valid = false;
        return gp__sim_end(call, GP_ERR_CAPTURE, GP__SIM_CAPTURE_ISOLATION, 0, 0);
    }
    gp__sim_violate(call, "for an event that was recorded into a capture");
    return gp__sim_end(call, GP_ERR_CAPTURE, GP__SIM_CAPTURED_EVENT, 0, 0);
}

gp_status gp__sim_stream_wait(gp_device *device, const struct gp__stream_key *key, gp__event *event,
                              gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_stream *stream;
    struct gp__sim_item item = {.event = NULL};
    gp_status status;
    int code;

    if (!gp__sim_begin(&call, sim, &kinds[STREAM_WAIT], error, "stream_wait handle=0x%zx id=%llu",
                       (size_t)key->handle, (unsigned long long)key->id))
        return gp__sim_decided(&call);
    if (!gp__sim_check_event(&call, event))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (sim->dead) {
        gp__sim_require_entered(&call);
        return gp__sim_end_ok(&call); /* nothing can still run: there is nothing to wait for */
    }
    stream = stream_for(&call, key, &status, &code);
    if (stream == NULL)
        return gp__sim_end(&call, status, code, 0, 0);
    if (stream->capture != NULL || event->captured)
        return refuse_wait(&call, stream);
    item.waits_for = event->record;
    gp__sim_push(stream, &item);
    return gp__sim_end_ok(&call);
}
