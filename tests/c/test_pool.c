/* SPDX-License-Identifier: Apache-2.0
 *
 * What a pool promises to those who allocate: blocks, limits, trimming, counting, closing; and what bad
 * input gets. Streams and captures are in test_pool_streams.c, backings that misbehave in
 * test_pool_backing.c. Cases of others' bug reports are named as project and number.
 */
#include "tests/support/model.h"

#include <pthread.h>

#define MIB CHECK_MIB

static struct world world;

static int begin_with(void **state, struct world_options options)
{
    world_begin(&world, &options);
    world_open(&world);
    *state = &world;
    return 0;
}

static int set_up(void **state)
{
    return begin_with(state, (struct world_options){.chunk_size = 2 * MIB});
}

static int set_up_limited(void **state)
{
    return begin_with(state, (struct world_options){.chunk_size = 2 * MIB, .limit = 8 * MIB});
}

static int set_up_planned(void **state)
{
    return begin_with(state, (struct world_options){0});
}

static int tear_down(void **state)
{
    world_end(*state);
    return 0;
}

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

static gp_status try_malloc_on(size_t bytes, int s, uintptr_t *va)
{
    return gp_pool_malloc(world.pool, bytes, world.stream[s], 0, va, &world.error);
}

/* ---- bad input ---- */

static void options_off_the_granularity_are_refused(void **state)
{
    gp_pool_options options = {.device = world.device, .limit = GP_NO_LIMIT};
    gp_pool *pool = (gp_pool *)1;

    (void)state;
    for (size_t size = 1; size < 4 * MIB; size = size * 3 + 1) {
        options.chunk_size = size;
        CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_create(&options, &pool, &world.error), NULL);
        CHECK(strstr(world.error.message, "2097152") != NULL, "no granularity in \"%s\"",
              world.error.message);
    }
    options.chunk_size = 0;
    options.device = NULL;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_create(&options, &pool, &world.error), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_create(NULL, &pool, NULL), NULL);
    assert_ptr_equal(pool, (gp_pool *)1);
}

static void size_zero_is_a_valid_nothing(void **state)
{
    uintptr_t va = 1;

    (void)state;
    CHECK_OK(try_malloc_on(0, 0, &va), &world.error);
    assert_int_equal(va, 0);
    CHECK_OK(gp_pool_free(world.pool, 0, NULL, 0, &world.error), &world.error);
    CHECK_OK(gp_pool_free(world.pool, 0, NULL, 0, &world.error), &world.error);
    CHECK_OK(gp_pool_record_stream(world.pool, 0, world.stream[0], NULL), NULL);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
}

static void absurd_sizes_are_refused_in_words(void **state)
{
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 511, PTRDIFF_MAX, (size_t)PTRDIFF_MAX + 1,
                            (size_t)PTRDIFF_MAX - 4 * MIB};
    uintptr_t va = 7;

    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        gp_status status = try_malloc_on(sizes[i], 0, &va);

        CHECK(status == GP_ERR_ARGUMENT || status == GP_ERR_ADDRESS_SPACE, "%zu bytes: %s",
              sizes[i], gp_status_text(status));
        CHECK(world.error.message[0] != '\0', "no words");
        check_all();
    }
    assert_int_equal(va, 7);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

static void foreign_and_freed_pointers_are_refused(void **state)
{
    uintptr_t va = world_malloc(&world, 4096, 0), buffer = 0;
    const uintptr_t wrong[] = {va + 1, va + 512, va + 4096, va - 512, 12345, UINTPTR_MAX};

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, wrong[i], NULL, 0, NULL), NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT,
                     gp_pool_record_stream(world.pool, wrong[i], world.stream[1], NULL), NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_pin(world.pool, wrong[i], false, NULL), NULL);
        gp_pool_unpin(world.pool, wrong[i]);
    }
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, va, NULL, GP_BLOCK_OBJECT, &world.error),
                 NULL);
    world_free(&world, va, -1);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, va, NULL, 0, &world.error), NULL);
    CHECK(strstr(world.error.message, "freed") != NULL, "\"%s\"", world.error.message);
    CHECK_OK(gp_pool_malloc(world.pool, 64, world.stream[0], GP_BLOCK_OBJECT, &buffer, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, buffer, NULL, 0, NULL), NULL);
    CHECK_OK(gp_pool_free(world.pool, buffer, NULL, GP_BLOCK_OBJECT, NULL), NULL);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    check_all();
}

static void another_pools_stream_is_refused(void **state)
{
    gp_pool_options options = {
        .device = world.device, .limit = GP_NO_LIMIT, .flags = GP_POOL_NO_REAPER};
    uintptr_t va = world_malloc(&world, 512, 0), other = 0;
    gp_stream *stream = NULL;
    gp_pool *pool;

    (void)state;
    CHECK_OK(gp_pool_create(&options, &pool, NULL), NULL);
    CHECK_OK(gp_pool_stream(pool, world.handle[0], &stream, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_malloc(world.pool, 512, stream, 0, &other, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_malloc(world.pool, 512, NULL, 0, &other, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(world.pool, va, stream, 0, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_record_stream(world.pool, va, stream, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_stream(pool, 0x999, &stream, NULL), NULL);
    CHECK_OK(gp_pool_close(pool, NULL), NULL);
    gp_stream_release(stream); /* outlives its pool's close */
    gp_pool_release(pool);
    world_free(&world, va, -1);
}

static void a_closed_pool_says_so(void **state)
{
    uintptr_t live = world_malloc(&world, 3 * MIB, 0), va = 0;
    size_t released = 0;
    gp_pool_stats stats;

    (void)state;
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    CHECK_OK(gp_pool_close(world.pool, NULL), NULL);
    assert_true(gp_pool_is_closed(world.pool));
    CHECK_STATUS(GP_ERR_STATE, try_malloc_on(512, 0, &va), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    CHECK_STATUS(GP_ERR_STATE, try_malloc_on(0, 0, &va), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_pool_free(world.pool, live, NULL, 0, &world.error), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    CHECK_STATUS(GP_ERR_STATE, gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_pool_set_limit(world.pool, 0, NULL, NULL), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_pool_record_stream(world.pool, live, world.stream[0], NULL),
                 NULL);
    CHECK_STATUS(GP_ERR_STATE, gp_pool_pin(world.pool, live, false, NULL), NULL);
    stats = world_stats(&world);
    CHECK(stats.used_bytes == 0 && stats.physical_bytes == 0 && stats.address_bytes == 0,
          "a closed pool has %zu used, %zu physical, %zu address bytes", stats.used_bytes,
          stats.physical_bytes, stats.address_bytes);
}

/* ---- addresses (node-llama-cpp 580, pytorch 186213) ---- */

static void refused_addresses_are_asked_for_in_halves(void **state)
{
    uintptr_t first, second, va = 0;
    gp_pool_stats stats;

    begin_with(state, (struct world_options){.chunk_size = 2 * MIB, .largest_reserve = 16 * MIB});
    first = world_malloc(&world, 10 * MIB, 0);
    stats = world_stats(&world);
    CHECK(stats.address_bytes == 16 * MIB, "%zu address bytes", stats.address_bytes);
    second =
        world_malloc(&world, 12 * MIB, 0); /* does not fit behind the first: a second segment */
    CHECK(second + 12 * MIB <= first || second >= first + 10 * MIB, "the blocks overlap");
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, try_malloc_on(17 * MIB, 0, &va), NULL);
    CHECK(strstr(world.error.message, "address") != NULL, "\"%s\" does not say addresses",
          world.error.message);
    assert_int_equal(world_stats(&world).physical_bytes, 22 * MIB);
    check_all();
    world_free(&world, first, -1);
    world_free(&world, second, -1);
}

static void address_space_is_a_bound(void **state)
{
    uintptr_t va = 0;

    begin_with(state, (struct world_options){.chunk_size = 2 * MIB, .address_space = 8 * MIB});
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, try_malloc_on(9 * MIB, 0, &va), NULL);
    world_malloc(&world, 8 * MIB, 0);
    assert_int_equal(world_stats(&world).address_bytes, 8 * MIB);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, try_malloc_on(512, 0, &va), NULL);
    check_all();
}

/* ---- blocks ---- */

static void blocks_are_aligned_and_counted(void **state)
{
    uintptr_t va[40];
    size_t used = 0;

    (void)state;
    for (size_t i = 0; i < 40; i++) {
        va[i] = world_malloc(&world, i * 777 + 1, 0);
        assert_int_equal(va[i] % GP_ALIGNMENT, 0);
        used += (i * 777 + 1 + 511) / 512 * 512;
        assert_int_equal(world_stats(&world).used_bytes, used);
    }
    for (size_t i = 0; i < 40; i++)
        world_free(&world, va[(i * 7) % 40], -1);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    assert_int_equal(world_stats(&world).peak_used_bytes, used);
    gp_pool_reset_peak_stats(world.pool);
    assert_int_equal(world_stats(&world).peak_used_bytes, 0);
    assert_int_equal(world_stats(&world).peak_physical_bytes, world_stats(&world).physical_bytes);
    check_all();
}

static void a_large_block_gets_few_chunks(void **state)
{
    (void)state;
    world_malloc(&world, 3 * CHECK_GIB, 0);
    CHECK(world_stats(&world).chunk_count == 16, "%llu chunks for 3 GiB",
          (unsigned long long)world_stats(&world).chunk_count);
    check_all();
}

static void pins_hold_blocks_and_pools(void **state)
{
    uintptr_t va = world_malloc(&world, 512, 0);
    gp_pool_stats before = world_stats(&world), after;

    (void)state;
    CHECK_OK(gp_pool_pin(world.pool, va, false, NULL), NULL);
    CHECK_OK(gp_pool_pin(world.pool, va, false, NULL), NULL);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_free(world.pool, va, NULL, 0, &world.error), NULL);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_close(world.pool, &world.error), NULL);
    gp_pool_unpin(world.pool, va);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_free(world.pool, va, NULL, 0, &world.error), NULL);
    CHECK(strstr(world.error.message, "1 live export") != NULL, "\"%s\"", world.error.message);
    CHECK_STATUS(GP_ERR_PINNED, gp_pool_close(world.pool, &world.error), NULL);
    after = world_stats(&world);
    assert_memory_equal(&before, &after, sizeof before);
    world_malloc(&world, 512, 0); /* a refused close changed nothing: the pool works on */
    gp_pool_unpin(world.pool, va);
    world_free(&world, va, -1);
}

/* ---- limits ---- */

/* A request that even reclaiming everything could not meet fails at once and trims nothing. */
static void a_hopeless_request_trims_nothing(void **state)
{
    uintptr_t live = world_malloc(&world, 4 * MIB, 0), idle = world_malloc(&world, 2 * MIB, 0);
    uintptr_t va = 0;

    (void)state;
    world_free(&world, idle, -1);
    CHECK_STATUS(GP_ERR_LIMIT, try_malloc_on(5 * MIB, 0, &va), NULL);
    assert_int_equal(world.error.size, 5 * MIB);
    assert_int_equal(world.error.physical, 6 * MIB);
    assert_int_equal(world.error.limit, 8 * MIB);
    assert_int_equal(world.error.largest_free, 2 * MIB);
    CHECK(strstr(world.error.message, "a limit of 8 MiB") != NULL, "no limit in \"%s\"",
          world.error.message);
    assert_int_equal(world_stats(&world).trim_count, 0);
    assert_int_equal(world.free_calls, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 6 * MIB);
    world_free(&world, live, -1);
    check_all();
}

/* cupy 7678: at the limit, with idle memory of the wrong shape, the idle memory goes back first. */
static void idle_memory_is_reclaimed_at_the_limit(void **state)
{
    uintptr_t va[4];

    (void)state;
    for (int i = 0; i < 4; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, va[0], 512);
    world_free(&world, va[0], -1);
    world_free(&world, va[2], -1);
    world_malloc(&world, 4 * MIB, 1);
    assert_int_equal(world_stats(&world).physical_bytes, 8 * MIB);
    CHECK(world_stats(&world).peak_physical_bytes <= 8 * MIB, "the peak passed the limit");
    check_all();
}

/* kvcached 406: below what is in use is legal; the rest is reported, and goes when it can. */
static void a_limit_below_use_is_reported(void **state)
{
    uintptr_t a = world_malloc(&world, 2 * MIB, 0), b = world_malloc(&world, 4 * MIB, 1), va = 0;
    gp_limit_result result;

    (void)state;
    world_launch(&world, 1, b, 512);
    world_free(&world, b, -1);
    CHECK_OK(gp_pool_set_limit(world.pool, MIB, &result, NULL), NULL);
    assert_int_equal(result.limit, MIB);
    assert_int_equal(result.physical_bytes, 6 * MIB);
    assert_int_equal(result.overage_bytes, 5 * MIB);
    assert_int_equal(result.deferred_bytes, 4 * MIB);
    CHECK_STATUS(GP_ERR_LIMIT, try_malloc_on(4 * MIB, 2, &va), NULL);
    CHECK_OK(gp_pool_drain(world.pool, NULL), NULL);
    assert_int_equal(world_stats(&world).physical_bytes, 2 * MIB);
    CHECK_OK(gp_pool_set_limit(world.pool, 0, &result, NULL), NULL);
    assert_int_equal(result.overage_bytes, 2 * MIB);
    assert_int_equal(result.deferred_bytes, 0);
    world_free(&world, a, -1);
    CHECK_OK(gp_pool_set_limit(world.pool, GP_NO_LIMIT, &result, NULL), NULL);
    assert_int_equal(result.overage_bytes, 0);
    world_malloc(&world, 64 * MIB, 2);
    check_all();
}

/* kvcached 377: limit minus physical never wraps round. */
static void headroom_saturates(void **state)
{
    uintptr_t va = 0, live = world_malloc(&world, 6 * MIB, 0);

    (void)state;
    for (size_t limit = 0; limit < 6 * MIB; limit += MIB) {
        CHECK_OK(gp_pool_set_limit(world.pool, limit, NULL, NULL), NULL);
        CHECK_STATUS(GP_ERR_LIMIT, try_malloc_on(2 * MIB, 0, &va), NULL);
        CHECK_STATUS(GP_ERR_LIMIT, try_malloc_on(PTRDIFF_MAX / 2, 0, &va), NULL);
    }
    world_free(&world, live, -1);
}

static void *churn(void *context)
{
    int s = *(int *)context;
    uint64_t random = (uint64_t)s * 77 + 1;

    for (int i = 0; i < 400; i++) {
        uintptr_t va = 0;
        size_t bytes;

        random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
        bytes = 1 + (random >> 40) % (5 * MIB);
        if (gp_pool_malloc(world.pool, bytes, world.stream[s], 0, &va, NULL) != GP_OK)
            continue;
        gp_pool_free(world.pool, va, i % 3 == 0 ? world.stream[(s + 1) % WORLD_STREAMS] : NULL, 0,
                     NULL);
    }
    return NULL;
}

/* rmm 869: the limit holds under any interleaving, and nothing drifts. */
static void the_limit_is_exact_under_threads(void **state)
{
    pthread_t threads[WORLD_STREAMS];
    int numbers[WORLD_STREAMS];

    (void)state;
    world_end(&world);
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB, .limit = 8 * MIB});
    gp_backing_release(world.backing); /* its counters are not for several threads */
    world.backing = gp_backing_retain(world.inner);
    world_open(&world);
    for (int s = 0; s < WORLD_STREAMS; s++) {
        numbers[s] = s;
        assert_int_equal(pthread_create(&threads[s], NULL, churn, &numbers[s]), 0);
    }
    for (int s = 0; s < WORLD_STREAMS; s++)
        pthread_join(threads[s], NULL);
    CHECK(world_stats(&world).peak_physical_bytes <= 8 * MIB, "peak %zu under a limit of 8 MiB",
          world_stats(&world).peak_physical_bytes);
    assert_int_equal(world_stats(&world).used_bytes, 0);
    world.supplied_bytes = world_stats(&world).physical_bytes;
    world.supplied_chunks = world_ledger(&world).chunk_count;
    check_all();
    world.supplied_bytes = world.supplied_chunks = 0;
}

/* ---- trimming ---- */

static void a_trim_keeps_what_it_is_told(void **state)
{
    uintptr_t va[5];
    size_t released = 0;

    (void)state;
    for (int i = 0; i < 5; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    for (int i = 0; i < 4; i++)
        world_free(&world, va[i], -1);
    CHECK_OK(gp_pool_trim(world.pool, 7 * MIB, 0, &released, NULL), NULL);
    assert_int_equal(released, 2 * MIB); /* 8 MiB stay: 6 would be less than 7 */
    CHECK_OK(gp_pool_trim(world.pool, 100 * MIB, 0, &released, NULL), NULL);
    assert_int_equal(released, 0);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, 6 * MIB);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 2 * MIB);
    check_all();
}

/* The same bound for a trim that does not wait, where the oldest idle chunk has users that cannot be
 * fenced one by one and a larger one behind it has not. */
static void a_trim_without_wait_keeps_what_it_is_told(void **state)
{
    uintptr_t pinned, large;
    size_t released = 0;

    (void)state;
    pinned = world_malloc(&world, 2 * MIB, 0);
    large = world_malloc(&world, 200 * MIB, 0);
    CHECK_OK(gp_pool_pin(world.pool, pinned, true, NULL), NULL);
    gp_pool_unpin(world.pool, pinned);
    world_free(&world, pinned, -1);
    world_free(&world, large, -1);
    CHECK_OK(gp_pool_trim(world.pool, world_stats(&world).physical_bytes - 2 * MIB, GP_TRIM_NO_WAIT,
                          &released, NULL),
             NULL);
    CHECK(released <= 2 * MIB, "a trim that may take 2 MiB set %zu retiring", released);
    check_all();
}

/* kvcached 319, cuda-python 2344: after a spike everything goes back, many times over. */
static void a_spike_leaves_nothing_behind(void **state)
{
    (void)state;
    for (int round = 0; round < 64; round++) {
        uintptr_t va[20];
        size_t released;

        for (int i = 0; i < 20; i++) {
            va[i] = world_malloc(&world, 3 * MIB, i % WORLD_STREAMS);
            world_launch(&world, i % WORLD_STREAMS, va[i], 3 * MIB);
        }
        for (int i = 0; i < 20; i++)
            world_free(&world, va[i], -1);
        CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
        assert_int_equal(world_ledger(&world).physical_bytes, 0);
        assert_int_equal(world_stats(&world).physical_bytes, 0);
    }
}

/* What is retiring and wanted again comes back without the backing being asked. */
static void retiring_memory_is_wanted_again(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);
    uint64_t asked;
    size_t released = 0;

    (void)state;
    world_launch(&world, 0, va, 512);
    world_free(&world, va, -1);
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, &released, NULL), NULL);
    assert_int_equal(released, 2 * MIB);
    assert_int_equal(world_stats(&world).retiring_bytes, 2 * MIB);
    asked = world.alloc_calls;
    assert_int_equal(world_malloc(&world, 2 * MIB, 0), va);
    assert_int_equal(world.alloc_calls, asked);
    assert_int_equal(world_stats(&world).retiring_bytes, 0);
    check_all();
}

static void names_are_kept(void **state)
{
    (void)state;
    assert_string_equal(gp_pool_name(world.pool), "test");
    assert_ptr_equal(gp_pool_device(world.pool), world.device);
}

#define TEST(name)         cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_LIMITED(name) cmocka_unit_test_setup_teardown(name, set_up_limited, tear_down)
#define TEST_PLANNED(name) cmocka_unit_test_setup_teardown(name, set_up_planned, tear_down)
#define TEST_OWN(name)     cmocka_unit_test_setup_teardown(name, NULL, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(options_off_the_granularity_are_refused),
        TEST(size_zero_is_a_valid_nothing),
        TEST(absurd_sizes_are_refused_in_words),
        TEST(foreign_and_freed_pointers_are_refused),
        TEST(another_pools_stream_is_refused),
        TEST(a_closed_pool_says_so),
        TEST_OWN(refused_addresses_are_asked_for_in_halves),
        TEST_OWN(address_space_is_a_bound),
        TEST(blocks_are_aligned_and_counted),
        TEST_PLANNED(a_large_block_gets_few_chunks),
        TEST(pins_hold_blocks_and_pools),
        TEST_LIMITED(a_hopeless_request_trims_nothing),
        TEST_LIMITED(idle_memory_is_reclaimed_at_the_limit),
        TEST(a_limit_below_use_is_reported),
        TEST(headroom_saturates),
        TEST(the_limit_is_exact_under_threads),
        TEST(a_trim_keeps_what_it_is_told),
        TEST_PLANNED(a_trim_without_wait_keeps_what_it_is_told),
        TEST(a_spike_leaves_nothing_behind),
        TEST(retiring_memory_is_wanted_again),
        TEST(names_are_kept),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
