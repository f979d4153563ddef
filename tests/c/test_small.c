/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan items 9 and 10: every sequence of operations in a tiny geometry, and every order in which
 * the streams of pending frees can complete. Small enough to be complete where test_model.c is
 * random.
 *
 * Sequences run to depth 5, those on a range to 6 (7 with GP_TEST_LONG=1); one that reaches a state
 * seen before is not continued. There are two alphabets: operations on blocks, and those on one
 * tiny range. GP_TEST_SEQUENCE="3,1,4" replays one of the first, GP_TEST_RANGE_SEQUENCE one of the
 * second.
 *
 * Mutations that this file catches: removing the ticket check (orders_of_completion_and_reuse),
 * removing the wait (all_sequences, by a violation), reaping what has not passed
 * (orders_of_completion_and_reaping).
 */
#include "tests/support/model.h"

#include "vmm/pool.h"

#define MIB        CHECK_MIB
#define DEEPEST    8
#define MOST_ORDER 6

/* ---- all sequences ---- */

struct small {
    struct world world;
    struct model model;
    bool refuse_next;
    bool limited;
};

static struct small small;

static bool refuse_once(struct world *world, size_t size)
{
    bool refuse = small.refuse_next;

    (void)world;
    (void)size;
    small.refuse_next = false;
    return refuse;
}

static void allocate(size_t bytes, int s)
{
    gp_error error = {0};
    gp_status status = model_malloc(&small.model, bytes, s, &error);

    CHECK(status == GP_OK || status == GP_ERR_OUT_OF_MEMORY || status == GP_ERR_LIMIT ||
              status == GP_ERR_ADDRESS_SPACE,
          "malloc: %s", error.message);
}

static void small_a(void)
{
    allocate(512, 0);
}

static void page_a(void)
{
    allocate(2 * MIB, 0);
}

static void page_b(void)
{
    allocate(2 * MIB, 1);
}

static void page_and_a_half_b(void)
{
    allocate(3 * MIB, 1);
}

static void free_lowest(void)
{
    if (small.model.count > 0)
        CHECK_OK(model_free(&small.model, 0, -1, NULL), NULL);
}

static void free_highest_on_b(void)
{
    if (small.model.count > 0)
        CHECK_OK(model_free(&small.model, small.model.count - 1, 1, NULL), NULL);
}

static void launch_everywhere(void)
{
    for (size_t i = 0; i < small.model.count; i++)
        for (int s = 0; s < 2; s++)
            if ((small.model.blocks[i].recorded & (1u << s)) != 0)
                world_launch(&small.world, s, small.model.blocks[i].va,
                             small.model.blocks[i].rounded);
}

static void record_lowest_on_b(void)
{
    struct model_block *block = small.model.blocks;

    if (small.model.count == 0)
        return;
    CHECK_OK(gp_pool_record_stream(small.world.pool, block->va, small.world.stream[1], NULL), NULL);
    block->recorded |= 2;
}

static void complete_a(void)
{
    gp__sim_complete(small.world.sim, small.world.handle[0], SIZE_MAX);
}

static void complete_one_b(void)
{
    gp__sim_complete(small.world.sim, small.world.handle[1], 1);
}

static void trim(void)
{
    size_t released;

    CHECK_OK(gp_pool_trim(small.world.pool, 0, 0, &released, NULL), NULL);
}

static void trim_no_wait(void)
{
    size_t released;

    CHECK_OK(gp_pool_trim(small.world.pool, 2 * MIB, GP_TRIM_NO_WAIT, &released, NULL), NULL);
}

static void reaper_turn(void)
{
    gp__pool_service(small.world.pool);
}

static void toggle_limit(void)
{
    small.limited = !small.limited;
    CHECK_OK(gp_pool_set_limit(small.world.pool, small.limited ? 4 * MIB : GP_NO_LIMIT, NULL, NULL),
             NULL);
}

static void refuse_next(void)
{
    small.refuse_next = true;
}

static void forget_b(void)
{
    struct world *world = &small.world;

    CHECK_OK(gp_pool_forget_stream(world->pool, world->handle[1], NULL), NULL);
    gp_stream_release(world->stream[1]);
    world->stream[1] = NULL;
    gp__sim_stream_destroy(world->sim, world->handle[1]);
    world->handle[1] = gp__sim_stream_create(world->sim, 0);
    CHECK_OK(gp_pool_stream(world->pool, world->handle[1], &world->stream[1], NULL), NULL);
    for (size_t i = 0; i < small.model.count; i++)
        small.model.blocks[i].recorded &= 1;
}

static void (*const operations[])(void) = {
    small_a,
    page_a,
    page_b,
    page_and_a_half_b,
    free_lowest,
    free_highest_on_b,
    launch_everywhere,
    record_lowest_on_b,
    complete_a,
    complete_one_b,
    trim,
    trim_no_wait,
    reaper_turn,
    toggle_limit,
    refuse_next,
    forget_b,
};
#include "small_range_ops.h"

/* What a search is made of. */
static const struct alphabet {
    const char *variable; /* of the environment, that replays a sequence */
    void (*const *operations)(void);
    size_t count;
    void (*begin)(void); /* what every sequence begins with; NULL: nothing */
    struct world_options options;
} of_blocks = {"GP_TEST_SEQUENCE",
               operations,
               sizeof operations / sizeof *operations,
               NULL,
               {.memory_bytes = 6 * MIB, .chunk_size = 2 * MIB, .address_space = 10 * MIB}},
  of_ranges = {"GP_TEST_RANGE_SEQUENCE",
               range_operations,
               sizeof range_operations / sizeof *range_operations,
               close_or_create,
               {.memory_bytes = 10 * MIB, .address_space = 4 * MIB, .device_addresses = 24 * MIB}};

static const struct alphabet *alphabet;

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}

static uint64_t mix_segment(uint64_t hash, const gp_pool *pool, const struct gp__segment *segment)
{
    for (const struct gp__span *span = segment->first; span != NULL; span = span->next) {
        struct gp__owners owners = span->owners;

        hash = mix(hash, span->va - segment->va);
        hash = mix(hash, (uint64_t)span->state);
        hash = mix(hash, span->state == GP_SPAN_USED
                             ? owners.slots
                             : gp__timeline_remaining(&pool->timeline, owners).slots);
        for (const gp_stream *s = pool->timeline.streams; s != NULL; s = s->next)
            hash = mix(hash, s->recorded >= owners.ticket);
    }
    for (uintptr_t va = segment->va; va < segment->va + segment->bytes; va += pool->page) {
        const struct gp__mapping *mapping = gp__mapping_at(pool, segment, va);

        hash = mix(hash, mapping == NULL ? 1 : mapping->retired.va - segment->va);
    }
    return hash;
}

static uint64_t mix_range(uint64_t hash, const gp_pool *pool, const gp_range *range)
{
    hash = mix(hash, range->closed * 2u + (range->pins.root != NULL));
    hash = mix(hash, range->slots);
    hash = mix(hash, pool->timeline.unknown_passed >= range->unpinned);
    hash = mix(hash, range->size);
    return mix_segment(hash, pool, range->segment);
}

/* What decides the pool's future: spans with who may still use them, chunks, what is retiring,
 * pending work. Tickets count only by whether a fence that covers them was recorded and has
 * passed. */
static uint64_t state_hash(void)
{
    gp_pool *pool = small.world.pool;
    uint64_t hash = mix(small.limited, small.refuse_next);

    for (const struct gp__segment *segment = pool->segments; segment != NULL;
         segment = segment->next)
        hash = mix_segment(hash, pool, segment);
    for (const gp_range *range = pool->ranges; range != NULL; range = range->next)
        hash = mix_range(hash, pool, range);
    for (const struct gp__retired *item = pool->retiring; item != NULL; item = item->next)
        hash = mix(hash, gp__timeline_remaining(&pool->timeline, item->owners).slots);
    for (int s = 0; s < 2; s++)
        hash = mix(hash, gp__sim_pending(small.world.sim, small.world.handle[s]));
    for (size_t i = 0; i < small.model.count; i++)
        hash = mix(hash, small.model.blocks[i].recorded);
    hash = mix(hash, small.model.ranges[0].users);
    return mix(hash, pool->mapped_bytes);
}

static void describe(const unsigned char *sequence, size_t length)
{
    char line[200];

    snprintf(line, sizeof line, "%s=", alphabet->variable);
    for (size_t i = 0; i < length; i++)
        snprintf(line + strlen(line), sizeof line - strlen(line), "%s%d", i == 0 ? "" : ",",
                 (int)sequence[i]);
    snprintf(line + strlen(line), sizeof line - strlen(line), " test_small");
    check_context(line);
}

/* Replays a sequence in a fresh world, checking after each step; returns the state it ends in. */
static uint64_t replay(const unsigned char *sequence, size_t length)
{
    uint64_t hash;

    memset(&small, 0, sizeof small);
    describe(sequence, length);
    world_begin(&small.world, &alphabet->options);
    gp__sim_log_enable(small.world.sim, false);
    small.world.refuse = refuse_once;
    world_open(&small.world);
    model_begin(&small.model, &small.world);
    if (alphabet->begin != NULL)
        alphabet->begin();
    for (size_t i = 0; i < length; i++)
        alphabet->operations[sequence[i]]();
    model_check(&small.model, "after the last operation");
    hash = state_hash();
    model_end(&small.model);
    world_end(&small.world);
    return hash;
}

struct node {
    unsigned char sequence[DEEPEST];
};

struct search {
    struct node *now, *next;
    size_t now_count, next_count, next_room;
    uint64_t *seen; /* open addressing; 0 is empty */
    size_t seen_room, seen_count;
};

/* True when the state is new. */
static bool remember(struct search *search, uint64_t hash)
{
    size_t at;

    hash = hash == 0 ? 1 : hash;
    CHECK(search->seen_count * 2 < search->seen_room, "more states than the table holds");
    for (at = hash % search->seen_room; search->seen[at] != 0; at = (at + 1) % search->seen_room)
        if (search->seen[at] == hash)
            return false;
    search->seen[at] = hash;
    search->seen_count++;
    return true;
}

static void push(struct search *search, const struct node *node)
{
    if (search->next_count == search->next_room) {
        search->next_room = search->next_room == 0 ? 1024 : search->next_room * 2;
        search->next = realloc(search->next, search->next_room * sizeof *search->next);
        CHECK(search->next != NULL, "no memory for the search");
    }
    search->next[search->next_count++] = *node;
}

/* Every operation on every state of this depth. */
static void deepen(struct search *search, size_t depth)
{
    for (size_t i = 0; i < search->now_count; i++)
        for (size_t o = 0; o < alphabet->count; o++) {
            struct node node = search->now[i];

            node.sequence[depth] = (unsigned char)o;
            if (remember(search, replay(node.sequence, depth + 1)))
                push(search, &node);
        }
    free(search->now);
    search->now = search->next;
    search->now_count = search->next_count;
    search->next = NULL;
    search->next_count = search->next_room = 0;
}

static bool replay_from_environment(void)
{
    const char *text = getenv(alphabet->variable);
    unsigned char sequence[64];
    size_t length = 0;

    if (text == NULL)
        return false;
    while (*text != '\0' && length < sizeof sequence) {
        char *end;

        sequence[length++] = (unsigned char)(strtoul(text, &end, 10) % alphabet->count);
        text = *end == ',' ? end + 1 : end;
    }
    replay(sequence, length);
    return true;
}

static void search_all(const struct alphabet *which, size_t depth)
{
    struct search search = {.seen_room = 1u << 23};

    alphabet = which;
    if (replay_from_environment())
        return;
    search.seen = calloc(search.seen_room, sizeof *search.seen);
    search.now = calloc(1, sizeof *search.now);
    CHECK(search.seen != NULL && search.now != NULL, "no memory for the search");
    search.now_count = 1;
    for (size_t d = 0; d < depth; d++)
        deepen(&search, d);
    print_message("%zu states at depth %zu\n", search.seen_count, depth);
    CHECK(search.seen_count > 100, "only %zu states: the geometry is too tight", search.seen_count);
    free(search.now);
    free(search.seen);
    check_context(NULL);
}

static void all_sequences(void **state)
{
    (void)state;
    search_all(&of_blocks, check_environment("GP_TEST_LONG", 0) != 0 ? 7 : 5);
}

static void all_sequences_on_a_range(void **state)
{
    (void)state;
    search_all(&of_ranges, check_environment("GP_TEST_LONG", 0) != 0 ? 7 : 6);
}

/* ---- all orders of completion ---- */

struct orders {
    struct world world;
    uintptr_t handle[MOST_ORDER + 1];
    gp_stream *stream[MOST_ORDER + 1]; /* one for each free, and the one that asks */
    uintptr_t freed[MOST_ORDER], kept[MOST_ORDER];
    uintptr_t filler;
};

static struct orders orders;

/* `count` freed pages with pending work, each on its own stream and between live pages. */
static void begin_orders(unsigned count)
{
    struct world_options options = {.chunk_size = 2 * MIB};
    struct world *world = &orders.world;

    memset(&orders, 0, sizeof orders);
    world_begin(world, &options);
    gp__sim_log_enable(world->sim, false);
    world_open(world);
    for (unsigned i = 0; i <= count; i++) {
        orders.handle[i] = gp__sim_stream_create(world->sim, 0);
        CHECK_OK(gp_pool_stream(world->pool, orders.handle[i], &orders.stream[i], NULL), NULL);
    }
    for (unsigned i = 0; i < count; i++) {
        CHECK_OK(gp_pool_malloc(world->pool, 2 * MIB, orders.stream[i], 0, &orders.freed[i], NULL),
                 NULL);
        CHECK_OK(
            gp_pool_malloc(world->pool, 2 * MIB, orders.stream[count], 0, &orders.kept[i], NULL),
            NULL);
        gp__sim_launch(world->sim, orders.handle[i], orders.freed[i], 2 * MIB);
    }
    for (unsigned i = 0; i < count; i++)
        CHECK_OK(gp_pool_free(world->pool, orders.freed[i], NULL, 0, NULL), NULL);
}

static void end_orders(unsigned count)
{
    for (unsigned i = 0; i <= count; i++)
        gp_stream_release(orders.stream[i]);
    world_end(&orders.world);
}

/* Retiring pages: each goes when its own stream has completed, and not before. */
static void reap_in_order(const unsigned *order, unsigned count)
{
    struct world *world = &orders.world;
    size_t set_retiring = 0;

    begin_orders(count);
    CHECK_OK(gp_pool_trim(world->pool, 0, GP_TRIM_NO_WAIT, &set_retiring, NULL), NULL);
    assert_int_equal(set_retiring, count * 2 * MIB);
    gp__pool_service(world->pool);
    for (unsigned i = 0; i < count; i++) {
        assert_int_equal(world_stats(world).retiring_bytes, (count - i) * 2 * MIB);
        gp__sim_complete(world->sim, orders.handle[order[i]], SIZE_MAX);
        gp__pool_service(world->pool);
        CHECK(!gp__sim_is_accessible(world->sim, orders.freed[order[i]], 512),
              "page %u passed and is still mapped", order[i]);
        for (unsigned j = i + 1; j < count; j++)
            CHECK(gp__sim_is_accessible(world->sim, orders.freed[order[j]], 2 * MIB),
                  "page %u went before its stream completed", order[j]);
    }
    end_orders(count);
}

/* Free pages: another stream gets each of them once its stream has completed, and not before. */
static void reuse_in_order(const unsigned *order, unsigned count)
{
    struct world *world = &orders.world;
    gp_stream *asking;
    uintptr_t va = 0;

    begin_orders(count);
    asking = orders.stream[count];
    /* A growth by a stream that could not use what is free is what makes the reaper fence it. */
    CHECK_OK(gp_pool_malloc(world->pool, 2 * MIB, asking, 0, &orders.filler, NULL), NULL);
    gp__pool_service(world->pool);
    for (unsigned i = 0; i < count; i++) {
        CHECK_STATUS(GP_NOT_READY, gp_pool_try_malloc(world->pool, 2 * MIB, asking, 0, &va, NULL),
                     NULL);
        gp__sim_complete(world->sim, orders.handle[order[i]], SIZE_MAX);
        CHECK_OK(gp_pool_try_malloc(world->pool, 2 * MIB, asking, 0, &va, NULL), NULL);
        CHECK(va == orders.freed[order[i]], "got page %#zx, only %#zx has passed", (size_t)va,
              (size_t)orders.freed[order[i]]);
    }
    end_orders(count);
}

/* Ranges that were closed under work: the addresses of each are free once its own stream has completed,
 * and not before. */
static void bury_in_order(const unsigned *order, unsigned count)
{
    struct world *world = &orders.world;
    gp_range *ranges[MOST_ORDER];
    uintptr_t va[MOST_ORDER];
    size_t addresses;

    begin_orders(count);
    addresses = world_stats(world).address_bytes;
    for (unsigned i = 0; i < count; i++) {
        gp__sim_complete(world->sim, orders.handle[i], SIZE_MAX);
        CHECK_OK(gp_range_create(world->pool, 8 * MIB, orders.stream[i], &ranges[i], NULL), NULL);
        CHECK_OK(gp_range_resize(ranges[i], 2 * MIB, NULL, 0, NULL, NULL), NULL);
        va[i] = gp_range_address(ranges[i]);
        gp__sim_launch(world->sim, orders.handle[i], va[i], 2 * MIB);
    }
    for (unsigned i = 0; i < count; i++)
        gp_range_release(ranges[i]);
    gp__pool_service(world->pool);
    for (unsigned i = 0; i < count; i++) {
        CHECK(world_stats(world).address_bytes == addresses + (count - i) * 8 * MIB,
              "%zu bytes of addresses, %u ranges are in use", world_stats(world).address_bytes,
              count - i);
        CHECK(gp__sim_is_accessible(world->sim, va[order[i]], 2 * MIB), "unmapped under work");
        gp__sim_complete(world->sim, orders.handle[order[i]], SIZE_MAX);
        gp__pool_service(world->pool);
    }
    assert_int_equal(world_stats(world).address_bytes, addresses);
    end_orders(count);
}

/* Heap's algorithm: every permutation of `order`. */
static void for_all_orders(unsigned *order, unsigned length, unsigned count,
                           void (*run)(const unsigned *order, unsigned count))
{
    if (length <= 1) {
        run(order, count);
        return;
    }
    for (unsigned i = 0; i < length; i++) {
        unsigned other = length % 2 == 0 ? i : 0, kept;

        for_all_orders(order, length - 1, count, run);
        kept = order[other];
        order[other] = order[length - 1];
        order[length - 1] = kept;
    }
}

static void run_orders(void (*run)(const unsigned *order, unsigned count))
{
    for (unsigned count = 1; count <= MOST_ORDER; count++) {
        unsigned order[MOST_ORDER] = {0, 1, 2, 3, 4, 5};

        for_all_orders(order, count, count, run);
    }
}

static void orders_of_completion_and_reaping(void **state)
{
    (void)state;
    run_orders(reap_in_order);
}

static void orders_of_completion_and_reuse(void **state)
{
    (void)state;
    run_orders(reuse_in_order);
}

static void orders_of_completion_and_burying(void **state)
{
    (void)state;
    run_orders(bury_in_order);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_of_completion_and_reaping),
        cmocka_unit_test(orders_of_completion_and_reuse),
        cmocka_unit_test(orders_of_completion_and_burying),
        cmocka_unit_test(all_sequences),
        cmocka_unit_test(all_sequences_on_a_range),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
