/* SPDX-License-Identifier: Apache-2.0
 *
 * The oracle is worth nothing unless it speaks up: each illegal memory call must reach the simulated
 * driver's violation hook with the right words.
 */
#include "tests/support/sim_fixture.h"

static void unmap_under_pending_work(void **state)
{
    struct fixture *f = *state;
    uintptr_t stream = gp__sim_stream_create(f->sim, 0);

    gp__sim_launch(f->sim, stream, f->va + 512, 512);
    expect_none(f);
    /* As on hardware, the call itself succeeds; the work then hits nothing. */
    CHECK_OK(f->driver->unmap(f->device, f->va, PAGE, f->memory, &f->error), &f->error);
    expect_violation(f, "under pending work");
    gp__sim_complete_all(f->sim);
    expect_violation(f, "unmapped since");
}

static void launch_on_unmapped_addresses(void **state)
{
    struct fixture *f = *state;

    gp__sim_launch(f->sim, 0, f->va + PAGE - 512, 1024);
    expect_violation(f, "not mapped with access");
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
}

static void launch_without_access(void **state)
{
    struct fixture *f = *state;
    gp__memory memory;

    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    CHECK_OK(f->driver->map(f->device, f->va + PAGE, PAGE, memory, NULL), NULL);
    gp__sim_launch(f->sim, 0, f->va + PAGE, 512);
    expect_violation(f, "not mapped with access");
}

static void map_junk_handle(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f, f->driver->map(f->device, f->va + PAGE, PAGE, 4711, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "junk handle");
}

static void map_released_handle(void **state)
{
    struct fixture *f = *state;
    gp__memory memory;

    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    CHECK_OK(f->driver->release(f->device, memory, PAGE, NULL), NULL);
    expect_refusal(f, f->driver->map(f->device, f->va + PAGE, PAGE, memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "released handle");
}

static void release_twice(void **state)
{
    struct fixture *f = *state;

    CHECK_OK(f->driver->release(f->device, f->memory, PAGE, NULL), NULL);
    expect_none(f);
    expect_refusal(f, f->driver->release(f->device, f->memory, PAGE, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "released handle");
}

static void release_handle_zero(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f, f->driver->release(f->device, 0, PAGE, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "junk handle");
}

static void release_with_wrong_size(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f, f->driver->release(f->device, f->memory, 2 * PAGE, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "the memory has 2097152 bytes");
}

static void map_over_a_mapping(void **state)
{
    struct fixture *f = *state;
    gp__memory memory;

    CHECK_OK(f->driver->create(f->device, 2 * PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    expect_refusal(f, f->driver->map(f->device, f->va, 2 * PAGE, memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "over a mapping");
}

static void map_half_a_handle(void **state)
{
    struct fixture *f = *state;
    gp__memory memory;

    CHECK_OK(f->driver->create(f->device, 2 * PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    expect_refusal(f, f->driver->map(f->device, f->va + PAGE, PAGE, memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "the memory has 4194304 bytes");
}

static void map_across_the_end_of_a_reservation(void **state)
{
    struct fixture *f = *state;
    gp__memory memory;
    uintptr_t next;

    /* The neighbour touches, so only the border between the two can be the reason. */
    CHECK_OK(f->driver->reserve(f->device, 2 * PAGE, &next, NULL), NULL);
    assert_int_equal(next, f->va + 8 * PAGE);
    CHECK_OK(f->driver->create(f->device, 2 * PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    expect_refusal(f, f->driver->map(f->device, f->va + 7 * PAGE, 2 * PAGE, memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "outside every reservation");
}

static void unmap_what_is_not_mapped(void **state)
{
    struct fixture *f = *state;

    CHECK_OK(f->driver->unmap(f->device, f->va + PAGE, PAGE, f->memory, &f->error), &f->error);
    expect_violation(f, "nothing is mapped there");
}

static void unmap_half_a_mapping(void **state)
{
    struct fixture *f = *state;
    gp__memory memory;

    CHECK_OK(f->driver->create(f->device, 2 * PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    CHECK_OK(f->driver->map(f->device, f->va + 2 * PAGE, 2 * PAGE, memory, NULL), NULL);
    expect_refusal(f, f->driver->unmap(f->device, f->va + 3 * PAGE, PAGE, memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "not exactly one mapping");
}

static void unmap_with_another_handle(void **state)
{
    struct fixture *f = *state;

    CHECK_OK(f->driver->unmap(f->device, f->va, PAGE, f->memory + 1, NULL), NULL);
    expect_violation(f, "memory 1 is mapped there");
}

static void set_access_over_a_hole(void **state)
{
    struct fixture *f = *state;

    expect_refusal(
        f, f->driver->set_access(f->device, f->va, 2 * PAGE, GP_LOCATION_DEVICE, NULL, &f->error),
        "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "does not cover whole mappings");
}

static void set_access_for_the_wrong_location(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f,
                   f->driver->set_access(f->device, f->va, PAGE, GP_LOCATION_HOST, NULL, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "in another location");
}

static void free_part_of_a_reservation(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f, f->driver->free_address(f->device, f->va, 4 * PAGE, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "part of the reservation");
}

static void free_addresses_with_a_mapping_left(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f, f->driver->free_address(f->device, f->va, 8 * PAGE, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "a mapping is left");
}

static void free_addresses_never_reserved(void **state)
{
    struct fixture *f = *state;

    expect_refusal(f, f->driver->free_address(f->device, f->va + 64 * PAGE, PAGE, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "not a reservation");
}

static void sizes_off_the_granularity(void **state)
{
    struct fixture *f = *state;
    uintptr_t va;
    gp__memory memory;

    expect_refusal(f, f->driver->reserve(f->device, 0, &va, &f->error), "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "no multiple of the granularity");
    expect_refusal(f, f->driver->create(f->device, 3, GP_LOCATION_DEVICE, 0, &memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "no multiple of the granularity");
    expect_refusal(f, f->driver->map(f->device, f->va + PAGE + 512, PAGE, f->memory, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "no multiple of the granularity");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(unmap_under_pending_work, set_up, tear_down),
        cmocka_unit_test_setup_teardown(launch_on_unmapped_addresses, set_up, tear_down),
        cmocka_unit_test_setup_teardown(launch_without_access, set_up, tear_down),
        cmocka_unit_test_setup_teardown(map_junk_handle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(map_released_handle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(release_twice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(release_handle_zero, set_up, tear_down),
        cmocka_unit_test_setup_teardown(release_with_wrong_size, set_up, tear_down),
        cmocka_unit_test_setup_teardown(map_over_a_mapping, set_up, tear_down),
        cmocka_unit_test_setup_teardown(map_half_a_handle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(map_across_the_end_of_a_reservation, set_up, tear_down),
        cmocka_unit_test_setup_teardown(unmap_what_is_not_mapped, set_up, tear_down),
        cmocka_unit_test_setup_teardown(unmap_half_a_mapping, set_up, tear_down),
        cmocka_unit_test_setup_teardown(unmap_with_another_handle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(set_access_over_a_hole, set_up, tear_down),
        cmocka_unit_test_setup_teardown(set_access_for_the_wrong_location, set_up, tear_down),
        cmocka_unit_test_setup_teardown(free_part_of_a_reservation, set_up, tear_down),
        cmocka_unit_test_setup_teardown(free_addresses_with_a_mapping_left, set_up, tear_down),
        cmocka_unit_test_setup_teardown(free_addresses_never_reserved, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sizes_off_the_granularity, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
