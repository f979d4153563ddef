/* SPDX-License-Identifier: Apache-2.0
 *
 * The caching backing: keeps chunks that come back, up to a bound, and hands them out again before
 * it asks its inner backing. A kept chunk is IDLE; only pools move it. Its lock is never held
 * across the inner backing.
 *
 *   kept_bytes = sum of the sizes of the kept chunks <= keep_bytes, but for a chunk that the inner
 *   backing would not take back.
 */
#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

struct kept {
    gp_chunk *chunk; /* a reference */
    gp_request request; /* of the growth that it came back from: the inner free gets it */
    struct kept *older;
    struct kept *newer;
};

struct cache {
    gp_backing *inner; /* a reference */
    size_t keep_bytes;
    struct gp__mutex lock; /* guards what follows */
    struct kept *oldest; /* in the order they came back */
    struct kept *newest;
    size_t kept_bytes;
};

/* ---- the list: lock held -------------------------------------------------------------------- */

/* Lists the chunk between two neighbours, of which one is NULL. */
static void add(struct cache *cache, struct kept *kept, struct kept *older, struct kept *newer)
{
    kept->older = older;
    kept->newer = newer;
    *(older != NULL ? &older->newer : &cache->oldest) = kept;
    *(newer != NULL ? &newer->older : &cache->newest) = kept;
    cache->kept_bytes += gp_chunk_size(kept->chunk);
}

static struct kept *remove_kept(struct cache *cache, struct kept *kept)
{
    *(kept->older != NULL ? &kept->older->newer : &cache->oldest) = kept->newer;
    *(kept->newer != NULL ? &kept->newer->older : &cache->newest) = kept->older;
    cache->kept_bytes -= gp_chunk_size(kept->chunk);
    gp__chunk_let_go(kept->chunk);
    return kept;
}

/* Somebody who holds the chunk too may have closed it or lent it to another pool meanwhile, so only
 * an idle one fits. */
static bool fits(const gp_chunk *chunk, const gp_request *request)
{
    return gp__chunk_state_of(chunk) == GP__CHUNK_IDLE && gp_chunk_size(chunk) == request->size &&
           gp_chunk_device(chunk) == request->device;
}

/* ---- taking chunks out ---------------------------------------------------------------------- */

/* The newest that fits: its memory is the likeliest to be warm. NULL if there is none. */
static struct kept *take_fitting(struct cache *cache, const gp_request *request)
{
    gp__mutex_lock(&cache->lock);
    struct kept *kept = cache->newest;
    while (kept != NULL && !fits(kept->chunk, request))
        kept = kept->older;
    if (kept != NULL)
        remove_kept(cache, kept);
    gp__mutex_unlock(&cache->lock);
    return kept;
}

static struct kept *take_oldest_above(struct cache *cache, size_t keep_bytes)
{
    gp__mutex_lock(&cache->lock);
    bool above = cache->kept_bytes > keep_bytes;
    struct kept *kept = above ? remove_kept(cache, cache->oldest) : NULL;
    gp__mutex_unlock(&cache->lock);
    return kept;
}

/* Context: calls out; no lock held. On failure the chunk is kept as before. */
static gp_status give_back(struct cache *cache, struct kept *kept, gp_error *error)
{
    if (gp_chunk_is_in_use(kept->chunk)) {
        /* The inner backing let another pool accept it: that acceptance ends in a free of its own.
         * */
        gp_chunk_release(kept->chunk);
        gp__free(kept);
        return GP_OK;
    }
    gp_status status = gp_backing_free(cache->inner, kept->chunk, &kept->request, error);
    if (status != GP_OK) {
        gp__mutex_lock(&cache->lock);
        bool ours = gp__chunk_keep(kept->chunk); /* it is no other cache's meanwhile */
        if (ours)
            add(cache, kept, NULL, cache->oldest);
        gp__mutex_unlock(&cache->lock);
        if (!ours) {
            gp_chunk_release(kept->chunk);
            gp__free(kept);
        }
        return status;
    }
    gp__free(kept);
    return GP_OK;
}

static gp_status shrink_to(struct cache *cache, size_t keep_bytes, size_t *released,
                           gp_error *error)
{
    struct kept *kept;
    *released = 0;
    while ((kept = take_oldest_above(cache, keep_bytes)) != NULL) {
        size_t size = gp_chunk_size(kept->chunk);
        gp_status status = give_back(cache, kept, error);
        if (status != GP_OK) {
            return status;
        }
        *released += size;
    }
    return GP_OK;
}

/* ---- the backing --------------------------------------------------------------------------- */

static gp_status cache_alloc(void *context, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    struct cache *cache = context;
    struct kept *kept = take_fitting(cache, request);
    if (kept != NULL) {
        *out = kept->chunk;
        gp__free(kept);
        return GP_OK;
    }
    gp_status status = gp_backing_alloc(cache->inner, request, out, error);
    if (status != GP_ERR_OUT_OF_MEMORY) {
        return status;
    }
    size_t released;
    gp_status shrunk = shrink_to(cache, 0, &released, error);
    if (shrunk != GP_OK) {
        return shrunk;
    }
    return released == 0 ? status : gp_backing_alloc(cache->inner, request, out, error);
}

/* GP_OK when the chunk is now kept; GP_NOT_READY when there is no room for it at present;
 * GP_ERR_ARGUMENT when it was kept before: twice in the list it would be handed out twice. */
static gp_status keep(struct cache *cache, struct kept *kept)
{
    size_t size = gp_chunk_size(kept->chunk);
    gp_status status = GP_OK;
    gp__mutex_lock(&cache->lock);
    if (!gp__chunk_keep(kept->chunk)) {
        status = GP_ERR_ARGUMENT;
    } else if (cache->kept_bytes > cache->keep_bytes - size) {
        gp__chunk_let_go(kept->chunk);
        status = GP_NOT_READY;
    } else {
        add(cache, kept, cache->newest, NULL);
    }
    gp__mutex_unlock(&cache->lock);
    return status;
}

/* Room is made first: when the inner backing will not take an old chunk, this free fails as a whole
 * and says why, and no failure goes unreported. */
static gp_status cache_free(void *context, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    struct cache *cache = context;
    size_t size = gp_chunk_size(chunk);
    struct kept *kept = size <= cache->keep_bytes ? gp__calloc(1, sizeof *kept) : NULL;
    if (kept == NULL) {
        /* Too large to keep, or no host memory to remember it: the inner backing takes it at once.
         * */
        return gp_backing_free(cache->inner, chunk, request, error);
    }
    kept->chunk = chunk;
    kept->request = *request;
    gp_status status;
    while ((status = keep(cache, kept)) == GP_NOT_READY) {
        size_t released;
        status = shrink_to(cache, cache->keep_bytes - size, &released, error);
        if (status != GP_OK) {
            gp__free(kept);
            return status;
        }
    }
    if (status != GP_OK) {
        gp__free(kept);
        return gp_error_set(error, status,
                            "chunk %llu of %zu bytes is kept by a cache already: it was given back "
                            "twice",
                            (unsigned long long)gp_chunk_id(chunk), size);
    }
    return GP_OK;
}

/* Nobody is left to hear of a failure; a chunk that the inner backing will not take is let go. */
static void cache_destroy(void *context)
{
    struct cache *cache = context;
    struct kept *kept;
    if (gp__fork_generation() != 0) {
        return; /* a thread of the parent may have been inside the list */
    }
    while ((kept = take_oldest_above(cache, 0)) != NULL) {
        if (gp_chunk_is_in_use(kept->chunk) ||
            gp_backing_free(cache->inner, kept->chunk, &kept->request, NULL) != GP_OK) {
            gp_chunk_release(kept->chunk);
        }
        gp__free(kept);
    }
    gp_backing_release(cache->inner);
    gp__mutex_destroy(&cache->lock);
    gp__free(cache);
}

static const gp_backing_ops caching_ops = {
    .alloc = cache_alloc,
    .free = cache_free,
    .destroy = cache_destroy,
};

gp_status gp_backing_caching(gp_backing *inner, size_t keep_bytes, gp_backing **out,
                             gp_error *error)
{
    if (inner == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT, "a caching backing needs an inner backing");
    }
    gp__note_use(); /* its lock can be taken without a device */
    struct cache *cache = gp__calloc(1, sizeof *cache);
    if (cache == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to describe a cache");
    }
    gp_status status = gp_backing_create(&caching_ops, cache, out, error);
    if (status != GP_OK) {
        gp__free(cache);
        return status;
    }
    cache->inner = gp_backing_retain(inner);
    cache->keep_bytes = keep_bytes;
    gp__mutex_init(&cache->lock, GP__RANK_BACKING);
    return GP_OK;
}

size_t gp_backing_cached_bytes(const gp_backing *backing)
{
    struct cache *cache = gp__backing_context(backing, &caching_ops);
    if (cache == NULL || gp__fork_generation() != 0) {
        return 0;
    }
    gp__mutex_lock(&cache->lock);
    size_t kept_bytes = cache->kept_bytes;
    gp__mutex_unlock(&cache->lock);
    return kept_bytes;
}

gp_status gp_backing_trim(gp_backing *backing, size_t keep_bytes, size_t *released, gp_error *error)
{
    struct cache *cache = gp__backing_context(backing, &caching_ops);
    if (cache == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT, "only a caching backing can be trimmed");
    }
    gp_status status = gp__check_process(error);
    if (status != GP_OK) {
        return status;
    }
    size_t total;
    status = shrink_to(cache, keep_bytes, &total, error);
    if (status == GP_OK && released != NULL) {
        *released = total;
    }
    return status;
}
