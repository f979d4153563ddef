/* SPDX-License-Identifier: Apache-2.0
 *
 * Fences: recording them on streams, and waiting until they passed. Every function here that can
 * block drops the timeline's lock first; none touches memory that users hold.
 */
#include "timeline.h"

#include "../backing/memory.h"

/* One slice of a wait: how long an interrupt or another thread's progress may go unnoticed. */
#define WAIT_SLICE_NS UINT64_C(5000000)

static struct gp__fence *take_spare(struct gp__timeline *timeline, uintptr_t context)
{
    for (struct gp__fence **link = &timeline->spare; *link != NULL; link = &(*link)->next) {
        struct gp__fence *fence = *link;
        if (fence->context == context) {
            *link = fence->next;
            fence->next = NULL;
            return fence;
        }
    }
    return NULL;
}

static void put_spare(struct gp__timeline *timeline, struct gp__fence *fence)
{
    fence->next = timeline->spare;
    timeline->spare = fence;
}

/* A fence with an event of `context`; a new one when no spare is left. lock: held, dropped inside. */
static gp_status get_fence(struct gp__timeline *timeline, uintptr_t context, struct gp__fence **out,
                           gp_error *error)
{
    struct gp__fence *fence = take_spare(timeline, context);
    if (fence == NULL) {
        gp__mutex_unlock(timeline->lock);
        gp_status status = GP_OK;
        fence = gp__calloc(1, sizeof *fence);
        if (fence == NULL)
            status = gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for a fence");
        else
            status = timeline->device->driver->event_create(timeline->device, context,
                                                            &fence->event, error);
        if (status != GP_OK)
            gp__free(fence);
        else
            fence->context = context;
        gp__mutex_lock(timeline->lock);
        if (status != GP_OK)
            return status;
    }
    *out = fence;
    return GP_OK;
}

/* A fence that left its stream's list: spare, unless threads still wait for its event. */
static void let_go(struct gp__timeline *timeline, struct gp__fence *fence)
{
    fence->passed = fence->waiters > 0;
    if (!fence->passed)
        put_spare(timeline, fence);
}

static void update_slot(struct gp__timeline *timeline, int slot)
{
    uint64_t least = UINT64_MAX;
    for (const gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->slot == slot && stream->passed < least)
            least = stream->passed;
    }
    timeline->slot_passed[slot] = least;
}

static void pass(struct gp__timeline *timeline, gp_stream *stream, uint64_t ticket)
{
    if (stream->passed < ticket)
        stream->passed = ticket;
    if (stream->slot != GP__SLOT_NONE)
        update_slot(timeline, stream->slot);
}

bool gp__timeline_poll(struct gp__timeline *timeline)
{
    gp_device *device = timeline->device;
    bool moved = false;
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        while (stream->fences != NULL &&
               device->driver->event_query(device, stream->fences->event, NULL) == GP_OK) {
            struct gp__fence *fence = stream->fences;
            stream->fences = fence->next;
            pass(timeline, stream, fence->ticket);
            let_go(timeline, fence);
            moved = true;
        }
    }
    return moved;
}

enum fate { HERE, ENDED, REPLACED };

/* What became of the stream: a fence may only go into the very stream that was resolved. One that
 * captures cannot be told apart and is not fenced anyway. A device that cannot answer is asked to record
 * all the same, and says itself what is wrong. */
static enum fate fate_of(gp_device *device, const gp_stream *stream)
{
    struct gp__stream_key now;
    gp_status status = device->driver->stream_resolve(device, stream->key.handle, &now, NULL);
    if (status == GP_ERR_ARGUMENT)
        return ENDED;
    if (status != GP_OK)
        return HERE;
    return now.id == stream->key.id && now.context == stream->key.context ? HERE : REPLACED;
}

/* Records a fence on one stream. lock: held, dropped inside. */
static gp_status record_one(struct gp__timeline *timeline, gp_stream *stream, gp_error *error)
{
    gp_device *device = timeline->device;
    struct gp__fence *fence;
    gp_status status = get_fence(timeline, stream->key.context, &fence, error);
    if (status != GP_OK)
        return status;
    uint64_t ticket = timeline->clock++;
    gp__mutex_unlock(timeline->lock);
    bool capturing = false;
    enum fate fate = fate_of(device, stream);
    if (fate == HERE)
        status = device->driver->stream_capturing(device, &stream->key, &capturing, error);
    if (fate == HERE && status == GP_OK && !capturing)
        status = device->driver->event_record(device, fence->event, &stream->key, error);
    gp__mutex_lock(timeline->lock);
    if (fate == ENDED && device->ended_streams_passed)
        pass(timeline, stream, ticket);
    else if (fate != HERE)
        gp__timeline_lose(timeline, stream);
    if (fate != HERE || capturing || status != GP_OK) {
        put_spare(timeline, fence);
        return !capturing ? status
                          : gp_error_set(error, GP_ERR_CAPTURE,
                                         "stream %#zx is being captured, so its work cannot be "
                                         "waited for; end the capture first",
                                         (size_t)stream->key.handle);
    }
    fence->ticket = ticket;
    if (stream->recorded < ticket)
        stream->recorded = ticket;
    struct gp__fence **last = &stream->fences;
    while (*last != NULL)
        last = &(*last)->next;
    *last = fence;
    return GP_OK;
}

static bool can_fence(const gp_stream *stream)
{
    return stream->state == GP__STREAM_LIVE &&
           (!stream->key.thread_bound || stream->thread == gp__thread_id());
}

/* The next stream of the owners that wants a fence and was not tried in this attempt. */
static gp_stream *next_to_record(struct gp__timeline *timeline, struct gp__owners owners,
                                 uint64_t attempt)
{
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->slot != GP__SLOT_NONE && (owners.slots >> stream->slot & 1) != 0 &&
            stream->recorded < owners.ticket && stream->passed < owners.ticket &&
            stream->attempt < attempt && can_fence(stream))
            return stream;
    }
    return NULL;
}

gp_status gp__timeline_record(struct gp__timeline *timeline, struct gp__owners owners,
                              gp_error *error)
{
    gp__assert_no_lock();
    gp_status first = GP_OK;
    gp__mutex_lock(timeline->lock);
    uint64_t attempt = ++timeline->attempts;
    gp_stream *stream;
    while ((stream = next_to_record(timeline, owners, attempt)) != NULL) {
        stream->attempt = attempt;
        gp_stream_retain(stream);
        gp_status status = record_one(timeline, stream, first == GP_OK ? error : NULL);
        gp_stream_release(stream);
        if (first == GP_OK)
            first = status;
    }
    gp__mutex_unlock(timeline->lock);
    return first;
}

static gp_status capture_error(gp_error *error, uintptr_t handle)
{
    return gp_error_set(error, GP_ERR_CAPTURE,
                        "stream %#zx is being captured, so memory that it may use cannot be "
                        "given back now; end the capture first",
                        (size_t)handle);
}

gp_status gp__timeline_check_capture(struct gp__timeline *timeline, struct gp__owners owners,
                                     gp_error *error)
{
    gp_device *device = timeline->device;
    gp_status status = GP_OK;
    gp__mutex_lock(timeline->lock);
    bool all = gp__timeline_is_unseen(timeline, owners);
    for (gp_stream *stream = timeline->streams; stream != NULL && status == GP_OK;
         stream = stream->next) {
        bool owner = stream->slot != GP__SLOT_NONE && (owners.slots >> stream->slot & 1) != 0;
        bool capturing = false;
        if ((!owner && !all) || !can_fence(stream))
            continue;
        /* Never block (stream.h), so the lock may stay. A stream that cannot be asked is dealt with
         * when its fence is recorded. */
        if (fate_of(device, stream) == HERE &&
            device->driver->stream_capturing(device, &stream->key, &capturing, NULL) == GP_OK &&
            capturing)
            status = capture_error(error, stream->key.handle);
    }
    gp__mutex_unlock(timeline->lock);
    return status;
}

static bool is_interrupted(const struct gp__interrupt *interrupt)
{
    return interrupt != NULL && interrupt->check != NULL &&
           interrupt->check(interrupt->context) != 0;
}

static gp_status wait_event(struct gp__timeline *timeline, gp__event *event,
                            const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_device *device = timeline->device;
    gp_status status = device->driver->event_wait(device, event, WAIT_SLICE_NS, error);
    if (status == GP_NOT_READY && is_interrupted(interrupt))
        return gp_error_set(error, GP_ERR_INTERRUPTED,
                            "a signal ended the wait for streams; nothing was lost, and the "
                            "same call goes on");
    return status;
}

/* Waits a slice for a fence that other threads may see passing too. lock: held, dropped inside. */
static gp_status wait_fence(struct gp__timeline *timeline, struct gp__fence *fence,
                            const struct gp__interrupt *interrupt, gp_error *error)
{
    fence->waiters++;
    gp__mutex_unlock(timeline->lock);
    gp_status status = wait_event(timeline, fence->event, interrupt, error);
    gp__mutex_lock(timeline->lock);
    if (--fence->waiters == 0 && fence->passed) {
        fence->passed = false;
        put_spare(timeline, fence);
    }
    return status;
}

/* The fence to wait for next: of an owner that has not passed. */
static struct gp__fence *next_to_wait(const struct gp__timeline *timeline, struct gp__owners owners)
{
    for (const gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->slot != GP__SLOT_NONE && (owners.slots >> stream->slot & 1) != 0 &&
            stream->passed < owners.ticket && stream->fences != NULL)
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

/* Fences one whole context and waits for it. */
static gp_status wait_context(struct gp__timeline *timeline, uintptr_t context,
                              const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_device *device = timeline->device;
    struct gp__fence *fence;
    gp__mutex_lock(timeline->lock);
    gp_status status = get_fence(timeline, context, &fence, error);
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
    put_spare(timeline, fence);
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

/* Fences every context that we know of: all work enqueued before this call has then passed. */
static gp_status wait_everything(struct gp__timeline *timeline, struct gp__owners owners,
                                 const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = gp__timeline_check_capture(timeline, owners, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(timeline->lock);
    uint64_t ticket = timeline->clock++;
    gp__mutex_unlock(timeline->lock);
    status = wait_context(timeline, timeline->device->context, interrupt, error);
    uintptr_t context = 0;
    while (status == GP_OK && (context = next_context(timeline, context)) != 0)
        status = wait_context(timeline, context, interrupt, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(timeline->lock);
    timeline->unknown_passed =
        ticket > timeline->unknown_passed ? ticket : timeline->unknown_passed;
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next)
        pass(timeline, stream, ticket);
    gp__mutex_unlock(timeline->lock);
    return GP_OK;
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
        status = wait_everything(timeline, owners, interrupt, error);
    return status;
}

static void unlink_stream(struct gp__timeline *timeline, gp_stream *stream)
{
    gp_stream **link = &timeline->streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    timeline->stream_count--;
    while (stream->fences != NULL) {
        struct gp__fence *fence = stream->fences;
        stream->fences = fence->next;
        let_go(timeline, fence);
    }
    int slot = stream->slot;
    stream->slot = GP__SLOT_NONE;
    stream->state = GP__STREAM_FORGOTTEN;
    if (slot == GP__SLOT_NONE)
        return;
    timeline->slot_streams[slot]--;
    update_slot(timeline, slot);
}

gp_status gp__timeline_forget(struct gp__timeline *timeline, gp_stream *stream,
                              const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_device *device = timeline->device;
    struct gp__entry entry;
    gp__mutex_lock(timeline->lock);
    bool known = stream->state != GP__STREAM_FORGOTTEN;
    uint64_t bit = known ? gp__timeline_bit(timeline, stream) : 0;
    struct gp__owners owners = {bit, timeline->clock};
    gp__mutex_unlock(timeline->lock);
    if (!known)
        return GP_OK;
    gp_status status = device->driver->enter(device, &entry, error);
    if (status != GP_OK)
        return status;
    status = gp__timeline_wait(timeline, owners, GP__REACH_ALL, interrupt, error);
    device->driver->leave(device, &entry);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(timeline->lock);
    bool mine = stream->state != GP__STREAM_FORGOTTEN;
    if (mine)
        unlink_stream(timeline, stream);
    gp__mutex_unlock(timeline->lock);
    if (mine)
        gp_stream_release(stream);
    return GP_OK;
}
