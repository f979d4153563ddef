/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of ranges share: a world with one pool, calls that count in pages of 2 MiB, and a
 * picture of what is committed as a string ("##.#": pages 0, 1 and 3).
 */
#ifndef GP__RANGE_CASE_H
#define GP__RANGE_CASE_H

#include <pthread.h>

#include "tests/support/model.h"

#define MIB  CHECK_MIB
#define PAGE ((size_t)WORLD_PAGE)

static struct world world;

static inline int begin_with(void **state, struct world_options options)
{
    world_begin(&world, &options);
    world_open(&world);
    *state = &world;
    return 0;
}

/* Chunks of one page: every cut is exact. */
static inline int set_up(void **state)
{
    return begin_with(state, (struct world_options){.chunk_size = PAGE});
}

/* Chunks as the pool plans them. */
static inline int set_up_planned(void **state)
{
    return begin_with(state, (struct world_options){0});
}

static inline int set_up_limited(void **state)
{
    return begin_with(state, (struct world_options){.chunk_size = PAGE, .limit = 4 * PAGE});
}

static inline int tear_down(void **state)
{
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_COMPLETES);
    gp__sim_complete_all(world.sim);
    world_end(*state);
    return 0;
}

static inline void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

static inline gp_range *make_range(size_t pages, int s)
{
    gp_range *range = NULL;

    CHECK_OK(gp_range_create(world.pool, pages * PAGE, world.stream[s], &range, &world.error),
             &world.error);
    return range;
}

static inline gp_stream *stream_of(int s)
{
    return s < 0 ? NULL : world.stream[s];
}

/* Pages [first, first + count) on world stream `s`, or the range's own for -1. */
static inline gp_status try_commit(gp_range *range, size_t first, size_t count, int s)
{
    gp_interval part = {first * PAGE, count * PAGE};

    return gp_range_commit(range, &part, 1, stream_of(s), NULL, &world.error);
}

/* Must succeed; the pages that it added. */
static inline size_t commit(gp_range *range, size_t first, size_t count, int s)
{
    gp_interval part = {first * PAGE, count * PAGE};
    size_t added = SIZE_MAX;

    CHECK_OK(gp_range_commit(range, &part, 1, stream_of(s), &added, &world.error), &world.error);
    CHECK(added % PAGE == 0, "%zu bytes added", added);
    return added / PAGE;
}

static inline gp_status try_decommit(gp_range *range, size_t first, size_t count, int s,
                                     unsigned flags)
{
    gp_interval part = {first * PAGE, count * PAGE};

    return gp_range_decommit(range, &part, 1, stream_of(s), flags, NULL, &world.error);
}

/* Must succeed, releasing and keeping so many pages. */
static inline void decommit(gp_range *range, size_t first, size_t count, unsigned flags,
                            size_t released, size_t kept)
{
    gp_interval part = {first * PAGE, count * PAGE};
    gp_release_result result = {SIZE_MAX, SIZE_MAX};

    CHECK_OK(gp_range_decommit(range, &part, 1, NULL, flags, &result, &world.error), &world.error);
    CHECK(result.released_bytes == released * PAGE && result.kept_bytes == kept * PAGE,
          "released %zu bytes and kept %zu, not %zu and %zu pages", result.released_bytes,
          result.kept_bytes, released, kept);
}

/* The picture, up to the last committed page; in storage that the next call reuses. */
static inline const char *picture(const gp_range *range)
{
    static char text[256];
    gp_interval parts[128];
    size_t count = gp_range_committed(range, parts, 128), end = 0;

    CHECK(count <= 128, "%zu intervals are too many to draw", count);
    for (size_t i = 0; i < count; i++) {
        CHECK(parts[i].offset >= end * PAGE && (i == 0 || parts[i].offset > end * PAGE),
              "intervals out of order, or neighbours that are not one");
        CHECK(parts[i].offset + parts[i].bytes < sizeof text * PAGE, "too far to draw");
        while (end * PAGE < parts[i].offset)
            text[end++] = '.';
        while (end * PAGE < parts[i].offset + parts[i].bytes)
            text[end++] = '#';
    }
    text[end] = '\0';
    return text;
}

/* The picture is so, the count of committed bytes agrees, and the device has it mapped. */
static inline void expect_committed(const gp_range *range, const char *want)
{
    size_t pages = 0;

    assert_string_equal(picture(range), want);
    for (size_t i = 0; want[i] != '\0'; i++) {
        if (want[i] != '#')
            continue;
        pages++;
        CHECK(gp__sim_is_accessible(world.sim, gp_range_address(range) + i * PAGE, PAGE),
              "page %zu is committed and not accessible", i);
    }
    CHECK(gp_range_committed_bytes(range) == pages * PAGE, "%zu bytes committed, %zu pages drawn",
          gp_range_committed_bytes(range), pages);
    check_all();
}

static inline void end_range(gp_range *range)
{
    CHECK_OK(gp_range_close(range, NULL, &world.error), &world.error);
    gp_range_release(range);
}

/* Everything that is retiring goes: the ranges that are closed are buried by then. */
static inline void drain(void)
{
    CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
}

#endif
