/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of the host device's memory share: the device, its table's calls with their
 * success checked, and what the kernel says about an address.
 */
#ifndef GP__HOST_CASE_H
#define GP__HOST_CASE_H

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backing/driver.h"
#include "tests/support/check.h"

#define PAGE (2 * CHECK_MIB)

static gp_device *host;
static const struct gp__driver *driver;
static int pipe_ends[2];

static inline int open_host(void **state)
{
    gp_error error;
    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, &error), &error);
    driver = host->driver;
    return pipe(pipe_ends);
}

/* ---- helpers: what the kernel says about an address -------------------------------------------
 * */

/* The kernel reads the byte for us, so that an address out of reach is an answer and not a fault.
 * */
static inline bool is_readable(uintptr_t va)
{
    char byte;
    if (write(pipe_ends[1], (void *)va, 1) != 1) {
        assert_int_equal(errno, EFAULT);
        return false;
    }
    assert_int_equal(read(pipe_ends[0], &byte, 1), 1);
    return true;
}

static inline bool is_occupied(uintptr_t va, size_t bytes)
{
    for (size_t offset = 0; offset < bytes; offset += PAGE) {
        void *at = mmap((void *)(va + offset), PAGE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != MAP_FAILED) {
            (void)munmap(at, PAGE);
            return false;
        }
        assert_int_equal(errno, EEXIST);
    }
    return true;
}

static inline unsigned mapping_count(void)
{
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    for (int c = fgetc(maps); c != EOF; c = fgetc(maps)) {
        count += c == '\n';
    }
    (void)fclose(maps);
    return count;
}

static inline volatile unsigned char *byte_at(uintptr_t va)
{
    return (volatile unsigned char *)va;
}

static inline uintptr_t reserve(size_t bytes)
{
    uintptr_t va;
    gp_error error;
    CHECK_OK(driver->reserve(host, bytes, &va, &error), &error);
    assert_int_equal(va % PAGE, 0);
    return va;
}

static inline void free_address(uintptr_t va, size_t bytes)
{
    gp_error error;
    CHECK_OK(driver->free_address(host, va, bytes, &error), &error);
}

static inline gp__memory create(size_t bytes)
{
    gp__memory memory;
    gp_error error;
    CHECK_OK(driver->create(host, bytes, GP_LOCATION_DEVICE, 0, &memory, &error), &error);
    return memory;
}

static inline void release(gp__memory memory, size_t bytes)
{
    gp_error error;
    CHECK_OK(driver->release(host, memory, bytes, &error), &error);
}

static inline void map(uintptr_t va, size_t bytes, gp__memory memory)
{
    gp_error error;
    CHECK_OK(driver->map(host, va, bytes, memory, &error), &error);
}

static inline void set_access(uintptr_t va, size_t bytes)
{
    gp_error error;
    CHECK_OK(driver->set_access(host, va, bytes, GP_LOCATION_DEVICE, NULL, &error), &error);
}

static inline void unmap(uintptr_t va, size_t bytes, gp__memory memory)
{
    gp_error error;
    CHECK_OK(driver->unmap(host, va, bytes, memory, &error), &error);
}

/* Marks the first and last byte and one in each sixteenth: the rest stays untouched. */
static inline void write_marks(uintptr_t va, size_t bytes, unsigned char seed)
{
    for (size_t i = 0; i < 16; i++) {
        *byte_at(va + bytes / 16 * i) = (unsigned char)(seed + i);
    }
    *byte_at(va + bytes - 1) = (unsigned char)(seed + 16);
}

static inline void check_marks(uintptr_t va, size_t bytes, unsigned char seed)
{
    for (size_t i = 0; i < 16; i++) {
        assert_int_equal(*byte_at(va + bytes / 16 * i), (unsigned char)(seed + i));
        assert_int_equal(*byte_at(va + bytes / 16 * i + 1), 0);
    }
    assert_int_equal(*byte_at(va + bytes - 1), (unsigned char)(seed + 16));
}

#endif
