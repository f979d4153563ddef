/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan items 1 to 4 for pools that were let go and that the reaper had to leave: an explicit call of another
 * pool closes them, and every driver call and allocation on that way is made to fail. What test_faults.c
 * cannot sweep, because two pools and the reaper take part.
 */
#include "tests/support/model.h"

#include "backing/memory.h"
#include "vmm/pool.h"

#include <sched.h>

#define MIB CHECK_MIB

enum mode { ONCE, FOR_EVER, PAIR, HEAP_ONCE, HEAP_FOR_EVER };
static const char *const mode_text[] = {"once", "for ever", "a pair", "heap once", "heap for ever"};

static struct world world;
static gp_pool *other; /* whose calls close what world.pool left */
static uint64_t second_fault; /* of a pair, counted from the first */
static uint64_t calls_of_last; /* driver calls or allocations of the latest act */

static gp_status act_trim(gp_error *error)
{
    return gp_pool_trim(other, 0, 0, NULL, error);
}

static gp_status act_drain(gp_error *error)
{
    return gp_pool_drain(other, error);
}

static gp_status act_close(gp_error *error)
{
    return gp_pool_close(other, error);
}

/* What the reaper has left holds three references: ours, that of finishing and the list's. */
static bool is_left(void)
{
    return gp__orphans_wanted(other) &&
           __atomic_load_n(&world.pool->references, __ATOMIC_ACQUIRE) == 3;
}

/* A pool with memory of a stream and memory of users that growpool cannot see, let go. */
static void begin(void)
{
    gp_pool_options options = {0};
    uintptr_t va[2];

    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB});
    options.device = world.device;
    options.limit = GP_NO_LIMIT;
    options.flags = GP_POOL_NO_REAPER;
    CHECK_OK(gp_pool_create(&options, &other, &world.error), &world.error);
    world_open(&world);
    va[0] = world_malloc(&world, 3 * MIB, 0);
    va[1] = world_malloc(&world, 2 * MIB, 1);
    CHECK_OK(gp_pool_pin(world.pool, va[0], true, NULL), NULL);
    gp_pool_unpin(world.pool, va[0]);
    world_launch(&world, 3, va[0], 3 * MIB);
    world_launch(&world, 1, va[1], 2 * MIB);
    CHECK_OK(gp_pool_finish(world.pool, NULL), NULL);
    while (!is_left())
        sched_yield();
}

static void check_books(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

/* With no fault any more an explicit call closes what is left. */
static void finish(bool everything)
{
    gp_pool_stats stats;

    CHECK_OK(act_trim(&world.error), &world.error);
    CHECK(gp_pool_is_closed(world.pool), "the pool is still left");
    check_books();
    stats = world_stats(&world);
    CHECK(stats.physical_bytes == stats.abandoned_bytes + stats.unreturned_bytes,
          "%zu physical bytes of a closed pool", stats.physical_bytes);
    CHECK_OK(gp_pool_return_unreturned(world.pool, NULL, &world.error), &world.error);
    CHECK(!everything || world_stats(&world).physical_bytes == 0, "a single fault left %zu bytes",
          world_stats(&world).physical_bytes);
}

static void announce(const char *name, enum mode mode, uint64_t n)
{
    char line[160];

    snprintf(line, sizeof line, "test_faults_left  # %s, %s, n %llu (%llu)", name, mode_text[mode],
             (unsigned long long)n, (unsigned long long)second_fault);
    check_context(line);
}

/* The call under one fault or more; true when they were beyond its last driver call or allocation. */
static bool call_under_fault(gp_status (*act)(gp_error *), enum mode mode, uint64_t n, bool *second)
{
    gp_error error = {0};
    gp_status status;
    uint64_t calls, fired;

    if (mode >= HEAP_ONCE)
        gp__memory_fail_at(n, mode == HEAP_FOR_EVER);
    else
        gp__sim_fail_at(world.sim, n, mode == FOR_EVER);
    if (mode == PAIR)
        gp__sim_then_fail_at(world.sim, second_fault);
    status = act(&error);
    fired = gp__sim_faults_fired(world.sim);
    calls = mode >= HEAP_ONCE ? gp__memory_fail_at(0, 0) : gp__sim_fault_calls(world.sim);
    gp__sim_fail_at(world.sim, 0, false);
    CHECK(calls < 500, "%llu calls", (unsigned long long)calls);
    /* The other pool's own part has nothing to fail at but looking; what it does for a pool that was left
     * is not told. */
    CHECK(status == GP_OK || status == GP_ERR_DRIVER, "%s", error.message);
    *second = fired >= 2;
    calls_of_last = calls;
    return calls < n;
}

static bool run(const char *name, gp_status (*act)(gp_error *), enum mode mode, uint64_t n,
                bool *second)
{
    bool beyond;

    begin();
    announce(name, mode, n);
    beyond = call_under_fault(act, mode, n, second);
    check_books();
    if (gp_pool_is_closed(other)) {
        gp_pool_release(other);
        gp_pool_options options = {.device = world.device, .limit = GP_NO_LIMIT};
        options.flags = GP_POOL_NO_REAPER;
        CHECK_OK(gp_pool_create(&options, &other, &world.error), &world.error);
    }
    finish(mode == ONCE || mode == HEAP_ONCE);
    CHECK_OK(gp_pool_close(other, &world.error), &world.error);
    gp_pool_release(other);
    if (mode == ONCE || mode >= HEAP_ONCE)
        world_end(&world);
    else
        world_abandon(&world);
    check_context(NULL);
    return beyond;
}

static void sweep(const char *name, gp_status (*act)(gp_error *))
{
    bool second, beyond;

    for (enum mode mode = ONCE; mode <= HEAP_FOR_EVER; mode++) {
        beyond = false;
        for (uint64_t n = 1; !beyond; n++) {
            second_fault = mode == PAIR;
            do
                beyond = run(name, act, mode, n, &second);
            while (mode == PAIR && second && second_fault++ > 0);
        }
        second_fault = 0;
        CHECK(mode != ONCE || calls_of_last > 20, "%s has only %llu calls: nothing was closed",
              name, (unsigned long long)calls_of_last);
    }
}

static void a_trim_of_another_pool(void **state)
{
    (void)state;
    sweep("trim", act_trim);
}

static void a_drain_of_another_pool(void **state)
{
    (void)state;
    sweep("drain", act_drain);
}

static void a_close_of_another_pool(void **state)
{
    (void)state;
    sweep("close", act_close);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trim_of_another_pool),
        cmocka_unit_test(a_drain_of_another_pool),
        cmocka_unit_test(a_close_of_another_pool),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
