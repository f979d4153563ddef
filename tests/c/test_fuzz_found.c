/* SPDX-License-Identifier: Apache-2.0
 *
 * What the fuzz target found, each as a sequence that a person can read. The inputs themselves are no
 * longer kept: these say what went wrong.
 */
#include "tests/support/model.h"

#include "backing/memory.h"
#include "vmm/pool.h"

#define MIB CHECK_MIB

static struct world world;

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

/* A close that lacks host memory has ended every range by then; one that nothing is mapped in waits for the
 * next close to be buried with the others. */
static void a_close_without_host_memory_goes_on_later(void **state)
{
    uint64_t asked = 0;

    (void)state;
    for (uint64_t n = 1; asked + 1 >= n; n++) {
        gp_range *range = NULL;

        world_begin(&world, NULL);
        world_open(&world);
        world_malloc(&world, 2 * MIB - 1024, 1);
        world_malloc(&world, 512, 0);
        CHECK_OK(gp_range_create(world.pool, 44 * MIB, world.stream[1], &range, NULL), NULL);
        gp__memory_fail_at(n, false);
        gp_status status = gp_pool_close(world.pool, &world.error);
        asked = gp__memory_fail_at(0, false);
        CHECK(status == GP_OK || status == GP_ERR_HOST_MEMORY, "%s", world.error.message);
        check_all();
        CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
        check_all();
        gp_range_release(range);
        world_end(&world);
    }
}

/* No host memory for the page map of addresses that the driver then will not take back. */
static void lose_addresses(gp_status (*grow)(gp_error *error), uint64_t heap, uint64_t driver)
{
    char line[120];

    snprintf(line, sizeof line, "heap allocation %llu fails, and driver calls from %llu on",
             (unsigned long long)heap, (unsigned long long)driver);
    check_context(line);
    world_begin(&world, &(struct world_options){.address_space = 16 * MIB});
    world_open(&world);
    gp__memory_fail_at(heap, false);
    gp__sim_fail_at(world.sim, driver, true);
    (void)grow(&world.error);
    gp__sim_fail_at(world.sim, 0, false);
    gp__memory_fail_at(0, false);
    check_all();
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    check_all();
    world_abandon(&world);
    check_context(NULL);
}

static gp_status grow_block(gp_error *error)
{
    uintptr_t va = 0;

    return gp_pool_malloc(world.pool, 512, world.stream[0], 0, &va, error);
}

static gp_status make_range(gp_error *error)
{
    gp_range *range = NULL;
    gp_status status = gp_range_create(world.pool, 16 * MIB, world.stream[0], &range, error);

    gp_range_release(range);
    return status;
}

static void addresses_that_are_lost_are_counted(void **state)
{
    (void)state;
    for (uint64_t heap = 1; heap <= 10; heap++)
        for (uint64_t driver = 1; driver <= 10; driver++) {
            lose_addresses(grow_block, heap, driver);
            lose_addresses(make_range, heap, driver);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses_that_are_lost_are_counted),
        cmocka_unit_test(a_close_without_host_memory_goes_on_later),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
