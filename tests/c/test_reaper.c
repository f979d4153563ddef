/* SPDX-License-Identifier: Apache-2.0
 *
 * The reaper as users meet it: chunks that a trim set retiring go by themselves when their streams pass,
 * and a pool that its last user let go of is closed behind the scenes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "backing/host_stream.h"
#include "backing/memory.h"
#include "sync/reaper.h"
#include "vmm/growpool.h"

#define MIB ((size_t)1 << 20)

struct gate {
    _Atomic bool open;
};

static void nap(void)
{
    struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
}

static void wait_for_gate(void *context)
{
    struct gate *gate = context;
    while (!atomic_load(&gate->open))
        nap();
}

/* A backing over the host's that counts, so that a test sees when a chunk came back. */
struct counter {
    gp_backing *inner;
    _Atomic int taken;
    _Atomic bool destroyed;
};

static gp_status counted_alloc(void *context, const gp_request *request, gp_chunk **out,
                               gp_error *error)
{
    struct counter *counter = context;
    gp_status status = gp_backing_alloc(counter->inner, request, out, error);
    if (status == GP_OK)
        atomic_fetch_add(&counter->taken, 1);
    return status;
}

static gp_status counted_free(void *context, gp_chunk *chunk, const gp_request *request,
                              gp_error *error)
{
    struct counter *counter = context;
    gp_status status = gp_backing_free(counter->inner, chunk, request, error);
    if (status == GP_OK)
        atomic_fetch_sub(&counter->taken, 1);
    return status;
}

static void counted_destroy(void *context)
{
    struct counter *counter = context;
    gp_backing_release(counter->inner);
    atomic_store(&counter->destroyed, true);
}

static const gp_backing_ops counted_ops = {counted_alloc, counted_free, counted_destroy};

static gp_pool *make_pool(struct counter *counter)
{
    gp_device *device;
    gp_backing *backing;
    gp_pool *pool;
    *counter = (struct counter){0};
    assert_int_equal(gp_device_open(GP_DEVICE_HOST, 0, &device, NULL), GP_OK);
    assert_int_equal(gp_backing_device(GP_LOCATION_DEVICE, &counter->inner, NULL), GP_OK);
    assert_int_equal(gp_backing_create(&counted_ops, counter, &backing, NULL), GP_OK);
    gp_pool_options options = {.name = "reaped",
                               .device = device,
                               .backing = backing,
                               .limit = GP_NO_LIMIT,
                               .address_space = 256 * MIB};
    assert_int_equal(gp_pool_create(&options, &pool, NULL), GP_OK);
    gp_backing_release(backing);
    return pool;
}

/* Waits until nothing is taken; the bound only turns a hang into a failure. */
static bool all_back(struct counter *counter)
{
    for (int i = 0; i < 20000 && atomic_load(&counter->taken) != 0; i++)
        nap();
    return atomic_load(&counter->taken) == 0;
}

/* Allocates on a stream whose work waits for the gate, frees, and returns the stream. */
static gp_host_stream *busy_free_block(gp_pool *pool, struct gate *gate)
{
    gp_host_stream *host;
    gp_stream *stream;
    uintptr_t block;
    assert_int_equal(gp_host_stream_create(&host, NULL), GP_OK);
    assert_int_equal(gp_pool_stream(pool, (uintptr_t)gp_host_stream_id(host), &stream, NULL),
                     GP_OK);
    assert_int_equal(gp_pool_malloc(pool, 4 * MIB, stream, 0, &block, NULL), GP_OK);
    assert_int_equal(gp_host_stream_submit(host, wait_for_gate, gate, NULL), GP_OK);
    assert_int_equal(gp_pool_free(pool, block, NULL, 0, NULL), GP_OK);
    gp_stream_release(stream);
    return host;
}

static void retiring_chunks_go_when_their_stream_passes(void **state)
{
    (void)state;
    struct counter counter;
    struct gate gate = {false};
    gp_pool *pool = make_pool(&counter);
    gp_host_stream *host = busy_free_block(pool, &gate);
    size_t set = 0;
    assert_int_equal(gp_pool_trim(pool, 0, GP_TRIM_NO_WAIT, &set, NULL), GP_OK);
    assert_int_equal(set, 4 * MIB);
    for (int i = 0; i < 30; i++)
        nap();
    assert_int_equal(atomic_load(&counter.taken), 1);
    gp_pool_stats stats;
    gp_pool_get_stats(pool, &stats);
    assert_int_equal(stats.retiring_bytes, 4 * MIB);
    atomic_store(&gate.open, true);
    assert_true(all_back(&counter));
    assert_int_equal(gp_pool_drain(pool, NULL), GP_OK);
    gp_pool_get_stats(pool, &stats);
    assert_int_equal(stats.physical_bytes, 0);
    gp_host_stream_close(host);
    assert_int_equal(gp_pool_close(pool, NULL), GP_OK);
    gp_pool_release(pool);
    assert_true(atomic_load(&counter.destroyed));
}

static void a_retiring_chunk_that_is_wanted_comes_back(void **state)
{
    (void)state;
    struct counter counter;
    struct gate gate = {false};
    gp_pool *pool = make_pool(&counter);
    gp_host_stream *host = busy_free_block(pool, &gate);
    gp_stream *stream;
    uintptr_t block;
    assert_int_equal(gp_pool_trim(pool, 0, GP_TRIM_NO_WAIT, NULL, NULL), GP_OK);
    assert_int_equal(gp_pool_stream(pool, (uintptr_t)gp_host_stream_id(host), &stream, NULL),
                     GP_OK);
    /* The reaper may hold the chunk for a moment; then the pool grows instead, which is right too. */
    assert_int_equal(gp_pool_malloc(pool, 4 * MIB, stream, 0, &block, NULL), GP_OK);
    atomic_store(&gate.open, true);
    assert_int_equal(gp_pool_free(pool, block, NULL, 0, NULL), GP_OK);
    gp_stream_release(stream);
    assert_int_equal(gp_pool_close(pool, NULL), GP_OK);
    assert_int_equal(atomic_load(&counter.taken), 0);
    gp_pool_release(pool);
    gp_host_stream_close(host);
}

static void a_pool_let_go_is_closed_behind_the_scenes(void **state)
{
    (void)state;
    struct counter counter;
    struct gate gate = {false};
    gp_pool *pool = make_pool(&counter);
    gp_host_stream *host = busy_free_block(pool, &gate);
    gp_pool_release(pool);
    for (int i = 0; i < 30; i++)
        nap();
    assert_int_equal(atomic_load(&counter.taken), 1);
    atomic_store(&gate.open, true);
    assert_true(all_back(&counter));
    for (int i = 0; i < 20000 && !atomic_load(&counter.destroyed); i++)
        nap();
    assert_true(atomic_load(&counter.destroyed));
    gp_host_stream_close(host);
}

static void lowering_the_limit_gives_idle_chunks_back(void **state)
{
    (void)state;
    struct counter counter;
    struct gate gate = {false};
    gp_pool *pool = make_pool(&counter);
    gp_host_stream *host = busy_free_block(pool, &gate);
    gp_limit_result result;
    assert_int_equal(gp_pool_set_limit(pool, MIB, &result, NULL), GP_OK);
    assert_int_equal(result.overage_bytes, 3 * MIB);
    assert_int_equal(result.deferred_bytes, 3 * MIB);
    atomic_store(&gate.open, true);
    assert_true(all_back(&counter));
    assert_int_equal(gp_pool_close(pool, NULL), GP_OK);
    gp_pool_release(pool);
    gp_host_stream_close(host);
}

/* A client of the reaper that counts its calls. */
struct client {
    struct gp__reaper_client reaper;
    _Atomic int calls;
    uint64_t again;
};

static uint64_t count_call(void *context)
{
    struct client *client = context;
    atomic_fetch_add(&client->calls, 1);
    return client->again;
}

static void a_removed_client_is_not_called_again(void **state)
{
    (void)state;
    struct client client = {.again = 100000};
    client.reaper.function = count_call;
    client.reaper.context = &client;
    gp__reaper_kick(&client.reaper);
    for (int i = 0; i < 20000 && atomic_load(&client.calls) < 3; i++)
        nap();
    assert_true(atomic_load(&client.calls) >= 3);
    gp__reaper_remove(&client.reaper);
    int calls = atomic_load(&client.calls);
    gp__reaper_kick(&client.reaper);
    for (int i = 0; i < 10; i++)
        nap();
    assert_int_equal(atomic_load(&client.calls), calls);
}

struct patient {
    struct gp__reaper_client reaper;
    int calls;
};

static uint64_t third_time_is_enough(void *context)
{
    struct patient *patient = context;
    return ++patient->calls < 3 ? UINT64_C(10000000) : UINT64_MAX;
}

/* Last: the reaper does not come back. */
static void a_stopped_reaper_leaves_work_to_explicit_calls(void **state)
{
    (void)state;
    struct counter counter;
    struct gate gate = {true};
    gp_pool *pool = make_pool(&counter);
    gp_host_stream *host = busy_free_block(pool, &gate);
    struct patient patient = {.reaper = {.function = third_time_is_enough, .context = &patient}};
    struct client watcher = {.again = GP__REAPER_WATCH_NS};
    watcher.reaper = (struct gp__reaper_client){.function = count_call, .context = &watcher};
    gp__reaper_kick(&watcher.reaper);
    while (atomic_load(&watcher.calls) == 0)
        nap();
    gp__reaper_kick(&patient.reaper);
    assert_true(gp__reaper_stop(UINT64_C(10000000000)));
    assert_int_equal(patient.calls, 3); /* what was under way was done first */
    /* One more look, and as many as the others took time for; not all of ten seconds. */
    assert_in_range(atomic_load(&watcher.calls), 2, 100);
    assert_int_equal(gp_pool_trim(pool, 0, GP_TRIM_NO_WAIT, NULL, NULL), GP_OK);
    for (int i = 0; i < 10; i++)
        nap();
    assert_int_equal(atomic_load(&counter.taken), 1);
    assert_int_equal(gp_pool_drain(pool, NULL), GP_OK);
    assert_int_equal(atomic_load(&counter.taken), 0);
    assert_int_equal(gp_pool_close(pool, NULL), GP_OK);
    gp_pool_release(pool);
    gp_host_stream_close(host);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(retiring_chunks_go_when_their_stream_passes),
        cmocka_unit_test(a_retiring_chunk_that_is_wanted_comes_back),
        cmocka_unit_test(a_pool_let_go_is_closed_behind_the_scenes),
        cmocka_unit_test(lowering_the_limit_gives_idle_chunks_back),
        cmocka_unit_test(a_removed_client_is_not_called_again),
        cmocka_unit_test(a_stopped_reaper_leaves_work_to_explicit_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
