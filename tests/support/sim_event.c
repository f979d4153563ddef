/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's events, the capture rules that their calls must respect, and enter and leave.
 * What a call does to a capture follows the measured rules: a query invalidates captures unless the
 * thread is in relaxed mode, a context-wide record always does.
 */
#include "sim_internal.h"

#include <stdlib.h>

static const struct gp__sim_kind kinds[] = {
    {"event_create", true, GP_ERR_DRIVER, GP__SIM_OUT_OF_MEMORY},
    {"event_destroy", true, GP_OK, 0},
    {"event_record", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"event_record_context", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"event_query", false, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"event_wait", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"enter", false, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"leave", false, GP_OK, 0},
};
enum { CREATE, DESTROY, RECORD, RECORD_CONTEXT, QUERY, WAIT, ENTER, LEAVE };

/* A thread's capture mode and how deep it is inside enter(); the mode of a thread that never entered
 * is global, as in the driver. */
struct thread_mode {
    bool relaxed;
    int depth;
};
static _Thread_local struct thread_mode mode;

bool gp__sim_thread_is_relaxed(void)
{
    return mode.relaxed;
}

gp_status gp__sim_enter(gp_device *device, struct gp__entry *entry, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (!gp__sim_begin(&call, sim, &kinds[ENTER], error, "enter"))
        return gp__sim_decided(&call);
    /* The depth travels in the entry, so that a leave out of order shows. */
    entry->previous_mode = mode.depth * 2 + (mode.relaxed ? 1 : 0);
    entry->pushed = true;
    mode.depth++;
    mode.relaxed = true;
    sim->entered++;
    return gp__sim_end_ok(&call);
}

void gp__sim_leave(gp_device *device, const struct gp__entry *entry)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (gp__sim_begin(&call, sim, &kinds[LEAVE], NULL, "leave")) {
        if (sim->entered == 0 || !entry->pushed || entry->previous_mode / 2 != mode.depth - 1) {
            gp__sim_violate(&call, "does not match the latest enter of this thread");
        } else {
            mode.depth--;
            mode.relaxed = entry->previous_mode % 2 != 0;
            sim->entered--;
        }
    }
    gp__sim_end_ok(&call);
}

gp_status gp__sim_event_create(gp_device *device, uintptr_t context, gp__event **out,
                               gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    gp__event *event;

    if (!gp__sim_begin(&call, sim, &kinds[CREATE], error, "event_create"))
        return gp__sim_decided(&call);
    if (context != device->context)
        gp__sim_violate(&call, "in a context that is not this device's");
    event = gp__sim_calloc(sizeof *event);
    event->next = sim->events;
    sim->events = event;
    sim->event_count++;
    *out = event;
    return gp__sim_end_ok(&call);
}

static bool is_known(const gp__sim *sim, const gp__event *event)
{
    const gp__event *known = sim->events;

    while (known != NULL && known != event)
        known = known->next;
    return known != NULL;
}

/* True when the event may be used; otherwise notes the violation. */
static bool check_event(struct gp__sim_call *call, const gp__event *event)
{
    if (!is_known(call->sim, event))
        gp__sim_violate(call, "not an event of this device");
    else if (event->destroyed)
        gp__sim_violate(call, "a destroyed event");
    else
        return true;
    return false;
}

static void forget_event(struct gp__sim_stream *stream, const gp__event *event)
{
    for (struct gp__sim_item *item = stream->first; item != NULL; item = item->next)
        if (item->event == event)
            item->event = NULL;
}

void gp__sim_event_destroy(gp_device *device, gp__event *event)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (gp__sim_begin(&call, sim, &kinds[DESTROY], NULL, "event_destroy") &&
        check_event(&call, event)) {
        for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
            forget_event(stream, event);
        event->destroyed = true;
        sim->event_count--;
    }
    gp__sim_end_ok(&call);
}

static void require_entered(struct gp__sim_call *call)
{
    if (mode.depth == 0)
        gp__sim_violate(call, "outside enter()");
}

/* Ends every capture that a query by this thread would end; always, with `in_any_mode`. */
static bool invalidate(gp__sim *sim, bool in_any_mode)
{
    bool hit = false;

    for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next) {
        struct gp__sim_capture *capture = &stream->capture;
        bool own = capture->thread == gp__sim_thread();
        bool affected = in_any_mode ||
                        (!mode.relaxed && (capture->mode == GP__SIM_CAPTURE_GLOBAL ||
                                           (own && capture->mode == GP__SIM_CAPTURE_THREAD_LOCAL)));

        if (!capture->active || !affected)
            continue;
        capture->valid = false;
        hit = true;
    }
    return hit;
}

static void begin_record(gp__event *event)
{
    event->record++;
    event->outstanding = 0;
    event->captured = false;
}

static void enqueue_record(struct gp__sim_stream *stream, gp__event *event)
{
    struct gp__sim_item item = {.event = event, .record = event->record};

    gp__sim_push(stream, &item);
    event->outstanding++;
}

/* What is wrong with recording on this stream, apart from captures. The driver goes by the handle. */
static void check_recordable(struct gp__sim_call *call, const struct gp__sim_stream *stream,
                             const struct gp__stream_key *key)
{
    require_entered(call);
    if (stream == NULL)
        gp__sim_violate(call, "a destroyed stream");
    else if (stream->id != key->id && stream->thread != 0)
        gp__sim_violate(call, "a stream bound to another thread");
    else if (stream->id != key->id)
        gp__sim_violate(call, "the handle names stream id %llu by now",
                        (unsigned long long)stream->id);
}

gp_status gp__sim_event_record(gp_device *device, gp__event *event,
                               const struct gp__stream_key *key, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_stream *stream;

    if (!gp__sim_begin(&call, sim, &kinds[RECORD], error, "event_record handle=0x%zx id=%llu",
                       (size_t)key->handle, (unsigned long long)key->id))
        return gp__sim_decided(&call);
    if (!check_event(&call, event))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (sim->dead) {
        begin_record(event); /* nothing can still run: it has passed */
        return gp__sim_end_ok(&call);
    }
    stream = gp__sim_find(sim, key->handle);
    check_recordable(&call, stream, key);
    if (stream == NULL)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (gp__sim_is_implicit(sim, stream)) {
        for (struct gp__sim_stream *other = sim->streams; other != NULL; other = other->next)
            if (other->flags & GP__SIM_STREAM_BLOCKING)
                other->capture.valid = false;
        gp__sim_violate(&call, "the legacy stream, beside a blocking stream that captures");
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_CAPTURE_IMPLICIT, 0, 0);
    }
    begin_record(event);
    if (stream->capture.active) {
        gp__sim_violate(&call, "a stream that captures");
        event->captured = true;
    } else {
        enqueue_record(stream, event);
    }
    return gp__sim_end_ok(&call);
}

gp_status gp__sim_event_record_context(gp_device *device, gp__event *event, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (!gp__sim_begin(&call, sim, &kinds[RECORD_CONTEXT], error, "event_record_context"))
        return gp__sim_decided(&call);
    if (!check_event(&call, event))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (sim->dead) {
        begin_record(event); /* nothing can still run: it has passed */
        return gp__sim_end_ok(&call);
    }
    require_entered(&call);
    if (invalidate(sim, true)) {
        gp__sim_violate(&call, "invalidates a capture of the context");
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_CAPTURE_UNSUPPORTED, 0, 0);
    }
    begin_record(event);
    for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
        if (stream->first != NULL)
            enqueue_record(stream, event);
    if (event->outstanding == 0)
        enqueue_record(sim->streams, event);
    return gp__sim_end_ok(&call);
}

/* The rules that query and wait share. GP_OK: look at the event. */
static gp_status check_query(struct gp__sim_call *call, const gp__event *event, int *code)
{
    *code = GP__SIM_INVALID_HANDLE;
    if (!check_event(call, event))
        return GP_ERR_DRIVER;
    if (event->captured) {
        gp__sim_violate(call, "an event that was recorded into a capture");
        *code = GP__SIM_CAPTURED_EVENT;
        return GP_ERR_DRIVER;
    }
    if (invalidate(call->sim, false)) {
        gp__sim_violate(call, "invalidates a capture: the thread is not in relaxed mode");
        *code = GP__SIM_CAPTURE_UNSUPPORTED;
        return GP_ERR_DRIVER;
    }
    require_entered(call);
    return GP_OK;
}

static gp_status end_query(struct gp__sim_call *call, const gp__event *event)
{
    if (event->outstanding == 0 || call->sim->dead)
        return gp__sim_end_ok(call);
    return gp__sim_end(call, GP_NOT_READY, GP__SIM_NOT_READY, 0, 0);
}

gp_status gp__sim_event_query(gp_device *device, gp__event *event, gp_error *error)
{
    struct gp__sim_call call;
    gp_status status;
    int code;

    if (!gp__sim_begin(&call, device->state, &kinds[QUERY], error, "event_query"))
        return gp__sim_decided(&call);
    status = check_query(&call, event, &code);
    if (status != GP_OK)
        return gp__sim_end(&call, status, code, 0, 0);
    return end_query(&call, event);
}

static bool holds_record(const struct gp__sim_stream *stream, const gp__event *event)
{
    const struct gp__sim_item *item = stream->first;

    while (item != NULL && (item->event != event || item->record != event->record))
        item = item->next;
    return item != NULL;
}

/* Lets each stream run up to its record of the event and no further. */
static void run_until(struct gp__sim_call *call, const gp__event *event)
{
    for (struct gp__sim_stream *stream = call->sim->streams; stream != NULL; stream = stream->next)
        while (holds_record(stream, event))
            gp__sim_pop(call, stream);
}

gp_status gp__sim_event_wait(gp_device *device, gp__event *event, uint64_t timeout_ns,
                             gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    gp_status status;
    int code;

    (void)timeout_ns;
    if (!gp__sim_begin(&call, sim, &kinds[WAIT], error, "event_wait"))
        return gp__sim_decided(&call);
    status = check_query(&call, event, &code);
    if (status != GP_OK)
        return gp__sim_end(&call, status, code, 0, 0);
    if (!sim->dead && sim->wait_mode == GP__SIM_WAIT_COMPLETES && event->outstanding > 0)
        run_until(&call, event);
    return end_query(&call, event);
}

void gp__sim_set_wait_mode(gp__sim *sim, enum gp__sim_wait_mode wait_mode)
{
    gp__mutex_lock(&sim->mutex);
    sim->wait_mode = wait_mode;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_kill_context(gp__sim *sim)
{
    gp__mutex_lock(&sim->mutex);
    sim->dead = true;
    for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next) {
        stream->capture.active = false;
        while (stream->first != NULL) {
            struct gp__sim_item *item = stream->first;

            stream->first = item->next;
            if (item->event != NULL && item->event->record == item->record)
                item->event->outstanding--;
            free(item);
            stream->last = stream->first == NULL ? NULL : stream->last;
            stream->pending--;
        }
    }
    gp__mutex_unlock(&sim->mutex);
}
