/* SPDX-License-Identifier: Apache-2.0
 *
 * Spans: how they tile a segment, and where free ones are found. This file knows who may reuse a range;
 * it never maps, waits or counts bytes.
 */
#include "pool.h"

#include "../backing/memory.h"

static struct gp__span *span_of(struct gp__tree_node *node)
{
    return (struct gp__span *)node;
}

gp_status gp__span_reserve(gp_pool *pool, size_t count, gp_error *error)
{
    while (pool->spare_span_count < count) {
        struct gp__span *span = gp__calloc(1, sizeof *span);
        if (span == NULL)
            return gp_error_set(error, GP_ERR_HOST_MEMORY,
                                "no host memory for the bookkeeping of pool '%s'", pool->name);
        gp__span_drop(pool, span);
    }
    return GP_OK;
}

struct gp__span *gp__span_new(gp_pool *pool)
{
    struct gp__span *span = pool->spare_spans;
    pool->spare_spans = span->next;
    pool->spare_span_count--;
    *span = (struct gp__span){.state = GP_SPAN_HOLE};
    return span;
}

void gp__span_drop(gp_pool *pool, struct gp__span *span)
{
    span->next = pool->spare_spans;
    pool->spare_spans = span;
    pool->spare_span_count++;
}

/* ---- which span starts where ---- */

static size_t page_of(const gp_pool *pool, const struct gp__span *span)
{
    return (span->va - span->segment->va) / pool->page;
}

static void set_start(struct gp__segment *segment, size_t page, struct gp__span *span)
{
    segment->pages[page].first = span;
    gp__marks_add(&segment->spans, page);
}

/* The lowest span that starts in the page, or NULL. */
static struct gp__span *start_in(const struct gp__segment *segment, size_t page)
{
    return gp__marks_last(&segment->spans, page) == page ? segment->pages[page].first : NULL;
}

static void note_start(const gp_pool *pool, struct gp__span *span)
{
    size_t page = page_of(pool, span);
    const struct gp__span *first = start_in(span->segment, page);
    if (first == NULL || first->va > span->va)
        set_start(span->segment, page, span);
}

/* Call while the span is still linked. */
static void forget_start(const gp_pool *pool, const struct gp__span *span)
{
    size_t page = page_of(pool, span);
    struct gp__segment *segment = span->segment;
    struct gp__span *next = span->next;
    if (start_in(segment, page) != span)
        return;
    if (next != NULL && page_of(pool, next) == page)
        segment->pages[page].first = next;
    else
        gp__marks_remove(&segment->spans, page);
}

void gp__span_start(gp_pool *pool, struct gp__segment *segment)
{
    struct gp__span *span = segment->first;
    *span = (struct gp__span){
        .state = GP_SPAN_HOLE, .segment = segment, .va = segment->va, .bytes = segment->bytes};
    note_start(pool, span);
    gp__span_file(pool, span);
}

struct gp__span *gp__span_at(const gp_pool *pool, const struct gp__segment *segment, uintptr_t va)
{
    size_t page = gp__marks_last(&segment->spans, (va - segment->va) / pool->page);
    if (segment->pages[page].first->va > va)
        page = gp__marks_last(&segment->spans, page - 1); /* a span starts in page 0 */
    struct gp__span *span = segment->pages[page].first;
    while (span->next != NULL && span->next->va <= va)
        span = span->next;
    return span;
}

struct gp__span *gp__span_cut(gp_pool *pool, struct gp__span *span, uintptr_t va)
{
    struct gp__span *rest = gp__span_new(pool);
    rest->segment = span->segment;
    rest->state = span->state;
    rest->was_hole = span->was_hole;
    rest->owners = span->owners;
    rest->arena = span->arena;
    rest->va = va;
    rest->bytes = span->bytes - (va - span->va);
    rest->previous = span;
    rest->next = span->next;
    if (rest->next != NULL)
        rest->next->previous = rest;
    span->next = rest;
    span->bytes = va - span->va;
    note_start(pool, rest);
    return rest;
}

void gp__span_join(gp_pool *pool, struct gp__span *span)
{
    struct gp__span *gone = span->next;
    forget_start(pool, gone);
    span->bytes += gone->bytes;
    span->next = gone->next;
    if (span->next != NULL)
        span->next->previous = span;
    gp__span_drop(pool, gone);
}

/* ---- bins ---- */

static int bin_number(struct gp__owners owners)
{
    if (owners.slots == 0)
        return GP__BIN_PASSED;
    bool one = (owners.slots & (owners.slots - 1)) == 0;
    return one && owners.slots != GP__UNKNOWN ? __builtin_ctzll(owners.slots) : GP__BIN_MIXED;
}

/* In ticket order, so that the oldest is the first to pass. Nearly always it is the newest. */
static void enqueue(struct gp__bin *bin, struct gp__span *span)
{
    struct gp__span *before = bin->newest;
    while (before != NULL && before->owners.ticket > span->owners.ticket)
        before = before->queue_previous;
    span->queue_previous = before;
    span->queue_next = before != NULL ? before->queue_next : bin->oldest;
    if (before != NULL)
        before->queue_next = span;
    else
        bin->oldest = span;
    if (span->queue_next != NULL)
        span->queue_next->queue_previous = span;
    else
        bin->newest = span;
}

static void dequeue(struct gp__bin *bin, struct gp__span *span)
{
    if (span->queue_previous != NULL)
        span->queue_previous->queue_next = span->queue_next;
    else
        bin->oldest = span->queue_next;
    if (span->queue_next != NULL)
        span->queue_next->queue_previous = span->queue_previous;
    else
        bin->newest = span->queue_previous;
}

void gp__span_file(gp_pool *pool, struct gp__span *span)
{
    if (span->segment->range != NULL)
        return;
    span->node.bytes = span->bytes;
    span->node.va = span->va;
    if (span->state == GP_SPAN_HOLE) {
        gp__tree_insert(&pool->holes, &span->node);
        return;
    }
    struct gp__bin *bin = &pool->bins[bin_number(span->owners)];
    gp__tree_insert(&bin->tree, &span->node);
    if (span->owners.slots != 0)
        enqueue(bin, span);
}

void gp__span_unfile(gp_pool *pool, struct gp__span *span)
{
    if (span->segment->range != NULL)
        return;
    if (span->state == GP_SPAN_HOLE) {
        gp__tree_remove(&pool->holes, &span->node);
        return;
    }
    struct gp__bin *bin = &pool->bins[bin_number(span->owners)];
    gp__tree_remove(&bin->tree, &span->node);
    if (span->owners.slots != 0)
        dequeue(bin, span);
}

/* ---- melting ---- */

/* Whether two FREE neighbours may become one: see REUSE in growpool.h. */
static bool can_melt(const gp_pool *pool, const struct gp__span *a, const struct gp__span *b)
{
    if (a->owners.slots == b->owners.slots)
        return true;
    if (a->owners.slots != 0 && b->owners.slots != 0)
        return false;
    const struct gp__span *owned = a->owners.slots != 0 ? a : b;
    const struct gp__span *passed = owned == a ? b : a;
    if (bin_number(owned->owners) == GP__BIN_MIXED)
        return false;
    return owned->bytes >= passed->bytes || pool->timeline.stream_count == 1;
}

/* Joins an unfiled FREE span with its filed successor, if they may melt. */
static void melt_next(gp_pool *pool, struct gp__span *span)
{
    struct gp__span *next = span->next;
    if (next == NULL || next->state != GP_SPAN_FREE || !can_melt(pool, span, next))
        return;
    gp__span_unfile(pool, next);
    span->owners = gp__owners_merge(span->owners, next->owners);
    gp__span_join(pool, span);
}

struct gp__span *gp__span_free(gp_pool *pool, struct gp__span *span, struct gp__owners owners)
{
    span->state = GP_SPAN_FREE;
    span->owners = gp__timeline_remaining(&pool->timeline, owners);
    melt_next(pool, span);
    struct gp__span *previous = span->previous;
    if (previous != NULL && previous->state == GP_SPAN_FREE && can_melt(pool, previous, span)) {
        gp__span_unfile(pool, previous);
        previous->owners = gp__owners_merge(previous->owners, span->owners);
        gp__span_join(pool, previous);
        span = previous;
    }
    gp__span_file(pool, span);
    return span;
}

struct gp__span *gp__span_hole(gp_pool *pool, struct gp__span *span)
{
    span->state = GP_SPAN_HOLE;
    span->owners = (struct gp__owners){0, 0};
    if (span->next != NULL && span->next->state == GP_SPAN_HOLE) {
        gp__span_unfile(pool, span->next);
        gp__span_join(pool, span);
    }
    if (span->previous != NULL && span->previous->state == GP_SPAN_HOLE) {
        span = span->previous;
        gp__span_unfile(pool, span);
        gp__span_join(pool, span);
    }
    gp__span_file(pool, span);
    return span;
}

/* ---- finding ---- */

bool gp__span_is_usable(const gp_pool *pool, struct gp__owners owners, const gp_stream *stream)
{
    return owners.slots == 0 ||
           (stream != NULL && gp__timeline_is_sole(&pool->timeline, owners.slots, stream));
}

struct gp__span *gp__span_find(gp_pool *pool, size_t bytes, const gp_stream *stream)
{
    struct gp__tree_node *best = gp__tree_at_least(&pool->bins[GP__BIN_PASSED].tree, bytes, 0);
    if (stream != NULL && stream->slot != GP__SLOT_NONE &&
        gp__timeline_is_sole(&pool->timeline, UINT64_C(1) << stream->slot, stream)) {
        struct gp__tree_node *own = gp__tree_at_least(&pool->bins[stream->slot].tree, bytes, 0);
        if (own != NULL && (best == NULL || own->bytes <= best->bytes))
            best = own;
    }
    return best == NULL ? NULL : span_of(best);
}

/* Takes the spans that fewer owners hold than when they were filed out of the bin, as a list. A slot's
 * queue is in ticket order, so it ends at the first that still waits; the mixed one is searched whole. */
static struct gp__span *take_changed(gp_pool *pool, int number)
{
    struct gp__span *changed = NULL;
    for (struct gp__span *span = pool->bins[number].oldest; span != NULL;) {
        struct gp__span *next = span->queue_next;
        if (gp__timeline_remaining(&pool->timeline, span->owners).slots != span->owners.slots) {
            gp__span_unfile(pool, span);
            span->state =
                GP_SPAN_CLAIMED; /* out of every bin, so that no neighbour melts with it */
            span->queue_next = changed;
            changed = span;
        } else if (number != GP__BIN_MIXED) {
            break;
        }
        span = next;
    }
    return changed;
}

void gp__span_settle(gp_pool *pool)
{
    gp__timeline_poll(&pool->timeline);
    gp__arenas_sweep(pool);
    if (pool->settled == pool->timeline.passes)
        return;
    pool->settled = pool->timeline.passes;
    for (int number = 0; number < GP__BIN_COUNT; number++) {
        for (struct gp__span *span = take_changed(pool, number); span != NULL;) {
            struct gp__span *next = span->queue_next;
            gp__span_free(pool, span, span->owners);
            span = next;
        }
    }
}
