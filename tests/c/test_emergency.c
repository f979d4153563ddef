/* SPDX-License-Identifier: Apache-2.0
 *
 * Emergency mode itself: that the first request of every growth really is refused, once, and that the suites
 * which run in it therefore prove something. What the pool must still do then is theirs.
 */
#include "tests/support/model.h"

#include "vmm/pool.h"

#define MIB CHECK_MIB

static struct world world;

static void begin(size_t chunk_size)
{
    world_begin(&world, &(struct world_options){.chunk_size = chunk_size});
    gp__set_emergency(true);
    world_open(&world);
}

static void end(void)
{
    gp__set_emergency(refusals() > 0);
    world_end(&world);
}

/* A pool that plans its chunks asks anew for the same size, one with fixed chunks too. */
static void a_growth_gets_on_after_its_refusal(void **state)
{
    const size_t chunk_sizes[] = {0, 2 * MIB};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        begin(chunk_sizes[i]);
        uintptr_t first = world_malloc(&world, 4 * MIB, 0);
        uint64_t calls = world.alloc_calls;
        assert_int_equal(calls, chunk_sizes[i] == 0 ? 1 : 2);
        uintptr_t second = world_malloc(&world, 4 * MIB, 0);
        assert_true(world.alloc_calls > calls);
        assert_int_equal(world_stats(&world).callback_errors, 0);
        world_free(&world, first, -1);
        world_free(&world, second, -1);
        end();
    }
}

/* What a refusal does to a pool that needs none: idle memory goes, streams are waited for. */
static void the_refusal_is_seen_by_the_ladder(void **state)
{
    (void)state;
    begin(2 * MIB);
    uintptr_t idle = world_malloc(&world, 2 * MIB, 0);
    world_launch(&world, 0, idle, 2 * MIB);
    world_free(&world, idle, -1);
    uintptr_t block = world_malloc(&world, 8 * MIB, 1);
    assert_int_equal(world_stats(&world).trim_count, 1);
    assert_int_equal(world_stats(&world).physical_bytes, 8 * MIB);
    assert_int_equal(gp__sim_pending(world.sim, world.handle[0]), 0);
    world_free(&world, block, -1);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_growth_gets_on_after_its_refusal),
        cmocka_unit_test(the_refusal_is_seen_by_the_ladder),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
