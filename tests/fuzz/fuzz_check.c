/* SPDX-License-Identifier: Apache-2.0
 *
 * What must hold after each operation: statuses that have a reason, models that agree, equations, and
 * pools whose sum is what the device says.
 */
#include "fuzz.h"

#include "backing/memory.h"

bool fuzz_is_capturing(void)
{
    for (int s = 0; s < WORLD_STREAMS; s++)
        if (fuzz.capture[s] != FUZZ_NONE)
            return true;
    return false;
}

void fuzz_forget_faults(void)
{
    gp__sim_fail_at(fuzz.world.sim, 0, false);
    gp__sim_fault_as_driver_error(fuzz.world.sim, false);
    fuzz.fired = 0;
}

bool fuzz_is_leaving(const struct fuzz_pool *pool)
{
    return pool->finishing || pool->ending || (pool->alive && pool->world.pool->closing);
}

/* ---- statuses ---- */

/* Driver faults show as what the call would report. */
static unsigned reasons_of_the_device(void)
{
    unsigned allowed = 0;

    if (gp__sim_faults_fired(fuzz.world.sim) > fuzz.fired)
        allowed |= 1u << GP_ERR_DRIVER | 1u << GP_ERR_OUT_OF_MEMORY | 1u << GP_ERR_ADDRESS_SPACE;
    if (fuzz.dead)
        allowed |= 1u << GP_ERR_DRIVER;
    if (fuzz.heap_fault > 0)
        allowed |= 1u << GP_ERR_HOST_MEMORY;
    return allowed;
}

static unsigned reasons_of_the_pool(const struct fuzz_pool *pool)
{
    unsigned allowed = 0;

    if (pool == NULL)
        return 0;
    if (fuzz_is_leaving(pool) || world_stats(&pool->world).abandoned_bytes > 0)
        allowed |= 1u << GP_ERR_STATE;
    if (fuzz.inside > 0)
        allowed |= 1u << GP_ERR_REENTRANT;
    if (fuzz.interrupted)
        allowed |= 1u << GP_ERR_INTERRUPTED;
    if (fuzz.moody)
        allowed |= 1u << GP_ERR_CALLBACK | 1u << GP_ERR_CONTRACT_TYPE |
                   1u << GP_ERR_CONTRACT_VALUE | 1u << GP_ERR_OUT_OF_MEMORY;
    return allowed;
}

void fuzz_expect(const struct fuzz_pool *pool, gp_status status, const gp_error *error,
                 unsigned allowed)
{
    if (status == GP_OK)
        return;
    fuzz_say("-> %s: %s", gp_status_text(status), error->message);
    fuzz.heap_error = fuzz.heap_error || status == GP_ERR_HOST_MEMORY;
    allowed |= reasons_of_the_device() | reasons_of_the_pool(pool);
    CHECK((allowed >> status & 1) != 0, "\"%s\" without a reason: %s", gp_status_text(status),
          error->message);
    if (status == GP_NOT_READY)
        return;
    CHECK(error->status == status, "the error says %d, the status is %d", (int)error->status,
          (int)status);
    CHECK(error->message[0] != '\0', "a failure without a message");
}

void fuzz_refused(gp_status status, const gp_error *error)
{
    CHECK(status != GP_OK, "a wrong argument was taken");
    fuzz_expect(NULL, status, error, 1u << GP_ERR_ARGUMENT | 1u << GP_ERR_STATE);
}

/* Physical bytes that serve somebody. */
static size_t serving(const gp_pool_stats *stats)
{
    return stats->physical_bytes - stats->unreturned_bytes - stats->abandoned_bytes;
}

void fuzz_check_growth(const struct fuzz_pool *pool, gp_status status, const gp_pool_stats *before)
{
    gp_pool_stats after = world_stats(&pool->world);

    if (fuzz.inside_count > 0)
        return; /* which may have changed the limit, and more */
    CHECK(status == GP_OK || serving(&after) <= serving(before),
          "a growth that failed left %zu bytes that serve, before it there were %zu",
          serving(&after), serving(before));
    CHECK(after.physical_bytes <= after.limit || after.physical_bytes <= before->physical_bytes,
          "%zu physical bytes, before it %zu, under a limit of %zu", after.physical_bytes,
          before->physical_bytes, after.limit);
}

/* ---- who is still there ---- */

static bool is_reachable(const struct fuzz_pool *pool)
{
    bool pinned = pool->held || fuzz_range_count(pool) > 0;

    for (size_t i = 0; i < pool->model.count && !pinned; i++)
        pinned = pool->model.blocks[i].pins > 0;
    return pinned;
}

static void follow(struct fuzz_pool *pool)
{
    if (!pool->alive || pool->ending)
        return;
    pool->ending =
        pool->world.pool->closing || gp_pool_is_closed(pool->world.pool) || !is_reachable(pool);
    if (pool->ending)
        model_clear(&pool->model);
}

void fuzz_follow(void)
{
    for (unsigned i = 0; i < FUZZ_POOLS; i++)
        follow(&fuzz.pools[i]);
}

/* ---- the whole ---- */

struct sums {
    size_t mapped, addresses, physical, cached;
};

static void check_pool(const struct fuzz_pool *pool, struct sums *sums)
{
    gp_pool_stats stats = world_stats(&pool->world);
    char message[400];
    size_t unreturned = gp_pool_unreturned(pool->world.pool, NULL, 0);

    CHECK(gp__pool_check(pool->world.pool, message, sizeof message), "%s", message);
    CHECK(stats.physical_bytes == pool->supplied_bytes, "%zu physical bytes, %zu were supplied",
          stats.physical_bytes, pool->supplied_bytes);
    CHECK(stats.abandoned_bytes > 0 || stats.chunk_count + unreturned == pool->supplied_chunks,
          "%llu chunks and %zu unreturned, %zu were supplied",
          (unsigned long long)stats.chunk_count, unreturned, pool->supplied_chunks);
    CHECK(pool->world.pool->closed || stats.free_bytes + stats.used_bytes + stats.retiring_bytes +
                                              stats.abandoned_bytes + stats.unreturned_bytes ==
                                          stats.physical_bytes,
          "free %zu, used %zu, retiring %zu: not %zu", stats.free_bytes, stats.used_bytes,
          stats.retiring_bytes, stats.physical_bytes);
    if (!pool->ending) {
        CHECK(stats.used_bytes == pool->model.used_bytes, "used_bytes %zu, the model has %zu",
              stats.used_bytes, pool->model.used_bytes);
        CHECK(stats.peak_used_bytes >= stats.used_bytes &&
                  stats.peak_physical_bytes >= stats.physical_bytes,
              "a peak is below the present");
        model_check_ranges(&pool->model, "after the step");
    }
    sums->mapped += stats.physical_bytes - stats.unreturned_bytes;
    sums->addresses += stats.address_bytes;
    sums->physical += stats.physical_bytes;
}

static void compare(const char *what, size_t here, size_t there)
{
    CHECK(here == there, "%s: %zu by growpool's account, %zu by the device's or the backing's",
          what, here, there);
}

void fuzz_check(void)
{
    struct gp__sim_ledger ledger = world_ledger(&fuzz.world);
    uint64_t leaked = world_leaked_chunks(&fuzz.world);
    struct sums sums = {fuzz.gone.abandoned_bytes, fuzz.gone.address_bytes,
                        fuzz.gone.abandoned_bytes, 0};

    for (unsigned i = 0; i < FUZZ_POOLS; i++) {
        const struct fuzz_pool *pool = &fuzz.pools[i];

        if (pool->alive)
            check_pool(pool, &sums);
        if (pool->cache != NULL)
            sums.cached += gp_backing_cached_bytes(pool->cache);
    }
    compare("mapped bytes", sums.mapped, ledger.mapped_bytes);
    compare("address bytes", sums.addresses, ledger.reserved_bytes);
    compare("physical bytes", sums.physical + sums.cached, fuzz.world.supplied_bytes);
    if (leaked == 0)
        compare("physical bytes", sums.physical + sums.cached, ledger.physical_bytes);
    compare("chunks", fuzz.world.supplied_chunks + leaked, ledger.chunk_count);
    compare("entries without leave", 0, ledger.entered);
    CHECK(gp__sim_graphs_are_mapped(fuzz.world.sim), "memory of a graph that lives was unmapped");
}
