/* SPDX-License-Identifier: Apache-2.0
 *
 * The scenarios. Sizes are chosen so that each act needs exactly the mechanism in its name.
 */
#include "scenario.h"

#define MIB CHECK_MIB

/* ---- small helpers ---- */

static uintptr_t take(struct scenario_run *run, size_t bytes, int s)
{
    uintptr_t va = world_malloc(&run->world, bytes, s);

    model_add(&run->model, va, bytes, s, 0);
    return va;
}

static void give(struct scenario_run *run, uintptr_t va, int s)
{
    world_free(&run->world, va, s);
    for (size_t i = 0; i < run->model.count; i++)
        if (run->model.blocks[i].va == va) {
            model_remove(&run->model, i);
            return;
        }
    CHECK(false, "freed a block that the model does not know");
}

/* Blocks 0..count of one 2 MiB page each, all with pending work on stream `s`. */
static void take_pages(struct scenario_run *run, unsigned count, int s)
{
    for (unsigned i = 0; i < count; i++) {
        run->block[i] = take(run, WORLD_PAGE, s);
        world_launch(&run->world, s, run->block[i], WORLD_PAGE);
    }
}

/* ---- create ---- */

static gp_status act_create(struct scenario_run *run, gp_error *error)
{
    struct world *world = &run->world;
    gp_status status = GP_OK;

    if (world->pool == NULL)
        status = world_try_open(world, error);
    for (int s = 0; s < WORLD_STREAMS && status == GP_OK; s++)
        if (world->stream[s] == NULL)
            status = gp_pool_stream(world->pool, world->handle[s], &world->stream[s], error);
    return status;
}

static void verify_create(struct scenario_run *run)
{
    gp_pool_stats stats = world_stats(&run->world);

    CHECK(stats.physical_bytes == 0 && stats.address_bytes == 0,
          "a new pool has %zu physical and %zu address bytes", stats.physical_bytes,
          stats.address_bytes);
}

/* ---- growing ---- */

static void open_world(struct scenario_run *run)
{
    world_open(&run->world);
}

static gp_status act_small(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 1000, 0, error);
}

static void prepare_one_page(struct scenario_run *run)
{
    world_open(&run->world);
    take_pages(run, 1, 0);
}

static gp_status act_one_mib(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, MIB, 0, error);
}

static gp_status act_nine_mib(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 9 * MIB, 1, error);
}

static void verify_five_chunks(struct scenario_run *run)
{
    CHECK(world_stats(&run->world).physical_bytes == 10 * MIB, "%zu physical bytes",
          world_stats(&run->world).physical_bytes);
}

static void prepare_small_blocks(struct scenario_run *run)
{
    world_open(&run->world);
    for (int i = 0; i < 20; i++)
        take(run, 3000, i % 2);
}

static gp_status act_large(struct scenario_run *run, gp_error *error)
{
    gp_status status = GP_OK;

    if (run->step == 0 && (status = model_malloc(&run->model, 1100 * MIB, 2, error)) == GP_OK)
        run->step = 1;
    if (status == GP_OK)
        status = model_malloc(&run->model, 100, 2, error);
    return status;
}

bool scenario_refuse(struct world *world, size_t size)
{
    uint64_t *countdown = world->knob;

    (void)size;
    if (*countdown == 0)
        return false;
    --*countdown;
    return true;
}

static void prepare_refusals(struct scenario_run *run)
{
    world_open(&run->world);
    take_pages(run, 2, 0);
    give(run, run->block[0], 0);
    run->countdown = 3 - refusals(); /* a chunk of 8 MiB can be halved twice */
    run->world.knob = &run->countdown;
    run->world.refuse = scenario_refuse;
}

static gp_status act_refusals(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 64 * MIB, 1, error);
}

/* ---- reuse ---- */

static void prepare_other_streams_memory(struct scenario_run *run)
{
    world_open(&run->world);
    run->block[0] = take(run, 4 * MIB, 0);
    world_launch(&run->world, 0, run->block[0], 4 * MIB);
    give(run, run->block[0], 0);
}

static gp_status act_four_mib_elsewhere(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 4 * MIB, 1, error);
}

static void verify_waited(struct scenario_run *run)
{
    CHECK(world_stats(&run->world).wait_count > 0, "memory of a busy stream came without a wait");
}

static void prepare_recorded(struct scenario_run *run)
{
    world_open(&run->world);
    run->block[0] = take(run, 4 * MIB, 0);
}

static gp_status act_record_stream(struct scenario_run *run, gp_error *error)
{
    struct world *world = &run->world;
    gp_status status;

    if (run->step == 0) {
        status = gp_pool_record_stream(world->pool, run->block[0], world->stream[1], error);
        if (status != GP_OK)
            return status;
        run->step = 1;
        world_launch(world, 1, run->block[0], 4 * MIB);
    }
    if (run->step == 1) {
        status = model_free(&run->model, 0, 0, error);
        if (status != GP_OK)
            return status;
        run->step = 2;
    }
    /* The limit leaves nothing else, and stream 1 is still at work on it. */
    return model_malloc(&run->model, 4 * MIB, 0, error);
}

/* ---- limits ---- */

/* Idle pages 0 and 2 do not touch: four MiB need both unmapped and mapped elsewhere. */
static void prepare_scattered(struct scenario_run *run)
{
    world_open(&run->world);
    take_pages(run, 4, 0);
    give(run, run->block[0], 0);
    give(run, run->block[2], 1);
}

static gp_status act_scattered(struct scenario_run *run, gp_error *error)
{
    return model_malloc(&run->model, 4 * MIB, 2, error);
}

static void verify_at_limit(struct scenario_run *run)
{
    gp_pool_stats stats = world_stats(&run->world);

    CHECK(stats.physical_bytes == 8 * MIB && stats.used_bytes == 8 * MIB,
          "%zu physical bytes, %zu of them used, at a limit of 8 MiB", stats.physical_bytes,
          stats.used_bytes);
}

static gp_status act_lower_limit(struct scenario_run *run, gp_error *error)
{
    struct world *world = &run->world;
    gp_limit_result result;
    gp_status status;

    if (run->step == 0) {
        status = gp_pool_set_limit(world->pool, 2 * MIB, &result, error);
        if (status != GP_OK)
            return status;
        CHECK(result.limit == 2 * MIB && result.physical_bytes >= 4 * MIB &&
                  result.overage_bytes == result.physical_bytes - 2 * MIB,
              "limit %zu, physical %zu, overage %zu", result.limit, result.physical_bytes,
              result.overage_bytes);
        run->step = 1;
    }
    return gp_pool_drain(world->pool, error);
}

static void verify_only_used(struct scenario_run *run)
{
    gp_pool_stats stats = world_stats(&run->world);

    CHECK(stats.physical_bytes == stats.used_bytes && stats.retiring_bytes == 0,
          "%zu physical bytes, %zu used, %zu retiring", stats.physical_bytes, stats.used_bytes,
          stats.retiring_bytes);
}

/* ---- shrinking ---- */

static gp_status act_trim(struct scenario_run *run, gp_error *error)
{
    return gp_pool_trim(run->world.pool, 0, 0, &run->released, error);
}

static gp_status act_trim_no_wait(struct scenario_run *run, gp_error *error)
{
    gp_status status;

    if (run->step == 0) {
        status = gp_pool_trim(run->world.pool, 0, GP_TRIM_NO_WAIT, &run->released, error);
        if (status != GP_OK)
            return status;
        run->step = 1;
        CHECK(run->released == 4 * MIB, "%zu bytes set retiring", run->released);
    }
    return gp_pool_drain(run->world.pool, error);
}

static gp_status act_forget(struct scenario_run *run, gp_error *error)
{
    return gp_pool_forget_stream(run->world.pool, run->world.handle[1], error);
}

static void verify_forgotten(struct scenario_run *run)
{
    struct world *world = &run->world;

    CHECK(gp__sim_pending(world->sim, world->handle[1]) == 0,
          "work is pending on a forgotten stream");
    gp__sim_stream_destroy(world->sim, world->handle[1]);
}

static void prepare_unreturned(struct scenario_run *run)
{
    gp_error error;
    gp_status status;

    prepare_scattered(run);
    run->countdown = 2;
    run->world.knob = &run->countdown;
    run->world.fail_free = scenario_refuse;
    status = gp_pool_trim(run->world.pool, 0, 0, &run->released, &error);
    CHECK(status == GP_OK || status == GP_ERR_CALLBACK, "%s", error.message);
    CHECK(gp_pool_unreturned(run->world.pool, NULL, 0) == 2, "%zu chunks unreturned",
          gp_pool_unreturned(run->world.pool, NULL, 0));
}

static gp_status act_return_unreturned(struct scenario_run *run, gp_error *error)
{
    return gp_pool_return_unreturned(run->world.pool, &run->released, error);
}

/* ---- closing ---- */

static void prepare_close_idle(struct scenario_run *run)
{
    world_open(&run->world);
    take_pages(run, 3, 0);
    for (int i = 0; i < 3; i++)
        give(run, run->block[i], i % 2);
}

static gp_status act_close(struct scenario_run *run, gp_error *error)
{
    return gp_pool_close(run->world.pool, error);
}

static void verify_closed(struct scenario_run *run)
{
    gp_pool_stats stats = world_stats(&run->world);

    model_clear(&run->model);
    CHECK(gp_pool_is_closed(run->world.pool), "close succeeded and the pool is open");
    CHECK(stats.used_bytes == 0 && stats.physical_bytes == stats.abandoned_bytes,
          "closed with %zu bytes used, %zu physical", stats.used_bytes, stats.physical_bytes);
}

#define PAGES .chunk_size = 2 * MIB

const struct scenario scenarios[] = {
    {"create", {0}, 0, NULL, act_create, verify_create, NULL},
    {"first_allocation", {0}, 0, open_world, act_small, NULL, NULL},
    {"grow_one_chunk", {PAGES}, 0, prepare_one_page, act_one_mib, NULL, NULL},
    {"grow_many_chunks", {PAGES}, 0, open_world, act_nine_mib, verify_five_chunks, NULL},
    {"small_and_large", {0}, 0, prepare_small_blocks, act_large, NULL, NULL},
    {"refusals", {0}, SCENARIO_SHRINKS, prepare_refusals, act_refusals, NULL, NULL},
    {"cross_stream_reuse",
     {PAGES, .limit = 4 * MIB},
     SCENARIO_SHRINKS,
     prepare_other_streams_memory,
     act_four_mib_elsewhere,
     verify_waited,
     NULL},
    {"record_stream",
     {PAGES, .limit = 4 * MIB},
     SCENARIO_SHRINKS,
     prepare_recorded,
     act_record_stream,
     verify_waited,
     NULL},
    {"limit_reclaim",
     {PAGES, .limit = 8 * MIB},
     SCENARIO_SHRINKS,
     prepare_scattered,
     act_scattered,
     verify_at_limit,
     NULL},
    {"lower_limit",
     {PAGES},
     SCENARIO_RETURNS,
     prepare_scattered,
     act_lower_limit,
     verify_only_used,
     NULL},
    {"trim_wait", {PAGES}, SCENARIO_RETURNS, prepare_scattered, act_trim, verify_only_used, NULL},
    {"trim_no_wait",
     {PAGES},
     SCENARIO_RETURNS,
     prepare_scattered,
     act_trim_no_wait,
     verify_only_used,
     NULL},
    {"forget_stream", {PAGES}, 0, prepare_scattered, act_forget, verify_forgotten, NULL},
    {"return_unreturned",
     {PAGES},
     SCENARIO_RETURNS,
     prepare_unreturned,
     act_return_unreturned,
     verify_only_used,
     NULL},
    {"close_idle", {PAGES}, SCENARIO_CLOSES, prepare_close_idle, act_close, verify_closed, NULL},
    {"close_live", {PAGES}, SCENARIO_CLOSES, prepare_scattered, act_close, verify_closed, NULL},
};
const size_t scenario_count = sizeof scenarios / sizeof *scenarios;

const struct scenario *scenario_at(size_t index)
{
    if (index < scenario_count)
        return &scenarios[index];
    index -= scenario_count;
    if (index < range_scenario_count)
        return &range_scenarios[index];
    index -= range_scenario_count;
    return index < more_scenario_count ? &more_scenarios[index] : NULL;
}

void scenario_begin(struct scenario_run *run, const struct scenario *scenario)
{
    memset(run, 0, sizeof *run);
    world_begin(&run->world, &scenario->options);
    model_begin(&run->model, &run->world);
    if (scenario->prepare != NULL)
        scenario->prepare(run);
}

void scenario_verify(struct scenario_run *run, const struct scenario *scenario)
{
    char where[80];

    if (scenario->verify != NULL)
        scenario->verify(run);
    snprintf(where, sizeof where, "after %s", scenario->name);
    if (run->world.pool != NULL)
        model_check(&run->model, where);
}

void scenario_settle(struct scenario_run *run, const struct scenario *scenario)
{
    if (scenario->settle != NULL)
        scenario->settle(run);
}

struct scenario_state scenario_state(const struct scenario_run *run)
{
    struct scenario_state state;

    memset(&state, 0, sizeof state);
    state.open = run->world.pool != NULL;
    if (state.open)
        state.stats = world_stats(&run->world);
    state.block_count = run->model.count;
    state.step = run->step;
    return state;
}

/* Physical bytes but those that no longer serve anybody. */
static size_t serving(const struct scenario_state *state)
{
    return state->stats.physical_bytes - state->stats.unreturned_bytes -
           state->stats.abandoned_bytes;
}

void scenario_check_unchanged(const struct scenario_run *run, const struct scenario *scenario,
                              const struct scenario_state *before)
{
    struct scenario_state now = scenario_state(run);
    bool may_shrink =
        refusals() > 0 || (scenario->shape & (SCENARIO_SHRINKS | SCENARIO_RETURNS)) != 0;
    char message[400];

    if (run->world.pool == NULL || !before->open)
        return;
    if ((scenario->shape & SCENARIO_CLOSES) != 0) {
        CHECK(checker_compare(&run->world, message, sizeof message), "%s", message);
        return;
    }
    /* Parts of the act that succeeded are the model's to compare; the failed part changed nothing. */
    model_check(&run->model, scenario->name);
    if (now.step != before->step || now.block_count != before->block_count)
        return;
    /* Chunks that an undo could not give back or unmap are counted apart, and only there. */
    CHECK(may_shrink ? serving(&now) <= serving(before) : serving(&now) == serving(before),
          "physical bytes that serve %zu, before the failure %zu", serving(&now), serving(before));
    CHECK(now.stats.limit == before->stats.limit, "the limit changed");
    CHECK(now.stats.used_bytes == before->stats.used_bytes ||
              (scenario->shape & SCENARIO_DECOMMITS) != 0,
          "used bytes changed");
}
