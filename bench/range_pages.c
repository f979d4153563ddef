/* SPDX-License-Identifier: Apache-2.0
 *
 * How many pages of a range can be committed and decommitted in a second on host memory: what a cache
 * of pages costs when nobody touches the pages. It prints a table and judges nothing.
 *
 *   bench_range_pages [PAGES [ROUNDS]]
 */
#include "growpool.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define DEFAULT_PAGES  4096
#define DEFAULT_ROUNDS 20

struct bench {
    gp_pool *pool;
    gp_range *range;
    size_t page_count; /* of the range */
    gp_interval *pages; /* those that come and go */
    size_t count;
    size_t rounds;
};

struct seconds {
    double commit;
    double decommit;
};

static void must(gp_status status, const gp_error *error)
{
    if (status == GP_OK)
        return;
    fprintf(stderr, "range_pages: %s: %s\n", gp_status_text(status), error->message);
    exit(1);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- one way of working ------------------------------------------------------------------------ */

struct way {
    const char *name;
    size_t pages_per_call;
    bool shuffled;
    bool planned_chunks; /* the pool plans its chunks; else each page is a chunk of its own */
    bool lasting_chunks; /* a page in 64 stays committed, and the chunks with it */
    size_t cached_bytes; /* the backing keeps so many bytes of chunks */
    unsigned flags; /* of decommit */
};

static void shuffle(gp_interval *pages, size_t count)
{
    unsigned seed = 1;
    for (size_t i = count; i > 1; i--) {
        seed = seed * 1103515245U + 12345U;
        size_t other = (seed >> 8) % i;
        gp_interval swapped = pages[i - 1];
        pages[i - 1] = pages[other];
        pages[other] = swapped;
    }
}

/* The pages that come and go, in the order in which they do. */
static void order_pages(struct bench *bench, const struct way *way)
{
    gp_error error = {0};
    const size_t page = gp_range_granularity(bench->range);
    const gp_interval all = {0, gp_range_max_bytes(bench->range)};
    if (way->lasting_chunks)
        must(gp_range_commit(bench->range, &all, 1, NULL, NULL, &error), &error);
    bench->count = 0;
    for (size_t i = 0; i < bench->page_count; i++) {
        if (!way->lasting_chunks || i % 64 != 0)
            bench->pages[bench->count++] = (gp_interval){i * page, page};
    }
    if (way->shuffled)
        shuffle(bench->pages, bench->count);
}

static void set_up(struct bench *bench, const struct way *way)
{
    gp_error error = {0};
    gp_stream *stream = NULL;
    gp_backing *device = NULL;
    gp_pool_options options = {.name = "bench", .limit = GP_NO_LIMIT};
    must(gp_device_open(GP_DEVICE_HOST, 0, &options.device, &error), &error);
    const size_t page = gp_device_granularity(options.device);
    options.chunk_size = way->planned_chunks ? 0 : page;
    must(gp_backing_device(GP_LOCATION_DEVICE, &device, &error), &error);
    must(gp_backing_caching(device, way->cached_bytes, &options.backing, &error), &error);
    must(gp_pool_create(&options, &bench->pool, &error), &error);
    must(gp_pool_stream(bench->pool, 0, &stream, &error), &error);
    must(gp_range_create(bench->pool, bench->page_count * page, stream, &bench->range, &error),
         &error);
    gp_stream_release(stream);
    gp_backing_release(options.backing);
    gp_backing_release(device);
    order_pages(bench, way);
}

static void tear_down(struct bench *bench)
{
    gp_error error = {0};
    must(gp_range_close(bench->range, NULL, &error), &error);
    gp_range_release(bench->range);
    must(gp_pool_close(bench->pool, &error), &error);
    gp_pool_release(bench->pool);
}

static size_t step_of(const struct bench *bench, const struct way *way, size_t done)
{
    size_t left = bench->count - done;
    return left < way->pages_per_call ? left : way->pages_per_call;
}

static struct seconds one_round(struct bench *bench, const struct way *way)
{
    gp_error error = {0};
    gp_release_result result;
    struct seconds seconds = {0};
    double start = now();
    for (size_t i = 0, step; i < bench->count; i += step) {
        step = step_of(bench, way, i);
        must(gp_range_commit(bench->range, bench->pages + i, step, NULL, NULL, &error), &error);
    }
    seconds.commit = now() - start;
    start = now();
    for (size_t i = 0, step; i < bench->count; i += step) {
        step = step_of(bench, way, i);
        must(gp_range_decommit(bench->range, bench->pages + i, step, NULL, way->flags, &result,
                               &error),
             &error);
    }
    must(gp_pool_drain(bench->pool, &error), &error);
    seconds.decommit = now() - start;
    return seconds;
}

static void measure(struct bench *bench, const struct way *way)
{
    struct seconds total = {0};
    set_up(bench, way);
    (void)one_round(bench, way); /* the first one warms up */
    for (size_t i = 0; i < bench->rounds; i++) {
        struct seconds seconds = one_round(bench, way);
        total.commit += seconds.commit;
        total.decommit += seconds.decommit;
    }
    tear_down(bench);
    const double pages = (double)(bench->count * bench->rounds);
    printf("%-42s %10.0f %12.0f %10.0f\n", way->name, pages / total.commit, pages / total.decommit,
           2 * pages / (total.commit + total.decommit));
}

/* ---- all of them ------------------------------------------------------------------------------- */

static const struct way ways[] = {
    {.name = "single pages, in order", .pages_per_call = 1},
    {.name = "single pages, shuffled", .pages_per_call = 1, .shuffled = true},
    {.name = "single pages, shuffled, no wait",
     .pages_per_call = 1,
     .shuffled = true,
     .flags = GP_TRIM_NO_WAIT},
    {.name = "single pages, shuffled, chunks kept",
     .pages_per_call = 1,
     .shuffled = true,
     .cached_bytes = SIZE_MAX},
    {.name = "bulk of 32, shuffled", .pages_per_call = 32, .shuffled = true},
    {.name = "bulk of 32, shuffled, no wait",
     .pages_per_call = 32,
     .shuffled = true,
     .flags = GP_TRIM_NO_WAIT},
    {.name = "bulk of 32, shuffled, chunks kept",
     .pages_per_call = 32,
     .shuffled = true,
     .cached_bytes = SIZE_MAX},
    {.name = "single pages, shuffled, in lasting chunks",
     .pages_per_call = 1,
     .shuffled = true,
     .planned_chunks = true,
     .lasting_chunks = true},
    {.name = "bulk of 32, shuffled, in lasting chunks",
     .pages_per_call = 32,
     .shuffled = true,
     .planned_chunks = true,
     .lasting_chunks = true},
};

static size_t number(const char *text)
{
    size_t value = (size_t)strtoul(text, NULL, 10);
    return value > 0 ? value : 1;
}

int main(int argc, char **argv)
{
    struct bench bench = {.page_count = DEFAULT_PAGES, .rounds = DEFAULT_ROUNDS};
    if (argc > 1)
        bench.page_count = number(argv[1]);
    if (argc > 2)
        bench.rounds = number(argv[2]);
    bench.pages = calloc(bench.page_count, sizeof(*bench.pages));
    if (bench.pages == NULL)
        return 1;
    printf("%zu pages, %zu rounds; pages a second\n", bench.page_count, bench.rounds);
    printf("%-42s %10s %12s %10s\n", "", "commit", "decommit", "both");
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        measure(&bench, &ways[i]);
    free(bench.pages);
    return 0;
}
