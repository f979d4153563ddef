/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan items 1 to 4: over every scenario the n-th driver call fails, once and for ever, and the n-th
 * host allocation fails, for every n until a pass injects nothing; and every pair of driver calls, so
 * that the second fault hits what the first one set going.
 *
 * Mutations that this file catches: leaving out any step of grow.c's undo (once_driver: state as before,
 * nothing left in the ledger), forgetting to count an abandoned chunk (forever_driver: the ledger
 * compared with abandoned_bytes), writing an output before the operation succeeded (model_malloc).
 *
 * GP_TEST_SCENARIO=name and GP_TEST_FAULT=n run a single case.
 */
#include "tests/support/scenario.h"

#include "backing/memory.h"
#include "vmm/pool.h"

/* More than any one act of a scenario may need, even where everything fails. */
#define MOST_CALLS UINT64_C(4000)
/* How far apart the faults are where there are too many to try. */
#define STRIDE 97

enum mode { ONCE, ONCE_AS_DRIVER_ERROR, FOR_EVER, PAIR, HEAP_ONCE, HEAP_FOR_EVER };
static const char *const mode_text[] = {
    "once", "once, as a driver error", "for ever", "a pair", "heap once", "heap for ever"};

/* How many driver calls and host allocations each act makes without faults. A number that moves is a
 * call that slipped in or fell away: look at it, then write the new one here. */
static const struct expectation {
    const char *name;
    uint64_t driver;
    uint64_t heap;
} expectations[] = {
#include "fault_counts.h"
};

static uint64_t second_fault; /* of a pair, counted from the first */
static uint64_t fired; /* driver faults that hit the last act */
static uint64_t counted; /* what the last act called or allocated */
static uint64_t pairs; /* runs that two faults hit */
static uint64_t abandoned_runs; /* runs for ever that had to abandon a chunk */
static struct scenario_run run; /* static: its address is the backing's context */

/* The line that reproduces a failure; printed first whenever a check fails. */
static void announce(const struct scenario *scenario, enum mode mode, uint64_t n)
{
    char line[200];

    snprintf(line, sizeof line,
             "GP_TEST_SCENARIO=%s GP_TEST_FAULT=%llu test_faults  # mode: %s (%llu), hit: %s",
             scenario->name, (unsigned long long)n, mode_text[mode],
             (unsigned long long)second_fault,
             mode < HEAP_ONCE && run.world.sim != NULL ? gp__sim_fault_name(run.world.sim) : "");
    check_context(line);
}

static bool is_documented(gp_status status, const struct scenario *scenario, enum mode mode)
{
    switch (status) {
    case GP_ERR_OUT_OF_MEMORY:
    case GP_ERR_ADDRESS_SPACE:
    case GP_ERR_DRIVER:
        return true;
    case GP_ERR_UNAVAILABLE:
        return (scenario->shape & SCENARIO_ASKS) != 0;
    case GP_ERR_HOST_MEMORY:
        return mode >= HEAP_ONCE;
    case GP_ERR_LIMIT:
        return (scenario->shape & SCENARIO_SHRINKS) != 0;
    case GP_ERR_STATE: /* poisoned: only where an undo failed as well */
        return mode == FOR_EVER || mode == PAIR;
    default:
        return false;
    }
}

static void arm(enum mode mode, uint64_t n)
{
    if (mode >= HEAP_ONCE) {
        gp__memory_fail_at(n, mode == HEAP_FOR_EVER);
        return;
    }
    gp__sim_fault_as_driver_error(run.world.sim, mode == ONCE_AS_DRIVER_ERROR);
    gp__sim_fail_at(run.world.sim, n, mode == FOR_EVER);
    if (mode == PAIR)
        gp__sim_then_fail_at(run.world.sim, second_fault);
}

/* Switches faults off; how many calls were counted. */
static uint64_t disarm(enum mode mode)
{
    uint64_t calls;

    if (mode >= HEAP_ONCE)
        return gp__memory_fail_at(0, 0);
    calls = gp__sim_fault_calls(run.world.sim);
    gp__sim_fail_at(run.world.sim, 0, false);
    return calls;
}

/* The act under one fault. True when the fault was beyond its last call. */
static bool act_under_fault(const struct scenario *scenario, enum mode mode, uint64_t n,
                            gp_status *status)
{
    struct scenario_state before = scenario_state(&run);
    gp_error error = {0};
    uint64_t calls;

    arm(mode, n);
    announce(scenario, mode, n);
    *status = scenario->act(&run, &error);
    announce(scenario, mode, n);
    fired = gp__sim_faults_fired(run.world.sim);
    counted = calls = disarm(mode);
    CHECK(calls < MOST_CALLS, "%llu calls: is anything trying for ever?",
          (unsigned long long)calls);
    if (*status == GP_OK)
        return calls < n;
    CHECK(is_documented(*status, scenario, mode), "undocumented status %d: %s", (int)*status,
          error.message);
    CHECK(error.status == *status, "the error says %d, the status is %d", (int)error.status,
          (int)*status);
    CHECK(error.message[0] != '\0', "a failure without a message");
    scenario_check_unchanged(&run, scenario, &before);
    return false;
}

/* One fault, then everything works again: nothing may be left. */
static bool run_once(const struct scenario *scenario, enum mode mode, uint64_t n)
{
    gp_status status;
    gp_error error = {0};
    bool beyond;

    scenario_begin(&run, scenario);
    beyond = act_under_fault(scenario, mode, n, &status);
    announce(scenario, mode, n);
    /* A chunk whose return the fault hit counts as physical until it is offered once more. */
    if (run.world.pool != NULL)
        CHECK_OK(gp_pool_return_unreturned(run.world.pool, NULL, &error), &error);
    if (status != GP_OK)
        CHECK_OK(scenario->act(&run, &error), &error);
    scenario_verify(&run, scenario);
    scenario_settle(&run, scenario);
    model_end(&run.model);
    CHECK(world_leaked_chunks(&run.world) == 0, "%llu chunks were never released",
          (unsigned long long)world_leaked_chunks(&run.world));
    world_end(&run.world);
    return beyond;
}

/* What is left in the device must be exactly what the counters say. */
static void check_leftovers(void)
{
    char message[400];

    if (run.world.pool == NULL)
        return;
    CHECK(checker_compare(&run.world, message, sizeof message), "%s", message);
    CHECK(run.world.pool->poisoned == (run.world.pool->abandoned_bytes > 0),
          "%zu bytes are abandoned and the pool is%s poisoned", run.world.pool->abandoned_bytes,
          run.world.pool->poisoned ? "" : " not");
}

/* The same for chunks that no pool had, when all of them were let go. */
static void check_leaked_chunks(void)
{
    struct gp__sim_ledger ledger = world_ledger(&run.world);
    uint64_t held = world_cached_bytes(&run.world) / WORLD_PAGE;

    CHECK(run.world.pool != NULL ||
              ledger.unreleased_count == world_leaked_chunks(&run.world) + held,
          "%zu chunks are left, %llu are counted as leaked", ledger.unreleased_count,
          (unsigned long long)world_leaked_chunks(&run.world));
}

/* Everything fails from the n-th call on, closing included; then the driver recovers. */
static bool run_for_ever(const struct scenario *scenario, enum mode mode, uint64_t n)
{
    gp_status status;
    gp_error error = {0};
    bool beyond;

    scenario_begin(&run, scenario);
    beyond = act_under_fault(scenario, mode, n, &status);
    announce(scenario, mode, n);
    check_leftovers();
    scenario_settle(&run, scenario);
    check_leaked_chunks();
    if (run.world.pool != NULL) {
        arm(mode, 1);
        status = gp_pool_close(run.world.pool, &error);
        CHECK(disarm(mode) < MOST_CALLS, "close tries for ever");
        CHECK(status == GP_OK || is_documented(status, scenario, mode), "close: %s", error.message);
        check_leftovers();
        CHECK_OK(gp_pool_close(run.world.pool, &error), &error);
        CHECK(gp_pool_is_closed(run.world.pool), "close did not close");
        check_leftovers();
        abandoned_runs += world_stats(&run.world).abandoned_bytes > 0;
    }
    model_end(&run.model);
    world_abandon(&run.world);
    return beyond;
}

/* Two faults, then everything works again. True when the second one was beyond the last call. */
static bool run_pair(const struct scenario *scenario, uint64_t n, bool *beyond)
{
    gp_status status;
    gp_error error = {0};
    bool hit;

    scenario_begin(&run, scenario);
    *beyond = act_under_fault(scenario, PAIR, n, &status);
    hit = fired >= 2;
    pairs += hit;
    announce(scenario, PAIR, n);
    check_leftovers();
    scenario_settle(&run, scenario);
    check_leaked_chunks();
    if (run.world.pool != NULL) {
        CHECK_OK(gp_pool_close(run.world.pool, &error), &error);
        check_leftovers();
        abandoned_runs += world_stats(&run.world).abandoned_bytes > 0;
    }
    model_end(&run.model);
    world_abandon(&run.world);
    return !hit;
}

/* Every pair of one scenario. */
static void sweep_pairs(const struct scenario *scenario)
{
    bool beyond = false;
    uint64_t stride = (scenario->shape & SCENARIO_LARGE) != 0 ? 4 * STRIDE : 1;

    for (uint64_t n = 1; !beyond; n += stride) {
        second_fault = 1;
        while (!run_pair(scenario, n, &beyond))
            second_fault += stride;
    }
    second_fault = 0;
}

static bool run_case(const struct scenario *scenario, enum mode mode, uint64_t n)
{
    bool for_ever = mode == FOR_EVER || mode == HEAP_FOR_EVER;

    return for_ever ? run_for_ever(scenario, mode, n) : run_once(scenario, mode, n);
}

/* Every n until a pass injects nothing; returns the last n that can hit something. */
static uint64_t sweep_scenario(const struct scenario *scenario, enum mode mode)
{
    uint64_t only = check_environment("GP_TEST_FAULT", 0), n = only == 0 ? 1 : only;

    while (!run_case(scenario, mode, n) && only == 0)
        n += mode < HEAP_ONCE && (scenario->shape & SCENARIO_LARGE) != 0 ? STRIDE : 1;
    return counted;
}

static const struct expectation *expectation_of(const struct scenario *scenario)
{
    for (size_t i = 0; i < sizeof expectations / sizeof *expectations; i++)
        if (strcmp(expectations[i].name, scenario->name) == 0)
            return &expectations[i];
    CHECK(false, "fault_counts.h has no line for scenario %s", scenario->name);
    return NULL;
}

static void sweep(enum mode mode)
{
    const char *only = getenv("GP_TEST_SCENARIO");
    bool wrong = false;

    for (size_t i = 0; scenario_at(i) != NULL; i++) {
        const struct scenario *scenario = scenario_at(i);
        const struct expectation *expected = expectation_of(scenario);
        uint64_t last, want = mode >= HEAP_ONCE ? expected->heap : expected->driver;

        if (only != NULL && strcmp(only, scenario->name) != 0)
            continue;
        last = sweep_scenario(scenario, mode);
        if (check_environment("GP_TEST_FAULT", 0) != 0 || mode == FOR_EVER ||
            mode == HEAP_FOR_EVER || last == want || refusals() > 0)
            continue; /* a refusal adds the calls of a second attempt */
        print_error("%s, %s: the largest n is %llu, fault_counts.h says %llu\n", scenario->name,
                    mode_text[mode], (unsigned long long)last, (unsigned long long)want);
        wrong = true;
    }
    check_context(NULL);
    CHECK(!wrong, "calls slipped in or fell away");
}

static void once_driver(void **state)
{
    (void)state;
    sweep(ONCE);
}

static void once_driver_error(void **state)
{
    (void)state;
    sweep(ONCE_AS_DRIVER_ERROR);
}

static void forever_driver(void **state)
{
    (void)state;
    abandoned_runs = 0;
    sweep(FOR_EVER);
    CHECK(abandoned_runs > 0 || getenv("GP_TEST_SCENARIO") != NULL,
          "no undo ever failed: nothing was compared");
}

static void pairs_of_driver_calls(void **state)
{
    const char *only = getenv("GP_TEST_SCENARIO");

    (void)state;
    abandoned_runs = 0;
    for (size_t i = 0; scenario_at(i) != NULL; i++) {
        const struct scenario *scenario = scenario_at(i);

        if (only == NULL || strcmp(only, scenario->name) == 0)
            sweep_pairs(scenario);
    }
    check_context(NULL);
    print_message("%llu pairs, %llu of them left something\n", (unsigned long long)pairs,
                  (unsigned long long)abandoned_runs);
    CHECK(abandoned_runs > 0 || only != NULL, "no undo ever failed: nothing was compared");
}

static void once_heap(void **state)
{
    (void)state;
    sweep(HEAP_ONCE);
}

static void forever_heap(void **state)
{
    (void)state;
    abandoned_runs = 0;
    sweep(HEAP_FOR_EVER);
    CHECK(abandoned_runs == 0, "chunks were abandoned for want of host memory");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(once_driver),
        cmocka_unit_test(once_driver_error),
        cmocka_unit_test(once_heap),
        cmocka_unit_test(forever_heap),
        /* Last: the addresses that these lose change how much later pools reserve. */
        cmocka_unit_test(forever_driver),
        cmocka_unit_test(pairs_of_driver_calls),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
