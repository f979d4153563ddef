/* SPDX-License-Identifier: Apache-2.0
 *
 * The hot paths of a pool, each a number of times in a function of its own, for a counter of instructions
 * (tests/test_instructions.py). It measures nothing itself. The pool's device is one of its own whose calls do
 * nothing: valgrind does not know the system call that moves the host device's pages, and what a driver
 * does is not to be counted.
 *
 * usage: hot_path CASE COUNT
 */
#include "../backing/driver.h"
#include "../vmm/growpool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB     ((size_t)1 << 20)
#define LIVE    1000
#define MOST    65536 /* blocks of one case */
#define SCATTER 7919 /* a prime */

#define UNUSED __attribute__((unused))

/* ---- a device that does nothing ------------------------------------------------------------------- */

static gp_status memory_info(UNUSED gp_device *device, size_t *free_bytes, size_t *total_bytes,
                             UNUSED gp_error *error)
{
    *free_bytes = *total_bytes = (size_t)1 << 40;
    return GP_OK;
}

static gp_status reserve(UNUSED gp_device *device, size_t bytes, uintptr_t *va,
                         UNUSED gp_error *error)
{
    static uintptr_t next = (uintptr_t)1 << 40;
    *va = next;
    next += bytes;
    return GP_OK;
}

static gp_status create(UNUSED gp_device *device, UNUSED size_t bytes, UNUSED gp_location location,
                        UNUSED unsigned flags, gp__memory *out, UNUSED gp_error *error)
{
    static gp__memory last;
    *out = ++last;
    return GP_OK;
}

static gp_status map(UNUSED gp_device *device, UNUSED uintptr_t va, UNUSED size_t bytes,
                     UNUSED gp__memory memory, UNUSED gp_error *error)
{
    return GP_OK;
}

static gp_status set_access(UNUSED gp_device *device, UNUSED uintptr_t va, UNUSED size_t bytes,
                            UNUSED gp_location location, UNUSED const struct gp__peers *peers,
                            UNUSED gp_error *error)
{
    return GP_OK;
}

static gp_status stream_resolve(UNUSED gp_device *device, uintptr_t handle,
                                struct gp__stream_key *out, UNUSED gp_error *error)
{
    *out = (struct gp__stream_key){.handle = handle, .id = handle};
    return GP_OK;
}

static gp_status stream_capturing(UNUSED gp_device *device,
                                  UNUSED const struct gp__stream_key *stream, bool *capturing,
                                  UNUSED gp_error *error)
{
    *capturing = false;
    return GP_OK;
}

static gp_status event_create(UNUSED gp_device *device, UNUSED uintptr_t context, gp__event **out,
                              UNUSED gp_error *error)
{
    static char event;
    *out = (gp__event *)&event;
    return GP_OK;
}

static gp_status event_record(UNUSED gp_device *device, UNUSED gp__event *event,
                              UNUSED const struct gp__stream_key *stream, UNUSED gp_error *error)
{
    return GP_OK;
}

static gp_status event_query(UNUSED gp_device *device, UNUSED gp__event *event,
                             UNUSED gp_error *error)
{
    return GP_OK;
}

static gp_status enter(UNUSED gp_device *device, UNUSED struct gp__entry *entry,
                       UNUSED gp_error *error)
{
    return GP_OK;
}

static void leave(UNUSED gp_device *device, UNUSED const struct gp__entry *entry)
{
}

static const struct gp__driver driver = {
    .memory_info = memory_info,
    .reserve = reserve,
    .create = create,
    .map = map,
    .set_access = set_access,
    .unmap = map,
    .stream_resolve = stream_resolve,
    .stream_capturing = stream_capturing,
    .event_create = event_create,
    .event_record = event_record,
    .event_query = event_query,
    .enter = enter,
    .leave = leave,
};

static gp_device device = {
    .driver = &driver,
    .kind = GP_DEVICE_HOST,
    .granularity = 2 * MIB,
    .host_accessible = true,
    .name = "nothing",
};

/* ---- the pool --------------------------------------------------------------------------------------- */

static gp_pool *pool;
static gp_stream *own, *other;
static uintptr_t blocks[MOST];
static gp_error error; /* zeroed once: that is no part of a call */

static void must(gp_status status)
{
    if (status == GP_OK)
        return;
    fprintf(stderr, "hot_path: %s: %s\n", gp_status_text(status), error.message);
    exit(1);
}

static uintptr_t take(size_t bytes)
{
    uintptr_t address = 0;
    must(gp_pool_malloc(pool, bytes, own, 0, &address, &error));
    return address;
}

static void give(uintptr_t address, gp_stream *stream)
{
    must(gp_pool_free(pool, address, stream, 0, &error));
}

/* ---- what is counted: nothing else calls these --------------------------------------------------- */

#define COUNTED __attribute__((noinline, noclone)) void

/* The same block again and again. */
COUNTED count_pair(long count);
COUNTED count_pair(long count)
{
    for (long i = 0; i < count; i++)
        give(take(MIB), own);
}

/* Another size each time: what was kept is given up, melted, and split anew. */
COUNTED count_miss(long count);
COUNTED count_miss(long count)
{
    for (long i = 0; i < count; i++)
        give(take(MIB + (size_t)(i % 64) * 512), own);
}

/* Freed on a stream that is not the block's. */
COUNTED count_cross(long count);
COUNTED count_cross(long count)
{
    for (long i = 0; i < count; i++)
        give(take(MIB), other);
}

COUNTED count_record(long count);
COUNTED count_record(long count)
{
    for (long i = 0; i < count; i++) {
        uintptr_t address = take(MIB);
        must(gp_pool_record_stream(pool, address, other, &error));
        give(address, own);
    }
}

/* As many blocks at once as there are rounds, freed in no order: trees, chains and lists get long. */
COUNTED count_fill(long count);
COUNTED count_fill(long count)
{
    for (long i = 0; i < count; i++)
        blocks[i] = take(512 * (1 + (size_t)i * 2654435761u % 8));
    for (long i = 0; i < count; i++)
        give(blocks[i * SCATTER % count], own);
}

/* ---- cases ----------------------------------------------------------------------------------------- */

static void make_pool(void)
{
    gp_pool_options options = {
        .name = "hot", .device = &device, .limit = GP_NO_LIMIT, .flags = GP_POOL_NO_REAPER};
    must(gp_pool_create(&options, &pool, &error));
    must(gp_pool_stream(pool, 11, &own, &error));
    must(gp_pool_stream(pool, 12, &other, &error));
}

/* Blocks of mixed sizes, a third of them free again: a pool in the middle of its work. */
static void make_live(void)
{
    for (size_t i = 0; i < LIVE; i++)
        blocks[i] = take(512 * (1 + i * 2654435761u % 4000));
    for (size_t i = 0; i < LIVE; i += 3)
        give(blocks[i], own);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*counted)(long count);
        bool live;
    } cases[] = {
        {"pair", count_pair, false},   {"pair-live", count_pair, true},
        {"miss", count_miss, false},   {"miss-live", count_miss, true},
        {"cross", count_cross, false}, {"record", count_record, false},
        {"fill", count_fill, false},
    };
    if (argc != 3 || atol(argv[2]) > MOST)
        return 2;
    make_pool();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (strcmp(cases[i].name, argv[1]) != 0)
            continue;
        if (cases[i].live)
            make_live();
        uintptr_t room = take(256 * MIB); /* so that no case grows */
        give(room, own);
        cases[i].counted(atol(argv[2]));
        return 0;
    }
    return 2;
}
