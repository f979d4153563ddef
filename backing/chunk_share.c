/* SPDX-License-Identifier: Apache-2.0
 *
 * The rules of chunks that are shared with other processes or with network cards: what is tried, what is
 * done without, and what a descriptor must hold. It speaks to the device's table and owns no chunk.
 */
#include "backing_internal.h"
#include "lock.h"

#include <fcntl.h>

/* gp_device.rdma_trial */
enum { TRIAL_OPEN, TRIAL_WORKED, TRIAL_FAILED };

/* ---- a trial mapping ------------------------------------------------------------------------ */

/* Takes the trial's mapping and addresses away again. Nobody would come back for them, so a driver that
 * refuses is asked once more. */
static gp_status undo_trial(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                            bool mapped, gp_error *error)
{
    const struct gp__driver *driver = device->driver;
    if (mapped && driver->unmap(device, va, bytes, memory, NULL) != GP_OK) {
        gp_status status = driver->unmap(device, va, bytes, memory, error);
        if (status != GP_OK) {
            return status;
        }
    }
    if (driver->free_address(device, va, bytes, NULL) == GP_OK) {
        return GP_OK;
    }
    return driver->free_address(device, va, bytes, error);
}

/* Maps the memory at addresses of its own, gives the device access where `access` says so, and undoes
 * both. *misfit: the driver said that the memory has another size. */
static gp_status try_mapping(gp_device *device, const struct gp__imported *memory, size_t bytes,
                             bool access, bool *misfit, gp_error *error)
{
    const struct gp__driver *driver = device->driver;
    uintptr_t va = 0;
    *misfit = false;
    gp_status status = driver->reserve(device, bytes, &va, error);
    if (status != GP_OK) {
        return status;
    }
    status = driver->map(device, va, bytes, memory->memory, error);
    bool mapped = status == GP_OK;
    *misfit = !mapped && error->code != 0 && error->code == device->wrong_size_code;
    if (mapped && access) {
        status = driver->set_access(device, va, bytes, memory->location, NULL, error);
    }
    gp_status undone =
        undo_trial(device, va, bytes, memory->memory, mapped, status == GP_OK ? error : NULL);
    return status == GP_OK ? undone : status;
}

/* ---- making --------------------------------------------------------------------------------- */

static gp_status cannot_share(const gp_device *device, gp_error *error)
{
    return gp_error_set(error, GP_ERR_UNAVAILABLE,
                        "%s cannot share memory by file descriptor: its driver does not support it",
                        device->name);
}

/* The smallest chunk with the property, made, mapped, used and undone: some systems say that they can
 * do it and then refuse access to the mapped memory. */
static gp_status try_rdma(gp_device *device, gp_location location)
{
    struct gp__imported made = {.location = location};
    gp_error error = {0};
    bool misfit;
    size_t bytes = device->granularity;
    gp_status status = device->driver->create(device, bytes, location, GP_CHUNK_GPU_DIRECT_RDMA,
                                              &made.memory, &error);
    if (status != GP_OK) {
        return status;
    }
    status = try_mapping(device, &made, bytes, true, &misfit, &error);
    gp_status released = gp__release_memory(device, made.memory, bytes, NULL);
    return status == GP_OK ? released : status;
}

/* Asked once for each device and location. A trial that failed for want of room proves nothing, and is
 * made again for the next chunk. Two threads may both make it: they find the same. */
static bool rdma_works(gp_device *device, gp_location location)
{
    int *known = &device->rdma_trial[location == GP_LOCATION_HOST];
    if ((device->chunk_flags & GP_CHUNK_GPU_DIRECT_RDMA) == 0) {
        return false;
    }
    int state = __atomic_load_n(known, __ATOMIC_ACQUIRE);
    if (state != TRIAL_OPEN) {
        return state == TRIAL_WORKED;
    }
    gp_status status = try_rdma(device, location);
    if (status != GP_ERR_OUT_OF_MEMORY && status != GP_ERR_ADDRESS_SPACE &&
        status != GP_ERR_HOST_MEMORY && status != GP_ERR_STATE) {
        __atomic_store_n(known, status == GP_OK ? TRIAL_WORKED : TRIAL_FAILED, __ATOMIC_RELEASE);
    }
    return status == GP_OK;
}

gp_status gp__share_create(gp_device *device, size_t bytes, gp_location location, unsigned *flags,
                           gp__memory *out, gp_error *error)
{
    const struct gp__driver *driver = device->driver;
    unsigned wanted = *flags;
    if ((wanted & ~(unsigned)(GP_CHUNK_EXPORTABLE | GP_CHUNK_GPU_DIRECT_RDMA)) != 0) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "chunk flags %#x are unknown: use GP_CHUNK_EXPORTABLE and "
                            "GP_CHUNK_GPU_DIRECT_RDMA",
                            wanted);
    }
    if ((wanted & GP_CHUNK_EXPORTABLE & ~device->chunk_flags) != 0) {
        return cannot_share(device, error);
    }
    unsigned plain = wanted & ~(unsigned)GP_CHUNK_GPU_DIRECT_RDMA;
    if (wanted != plain && !rdma_works(device, location)) {
        wanted = plain;
    }
    gp_status status = driver->create(device, bytes, location, wanted, out, error);
    if (status != GP_OK && wanted != plain) {
        wanted = plain;
        status = driver->create(device, bytes, location, wanted, out, error);
    }
    if (status == GP_OK) {
        *flags = wanted;
    }
    return status;
}

/* ---- importing ------------------------------------------------------------------------------ */

static gp_status wrong_size(const gp_device *device, int fd, size_t bytes, gp_error *error)
{
    char text[32];
    gp_status status =
        gp_error_set(error, GP_ERR_ARGUMENT,
                     "descriptor %d holds a chunk of %s that is not %s: give the exact size of the "
                     "chunk that was exported",
                     fd, device->name, gp__size_text(bytes, text));
    if (error != NULL) {
        error->size = bytes;
    }
    return status;
}

gp_status gp__share_import(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                           gp_error *error)
{
    struct gp__imported found = {0};
    gp_error detail = {0};
    bool misfit = false;
    if ((device->chunk_flags & GP_CHUNK_EXPORTABLE) == 0) {
        return cannot_share(device, error);
    }
    if (fd < 0 || fcntl(fd, F_GETFD) < 0) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "%d is no open file descriptor: pass the one that stands for the chunk",
                            fd);
    }
    gp_status status = device->driver->import_fd(device, fd, bytes, &found, error);
    if (status != GP_OK) {
        return status;
    }
    status = try_mapping(device, &found, bytes, false, &misfit, &detail);
    if (status == GP_OK) {
        *out = found;
        return GP_OK;
    }
    (void)gp__release_memory(device, found.memory, bytes, NULL);
    if (misfit) {
        return wrong_size(device, fd, bytes, error);
    }
    if (error != NULL) {
        *error = detail;
    }
    return status;
}
