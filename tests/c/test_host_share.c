/* SPDX-License-Identifier: Apache-2.0
 *
 * The host device's exportable chunks: memory files that keep their contents over maps and unmaps, that
 * another chunk, and another process, can map too, and that a forked child cannot reach.
 */
#include "host_case.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "backing/memory.h"
#include "child.h"

static unsigned descriptor_count(void)
{
    unsigned count = 0;
    for (int fd = 0; fd < 4096; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

static gp__memory create_shared(size_t bytes)
{
    gp__memory memory;
    gp_error error;
    CHECK_OK(driver->create(host, bytes, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &memory, &error),
             &error);
    return memory;
}

static int export_fd(gp__memory memory, size_t bytes)
{
    int fd = -1;
    gp_error error;
    CHECK_OK(driver->export_fd(host, memory, bytes, &fd, &error), &error);
    return fd;
}

static void expect_text(const gp_error *error, const char *part)
{
    CHECK(strstr(error->message, part) != NULL, "\"%s\" does not say \"%s\"", error->message, part);
}

/* ---- contents -------------------------------------------------------------------------------- */

static void contents_survive_maps_and_unmaps(void **state)
{
    (void)state;
    size_t bytes = 3 * PAGE;
    unsigned mappings = mapping_count(), descriptors = descriptor_count();
    int64_t live = gp__memory_live();
    uintptr_t va = reserve(8 * PAGE);
    gp__memory memory = create_shared(bytes);
    assert_int_equal(descriptor_count(), descriptors + 1);
    map(va + PAGE, bytes, memory);
    assert_false(is_readable(va + PAGE)); /* no access yet */
    set_access(va + PAGE, bytes);
    write_marks(va + PAGE, bytes, 40);
    assert_false(is_readable(va));
    assert_false(is_readable(va + PAGE + bytes));
    unmap(va + PAGE, bytes, memory);
    assert_false(is_readable(va + PAGE));
    assert_true(is_occupied(va, 8 * PAGE)); /* no hole at any time, so none is left */
    map(va + 4 * PAGE, bytes, memory);
    set_access(va + 4 * PAGE, bytes);
    check_marks(va + 4 * PAGE, bytes, 40);
    unmap(va + 4 * PAGE, bytes, memory);
    release(memory, bytes);
    free_address(va, 8 * PAGE);
    assert_int_equal(descriptor_count(), descriptors);
    assert_int_equal(mapping_count(), mappings);
    assert_int_equal(gp__memory_live(), live);
}

static void both_chunks_of_one_memory_see_each_other(void **state)
{
    (void)state;
    unsigned descriptors = descriptor_count();
    uintptr_t va = reserve(4 * PAGE);
    gp__memory memory = create_shared(PAGE);
    int fd = export_fd(memory, PAGE);
    struct gp__imported found;
    gp_error error;
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    CHECK_OK(driver->import_fd(host, fd, PAGE, &found, &error), &error);
    assert_int_equal(found.location, GP_LOCATION_DEVICE);
    assert_int_equal(found.flags, 0);
    assert_int_equal(close(fd), 0);
    map(va, PAGE, memory);
    map(va + 2 * PAGE, PAGE, found.memory);
    set_access(va, PAGE);
    set_access(va + 2 * PAGE, PAGE);
    write_marks(va, PAGE, 3);
    check_marks(va + 2 * PAGE, PAGE, 3);
    unmap(va, PAGE, memory);
    release(memory, PAGE);
    check_marks(va + 2 * PAGE, PAGE, 3); /* lives until its last chunk goes */
    unmap(va + 2 * PAGE, PAGE, found.memory);
    release(found.memory, PAGE);
    free_address(va, 4 * PAGE);
    assert_int_equal(descriptor_count(), descriptors);
}

static void nobody_can_cut_a_chunk_under_its_mapping(void **state)
{
    (void)state;
    gp__memory memory = create_shared(PAGE);
    int fd = export_fd(memory, PAGE);
    assert_int_not_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(errno, EPERM);
    assert_int_not_equal(ftruncate(fd, (off_t)(2 * PAGE)), 0);
    assert_int_not_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
    assert_int_equal(close(fd), 0);
    release(memory, PAGE);
}

/* ---- fork ------------------------------------------------------------------------------------ */

/* Ends by SIGSEGV: there is nothing at the address. */
static bool write_there(void *context)
{
    (void)signal(SIGSEGV, SIG_DFL);
    *byte_at(*(uintptr_t *)context) = 99;
    return true;
}

static void a_forked_child_cannot_reach_it(void **state)
{
    (void)state;
    uintptr_t va = reserve(3 * PAGE);
    gp__memory memory = create_shared(PAGE), ordinary = create(PAGE);
    map(va, PAGE, memory);
    map(va + PAGE, PAGE, ordinary);
    set_access(va, 2 * PAGE);
    write_marks(va, PAGE, 7);
    write_marks(va + PAGE, PAGE, 8);
    int status = in_child(write_there, &va);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSEGV);
    uintptr_t other = va + PAGE;
    assert_int_equal(in_child(write_there, &other), 0); /* a copy of its own */
    check_marks(va, PAGE, 7);
    check_marks(va + PAGE, PAGE, 8);
    unmap(va, PAGE, memory);
    unmap(va + PAGE, PAGE, ordinary);
    release(memory, PAGE);
    release(ordinary, PAGE);
    free_address(va, 3 * PAGE);
}

static bool is_refused(void *context)
{
    gp__memory memory = *(gp__memory *)context;
    struct gp__imported found;
    bool can;
    int fd;
    return driver->export_fd(host, memory, PAGE, &fd, NULL) == GP_ERR_STATE &&
           driver->import_fd(host, 0, PAGE, &found, NULL) == GP_ERR_STATE &&
           driver->can_access(host, host, &can, NULL) == GP_ERR_STATE;
}

static void a_forked_child_is_refused(void **state)
{
    (void)state;
    gp__memory memory = create_shared(PAGE);
    assert_int_equal(in_child(is_refused, &memory), 0);
    release(memory, PAGE);
}

/* ---- what is refused --------------------------------------------------------------------------- */

static void only_chunks_of_that_size_are_imported(void **state)
{
    (void)state;
    gp_chunk *chunk = NULL, *imported = NULL;
    gp_error error;
    int fd = -1;
    char name[] = "/tmp/growpool-test-XXXXXX";
    CHECK_OK(gp_chunk_create(host, 2 * PAGE, GP_LOCATION_DEVICE,
                             GP_CHUNK_EXPORTABLE | GP_CHUNK_GPU_DIRECT_RDMA, &chunk, &error),
             &error);
    assert_int_equal(gp_chunk_flags(chunk), GP_CHUNK_EXPORTABLE);
    CHECK_OK(gp_chunk_export_fd(chunk, &fd, &error), &error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(host, fd, PAGE, &imported, &error), &error);
    expect_text(&error, "holds a chunk of 4194304 bytes, not of 2097152");
    assert_int_equal(error.size, PAGE);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(host, fd, 4 * PAGE, &imported, NULL), NULL);
    CHECK_OK(gp_chunk_import_fd(host, fd, 2 * PAGE, &imported, &error), &error);
    assert_int_equal(close(fd), 0);
    gp_chunk_release(imported);
    gp_chunk_release(chunk);

    imported = NULL;
    fd = mkstemp(name);
    assert_true(fd >= 0);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(ftruncate(fd, (off_t)PAGE), 0);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(host, fd, PAGE, &imported, &error), &error);
    expect_text(&error, "is no exported chunk of a host device");
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(host, pipe_ends[0], PAGE, &imported, &error),
                 &error);
    assert_int_equal(close(fd), 0);
    fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, (off_t)PAGE), 0);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(host, fd, PAGE, &imported, &error), &error);
    assert_int_equal(close(fd), 0);
    assert_null(imported);
}

static void wrong_calls_change_nothing(void **state)
{
    (void)state;
    gp_error error;
    uintptr_t va = reserve(4 * PAGE);
    gp__memory memory = create_shared(PAGE);
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va, 2 * PAGE, memory, &error), NULL);
    map(va, PAGE, memory);
    set_access(va, PAGE);
    write_marks(va, PAGE, 1);
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va + PAGE, PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->release(host, memory, PAGE, &error), NULL);
    assert_string_equal(error.name, "EBUSY");
    CHECK_STATUS(GP_ERR_DRIVER, driver->unmap(host, va + PAGE, PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->free_address(host, va, 4 * PAGE, &error), NULL);
    check_marks(va, PAGE, 1);
    unmap(va, PAGE, memory);
    release(memory, PAGE);
    free_address(va, 4 * PAGE);
}

/* ---- when the system refuses -------------------------------------------------------------------- */

static struct rlimit lower(__rlimit_resource_t which, rlim_t limit)
{
    struct rlimit before, none;
    assert_int_equal(getrlimit(which, &before), 0);
    none = before;
    none.rlim_cur = limit;
    assert_int_equal(setrlimit(which, &none), 0);
    return before;
}

static void running_out_of_descriptors_is_told(void **state)
{
    (void)state;
    gp_error errors[3];
    gp_status statuses[3];
    gp__memory memory = create_shared(PAGE), none = 0;
    struct gp__imported found = {0};
    int fd = export_fd(memory, PAGE), second = -1; /* fd was the lowest that was free */
    int64_t live = gp__memory_live();
    struct rlimit before = lower(RLIMIT_NOFILE, (rlim_t)fd + 1);
    statuses[0] =
        driver->create(host, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &none, &errors[0]);
    statuses[1] = driver->export_fd(host, memory, PAGE, &second, &errors[1]);
    statuses[2] = driver->import_fd(host, fd, PAGE, &found, &errors[2]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, statuses[i], &errors[i]);
        expect_text(&errors[i], "no file descriptor is left for a shared chunk of 2 MiB");
        assert_int_equal(errors[i].code, EMFILE);
        assert_int_equal(errors[i].size, PAGE);
        assert_string_equal(errors[i].call, i == 0 ? "memfd_create" : "fcntl");
    }
    assert_int_equal(none, 0);
    assert_int_equal(second, -1);
    assert_int_equal(found.memory, 0);
    assert_int_equal(gp__memory_live(), live);
    assert_int_equal(close(fd), 0);
    release(memory, PAGE);
}

static void refused_system_calls_change_nothing(void **state)
{
    (void)state;
    gp_error errors[2];
    gp_status statuses[2];
    uintptr_t va = reserve(4 * PAGE);
    gp__memory mapped = create_shared(PAGE), idle = create_shared(PAGE);
    map(va, PAGE, mapped);
    set_access(va, PAGE);
    write_marks(va, PAGE, 5);
    struct rlimit before = lower(RLIMIT_AS, 4096);
    statuses[0] = driver->map(host, va + PAGE, PAGE, idle, &errors[0]);
    statuses[1] = driver->unmap(host, va, PAGE, mapped, &errors[1]);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    CHECK_STATUS(GP_ERR_DRIVER, statuses[0], &errors[0]);
    assert_string_equal(errors[0].call, "mmap");
    assert_string_equal(errors[0].name, "ENOMEM");
    CHECK_STATUS(GP_ERR_DRIVER, statuses[1], &errors[1]);
    assert_string_equal(errors[1].call, "mmap");
    assert_true(is_occupied(va, 4 * PAGE));
    check_marks(va, PAGE, 5); /* where it was, with access */
    map(va + PAGE, PAGE, idle);
    unmap(va + PAGE, PAGE, idle);
    unmap(va, PAGE, mapped);
    release(mapped, PAGE);
    release(idle, PAGE);
    free_address(va, 4 * PAGE);
}

static void no_heap_leaves_no_file(void **state)
{
    (void)state;
    gp__memory memory = 0;
    gp_chunk *chunk = NULL;
    gp_error error;
    gp__memory exported = create_shared(PAGE);
    int fd = export_fd(exported, PAGE);
    unsigned descriptors = descriptor_count();
    int64_t live = gp__memory_live();
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(
        GP_ERR_HOST_MEMORY,
        driver->create(host, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &memory, &error),
        &error);
    for (uint64_t n = 1; n <= 3; n++) { /* the chunk, the driver's part, the trial's reservation */
        gp__memory_fail_at(n, 0);
        gp_status status = gp_chunk_import_fd(host, fd, PAGE, &chunk, &error);
        gp__memory_fail_at(0, 0);
        CHECK_STATUS(GP_ERR_HOST_MEMORY, status, &error);
        assert_int_equal(descriptor_count(), descriptors);
        assert_int_equal(gp__memory_live(), live);
    }
    assert_int_equal(memory, 0);
    assert_null(chunk);
    assert_int_equal(close(fd), 0);
    release(exported, PAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contents_survive_maps_and_unmaps),
        cmocka_unit_test(both_chunks_of_one_memory_see_each_other),
        cmocka_unit_test(nobody_can_cut_a_chunk_under_its_mapping),
        cmocka_unit_test(a_forked_child_cannot_reach_it),
        cmocka_unit_test(a_forked_child_is_refused),
        cmocka_unit_test(only_chunks_of_that_size_are_imported),
        cmocka_unit_test(wrong_calls_change_nothing),
        cmocka_unit_test(running_out_of_descriptors_is_told),
        cmocka_unit_test(refused_system_calls_change_nothing),
        cmocka_unit_test(no_heap_leaves_no_file),
    };
    return cmocka_run_group_tests(tests, open_host, NULL);
}
