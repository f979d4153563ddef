/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of a pool: made, used, closed, let go. What must hold at either end of it.
 */
#include "quick.h"

#include <stdio.h>

#include "../backing/memory.h"

#define SLEEP_NS UINT64_C(5000000)

/* ---- common -------------------------------------------------------------------------------- */

gp_status gp__pool_enter_slowly(const gp_pool *pool, gp_error *error)
{
    if (gp__is_forked_child())
        return gp__state_error(error, GP_REASON_FORKED,
                               "pool '%s' was made before this process was forked; only the parent "
                               "can use it",
                               pool->name);
    return gp__check_process(error);
}

gp_status gp__pool_closed_error(const gp_pool *pool, gp_error *error)
{
    return gp__state_error(error, GP_REASON_CLOSED, "pool '%s' is closed", pool->name);
}

gp_status gp__pool_usable(const gp_pool *pool, bool growing, gp_error *error)
{
    if (pool->finishing || pool->closing || pool->closed)
        return gp__pool_closed_error(pool, error);
    if (growing && pool->poisoned)
        return gp__state_error(error, GP_REASON_POISONED,
                               "pool '%s' cannot grow any more: the driver refused to undo a step, "
                               "and %zu bytes were abandoned; close it and make a new one",
                               pool->name, pool->abandoned_bytes);
    return GP_OK;
}

gp_status gp__pool_visit(gp_pool *pool, gp_error *error)
{
    gp__mutex_lock(&pool->lock);
    gp_status status = gp__pool_usable(pool, false, error);
    if (status == GP_OK)
        pool->visitors++;
    gp__mutex_unlock(&pool->lock);
    return status;
}

void gp__pool_leave(gp_pool *pool)
{
    gp__mutex_lock(&pool->lock);
    pool->visitors--;
    gp__condition_broadcast(&pool->changed);
    gp__mutex_unlock(&pool->lock);
}

gp_status gp__pool_sleep(gp_pool *pool, const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = gp__check_fork(error); /* in a child nobody would end the wait */
    if (status != GP_OK)
        return status;
    gp__condition_wait(&pool->changed, &pool->lock, SLEEP_NS);
    if (interrupt == NULL || interrupt->check == NULL)
        return GP_OK;
    gp__mutex_unlock(&pool->lock);
    int stop = interrupt->check(interrupt->context);
    gp__mutex_lock(&pool->lock);
    return stop == 0 ? GP_OK
                     : gp_error_set(error, GP_ERR_INTERRUPTED,
                                    "a signal ended the wait for pool '%s'; nothing was lost, and "
                                    "the same call goes on",
                                    pool->name);
}

static size_t largest_of(const struct gp__tree *tree)
{
    const struct gp__tree_node *node = gp__tree_below(tree, SIZE_MAX, 0);
    return node == NULL ? 0 : node->bytes;
}

void gp__pool_figures(const gp_pool *pool, size_t size, size_t physical, gp_error *error)
{
    if (error == NULL)
        return;
    error->size = size;
    error->physical = physical;
    error->limit = pool->limit;
    error->largest_free = 0;
    for (int bin = 0; bin < GP__BIN_COUNT; bin++) {
        size_t largest = largest_of(&pool->bins[bin].tree);
        if (largest > error->largest_free)
            error->largest_free = largest;
    }
}

void gp__pool_poll(gp_pool *pool)
{
    gp_device *device = pool->device;
    struct gp__entry entry;
    if (device->driver->enter(device, &entry, NULL) != GP_OK)
        return;
    gp__mutex_lock(&pool->lock);
    gp__span_settle(pool);
    gp__mutex_unlock(&pool->lock);
    device->driver->leave(device, &entry);
}

void gp__pool_record_here(gp_pool *pool, struct gp__owners owners)
{
    gp_device *device = pool->device;
    struct gp__entry entry;
    if (device->driver->enter(device, &entry, NULL) != GP_OK)
        return;
    if (gp__pool_visit(pool, NULL) == GP_OK) {
        gp__timeline_record(&pool->timeline, owners, NULL);
        gp__pool_leave(pool);
    }
    device->driver->leave(device, &entry);
}

/* ---- making -------------------------------------------------------------------------------- */

static gp_status check_options(const gp_pool_options *options, gp_error *error)
{
    if (options == NULL || options->device == NULL)
        return gp_error_set(error, GP_ERR_ARGUMENT, "a pool needs a device");
    size_t granularity = options->device->granularity;
    if (options->chunk_size % granularity != 0 || options->chunk_size > PTRDIFF_MAX)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "chunk_size %zu must be a multiple of the granularity of %s, %zu bytes",
                            options->chunk_size, options->device->name, granularity);
    return gp__check_process(error);
}

/* The pool's bytes of addresses: as asked, or twice what the device has; whole pages. */
static gp_status plan_addresses(gp_pool *pool, size_t asked, gp_error *error)
{
    size_t total = asked;
    pool->default_addresses = asked == 0;
    if (asked == 0) {
        size_t available;
        gp_status status = gp_device_memory(pool->device, &available, &total, error);
        if (status != GP_OK)
            return status;
        total = total > PTRDIFF_MAX / 2 ? PTRDIFF_MAX / 2 : total * 2;
    }
    if (total > PTRDIFF_MAX - pool->page)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "address_space %zu is more than any device can reserve", total);
    pool->address_space = (total + pool->page - 1) / pool->page * pool->page;
    return GP_OK;
}

static struct gp__owners span_owners(const struct gp__segment *segment)
{
    struct gp__owners all = {0, 0};
    for (const struct gp__span *span = segment->first; span != NULL; span = span->next)
        all = gp__owners_merge(all, span->owners);
    return all;
}

/* The owners of everything that the pool's lists show. lock: held. */
static struct gp__owners all_owners(const gp_pool *pool)
{
    struct gp__owners all = {0, 0};
    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next)
        all = gp__owners_merge(all, span_owners(segment));
    for (const gp_range *range = pool->ranges; range != NULL; range = range->next) {
        all = gp__owners_merge(all, span_owners(range->segment));
        all.slots |= range->slots;
    }
    for (const struct gp__retired *item = pool->retiring; item != NULL; item = item->next)
        all = gp__owners_merge(all, item->owners);
    return all;
}

/* A range is used by streams that come and go; those that were forgotten are no owners any more, and would
 * keep their slots from others as long as the range lives. */
static void forget_owners(gp_pool *pool)
{
    uint64_t peopled = GP__UNKNOWN;
    for (int slot = 0; slot < GP__SLOT_COUNT; slot++)
        peopled |= pool->timeline.slot_streams[slot] > 0 ? UINT64_C(1) << slot : 0;
    for (gp_range *range = pool->ranges; range != NULL; range = range->next)
        range->slots &= peopled;
}

/* Chunks in the hands of a thread that reaps are on no list, so then any slot may be theirs. */
static uint64_t slots_in_use(void *context)
{
    gp_pool *pool = context;
    forget_owners(pool);
    return pool->deliveries > 0 ? ~UINT64_C(0) : all_owners(pool).slots;
}

static void init(gp_pool *pool, const gp_pool_options *options)
{
    snprintf(pool->name, sizeof pool->name, "%s", options->name != NULL ? options->name : "");
    pool->device = options->device;
    pool->chunk_size = options->chunk_size;
    pool->page = options->chunk_size != 0 ? options->chunk_size : options->device->granularity;
    pool->flags = options->flags;
    pool->limit = options->limit;
    pool->interrupted = options->interrupted;
    pool->interrupted_context = options->interrupted_context;
    if (options->interrupted != NULL)
        pool->interrupt = (struct gp__interrupt){gp__pool_interrupted, pool};
    pool->references = 1;
    pool->reaper = (struct gp__reaper_client){.function = gp__pool_service, .context = pool};
    gp__mutex_init(&pool->lock, GP__RANK_POOL);
    gp__condition_init(&pool->changed);
    gp__timeline_init(&pool->timeline, pool->device, &pool->lock, slots_in_use, gp__quick_end,
                      pool);
}

gp_status gp_pool_create(const gp_pool_options *options, gp_pool **out, gp_error *error)
{
    gp_status status = check_options(options, error);
    if (status != GP_OK)
        return status;
    gp_pool *pool = gp__calloc(1, sizeof *pool);
    if (pool == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for a pool");
    init(pool, options);
    status = gp__peers_set(&pool->peers, pool->device, options->peers, options->peer_count, error);
    if (status == GP_OK)
        status = plan_addresses(pool, options->address_space, error);
    if (status == GP_OK && options->backing != NULL)
        pool->backing = gp_backing_retain(options->backing);
    else if (status == GP_OK)
        status = gp_backing_device(GP_LOCATION_DEVICE, &pool->backing, error);
    if (status != GP_OK) {
        gp__mutex_destroy(&pool->lock);
        pthread_cond_destroy(&pool->changed);
        gp__free(pool);
        return status;
    }
    gp__timeline_enlist(&pool->timeline);
    *out = pool;
    return GP_OK;
}

/* ---- closing ------------------------------------------------------------------------------- */

/* Every block and range ends, with its owners. lock: held. */
static void end_blocks(gp_pool *pool)
{
    bool record_now = false;
    gp__quick_end_all(pool);
    gp__ranges_end(pool);
    for (size_t bucket = 0; bucket < pool->index_size; bucket++) {
        while (pool->index[bucket] != NULL)
            gp__block_end(pool, pool->index[bucket], NULL, &record_now);
    }
}

/* Who may still use memory of the pool without having asked for it. lock: held. */
static gp_status in_use(gp_pool *pool, gp_error *error)
{
    gp__arenas_sweep(pool);
    if (pool->pinned > 0)
        return gp_error_set(error, GP_ERR_PINNED,
                            "pool '%s' has %u live exports of its memory; release them first",
                            pool->name, pool->pinned);
    if (gp__arenas_alive(pool))
        return gp_error_set(error, GP_ERR_CAPTURE,
                            "pool '%s' gave memory to a graph that is being captured or can still "
                            "be launched; destroy the graph and its executables first",
                            pool->name);
    return GP_OK;
}

/* What forbids to begin closing; nothing changed. */
static gp_status check_close(gp_pool *pool, gp_error *error)
{
    gp__pool_poll(pool);
    gp__mutex_lock(&pool->lock);
    gp_status status = in_use(pool, error);
    struct gp__owners owners = all_owners(pool);
    owners.ticket = gp__timeline_now(&pool->timeline); /* live blocks will be stamped now */
    bool begun = pool->closing;
    gp__mutex_unlock(&pool->lock);
    if (status != GP_OK || begun || owners.slots == 0)
        return status;
    return gp__timeline_check_capture(&pool->timeline, owners, error);
}

/* From here on the pool takes no work; waits for those who grow it or use its timeline. */
static gp_status start_close(gp_pool *pool, const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = check_close(pool, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    status = in_use(pool, error);
    if (status == GP_OK) {
        pool->closing = true;
        gp__quick_end_all(pool);
    }
    while (status == GP_OK && (pool->growers > 0 || pool->visitors > 0))
        status = gp__pool_sleep(pool, interrupt, error);
    gp__mutex_unlock(&pool->lock);
    return status;
}

/* Nothing retires, is under way, or is mapped. lock: held. */
static bool is_empty(const gp_pool *pool)
{
    return pool->mapped_bytes == 0 && pool->retiring_bytes == 0 && pool->deliveries == 0;
}

/* Retires and returns everything that is left, once. GP_NOT_READY: more came back meanwhile. */
static gp_status empty(gp_pool *pool, enum gp__reap_mode mode,
                       const struct gp__interrupt *interrupt, gp_error *error)
{
    struct gp__retired *list = NULL;
    gp__mutex_lock(&pool->lock);
    end_blocks(pool);
    gp__retiring_take(pool, &list);
    gp__retire(pool, SIZE_MAX, SIZE_MAX, GP__RETIRE_ALL, &list);
    gp__retire_hold(pool, list);
    bool all = pool->mapped_bytes == 0;
    gp__mutex_unlock(&pool->lock);
    gp_status status = GP_OK;
    if (list != NULL)
        status = gp__retire_finish(pool, list, mode, interrupt, NULL, NULL, error);
    if (status == GP_OK && !all)
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory to take pool '%s' apart; free some and close again",
                            pool->name);
    gp__mutex_lock(&pool->lock);
    while (pool->deliveries > 0 && status != GP_ERR_INTERRUPTED && gp__check_fork(NULL) == GP_OK) {
        gp_status slept = gp__pool_sleep(pool, interrupt, error);
        status = slept == GP_OK ? status : slept;
    }
    if (gp__check_fork(NULL) != GP_OK) {
        gp__mutex_unlock(&pool->lock);
        return gp__check_fork(error); /* a callback forked: what is left is the parent's */
    }
    /* An unmap that was refused was abandoned and counted: that does not keep a pool from closing. */
    if (is_empty(pool))
        status = GP_OK;
    else if (status == GP_OK)
        status = GP_NOT_READY;
    gp__mutex_unlock(&pool->lock);
    return status;
}

/* What a closed pool owned, taken out under the lock so that threads that come late find it empty. */
struct remains {
    struct gp__timeline timeline;
    struct gp__segment *segments;
    struct gp__segment *of_ranges;
    struct gp__span *spans;
    struct gp__span **index;
};

/* lock: held. */
static void take_remains(gp_pool *pool, struct remains *remains)
{
    *remains = (struct remains){pool->timeline, pool->segments, gp__ranges_take(pool),
                                pool->spare_spans, pool->index};
    gp__arenas_drop(pool);
    pool->timeline.streams = NULL;
    pool->timeline.spare = NULL;
    pool->timeline.stream_count = 0;
    pool->segments = NULL;
    pool->spare_spans = NULL;
    pool->spare_span_count = 0;
    pool->index = NULL;
    pool->index_size = 0;
    pool->holes = (struct gp__tree){NULL};
    for (int bin = 0; bin < GP__BIN_COUNT; bin++)
        pool->bins[bin] = (struct gp__bin){{NULL}, NULL, NULL};
}

static void free_remains(gp_pool *pool, struct remains *remains)
{
    size_t freed = gp__segments_free(pool, remains->segments);
    gp__range_free_segments(pool, remains->of_ranges);
    gp__timeline_destroy(&remains->timeline);
    gp__free(remains->index);
    while (remains->spans != NULL) {
        struct gp__span *span = remains->spans;
        remains->spans = span->next;
        gp__free(span);
    }
    gp__mutex_lock(&pool->lock);
    pool->address_bytes -= freed;
    gp__mutex_unlock(&pool->lock);
}

gp_status gp__pool_close(gp_pool *pool, enum gp__reap_mode mode,
                         const struct gp__interrupt *interrupt, gp_error *error)
{
    gp_status status = start_close(pool, interrupt, error);
    if (status == GP_OK)
        status = empty(pool, mode, interrupt, error);
    while (status == GP_NOT_READY && mode == GP__REAP_FINAL)
        status = empty(pool, mode, interrupt, error);
    if (status != GP_OK)
        return status;
    gp__reaper_remove(&pool->reaper);
    gp__timeline_delist(&pool->timeline);
    struct remains remains;
    gp__mutex_lock(&pool->lock);
    bool first = !pool->closed;
    if (first)
        take_remains(pool, &remains);
    __atomic_store_n(&pool->closed, true, __ATOMIC_RELEASE);
    gp__mutex_unlock(&pool->lock);
    if (first)
        free_remains(pool, &remains);
    return GP_OK;
}

gp_status gp_pool_close(gp_pool *pool, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    if (gp_pool_is_closed(pool))
        return GP_OK;
    status = gp__pool_not_inside(pool, "closing", error);
    bool others = status == GP_OK && gp__orphans_wanted(pool); /* while its streams are known */
    if (status == GP_OK)
        status = gp__pool_close(pool, GP__REAP_FINAL, &pool->interrupt, error);
    if (status != GP_OK)
        return status;
    gp__orphan_finished(pool);
    return others ? gp__orphans_close(pool->device, &pool->interrupt, error) : GP_OK;
}

bool gp_pool_is_closed(const gp_pool *pool)
{
    return __atomic_load_n(&pool->closed, __ATOMIC_ACQUIRE);
}

/* ---- what it is ---------------------------------------------------------------------------- */

gp_device *gp_pool_device(const gp_pool *pool)
{
    return pool->device;
}

const char *gp_pool_name(const gp_pool *pool)
{
    return pool->name;
}
