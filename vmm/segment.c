/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments: reserved addresses, the page map, and which mappings are idle. This file reserves and frees
 * addresses; it never maps memory into them.
 */
#include "pool.h"

#include "../backing/memory.h"

/* How much all default reservations of the process may come to, and the least that one asks for. An x86-64
 * process has 128 TiB of addresses; CUDA's driver gave 127 TiB of them away on an H200, 282 GiB at a time. */
#define DEFAULT_TOTAL (UINT64_C(16) << 40)
#define DEFAULT_SHARE 8 /* one takes at most this part of what is left */
#define DEFAULT_LEAST (UINT64_C(256) << 20)

static uint64_t reserved_by_default; /* bytes, in all pools; atomic */

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

static void free_maps(struct gp__segment *segment)
{
    gp__marks_free(&segment->spans);
    gp__marks_free(&segment->chunks);
    gp__free(segment->pages);
}

static struct gp__segment *new_segment(gp_pool *pool, uintptr_t va, size_t bytes)
{
    struct gp__segment *segment = gp__calloc(1, sizeof *segment);
    size_t count = bytes / pool->page;
    struct gp__page *pages = gp__calloc(count, sizeof *pages);
    struct gp__span *hole = gp__calloc(1, sizeof *hole);
    bool marked = segment != NULL && gp__marks_init(&segment->spans, count) &&
                  gp__marks_init(&segment->chunks, count);
    if (!marked || pages == NULL || hole == NULL) {
        if (segment != NULL)
            free_maps(segment);
        gp__free(segment);
        gp__free(pages);
        gp__free(hole);
        return NULL;
    }
    segment->va = va;
    segment->bytes = bytes;
    segment->pages = pages;
    segment->first = hole;
    return segment;
}

/* Gives addresses back that nothing describes yet; what the driver will not take is lost, and counted. */
static void unreserve(gp_pool *pool, uintptr_t va, size_t bytes)
{
    gp_device *device = pool->device;
    if (device->driver->free_address(device, va, bytes, NULL) == GP_OK ||
        device->driver->free_address(device, va, bytes, NULL) == GP_OK)
        return;
    gp__mutex_lock(&pool->lock);
    pool->address_bytes += bytes;
    pool->parted_bytes += bytes;
    gp__mutex_unlock(&pool->lock);
}

/* lock: not held. */
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
    unreserve(pool, va, bytes);
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

gp_status gp__segment_reserve(gp_pool *pool, size_t bytes, struct gp__segment **out,
                              gp_error *error)
{
    gp_status status = reserve_segment(pool, bytes, bytes, out, error);
    if (status == GP_ERR_ADDRESS_SPACE)
        return gp_error_set(error, status,
                            "the device has no run of %zu bytes of addresses left for a range of "
                            "pool '%s'; this is about addresses, not memory: ask for a smaller "
                            "maximum, or close ranges and pools",
                            bytes, pool->name);
    return status;
}

/* How much of what the pool may still reserve it should: everything when its user named a figure. */
static size_t wanted_addresses(const gp_pool *pool, size_t needed, size_t left)
{
    if (!pool->default_addresses)
        return left;
    uint64_t reserved = __atomic_load_n(&reserved_by_default, __ATOMIC_RELAXED);
    uint64_t share = reserved < DEFAULT_TOTAL ? (DEFAULT_TOTAL - reserved) / DEFAULT_SHARE : 0;
    if (share < DEFAULT_LEAST)
        share = DEFAULT_LEAST;
    if (share < needed)
        share = needed;
    return share < left ? gp__round_up(share, pool->page) : left;
}

gp_status gp__segment_add(gp_pool *pool, size_t bytes, gp_error *error)
{
    size_t needed = gp__round_up(bytes, pool->page);
    size_t left = pool->address_space - pool->block_address_bytes;
    if (needed > left)
        return no_addresses(pool, needed, left, error);
    struct gp__segment *segment = NULL;
    pool->reserving = true;
    gp__mutex_unlock(&pool->lock);
    gp_status status =
        reserve_segment(pool, wanted_addresses(pool, needed, left), needed, &segment, error);
    gp__mutex_lock(&pool->lock);
    pool->reserving = false;
    gp__condition_broadcast(&pool->changed);
    if (status != GP_OK)
        return status;
    segment->next = pool->segments;
    pool->segments = segment;
    pool->address_bytes += segment->bytes;
    pool->block_address_bytes += segment->bytes;
    segment->by_default = pool->default_addresses;
    if (segment->by_default)
        __atomic_add_fetch(&reserved_by_default, segment->bytes, __ATOMIC_RELAXED);
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
    if (freed && segment->by_default)
        __atomic_sub_fetch(&reserved_by_default, bytes, __ATOMIC_RELAXED);
    free_maps(segment);
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

static size_t page_of(const gp_pool *pool, const struct gp__segment *segment, uintptr_t va)
{
    return (va - segment->va) / pool->page;
}

struct gp__mapping *gp__mapping_at(const gp_pool *pool, const struct gp__segment *segment,
                                   uintptr_t va)
{
    size_t start = gp__marks_last(&segment->chunks, page_of(pool, segment, va));
    struct gp__mapping *mapping = start != SIZE_MAX ? segment->pages[start].mapping : NULL;
    return mapping != NULL && va - mapping->retired.va < mapping->retired.bytes ? mapping : NULL;
}

struct gp__mapping *gp__mapping_from(const gp_pool *pool, const struct gp__segment *segment,
                                     uintptr_t va)
{
    size_t page = page_of(pool, segment, va + pool->page - 1);
    size_t start =
        va < segment->va + segment->bytes ? gp__marks_next(&segment->chunks, page) : SIZE_MAX;
    return start != SIZE_MAX ? segment->pages[start].mapping : NULL;
}

void gp__mapping_enter(gp_pool *pool, struct gp__mapping *mapping)
{
    struct gp__segment *segment = mapping->segment;
    size_t page = page_of(pool, segment, mapping->retired.va);
    segment->pages[page].mapping = mapping;
    gp__marks_add(&segment->chunks, page);
    segment->mapped_bytes += mapping->retired.bytes;
    gp__mapping_idle_add(pool, mapping);
}

void gp__mapping_erase(gp_pool *pool, struct gp__mapping *mapping)
{
    struct gp__segment *segment = mapping->segment;
    gp__marks_remove(&segment->chunks, page_of(pool, segment, mapping->retired.va));
    segment->mapped_bytes -= mapping->retired.bytes;
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

void gp__mapping_count(gp_pool *pool, const struct gp__segment *segment, uintptr_t va, size_t bytes,
                       bool live)
{
    uintptr_t end = va + bytes;
    while (va < end) {
        struct gp__mapping *mapping = gp__mapping_at(pool, segment, va);
        uintptr_t stop = mapping->retired.va + mapping->retired.bytes;
        size_t part = (stop < end ? stop : end) - va;
        if (live && mapping->live == 0)
            gp__mapping_idle_remove(pool, mapping);
        mapping->live = live ? mapping->live + part : mapping->live - part;
        if (mapping->live == 0)
            gp__mapping_idle_add(pool, mapping);
        va += part;
    }
}
