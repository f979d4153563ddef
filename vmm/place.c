/* SPDX-License-Identifier: Apache-2.0
 *
 * Placement: where a request that no free range fits should grow. Pure policy: it reads spans and changes
 * nothing.
 */
#include "pool.h"

#define HOLES_TRIED 8 /* on either side of the request's size */
#define SPANS_TRIED 16 /* a place may run over so many spans */

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
            size_t pages = gp__round_up(left, pool->page);
            take = take < pages ? take : pages;
            place.new_bytes += take;
            place.room = span->bytes - take;
        } else if (span->state != GP_SPAN_FREE || !gp__span_is_usable(pool, span->owners, stream)) {
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
    bool through = before != NULL && before->state == GP_SPAN_FREE &&
                   gp__span_is_usable(pool, before->owners, stream);
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

size_t gp__place_idle_bytes(const gp_pool *pool, const struct gp__segment *segment, uintptr_t from,
                            uintptr_t to)
{
    size_t idle = 0;
    for (uintptr_t va = from; va < to;) {
        const struct gp__mapping *mapping = gp__mapping_at(pool, segment, va);
        uintptr_t stop = mapping->retired.va + mapping->retired.bytes;
        stop = stop < to ? stop : to;
        if (mapping->live == 0)
            idle += stop - va;
        va = stop;
    }
    return idle;
}

/* Whether a block could lie over this span once all seen owners had passed; *anew is how much of it would
 * have to be mapped for that once all idle memory was gone. */
static bool could_use(const gp_pool *pool, const struct gp__span *span, size_t *anew)
{
    bool gone = span->state == GP_SPAN_HOLE || span->state == GP_SPAN_RETIRING;
    if (!gone &&
        (span->state != GP_SPAN_FREE || gp__timeline_is_unseen(&pool->timeline, span->owners)))
        return false;
    *anew = gone ? span->bytes
                 : gp__place_idle_bytes(pool, span->segment, span->va, span->va + span->bytes);
    return true;
}

/* The fewest bytes to map for a block in this segment: a window of usable spans slides over it, always the
 * shortest that starts where it starts and holds the block. */
static size_t least_in(const gp_pool *pool, const struct gp__segment *segment, size_t bytes)
{
    size_t least = SIZE_MAX, held = 0, fresh = 0, anew = 0, first_anew = 0;
    const struct gp__span *first = segment->first;
    for (const struct gp__span *span = first; span != NULL; span = span->next) {
        if (!could_use(pool, span, &anew)) {
            held = fresh = 0;
            first = span->next;
            continue;
        }
        while (held + span->bytes >= bytes) {
            size_t last = anew < bytes - held ? anew : bytes - held;
            least = fresh + last < least ? fresh + last : least;
            if (first == span)
                break;
            could_use(pool, first, &first_anew);
            held -= first->bytes;
            fresh -= first_anew;
            first = first->next;
        }
        held += span->bytes;
        fresh += anew;
        if (first == span && span->bytes >= bytes) {
            /* It holds the block alone, so no better window starts here. */
            held = fresh = 0;
            first = span->next;
        }
    }
    return least;
}

size_t gp__place_least_physical(const gp_pool *pool, size_t bytes)
{
    size_t least = SIZE_MAX;
    if (pool->address_space - pool->block_address_bytes >= bytes)
        least = bytes;
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next) {
        size_t fresh = least_in(pool, segment, bytes);
        least = fresh < least ? fresh : least;
    }
    if (least == SIZE_MAX)
        return SIZE_MAX;
    return pool->physical - gp__retirable_bytes(pool) - pool->credit_bytes +
           gp__round_up(least, pool->page);
}
