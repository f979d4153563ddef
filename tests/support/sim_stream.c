/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's streams: who they are and the work queued on them. Work completes in order,
 * and only when somebody asks for it here.
 */
#include "sim_internal.h"

#include <stdatomic.h>
#include <stdlib.h>

static const struct gp__sim_kind resolve_kind = {"stream_resolve", false, GP_ERR_DRIVER,
                                                 GP__SIM_UNKNOWN};
static const struct gp__sim_kind confirm_kind = {"stream_confirm", false, GP_NOT_READY,
                                                 GP__SIM_UNKNOWN};
static const struct gp__sim_kind capturing_kind = {"stream_capturing", false, GP_ERR_DRIVER,
                                                   GP__SIM_UNKNOWN};

uint64_t gp__sim_thread(void)
{
    static _Atomic uint64_t last;
    static _Thread_local uint64_t number;

    if (number == 0)
        number = atomic_fetch_add(&last, 1) + 1;
    return number;
}

struct gp__sim_stream *gp__sim_find_id(gp__sim *sim, uint64_t id)
{
    struct gp__sim_stream *stream = sim->streams;

    while (stream != NULL && stream->id != id)
        stream = stream->next;
    return stream;
}

static struct gp__sim_stream *add_stream(gp__sim *sim, uintptr_t handle, unsigned flags)
{
    struct gp__sim_stream *stream = gp__sim_calloc(sizeof *stream);

    stream->handle = handle;
    stream->id = sim->next_id++;
    stream->flags = flags;
    stream->live = true;
    stream->next = sim->streams->next; /* the legacy stream stays first */
    sim->streams->next = stream;
    return stream;
}

struct gp__sim_stream *gp__sim_find(gp__sim *sim, uintptr_t handle)
{
    uint64_t thread = handle == 2 ? gp__sim_thread() : 0;
    struct gp__sim_stream *stream;

    if (handle <= 1)
        return sim->streams;
    for (stream = sim->streams; stream != NULL; stream = stream->next)
        if (stream->live && stream->handle == handle && stream->thread == thread)
            return stream;
    if (handle != 2)
        return NULL;
    stream = add_stream(sim, handle, GP__SIM_STREAM_BLOCKING);
    stream->thread = thread;
    return stream;
}

void gp__sim_push(struct gp__sim_stream *stream, const struct gp__sim_item *item)
{
    struct gp__sim_item *copy = gp__sim_calloc(sizeof *copy);

    *copy = *item;
    copy->next = NULL;
    if (stream->last == NULL)
        stream->first = copy;
    else
        stream->last->next = copy;
    stream->last = copy;
    stream->pending++;
}

/* What the item touches: a graph's addresses, or its own. */
static const struct gp__sim_range *ranges_of(const struct gp__sim_item *item, size_t *count)
{
    *count = item->graph != NULL ? item->graph->range_count : 2;
    return item->graph != NULL ? item->graph->ranges : item->ranges;
}

void gp__sim_drop(gp__sim *sim, struct gp__sim_stream *stream)
{
    struct gp__sim_item *item = stream->first;

    stream->first = item->next;
    if (stream->first == NULL)
        stream->last = NULL;
    stream->pending--;
    if (item->event != NULL && item->event->record == item->record)
        item->event->outstanding--;
    if (item->graph != NULL)
        gp__sim_launch_ended(sim, item->graph);
    free(item);
}

void gp__sim_pop(struct gp__sim_call *call, struct gp__sim_stream *stream)
{
    size_t count;
    const struct gp__sim_range *ranges = ranges_of(stream->first, &count);

    for (size_t i = 0; i < count; i++)
        if (ranges[i].bytes > 0 &&
            !gp__sim_covered_for(call->sim, ranges[i].va, ranges[i].bytes, ranges[i].from))
            gp__sim_violate(call,
                            "work of stream id %llu touches va=0x%zx bytes=%zu, unmapped since",
                            (unsigned long long)stream->id, (size_t)ranges[i].va, ranges[i].bytes);
    gp__sim_drop(call->sim, stream);
}

bool gp__sim_holds_record(const struct gp__sim_stream *stream, uint64_t record)
{
    const struct gp__sim_item *item = stream->first;

    while (item != NULL && item->record != record)
        item = item->next;
    return item != NULL;
}

bool gp__sim_is_blocked(const gp__sim *sim, const struct gp__sim_stream *stream)
{
    uint64_t record = stream->first == NULL ? 0 : stream->first->waits_for;

    if (record == 0)
        return false;
    for (const struct gp__sim_stream *other = sim->streams; other != NULL; other = other->next)
        if (gp__sim_holds_record(other, record))
            return true;
    return false;
}

static const struct gp__sim_range *touching(const struct gp__sim_item *item, uintptr_t va,
                                            size_t bytes)
{
    size_t count;
    const struct gp__sim_range *ranges = ranges_of(item, &count);

    for (size_t i = 0; i < count; i++)
        if (ranges[i].bytes > 0 && ranges[i].va < va + bytes && va < ranges[i].va + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

const struct gp__sim_range *gp__sim_overlap(const gp__sim *sim, uintptr_t va, size_t bytes,
                                            uint64_t except_id, uint64_t *stream_id)
{
    for (const struct gp__sim_stream *stream = sim->streams; stream != NULL;
         stream = stream->next) {
        if (stream->id == except_id)
            continue;
        for (const struct gp__sim_item *item = stream->first; item != NULL; item = item->next) {
            const struct gp__sim_range *range = touching(item, va, bytes);

            if (range == NULL)
                continue;
            *stream_id = stream->id;
            return range;
        }
    }
    return NULL;
}

bool gp__sim_busy(const gp__sim *sim, uintptr_t va, size_t bytes, uint64_t except_id)
{
    struct gp__mutex *mutex = (struct gp__mutex *)&sim->mutex;
    uint64_t stream_id;
    bool busy;

    gp__mutex_lock(mutex);
    busy = gp__sim_overlap(sim, va, bytes, except_id, &stream_id) != NULL;
    gp__mutex_unlock(mutex);
    return busy;
}

uint64_t gp__sim_stream_id(gp__sim *sim, uintptr_t handle)
{
    const struct gp__sim_stream *stream;
    uint64_t id;

    gp__mutex_lock(&sim->mutex);
    stream = gp__sim_find(sim, handle);
    id = stream == NULL ? 0 : stream->id;
    gp__mutex_unlock(&sim->mutex);
    return id;
}

uintptr_t gp__sim_stream_create(gp__sim *sim, unsigned flags)
{
    uintptr_t handle;

    gp__mutex_lock(&sim->mutex);
    if (sim->free_handle_count > 0) {
        handle = sim->free_handles[--sim->free_handle_count];
    } else {
        handle = sim->next_handle;
        sim->next_handle += 0x40;
    }
    add_stream(sim, handle, flags);
    gp__mutex_unlock(&sim->mutex);
    return handle;
}

void gp__sim_stream_destroy(gp__sim *sim, uintptr_t handle)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;

    if (!gp__sim_begin(&call, sim, NULL, NULL, "# destroy stream=0x%zx", (size_t)handle)) {
        gp__sim_end_ok(&call);
        return;
    }
    stream = gp__sim_find(sim, handle);
    if (handle <= 2 || stream == NULL) {
        gp__sim_violate(&call, "a stream that was not created, or was destroyed already");
    } else {
        stream->live = false;
        gp__sim_leave_capture(sim, stream);
        sim->free_handles = gp__sim_room(sim->free_handles, sim->free_handle_count,
                                         &sim->free_handle_room, sizeof *sim->free_handles);
        sim->free_handles[sim->free_handle_count++] = handle;
    }
    gp__sim_end_ok(&call);
}

void gp__sim_launch(gp__sim *sim, uintptr_t handle, uintptr_t va, size_t bytes)
{
    gp__sim_launch_from(sim, NULL, handle, va, bytes);
}

void gp__sim_launch_from(gp__sim *sim, const gp_device *from, uintptr_t handle, uintptr_t va,
                         size_t bytes)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;
    struct gp__sim_item item = {.ranges = {{va, bytes, from}}};

    if (!gp__sim_begin(&call, sim, NULL, NULL, "# launch%s%s stream=0x%zx va=0x%zx bytes=%zu",
                       from != NULL ? " from " : "", from != NULL ? from->name : "", (size_t)handle,
                       (size_t)va, bytes)) {
        gp__sim_end_ok(&call);
        return;
    }
    stream = gp__sim_find(sim, handle);
    if (stream == NULL)
        gp__sim_violate(&call, "a destroyed stream");
    else if (!gp__sim_covered_for(sim, va, bytes, from))
        gp__sim_violate(&call, "the addresses are not mapped with access for %s",
                        from != NULL ? from->name : sim->device.name);
    else if (stream->capture != NULL)
        gp__sim_add_range(stream->capture, &item.ranges[0]);
    else if (!sim->dead && bytes > 0)
        gp__sim_push(stream, &item);
    gp__sim_end_ok(&call);
}

static size_t complete(gp__sim *sim, struct gp__sim_call *call, struct gp__sim_stream *stream,
                       size_t count)
{
    size_t done = 0;

    while (done < count && stream->first != NULL && !gp__sim_is_blocked(sim, stream)) {
        gp__sim_pop(call, stream);
        done++;
    }
    return done;
}

size_t gp__sim_complete(gp__sim *sim, uintptr_t handle, size_t count)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;
    size_t done = 0;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# complete stream=0x%zx count=%zu", (size_t)handle,
                      count)) {
        stream = gp__sim_find(sim, handle);
        if (stream != NULL)
            done = complete(sim, &call, stream, count);
    }
    gp__sim_end_ok(&call);
    return done;
}

/* Until nothing moves any more: a wait lets go when another stream has run. */
void gp__sim_complete_all(gp__sim *sim)
{
    struct gp__sim_call call;
    size_t moved = 0;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# complete everything"))
        do {
            moved = 0;
            for (struct gp__sim_stream *stream = sim->streams; stream != NULL;
                 stream = stream->next)
                moved += complete(sim, &call, stream, SIZE_MAX);
        } while (moved > 0);
    gp__sim_end_ok(&call);
}

static size_t count_pending(const gp__sim *sim, const struct gp__sim_stream *only)
{
    size_t pending = 0;

    for (const struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
        if (only == NULL || stream == only)
            pending += stream->pending;
    return pending;
}

size_t gp__sim_pending(const gp__sim *sim, uintptr_t handle)
{
    gp__sim *mutable_sim = (gp__sim *)sim;
    const struct gp__sim_stream *stream;
    size_t pending;

    gp__mutex_lock(&mutable_sim->mutex);
    stream = gp__sim_find(mutable_sim, handle);
    pending = stream == NULL ? 0 : stream->pending;
    gp__mutex_unlock(&mutable_sim->mutex);
    return pending;
}

size_t gp__sim_pending_all(const gp__sim *sim)
{
    struct gp__mutex *mutex = (struct gp__mutex *)&sim->mutex;
    size_t pending;

    gp__mutex_lock(mutex);
    pending = count_pending(sim, NULL);
    gp__mutex_unlock(mutex);
    return pending;
}

size_t gp__sim_work_all(const gp__sim *sim)
{
    struct gp__mutex *mutex = (struct gp__mutex *)&sim->mutex;
    size_t work = 0;

    gp__mutex_lock(mutex);
    for (const struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
        for (const struct gp__sim_item *item = stream->first; item != NULL; item = item->next)
            work += item->record == 0 && item->waits_for == 0;
    gp__mutex_unlock(mutex);
    return work;
}

bool gp__sim_was_destroyed(const gp__sim *sim, uintptr_t handle)
{
    const struct gp__sim_stream *stream = sim->streams;

    while (stream != NULL && stream->handle != handle)
        stream = stream->next;
    return stream != NULL;
}

gp_status gp__sim_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                 gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    const struct gp__sim_stream *stream;
    struct gp__stream_key key;

    if (!gp__sim_begin(&call, sim, &resolve_kind, error, "stream_resolve handle=0x%zx",
                       (size_t)handle))
        return gp__sim_decided(&call);
    if (sim->dead)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_ILLEGAL_ADDRESS, 0, 0);
    stream = gp__sim_find(sim, handle);
    if (stream == NULL) {
        /* Real hardware crashes on the handle of a destroyed stream that no new one took over. */
        if (gp__sim_was_destroyed(sim, handle))
            gp__sim_violate(&call, "a destroyed stream");
        return gp__sim_end(&call, GP_ERR_ARGUMENT, GP__SIM_INVALID_HANDLE, 0, 0);
    }
    key = (struct gp__stream_key){.handle = stream->handle,
                                  .context = device->context,
                                  .id = stream->id,
                                  .thread_bound = stream->thread != 0};
    if (handle > 1 && stream->capture != NULL) {
        key.id = 0; /* asking for it would invalidate the capture */
        *out = key;
        return gp__sim_end(&call, GP_ERR_CAPTURE, GP__SIM_CAPTURE_UNSUPPORTED, 0, 0);
    }
    *out = key;
    gp__sim_note(&call, " id=%llu", (unsigned long long)stream->id);
    return gp__sim_end_ok(&call);
}

gp_status gp__sim_stream_confirm(gp_device *device, const struct gp__stream_key *key)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    const struct gp__sim_stream *stream;
    bool same;

    if (!gp__sim_begin(&call, sim, &confirm_kind, NULL, "stream_confirm handle=0x%zx",
                       (size_t)key->handle)) {
        (void)gp__sim_decided(&call);
        return GP_NOT_READY;
    }
    stream = gp__sim_find(sim, key->handle);
    if (stream == NULL && gp__sim_was_destroyed(sim, key->handle))
        gp__sim_violate(&call, "a destroyed stream");
    same = stream != NULL && stream->capture == NULL && stream->id == key->id && !sim->dead;
    gp__sim_note(&call, " %s", same ? "yes" : "no");
    if (same)
        return gp__sim_end_ok(&call);
    return gp__sim_end(&call, GP_NOT_READY, GP__SIM_INVALID_HANDLE, 0, 0);
}

gp_status gp__sim_stream_capturing(gp_device *device, const struct gp__stream_key *key,
                                   bool *capturing, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    const struct gp__sim_stream *stream;

    if (!gp__sim_begin(&call, sim, &capturing_kind, error, "stream_capturing handle=0x%zx",
                       (size_t)key->handle))
        return gp__sim_decided(&call);
    /* The driver goes by the handle: a stream that took over a destroyed one's handle answers. */
    stream = gp__sim_find(sim, key->handle);
    if (stream == NULL) {
        gp__sim_violate(&call, "a destroyed stream");
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_HANDLE, 0, 0);
    }
    *capturing = stream->capture != NULL || gp__sim_is_implicit(sim, stream);
    gp__sim_note(&call, " %s", *capturing ? "yes" : "no");
    return gp__sim_end_ok(&call);
}
