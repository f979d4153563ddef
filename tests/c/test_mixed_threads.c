/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything at once on the simulated device: threads that allocate, free what others allocated, record
 * streams, change ranges, pin, capture and replay, one that trims, drains and moves limits, one that closes
 * pools under all of them. The backing refuses and fails now and then. The simulated driver reports every
 * illegal call, and the pools' invariants are checked all the while. Meant for ThreadSanitizer.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "backing/memory.h"
#include "tests/support/world.h"
#include "vmm/pool.h"

#define MIB     CHECK_MIB
#define PAGE    WORLD_PAGE
#define WORKERS 5
#define POOLS   2
#define BOXES   24

/* A block or a range on its way to another thread, with the pool that it came from. */
struct box {
    gp_pool *pool;
    uintptr_t block;
    gp_range *range;
};

static struct {
    gp__sim *sim;
    gp_device *device;
    gp_backing *backing;
    gp_backing *inner;
    pthread_mutex_t lock; /* of pools and boxes */
    gp_pool *pools[POOLS];
    struct box boxes[BOXES];
    _Atomic int running;
    _Atomic uint64_t backing_calls, pools_closed, captures, commits, frees;
    int rounds;
} field;

struct worker {
    unsigned seed;
    uintptr_t handle; /* of a stream of its own */
    char failure[420]; /* the first one; "": none */
};

static unsigned dice(struct worker *worker, unsigned sides)
{
    return (unsigned)rand_r(&worker->seed) % sides;
}

/* What other threads may do to a call: close its pool, take all memory, work on the same part, keep a range
 * pinned, capture a stream that has to share its slot with the one concerned; and what the backing may do.
 * False, and noted, for anything else. A capture that was invalidated is seen at its end. */
static bool expected(struct worker *worker, gp_status status, const gp_error *error,
                     const char *what)
{
    bool state = status == GP_ERR_STATE &&
                 (error->reason == GP_REASON_CLOSED || error->reason == GP_REASON_BUSY);
    if (status == GP_OK || status == GP_ERR_LIMIT || status == GP_ERR_OUT_OF_MEMORY || state ||
        status == GP_ERR_PINNED || status == GP_ERR_CAPTURE || status == GP_ERR_CALLBACK)
        return true;
    if (worker->failure[0] == '\0')
        snprintf(worker->failure, sizeof worker->failure, "%s: %s: %s", what,
                 gp_status_text(status), error->message);
    return false;
}

/* ---- the backing ---- */

static gp_status moody_alloc(void *context, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    uint64_t number = atomic_fetch_add(&field.backing_calls, 1);
    (void)context;
    if (number % 13 == 5)
        return GP_ERR_OUT_OF_MEMORY;
    if (number % 37 == 7)
        return gp_error_set(error, GP_ERR_CALLBACK, "in a bad mood");
    return gp_backing_alloc(field.inner, request, out, error);
}

static gp_status moody_free(void *context, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    (void)context;
    if (atomic_fetch_add(&field.backing_calls, 1) % 17 == 3)
        return gp_error_set(error, GP_ERR_CALLBACK, "in a bad mood");
    return gp_backing_free(field.inner, chunk, request, error);
}

/* Pools that were let go still call the backing; the last of them ends it. */
static void moody_destroy(void *context)
{
    (void)context;
    gp_backing_release(field.inner);
}

static const gp_backing_ops moody_ops = {moody_alloc, moody_free, moody_destroy};

/* ---- pools and boxes ---- */

static gp_pool *open_pool(void)
{
    gp_pool *pool = NULL;
    gp_pool_options options = {.name = "mixed",
                               .device = field.device,
                               .backing = field.backing,
                               .limit = 64 * MIB,
                               .address_space = 256 * MIB};
    CHECK_OK(gp_pool_create(&options, &pool, NULL), NULL);
    return pool;
}

/* A reference to one of the pools. */
static gp_pool *some_pool(struct worker *worker)
{
    unsigned place = dice(worker, POOLS);
    pthread_mutex_lock(&field.lock);
    gp_pool *pool = gp_pool_retain(field.pools[place]);
    pthread_mutex_unlock(&field.lock);
    return pool;
}

/* Puts a box down and takes another one, which may be empty. */
static struct box swap(struct worker *worker, struct box mine)
{
    unsigned place = dice(worker, BOXES);
    pthread_mutex_lock(&field.lock);
    struct box other = field.boxes[place];
    field.boxes[place] = mine;
    pthread_mutex_unlock(&field.lock);
    return other;
}

/* Ends what is in the box, with this thread's stream or the block's own. */
static void empty_box(struct worker *worker, struct box box, gp_stream *stream)
{
    gp_error error = {0};
    if (box.block != 0) {
        gp_status status = gp_pool_free(box.pool, box.block, stream, 0, &error);
        /* Its pool was closed, and the block with it. */
        if (!(status == GP_ERR_ARGUMENT && gp_pool_is_closed(box.pool)))
            expected(worker, status, &error, "free");
        atomic_fetch_add(&field.frees, 1);
    }
    gp_range_release(box.range);
    gp_pool_release(box.pool);
}

/* ---- what workers do ---- */

/* A block that this thread's stream works on; whoever finds it in the box frees it. */
static void pass_block(struct worker *worker, gp_pool *pool, gp_stream *stream)
{
    gp_error error = {0};
    struct box mine = {NULL, 0, NULL};
    size_t bytes = dice(worker, 3 * (unsigned)MIB) + 512;
    gp_status status = gp_pool_malloc(pool, bytes, stream, 0, &mine.block, &error);
    if (!expected(worker, status, &error, "malloc") || status != GP_OK)
        return;
    mine.pool = gp_pool_retain(pool);
    struct box other = swap(worker, mine);
    gp_stream *user = NULL;
    if (other.pool != NULL && other.block != 0 && dice(worker, 2) == 0 &&
        gp_pool_stream(other.pool, worker->handle, &user, NULL) == GP_OK)
        (void)gp_pool_record_stream(other.pool, other.block, user, NULL);
    empty_box(worker, other, user);
    gp_stream_release(user);
}

/* Work on a block, while nobody else can free it. */
static void work_on_block(struct worker *worker, gp_pool *pool, gp_stream *stream)
{
    uintptr_t block = 0;
    gp_error error = {0};
    size_t bytes = dice(worker, (unsigned)MIB) + 512;
    gp_status status = gp_pool_malloc(pool, bytes, stream, 0, &block, &error);
    if (!expected(worker, status, &error, "malloc") || status != GP_OK)
        return;
    status =
        gp_pool_fill(pool, block, bytes, 7, stream, &error); /* fails when the pool is closed */
    expected(worker, status, &error, "fill");
    empty_box(worker, (struct box){gp_pool_retain(pool), block, NULL}, NULL);
}

static void change_range(struct worker *worker, gp_range *range)
{
    gp_error error = {0};
    gp_interval part = {dice(worker, 12) * PAGE, (dice(worker, 4) + 1) * PAGE};
    gp_status status = gp_range_commit(range, &part, 1, NULL, NULL, &error);
    expected(worker, status, &error, "commit");
    if (status == GP_OK && gp_range_pin(range, part.offset, part.bytes, false, NULL) == GP_OK)
        gp_range_unpin(range, part.offset, part.bytes);
    unsigned flags = dice(worker, 2) == 0 ? GP_TRIM_NO_WAIT : 0;
    status = gp_range_decommit(range, &part, 1, NULL, flags, NULL, &error);
    expected(worker, status, &error, "decommit");
    status = gp_range_resize(range, dice(worker, 6) * PAGE, NULL, flags, NULL, &error);
    expected(worker, status, &error, "resize");
    atomic_fetch_add(&field.commits, 1);
}

/* A range goes through a box: two threads may change one at the same time. */
static void pass_range(struct worker *worker, gp_pool *pool, gp_stream *stream)
{
    gp_error error = {0};
    struct box mine = {NULL, 0, NULL};
    gp_status status = gp_range_create(pool, 16 * PAGE, stream, &mine.range, &error);
    if (status == GP_ERR_ADDRESS_SPACE || !expected(worker, status, &error, "range") ||
        status != GP_OK)
        return;
    mine.pool = gp_pool_retain(pool);
    gp_range *also = gp_range_retain(mine.range);
    struct box other = swap(worker, mine);
    change_range(worker, also);
    if (other.range != NULL)
        change_range(worker, other.range);
    if (other.range != NULL && dice(worker, 3) == 0)
        expected(worker, gp_range_close(other.range, NULL, &error), &error, "close of a range");
    empty_box(worker, other, NULL);
    gp_range_release(also);
}

/* A stream of its own for each capture: nobody may begin one on a stream that others put fences on. */
static void capture(struct worker *worker, gp_pool *pool, gp_stream *unused)
{
    gp_error error = {0};
    uintptr_t handle = gp__sim_stream_create(field.sim, 0), block = 0;
    gp_stream *stream = NULL;
    (void)unused;
    gp__sim_capture_begin(field.sim, handle, (enum gp__sim_capture_mode)dice(worker, 3));
    gp_status status = gp_pool_stream(pool, handle, &stream, &error);
    if (status == GP_OK)
        status = gp_pool_malloc(pool, PAGE / 2, stream, 0, &block, &error);
    expected(worker, status, &error, "malloc in a capture");
    if (status == GP_OK)
        expected(worker, gp_pool_fill(pool, block, PAGE / 2, 1, stream, &error), &error,
                 "fill in a capture");
    if (block != 0)
        empty_box(worker, (struct box){gp_pool_retain(pool), block, NULL}, NULL);
    gp__sim_graph *graph = gp__sim_capture_end_graph(field.sim, handle);
    if (graph == NULL)
        snprintf(worker->failure, sizeof worker->failure, "a capture was invalidated");
    /* With a graph alive no close gets through, so the memory is there. */
    if (graph != NULL && status == GP_OK && !gp_pool_is_closed(pool))
        gp__sim_graph_launch(field.sim, graph, handle);
    if (graph != NULL)
        gp__sim_graph_destroy(field.sim, graph);
    status = gp_pool_forget_stream(pool, handle, &error);
    expected(worker, status, &error, "forget_stream");
    gp_stream_release(stream);
    gp__sim_stream_destroy(field.sim, handle);
    atomic_fetch_add(&field.captures, 1);
}

static void *work(void *context)
{
    static void (*const acts[])(struct worker *, gp_pool *, gp_stream *) = {
        pass_block, pass_block, work_on_block, work_on_block, pass_range, capture};
    struct worker *worker = context;
    for (int i = 0; i < field.rounds && worker->failure[0] == '\0'; i++) {
        gp_pool *pool = some_pool(worker);
        gp_stream *stream = NULL;
        if (gp_pool_stream(pool, worker->handle, &stream, NULL) == GP_OK)
            acts[dice(worker, sizeof acts / sizeof acts[0])](worker, pool, stream);
        gp_stream_release(stream);
        gp_pool_release(pool);
        if (dice(worker, 16) == 0)
            gp__sim_complete(field.sim, worker->handle, dice(worker, 8));
    }
    atomic_fetch_sub(&field.running, 1);
    return NULL;
}

/* ---- what disturbs them ---- */

static void shrink(struct worker *worker, gp_pool *pool)
{
    gp_error error = {0};
    size_t limit = (dice(worker, 64) + 8) * MIB;
    unsigned flags = dice(worker, 2) == 0 ? GP_TRIM_NO_WAIT : 0;
    gp_status status = gp_pool_trim(pool, 4 * MIB, flags, NULL, &error);
    expected(worker, status, &error, "trim");
    status = dice(worker, 4) == 0 ? gp_pool_drain(pool, &error) : GP_OK;
    expected(worker, status, &error, "drain");
    expected(worker, gp_pool_set_limit(pool, limit, NULL, &error), &error, "set_limit");
    expected(worker, gp_pool_return_unreturned(pool, NULL, &error), &error, "return_unreturned");
}

static void look(struct worker *worker, gp_pool *pool)
{
    char message[200];
    gp_pool_snapshot snapshot;
    if (gp_pool_take_snapshot(pool, &snapshot, NULL) == GP_OK)
        gp_pool_snapshot_free(&snapshot);
    if (!gp_pool_is_closed(pool) && !gp__pool_check(pool, message, sizeof message) &&
        !gp_pool_is_closed(pool))
        snprintf(worker->failure, sizeof worker->failure, "%s", message);
}

static void *trim_always(void *context)
{
    struct worker *worker = context;
    while (atomic_load(&field.running) > 0) {
        gp_pool *pool = some_pool(worker);
        shrink(worker, pool);
        look(worker, pool);
        gp_pool_release(pool);
    }
    return NULL;
}

/* Puts a new pool in the old one's place, closes the old one, and sometimes only lets it go. */
static void *close_always(void *context)
{
    struct worker *worker = context;
    while (atomic_load(&field.running) > 0) {
        gp_pool *fresh = open_pool();
        unsigned place = dice(worker, POOLS);
        pthread_mutex_lock(&field.lock);
        gp_pool *old = field.pools[place];
        field.pools[place] = fresh;
        pthread_mutex_unlock(&field.lock);
        gp_error error = {0};
        gp_status status = GP_ERR_PINNED;
        while (dice(worker, 8) != 0 && (status == GP_ERR_PINNED || status == GP_ERR_CAPTURE))
            status = gp_pool_close(old, &error);
        expected(worker, status, &error, "close");
        gp_pool_release(old);
        atomic_fetch_add(&field.pools_closed, 1);
    }
    return NULL;
}

/* ---- the run ---- */

static void count_only(void *context, const char *message)
{
    (void)context;
    (void)message;
}

static void begin(void)
{
    memset(&field, 0, sizeof field);
    pthread_mutex_init(&field.lock, NULL);
    field.rounds = (int)check_environment("GP_TEST_OPS", 15000) / 10;
    field.sim = gp__sim_create(NULL);
    field.device = gp__sim_device(field.sim);
    gp__sim_on_violation(field.sim, count_only, NULL);
    CHECK_OK(gp_backing_device(GP_LOCATION_DEVICE, &field.inner, NULL), NULL);
    CHECK_OK(gp_backing_create(&moody_ops, NULL, &field.backing, NULL), NULL);
    for (int i = 0; i < POOLS; i++)
        field.pools[i] = open_pool();
    atomic_store(&field.running, WORKERS);
}

static void end(int64_t live)
{
    struct worker last = {.seed = 1};
    struct gp__sim_ledger ledger;
    for (int i = 0; i < BOXES; i++)
        empty_box(&last, field.boxes[i], NULL);
    gp__sim_complete_all(field.sim);
    for (int i = 0; i < POOLS; i++) {
        CHECK_OK(gp_pool_close(field.pools[i], NULL), NULL);
        gp_pool_release(field.pools[i]);
    }
    gp_backing_release(field.backing);
    /* Pools that were let go are closed by the reaper. */
    for (int i = 0; i < 10000 && gp__memory_live() != live; i++) {
        gp__sim_complete_all(field.sim);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    assert_int_equal(gp__memory_live(), live);
    gp__sim_get_ledger(field.sim, &ledger);
    assert_int_equal(ledger.physical_bytes + ledger.reservation_count + ledger.event_count +
                         ledger.keep_count + ledger.entered,
                     0);
    CHECK(gp__sim_violations(field.sim) == 0, "%s", gp__sim_violation_text(field.sim));
    gp__sim_destroy(field.sim);
    pthread_mutex_destroy(&field.lock);
}

static void everything_at_once(void **state)
{
    struct worker workers[WORKERS + 2] = {{0}};
    pthread_t threads[WORKERS + 2];
    int64_t live = gp__memory_live();
    unsigned seed = (unsigned)check_environment("GP_TEST_SEED", 1000);
    char line[64];
    (void)state;
    snprintf(line, sizeof line, "GP_TEST_SEED=%u test_mixed_threads", seed);
    check_context(line);
    begin();
    for (unsigned i = 0; i < WORKERS + 2; i++) {
        void *(*run)(void *) = i < WORKERS ? work : i == WORKERS ? trim_always : close_always;
        workers[i].seed = seed + i;
        workers[i].handle = gp__sim_stream_create(field.sim, 0);
        assert_int_equal(pthread_create(&threads[i], NULL, run, &workers[i]), 0);
    }
    for (unsigned i = 0; i < WORKERS + 2; i++)
        pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < WORKERS + 2; i++)
        CHECK(workers[i].failure[0] == '\0', "thread %u: %s", i, workers[i].failure);
    CHECK(field.pools_closed > 1 && field.captures > 0 && field.commits > 0 && field.frees > 0,
          "a part never ran");
    end(live);
    check_context(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(everything_at_once)};
    return cmocka_run_group_tests_name("everything at once", tests, NULL, NULL);
}
