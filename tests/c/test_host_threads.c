/* SPDX-License-Identifier: Apache-2.0
 *
 * The host device's memory among threads and forks: ranges never have a hole that another thread
 * could take, and a forked child changes nothing in its parent.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "backing/memory.h"
#include "child.h"
#include "host_case.h"

/* ---- other threads -------------------------------------------------------------------------- */

static _Atomic bool stop_taking;

/* Takes any address that is free for a moment and writes to it: what malloc and others do. */
static void *take_addresses(void *context)
{
    (void)context;
    while (!stop_taking) {
        void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at != MAP_FAILED) {
            *byte_at((uintptr_t)at) = 0xee;
            (void)munmap(at, PAGE);
        }
    }
    return NULL;
}

static void a_range_never_has_a_hole(void **state)
{
    (void)state;
    pthread_t taker;
    size_t count = 8;
    uintptr_t va = reserve(count * PAGE);
    gp__memory memories[8];
    stop_taking = false;
    for (size_t i = 0; i < count; i++) {
        memories[i] = create(PAGE);
    }
    CHECK(pthread_create(&taker, NULL, take_addresses, NULL) == 0, "no thread");
    for (unsigned round = 0; round < 200; round++) {
        for (size_t i = 0; i < count; i++) {
            map(va + i * PAGE, PAGE, memories[i]);
        }
        set_access(va, count * PAGE);
        for (size_t i = 0; i < count; i++) {
            volatile unsigned char *byte = byte_at(va + i * PAGE + round);
            assert_int_equal(*byte, 0);
            *byte = (unsigned char)(i + 1);
            assert_int_equal(*byte_at(va + i * PAGE + round / 2), i + 1);
        }
        for (size_t i = 0; i < count; i++) {
            unmap(va + i * PAGE, PAGE, memories[i]);
        }
    }
    stop_taking = true;
    (void)pthread_join(taker, NULL);
    assert_true(is_occupied(va, count * PAGE));
    for (size_t i = 0; i < count; i++) {
        release(memories[i], PAGE);
    }
    free_address(va, count * PAGE);
}

static void *grow_and_shrink(void *context)
{
    intptr_t failures = 0;
    (void)context;
    for (unsigned round = 0; round < 50; round++) {
        uintptr_t va;
        gp__memory memory;
        if (driver->reserve(host, 2 * PAGE, &va, NULL) != GP_OK ||
            driver->create(host, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL) != GP_OK ||
            driver->map(host, va, PAGE, memory, NULL) != GP_OK ||
            driver->set_access(host, va, PAGE, GP_LOCATION_DEVICE, NULL, NULL) != GP_OK) {
            return (void *)(intptr_t)-1;
        }
        *byte_at(va) = (unsigned char)round;
        failures += driver->unmap(host, va, PAGE, memory, NULL) != GP_OK;
        failures += driver->free_address(host, va, 2 * PAGE, NULL) != GP_OK;
        failures += driver->release(host, memory, PAGE, NULL) != GP_OK;
    }
    return (void *)failures;
}

static void threads_grow_and_shrink_at_once(void **state)
{
    (void)state;
    pthread_t threads[4];
    int64_t live = gp__memory_live();
    for (size_t i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, grow_and_shrink, NULL) == 0, "no thread");
    }
    for (size_t i = 0; i < 4; i++) {
        void *failures;
        (void)pthread_join(threads[i], &failures);
        assert_null(failures);
    }
    assert_int_equal(gp__memory_live(), live);
}

/* ---- forks --------------------------------------------------------------------------------- */

struct forked {
    uintptr_t va;
    gp__memory mapped;
    gp__memory at_home;
};

static bool child_changes_nothing(void *context)
{
    struct forked *forked = context;
    uintptr_t va;
    gp__memory memory;
    size_t bytes;
    struct gp__entry entry;
    /* The child has a copy of the pages, and may do to it what it likes. */
    *byte_at(forked->va) = 99;
    *byte_at(forked->va + PAGE - 1) = 99;
    gp_status statuses[] = {
        driver->memory_info(host, &bytes, &bytes, NULL),
        driver->reserve(host, PAGE, &va, NULL),
        driver->free_address(host, forked->va, 2 * PAGE, NULL),
        driver->create(host, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL),
        driver->release(host, forked->at_home, PAGE, NULL),
        driver->map(host, forked->va + PAGE, PAGE, forked->at_home, NULL),
        driver->set_access(host, forked->va, PAGE, GP_LOCATION_DEVICE, NULL, NULL),
        driver->unmap(host, forked->va, PAGE, forked->mapped, NULL),
        driver->enter(host, &entry, NULL),
    };
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        if (statuses[i] != GP_ERR_STATE) {
            return false;
        }
    }
    return *byte_at(forked->va) == 99;
}

static void a_forked_child_never_reaches_the_parent(void **state)
{
    (void)state;
    struct forked forked = {
        .va = reserve(2 * PAGE), .mapped = create(PAGE), .at_home = create(PAGE)};
    map(forked.va, PAGE, forked.mapped);
    set_access(forked.va, PAGE);
    write_marks(forked.va, PAGE, 7);
    assert_int_equal(in_child(child_changes_nothing, &forked), 0);
    check_marks(forked.va, PAGE, 7);
    /* Pages that were shared with a child move like any others. */
    unmap(forked.va, PAGE, forked.mapped);
    map(forked.va + PAGE, PAGE, forked.mapped);
    set_access(forked.va + PAGE, PAGE);
    check_marks(forked.va + PAGE, PAGE, 7);
    unmap(forked.va + PAGE, PAGE, forked.mapped);
    release(forked.mapped, PAGE);
    release(forked.at_home, PAGE);
    free_address(forked.va, 2 * PAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_range_never_has_a_hole),
        cmocka_unit_test(threads_grow_and_shrink_at_once),
        cmocka_unit_test(a_forked_child_never_reaches_the_parent),
    };
    return cmocka_run_group_tests(tests, open_host, NULL);
}
