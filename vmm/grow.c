/* SPDX-License-Identifier: Apache-2.0
 *
 * Growth: claim, ask, map, publish, and the undo of each. This file is mechanism: it grows as it is told
 * or leaves the pool as it was (V3); what to try next is ladder.c's.
 */
#include "pool.h"

#include <assert.h>

#include "../backing/memory.h"

#define MAX_REFUSALS 12

/* Pages and bytes taken out of the pool for one attempt. The spans from first to last are CLAIMED and
 * nobody else touches them, so they are read without the lock. */
struct claim {
    struct gp__span *first;
    struct gp__span *last;
    size_t new_bytes;
    struct gp__retired *mappings; /* accepted chunks, by address */
    struct gp__retired **tail;
    size_t mapped_count; /* of those, how many are mapped in the driver */
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- claim -------------------------------------------------------------------------------- */

/* How many bytes to claim, or GP_ERR_LIMIT. lock: held. */
static gp_status size_claim(struct gp__growth *growth, const struct gp__place *place, size_t *out,
                            gp_error *error)
{
    gp_pool *pool = growth->pool;
    size_t held = pool->physical - growth->credit; /* what others hold, and we in blocks */
    size_t most = pool->limit > held ? pool->limit - held : 0;
    growth->stepped = 0;
    if (place->new_bytes > most) {
        growth->obstacle = GP__OBSTACLE_LIMIT;
        growth->deficit = held + place->new_bytes - pool->limit;
        return gp_error_set(error, GP_ERR_LIMIT,
                            "pool '%s' cannot grow by %zu bytes: it has %zu physical bytes and a "
                            "limit of %zu",
                            pool->name, place->new_bytes, held, pool->limit);
    }
    if (growth->step) {
        size_t step = smaller(gp__plan_step(pool, place->new_bytes), place->room);
        growth->stepped = smaller(step, (most - place->new_bytes) / pool->page * pool->page);
    }
    *out = place->new_bytes + growth->stepped;
    return GP_OK;
}

static void count_claim(struct gp__growth *growth, size_t bytes)
{
    gp_pool *pool = growth->pool;
    size_t from_credit = smaller(bytes, growth->credit);
    growth->credit -= from_credit;
    pool->credit_bytes -= from_credit;
    pool->physical += bytes - from_credit;
    pool->claimed_bytes += bytes;
    /* What was reclaimed beyond the need must not lift the pool over its limit (B3). */
    size_t over = pool->physical > pool->limit ? pool->physical - pool->limit : 0;
    size_t surplus = smaller(growth->credit, over);
    growth->credit -= surplus;
    pool->credit_bytes -= surplus;
    pool->physical -= surplus;
    if (pool->peak_physical < pool->physical)
        pool->peak_physical = pool->physical;
}

/* Takes the spans of the place: `new_bytes` of holes and the free ranges between. lock: held; needs one
 * spare descriptor. */
static void take_claim(struct gp__growth *growth, struct gp__span *first, size_t new_bytes,
                       struct claim *claim)
{
    gp_pool *pool = growth->pool;
    *claim = (struct claim){.first = first, .new_bytes = new_bytes};
    claim->tail = &claim->mappings;
    size_t block_left = growth->bytes, new_left = new_bytes;
    for (struct gp__span *span = first;; span = span->next) {
        bool hole = span->state == GP_SPAN_HOLE;
        size_t take = smaller(span->bytes, hole ? new_left : block_left);
        gp__span_unfile(pool, span);
        if (take < span->bytes)
            gp__span_file(pool, gp__span_cut(pool, span, span->va + take));
        span->was_hole = hole;
        span->state = GP_SPAN_CLAIMED;
        if (hole)
            new_left -= take;
        else
            gp__mapping_count(pool, span, 1);
        claim->last = span;
        if (take >= block_left)
            break;
        block_left -= take;
    }
    count_claim(growth, new_bytes);
}

/* ---- ask ---------------------------------------------------------------------------------- */

/* Asks for one chunk of a run of which `left` bytes are missing; halves the size while the growth allows
 * and the backing refuses. */
static gp_status ask_one(struct gp__growth *growth, size_t left, size_t *cap,
                         struct gp__mapping *mapping, gp_error *error)
{
    gp_pool *pool = growth->pool;
    for (;;) {
        gp_request request = {gp__plan_chunk(pool, left, growth->bytes, *cap), pool->device,
                              growth->stream->key.handle};
        gp_status status = gp__ask_backing(pool, &request, &mapping->retired.chunk, error);
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

/* Asks for the chunks of one claimed hole. */
static gp_status ask_run(struct gp__growth *growth, struct claim *claim, struct gp__span *hole,
                         size_t *cap, gp_error *error)
{
    for (size_t done = 0; done < hole->bytes;) {
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

static gp_status ask(struct gp__growth *growth, struct claim *claim, gp_error *error)
{
    size_t cap = SIZE_MAX;
    for (struct gp__span *span = claim->first;; span = span->next) {
        if (span->was_hole) {
            gp_status status = ask_run(growth, claim, span, &cap, error);
            if (status != GP_OK)
                return status;
        }
        if (span == claim->last)
            return GP_OK;
    }
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

static gp_status map(gp_pool *pool, struct claim *claim, gp_error *error)
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
static void release_spans(gp_pool *pool, struct claim *claim)
{
    struct gp__span *span = claim->first;
    for (bool more = true; more;) {
        struct gp__span *next = span->next;
        more = span != claim->last;
        if (span->state == GP_SPAN_CLAIMED && span->was_hole) {
            gp__span_hole(pool, span);
        } else if (span->state == GP_SPAN_CLAIMED) {
            gp__mapping_count(pool, span, -1);
            gp__span_free(pool, span, span->owners);
        }
        span = next;
    }
}

/* Undoes a claim whatever it has reached. Bytes that come free become the request's credit. */
static void undo(struct gp__growth *growth, struct claim *claim)
{
    gp_pool *pool = growth->pool;
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
    pool->credit_bytes += not_asked;
    growth->credit += not_asked;
    gp__mutex_unlock(&pool->lock);
}

/* ---- publish ------------------------------------------------------------------------------ */

/* Enters the new mappings. lock: held. */
static void enter_mappings(gp_pool *pool, struct claim *claim)
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
static uintptr_t publish(struct gp__growth *growth, struct claim *claim)
{
    gp_pool *pool = growth->pool;
    for (struct gp__span *span = claim->first;; span = span->next) {
        if (!span->was_hole)
            gp__mapping_count(pool, span, -1);
        if (span == claim->last)
            break;
    }
    enter_mappings(pool, claim);
    struct gp__span *last = claim->last;
    for (bool more = claim->first != last; more;) {
        more = claim->first->next != last;
        gp__span_join(pool, claim->first);
    }
    gp__block_make(pool, claim->first, growth->bytes, growth->stream, growth->flags);
    pool->grow_count++;
    return claim->first->va;
}

/* ---- an attempt --------------------------------------------------------------------------- */

/* A retiring mapping that would serve the request comes back, unless the limit wants it gone. lock: held. */
static void want_back(struct gp__growth *growth)
{
    gp_pool *pool = growth->pool;
    struct gp__retired **link = &pool->retiring;
    if (pool->physical > pool->limit)
        return;
    for (int tried = 0; *link != NULL && tried < 16; tried++, link = &(*link)->next) {
        struct gp__retired *item = *link;
        uint64_t slots = gp__timeline_remaining(&pool->timeline, item->owners).slots;
        if (item->bytes >= growth->bytes &&
            (slots == 0 || gp__timeline_is_sole(&pool->timeline, slots, growth->stream))) {
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

/* What cannot fail later: descriptors, the index, and that the pool wants to grow. lock: held. */
static gp_status prepare(gp_pool *pool, gp_error *error)
{
    gp_status status = gp__pool_usable(pool, true, error);
    if (status == GP_OK)
        status = gp__span_reserve(pool, 4, error);
    return status == GP_OK ? gp__index_reserve(pool, error) : status;
}

/* Finds a place, adding a segment where there is none. lock: held, dropped inside. */
static gp_status find_place(struct gp__growth *growth, struct gp__place *place, gp_error *error)
{
    gp_pool *pool = growth->pool;
    gp_status status = GP_OK;
    while (status == GP_OK) {
        *place = gp__place_find(pool, growth->bytes, growth->stream);
        if (place->first != NULL)
            break;
        if (pool->reserving)
            status = gp__pool_sleep(pool, error);
        else
            status = gp__segment_add(pool, growth->bytes, error);
        if (status == GP_ERR_ADDRESS_SPACE)
            growth->obstacle = GP__OBSTACLE_ADDRESS;
        if (status == GP_OK)
            status = prepare(pool, error);
    }
    return status;
}

/* The part of an attempt under the lock: a block at once, or a claim. */
static gp_status start(struct gp__growth *growth, struct claim *claim, uintptr_t *out,
                       gp_error *error)
{
    gp_pool *pool = growth->pool;
    gp_status status = prepare(pool, error);
    if (status != GP_OK)
        return status;
    for (int round = 0; round < 2; round++) {
        struct gp__span *block =
            gp__block_take(pool, growth->bytes, growth->stream, growth->flags, round == 0);
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
    status = find_place(growth, &place, error);
    if (status == GP_OK)
        status = size_claim(growth, &place, &new_bytes, error);
    if (status != GP_OK)
        return status;
    want_fences(growth);
    take_claim(growth, place.first, new_bytes, claim);
    return GP_NOT_READY;
}

gp_status gp__grow_attempt(struct gp__growth *growth, uintptr_t *out, gp_error *error)
{
    gp_pool *pool = growth->pool;
    struct claim claim = {0};
    growth->obstacle = GP__OBSTACLE_NONE;
    gp__mutex_lock(&pool->lock);
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
        status = prepare(pool, error);
        if (status == GP_OK)
            *out = publish(growth, &claim);
        gp__mutex_unlock(&pool->lock);
    }
    if (status != GP_OK)
        undo(growth, &claim);
    return status;
}
