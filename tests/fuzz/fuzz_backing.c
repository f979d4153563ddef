/* SPDX-License-Identifier: Apache-2.0
 *
 * The backing that each pool asks: it counts what the pool has, misbehaves as told, and runs operations
 * inside its calls. Behind it may be a cache, and then the world's backing.
 */
#include "fuzz.h"

static gp_backing *inner_of(const struct fuzz_pool *pool)
{
    return pool->cache != NULL ? pool->cache : fuzz.world.backing;
}

/* True once for each call that the mood lasts. */
static enum fuzz_mood take_mood(enum fuzz_mood mood, unsigned *calls)
{
    if (*calls == 0)
        return MOOD_GOOD;
    --*calls;
    return mood;
}

static gp_status give_closed(const struct fuzz_pool *pool, size_t bytes, gp_chunk **out)
{
    gp_chunk *chunk = NULL;

    if (gp_chunk_create(pool->world.device, bytes, GP_LOCATION_DEVICE, 0, &chunk, NULL) != GP_OK)
        return GP_ERR_OUT_OF_MEMORY;
    if (gp_chunk_close(chunk, NULL) == GP_OK) {
        *out = chunk;
        return GP_OK;
    }
    gp_chunk_release(chunk); /* a driver fault: it would be a good one */
    return GP_ERR_OUT_OF_MEMORY;
}

static gp_status answer(struct fuzz_pool *pool, enum fuzz_mood mood, const gp_request *request,
                        gp_chunk **out, gp_error *error)
{
    gp_request larger = *request;

    fuzz.moody = true;
    switch (mood) {
    case MOOD_REFUSES:
        return GP_ERR_OUT_OF_MEMORY; /* without a word */
    case MOOD_NOT_READY:
        return GP_NOT_READY;
    case MOOD_NOTHING:
        return GP_OK;
    case MOOD_TWICE:
        if (fuzz.latest == NULL)
            return GP_ERR_OUT_OF_MEMORY;
        *out = gp_chunk_retain(fuzz.latest);
        return GP_OK;
    case MOOD_WRONG_SIZE:
        larger.size += WORLD_PAGE;
        return gp_chunk_create(pool->world.device, larger.size, GP_LOCATION_DEVICE, 0, out, error);
    case MOOD_CLOSED:
        return give_closed(pool, request->size, out);
    default:
        return gp_error_set(error, GP_ERR_CALLBACK, "the backing failed as told");
    }
}

static gp_status top_alloc(void *context, const gp_request *request, gp_chunk **out,
                           gp_error *error)
{
    struct fuzz_pool *pool = context;
    enum fuzz_mood mood = take_mood(fuzz.alloc_mood, &fuzz.alloc_moody);
    gp_status status;

    if (mood == MOOD_REENTERS)
        fuzz_reenter(pool);
    else if (mood != MOOD_GOOD)
        return answer(pool, mood, request, out, error);
    status = gp_backing_alloc(inner_of(pool), request, out, error);
    if (status != GP_OK)
        return status;
    pool->supplied_bytes += request->size;
    pool->supplied_chunks++;
    gp_chunk_release(fuzz.latest);
    fuzz.latest = gp_chunk_retain(*out);
    return GP_OK;
}

static gp_status top_free(void *context, gp_chunk *chunk, const gp_request *request,
                          gp_error *error)
{
    struct fuzz_pool *pool = context;
    enum fuzz_mood mood = take_mood(fuzz.free_mood, &fuzz.free_moody);
    gp_status status;

    if (mood == MOOD_REENTERS)
        fuzz_reenter(pool);
    else if (mood != MOOD_GOOD) {
        fuzz.moody = true;
        return mood == MOOD_NOT_READY
                   ? GP_NOT_READY
                   : gp_error_set(error, GP_ERR_CALLBACK, "it is not taken back");
    }
    if (chunk == fuzz.latest) {
        gp_chunk_release(fuzz.latest);
        fuzz.latest = NULL;
    }
    status = gp_backing_free(inner_of(pool), chunk, request, error);
    if (status != GP_OK)
        return status;
    pool->supplied_bytes -= request->size;
    pool->supplied_chunks--;
    return GP_OK;
}

/* Chunks of a pool that is gone: the device keeps those that were abandoned, the others were released. */
static void count_chunks(const struct fuzz_pool *pool, const gp_pool_stats *stats)
{
    if (stats->abandoned_bytes == 0)
        fuzz.world.supplied_chunks -= pool->supplied_chunks;
    else if (stats->unreturned_bytes > 0) /* some of each: only the device can tell */
        fuzz.world.supplied_chunks =
            world_ledger(&fuzz.world).chunk_count - world_leaked_chunks(&fuzz.world);
}

static void top_destroy(void *context)
{
    struct fuzz_pool *pool = context;
    gp_pool_stats stats;

    if (!pool->alive)
        return; /* it never was: create failed */
    stats = world_stats(&pool->world);
    CHECK(stats.used_bytes == 0 && stats.free_bytes == 0 && stats.retiring_bytes == 0,
          "a pool is gone with %zu bytes used, %zu free, %zu retiring", stats.used_bytes,
          stats.free_bytes, stats.retiring_bytes);
    gp_chunk_release(fuzz.latest); /* which may be one of its unreturned ones */
    fuzz.latest = NULL;
    fuzz.gone.abandoned_bytes += stats.abandoned_bytes;
    fuzz.gone.address_bytes += stats.address_bytes;
    fuzz.world.supplied_bytes -= stats.unreturned_bytes;
    count_chunks(pool, &stats);
    pool->alive = pool->held = false;
    model_clear(&pool->model);
}

static const gp_backing_ops top_ops = {top_alloc, top_free, top_destroy};

gp_status fuzz_backing_create(struct fuzz_pool *pool, gp_backing **out, gp_error *error)
{
    return gp_backing_create(&top_ops, pool, out, error);
}

/* ---- operations ---- */

void fuzz_op_mood(void)
{
    uint8_t which = fuzz_byte();
    enum fuzz_mood mood = (enum fuzz_mood)((which >> 1) % MOOD_COUNT);
    unsigned calls = 1 + fuzz_byte() % 16;

    fuzz_say("the next %u %ss are in mood %d", calls, (which & 1) != 0 ? "free" : "alloc",
             (int)mood);
    if ((which & 1) != 0) {
        fuzz.free_mood = mood;
        fuzz.free_moody = calls;
    } else {
        fuzz.alloc_mood = mood;
        fuzz.alloc_moody = calls;
    }
}

static bool take_one(unsigned *calls)
{
    bool any = *calls > 0;

    *calls -= any;
    fuzz.moody = fuzz.moody || any;
    return any;
}

static bool refuse_base(struct world *world, size_t size)
{
    (void)world;
    (void)size;
    return take_one(&fuzz.refuse_base);
}

static bool fail_base(struct world *world, size_t size)
{
    (void)world;
    (void)size;
    return take_one(&fuzz.fail_base);
}

void fuzz_op_base_knobs(void)
{
    uint8_t byte = fuzz_byte();

    fuzz.world.refuse = refuse_base;
    fuzz.world.fail_free = fail_base;
    fuzz.refuse_base = byte & 15;
    fuzz.fail_base = byte >> 4 & 7;
    fuzz_say("the device's backing refuses %u, fails %u", fuzz.refuse_base, fuzz.fail_base);
}

void fuzz_op_cache_trim(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t keep = fuzz_below(8) * WORLD_PAGE, before, released = SIZE_MAX;
    gp_error error = {0};
    gp_status status;

    fuzz_say("keep %zu", keep);
    if (pool->cache == NULL)
        return;
    before = gp_backing_cached_bytes(pool->cache);
    status = gp_backing_trim(pool->cache, keep, &released, &error);
    fuzz_expect(pool, status, &error, 0);
    CHECK((status == GP_OK) == (released != SIZE_MAX), "a trim that wrote its output is %d",
          (int)status);
    if (status == GP_OK && fuzz.inside_count == 0)
        CHECK(gp_backing_cached_bytes(pool->cache) + released == before, "released %zu of %zu",
              released, before);
}

int fuzz_interrupted(void *context)
{
    (void)context;
    if (fuzz.patience == 0) {
        fuzz.interrupted = true;
        return 1;
    }
    fuzz.patience--;
    if (!fuzz.times_out)
        return 0;
    for (int s = 0; s < WORLD_STREAMS; s++)
        gp__sim_complete(fuzz.world.sim, fuzz.world.handle[s], 1);
    if (++fuzz.asked % 8 == 0) /* streams that were destroyed, and the crowd */
        gp__sim_complete_all(fuzz.world.sim);
    return 0;
}
