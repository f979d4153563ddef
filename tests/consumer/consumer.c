/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that uses an installed growpool as its users do: a host pool with a backing of its own,
 * blocks, a range, exports, a shared chunk, and figures that must be right. It includes installed
 * headers only.
 */
#include <growpool/growpool.h>

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "consumer.c:%d: this should hold: %s\n", __LINE__, #condition);        \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

/* ---- a backing that counts ------------------------------------------------------------------- */

struct counts {
    atomic_size_t given; /* bytes */
    atomic_size_t taken;
    atomic_int destroyed;
};

static gp_status count_alloc(void *context, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    struct counts *counts = context;
    gp_status status =
        gp_chunk_create(request->device, request->size, GP_LOCATION_DEVICE, 0, out, error);
    if (status == GP_OK)
        counts->given += request->size;
    return status;
}

static gp_status count_free(void *context, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    struct counts *counts = context;
    (void)error;
    counts->taken += request->size;
    gp_chunk_release(chunk);
    return GP_OK;
}

static void count_destroy(void *context)
{
    struct counts *counts = context;
    counts->destroyed++;
}

static const gp_backing_ops count_ops = {count_alloc, count_free, count_destroy};

/* ---- what it does ---------------------------------------------------------------------------- */

static bool make_pool(struct counts *counts, gp_pool **pool, gp_stream **stream)
{
    gp_pool_options options = {0};
    gp_error error = {0};
    CHECK(gp_device_open(GP_DEVICE_HOST, 0, &options.device, &error) == GP_OK);
    CHECK(gp_backing_create(&count_ops, counts, &options.backing, &error) == GP_OK);
    options.name = "consumer";
    options.limit = 32 * MIB;
    options.chunk_size = gp_device_granularity(options.device);
    CHECK(options.chunk_size == 2 * MIB);
    CHECK(gp_pool_create(&options, pool, &error) == GP_OK);
    gp_backing_release(options.backing);
    CHECK(gp_pool_stream(*pool, 0, stream, &error) == GP_OK);
    CHECK(strcmp(gp_pool_name(*pool), "consumer") == 0);
    return true;
}

static bool use_a_block(gp_pool *pool, gp_stream *stream)
{
    gp_error error = {0};
    gp_pool_stats stats;
    uintptr_t address = 0, refused = 0;
    CHECK(gp_pool_malloc(pool, 5 * MIB, stream, 0, &address, &error) == GP_OK);
    memset((void *)address, 1, 5 * MIB);
    CHECK(gp_pool_malloc(pool, 64 * MIB, stream, 0, &refused, &error) == GP_ERR_LIMIT);
    CHECK(refused == 0 && error.limit == 32 * MIB && strstr(error.message, "limit") != NULL);
    gp_pool_get_stats(pool, &stats);
    CHECK(stats.used_bytes == 5 * MIB && stats.physical_bytes == 6 * MIB);
    CHECK(gp_pool_free(pool, address, NULL, 0, &error) == GP_OK);
    CHECK(gp_pool_free(pool, address, NULL, 0, &error) == GP_ERR_ARGUMENT);
    return true;
}

static bool use_a_range(gp_pool *pool, gp_stream *stream)
{
    gp_error error = {0};
    gp_release_result result = {0};
    gp_range *range = NULL;
    CHECK(gp_range_create(pool, 64 * MIB, stream, &range, &error) == GP_OK);
    CHECK(gp_range_resize(range, 8 * MIB, NULL, 0, &result, &error) == GP_OK);
    const uintptr_t address = gp_range_address(range);
    unsigned char *bytes = (unsigned char *)address;
    memset(bytes, 7, 8 * MIB);
    CHECK(gp_range_resize(range, 4 * MIB, NULL, 0, &result, &error) == GP_OK);
    CHECK(result.released_bytes == 4 * MIB && result.kept_bytes == 0);
    CHECK(gp_range_address(range) == address && bytes[4 * MIB - 1] == 7);
    const gp_interval far_away = {40 * MIB, 2 * MIB};
    size_t committed = 0;
    CHECK(gp_range_commit(range, &far_away, 1, NULL, &committed, &error) == GP_OK);
    CHECK(committed == 2 * MIB && gp_range_committed_bytes(range) == 6 * MIB);
    gp_interval found[3];
    CHECK(gp_range_committed(range, found, 3) == 2);
    CHECK(found[1].offset == far_away.offset && found[1].bytes == far_away.bytes);
    CHECK(gp_range_close(range, NULL, &error) == GP_OK);
    gp_range_release(range);
    return true;
}

static bool export_and_copy(gp_pool *pool, gp_stream *stream)
{
    gp_error error = {0};
    uintptr_t address = 0, other = 0;
    CHECK(gp_pool_malloc(pool, MIB, stream, 0, &address, &error) == GP_OK);
    CHECK(gp_pool_malloc(pool, MIB, stream, 0, &other, &error) == GP_OK);
    CHECK(gp_pool_fill(pool, address, MIB, 5, stream, &error) == GP_OK);
    CHECK(gp_pool_copy(pool, other, address, MIB, stream, &error) == GP_OK);
    CHECK(gp_pool_synchronize(pool, stream, false, &error) == GP_OK);
    CHECK(((unsigned char *)other)[MIB - 1] == 5);
    CHECK(gp_pool_pin(pool, other, false, &error) == GP_OK);
    CHECK(gp_pool_free(pool, other, NULL, 0, &error) == GP_ERR_PINNED);
    CHECK(gp_pool_close(pool, &error) == GP_ERR_PINNED && !gp_pool_is_closed(pool));
    gp_pool_unpin(pool, other);
    CHECK(gp_pool_free(pool, other, NULL, 0, &error) == GP_OK);
    CHECK(gp_pool_free(pool, address, NULL, 0, &error) == GP_OK);
    return true;
}

static bool share_a_chunk(gp_device *device)
{
    gp_error error = {0};
    gp_chunk *chunk = NULL, *twin = NULL;
    int fd = -1;
    CHECK(gp_chunk_create(device, 2 * MIB, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &chunk,
                          &error) == GP_OK);
    CHECK(gp_chunk_export_fd(chunk, &fd, &error) == GP_OK);
    CHECK(gp_chunk_import_fd(device, fd, 2 * MIB, &twin, &error) == GP_OK);
    close(fd);
    CHECK(gp_chunk_size(twin) == 2 * MIB && gp_chunk_id(twin) != gp_chunk_id(chunk));
    gp_chunk_release(chunk);
    gp_chunk_release(twin);
    return true;
}

static bool finish(struct counts *counts, gp_pool *pool, gp_stream *stream)
{
    gp_error error = {0};
    gp_pool_stats stats;
    size_t released = 0;
    CHECK(gp_pool_drain(pool, &error) == GP_OK);
    CHECK(gp_pool_trim(pool, 0, 0, &released, &error) == GP_OK);
    gp_pool_get_stats(pool, &stats);
    CHECK(stats.physical_bytes == 0 && stats.used_bytes == 0);
    CHECK(stats.peak_physical_bytes <= 32 * MIB);
    CHECK(counts->given == counts->taken && counts->given >= 16 * MIB);
    CHECK(gp_pool_close(pool, &error) == GP_OK);
    gp_stream_release(stream);
    gp_pool_release(pool);
    CHECK(counts->destroyed == 1);
    return true;
}

int main(void)
{
    struct counts counts = {0};
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    if (!make_pool(&counts, &pool, &stream) || !use_a_block(pool, stream) ||
        !use_a_range(pool, stream) || !export_and_copy(pool, stream) ||
        !share_a_chunk(gp_pool_device(pool)) || !finish(&counts, pool, stream))
        return 1;
    puts("consumer: every figure is right");
    return 0;
}
