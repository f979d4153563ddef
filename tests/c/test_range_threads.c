/* SPDX-License-Identifier: Apache-2.0
 *
 * Several threads on the ranges of one pool: each commits and decommits a part of a common range
 * and a range of its own, one trims and moves the limit, one makes ranges and lets them go, and
 * threads race for the same part, for a close, and for the last reference. On real host memory a
 * page that goes too early faults and one that is handed out too early shows in its pattern. Meant
 * for ThreadSanitizer.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "backing/host_stream.h"
#include "backing/memory.h"
#include "tests/support/model.h"
#include "vmm/pool.h"

#define PAGE       ((size_t)WORLD_PAGE)
#define WORKERS    4
#define PART_PAGES 8

struct field {
    gp_pool *pool;
    gp_range *shared; /* worker i has pages [i * PART_PAGES, (i + 1) * PART_PAGES) */
    bool real; /* memory that can be written */
    _Atomic int running;
    _Atomic uint64_t wrong;
    int rounds;
};

struct worker {
    struct field *field;
    unsigned seed;
    unsigned number;
    uintptr_t handle; /* of a simulated stream */
    int failures;
    uint64_t done;
};

struct job {
    struct field *field;
    uintptr_t va;
    size_t bytes;
    uint64_t pattern;
};

/* Writes the pattern, then looks whether it is still there. */
static void run_job(void *context)
{
    struct job *job = context;

    for (int pass = 0; pass < 2; pass++)
        for (size_t at = 0; at < job->bytes; at += 4096) {
            volatile uint64_t *word = (volatile uint64_t *)(job->va + at);

            if (pass == 0)
                *word = job->pattern + at;
            else if (*word != job->pattern + at)
                atomic_fetch_add(&job->field->wrong, 1);
        }
    free(job);
}

static bool use(struct worker *worker, gp_host_stream *host, uintptr_t va, size_t bytes)
{
    struct job *job = worker->field->real ? malloc(sizeof *job) : NULL;

    if (!worker->field->real)
        return true;
    if (job == NULL)
        return false;
    *job = (struct job){worker->field, va, bytes, (uint64_t)rand_r(&worker->seed) << 24};
    return gp_host_stream_submit(host, run_job, job, NULL) == GP_OK;
}

static size_t below(struct worker *worker, size_t bound)
{
    return (size_t)rand_r(&worker->seed) % bound;
}

/* One step on the pages [first, first + PART_PAGES) of a range. */
static bool step(struct worker *worker, gp_range *range, size_t first, gp_host_stream *host,
                 gp_stream *stream)
{
    size_t at = below(worker, PART_PAGES), count = 1 + below(worker, PART_PAGES - at);
    gp_interval part = {(first + at) * PAGE, count * PAGE};
    gp_error error;
    gp_status status = gp_range_commit(range, &part, 1, stream, NULL, &error);

    if (status == GP_ERR_LIMIT || status == GP_ERR_OUT_OF_MEMORY)
        return true;
    if (status != GP_OK || !use(worker, host, gp_range_address(range) + part.offset, part.bytes))
        return false;
    worker->done++;
    if (below(worker, 3) == 0)
        part = (gp_interval){first * PAGE, PART_PAGES * PAGE}; /* leaves room for the others */
    else
        part.bytes = (1 + below(worker, count)) * PAGE;
    status = gp_range_decommit(range, &part, 1, stream, below(worker, 3) == 0 ? 0 : GP_TRIM_NO_WAIT,
                               NULL, &error);
    return status == GP_OK;
}

static void work_on(struct worker *worker, gp_host_stream *host, gp_stream *stream)
{
    struct field *field = worker->field;
    gp_range *own = NULL;

    if (gp_range_create(field->pool, PART_PAGES * PAGE, stream, &own, NULL) != GP_OK) {
        worker->failures++;
        return;
    }
    for (int i = 0; i < field->rounds; i++) {
        worker->failures += !step(worker, field->shared, worker->number * PART_PAGES, host, stream);
        worker->failures += !step(worker, own, 0, host, stream);
        if (below(worker, 8) > 0)
            continue;
        worker->failures += gp_range_close(own, stream, NULL) != GP_OK;
        gp_range_release(own);
        own = NULL;
        if (gp_range_create(field->pool, PART_PAGES * PAGE, stream, &own, NULL) != GP_OK) {
            worker->failures++;
            return;
        }
    }
    gp_range_release(own);
}

static void *work(void *context)
{
    struct worker *worker = context;
    struct field *field = worker->field;
    gp_host_stream *host = NULL;
    gp_stream *stream = NULL;

    if (field->real && gp_host_stream_create(&host, NULL) == GP_OK)
        worker->handle = (uintptr_t)gp_host_stream_id(host);
    if (gp_pool_stream(field->pool, worker->handle, &stream, NULL) != GP_OK)
        worker->failures++;
    else
        work_on(worker, host, stream);
    gp_stream_release(stream);
    if (host != NULL) {
        worker->failures += gp_host_stream_wait(host, UINT64_C(60000000000)) != GP_OK;
        gp_host_stream_close(host);
    }
    atomic_fetch_sub(&field->running, 1);
    return NULL;
}

static void *disturb(void *context)
{
    struct worker *worker = context;
    struct field *field = worker->field;

    while (atomic_load(&field->running) > 0) {
        unsigned flags = below(worker, 2) == 0 ? GP_TRIM_NO_WAIT : 0;
        gp_interval parts[16];
        gp_pool_snapshot snapshot;

        worker->failures += gp_pool_trim(field->pool, 4 * PAGE, flags, NULL, NULL) != GP_OK;
        worker->failures +=
            gp_pool_set_limit(field->pool, (8 + below(worker, 56)) * PAGE, NULL, NULL) != GP_OK;
        gp_range_committed(field->shared, parts, 16);
        worker->failures += gp_range_is_closed(field->shared);
        worker->failures += gp_pool_take_snapshot(field->pool, &snapshot, NULL) != GP_OK;
        gp_pool_snapshot_free(&snapshot);
    }
    return NULL;
}

static void run_field(struct field *field, const uintptr_t handles[WORKERS])
{
    struct worker workers[WORKERS + 1];
    pthread_t threads[WORKERS + 1];
    gp_stream *first = NULL;
    uint64_t done = 0;
    char message[256];

    CHECK_OK(gp_pool_stream(field->pool, handles[0], &first, NULL), NULL);
    CHECK_OK(gp_range_create(field->pool, WORKERS * PART_PAGES * PAGE, first, &field->shared, NULL),
             NULL);
    atomic_store(&field->running, WORKERS);
    for (unsigned i = 0; i <= WORKERS; i++) {
        workers[i] = (struct worker){.field = field, .seed = i + 1, .number = i};
        if (i < WORKERS)
            workers[i].handle = handles[i];
        CHECK(pthread_create(&threads[i], NULL, i < WORKERS ? work : disturb, &workers[i]) == 0,
              "no thread");
    }
    for (int i = 0; i <= WORKERS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i <= WORKERS; i++)
        CHECK(workers[i].failures == 0, "%d failures of thread %d", workers[i].failures, i);
    for (int i = 0; i < WORKERS; i++)
        done += workers[i].done;
    CHECK(done > 0, "nothing was ever committed");
    CHECK(atomic_load(&field->wrong) == 0, "%llu words were overwritten",
          (unsigned long long)atomic_load(&field->wrong));
    gp_range_release(field->shared);
    gp_stream_release(first);
    CHECK_OK(gp_pool_drain(field->pool, NULL), NULL);
    CHECK(gp__pool_check(field->pool, message, sizeof message), "%s", message);
}

static int rounds_wanted(void)
{
    return (int)(check_environment("GP_TEST_OPS", 10000) / 50) + 1;
}

static void expect_nothing_left(gp_pool *pool)
{
    gp_pool_stats stats;

    CHECK_OK(gp_pool_close(pool, NULL), NULL);
    gp_pool_get_stats(pool, &stats);
    CHECK(stats.physical_bytes == 0 && stats.address_bytes == 0 && stats.used_bytes == 0,
          "%zu physical, %zu address, %zu used bytes are left", stats.physical_bytes,
          stats.address_bytes, stats.used_bytes);
}

static void threads_share_ranges_of_real_memory(void **state)
{
    const uintptr_t handles[WORKERS] = {0};
    struct field field = {.real = true, .rounds = rounds_wanted()};
    gp_device *device;
    gp_error error;

    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &device, &error), &error);
    for (size_t chunk_size = 0; chunk_size <= PAGE; chunk_size += PAGE) {
        gp_pool_options options = {.device = device,
                                   .limit = 64 * PAGE,
                                   .chunk_size = chunk_size,
                                   .address_space = 64 * PAGE};

        CHECK_OK(gp_pool_create(&options, &field.pool, &error), &error);
        run_field(&field, handles);
        expect_nothing_left(field.pool);
        gp_pool_release(field.pool);
    }
}

/* The simulator sees every call: none may be out of order, whoever makes it. */
static void threads_share_ranges_of_a_strict_device(void **state)
{
    static struct world world;
    struct field field = {.rounds = rounds_wanted()};

    (void)state;
    world_begin(&world, &(struct world_options){.limit = 64 * PAGE, .with_reaper = true});
    gp__sim_log_enable(world.sim, false);
    world_open(&world);
    field.pool = world.pool;
    run_field(&field, world.handle);
    world_end(&world);
}

/* ---- races ---- */

/* What all threads of a race do, after they met at the barrier. */
struct race {
    pthread_barrier_t start;
    gp_pool *pool;
    gp_range *range;
    gp_stream *stream;
    void (*act)(struct race *race, unsigned number);
    _Atomic int failures;
};

struct runner {
    struct race *race;
    unsigned number;
};

static void *run_race(void *context)
{
    struct runner *runner = context;

    pthread_barrier_wait(&runner->race->start);
    runner->race->act(runner->race, runner->number);
    return NULL;
}

static void race(struct race *race, unsigned count)
{
    struct runner runners[WORKERS];
    pthread_t threads[WORKERS];

    CHECK(pthread_barrier_init(&race->start, NULL, count) == 0, "no barrier");
    for (unsigned i = 0; i < count; i++) {
        runners[i] = (struct runner){race, i};
        CHECK(pthread_create(&threads[i], NULL, run_race, &runners[i]) == 0, "no thread");
    }
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&race->start);
    CHECK(atomic_load(&race->failures) == 0, "%d failures", atomic_load(&race->failures));
}

static void begin_race(struct race *race, void (*act)(struct race *, unsigned), unsigned flags)
{
    gp_device *device;
    gp_error error;

    memset(race, 0, sizeof *race);
    race->act = act;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &device, &error), &error);
    gp_pool_options options = {.device = device,
                               .limit = GP_NO_LIMIT,
                               .chunk_size = PAGE,
                               .address_space = 8 * PAGE,
                               .flags = flags};
    CHECK_OK(gp_pool_create(&options, &race->pool, &error), &error);
    CHECK_OK(gp_pool_stream(race->pool, 0, &race->stream, &error), &error);
}

static void begin_range(struct race *race)
{
    gp_interval part = {0, PAGE};

    CHECK_OK(gp_range_create(race->pool, 8 * PAGE, race->stream, &race->range, NULL), NULL);
    CHECK_OK(gp_range_commit(race->range, &part, 1, NULL, NULL, NULL), NULL);
}

static void end_race(struct race *race)
{
    gp_stream_release(race->stream);
    expect_nothing_left(race->pool);
    gp_pool_release(race->pool);
}

/* The same part: each call succeeds or is told that the part is busy; resizes likewise. */
static void fight_for_a_part(struct race *race, unsigned number)
{
    for (size_t i = 0; i < 100; i++) {
        gp_interval part = {PAGE, 2 * PAGE};
        gp_error error = {0};
        gp_status status;

        if (number == 0)
            status = gp_range_resize(race->range, (1 + i % 4) * PAGE, NULL, GP_TRIM_NO_WAIT, NULL,
                                     &error);
        else if (number == 1)
            status = gp_range_resize(race->range, (4 - i % 4) * PAGE, NULL, 0, NULL, &error);
        else if (i % 2 == 0)
            status = gp_range_commit(race->range, &part, 1, NULL, NULL, &error);
        else
            status = gp_range_decommit(race->range, &part, 1, NULL,
                                       number == 2 ? GP_TRIM_NO_WAIT : 0, NULL, &error);
        if (status != GP_OK && (status != GP_ERR_STATE || error.reason != GP_REASON_BUSY))
            atomic_fetch_add(&race->failures, 1);
    }
}

static void threads_fight_for_a_part(void **state)
{
    struct race field;
    char message[256];

    (void)state;
    begin_race(&field, fight_for_a_part, 0);
    for (int round = 0; round < 10; round++) {
        begin_range(&field);
        race(&field, 4);
        CHECK(gp_range_committed_bytes(field.range) % PAGE == 0, "half a page");
        CHECK_OK(gp_range_resize(field.range, 0, NULL, 0, NULL, NULL), NULL);
        gp_range_release(field.range);
        CHECK_OK(gp_pool_drain(field.pool, NULL), NULL);
        CHECK(gp__pool_check(field.pool, message, sizeof message), "%s", message);
    }
    end_race(&field);
}

/* One closes, one commits, one pins and unpins, one drains; the last reference goes in another
 * thread each time. */
static void close_under_use(struct race *race, unsigned number)
{
    gp_interval part = {2 * PAGE, 3 * PAGE};
    gp_error error = {0};
    gp_status status = GP_OK;

    if (number == 0)
        status = gp_range_close(race->range, NULL, &error);
    else if (number == 1)
        status = gp_range_commit(race->range, &part, 1, NULL, NULL, &error);
    else if (number == 2)
        status = gp_range_pin(race->range, 0, 512, false, &error);
    else
        status = gp_pool_drain(race->pool, &error);
    if (number == 2 && status == GP_OK)
        gp_range_unpin(race->range, 0, 512);
    if (status != GP_OK && status != GP_ERR_PINNED &&
        (status != GP_ERR_STATE || error.reason != GP_REASON_CLOSED))
        atomic_fetch_add(&race->failures, 1);
    gp_range_release(race->range);
}

static void threads_race_to_end_a_range(void **state)
{
    struct race field;

    (void)state;
    for (unsigned flags = 0; flags <= GP_POOL_NO_REAPER; flags++) {
        begin_race(&field, close_under_use, flags);
        for (int round = 0; round < 100; round++) {
            begin_range(&field);
            for (int i = 1; i < 4; i++)
                gp_range_retain(field.range);
            race(&field, 4);
        }
        end_race(&field);
    }
}

/* A closed range is buried by whoever unmaps the last of it, just as its last holder lets go. */
static void release_or_bury(struct race *race, unsigned number)
{
    if (number == 0)
        gp_range_release(race->range);
    else if (gp_pool_drain(race->pool, NULL) != GP_OK)
        atomic_fetch_add(&race->failures, 1);
}

static void threads_race_to_bury_a_range(void **state)
{
    struct race field;

    (void)state;
    begin_race(&field, release_or_bury, GP_POOL_NO_REAPER);
    for (int round = 0; round < 1000; round++) {
        begin_range(&field);
        CHECK_OK(gp_range_close(field.range, NULL, NULL), NULL);
        race(&field, 2);
    }
    end_race(&field);
}

/* The pool closes while its ranges do: every one of them is freed once, and everything is back. */
static void close_with_the_pool(struct race *race, unsigned number)
{
    if (number == 0 && gp_pool_close(race->pool, NULL) != GP_OK)
        atomic_fetch_add(&race->failures, 1);
    if (number == 1 && gp_range_close(race->range, NULL, NULL) != GP_OK)
        atomic_fetch_add(&race->failures, 1);
    if (number == 2)
        gp_range_committed_bytes(race->range);
    gp_range_release(race->range);
}

static void threads_race_to_close_the_pool(void **state)
{
    struct race field;
    int64_t live = 0;

    (void)state;
    for (int round = 0; round < 100; round++) {
        gp_pool_stats stats;

        if (round == 1) /* what the device keeps for itself is there by now */
            live = gp__memory_live();
        begin_race(&field, close_with_the_pool, 0);
        begin_range(&field);
        for (int i = 1; i < 4; i++)
            gp_range_retain(field.range);
        race(&field, 4);
        gp_pool_get_stats(field.pool, &stats);
        CHECK(stats.address_bytes == 0, "%zu bytes of addresses after a close",
              stats.address_bytes);
        end_race(&field);
    }
    CHECK(gp__memory_live() == live, "%lld allocations are left",
          (long long)(gp__memory_live() - live));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* First those that count allocations: the worker of a host stream ends when it likes. */
        cmocka_unit_test(threads_share_ranges_of_a_strict_device),
        cmocka_unit_test(threads_race_to_close_the_pool),
        cmocka_unit_test(threads_race_to_bury_a_range),
        cmocka_unit_test(threads_fight_for_a_part),
        cmocka_unit_test(threads_race_to_end_a_range),
        cmocka_unit_test(threads_share_ranges_of_real_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
