/* SPDX-License-Identifier: Apache-2.0
 *
 * The ladder: what a request tries, and in which order, when memory is short. Pure policy over grow.c and
 * retire.c; the rungs are described in growpool.h.
 */
#include "quick.h"

/* How long the ladder waits for chunks that other threads are giving back. */
#define DELIVERIES_NS UINT64_C(100000000)

/* How often a growth looks whether streams are at rest: together about a microsecond each, so no longer than to
 * create and map one chunk takes. Not by the clock, so that the same calls do the same. */
#define LOOKS 16

enum rung { RUNG_WANTED, RUNG_NEEDED, RUNG_TRIMMED, RUNG_WAITED, RUNG_HALVED, RUNG_NONE };

/* Gives idle memory back, oldest first, but for chunks that fit into what is lacking: those move there. What
 * comes free is this request's alone. */
static size_t trim_idle(struct gp__growth *growth, size_t goal, bool move, gp_status *status,
                        gp_error *error)
{
    gp_pool *pool = growth->pool;
    struct gp__retired *list = NULL;
    size_t before = growth->credit.reclaimed;
    gp__stock_return(pool, &growth->credit); /* it was no help */
    growth->credit.stock_room = move ? growth->lacking : 0;
    gp__quick_lock(pool);
    gp__retire(pool, goal, SIZE_MAX, GP__RETIRE_SEEN, &list);
    gp__retire_hold(pool, list);
    gp__mutex_unlock(&pool->lock);
    if (list != NULL && gp__retire_finish(pool, list, GP__REAP_SEEN, &pool->interrupt,
                                          &growth->credit, NULL, error) == GP_ERR_INTERRUPTED)
        *status = GP_ERR_INTERRUPTED;
    return growth->credit.reclaimed - before;
}

/* For each slot the highest ticket that a free range waits for, where a fence on its streams can do; 0
 * for none. lock: held. */
static void waiting_tickets(gp_pool *pool, uint64_t tickets[GP__SLOT_COUNT])
{
    for (int bin = 0; bin < GP__BIN_COUNT; bin++) {
        for (struct gp__span *span = pool->bins[bin].oldest; span != NULL;
             span = span->queue_next) {
            if (gp__timeline_is_unseen(&pool->timeline, span->owners))
                continue;
            for (uint64_t left = span->owners.slots; left != 0; left &= left - 1) {
                int slot = __builtin_ctzll(left);
                if (tickets[slot] < span->owners.ticket)
                    tickets[slot] = span->owners.ticket;
            }
        }
    }
}

/* Chunks that another thread is giving back may be what is missing; a callback may also be waiting for
 * us, so this is short. True if one was done. lock: held, dropped inside. */
static bool wait_for_deliveries(gp_pool *pool, gp_status *status, gp_error *error)
{
    uint64_t deadline = gp__monotonic_ns() + DELIVERIES_NS;
    size_t before = pool->retiring_bytes;
    while (pool->deliveries > 0 && *status == GP_OK && gp__monotonic_ns() < deadline)
        *status = gp__pool_sleep(pool, &pool->interrupt, error);
    return pool->retiring_bytes < before;
}

/* Waits for the slots one by one, so that one that captures does not keep the others from passing. True
 * if there was anything to wait for. */
static bool wait_for_slots(gp_pool *pool, const uint64_t tickets[GP__SLOT_COUNT], gp_status *status,
                           gp_error *error)
{
    bool any = false;
    for (int slot = 0; slot < GP__SLOT_COUNT && *status == GP_OK; slot++) {
        if (tickets[slot] == 0)
            continue;
        any = true;
        struct gp__owners owners = {UINT64_C(1) << slot, tickets[slot]};
        if (gp__timeline_wait(&pool->timeline, owners, GP__REACH_SEEN, &pool->interrupt, error) ==
            GP_ERR_INTERRUPTED)
            *status = GP_ERR_INTERRUPTED;
    }
    return any;
}

/* Waits for the tickets of free ranges, then finishes what is retiring. True if anything moved. */
static bool wait_for_tickets(struct gp__growth *growth, gp_status *status, gp_error *error)
{
    gp_pool *pool = growth->pool;
    uint64_t tickets[GP__SLOT_COUNT] = {0};
    struct gp__retired *list = NULL;
    gp__quick_lock(pool);
    bool moved = wait_for_deliveries(pool, status, error);
    waiting_tickets(pool, tickets);
    gp__retiring_take(pool, &list);
    gp__retire_hold(pool, list);
    gp__mutex_unlock(&pool->lock);
    moved = wait_for_slots(pool, tickets, status, error) || moved;
    if (list == NULL)
        return moved;
    bool stopped = *status != GP_OK;
    gp_status reaped =
        gp__retire_finish(pool, list, stopped ? GP__REAP_READY : GP__REAP_SEEN, &pool->interrupt,
                          &growth->credit, NULL, stopped ? NULL : error);
    if (reaped == GP_ERR_INTERRUPTED)
        *status = reaped;
    return true;
}

/* ---- what costs no wait ------------------------------------------------------------------------- */

/* The streams whose free memory would serve if they have passed. lock: held. */
static uint64_t serving_slots(const struct gp__growth *growth)
{
    const gp_pool *pool = growth->pool;
    uint64_t slots = 0;
    for (int bin = 0; bin < GP__BIN_COUNT; bin++) {
        const struct gp__tree_node *node =
            gp__tree_at_least(&pool->bins[bin].tree, growth->bytes, 0);
        if (node != NULL && bin != growth->stream->slot)
            slots |= ((const struct gp__span *)node)->owners.slots & ~GP__UNKNOWN;
    }
    return slots;
}

/* The streams for which a growth would wait if it could, and in `list` what it may take from elsewhere
 * without waiting. Nothing of either when free memory is there. lock: held. */
static uint64_t look_around(struct gp__growth *growth, struct gp__retired **list)
{
    gp_pool *pool = growth->pool;
    gp__span_settle(pool);
    if (gp__span_find(pool, growth->bytes, growth->taker) != NULL)
        return 0;
    uint64_t slots = serving_slots(growth);
    struct gp__place place = gp__place_find(pool, growth->bytes, growth->taker);
    if (place.first == NULL ||
        !gp__plan_is_wasteful(pool, growth->bytes, pool->physical + place.new_bytes))
        return slots;
    uintptr_t from = place.first->va, to = place.first->va + growth->bytes;
    slots |= gp__retire_slots(pool, place.new_bytes, from, to);
    if (slots == 0)
        gp__retire_movable(pool, place.new_bytes, from, to, list);
    growth->credit.stock_room = place.new_bytes;
    return slots;
}

/* Before a block grows the pool: free memory of other streams, and idle chunks elsewhere. Fences tell what is
 * at rest; an idle stream passes its own within microseconds, and for a busy one nobody waits. Then chunks
 * that everybody has passed move to where they are needed: to unmap and map costs what it costs to create
 * and map, and the pool does not grow. */
static void look_for_rest(struct gp__growth *growth)
{
    gp_pool *pool = growth->pool;
    struct gp__retired *list = NULL;
    uint64_t slots = 1, fenced = 0;
    for (int looked = 0; looked < LOOKS && slots != 0; looked++) {
        gp__quick_lock(pool);
        slots = look_around(growth, &list);
        struct gp__owners owners = {slots & ~fenced, gp__timeline_now(&pool->timeline)};
        gp__retire_hold(pool, list);
        gp__mutex_unlock(&pool->lock);
        fenced |= slots;
        if (owners.slots != 0)
            gp__timeline_record(&pool->timeline, owners, NULL);
    }
    if (list != NULL)
        gp__retire_finish(pool, list, GP__REAP_READY, NULL, &growth->credit, NULL, NULL);
}

/* ---- the rungs ------------------------------------------------------------------------------------ */

/* Whether giving back everything idle could make room under the limit. */
static bool can_meet_limit(struct gp__growth *growth)
{
    gp_pool *pool = growth->pool;
    gp__quick_lock(pool);
    size_t least =
        growth->range != NULL
            ? gp__commit_least_physical(pool, growth->range, growth->parts, growth->part_count)
            : gp__place_least_physical(pool, growth->bytes);
    bool possible = least <= pool->limit;
    gp__mutex_unlock(&pool->lock);
    return possible;
}

/* Does what the rung stands for; true when another attempt makes sense. */
static bool climb(struct gp__growth *growth, enum rung rung, gp_status *status, gp_error *error)
{
    bool limit = growth->obstacle == GP__OBSTACLE_LIMIT;
    bool backing = growth->obstacle == GP__OBSTACLE_BACKING;
    switch (rung) {
    case RUNG_NEEDED:
        growth->step = false;
        return backing && growth->stepped > 0;
    case RUNG_TRIMMED:
        return trim_idle(growth, limit ? growth->deficit : SIZE_MAX, limit && growth->range == NULL,
                         status, error) > 0;
    case RUNG_WAITED:
        return wait_for_tickets(growth, status, error);
    case RUNG_HALVED:
        growth->halve = true;
        /* Waiting may have made more memory idle. */
        return trim_idle(growth, SIZE_MAX, false, status, error) > 0 ||
               (backing && (growth->pool->chunk_size == 0 || gp__in_emergency()));
    default:
        return false;
    }
}

/* What the caller can do about the limit beyond the obvious. lock: held. */
static const char *limit_advice(const gp_pool *pool)
{
    if (pool->page > pool->limit)
        return "; the limit is smaller than one chunk";
    if (pool->unreturned_bytes > 0)
        return "; chunks whose free failed count too, until return_unreturned";
    return "";
}

/* What the caller is told when no rung is left. */
static gp_status give_up(struct gp__growth *growth, gp_status status, gp_error *error)
{
    gp_pool *pool = growth->pool;
    char wanted[32], physical[32], used[32], limit[32];
    gp__quick_lock(pool);
    size_t held = pool->physical - growth->credit.bytes;
    gp__size_text(growth->bytes, wanted);
    gp__size_text(held, physical);
    gp__size_text(pool->used_bytes, used);
    gp__size_text(pool->limit, limit);
    if (growth->obstacle == GP__OBSTACLE_LIMIT)
        gp_error_set(error, GP_ERR_LIMIT,
                     "pool '%s' has no room for %s: it holds %s of physical memory, %s of it in "
                     "blocks, under a limit of %s; free blocks or raise the limit%s",
                     pool->name, wanted, physical, used, limit, limit_advice(pool));
    else if (growth->obstacle == GP__OBSTACLE_BACKING)
        gp_error_set(error, GP_ERR_OUT_OF_MEMORY,
                     "the backing of pool '%s' had no memory for %s (asked %u time%s); the pool "
                     "holds %s of physical memory, %s of it in blocks; free blocks, trim other "
                     "pools, or supply more",
                     pool->name, wanted, growth->refusals, growth->refusals == 1 ? "" : "s",
                     physical, used);
    if (growth->obstacle != GP__OBSTACLE_NONE)
        gp__pool_figures(pool, growth->bytes, held, error);
    gp__mutex_unlock(&pool->lock);
    return status;
}

static gp_status attempt_all(struct gp__growth *growth, uintptr_t *out, gp_error *error)
{
    gp_error details = {0};
    if (growth->range == NULL && growth->arena == NULL)
        look_for_rest(growth);
    gp_status status = gp__grow_attempt(growth, out, &details);
    if (growth->obstacle == GP__OBSTACLE_LIMIT && !can_meet_limit(growth))
        return give_up(growth, status, error);
    for (enum rung rung = RUNG_NEEDED;
         status != GP_OK && growth->obstacle != GP__OBSTACLE_NONE && rung != RUNG_NONE; rung++) {
        gp_status climbed = GP_OK;
        gp_error stopped = {0};
        bool again = climb(growth, rung, &climbed, &stopped);
        gp_status forked = gp__check_fork(&stopped); /* by a callback: the child stops climbing */
        if (forked != GP_OK)
            climbed = forked;
        if (climbed == GP_ERR_INTERRUPTED || forked != GP_OK) {
            growth->obstacle = GP__OBSTACLE_NONE;
            details = stopped;
            status = climbed;
        } else if (again) {
            status = gp__grow_attempt(growth, out, &details);
        }
    }
    if (status != GP_OK) {
        if (error != NULL)
            *error = details;
        return give_up(growth, status, error);
    }
    return GP_OK;
}

gp_status gp__ladder(struct gp__growth *growth, uintptr_t *out, gp_error *error)
{
    gp_pool *pool = growth->pool;
    struct gp__entry entry;
    growth->step = growth->range == NULL;
    growth->credit.most = gp__round_up(growth->bytes, pool->page);
    gp_status status = gp__pool_not_inside(pool, "growing", error);
    if (status == GP_OK)
        status = pool->device->driver->enter(pool->device, &entry, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    pool->growers++;
    gp__mutex_unlock(&pool->lock);
    status = attempt_all(growth, out, error);
    gp__stock_return(pool, &growth->credit);
    if (status != GP_OK && growth->range != NULL)
        gp__commit_let_go(growth);
    gp__mutex_lock(&pool->lock);
    pool->growers--;
    pool->credit_bytes -= growth->credit.bytes;
    pool->physical -= growth->credit.bytes;
    gp__condition_broadcast(&pool->changed);
    gp__mutex_unlock(&pool->lock);
    pool->device->driver->leave(pool->device, &entry);
    return status;
}
