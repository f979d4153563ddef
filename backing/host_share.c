/* SPDX-License-Identifier: Apache-2.0
 *
 * Host chunks that other processes may import. Each is a memory file of its own and costs a descriptor as
 * long as it lives; its contents are in the file, so they survive an unmap. A forked child cannot reach
 * them: mapped parts are missing from its address space, so that a stray use there faults instead of
 * writing into the parent's memory.
 *
 *   create        a memory file, sealed so that nobody who gets a descriptor can cut it under a mapping.
 *   map, unmap    one mmap over what is there, which replaces it in one step: no hole in between.
 *   import        a descriptor of such a file. Others are refused, a file on disk for instance.
 */
#include "host_internal.h"

#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U /* older C libraries lack the name */
#endif

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Kernels before 6.3 do not know that a memory file need not be executable; later ones may insist. */
static int new_file(void)
{
    int fd = memfd_create("growpool", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) {
        fd = memfd_create("growpool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    }
    return fd;
}

/* Made by `call`, which failed just now. */
static gp_status no_descriptor(const char *call, size_t bytes, gp_error *error)
{
    char text[32];
    int code = errno;
    gp_status status = gp__errno_error(error, GP_ERR_OUT_OF_MEMORY, call, code, 0, bytes);
    if (error != NULL && (code == EMFILE || code == ENFILE)) {
        (void)snprintf(error->message, sizeof error->message,
                       "no file descriptor is left for a shared chunk of %s on host: each holds "
                       "one; raise the limit (ulimit -n) or give chunks back",
                       gp__size_text(bytes, text));
    }
    return status;
}

gp_status gp__host_share_create(size_t bytes, int *descriptor, gp_error *error)
{
    int fd = new_file();
    if (fd < 0) {
        return no_descriptor("memfd_create", bytes, error);
    }
    const char *call = "ftruncate";
    int result = ftruncate(fd, (off_t)bytes);
    if (result == 0) {
        call = "fcntl";
        result = fcntl(fd, F_ADD_SEALS, SEALS);
    }
    if (result != 0) {
        int code = errno;
        (void)close(fd);
        return gp__errno_error(error, GP_ERR_DRIVER, call, code, 0, bytes);
    }
    *descriptor = fd;
    return GP_OK;
}

/* What a failed mmap over [va, va + bytes) left there, errno as it was. */
enum leftover { LEFT_AS_IT_WAS, LEFT_EMPTY, LEFT_TO_OTHERS };

/* Older kernels clear the range before they refuse, which leaves a hole: fill it. NOREPLACE, because in
 * every other case the pages are still there. */
static enum leftover fill_hole(uintptr_t va, size_t bytes)
{
    int code = errno;
    void *filled =
        mmap((void *)va, bytes, PROT_NONE, GP__HOST_PRIVATE_PAGES | MAP_FIXED_NOREPLACE, -1, 0);
    bool still_there = filled == MAP_FAILED && errno == EEXIST;
    errno = code;
    if (filled != MAP_FAILED) {
        return LEFT_EMPTY;
    }
    return still_there ? LEFT_AS_IT_WAS : LEFT_TO_OTHERS;
}

enum gp__host_move gp__host_share_map(int descriptor, uintptr_t va, size_t bytes)
{
    void *pages = mmap((void *)va, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, descriptor, 0);
    if (pages == MAP_FAILED) {
        return fill_hole(va, bytes) == LEFT_TO_OTHERS ? GP__HOST_TARGET_LOST : GP__HOST_NOT_MOVED;
    }
    if (madvise(pages, bytes, MADV_DONTFORK) == 0) {
        return GP__HOST_MOVED;
    }
    int code = errno;
    bool lost = false;
    (void)gp__host_share_unmap(va, bytes, &lost);
    errno = code;
    return lost ? GP__HOST_TARGET_LOST : GP__HOST_NOT_MOVED;
}

int gp__host_share_unmap(uintptr_t va, size_t bytes, bool *lost)
{
    *lost = false;
    if (mmap((void *)va, bytes, PROT_NONE, GP__HOST_PRIVATE_PAGES | MAP_FIXED, -1, 0) !=
        MAP_FAILED) {
        return 0;
    }
    int code = errno;
    enum leftover left = fill_hole(va, bytes);
    *lost = left == LEFT_TO_OTHERS;
    return left == LEFT_AS_IT_WAS ? code : 0;
}

gp_status gp__host_export_fd(gp_device *device, gp__memory memory, size_t bytes, int *fd,
                             gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    int copy = fcntl(gp__host_descriptor(memory), F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
        return no_descriptor("fcntl", bytes, error);
    }
    *fd = copy;
    return GP_OK;
}

/* GP_OK when the descriptor is a chunk's memory file of that size. */
static gp_status check_file(int fd, size_t bytes, gp_error *error)
{
    struct stat file;
    if (fstat(fd, &file) != 0) {
        return gp__errno_error(error, GP_ERR_DRIVER, "fstat", errno, 0, bytes);
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "descriptor %d is no exported chunk of a host device: pass one that "
                            "exporting a chunk gave",
                            fd);
    }
    if ((size_t)file.st_size == bytes) {
        return GP_OK;
    }
    gp_status status =
        gp_error_set(error, GP_ERR_ARGUMENT,
                     "descriptor %d holds a chunk of %zu bytes, not of %zu: give the exact size of "
                     "the chunk that was exported",
                     fd, (size_t)file.st_size, bytes);
    if (error != NULL) {
        error->size = bytes;
    }
    return status;
}

gp_status gp__host_import_fd(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                             gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        status = check_file(fd, bytes, error);
    }
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
        return no_descriptor("fcntl", bytes, error);
    }
    struct gp__imported found = {.location = GP_LOCATION_DEVICE};
    status = gp__host_share_wrap(copy, bytes, &found.memory, error);
    if (status == GP_OK) {
        *out = found;
    } else {
        (void)close(copy);
    }
    return status;
}

/* There is one host: nobody to reach it from elsewhere. */
gp_status gp__host_can_access(gp_device *device, gp_device *peer, bool *can, gp_error *error)
{
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        *can = device == peer;
    }
    return status;
}
