/* SPDX-License-Identifier: Apache-2.0
 *
 * The invariants of a pool, checked from scratch against its lists, and the switch of emergency mode: test
 * builds only. Each breach is one sentence that names the equation of pool.h or the invariant of growpool.h.
 */
#include "quick.h"

#ifdef GP_TESTING

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic bool emergency;

void gp__set_emergency(bool enabled)
{
    atomic_store(&emergency, enabled);
}

bool gp__in_emergency(void)
{
    return atomic_load(&emergency);
}

struct check {
    const gp_pool *pool;
    char *message;
    size_t size;
    bool ok;
    size_t used, held, free, holes, claimed_new, claimed_free, retiring, mapped, idle, address;
    size_t blocks, known, chunks, filed_free, filed_holes, pins;
};

__attribute__((format(printf, 2, 3))) static void breach(struct check *check, const char *format,
                                                         ...)
{
    if (!check->ok)
        return;
    check->ok = false;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(check->message, check->size, format, arguments);
    va_end(arguments);
}

static void expect(struct check *check, bool holds, const char *what, size_t a, size_t b)
{
    if (!holds)
        breach(check, "%s: %zu and %zu", what, a, b);
}

/* V5: spans tile the segment, in order, linked both ways, each where its pages say. */
static void check_links(struct check *check, const struct gp__segment *segment)
{
    uintptr_t va = segment->va;
    const struct gp__span *previous = NULL;
    for (const struct gp__span *span = segment->first; span != NULL; span = span->next) {
        expect(check, span->va == va, "V5 a gap or overlap between spans", span->va, va);
        expect(check, span->bytes > 0, "V5 an empty span", span->va, 0);
        expect(check, span->previous == previous, "V5 a broken back link", span->va, 0);
        expect(check, span->segment == segment, "V5 a span of another segment", span->va, 0);
        expect(check, gp__span_at(check->pool, segment, span->va) == span,
               "the page map missed a span start", span->va, 0);
        previous = span;
        va += span->bytes;
    }
    expect(check, va == segment->va + segment->bytes, "V5 spans end before their segment", va,
           segment->va + segment->bytes);
    check->address += segment->bytes;
}

/* What the pages under a span may hold. */
static void check_pages(struct check *check, const struct gp__segment *segment,
                        const struct gp__span *span)
{
    bool wants = span->state == GP_SPAN_USED || span->state == GP_SPAN_FREE ||
                 span->state == GP_SPAN_HELD || span->state == GP_SPAN_RETIRING ||
                 (span->state == GP_SPAN_CLAIMED && !span->was_hole);
    size_t page = check->pool->page;
    for (size_t i = (span->va - segment->va) / page;
         i * page < span->va + span->bytes - segment->va; i++) {
        const struct gp__mapping *mapping =
            gp__mapping_at(check->pool, segment, segment->va + i * page);
        if (span->state == GP_SPAN_ABANDONED)
            continue;
        expect(check, (mapping != NULL) == wants, "V5 a span's pages disagree with its state",
               span->va, (size_t)span->state);
        if (mapping == NULL)
            continue;
        enum gp__chunk_state state = gp__chunk_state_of(mapping->retired.chunk);
        bool retiring = state != GP__CHUNK_MAPPED;
        expect(check, retiring == (span->state == GP_SPAN_RETIRING),
               "V4 a chunk's state disagrees with its span", span->va, (size_t)state);
    }
}

static void check_block(struct check *check, const struct gp__span *span)
{
    check->blocks++;
    check->known += span->known;
    check->pins += span->pins;
    expect(check, gp__index_find(check->pool, span->va) == span,
           "a block is missing from the index", span->va, 0);
}

static void check_spans(struct check *check, const struct gp__segment *segment)
{
    for (const struct gp__span *span = segment->first; span != NULL; span = span->next) {
        check_pages(check, segment, span);
        switch (span->state) {
        case GP_SPAN_USED:
            check->used += span->bytes;
            if (segment->range == NULL)
                check_block(check, span);
            break;
        case GP_SPAN_FREE:
            check->free += span->bytes;
            check->filed_free += segment->range == NULL;
            break;
        case GP_SPAN_HOLE:
            check->filed_holes += segment->range == NULL;
            break;
        case GP_SPAN_CLAIMED:
            *(span->was_hole ? &check->claimed_new : &check->claimed_free) += span->bytes;
            break;
        case GP_SPAN_RETIRING:
            check->retiring += span->bytes;
            break;
        case GP_SPAN_HELD:
            check->held += span->bytes;
            expect(check, span->arena != NULL && segment->range == NULL, "held memory of no arena",
                   span->va, 0);
            break;
        case GP_SPAN_ABANDONED:
            break;
        }
    }
}

static size_t live_bytes(const struct gp__mapping *mapping)
{
    size_t live = 0;
    uintptr_t start = mapping->retired.va, end = start + mapping->retired.bytes;
    for (const struct gp__span *span = mapping->segment->first; span != NULL; span = span->next) {
        bool counts = span->state == GP_SPAN_USED || span->state == GP_SPAN_HELD ||
                      (span->state == GP_SPAN_CLAIMED && !span->was_hole);
        uintptr_t from = span->va > start ? span->va : start;
        uintptr_t to = span->va + span->bytes < end ? span->va + span->bytes : end;
        if (counts && from < to)
            live += to - from;
    }
    return live;
}

static void check_mappings(struct check *check, const struct gp__segment *segment)
{
    size_t mapped = 0;
    const struct gp__mapping *mapping = NULL;
    uintptr_t va = segment->va;
    while ((mapping = gp__mapping_from(check->pool, segment, va)) != NULL) {
        expect(check, mapping->retired.va >= va && mapping->segment == segment,
               "V5 mappings overlap", mapping->retired.va, va);
        va = mapping->retired.va + mapping->retired.bytes;
        check->chunks++;
        mapped += mapping->retired.bytes;
        if (gp__chunk_state_of(mapping->retired.chunk) != GP__CHUNK_MAPPED)
            continue;
        check->mapped += mapping->retired.bytes;
        expect(check, mapping->live == live_bytes(mapping), "a mapping's live bytes", mapping->live,
               live_bytes(mapping));
        if (mapping->live == 0)
            check->idle += mapping->retired.bytes;
    }
    expect(check, segment->mapped_bytes == mapped, "a segment's mapped bytes",
           segment->mapped_bytes, mapped);
}

static size_t count_nodes(const struct gp__tree_node *node)
{
    return node == NULL ? 0 : 1 + count_nodes(node->left) + count_nodes(node->right);
}

/* A range's own figures; its neighbours in state USED are one span. */
static void check_range(struct check *check, const gp_range *range)
{
    size_t committed = 0;
    for (const struct gp__span *span = range->segment->first; span != NULL; span = span->next) {
        committed += span->state == GP_SPAN_USED ? span->bytes : 0;
        expect(check,
               span->state != GP_SPAN_USED || span->next == NULL ||
                   span->next->state != GP_SPAN_USED,
               "two committed neighbours of a range", span->va, 0);
    }
    check->pins += count_nodes(range->pins.root);
    expect(check, range->committed_bytes == committed, "a range's committed bytes",
           range->committed_bytes, committed);
    expect(check, range->segment->range == range, "a range's segment", range->address, 0);
    /* A close of the pool takes what is left of all ranges. */
    expect(check,
           !range->closed || range->segment->mapped_bytes > 0 || range->claims > 0 ||
               check->pool->closing,
           "a closed range that was not buried", range->address, range->max_bytes);
}

static void check_bins(struct check *check)
{
    size_t filed = 0;
    for (int number = 0; number < GP__BIN_COUNT; number++) {
        const struct gp__bin *bin = &check->pool->bins[number];
        filed += count_nodes(bin->tree.root);
        for (const struct gp__span *span = bin->oldest; span != NULL; span = span->queue_next)
            expect(check, span->state == GP_SPAN_FREE && span->owners.slots != 0,
                   "a queue holds a span that waits for nobody", span->va, (size_t)number);
    }
    expect(check, filed == check->filed_free, "V5 free spans and filed spans", check->filed_free,
           filed);
    size_t holes = count_nodes(check->pool->holes.root);
    expect(check, holes == check->filed_holes, "V5 holes and filed holes", check->filed_holes,
           holes);
}

static size_t list_bytes(const struct gp__retired *list)
{
    size_t bytes = 0;
    for (; list != NULL; list = list->next)
        bytes += list->bytes;
    return bytes;
}

static void check_equations(struct check *check)
{
    const gp_pool *pool = check->pool;
    size_t physical = pool->claimed_bytes + pool->mapped_bytes + pool->retiring_bytes +
                      pool->unreturned_bytes + pool->abandoned_bytes + pool->credit_bytes +
                      pool->stock_bytes;
    expect(check, pool->physical == physical, "physical bytes", pool->physical, physical);
    expect(check, pool->mapped_bytes == check->mapped, "mapped bytes", pool->mapped_bytes,
           check->mapped);
    size_t spans = check->used + check->held + check->free + check->claimed_free;
    expect(check, check->mapped == spans, "V5 mapped bytes and spans", check->mapped, spans);
    expect(check, pool->held_bytes == check->held, "held bytes", pool->held_bytes, check->held);
    expect(check, pool->idle_bytes == check->idle, "idle bytes", pool->idle_bytes, check->idle);
    expect(check, pool->used_bytes == check->used, "used bytes", pool->used_bytes, check->used);
    expect(check, pool->block_count == check->blocks, "blocks", pool->block_count, check->blocks);
    expect(check, gp__quick_count(pool) == check->known, "quick lists and the blocks they know",
           gp__quick_count(pool), check->known);
    expect(check, pool->pinned == check->pins, "pins", pool->pinned, check->pins);
    expect(check, pool->chunk_count == check->chunks, "chunks", (size_t)pool->chunk_count,
           check->chunks);
    size_t address = check->address + pool->parted_bytes;
    expect(check, pool->address_bytes == address || pool->closed, "address bytes",
           pool->address_bytes, address);
    size_t unreturned = list_bytes(pool->unreturned);
    if (pool->growers == 0 && pool->deliveries == 0) {
        expect(check, pool->claimed_bytes == check->claimed_new, "claimed bytes",
               pool->claimed_bytes, check->claimed_new);
        expect(check, pool->retiring_bytes == check->retiring, "retiring bytes",
               pool->retiring_bytes, check->retiring);
        expect(check, pool->retiring_bytes == list_bytes(pool->retiring), "the retiring list",
               pool->retiring_bytes, list_bytes(pool->retiring));
        expect(check, pool->credit_bytes == 0, "credit without a grower", pool->credit_bytes, 0);
        expect(check, pool->unreturned_bytes == unreturned, "unreturned bytes",
               pool->unreturned_bytes, unreturned);
    }
}

static void check_segment(struct check *check, const struct gp__segment *segment)
{
    check_links(check, segment);
    check_spans(check, segment);
    check_mappings(check, segment);
}

bool gp__pool_check(gp_pool *pool, char *message, size_t size)
{
    struct check check = {.pool = pool, .message = message, .size = size, .ok = true};
    size_t for_blocks = 0;
    gp__mutex_lock(&pool->lock);
    for (const struct gp__segment *segment = pool->segments; segment != NULL && check.ok;
         segment = segment->next)
        check_segment(&check, segment);
    for_blocks = check.address;
    for (const gp_range *range = pool->ranges; range != NULL && check.ok; range = range->next) {
        check_segment(&check, range->segment);
        check_range(&check, range);
    }
    expect(&check, pool->block_address_bytes == for_blocks || pool->closed,
           "address bytes for blocks", pool->block_address_bytes, for_blocks);
    if (check.ok)
        check_bins(&check);
    if (check.ok)
        check_equations(&check);
    gp__mutex_unlock(&pool->lock);
    return check.ok;
}

#else
/* ISO C wants a declaration in every file. */
typedef int gp__check_unused;
#endif
