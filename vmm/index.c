/* SPDX-License-Identifier: Apache-2.0
 *
 * The index of live blocks by address: a hash table with chains through the spans. It grows when a block
 * is made and never when one ends, so a free allocates nothing.
 */
#include "pool.h"

#include "../backing/memory.h"

#define FIRST_SIZE 64

static struct gp__span **bucket(const gp_pool *pool, uintptr_t va)
{
    uint64_t hash = (uint64_t)(va / GP_ALIGNMENT) * UINT64_C(0x9E3779B97F4A7C15);
    return &pool->index[(hash >> 32) & (pool->index_size - 1)];
}

gp_status gp__index_reserve(gp_pool *pool, gp_error *error)
{
    if (pool->block_count < pool->index_size)
        return GP_OK;
    size_t old_size = pool->index_size;
    size_t size = old_size == 0 ? FIRST_SIZE : old_size * 2;
    struct gp__span **old = pool->index;
    struct gp__span **grown = gp__calloc(size, sizeof(struct gp__span *));
    if (grown == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory to index more than %zu blocks of pool '%s'", old_size,
                            pool->name);
    pool->index = grown;
    pool->index_size = size;
    for (size_t i = 0; i < old_size; i++) {
        for (struct gp__span *span = old[i]; span != NULL;) {
            struct gp__span *chain = span->chain;
            struct gp__span **place = bucket(pool, span->va);
            span->chain = *place;
            *place = span;
            span = chain;
        }
    }
    gp__free(old);
    return GP_OK;
}

void gp__index_add(gp_pool *pool, struct gp__span *span)
{
    struct gp__span **place = bucket(pool, span->va);
    span->chain = *place;
    *place = span;
    pool->block_count++;
}

void gp__index_remove(gp_pool *pool, struct gp__span *span)
{
    struct gp__span **link = bucket(pool, span->va);
    while (*link != span)
        link = &(*link)->chain;
    *link = span->chain;
    pool->block_count--;
}

struct gp__span *gp__index_find(const gp_pool *pool, uintptr_t va)
{
    if (pool->index_size == 0)
        return NULL;
    struct gp__span *span = *bucket(pool, va);
    while (span != NULL && span->va != va)
        span = span->chain;
    return span;
}
