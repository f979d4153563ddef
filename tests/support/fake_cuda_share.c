/* SPDX-License-Identifier: Apache-2.0
 *
 * The stand-in for libcuda.so.1: memory shared between processes and devices. Descriptors are real ones,
 * of nothing; what the driver says of imported memory is what a test set.
 */
#include <unistd.h>

#include "tests/support/fake_cuda_internal.h"

gp__cu_result fake_cuDeviceCanAccessPeer(int *can_access, gp__cu_device device, gp__cu_device peer)
{
    CALLED(cuDeviceCanAccessPeer, "device=%d peer=%d", device, peer);
    *can_access = (int)setting("peers", 1);
    return GP__CUDA_SUCCESS;
}

gp__cu_result fake_cuMemExportToShareableHandle(void *shareable, gp__cu_memory memory,
                                                gp__cu_handle_type type, unsigned long long flags)
{
    CALLED(cuMemExportToShareableHandle, "memory=%llu type=%u flags=%llu", memory, type, flags);
    *(int *)shareable = setting("bad_fd", 0) != 0 ? -1 : dup(STDIN_FILENO);
    return GP__CUDA_SUCCESS;
}

gp__cu_result fake_cuMemImportFromShareableHandle(gp__cu_memory *memory, void *shareable,
                                                  gp__cu_handle_type type)
{
    CALLED(cuMemImportFromShareableHandle, "fd=%d type=%u", (int)(uintptr_t)shareable, type);
    *memory = 4712;
    return GP__CUDA_SUCCESS;
}

gp__cu_result fake_cuMemGetAllocationPropertiesFromHandle(gp__cu_allocation *properties,
                                                          gp__cu_memory memory)
{
    CALLED(cuMemGetAllocationPropertiesFromHandle, "memory=%llu", memory);
    properties->location.type = (unsigned)setting("imported_type", GP__CU_MEM_LOCATION_TYPE_DEVICE);
    properties->location.id = (int)setting("imported_id", 0);
    properties->allocFlags.gpuDirectRDMACapable = (unsigned char)setting("imported_rdma", 0);
    return GP__CUDA_SUCCESS;
}
