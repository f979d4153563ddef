/* SPDX-License-Identifier: Apache-2.0
 *
 * Figures and pictures of a pool, for people and for tests. Reads only.
 */
#include "pool.h"

#include "../backing/memory.h"

void gp_pool_get_stats(gp_pool *pool, gp_pool_stats *out)
{
    bool lockable = gp__pool_enter(pool, NULL) == GP_OK;
    if (lockable)
        gp__mutex_lock(&pool->lock);
    *out = (gp_pool_stats){
        .used_bytes = pool->used_bytes,
        .free_bytes = pool->mapped_bytes - pool->used_bytes,
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
    pool->peak_used = pool->used_bytes;
    pool->peak_physical = pool->physical;
    gp__mutex_unlock(&pool->lock);
}

/* ---- snapshots ----------------------------------------------------------------------------- */

static void count(const gp_pool *pool, size_t *spans, size_t *chunks)
{
    *spans = 0;
    *chunks = (size_t)pool->chunk_count;
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next) {
        for (const struct gp__span *span = segment->first; span != NULL; span = span->next)
            (*spans)++;
    }
}

static gp_span_info describe_span(const gp_pool *pool, const struct gp__span *span)
{
    uint64_t owners = span->state == GP_SPAN_FREE
                          ? gp__timeline_remaining(&pool->timeline, span->owners).slots
                          : span->owners.slots;
    return (gp_span_info){.address = span->va,
                          .bytes = span->bytes,
                          .state = span->state,
                          .stream_id = span->stream != NULL ? span->stream->key.id : 0,
                          .owner_count = (unsigned)__builtin_popcountll(owners),
                          .segment_start = span->previous == NULL};
}

static size_t describe_chunks(const gp_pool *pool, const struct gp__segment *segment,
                              gp_chunk_info *out)
{
    size_t number = 0;
    for (size_t page = 0; page < segment->bytes / pool->page;) {
        const struct gp__mapping *mapping = segment->pages[page].mapping;
        if (mapping == NULL) {
            page++;
            continue;
        }
        const struct gp__retired *item = &mapping->retired;
        out[number++] = (gp_chunk_info){
            .address = item->va,
            .bytes = item->bytes,
            .id = gp_chunk_id(item->chunk),
            .retiring = gp__chunk_state_of(item->chunk) != GP__CHUNK_MAPPED,
        };
        page += item->bytes / pool->page;
    }
    return number;
}

/* The segment with the lowest address above `after`: snapshots are in address order. */
static const struct gp__segment *next_segment(const gp_pool *pool, uintptr_t after)
{
    const struct gp__segment *best = NULL;
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next) {
        if (segment->va > after && (best == NULL || segment->va < best->va))
            best = segment;
    }
    return best;
}

static void fill(const gp_pool *pool, gp_pool_snapshot *out)
{
    const struct gp__segment *segment = next_segment(pool, 0);
    for (; segment != NULL; segment = next_segment(pool, segment->va)) {
        for (const struct gp__span *span = segment->first; span != NULL; span = span->next)
            out->spans[out->span_count++] = describe_span(pool, span);
        out->chunk_count += describe_chunks(pool, segment, out->chunks + out->chunk_count);
    }
}

gp_status gp_pool_take_snapshot(gp_pool *pool, gp_pool_snapshot *out, gp_error *error)
{
    size_t spans, chunks;
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    count(pool, &spans, &chunks);
    gp_pool_snapshot made = {gp__calloc(spans + 1, sizeof(gp_span_info)), 0,
                             gp__calloc(chunks + 1, sizeof(gp_chunk_info)), 0};
    if (made.spans != NULL && made.chunks != NULL)
        fill(pool, &made);
    else
        status = gp_error_set(error, GP_ERR_HOST_MEMORY,
                              "no host memory for a snapshot of %zu spans and %zu chunks", spans,
                              chunks);
    gp__mutex_unlock(&pool->lock);
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
