/* SPDX-License-Identifier: Apache-2.0
 *
 * A forked child: every call on a pool, a range or a stream of the parent's says so, or does nothing; and
 * so ends a call whose callback forked. The lock witness tells whether the child came to a lock, and the
 * simulated device ends a child that calls it.
 */
#include "child.h"
#include <limits.h>

#include "backing/host_stream.h"
#include "backing/lock.h"
#include "tests/support/world.h"
#include "vmm/pool.h"

#define PAGE ((size_t)2 << 20)

/* ---- calls that begin in the child ---- */

struct parent {
    gp_pool *pool;
    gp_stream *stream;
    gp_range *range;
    uintptr_t block;
    gp_backing *cache;
    gp_chunk *chunk;
    gp_host_stream *worker;
};

static void do_nothing(void *unused)
{
    (void)unused;
}

static bool is_forked(gp_status status, const gp_error *error)
{
    return status == GP_ERR_STATE && error->reason == GP_REASON_FORKED;
}

#define FORKED(call)                                                                               \
    do {                                                                                           \
        memset(&error, 0, sizeof error);                                                           \
        if (!is_forked(call, &error))                                                              \
            return false;                                                                          \
    } while (0)

static bool blocks_say_so(void *context)
{
    struct parent *p = context;
    gp_error error;
    gp_stream *stream = NULL;
    uintptr_t out = 0;

    FORKED(gp_pool_malloc(p->pool, 512, p->stream, 0, &out, &error));
    FORKED(gp_pool_try_malloc(p->pool, 512, p->stream, 0, &out, &error));
    FORKED(gp_pool_free(p->pool, p->block, NULL, 0, &error));
    FORKED(gp_pool_record_stream(p->pool, p->block, p->stream, &error));
    FORKED(gp_pool_pin(p->pool, p->block, true, &error));
    FORKED(gp_pool_stream(p->pool, 0, &stream, &error));
    FORKED(gp_pool_block_stream(p->pool, p->block, &stream, &error));
    gp_pool_unpin(p->pool, p->block);
    gp_pool_abandon(p->pool, p->block, 0);
    return out == 0 && stream == NULL;
}

static bool work_says_so(void *context)
{
    struct parent *p = context;
    gp_error error;

    FORKED(gp_pool_copy(p->pool, p->block, p->block + 256, 16, p->stream, &error));
    FORKED(gp_pool_fill(p->pool, p->block, 16, 0, p->stream, &error));
    FORKED(gp_pool_synchronize(p->pool, p->stream, false, &error));
    FORKED(gp_pool_join(p->pool, p->stream, p->stream, &error));
    FORKED(gp_pool_forget_stream(p->pool, gp_stream_handle(p->stream), &error));
    return true;
}

static bool ranges_say_so(void *context)
{
    struct parent *p = context;
    const gp_interval part = {0, PAGE};
    gp_interval found;
    gp_error error;
    gp_range *range = NULL;

    FORKED(gp_range_create(p->pool, PAGE, p->stream, &range, &error));
    FORKED(gp_range_commit(p->range, &part, 1, NULL, NULL, &error));
    FORKED(gp_range_decommit(p->range, &part, 1, NULL, 0, NULL, &error));
    FORKED(gp_range_resize(p->range, 2 * PAGE, NULL, 0, NULL, &error));
    FORKED(gp_range_record_stream(p->range, p->stream, &error));
    FORKED(gp_range_pin(p->range, 0, 512, true, &error));
    FORKED(gp_range_close(p->range, NULL, &error));
    gp_range_unpin(p->range, 0, 512);
    gp_range_release(gp_range_retain(p->range));
    return range == NULL && gp_range_size(p->range) == PAGE &&
           gp_range_committed_bytes(p->range) == PAGE && gp_range_physical_bytes(p->range) == 0 &&
           gp_range_committed(p->range, &found, 1) == 0 && !gp_range_is_closed(p->range);
}

static bool pools_say_so(void *context)
{
    struct parent *p = context;
    gp_pool_snapshot snapshot;
    gp_pool_stats stats;
    gp_error error;

    FORKED(gp_pool_trim(p->pool, 0, 0, NULL, &error));
    FORKED(gp_pool_trim(p->pool, 0, GP_TRIM_NO_WAIT, NULL, &error));
    FORKED(gp_pool_drain(p->pool, &error));
    FORKED(gp_pool_set_limit(p->pool, PAGE, NULL, &error));
    FORKED(gp_pool_return_unreturned(p->pool, NULL, &error));
    FORKED(gp_pool_take_snapshot(p->pool, &snapshot, &error));
    FORKED(gp_pool_finish(p->pool, &error));
    FORKED(gp_pool_close(p->pool, &error));
    gp_pool_reset_peak_stats(p->pool);
    gp_pool_get_stats(p->pool, &stats);
    gp_pool_release(p->pool);
    return stats.used_bytes == PAGE + 512 && gp_pool_unreturned(p->pool, NULL, 0) == 0 &&
           !gp_pool_is_closed(p->pool);
}

static bool nothing_can_be_made(void *context)
{
    struct parent *p = context;
    gp_pool_options options = {.limit = GP_NO_LIMIT, .device = gp_pool_device(p->pool)};
    gp_device *device = NULL;
    gp_pool *pool = NULL;
    gp_chunk *chunk = NULL;
    gp_host_stream *stream = NULL;
    gp_error error;
    size_t free_bytes, total_bytes;

    FORKED(gp_device_open(GP_DEVICE_HOST, 0, &device, &error));
    FORKED(gp_device_memory(options.device, &free_bytes, &total_bytes, &error));
    FORKED(gp_pool_create(&options, &pool, &error));
    FORKED(gp_chunk_create(options.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, &error));
    FORKED(gp_host_stream_create(&stream, &error));
    return pool == NULL && chunk == NULL && stream == NULL;
}

/* The caching backing's lock may be held as well; what it keeps stays the parent's. */
static bool backings_say_so(void *context)
{
    struct parent *p = context;
    gp_request request = {PAGE, gp_pool_device(p->pool), 0};
    gp_chunk *chunk = NULL;
    gp_error error;

    FORKED(gp_backing_alloc(p->cache, &request, &chunk, &error));
    FORKED(gp_backing_free(p->cache, p->chunk, &request, &error));
    FORKED(gp_backing_trim(p->cache, 0, NULL, &error));
    FORKED(gp_chunk_close(p->chunk, &error));
    FORKED(gp_host_stream_submit(p->worker, do_nothing, NULL, &error));
    bool empty = gp_backing_cached_bytes(p->cache) == 0;
    gp_chunk_release(p->chunk);
    gp_backing_release(p->cache);
    gp_host_stream_close(p->worker);
    return empty;
}

static bool (*const bodies[])(void *) = {blocks_say_so,       work_says_so,    ranges_say_so,
                                         nothing_can_be_made, backings_say_so, pools_say_so};

struct body {
    bool (*function)(void *context);
    struct parent *parent;
};

static bool without_a_lock(void *context)
{
    const struct body *body = context;

    return body->function(body->parent) && gp__witness_child_locks() == 0;
}

static void make_parent(struct parent *p)
{
    gp_error error = {0};
    gp_pool_options options = {.limit = GP_NO_LIMIT, .chunk_size = PAGE};
    gp_backing *device = NULL;

    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &options.device, &error), &error);
    CHECK_OK(gp_pool_create(&options, &p->pool, &error), &error);
    CHECK_OK(gp_pool_stream(p->pool, 0, &p->stream, &error), &error);
    CHECK_OK(gp_pool_malloc(p->pool, 512, p->stream, 0, &p->block, &error), &error);
    CHECK_OK(gp_range_create(p->pool, 4 * PAGE, p->stream, &p->range, &error), &error);
    CHECK_OK(gp_range_resize(p->range, PAGE, NULL, 0, NULL, &error), &error);
    CHECK_OK(gp_backing_device(GP_LOCATION_DEVICE, &device, &error), &error);
    CHECK_OK(gp_backing_caching(device, SIZE_MAX, &p->cache, &error), &error);
    gp_backing_release(device);
    CHECK_OK(gp_chunk_create(options.device, PAGE, GP_LOCATION_DEVICE, 0, &p->chunk, &error),
             &error);
    CHECK_OK(gp_host_stream_create(&p->worker, &error), &error);
}

static void unmake_parent(struct parent *p)
{
    gp_error error = {0};

    CHECK_OK(gp_pool_free(p->pool, p->block, NULL, 0, &error), &error);
    gp_range_release(p->range);
    gp_stream_release(p->stream);
    CHECK_OK(gp_pool_close(p->pool, &error), &error);
    gp_pool_release(p->pool);
    gp_backing_release(p->cache);
    gp_chunk_release(p->chunk);
    gp_host_stream_close(p->worker);
}

static void every_call_in_a_forked_child_says_so(void **state)
{
    struct parent p = {0};

    (void)state;
    make_parent(&p);
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        struct body body = {bodies[i], &p};
        gp__mutex_lock(&p.pool->lock); /* as a thread of the parent's might */
        int status = in_child(without_a_lock, &body);
        gp__mutex_unlock(&p.pool->lock);
        CHECK(status == 0, "child %zu ended with %#x", i, (unsigned)status);
    }
    unmake_parent(&p);
}

/* ---- a process that only loaded growpool ---- */

static bool uses_growpool(void *context)
{
    struct parent p = {0};
    struct body body = {blocks_say_so, &p};

    (void)context;
    make_parent(&p);
    memset((void *)p.block, 1, 512);
    bool forked = in_child(without_a_lock, &body) == 0; /* for its own children it is the parent */
    unmake_parent(&p);
    return forked;
}

static bool forks_again(void *context)
{
    return in_child(uses_growpool, context) == 0;
}

/* The first test of this file, while the process has used nothing. */
static void a_child_forked_before_the_first_use_starts_afresh(void **state)
{
    (void)state;
    assert_int_equal(in_child(uses_growpool, NULL), 0);
    assert_int_equal(in_child(forks_again, NULL), 0);
    assert_int_equal(gp__fork_generation(), 0);
}

/* ---- calls whose callback forks ---- */

static struct world world;
static pid_t parent_id;
static unsigned calls_before_fork; /* of callbacks that may fork; UINT_MAX: never again */
static int child_status;
static size_t claimed_at_fork;

static bool is_child(void)
{
    return getpid() != parent_id;
}

/* Before a sanitizer looks for what the parent's other threads refer to. */
static void end_child(void)
{
    _exit(0);
}

/* Both processes go on from here; the parent after the child's end. */
static void fork_here(void)
{
    if (calls_before_fork-- != 0)
        return;
    calls_before_fork = UINT_MAX;
    pid_t child = fork();
    CHECK(child >= 0, "fork failed");
    if (child == 0) {
        claimed_at_fork = world.pool->claimed_bytes;
        CHECK(atexit(end_child) == 0, "no room for a handler");
        return;
    }
    CHECK(waitpid(child, &child_status, 0) == child, "no child");
}

static gp_status fork_in_alloc(struct world *w, const gp_request *request, gp_chunk **out,
                               gp_error *error)
{
    gp_status status = gp_backing_alloc(w->inner, request, out, error);

    if (status == GP_OK) {
        w->supplied_bytes += request->size;
        w->supplied_chunks++;
    }
    fork_here(); /* a success in the child too */
    return status;
}

static void fork_before_free(struct world *w, const gp_request *request)
{
    (void)w;
    (void)request;
    fork_here();
}

static int fork_in_wait(void *context)
{
    (void)context;
    fork_here();
    if (!is_child())
        gp__sim_complete_all(world.sim);
    return 0;
}

/* Does `operation`, during which the n-th callback forks. In the child it must fail with one of two
 * statuses, have undone nothing, and have left the device alone (else the simulator aborts). In the
 * parent it works. */
static void forks(const char *name, unsigned n, gp_status (*operation)(gp_error *error))
{
    gp_error error = {0};

    calls_before_fork = n;
    child_status = -1;
    gp_status status = operation(&error);
    if (is_child()) {
        bool refused = is_forked(status, &error) || status == GP_ERR_INTERRUPTED;
        _exit(refused && world.pool->claimed_bytes == claimed_at_fork ? 0 : 1);
    }
    CHECK_OK(status, &error);
    CHECK(child_status == 0, "%s: the child ended with %#x", name, (unsigned)child_status);
    calls_before_fork = UINT_MAX;
}

static uintptr_t made;
static gp_range *range;

static gp_status grow(gp_error *error)
{
    return gp_pool_malloc(world.pool, 3 * PAGE, world.stream[0], 0, &made, error);
}

static gp_status commit(gp_error *error)
{
    const gp_interval part = {0, 3 * PAGE};

    return gp_range_commit(range, &part, 1, world.stream[0], NULL, error);
}

static gp_status decommit(gp_error *error)
{
    const gp_interval part = {0, 3 * PAGE};

    return gp_range_decommit(range, &part, 1, world.stream[0], 0, NULL, error);
}

static gp_status trim(gp_error *error)
{
    size_t released;

    return gp_pool_trim(world.pool, 0, 0, &released, error);
}

static gp_status drain(gp_error *error)
{
    return gp_pool_drain(world.pool, error);
}

static gp_status close_pool(gp_error *error)
{
    return gp_pool_close(world.pool, error);
}

static gp_status try_again(gp_error *error)
{
    size_t returned;

    return gp_pool_return_unreturned(world.pool, &returned, error);
}

static void begin_world(int (*interrupted)(void *context))
{
    parent_id = getpid();
    calls_before_fork = UINT_MAX;
    world_begin(&world, &(struct world_options){.chunk_size = PAGE, .interrupted = interrupted});
    world_open(&world);
    world.before_free = fork_before_free;
}

/* Growing: every place of the fork among the three chunks. */
static void alloc_may_fork(void **state)
{
    (void)state;
    begin_world(NULL);
    world.answer = fork_in_alloc;
    CHECK_OK(gp_range_create(world.pool, 4 * PAGE, world.stream[0], &range, &world.error),
             &world.error);
    for (unsigned n = 0; n < 3; n++) {
        forks("a block", n, grow);
        world_free(&world, made, 0);
        CHECK_OK(trim(&world.error), &world.error);
        forks("a commit", n, commit);
        CHECK_OK(decommit(&world.error), &world.error);
    }
    gp_range_release(range);
    world_end(&world);
}

static bool fail_all(struct world *w, size_t size)
{
    (void)w;
    (void)size;
    return true;
}

/* Shrinking: the first chunk of several, one in the middle, and the last. */
static void free_may_fork(void **state)
{
    (void)state;
    begin_world(NULL);
    CHECK_OK(gp_range_create(world.pool, 4 * PAGE, world.stream[0], &range, &world.error),
             &world.error);
    for (unsigned n = 0; n < 3; n++) {
        world_free(&world, world_malloc(&world, 3 * PAGE, 0), 0);
        forks("a trim", n, trim);
        CHECK_OK(commit(&world.error), &world.error);
        forks("a decommit", n, decommit);
        world_free(&world, world_malloc(&world, 3 * PAGE, 0), 0);
        CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, NULL, &world.error), &world.error);
        forks("a drain", n, drain);
        world_free(&world, world_malloc(&world, 3 * PAGE, 0), 0);
        world.fail_free = fail_all;
        (void)trim(&world.error);
        world.fail_free = NULL;
        forks("another try", n, try_again);
        world_free(&world, world_malloc(&world, 3 * PAGE, 0), 0);
        CHECK_OK(gp_pool_set_limit(world.pool, 3 * PAGE, NULL, &world.error), &world.error);
        forks("a commit for which idle chunks have to go", n, commit);
        CHECK_OK(gp_pool_set_limit(world.pool, GP_NO_LIMIT, NULL, &world.error), &world.error);
        CHECK_OK(decommit(&world.error), &world.error);
    }
    gp_range_release(range);
    world_malloc(&world, 3 * PAGE, 1);
    forks("a close", 2, close_pool);
    world_end(&world);
}

/* Memory of three ranges that are gone, retiring: of a busy stream, between two pieces of another one's. */
static void leave_ranges(void)
{
    const int streams[] = {1, 0, 1};

    for (size_t i = 0; i < 3; i++) {
        gp_stream *stream = world.stream[streams[i]];
        gp_range *gone = NULL;
        CHECK_OK(gp_range_create(world.pool, PAGE, stream, &gone, &world.error), &world.error);
        CHECK_OK(gp_range_resize(gone, PAGE, NULL, 0, NULL, &world.error), &world.error);
        world_launch(&world, streams[i], gp_range_address(gone), PAGE);
        gp_range_release(gone);
    }
}

static gp_status synchronize(gp_error *error)
{
    return gp_pool_synchronize(world.pool, world.stream[0], false, error);
}

static gp_status forget(gp_error *error)
{
    return gp_pool_forget_stream(world.pool, world.handle[0], error);
}

/* What is asked while an operation waits, such as a signal handler, may fork too: while it waits for the
 * first stream, and for the second one when some memory is unmapped already. */
static void a_wait_may_be_forked(void **state)
{
    gp_status (*const operations[])(gp_error * error) = {trim, drain, close_pool, synchronize,
                                                         forget};

    (void)state;
    for (unsigned i = 0; i < 8; i++) {
        begin_world(fork_in_wait);
        gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
        leave_ranges();
        forks("a wait", i < 3 ? 1 : 0, operations[i < 3 ? i : i - 3]);
        gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
        world_end(&world);
    }
}

/* A request that waits for free memory of a busy stream while other memory retires. */
static void the_wait_of_a_request_may_be_forked(void **state)
{
    (void)state;
    begin_world(fork_in_wait);
    uintptr_t half = world_malloc(&world, PAGE / 2, 0), other = world_malloc(&world, PAGE / 2, 1);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    leave_ranges();
    CHECK_OK(gp_pool_set_limit(world.pool, 4 * PAGE, NULL, &world.error), &world.error);
    world_launch(&world, 0, half, PAGE / 2);
    world_free(&world, half, 0);
    forks("a request", 0, grow);
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
    world_free(&world, made, 0);
    world_free(&world, other, 1);
    world_end(&world);
}

/* ---- pools that were let go ---- */

/* A pool with memory that anybody may still use, let go; it waits for another pool's call to close it. */
static void leave_pool(void)
{
    gp_pool_options options = {.device = world.device,
                               .backing = world.backing,
                               .chunk_size = PAGE,
                               .limit = GP_NO_LIMIT,
                               .flags = GP_POOL_NO_REAPER};
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    uintptr_t block;
    size_t before = gp__orphans_left(world.device);

    CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(pool, world.handle[0], &stream, &world.error), &world.error);
    CHECK_OK(gp_pool_malloc(pool, PAGE, stream, 0, &block, &world.error), &world.error);
    CHECK_OK(gp_pool_pin(pool, block, true, &world.error), &world.error);
    gp_pool_unpin(pool, block);
    gp_stream_release(stream);
    gp_pool_release(pool);
    while (gp__orphans_left(world.device) == before)
        (void)usleep(100);
}

/* The child leaves the second of two such pools, and the calling pool, as they are. */
static void closing_what_others_left_may_be_forked(void **state)
{
    gp_status (*const operations[])(gp_error * error) = {trim, drain, close_pool};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        begin_world(fork_in_wait);
        leave_pool();
        leave_pool();
        world.before_free = fork_before_free;
        forks("the free of a pool that was left", 0, operations[i]);
        CHECK(gp__orphans_left(world.device) == 0, "a pool is still left");
        world_end(&world);
    }
}

/* ---- the thread that delivers ---- */

static void wait_until_returned(void)
{
    while (__atomic_load_n(&world.supplied_chunks, __ATOMIC_RELAXED) != 0) {
        gp__sim_complete_all(world.sim); /* the fence, once it was recorded */
        (void)usleep(100);
    }
}

/* In the child that thread is the only one: it ends, and the process with it, having done nothing. */
static void a_delivery_may_fork(void **state)
{
    (void)state;
    parent_id = getpid();
    world_begin(&world, &(struct world_options){.chunk_size = PAGE, .with_reaper = true});
    world_open(&world);
    world_free(&world, world_malloc(&world, 3 * PAGE, 0), 0);
    world.before_free = fork_before_free;
    child_status = -1;
    calls_before_fork = 1;
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, NULL, &world.error), &world.error);
    wait_until_returned();
    CHECK(child_status == 0, "the child ended with %#x", (unsigned)child_status);
    world_end(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_child_forked_before_the_first_use_starts_afresh),
        cmocka_unit_test(alloc_may_fork),
        cmocka_unit_test(free_may_fork),
        cmocka_unit_test(a_wait_may_be_forked),
        cmocka_unit_test(the_wait_of_a_request_may_be_forked),
        cmocka_unit_test(closing_what_others_left_may_be_forked),
        cmocka_unit_test(a_delivery_may_fork),
        /* Last: the worker of its stream frees what it has when it ends, sometime. */
        cmocka_unit_test(every_call_in_a_forked_child_says_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
