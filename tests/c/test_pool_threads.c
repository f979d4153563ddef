/* SPDX-License-Identifier: Apache-2.0
 *
 * Several threads on one pool of real host memory: each writes patterns through its own stream, blocks are
 * freed by other threads, while one more thread trims and moves the limit. A page unmapped too early
 * faults; a block handed out too early shows in its pattern. Meant for ThreadSanitizer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backing/host_stream.h"
#include "backing/memory.h"
#include "vmm/growpool.h"
#include "vmm/pool.h"

#define MIB     ((size_t)1 << 20)
#define WORKERS 4
#define BOXES   16

/* Work that a host stream runs over a block: fill it, or look whether it still holds its pattern. */
struct job {
    uintptr_t block;
    size_t words;
    uint64_t pattern;
    bool check;
    _Atomic uint64_t *wrong;
};

struct box { /* blocks on their way to another thread */
    uintptr_t block;
    size_t words;
    uint64_t pattern;
    gp_stream *stream; /* the one that wrote it */
};

struct arena {
    gp_pool *pool;
    pthread_mutex_t lock; /* of the boxes */
    struct box boxes[BOXES];
    _Atomic uint64_t wrong;
    _Atomic uint64_t refused;
    _Atomic int running;
    int rounds;
};

struct worker {
    struct arena *arena;
    unsigned seed;
    int failures;
};

static void run_job(void *context)
{
    struct job *job = context;
    volatile uint64_t *words = (volatile uint64_t *)job->block;
    /* The first and last words of each 4 KiB are enough to catch a page that went or changed hands. */
    for (size_t i = 0; i < job->words; i += 512) {
        if (!job->check)
            words[i] = job->pattern + i;
        else if (words[i] != job->pattern + i)
            atomic_fetch_add(job->wrong, 1);
    }
    free(job);
}

static bool submit(gp_host_stream *stream, const struct box *box, bool check, struct arena *arena)
{
    struct job *job = malloc(sizeof *job);
    if (job == NULL)
        return false;
    *job = (struct job){box->block, box->words, box->pattern, check, &arena->wrong};
    return gp_host_stream_submit(stream, run_job, job, NULL) == GP_OK;
}

/* Puts a block into a random box and takes out what was there. */
static struct box swap(struct arena *arena, unsigned *seed, struct box mine)
{
    size_t place = (size_t)rand_r(seed) % BOXES;
    pthread_mutex_lock(&arena->lock);
    struct box other = arena->boxes[place];
    arena->boxes[place] = mine;
    pthread_mutex_unlock(&arena->lock);
    return other;
}

static int one_round(struct worker *worker, gp_host_stream *host, gp_stream *stream)
{
    struct arena *arena = worker->arena;
    size_t bytes = ((size_t)rand_r(&worker->seed) % (3 * MIB)) + 4096;
    struct box mine = {0, bytes / 8, (uint64_t)rand_r(&worker->seed) << 20, stream};
    gp_status status = gp_pool_malloc(arena->pool, bytes, stream, 0, &mine.block, NULL);
    if (status == GP_ERR_LIMIT || status == GP_ERR_OUT_OF_MEMORY) {
        atomic_fetch_add(&arena->refused, 1);
        return 0;
    }
    if (status != GP_OK || !submit(host, &mine, false, arena) || !submit(host, &mine, true, arena))
        return 1;
    gp_stream_retain(stream);
    struct box other = swap(arena, &worker->seed, mine);
    if (other.block == 0)
        return 0;
    /* Ours now: half of the time our stream looks at nothing and only its writer owns it, half of the
     * time we declare our use of it, and free it with our stream. */
    bool use = rand_r(&worker->seed) % 2 == 0;
    if (use && gp_pool_record_stream(arena->pool, other.block, stream, NULL) != GP_OK)
        return 1;
    status = gp_pool_free(arena->pool, other.block, use ? stream : NULL, 0, NULL);
    gp_stream_release(other.stream);
    return status != GP_OK;
}

static void *work(void *context)
{
    struct worker *worker = context;
    struct arena *arena = worker->arena;
    gp_host_stream *host;
    gp_stream *stream;
    if (gp_host_stream_create(&host, NULL) != GP_OK ||
        gp_pool_stream(arena->pool, (uintptr_t)gp_host_stream_id(host), &stream, NULL) != GP_OK) {
        worker->failures++;
        return NULL;
    }
    for (int i = 0; i < arena->rounds; i++)
        worker->failures += one_round(worker, host, stream);
    worker->failures += gp_host_stream_wait(host, UINT64_C(60000000000)) != GP_OK;
    gp_stream_release(stream);
    gp_host_stream_close(host);
    atomic_fetch_sub(&arena->running, 1);
    return NULL;
}

static void *disturb(void *context)
{
    struct worker *worker = context;
    struct arena *arena = worker->arena;
    while (atomic_load(&arena->running) > 0) {
        gp_pool_stats stats;
        unsigned flags = rand_r(&worker->seed) % 2 == 0 ? GP_TRIM_NO_WAIT : 0;
        size_t limit = ((size_t)rand_r(&worker->seed) % 64 + 8) * MIB;
        worker->failures += gp_pool_trim(arena->pool, 4 * MIB, flags, NULL, NULL) != GP_OK;
        worker->failures += gp_pool_set_limit(arena->pool, limit, NULL, NULL) != GP_OK;
        gp_pool_get_stats(arena->pool, &stats);
        gp_pool_snapshot snapshot;
        worker->failures += gp_pool_take_snapshot(arena->pool, &snapshot, NULL) != GP_OK;
        gp_pool_snapshot_free(&snapshot);
    }
    return NULL;
}

static int rounds_wanted(void)
{
    const char *text = getenv("GP_TEST_OPS");
    long rounds = text != NULL ? strtol(text, NULL, 10) / 10 : 3000;
    return rounds > 0 ? (int)rounds : 1;
}

static void threads_share_a_pool(void **state)
{
    (void)state;
    gp_device *device;
    struct arena arena = {.lock = PTHREAD_MUTEX_INITIALIZER, .rounds = rounds_wanted()};
    struct worker workers[WORKERS + 1];
    pthread_t threads[WORKERS + 1];
    char message[256];
    assert_int_equal(gp_device_open(GP_DEVICE_HOST, 0, &device, NULL), GP_OK);
    gp_pool_options options = {
        .name = "shared", .device = device, .limit = 64 * MIB, .address_space = 1024 * MIB};
    assert_int_equal(gp_pool_create(&options, &arena.pool, NULL), GP_OK);
    atomic_store(&arena.running, WORKERS);
    for (unsigned i = 0; i <= WORKERS; i++) {
        workers[i] = (struct worker){&arena, i + 1, 0};
        assert_int_equal(
            pthread_create(&threads[i], NULL, i < WORKERS ? work : disturb, &workers[i]), 0);
    }
    for (int i = 0; i <= WORKERS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].failures, 0);
    }
    assert_int_equal(atomic_load(&arena.wrong), 0);
    assert_true(gp__pool_check(arena.pool, message, sizeof message));
    for (int i = 0; i < BOXES; i++)
        gp_stream_release(arena.boxes[i].stream);
    assert_int_equal(gp_pool_close(arena.pool, NULL), GP_OK);
    gp_pool_stats stats;
    gp_pool_get_stats(arena.pool, &stats);
    assert_int_equal(stats.physical_bytes, 0);
    assert_int_equal(stats.address_bytes, 0);
    gp_pool_release(arena.pool);
}

/* Threads that race to close a pool, and to use it meanwhile. */
static void *race_close(void *context)
{
    struct worker *worker = context;
    gp_pool *pool = worker->arena->pool;
    gp_stream *stream;
    uintptr_t block;
    if (gp_pool_stream(pool, 0, &stream, NULL) == GP_OK) {
        for (int i = 0; i < 50; i++) {
            if (gp_pool_malloc(pool, 100000, stream, 0, &block, NULL) == GP_OK)
                gp_pool_free(pool, block, NULL, 0, NULL);
        }
        gp_stream_release(stream);
    }
    worker->failures += gp_pool_close(pool, NULL) != GP_OK;
    return NULL;
}

static void threads_race_to_close(void **state)
{
    (void)state;
    gp_device *device;
    assert_int_equal(gp_device_open(GP_DEVICE_HOST, 0, &device, NULL), GP_OK);
    for (int round = 0; round < 50; round++) {
        struct arena arena = {.lock = PTHREAD_MUTEX_INITIALIZER};
        struct worker workers[WORKERS];
        pthread_t threads[WORKERS];
        gp_pool_options options = {
            .device = device, .limit = GP_NO_LIMIT, .address_space = 64 * MIB};
        assert_int_equal(gp_pool_create(&options, &arena.pool, NULL), GP_OK);
        for (int i = 0; i < WORKERS; i++) {
            workers[i] = (struct worker){&arena, (unsigned)i, 0};
            assert_int_equal(pthread_create(&threads[i], NULL, race_close, &workers[i]), 0);
        }
        for (int i = 0; i < WORKERS; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(workers[i].failures, 0);
        }
        assert_true(gp_pool_is_closed(arena.pool));
        gp_pool_release(arena.pool);
    }
}

/* Threads that all forget the same stream at once: one of them does it. */
static void *race_forget(void *context)
{
    struct worker *worker = context;
    uintptr_t handle = worker->arena->boxes[0].block;
    worker->failures += gp_pool_forget_stream(worker->arena->pool, handle, NULL) != GP_OK;
    return NULL;
}

static void threads_forget_one_stream(void **state)
{
    (void)state;
    gp_device *device;
    struct arena arena = {.lock = PTHREAD_MUTEX_INITIALIZER};
    assert_int_equal(gp_device_open(GP_DEVICE_HOST, 0, &device, NULL), GP_OK);
    gp_pool_options options = {.device = device, .limit = GP_NO_LIMIT, .address_space = 64 * MIB};
    assert_int_equal(gp_pool_create(&options, &arena.pool, NULL), GP_OK);
    for (int round = 0; round < 100; round++) {
        struct worker workers[WORKERS];
        pthread_t threads[WORKERS];
        gp_host_stream *host;
        gp_stream *stream;
        uintptr_t block;
        assert_int_equal(gp_host_stream_create(&host, NULL), GP_OK);
        arena.boxes[0].block = (uintptr_t)gp_host_stream_id(host);
        assert_int_equal(gp_pool_stream(arena.pool, arena.boxes[0].block, &stream, NULL), GP_OK);
        assert_int_equal(gp_pool_malloc(arena.pool, 4096, stream, 0, &block, NULL), GP_OK);
        assert_int_equal(gp_pool_free(arena.pool, block, NULL, 0, NULL), GP_OK);
        gp_stream_release(stream);
        for (int i = 0; i < WORKERS; i++) {
            workers[i] = (struct worker){&arena, (unsigned)i, 0};
            assert_int_equal(pthread_create(&threads[i], NULL, race_forget, &workers[i]), 0);
        }
        for (int i = 0; i < WORKERS; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(workers[i].failures, 0);
        }
        gp_host_stream_close(host);
    }
    assert_int_equal(gp_pool_close(arena.pool, NULL), GP_OK);
    gp_pool_release(arena.pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_share_a_pool),
        cmocka_unit_test(threads_race_to_close),
        cmocka_unit_test(threads_forget_one_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
