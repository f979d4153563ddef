/* SPDX-License-Identifier: Apache-2.0
 *
 * What users ask of a pool that shrinks it: trim, drain, the limit, forgetting streams, and another try for
 * chunks that could not be returned.
 */
#include "quick.h"

#include "../backing/memory.h"

static gp_status begin(gp_pool *pool, const char *operation, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    return status == GP_OK ? gp__pool_not_inside(pool, operation, error) : status;
}

/* Waits until no chunk is in another thread's hands. lock: held, dropped inside. */
static gp_status wait_deliveries(gp_pool *pool, gp_error *error)
{
    gp_status status = GP_OK;
    while (pool->deliveries > 0 && status == GP_OK)
        status = gp__pool_sleep(pool, &pool->interrupt, error);
    return status;
}

/* Reaps the list (held) and whatever other threads hand back meanwhile, until nothing is retiring. */
static gp_status finish_all(gp_pool *pool, struct gp__retired *list, size_t *returned,
                            gp_error *error)
{
    gp_status status = GP_OK;
    do {
        size_t bytes = 0;
        if (list != NULL)
            status =
                gp__retire_finish(pool, list, GP__REAP_ALL, &pool->interrupt, NULL, &bytes, error);
        *returned += bytes;
        gp__mutex_lock(&pool->lock);
        if (status == GP_OK)
            status = wait_deliveries(pool, error);
        list = NULL;
        if (status == GP_OK)
            gp__retiring_take(pool, &list);
        gp__retire_hold(pool, list);
        gp__mutex_unlock(&pool->lock);
    } while (list != NULL);
    if (gp__check_fork(NULL) == GP_OK)
        gp__range_free_parted(pool);
    return status;
}

/* Bytes that a trim may take at most: whole chunks, leaving `keep` mapped. lock: held. */
static size_t trim_most(const gp_pool *pool, size_t keep)
{
    return pool->mapped_bytes > keep ? pool->mapped_bytes - keep : 0;
}

/* What a trim is about to wait for must not be captured: checked before anything changes. */
static gp_status check_trim(gp_pool *pool, size_t keep, gp_error *error)
{
    gp__quick_lock(pool);
    gp_status status = gp__pool_usable(pool, false, error);
    struct gp__owners owners = {0, 0};
    if (status == GP_OK)
        owners = gp__retire_owners(pool, trim_most(pool, keep));
    for (const struct gp__retired *item = pool->retiring; item != NULL; item = item->next)
        owners = gp__owners_merge(owners, item->owners);
    gp__mutex_unlock(&pool->lock);
    if (status != GP_OK || owners.slots == 0)
        return status;
    return gp__timeline_check_capture(&pool->timeline, owners, error);
}

/* Closes what others left to an explicit call, unless a signal ended this one. `status` is that of the
 * call's own work, and the first error wins. */
static gp_status close_orphans(gp_pool *pool, gp_status status, gp_error *error)
{
    if (status == GP_ERR_INTERRUPTED || !gp__orphans_wanted(pool))
        return status;
    gp_status closed =
        gp__orphans_close(pool->device, &pool->interrupt, status == GP_OK ? error : NULL);
    return status == GP_OK ? closed : status;
}

gp_status gp_pool_trim(gp_pool *pool, size_t min_bytes_to_keep, unsigned flags, size_t *released,
                       gp_error *error)
{
    bool wait = (flags & GP_TRIM_NO_WAIT) == 0;
    gp_status status = begin(pool, "trimming", error);
    if (status == GP_OK && wait) {
        gp__pool_poll(pool);
        status = check_trim(pool, min_bytes_to_keep, error);
    }
    if (status != GP_OK)
        return status;
    struct gp__retired *list = NULL;
    size_t set_retiring = 0, returned = 0;
    gp__quick_lock(pool);
    status = gp__pool_usable(pool, false, error);
    if (status == GP_OK) {
        set_retiring = gp__retire(pool, SIZE_MAX, trim_most(pool, min_bytes_to_keep),
                                  wait ? GP__RETIRE_ALL : GP__RETIRE_SEEN, &list);
        if (wait) {
            gp__retiring_take(pool, &list);
            gp__retire_hold(pool, list);
        } else {
            gp__retiring_add(pool, list);
        }
    }
    gp__mutex_unlock(&pool->lock);
    if (status != GP_OK)
        return status;
    if (wait)
        status = close_orphans(pool, finish_all(pool, list, &returned, error), error);
    else
        gp__pool_kick(pool);
    if (status == GP_OK && released != NULL)
        *released = wait ? returned : set_retiring;
    return status;
}

gp_status gp_pool_drain(gp_pool *pool, gp_error *error)
{
    gp_status status = begin(pool, "draining", error);
    if (status != GP_OK)
        return status;
    gp__pool_poll(pool);
    status = check_trim(pool, SIZE_MAX, error);
    if (status != GP_OK)
        return status;
    struct gp__retired *list = NULL;
    size_t returned = 0;
    gp__mutex_lock(&pool->lock);
    gp__retiring_take(pool, &list);
    gp__retire_hold(pool, list);
    gp__mutex_unlock(&pool->lock);
    return close_orphans(pool, finish_all(pool, list, &returned, error), error);
}

gp_status gp_pool_set_limit(gp_pool *pool, size_t limit, gp_limit_result *out, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    gp__quick_lock(pool);
    status = gp__pool_usable(pool, false, error);
    if (status != GP_OK) {
        gp__mutex_unlock(&pool->lock);
        return status;
    }
    pool->limit = limit;
    size_t over = pool->physical > limit ? pool->physical - limit : 0;
    if (over > pool->retiring_bytes) {
        gp__retire(pool, over - pool->retiring_bytes, SIZE_MAX, GP__RETIRE_SEEN, &pool->retiring);
        pool->service_delay = 0;
    }
    size_t deferred = pool->retiring_bytes < over ? pool->retiring_bytes : over;
    gp_limit_result result = {limit, pool->physical, over, deferred};
    bool kick = pool->retiring != NULL;
    gp__mutex_unlock(&pool->lock);
    if (kick)
        gp__pool_kick(pool);
    if (out != NULL)
        *out = result;
    return GP_OK;
}

gp_status gp_pool_stream(gp_pool *pool, uintptr_t handle, gp_stream **out, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    status = gp__pool_visit(pool, error);
    if (status != GP_OK)
        return status;
    status = gp__timeline_stream(&pool->timeline, handle, out, error);
    gp__pool_leave(pool);
    return status;
}

gp_status gp_pool_forget_stream(gp_pool *pool, uintptr_t handle, gp_error *error)
{
    gp_stream *stream = NULL;
    gp_status status = gp_pool_stream(pool, handle, &stream, error);
    if (status != GP_OK)
        return status;
    status = gp__pool_visit(pool, error);
    if (status == GP_OK) {
        status = gp__timeline_forget(&pool->timeline, stream, &pool->interrupt, error);
        gp__pool_leave(pool);
    }
    gp_stream_release(stream);
    return status;
}

gp_status gp_pool_return_unreturned(gp_pool *pool, size_t *returned, gp_error *error)
{
    gp_status status = begin(pool, "returning chunks of", error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    struct gp__retired *list = pool->unreturned;
    pool->unreturned = NULL;
    pool->deliveries++;
    gp__mutex_unlock(&pool->lock);
    size_t bytes = 0, count = 0;
    while (list != NULL) {
        struct gp__retired *item = list;
        size_t size = item->bytes;
        list = item->next;
        if (gp__return_chunk(pool, (struct gp__mapping *)item, &pool->unreturned_bytes, NULL,
                             NULL) == GP_OK) {
            bytes += size;
            count++;
        }
    }
    gp__mutex_lock(&pool->lock);
    pool->trim_count += count;
    pool->deliveries--;
    gp__condition_broadcast(&pool->changed);
    gp__mutex_unlock(&pool->lock);
    if (returned != NULL)
        *returned = bytes;
    return gp__check_fork(error);
}

size_t gp_pool_unreturned(gp_pool *pool, gp_chunk **chunks, size_t capacity)
{
    size_t count = 0;
    if (gp__pool_enter(pool, NULL) != GP_OK)
        return 0;
    gp__mutex_lock(&pool->lock);
    for (struct gp__retired *item = pool->unreturned; item != NULL; item = item->next) {
        if (count < capacity)
            chunks[count] = gp_chunk_retain(item->chunk);
        count++;
    }
    gp__mutex_unlock(&pool->lock);
    return count;
}
