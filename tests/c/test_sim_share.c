/* SPDX-License-Identifier: Apache-2.0
 *
 * What the simulated driver says of shared memory: what it must allow, what it refuses as a GPU's driver
 * does, and what it reports because growpool must never do it.
 */
#include <unistd.h>

#include "tests/support/sim_fixture.h"

static gp__memory create(struct fixture *f, unsigned flags)
{
    gp__memory memory = 0;

    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, flags, &memory, NULL), NULL);
    return memory;
}

static int export_fd(struct fixture *f, gp__memory memory)
{
    int fd = -1;

    CHECK_OK(f->driver->export_fd(f->device, memory, PAGE, &fd, NULL), NULL);
    return fd;
}

static gp__memory import_fd(struct fixture *f, int fd, size_t bytes)
{
    struct gp__imported found = {0};

    CHECK_OK(f->driver->import_fd(f->device, fd, bytes, &found, NULL), NULL);
    return found.memory;
}

static void imported_memory_is_a_handle_of_its_own(void **state)
{
    struct fixture *f = *state;
    gp__memory memory = create(f, GP_CHUNK_EXPORTABLE);
    int fd = export_fd(f, memory);
    gp__memory first = import_fd(f, fd, PAGE), second = import_fd(f, fd, PAGE);
    struct gp__sim_ledger ledger;

    assert_int_not_equal(first, memory);
    assert_int_not_equal(first, second);
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.physical_bytes, 2 * PAGE); /* the fixture's, and this one */
    assert_int_equal(ledger.unreleased_count, 4);
    CHECK_OK(f->driver->map(f->device, f->va + PAGE, PAGE, first, NULL), NULL);
    CHECK_OK(f->driver->set_access(f->device, f->va + PAGE, PAGE, GP_LOCATION_DEVICE, NULL, NULL),
             NULL);
    CHECK_OK(f->driver->release(f->device, memory, PAGE, NULL), NULL);
    CHECK_OK(f->driver->release(f->device, first, PAGE, NULL), NULL);
    CHECK_OK(f->driver->release(f->device, second, PAGE, NULL), NULL);
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.physical_bytes, 2 * PAGE); /* mapped still */
    CHECK_OK(f->driver->unmap(f->device, f->va + PAGE, PAGE, first, NULL), NULL);
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.physical_bytes, PAGE);
    gp__memory late = import_fd(f, fd, PAGE); /* the descriptor kept it */
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.physical_bytes, 2 * PAGE);
    CHECK_OK(f->driver->release(f->device, late, PAGE, NULL), NULL);
    assert_int_equal(close(fd), 0);
    expect_none(f);
}

static void a_wrong_size_shows_at_the_map(void **state)
{
    struct fixture *f = *state;
    gp__memory memory = create(f, GP_CHUNK_EXPORTABLE);
    int fd = export_fd(f, memory);
    gp__memory imported = import_fd(f, fd, 4 * PAGE);

    expect_refusal(f, f->driver->map(f->device, f->va + PAGE, 4 * PAGE, imported, &f->error),
                   "CUDA_ERROR_NOT_SUPPORTED");
    assert_int_equal(f->error.code, f->device->wrong_size_code);
    CHECK_OK(f->driver->release(f->device, imported, 4 * PAGE, NULL), NULL);
    expect_none(f);
    /* Of memory that it made itself growpool knows the size. */
    (void)f->driver->map(f->device, f->va + PAGE, 4 * PAGE, memory, &f->error);
    expect_violation(f, "the memory has 2097152 bytes");
    CHECK_OK(f->driver->release(f->device, memory, PAGE, NULL), NULL);
    assert_int_equal(close(fd), 0);
}

static void junk_descriptors_are_an_error_as_on_hardware(void **state)
{
    struct fixture *f = *state;
    struct gp__imported found = {0};
    int ends[2];

    assert_int_equal(pipe(ends), 0);
    expect_refusal(f, f->driver->import_fd(f->device, ends[0], PAGE, &found, &f->error),
                   "CUDA_ERROR_UNKNOWN");
    expect_refusal(f, f->driver->import_fd(f->device, -1, PAGE, &found, &f->error),
                   "CUDA_ERROR_UNKNOWN");
    assert_int_equal(close(ends[0]) + close(ends[1]), 0);
    assert_int_equal(found.memory, 0);
    expect_none(f);
}

static void what_must_never_be_asked_is_reported(void **state)
{
    struct fixture *f = *state;
    gp__memory exportable = create(f, GP_CHUNK_EXPORTABLE), made = 0;
    int fd = export_fd(f, exportable), none = -1;
    gp__memory imported = import_fd(f, fd, PAGE);
    struct gp__imported found = {0};

    expect_refusal(f, f->driver->export_fd(f->device, f->memory, PAGE, &none, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "not created exportable");
    expect_refusal(f, f->driver->export_fd(f->device, imported, PAGE, &none, &f->error),
                   "CUDA_ERROR_INVALID_VALUE");
    expect_violation(f, "imported memory");
    CHECK_OK(f->driver->release(f->device, imported, PAGE, NULL), NULL);
    CHECK_OK(f->driver->release(f->device, exportable, PAGE, NULL), NULL);
    (void)f->driver->export_fd(f->device, exportable, PAGE, &none, &f->error);
    expect_violation(f, "released handle");
    (void)f->driver->export_fd(f->device, 999, PAGE, &none, &f->error);
    expect_violation(f, "junk handle");
    gp__sim_set_sharing(f->sim, false);
    (void)f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &made, NULL);
    expect_violation(f, "flags 0x1, of which the device knows 0x2");
    (void)f->driver->import_fd(f->device, fd, PAGE, &found, NULL);
    expect_violation(f, "the device does not share memory");
    gp__sim_set_rdma(f->sim, GP__SIM_RDMA_ABSENT);
    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &made, NULL), NULL);
    CHECK_OK(f->driver->release(f->device, made, PAGE, NULL), NULL);
    (void)f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_GPU_DIRECT_RDMA, &made,
                            NULL);
    expect_violation(f, "flags 0x2");
    assert_int_equal(none, -1);
    assert_int_equal(close(fd), 0);
}

static void the_new_calls_can_be_made_to_fail(void **state)
{
    struct fixture *f = *state;
    gp__memory memory = create(f, GP_CHUNK_EXPORTABLE);
    struct gp__imported found = {0};
    int fd = -1;

    gp__sim_fail_at(f->sim, 1, true);
    expect_refusal(f, f->driver->export_fd(f->device, memory, PAGE, &fd, &f->error),
                   "CUDA_ERROR_UNKNOWN");
    expect_refusal(f, f->driver->import_fd(f->device, 0, PAGE, &found, &f->error),
                   "CUDA_ERROR_UNKNOWN");
    assert_int_equal(gp__sim_faults_fired(f->sim), 2);
    gp__sim_fail_at(f->sim, 0, false);
    assert_int_equal(fd, -1);
    CHECK_OK(f->driver->release(f->device, memory, PAGE, NULL), NULL);
    expect_none(f);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(imported_memory_is_a_handle_of_its_own),
        TEST(a_wrong_size_shows_at_the_map),
        TEST(junk_descriptors_are_an_error_as_on_hardware),
        TEST(what_must_never_be_asked_is_reported),
        TEST(the_new_calls_can_be_made_to_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
