/* SPDX-License-Identifier: Apache-2.0
 *
 * Making and unmaking the world of a pool test, and the backing that obeys its knobs.
 */
#include "world.h"

#include "backing/chunk.h"
#include "backing/memory.h"

/* The reaper gives chunks back on its own thread, so the counters are atomic. */
static void count_supplied(struct world *world, size_t bytes, bool supplied)
{
    if (supplied) {
        __atomic_add_fetch(&world->supplied_bytes, bytes, __ATOMIC_RELAXED);
        __atomic_add_fetch(&world->supplied_chunks, 1, __ATOMIC_RELAXED);
    } else {
        __atomic_sub_fetch(&world->supplied_bytes, bytes, __ATOMIC_RELAXED);
        __atomic_sub_fetch(&world->supplied_chunks, 1, __ATOMIC_RELAXED);
    }
}

static gp_status knob_alloc(void *context, const gp_request *request, gp_chunk **out,
                            gp_error *error)
{
    struct world *world = context;
    gp_status status;

    __atomic_add_fetch(&world->alloc_calls, 1, __ATOMIC_RELAXED);
    if (world->answer != NULL)
        return world->answer(world, request, out, error);
    if (world->refuse != NULL && world->refuse(world, request->size)) {
        world->refusals++;
        return gp_error_set(error, GP_ERR_OUT_OF_MEMORY, "the test backing refuses %zu bytes",
                            request->size);
    }
    if (world->alloc_status != GP_OK)
        return gp_error_set(error, world->alloc_status, "the test backing answers as told");
    status = gp_backing_alloc(world->inner, request, out, error);
    if (status != GP_OK)
        return status;
    count_supplied(world, request->size, true);
    return GP_OK;
}

static gp_status knob_free(void *context, gp_chunk *chunk, const gp_request *request,
                           gp_error *error)
{
    struct world *world = context;
    gp_status status;

    __atomic_add_fetch(&world->free_calls, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&world->last_free_stream, request->stream, __ATOMIC_RELAXED);
    if (world->before_free != NULL)
        world->before_free(world, request);
    if (world->fail_free != NULL && world->fail_free(world, request->size))
        return gp_error_set(error, GP_ERR_CALLBACK, "the test backing will not take %zu bytes back",
                            request->size);
    status = gp_backing_free(world->inner, chunk, request, error);
    if (status != GP_OK)
        return status;
    count_supplied(world, request->size, false);
    return GP_OK;
}

static const gp_backing_ops knob_ops = {knob_alloc, knob_free, NULL};

/* Ends the process: a violation is found deep inside a pool call, which a test cannot leave by longjmp
 * without leaving locks and thread-local state behind. */
static void end_on_violation(void *context, const char *message)
{
    const struct world *world = context;

    fprintf(stderr, "reproduce: %s\nviolation: %s\n", check_context_line(), message);
    gp__sim_print_latest(world->sim);
    abort();
}

void world_begin(struct world *world, const struct world_options *options)
{
    struct gp__sim_options sim_options = {0};

    memset(world, 0, sizeof *world);
    if (options != NULL)
        world->options = *options;
    world->live_before = gp__memory_live();
    world->failed_releases_before = gp__chunk_failed_releases();
    sim_options.memory_bytes = world->options.memory_bytes;
    sim_options.largest_reserve = world->options.largest_reserve;
    sim_options.address_bytes = world->options.device_addresses;
    world->sim = gp__sim_create(&sim_options);
    CHECK(world->sim != NULL, "no simulator");
    gp__sim_on_violation(world->sim, end_on_violation, world);
    world->device = gp__sim_device(world->sim);
    CHECK_OK(gp_backing_device(GP_LOCATION_DEVICE, &world->inner, &world->error), &world->error);
    CHECK_OK(gp_backing_create(&knob_ops, world, &world->backing, &world->error), &world->error);
    if (world->options.cache_bytes != 0)
        CHECK_OK(gp_backing_caching(world->backing, world->options.cache_bytes, &world->cache,
                                    &world->error),
                 &world->error);
    if (world->options.with_peer) {
        sim_options.ordinal = 1;
        world->peer_sim = gp__sim_create(&sim_options);
        CHECK(world->peer_sim != NULL, "no simulator for the peer");
        gp__sim_on_violation(world->peer_sim, end_on_violation, world);
    }
    for (int s = 0; s < WORLD_STREAMS; s++)
        world->handle[s] = gp__sim_stream_create(world->sim, 0);
}

gp_status world_try_open(struct world *world, gp_error *error)
{
    gp_device *peer = world->peer_sim != NULL ? gp__sim_device(world->peer_sim) : NULL;
    gp_pool_options options = {
        .name = "test",
        .device = world->device,
        .backing = world->cache != NULL ? world->cache : world->backing,
        .peers = &peer,
        .peer_count = peer != NULL ? 1 : 0,
        .limit = world->options.limit == 0 ? GP_NO_LIMIT : world->options.limit,
        .chunk_size = world->options.chunk_size,
        .address_space = world->options.address_space,
        .flags = world->options.with_reaper ? 0 : GP_POOL_NO_REAPER,
        .interrupted = world->options.interrupted,
        .interrupted_context = world->options.interrupted_context,
    };

    return gp_pool_create(&options, &world->pool, error);
}

void world_open(struct world *world)
{
    CHECK_OK(world_try_open(world, &world->error), &world->error);
    for (int s = 0; s < WORLD_STREAMS; s++)
        CHECK_OK(gp_pool_stream(world->pool, world->handle[s], &world->stream[s], &world->error),
                 &world->error);
}

void world_close(struct world *world)
{
    for (int s = 0; s < WORLD_STREAMS; s++) {
        gp_stream_release(world->stream[s]);
        world->stream[s] = NULL;
    }
    if (world->pool == NULL)
        return;
    CHECK_OK(gp_pool_close(world->pool, &world->error), &world->error);
    gp_pool_release(world->pool);
    world->pool = NULL;
}

static void end(struct world *world)
{
    world_close(world);
    gp_backing_release(world->cache);
    gp_backing_release(world->backing);
    gp_backing_release(world->inner);
    CHECK(gp__memory_live() == world->live_before, "%lld allocations of growpool's are left",
          (long long)(gp__memory_live() - world->live_before));
}

static void destroy_sims(struct world *world)
{
    gp__sim_destroy(world->sim);
    if (world->peer_sim != NULL)
        gp__sim_destroy(world->peer_sim);
}

void world_end(struct world *world)
{
    struct gp__sim_ledger ledger;

    end(world);
    ledger = world_ledger(world);
    CHECK(ledger.reservation_count == 0 && ledger.chunk_count == 0 && ledger.mapping_count == 0 &&
              ledger.event_count == 0 && ledger.entered == 0,
          "left in the device: %zu reservations, %zu chunks, %zu mappings, %zu events, %zu entries",
          ledger.reservation_count, ledger.chunk_count, ledger.mapping_count, ledger.event_count,
          ledger.entered);
    CHECK(world->supplied_chunks == 0, "%zu chunks never came back", world->supplied_chunks);
    destroy_sims(world);
}

void world_abandon(struct world *world)
{
    end(world);
    destroy_sims(world);
}

uint64_t world_leaked_chunks(const struct world *world)
{
    return gp__chunk_failed_releases() - world->failed_releases_before;
}

uintptr_t world_malloc(struct world *world, size_t bytes, int s)
{
    uintptr_t va = 0;

    CHECK_OK(gp_pool_malloc(world->pool, bytes, world->stream[s], 0, &va, &world->error),
             &world->error);
    return va;
}

void world_free(struct world *world, uintptr_t va, int s)
{
    CHECK_OK(gp_pool_free(world->pool, va, s < 0 ? NULL : world->stream[s], 0, &world->error),
             &world->error);
}

void world_launch(struct world *world, int s, uintptr_t va, size_t bytes)
{
    gp__sim_launch(world->sim, world->handle[s], va, bytes);
}

gp_pool_stats world_stats(const struct world *world)
{
    gp_pool_stats stats;

    gp_pool_get_stats(world->pool, &stats);
    return stats;
}

struct gp__sim_ledger world_ledger(const struct world *world)
{
    struct gp__sim_ledger ledger;

    gp__sim_get_ledger(world->sim, &ledger);
    return ledger;
}

size_t world_cached_bytes(const struct world *world)
{
    return world->cache == NULL ? 0 : gp_backing_cached_bytes(world->cache);
}
