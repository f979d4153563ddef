/* SPDX-License-Identifier: Apache-2.0
 *
 * Placement: where a request that no free range fits should grow. Pure policy: it reads spans and changes
 * nothing.
 */
#include "pool.h"

#define HOLES_TRIED 8 /* on either side of the request's size */
#define SPANS_TRIED 16 /* a place may run over so many spans */

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* What a block of `bytes` that starts at `first` would need, if the spans from there allow it. */
static bool evaluate(const gp_pool *pool, struct gp__span *first, size_t bytes,
                     const gp_stream *stream, struct gp__place *out)
{
    struct gp__place place = {first, 0, 0};
    size_t left = bytes;
    struct gp__span *span = first;
    for (int i = 0; i < SPANS_TRIED && span != NULL; i++, span = span->next) {
        size_t take = span->bytes;
        if (span->state == GP_SPAN_HOLE) {
            size_t pages = round_up(left, pool->page);
            take = take < pages ? take : pages;
            place.new_bytes += take;
            place.room = span->bytes - take;
        } else if (span->state != GP_SPAN_FREE || !gp__span_is_usable(pool, span, stream)) {
            return false;
        } else {
            place.room = 0;
        }
        if (take >= left) {
            *out = place;
            return true;
        }
        left -= take;
    }
    return false;
}

static bool is_better(const struct gp__place *a, const struct gp__place *b)
{
    if (b->first == NULL || a->new_bytes != b->new_bytes)
        return b->first == NULL || a->new_bytes < b->new_bytes;
    if (a->room != b->room)
        return a->room < b->room;
    return a->first->va < b->first->va;
}

/* A hole is entered through the free span before it, if the stream may use that. */
static void consider(const gp_pool *pool, struct gp__span *hole, size_t bytes,
                     const gp_stream *stream, struct gp__place *best)
{
    struct gp__span *before = hole->previous;
    struct gp__place place;
    bool through =
        before != NULL && before->state == GP_SPAN_FREE && gp__span_is_usable(pool, before, stream);
    if (evaluate(pool, through ? before : hole, bytes, stream, &place) && is_better(&place, best))
        *best = place;
}

struct gp__place gp__place_find(gp_pool *pool, size_t bytes, const gp_stream *stream)
{
    struct gp__place best = {NULL, 0, 0};
    struct gp__tree_node *node = gp__tree_at_least(&pool->holes, bytes, 0);
    for (int i = 0; i < HOLES_TRIED && node != NULL; i++) {
        consider(pool, (struct gp__span *)node, bytes, stream, &best);
        node = gp__tree_at_least(&pool->holes, node->bytes, node->va + 1);
    }
    node = gp__tree_below(&pool->holes, bytes, 0);
    for (int i = 0; i < HOLES_TRIED && node != NULL; i++) {
        consider(pool, (struct gp__span *)node, bytes, stream, &best);
        node = gp__tree_below(&pool->holes, node->bytes, node->va);
    }
    return best;
}

/* Bytes of a FREE span that lie in idle mappings: they would have to be mapped anew if those went. */
static size_t idle_bytes(const gp_pool *pool, const struct gp__span *span)
{
    uintptr_t end = span->va + span->bytes;
    size_t idle = 0;
    for (uintptr_t va = span->va; va < end;) {
        const struct gp__mapping *mapping = gp__mapping_at(pool, span->segment, va);
        uintptr_t stop = mapping->retired.va + mapping->retired.bytes;
        stop = stop < end ? stop : end;
        if (mapping->live == 0)
            idle += stop - va;
        va = stop;
    }
    return idle;
}

/* Bytes that a block of `bytes` starting at `first` would add once all idle memory is gone. */
static size_t least_from(const gp_pool *pool, const struct gp__span *first, size_t bytes)
{
    size_t left = bytes, fresh = 0;
    for (const struct gp__span *span = first; span != NULL; span = span->next) {
        size_t take = span->bytes < left ? span->bytes : left;
        bool gone = span->state == GP_SPAN_HOLE || span->state == GP_SPAN_RETIRING;
        if (!gone &&
            (span->state != GP_SPAN_FREE || gp__timeline_is_unseen(&pool->timeline, span->owners)))
            return SIZE_MAX;
        size_t anew = gone ? span->bytes : idle_bytes(pool, span);
        fresh += anew < take ? anew : take;
        left -= take;
        if (left == 0)
            return round_up(fresh, pool->page);
    }
    return SIZE_MAX;
}

size_t gp__place_least_physical(const gp_pool *pool, size_t bytes)
{
    size_t least = SIZE_MAX;
    if (pool->address_space - pool->address_bytes >= bytes)
        least = round_up(bytes, pool->page);
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next) {
        for (const struct gp__span *span = segment->first; span != NULL; span = span->next) {
            size_t fresh = least_from(pool, span, bytes);
            least = fresh < least ? fresh : least;
        }
    }
    if (least == SIZE_MAX)
        return SIZE_MAX;
    return pool->physical - pool->idle_bytes - pool->retiring_bytes - pool->credit_bytes + least;
}
