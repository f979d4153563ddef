/* SPDX-License-Identifier: Apache-2.0
 *
 * The way out of a pool: idle mappings are set retiring, reaped once their owners passed, and their chunks
 * given back. Every accepted chunk leaves through here or through grow.c's undo (B1).
 */
#include "pool.h"

#include <assert.h>

#include "../backing/memory.h"

#define SERVICE_BATCH        16 /* chunks that the reaper holds at once */
#define SERVICE_LOOK         1024 /* chunks that it asks about in one look */
#define RECYCLE_LOOK         1024 /* idle chunks that a growth asks about */
#define SERVICE_DELAY_MIN_NS UINT64_C(100000)
#define SERVICE_DELAY_MAX_NS UINT64_C(20000000)

/* Which pools' callbacks this thread is inside. */
struct callout {
    const gp_pool *pool;
    struct callout *outer;
};

static _Thread_local struct callout *callouts;

gp_status gp__pool_not_inside(const gp_pool *pool, const char *operation, gp_error *error)
{
    for (const struct callout *callout = callouts; callout != NULL; callout = callout->outer) {
        if (callout->pool == pool)
            return gp_error_set(error, GP_ERR_REENTRANT,
                                "%s pool '%s' inside its own callback, or in a signal handler that "
                                "interrupted it, would call the same backing again; use another "
                                "pool there, or do it afterwards",
                                operation, pool->name);
    }
    return GP_OK;
}

int gp__pool_interrupted(void *context)
{
    const gp_pool *pool = context;
    struct callout here = {pool, callouts};
    callouts = &here;
    int stop = pool->interrupted(pool->interrupted_context);
    callouts = here.outer;
    return stop != 0 || gp__check_fork(NULL) != GP_OK; /* it may have forked */
}

gp_status gp__ask_backing(gp_pool *pool, const gp_request *request, gp_chunk **out, gp_error *error)
{
    struct callout here = {pool, callouts};
    callouts = &here;
    gp_status status = gp__backing_supply(pool->backing, request, out, error);
    callouts = here.outer;
    if (status == GP_NOT_READY)
        status =
            gp_error_set(error, GP_ERR_CONTRACT_VALUE,
                         "the backing of pool '%s' answered that it is not ready; it must give "
                         "a chunk or report out of memory",
                         pool->name);
    if (status != GP_OK && status != GP_ERR_OUT_OF_MEMORY) {
        gp__mutex_lock(&pool->lock);
        pool->callback_errors++;
        gp__mutex_unlock(&pool->lock);
    }
    return status;
}

void gp__credit_add(gp_pool *pool, struct gp__credit *credit, size_t bytes)
{
    size_t kept = 0;
    if (credit != NULL) {
        size_t lacking = credit->most > credit->bytes ? credit->most - credit->bytes : 0;
        kept = bytes < lacking ? bytes : lacking;
        credit->bytes += kept;
        credit->reclaimed += bytes;
    }
    pool->credit_bytes += kept;
    pool->physical -= bytes - kept;
}

gp_status gp__return_chunk(gp_pool *pool, struct gp__mapping *mapping, size_t *counter,
                           struct gp__credit *credit, gp_error *error)
{
    gp_chunk *chunk = mapping->retired.chunk;
    size_t bytes = mapping->retired.bytes;
    gp_request request = {bytes, pool->device, mapping->stream};
    struct callout here = {pool, callouts};
    callouts = &here;
    gp_status status = gp__backing_return(pool->backing, chunk, &request, error);
    callouts = here.outer;
    bool ours = status != GP_OK && gp__backing_left_unreturned(chunk, mapping->generation);
    gp__mutex_lock(&pool->lock);
    *counter -= bytes;
    if (ours) {
        pool->unreturned_bytes += bytes;
        mapping->retired.next = pool->unreturned;
        pool->unreturned = &mapping->retired;
    } else {
        gp__credit_add(pool, credit, bytes);
    }
    if (status != GP_OK)
        pool->callback_errors++;
    gp__mutex_unlock(&pool->lock);
    if (ours)
        return status;
    if (status != GP_OK)
        gp_chunk_release(chunk);
    gp__free(mapping);
    return status;
}

/* ---- idle -> retiring --------------------------------------------------------------------- */

struct gp__owners gp__retire_owners_of(const gp_pool *pool, const struct gp__mapping *mapping)
{
    struct gp__owners all = {0, 0};
    uintptr_t end = mapping->retired.va + mapping->retired.bytes;
    const struct gp__span *span = gp__span_at(pool, mapping->segment, mapping->retired.va);
    for (; span != NULL && span->va < end; span = span->next) {
        all = gp__owners_merge(all, gp__timeline_remaining(&pool->timeline, span->owners));
    }
    return all;
}

/* Cuts the mapping's range out of the free ranges around it. Needs two spare descriptors. */
static void carve(gp_pool *pool, const struct gp__mapping *mapping)
{
    uintptr_t va = mapping->retired.va;
    uintptr_t end = va + mapping->retired.bytes;
    struct gp__span *span = gp__span_at(pool, mapping->segment, va);
    gp__span_unfile(pool, span);
    if (span->va < va) {
        struct gp__span *rest = gp__span_cut(pool, span, va);
        gp__span_file(pool, span);
        span = rest;
    }
    while (span->va + span->bytes < end) {
        gp__span_unfile(pool, span->next);
        span->owners = span->next->owners; /* of the last one, for what is cut off behind it */
        gp__span_join(pool, span);
    }
    if (span->va + span->bytes > end)
        gp__span_file(pool, gp__span_cut(pool, span, end));
    span->state = GP_SPAN_RETIRING;
    span->owners = (struct gp__owners){0, 0};
}

static void retire(gp_pool *pool, struct gp__mapping *mapping, struct gp__owners owners)
{
    carve(pool, mapping);
    bool moved = gp__chunk_move(mapping->retired.chunk, GP__CHUNK_MAPPED, GP__CHUNK_RETIRING);
    assert(moved);
    (void)moved;
    gp__mapping_idle_remove(pool, mapping);
    pool->mapped_bytes -= mapping->retired.bytes;
    pool->retiring_bytes += mapping->retired.bytes;
    mapping->retired.owners = owners;
}

bool gp__retire_one(gp_pool *pool, struct gp__mapping *mapping, enum gp__retire_which which,
                    struct gp__retired **list)
{
    struct gp__owners owners = gp__retire_owners_of(pool, mapping);
    if (which == GP__RETIRE_SEEN && gp__timeline_is_unseen(&pool->timeline, owners))
        return false;
    if (gp__span_reserve(pool, 2, NULL) != GP_OK)
        return false;
    retire(pool, mapping, owners);
    mapping->retired.next = *list;
    *list = &mapping->retired;
    return true;
}

size_t gp__retire(gp_pool *pool, size_t goal, size_t most, enum gp__retire_which which,
                  struct gp__retired **list)
{
    size_t bytes = 0;
    for (struct gp__mapping *mapping = pool->idle_oldest; mapping != NULL && bytes < goal;) {
        struct gp__mapping *next = mapping->next;
        if (mapping->retired.bytes <= most - bytes && gp__retire_one(pool, mapping, which, list))
            bytes += mapping->retired.bytes;
        mapping = next;
    }
    return bytes;
}

/* Whether a growth that is to fill [from, to) may have the chunk. */
static bool may_move(const struct gp__mapping *mapping, size_t most, uintptr_t from, uintptr_t to)
{
    const struct gp__retired *item = &mapping->retired;
    return item->bytes <= most && mapping->segment->range == NULL &&
           (item->va + item->bytes <= from || item->va >= to);
}

void gp__retire_movable(gp_pool *pool, size_t most, uintptr_t from, uintptr_t to,
                        struct gp__retired **list)
{
    struct gp__mapping *mapping = pool->idle_oldest;
    for (int looked = 0; looked < RECYCLE_LOOK && mapping != NULL && most >= pool->page; looked++) {
        struct gp__mapping *next = mapping->next;
        if (may_move(mapping, most, from, to) &&
            gp__retire_one(pool, mapping, GP__RETIRE_SEEN, list))
            most -= mapping->retired.bytes;
        mapping = next;
    }
}

uint64_t gp__retire_slots(const gp_pool *pool, size_t most, uintptr_t from, uintptr_t to)
{
    uint64_t slots = 0;
    const struct gp__mapping *mapping = pool->idle_oldest;
    for (int looked = 0; looked < RECYCLE_LOOK && mapping != NULL && most >= pool->page;
         looked++, mapping = mapping->next) {
        struct gp__owners owners = gp__retire_owners_of(pool, mapping);
        if (!may_move(mapping, most, from, to) || gp__timeline_is_unseen(&pool->timeline, owners))
            continue;
        slots |= owners.slots;
        most -= mapping->retired.bytes;
    }
    return slots;
}

struct gp__owners gp__retire_owners(gp_pool *pool, size_t most)
{
    struct gp__owners all = {0, 0};
    size_t bytes = 0;
    for (struct gp__mapping *mapping = pool->idle_oldest; mapping != NULL;
         mapping = mapping->next) {
        if (mapping->retired.bytes > most - bytes)
            continue;
        all = gp__owners_merge(all, gp__retire_owners_of(pool, mapping));
        bytes += mapping->retired.bytes;
    }
    return all;
}

size_t gp__retirable_bytes(const gp_pool *pool)
{
    size_t bytes = pool->retiring_bytes;
    for (const struct gp__retired *item = pool->retiring; item != NULL; item = item->next) {
        if (gp__timeline_is_unseen(&pool->timeline, item->owners))
            bytes -= item->bytes;
    }
    for (const struct gp__mapping *mapping = pool->idle_oldest; mapping != NULL;
         mapping = mapping->next) {
        if (!gp__timeline_is_unseen(&pool->timeline, gp__retire_owners_of(pool, mapping)))
            bytes += mapping->retired.bytes;
    }
    return bytes;
}

void gp__unretire(gp_pool *pool, struct gp__retired *item)
{
    struct gp__mapping *mapping = (struct gp__mapping *)item;
    bool moved = gp__chunk_move(item->chunk, GP__CHUNK_RETIRING, GP__CHUNK_MAPPED);
    assert(moved);
    (void)moved;
    item->next = NULL;
    pool->retiring_bytes -= item->bytes;
    pool->mapped_bytes += item->bytes;
    gp__mapping_idle_add(pool, mapping);
    gp__span_free(pool, gp__span_at(pool, mapping->segment, item->va), item->owners);
}

void gp__retiring_take(gp_pool *pool, struct gp__retired **list)
{
    struct gp__retired **last = &pool->retiring;
    while (*last != NULL)
        last = &(*last)->next;
    *last = *list;
    *list = pool->retiring;
    pool->retiring = NULL;
}

void gp__retiring_add(gp_pool *pool, struct gp__retired *list)
{
    struct gp__retired **last = &list;
    if (list == NULL)
        return;
    while (*last != NULL)
        last = &(*last)->next;
    *last = pool->retiring;
    pool->retiring = list;
    pool->service_delay = 0;
}

void gp__retire_hold(gp_pool *pool, const struct gp__retired *list)
{
    if (list != NULL)
        pool->deliveries++;
}

/* ---- retiring -> returned ----------------------------------------------------------------- */

/* Adds the segment of a range that has nothing left to *dead. */
static void bury(gp_pool *pool, struct gp__segment *segment, struct gp__segment **dead)
{
    struct gp__segment *buried = gp__range_bury(pool, segment->range);
    if (buried == NULL)
        return;
    buried->next = *dead;
    *dead = buried;
}

static void note_unmapped(gp_pool *pool, struct gp__retired *list, struct gp__segment **dead)
{
    for (struct gp__retired *item = list; item != NULL; item = item->next) {
        struct gp__mapping *mapping = (struct gp__mapping *)item;
        struct gp__segment *segment = mapping->segment;
        gp__mapping_erase(pool, mapping);
        mapping->segment = NULL; /* which may go before the mapping does */
        gp__span_hole(pool, gp__span_at(pool, segment, item->va));
        pool->chunk_count--;
        bury(pool, segment, dead);
    }
}

static void note_abandoned(gp_pool *pool, struct gp__retired *list, struct gp__segment **dead)
{
    for (struct gp__retired *item = list; item != NULL; item = item->next) {
        struct gp__mapping *mapping = (struct gp__mapping *)item;
        gp__mapping_erase(pool, mapping);
        gp__span_at(pool, mapping->segment, item->va)->state = GP_SPAN_ABANDONED;
        mapping->segment->lost = true;
        pool->chunk_count--;
        pool->retiring_bytes -= item->bytes;
        pool->abandoned_bytes += item->bytes;
        pool->poisoned = true;
        bury(pool, mapping->segment, dead);
    }
}

static void note_kept(gp_pool *pool, struct gp__retired *list)
{
    struct gp__retired **last = &pool->retiring; /* behind those that were not looked at yet */
    while (*last != NULL)
        last = &(*last)->next;
    *last = list;
}

static void drop_abandoned(struct gp__retired *list)
{
    while (list != NULL) {
        struct gp__retired *next = list->next;
        gp_chunk_release(list->chunk);
        gp__free(list);
        list = next;
    }
}

/* Takes an unmapped chunk into the stock, if it has room for it. */
static bool stock(gp_pool *pool, struct gp__credit *credit, struct gp__retired *item)
{
    if (credit == NULL || item->bytes > credit->stock_room)
        return false;
    credit->stock_room -= item->bytes;
    credit->reclaimed += item->bytes;
    item->next = credit->stock;
    credit->stock = item;
    gp__mutex_lock(&pool->lock);
    pool->retiring_bytes -= item->bytes;
    pool->stock_bytes += item->bytes;
    gp__mutex_unlock(&pool->lock);
    return true;
}

void gp__stock_return(gp_pool *pool, struct gp__credit *credit)
{
    while (credit->stock != NULL && gp__check_fork(NULL) == GP_OK) {
        struct gp__retired *item = credit->stock;
        credit->stock = item->next;
        gp__return_chunk(pool, (struct gp__mapping *)item, &pool->stock_bytes, credit, NULL);
    }
}

gp_status gp__retire_finish(gp_pool *pool, struct gp__retired *list, enum gp__reap_mode mode,
                            const struct gp__interrupt *interrupt, struct gp__credit *credit,
                            size_t *returned, gp_error *error)
{
    struct gp__reaped reaped;
    size_t bytes = 0, count = 0;
    gp_status status = gp__reap(&pool->timeline, list, mode, interrupt, &reaped, error);
    if (gp__check_fork(NULL) != GP_OK)
        return status; /* the interrupt hook forked: what was unmapped is the parent's to return */
    struct gp__segment *dead = NULL;
    gp__mutex_lock(&pool->lock);
    note_unmapped(pool, reaped.unmapped, &dead);
    note_abandoned(pool, reaped.abandoned, &dead);
    note_kept(pool, reaped.kept);
    gp__condition_broadcast(&pool->changed); /* a commit may wait for these addresses */
    gp__mutex_unlock(&pool->lock);
    gp__range_free_segments(pool, dead);
    drop_abandoned(reaped.abandoned);
    while (reaped.unmapped != NULL) {
        struct gp__retired *item = reaped.unmapped;
        size_t size = item->bytes;
        reaped.unmapped = item->next;
        if (stock(pool, credit, item))
            continue;
        if (gp__return_chunk(pool, (struct gp__mapping *)item, &pool->retiring_bytes, credit,
                             NULL) == GP_OK) {
            bytes += size;
            count++;
        }
    }
    gp__mutex_lock(&pool->lock);
    pool->trim_count += count;
    pool->deliveries--;
    bool left = pool->retiring != NULL;
    gp__condition_broadcast(&pool->changed);
    gp__mutex_unlock(&pool->lock);
    if (left)
        gp__pool_kick(pool);
    if (returned != NULL)
        *returned = bytes;
    return status == GP_OK ? gp__check_fork(error) : status;
}

/* ---- the reaper's part -------------------------------------------------------------------- */

void gp__pool_kick(gp_pool *pool)
{
    if ((pool->flags & GP_POOL_NO_REAPER) == 0)
        gp__reaper_kick(&pool->reaper);
}

/* The owners of what a look may take, and of free memory that the next request wants. lock: held. */
static struct gp__owners owners_to_fence(gp_pool *pool, struct gp__owners *wanted)
{
    struct gp__owners retiring = {0, 0};
    const struct gp__retired *item = pool->retiring;
    for (int looked = 0; looked < SERVICE_LOOK && item != NULL; looked++, item = item->next)
        retiring = gp__owners_merge(retiring, item->owners);
    *wanted = (struct gp__owners){pool->record_slots, gp__timeline_now(&pool->timeline)};
    pool->record_slots = 0;
    return retiring;
}

static void record_and_poll(gp_pool *pool, struct gp__owners retiring, struct gp__owners wanted)
{
    gp_device *device = pool->device;
    struct gp__entry entry;
    if ((retiring.slots | wanted.slots) == 0 ||
        device->driver->enter(device, &entry, NULL) != GP_OK)
        return;
    gp__timeline_record(&pool->timeline, retiring, NULL);
    gp__timeline_record(&pool->timeline, wanted, NULL);
    gp__mutex_lock(&pool->lock);
    gp__timeline_poll(&pool->timeline);
    gp__mutex_unlock(&pool->lock);
    device->driver->leave(device, &entry);
}

/* Takes what has passed: a few only, so that the others stay in reach of those who need them while a slow
 * callback takes one back. What was looked at and must wait goes behind the rest, so that one stuck
 * stream does not hide the others' chunks. lock: held. */
static struct gp__retired *take_passed(gp_pool *pool)
{
    struct gp__retired *taken = NULL, **taken_end = &taken;
    struct gp__retired *waiting = NULL, **waiting_end = &waiting;
    int count = 0;
    for (int looked = 0; looked < SERVICE_LOOK && count < SERVICE_BATCH && pool->retiring != NULL;
         looked++) {
        struct gp__retired *item = pool->retiring;
        struct gp__retired ***end = &waiting_end;
        if (gp__timeline_remaining(&pool->timeline, item->owners).slots == 0) {
            end = &taken_end;
            count++;
        }
        pool->retiring = item->next;
        item->next = NULL;
        **end = item;
        *end = &item->next;
    }
    struct gp__retired **last = &pool->retiring;
    while (*last != NULL)
        last = &(*last)->next;
    *last = waiting;
    gp__retire_hold(pool, taken);
    return taken;
}

/* lock: held. */
static bool is_let_go(const gp_pool *pool)
{
    return pool->finishing || __atomic_load_n(&pool->orphaned, __ATOMIC_ACQUIRE);
}

/* How long until the next look: longer each time nothing moved, and never again by itself when all that
 * is left needs an explicit call. lock: held. */
static uint64_t next_look(gp_pool *pool, size_t returned)
{
    if (is_let_go(pool))
        return 0; /* by a callback just now: its kick was none, inside our own call */
    uint64_t delay = pool->service_delay * 2;
    if (returned > 0)
        delay = 0; /* there may be more where that came from */
    else if (delay < SERVICE_DELAY_MIN_NS)
        delay = SERVICE_DELAY_MIN_NS;
    if (delay > SERVICE_DELAY_MAX_NS)
        delay = SERVICE_DELAY_MAX_NS;
    pool->service_delay = delay;
    for (const struct gp__retired *item = pool->retiring; item != NULL; item = item->next) {
        if (!gp__timeline_is_unseen(&pool->timeline, item->owners))
            return delay;
    }
    return UINT64_MAX;
}

uint64_t gp__pool_service(void *context)
{
    gp_pool *pool = context;
    if (gp__is_exiting())
        return UINT64_MAX;
    struct gp__owners wanted;
    gp__mutex_lock(&pool->lock);
    if (is_let_go(pool)) {
        gp__mutex_unlock(&pool->lock);
        return gp__orphan_service(pool);
    }
    struct gp__owners retiring = owners_to_fence(pool, &wanted);
    pool->visitors++;
    gp__mutex_unlock(&pool->lock);
    gp__range_free_parted(pool);
    record_and_poll(pool, retiring, wanted);
    gp__mutex_lock(&pool->lock);
    struct gp__retired *list = take_passed(pool);
    gp__mutex_unlock(&pool->lock);
    size_t returned = 0;
    if (list != NULL)
        gp__retire_finish(pool, list, GP__REAP_READY, NULL, NULL, &returned, NULL);
    gp__mutex_lock(&pool->lock);
    pool->visitors--;
    gp__condition_broadcast(&pool->changed);
    uint64_t delay = next_look(pool, returned);
    gp__mutex_unlock(&pool->lock);
    return delay;
}
