/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on blocks: allocate, use, share, export, free, and what users get wrong. They keep to what a
 * user may do: work is launched on a block only by streams that have a right to it.
 */
#include "fuzz.h"

#include <pthread.h>

/* A block of the pool, or NULL. */
static struct model_block *pick(struct fuzz_pool *pool, size_t *index)
{
    if (pool == NULL || pool->model.count == 0)
        return NULL;
    *index = fuzz_below(pool->model.count);
    return &pool->model.blocks[*index];
}

/* The number of the capture that the stream is part of; 0: none. */
static unsigned capture_of(int s)
{
    return fuzz.capture[s] == FUZZ_NONE ? 0 : fuzz.graphs[fuzz.capture[s]].serial;
}

/* Whether stream s may work on the block. What is captured must belong to the graph. */
static bool may_use(const struct fuzz_pool *pool, const struct model_block *block, int s)
{
    bool known = (block->recorded & 1u << s) != 0 || (block->exported && block->pins > 0);
    unsigned capture = capture_of(s);

    return known && !pool->world.pool->closing && (capture == 0 || block->capture == capture) &&
           gp__sim_pending(fuzz.world.sim, fuzz.world.handle[s]) < FUZZ_QUEUED;
}

static bool launch(const struct fuzz_pool *pool, const struct model_block *block, int s)
{
    bool may = may_use(pool, block, s);

    if (may)
        fuzz_launch(s, block->va, block->rounded);
    return may;
}

/* ---- allocating ---- */

/* What the model cannot say about a block that was just handed out: nobody's graph has it. */
static void check_handed(const struct fuzz_pool *pool, uintptr_t va, size_t bytes, int s)
{
    uintptr_t handle = fuzz.world.handle[s];
    unsigned capture = capture_of(s);
    size_t rounded = (bytes + GP_ALIGNMENT - 1) / GP_ALIGNMENT * GP_ALIGNMENT;

    if (bytes == 0)
        return;
    CHECK(!fuzz_is_leaving(pool), "a pool that is being closed gave a block");
    CHECK(!gp__sim_in_graph(fuzz.world.sim, va, rounded, handle),
          "block %#zx of %zu bytes is in a graph that lives", (size_t)va, bytes);
    CHECK(capture == 0 || !gp__sim_busy(fuzz.world.sim, va, rounded, 0),
          "block %#zx of %zu bytes went to a capture under pending work", (size_t)va, bytes);
}

static void note_block(struct fuzz_pool *pool, uintptr_t va, size_t bytes, int s, unsigned flags,
                       bool use)
{
    check_handed(pool, va, bytes, s);
    model_add(&pool->model, va, bytes, s, flags);
    for (size_t i = 0; i < pool->model.count; i++) {
        struct model_block *block = &pool->model.blocks[i];

        if (bytes == 0 || block->va != va)
            continue;
        block->capture = capture_of(s);
        /* All of a graph's memory is in it, so that the simulator knows what a replay touches. */
        if (use || block->capture != 0)
            launch(pool, block, s);
    }
}

struct request {
    size_t bytes;
    int s;
    unsigned flags;
    bool use;
};

static bool read_request(struct fuzz_pool *pool, struct request *request)
{
    uint8_t how;

    request->bytes = fuzz_block_size();
    how = fuzz_byte();
    request->s = how % WORLD_STREAMS;
    request->flags = (how & 0x10) != 0 ? GP_BLOCK_OBJECT : 0;
    request->use = (how & 0x20) == 0;
    fuzz_say("%zu bytes, stream %d%s%s", request->bytes, request->s,
             request->flags != 0 ? ", an object's" : "", request->use ? ", used" : "");
    return pool != NULL && pool->world.stream[request->s] != NULL &&
           pool->model.count < FUZZ_BLOCKS;
}

void fuzz_op_malloc(void)
{
    struct fuzz_pool *pool = fuzz_held();
    struct request request;
    gp_error error = {0};
    uintptr_t va = UINTPTR_MAX;
    gp_pool_stats before;
    gp_status status;

    if (!read_request(pool, &request))
        return;
    before = world_stats(&pool->world);
    status = gp_pool_malloc(pool->world.pool, request.bytes, pool->world.stream[request.s],
                            request.flags, &va, &error);
    fuzz_expect(
        pool, status, &error,
        FUZZ_MEMORY | (request.bytes > SIZE_MAX / 2 ? 1u << GP_ERR_ARGUMENT : 0) |
            (fuzz.capture[request.s] != FUZZ_NONE && fuzz.graphs[fuzz.capture[request.s]].spoiled
                 ? 1u << GP_ERR_CAPTURE
                 : 0));
    fuzz_check_growth(pool, status, &before);
    if (status == GP_OK) {
        note_block(pool, va, request.bytes, request.s, request.flags, request.use);
        return;
    }
    CHECK(va == UINTPTR_MAX, "malloc failed and yet wrote its output");
}

void fuzz_op_try_malloc(void)
{
    struct fuzz_pool *pool = fuzz_held();
    struct request request;
    gp_error error = {0};
    uintptr_t va = UINTPTR_MAX;
    uint64_t calls = fuzz.world.alloc_calls + fuzz.world.free_calls;
    bool spoiled;
    gp_status status;

    if (!read_request(pool, &request))
        return;
    spoiled = fuzz.capture[request.s] != FUZZ_NONE && fuzz.graphs[fuzz.capture[request.s]].spoiled;
    status = gp_pool_try_malloc(pool->world.pool, request.bytes, pool->world.stream[request.s],
                                request.flags, &va, &error);
    fuzz_expect(pool, status, &error,
                1u << GP_NOT_READY | (request.bytes > SIZE_MAX / 2 ? 1u << GP_ERR_ARGUMENT : 0) |
                    (spoiled ? 1u << GP_ERR_CAPTURE : 0));
    CHECK(fuzz.world.alloc_calls + fuzz.world.free_calls == calls, "the fast path called out");
    if (status == GP_OK)
        note_block(pool, va, request.bytes, request.s, request.flags, request.use);
}

/* ---- freeing ---- */

/* The stream of the last use: `how` chooses one, or the block's own. */
static int last_stream(const struct fuzz_pool *pool, const struct model_block *block, uint8_t how)
{
    int s = how % WORLD_STREAMS;

    if ((how & 0x10) == 0)
        return FUZZ_NONE;
    if ((how & 0x20) == 0 && block->pins == 0 && capture_of(s) == 0 && !pool->world.pool->closing &&
        pool->world.stream[s] != NULL &&
        gp__sim_pending(fuzz.world.sim, fuzz.world.handle[s]) < FUZZ_QUEUED)
        fuzz_launch(s, block->va, block->rounded);
    return pool->world.stream[s] != NULL ? s : FUZZ_NONE;
}

static void check_free(struct fuzz_pool *pool, size_t index, gp_status status,
                       const gp_error *error)
{
    bool pinned = pool->model.blocks[index].pins > 0;

    fuzz_expect(pool, status, error, pinned ? 1u << GP_ERR_PINNED : 0);
    CHECK(status != GP_OK || !pinned, "exported memory was freed");
}

void fuzz_op_free(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    struct model_block *block = pick(pool, &index);
    struct model_block copy;
    gp_error error = {0};
    gp_status status;
    int s;

    if (block == NULL || block->abandoned)
        return;
    copy = *block;
    s = last_stream(pool, block, fuzz_byte());
    fuzz_say("block %zu (%#zx), stream %d", index, (size_t)block->va, s);
    status = gp_pool_free(pool->world.pool, copy.va, s < 0 ? NULL : pool->world.stream[s],
                          copy.flags, &error);
    check_free(pool, index, status, &error);
    if (status == GP_OK)
        model_remove(&pool->model, index);
}

struct elsewhere {
    gp_pool *pool;
    uintptr_t va;
    unsigned flags;
    gp_error error;
    gp_status status;
};

static void *free_there(void *argument)
{
    struct elsewhere *work = argument;

    work->status = gp_pool_free(work->pool, work->va, NULL, work->flags, &work->error);
    return NULL;
}

/* On a thread that cannot fence this one's default stream. */
void fuzz_op_free_elsewhere(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    struct model_block *block = pick(pool, &index);
    struct elsewhere work = {0};
    pthread_t thread;

    if (block == NULL || block->abandoned)
        return;
    fuzz_say("block %zu (%#zx)", index, (size_t)block->va);
    work.pool = pool->world.pool;
    work.va = block->va;
    work.flags = block->flags;
    CHECK(pthread_create(&thread, NULL, free_there, &work) == 0, "no thread");
    pthread_join(thread, NULL);
    check_free(pool, index, work.status, &work.error);
    if (work.status == GP_OK)
        model_remove(&pool->model, index);
}

/* Addresses that are no block, and the wrong kind of free. */
void fuzz_op_bad_free(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    const struct model_block *block = pick(pool, &index);
    uint8_t how = fuzz_byte();
    uintptr_t va;
    unsigned flags;
    gp_error error = {0};
    gp_status status;

    if (block == NULL || fuzz_is_leaving(pool))
        return;
    va = block->va;
    flags = block->flags;
    if ((how & 1) != 0)
        flags ^= GP_BLOCK_OBJECT;
    else
        va += (how & 2) != 0 ? 1 : 256;
    fuzz_say("%#zx with flags %u", (size_t)va, flags);
    status = gp_pool_free(pool->world.pool, va, NULL, flags, &error);
    fuzz_refused(status, &error);
    status = gp_pool_record_stream(pool->world.pool, va, pool->world.stream[0], &error);
    CHECK(status == GP_ERR_ARGUMENT || va == block->va, "an address inside a block was recorded");
    gp_pool_abandon(pool->world.pool, va, flags); /* does nothing */
}

/* ---- using ---- */

void fuzz_op_launch(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t index = 0;
    const struct model_block *block = pick(pool, &index);
    int s = fuzz_stream();

    if (block == NULL)
        return;
    fuzz_say("block %zu (%#zx), stream %d", index, (size_t)block->va, s);
    launch(pool, block, s);
}

void fuzz_op_record(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    struct model_block *block = pick(pool, &index);
    uint8_t how = fuzz_byte();
    int s = how % WORLD_STREAMS;
    gp_error error = {0};
    gp_status status;

    if (block == NULL || pool->world.stream[s] == NULL || block->abandoned)
        return;
    fuzz_say("block %zu (%#zx), stream %d", index, (size_t)block->va, s);
    status = gp_pool_record_stream(pool->world.pool, block->va, pool->world.stream[s], &error);
    fuzz_expect(pool, status, &error, 0);
    if (status != GP_OK)
        return;
    block->recorded |= 1u << s;
    if ((how & 0x10) == 0)
        launch(pool, block, s);
}

void fuzz_op_copy(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t first = 0, second = 0, bytes;
    const struct model_block *to = pick(pool, &first), *from = pick(pool, &second);
    int s = fuzz_stream();
    gp_error error = {0};
    gp_status status;

    if (to == NULL || pool->world.stream[s] == NULL || fuzz_is_implicit(s) ||
        !may_use(pool, to, s) || !may_use(pool, from, s))
        return;
    bytes = to->rounded < from->rounded ? to->rounded : from->rounded;
    fuzz_say("%zu bytes from block %zu to %zu, stream %d", bytes, second, first, s);
    status = gp_pool_copy(pool->world.pool, to->va, from->va, bytes, pool->world.stream[s], &error);
    fuzz_expect(pool, status, &error, fuzz.capture[s] != FUZZ_NONE ? 1u << GP_ERR_CAPTURE : 0);
}

void fuzz_op_fill(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    const struct model_block *to = pick(pool, &index);
    int s = fuzz_stream();
    gp_error error = {0};
    gp_status status;

    if (to == NULL || pool->world.stream[s] == NULL || fuzz_is_implicit(s) || !may_use(pool, to, s))
        return;
    fuzz_say("block %zu, stream %d", index, s);
    status = gp_pool_fill(pool->world.pool, to->va, to->rounded, 7, pool->world.stream[s], &error);
    fuzz_expect(pool, status, &error, fuzz.capture[s] != FUZZ_NONE ? 1u << GP_ERR_CAPTURE : 0);
}

/* ---- exports ---- */

void fuzz_op_pin(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    struct model_block *block = pick(pool, &index);
    bool unknown = (fuzz_byte() & 1) != 0;
    gp_error error = {0};
    gp_status status;

    if (block == NULL || block->abandoned || block->pins >= 3)
        return;
    fuzz_say("block %zu (%#zx)%s", index, (size_t)block->va, unknown ? ", users unknown" : "");
    status = gp_pool_pin(pool->world.pool, block->va, unknown, &error);
    fuzz_expect(pool, status, &error, 0);
    if (status != GP_OK)
        return;
    block->pins++;
    block->exported = block->exported || unknown;
}

static void unpin(struct fuzz_pool *pool, size_t index)
{
    struct model_block *block = &pool->model.blocks[index];
    uintptr_t va = block->va;
    bool gone;

    if (--block->pins > 0) {
        gp_pool_unpin(pool->world.pool, va);
        return;
    }
    block->exported = false;
    gone = block->abandoned;
    if (gone)
        model_remove(&pool->model, index);
    gp_pool_unpin(pool->world.pool, va);
}

/* Also of a pool that its user let go of: each pin holds it. */
void fuzz_op_unpin(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t start = fuzz_byte();

    fuzz_say("one of %zu blocks", pool->model.count);
    for (size_t i = 0; pool->alive && i < pool->model.count; i++) {
        size_t index = (start + i) % pool->model.count;

        if (pool->model.blocks[index].pins == 0)
            continue;
        unpin(pool, index);
        return;
    }
}

void fuzz_unpin_all(struct fuzz_pool *pool)
{
    for (size_t i = 0; pool->alive && i < pool->model.count;) {
        if (pool->model.blocks[i].pins > 0)
            unpin(pool, i);
        else
            i++;
    }
}

void fuzz_op_abandon(void)
{
    struct fuzz_pool *pool = fuzz_held();
    size_t index = 0;
    struct model_block *block = pick(pool, &index);

    if (block == NULL || block->abandoned)
        return;
    fuzz_say("block %zu (%#zx)", index, (size_t)block->va);
    gp_pool_abandon(pool->world.pool, block->va, block->flags);
    if (block->pins > 0)
        block->abandoned = true;
    else
        model_remove(&pool->model, index);
}
