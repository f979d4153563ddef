/* SPDX-License-Identifier: Apache-2.0
 *
 * Several threads on one pool of the simulated device, with work left pending on purpose: the simulated
 * driver reports every unmap under work, and a checker looks at the pool's invariants all the while.
 * Twin of test_pool_threads.c, which has real memory and real work instead.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/sim.h"
#include "vmm/growpool.h"
#include "vmm/pool.h"

#define MIB     ((size_t)1 << 20)
#define WORKERS 4
#define BOXES   16

struct arena {
    gp__sim *sim;
    gp_pool *pool;
    pthread_mutex_t lock;
    uintptr_t boxes[BOXES];
    _Atomic int running;
    int rounds;
};

struct worker {
    struct arena *arena;
    unsigned seed;
    int failures;
};

/* Counted by the simulator; the test asserts the count. */
static void ignore_violation(void *context, const char *message)
{
    (void)context;
    (void)message;
}

static uintptr_t swap(struct arena *arena, unsigned *seed, uintptr_t mine)
{
    size_t place = (size_t)rand_r(seed) % BOXES;
    pthread_mutex_lock(&arena->lock);
    uintptr_t other = arena->boxes[place];
    arena->boxes[place] = mine;
    pthread_mutex_unlock(&arena->lock);
    return other;
}

static int one_round(struct worker *worker, uintptr_t handle, gp_stream *stream)
{
    struct arena *arena = worker->arena;
    size_t bytes = (size_t)rand_r(&worker->seed) % (3 * MIB) + 4096;
    uintptr_t block = 0;
    gp_status status = gp_pool_malloc(arena->pool, bytes, stream, 0, &block, NULL);
    if (status == GP_ERR_LIMIT)
        return 0;
    if (status != GP_OK)
        return 1;
    gp__sim_launch(arena->sim, handle, block, bytes);
    gp__sim_launch(arena->sim, handle, block, bytes);
    uintptr_t other = swap(arena, &worker->seed, block);
    if (rand_r(&worker->seed) % 8 == 0)
        gp__sim_complete(arena->sim, handle, (size_t)rand_r(&worker->seed) % 10);
    bool use = rand_r(&worker->seed) % 2 == 0;
    if (use && gp_pool_record_stream(arena->pool, other, stream, NULL) != GP_OK)
        return 1;
    return gp_pool_free(arena->pool, other, use ? stream : NULL, 0, NULL) != GP_OK;
}

static void *work(void *context)
{
    struct worker *worker = context;
    struct arena *arena = worker->arena;
    uintptr_t handle = gp__sim_stream_create(arena->sim, 0);
    gp_stream *stream = NULL;
    worker->failures += gp_pool_stream(arena->pool, handle, &stream, NULL) != GP_OK;
    for (int i = 0; i < arena->rounds && worker->failures == 0; i++)
        worker->failures += one_round(worker, handle, stream);
    gp_stream_release(stream);
    atomic_fetch_sub(&arena->running, 1);
    return NULL;
}

static void *disturb(void *context)
{
    struct worker *worker = context;
    struct arena *arena = worker->arena;
    char message[256];
    while (atomic_load(&arena->running) > 0) {
        unsigned flags = rand_r(&worker->seed) % 2 == 0 ? GP_TRIM_NO_WAIT : 0;
        size_t limit = ((size_t)rand_r(&worker->seed) % 64 + 8) * MIB;
        worker->failures += gp_pool_trim(arena->pool, 4 * MIB, flags, NULL, NULL) != GP_OK;
        worker->failures += gp_pool_set_limit(arena->pool, limit, NULL, NULL) != GP_OK;
        worker->failures += !gp__pool_check(arena->pool, message, sizeof message);
    }
    return NULL;
}

static int rounds_wanted(void)
{
    const char *text = getenv("GP_TEST_OPS");
    long rounds = text != NULL ? strtol(text, NULL, 10) / 10 : 3000;
    return rounds > 0 ? (int)rounds : 1;
}

static void run_with_seed(unsigned seed)
{
    struct arena arena = {.lock = PTHREAD_MUTEX_INITIALIZER, .rounds = rounds_wanted()};
    struct worker workers[WORKERS + 1];
    pthread_t threads[WORKERS + 1];
    arena.sim = gp__sim_create(NULL);
    assert_non_null(arena.sim);
    gp__sim_on_violation(arena.sim, ignore_violation, NULL);
    gp_pool_options options = {.name = "shared",
                               .device = gp__sim_device(arena.sim),
                               .limit = 64 * MIB,
                               .address_space = 1024 * MIB};
    assert_int_equal(gp_pool_create(&options, &arena.pool, NULL), GP_OK);
    atomic_store(&arena.running, WORKERS);
    for (unsigned i = 0; i <= WORKERS; i++) {
        workers[i] = (struct worker){&arena, seed * 100 + i, 0};
        assert_int_equal(
            pthread_create(&threads[i], NULL, i < WORKERS ? work : disturb, &workers[i]), 0);
    }
    for (int i = 0; i <= WORKERS; i++)
        pthread_join(threads[i], NULL);
    if (gp__sim_violations(arena.sim) != 0)
        fail_msg("seed %u: %s", seed, gp__sim_violation_text(arena.sim));
    for (int i = 0; i <= WORKERS; i++)
        assert_int_equal(workers[i].failures, 0);
    assert_int_equal(gp_pool_close(arena.pool, NULL), GP_OK);
    gp_pool_release(arena.pool);
    struct gp__sim_ledger ledger;
    gp__sim_get_ledger(arena.sim, &ledger);
    assert_int_equal(ledger.physical_bytes, 0);
    assert_int_equal(ledger.reservation_count, 0);
    assert_int_equal(ledger.event_count, 0);
    gp__sim_destroy(arena.sim);
}

static void threads_share_a_simulated_pool(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 3; seed++)
        run_with_seed(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_share_a_simulated_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
