/* SPDX-License-Identifier: Apache-2.0
 *
 * Quick lists under threads: each stream's own thread allocates and frees the same sizes without the pool's
 * lock, while others free on foreign streams, give lists up, read figures, trim and close. Runs under
 * ThreadSanitizer; the simulator objects when memory changes hands too early.
 */
#include "tests/support/model.h"

#include <pthread.h>
#include <stdlib.h>

#include "vmm/quick.h"

#define MIB     CHECK_MIB
#define WORKERS WORLD_STREAMS
#define HANDED  16

static struct world world;
static bool stop;
static uintptr_t handed[HANDED]; /* blocks on their way to another thread */

static int set_up(void **state)
{
    world_begin(&world, &(struct world_options){.with_reaper = true});
    world_open(&world);
    stop = false;
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    world_end(*state);
    return 0;
}

static size_t rounds(void)
{
    const char *text = getenv("GP_TEST_OPS");

    return text != NULL ? (size_t)strtoul(text, NULL, 10) : 20000;
}

/* Work that the simulator holds pending, so that memory given away too early shows. */
static void use(int s, uintptr_t va, size_t bytes, size_t round)
{
    if (round % 16 == 0)
        world_launch(&world, s, va, bytes);
}

static void *work(void *number)
{
    int s = (int)(intptr_t)number;
    size_t count = rounds();

    for (size_t i = 0; i < count; i++) {
        size_t bytes = (512u << (i % 4)) + (i % 97 == 0 ? 4096 : 0);
        uintptr_t va = world_malloc(&world, bytes, s);
        use(s, va, bytes, i);
        if (i % 11 == 0) /* somebody frees it on a stream of theirs, and we what another left */
            va = __atomic_exchange_n(&handed[i / 11 % HANDED], va, __ATOMIC_ACQ_REL);
        if (i % 13 == 0 && va != 0)
            CHECK_OK(gp_pool_record_stream(world.pool, va, world.stream[(s + 1) % WORKERS], NULL),
                     NULL);
        world_free(&world, va, i % 5 == 0 ? -1 : s);
    }
    return NULL;
}

static void *look(void *unused)
{
    char message[400];

    (void)unused;
    for (int i = 0; !__atomic_load_n(&stop, __ATOMIC_ACQUIRE); i++) {
        gp_pool_stats stats = world_stats(&world);
        CHECK(stats.used_bytes <= stats.peak_used_bytes, "%zu used, %zu at most", stats.used_bytes,
              stats.peak_used_bytes);
        CHECK(gp__pool_check(world.pool, message, sizeof message), "%s", message);
        if (i % 8 == 0)
            CHECK_OK(gp_pool_trim(world.pool, 0, i % 16 == 0 ? GP_TRIM_NO_WAIT : 0, NULL, NULL),
                     NULL);
    }
    return NULL;
}

static void streams_work_apart_while_others_look_and_trim(void **state)
{
    pthread_t workers[WORKERS], looker;

    (void)state;
    assert_int_equal(pthread_create(&looker, NULL, look, NULL), 0);
    for (intptr_t i = 0; i < WORKERS; i++)
        assert_int_equal(pthread_create(&workers[i], NULL, work, (void *)i), 0);
    for (int i = 0; i < WORKERS; i++)
        pthread_join(workers[i], NULL);
    __atomic_store_n(&stop, true, __ATOMIC_RELEASE);
    pthread_join(looker, NULL);
    for (int i = 0; i < HANDED; i++) {
        world_free(&world, handed[i], -1);
        handed[i] = 0;
    }
    assert_int_equal(world_stats(&world).used_bytes, 0);
}

/* Frees race with the close: each either keeps its block, ends it, or finds the pool closed. */
static void *work_until_closed(void *number)
{
    gp_stream *stream = gp_stream_retain(world.stream[(intptr_t)number]);
    gp_status status = GP_OK;

    while (status == GP_OK) {
        uintptr_t va = 0;
        status = gp_pool_malloc(world.pool, 4096, stream, 0, &va, NULL);
        if (status != GP_OK)
            break;
        status = gp_pool_free(world.pool, va, stream, 0, NULL);
    }
    CHECK(status == GP_ERR_STATE, "%s", gp_status_text(status));
    gp_stream_release(stream);
    return NULL;
}

static void a_close_meets_the_fast_path_anywhere(void **state)
{
    pthread_t workers[WORKERS];

    (void)state;
    for (int round = 0; round < 50; round++) {
        for (intptr_t i = 0; i < WORKERS; i++)
            assert_int_equal(pthread_create(&workers[i], NULL, work_until_closed, (void *)i), 0);
        while (world_stats(&world).peak_used_bytes == 0)
            (void)sched_yield();
        if (round % 2 == 0)
            CHECK_OK(gp_pool_finish(world.pool, NULL), NULL);
        CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
        for (int i = 0; i < WORKERS; i++)
            pthread_join(workers[i], NULL);
        assert_int_equal(world.supplied_bytes, 0);
        world_close(&world);
        world_open(&world);
    }
}

static pthread_barrier_t both;

static void *free_too(void *address)
{
    for (size_t i = 0; i < rounds() / 10; i++) {
        pthread_barrier_wait(&both);
        (void)gp_pool_free(world.pool, *(uintptr_t *)address, NULL, 0, NULL);
        pthread_barrier_wait(&both);
    }
    return NULL;
}

/* A mistake of two users, of which one is told at best: it must not cost the pool its figures. */
static void a_block_freed_by_two_at_once_is_freed_once(void **state)
{
    uintptr_t va = 0;
    pthread_t other;
    char message[400];

    (void)state;
    pthread_barrier_init(&both, NULL, 2);
    pthread_create(&other, NULL, free_too, &va);
    for (size_t i = 0; i < rounds() / 10; i++) {
        CHECK_OK(gp_pool_malloc(world.pool, 4096, world.stream[0], 0, &va, NULL), NULL);
        pthread_barrier_wait(&both);
        (void)gp_pool_free(world.pool, va, world.stream[0], 0, NULL);
        pthread_barrier_wait(&both);
        CHECK(gp__pool_check(world.pool, message, sizeof message), "%s", message);
        assert_int_equal(world_stats(&world).used_bytes, 0);
    }
    pthread_join(other, NULL);
    pthread_barrier_destroy(&both);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(streams_work_apart_while_others_look_and_trim, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_close_meets_the_fast_path_anywhere, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_block_freed_by_two_at_once_is_freed_once, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
