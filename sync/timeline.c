/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams, slots and stamps of one timeline: who owns memory. When they have passed is fence.c.
 */
#include "timeline.h"

#include "../backing/memory.h"

#define SHARED_SLOT (GP__SLOT_COUNT - 1)

static uint64_t bit_of(int slot)
{
    return UINT64_C(1) << slot;
}

void gp__timeline_init(struct gp__timeline *timeline, gp_device *device, struct gp__mutex *lock,
                       uint64_t (*slots_in_use)(void *context),
                       void (*stream_ends)(void *context, gp_stream *stream), void *context)
{
    static uint64_t timelines;
    *timeline = (struct gp__timeline){.number = __atomic_add_fetch(&timelines, 1, __ATOMIC_RELAXED),
                                      .device = device,
                                      .lock = lock,
                                      .clock = 1,
                                      .slots_in_use = slots_in_use,
                                      .stream_ends = stream_ends,
                                      .context = context};
    for (int slot = 0; slot < GP__SLOT_COUNT; slot++)
        timeline->slot_passed[slot] = UINT64_MAX;
}

static void destroy_fences(struct gp__timeline *timeline, struct gp__fence *fence)
{
    bool alive = !gp__is_exiting();
    while (fence != NULL) {
        struct gp__fence *next = fence->next;
        if (alive)
            timeline->device->driver->event_destroy(timeline->device, fence->event);
        gp__free(fence);
        fence = next;
    }
}

void gp__timeline_destroy(struct gp__timeline *timeline)
{
    destroy_fences(timeline, timeline->spare);
    timeline->spare = NULL;
    while (timeline->streams != NULL) {
        gp_stream *stream = timeline->streams;
        timeline->streams = stream->next;
        destroy_fences(timeline, stream->fences);
        stream->fences = NULL;

        gp_stream_release(stream);
    }
}

static gp_stream *find_stream(struct gp__timeline *timeline, const struct gp__stream_key *key)
{
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->key.context == key->context && stream->key.id == key->id && !stream->unnamed &&
            stream->state != GP__STREAM_FORGOTTEN)
            return stream;
    }
    return NULL;
}

/* The live stream that was last known by this handle, on this thread if that matters. lock: held. */
static gp_stream *find_handle(const struct gp__timeline *timeline, uintptr_t handle)
{
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        bool ours = !stream->key.thread_bound || stream->thread == gp__thread_id();
        if (stream->key.handle == handle && stream->state == GP__STREAM_LIVE && ours)
            return stream;
    }
    return NULL;
}

void gp__timeline_lose(struct gp__timeline *timeline, gp_stream *stream)
{
    timeline->stream_ends(timeline->context, stream);
    gp__stream_set_state(stream, GP__STREAM_GONE);
    if (stream->slot != GP__SLOT_NONE)
        timeline->peculiar |= bit_of(stream->slot);
}

/* A handle that now names another stream: the streams that it named before are gone. */
static void mark_gone(struct gp__timeline *timeline, const struct gp__stream_key *key)
{
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->key.handle == key->handle && !stream->key.thread_bound &&
            (stream->key.id != key->id || stream->key.context != key->context) &&
            stream->state == GP__STREAM_LIVE)
            gp__timeline_lose(timeline, stream);
    }
}

/* Takes the slots that own nothing away from their streams. */
static void reclaim_slots(struct gp__timeline *timeline)
{
    uint64_t used = timeline->slots_in_use(timeline->context);
    for (gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->slot == GP__SLOT_NONE || (used & bit_of(stream->slot)) != 0)
            continue;
        if (--timeline->slot_streams[stream->slot] == 0)
            timeline->slot_passed[stream->slot] = UINT64_MAX;
        timeline->peculiar &= ~bit_of(stream->slot);
        stream->slot = GP__SLOT_NONE;
    }
}

void gp__timeline_unlink(struct gp__timeline *timeline, gp_stream *stream)
{
    gp_stream **link = &timeline->streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    timeline->stream_count--;
    if (stream->slot == GP__SLOT_NONE)
        return;
    if (--timeline->slot_streams[stream->slot] == 0)
        timeline->slot_passed[stream->slot] = UINT64_MAX;
    stream->slot = GP__SLOT_NONE;
}

/* Lets go of streams that own nothing and that nobody holds: if they come back they are met anew. Gone
 * streams of one slot can only pass together, so one of them stands for all. */
static void prune(struct gp__timeline *timeline)
{
    gp_stream *gone[GP__SLOT_COUNT] = {NULL};
    for (gp_stream *stream = timeline->streams; stream != NULL;) {
        gp_stream *next = stream->next;
        bool held = stream->fences != NULL || stream->recording > 0 ||
                    __atomic_load_n(&stream->references, __ATOMIC_ACQUIRE) != 1;
        gp_stream *other = NULL;
        if (stream->slot != GP__SLOT_NONE && stream->state == GP__STREAM_GONE) {
            other = gone[stream->slot];
            gone[stream->slot] = other != NULL ? other : stream;
        }
        if (other != NULL && !held && other->passed > stream->passed)
            other->passed = stream->passed;
        if (!held && (stream->slot == GP__SLOT_NONE || other != NULL)) {
            gp__timeline_unlink(timeline, stream);
            gp_stream_release(stream);
        }
        stream = next;
    }
}

static gp_stream *add_stream(struct gp__timeline *timeline, const struct gp__stream_key *key)
{
    if (timeline->stream_count >= GP__SLOT_COUNT) {
        reclaim_slots(timeline);
        prune(timeline);
    }
    gp_stream *stream = gp__calloc(1, sizeof *stream);
    if (stream == NULL)
        return NULL;
    if (key->thread_bound)
        gp__thread_gets_stream();
    mark_gone(timeline, key);
    *stream = (gp_stream){.key = *key,
                          .number = ++timeline->stream_total,
                          .timeline = timeline->number,
                          .references = 1,
                          .thread = key->thread_bound ? gp__thread_id() : 0,
                          .slot = GP__SLOT_NONE,
                          .next = timeline->streams};
    timeline->streams = stream;
    timeline->stream_count++;
    return stream;
}

/* The stream with this name, or the unnamed one behind the handle, which gets it. lock: held. */
static gp_stream *find_named(struct gp__timeline *timeline, const struct gp__stream_key *key)
{
    gp_stream *stream = find_stream(timeline, key);
    if (stream != NULL)
        return stream;
    stream = find_handle(timeline, key->handle);
    if (stream == NULL || !stream->unnamed || stream->key.context != key->context)
        return NULL;
    gp__stream_name(stream, key->id);
    return stream;
}

gp_status gp__timeline_stream(struct gp__timeline *timeline, uintptr_t handle, gp_stream **out,
                              gp_error *error)
{
    struct gp__stream_key key = {0};
    gp_status status =
        timeline->device->driver->stream_resolve(timeline->device, handle, &key, error);
    if (status != GP_OK && status != GP_ERR_CAPTURE && status != GP_ERR_DRIVER)
        return status;
    bool capturing = status == GP_ERR_CAPTURE;
    gp__mutex_lock(timeline->lock);
    gp_stream *stream = status == GP_OK ? find_named(timeline, &key)
                                        : find_handle(timeline, capturing ? key.handle : handle);
    if (stream == NULL && status != GP_ERR_DRIVER) {
        stream = add_stream(timeline, &key);
        if (stream != NULL)
            stream->unnamed = capturing;
        status = GP_OK;
    }
    if (stream != NULL)
        *out = gp_stream_retain(stream);
    gp__mutex_unlock(timeline->lock);
    if (stream != NULL || status == GP_ERR_DRIVER)
        return stream != NULL ? GP_OK : status;
    return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to remember stream %#zx",
                        (size_t)handle);
}

static int find_slot(const struct gp__timeline *timeline, uint64_t taken)
{
    for (int slot = 0; slot < SHARED_SLOT; slot++) {
        if (timeline->slot_streams[slot] == 0 && (taken & bit_of(slot)) == 0)
            return slot;
    }
    return GP__SLOT_NONE;
}

/* A slot for a stream that owns nothing yet: a fresh one, else one reclaimed, else the shared one.
 * A slot left by a forgotten stream may still stand in owner sets, so the pool is asked about it. */
static int assign_slot(struct gp__timeline *timeline)
{
    int fresh = find_slot(timeline, timeline->touched);
    if (fresh != GP__SLOT_NONE)
        return fresh;
    uint64_t taken = timeline->slots_in_use(timeline->context);
    int slot = find_slot(timeline, taken);
    if (slot == GP__SLOT_NONE) {
        reclaim_slots(timeline);
        slot = find_slot(timeline, taken);
    }
    return slot == GP__SLOT_NONE ? SHARED_SLOT : slot;
}

uint64_t gp__timeline_bit(struct gp__timeline *timeline, gp_stream *stream)
{
    if (stream->key.always_passed || stream->state == GP__STREAM_FORGOTTEN)
        return 0;
    if (stream->slot == GP__SLOT_NONE) {
        int slot = assign_slot(timeline);
        stream->slot = slot;
        timeline->touched |= bit_of(slot);
        if (stream->key.thread_bound || stream->state == GP__STREAM_GONE)
            timeline->peculiar |= bit_of(slot);
        /* It has done nothing to our memory yet, so everything stamped before has passed on it. */
        stream->passed = timeline->clock - 1;
        stream->recorded = timeline->clock - 1;
        if (timeline->slot_streams[slot]++ == 0 || timeline->slot_passed[slot] > stream->passed)
            timeline->slot_passed[slot] = stream->passed;
    }
    return bit_of(stream->slot);
}

bool gp__timeline_is_sole(const struct gp__timeline *timeline, uint64_t slots,
                          const gp_stream *stream)
{
    return stream->slot != GP__SLOT_NONE && slots == bit_of(stream->slot) &&
           timeline->slot_streams[stream->slot] == 1 && stream->state == GP__STREAM_LIVE;
}

/* True when no fence can be put on the stream from this thread. */
static bool is_out_of_reach(const gp_stream *stream)
{
    return stream->state != GP__STREAM_LIVE ||
           (stream->key.thread_bound && stream->thread != gp__thread_id());
}

struct gp__owners gp__timeline_stamp(struct gp__timeline *timeline, uint64_t slots,
                                     gp_stream *stream, bool *record_now)
{
    if (stream != NULL)
        slots |= gp__timeline_bit(timeline, stream);
    if ((slots & timeline->peculiar) == 0)
        return slots == 0 ? (struct gp__owners){0, 0} : (struct gp__owners){slots, timeline->clock};
    uint64_t stamped = slots & (GP__UNKNOWN | ~timeline->peculiar);
    for (gp_stream *each = timeline->streams; each != NULL; each = each->next) {
        if (each->slot == GP__SLOT_NONE || (slots & bit_of(each->slot)) == 0)
            continue;
        if (is_out_of_reach(each)) {
            stamped |= GP__UNKNOWN;
            continue;
        }
        stamped |= bit_of(each->slot);
        if (each->key.thread_bound)
            *record_now = true;
    }
    return stamped == 0 ? (struct gp__owners){0, 0} : (struct gp__owners){stamped, timeline->clock};
}

struct gp__owners gp__timeline_remaining(const struct gp__timeline *timeline,
                                         struct gp__owners owners)
{
    uint64_t remaining = 0;
    for (uint64_t left = owners.slots & ~GP__UNKNOWN; left != 0; left &= left - 1) {
        int slot = __builtin_ctzll(left);
        if (timeline->slot_passed[slot] < owners.ticket)
            remaining |= bit_of(slot);
    }
    if ((owners.slots & GP__UNKNOWN) != 0 && timeline->unknown_passed < owners.ticket)
        remaining |= GP__UNKNOWN;
    return remaining == 0 ? (struct gp__owners){0, 0}
                          : (struct gp__owners){remaining, owners.ticket};
}

bool gp__timeline_is_unseen(const struct gp__timeline *timeline, struct gp__owners owners)
{
    if ((owners.slots & GP__UNKNOWN) != 0)
        return true;
    if ((owners.slots & timeline->peculiar) == 0)
        return false;
    for (const gp_stream *stream = timeline->streams; stream != NULL; stream = stream->next) {
        if (stream->slot != GP__SLOT_NONE && (owners.slots & bit_of(stream->slot)) != 0 &&
            stream->recorded < owners.ticket && is_out_of_reach(stream))
            return true;
    }
    return false;
}
