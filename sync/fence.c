/* SPDX-License-Identifier: Apache-2.0
 *
 * Fences: recording them on streams and seeing them pass. Whatever can block drops the timeline's lock
 * first; nothing here waits, or touches memory that users hold.
 */
#include "fence.h"

#include "../backing/memory.h"

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

gp_status gp__fence_get(struct gp__timeline *timeline, uintptr_t context, struct gp__fence **out,
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

void gp__fence_let_go(struct gp__timeline *timeline, struct gp__fence *fence)
{
    fence->passed = fence->waiters > 0;
    if (fence->passed)
        return;
    fence->next = timeline->spare;
    timeline->spare = fence;
}

void gp__fence_update_slot(struct gp__timeline *timeline, int slot)
{
    uint64_t least = UINT64_MAX;
    for (const gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->slot == slot && stream->passed < least)
            least = stream->passed;
    }
    timeline->slot_passed[slot] = least;
}

void gp__fence_pass(struct gp__timeline *timeline, gp_stream *stream, uint64_t ticket)
{
    if (stream->passed < ticket)
        stream->passed = ticket;
    timeline->passes++;
    if (stream->slot == GP__SLOT_NONE)
        return;
    if (timeline->slot_streams[stream->slot] == 1)
        timeline->slot_passed[stream->slot] = stream->passed;
    else
        gp__fence_update_slot(timeline, stream->slot);
}

void gp__timeline_poll(struct gp__timeline *timeline)
{
    gp_device *device = timeline->device;
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        while (stream->fences != NULL &&
               device->driver->event_query(device, stream->fences->event, NULL) == GP_OK) {
            struct gp__fence *fence = stream->fences;
            stream->fences = fence->next;
            gp__fence_pass(timeline, stream, fence->ticket);
            gp__fence_let_go(timeline, fence);
        }
    }
}

/* ---- which stream is it ------------------------------------------------------------------- */

enum gp__fate gp__stream_fate(gp_device *device, const gp_stream *stream, uint64_t *id)
{
    struct gp__stream_key now;
    bool unnamed = __atomic_load_n(&stream->unnamed, __ATOMIC_ACQUIRE);
    uint64_t known = gp_stream_id(stream);
    gp_status status = device->driver->stream_resolve(device, stream->key.handle, &now, NULL);
    *id = known;
    if (status == GP_ERR_ARGUMENT)
        return GP__FATE_ENDED;
    if (status != GP_OK)
        return GP__FATE_HERE;
    if (unnamed && now.context == stream->key.context) {
        *id = now.id;
        return GP__FATE_HERE;
    }
    return now.id == known && now.context == stream->key.context ? GP__FATE_HERE
                                                                 : GP__FATE_REPLACED;
}

void gp__stream_note_fate(struct gp__timeline *timeline, gp_stream *stream, enum gp__fate fate,
                          uint64_t id, uint64_t ticket)
{
    /* Another thread may have learnt the id meanwhile. */
    if (fate == GP__FATE_HERE && stream->unnamed && id != stream->key.id)
        gp__stream_name(stream, id);
    if (fate == GP__FATE_ENDED && timeline->device->ended_streams_passed)
        gp__fence_pass(timeline, stream, ticket);
    else if (fate != GP__FATE_HERE && stream->state == GP__STREAM_LIVE)
        gp__timeline_lose(timeline, stream);
}

bool gp__fence_can_record(const gp_stream *stream)
{
    return stream->state == GP__STREAM_LIVE &&
           (!stream->key.thread_bound || stream->thread == gp__thread_id());
}

/* ---- recording ---------------------------------------------------------------------------- */

static void append(gp_stream *stream, struct gp__fence *fence, uint64_t ticket)
{
    fence->ticket = ticket;
    if (stream->recorded < ticket)
        stream->recorded = ticket;
    struct gp__fence **last = &stream->fences;
    while (*last != NULL)
        last = &(*last)->next;
    *last = fence;
}

gp_status gp__fence_record(struct gp__timeline *timeline, gp_stream *stream, gp_error *error)
{
    gp_device *device = timeline->device;
    struct gp__fence *fence;
    stream->recording++; /* forgetting the stream waits for us */
    gp_status status = gp__fence_get(timeline, stream->key.context, &fence, error);
    if (status != GP_OK) {
        stream->recording--;
        return status;
    }
    uint64_t ticket = __atomic_fetch_add(&timeline->clock, 1, __ATOMIC_RELAXED);
    gp__mutex_unlock(timeline->lock);
    bool capturing = false;
    uint64_t id;
    enum gp__fate fate = gp__stream_fate(device, stream, &id);
    struct gp__stream_key key = gp__stream_key(stream);
    if (fate == GP__FATE_HERE)
        status = device->driver->stream_capturing(device, &key, &capturing, error);
    if (fate == GP__FATE_HERE && status == GP_OK && !capturing)
        status = device->driver->event_record(device, fence->event, &key, error);
    gp__mutex_lock(timeline->lock);
    stream->recording--;
    gp__stream_note_fate(timeline, stream, fate, id, ticket);
    if (fate == GP__FATE_HERE && status == GP_OK && !capturing)
        append(stream, fence, ticket);
    else
        gp__fence_let_go(timeline, fence);
    return capturing ? gp__capture_error(error, stream->key.handle) : status;
}

/* The next stream that wants a fence, going down from the stream with the number `last`. */
static gp_stream *next_to_record(struct gp__timeline *timeline, struct gp__owners owners,
                                 uint64_t last)
{
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->number < last && gp__stream_owns(stream, owners.slots) &&
            stream->recorded < owners.ticket && stream->passed < owners.ticket &&
            gp__fence_can_record(stream))
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
    gp_stream *stream = next_to_record(timeline, owners, UINT64_MAX);
    while (stream != NULL) {
        uint64_t number = stream->number;
        gp_stream_retain(stream);
        gp_status status = gp__fence_record(timeline, stream, first == GP_OK ? error : NULL);
        gp_stream_release(stream);
        if (first == GP_OK)
            first = status;
        stream = next_to_record(timeline, owners, number);
    }
    gp__mutex_unlock(timeline->lock);
    return first;
}
