/* SPDX-License-Identifier: Apache-2.0
 *
 * Work that growpool enqueues for its users: copies, fills, and one stream waiting for another. Pure
 * pass-through to the device and the timeline: it knows neither blocks nor ranges.
 */
#include "quick.h"

/* Runs between the visit that keeps close() away and the end of the device's context. */
struct visit {
    gp_pool *pool;
    struct gp__entry entry;
};

static gp_status begin(struct visit *visit, gp_pool *pool, const gp_stream *stream, gp_error *error)
{
    visit->pool = pool;
    gp_status status = gp__pool_enter(pool, error);
    if (status == GP_OK)
        status = gp__pool_check_live(pool, stream, error);
    if (status == GP_OK)
        status = gp__pool_visit(pool, error);
    if (status != GP_OK)
        return status;
    status = pool->device->driver->enter(pool->device, &visit->entry, error);
    if (status != GP_OK)
        gp__pool_leave(pool);
    return status;
}

static gp_status end(struct visit *visit, gp_status status)
{
    visit->pool->device->driver->leave(visit->pool->device, &visit->entry);
    gp__pool_leave(visit->pool);
    return status;
}

static gp_status check_addresses(uintptr_t to, uintptr_t from, size_t bytes, gp_error *error)
{
    if (bytes == 0 || (to != 0 && from != 0))
        return GP_OK;
    return gp_error_set(error, GP_ERR_ARGUMENT,
                        "%zu bytes at address 0: an empty block has no memory to copy or fill",
                        bytes);
}

gp_status gp_pool_copy(gp_pool *pool, uintptr_t to, uintptr_t from, size_t bytes, gp_stream *stream,
                       gp_error *error)
{
    struct visit visit;
    gp_status status = check_addresses(to, from, bytes, error);
    if (status == GP_OK)
        status = begin(&visit, pool, stream, error);
    if (status != GP_OK)
        return status;
    struct gp__stream_key key = gp__stream_key(stream);
    if (bytes > 0)
        status = pool->device->driver->copy(pool->device, to, from, bytes, &key, error);
    return end(&visit, status);
}

gp_status gp_pool_fill(gp_pool *pool, uintptr_t to, size_t bytes, unsigned char value,
                       gp_stream *stream, gp_error *error)
{
    struct visit visit;
    gp_status status = check_addresses(to, to, bytes, error);
    if (status == GP_OK)
        status = begin(&visit, pool, stream, error);
    if (status != GP_OK)
        return status;
    struct gp__stream_key key = gp__stream_key(stream);
    if (bytes > 0)
        status = pool->device->driver->fill(pool->device, to, bytes, value, &key, error);
    return end(&visit, status);
}

gp_status gp_pool_synchronize(gp_pool *pool, gp_stream *stream, bool whole, gp_error *error)
{
    struct visit visit;
    gp_status status = begin(&visit, pool, stream, error);
    if (status != GP_OK)
        return status;
    status =
        gp__timeline_synchronize(&pool->timeline, stream, whole ? NULL : &pool->interrupt, error);
    return end(&visit, status);
}

gp_status gp_pool_join(gp_pool *pool, gp_stream *from, gp_stream *to, gp_error *error)
{
    struct visit visit;
    gp_status status = gp__pool_enter(pool, error);
    if (status == GP_OK)
        status = gp__pool_check_live(pool, to, error);
    if (status == GP_OK)
        status = gp__pool_check_stream(pool, from, error);
    if (status == GP_OK && gp__stream_is_forgotten(from))
        return GP_OK; /* its work was waited for when it was forgotten */
    if (status == GP_OK)
        status = begin(&visit, pool, from, error);
    if (status != GP_OK)
        return status;
    return end(&visit, gp__timeline_join(&pool->timeline, from, to, error));
}

gp_status gp_pool_block_stream(gp_pool *pool, uintptr_t address, gp_stream **out, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    status = gp__pool_usable(pool, false, error);
    const struct gp__span *span = status == GP_OK ? gp__index_find(pool, address) : NULL;
    if (span != NULL && gp__quick_is_kept(span))
        span = NULL;
    if (span != NULL)
        *out = gp_stream_retain(span->stream);
    gp__mutex_unlock(&pool->lock);
    if (status == GP_OK && span == NULL)
        status = gp_error_set(error, GP_ERR_ARGUMENT, "%#zx is no live block of pool '%s'",
                              (size_t)address, pool->name);
    return status;
}
