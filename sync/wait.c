/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting for fences, in slices that an interrupt can end, and forgetting streams. Never waits inside the
 * driver, and never with the timeline's lock held.
 */
#include "fence.h"

#include <time.h>

/* One slice of a wait: how long an interrupt or another thread's progress may go unnoticed. */
#define WAIT_SLICE_NS UINT64_C(5000000)

static gp_status interrupted(const struct gp__interrupt *interrupt, gp_error *error)
{
    if (interrupt == NULL || interrupt->check == NULL || interrupt->check(interrupt->context) == 0)
        return GP_NOT_READY;
    return gp_error_set(error, GP_ERR_INTERRUPTED,
                        "a signal ended the wait for streams; nothing was lost, and the same call "
                        "goes on");
}

static gp_status wait_event(struct gp__timeline *timeline, gp__event *event,
                            const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_device *device = timeline->device;
    gp_status status = device->driver->event_wait(device, event, WAIT_SLICE_NS, error);
    return status == GP_NOT_READY ? interrupted(interrupt, error) : status;
}

/* Waits a slice for a fence that other threads may see passing too. lock: held, dropped inside. */
static gp_status wait_fence(struct gp__timeline *timeline, struct gp__fence *fence,
                            const struct gp__interrupt *interrupt, gp_error *error)
{
    fence->waiters++;
    gp__mutex_unlock(timeline->lock);
    gp_status status = wait_event(timeline, fence->event, interrupt, error);
    gp__mutex_lock(timeline->lock);
    if (--fence->waiters == 0 && fence->passed)
        gp__fence_let_go(timeline, fence);
    return status;
}

/* The fence to wait for next: of an owner that has not passed. */
static struct gp__fence *next_to_wait(const struct gp__timeline *timeline, struct gp__owners owners)
{
    for (const gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (gp__stream_owns(stream, owners.slots) && stream->passed < owners.ticket &&
            stream->fences != NULL)
            return stream->fences;
    }
    return NULL;
}

/* Waits for the fences in flight. GP_NOT_READY when owners remain that have none. */
static gp_status wait_seen(struct gp__timeline *timeline, struct gp__owners owners,
                           const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = GP_OK;
    gp__mutex_lock(timeline->lock);
    while (status == GP_OK || status == GP_NOT_READY) {
        gp__timeline_poll(timeline);
        owners = gp__timeline_remaining(timeline, owners);
        struct gp__fence *fence = next_to_wait(timeline, owners);
        if (fence == NULL) {
            status = owners.slots == 0 ? GP_OK : GP_NOT_READY;
            break;
        }
        status = wait_fence(timeline, fence, interrupt, error);
    }
    gp__mutex_unlock(timeline->lock);
    return status;
}

/* ---- whole contexts ----------------------------------------------------------------------- */

/* Fences one whole context and waits for it. */
static gp_status wait_context(struct gp__timeline *timeline, uintptr_t context,
                              const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_device *device = timeline->device;
    struct gp__fence *fence;
    gp__mutex_lock(timeline->lock);
    gp_status status = gp__fence_get(timeline, context, &fence, error);
    gp__mutex_unlock(timeline->lock);
    if (status != GP_OK)
        return status;
    status = device->driver->event_record_context(device, fence->event, error);
    if (status == GP_OK) {
        do
            status = wait_event(timeline, fence->event, interrupt, error);
        while (status == GP_NOT_READY);
    }
    gp__mutex_lock(timeline->lock);
    gp__fence_let_go(timeline, fence);
    gp__mutex_unlock(timeline->lock);
    return status;
}

/* The smallest context above `after` that any stream of the timeline lives in; 0 when none is left. */
static uintptr_t next_context(struct gp__timeline *timeline, uintptr_t after)
{
    uintptr_t best = 0;
    gp__mutex_lock(timeline->lock);
    for (const gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        uintptr_t context = stream->key.context;
        if (context > after && context != timeline->device->context &&
            (best == 0 || context < best))
            best = context;
    }
    gp__mutex_unlock(timeline->lock);
    return best;
}

static void pass_everybody(struct gp__timeline *timeline, uint64_t ticket)
{
    gp__mutex_lock(timeline->lock);
    if (timeline->unknown_passed < ticket)
        timeline->unknown_passed = ticket;
    timeline->passes++;
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->passed < ticket)
            stream->passed = ticket;
    }
    for (int slot = 0; slot < GP__SLOT_COUNT; slot++) {
        if (timeline->slot_streams[slot] > 0)
            gp__fence_update_slot(timeline, slot);
    }
    gp__mutex_unlock(timeline->lock);
}

/* Fences every context that we know of: all work enqueued before this call has then passed. A capture
 * anywhere in a context would be invalidated, so every stream that any pool knows is asked first. */
static gp_status wait_everything(struct gp__timeline *timeline,
                                 const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = gp__device_check_capture(timeline->device, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(timeline->lock);
    uint64_t ticket = __atomic_fetch_add(&timeline->clock, 1, __ATOMIC_RELAXED);
    gp__mutex_unlock(timeline->lock);
    status = wait_context(timeline, timeline->device->context, interrupt, error);
    uintptr_t context = 0;
    while (status == GP_OK && (context = next_context(timeline, context)) != 0)
        status = wait_context(timeline, context, interrupt, error);
    if (status == GP_OK)
        pass_everybody(timeline, ticket);
    return status;
}

gp_status gp__timeline_wait(struct gp__timeline *timeline, struct gp__owners owners,
                            enum gp__reach reach, const struct gp__interrupt *interrupt,
                            gp_error *error)
{
    gp__mutex_lock(timeline->lock);
    gp__timeline_poll(timeline);
    owners = gp__timeline_remaining(timeline, owners);
    if (owners.slots != 0)
        timeline->wait_count++;
    gp__mutex_unlock(timeline->lock);
    if (owners.slots == 0)
        return GP_OK;
    gp_status status = gp__timeline_record(timeline, owners, error);
    if (status != GP_OK)
        return status;
    status = wait_seen(timeline, owners, interrupt, error);
    if (status == GP_NOT_READY && reach == GP__REACH_ALL)
        status = wait_everything(timeline, interrupt, error);
    return status;
}

/* ---- one stream ---------------------------------------------------------------------------- */

/* Waits for this one stream's work, whoever shares its slot. */
static gp_status wait_stream(struct gp__timeline *timeline, gp_stream *stream, uint64_t ticket,
                             const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = GP_OK;
    gp__mutex_lock(timeline->lock);
    gp__timeline_poll(timeline);
    if (stream->passed < ticket && stream->recorded < ticket && gp__fence_can_record(stream))
        status = gp__fence_record(timeline, stream, error);
    while (status == GP_OK && stream->passed < ticket && stream->fences != NULL) {
        status = wait_fence(timeline, stream->fences, interrupt, error);
        if (status == GP_NOT_READY)
            status = GP_OK;
        if (status == GP_OK)
            gp__timeline_poll(timeline);
    }
    bool passed = stream->passed >= ticket || stream->state == GP__STREAM_FORGOTTEN;
    gp__mutex_unlock(timeline->lock);
    return status == GP_OK && !passed ? wait_everything(timeline, interrupt, error) : status;
}

gp_status gp__timeline_synchronize(struct gp__timeline *timeline, gp_stream *stream,
                                   const struct gp__interrupt *interrupt, gp_error *error)
{
    gp__assert_no_lock();
    gp__mutex_lock(timeline->lock);
    bool done = gp__timeline_bit(timeline, stream) == 0;
    uint64_t ticket = timeline->clock;
    gp__mutex_unlock(timeline->lock);
    return done ? GP_OK : wait_stream(timeline, stream, ticket, interrupt, error);
}

static gp_status refuse_capture(struct gp__timeline *timeline, const gp_stream *stream,
                                gp_error *error)
{
    bool capturing = false;
    struct gp__stream_key key = gp__stream_key(stream);
    gp_status status =
        timeline->device->driver->stream_capturing(timeline->device, &key, &capturing, error);
    if (status != GP_OK || !capturing)
        return status;
    return gp_error_set(error, GP_ERR_CAPTURE,
                        "stream %#zx is being captured: it cannot be made to wait for work outside "
                        "the graph; do that before the capture begins",
                        (size_t)stream->key.handle);
}

/* The latest fence in flight. A later one than the caller's covers the caller's work too. */
static struct gp__fence *latest_fence(const gp_stream *stream)
{
    struct gp__fence *fence = stream->fences;
    while (fence != NULL && fence->next != NULL)
        fence = fence->next;
    return fence;
}

gp_status gp__timeline_join(struct gp__timeline *timeline, gp_stream *from, gp_stream *to,
                            gp_error *error)
{
    gp_device *device = timeline->device;
    gp__assert_no_lock();
    if (from == to || from->key.always_passed)
        return GP_OK;
    gp_status status = refuse_capture(timeline, to, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(timeline->lock);
    gp__timeline_bit(timeline, from); /* so that its fences are looked at */
    if (gp__fence_can_record(from))
        status = gp__fence_record(timeline, from, error);
    else
        status = gp_error_set(error, GP_ERR_ARGUMENT,
                              "stream %#zx cannot be waited for from this thread: it is another "
                              "thread's default stream, or it was destroyed",
                              (size_t)from->key.handle);
    struct gp__fence *fence = status == GP_OK ? latest_fence(from) : NULL;
    if (status == GP_OK && from->state == GP__STREAM_GONE)
        status =
            gp_error_set(error, GP_ERR_ARGUMENT,
                         "stream %#zx was destroyed, and its handle names another one now: its "
                         "work cannot be waited for in a stream",
                         (size_t)from->key.handle);
    if (fence == NULL || status != GP_OK) {
        gp__mutex_unlock(timeline->lock);
        return status;
    }
    fence->waiters++; /* nobody records it anew meanwhile */
    gp__mutex_unlock(timeline->lock);
    struct gp__stream_key key = gp__stream_key(to);
    status = device->driver->stream_wait(device, &key, fence->event, error);
    gp__mutex_lock(timeline->lock);
    if (--fence->waiters == 0 && fence->passed)
        gp__fence_let_go(timeline, fence);
    gp__mutex_unlock(timeline->lock);
    return status;
}

/* ---- forgetting ---------------------------------------------------------------------------- */

/* Sleeps a little with the lock dropped. GP_NOT_READY, or interrupted. lock: held, dropped inside. */
static gp_status sleep_a_little(struct gp__timeline *timeline,
                                const struct gp__interrupt *interrupt, gp_error *error)
{
    const struct timespec pause = {0, 100000};
    gp__mutex_unlock(timeline->lock);
    nanosleep(&pause, NULL);
    gp_status status = interrupted(interrupt, error);
    gp__mutex_lock(timeline->lock);
    return status;
}

/* Keeps new fences away, and waits until no thread is putting one on the stream. Of several threads that
 * forget one stream the first does it; the others wait for it to end, and take over if it gave up. */
static gp_status wait_recorders(struct gp__timeline *timeline, gp_stream *stream,
                                const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = GP_NOT_READY;
    gp__mutex_lock(timeline->lock);
    while (stream->state == GP__STREAM_LEAVING && status == GP_NOT_READY)
        status = sleep_a_little(timeline, interrupt, error);
    enum gp__stream_state before = stream->state;
    if (status == GP_NOT_READY && before != GP__STREAM_FORGOTTEN) {
        timeline->stream_ends(timeline->context, stream);
        gp__stream_set_state(stream, GP__STREAM_LEAVING);
        while (stream->recording > 0 && status == GP_NOT_READY)
            status = sleep_a_little(timeline, interrupt, error);
        if (status != GP_NOT_READY)
            gp__stream_set_state(stream, before);
    }
    gp__mutex_unlock(timeline->lock);
    return status == GP_NOT_READY ? GP_OK : status;
}

/* lock: held. */
static void unlink_stream(struct gp__timeline *timeline, gp_stream *stream)
{
    while (stream->fences != NULL) {
        struct gp__fence *fence = stream->fences;
        stream->fences = fence->next;
        gp__fence_let_go(timeline, fence);
    }
    int slot = stream->slot;
    gp__timeline_unlink(timeline, stream);
    gp__stream_set_state(stream, GP__STREAM_FORGOTTEN);
    timeline->passes++;
    if (slot != GP__SLOT_NONE)
        gp__fence_update_slot(timeline, slot);
}

static gp_status forget(struct gp__timeline *timeline, gp_stream *stream, uint64_t ticket,
                        const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = wait_stream(timeline, stream, ticket, interrupt, error);
    if (status == GP_OK)
        status = wait_recorders(timeline, stream, interrupt, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(timeline->lock);
    bool mine = stream->state == GP__STREAM_LEAVING;
    if (mine)
        unlink_stream(timeline, stream);
    gp__mutex_unlock(timeline->lock);
    if (mine)
        gp_stream_release(stream);
    return GP_OK;
}

gp_status gp__timeline_forget(struct gp__timeline *timeline, gp_stream *stream,
                              const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_device *device = timeline->device;
    struct gp__entry entry;
    gp__mutex_lock(timeline->lock);
    bool known = stream->state != GP__STREAM_FORGOTTEN;
    bool owns = known && gp__timeline_bit(timeline, stream) != 0;
    uint64_t ticket = timeline->clock;
    gp__mutex_unlock(timeline->lock);
    if (!known || stream->key.always_passed)
        return GP_OK;
    gp_status status = device->driver->enter(device, &entry, error);
    if (status != GP_OK)
        return status;
    status = forget(timeline, stream, owns ? ticket : 0, interrupt, error);
    device->driver->leave(device, &entry);
    return status;
}
