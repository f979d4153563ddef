/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on whole pools: made, shrunk, limited, looked at, closed, let go. They check what the calls
 * report against the pool's figures before and after.
 */
#include "fuzz.h"

#include "backing/memory.h"

struct fuzz_pool *fuzz_held(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];

    return pool->alive && pool->held ? pool : NULL;
}

void fuzz_op_select(void)
{
    fuzz.now = (unsigned)fuzz_below(FUZZ_POOLS);
    fuzz_say("pool %u", fuzz.now);
}

/* ---- making ---- */

/* With faults out of the way: a pool that does not know all streams cannot look after their captures. */
void fuzz_resolve(struct fuzz_pool *pool, int s)
{
    gp_error error = {0};
    gp_status status;

    if (!pool->alive || !pool->held || pool->finishing || pool->ending ||
        pool->world.stream[s] != NULL)
        return;
    status = gp_pool_stream(pool->world.pool, fuzz.world.handle[s], &pool->world.stream[s], &error);
    fuzz_expect(pool, status, &error, 0);
    if (status == GP_OK || fuzz.dead)
        return;
    fuzz_forget_faults();
    gp__memory_fail_at(0, false);
    fuzz.heap_error = false;
    status = gp_pool_stream(pool->world.pool, fuzz.world.handle[s], &pool->world.stream[s], &error);
    fuzz_expect(pool, status, &error, 0);
}

struct plan {
    gp_pool_options options;
    size_t keep; /* of a cache; 0: none */
};

static struct plan plan_pool(uint8_t what, uint8_t more, gp_device **peers)
{
    static const size_t limits[8] = {SIZE_MAX, 4, 8, 16, 32, 64, 3, 1};
    static const size_t caches[4] = {0, 0, 4, 64};
    static const size_t addresses[4] = {0, 16, 64, 512};
    size_t limit = limits[what >> 3 & 7];
    struct plan plan = {
        .options = {.name = "fuzz",
                    .device = fuzz.world.device,
                    .limit = limit == SIZE_MAX ? GP_NO_LIMIT : limit * WORLD_PAGE,
                    .chunk_size = (what & 3) == 1   ? WORLD_PAGE
                                  : (what & 3) == 2 ? 2 * WORLD_PAGE
                                                    : 0,
                    .address_space = addresses[more & 3] * WORLD_PAGE,
                    .flags = (what & 4) != 0 ? GP_POOL_NO_REAPER : 0,
                    .interrupted = fuzz_interrupted},
        .keep = caches[what >> 6] * WORLD_PAGE,
    };

    if (fuzz.peer != NULL) {
        peers[0] = fuzz.world.device;
        peers[1] = peers[2] = gp__sim_device(fuzz.peer);
        plan.options.peers = peers;
        plan.options.peer_count = 3;
    }
    return plan;
}

static void drop_cache(struct fuzz_pool *pool)
{
    unsigned failing = fuzz.fail_base;

    if (pool->cache == NULL)
        return;
    fuzz_forget_faults(); /* what it cannot give back it would drop, uncounted */
    fuzz.fail_base = 0;
    gp_backing_release(pool->cache);
    pool->cache = NULL;
    fuzz.fail_base = failing;
}

static gp_status make(struct fuzz_pool *pool, struct plan *plan, gp_error *error)
{
    gp_status status = GP_OK;

    if (plan->keep > 0)
        status = gp_backing_caching(fuzz.world.backing, plan->keep, &pool->cache, error);
    if (status == GP_OK)
        status = fuzz_backing_create(pool, &plan->options.backing, error);
    if (status != GP_OK)
        return status;
    status = gp_pool_create(&plan->options, &pool->world.pool, error);
    pool->alive = pool->held = status == GP_OK;
    gp_backing_release(plan->options.backing);
    return status;
}

void fuzz_op_open(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    bool first = pool->world.options.memory_bytes == 0 || fuzz.at <= sizeof fuzz.options;
    uint8_t what = first ? fuzz.options[0] : fuzz_byte();
    uint8_t more = first ? fuzz.options[3] : fuzz_byte();
    gp_device *peers[3];
    struct plan plan;
    gp_error error = {0};
    gp_status status;

    fuzz_say("pool %u, %#x %#x", fuzz.now, what, more);
    if (pool->alive)
        return;
    if (fuzz.driver_faults && (more & 3) == 0)
        more |= 1;
    plan = plan_pool(what, more, peers);
    for (int s = 0; s < WORLD_STREAMS; s++)
        gp_stream_release(pool->world.stream[s]);
    drop_cache(pool);
    model_end(&pool->model);
    *pool = (struct fuzz_pool){.world = fuzz.world, .whole_pages = (what & 3) != 2};
    model_begin(&pool->model, &pool->world);
    status = make(pool, &plan, &error);
    fuzz_expect(NULL, status, &error, fuzz.peer != NULL ? 1u << GP_ERR_UNAVAILABLE : 0);
    for (int s = 0; s < WORLD_STREAMS; s++)
        fuzz_resolve(pool, s);
}

/* Options that no pool can have. */
void fuzz_op_open_bad(void)
{
    gp_device *peers[1] = {NULL};
    gp_pool_options options = {.device = fuzz.world.device, .chunk_size = 1000};
    gp_pool *made = NULL;
    gp_error error = {0};

    fuzz_say("nothing comes of it");
    fuzz_refused(gp_pool_create(&options, &made, &error), &error);
    options.chunk_size = 0;
    options.address_space = SIZE_MAX;
    fuzz_refused(gp_pool_create(&options, &made, &error), &error);
    options.address_space = WORLD_PAGE;
    options.peer_count = 1;
    fuzz_refused(gp_pool_create(&options, &made, &error), &error);
    options.peers = peers;
    fuzz_refused(gp_pool_create(&options, &made, &error), &error);
    options.device = NULL;
    fuzz_refused(gp_pool_create(&options, &made, &error), &error);
    CHECK(made == NULL, "a pool of bad options");
}

/* After errors that promise it; a driver that would not tell about a capture spoils the promise. */
static void check_untouched(const struct fuzz_pool *pool, gp_status status,
                            const gp_pool_stats *before)
{
    gp_pool_stats after = world_stats(&pool->world);

    if ((status != GP_ERR_CAPTURE && status != GP_ERR_PINNED && status != GP_ERR_STATE) ||
        fuzz.inside_count > 0 || gp__sim_faults_fired(fuzz.world.sim) > 0)
        return;
    CHECK(after.physical_bytes == before->physical_bytes &&
              after.used_bytes == before->used_bytes &&
              after.retiring_bytes == before->retiring_bytes,
          "\"%s\", and yet physical %zu -> %zu, used %zu -> %zu, retiring %zu -> %zu",
          gp_status_text(status), before->physical_bytes, after.physical_bytes, before->used_bytes,
          after.used_bytes, before->retiring_bytes, after.retiring_bytes);
}

/* ---- ending ---- */

static unsigned close_reasons(const struct fuzz_pool *pool)
{
    unsigned allowed = 0;

    for (size_t i = 0; i < pool->model.count; i++)
        allowed |= pool->model.blocks[i].pins > 0 ? 1u << GP_ERR_PINNED : 0;
    for (size_t i = 0; i < MODEL_RANGES; i++)
        allowed |= pool->model.ranges[i].pin_count > 0 ? 1u << GP_ERR_PINNED : 0;
    for (int g = 0; g < FUZZ_GRAPHS; g++)
        allowed |= fuzz.graphs[g].used ? 1u << GP_ERR_CAPTURE : 0;
    if (gp__sim_pending_all(fuzz.world.sim) > 0)
        allowed |= 1u << GP_ERR_CAPTURE; /* a launch of a graph that was destroyed */
    return allowed;
}

void fuzz_op_close(void)
{
    struct fuzz_pool *pool = fuzz_held();
    unsigned allowed;
    gp_pool_stats before;
    bool begun;
    gp_error error = {0};
    gp_status status;

    fuzz_say("pool %u", fuzz.now);
    if (fuzz_byte() % 4 != 1 || pool == NULL)
        return;
    allowed = close_reasons(pool);
    before = world_stats(&pool->world);
    begun = pool->world.pool->closing;
    status = gp_pool_close(pool->world.pool, &error);
    fuzz_expect(pool, status, &error, allowed);
    CHECK(status != GP_OK || (allowed & 1u << GP_ERR_PINNED) == 0, "closed with live exports");
    if (!begun) /* by the reaper, or a close that was interrupted: then it goes on as far as it can */
        check_untouched(pool, status, &before);
    if (status != GP_OK)
        return;
    CHECK(gp_pool_is_closed(pool->world.pool), "close succeeded and the pool is open");
    CHECK_OK(gp_pool_close(pool->world.pool, &error), &error);
}

void fuzz_op_finish(void)
{
    struct fuzz_pool *pool = fuzz_held();
    gp_error error = {0};

    fuzz_say("pool %u", fuzz.now);
    if (fuzz_byte() % 4 != 1 || pool == NULL)
        return;
    CHECK_OK(gp_pool_finish(pool->world.pool, &error), &error);
    pool->finishing = true;
}

void fuzz_op_release(void)
{
    struct fuzz_pool *pool = fuzz_held();
    gp_pool *raw;

    fuzz_say("pool %u", fuzz.now);
    if (fuzz_byte() % 4 != 1 || pool == NULL)
        return;
    raw = pool->world.pool;
    pool->held = false;
    for (int s = 0; s < WORLD_STREAMS && raw->closed; s++) {
        gp_stream_release(pool->world.stream[s]); /* others outlive their pool */
        pool->world.stream[s] = NULL;
    }
    gp_pool_release(raw);
}

/* ---- shrinking ---- */

void fuzz_op_trim(void)
{
    struct fuzz_pool *pool = fuzz_held();
    uint8_t pages = fuzz_byte();
    size_t keep = (pages & 0x80) != 0 ? (size_t)(pages & 0x7f) * WORLD_PAGE : 0;
    size_t released = SIZE_MAX;
    gp_pool_stats before, after;
    gp_error error = {0};
    gp_status status;

    fuzz_say("keep %zu", keep);
    if (pool == NULL)
        return;
    before = world_stats(&pool->world);
    status = gp_pool_trim(pool->world.pool, keep, 0, &released, &error);
    fuzz_expect(pool, status, &error, fuzz_is_capturing() ? 1u << GP_ERR_CAPTURE : 0);
    check_untouched(pool, status, &before);
    CHECK((status == GP_OK) == (released != SIZE_MAX), "a trim that wrote its output is %d",
          (int)status);
    if (status != GP_OK || fuzz.inside_count > 0 || fuzz.inside > 0)
        return;
    after = world_stats(&pool->world);
    CHECK(after.retiring_bytes == 0, "%zu bytes retire after a trim that waits",
          after.retiring_bytes);
    CHECK(keep > 0 || fuzz.heap_fault > 0 || pool->world.pool->idle_bytes == 0,
          "%zu bytes are idle after a trim of everything", pool->world.pool->idle_bytes);
    CHECK(after.physical_bytes + released == before.physical_bytes, "released %zu of %zu to %zu",
          released, before.physical_bytes, after.physical_bytes);
    CHECK(after.free_bytes + after.used_bytes >= keep ||
              after.free_bytes + after.used_bytes == before.free_bytes + before.used_bytes,
          "a trim that keeps %zu left %zu mapped", keep, after.free_bytes + after.used_bytes);
}

void fuzz_op_trim_no_wait(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t keep = fuzz_below(64) * WORLD_PAGE, released = SIZE_MAX, before;
    gp_error error = {0};
    gp_status status;

    fuzz_say("keep %zu", keep);
    if (pool == NULL)
        return;
    before = world_stats(&pool->world).retiring_bytes;
    status = gp_pool_trim(pool->world.pool, keep, GP_TRIM_NO_WAIT, &released, &error);
    fuzz_expect(pool, status, &error, 0);
    if (status == GP_OK)
        CHECK(world_stats(&pool->world).retiring_bytes == before + released,
              "%zu bytes set retiring", released);
}

void fuzz_op_drain(void)
{
    struct fuzz_pool *pool = fuzz_held();
    gp_pool_stats before;
    gp_error error = {0};
    gp_status status;

    fuzz_say("pool %u", fuzz.now);
    if (pool == NULL)
        return;
    before = world_stats(&pool->world);
    status = gp_pool_drain(pool->world.pool, &error);
    fuzz_expect(pool, status, &error, fuzz_is_capturing() ? 1u << GP_ERR_CAPTURE : 0);
    check_untouched(pool, status, &before);
    if (status == GP_OK && fuzz.inside_count == 0)
        CHECK(world_stats(&pool->world).retiring_bytes == 0, "still retiring after a drain");
}

void fuzz_op_limit(void)
{
    struct fuzz_pool *pool = fuzz_held();
    uint8_t pages = fuzz_byte();
    size_t limit = pages == 0xff ? GP_NO_LIMIT : pages * WORLD_PAGE;
    gp_limit_result result;
    gp_pool_stats stats;
    gp_error error = {0};
    gp_status status;

    fuzz_say("%zu", limit);
    if (pool == NULL)
        return;
    status = gp_pool_set_limit(pool->world.pool, limit, &result, &error);
    fuzz_expect(pool, status, &error, 0);
    if (status != GP_OK)
        return;
    stats = world_stats(&pool->world);
    CHECK(result.limit == limit && stats.limit == limit, "the limit did not take");
    CHECK(result.physical_bytes == stats.physical_bytes, "a wrong report of physical bytes");
    CHECK(result.overage_bytes == (stats.physical_bytes > limit ? stats.physical_bytes - limit : 0),
          "a wrong overage: %zu", result.overage_bytes);
    CHECK(result.deferred_bytes <= result.overage_bytes &&
              result.deferred_bytes <= stats.retiring_bytes,
          "deferred %zu of %zu, retiring %zu", result.deferred_bytes, result.overage_bytes,
          stats.retiring_bytes);
}

void fuzz_op_unreturned(void)
{
    struct fuzz_pool *pool = fuzz_held();
    gp_chunk *chunks[2] = {NULL, NULL};
    size_t before, returned = SIZE_MAX;
    gp_error error = {0};
    gp_status status;

    fuzz_say("pool %u", fuzz.now);
    if (pool == NULL)
        return;
    gp_pool_unreturned(pool->world.pool, chunks, 2);
    for (size_t i = 0; i < 2; i++)
        if (chunks[i] != NULL) {
            CHECK_STATUS(GP_ERR_STATE, gp_chunk_close(chunks[i], &error), &error);
            gp_chunk_release(chunks[i]);
        }
    before = world_stats(&pool->world).unreturned_bytes;
    status = gp_pool_return_unreturned(pool->world.pool, &returned, &error);
    fuzz_expect(pool, status, &error, 0);
    if (status == GP_OK && fuzz.inside_count == 0)
        CHECK(world_stats(&pool->world).unreturned_bytes + returned == before,
              "returned %zu of %zu", returned, before);
}

/* ---- looking ---- */

static void look_at_snapshot(const struct fuzz_pool *pool)
{
    gp_pool_stats stats = world_stats(&pool->world);
    gp_pool_snapshot snapshot = {0};
    gp_error error = {0};
    size_t used = 0, bytes = 0;
    gp_status status = gp_pool_take_snapshot(pool->world.pool, &snapshot, &error);

    fuzz_expect(pool, status, &error, 0);
    if (status != GP_OK)
        return;
    for (size_t i = 0; i < snapshot.span_count; i++)
        used += snapshot.spans[i].state == GP_SPAN_USED ? snapshot.spans[i].bytes : 0;
    for (size_t i = 0; i < snapshot.chunk_count; i++)
        bytes += snapshot.chunks[i].bytes;
    CHECK(used == stats.used_bytes || fuzz_is_leaving(pool),
          "%zu bytes used in the picture, %zu in all", used, stats.used_bytes);
    CHECK(fuzz.inside > 0 || stats.abandoned_bytes > 0 ||
              bytes == stats.free_bytes + stats.used_bytes + stats.retiring_bytes,
          "%zu bytes of chunks in the picture", bytes);
    gp_pool_snapshot_free(&snapshot);
}

void fuzz_op_look(void)
{
    struct fuzz_pool *pool = fuzz_held();
    gp_stream *stream = NULL;
    gp_error error = {0};

    fuzz_say("pool %u", fuzz.now);
    if (pool == NULL)
        return;
    look_at_snapshot(pool);
    CHECK(gp_pool_device(pool->world.pool) == fuzz.world.device &&
              gp_pool_peer_count(pool->world.pool) == (fuzz.peer != NULL) &&
              gp_pool_peer(pool->world.pool, 1) == NULL &&
              strcmp(gp_pool_name(pool->world.pool), "fuzz") == 0,
          "a pool is not what it was made as");
    if ((fuzz_byte() & 1) != 0)
        gp_pool_reset_peak_stats(pool->world.pool);
    if (pool->model.count == 0 || fuzz_is_leaving(pool))
        return;
    CHECK_OK(gp_pool_block_stream(pool->world.pool, pool->model.blocks[0].va, &stream, &error),
             &error);
    CHECK(pool->model.blocks[0].stream < 0 ||
              pool->world.stream[pool->model.blocks[0].stream] == stream,
          "a block's stream is another one");
    gp_stream_release(stream);
}

/* The device as if another process had taken memory, or given it back. */
void fuzz_op_device_memory(void)
{
    size_t pages = fuzz_byte();

    fuzz_say("%zu pages", pages);
    gp__sim_set_memory(fuzz.world.sim, pages * WORLD_PAGE);
}

/* ---- the end ---- */

/* options[7]: how pools go. */
static void end_pool(struct fuzz_pool *pool, bool close, bool ranges_first)
{
    gp_error error = {0};

    if (ranges_first)
        fuzz_ranges_end(pool);
    if (pool->held) {
        CHECK_OK(gp_pool_return_unreturned(pool->world.pool, NULL, &error), &error);
        if (close)
            CHECK_OK(gp_pool_close(pool->world.pool, &error), &error);
        pool->held = false;
        gp_pool_release(pool->world.pool);
    }
    if (!ranges_first)
        fuzz_ranges_end(pool);
}

static bool any_alive(void)
{
    bool any = false;

    for (unsigned i = 0; i < FUZZ_POOLS; i++)
        any = any || fuzz.pools[i].alive;
    return any;
}

/* Pools that nobody closed go by themselves, or with an explicit call of another pool. */
static void end_orphans(void)
{
    gp_pool_options options = {.device = fuzz.world.device,
                               .backing = fuzz.world.backing,
                               .limit = GP_NO_LIMIT,
                               .address_space = WORLD_PAGE,
                               .flags = GP_POOL_NO_REAPER};
    gp_pool *other = NULL;
    gp_error error = {0};

    for (int turn = 0; turn < 200 && any_alive(); turn++)
        fuzz_reaper_turn();
    if (!any_alive())
        return;
    CHECK_OK(gp_pool_create(&options, &other, &error), &error);
    CHECK_OK(gp_pool_trim(other, 0, 0, NULL, &error), &error);
    CHECK_OK(gp_pool_close(other, &error), &error);
    gp_pool_release(other);
    CHECK(!any_alive(), "a pool that was let go is still there");
}

void fuzz_pools_end(void)
{
    for (unsigned i = 0; i < FUZZ_POOLS; i++)
        end_pool(&fuzz.pools[i], (fuzz.options[7] >> i & 1) == 0,
                 (fuzz.options[7] >> (i + 4) & 1) == 0);
    fuzz_follow();
    end_orphans();
    for (unsigned i = 0; i < FUZZ_POOLS; i++) {
        struct fuzz_pool *pool = &fuzz.pools[i];

        for (int s = 0; s < WORLD_STREAMS; s++)
            gp_stream_release(pool->world.stream[s]);
        drop_cache(pool);
        model_end(&pool->model);
    }
}
