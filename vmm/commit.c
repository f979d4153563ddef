/* SPDX-License-Identifier: Apache-2.0
 *
 * A range's commit as grow.c sees it: which spans of the range's segment are claimed, and how they become
 * part of it. The addresses are given, so nothing is placed here; and nothing is asked or mapped.
 */
#include "pool.h"

/* What stands between a commit and its claim. */
struct look {
    size_t new_bytes; /* of holes */
    struct gp__owners owners; /* to be waited for: of memory that is still mapped there */
    bool busy; /* another commit is at work there */
    bool in_hand; /* another thread is unmapping memory there */
};

static uintptr_t start_of(const gp_range *range, const gp_interval *part)
{
    return range->segment->va + part->offset;
}

/* Whether one of the parts, which are in order and apart, overlaps [va, va + bytes). */
static bool overlaps(const struct gp__growth *growth, uintptr_t va, size_t bytes)
{
    size_t low = 0, high = growth->part_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const gp_interval *part = &growth->parts[middle];
        if (start_of(growth->range, part) + part->bytes <= va)
            low = middle + 1;
        else
            high = middle;
    }
    return low < growth->part_count && start_of(growth->range, &growth->parts[low]) < va + bytes;
}

/* Retiring memory of the parts comes back where the stream may use it; the owners of the rest are added to
 * what is waited for. */
static void want_back(struct gp__growth *growth, struct look *look)
{
    gp_pool *pool = growth->pool;
    struct gp__retired **link = &pool->retiring;
    while (*link != NULL) {
        struct gp__retired *item = *link;
        bool ours = ((struct gp__mapping *)item)->segment == growth->range->segment &&
                    overlaps(growth, item->va, item->bytes);
        struct gp__owners owners = {0, 0};
        if (ours)
            owners = gp__timeline_remaining(&pool->timeline, item->owners);
        if (ours && gp__span_is_usable(pool, owners, growth->taker)) {
            *link = item->next;
            gp__unretire(pool, item);
            continue;
        }
        look->owners = gp__owners_merge(look->owners, owners);
        link = &item->next;
    }
}

static void look_at_span(const struct gp__growth *growth, const struct gp__span *span, size_t bytes,
                         struct look *look)
{
    const gp_pool *pool = growth->pool;
    struct gp__owners owners = {0, 0};
    switch (span->state) {
    case GP_SPAN_HOLE:
        look->new_bytes += bytes;
        break;
    case GP_SPAN_FREE:
        owners = gp__timeline_remaining(&pool->timeline, span->owners);
        if (!gp__span_is_usable(pool, owners, growth->taker))
            look->owners = gp__owners_merge(look->owners, owners);
        break;
    case GP_SPAN_CLAIMED:
        look->busy = true;
        break;
    case GP_SPAN_RETIRING:
        look->in_hand = true; /* if it is on the pool's list, its owners are waited for first */
        break;
    case GP_SPAN_USED:
    case GP_SPAN_HELD:
    case GP_SPAN_ABANDONED:
        break;
    }
}

/* Whether memory of the parts is retiring. The pool's list of what retires may be long, and most commits
 * find nothing of theirs in it. */
static bool any_retiring(const struct gp__growth *growth)
{
    for (size_t i = 0; i < growth->part_count; i++) {
        uintptr_t va = start_of(growth->range, &growth->parts[i]);
        uintptr_t end = va + growth->parts[i].bytes;
        const struct gp__span *span = gp__span_at(growth->pool, growth->range->segment, va);
        for (; span != NULL && span->va < end; span = span->next) {
            if (span->state == GP_SPAN_RETIRING)
                return true;
        }
    }
    return false;
}

static struct look look_at(struct gp__growth *growth)
{
    struct look look = {0};
    const gp_range *range = growth->range;
    if (growth->pool->retiring != NULL && any_retiring(growth))
        want_back(growth, &look);
    for (size_t i = 0; i < growth->part_count; i++) {
        uintptr_t va = start_of(range, &growth->parts[i]);
        uintptr_t end = va + growth->parts[i].bytes;
        struct gp__span *span = gp__span_at(growth->pool, range->segment, va);
        for (; span != NULL && span->va < end; span = span->next) {
            uintptr_t from = span->va > va ? span->va : va;
            uintptr_t to = span->va + span->bytes;
            look_at_span(growth, span, (to < end ? to : end) - from, &look);
        }
    }
    return look;
}

/* Waits for what the look found. lock: held, dropped inside. */
static gp_status wait_for(struct gp__growth *growth, const struct look *look, gp_error *error)
{
    gp_pool *pool = growth->pool;
    if (look->owners.slots == 0)
        return gp__pool_sleep(pool, &pool->interrupt, error);
    gp__mutex_unlock(&pool->lock);
    gp_status status =
        gp__timeline_wait(&pool->timeline, look->owners, GP__REACH_ALL, &pool->interrupt, error);
    gp__mutex_lock(&pool->lock);
    return status;
}

gp_status gp__range_busy(const gp_range *range, gp_error *error)
{
    return gp__state_error(error, GP_REASON_BUSY,
                           "another thread is committing the same part of the range of %zu bytes",
                           range->max_bytes);
}

/* Takes what is not committed of one part. */
static void claim_part(struct gp__growth *growth, const gp_interval *part, struct gp__claim *claim)
{
    gp_pool *pool = growth->pool;
    uintptr_t va = start_of(growth->range, part);
    uintptr_t end = va + part->bytes;
    while (va < end) {
        struct gp__span *span = gp__span_at(pool, growth->range->segment, va);
        bool wanted = span->state == GP_SPAN_HOLE || span->state == GP_SPAN_FREE;
        if (wanted && span->va < va)
            span = gp__span_cut(pool, span, va);
        uintptr_t stop = span->va + span->bytes;
        if (wanted)
            gp__claim_span(pool, claim, span, (stop < end ? stop : end) - va);
        va = stop;
    }
}

gp_status gp__commit_claim(struct gp__growth *growth, struct gp__claim *claim, gp_error *error)
{
    for (;;) {
        gp_status status = gp__grow_prepare(growth, 2 * growth->part_count, error);
        if (status != GP_OK)
            return status;
        struct look look = look_at(growth);
        if (look.busy)
            return gp__range_busy(growth->range, error);
        if (look.owners.slots == 0 && !look.in_hand) {
            status = gp__grow_check_limit(growth, look.new_bytes, error);
            if (status != GP_OK)
                return status;
            break;
        }
        status = wait_for(growth, &look, error);
        if (status != GP_OK)
            return status;
    }
    for (size_t i = 0; i < growth->part_count; i++)
        claim_part(growth, &growth->parts[i], claim);
    return GP_OK;
}

/* Joins the span with neighbours that are committed too. */
static void join(gp_pool *pool, struct gp__span *span)
{
    if (span->next != NULL && span->next->state == GP_SPAN_USED)
        gp__span_join(pool, span);
    if (span->previous != NULL && span->previous->state == GP_SPAN_USED)
        gp__span_join(pool, span->previous);
}

size_t gp__commit_publish(struct gp__growth *growth, struct gp__claim *claim)
{
    gp_pool *pool = growth->pool;
    gp_range *range = growth->range;
    size_t bytes = 0;
    for (struct gp__span *span = claim->first; span != NULL;) {
        struct gp__span *next = span->queue_next;
        if (span->was_hole)
            gp__mapping_count(pool, span->segment, span->va, span->bytes, true);
        bytes += span->bytes;
        span->state = GP_SPAN_USED;
        span->owners = (struct gp__owners){0, 0};
        join(pool, span);
        span = next;
    }
    range->claims--;
    range->slots |= gp__timeline_bit(&pool->timeline, growth->stream);
    range->committed_bytes += bytes;
    gp__used_add(pool, bytes);
    return bytes;
}

void gp__commit_let_go(struct gp__growth *growth)
{
    gp_pool *pool = growth->pool;
    gp_range *range = growth->range;
    struct gp__retired *list = NULL;
    gp_release_result ignored = {0, 0};
    if (gp__check_fork(NULL) != GP_OK)
        return; /* a callback forked: the range is the parent's */
    gp__mutex_lock(&pool->lock);
    for (size_t i = 0; i < growth->part_count && range->segment != NULL; i++) {
        uintptr_t va = start_of(range, &growth->parts[i]);
        gp__range_retire_part(range, va, va + growth->parts[i].bytes, GP__RETIRE_SEEN, &list,
                              &ignored);
    }
    gp__retiring_add(pool, list);
    gp__mutex_unlock(&pool->lock);
    if (list != NULL)
        gp__pool_kick(pool);
}

/* How much of [from, to) of the span would have to be mapped anew if all idle memory went. */
static size_t anew(const gp_pool *pool, const struct gp__span *span, uintptr_t from, uintptr_t to)
{
    if (span->state == GP_SPAN_HOLE || span->state == GP_SPAN_RETIRING)
        return to - from;
    return span->state == GP_SPAN_FREE ? gp__place_idle_bytes(pool, span->segment, from, to) : 0;
}

size_t gp__commit_least_physical(const gp_pool *pool, const gp_range *range,
                                 const gp_interval *parts, size_t count)
{
    size_t bytes = 0;
    for (size_t i = 0; i < count && range->segment != NULL; i++) {
        uintptr_t va = range->segment->va + parts[i].offset;
        uintptr_t end = va + parts[i].bytes;
        const struct gp__span *span = gp__span_at(pool, range->segment, va);
        for (; span != NULL && span->va < end; span = span->next) {
            uintptr_t stop = span->va + span->bytes;
            bytes += anew(pool, span, span->va > va ? span->va : va, stop < end ? stop : end);
        }
    }
    return pool->physical - gp__retirable_bytes(pool) - pool->credit_bytes + bytes;
}
