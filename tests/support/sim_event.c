/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's events, and enter and leave.
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

#define MOST_ENTERED 16 /* by one thread at once */

/* A thread's capture mode and the devices that it is inside of, the innermost last; the mode of a thread
 * that never entered is global, as in the driver. */
struct thread_mode {
    bool relaxed;
    int depth;
    gp__sim *inside[MOST_ENTERED];
};
static _Thread_local struct thread_mode mode;

gp__sim *gp__sim_current(void)
{
    return mode.depth > 0 ? mode.inside[mode.depth - 1] : NULL;
}

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
    if (mode.depth == MOST_ENTERED)
        abort();
    mode.inside[mode.depth++] = sim;
    mode.relaxed = true;
    sim->entered++;
    return gp__sim_end_ok(&call);
}

void gp__sim_leave(gp_device *device, const struct gp__entry *entry)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (gp__fork_generation() != 0)
        return;
    if (gp__sim_begin(&call, sim, &kinds[LEAVE], NULL, "leave")) {
        if (gp__sim_current() != sim || !entry->pushed ||
            entry->previous_mode / 2 != mode.depth - 1) {
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

bool gp__sim_check_event(struct gp__sim_call *call, const gp__event *event)
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
        gp__sim_check_event(&call, event)) {
        for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
            forget_event(stream, event);
        event->destroyed = true;
        sim->event_count--;
    }
    gp__sim_end_ok(&call);
}

void gp__sim_require_entered(struct gp__sim_call *call)
{
    if (mode.depth == 0)
        gp__sim_violate(call, "outside enter()");
    else if (gp__sim_current() != call->sim)
        gp__sim_violate(call, "while the context of %s is current", gp__sim_current()->device.name);
}

static void begin_record(gp__sim *sim, gp__event *event)
{
    event->record = ++sim->record_count;
    event->outstanding = 0;
    event->captured = false;
}

static void enqueue_record(struct gp__sim_stream *stream, gp__event *event)
{
    struct gp__sim_item item = {.event = event, .record = event->record};

    gp__sim_push(stream, &item);
    event->outstanding++;
}

/* The driver goes by the handle. The key of a stream that was resolved while it captured has no id. */
void gp__sim_check_stream(struct gp__sim_call *call, const struct gp__sim_stream *stream,
                          const struct gp__stream_key *key)
{
    gp__sim_require_entered(call);
    if (stream == NULL)
        gp__sim_violate(call, "a destroyed stream");
    else if (key->id == 0 || stream->id == key->id)
        return;
    else if (stream->thread != 0)
        gp__sim_violate(call, "a stream bound to another thread");
    else
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
    if (!gp__sim_check_event(&call, event))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (sim->dead) {
        begin_record(sim, event); /* nothing can still run: it has passed */
        return gp__sim_end_ok(&call);
    }
    stream = gp__sim_find(sim, key->handle);
    gp__sim_check_stream(&call, stream, key);
    if (stream == NULL)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (gp__sim_hits_implicit(&call, stream))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_CAPTURE_IMPLICIT, 0, 0);
    begin_record(sim, event);
    if (stream->capture != NULL) {
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
    if (!gp__sim_check_event(&call, event))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    if (sim->dead) {
        begin_record(sim, event); /* nothing can still run: it has passed */
        return gp__sim_end_ok(&call);
    }
    gp__sim_require_entered(&call);
    if (gp__sim_invalidate(sim, true)) {
        gp__sim_violate(&call, "invalidates a capture of the context");
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_CAPTURE_UNSUPPORTED, 0, 0);
    }
    begin_record(sim, event);
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
    if (!gp__sim_check_event(call, event))
        return GP_ERR_DRIVER;
    if (event->captured) {
        gp__sim_violate(call, "an event that was recorded into a capture");
        *code = GP__SIM_CAPTURED_EVENT;
        return GP_ERR_DRIVER;
    }
    if (gp__sim_invalidate(call->sim, false)) {
        gp__sim_violate(call, "invalidates a capture: the thread is not in relaxed mode");
        *code = GP__SIM_CAPTURE_UNSUPPORTED;
        return GP_ERR_DRIVER;
    }
    gp__sim_require_entered(call);
    return GP_OK;
}

static gp_status end_query(struct gp__sim_call *call, const gp__event *event)
{
    if (event->outstanding == 0 || call->sim->dead)
        return gp__sim_end_ok(call);
    return gp__sim_end(call, GP_NOT_READY, GP__SIM_NOT_READY, 0, 0);
}

/* Lets each stream run up to its part of the record and no further; where a stream waits there, so
 * does what it waits for. The recursion ends: a record that is waited for was made before the wait. */
static void run_until(struct gp__sim_call *call, uint64_t record)
{
    for (struct gp__sim_stream *stream = call->sim->streams; stream != NULL; stream = stream->next)
        while (gp__sim_holds_record(stream, record)) {
            if (gp__sim_is_blocked(call->sim, stream))
                run_until(call, stream->first->waits_for);
            gp__sim_pop(call, stream);
        }
}

/* Lets the device run as far as the event, where the mode says so. */
static void run_as(struct gp__sim_call *call, const gp__event *event, enum gp__sim_wait_mode when)
{
    if (!call->sim->dead && call->sim->wait_mode == when && event->outstanding > 0)
        run_until(call, event->record);
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
    run_as(&call, event, GP__SIM_QUERY_COMPLETES);
    return end_query(&call, event);
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
    if (sim->wait_mode != GP__SIM_WAIT_TIMES_OUT)
        run_as(&call, event, sim->wait_mode);
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
    struct gp__sim_keep *gone;

    gp__mutex_lock(&sim->mutex);
    sim->dead = true;
    for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next) {
        gp__sim_leave_capture(sim, stream);
        while (stream->first != NULL)
            gp__sim_drop(sim, stream);
    }
    gone = gp__sim_take_gone(sim);
    gp__mutex_unlock(&sim->mutex);
    gp__sim_tell_gone(gone);
}
