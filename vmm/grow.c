/* SPDX-License-Identifier: Apache-2.0
 *
 * Growth: claim, ask, map, publish, and the undo of each. This file is mechanism: it grows as it is told
 * or leaves the pool as it was (V3); what to try next is ladder.c's.
 */
#include "quick.h"

#include <assert.h>

#include "../backing/memory.h"

#define MAX_REFUSALS 12
#define BLOCK_SPANS  4 /* descriptors that the steps of a block need at most */

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- claim -------------------------------------------------------------------------------- */

/* How much of the stock has a place. */
static size_t placed_bytes(const struct gp__growth *growth)
{
    size_t bytes = 0;
    for (const struct gp__retired *item = growth->credit.stock; item != NULL; item = item->next)
        bytes += item->va != 0 ? item->bytes : 0;
    return bytes;
}

static size_t room_under_limit(const struct gp__growth *growth, size_t *held)
{
    const gp_pool *pool = growth->pool;
    *held = pool->physical - growth->credit.bytes - placed_bytes(growth); /* others, our blocks */
    return pool->limit > *held ? pool->limit - *held : 0;
}

gp_status gp__grow_check_limit(struct gp__growth *growth, size_t new_bytes, gp_error *error)
{
    gp_pool *pool = growth->pool;
    size_t held;
    if (new_bytes <= room_under_limit(growth, &held))
        return GP_OK;
    growth->obstacle = GP__OBSTACLE_LIMIT;
    growth->deficit = held + new_bytes - pool->limit;
    return gp_error_set(error, GP_ERR_LIMIT,
                        "pool '%s' cannot grow by %zu bytes: it has %zu physical bytes and a "
                        "limit of %zu",
                        pool->name, new_bytes, held, pool->limit);
}

/* How many bytes to claim for a block, or GP_ERR_LIMIT. lock: held. */
static gp_status size_claim(struct gp__growth *growth, const struct gp__place *place, size_t *out,
                            gp_error *error)
{
    gp_pool *pool = growth->pool;
    size_t held;
    size_t most = room_under_limit(growth, &held);
    growth->stepped = 0;
    growth->wasteful = gp__plan_is_wasteful(pool, growth->bytes, held + place->new_bytes);
    gp_status status = gp__grow_check_limit(growth, place->new_bytes, error);
    if (status != GP_OK)
        return status;
    if (growth->step && !growth->wasteful) {
        size_t step = smaller(gp__plan_step(pool, place->new_bytes), place->room);
        growth->stepped = smaller(step, (most - place->new_bytes) / pool->page * pool->page);
    }
    *out = place->new_bytes + growth->stepped;
    return GP_OK;
}

static void count_claim(struct gp__growth *growth, const struct gp__claim *claim)
{
    gp_pool *pool = growth->pool;
    size_t bytes = claim->new_bytes;
    /* What was reclaimed beyond the claim is room for others, who may come while the backing is asked. */
    pool->physical += bytes - claim->moved_bytes - growth->credit.bytes;
    pool->stock_bytes -= claim->moved_bytes;
    pool->credit_bytes -= growth->credit.bytes;
    growth->credit.bytes = 0;
    pool->claimed_bytes += bytes;
    if (pool->peak_physical < pool->physical)
        pool->peak_physical = pool->physical;
}

void gp__claim_span(gp_pool *pool, struct gp__claim *claim, struct gp__span *span, size_t bytes)
{
    if (bytes < span->bytes)
        gp__span_file(pool, gp__span_cut(pool, span, span->va + bytes));
    span->was_hole = span->state == GP_SPAN_HOLE;
    span->state = GP_SPAN_CLAIMED;
    span->queue_next = NULL;
    if (span->was_hole)
        claim->new_bytes += bytes;
    else
        gp__mapping_count(pool, span->segment, span->va, bytes, true);
    *claim->last = span;
    claim->last = &span->queue_next;
}

/* Takes the spans of a block's place: `new_bytes` of holes and the free ranges between. lock: held; needs
 * one spare descriptor. */
static void claim_place(struct gp__growth *growth, struct gp__span *first, size_t new_bytes,
                        struct gp__claim *claim)
{
    size_t block_left = growth->bytes, new_left = new_bytes;
    for (struct gp__span *span = first;; span = span->next) {
        bool hole = span->state == GP_SPAN_HOLE;
        size_t take = smaller(span->bytes, hole ? new_left : block_left);
        gp__span_unfile(growth->pool, span);
        gp__claim_span(growth->pool, claim, span, take);
        if (hole)
            new_left -= take;
        if (take >= block_left)
            break;
        block_left -= take;
    }
}

/* Gives chunks of the stock places at the start of a hole. */
static void fill_hole(struct gp__growth *growth, const struct gp__span *hole, size_t bytes)
{
    uintptr_t va = hole->va, end = hole->va + bytes;
    for (struct gp__retired *item = growth->credit.stock; item != NULL; item = item->next) {
        if (item->va != 0 || item->bytes > end - va)
            continue;
        item->va = va;
        ((struct gp__mapping *)item)->segment = hole->segment;
        va += item->bytes;
    }
}

/* Looks where chunks of the stock fit into the holes of a place. lock: held. */
static void fit_stock(struct gp__growth *growth, const struct gp__span *first)
{
    size_t left = growth->bytes;
    for (struct gp__retired *item = growth->credit.stock; item != NULL; item = item->next)
        item->va = 0;
    for (const struct gp__span *span = first; growth->credit.stock != NULL; span = span->next) {
        bool hole = span->state == GP_SPAN_HOLE;
        size_t take = smaller(span->bytes, hole ? gp__round_up(left, growth->pool->page) : left);
        if (hole)
            fill_hole(growth, span, take);
        if (take >= left)
            break;
        left -= take;
    }
}

/* Chunks of the stock that have a place become part of the claim. lock: held. */
static void place_stock(struct gp__growth *growth, struct gp__claim *claim)
{
    for (struct gp__retired **link = &growth->credit.stock; *link != NULL;) {
        struct gp__retired *item = *link;
        if (item->va == 0) {
            link = &item->next;
            continue;
        }
        bool moved = gp__chunk_move(item->chunk, GP__CHUNK_UNMAPPED, GP__CHUNK_SUPPLIED);
        assert(moved);
        (void)moved;
        ((struct gp__mapping *)item)->generation = gp_chunk_generation(item->chunk);
        *link = item->next;
        item->next = NULL;
        *claim->tail = item;
        claim->tail = &item->next;
        claim->moved_bytes += item->bytes;
    }
}

/* ---- ask ---------------------------------------------------------------------------------- */

/* Asks the backing; in emergency mode the growth's first request is refused instead, unless no rung would
 * be left after that. */
static gp_status ask_backing(const struct gp__growth *growth, const gp_request *request,
                             gp_chunk **out, gp_error *error)
{
    if (gp__in_emergency() && growth->refusals == 0 && !growth->halve)
        return gp_error_set(error, GP_ERR_OUT_OF_MEMORY, "emergency mode refuses %zu bytes",
                            request->size);
    return gp__ask_backing(growth->pool, request, out, error);
}

/* Asks for one chunk of a run of which `left` bytes are missing; halves the size while the growth allows
 * and the backing refuses. */
static gp_status ask_one(struct gp__growth *growth, size_t left, size_t *cap,
                         struct gp__mapping *mapping, gp_error *error)
{
    gp_pool *pool = growth->pool;
    for (;;) {
        /* A range grows by what its user names at once, and gives that back at once. */
        size_t wanted = growth->range != NULL ? SIZE_MAX : growth->bytes;
        gp_request request = {gp__plan_chunk(pool, left, wanted, growth->wasteful, *cap),
                              pool->device, growth->stream->key.handle};
        gp_status status = ask_backing(growth, &request, &mapping->retired.chunk, error);
        if (status == GP_OK) {
            mapping->retired.bytes = request.size;
            mapping->generation = gp_chunk_generation(mapping->retired.chunk);
            mapping->stream = request.stream;
        }
        if (status != GP_ERR_OUT_OF_MEMORY)
            return status;
        growth->refusals++;
        bool least = pool->chunk_size != 0 || request.size <= pool->page;
        if (!growth->halve || least || growth->refusals >= MAX_REFUSALS)
            return status;
        *cap = request.size / 2;
    }
}

/* Bytes at the start of the hole that have chunks of the stock. */
static size_t bytes_in(const struct gp__retired *mappings, const struct gp__span *hole)
{
    size_t bytes = 0;
    for (const struct gp__retired *item = mappings; item != NULL; item = item->next)
        bytes += item->va >= hole->va && item->va < hole->va + hole->bytes ? item->bytes : 0;
    return bytes;
}

/* Asks for the chunks of one claimed hole. */
static gp_status ask_run(struct gp__growth *growth, struct gp__claim *claim, struct gp__span *hole,
                         size_t *cap, gp_error *error)
{
    for (size_t done = bytes_in(claim->mappings, hole); done < hole->bytes;) {
        struct gp__mapping *mapping = gp__calloc(1, sizeof *mapping);
        if (mapping == NULL)
            return gp_error_set(error, GP_ERR_HOST_MEMORY,
                                "no host memory to describe a mapping of pool '%s'",
                                growth->pool->name);
        gp_status status = ask_one(growth, hole->bytes - done, cap, mapping, error);
        if (status != GP_OK) {
            gp__free(mapping);
            return status;
        }
        mapping->segment = hole->segment;
        mapping->retired.va = hole->va + done;
        done += mapping->retired.bytes;
        *claim->tail = &mapping->retired;
        claim->tail = &mapping->retired.next;
    }
    return GP_OK;
}

static gp_status ask(struct gp__growth *growth, struct gp__claim *claim, gp_error *error)
{
    size_t cap = SIZE_MAX;
    gp_status status = GP_OK;
    for (struct gp__span *span = claim->first; span != NULL && status == GP_OK;
         span = span->queue_next) {
        if (span->was_hole)
            status = ask_run(growth, claim, span, &cap, error);
    }
    return status;
}

/* ---- map ---------------------------------------------------------------------------------- */

/* Sets access over each contiguous run of chunks from one kind of place. */
static gp_status set_access(gp_pool *pool, const struct gp__retired *item, gp_error *error)
{
    while (item != NULL) {
        const struct gp__retired *run = item;
        gp_location location = gp_chunk_location(run->chunk);
        size_t bytes = 0;
        while (item != NULL && item->va == run->va + bytes &&
               gp_chunk_location(item->chunk) == location) {
            bytes += item->bytes;
            item = item->next;
        }
        gp_status status = pool->device->driver->set_access(pool->device, run->va, bytes, location,
                                                            &pool->peers, error);
        if (status != GP_OK)
            return status;
    }
    return GP_OK;
}

static gp_status map(gp_pool *pool, struct gp__claim *claim, gp_error *error)
{
    gp_device *device = pool->device;
    for (struct gp__retired *item = claim->mappings; item != NULL; item = item->next) {
        gp_status status = device->driver->map(device, item->va, item->bytes,
                                               gp__chunk_memory(item->chunk), error);
        if (status != GP_OK)
            return status;
        claim->mapped_count++;
    }
    return set_access(pool, claim->mappings, error);
}

/* ---- undo --------------------------------------------------------------------------------- */

/* Unmaps what no user has seen; false if the driver refuses twice. */
static bool undo_map(gp_pool *pool, const struct gp__retired *item)
{
    gp_device *device = pool->device;
    gp__memory memory = gp__chunk_memory(item->chunk);
    return device->driver->unmap(device, item->va, item->bytes, memory, NULL) == GP_OK ||
           device->driver->unmap(device, item->va, item->bytes, memory, NULL) == GP_OK;
}

/* Leaves a chunk where it is for ever, and the hole around it. */
static void abandon(gp_pool *pool, struct gp__retired *item)
{
    bool moved = gp__chunk_move(item->chunk, GP__CHUNK_SUPPLIED, GP__CHUNK_ABANDONED);
    assert(moved);
    (void)moved;
    struct gp__mapping *mapping = (struct gp__mapping *)item;
    gp__mutex_lock(&pool->lock);
    pool->claimed_bytes -= item->bytes;
    pool->abandoned_bytes += item->bytes;
    pool->poisoned = true;
    mapping->segment->lost = true;
    gp__span_at(pool, mapping->segment, item->va)->state = GP_SPAN_ABANDONED;
    gp__mutex_unlock(&pool->lock);
    gp_chunk_release(item->chunk);
    gp__free(mapping);
}

/* Gives the claimed spans back to what they were. lock: held. */
static void release_spans(gp_pool *pool, struct gp__claim *claim)
{
    for (struct gp__span *span = claim->first; span != NULL;) {
        struct gp__span *next = span->queue_next;
        if (span->state == GP_SPAN_CLAIMED && span->was_hole) {
            gp__span_hole(pool, span);
        } else if (span->state == GP_SPAN_CLAIMED) {
            gp__mapping_count(pool, span->segment, span->va, span->bytes, false);
            gp__span_free(pool, span, span->owners);
        }
        span = next;
    }
}

/* Undoes a claim whatever it has reached. Bytes that come free become the request's credit. */
static void undo(struct gp__growth *growth, struct gp__claim *claim)
{
    gp_pool *pool = growth->pool;
    if (gp__check_fork(NULL) != GP_OK)
        return; /* the backing forked: all of it is the parent's */
    size_t not_asked = claim->new_bytes;
    for (struct gp__retired *item = claim->mappings; item != NULL;) {
        struct gp__retired *next = item->next;
        not_asked -= item->bytes;
        bool mapped = claim->mapped_count > 0;
        claim->mapped_count -= mapped;
        if (mapped && !undo_map(pool, item))
            abandon(pool, item);
        else
            gp__return_chunk(pool, (struct gp__mapping *)item, &pool->claimed_bytes,
                             &growth->credit, NULL);
        item = next;
    }
    gp__mutex_lock(&pool->lock);
    release_spans(pool, claim);
    pool->claimed_bytes -= not_asked;
    gp__credit_add(pool, &growth->credit, not_asked);
    struct gp__segment *dead = NULL;
    bool kick = growth->range != NULL && gp__range_unclaim(growth->range, &dead);
    gp__mutex_unlock(&pool->lock);
    gp__range_free_segments(pool, dead);
    if (kick)
        gp__pool_kick(pool);
}

/* ---- publish ------------------------------------------------------------------------------ */

static size_t count_spans(const struct gp__claim *claim)
{
    size_t count = 0;
    for (const struct gp__span *span = claim->first; span != NULL; span = span->queue_next)
        count++;
    return count;
}

/* Enters the new mappings. lock: held. */
static void enter_mappings(gp_pool *pool, struct gp__claim *claim)
{
    for (struct gp__retired *item = claim->mappings; item != NULL;) {
        struct gp__retired *next = item->next;
        bool moved = gp__chunk_move(item->chunk, GP__CHUNK_SUPPLIED, GP__CHUNK_MAPPED);
        assert(moved);
        (void)moved;
        item->next = NULL;
        pool->chunk_count++;
        gp__mapping_enter(pool, (struct gp__mapping *)item);
        item = next;
    }
    pool->claimed_bytes -= claim->new_bytes;
    pool->mapped_bytes += claim->new_bytes;
}

/* Makes the claimed spans one block, and what is left behind it free. lock: held. */
static uintptr_t publish_block(struct gp__growth *growth, struct gp__claim *claim)
{
    gp_pool *pool = growth->pool;
    struct gp__span *block = claim->first;
    for (struct gp__span *span = block; span != NULL; span = span->queue_next) {
        if (!span->was_hole)
            gp__mapping_count(pool, span->segment, span->va, span->bytes, false);
    }
    for (size_t more = count_spans(claim); more > 1; more--)
        gp__span_join(pool, block);
    gp__block_make(pool, block, growth->bytes, growth->stream, growth->flags, growth->arena);
    return block->va;
}

/* lock: held. */
static uintptr_t publish(struct gp__growth *growth, struct gp__claim *claim)
{
    enter_mappings(growth->pool, claim);
    if (claim->new_bytes > 0)
        growth->pool->grow_count++;
    return growth->range != NULL ? gp__commit_publish(growth, claim) : publish_block(growth, claim);
}

/* ---- an attempt --------------------------------------------------------------------------- */

static bool in_blocks(const struct gp__retired *item)
{
    return ((const struct gp__mapping *)item)->segment->range == NULL;
}

/* A retiring mapping that would serve the request comes back, unless the limit wants it gone. lock: held. */
static void want_back(struct gp__growth *growth)
{
    gp_pool *pool = growth->pool;
    struct gp__retired **link = &pool->retiring;
    if (pool->physical > pool->limit)
        return;
    int tried = 0;
    for (int seen = 0; *link != NULL && tried < 16 && seen < 256; seen++, link = &(*link)->next) {
        struct gp__retired *item = *link;
        tried += in_blocks(item);
        struct gp__owners owners = gp__timeline_remaining(&pool->timeline, item->owners);
        if (item->bytes >= growth->bytes && in_blocks(item) &&
            gp__span_is_usable(pool, owners, growth->taker)) {
            *link = item->next;
            gp__unretire(pool, item);
            return;
        }
    }
}

/* Free memory of other streams is why the pool grows: their fences would let the next request have it.
 * The reaper records them, where they stall nobody. lock: held. */
static void want_fences(struct gp__growth *growth)
{
    gp_pool *pool = growth->pool;
    for (int bin = 0; bin < GP__BIN_PASSED; bin++) {
        if (pool->bins[bin].oldest != NULL && bin != growth->stream->slot)
            pool->record_slots |= UINT64_C(1) << bin;
    }
    struct gp__span *span = pool->bins[GP__BIN_MIXED].oldest;
    for (int tried = 0; span != NULL && tried < 16; tried++, span = span->queue_next)
        pool->record_slots |= span->owners.slots & ~GP__UNKNOWN;
}

gp_status gp__grow_prepare(struct gp__growth *growth, size_t spans, gp_error *error)
{
    gp_pool *pool = growth->pool;
    gp_status status = gp__pool_usable(pool, true, error);
    if (status == GP_OK && growth->range != NULL)
        status = gp__range_check_open(growth->range, error);
    if (status == GP_OK)
        status = gp__span_reserve(pool, spans, error);
    return status == GP_OK ? gp__index_reserve(pool, error) : status;
}

/* Finds a place, adding a segment where there is none. lock: held, dropped inside. */
static gp_status find_place(struct gp__growth *growth, struct gp__place *place, gp_error *error)
{
    gp_pool *pool = growth->pool;
    gp_status status = GP_OK;
    while (status == GP_OK) {
        *place = gp__place_find(pool, growth->bytes, growth->taker);
        if (place->first != NULL)
            break;
        if (pool->reserving)
            status = gp__pool_sleep(pool, &pool->interrupt, error);
        else
            status = gp__segment_add(pool, growth->bytes, error);
        if (status == GP_ERR_ADDRESS_SPACE)
            growth->obstacle = GP__OBSTACLE_ADDRESS;
        if (status == GP_OK)
            status = gp__grow_prepare(growth, BLOCK_SPANS, error);
    }
    return status;
}

/* The part of an attempt for a block that needs the lock: a block at once, or a claim. */
static gp_status start_block(struct gp__growth *growth, struct gp__claim *claim, uintptr_t *out,
                             gp_error *error)
{
    gp_pool *pool = growth->pool;
    for (int round = 0; round < 2; round++) {
        struct gp__span *block = gp__block_take(pool, growth->bytes, growth->stream, growth->flags,
                                                growth->arena, round == 0);
        if (block != NULL) {
            *out = block->va;
            return GP_OK;
        }
        if (round == 0)
            want_back(growth);
    }
    /* More than the limit can never be met, and must not reserve addresses in vain. */
    struct gp__place place = {NULL, growth->bytes, 0};
    size_t new_bytes = 0;
    if (growth->bytes > pool->limit)
        return size_claim(growth, &place, &new_bytes, error);
    gp_status status = find_place(growth, &place, error);
    if (status == GP_OK) {
        growth->lacking = place.new_bytes;
        fit_stock(growth, place.first);
        status = size_claim(growth, &place, &new_bytes, error);
    }
    if (status != GP_OK)
        return status;
    want_fences(growth);
    claim_place(growth, place.first, new_bytes, claim);
    place_stock(growth, claim);
    return GP_NOT_READY;
}

static gp_status start_commit(struct gp__growth *growth, struct gp__claim *claim, uintptr_t *out,
                              gp_error *error)
{
    gp__arenas_sweep(growth->pool); /* as the search for a block does */
    gp_status status = gp__commit_claim(growth, claim, error);
    if (status != GP_OK)
        return status;
    *out = 0;
    return claim->first == NULL ? GP_OK : GP_NOT_READY;
}

/* GP_OK: done at once; GP_NOT_READY: claimed. lock: held. */
static gp_status start(struct gp__growth *growth, struct gp__claim *claim, uintptr_t *out,
                       gp_error *error)
{
    gp_status status = gp__grow_prepare(growth, BLOCK_SPANS, error);
    if (status == GP_OK)
        status = growth->range != NULL ? start_commit(growth, claim, out, error)
                                       : start_block(growth, claim, out, error);
    if (status == GP_NOT_READY) {
        count_claim(growth, claim);
        if (growth->range != NULL)
            growth->range->claims++;
    }
    return status;
}

gp_status gp__grow_attempt(struct gp__growth *growth, uintptr_t *out, gp_error *error)
{
    gp_pool *pool = growth->pool;
    struct gp__claim claim = {0};
    claim.last = &claim.first;
    claim.tail = &claim.mappings;
    growth->obstacle = GP__OBSTACLE_NONE;
    gp__quick_lock(pool);
    gp_status status = start(growth, &claim, out, error);
    bool kick = pool->record_slots != 0;
    gp__mutex_unlock(&pool->lock);
    if (kick)
        gp__pool_kick(pool);
    if (status != GP_NOT_READY)
        return status;
    status = ask(growth, &claim, error);
    if (status == GP_ERR_OUT_OF_MEMORY)
        growth->obstacle = GP__OBSTACLE_BACKING;
    if (status == GP_OK)
        status = map(pool, &claim, error);
    if (status == GP_OK) {
        gp__mutex_lock(&pool->lock);
        /* Others may have used up the spare descriptors, and the pool may not want to grow any more. */
        status = gp__grow_prepare(growth, BLOCK_SPANS, error);
        if (status == GP_OK)
            *out = publish(growth, &claim);
        gp__mutex_unlock(&pool->lock);
    }
    if (status != GP_OK)
        undo(growth, &claim);
    return status;
}
