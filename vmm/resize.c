/* SPDX-License-Identifier: Apache-2.0
 *
 * What changes how much of a range is committed: commit, decommit, resize. Committing is a growth like a
 * block's (grow.c, commit.c); decommitting frees pages, then retires the mappings that are idle by then.
 * It never gives addresses away.
 */
#include "pool.h"

#include <stdlib.h>

#include "../backing/memory.h"

/* ---- arguments ----------------------------------------------------------------------------- */

gp_status gp__range_check_open(const gp_range *range, gp_error *error)
{
    gp_status status = gp__pool_usable(range->pool, false, error);
    if (status == GP_OK && range->closed)
        status = gp__state_error(error, GP_REASON_CLOSED, "the range of %zu bytes is closed",
                                 range->max_bytes);
    return status;
}

static gp_status check_interval(const gp_range *range, const gp_interval *part, gp_error *error)
{
    size_t page = range->pool->page;
    size_t end = gp__round_up(range->max_bytes, page);
    if (part->offset % page != 0 || part->bytes % page != 0)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "offset %zu and size %zu must be multiples of the granularity of the "
                            "range, %zu bytes",
                            part->offset, part->bytes, page);
    if (part->offset > end || part->bytes > end - part->offset)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "%zu bytes at offset %zu end beyond the range, which has %zu bytes",
                            part->bytes, part->offset, end);
    return GP_OK;
}

static int by_offset(const void *a, const void *b)
{
    const gp_interval *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* The intervals in order, apart, and none empty. *out is `one` or to be freed. */
static gp_status normalise(const gp_range *range, const gp_interval *intervals, size_t *count,
                           gp_interval *one, gp_interval **out, gp_error *error)
{
    size_t kept = 0;
    bool sorted = true;
    gp_interval *parts = *count <= 1 ? one : gp__calloc(*count, sizeof *parts);
    if (parts == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for %zu intervals", *count);
    for (size_t i = 0; i < *count; i++) {
        gp_status status = check_interval(range, &intervals[i], error);
        if (status != GP_OK) {
            if (parts != one)
                gp__free(parts);
            return status;
        }
        sorted = sorted && (kept == 0 || parts[kept - 1].offset <= intervals[i].offset);
        if (intervals[i].bytes > 0)
            parts[kept++] = intervals[i];
    }
    if (!sorted)
        qsort(parts, kept, sizeof *parts, by_offset);
    size_t last = 0;
    for (size_t i = 1; i < kept; i++) {
        size_t end = parts[last].offset + parts[last].bytes;
        if (parts[i].offset > end)
            parts[++last] = parts[i];
        else if (parts[i].offset + parts[i].bytes > end)
            parts[last].bytes = parts[i].offset + parts[i].bytes - parts[last].offset;
    }
    *count = kept == 0 ? 0 : last + 1;
    *out = parts;
    return GP_OK;
}

static gp_status begin(gp_range *range, const gp_stream *stream, gp_error *error)
{
    gp_status status = gp__pool_enter(range->pool, error);
    if (status == GP_OK && stream != NULL)
        status = gp__pool_check_stream(range->pool, stream, error);
    return status;
}

/* ---- commit -------------------------------------------------------------------------------- */

static gp_status commit(gp_range *range, const gp_interval *parts, size_t count, gp_stream *stream,
                        size_t *committed, gp_error *error)
{
    gp_pool *pool = range->pool;
    gp_device *device = pool->device;
    bool capturing = false;
    uintptr_t added = 0;
    struct gp__growth growth = {
        .pool = pool, .stream = stream, .range = range, .parts = parts, .part_count = count};
    for (size_t i = 0; i < count; i++)
        growth.bytes += parts[i].bytes;
    gp__mutex_lock(&pool->lock);
    gp_status status = gp__range_check_open(range, error);
    gp__mutex_unlock(&pool->lock);
    if (status == GP_OK && count > 0)
        status = gp__pool_check_live(pool, stream, error);
    if (status == GP_OK && count > 0)
        status = device->driver->stream_capturing(device, &stream->key, &capturing, error);
    growth.taker = capturing ? NULL : stream;
    if (status == GP_OK && count > 0)
        status = gp__ladder(&growth, &added, error);
    if (status == GP_OK && committed != NULL)
        *committed = added;
    return status;
}

gp_status gp_range_commit(gp_range *range, const gp_interval *intervals, size_t count,
                          gp_stream *stream, size_t *committed, gp_error *error)
{
    gp_interval one, *parts = NULL;
    gp_status status = begin(range, stream, error);
    if (status == GP_OK)
        status = normalise(range, intervals, &count, &one, &parts, error);
    if (status != GP_OK)
        return status;
    status = commit(range, parts, count, stream != NULL ? stream : range->stream, committed, error);
    if (parts != &one)
        gp__free(parts);
    return status;
}

/* ---- decommit ------------------------------------------------------------------------------ */

struct gp__owners gp__range_stamp(gp_range *range, gp_stream *stream, bool *record_now)
{
    struct gp__timeline *timeline = &range->pool->timeline;
    if (range->pins.root == NULL && timeline->unknown_passed >= range->unpinned)
        range->slots &= ~GP__UNKNOWN;
    return gp__timeline_stamp(timeline, range->slots, stream != NULL ? stream : range->stream,
                              record_now);
}

gp_status gp__range_pinned(const gp_range *range, const struct gp__tree_node *node, gp_error *error)
{
    const struct gp__range_pin *pin = (const struct gp__range_pin *)node;
    return gp_error_set(error, GP_ERR_PINNED,
                        "%zu bytes at offset %zu of the range of %zu bytes have live exports; "
                        "release them first",
                        pin->bytes, pin->offset, range->max_bytes);
}

/* A pin that overlaps the part, or NULL: looks down from its end, no further than the longest pin reaches. */
static const struct gp__tree_node *pin_over(const gp_range *range, const gp_interval *part)
{
    const struct gp__tree_node *node = gp__tree_below(&range->pins, part->offset + part->bytes, 0);
    while (node != NULL && node->bytes + range->longest_pin > part->offset) {
        const struct gp__range_pin *pin = (const struct gp__range_pin *)node;
        if (pin->bytes > 0 && pin->offset + pin->bytes > part->offset)
            return node;
        node = gp__tree_below(&range->pins, node->bytes, node->va);
    }
    return NULL;
}

/* What forbids to decommit the parts. lock: held. */
static gp_status check_parts(const gp_range *range, const gp_interval *parts, size_t count,
                             gp_error *error)
{
    for (size_t i = 0; i < count && range->pins.root != NULL; i++) {
        const struct gp__tree_node *pin = pin_over(range, &parts[i]);
        if (pin != NULL)
            return gp__range_pinned(range, pin, error);
    }
    for (size_t i = 0; i < count && range->claims > 0; i++) {
        uintptr_t va = range->address + parts[i].offset;
        const struct gp__span *span = gp__span_at(range->pool, range->segment, va);
        for (; span != NULL && span->va < va + parts[i].bytes; span = span->next) {
            if (span->state == GP_SPAN_CLAIMED)
                return gp__range_busy(range, error);
        }
    }
    return GP_OK;
}

void gp__range_free_part(gp_range *range, uintptr_t va, uintptr_t end, struct gp__owners owners)
{
    gp_pool *pool = range->pool;
    while (va < end) {
        struct gp__span *span = gp__span_at(pool, range->segment, va);
        uintptr_t stop = span->va + span->bytes;
        stop = stop < end ? stop : end;
        if (span->state == GP_SPAN_USED) {
            if (span->va < va)
                span = gp__span_cut(pool, span, va);
            if (span->va + span->bytes > stop)
                gp__span_cut(pool, span, stop);
            size_t bytes = stop - va;
            gp__mapping_count(pool, range->segment, va, bytes, false);
            range->committed_bytes -= bytes;
            gp__used_note(pool);
            pool->used_bytes -= bytes;
            gp__span_free(pool, span, owners);
        }
        va = stop;
    }
}

void gp__range_retire_part(gp_range *range, uintptr_t va, uintptr_t end,
                           enum gp__retire_which which, struct gp__retired **list,
                           gp_release_result *result)
{
    gp_pool *pool = range->pool;
    while (va < end) {
        struct gp__mapping *mapping = gp__mapping_at(pool, range->segment, va);
        if (mapping == NULL) {
            const struct gp__span *span = gp__span_at(pool, range->segment, va);
            va = span->va + span->bytes;
            continue;
        }
        uintptr_t stop = mapping->retired.va + mapping->retired.bytes;
        bool retiring = gp__chunk_state_of(mapping->retired.chunk) != GP__CHUNK_MAPPED;
        bool idle = !retiring && mapping->live == 0;
        if (idle && gp__retire_one(pool, mapping, which, list))
            result->released_bytes += mapping->retired.bytes;
        else if (!retiring)
            result->kept_bytes += (stop < end ? stop : end) - va;
        va = stop;
    }
}

struct decommit {
    const gp_interval *parts;
    size_t count;
    gp_stream *stream; /* NULL: the range's own */
    enum gp__retire_which which;
    struct gp__retired *list;
    gp_release_result result;
    struct gp__owners owners;
    bool record_now;
};

/* lock: held. */
static gp_status decommit(gp_range *range, struct decommit *work, gp_error *error)
{
    gp_status status = check_parts(range, work->parts, work->count, error);
    if (status == GP_OK)
        status = gp__span_reserve(range->pool, 2 * work->count, error);
    if (status != GP_OK)
        return status;
    work->owners = gp__range_stamp(range, work->stream, &work->record_now);
    for (size_t i = 0; i < work->count; i++) {
        uintptr_t va = range->address + work->parts[i].offset;
        gp__range_free_part(range, va, va + work->parts[i].bytes, work->owners);
    }
    for (size_t i = 0; i < work->count; i++) {
        uintptr_t va = range->address + work->parts[i].offset;
        gp__range_retire_part(range, va, va + work->parts[i].bytes, work->which, &work->list,
                              &work->result);
    }
    return GP_OK;
}

static size_t committed_in(const gp_range *range, uintptr_t va, uintptr_t end)
{
    size_t bytes = 0;
    const struct gp__span *span = gp__span_at(range->pool, range->segment, va);
    for (; span != NULL && span->va < end; span = span->next) {
        uintptr_t from = span->va > va ? span->va : va;
        uintptr_t stop = span->va + span->bytes;
        if (span->state == GP_SPAN_USED)
            bytes += (stop < end ? stop : end) - from;
    }
    return bytes;
}

/* Who else may still use the chunks that a decommit of the parts gives back: parts of them may have been
 * decommitted before, after a use on other streams. lock: held. */
static struct gp__owners earlier_owners(const gp_range *range, const gp_interval *parts,
                                        size_t count)
{
    const gp_pool *pool = range->pool;
    struct gp__owners all = {0, 0};
    const struct gp__mapping *last = NULL;
    size_t gone = 0;
    for (size_t i = 0; i < count && range->segment != NULL; i++) {
        uintptr_t va = range->address + parts[i].offset;
        uintptr_t end = va + parts[i].bytes;
        while (va < end) {
            const struct gp__mapping *mapping = gp__mapping_at(pool, range->segment, va);
            const struct gp__span *span = gp__span_at(pool, range->segment, va);
            uintptr_t stop = span->va + span->bytes;
            if (mapping != NULL) {
                stop = mapping->retired.va + mapping->retired.bytes;
                gone =
                    (mapping == last ? gone : 0) + committed_in(range, va, stop < end ? stop : end);
                last = mapping;
                if (gone == mapping->live)
                    all = gp__owners_merge(all, gp__retire_owners_of(pool, mapping));
            }
            va = stop;
        }
    }
    return all;
}

/* What a decommit will wait for must not be captured: checked before anything changes. */
static gp_status check_wait(gp_range *range, const struct decommit *work, gp_error *error)
{
    gp_pool *pool = range->pool;
    bool ignored = false;
    gp_status status = gp__pool_not_inside(pool, "shrinking", error);
    if (status == GP_OK)
        status = gp__pool_visit(pool, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    struct gp__owners owners = gp__range_stamp(range, work->stream, &ignored);
    owners = gp__owners_merge(owners, earlier_owners(range, work->parts, work->count));
    gp__mutex_unlock(&pool->lock);
    if (owners.slots != 0)
        status = gp__timeline_check_capture(&pool->timeline, owners, error);
    gp__pool_leave(pool);
    return status;
}

/* The whole of a decommit; *changed: the parts are decommitted, whatever is returned. `size`: what a resize
 * sets with it, or SIZE_MAX. */
static gp_status decommit_parts(gp_range *range, struct decommit *work, unsigned flags, size_t size,
                                gp_release_result *out, gp_error *error)
{
    gp_pool *pool = range->pool;
    bool wait = (flags & GP_TRIM_NO_WAIT) == 0;
    size_t returned = 0;
    gp_status status = wait ? check_wait(range, work, error) : GP_OK;
    if (status != GP_OK)
        return status;
    work->which = wait ? GP__RETIRE_ALL : GP__RETIRE_SEEN;
    gp__mutex_lock(&pool->lock);
    status = gp__range_check_open(range, error);
    if (status == GP_OK && range->segment != NULL)
        status = decommit(range, work, error);
    if (status == GP_OK && size != SIZE_MAX)
        range->size = size;
    if (wait)
        gp__retire_hold(pool, work->list);
    else
        gp__retiring_add(pool, work->list);
    gp__mutex_unlock(&pool->lock);
    if (status == GP_OK && work->record_now)
        gp__pool_record_here(pool, work->owners);
    if (work->list != NULL && wait)
        status = gp__retire_finish(pool, work->list, GP__REAP_ALL, &pool->interrupt, NULL,
                                   &returned, error);
    else if (work->list != NULL)
        gp__pool_kick(pool);
    if (wait)
        work->result.released_bytes = returned;
    if (status == GP_OK && out != NULL)
        *out = work->result;
    return status;
}

gp_status gp_range_decommit(gp_range *range, const gp_interval *intervals, size_t count,
                            gp_stream *stream, unsigned flags, gp_release_result *out,
                            gp_error *error)
{
    gp_interval one, *parts = NULL;
    gp_status status = begin(range, stream, error);
    if (status == GP_OK)
        status = normalise(range, intervals, &count, &one, &parts, error);
    if (status != GP_OK)
        return status;
    struct decommit work = {.parts = parts, .count = count, .stream = stream};
    status = decommit_parts(range, &work, flags, SIZE_MAX, out, error);
    if (parts != &one)
        gp__free(parts);
    return status;
}

/* ---- resize -------------------------------------------------------------------------------- */

/* One resize at a time. */
static gp_status begin_resize(gp_range *range, size_t size, size_t *before, gp_error *error)
{
    gp_pool *pool = range->pool;
    if (size > range->max_bytes)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "%zu bytes is more than the maximum that was reserved, %zu bytes", size,
                            range->max_bytes);
    gp__mutex_lock(&pool->lock);
    gp_status status = gp__range_check_open(range, error);
    /* It may be this thread, of which a callback runs within. */
    if (status == GP_OK && range->resizing)
        status = gp__pool_not_inside(pool, "resizing a range of", error);
    if (status == GP_OK && range->resizing)
        status =
            gp__state_error(error, GP_REASON_BUSY,
                            "another thread is resizing the range of %zu bytes", range->max_bytes);
    if (status == GP_OK)
        range->resizing = true;
    *before = range->size;
    gp__mutex_unlock(&pool->lock);
    return status;
}

gp_status gp_range_resize(gp_range *range, size_t size, gp_stream *stream, unsigned flags,
                          gp_release_result *out, gp_error *error)
{
    gp_pool *pool = range->pool;
    size_t before = 0;
    gp_release_result result = {0, 0};
    gp_status status = begin(range, stream, error);
    if (status == GP_OK)
        status = begin_resize(range, size, &before, error);
    if (status != GP_OK)
        return status;
    size_t end = gp__round_up(range->max_bytes, pool->page);
    size_t middle = gp__round_up(size, pool->page);
    gp_interval kept = {0, middle}, gone = {middle, end - middle};
    if (size >= before)
        status =
            commit(range, &kept, middle > 0, stream != NULL ? stream : range->stream, NULL, error);
    struct decommit work = {.parts = &gone, .count = gone.bytes > 0, .stream = stream};
    if (size < before)
        status = decommit_parts(range, &work, flags, size, &result, error);
    gp__mutex_lock(&pool->lock);
    if (status == GP_OK)
        range->size = size;
    range->resizing = false;
    gp__mutex_unlock(&pool->lock);
    if (status == GP_OK && out != NULL)
        *out = result;
    return status;
}
