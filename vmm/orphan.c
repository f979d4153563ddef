/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools that are let go: references, the last of them, and who closes a pool that nobody closed. It keeps
 * one list for the process, of pools that are closed but for memory whose owners growpool cannot see.
 *
 * WHO MAY FENCE A WHOLE CONTEXT. That fence invalidates captures on streams that growpool does not know, so
 * only an explicit call may make it: its caller answers for them. The reaper must not. A pool that it
 * cannot close for that reason goes on the list (`left`), and the next trim, drain or close of any pool of
 * the device closes it. While a pool is left the reaper keeps off it; the list holds a reference to a
 * pool that is only finishing, for its user may close it too.
 */
#include "quick.h"

#include "../backing/memory.h"

#define SLICE_NS UINT64_C(20000000)

/* Ranked below pools, so it is taken before any. Guards `left`, `next_left` and the list. */
static struct gp__mutex left_lock = GP__MUTEX_INIT(GP__RANK_REAPER);
static gp_pool *left_pools;

gp_pool *gp_pool_retain(gp_pool *pool)
{
    __atomic_add_fetch(&pool->references, 1, __ATOMIC_RELAXED);
    return pool;
}

/* Unreturned chunks lose the pool's reference, which releases their memory unless somebody else holds
 * them. */
void gp__pool_destroy(gp_pool *pool)
{
    while (pool->unreturned != NULL) {
        struct gp__retired *item = pool->unreturned;
        pool->unreturned = item->next;
        /* No pool holds it any more: whoever else has it may close it or supply it again. */
        gp__chunk_move(item->chunk, GP__CHUNK_UNRETURNED, GP__CHUNK_UNMAPPED);
        gp__chunk_move(item->chunk, GP__CHUNK_UNMAPPED, GP__CHUNK_IDLE);
        gp_chunk_release(item->chunk);
        gp__free(item);
    }
    gp__timeline_destroy(&pool->timeline);
    gp_backing_release(pool->backing);
    gp__mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->changed);
    gp__free(pool);
}

void gp_pool_release(gp_pool *pool)
{
    if (pool == NULL || __atomic_sub_fetch(&pool->references, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    if (gp__pool_enter(pool, NULL) != GP_OK)
        return;
    if (gp_pool_is_closed(pool)) {
        gp__pool_destroy(pool);
        return;
    }
    gp__reaper_hand_over(&pool->reaper, &pool->orphaned);
}

gp_status gp_pool_finish(gp_pool *pool, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    bool begin = !pool->finishing && !pool->closed;
    if (begin) {
        gp_pool_retain(pool); /* until it is closed */
        pool->finishing = true;
        gp__quick_end_all(pool);
    }
    gp__mutex_unlock(&pool->lock);
    if (begin)
        gp__reaper_kick(&pool->reaper); /* whatever its flags say: nobody else closes it */
    return GP_OK;
}

/* ---- what cannot be closed in the background ----------------------------------------------- */

static bool is_left(const gp_pool *pool)
{
    gp__mutex_lock(&left_lock);
    bool left = pool->left;
    gp__mutex_unlock(&left_lock);
    return left;
}

/* Puts the pool on the list, which takes over the caller's reference; not one that its user has closed
 * meanwhile, when there was nothing on the list to let go of. */
static void leave(gp_pool *pool)
{
    gp__mutex_lock(&left_lock);
    bool closed = gp_pool_is_closed(pool);
    pool->left = true;
    if (!closed) {
        pool->next_left = left_pools;
        left_pools = pool;
    }
    gp__mutex_unlock(&left_lock);
    if (closed)
        gp_pool_release(pool);
}

/* Takes one pool off the list; false when it was not on it. */
static bool take_one(const gp_pool *pool)
{
    gp__mutex_lock(&left_lock);
    gp_pool **link = &left_pools;
    while (*link != NULL && *link != pool)
        link = &(*link)->next_left;
    bool found = *link != NULL;
    if (found)
        *link = pool->next_left;
    gp__mutex_unlock(&left_lock);
    return found;
}

/* Drops the references of gp_pool_finish() and of the list once the pool is closed. */
void gp__orphan_finished(gp_pool *pool)
{
    bool listed = take_one(pool);
    gp__mutex_lock(&pool->lock);
    bool finished = pool->finishing && pool->closed;
    if (finished)
        pool->finishing = false;
    gp__mutex_unlock(&pool->lock);
    if (listed)
        gp_pool_release(pool);
    if (finished)
        gp_pool_release(pool);
}

/* Takes the pools of the device off the list; they stay `left`. */
static gp_pool *take_left(const gp_device *device)
{
    gp_pool *taken = NULL;
    gp__mutex_lock(&left_lock);
    for (gp_pool **link = &left_pools; *link != NULL;) {
        gp_pool *pool = *link;
        if (pool->device != device) {
            link = &pool->next_left;
            continue;
        }
        *link = pool->next_left;
        pool->next_left = taken;
        taken = pool;
    }
    gp__mutex_unlock(&left_lock);
    return taken;
}

static bool is_orphaned(const gp_pool *pool)
{
    return __atomic_load_n(&pool->orphaned, __ATOMIC_ACQUIRE);
}

size_t gp__orphans_left(const gp_device *device)
{
    size_t count = 0;
    gp__mutex_lock(&left_lock);
    for (const gp_pool *pool = left_pools; pool != NULL; pool = pool->next_left)
        count += pool->device == device;
    gp__mutex_unlock(&left_lock);
    return count;
}

bool gp__orphans_wanted(gp_pool *pool)
{
    return gp__check_fork(NULL) == GP_OK && gp__orphans_left(pool->device) > 0 &&
           gp__device_check_capture(pool->device, NULL) == GP_OK;
}

/* Closes one pool that was taken off the list, or puts it back. */
static gp_status close_left(gp_pool *pool, const struct gp__interrupt *interrupt, gp_error *error)
{
    bool orphaned = is_orphaned(pool);
    gp_status status = gp__pool_not_inside(pool, "closing", NULL);
    if (status == GP_OK)
        status = gp__pool_close(pool, GP__REAP_FINAL, interrupt, error);
    if (status != GP_OK) {
        leave(pool);
    } else if (orphaned) {
        gp__pool_destroy(pool);
    } else {
        gp__orphan_finished(pool);
        gp_pool_release(pool); /* the list's reference */
    }
    return status;
}

gp_status gp__orphans_close(gp_device *device, const struct gp__interrupt *interrupt,
                            gp_error *error)
{
    gp_pool *pool = take_left(device);
    gp_status stopped = GP_OK;
    while (pool != NULL) {
        gp_pool *next = pool->next_left;
        gp_error told = {0};
        if (stopped != GP_OK) {
            leave(pool);
        } else {
            gp_status status = close_left(pool, interrupt, &told);
            if (status == GP_ERR_INTERRUPTED || gp__check_fork(NULL) != GP_OK)
                stopped = status;
            if (stopped != GP_OK && error != NULL)
                *error = told;
        }
        pool = next;
    }
    return stopped;
}

/* ---- the reaper's part --------------------------------------------------------------------- */

/* Ends a slice of a close, so that one pool's stream does not hold up the others. */
static int slice_is_over(void *context)
{
    return gp__is_exiting() || gp__monotonic_ns() >= *(uint64_t *)context;
}

/* Whether nothing is left but memory whose owners cannot be fenced one by one. */
static bool is_hopeless(gp_pool *pool)
{
    gp__mutex_lock(&pool->lock);
    bool hopeless = pool->retiring != NULL && pool->deliveries == 0;
    for (const struct gp__retired *item = pool->retiring; item != NULL; item = item->next)
        hopeless = hopeless && gp__timeline_is_unseen(&pool->timeline, item->owners);
    gp__mutex_unlock(&pool->lock);
    return hopeless;
}

static uint64_t service(gp_pool *pool, bool orphaned)
{
    uint64_t deadline = gp__monotonic_ns() + SLICE_NS;
    struct gp__interrupt slice = {slice_is_over, &deadline};
    if (is_left(pool))
        return UINT64_MAX;
    gp_status status = gp__pool_close(pool, GP__REAP_SEEN, &slice, NULL);
    if (status == GP_OK) {
        if (orphaned)
            gp__pool_destroy(pool);
        else
            gp__orphan_finished(pool);
        return UINT64_MAX;
    }
    if (status == GP_ERR_PINNED)
        return UINT64_MAX; /* the last unpin kicks */
    gp__mutex_lock(&pool->lock);
    bool graphs = gp__arenas_alive(pool);
    gp__mutex_unlock(&pool->lock);
    if (graphs)
        return GP__REAPER_WATCH_NS; /* for whoever destroys them */
    if (!is_hopeless(pool))
        return SLICE_NS / 4;
    if (!orphaned)
        gp_pool_retain(pool);
    leave(pool);
    return UINT64_MAX;
}

/* A finishing pool may be closed by its user at the same time, and be gone as soon as both are through:
 * so this thread holds it too. */
uint64_t gp__orphan_service(gp_pool *pool)
{
    bool orphaned = is_orphaned(pool);
    if (!orphaned)
        gp_pool_retain(pool);
    uint64_t delay = service(pool, orphaned);
    if (!orphaned)
        gp_pool_release(pool);
    return delay;
}
