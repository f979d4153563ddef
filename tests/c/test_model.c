/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan item 8: random operations on a pool of the simulated device against the shadow model. Work is
 * launched on blocks all the time and completes at random, so memory that is unmapped or handed to
 * another stream too early is caught by the simulator or by model_add(); the backing refuses at random
 * and sometimes will not take chunks back.
 *
 * Mutations that this file catches: removing the wait before an unmap (violation "under pending work"),
 * removing the ticket check of cross-stream reuse (model_add: "under pending work of another stream"),
 * any counter that drifts (checker_compare).
 *
 * GP_TEST_OPS=operations a seed (default 100,000), GP_TEST_SEED=one seed, GP_TEST_CHECK=check after every
 * so many operations (default 4; after each one in the first 2,000).
 */
#include "tests/support/model.h"

#define MIB       CHECK_MIB
#define SEEDS     8
#define MOST_LIVE 160

struct random_run {
    struct world world;
    struct model model;
    uint64_t seed, rng, op;
    unsigned refuse_percent, fail_free_percent;
    size_t limit;
};

static struct random_run run;

static uint64_t next_random(void)
{
    /* xorshift64*: the same everywhere, unlike rand(). */
    run.rng ^= run.rng >> 12;
    run.rng ^= run.rng << 25;
    run.rng ^= run.rng >> 27;
    return run.rng * UINT64_C(2685821657736338717);
}

static size_t below(size_t bound)
{
    return (size_t)(next_random() >> 11) % bound;
}

static bool percent(unsigned chance)
{
    return below(100) < chance;
}

static bool refuse(struct world *world, size_t size)
{
    (void)world;
    (void)size;
    return percent(run.refuse_percent);
}

static bool fail_free(struct world *world, size_t size)
{
    (void)world;
    (void)size;
    return percent(run.fail_free_percent);
}

/* Mostly small, sometimes a few pages, rarely large. */
static size_t random_size(void)
{
    size_t kind = below(100);

    if (kind < 55)
        return 1 + below(8192);
    if (kind < 85)
        return 1 + below(600 * 1024);
    if (kind < 98)
        return 1 + below(9 * MIB);
    return 1 + below(200 * MIB);
}

static int random_stream(void)
{
    return (int)below(WORLD_STREAMS);
}

/* A stream that may work on the block now: allocated on it or recorded. */
static int random_user(const struct model_block *block)
{
    int s = random_stream();

    for (int i = 0; i < WORLD_STREAMS; i++, s = (s + 1) % WORLD_STREAMS)
        if ((block->recorded & (1u << s)) != 0)
            return s;
    return -1;
}

static void launch_on(const struct model_block *block, int s)
{
    size_t from = below(block->rounded), bytes = 1 + below(block->rounded - from);

    if (gp__sim_pending(run.world.sim, run.world.handle[s]) < 64)
        world_launch(&run.world, s, block->va + from, bytes);
}

static void expect(gp_status status, const gp_error *error, unsigned allowed)
{
    CHECK(status == GP_OK || (allowed & (1u << status)) != 0, "status %d (%s): %s", (int)status,
          gp_status_text(status), error->message);
}

#define NO_MEMORY (1u << GP_ERR_OUT_OF_MEMORY | 1u << GP_ERR_LIMIT)

static bool op_malloc(void)
{
    gp_error error = {0};
    size_t size = random_size();
    int s = random_stream();
    gp_status status;

    if (run.model.count >= MOST_LIVE)
        return false;
    status = model_malloc(&run.model, size, s, &error);
    expect(status, &error, NO_MEMORY);
    if (status != GP_OK) {
        CHECK(error.size >= size && error.limit == world_stats(&run.world).limit,
              "the error says size %zu, limit %zu", error.size, error.limit);
        return false;
    }
    for (size_t i = 0; i < run.model.count; i++)
        if (run.model.blocks[i].bytes == size && run.model.blocks[i].stream == s && percent(70))
            launch_on(&run.model.blocks[i], random_user(&run.model.blocks[i]));
    return true;
}

static bool op_try_malloc(void)
{
    gp_error error = {0};
    size_t size = random_size();
    int s = random_stream();
    uintptr_t va = 0;
    uint64_t before = run.world.alloc_calls + run.world.free_calls;
    gp_status status;

    if (run.model.count >= MOST_LIVE)
        return false;
    status = gp_pool_try_malloc(run.world.pool, size, run.world.stream[s], 0, &va, &error);
    CHECK(run.world.alloc_calls + run.world.free_calls == before, "the fast path called out");
    expect(status, &error, 1u << GP_NOT_READY);
    if (status == GP_OK)
        model_add(&run.model, va, size, s, 0);
    return status == GP_OK;
}

/* Frees on the block's own stream, or on another after its last use there. */
static bool op_free(void)
{
    gp_error error = {0};
    size_t index;
    const struct model_block *block;
    int s = -1;

    if (run.model.count == 0)
        return false;
    index = below(run.model.count);
    block = &run.model.blocks[index];
    if (block->stream < 0 || percent(30)) {
        s = random_stream();
        if (percent(50))
            launch_on(block, s); /* the last use is on the stream that frees */
    }
    expect(model_free(&run.model, index, s, &error), &error, 0);
    return true;
}

static bool op_launch(void)
{
    const struct model_block *block;
    int s;

    if (run.model.count == 0)
        return false;
    block = &run.model.blocks[below(run.model.count)];
    s = random_user(block);
    if (s >= 0)
        launch_on(block, s);
    return s >= 0;
}

static bool op_record_stream(void)
{
    gp_error error = {0};
    struct model_block *block;
    int s = random_stream();

    if (run.model.count == 0)
        return false;
    block = &run.model.blocks[below(run.model.count)];
    expect(gp_pool_record_stream(run.world.pool, block->va, run.world.stream[s], &error), &error,
           0);
    block->recorded |= 1u << s;
    launch_on(block, s);
    return true;
}

#include "model_range_ops.h"

/* ---- time and memory ---- */

static bool op_complete(void)
{
    int s = random_stream();

    if (percent(10))
        gp__sim_complete_all(run.world.sim);
    else
        gp__sim_complete(run.world.sim, run.world.handle[s], 1 + below(20));
    return true;
}

static bool op_trim(void)
{
    gp_error error = {0};
    gp_pool_stats before = world_stats(&run.world), after;
    size_t keep = percent(50) ? 0 : below(before.physical_bytes + 1), released = SIZE_MAX;

    expect(gp_pool_trim(run.world.pool, keep, 0, &released, &error), &error, 0);
    after = world_stats(&run.world);
    CHECK(after.retiring_bytes == 0, "%zu bytes retire after a trim that waits",
          after.retiring_bytes);
    CHECK(after.physical_bytes + released == before.physical_bytes,
          "released %zu, physical %zu -> %zu", released, before.physical_bytes,
          after.physical_bytes);
    CHECK(after.free_bytes + after.used_bytes >= keep ||
              after.free_bytes + after.used_bytes == before.free_bytes + before.used_bytes,
          "a trim that keeps %zu left %zu mapped", keep, after.free_bytes + after.used_bytes);
    return released > 0;
}

static bool op_trim_no_wait(void)
{
    gp_error error = {0};
    size_t released = SIZE_MAX, before = world_stats(&run.world).retiring_bytes;

    expect(gp_pool_trim(run.world.pool, below(16) * MIB, GP_TRIM_NO_WAIT, &released, &error),
           &error, 0);
    CHECK(world_stats(&run.world).retiring_bytes == before + released, "%zu bytes set retiring",
          released);
    return released > 0;
}

static bool op_drain(void)
{
    gp_error error = {0};

    expect(gp_pool_drain(run.world.pool, &error), &error, 0);
    CHECK(world_stats(&run.world).retiring_bytes == 0, "still retiring after a drain");
    return true;
}

static bool op_limit(void)
{
    gp_error error = {0};
    gp_limit_result result;
    gp_pool_stats stats;

    run.limit = percent(20) ? GP_NO_LIMIT : below(96) * 4 * MIB;
    expect(gp_pool_set_limit(run.world.pool, run.limit, &result, &error), &error, 0);
    stats = world_stats(&run.world);
    CHECK(result.limit == run.limit && stats.limit == run.limit, "the limit did not take");
    CHECK(result.physical_bytes == stats.physical_bytes, "a wrong report of physical bytes");
    CHECK(result.overage_bytes ==
              (stats.physical_bytes > run.limit ? stats.physical_bytes - run.limit : 0),
          "a wrong overage: %zu", result.overage_bytes);
    CHECK(result.deferred_bytes <= result.overage_bytes &&
              result.deferred_bytes <= stats.retiring_bytes,
          "deferred %zu of %zu, retiring %zu", result.deferred_bytes, result.overage_bytes,
          stats.retiring_bytes);
    return true;
}

/* The stream ends and a new one takes over its place, often with the very same handle. */
static bool op_forget(void)
{
    gp_error error = {0};
    struct world *world = &run.world;
    int s = random_stream();

    if (!percent(20))
        return false;
    expect(gp_pool_forget_stream(world->pool, world->handle[s], &error), &error, 0);
    CHECK(gp__sim_pending(world->sim, world->handle[s]) == 0, "work left on a forgotten stream");
    gp_stream_release(world->stream[s]);
    gp__sim_stream_destroy(world->sim, world->handle[s]);
    world->handle[s] = gp__sim_stream_create(world->sim, 0);
    expect(gp_pool_stream(world->pool, world->handle[s], &world->stream[s], &error), &error, 0);
    for (size_t i = 0; i < run.model.count; i++) {
        run.model.blocks[i].recorded &= ~(1u << s);
        if (run.model.blocks[i].stream == s)
            run.model.blocks[i].stream = -1;
    }
    for (size_t i = 0; i < MODEL_RANGES; i++) {
        run.model.ranges[i].users &= ~(1u << s);
        if (run.model.ranges[i].stream == s)
            run.model.ranges[i].stream = -1;
    }
    return true;
}

static bool op_return_unreturned(void)
{
    gp_error error = {0};
    size_t before = world_stats(&run.world).unreturned_bytes, returned = SIZE_MAX;

    expect(gp_pool_return_unreturned(run.world.pool, &returned, &error), &error, 0);
    CHECK(world_stats(&run.world).unreturned_bytes + returned == before, "returned %zu of %zu",
          returned, before);
    return returned > 0;
}

static bool op_knobs(void)
{
    run.refuse_percent = percent(50) ? 0 : (unsigned)below(100);
    run.fail_free_percent = percent(70) ? 0 : (unsigned)below(60);
    return true;
}

static bool op_bad_free(void)
{
    uintptr_t va;

    if (run.model.count == 0)
        return false;
    va = run.model.blocks[below(run.model.count)].va + (percent(50) ? 512 : 1);
    for (size_t i = 0; i < run.model.count; i++)
        if (run.model.blocks[i].va == va)
            return false;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(run.world.pool, va, NULL, 0, NULL), NULL);
    return true;
}

static const struct operation {
    const char *name;
    bool (*run)(void);
    unsigned weight;
} operations[] = {
    {"malloc", op_malloc, 300},
    {"try_malloc", op_try_malloc, 60},
    {"free", op_free, 330},
    {"launch", op_launch, 120},
    {"record_stream", op_record_stream, 40},
    {"range_create", op_range_create, 12},
    {"range_close", op_range_close, 4},
    {"commit", op_commit, 70},
    {"decommit", op_decommit, 50},
    {"resize", op_resize, 20},
    {"range_use", op_range_use, 60},
    {"pin", op_pin, 12},
    {"unpin", op_unpin, 20},
    {"complete", op_complete, 90},
    {"trim", op_trim, 8},
    {"trim_no_wait", op_trim_no_wait, 12},
    {"drain", op_drain, 4},
    {"set_limit", op_limit, 6},
    {"forget_stream", op_forget, 6},
    {"return_unreturned", op_return_unreturned, 6},
    {"knobs", op_knobs, 10},
    {"bad_free", op_bad_free, 8},
};
#define OPERATION_COUNT (sizeof operations / sizeof *operations)

static size_t pick_operation(void)
{
    size_t total = 0, ticket, i = 0;

    for (size_t o = 0; o < OPERATION_COUNT; o++)
        total += operations[o].weight;
    ticket = below(total);
    while (ticket >= operations[i].weight)
        ticket -= operations[i++].weight;
    return i;
}

/* By operation, over all seeds: a kind that hardly ever works tests nothing. */
static uint64_t successes[OPERATION_COUNT];

static void step(uint64_t every)
{
    size_t o = pick_operation();
    char line[160];
    uint64_t before = run.world.alloc_calls;

    snprintf(line, sizeof line, "GP_TEST_SEED=%llu GP_TEST_OPS=%llu test_model  # ends in %s",
             (unsigned long long)run.seed, (unsigned long long)run.op + 1, operations[o].name);
    check_context(line);
    if (operations[o].run())
        successes[o]++;
    CHECK(run.world.alloc_calls - before < 2000, "%llu backing calls in one operation",
          (unsigned long long)(run.world.alloc_calls - before));
    if (run.op < 2000 || run.op % every == 0)
        model_check(&run.model, operations[o].name);
    run.op++;
}

static void run_seed(uint64_t seed, uint64_t operations_wanted)
{
    struct world_options options = {.chunk_size = seed % 3 == 0 ? 2 * MIB : 0,
                                    .memory_bytes = 2 * CHECK_GIB};

    memset(&run, 0, sizeof run);
    run.seed = seed;
    run.rng = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    world_begin(&run.world, &options);
    gp__sim_log_enable(run.world.sim, false);
    run.world.refuse = refuse;
    run.world.fail_free = fail_free;
    world_open(&run.world);
    model_begin(&run.model, &run.world);
    while (run.op < operations_wanted)
        step(check_environment("GP_TEST_CHECK", 4));
    run.refuse_percent = 0;
    run.fail_free_percent = 0;
    CHECK_OK(gp_pool_return_unreturned(run.world.pool, NULL, &run.world.error), &run.world.error);
    model_check(&run.model, "at the end");
    model_end(&run.model);
    world_end(&run.world);
    check_context(NULL);
}

static void random_operations_agree_with_the_model(void **state)
{
    uint64_t only = check_environment("GP_TEST_SEED", 0);
    uint64_t wanted = check_environment("GP_TEST_OPS", 100000);

    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        if (only == 0)
            run_seed(seed, wanted);
    if (only != 0)
        run_seed(only, wanted);
    for (size_t o = 0; o < OPERATION_COUNT && only == 0 && wanted >= 10000; o++)
        CHECK(successes[o] >= SEEDS, "\"%s\" succeeded %llu times", operations[o].name,
              (unsigned long long)successes[o]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations_agree_with_the_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
