/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA memory beyond its own process and device: descriptors that stand for it, and peers that may reach
 * it. It never maps anything and never checks a size: the driver lets any size pass at import.
 *
 * DRIVER FACTS RELIED ON (H200, driver 580.159)
 *   - An imported handle is a new number for the same memory. Mapping it with another size than the
 *     memory's fails with NOT_SUPPORTED. It cannot be exported again (INVALID_VALUE).
 *   - A descriptor that holds no memory of the driver's fails the import with UNKNOWN.
 *   - The properties of an imported handle tell where its memory lives.
 */
#include "cuda_device.h"

#include "backing_internal.h"
#include "lock.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

static gp_status begin_blocking(gp_error *error)
{
    gp__assert_no_lock();
    return gp__check_process(error);
}

/* A question that fails, in whatever way, means "not supported". */
unsigned gp__cuda_chunk_flags(const struct gp__cuda_api *api, gp__cu_device device)
{
    unsigned flags = 0;
    if (gp__cuda_attribute(api, device,
                           GP__CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                           0) == 1)
        flags |= GP_CHUNK_EXPORTABLE;
    if (gp__cuda_attribute(api, device,
                           GP__CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0) == 1)
        flags |= GP_CHUNK_GPU_DIRECT_RDMA;
    return flags;
}

/* The driver's descriptors live on in programs that this process executes, unless told otherwise. */
static gp_status close_on_exec(int fd, size_t bytes, gp_error *error)
{
    int flags = fcntl(fd, F_GETFD);
    if (flags >= 0 && fcntl(fd, F_SETFD, flags | FD_CLOEXEC) == 0)
        return GP_OK;
    return gp__errno_error(error, GP_ERR_DRIVER, "fcntl", errno, 0, bytes);
}

gp_status gp__cuda_export_fd(gp_device *device, gp__memory memory, size_t bytes, int *fd,
                             gp_error *error)
{
    const struct gp__cuda_api *api = gp__cuda_of(device)->api;
    int made = -1;
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = api->cuMemExportToShareableHandle(
        &made, memory, GP__CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(api, error, GP_ERR_DRIVER, "cuMemExportToShareableHandle", code, 0,
                              bytes);
    status = close_on_exec(made, bytes, error);
    if (status == GP_OK)
        *fd = made;
    else
        (void)close(made);
    return status;
}

/* Where the imported memory lives, or why it is of no use here. */
static gp_status describe(gp_device *device, struct gp__imported *found, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp__cu_allocation properties = {0};
    gp__cu_result code =
        cuda->api->cuMemGetAllocationPropertiesFromHandle(&properties, found->memory);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER,
                              "cuMemGetAllocationPropertiesFromHandle", code, 0, 0);
    bool local = properties.location.type == GP__CU_MEM_LOCATION_TYPE_DEVICE;
    if (local && properties.location.id != cuda->native)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "the descriptor's memory lives on cuda:%d: it cannot be a chunk of %s",
                            properties.location.id, device->name);
    found->location = local ? GP_LOCATION_DEVICE : GP_LOCATION_HOST;
    found->flags = properties.allocFlags.gpuDirectRDMACapable != 0 ? GP_CHUNK_GPU_DIRECT_RDMA : 0;
    return GP_OK;
}

gp_status gp__cuda_import_fd(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                             gp_error *error)
{
    const struct gp__cuda_api *api = gp__cuda_of(device)->api;
    struct gp__imported found = {0};
    gp__cu_memory memory = 0;
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    /* The driver takes the descriptor's number in the place of a pointer. */
    gp__cu_result code = api->cuMemImportFromShareableHandle(
        &memory, (void *)(uintptr_t)fd, GP__CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(api, error, GP_ERR_DRIVER, "cuMemImportFromShareableHandle", code, 0,
                              bytes);
    found.memory = memory;
    status = describe(device, &found, error);
    if (status == GP_OK)
        *out = found;
    else
        (void)gp__release_memory(device, memory, bytes, NULL);
    return status;
}

gp_status gp__cuda_can_access(gp_device *device, gp_device *peer, bool *can, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    int answer = 0;
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    /* The first device is the one that reaches out, the second the one with the memory. */
    gp__cu_result code =
        cuda->api->cuDeviceCanAccessPeer(&answer, gp__cuda_of(peer)->native, cuda->native);
    *can = code == GP__CUDA_SUCCESS && answer == 1;
    return GP_OK;
}
