/* SPDX-License-Identifier: Apache-2.0
 *
 * The host device's memory: real addresses and real pages. Chunks keep their contents while they
 * are unmapped, a wrong or refused call changes nothing.
 */
#include <sys/resource.h>
#include <sys/syscall.h>

#include "backing/backing.h"
#include "backing/memory.h"
#include "host_case.h"

/* ---- the device --------------------------------------------------------------------------- */

static void the_host_says_what_it_is(void **state)
{
    (void)state;
    gp_device *again;
    size_t free_bytes;
    size_t total_bytes;
    gp_error error;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &again, &error), &error);
    assert_ptr_equal(again, host);
    assert_string_equal(gp_device_name(host), "host");
    assert_int_equal(gp_device_id(host), -1);
    assert_int_equal(gp_device_granularity(host), PAGE);
    assert_true(gp_device_is_host_accessible(host));
    assert_false(gp_device_is_device_accessible(host));
    CHECK_OK(gp_device_memory(host, &free_bytes, &total_bytes, &error), &error);
    assert_true(free_bytes > 0);
    assert_true(free_bytes <= total_bytes);
    assert_true(total_bytes <=
                (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) + CHECK_GIB);
}

/* ---- addresses ---------------------------------------------------------------------------- */

static void reservations_are_freed_exactly(void **state)
{
    (void)state;
    gp_error error;
    int64_t live = gp__memory_live();
    uintptr_t ranges[40]; /* more than the table's first size */
    for (size_t i = 0; i < 40; i++) {
        ranges[i] = reserve((i + 1) * PAGE);
        assert_false(is_readable(ranges[i]));
        assert_true(is_occupied(ranges[i], (i + 1) * PAGE));
    }
    for (size_t i = 1; i < 40; i += 2) {
        uintptr_t va = ranges[i];
        size_t bytes = (i + 1) * PAGE;
        CHECK_STATUS(GP_ERR_ARGUMENT, driver->free_address(host, va, bytes - PAGE, &error), NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT, driver->free_address(host, va, bytes + PAGE, &error), NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT, driver->free_address(host, va + PAGE, bytes - PAGE, &error),
                     NULL);
        CHECK_STATUS(GP_ERR_ARGUMENT, driver->free_address(host, 0, PAGE, &error), NULL);
        assert_true(is_occupied(va, bytes));
        free_address(va, bytes);
        assert_false(is_occupied(va, bytes));
        CHECK_STATUS(GP_ERR_ARGUMENT, driver->free_address(host, va, bytes, &error), NULL);
    }
    for (size_t i = 0; i < 40; i += 2) {
        free_address(ranges[i], (i + 1) * PAGE);
    }
    assert_int_equal(gp__memory_live(), live);
}

static void impossible_reservations_are_refused(void **state)
{
    (void)state;
    static const size_t too_much[] = {SIZE_MAX / PAGE * PAGE, (size_t)1 << 60};
    uintptr_t va = 0;
    gp_error error;
    int64_t live = gp__memory_live();
    for (size_t i = 0; i < 2; i++) {
        CHECK_STATUS(GP_ERR_ADDRESS_SPACE, driver->reserve(host, too_much[i], &va, &error), NULL);
        assert_string_equal(error.name, "ENOMEM");
        assert_string_equal(error.call, "mmap");
        assert_int_equal(error.size, too_much[i]);
    }
    CHECK_STATUS(GP_ERR_DRIVER, driver->reserve(host, 0, &va, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->reserve(host, PAGE + 1, &va, &error), NULL);
    assert_string_equal(error.name, "EINVAL");
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->reserve(host, PAGE, &va, &error), NULL);
    gp__memory_fail_at(0, 0);
    assert_int_equal(va, 0);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- chunks ------------------------------------------------------------------------------- */

static void contents_survive_a_move(size_t bytes)
{
    uintptr_t va = reserve(4 * bytes);
    gp__memory memory = create(bytes);
    map(va + bytes, bytes, memory);
    assert_false(is_readable(va + bytes)); /* mapped, but no access yet */
    set_access(va + bytes, bytes);
    assert_false(is_readable(va));
    assert_false(is_readable(va + 2 * bytes));
    write_marks(va + bytes, bytes, 1);
    unmap(va + bytes, bytes, memory);
    assert_false(is_readable(va + bytes));
    assert_true(is_occupied(va, 4 * bytes));
    map(va + 3 * bytes, bytes, memory);
    assert_false(is_readable(va + 3 * bytes)); /* access does not travel with the chunk */
    set_access(va + 3 * bytes, bytes);
    check_marks(va + 3 * bytes, bytes, 1);
    unmap(va + 3 * bytes, bytes, memory);
    release(memory, bytes);
    assert_true(is_occupied(va, 4 * bytes));
    free_address(va, 4 * bytes);
}

static void chunks_of_all_sizes_keep_their_contents(void **state)
{
    (void)state;
    static const size_t sizes[] = {PAGE,           2 * PAGE,        3 * PAGE,
                                   64 * CHECK_MIB, 128 * CHECK_MIB, CHECK_GIB};
    int64_t live = gp__memory_live();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        contents_survive_a_move(sizes[i]);
    }
    assert_int_equal(gp__memory_live(), live);
}

#define NEIGHBOURS 6

static void neighbours_do_not_disturb_each_other(void **state)
{
    (void)state;
    gp__memory memories[NEIGHBOURS];
    uintptr_t va = reserve(NEIGHBOURS * PAGE);
    for (size_t i = 0; i < NEIGHBOURS; i++) {
        memories[i] = create(PAGE);
        map(va + i * PAGE, PAGE, memories[i]);
    }
    set_access(va, NEIGHBOURS * PAGE); /* one call over all of them */
    for (size_t i = 0; i < NEIGHBOURS; i += 2) { /* every second one is never touched */
        write_marks(va + i * PAGE, PAGE, (unsigned char)(40 * i));
    }
    for (unsigned round = 0; round < 20; round++) {
        size_t gone = round % NEIGHBOURS;
        unmap(va + gone * PAGE, PAGE, memories[gone]);
        assert_false(is_readable(va + gone * PAGE));
        for (size_t i = 0; i < NEIGHBOURS; i++) {
            assert_true(i == gone || is_readable(va + i * PAGE));
        }
        map(va + gone * PAGE, PAGE, memories[gone]);
        set_access(va + gone * PAGE, PAGE);
        for (size_t i = 0; i < NEIGHBOURS; i += 2) {
            check_marks(va + i * PAGE, PAGE, (unsigned char)(40 * i));
        }
    }
    for (size_t i = 0; i < NEIGHBOURS; i++) {
        unmap(va + i * PAGE, PAGE, memories[i]);
        release(memories[i], PAGE);
    }
    free_address(va, NEIGHBOURS * PAGE);
}

#define JOINED 64

/* A process has 65,530 mappings: a range that was used and is empty again must not cost one for
 * each chunk that was there. The homes of chunks that have pages cost one each, wherever they lie. */
static void empty_ranges_join_again(void **state)
{
    (void)state;
    uintptr_t va = reserve(JOINED * PAGE);
    gp__memory memories[JOINED];
    for (size_t i = 0; i < JOINED; i++) {
        memories[i] = create(PAGE);
    }
    unsigned before = mapping_count();
    for (size_t i = 0; i < JOINED; i++) {
        uintptr_t at = va + i * 37 % JOINED * PAGE; /* every place once, in no order */
        map(at, PAGE, memories[i]);
        set_access(at, PAGE);
        write_marks(at, PAGE, (unsigned char)i);
    }
    for (size_t i = 0; i < JOINED; i++) {
        unmap(va + i * 37 % JOINED * PAGE, PAGE, memories[i]);
    }
    unsigned after = mapping_count();
    CHECK(after <= before + JOINED + 4, "%u mappings before, %u after", before, after);
    for (size_t i = 0; i < JOINED; i++) {
        release(memories[i], PAGE);
    }
    free_address(va, JOINED * PAGE);
}

static void chunks_that_cannot_be_made_are_refused(void **state)
{
    (void)state;
    gp__memory memory = 0;
    gp_chunk *chunk = NULL;
    gp_error error;
    int64_t live = gp__memory_live();
    size_t total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t bytes = (total / PAGE + 1) * PAGE;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 driver->create(host, bytes, GP_LOCATION_DEVICE, 0, &memory, &error), NULL);
    assert_int_equal(error.size, bytes);
    CHECK_STATUS(GP_ERR_UNAVAILABLE,
                 driver->create(host, PAGE, GP_LOCATION_HOST, 0, &memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER,
                 driver->create(host, PAGE / 2, GP_LOCATION_DEVICE, 0, &memory, &error), NULL);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY,
                 driver->create(host, PAGE, GP_LOCATION_DEVICE, 0, &memory, &error), NULL);
    gp__memory_fail_at(2, 0); /* the chunk is described, the driver's part is not */
    CHECK_STATUS(GP_ERR_HOST_MEMORY,
                 gp_chunk_create(host, PAGE, GP_LOCATION_DEVICE, 0, &chunk, &error), NULL);
    gp__memory_fail_at(0, 0);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_adopt(host, 7, PAGE, NULL, NULL, &chunk, &error), NULL);
    assert_int_equal(memory, 0);
    assert_null(chunk);
    assert_int_equal(gp__memory_live(), live);
}

static void wrong_calls_are_refused_and_change_nothing(void **state)
{
    (void)state;
    gp_error error;
    uintptr_t va = reserve(4 * PAGE);
    gp__memory memory = create(2 * PAGE);
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va, PAGE, memory, &error), NULL);
    assert_string_equal(error.name, "EINVAL");
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va + 4096, 2 * PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va + 3 * PAGE, 2 * PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va - PAGE, 2 * PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->unmap(host, va, 2 * PAGE, memory, &error), NULL);
    map(va, 2 * PAGE, memory);
    set_access(va, 2 * PAGE);
    write_marks(va, 2 * PAGE, 9);
    CHECK_STATUS(GP_ERR_DRIVER, driver->map(host, va + 2 * PAGE, 2 * PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->unmap(host, va, PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->unmap(host, va + PAGE, 2 * PAGE, memory, &error), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, driver->release(host, memory, 2 * PAGE, &error), NULL);
    assert_string_equal(error.name, "EBUSY");
    CHECK_STATUS(GP_ERR_DRIVER, driver->free_address(host, va, 4 * PAGE, &error), NULL);
    assert_string_equal(error.name, "EBUSY");
    CHECK_STATUS(
        GP_ERR_DRIVER,
        driver->set_access(host, va + 3 * PAGE, 2 * PAGE, GP_LOCATION_DEVICE, NULL, &error), NULL);
    check_marks(va, 2 * PAGE, 9);
    unmap(va, 2 * PAGE, memory);
    CHECK_STATUS(GP_ERR_DRIVER, driver->release(host, memory, PAGE, &error), NULL);
    release(memory, 2 * PAGE);
    free_address(va, 4 * PAGE);
}

/* ---- when the system refuses ----------------------------------------------------------------- */

static struct rlimit allow_no_more_addresses(void)
{
    struct rlimit before;
    struct rlimit none;
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    none = before;
    none.rlim_cur = 4096;
    assert_int_equal(setrlimit(RLIMIT_AS, &none), 0);
    return before;
}

static void refused_system_calls_change_nothing(void **state)
{
    (void)state;
    gp_error errors[4];
    gp_status statuses[4];
    uintptr_t va = reserve(4 * PAGE);
    uintptr_t refused_va = 0;
    gp__memory at_home = create(PAGE);
    gp__memory mapped = create(PAGE);
    gp__memory refused_memory = 0;
    map(va, PAGE, mapped);
    set_access(va, PAGE);
    write_marks(va, PAGE, 5);

    struct rlimit before = allow_no_more_addresses();
    statuses[0] = driver->reserve(host, PAGE, &refused_va, &errors[0]);
    statuses[1] = driver->create(host, PAGE, GP_LOCATION_DEVICE, 0, &refused_memory, &errors[1]);
    statuses[2] = driver->map(host, va + PAGE, PAGE, at_home, &errors[2]);
    statuses[3] = driver->unmap(host, va, PAGE, mapped, &errors[3]);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);

    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, statuses[0], &errors[0]);
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, statuses[1], &errors[1]);
    CHECK_STATUS(GP_ERR_DRIVER, statuses[2], &errors[2]);
    CHECK_STATUS(GP_ERR_DRIVER, statuses[3], &errors[3]);
    assert_string_equal(errors[2].call, "mremap");
    assert_string_equal(errors[2].name, "ENOMEM");
    assert_string_equal(errors[3].call, "mremap");
    assert_int_equal(refused_va, 0);
    assert_int_equal(refused_memory, 0);

    /* A kernel that clears the target before it refuses leaves a hole, and under this limit nothing
     * can fill it: another thread may own it by now, so nothing is ever mapped there again. */
    bool hole = !is_occupied(va + PAGE, PAGE);
    gp_status again = driver->map(host, va + PAGE, PAGE, at_home, NULL);
    CHECK_STATUS(hole ? GP_ERR_DRIVER : GP_OK, again, NULL);
    if (again == GP_OK) {
        unmap(va + PAGE, PAGE, at_home);
    }

    /* The mapped chunk is where it was and can be used and, now, unmapped. */
    check_marks(va, PAGE, 5);
    unmap(va, PAGE, mapped);
    uintptr_t other = reserve(PAGE);
    map(other, PAGE, mapped);
    set_access(other, PAGE);
    check_marks(other, PAGE, 5);
    unmap(other, PAGE, mapped);
    release(mapped, PAGE);
    free_address(other, PAGE);
    release(at_home, PAGE);
    free_address(va, 4 * PAGE);
}

/* Uses up the mappings that the kernel grants a process. System calls, because the C library's mmap
 * and munmap under ThreadSanitizer want mappings of their own. */
static void *use_up_mappings(size_t *bytes)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    unsigned long most = 65530;
    FILE *file = fopen("/proc/sys/vm/max_map_count", "r");
    if (file != NULL) {
        assert_int_equal(fscanf(file, "%lu", &most), 1);
        (void)fclose(file);
    }
    *bytes = 2 * most * page_bytes;
    long region = syscall(SYS_mmap, NULL, *bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(region != -1);
    size_t offset = 0;
    while (offset < *bytes &&
           mprotect((void *)(region + (long)offset), page_bytes, PROT_READ) == 0) {
        offset += 2 * page_bytes;
    }
    assert_true(offset < *bytes);
    return (void *)region;
}

static void running_out_of_mappings_changes_nothing(void **state)
{
    (void)state;
    gp_error errors[2];
    gp_status statuses[2];
    size_t bytes;
    uintptr_t va = reserve(8 * PAGE);
    gp__memory at_home = create(PAGE);
    gp__memory mapped = create(PAGE);
    map(va + 2 * PAGE, PAGE, mapped);
    set_access(va + 2 * PAGE, PAGE);
    write_marks(va + 2 * PAGE, PAGE, 5);

    void *region = use_up_mappings(&bytes);
    statuses[0] = driver->map(host, va + 5 * PAGE, PAGE, at_home, &errors[0]);
    statuses[1] = driver->unmap(host, va + 2 * PAGE, PAGE, mapped, &errors[1]);
    assert_int_equal(syscall(SYS_munmap, region, bytes), 0);

    CHECK_STATUS(GP_ERR_DRIVER, statuses[0], NULL);
    CHECK_STATUS(GP_ERR_DRIVER, statuses[1], NULL);
    assert_string_equal(errors[0].name, "ENOMEM");
    assert_string_equal(errors[1].name, "ENOMEM");
    assert_true(is_occupied(va, 8 * PAGE));
    assert_false(is_readable(va + 5 * PAGE));
    check_marks(va + 2 * PAGE, PAGE, 5);
    map(va + 5 * PAGE, PAGE, at_home);
    unmap(va + 5 * PAGE, PAGE, at_home);
    unmap(va + 2 * PAGE, PAGE, mapped);
    release(mapped, PAGE);
    release(at_home, PAGE);
    free_address(va, 8 * PAGE);
    assert_false(is_occupied(va, 8 * PAGE));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_host_says_what_it_is),
        cmocka_unit_test(reservations_are_freed_exactly),
        cmocka_unit_test(impossible_reservations_are_refused),
        cmocka_unit_test(chunks_of_all_sizes_keep_their_contents),
        cmocka_unit_test(neighbours_do_not_disturb_each_other),
        cmocka_unit_test(empty_ranges_join_again),
        cmocka_unit_test(chunks_that_cannot_be_made_are_refused),
        cmocka_unit_test(wrong_calls_are_refused_and_change_nothing),
        cmocka_unit_test(refused_system_calls_change_nothing),
        cmocka_unit_test(running_out_of_mappings_changes_nothing),
    };
    return cmocka_run_group_tests(tests, open_host, NULL);
}
