/* SPDX-License-Identifier: Apache-2.0
 *
 * Arenas: the memory that blocks of one capture have had. It owns HELD spans, and knows when the graph is
 * gone; it never maps, and never asks what a graph does with the memory.
 *
 * WHY AN ARENA. A replay uses the captured addresses whenever its user likes, on whatever stream, so
 * memory that a captured block had cannot go to anybody outside the capture while a graph can be launched.
 * Inside the capture it can: work is ordered as it was captured, on one stream. The graph holds a user
 * object; the driver calls gone() when the last executable is destroyed and its launches have completed
 * (measured on an H200, driver 580.159: an executable destroyed under two running launches calls it when
 * the second ends), so the memory has no owner then but those who used it outside the capture.
 *
 * gone() runs on a thread of the driver's and only sets a flag; pools look at it when they look at fences.
 */
#include "pool.h"

#include "../backing/memory.h"

#define HELD_TRIED 16 /* spans that a request looks at */

static bool is_gone(const struct gp__arena *arena)
{
    return __atomic_load_n(&arena->gone, __ATOMIC_ACQUIRE);
}

void gp__arena_release(struct gp__arena *arena)
{
    if (arena == NULL)
        return;
    if (__atomic_sub_fetch(&arena->references, 1, __ATOMIC_ACQ_REL) == 0)
        gp__free(arena);
}

static void graph_is_gone(void *context)
{
    struct gp__arena *arena = context;
    __atomic_store_n(&arena->gone, true, __ATOMIC_RELEASE);
    gp__arena_release(arena);
}

/* ---- finding and making -------------------------------------------------------------------- */

/* lock: held. */
static struct gp__arena *find(const gp_pool *pool, uint64_t capture)
{
    struct gp__arena *arena = pool->arenas;
    while (arena != NULL && (arena->capture != capture || is_gone(arena)))
        arena = arena->next;
    return arena;
}

/* Two threads of one capture may each make one: then the second is used. lock: dropped. */
static gp_status make_arena(gp_pool *pool, const gp_stream *stream, uint64_t capture,
                            struct gp__arena **out, gp_error *error)
{
    gp_device *device = pool->device;
    struct gp__arena *arena = gp__calloc(1, sizeof *arena);
    if (arena == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to note a capture");
    arena->capture = capture;
    arena->references = 3; /* the graph, the pool's list, the caller */
    gp_status status =
        device->driver->capture_keep(device, &stream->key, graph_is_gone, arena, error);
    if (status != GP_OK) {
        gp__free(arena);
        return status;
    }
    gp__mutex_lock(&pool->lock);
    arena->next = pool->arenas;
    pool->arenas = arena;
    gp__mutex_unlock(&pool->lock);
    *out = arena;
    return GP_OK;
}

gp_status gp__arena_of(gp_pool *pool, const gp_stream *stream, bool make, struct gp__arena **out,
                       gp_error *error)
{
    gp_device *device = pool->device;
    uint64_t capture = 0;
    *out = NULL;
    gp_status status = device->driver->capture_id(device, &stream->key, &capture, error);
    if (status != GP_OK || capture == 0)
        return status;
    gp__mutex_lock(&pool->lock);
    *out = find(pool, capture);
    if (*out != NULL)
        __atomic_add_fetch(&(*out)->references, 1, __ATOMIC_RELAXED);
    gp__mutex_unlock(&pool->lock);
    if (*out != NULL)
        return GP_OK;
    return make ? make_arena(pool, stream, capture, out, error) : GP_NOT_READY;
}

/* ---- held memory --------------------------------------------------------------------------- */

static void file(struct gp__arena *arena, struct gp__span *span)
{
    span->node.bytes = span->bytes;
    span->node.va = span->va;
    gp__tree_insert(&arena->held, &span->node);
}

/* Neighbours of one arena and one stream melt. */
static bool can_melt(const struct gp__span *a, const struct gp__span *b)
{
    return a != NULL && b != NULL && a->state == GP_SPAN_HELD && b->state == GP_SPAN_HELD &&
           a->arena == b->arena && a->owners.slots == b->owners.slots;
}

void gp__arena_hold(gp_pool *pool, struct gp__arena *arena, struct gp__span *span,
                    struct gp__owners owners)
{
    span->state = GP_SPAN_HELD;
    span->arena = arena;
    span->owners = owners;
    pool->held_bytes += span->bytes;
    if (can_melt(span, span->next)) {
        gp__tree_remove(&arena->held, &span->next->node);
        span->owners = gp__owners_merge(span->owners, span->next->owners);
        gp__span_join(pool, span);
    }
    if (can_melt(span->previous, span)) {
        span = span->previous;
        gp__tree_remove(&arena->held, &span->node);
        span->owners = gp__owners_merge(span->owners, span->next->owners);
        gp__span_join(pool, span);
    }
    file(arena, span);
}

static void unhold(gp_pool *pool, struct gp__arena *arena, struct gp__span *span)
{
    gp__tree_remove(&arena->held, &span->node);
    pool->held_bytes -= span->bytes;
}

struct gp__span *gp__arena_take(gp_pool *pool, struct gp__arena *arena, size_t bytes,
                                const gp_stream *stream)
{
    struct gp__tree_node *node = gp__tree_at_least(&arena->held, bytes, 0);
    for (int i = 0; i < HELD_TRIED && node != NULL; i++) {
        struct gp__span *span = (struct gp__span *)node;
        if (gp__span_is_usable(pool, span->owners, stream)) {
            unhold(pool, arena, span);
            return span;
        }
        node = gp__tree_at_least(&arena->held, node->bytes, node->va + 1);
    }
    return NULL;
}

void gp__arena_join(struct gp__arena *arena)
{
    arena->blocks++;
    __atomic_add_fetch(&arena->references, 1, __ATOMIC_RELAXED);
}

bool gp__arena_leave(struct gp__arena *arena)
{
    bool ours = !is_gone(arena); /* then the pool's list holds it too */
    arena->blocks--;
    gp__arena_release(arena);
    return ours;
}

/* ---- the end of a graph -------------------------------------------------------------------- */

static void free_held(gp_pool *pool, struct gp__arena *arena)
{
    struct gp__tree_node *node;
    while ((node = gp__tree_at_least(&arena->held, 0, 0)) != NULL) {
        struct gp__span *span = (struct gp__span *)node;
        unhold(pool, arena, span);
        span->arena = NULL;
        gp__mapping_count(pool, span->segment, span->va, span->bytes, false);
        gp__span_free(pool, span, span->owners);
    }
}

void gp__arenas_sweep(gp_pool *pool)
{
    for (struct gp__arena **link = &pool->arenas; *link != NULL;) {
        struct gp__arena *arena = *link;
        if (!is_gone(arena)) {
            link = &arena->next;
            continue;
        }
        free_held(pool, arena);
        *link = arena->next;
        gp__arena_release(arena); /* blocks that name it have references of their own */
    }
}

bool gp__arenas_alive(const gp_pool *pool)
{
    for (const struct gp__arena *arena = pool->arenas; arena != NULL; arena = arena->next) {
        if (!is_gone(arena) && (arena->blocks > 0 || arena->held.root != NULL))
            return true;
    }
    return false;
}

void gp__arenas_drop(gp_pool *pool)
{
    while (pool->arenas != NULL) {
        struct gp__arena *arena = pool->arenas;
        pool->arenas = arena->next;
        gp__arena_release(arena);
    }
}
