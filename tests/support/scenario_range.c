/* SPDX-License-Identifier: Apache-2.0
 *
 * The scenarios of ranges. Each act goes on from run->step when it is tried again, so that parts
 * that have succeeded are not done twice.
 */
#include "scenario.h"

#define PAGE ((size_t)WORLD_PAGE)

static gp_status give_parts(struct scenario_run *run, const gp_interval *parts, size_t count, int s,
                            gp_error *error)
{
    return model_commit(&run->model, 0, parts, count, s, error);
}

static gp_status take_parts(struct scenario_run *run, const gp_interval *parts, size_t count,
                            unsigned flags, gp_error *error)
{
    return model_decommit(&run->model, 0, parts, count, -1, flags, error);
}

static void launch(struct scenario_run *run, int s, size_t first, size_t count)
{
    world_launch(&run->world, s, run->model.ranges[0].va + first * PAGE, count * PAGE);
}

/* ---- preparations ---- */

static void open_world(struct scenario_run *run)
{
    world_open(&run->world);
}

/* A range of 16 pages for stream 0; nothing is committed. */
static void prepare_range(struct scenario_run *run)
{
    open_world(run);
    CHECK_OK(model_range_create(&run->model, 0, 16, 0, &run->world.error), &run->world.error);
}

static void commit_pages(struct scenario_run *run, size_t first, size_t count, int s)
{
    gp_interval part = {first * PAGE, count * PAGE};

    CHECK_OK(give_parts(run, &part, 1, s, &run->world.error), &run->world.error);
}

static void decommit_pages(struct scenario_run *run, size_t first, size_t count, unsigned flags)
{
    gp_interval part = {first * PAGE, count * PAGE};

    CHECK_OK(take_parts(run, &part, 1, flags, &run->world.error), &run->world.error);
}

static void prepare_one_page(struct scenario_run *run)
{
    prepare_range(run);
    CHECK_OK(model_resize(&run->model, 0, PAGE, -1, 0, &run->world.error), &run->world.error);
}

/* Five pages with work of two owners on them. */
static void prepare_busy(struct scenario_run *run)
{
    prepare_range(run);
    CHECK_OK(model_resize(&run->model, 0, 5 * PAGE, -1, 0, &run->world.error), &run->world.error);
    CHECK_OK(gp_range_record_stream(run->model.ranges[0].range, run->world.stream[1], NULL), NULL);
    launch(run, 0, 0, 3);
    launch(run, 1, 2, 3);
}

/* One chunk of six pages, of which two in the middle were cut out by a stream that is still at
 * work. */
static void prepare_cut(struct scenario_run *run)
{
    prepare_range(run);
    commit_pages(run, 2, 6, -1);
    launch(run, 0, 4, 2);
    decommit_pages(run, 4, 2, 0);
    CHECK(world_stats(&run->world).free_bytes == 2 * PAGE, "nothing was kept");
}

static void prepare_leaving(struct scenario_run *run)
{
    prepare_range(run);
    commit_pages(run, 0, 4, -1);
    launch(run, 0, 0, 4);
    decommit_pages(run, 0, 3, GP_TRIM_NO_WAIT);
}

static void prepare_at_limit(struct scenario_run *run)
{
    prepare_leaving(run);
    CHECK_OK(gp_pool_set_limit(run->world.pool, 4 * PAGE, NULL, NULL), NULL);
}

/* ---- acts ---- */

static gp_status act_create(struct scenario_run *run, gp_error *error)
{
    return model_range_create(&run->model, 0, 16, 1, error);
}

static void verify_addresses(struct scenario_run *run)
{
    CHECK(world_stats(&run->world).address_bytes == 16 * PAGE, "%zu bytes of addresses",
          world_stats(&run->world).address_bytes);
}

static gp_status act_resize_up(struct scenario_run *run, gp_error *error)
{
    return model_resize(&run->model, 0, 4 * PAGE + 1, -1, 0, error);
}

static gp_status act_resize_down(struct scenario_run *run, gp_error *error)
{
    return model_resize(&run->model, 0, 2 * PAGE, -1, 0, error);
}

static gp_status act_commit_sparse(struct scenario_run *run, gp_error *error)
{
    const gp_interval parts[] = {{6 * PAGE, 2 * PAGE}, {0, 2 * PAGE}, {10 * PAGE, PAGE}};

    return give_parts(run, parts, 3, 2, error);
}

static gp_status act_commit_over_kept(struct scenario_run *run, gp_error *error)
{
    const gp_interval part = {0, 10 * PAGE};

    return give_parts(run, &part, 1, 1, error);
}

static void verify_ten_pages(struct scenario_run *run)
{
    CHECK(world_stats(&run->world).physical_bytes == 10 * PAGE, "%zu physical bytes",
          world_stats(&run->world).physical_bytes);
}

static gp_status act_commit_leaving(struct scenario_run *run, gp_error *error)
{
    const gp_interval part = {PAGE, 5 * PAGE};

    return give_parts(run, &part, 1, 1, error);
}

static gp_status act_commit_elsewhere(struct scenario_run *run, gp_error *error)
{
    const gp_interval part = {8 * PAGE, 2 * PAGE};

    return give_parts(run, &part, 1, 1, error);
}

static gp_status act_decommit(struct scenario_run *run, gp_error *error)
{
    const gp_interval part = {PAGE, 3 * PAGE};

    return take_parts(run, &part, 1, 0, error);
}

static gp_status act_decommit_bulk(struct scenario_run *run, gp_error *error)
{
    const gp_interval parts[] = {{4 * PAGE, PAGE}, {0, PAGE}, {2 * PAGE, PAGE}};

    return take_parts(run, parts, 3, 0, error);
}

static gp_status act_decommit_no_wait(struct scenario_run *run, gp_error *error)
{
    const gp_interval part = {0, 4 * PAGE};
    gp_status status = GP_OK;

    if (run->step == 0)
        status = take_parts(run, &part, 1, GP_TRIM_NO_WAIT, error);
    if (status != GP_OK)
        return status;
    run->step = 1;
    return gp_pool_drain(run->world.pool, error);
}

/* What a failure has left retiring goes with the next drain at the latest. */
static void verify_nothing_retires(struct scenario_run *run)
{
    gp_pool_stats stats;

    CHECK_OK(gp_pool_drain(run->world.pool, &run->world.error), &run->world.error);
    stats = world_stats(&run->world);
    CHECK(stats.retiring_bytes == 0, "%zu bytes retire", stats.retiring_bytes);
}

/* Pages of a range that are idle for want of host memory, or by a refused fence, go with a trim. */
static void verify_trimmed(struct scenario_run *run)
{
    gp_pool_stats stats;

    CHECK_OK(gp_pool_trim(run->world.pool, 0, 0, NULL, &run->world.error), &run->world.error);
    stats = world_stats(&run->world);
    CHECK(stats.physical_bytes == stats.used_bytes, "%zu physical bytes, %zu used",
          stats.physical_bytes, stats.used_bytes);
}

static gp_status act_pin(struct scenario_run *run, gp_error *error)
{
    gp_status status = model_pin(&run->model, 0, PAGE, 512, true, error);

    if (status == GP_OK)
        model_unpin(&run->model, 0, 0);
    return status;
}

static gp_status act_unpinned_decommit(struct scenario_run *run, gp_error *error)
{
    gp_status status = run->step == 0 ? act_pin(run, error) : GP_OK;

    if (status != GP_OK)
        return status;
    if (run->step == 0)
        launch(run, 3, 0, 5); /* who exported it, growpool cannot see */
    run->step = 1;
    return act_decommit(run, error);
}

static gp_status act_close(struct scenario_run *run, gp_error *error)
{
    gp_status status = GP_OK;

    if (run->step == 0)
        status = model_range_close(&run->model, 0, 2, error);
    if (status != GP_OK)
        return status;
    run->step = 1;
    return gp_pool_trim(run->world.pool, 0, 0, NULL, error);
}

static void verify_buried(struct scenario_run *run)
{
    gp_pool_stats stats = world_stats(&run->world);

    CHECK(stats.physical_bytes == 0, "%zu physical bytes of a closed range", stats.physical_bytes);
    CHECK(stats.address_bytes == 0, "%zu bytes of addresses of a closed range",
          stats.address_bytes);
}

static gp_status act_close_pool(struct scenario_run *run, gp_error *error)
{
    return gp_pool_close(run->world.pool, error);
}

static void verify_closed(struct scenario_run *run)
{
    model_clear(&run->model);
    CHECK(gp_range_is_closed(run->model.ranges[0].range), "the range outlived its pool");
    verify_buried(run);
}

#define PAGES  .chunk_size = WORLD_PAGE
#define LEAVES SCENARIO_RETURNS | SCENARIO_DECOMMITS

const struct scenario range_scenarios[] = {
    {"range_create", {PAGES}, 0, open_world, act_create, verify_addresses, NULL},
    {"resize_up", {PAGES}, 0, prepare_one_page, act_resize_up, verify_nothing_retires, NULL},
    {"resize_down", {PAGES}, LEAVES, prepare_busy, act_resize_down, verify_trimmed, NULL},
    {"commit_sparse",
     {PAGES},
     0,
     prepare_one_page,
     act_commit_sparse,
     verify_nothing_retires,
     NULL},
    {"commit_over_kept", {0}, 0, prepare_cut, act_commit_over_kept, verify_ten_pages, NULL},
    {"commit_leaving",
     {PAGES},
     LEAVES,
     prepare_leaving,
     act_commit_leaving,
     verify_nothing_retires,
     NULL},
    {"commit_at_limit",
     {PAGES},
     LEAVES | SCENARIO_SHRINKS,
     prepare_at_limit,
     act_commit_elsewhere,
     verify_nothing_retires,
     NULL},
    {"decommit", {PAGES}, LEAVES, prepare_busy, act_decommit, verify_trimmed, NULL},
    {"decommit_bulk", {PAGES}, LEAVES, prepare_busy, act_decommit_bulk, verify_trimmed, NULL},
    {"decommit_no_wait", {PAGES}, LEAVES, prepare_busy, act_decommit_no_wait, verify_trimmed, NULL},
    {"range_pin", {PAGES}, 0, prepare_busy, act_pin, NULL, NULL},
    {"range_unpinned", {PAGES}, LEAVES, prepare_busy, act_unpinned_decommit, verify_trimmed, NULL},
    {"range_close", {PAGES}, LEAVES, prepare_busy, act_close, verify_buried, NULL},
    {"range_close_cut", {0}, LEAVES, prepare_cut, act_close, verify_buried, NULL},
    {"pool_close_range",
     {PAGES},
     SCENARIO_CLOSES,
     prepare_busy,
     act_close_pool,
     verify_closed,
     NULL},
};
const size_t range_scenario_count = sizeof range_scenarios / sizeof *range_scenarios;
