/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on time: work completes, the reaper has its turn, streams come, go and wait for each other,
 * captures become graphs, the context dies.
 */
#include "fuzz.h"

void fuzz_launch(int s, uintptr_t va, size_t bytes)
{
    bool by_peer = fuzz.peer != NULL && (va / GP_ALIGNMENT + bytes / WORLD_PAGE) % 2 == 0;

    gp__sim_launch_from(fuzz.world.sim, by_peer ? gp__sim_device(fuzz.peer) : NULL,
                        fuzz.world.handle[s], va, bytes);
}

void fuzz_op_complete(void)
{
    int s = fuzz_stream();
    size_t count = 1 + fuzz_byte() % 24;

    fuzz_say("%zu items of stream %d", count, s);
    gp__sim_complete(fuzz.world.sim, fuzz.world.handle[s], count);
}

void fuzz_op_complete_all(void)
{
    fuzz_say("all work");
    gp__sim_complete_all(fuzz.world.sim);
}

void fuzz_op_reaper(void)
{
    fuzz_say("a turn");
    fuzz_reaper_turn();
}

/* How waits behave from now on, and when the interrupt hook says stop. */
void fuzz_op_wait_mode(void)
{
    uint8_t how = fuzz_byte();

    fuzz.times_out = (how & 1) != 0;
    fuzz.patience = (how & 2) != 0 ? how >> 2 : UINT32_MAX;
    fuzz_say("waits %s, patience %u", fuzz.times_out ? "time out" : "complete", fuzz.patience);
    gp__sim_set_wait_mode(fuzz.world.sim,
                          fuzz.times_out ? GP__SIM_WAIT_TIMES_OUT : GP__SIM_WAIT_COMPLETES);
}

bool fuzz_is_implicit(int s)
{
    bool implicit = false;

    for (int other = 0; other < WORLD_STREAMS; other++)
        implicit = implicit || (fuzz.capture[other] != FUZZ_NONE && fuzz.blocking[other]);
    return implicit && fuzz.world.handle[s] == 0;
}

static unsigned capture_reason(void)
{
    return fuzz_is_capturing() ? 1u << GP_ERR_CAPTURE : 0;
}

void fuzz_op_synchronize(void)
{
    struct fuzz_pool *pool = fuzz_held();
    int s = fuzz_stream();
    bool whole = (fuzz_byte() & 1) != 0;
    gp_error error = {0};
    gp_status status;

    if (pool == NULL || pool->world.stream[s] == NULL)
        return;
    fuzz_say("stream %d%s", s, whole ? ", whole" : "");
    if (whole) /* nothing would end the wait */
        gp__sim_set_wait_mode(fuzz.world.sim, GP__SIM_WAIT_COMPLETES);
    status = gp_pool_synchronize(pool->world.pool, pool->world.stream[s], whole, &error);
    if (fuzz.times_out)
        gp__sim_set_wait_mode(fuzz.world.sim, GP__SIM_WAIT_TIMES_OUT);
    fuzz_expect(pool, status, &error, capture_reason());
}

void fuzz_op_join(void)
{
    struct fuzz_pool *pool = fuzz_held();
    int from = fuzz_stream(), to = fuzz_stream();
    gp_error error = {0};

    if (pool == NULL || pool->world.stream[from] == NULL || pool->world.stream[to] == NULL ||
        gp__sim_pending(fuzz.world.sim, fuzz.world.handle[to]) >= FUZZ_QUEUED)
        return;
    fuzz_say("stream %d waits for %d", to, from);
    fuzz_expect(
        pool,
        gp_pool_join(pool->world.pool, pool->world.stream[from], pool->world.stream[to], &error),
        &error, capture_reason());
}

/* ---- streams that end ---- */

/* The models forget stream s. */
static void forget_in_models(int s)
{
    for (unsigned p = 0; p < FUZZ_POOLS; p++) {
        struct model *model = &fuzz.pools[p].model;

        for (size_t i = 0; i < model->count; i++) {
            model->blocks[i].recorded &= ~(1u << s);
            if (model->blocks[i].stream == s)
                model->blocks[i].stream = FUZZ_NONE;
        }
        for (size_t i = 0; i < MODEL_RANGES; i++) {
            model->ranges[i].users &= ~(1u << s);
            if (model->ranges[i].stream == s)
                model->ranges[i].stream = FUZZ_NONE;
        }
    }
}

/* Forgets the handle in one pool. */
static bool forget_in_pool(struct fuzz_pool *pool, uintptr_t handle)
{
    gp_error error = {0};
    gp_status status;

    if (pool->ending && gp_pool_is_closed(pool->world.pool))
        return true; /* a closed pool knows no stream */
    status = gp_pool_forget_stream(pool->world.pool, handle, &error);
    fuzz_expect(pool, status, &error, capture_reason());
    return status == GP_OK;
}

/* True when every pool that may know the handle has let go of it. */
static bool forget_everywhere(uintptr_t handle)
{
    bool all = true;

    for (unsigned p = 0; p < FUZZ_POOLS; p++)
        if (fuzz.pools[p].alive)
            all = fuzz.pools[p].held && forget_in_pool(&fuzz.pools[p], handle) && all;
    return all;
}

static void renew(int s)
{
    if (fuzz.world.handle[s] > 2) {
        gp__sim_stream_destroy(fuzz.world.sim, fuzz.world.handle[s]);
        fuzz.world.handle[s] =
            gp__sim_stream_create(fuzz.world.sim, fuzz.blocking[s] ? GP__SIM_STREAM_BLOCKING : 0);
    }
    for (unsigned p = 0; p < FUZZ_POOLS; p++)
        fuzz.pools[p].world.handle[s] = fuzz.world.handle[s];
}

static void resolve_anew(int s)
{
    for (unsigned p = 0; p < FUZZ_POOLS; p++) {
        gp_stream_release(fuzz.pools[p].world.stream[s]);
        fuzz.pools[p].world.stream[s] = NULL;
        fuzz_resolve(&fuzz.pools[p], s);
    }
}

/* The stream ends, and a new one takes over its place, often with the very same handle. */
void fuzz_op_forget(void)
{
    int s = fuzz_stream();
    bool destroy = (fuzz_byte() & 1) != 0;
    uintptr_t handle;

    if (fuzz.capture[s] != FUZZ_NONE)
        destroy = false;
    fuzz_say("stream %d%s", s, destroy ? ", and it is destroyed" : "");
    for (unsigned p = 0; p < FUZZ_POOLS; p++)
        if (fuzz.pools[p].alive && !fuzz.pools[p].held)
            return; /* a pool that is let go may know the stream for ever */
    handle = fuzz.world.handle[s];
    destroy = forget_everywhere(handle) && destroy;
    for (int other = 0; other < WORLD_STREAMS; other++)
        if (fuzz.world.handle[other] == handle) {
            if (destroy)
                renew(other);
            forget_in_models(other);
            resolve_anew(other);
        }
}

/* A user forgets to forget: the stream is destroyed, and its handle names another one at once. */
void fuzz_op_replace(void)
{
    int s = fuzz_stream();

    fuzz_say("stream %d", s);
    if (fuzz.world.handle[s] <= 2 || fuzz.capture[s] != FUZZ_NONE || fuzz.dead)
        return;
    /* Where a device cannot tell who a handle is, the stream that was known by it is found: the user has to
     * forget. */
    fuzz_forget_faults();
    renew(s);
    forget_in_models(s);
    resolve_anew(s);
}

/* More streams than a pool has slots: each allocates, works and frees. */
void fuzz_op_crowd(void)
{
    struct fuzz_pool *pool = fuzz_held();
    uint8_t byte = fuzz_byte();
    size_t count = byte >= 0xf8 && fuzz_byte() % 32 == 7 ? FUZZ_CROWD : byte % 6;
    gp_error error = {0};

    fuzz_say("%zu streams", count);
    for (size_t i = 0; i < count && pool != NULL && !fuzz_is_capturing() && !fuzz.dead; i++) {
        gp_stream *stream = NULL;
        uintptr_t va = 0;
        gp_status status;

        if (i >= fuzz.crowd_count)
            fuzz.crowd[fuzz.crowd_count++] = gp__sim_stream_create(fuzz.world.sim, 0);
        status = gp_pool_stream(pool->world.pool, fuzz.crowd[i], &stream, &error);
        fuzz_expect(pool, status, &error, 0);
        if (status != GP_OK)
            return;
        status = gp_pool_malloc(pool->world.pool, 4096, stream, 0, &va, &error);
        fuzz_expect(pool, status, &error, FUZZ_MEMORY);
        if (status == GP_OK) {
            CHECK(!gp__sim_busy(fuzz.world.sim, va, 4096, gp_stream_id(stream)),
                  "stream %zu of the crowd got memory under work", i);
            gp__sim_launch(fuzz.world.sim, fuzz.crowd[i], va, 4096);
            status = gp_pool_free(pool->world.pool, va, NULL, 0, &error);
            fuzz_expect(pool, status, &error, 0);
        }
        gp_stream_release(stream);
    }
}

/* ---- captures ---- */

/* Every pool that the user has must know the stream: then it looks before it fences a whole context. */
static bool is_known(int s)
{
    for (unsigned p = 0; p < FUZZ_POOLS; p++)
        if (fuzz.pools[p].alive && fuzz.pools[p].world.stream[s] == NULL)
            return false;
    return true;
}

void fuzz_op_capture_begin(void)
{
    int s = fuzz_stream();
    unsigned mode = fuzz_byte() % 3;

    fuzz_say("stream %d, mode %u", s, mode);
    if (fuzz.capture[s] != FUZZ_NONE || fuzz.world.handle[s] == 0 || fuzz.dead || !is_known(s))
        return;
    for (int other = 0; other < WORLD_STREAMS; other++)
        if (fuzz.capture[other] != FUZZ_NONE && fuzz.world.handle[other] == fuzz.world.handle[s])
            return; /* two names of one stream */
    for (int g = 0; g < FUZZ_GRAPHS; g++) {
        if (fuzz.graphs[g].used)
            continue;
        fuzz.graphs[g] = (struct fuzz_graph){.used = true, .s = s, .serial = ++fuzz.serials};
        gp__sim_capture_begin(fuzz.world.sim, fuzz.world.handle[s],
                              (enum gp__sim_capture_mode)mode);
        for (int other = 0; other < WORLD_STREAMS; other++)
            if (fuzz.world.handle[other] == fuzz.world.handle[s])
                fuzz.capture[other] = g;
        return;
    }
}

void fuzz_op_capture_join(void)
{
    int s = fuzz_stream(), of = fuzz_stream();

    fuzz_say("stream %d joins the capture of %d", s, of);
    if (fuzz.capture[s] != FUZZ_NONE || fuzz.capture[of] == FUZZ_NONE ||
        fuzz.world.handle[s] <= 2 || !is_known(s))
        return;
    gp__sim_capture_join(fuzz.world.sim, fuzz.world.handle[s], fuzz.world.handle[of]);
    fuzz.capture[s] = fuzz.capture[of];
}

static void forget_captures(int g)
{
    for (int s = 0; s < WORLD_STREAMS; s++)
        if (fuzz.capture[s] == g)
            fuzz.capture[s] = FUZZ_NONE;
    fuzz.graphs[g].s = FUZZ_NONE;
}

static void end_capture(int g)
{
    struct fuzz_graph *graph = &fuzz.graphs[g];

    graph->made = gp__sim_capture_end_graph(fuzz.world.sim, fuzz.world.handle[graph->s]);
    CHECK(graph->made != NULL || graph->spoiled, "the capture on stream %d was invalidated",
          graph->s);
    forget_captures(g);
    if (graph->made == NULL)
        *graph = (struct fuzz_graph){0};
}

void fuzz_op_capture_end(void)
{
    int s = fuzz_stream();

    fuzz_say("stream %d", s);
    if (fuzz.capture[s] != FUZZ_NONE)
        end_capture(fuzz.capture[s]);
}

/* A stream that joined the capture is destroyed: the capture is invalid. */
void fuzz_op_capture_spoil(void)
{
    int s = fuzz_stream();
    uintptr_t stranger;

    fuzz_say("stream %d", s);
    if (fuzz.capture[s] == FUZZ_NONE)
        return;
    stranger = gp__sim_stream_create(fuzz.world.sim, 0);
    gp__sim_capture_join(fuzz.world.sim, stranger, fuzz.world.handle[s]);
    gp__sim_stream_destroy(fuzz.world.sim, stranger);
    fuzz.graphs[fuzz.capture[s]].spoiled = true;
}

/* A stream that growpool has never met captures, while nobody makes a call that its caller would have to
 * answer for: neither the reaper nor the ladder may fence the whole context. */
void fuzz_op_stranger(void)
{
    unsigned inside = fuzz.inside;
    uintptr_t stranger;

    fuzz_say("it captures");
    if (fuzz.dead)
        return;
    stranger = gp__sim_stream_create(fuzz.world.sim, GP__SIM_STREAM_BLOCKING);
    gp__sim_capture_begin(fuzz.world.sim, stranger, GP__SIM_CAPTURE_GLOBAL);
    fuzz.inside = FUZZ_DEEPEST; /* callbacks make no explicit calls either */
    fuzz_reaper_turn();
    fuzz_op_malloc();
    fuzz_reaper_turn();
    fuzz.inside = inside;
    CHECK(gp__sim_capture_end(fuzz.world.sim, stranger), "a stranger's capture was invalidated");
    gp__sim_stream_destroy(fuzz.world.sim, stranger);
}

static int pick_graph(void)
{
    int g = (int)fuzz_below(FUZZ_GRAPHS);

    for (int i = 0; i < FUZZ_GRAPHS; i++, g = (g + 1) % FUZZ_GRAPHS)
        if (fuzz.graphs[g].used && fuzz.graphs[g].made != NULL)
            return g;
    return FUZZ_NONE;
}

void fuzz_op_graph_launch(void)
{
    int g = pick_graph(), s = fuzz_stream();

    fuzz_say("graph %d on stream %d", g, s);
    if (g != FUZZ_NONE && fuzz.capture[s] == FUZZ_NONE && !fuzz.dead &&
        gp__sim_pending(fuzz.world.sim, fuzz.world.handle[s]) < FUZZ_QUEUED)
        gp__sim_graph_launch(fuzz.world.sim, fuzz.graphs[g].made, fuzz.world.handle[s]);
}

static void destroy_graph(int g)
{
    gp__sim_graph_destroy(fuzz.world.sim, fuzz.graphs[g].made);
    fuzz.graphs[g] = (struct fuzz_graph){0};
}

void fuzz_op_graph_destroy(void)
{
    int g = pick_graph();

    fuzz_say("graph %d", g);
    if (g != FUZZ_NONE)
        destroy_graph(g);
}

/* Every stream's work is gone, and so are captures. */
void fuzz_op_kill(void)
{
    bool sure = fuzz_byte() % 4 == 1;

    fuzz_say("the context dies: %s", sure ? "yes" : "no");
    if (!sure || fuzz.inside > 0)
        return;
    gp__sim_kill_context(fuzz.world.sim);
    fuzz.dead = true;
    for (int g = 0; g < FUZZ_GRAPHS; g++) {
        if (!fuzz.graphs[g].used || fuzz.graphs[g].s == FUZZ_NONE)
            continue;
        forget_captures(g);
        fuzz.graphs[g] = (struct fuzz_graph){0};
    }
}

void fuzz_graphs_end(void)
{
    for (int g = 0; g < FUZZ_GRAPHS; g++) {
        if (fuzz.graphs[g].used && fuzz.graphs[g].s != FUZZ_NONE)
            end_capture(g);
        if (fuzz.graphs[g].used)
            destroy_graph(g);
    }
    gp__sim_complete_all(fuzz.world.sim);
}
