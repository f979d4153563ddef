/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's streams: who they are, the work queued on them, captures. Work completes in
 * order, and only when somebody asks for it here.
 */
#include "sim_internal.h"

#include <stdatomic.h>
#include <stdlib.h>

static const struct gp__sim_kind resolve_kind = {"stream_resolve", false, GP_ERR_DRIVER,
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

bool gp__sim_is_implicit(const gp__sim *sim, const struct gp__sim_stream *stream)
{
    if (stream != sim->streams)
        return false;
    for (const struct gp__sim_stream *other = sim->streams; other != NULL; other = other->next)
        if (other != stream && other->capture.active && (other->flags & GP__SIM_STREAM_BLOCKING))
            return true;
    return false;
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

void gp__sim_pop(struct gp__sim_call *call, struct gp__sim_stream *stream)
{
    struct gp__sim_item *item = stream->first;

    stream->first = item->next;
    if (stream->first == NULL)
        stream->last = NULL;
    stream->pending--;
    if (item->bytes > 0 && !gp__sim_covered_for(call->sim, item->va, item->bytes, item->from))
        gp__sim_violate(call, "work of stream id %llu touches va=0x%zx bytes=%zu, unmapped since",
                        (unsigned long long)stream->id, (size_t)item->va, item->bytes);
    if (item->event != NULL && item->event->record == item->record)
        item->event->outstanding--;
    free(item);
}

const struct gp__sim_item *gp__sim_overlap(const gp__sim *sim, uintptr_t va, size_t bytes,
                                           uint64_t except_id, uint64_t *stream_id)
{
    for (const struct gp__sim_stream *stream = sim->streams; stream != NULL;
         stream = stream->next) {
        if (stream->id == except_id)
            continue;
        for (const struct gp__sim_item *item = stream->first; item != NULL; item = item->next)
            if (item->bytes > 0 && item->va < va + bytes && va < item->va + item->bytes) {
                *stream_id = stream->id;
                return item;
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
        stream->capture.active = false;
        sim->free_handles = gp__sim_room(sim->free_handles, sim->free_handle_count,
                                         &sim->free_handle_room, sizeof *sim->free_handles);
        sim->free_handles[sim->free_handle_count++] = handle;
    }
    gp__sim_end_ok(&call);
}

void gp__sim_launch(gp__sim *sim, uintptr_t handle, uintptr_t va, size_t bytes)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;
    struct gp__sim_item item = {.va = va, .bytes = bytes};

    if (!gp__sim_begin(&call, sim, NULL, NULL, "# launch stream=0x%zx va=0x%zx bytes=%zu",
                       (size_t)handle, (size_t)va, bytes)) {
        gp__sim_end_ok(&call);
        return;
    }
    stream = gp__sim_find(sim, handle);
    if (stream == NULL)
        gp__sim_violate(&call, "a destroyed stream");
    else if (!gp__sim_covered(sim, va, bytes))
        gp__sim_violate(&call, "the addresses are not mapped with access");
    else if (!sim->dead && bytes > 0 && !stream->capture.active)
        gp__sim_push(stream, &item);
    gp__sim_end_ok(&call);
}

static size_t complete(gp__sim *sim, struct gp__sim_call *call, struct gp__sim_stream *stream,
                       size_t count)
{
    size_t done = 0;

    (void)sim;
    while (done < count && stream->first != NULL) {
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

void gp__sim_complete_all(gp__sim *sim)
{
    struct gp__sim_call call;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# complete everything"))
        for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
            complete(sim, &call, stream, SIZE_MAX);
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

void gp__sim_capture_begin(gp__sim *sim, uintptr_t handle, enum gp__sim_capture_mode mode)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;

    if (!gp__sim_begin(&call, sim, NULL, NULL, "# capture begins on stream=0x%zx",
                       (size_t)handle)) {
        gp__sim_end_ok(&call);
        return;
    }
    stream = gp__sim_find(sim, handle);
    if (stream == NULL || handle <= 1 || stream->capture.active)
        gp__sim_violate(&call, "that stream cannot begin a capture now");
    else
        stream->capture = (struct gp__sim_capture){true, true, mode, gp__sim_thread()};
    gp__sim_end_ok(&call);
}

bool gp__sim_capture_end(gp__sim *sim, uintptr_t handle)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;
    bool valid = false;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# capture ends on stream=0x%zx", (size_t)handle)) {
        stream = gp__sim_find(sim, handle);
        if (stream == NULL || !stream->capture.active) {
            gp__sim_violate(&call, "that stream does not capture");
        } else {
            valid = stream->capture.valid;
            stream->capture.active = false;
        }
    }
    gp__sim_end_ok(&call);
    return valid;
}

static bool was_destroyed(const gp__sim *sim, uintptr_t handle)
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

    if (!gp__sim_begin(&call, sim, &resolve_kind, error, "stream_resolve handle=0x%zx",
                       (size_t)handle))
        return gp__sim_decided(&call);
    if (sim->dead)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_ILLEGAL_ADDRESS, 0, 0);
    stream = gp__sim_find(sim, handle);
    if (stream == NULL) {
        /* Real hardware crashes on the handle of a destroyed stream that no new one took over. */
        if (was_destroyed(sim, handle))
            gp__sim_violate(&call, "a destroyed stream");
        return gp__sim_end(&call, GP_ERR_ARGUMENT, GP__SIM_INVALID_HANDLE, 0, 0);
    }
    if (handle > 1 && stream->capture.active)
        return gp__sim_end(&call, GP_ERR_CAPTURE, GP__SIM_CAPTURE_UNSUPPORTED, 0, 0);
    *out = (struct gp__stream_key){.handle = stream->handle,
                                   .context = device->context,
                                   .id = stream->id,
                                   .thread_bound = stream->thread != 0};
    gp__sim_note(&call, " id=%llu", (unsigned long long)stream->id);
    return gp__sim_end_ok(&call);
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
    *capturing = stream->capture.active || gp__sim_is_implicit(sim, stream);
    gp__sim_note(&call, " %s", *capturing ? "yes" : "no");
    return gp__sim_end_ok(&call);
}
