/* SPDX-License-Identifier: Apache-2.0
 *
 * What a request may take and give back when the limit, the addresses or unseen users stand in its
 * way. Single-threaded: a limit that moves meanwhile is moved inside the pool's own callbacks.
 */
#include "tests/support/model.h"

#include "backing/driver.h"

#include "vmm/pool.h"

#define MIB CHECK_MIB

static struct world world;

static void open_world(size_t limit, size_t address_space)
{
    world_begin(&world, &(struct world_options){
                            .chunk_size = 2 * MIB, .limit = limit, .address_space = address_space});
    world_open(&world);
}

static int tear_down(void **state)
{
    (void)state;
    gp__sim_complete_all(world.sim);
    world_end(&world);
    return 0;
}

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

static gp_status malloc_on(int s, size_t bytes, uintptr_t *va)
{
    return gp_pool_malloc(world.pool, bytes, world.stream[s], 0, va, &world.error);
}

/* A block that stream `s` still works on when it is freed. */
static void free_busy(uintptr_t va, int s)
{
    world_launch(&world, s, va, 512);
    world_free(&world, va, -1);
}

/* An export that ended: nobody can see who still uses the memory. */
static void free_exported(uintptr_t va)
{
    CHECK_OK(gp_pool_pin(world.pool, va, true, &world.error), &world.error);
    gp_pool_unpin(world.pool, va);
    world_free(&world, va, -1);
}

static const struct gp__driver *real;

static gp_status unmap_and_limit_to_nothing(gp_device *device, uintptr_t va, size_t bytes,
                                            gp__memory memory, gp_error *error)
{
    gp_status status = real->unmap(device, va, bytes, memory, error);

    CHECK_OK(gp_pool_set_limit(world.pool, 0, NULL, NULL), NULL);
    return status;
}

/* The ladder takes memory from elsewhere for a request, and before its next attempt the limit falls below
 * the size of the request: an error like any other, and the memory goes back. */
static void a_limit_that_falls_below_a_waiting_request_refuses_it(void **state)
{
    struct gp__driver hooked;
    uintptr_t got = 77;

    (void)state;
    open_world(4 * MIB, 0);
    free_busy(world_malloc(&world, 4 * MIB, 0), 0);
    real = world.device->driver;
    hooked = *real;
    hooked.unmap = unmap_and_limit_to_nothing;
    world.device->driver = &hooked;
    CHECK_STATUS(GP_ERR_LIMIT, malloc_on(1, 4 * MIB, &got), &world.error);
    world.device->driver = real;
    assert_int_equal(got, 77);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world.supplied_bytes, 0);
    check_all();
}

static unsigned asked_over_the_limit;

static bool note_excess(struct world *where, size_t size)
{
    gp_pool_stats stats = world_stats(where);

    (void)size;
    if (stats.physical_bytes > stats.limit)
        asked_over_the_limit++;
    return false;
}

/* B3 while the pool is over a lowered limit: what a request reclaims first pays for the overage,
 * and only the rest may become new memory. */
static void what_a_request_reclaims_pays_for_the_overage_first(void **state)
{
    gp_limit_result result;
    uintptr_t va[7], got = 0;
    gp_pool_stats stats;

    (void)state;
    open_world(14 * MIB, 0);
    for (int i = 0; i < 7; i++) {
        va[i] = world_malloc(&world, 2 * MIB, 0);
        world_launch(&world, 0, va[i], 512);
    }
    for (int i = 0; i < 6; i++)
        world_free(&world, va[i], -1);
    CHECK_OK(gp_pool_set_limit(world.pool, 6 * MIB, &result, NULL), NULL);
    assert_int_equal(result.overage_bytes, 8 * MIB);
    asked_over_the_limit = 0;
    world.refuse = note_excess;
    CHECK_OK(malloc_on(1, 4 * MIB, &got), &world.error);
    assert_int_equal(asked_over_the_limit, 0);
    stats = world_stats(&world);
    CHECK(stats.physical_bytes <= 6 * MIB, "%zu physical bytes", stats.physical_bytes);
    check_all();
}

/* Overage that a lowered limit found retiring was promised to go; no request takes it back. */
static void deferred_bytes_are_not_taken_back(void **state)
{
    uintptr_t va[5], got = 0;
    gp_limit_result result;

    (void)state;
    open_world(10 * MIB, 0);
    for (int i = 0; i < 5; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va[0], 512);
    for (int i = 0; i < 3; i++)
        world_free(&world, va[i], -1);
    CHECK_OK(gp_pool_set_limit(world.pool, 4 * MIB, &result, NULL), NULL);
    assert_int_equal(result.deferred_bytes, 6 * MIB);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(GP_ERR_LIMIT, malloc_on(0, 2 * MIB, &got), NULL);
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * MIB);
    check_all();
}

/* When all addresses are mapped, another stream's idle memory is what holds them: it is waited for
 * and given back before the pool says that it has no addresses. */
static void addresses_of_idle_memory_are_reclaimed(void **state)
{
    uintptr_t got = 0;

    (void)state;
    open_world(8 * MIB, 8 * MIB);
    free_busy(world_malloc(&world, 8 * MIB, 0), 0);
    CHECK_OK(malloc_on(1, 4 * MIB, &got), &world.error);
    CHECK(!gp__sim_busy(world.sim, got, 4 * MIB, 0), "handed out under pending work");
    check_all();
}

/* Memory with unseen users is out of a request's reach, so it does not count as room: a limit that
 * cannot be met without it is reported at once, and nothing is given back in vain. */
static void a_request_that_only_unseen_memory_could_serve_trims_nothing(void **state)
{
    uintptr_t unseen, idle, got = 0;
    gp_pool_stats before, after;

    (void)state;
    open_world(6 * MIB, 0);
    unseen = world_malloc(&world, 2 * MIB, 0);
    idle = world_malloc(&world, 2 * MIB, 0);
    world_malloc(&world, 2 * MIB, 0);
    free_exported(unseen);
    world_free(&world, idle, -1);
    before = world_stats(&world);
    CHECK_STATUS(GP_ERR_LIMIT, malloc_on(1, 4 * MIB, &got), NULL);
    after = world_stats(&world);
    assert_int_equal(after.trim_count, before.trim_count);
    assert_int_equal(after.physical_bytes, 6 * MIB);
    assert_int_equal(world.free_calls, 0);
}

/* The same memory once it is retiring, after a trim that was to wait and could not. */
static void unseen_memory_that_retires_is_no_room_either(void **state)
{
    uintptr_t unseen, idle, got = 0;
    uint64_t frees;

    (void)state;
    open_world(6 * MIB, 0);
    unseen = world_malloc(&world, 2 * MIB, 0);
    idle = world_malloc(&world, 2 * MIB, 0);
    world_malloc(&world, 2 * MIB, 0);
    free_exported(unseen);
    /* A driver that fails before the trim knows of no capture leaves the memory where it is. */
    for (uint64_t n = 1; world_stats(&world).retiring_bytes == 0; n++) {
        gp__sim_fail_at(world.sim, n, true);
        CHECK_STATUS(GP_ERR_DRIVER, gp_pool_trim(world.pool, 0, 0, NULL, NULL), NULL);
        gp__sim_fail_at(world.sim, 0, false);
    }
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * MIB);
    world_free(&world, idle, -1);
    frees = world.free_calls;
    CHECK_STATUS(GP_ERR_LIMIT, malloc_on(1, 4 * MIB, &got), NULL);
    assert_int_equal(world.free_calls, frees);
    assert_int_equal(world_stats(&world).physical_bytes, 6 * MIB);
}

static bool is_about_memory(gp_status status)
{
    return status == GP_ERR_LIMIT || status == GP_ERR_OUT_OF_MEMORY ||
           status == GP_ERR_ADDRESS_SPACE;
}

/* The pool's figures belong to errors about memory; a driver's error that came through the ladder
 * keeps its own. Chunks that an undone growth hands back were never trimmed. */
static void check_failed_growth(gp_status status, const gp_error *error)
{
    if (is_about_memory(status)) {
        assert_int_equal(error->size, 5 * MIB);
    } else {
        CHECK(error->size == 0 && error->physical == 0 && error->limit != 64 * MIB,
              "\"%s\" speaks of size %zu, physical %zu, limit %zu", error->message, error->size,
              error->physical, error->limit);
    }
    assert_int_equal(world_stats(&world).trim_count, 0);
}

static void a_failed_growth_reports_and_counts_no_more_than_it_did(void **state)
{
    bool again = true;
    unsigned failures = 0;

    (void)state;
    for (uint64_t n = 1; again; n++) {
        gp_error error = {0};
        uintptr_t va = 0;
        gp_status status;

        open_world(64 * MIB, 0);
        gp__sim_fail_at(world.sim, n, false);
        status = gp_pool_malloc(world.pool, 5 * MIB, world.stream[0], 0, &va, &error);
        again = gp__sim_fault_calls(world.sim) >= n;
        gp__sim_fail_at(world.sim, 0, false);
        failures += status != GP_OK;
        if (status != GP_OK)
            check_failed_growth(status, &error);
        if (again)
            world_end(&world);
    }
    CHECK(failures >= 12, "only %u faults failed the growth", failures);
}

/* ---- what a limit could be met with ---- */

/* Bytes of the span that would have to be mapped anew if all idle memory went; false for one that
 * no block of a waiting request could lie over. */
static bool anew(const struct gp__span *span, size_t *bytes)
{
    const gp_pool *pool = world.pool;
    bool gone = span->state == GP_SPAN_HOLE || span->state == GP_SPAN_RETIRING;

    *bytes = gone ? span->bytes : 0;
    if (gone)
        return true;
    if (span->state != GP_SPAN_FREE || gp__timeline_is_unseen(&pool->timeline, span->owners))
        return false;
    for (size_t at = 0; at < span->bytes; at += GP_ALIGNMENT)
        if (gp__mapping_at(pool, span->segment, span->va + at)->live == 0)
            *bytes += GP_ALIGNMENT;
    return true;
}

/* Bytes to map for a block that starts where `span` does; SIZE_MAX if it cannot. */
static size_t fresh_from(const struct gp__span *span, size_t bytes)
{
    size_t fresh = 0, left = bytes, added;

    for (; span != NULL && anew(span, &added); span = span->next) {
        size_t take = span->bytes < left ? span->bytes : left;

        fresh += added < take ? added : take;
        left -= take;
        if (left == 0)
            return fresh;
    }
    return SIZE_MAX;
}

/* gp__place_least_physical() the slow way: every span is tried as the start. */
static size_t slow_least(size_t bytes)
{
    const gp_pool *pool = world.pool;
    size_t least = pool->address_space - pool->address_bytes >= bytes ? bytes : SIZE_MAX;

    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next)
        for (const struct gp__span *span = segment->first; span != NULL; span = span->next) {
            size_t fresh = fresh_from(span, bytes);

            least = fresh < least ? fresh : least;
        }
    if (least == SIZE_MAX)
        return SIZE_MAX;
    return pool->physical - gp__retirable_bytes(pool) + gp__round_up(least, pool->page);
}

#define LIVE_MAX 40

struct shuffle {
    unsigned seed;
    uintptr_t live[LIVE_MAX];
    size_t count;
};

static size_t pick(struct shuffle *shuffle, size_t bound)
{
    return (size_t)rand_r(&shuffle->seed) % bound;
}

/* Makes or ends one block, of which some keep busy streams and some unseen users. */
static void shuffle_blocks(struct shuffle *shuffle)
{
    int s = (int)pick(shuffle, WORLD_STREAMS);
    uintptr_t va = 0;

    if (shuffle->count < LIVE_MAX && pick(shuffle, 9) < 5) {
        if (malloc_on(s, 1 + pick(shuffle, pick(shuffle, 6) == 0 ? 5 * MIB : MIB), &va) == GP_OK)
            shuffle->live[shuffle->count++] = va;
    } else if (shuffle->count > 0) {
        size_t i = pick(shuffle, shuffle->count);

        va = shuffle->live[i];
        shuffle->live[i] = shuffle->live[--shuffle->count];
        if (pick(shuffle, 2) == 0)
            gp_pool_record_stream(world.pool, va, world.stream[s], NULL);
        if (pick(shuffle, 8) == 0)
            free_exported(va);
        else
            world_free(&world, va, -1);
    }
    if (pick(shuffle, 15) == 0)
        gp_pool_trim(world.pool, 0, pick(shuffle, 4) == 0 ? 0 : GP_TRIM_NO_WAIT, NULL, NULL);
}

/* Whether a limit can be met is found in one pass over a pool's spans, however many there are; it
 * must be what trying each of them would find. */
static void one_pass_finds_the_least_physical_bytes(void **state)
{
    struct shuffle shuffle = {.seed = 1};
    size_t possible = 0;

    (void)state;
    open_world(0, 32 * MIB);
    for (int i = 0; i < 1500; i++) {
        size_t bytes = (1 + pick(&shuffle, 6 * MIB / GP_ALIGNMENT)) * GP_ALIGNMENT, want;

        shuffle_blocks(&shuffle);
        want = slow_least(bytes);
        possible += want != SIZE_MAX;
        CHECK(gp__place_least_physical(world.pool, bytes) == want, "step %d: %zu, not %zu", i,
              gp__place_least_physical(world.pool, bytes), want);
    }
    CHECK(possible > 300 && possible < 1500, "%zu of 1500 were possible", possible);
}

#define TEST(name) cmocka_unit_test_teardown(name, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_limit_that_falls_below_a_waiting_request_refuses_it),
        TEST(what_a_request_reclaims_pays_for_the_overage_first),
        TEST(deferred_bytes_are_not_taken_back),
        TEST(addresses_of_idle_memory_are_reclaimed),
        TEST(a_request_that_only_unseen_memory_could_serve_trims_nothing),
        TEST(unseen_memory_that_retires_is_no_room_either),
        TEST(a_failed_growth_reports_and_counts_no_more_than_it_did),
        TEST(one_pass_finds_the_least_physical_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
