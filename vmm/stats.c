/* SPDX-License-Identifier: Apache-2.0
 *
 * Figures and pictures of a pool, for people and for tests. Reads only.
 */
#include "quick.h"

#include <stdlib.h>

#include "../backing/memory.h"

/* ---- what is used -------------------------------------------------------------------------------- */

/* Between two notes only quick lists change what is used: it was most where they kept least. With several
 * streams that is a bound, for their lists need not have kept least at one time. */
static size_t note(gp_pool *pool)
{
    size_t kept;
    size_t most = pool->used_bytes - gp__quick_least_bytes(pool, &kept);
    if (pool->peak_used < most)
        pool->peak_used = most;
    return kept;
}

void gp__used_note(gp_pool *pool)
{
    note(pool);
}

void gp__used_add(gp_pool *pool, size_t bytes)
{
    size_t kept = note(pool);
    pool->used_bytes += bytes;
    if (pool->peak_used < pool->used_bytes - kept)
        pool->peak_used = pool->used_bytes - kept;
}

/* ---- figures -------------------------------------------------------------------------------------- */

void gp_pool_get_stats(gp_pool *pool, gp_pool_stats *out)
{
    bool lockable = gp__pool_enter(pool, NULL) == GP_OK;
    if (lockable)
        gp__mutex_lock(&pool->lock);
    gp__used_note(pool);
    size_t used = pool->used_bytes - gp__quick_kept_bytes(pool);
    *out = (gp_pool_stats){
        .used_bytes = used,
        .free_bytes = pool->mapped_bytes - used,
        .physical_bytes = pool->physical,
        .retiring_bytes = pool->retiring_bytes,
        .unreturned_bytes = pool->unreturned_bytes,
        .abandoned_bytes = pool->abandoned_bytes,
        .address_bytes = pool->address_bytes,
        .peak_used_bytes = pool->peak_used,
        .peak_physical_bytes = pool->peak_physical,
        .limit = pool->limit,
        .chunk_count = pool->chunk_count,
        .grow_count = pool->grow_count,
        .trim_count = pool->trim_count,
        .wait_count = pool->timeline.wait_count,
        .callback_errors = pool->callback_errors,
    };
    if (lockable)
        gp__mutex_unlock(&pool->lock);
}

void gp_pool_reset_peak_stats(gp_pool *pool)
{
    if (gp__pool_enter(pool, NULL) != GP_OK)
        return;
    gp__mutex_lock(&pool->lock);
    gp__used_note(pool);
    pool->peak_used = pool->used_bytes - gp__quick_kept_bytes(pool);
    pool->peak_physical = pool->physical;
    gp__mutex_unlock(&pool->lock);
}

/* ---- snapshots ----------------------------------------------------------------------------- */

static size_t count_spans(const struct gp__segment *segment)
{
    size_t spans = 0;
    for (const struct gp__span *span = segment->first; span != NULL; span = span->next)
        spans++;
    return spans;
}

static void count(const gp_pool *pool, size_t *segments, size_t *spans)
{
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next) {
        (*segments)++;
        *spans += count_spans(segment);
    }
    for (const gp_range *range = pool->ranges; range != NULL; range = range->next) {
        (*segments)++;
        *spans += count_spans(range->segment);
    }
}

static gp_span_info describe_span(const gp_pool *pool, const struct gp__span *span)
{
    bool stamped = span->state == GP_SPAN_FREE || span->state == GP_SPAN_HELD;
    const gp_range *range = span->segment->range;
    uint64_t owners =
        stamped ? gp__timeline_remaining(&pool->timeline, span->owners).slots : span->owners.slots;
    if (range != NULL && span->state == GP_SPAN_USED)
        owners = range->slots;
    return (gp_span_info){.address = span->va,
                          .bytes = span->bytes,
                          .state = span->state,
                          .stream_id = span->stream != NULL ? span->stream->key.id : 0,
                          .owner_count = (unsigned)__builtin_popcountll(owners),
                          .segment_start = span->previous == NULL,
                          .in_range = range != NULL};
}

static size_t describe_chunks(const gp_pool *pool, const struct gp__segment *segment,
                              gp_chunk_info *out)
{
    size_t number = 0;
    const struct gp__mapping *mapping = gp__mapping_from(pool, segment, segment->va);
    while (mapping != NULL) {
        const struct gp__retired *item = &mapping->retired;
        out[number++] = (gp_chunk_info){
            .address = item->va,
            .bytes = item->bytes,
            .id = gp_chunk_id(item->chunk),
            .retiring = gp__chunk_state_of(item->chunk) != GP__CHUNK_MAPPED,
        };
        mapping = gp__mapping_from(pool, segment, item->va + item->bytes);
    }
    return number;
}

static int by_address(const void *a, const void *b)
{
    const struct gp__segment *const *x = a, *const *y = b;
    return (*x)->va < (*y)->va ? -1 : (*x)->va > (*y)->va;
}

static void fill(const gp_pool *pool, const struct gp__segment **order, gp_pool_snapshot *out)
{
    size_t segments = 0;
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next)
        order[segments++] = segment;
    for (const gp_range *range = pool->ranges; range != NULL; range = range->next)
        order[segments++] = range->segment;
    qsort(order, segments, sizeof *order, by_address);
    for (size_t i = 0; i < segments; i++) {
        for (const struct gp__span *span = order[i]->first; span != NULL; span = span->next)
            out->spans[out->span_count++] = describe_span(pool, span);
        out->chunk_count += describe_chunks(pool, order[i], out->chunks + out->chunk_count);
    }
}

gp_status gp_pool_take_snapshot(gp_pool *pool, gp_pool_snapshot *out, gp_error *error)
{
    size_t segments = 0, spans = 0;
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    gp__quick_lock(pool);
    count(pool, &segments, &spans);
    size_t chunks = (size_t)pool->chunk_count;
    const struct gp__segment **order = gp__calloc(segments + 1, sizeof(struct gp__segment *));
    gp_pool_snapshot made = {gp__calloc(spans + 1, sizeof(gp_span_info)), 0,
                             gp__calloc(chunks + 1, sizeof(gp_chunk_info)), 0};
    if (order != NULL && made.spans != NULL && made.chunks != NULL)
        fill(pool, order, &made);
    else
        status = gp_error_set(error, GP_ERR_HOST_MEMORY,
                              "no host memory for a snapshot of %zu spans and %zu chunks", spans,
                              chunks);
    gp__mutex_unlock(&pool->lock);
    gp__free(order);
    if (status == GP_OK)
        *out = made;
    else
        gp_pool_snapshot_free(&made);
    return status;
}

void gp_pool_snapshot_free(gp_pool_snapshot *snapshot)
{
    gp__free(snapshot->spans);
    gp__free(snapshot->chunks);
    *snapshot = (gp_pool_snapshot){NULL, 0, NULL, 0};
}
