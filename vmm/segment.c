/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments: reserved addresses, the page map, and which mappings are idle. This file reserves and frees
 * addresses; it never maps memory into them.
 */
#include "pool.h"

#include "../backing/memory.h"

/* Reserves `wanted` bytes, or half as often as it takes, but never less than `needed`. */
static gp_status reserve(gp_pool *pool, size_t wanted, size_t needed, uintptr_t *va, size_t *bytes,
                         gp_error *error)
{
    gp_device *device = pool->device;
    for (;;) {
        gp_status status = device->driver->reserve(device, wanted, va, error);
        if (status == GP_OK)
            *bytes = wanted;
        if (status != GP_ERR_ADDRESS_SPACE || wanted == needed)
            return status;
        wanted = gp__round_up(wanted / 2, pool->page);
        if (wanted < needed)
            wanted = needed;
    }
}

static struct gp__segment *new_segment(gp_pool *pool, uintptr_t va, size_t bytes)
{
    struct gp__segment *segment = gp__calloc(1, sizeof *segment);
    struct gp__page *pages = gp__calloc(bytes / pool->page, sizeof *pages);
    struct gp__span *hole = gp__calloc(1, sizeof *hole);
    if (segment == NULL || pages == NULL || hole == NULL) {
        gp__free(segment);
        gp__free(pages);
        gp__free(hole);
        return NULL;
    }
    *segment = (struct gp__segment){.va = va, .bytes = bytes, .pages = pages, .first = hole};
    return segment;
}

static gp_status reserve_segment(gp_pool *pool, size_t wanted, size_t needed,
                                 struct gp__segment **out, gp_error *error)
{
    uintptr_t va = 0;
    size_t bytes = 0;
    gp_status status = reserve(pool, wanted, needed, &va, &bytes, error);
    if (status != GP_OK)
        return status;
    *out = new_segment(pool, va, bytes);
    if (*out != NULL)
        return GP_OK;
    if (pool->device->driver->free_address(pool->device, va, bytes, NULL) != GP_OK)
        pool->device->driver->free_address(pool->device, va, bytes, NULL);
    return gp_error_set(error, GP_ERR_HOST_MEMORY,
                        "no host memory for the page map of %zu bytes of addresses", bytes);
}

static gp_status no_addresses(const gp_pool *pool, size_t needed, size_t left, gp_error *error)
{
    return gp_error_set(error, GP_ERR_ADDRESS_SPACE,
                        "pool '%s' has no run of addresses for %zu more bytes: %zu of its "
                        "address_space of %zu bytes are not reserved yet; this is about addresses, "
                        "not memory: free blocks, or make the pool with a larger address_space",
                        pool->name, needed, left, pool->address_space);
}

gp_status gp__segment_add(gp_pool *pool, size_t bytes, gp_error *error)
{
    size_t needed = gp__round_up(bytes, pool->page);
    size_t left = pool->address_space - pool->address_bytes;
    if (needed > left)
        return no_addresses(pool, needed, left, error);
    struct gp__segment *segment = NULL;
    pool->reserving = true;
    gp__mutex_unlock(&pool->lock);
    gp_status status = reserve_segment(pool, left, needed, &segment, error);
    gp__mutex_lock(&pool->lock);
    pool->reserving = false;
    pthread_cond_broadcast(&pool->changed);
    if (status != GP_OK)
        return status;
    segment->next = pool->segments;
    pool->segments = segment;
    pool->address_bytes += segment->bytes;
    gp__span_start(pool, segment);
    return GP_OK;
}

/* Returns the bytes of addresses that were freed. */
static size_t drop_segment(gp_pool *pool, struct gp__segment *segment)
{
    for (struct gp__span *span = segment->first; span != NULL;) {
        struct gp__span *next = span->next;
        gp__free(span);
        span = next;
    }
    gp_device *device = pool->device;
    bool freed =
        !segment->lost &&
        (device->driver->free_address(device, segment->va, segment->bytes, NULL) == GP_OK ||
         device->driver->free_address(device, segment->va, segment->bytes, NULL) == GP_OK);
    size_t bytes = freed ? segment->bytes : 0;
    gp__free(segment->pages);
    gp__free(segment);
    return bytes;
}

size_t gp__segments_free(gp_pool *pool, struct gp__segment *segments)
{
    size_t freed = 0;
    while (segments != NULL) {
        struct gp__segment *segment = segments;
        segments = segment->next;
        freed += drop_segment(pool, segment);
    }
    return freed;
}

struct gp__mapping *gp__mapping_at(const gp_pool *pool, const struct gp__segment *segment,
                                   uintptr_t va)
{
    return segment->pages[(va - segment->va) / pool->page].mapping;
}

static void set_pages(gp_pool *pool, const struct gp__mapping *where, struct gp__mapping *value)
{
    size_t first = (where->retired.va - where->segment->va) / pool->page;
    for (size_t page = 0; page < where->retired.bytes / pool->page; page++)
        where->segment->pages[first + page].mapping = value;
}

void gp__mapping_enter(gp_pool *pool, struct gp__mapping *mapping)
{
    set_pages(pool, mapping, mapping);
    gp__mapping_idle_add(pool, mapping);
}

void gp__mapping_erase(gp_pool *pool, struct gp__mapping *mapping)
{
    set_pages(pool, mapping, NULL);
}

void gp__mapping_idle_add(gp_pool *pool, struct gp__mapping *mapping)
{
    mapping->next = NULL;
    mapping->previous = pool->idle_newest;
    if (pool->idle_newest != NULL)
        pool->idle_newest->next = mapping;
    else
        pool->idle_oldest = mapping;
    pool->idle_newest = mapping;
    pool->idle_bytes += mapping->retired.bytes;
}

void gp__mapping_idle_remove(gp_pool *pool, struct gp__mapping *mapping)
{
    if (mapping->previous != NULL)
        mapping->previous->next = mapping->next;
    else
        pool->idle_oldest = mapping->next;
    if (mapping->next != NULL)
        mapping->next->previous = mapping->previous;
    else
        pool->idle_newest = mapping->previous;
    pool->idle_bytes -= mapping->retired.bytes;
}

void gp__mapping_count(gp_pool *pool, const struct gp__span *span, int change)
{
    uintptr_t end = span->va + span->bytes;
    for (uintptr_t va = span->va; va < end;) {
        struct gp__mapping *mapping = gp__mapping_at(pool, span->segment, va);
        if (change > 0 && mapping->live++ == 0)
            gp__mapping_idle_remove(pool, mapping);
        if (change < 0 && --mapping->live == 0)
            gp__mapping_idle_add(pool, mapping);
        va = mapping->retired.va + mapping->retired.bytes;
    }
}
