/* SPDX-License-Identifier: Apache-2.0
 *
 * Random captures beside random blocks, against a model of who may have which memory: what a living graph
 * was given, nobody outside its capture gets; and no work touches memory that another one's pending work
 * touches. GP_TEST_OPS and GP_TEST_SEED choose how much and which.
 */
#include "tests/support/model.h"

#include "vmm/pool.h"

#define MIB        CHECK_MIB
#define MOST_LIVE  64
#define MOST_GRAPH 6
#define MOST_KEPT  256

struct block {
    uintptr_t va;
    size_t bytes;
    int s;
    int graph; /* of the capture that it was allocated in; -1: none */
};

struct kept {
    uintptr_t va;
    size_t bytes;
};

/* A capture that goes on, or the graph it became. */
struct graph {
    bool used;
    int s; /* the stream that captures; -1: ended */
    gp__sim_graph *made;
    struct kept kept[MOST_KEPT]; /* every block it was ever given */
    size_t count;
};

static struct world world;
static struct block blocks[MOST_LIVE];
static size_t block_count;
static struct graph graphs[MOST_GRAPH];
static uint64_t seed;

static uint64_t draw(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

static int capture_on(int s)
{
    for (int g = 0; g < MOST_GRAPH; g++)
        if (graphs[g].used && graphs[g].s == s)
            return g;
    return -1;
}

static bool overlaps(uintptr_t a, size_t a_bytes, uintptr_t b, size_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

/* What a block that was just handed out must not be. */
static void check_handed(const struct block *block)
{
    for (int g = 0; g < MOST_GRAPH; g++) {
        if (!graphs[g].used || g == block->graph)
            continue;
        for (size_t i = 0; i < graphs[g].count; i++)
            CHECK(!overlaps(block->va, block->bytes, graphs[g].kept[i].va, graphs[g].kept[i].bytes),
                  "block %#zx overlaps what graph %d was given", (size_t)block->va, g);
    }
    uint64_t except = block->graph < 0 ? gp__sim_stream_id(world.sim, world.handle[block->s]) : 0;
    CHECK(!gp__sim_busy(world.sim, block->va, block->bytes, except),
          "block %#zx is in use by pending work", (size_t)block->va);
    for (size_t i = 0; i < block_count; i++)
        CHECK(!overlaps(block->va, block->bytes, blocks[i].va, blocks[i].bytes),
              "block %#zx overlaps a live one", (size_t)block->va);
}

static void op_malloc(void)
{
    struct block block = {.bytes = 512 * (1 + draw(6000)), .s = (int)draw(WORLD_STREAMS)};
    block.graph = capture_on(block.s);
    if (block_count == MOST_LIVE || (block.graph >= 0 && graphs[block.graph].count == MOST_KEPT))
        return;
    gp_status status =
        gp_pool_malloc(world.pool, block.bytes, world.stream[block.s], 0, &block.va, &world.error);
    if (status == GP_ERR_LIMIT || status == GP_ERR_OUT_OF_MEMORY)
        return;
    CHECK_OK(status, &world.error);
    check_handed(&block);
    if (block.graph >= 0) {
        struct graph *graph = &graphs[block.graph];
        graph->kept[graph->count++] = (struct kept){block.va, block.bytes};
    }
    blocks[block_count++] = block;
}

static void op_free(void)
{
    if (block_count == 0)
        return;
    size_t i = draw(block_count);
    world_free(&world, blocks[i].va, -1);
    blocks[i] = blocks[--block_count];
}

/* Work on a block's own stream; in its capture it becomes part of the graph. */
static void op_launch(void)
{
    if (block_count == 0)
        return;
    const struct block *block = &blocks[draw(block_count)];
    int capture = capture_on(block->s);
    if (capture >= 0 && capture != block->graph)
        return; /* memory from outside a graph is its user's to keep */
    world_launch(&world, block->s, block->va, block->bytes);
}

static void op_begin(void)
{
    int s = (int)draw(WORLD_STREAMS);
    if (capture_on(s) >= 0)
        return;
    for (int g = 0; g < MOST_GRAPH; g++) {
        if (graphs[g].used)
            continue;
        graphs[g] = (struct graph){.used = true, .s = s};
        gp__sim_capture_begin(world.sim, world.handle[s], (enum gp__sim_capture_mode)draw(3));
        return;
    }
}

static void op_end(void)
{
    int g = capture_on((int)draw(WORLD_STREAMS));
    if (g < 0)
        return;
    graphs[g].made = gp__sim_capture_end_graph(world.sim, world.handle[graphs[g].s]);
    CHECK(graphs[g].made != NULL, "capture %d was invalidated", g);
    graphs[g].s = -1;
}

static struct graph *ended_graph(void)
{
    struct graph *graph = &graphs[draw(MOST_GRAPH)];
    return graph->used && graph->s < 0 ? graph : NULL;
}

static void op_replay(void)
{
    struct graph *graph = ended_graph();
    int s = (int)draw(WORLD_STREAMS);
    if (graph != NULL && capture_on(s) < 0)
        gp__sim_graph_launch(world.sim, graph->made, world.handle[s]);
}

static void forget_graph(struct graph *graph)
{
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i].graph == graph - graphs)
            blocks[i].graph = -1;
    *graph = (struct graph){0};
}

static void op_destroy(void)
{
    struct graph *graph = ended_graph();
    if (graph == NULL)
        return;
    gp__sim_graph_destroy(world.sim, graph->made);
    forget_graph(graph);
}

static void op_trim(void)
{
    gp_status status =
        gp_pool_trim(world.pool, 0, draw(2) ? GP_TRIM_NO_WAIT : 0, NULL, &world.error);
    if (status != GP_ERR_CAPTURE)
        CHECK_OK(status, &world.error);
}

static void op_complete(void)
{
    gp__sim_complete(world.sim, world.handle[draw(WORLD_STREAMS)], draw(5));
}

/* Ends every capture and destroys every graph. */
static void end_all(void)
{
    for (int g = 0; g < MOST_GRAPH; g++) {
        if (!graphs[g].used)
            continue;
        if (graphs[g].s >= 0)
            graphs[g].made = gp__sim_capture_end_graph(world.sim, world.handle[graphs[g].s]);
        gp__sim_graph_destroy(world.sim, graphs[g].made);
        forget_graph(&graphs[g]);
    }
    gp__sim_complete_all(world.sim);
}

static void random_captures(void **state)
{
    static void (*const operations[])(void) = {
        op_malloc, op_malloc, op_malloc, op_free,    op_free, op_launch,  op_launch,
        op_begin,  op_end,    op_replay, op_destroy, op_trim, op_complete};
    uint64_t rounds = check_environment("GP_TEST_OPS", 20000);
    uint64_t first = check_environment("GP_TEST_SEED", 1);
    char line[120], message[400];
    (void)state;
    for (uint64_t each = first; each < first + 4; each++) {
        world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB, .limit = 200 * MIB});
        world_open(&world);
        gp__sim_log_enable(world.sim, false);
        block_count = 0;
        seed = each * UINT64_C(0x9E3779B97F4A7C15) + 1;
        for (uint64_t i = 0; i < rounds / 4; i++) {
            snprintf(line, sizeof line, "GP_TEST_SEED=%llu, operation %llu",
                     (unsigned long long)each, (unsigned long long)i);
            check_context(line);
            operations[draw(sizeof operations / sizeof operations[0])]();
            if (i % 16 == 0)
                CHECK(gp__pool_check(world.pool, message, sizeof message), "%s", message);
        }
        end_all();
        while (block_count > 0)
            op_free();
        CHECK_OK(gp_pool_trim(world.pool, 0, 0, NULL, &world.error), &world.error);
        assert_int_equal(world_stats(&world).physical_bytes, 0);
        check_context(NULL);
        world_end(&world);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_captures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
