/* SPDX-License-Identifier: Apache-2.0
 *
 * Which streams may not be fenced now because they capture. It keeps the list of the process's timelines:
 * a fence of a whole context would invalidate a capture on any stream in it, whichever pool knows that
 * stream, so then the streams of every pool of the device are asked.
 */
#include "fence.h"

/* Ranked below pools: it is held while one timeline after the other is locked and asked. Guards the list
 * and each timeline's place in it. */
static struct gp__mutex timelines_lock = GP__MUTEX_INIT(GP__RANK_TIMELINES);
static struct gp__timeline *timelines;

void gp__timeline_enlist(struct gp__timeline *timeline)
{
    gp__mutex_lock(&timelines_lock);
    timeline->next = timelines;
    if (timelines != NULL)
        timelines->link = &timeline->next;
    timelines = timeline;
    timeline->link = &timelines;
    gp__mutex_unlock(&timelines_lock);
}

void gp__timeline_delist(struct gp__timeline *timeline)
{
    gp__mutex_lock(&timelines_lock);
    if (timeline->link != NULL) {
        *timeline->link = timeline->next;
        if (timeline->next != NULL)
            timeline->next->link = timeline->link;
        timeline->link = NULL;
    }
    gp__mutex_unlock(&timelines_lock);
}

gp_status gp__capture_error(gp_error *error, uintptr_t handle)
{
    return gp_error_set(error, GP_ERR_CAPTURE,
                        "stream %#zx is being captured, so memory that it may use cannot be "
                        "waited for or given back now; end the capture first",
                        (size_t)handle);
}

/* Asks the streams of `slots`, which may be all. Resolve and is-capturing never block (stream.h), so the
 * lock may stay. A stream that cannot say whether it captures counts as an error: a fence might break its
 * capture. lock: held. */
static gp_status ask(struct gp__timeline *timeline, bool all, uint64_t slots, gp_error *error)
{
    gp_device *device = timeline->device;
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        bool capturing = false;
        uint64_t id;
        if ((!all && !gp__stream_owns(stream, slots)) || !gp__fence_can_record(stream) ||
            gp__stream_fate(device, stream, &id) != GP__FATE_HERE)
            continue;
        gp_status status =
            device->driver->stream_capturing(device, &stream->key, &capturing, error);
        if (status != GP_OK || capturing)
            return capturing ? gp__capture_error(error, stream->key.handle) : status;
    }
    return GP_OK;
}

gp_status gp__device_check_capture(const gp_device *device, gp_error *error)
{
    gp_status status = GP_OK;
    gp__mutex_lock(&timelines_lock);
    for (struct gp__timeline *each = timelines; each != NULL && status == GP_OK;
         each = each->next) {
        if (each->device != device)
            continue;
        gp__mutex_lock(each->lock);
        status = ask(each, true, 0, error);
        gp__mutex_unlock(each->lock);
    }
    gp__mutex_unlock(&timelines_lock);
    return status;
}

gp_status gp__timeline_check_capture(struct gp__timeline *timeline, struct gp__owners owners,
                                     gp_error *error)
{
    uint64_t id;
    gp__mutex_lock(timeline->lock);
    /* Streams that are gone make the owners unseen, which widens the question, so they are found first. */
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (!gp__stream_owns(stream, owners.slots) || !gp__fence_can_record(stream))
            continue;
        enum gp__fate fate = gp__stream_fate(timeline->device, stream, &id);
        gp__stream_note_fate(timeline, stream, fate, id, timeline->clock - 1);
    }
    bool all = gp__timeline_is_unseen(timeline, owners);
    gp_status status = all ? GP_OK : ask(timeline, false, owners.slots, error);
    gp__mutex_unlock(timeline->lock);
    return all ? gp__device_check_capture(timeline->device, error) : status;
}
