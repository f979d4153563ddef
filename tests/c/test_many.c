/* SPDX-License-Identifier: Apache-2.0
 *
 * Many pools and many blocks: what a default reservation comes to when pools multiply, how addresses are
 * accounted for, and what running out of them is called. pytorch 186213, node-llama-cpp 580.
 */
#include "tests/support/model.h"

#include "vmm/pool.h"

#define MIB    CHECK_MIB
#define GIB    CHECK_GIB
#define TIB    (GIB << 10)
#define POOLS  1000
#define BLOCKS 100 /* in each pool */
#define LIVE   100000 /* in one pool */

static gp__sim *sim;

static int set_up(void **state)
{
    struct gp__sim_options options = {.address_bytes = 64 * TIB};
    (void)state;
    sim = gp__sim_create(&options);
    gp__sim_log_enable(sim, false);
    return sim == NULL;
}

static int tear_down(void **state)
{
    struct gp__sim_ledger ledger;
    (void)state;
    gp__sim_get_ledger(sim, &ledger);
    CHECK(ledger.reservation_count == 0 && ledger.chunk_count == 0,
          "left: %zu reservations, %zu chunks", ledger.reservation_count, ledger.chunk_count);
    gp__sim_destroy(sim);
    return 0;
}

static gp_pool *open_pool(size_t address_space)
{
    gp_error error = {0};
    gp_pool *pool = NULL;
    gp_pool_options options = {.device = gp__sim_device(sim),
                               .limit = GP_NO_LIMIT,
                               .chunk_size = 2 * MIB,
                               .address_space = address_space,
                               .flags = GP_POOL_NO_REAPER};
    CHECK_OK(gp_pool_create(&options, &pool, &error), &error);
    return pool;
}

static size_t address_bytes(gp_pool *pool)
{
    gp_pool_stats stats;
    gp_pool_get_stats(pool, &stats);
    return stats.address_bytes;
}

static void close_pool(gp_pool *pool)
{
    gp_error error = {0};
    CHECK_OK(gp_pool_close(pool, &error), &error);
    assert_int_equal(address_bytes(pool), 0);
    gp_pool_release(pool);
}

static uintptr_t take(gp_pool *pool, gp_stream *stream, size_t bytes)
{
    gp_error error = {0};
    uintptr_t va = 0;
    CHECK_OK(gp_pool_malloc(pool, bytes, stream, 0, &va, &error), &error);
    return va;
}

/* Live blocks in each of many pools, half of them freed and taken again. */
static void fill(gp_pool *pool)
{
    uintptr_t blocks[BLOCKS];
    gp_stream *stream = NULL;
    char message[400];
    CHECK_OK(gp_pool_stream(pool, 0, &stream, NULL), NULL);
    for (size_t i = 0; i < BLOCKS; i++)
        blocks[i] = take(pool, stream, 512 + i * 64);
    for (size_t i = 0; i < BLOCKS; i += 2)
        CHECK_OK(gp_pool_free(pool, blocks[i], NULL, 0, NULL), NULL);
    for (size_t i = 0; i < BLOCKS; i += 2)
        take(pool, stream, 512 + i * 64);
    gp_stream_release(stream);
    CHECK(gp__pool_check(pool, message, sizeof message), "%s", message);
}

static void a_thousand_pools_share_the_addresses(void **state)
{
    static gp_pool *pools[POOLS];
    size_t sum = 0, least = SIZE_MAX, whole = 128 * GIB; /* twice the device */
    struct gp__sim_ledger ledger;
    (void)state;
    for (size_t i = 0; i < POOLS; i++) {
        pools[i] = open_pool(0);
        fill(pools[i]);
        size_t bytes = address_bytes(pools[i]);
        sum += bytes;
        least = bytes < least ? bytes : least;
        if (i == 0)
            assert_int_equal(bytes, whole);
    }
    assert_int_equal(least, 256 * MIB);
    CHECK(sum <= 16 * TIB + POOLS * 256 * MIB, "%zu bytes of addresses", sum);
    gp__sim_get_ledger(sim, &ledger);
    assert_int_equal(ledger.reserved_bytes, sum);
    /* The last one still holds what its device holds, in more than one piece. */
    gp_stream *stream = NULL;
    CHECK_OK(gp_pool_stream(pools[POOLS - 1], 0, &stream, NULL), NULL);
    uintptr_t large = take(pools[POOLS - 1], stream, GIB);
    CHECK_OK(gp_pool_free(pools[POOLS - 1], large, NULL, 0, NULL), NULL);
    gp_stream_release(stream);
    for (size_t i = 0; i < POOLS; i++)
        close_pool(pools[i]);
    gp_pool *again = open_pool(0);
    fill(again);
    assert_int_equal(address_bytes(again), whole); /* what the others gave back is there again */
    close_pool(again);
}

static int by_value(const void *a, const void *b)
{
    uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
    return (x > y) - (x < y);
}

/* No two overlap, half of them go and come back into the same memory, and the last free leaves one run. */
static void many_live_blocks_in_one_pool(void **state)
{
    static uintptr_t blocks[LIVE], sorted[LIVE];
    gp_pool *pool = open_pool(GIB);
    gp_stream *stream = NULL;
    gp_pool_stats stats;
    char message[400];
    size_t released = 0;
    (void)state;
    CHECK_OK(gp_pool_stream(pool, 0, &stream, NULL), NULL);
    for (size_t i = 0; i < LIVE; i++)
        blocks[i] = take(pool, stream, 512);
    for (size_t i = 0; i < LIVE; i += 2)
        CHECK_OK(gp_pool_free(pool, blocks[i], NULL, 0, NULL), NULL);
    CHECK(gp__pool_check(pool, message, sizeof message), "%s", message);
    for (size_t i = 0; i < LIVE; i += 2)
        blocks[i] = take(pool, stream, 512);
    memcpy(sorted, blocks, sizeof sorted);
    qsort(sorted, LIVE, sizeof *sorted, by_value);
    for (size_t i = 1; i < LIVE; i++)
        CHECK(sorted[i] - sorted[i - 1] >= 512, "blocks %zu and %zu overlap", i - 1, i);
    gp_pool_get_stats(pool, &stats);
    assert_int_equal(stats.used_bytes, LIVE * 512);
    assert_int_equal(stats.peak_used_bytes, LIVE * 512);
    CHECK(stats.physical_bytes <= LIVE * 512 + 32 * MIB, "%zu physical bytes",
          stats.physical_bytes);
    for (size_t i = 0; i < LIVE; i++)
        CHECK_OK(gp_pool_free(pool, blocks[i], NULL, 0, NULL), NULL);
    CHECK(gp__pool_check(pool, message, sizeof message), "%s", message);
    CHECK_OK(gp_pool_trim(pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, stats.physical_bytes);
    gp_stream_release(stream);
    close_pool(pool);
}

static void ranges_count_and_give_their_addresses_back(void **state)
{
    enum { RANGES = 1000 };
    static gp_range *ranges[RANGES];
    gp_pool *pool = open_pool(GIB);
    gp_stream *stream = NULL;
    gp_error error = {0};
    (void)state;
    CHECK_OK(gp_pool_stream(pool, 0, &stream, NULL), NULL);
    for (size_t i = 0; i < RANGES; i++) {
        CHECK_OK(gp_range_create(pool, GIB, stream, &ranges[i], &error), &error);
        CHECK_OK(gp_range_resize(ranges[i], (i % 4) * MIB, NULL, 0, NULL, &error), &error);
    }
    assert_int_equal(address_bytes(pool), RANGES * GIB); /* none of it is for blocks */
    take(pool, stream, 512);
    assert_int_equal(address_bytes(pool), (RANGES + 1) * GIB);
    for (size_t i = 0; i < RANGES; i++)
        gp_range_release(ranges[i]);
    CHECK_OK(gp_pool_trim(pool, 0, 0, NULL, &error), &error);
    assert_int_equal(address_bytes(pool), GIB);
    gp_stream_release(stream);
    close_pool(pool);
}

/* Range after range takes 1 TiB until the device has no more; a closed one makes room for the next. */
static void ranges_run_out_of_addresses(void **state)
{
    static gp_range *ranges[65];
    gp_pool *pool = open_pool(GIB);
    gp_stream *stream = NULL;
    gp_error error = {0};
    size_t count = 0;
    gp_status status;
    (void)state;
    CHECK_OK(gp_pool_stream(pool, 0, &stream, NULL), NULL);
    while ((status = gp_range_create(pool, TIB, stream, &ranges[count], &error)) == GP_OK)
        count++;
    assert_int_equal(status, GP_ERR_ADDRESS_SPACE);
    assert_in_range(count, 60, 64);
    assert_int_equal(address_bytes(pool), count * TIB);
    gp_range_release(ranges[0]);
    CHECK_OK(gp_pool_drain(pool, &error), &error);
    CHECK_OK(gp_range_create(pool, TIB, stream, &ranges[0], &error), &error);
    assert_int_equal(address_bytes(pool), count * TIB);
    while (count > 0)
        gp_range_release(ranges[--count]);
    CHECK_OK(gp_pool_drain(pool, &error), &error);
    assert_int_equal(address_bytes(pool), 0);
    gp_stream_release(stream);
    close_pool(pool);
}

static void running_out_of_addresses_says_so(void **state)
{
    gp_pool *pool = open_pool(4 * MIB);
    gp_stream *stream = NULL;
    gp_range *range = NULL;
    gp_error error = {0};
    uintptr_t va = 0;
    (void)state;
    CHECK_OK(gp_pool_stream(pool, 0, &stream, NULL), NULL);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, gp_range_create(pool, 65 * TIB, stream, &range, &error),
                 NULL);
    CHECK(strstr(error.message, "addresses, not memory") != NULL, "\"%s\"", error.message);
    take(pool, stream, 3 * MIB);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, gp_pool_malloc(pool, 3 * MIB, stream, 0, &va, &error), NULL);
    CHECK(strstr(error.message, "addresses, not memory") != NULL, "\"%s\"", error.message);
    assert_int_equal(address_bytes(pool), 4 * MIB);
    gp_stream_release(stream);
    close_pool(pool);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_thousand_pools_share_the_addresses),
        TEST(many_live_blocks_in_one_pool),
        TEST(ranges_run_out_of_addresses),
        TEST(ranges_count_and_give_their_addresses_back),
        TEST(running_out_of_addresses_says_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
