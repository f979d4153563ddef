/* SPDX-License-Identifier: Apache-2.0
 *
 * Two threads at a pool's limit: what one request reclaims beyond its own need is room for the other at once,
 * while the first still stands in a callback.
 */
#include <pthread.h>

#include "tests/support/model.h"
#include "vmm/pool.h"

#define MIB    CHECK_MIB
#define CHUNKS 8

static struct world world;

/* The other thread's request, made inside a callback of the first one's, on its thread. */
static struct {
    uintptr_t va;
    gp_status status;
    unsigned frees_before; /* made when so many frees have begun; 0: in alloc */
    unsigned frees;
    bool made;
} other;

static void *allocate(void *unused)
{
    (void)unused;
    other.status = gp_pool_malloc(world.pool, 2 * MIB, world.stream[2], 0, &other.va, &world.error);
    return NULL;
}

static void let_the_other_allocate(void)
{
    pthread_t thread;

    other.made = true;
    CHECK(pthread_create(&thread, NULL, allocate, NULL) == 0, "no thread");
    CHECK(pthread_join(thread, NULL) == 0, "no join");
}

static void before_free(struct world *where, const gp_request *request)
{
    (void)where;
    (void)request;
    if (++other.frees == other.frees_before && !other.made)
        let_the_other_allocate();
}

static gp_status answer(struct world *where, const gp_request *request, gp_chunk **out,
                        gp_error *error)
{
    if (other.frees_before == 0 && !other.made)
        let_the_other_allocate();
    gp_status status = gp_backing_alloc(where->inner, request, out, error);
    if (status == GP_OK) {
        __atomic_add_fetch(&where->supplied_bytes, request->size, __ATOMIC_RELAXED);
        __atomic_add_fetch(&where->supplied_chunks, 1, __ATOMIC_RELAXED);
    }
    return status;
}

/* The pool is at its limit with chunks that retire and wait for stream 0; a request on stream 1 takes them
 * all back, for they are too large to move where it needs memory, and needs the room of half a one. */
static void one_reclaims_while_the_other_asks(unsigned frees_before)
{
    uintptr_t blocks[CHUNKS], va = 0;

    memset(&other, 0, sizeof other);
    other.frees_before = frees_before;
    world_begin(&world, &(struct world_options){.limit = CHUNKS * 4 * MIB});
    world_open(&world);
    for (int i = 0; i < CHUNKS; i++)
        blocks[i] = world_malloc(&world, 4 * MIB, 0);
    for (int i = 0; i < CHUNKS; i++) {
        world_launch(&world, 0, blocks[i], 512);
        world_free(&world, blocks[i], -1);
    }
    CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, NULL, &world.error), &world.error);
    world.answer = answer;
    world.before_free = before_free;
    CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, world.stream[1], 0, &va, NULL), NULL);
    assert_true(other.made);
    CHECK_OK(other.status, &world.error);
    assert_int_equal(world_stats(&world).physical_bytes, 4 * MIB);
    world_end(&world);
}

static void what_a_request_does_not_claim_is_room_while_it_asks(void **state)
{
    (void)state;
    one_reclaims_while_the_other_asks(0);
}

/* At the third free two chunks are back: one for the request that reclaims, one for whoever comes. */
static void what_a_request_does_not_need_is_room_while_it_gives_back(void **state)
{
    (void)state;
    one_reclaims_while_the_other_asks(3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_request_does_not_claim_is_room_while_it_asks),
        cmocka_unit_test(what_a_request_does_not_need_is_room_while_it_gives_back),
    };
    return cmocka_run_group_tests_name("room under the limit", tests, NULL, NULL);
}
