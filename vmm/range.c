/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranges: how they begin and end, what they show, who uses them, and their pins. What changes their
 * size is resize.c's. Nothing here maps, unmaps or waits.
 */
#include "pool.h"

#include "../backing/memory.h"

/* ---- life ---------------------------------------------------------------------------------- */

static gp_status check_create(gp_pool *pool, size_t max_bytes, const gp_stream *stream,
                              gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status == GP_OK)
        status = gp__pool_check_stream(pool, stream, error);
    if (status == GP_OK && max_bytes > PTRDIFF_MAX - pool->page)
        status = gp_error_set(error, GP_ERR_ARGUMENT, "%zu bytes is more than any range can hold",
                              max_bytes);
    return status;
}

/* lock: held. */
static void list_range(gp_range *range, struct gp__segment *segment)
{
    gp_pool *pool = range->pool;
    range->segment = segment;
    range->address = segment->va;
    segment->range = range;
    range->next = pool->ranges;
    if (range->next != NULL)
        range->next->previous = range;
    pool->ranges = range;
    pool->address_bytes += segment->bytes;
    gp__span_start(pool, segment);
}

static void free_range(gp_range *range)
{
    gp_stream_release(range->stream);
    gp__free(range);
}

/* A range whose memory is reserved, for a pool that this thread visits. */
static gp_status make(gp_pool *pool, size_t max_bytes, gp_stream *stream, gp_range **out,
                      gp_error *error)
{
    struct gp__segment *segment = NULL;
    size_t bytes = gp__round_up(max_bytes, pool->page);
    gp_range *range = gp__calloc(1, sizeof *range);
    if (range == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for a range of pool '%s'",
                            pool->name);
    gp_status status = bytes > 0 ? gp__segment_reserve(pool, bytes, &segment, error) : GP_OK;
    if (status != GP_OK) {
        gp__free(range);
        return status;
    }
    *range = (gp_range){.pool = gp_pool_retain(pool), .max_bytes = max_bytes, .references = 1};
    range->stream = gp_stream_retain(stream);
    gp__mutex_lock(&pool->lock);
    range->slots = gp__timeline_bit(&pool->timeline, stream);
    if (segment != NULL)
        list_range(range, segment);
    gp__mutex_unlock(&pool->lock);
    *out = range;
    return GP_OK;
}

gp_status gp_range_create(gp_pool *pool, size_t max_bytes, gp_stream *stream, gp_range **out,
                          gp_error *error)
{
    gp_status status = check_create(pool, max_bytes, stream, error);
    if (status == GP_OK)
        status = gp__pool_visit(pool, error);
    if (status != GP_OK)
        return status;
    status = make(pool, max_bytes, stream, out, error);
    gp__pool_leave(pool);
    return status;
}

/* Takes the range off the list; what is left of it goes with its last holder. lock: held. */
static struct gp__segment *detach(gp_pool *pool, gp_range *range)
{
    struct gp__segment *segment = range->segment;
    if (range->previous != NULL)
        range->previous->next = range->next;
    else
        pool->ranges = range->next;
    if (range->next != NULL)
        range->next->previous = range->previous;
    range->segment = NULL;
    range->committed_bytes = 0;
    pool->parted_bytes += segment->bytes;
    if (range->unheld)
        free_range(range);
    return segment;
}

struct gp__segment *gp__range_bury(gp_pool *pool, gp_range *range)
{
    if (range == NULL || !range->closed || range->segment == NULL || range->claims > 0 ||
        range->segment->mapped_bytes > 0)
        return NULL;
    return detach(pool, range);
}

void gp__range_free_segments(gp_pool *pool, struct gp__segment *segments)
{
    if (segments == NULL)
        return;
    size_t freed = gp__segments_free(pool, segments);
    gp__mutex_lock(&pool->lock);
    pool->address_bytes -= freed;
    pool->parted_bytes -= freed;
    gp__mutex_unlock(&pool->lock);
}

void gp__range_free_parted(gp_pool *pool)
{
    gp__mutex_lock(&pool->lock);
    struct gp__segment *segments = pool->parted;
    pool->parted = NULL;
    pool->visitors += segments != NULL; /* a close waits */
    gp__mutex_unlock(&pool->lock);
    if (segments == NULL)
        return;
    gp__range_free_segments(pool, segments);
    gp__pool_leave(pool);
}

struct gp__segment *gp__ranges_take(gp_pool *pool)
{
    struct gp__segment *taken = pool->parted;
    pool->parted = NULL;
    while (pool->ranges != NULL) {
        struct gp__segment *segment = detach(pool, pool->ranges);
        segment->next = taken;
        taken = segment;
    }
    return taken;
}

/* ---- ending -------------------------------------------------------------------------------- */

/* Everything that is committed becomes free. lock: held. */
static struct gp__owners end_range(gp_range *range, gp_stream *stream, bool *record_now)
{
    struct gp__owners owners = gp__range_stamp(range, stream, record_now);
    range->closed = true;
    if (range->segment != NULL)
        gp__range_free_part(range, range->address, range->address + range->segment->bytes, owners);
    return owners;
}

void gp__ranges_end(gp_pool *pool)
{
    bool ignored = false;
    for (gp_range *range = pool->ranges; range != NULL; range = range->next)
        end_range(range, NULL, &ignored);
}

/* Mappings that nothing is committed in any more go to the reaper. lock: held. */
static bool retire_all(gp_range *range)
{
    struct gp__retired *list = NULL;
    gp_release_result ignored = {0, 0};
    if (range->segment != NULL)
        gp__range_retire_part(range, range->address, range->address + range->segment->bytes,
                              GP__RETIRE_SEEN, &list, &ignored);
    gp__retiring_add(range->pool, list);
    return list != NULL;
}

bool gp__range_unclaim(gp_range *range, struct gp__segment **dead)
{
    range->claims--;
    bool kick = range->closed && retire_all(range);
    *dead = gp__range_bury(range->pool, range);
    return kick;
}

/* What a close, but not the last release, may find. lock: held. */
static gp_status check_end(const gp_range *range, bool *done, gp_error *error)
{
    *done = range->closed || range->pool->closed;
    const struct gp__tree_node *pin = range->pins.root;
    return *done || pin == NULL ? GP_OK : gp__range_pinned(range, pin, error);
}

/* Leaves the addresses of a range that has nothing left to the reaper: freeing them is a driver call, which
 * may block, and this may be a finaliser. True when there are some. lock: held. */
static bool part(gp_pool *pool, struct gp__segment *dead)
{
    if (dead == NULL)
        return false;
    dead->next = pool->parted;
    pool->parted = dead;
    return true;
}

/* Ends the range and leaves its memory to the reaper. With `last` nobody holds it any more, and it
 * may be gone afterwards. */
static gp_status end_and_retire(gp_range *range, gp_stream *stream, bool last, gp_error *error)
{
    gp_pool *pool = range->pool;
    bool record_now = false, done = false;
    gp__mutex_lock(&pool->lock);
    gp_status status = last ? GP_OK : check_end(range, &done, error);
    if (status != GP_OK || done) {
        gp__mutex_unlock(&pool->lock);
        return status;
    }
    struct gp__owners owners = end_range(range, stream, &record_now);
    bool kick = retire_all(range);
    bool buried = range->segment == NULL;
    range->unheld = last; /* from here on whoever buries it frees it */
    /* A close that is under way takes what is left of all ranges. */
    bool parted = part(pool, pool->closing ? NULL : gp__range_bury(pool, range));
    gp__mutex_unlock(&pool->lock);
    if (last && buried)
        free_range(range);
    if (record_now)
        gp__pool_record_here(pool, owners);
    if (kick || parted)
        gp__pool_kick(pool);
    if (parted && (pool->flags & GP_POOL_NO_REAPER) != 0)
        gp__range_free_parted(pool);
    return GP_OK;
}

gp_status gp_range_close(gp_range *range, gp_stream *stream, gp_error *error)
{
    gp_pool *pool = range->pool;
    gp_status status = gp__pool_enter(pool, error);
    if (status == GP_OK && stream != NULL)
        status = gp__pool_check_stream(pool, stream, error);
    return status == GP_OK ? end_and_retire(range, stream, false, error) : status;
}

gp_range *gp_range_retain(gp_range *range)
{
    __atomic_add_fetch(&range->references, 1, __ATOMIC_RELAXED);
    return range;
}

void gp_range_release(gp_range *range)
{
    if (range == NULL || __atomic_sub_fetch(&range->references, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    gp_pool *pool = range->pool;
    if (gp__pool_enter(pool, NULL) != GP_OK)
        return;
    end_and_retire(range, NULL, true, NULL);
    gp_pool_release(pool);
}

/* ---- users --------------------------------------------------------------------------------- */

gp_status gp_range_record_stream(gp_range *range, gp_stream *stream, gp_error *error)
{
    gp_pool *pool = range->pool;
    gp_status status = gp__pool_enter(pool, error);
    if (status == GP_OK)
        status = gp__pool_check_stream(pool, stream, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    status = gp__range_check_open(range, error);
    if (status == GP_OK)
        range->slots |= gp__timeline_bit(&pool->timeline, stream);
    gp__mutex_unlock(&pool->lock);
    return status;
}

/* Whether the whole part is committed. lock: held. */
static bool is_committed(const gp_range *range, size_t offset, size_t bytes)
{
    uintptr_t va = range->address + offset;
    if (bytes == 0)
        return true;
    if (range->segment == NULL || offset > range->segment->bytes ||
        bytes > range->segment->bytes - offset)
        return false;
    const struct gp__span *span = gp__span_at(range->pool, range->segment, va);
    return span->state == GP_SPAN_USED && va + bytes <= span->va + span->bytes;
}

gp_status gp_range_pin(gp_range *range, size_t offset, size_t bytes, bool unknown, gp_error *error)
{
    gp_pool *pool = range->pool;
    gp_status status = gp__pool_enter(pool, error);
    struct gp__range_pin *pin = status == GP_OK ? gp__calloc(1, sizeof *pin) : NULL;
    if (status == GP_OK && pin == NULL)
        status = gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to note an export");
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    status = gp__range_check_open(range, error);
    if (status == GP_OK && !is_committed(range, offset, bytes))
        status = gp_error_set(error, GP_ERR_ARGUMENT,
                              "%zu bytes at offset %zu are not all committed: the range has %zu "
                              "of at most %zu bytes; commit them before exporting them",
                              bytes, offset, range->committed_bytes, range->max_bytes);
    if (status == GP_OK) {
        *pin = (struct gp__range_pin){{NULL, NULL, offset, ++range->pin_total}, offset, bytes};
        gp__tree_insert(&range->pins, &pin->node);
        if (range->longest_pin < bytes)
            range->longest_pin = bytes;
        pool->pinned++;
        if (unknown)
            range->slots |= GP__UNKNOWN;
        gp_range_retain(range);
    }
    gp__mutex_unlock(&pool->lock);
    if (status != GP_OK)
        gp__free(pin);
    return status;
}

/* The oldest pin of exactly this part, or NULL. lock: held. */
static struct gp__range_pin *find_pin(const gp_range *range, size_t offset, size_t bytes)
{
    struct gp__tree_node *node = gp__tree_at_least(&range->pins, offset, 0);
    while (node != NULL && node->bytes == offset && ((struct gp__range_pin *)node)->bytes != bytes)
        node = gp__tree_at_least(&range->pins, offset, node->va + 1);
    return node != NULL && node->bytes == offset ? (struct gp__range_pin *)node : NULL;
}

void gp_range_unpin(gp_range *range, size_t offset, size_t bytes)
{
    gp_pool *pool = range->pool;
    if (gp__pool_enter(pool, NULL) != GP_OK)
        return;
    gp__mutex_lock(&pool->lock);
    struct gp__range_pin *pin = find_pin(range, offset, bytes);
    if (pin != NULL) {
        gp__tree_remove(&range->pins, &pin->node);
        if (range->pins.root == NULL)
            range->longest_pin = 0;
        pool->pinned--;
        range->unpinned = gp__timeline_now(&pool->timeline);
    }
    bool kick = pool->pinned == 0 && pool->finishing;
    gp__mutex_unlock(&pool->lock);
    gp__free(pin);
    if (kick)
        gp__reaper_kick(&pool->reaper);
    if (pin != NULL)
        gp_range_release(range);
}

/* ---- what it shows ------------------------------------------------------------------------- */

uintptr_t gp_range_address(const gp_range *range)
{
    return range->address;
}

size_t gp_range_max_bytes(const gp_range *range)
{
    return range->max_bytes;
}

size_t gp_range_granularity(const gp_range *range)
{
    return range->pool->page;
}

gp_pool *gp_range_pool(const gp_range *range)
{
    return range->pool;
}

gp_stream *gp_range_stream(const gp_range *range)
{
    return range->stream;
}

/* Reads one figure under the lock; in a forked child, where locks may be held for ever, without. */
static size_t read_figure(const gp_range *range, const size_t *figure)
{
    bool lockable = gp__pool_enter(range->pool, NULL) == GP_OK;
    if (lockable)
        gp__mutex_lock(&range->pool->lock);
    size_t value = *figure;
    if (lockable)
        gp__mutex_unlock(&range->pool->lock);
    return value;
}

size_t gp_range_size(const gp_range *range)
{
    return read_figure(range, &range->size);
}

size_t gp_range_committed_bytes(const gp_range *range)
{
    return read_figure(range, &range->committed_bytes);
}

size_t gp_range_physical_bytes(const gp_range *range)
{
    if (gp__pool_enter(range->pool, NULL) != GP_OK)
        return 0;
    gp__mutex_lock(&range->pool->lock);
    size_t bytes = range->segment != NULL ? range->segment->mapped_bytes : 0;
    gp__mutex_unlock(&range->pool->lock);
    return bytes;
}

bool gp_range_is_closed(const gp_range *range)
{
    bool closed = gp_pool_is_closed(range->pool);
    if (gp__pool_enter(range->pool, NULL) != GP_OK)
        return closed;
    gp__mutex_lock(&range->pool->lock);
    closed = closed || range->closed;
    gp__mutex_unlock(&range->pool->lock);
    return closed;
}

size_t gp_range_committed(const gp_range *range, gp_interval *out, size_t capacity)
{
    size_t count = 0;
    if (gp__pool_enter(range->pool, NULL) != GP_OK)
        return 0;
    gp__mutex_lock(&range->pool->lock);
    const struct gp__span *span = range->segment != NULL ? range->segment->first : NULL;
    for (; span != NULL; span = span->next) {
        if (span->state != GP_SPAN_USED)
            continue;
        if (count < capacity)
            out[count] = (gp_interval){span->va - range->address, span->bytes};
        count++;
    }
    gp__mutex_unlock(&range->pool->lock);
    return count;
}
