/* SPDX-License-Identifier: Apache-2.0
 *
 * How much memory this machine has and how much of it is free, control groups included. It
 * allocates nothing and keeps nothing.
 */
#include "host_internal.h"

#include "backing_internal.h"
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

gp_status gp__host_check_fork(gp_error *error)
{
    if (gp__fork_generation() == 0) {
        return GP_OK;
    }
    return gp__state_error(error, GP_REASON_FORKED,
                           "host memory and host streams do not survive a fork: use them in the "
                           "parent");
}

size_t gp__host_physical_bytes(void)
{
    static _Atomic size_t known; /* asked once: the answer costs a system call */
    size_t bytes = atomic_load_explicit(&known, memory_order_relaxed);
    if (bytes == 0) {
        long pages = sysconf(_SC_PHYS_PAGES);
        long page_bytes = sysconf(_SC_PAGESIZE);
        bytes = pages > 0 && page_bytes > 0 ? (size_t)pages * (size_t)page_bytes : SIZE_MAX;
        atomic_store_explicit(&known, bytes, memory_order_relaxed);
    }
    return bytes;
}

/* Reads a small text file whole. False when it is not there. */
static bool read_text(const char *path, char *text, size_t capacity)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return false;
    }
    ssize_t length = read(descriptor, text, capacity - 1);
    (void)close(descriptor);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/* "MemAvailable:  123 kB" -> bytes; `otherwise` when the line is missing. */
static size_t meminfo_bytes(const char *text, const char *key, size_t otherwise)
{
    const char *line = strstr(text, key);
    return line == NULL ? otherwise : (size_t)strtoull(line + strlen(key), NULL, 10) * 1024;
}

/* False when the file is missing or says "max". */
static bool cgroup_bytes(const char *group, const char *file, size_t *out)
{
    char path[1024];
    char text[64];
    int length = snprintf(path, sizeof path, "/sys/fs/cgroup%s/%s", group, file);
    if (length < 0 || (size_t)length >= sizeof path || !read_text(path, text, sizeof text) ||
        text[0] < '0' || text[0] > '9') {
        return false;
    }
    *out = (size_t)strtoull(text, NULL, 10);
    return true;
}

/* A control group (version 2) or any above it may allow less than the machine has. */
static void lower_to_cgroup(size_t *free_bytes, size_t *total_bytes)
{
    char text[1024];
    if (!read_text("/proc/self/cgroup", text, sizeof text)) {
        return;
    }
    char *group = strstr(text, "0::/");
    if (group == NULL) {
        return;
    }
    group += strlen("0::");
    group[strcspn(group, "\n")] = '\0';
    for (char *end = group + strlen(group); end != NULL; end = strrchr(group, '/')) {
        size_t most;
        size_t used;
        *end = '\0';
        if (cgroup_bytes(group, "memory.max", &most) &&
            cgroup_bytes(group, "memory.current", &used)) {
            size_t left = used < most ? most - used : 0;
            *free_bytes = left < *free_bytes ? left : *free_bytes;
            *total_bytes = most < *total_bytes ? most : *total_bytes;
        }
    }
}

gp_status gp__host_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                               gp_error *error)
{
    (void)device;
    char text[2048];
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    if (!read_text("/proc/meminfo", text, sizeof text)) {
        return gp__errno_error(error, GP_ERR_DRIVER, "read of /proc/meminfo", errno, 0, 0);
    }
    size_t total = meminfo_bytes(text, "MemTotal:", gp__host_physical_bytes());
    size_t available = meminfo_bytes(text, "MemAvailable:", total);
    lower_to_cgroup(&available, &total);
    *free_bytes = available;
    *total_bytes = total;
    return GP_OK;
}
