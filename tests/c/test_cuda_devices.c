/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools on two CUDA devices against a stand-in for the driver: the thread's current context never matters
 * to them and is as it was after every call, and each pool's fences are made and recorded in its own
 * device's context.
 */
#include "tests/support/cuda_case.h"

#include <pthread.h>

#include "backing/cuda_abi.h"
#include "backing/memory.h"
#include "vmm/growpool.h"

#define PAGE ((size_t)2 << 20)

static gp__cu_result (*get_current)(gp__cu_context *context);
static gp__cu_result (*push_current)(gp__cu_context context);
static gp__cu_result (*pop_current)(gp__cu_context *context);

static void find(const char *name, void *slot)
{
    gp__cu_get_proc_address get_proc_address;
    *(void **)&get_proc_address = case_symbol("cuGetProcAddress");
    assert_non_null(get_proc_address);
    assert_int_equal(get_proc_address(name, slot, 4000, GP__CU_GET_PROC_ADDRESS_LEGACY_STREAM), 0);
}

/* What a program around growpool has made current, by the driver's word. */
static uintptr_t current(void)
{
    gp__cu_context context = NULL;
    assert_int_equal(get_current(&context), 0);
    return (uintptr_t)context;
}

static void make_current(const gp_device *device)
{
    assert_int_equal(push_current((gp__cu_context)device->context), 0);
}

struct pair {
    gp_device *device[2];
    gp_pool *pool[2];
    gp_stream *stream[2]; /* the legacy ones */
};

static int interrupted_never(void *context)
{
    (void)context;
    return 0;
}

static struct pair open_pair(void)
{
    struct pair pair;
    gp_error error;
    for (int i = 0; i < 2; i++) {
        pair.device[i] = open_device(i);
        gp_pool_options options = {.device = pair.device[i],
                                   .limit = GP_NO_LIMIT,
                                   .flags = GP_POOL_NO_REAPER,
                                   .interrupted = interrupted_never};
        CHECK_OK(gp_pool_create(&options, &pair.pool[i], &error), &error);
        CHECK_OK(gp_pool_stream(pair.pool[i], 0, &pair.stream[i], &error), &error);
    }
    find("cuCtxGetCurrent", &get_current);
    find("cuCtxPushCurrent", &push_current);
    find("cuCtxPopCurrent", &pop_current);
    return pair;
}

static void close_pair(struct pair *pair)
{
    for (int i = 0; i < 2; i++) {
        gp_error error;
        gp_stream_release(pair->stream[i]);
        CHECK_OK(gp_pool_close(pair->pool[i], &error), &error);
        gp_pool_release(pair->pool[i]);
    }
}

static uintptr_t take(struct pair *pair, int which, size_t bytes)
{
    uintptr_t va = 0;
    gp_error error;
    CHECK_OK(gp_pool_malloc(pair->pool[which], bytes, pair->stream[which], 0, &va, &error), &error);
    return va;
}

/* Every kind of call on both pools; `expected` stays current throughout. */
static void use_both(struct pair *pair, uintptr_t expected)
{
    gp_error error;
    for (int i = 0; i < 2; i++) {
        gp_chunk *chunk = NULL;
        gp_stream *stream = NULL;
        size_t released = 0;
        uintptr_t va = take(pair, i, 3 * PAGE);
        assert_int_equal(current(), expected);
        CHECK_OK(gp_pool_stream(pair->pool[i], 2, &stream, &error), &error);
        assert_int_equal(current(), expected);
        CHECK_OK(gp_pool_record_stream(pair->pool[i], va, stream, &error), &error);
        CHECK_OK(gp_pool_free(pair->pool[i], va, NULL, 0, &error), &error);
        assert_int_equal(current(), expected);
        CHECK_OK(gp_pool_trim(pair->pool[i], 0, 0, &released, &error), &error);
        assert_int_equal(released, 3 * PAGE);
        assert_int_equal(current(), expected);
        CHECK_OK(gp_chunk_create(pair->device[i], PAGE, GP_LOCATION_DEVICE,
                                 GP_CHUNK_GPU_DIRECT_RDMA, &chunk, &error),
                 &error);
        gp_chunk_release(chunk);
        gp_stream_release(stream);
        assert_int_equal(current(), expected);
    }
}

static void the_current_context_never_matters(void **state)
{
    struct pair pair = open_pair();
    gp__cu_context popped = NULL;
    (void)state;
    assert_int_equal(current(), 0);
    use_both(&pair, 0);
    for (int i = 0; i < 2; i++) {
        make_current(pair.device[i]);
        use_both(&pair, pair.device[i]->context);
        assert_int_equal(pop_current(&popped), 0);
        assert_int_equal((uintptr_t)popped, pair.device[i]->context);
        assert_int_equal(current(), 0); /* nothing else was left on the stack */
    }
    close_pair(&pair);
    assert_int_equal(current(), 0);
    assert_int_equal(fake_calls("cuCtxPushCurrent"), fake_calls("cuCtxPopCurrent"));
}

/* ---- a trim while another device is current -------------------------------------------------- */

static void *trim_elsewhere(void *context)
{
    struct pair *pair = context;
    gp_error error;
    size_t released = 0;
    make_current(pair->device[1]);
    CHECK_OK(gp_pool_trim(pair->pool[0], 0, 0, &released, &error), &error);
    assert_int_equal(released, PAGE);
    assert_int_equal(current(), pair->device[1]->context);
    return NULL;
}

/* PyTorch 196258: a pool on device 0, device 1 current, work on device 0's default stream. */
static void a_trim_waits_in_its_own_context(void **state)
{
    struct pair pair = open_pair();
    gp_error error;
    pthread_t thread;
    (void)state;
    uintptr_t va = take(&pair, 0, PAGE);
    CHECK_OK(gp_pool_free(pair.pool[0], va, NULL, 0, &error), &error);
    fake_set("busy", 1);
    unsigned long before = fake_calls("cuEventQuery");
    assert_int_equal(pthread_create(&thread, NULL, trim_elsewhere, &pair), 0);
    while (fake_calls("cuEventQuery") < before + 3)
        (void)usleep(100);
    /* It waits: the event of device 0 in device 0's context, and nothing is unmapped. */
    assert_string_equal(fake_last("cuEventCreate"), "flags=2 device=0");
    assert_string_equal(fake_last("cuEventRecord"), "stream=(nil) device=0");
    assert_int_equal(fake_calls("cuMemUnmap"), 0);
    fake_set("busy", 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(fake_calls("cuMemUnmap"), 1);
    close_pair(&pair);
}

#define CASE(function, ...)                                                                        \
    {                                                                                              \
        .name = #function, .run = function, __VA_ARGS__                                            \
    }

int main(int argc, char **argv)
{
    static const struct cuda_case cases[] = {
        CASE(the_current_context_never_matters, .settings = NULL),
        CASE(a_trim_waits_in_its_own_context, .settings = NULL),
    };
    return run_cases(argc, argv, cases, CASE_COUNT(cases));
}
