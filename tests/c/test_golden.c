/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan item 6: the order and pairing of driver calls, read from the simulator's log. Sizes must
 * match exactly; how many calls there are is nobody's business here (fault_counts.h watches that).
 *
 * Mutations that this file catches: unmapping before the fence (a_trim_fences_waits_and_unmaps), a
 * release before the unmap, addresses freed with another size (a_close_frees_exact_addresses), a
 * fence for each interval of a decommit (a_decommit_of_many_parts_fences_once), a driver call on
 * the same-stream path (a_same_stream_reuse_calls_nothing).
 */
#include "tests/support/world.h"

#define MIB CHECK_MIB

struct line {
    char name[24];
    uint64_t va, bytes, memory, id;
    bool ok;
};

static bool read_field(const char *text, const char *key, uint64_t *out)
{
    const char *found = strstr(text, key);

    if (found == NULL)
        return false;
    *out = strtoull(found + strlen(key), NULL, 0);
    return true;
}

static struct line read_line(const struct world *world, size_t index)
{
    const char *text = gp__sim_log_line(world->sim, index);
    struct line line;

    memset(&line, 0, sizeof line);
    sscanf(text, "%23s", line.name);
    read_field(text, " va=", &line.va);
    read_field(text, " bytes=", &line.bytes);
    read_field(text, " memory=", &line.memory);
    read_field(text, " id=", &line.id);
    line.ok = strstr(text, "-> ok") != NULL;
    return line;
}

/* The index of the first successful call `name` at or after `from` that concerns this memory, address
 * or stream id (0: any); SIZE_MAX when there is none. */
static size_t find(const struct world *world, const char *name, uint64_t memory, uint64_t va,
                   uint64_t id, size_t from)
{
    for (size_t i = from; i < gp__sim_log_count(world->sim); i++) {
        struct line line = read_line(world, i);

        if (strcmp(line.name, name) == 0 && line.ok && (memory == 0 || line.memory == memory) &&
            (va == 0 || line.va == va) && (id == 0 || line.id == id))
            return i;
    }
    return SIZE_MAX;
}

static size_t count(const struct world *world, const char *name)
{
    size_t found = 0;

    for (size_t i = find(world, name, 0, 0, 0, 0); i != SIZE_MAX;
         i = find(world, name, 0, 0, 0, i + 1))
        found++;
    return found;
}

/* Every memory created is mapped once with its size, opened afterwards, and nothing in between was
 * handed out. */
static void check_growth(const struct world *world)
{
    size_t create = find(world, "create", 0, 0, 0, 0);

    CHECK(create != SIZE_MAX, "nothing was created");
    for (; create != SIZE_MAX; create = find(world, "create", 0, 0, 0, create + 1)) {
        struct line made = read_line(world, create);
        size_t map = find(world, "map", made.memory, 0, 0, 0), open;
        struct line mapped;

        CHECK(map != SIZE_MAX && map > create, "memory %llu was not mapped after its creation",
              (unsigned long long)made.memory);
        mapped = read_line(world, map);
        CHECK(mapped.bytes == made.bytes, "memory %llu: created %llu bytes, mapped %llu",
              (unsigned long long)made.memory, (unsigned long long)made.bytes,
              (unsigned long long)mapped.bytes);
        for (open = map; open != SIZE_MAX; open = find(world, "set_access", 0, 0, 0, open + 1)) {
            struct line opened = read_line(world, open);

            if (open > map && opened.va <= mapped.va &&
                opened.va + opened.bytes >= mapped.va + mapped.bytes)
                break;
        }
        CHECK(open != SIZE_MAX, "no access was set over memory %llu after its mapping",
              (unsigned long long)made.memory);
        CHECK(find(world, "map", made.memory, 0, 0, map + 1) == SIZE_MAX, "mapped twice");
    }
}

/* Every successful unmap has its release afterwards, and every release its unmap before, same sizes. */
static void check_shrinkage(const struct world *world)
{
    CHECK(count(world, "unmap") == count(world, "release"), "%zu unmaps, %zu releases",
          count(world, "unmap"), count(world, "release"));
    for (size_t i = find(world, "unmap", 0, 0, 0, 0); i != SIZE_MAX;
         i = find(world, "unmap", 0, 0, 0, i + 1)) {
        struct line unmapped = read_line(world, i);
        size_t release = find(world, "release", unmapped.memory, 0, 0, 0);

        CHECK(release != SIZE_MAX && release > i, "memory %llu was not released after its unmap",
              (unsigned long long)unmapped.memory);
        CHECK(read_line(world, release).bytes == unmapped.bytes, "released with another size");
    }
}

static int set_up(void **state)
{
    static struct world world;

    world_begin(&world, &(struct world_options){.chunk_size = WORLD_PAGE});
    world_open(&world);
    gp__sim_log_clear(world.sim);
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    world_end(*state);
    return 0;
}

static void a_growth_reserves_creates_maps_and_opens(void **state)
{
    struct world *world = *state;
    uintptr_t va = world_malloc(world, 5 * MIB, 0);
    size_t reserve = find(world, "reserve", 0, 0, 0, 0);

    CHECK(reserve != SIZE_MAX && reserve < find(world, "create", 0, 0, 0, 0),
          "the addresses come first");
    CHECK(va >= read_line(world, reserve).va &&
              va + 5 * MIB <= read_line(world, reserve).va + read_line(world, reserve).bytes,
          "the block lies outside the reservation");
    check_growth(world);
    gp__sim_log_clear(world->sim);
    world_malloc(world, 3 * MIB, 1);
    CHECK(find(world, "reserve", 0, 0, 0, 0) == SIZE_MAX, "addresses were left, yet more reserved");
    check_growth(world);
}

/* Frees call nothing; taking the memory back asks only whether the stream captures. */
static void a_same_stream_reuse_calls_nothing(void **state)
{
    struct world *world = *state;
    uintptr_t va = world_malloc(world, 2 * MIB, 0), again = 0;

    world_launch(world, 0, va, 2 * MIB);
    gp__sim_log_clear(world->sim);
    world_free(world, va, -1);
    assert_int_equal(gp__sim_log_count(world->sim), 0);
    CHECK_OK(gp_pool_try_malloc(world->pool, 2 * MIB, world->stream[0], 0, &again, NULL), NULL);
    assert_int_equal(again, va);
    world_free(world, va, 0);
    CHECK_OK(gp_pool_malloc(world->pool, 2 * MIB, world->stream[0], 0, &again, NULL), NULL);
    assert_int_equal(again, va);
    CHECK(gp__sim_log_count(world->sim) == count(world, "stream_capturing"),
          "%zu driver calls on the fast path", gp__sim_log_count(world->sim));
}

static void a_trim_fences_waits_and_unmaps(void **state)
{
    struct world *world = *state;
    uintptr_t a = world_malloc(world, 2 * MIB, 0), b = world_malloc(world, 2 * MIB, 1);
    uint64_t id_a = gp__sim_stream_id(world->sim, world->handle[0]);
    uint64_t id_b = gp__sim_stream_id(world->sim, world->handle[1]);
    size_t released = 0, fence_a, fence_b, last_fence, wait, query, unmap;

    world_launch(world, 0, a, 2 * MIB);
    world_launch(world, 1, b, 2 * MIB);
    world_launch(world, 1, a, 2 * MIB);
    CHECK_OK(gp_pool_record_stream(world->pool, a, world->stream[1], NULL), NULL);
    world_free(world, a, 0);
    world_free(world, b, 1);
    gp__sim_log_clear(world->sim);
    CHECK_OK(gp_pool_trim(world->pool, 0, 0, &released, &world->error), &world->error);
    assert_int_equal(released, 4 * MIB);
    fence_a = find(world, "event_record", 0, 0, id_a, 0);
    fence_b = find(world, "event_record", 0, 0, id_b, 0);
    CHECK(fence_a != SIZE_MAX && fence_b != SIZE_MAX, "a fence on each owner's stream");
    last_fence = fence_a > fence_b ? fence_a : fence_b;
    unmap = find(world, "unmap", 0, a, 0, 0);
    wait = find(world, "event_wait", 0, 0, 0, last_fence);
    query = find(world, "event_query", 0, 0, 0, last_fence);
    CHECK(unmap != SIZE_MAX && last_fence < unmap,
          "both fences before the unmap of memory of both");
    CHECK(wait < unmap || query < unmap, "a completed wait or query before the unmap");
    CHECK(find(world, "unmap", 0, b, 0, fence_b) != SIZE_MAX, "b is unmapped after its fence");
    check_shrinkage(world);
}

static void a_trim_of_passed_memory_needs_no_second_fence(void **state)
{
    struct world *world = *state;
    uintptr_t a = world_malloc(world, 2 * MIB, 0), b = world_malloc(world, 2 * MIB, 0);
    size_t released = 0;

    world_launch(world, 0, a, 2 * MIB);
    world_free(world, a, 0);
    world_free(world, b, 0);
    gp__sim_log_clear(world->sim);
    CHECK_OK(gp_pool_trim(world->pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(released, 4 * MIB);
    assert_int_equal(count(world, "event_record"), 1); /* one clock: a single fence covers both */
    assert_int_equal(count(world, "unmap"), 2);
}

static void a_close_frees_exact_addresses(void **state)
{
    struct world *world = *state;
    size_t reserve, unmapped = 0, freed;

    world_launch(world, 0, world_malloc(world, 7 * MIB, 0), 7 * MIB);
    world_launch(world, 1, world_malloc(world, 100, 1), 100);
    world_close(world);
    reserve = find(world, "reserve", 0, 0, 0, 0);
    for (; reserve != SIZE_MAX; reserve = find(world, "reserve", 0, 0, 0, reserve + 1)) {
        struct line reserved = read_line(world, reserve);

        freed = find(world, "free_address", 0, reserved.va, 0, reserve);
        CHECK(freed != SIZE_MAX, "the reservation at %#llx was never freed",
              (unsigned long long)reserved.va);
        assert_int_equal(read_line(world, freed).bytes, reserved.bytes);
    }
    for (size_t i = find(world, "unmap", 0, 0, 0, 0); i != SIZE_MAX;
         i = find(world, "unmap", 0, 0, 0, i + 1))
        unmapped = i;
    freed = find(world, "free_address", 0, 0, 0, 0);
    CHECK(freed > unmapped, "addresses were freed before the last unmap");
    assert_int_equal(count(world, "reserve"), count(world, "free_address"));
    assert_int_equal(count(world, "create"), count(world, "release"));
    assert_int_equal(count(world, "event_create"), count(world, "event_destroy"));
    assert_int_equal(count(world, "enter"), count(world, "leave"));
    check_growth(world);
    check_shrinkage(world);
}

/* The third map fails: two are unmapped, three chunks go back, and nothing was ever opened. */
static void a_failed_map_is_undone_in_order(void **state)
{
    struct world *world = *state;
    uintptr_t va = 0;
    uint64_t n;
    bool seen = false;

    /* Which call that is, the log of the failing attempt itself tells. */
    for (n = 1; n < 100 && !seen; n++) {
        gp__sim_log_clear(world->sim);
        gp__sim_fail_at(world->sim, n, false);
        if (gp_pool_malloc(world->pool, 6 * MIB, world->stream[0], 0, &va, NULL) == GP_OK)
            world_free(world, va, 0);
        seen = strcmp(gp__sim_fault_name(world->sim), "map") == 0 && count(world, "map") == 2;
        gp__sim_fail_at(world->sim, 0, false);
        CHECK_OK(gp_pool_trim(world->pool, 0, 0, &(size_t){0}, NULL), NULL);
    }
    CHECK(seen, "no fault hit a third map");
    assert_int_equal(count(world, "unmap"), 2);
    assert_int_equal(count(world, "create"), 3);
    assert_int_equal(count(world, "release"), 3);
    assert_int_equal(count(world, "set_access"), 0);
}

static void a_growth_asks_whether_its_stream_captures(void **state)
{
    struct world *world = *state;
    size_t asked;

    world_malloc(world, 100, 2);
    asked = find(world, "stream_capturing", 0, 0, 0, 0);
    CHECK(asked != SIZE_MAX && asked < find(world, "create", 0, 0, 0, 0),
          "the question comes before the growth");
}

/* ---- ranges ---- */

static gp_range *make_range(struct world *world)
{
    gp_range *range = NULL;

    CHECK_OK(gp_range_create(world->pool, 8 * WORLD_PAGE, world->stream[0], &range, &world->error),
             &world->error);
    return range;
}

static void a_range_reserves_its_exact_size(void **state)
{
    struct world *world = *state;
    gp_range *range = make_range(world);
    size_t reserve = find(world, "reserve", 0, 0, 0, 0);

    assert_int_equal(gp__sim_log_count(world->sim), 1);
    assert_int_equal(read_line(world, reserve).bytes, 8 * WORLD_PAGE);
    assert_int_equal(read_line(world, reserve).va, gp_range_address(range));
    gp_range_release(range);
    assert_int_equal(gp__sim_log_count(world->sim), 2); /* nothing was mapped: it goes at once */
    CHECK(find(world, "free_address", 0, read_line(world, reserve).va, 0, 0) == 1, "in one piece");
}

/* Pages 1 and 2, and page 6: each hole's chunks are made and mapped in order, and opened as one
 * run. */
static void a_commit_of_two_holes_opens_two_runs(void **state)
{
    struct world *world = *state;
    gp_range *range = make_range(world);
    const gp_interval parts[] = {{6 * WORLD_PAGE, WORLD_PAGE}, {WORLD_PAGE, 2 * WORLD_PAGE}};
    uintptr_t va = gp_range_address(range);
    size_t first, second, last_map;

    gp__sim_log_clear(world->sim);
    CHECK_OK(gp_range_commit(range, parts, 2, NULL, NULL, &world->error), &world->error);
    check_growth(world);
    assert_int_equal(count(world, "create"), 3);
    assert_int_equal(count(world, "set_access"), 2);
    assert_int_equal(count(world, "reserve"), 0);
    first = find(world, "set_access", 0, va + WORLD_PAGE, 0, 0);
    second = find(world, "set_access", 0, va + 6 * WORLD_PAGE, 0, 0);
    last_map = find(world, "map", 0, va + 6 * WORLD_PAGE, 0, 0);
    CHECK(first != SIZE_MAX && second != SIZE_MAX && last_map < first,
          "every chunk is mapped before the first is opened");
    assert_int_equal(read_line(world, first).bytes, 2 * WORLD_PAGE);
    assert_int_equal(read_line(world, second).bytes, WORLD_PAGE);
    CHECK(find(world, "map", 0, va + WORLD_PAGE, 0, 0) <
              find(world, "map", 0, va + 2 * WORLD_PAGE, 0, 0),
          "chunks are mapped by address");
    gp_range_release(range);
}

/* Three parts in use by one stream: one fence and one wait for all, then each is unmapped and
 * released. */
static void a_decommit_of_many_parts_fences_once(void **state)
{
    struct world *world = *state;
    gp_range *range = make_range(world);
    const gp_interval all = {0, 8 * WORLD_PAGE};
    const gp_interval parts[] = {
        {5 * WORLD_PAGE, WORLD_PAGE}, {0, WORLD_PAGE}, {2 * WORLD_PAGE, 2 * WORLD_PAGE}};
    size_t fence, wait, unmap;

    CHECK_OK(gp_range_commit(range, &all, 1, NULL, NULL, &world->error), &world->error);
    world_launch(world, 0, gp_range_address(range), 8 * WORLD_PAGE);
    gp__sim_log_clear(world->sim);
    CHECK_OK(gp_range_decommit(range, parts, 3, NULL, 0, NULL, &world->error), &world->error);
    assert_int_equal(count(world, "event_record"), 1);
    assert_int_equal(count(world, "event_wait"), 1);
    assert_int_equal(count(world, "unmap"), 4);
    fence = find(world, "event_record", 0, 0, 0, 0);
    wait = find(world, "event_wait", 0, 0, 0, fence);
    unmap = find(world, "unmap", 0, 0, 0, 0);
    CHECK(fence < wait && wait < unmap, "the fence, the wait, then the first unmap");
    for (size_t i = unmap; i != SIZE_MAX; i = find(world, "unmap", 0, 0, 0, i + 1))
        assert_int_equal(read_line(world, i).bytes, WORLD_PAGE);
    check_shrinkage(world);
    gp_range_release(range);
}

/* The pages go first, each with its exact size, and the addresses behind the last of them. */
static void a_closed_range_unmaps_before_it_frees(void **state)
{
    struct world *world = *state;
    gp_range *range = make_range(world);
    const gp_interval parts[] = {{0, 2 * WORLD_PAGE}, {7 * WORLD_PAGE, WORLD_PAGE}};
    uintptr_t va = gp_range_address(range);
    size_t freed;

    CHECK_OK(gp_range_commit(range, parts, 2, NULL, NULL, &world->error), &world->error);
    world_launch(world, 0, va, WORLD_PAGE);
    gp__sim_log_clear(world->sim);
    CHECK_OK(gp_range_close(range, NULL, &world->error), &world->error);
    CHECK(count(world, "unmap") == 0 && count(world, "event_wait") == 0, "closing waited");
    CHECK_OK(gp_pool_drain(world->pool, &world->error), &world->error);
    freed = find(world, "free_address", 0, va, 0, 0);
    CHECK(freed != SIZE_MAX, "the addresses stay");
    assert_int_equal(read_line(world, freed).bytes, 8 * WORLD_PAGE);
    assert_int_equal(count(world, "free_address"), 1);
    assert_int_equal(count(world, "unmap"), 3);
    CHECK(find(world, "unmap", 0, 0, 0, freed) == SIZE_MAX, "an unmap behind the free");
    CHECK(find(world, "event_wait", 0, 0, 0, 0) < find(world, "unmap", 0, 0, 0, 0),
          "unmapped before the owner was waited for");
    check_shrinkage(world);
    gp_range_release(range);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_growth_reserves_creates_maps_and_opens),
        TEST(a_same_stream_reuse_calls_nothing),
        TEST(a_trim_fences_waits_and_unmaps),
        TEST(a_trim_of_passed_memory_needs_no_second_fence),
        TEST(a_close_frees_exact_addresses),
        TEST(a_failed_map_is_undone_in_order),
        TEST(a_growth_asks_whether_its_stream_captures),
        TEST(a_range_reserves_its_exact_size),
        TEST(a_commit_of_two_holes_opens_two_runs),
        TEST(a_decommit_of_many_parts_fences_once),
        TEST(a_closed_range_unmaps_before_it_frees),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
