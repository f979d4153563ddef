/* SPDX-License-Identifier: Apache-2.0
 *
 * A first pool in C: a backing that counts what it supplies, a block that makes the pool grow, a limit
 * that holds, and a trim that gives everything back. On host memory, so it runs anywhere.
 */
#include <growpool/growpool.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

/* Every call that can fail returns a status and fills a gp_error that says what happened. */
static void must(gp_status status, const gp_error *error)
{
    if (status == GP_OK)
        return;
    fprintf(stderr, "grow: %s: %s\n", gp_status_text(status), error->message);
    exit(1);
}

/* ---- the backing: where physical memory comes from ------------------------------------------- */

/* A pool may call its backing on several threads at once, so the counters are atomic. */
struct counter {
    atomic_int given;
    atomic_int taken;
};

static gp_status give(void *context, const gp_request *request, gp_chunk **out, gp_error *error)
{
    struct counter *counter = context;
    /* Here a program decides: say no with GP_ERR_OUT_OF_MEMORY, or hand out a chunk it has kept. */
    gp_status status =
        gp_chunk_create(request->device, request->size, GP_LOCATION_DEVICE, 0, out, error);
    if (status == GP_OK)
        counter->given++;
    return status;
}

static gp_status take_back(void *context, gp_chunk *chunk, const gp_request *request,
                           gp_error *error)
{
    struct counter *counter = context;
    (void)request;
    (void)error;
    counter->taken++;
    gp_chunk_release(chunk); /* or keep it, and give it again */
    return GP_OK;
}

static const gp_backing_ops counting = {.alloc = give, .free = take_back};

/* ---- the program ------------------------------------------------------------------------------- */

static void show(gp_pool *pool, const char *when)
{
    gp_pool_stats stats;
    gp_pool_get_stats(pool, &stats);
    printf("%-22s %3zu MiB used, %3zu MiB physical in %d chunks\n", when, stats.used_bytes / MIB,
           stats.physical_bytes / MIB, (int)stats.chunk_count);
}

static gp_pool *make_pool(struct counter *counter)
{
    gp_error error = {0};
    gp_pool *pool = NULL;
    gp_pool_options options = {.name = "first", .limit = 128 * MIB};
    must(gp_device_open(GP_DEVICE_HOST, 0, &options.device, &error), &error);
    must(gp_backing_create(&counting, counter, &options.backing, &error), &error);
    must(gp_pool_create(&options, &pool, &error), &error);
    gp_backing_release(options.backing); /* the pool has a reference of its own */
    return pool;
}

int main(void)
{
    struct counter counter = {0};
    gp_error error = {0};
    gp_pool *pool = make_pool(&counter);

    /* Memory is always for work on a stream; on the host, handle 0 is the calling thread. */
    gp_stream *stream = NULL;
    must(gp_pool_stream(pool, 0, &stream, &error), &error);
    show(pool, "a new pool:");

    uintptr_t small = 0, large = 0;
    must(gp_pool_malloc(pool, 1 * MIB, stream, 0, &small, &error), &error);
    show(pool, "after 1 MiB:");
    must(gp_pool_malloc(pool, 64 * MIB, stream, 0, &large, &error), &error);
    memset((void *)large, 1, 64 * MIB);
    show(pool, "after 64 MiB more:");

    uintptr_t too_large = 0;
    if (gp_pool_malloc(pool, 256 * MIB, stream, 0, &too_large, &error) == GP_ERR_LIMIT)
        printf("the limit holds: %s\n", error.message);

    must(gp_pool_free(pool, small, NULL, 0, &error), &error);
    must(gp_pool_free(pool, large, NULL, 0, &error), &error);
    show(pool, "after both were freed:");
    must(gp_pool_trim(pool, 0, 0, NULL, &error), &error);
    show(pool, "after a trim:");

    must(gp_pool_close(pool, &error), &error);
    gp_stream_release(stream);
    gp_pool_release(pool);
    printf("the backing gave %d chunks and took back %d\n", counter.given, counter.taken);
    return counter.given == counter.taken ? 0 : 1;
}
