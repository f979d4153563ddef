/* SPDX-License-Identifier: Apache-2.0
 *
 * The scenarios of what a pool does beside growing and shrinking: work on memory, captures, peers, caches,
 * many streams, chunks and backings without a pool. As in scenario.c an act goes on from run->step.
 */
#include "scenario.h"

#include <unistd.h>

#define MIB  CHECK_MIB
#define PAGE ((size_t)WORLD_PAGE)

static void open_world(struct scenario_run *run)
{
    world_open(&run->world);
}

/* A block of the model, kept as run->block[i]. */
static uintptr_t take(struct scenario_run *run, unsigned i, size_t bytes, int s)
{
    run->block[i] = world_malloc(&run->world, bytes, s);
    model_add(&run->model, run->block[i], bytes, s, 0);
    return run->block[i];
}

static size_t place_of(const struct scenario_run *run, uintptr_t va)
{
    for (size_t i = 0; i < run->model.count; i++)
        if (run->model.blocks[i].va == va)
            return i;
    CHECK(false, "the model does not know block %#zx", (size_t)va);
    return 0;
}

static void give(struct scenario_run *run, unsigned i, int s)
{
    CHECK_OK(model_free(&run->model, place_of(run, run->block[i]), s, &run->world.error),
             &run->world.error);
}

/* `count` pages of stream 0 with work on them; as many as `freed` are freed again, every other first. */
static void take_and_free(struct scenario_run *run, unsigned count, unsigned freed)
{
    open_world(run);
    for (unsigned i = 0; i < count; i++)
        world_launch(&run->world, 0, take(run, i, PAGE, 0), PAGE);
    for (unsigned i = 0; i < freed; i++)
        give(run, i * 2 < count ? i * 2 : (i * 2 - count) | 1, 0);
}

static gp_status trim(struct scenario_run *run, gp_error *error)
{
    return gp_pool_trim(run->world.pool, 0, 0, &run->released, error);
}

/* A trim that could not look at fences or graphs has left something to the next. */
static void verify_only_used(struct scenario_run *run)
{
    gp_pool_stats stats;

    CHECK_OK(trim(run, &run->world.error), &run->world.error);
    stats = world_stats(&run->world);

    CHECK(stats.physical_bytes == stats.used_bytes, "%zu physical bytes, %zu used",
          stats.physical_bytes, stats.used_bytes);
}

/* ---- work ---- */

static void prepare_two_blocks(struct scenario_run *run)
{
    take_and_free(run, 2, 0);
}

static gp_status work_step(struct scenario_run *run, gp_error *error)
{
    struct world *world = &run->world;
    gp_stream *stream = NULL;
    gp_status status;

    switch (run->step) {
    case 0:
        return gp_pool_fill(world->pool, run->block[0], PAGE, 7, world->stream[0], error);
    case 1:
        return gp_pool_copy(world->pool, run->block[1], run->block[0], PAGE, world->stream[0],
                            error);
    case 2:
        return gp_pool_join(world->pool, world->stream[0], world->stream[1], error);
    case 3:
        return gp_pool_synchronize(world->pool, world->stream[1], false, error);
    default:
        status = gp_pool_block_stream(world->pool, run->block[0], &stream, error);
        if (status == GP_OK)
            gp_stream_release(stream);
        return status;
    }
}

static gp_status act_work(struct scenario_run *run, gp_error *error)
{
    gp_status status = GP_OK;

    while (run->step < 5 && (status = work_step(run, error)) == GP_OK)
        run->step++;
    return status;
}

static void verify_work_done(struct scenario_run *run)
{
    CHECK(gp__sim_work_all(run->world.sim) == 0,
          "work of stream 0 is pending after a join with it");
}

static gp_status act_snapshot(struct scenario_run *run, gp_error *error)
{
    gp_pool_snapshot snapshot;
    gp_status status = gp_pool_take_snapshot(run->world.pool, &snapshot, error);

    if (status != GP_OK)
        return status;
    CHECK(snapshot.chunk_count == 2, "%zu chunks in the picture", snapshot.chunk_count);
    gp_pool_snapshot_free(&snapshot);
    return GP_OK;
}

/* ---- peers ---- */

static gp_status act_create(struct scenario_run *run, gp_error *error)
{
    return run->world.pool != NULL ? GP_OK : world_try_open(&run->world, error);
}

static void verify_peer(struct scenario_run *run)
{
    CHECK(gp_pool_peer_count(run->world.pool) == 1, "the peer is not there");
}

static gp_status act_nine_mib(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 9 * MIB, 1, error);
}

/* A violation, which aborts, if one of the chunks were not accessible. */
static void verify_peer_reaches(struct scenario_run *run)
{
    struct world *world = &run->world;

    gp__sim_launch_from(world->sim, gp__sim_device(world->peer_sim), world->handle[1],
                        run->model.blocks[0].va, 9 * MIB);
}

/* ---- captures ---- */

static void begin_capture(struct scenario_run *run)
{
    gp__sim_capture_begin(run->world.sim, run->world.handle[0], GP__SIM_CAPTURE_GLOBAL);
    run->capturing = true;
}

static void end_capture(struct scenario_run *run)
{
    run->graph = gp__sim_capture_end_graph(run->world.sim, run->world.handle[0]);
    run->capturing = false;
    CHECK(run->graph != NULL, "the capture was invalidated");
}

static void settle_capture(struct scenario_run *run)
{
    if (run->capturing)
        end_capture(run);
    if (run->graph != NULL)
        gp__sim_graph_destroy(run->world.sim, run->graph);
    run->graph = NULL;
}

/* Stream 1 has memory and is at work on some that is free. */
static void prepare_capture(struct scenario_run *run)
{
    open_world(run);
    for (unsigned i = 0; i < 2; i++)
        world_launch(&run->world, 1, take(run, i, PAGE, 1), PAGE);
    give(run, 0, 1);
    begin_capture(run);
}

static gp_status act_captured_block(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 3 * MIB, 0, error);
}

static void prepare_captured_block(struct scenario_run *run)
{
    prepare_capture(run);
    take(run, 2, 3 * MIB, 0);
}

static gp_status act_another_captured_block(struct scenario_run *run, gp_error *error)
{
    if (run->step == 0) {
        gp_status status = model_free(&run->model, place_of(run, run->block[2]), 0, error);
        if (status != GP_OK)
            return status;
        run->step = 1;
    }
    return model_malloc(&run->model, 6 * MIB, 0, error);
}

static void prepare_graph(struct scenario_run *run)
{
    prepare_captured_block(run);
    give(run, 2, 0);
    end_capture(run);
    gp__sim_graph_launch(run->world.sim, run->graph, run->world.handle[2]);
}

static gp_status act_end_graph(struct scenario_run *run, gp_error *error)
{
    settle_capture(run);
    gp__sim_complete_all(run->world.sim); /* the launch: growpool cannot see it */
    return trim(run, error);
}

static void prepare_ended_graph(struct scenario_run *run)
{
    prepare_graph(run);
    settle_capture(run);
    gp__sim_complete_all(run->world.sim);
}

static gp_status act_close(struct scenario_run *run, gp_error *error)
{
    return gp_pool_close(run->world.pool, error);
}

static void verify_closed(struct scenario_run *run)
{
    model_clear(&run->model);
    CHECK(world_stats(&run->world).physical_bytes == world_stats(&run->world).abandoned_bytes,
          "closed with %zu physical bytes", world_stats(&run->world).physical_bytes);
}

/* ---- pins, owners ---- */

static gp_status act_unpinned(struct scenario_run *run, gp_error *error)
{
    struct world *world = &run->world;
    gp_status status = GP_OK;

    if (run->step == 0) {
        status = gp_pool_pin(world->pool, run->block[0], true, error);
        if (status != GP_OK)
            return status;
        world_launch(world, 3, run->block[0], PAGE); /* who exported it, growpool cannot see */
        gp_pool_unpin(world->pool, run->block[0]);
        run->step = 1;
    }
    if (run->step == 1)
        status = model_free(&run->model, place_of(run, run->block[0]), 0, error);
    if (status != GP_OK)
        return status;
    run->step = 2;
    return trim(run, error);
}

/* More streams at work on one block than a timeline has slots. */
static void prepare_many_streams(struct scenario_run *run)
{
    struct world *world = &run->world;

    take_and_free(run, 1, 0);
    for (int i = 0; i < SCENARIO_EXTRA; i++) {
        uintptr_t handle = gp__sim_stream_create(world->sim, 0);

        CHECK_OK(gp_pool_stream(world->pool, handle, &run->extra[i], &world->error), &world->error);
        CHECK_OK(gp_pool_record_stream(world->pool, run->block[0], run->extra[i], &world->error),
                 &world->error);
        gp__sim_launch(world->sim, handle, run->block[0], PAGE);
    }
}

static void settle_streams(struct scenario_run *run)
{
    for (int i = 0; i < SCENARIO_EXTRA; i++)
        gp_stream_release(run->extra[i]);
    memset(run->extra, 0, sizeof run->extra);
}

static gp_status act_free_and_trim(struct scenario_run *run, gp_error *error)
{
    gp_status status = GP_OK;

    if (run->step == 0)
        status = model_free(&run->model, 0, 0, error);
    if (status != GP_OK)
        return status;
    run->step = 1;
    return trim(run, error);
}

static void prepare_range(struct scenario_run *run)
{
    const gp_interval part = {0, 4 * PAGE};

    open_world(run);
    CHECK_OK(model_range_create(&run->model, 0, 8, 0, &run->world.error), &run->world.error);
    CHECK_OK(model_commit(&run->model, 0, &part, 1, -1, &run->world.error), &run->world.error);
}

static gp_status act_range_record(struct scenario_run *run, gp_error *error)
{
    const gp_interval part = {PAGE, 2 * PAGE};
    struct model_range *range = &run->model.ranges[0];
    gp_status status = GP_OK;

    if (run->step == 0) {
        status = gp_range_record_stream(range->range, run->world.stream[2], error);
        if (status != GP_OK)
            return status;
        world_launch(&run->world, 2, range->va, 4 * PAGE);
        run->step = 1;
    }
    return model_decommit(&run->model, 0, &part, 1, -1, 0, error);
}

/* ---- unreturned chunks ---- */

static void prepare_four_unreturned(struct scenario_run *run)
{
    take_and_free(run, 5, 4);
    run->countdown = 4;
    run->world.knob = &run->countdown;
    run->world.fail_free = scenario_refuse;
    (void)trim(run, &run->world.error);
    CHECK(gp_pool_unreturned(run->world.pool, NULL, 0) == 4, "%zu chunks unreturned",
          gp_pool_unreturned(run->world.pool, NULL, 0));
}

/* Two of them fail again the first time. */
static gp_status act_return_again(struct scenario_run *run, gp_error *error)
{
    gp_status status;

    if (run->step == 0) {
        run->countdown = 2;
        status = gp_pool_return_unreturned(run->world.pool, &run->released, error);
        if (status != GP_OK)
            return status;
        CHECK(gp_pool_unreturned(run->world.pool, NULL, 0) >= 2, "more went than could");
        run->countdown = 0;
        run->step = 1;
    }
    return gp_pool_return_unreturned(run->world.pool, &run->released, error);
}

static bool refuse_while_idle(struct world *world, size_t size)
{
    (void)size;
    return world->alloc_calls > 5 && world_stats(world).free_bytes > 0;
}

/* Two pages, of which one is idle; the growth's fourth chunk is refused, and one of the first three is not
 * taken back. */
static void prepare_refused_undo(struct scenario_run *run)
{
    take_and_free(run, 2, 1);
    run->countdown = 1;
    run->world.knob = &run->countdown;
    run->world.fail_free = scenario_refuse;
    run->world.refuse = refuse_while_idle;
}

static void verify_one_unreturned(struct scenario_run *run)
{
    CHECK(run->countdown == 0, "nothing was refused");
    CHECK_OK(gp_pool_return_unreturned(run->world.pool, NULL, &run->world.error),
             &run->world.error);
    CHECK(gp_pool_unreturned(run->world.pool, NULL, 0) == 0, "chunks are unreturned");
}

/* ---- caches ---- */

static void prepare_cached(struct scenario_run *run)
{
    take_and_free(run, 4, 3);
    CHECK_OK(trim(run, &run->world.error), &run->world.error);
    CHECK(world_cached_bytes(&run->world) == 3 * PAGE, "the cache keeps %zu bytes",
          world_cached_bytes(&run->world));
}

static void verify_cache_empty(struct scenario_run *run)
{
    CHECK(world_cached_bytes(&run->world) == 0, "the cache keeps %zu bytes",
          world_cached_bytes(&run->world));
}

/* The cache holds two pages, and four come. */
static void prepare_small_cache(struct scenario_run *run)
{
    take_and_free(run, 5, 4);
}

static void verify_cache_full(struct scenario_run *run)
{
    verify_only_used(run);
    CHECK(world_cached_bytes(&run->world) <= 2 * PAGE, "the cache keeps %zu bytes",
          world_cached_bytes(&run->world));
}

static gp_status act_trim_cache(struct scenario_run *run, gp_error *error)
{
    return gp_backing_trim(run->world.cache, 0, &run->released, error);
}

/* ---- without a pool ---- */

static void no_release(void *context)
{
    (void)context;
}

static gp_status chunk_step(struct scenario_run *run, gp_error *error)
{
    gp_device *device = run->world.device;
    size_t free_bytes, total_bytes;

    switch (run->step) {
    case 0:
        return gp_device_memory(device, &free_bytes, &total_bytes, error);
    case 1:
        return gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE, 0, &run->chunk[0], error);
    case 2:
        return gp_chunk_adopt(device, gp_chunk_handle(run->chunk[0]), PAGE, no_release, NULL,
                              &run->chunk[1], error);
    default:
        return gp_chunk_close(run->chunk[0], error);
    }
}

static gp_status act_chunk(struct scenario_run *run, gp_error *error)
{
    gp_status status = GP_OK;

    while (run->step < 4 && (status = chunk_step(run, error)) == GP_OK)
        run->step++;
    return status;
}

static void settle_chunks(struct scenario_run *run)
{
    gp_chunk_release(run->chunk[0]);
    gp_chunk_release(run->chunk[1]);
}

static gp_status share_step(struct scenario_run *run, gp_error *error)
{
    gp_device *device = run->world.device;

    switch (run->step) {
    case 0:
        return gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE,
                               GP_CHUNK_EXPORTABLE | GP_CHUNK_GPU_DIRECT_RDMA, &run->chunk[0],
                               error);
    case 1:
        return gp_chunk_export_fd(run->chunk[0], &run->fd, error);
    default:
        return gp_chunk_import_fd(device, run->fd, PAGE, &run->chunk[1], error);
    }
}

static gp_status act_share(struct scenario_run *run, gp_error *error)
{
    gp_status status = GP_OK;

    while (run->step < 3 && (status = share_step(run, error)) == GP_OK)
        run->step++;
    return status;
}

static void settle_shared(struct scenario_run *run)
{
    if (run->step >= 2)
        CHECK(close(run->fd) == 0, "the descriptor was closed by somebody else");
    settle_chunks(run);
}

static gp_status act_backing(struct scenario_run *run, gp_error *error)
{
    const gp_request request = {PAGE, run->world.device, 0};
    gp_status status = GP_OK;

    if (run->step == 0)
        status = gp_backing_alloc(run->world.cache, &request, &run->chunk[0], error);
    if (status != GP_OK)
        return status;
    run->step = 1;
    status = gp_backing_free(run->world.cache, run->chunk[0], &request, error);
    if (status == GP_OK)
        run->chunk[0] = NULL;
    return status;
}

#define PAGES  .chunk_size = WORLD_PAGE
#define CACHED PAGES, .cache_bytes = 64 * MIB
#define LEAVES SCENARIO_RETURNS | SCENARIO_DECOMMITS

const struct scenario more_scenarios[] = {
    {"work", {PAGES}, 0, prepare_two_blocks, act_work, verify_work_done, NULL},
    {"snapshot", {PAGES}, 0, prepare_two_blocks, act_snapshot, NULL, NULL},
    {"peer_create", {.with_peer = true}, SCENARIO_ASKS, NULL, act_create, verify_peer, NULL},
    {"peer_grow",
     {PAGES, .with_peer = true},
     0,
     open_world,
     act_nine_mib,
     verify_peer_reaches,
     NULL},
    {"capture_first", {PAGES}, 0, prepare_capture, act_captured_block, NULL, settle_capture},
    {"capture_again",
     {PAGES},
     0,
     prepare_captured_block,
     act_another_captured_block,
     NULL,
     settle_capture},
    {"capture_gone",
     {PAGES},
     SCENARIO_RETURNS,
     prepare_graph,
     act_end_graph,
     verify_only_used,
     settle_capture},
    {"capture_close",
     {PAGES},
     SCENARIO_CLOSES,
     prepare_ended_graph,
     act_close,
     verify_closed,
     settle_capture},
    {"block_unpinned",
     {PAGES},
     SCENARIO_RETURNS,
     prepare_two_blocks,
     act_unpinned,
     verify_only_used,
     NULL},
    {"many_streams",
     {PAGES},
     SCENARIO_RETURNS | SCENARIO_LARGE,
     prepare_many_streams,
     act_free_and_trim,
     verify_only_used,
     settle_streams},
    {"range_record", {PAGES}, LEAVES, prepare_range, act_range_record, NULL, NULL},
    {"return_again",
     {PAGES},
     SCENARIO_RETURNS,
     prepare_four_unreturned,
     act_return_again,
     verify_only_used,
     NULL},
    {"refused_undo",
     {PAGES},
     SCENARIO_SHRINKS,
     prepare_refused_undo,
     act_nine_mib,
     verify_one_unreturned,
     NULL},
    {"cache_reuse", {CACHED}, 0, prepare_cached, act_nine_mib, verify_cache_empty, NULL},
    {"cache_full",
     {PAGES, .cache_bytes = 4 * MIB},
     SCENARIO_RETURNS,
     prepare_small_cache,
     trim,
     verify_cache_full,
     NULL},
    {"cache_trim", {CACHED}, 0, prepare_cached, act_trim_cache, verify_cache_empty, NULL},
    {"cache_close", {CACHED}, SCENARIO_CLOSES, prepare_cached, act_close, verify_closed, NULL},
    {"chunk", {0}, 0, NULL, act_chunk, NULL, settle_chunks},
    {"chunk_share", {0}, 0, NULL, act_share, NULL, settle_shared},
    {"backing", {CACHED}, 0, NULL, act_backing, NULL, settle_chunks},
};
const size_t more_scenario_count = sizeof more_scenarios / sizeof *more_scenarios;
