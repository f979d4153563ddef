/* SPDX-License-Identifier: Apache-2.0
 *
 * The device table for "cuda:N": opening a device, its memory, and entering its context.
 * Never links against the CUDA driver or runtime, never decides when memory may be unmapped.
 */
#include "cuda_device.h"

#include <stdio.h>

#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

#define MODE_UNKNOWN (-1) /* the thread's capture mode could not be read: it is left alone */

/* ---- contexts ------------------------------------------------------------------------------ */

gp__cu_result gp__cuda_scope_enter(const struct gp__cuda_api *api, gp__cu_context context,
                                   struct gp__cuda_scope *scope)
{
    gp__cu_context current = NULL;
    scope->pushed = false;
    if (api->cuCtxGetCurrent(&current) == GP__CUDA_SUCCESS && current == context)
        return GP__CUDA_SUCCESS;
    gp__cu_result code = api->cuCtxPushCurrent(context);
    scope->pushed = code == GP__CUDA_SUCCESS;
    return code;
}

void gp__cuda_scope_leave(const struct gp__cuda_api *api, const struct gp__cuda_scope *scope)
{
    gp__cu_context popped;
    if (scope->pushed)
        (void)api->cuCtxPopCurrent(&popped);
}

bool gp__cuda_is_dead(gp__cu_result code)
{
    switch (code) {
    case GP__CUDA_ERROR_DEINITIALIZED:
    case GP__CUDA_ERROR_ECC_UNCORRECTABLE:
    case GP__CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case GP__CUDA_ERROR_CONTAINED:
    case GP__CUDA_ERROR_ILLEGAL_ADDRESS:
    case GP__CUDA_ERROR_LAUNCH_TIMEOUT:
    case GP__CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case GP__CUDA_ERROR_ASSERT:
    case GP__CUDA_ERROR_HARDWARE_STACK_ERROR:
    case GP__CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case GP__CUDA_ERROR_MISALIGNED_ADDRESS:
    case GP__CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case GP__CUDA_ERROR_INVALID_PC:
    case GP__CUDA_ERROR_LAUNCH_FAILED:
    case GP__CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case GP__CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case GP__CUDA_ERROR_EXTERNAL_DEVICE:
        return true;
    default:
        return false;
    }
}

/* A dead context must not stop a pool from closing, so entering one succeeds: the calls inside then
 * see the error themselves and take it for "passed". */
gp_status gp__cuda_enter(gp_device *device, struct gp__entry *entry, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    const struct gp__cuda_api *api = cuda->api;
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    gp__cu_capture_mode mode = GP__CU_STREAM_CAPTURE_MODE_RELAXED;
    gp__cu_result code = api->cuThreadExchangeStreamCaptureMode(&mode);
    if (code != GP__CUDA_SUCCESS && !gp__cuda_is_dead(code))
        return gp__cuda_error(api, error, GP_ERR_DRIVER, "cuThreadExchangeStreamCaptureMode", code,
                              0, 0);
    int previous = code == GP__CUDA_SUCCESS ? (int)mode : MODE_UNKNOWN;
    code = api->cuCtxPushCurrent(cuda->context);
    if (code != GP__CUDA_SUCCESS && !gp__cuda_is_dead(code)) {
        if (previous != MODE_UNKNOWN)
            (void)api->cuThreadExchangeStreamCaptureMode(&mode);
        return gp__cuda_error(api, error, GP_ERR_DRIVER, "cuCtxPushCurrent", code, 0, 0);
    }
    entry->previous_mode = previous;
    entry->pushed = code == GP__CUDA_SUCCESS;
    return GP_OK;
}

void gp__cuda_leave(gp_device *device, const struct gp__entry *entry)
{
    const struct gp__cuda_api *api = gp__cuda_of(device)->api;
    gp__cu_context popped;
    if (gp__check_process(NULL) != GP_OK)
        return;
    if (entry->pushed)
        (void)api->cuCtxPopCurrent(&popped);
    if (entry->previous_mode != MODE_UNKNOWN) {
        gp__cu_capture_mode mode = (gp__cu_capture_mode)entry->previous_mode;
        (void)api->cuThreadExchangeStreamCaptureMode(&mode);
    }
}

/* ---- memory -------------------------------------------------------------------------------- */

/* What every memory entry does first. */
static gp_status begin_blocking(gp_error *error)
{
    gp__assert_no_lock();
    return gp__check_process(error);
}

static gp_status cuda_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                                  gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    struct gp__entry entry;
    size_t available = 0, total = 0;
    gp__assert_no_lock();
    gp_status status = gp__cuda_enter(device, &entry, error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemGetInfo(&available, &total);
    gp__cuda_leave(device, &entry);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuMemGetInfo", code, 0, 0);
    *free_bytes = available;
    *total_bytes = total;
    return GP_OK;
}

static gp_status cuda_reserve(gp_device *device, size_t bytes, uintptr_t *va, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp__cu_pointer reserved = 0;
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemAddressReserve(&reserved, bytes, 0, 0, 0);
    if (code == GP__CUDA_SUCCESS) {
        *va = (uintptr_t)reserved;
        return GP_OK;
    }
    /* "Out of memory" here means addresses: the driver reserves no memory for them. */
    status = code == GP__CUDA_ERROR_OUT_OF_MEMORY ? GP_ERR_ADDRESS_SPACE : GP_ERR_DRIVER;
    return gp__cuda_error(cuda->api, error, status, "cuMemAddressReserve", code, 0, bytes);
}

static gp_status cuda_free_address(gp_device *device, uintptr_t va, size_t bytes, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemAddressFree(va, bytes);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuMemAddressFree", code, va, bytes);
    return GP_OK;
}

static gp__cu_location location_of(const struct gp__cuda_device *cuda, gp_location location)
{
    if (location == GP_LOCATION_HOST)
        return (gp__cu_location){GP__CU_MEM_LOCATION_TYPE_HOST_NUMA, cuda->host_node};
    return (gp__cu_location){GP__CU_MEM_LOCATION_TYPE_DEVICE, cuda->native};
}

static gp__cu_allocation allocation_in(const struct gp__cuda_device *cuda, gp_location location)
{
    return (gp__cu_allocation){.type = GP__CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = location_of(cuda, location)};
}

static gp_status no_host_memory(const gp_device *device, gp_error *error)
{
    return gp_error_set(error, GP_ERR_UNAVAILABLE,
                        "%s cannot map host memory at its addresses (HOST_NUMA): the driver is too "
                        "old or the system does not support it",
                        device->name);
}

static gp_status cuda_create(gp_device *device, size_t bytes, gp_location location, unsigned flags,
                             gp__memory *out, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp__cu_memory memory = 0;
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    if (location == GP_LOCATION_HOST && !cuda->host_supported)
        return no_host_memory(device, error);
    gp__cu_allocation properties = allocation_in(cuda, location);
    if (flags & GP_CHUNK_EXPORTABLE)
        properties.requestedHandleTypes = GP__CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.allocFlags.gpuDirectRDMACapable = (flags & GP_CHUNK_GPU_DIRECT_RDMA) != 0;
    gp__cu_result code = cuda->api->cuMemCreate(&memory, bytes, &properties, 0);
    if (code == GP__CUDA_SUCCESS) {
        *out = memory;
        return GP_OK;
    }
    if (code == GP__CUDA_ERROR_OUT_OF_MEMORY)
        status = GP_ERR_OUT_OF_MEMORY;
    else if (code == GP__CUDA_ERROR_NOT_SUPPORTED)
        status = GP_ERR_UNAVAILABLE;
    else
        status = GP_ERR_DRIVER;
    return gp__cuda_error(cuda->api, error, status, "cuMemCreate", code, 0, bytes);
}

static gp_status cuda_release(gp_device *device, gp__memory memory, size_t bytes, gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemRelease(memory);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuMemRelease", code, 0, bytes);
    return GP_OK;
}

static gp_status cuda_map(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                          gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemMap(va, bytes, 0, memory, 0);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuMemMap", code, va, bytes);
    return GP_OK;
}

static gp_status cuda_set_access(gp_device *device, uintptr_t va, size_t bytes,
                                 gp_location location, const struct gp__peers *peers,
                                 gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_access access[2 + GP__MOST_PEERS] = {
        {location_of(cuda, GP_LOCATION_DEVICE), GP__CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
        {location_of(cuda, GP_LOCATION_HOST), GP__CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
    };
    size_t count = location == GP_LOCATION_HOST ? 2 : 1;
    for (size_t i = 0; peers != NULL && i < peers->count; i++)
        access[count++] =
            (gp__cu_access){location_of(gp__cuda_of(peers->devices[i]), GP_LOCATION_DEVICE),
                            GP__CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    gp__cu_result code = cuda->api->cuMemSetAccess(va, bytes, access, count);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuMemSetAccess", code, va, bytes);
    return GP_OK;
}

static gp_status cuda_unmap(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                            gp_error *error)
{
    const struct gp__cuda_device *cuda = gp__cuda_of(device);
    (void)memory; /* the driver finds it by address */
    gp_status status = begin_blocking(error);
    if (status != GP_OK)
        return status;
    gp__cu_result code = cuda->api->cuMemUnmap(va, bytes);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuMemUnmap", code, va, bytes);
    return GP_OK;
}

static const struct gp__driver cuda_driver = {
    .memory_info = cuda_memory_info,
    .reserve = cuda_reserve,
    .free_address = cuda_free_address,
    .create = cuda_create,
    .export_fd = gp__cuda_export_fd,
    .import_fd = gp__cuda_import_fd,
    .can_access = gp__cuda_can_access,
    .release = cuda_release,
    .map = cuda_map,
    .set_access = cuda_set_access,
    .unmap = cuda_unmap,
    .stream_resolve = gp__cuda_stream_resolve,
    .stream_confirm = gp__cuda_stream_confirm,
    .stream_capturing = gp__cuda_stream_capturing,
    .event_create = gp__cuda_event_create,
    .event_destroy = gp__cuda_event_destroy,
    .event_record = gp__cuda_event_record,
    .event_record_context = gp__cuda_event_record_context,
    .event_query = gp__cuda_event_query,
    .event_wait = gp__cuda_event_wait,
    .copy = gp__cuda_copy,
    .fill = gp__cuda_fill,
    .stream_wait = gp__cuda_stream_wait,
    .capture_id = gp__cuda_capture_id,
    .capture_keep = gp__cuda_capture_keep,
    .enter = gp__cuda_enter,
    .leave = gp__cuda_leave,
};

/* ---- opening ------------------------------------------------------------------------------- */

static size_t granularity_in(const struct gp__cuda_device *cuda, gp_location location,
                             gp__cu_result *code)
{
    size_t granularity = 0;
    gp__cu_allocation properties = allocation_in(cuda, location);
    *code = cuda->api->cuMemGetAllocationGranularity(&granularity, &properties,
                                                     GP__CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    return *code == GP__CUDA_SUCCESS ? granularity : 0;
}

/* Host memory is offered only where its chunks can follow the device's granularity. A probe that
 * fails, in whatever way, means "not supported". */
static void probe_host_memory(struct gp__cuda_device *cuda)
{
    gp__cu_result code;
    int node = gp__cuda_attribute(cuda->api, cuda->native, GP__CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0);
    cuda->host_node = node < 0 ? 0 : node; /* -1: the system has one node and no number for it */
    if (gp__cuda_attribute(cuda->api, cuda->native,
                           GP__CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                           0) != 1)
        return;
    size_t granularity = granularity_in(cuda, GP_LOCATION_HOST, &code);
    cuda->host_supported = granularity != 0 && cuda->base.granularity % granularity == 0;
}

/* Asks nothing while another library captures: the legacy stream then answers every question with an
 * error. Its id is only ever compared within this context, so any number that no stream has will do. */
static uint64_t legacy_stream_id(const struct gp__cuda_device *cuda)
{
    struct gp__cuda_scope scope;
    gp__cu_capture_status capture = GP__CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = UINT64_MAX;
    if (gp__cuda_scope_enter(cuda->api, cuda->context, &scope) != GP__CUDA_SUCCESS)
        return id;
    if (cuda->api->cuStreamIsCapturing(NULL, &capture) == GP__CUDA_SUCCESS &&
        capture == GP__CU_STREAM_CAPTURE_STATUS_NONE &&
        cuda->api->cuStreamGetId(NULL, &id) != GP__CUDA_SUCCESS)
        id = UINT64_MAX;
    gp__cuda_scope_leave(cuda->api, &scope);
    return id;
}

/* The primary context is taken last, so that nothing has to be given back on failure. */
static gp_status open_native(struct gp__cuda_device *cuda, gp_error *error)
{
    gp__cu_result code;
    gp_device *base = &cuda->base;
    gp_status status = gp__cuda_probe(cuda->api, base->ordinal, &cuda->native, error);
    if (status != GP_OK)
        return status;
    base->granularity = granularity_in(cuda, GP_LOCATION_DEVICE, &code);
    if (base->granularity == 0)
        return gp__cuda_error(cuda->api, error, GP_ERR_UNAVAILABLE, "cuMemGetAllocationGranularity",
                              code, 0, 0);
    probe_host_memory(cuda);
    base->chunk_flags = gp__cuda_chunk_flags(cuda->api, cuda->native);
    base->wrong_size_code = GP__CUDA_ERROR_NOT_SUPPORTED;
    code = cuda->api->cuDevicePrimaryCtxRetain(&cuda->context, cuda->native);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(cuda->api, error, GP_ERR_DRIVER, "cuDevicePrimaryCtxRetain", code, 0,
                              0);
    base->context = (uintptr_t)cuda->context;
    cuda->legacy_id = legacy_stream_id(cuda);
    return GP_OK;
}

gp_status gp__cuda_open(int ordinal, gp_device **out, gp_error *error)
{
    const struct gp__cuda_api *api = NULL;
    gp_status status = gp__cuda_load(&api, error);
    if (status != GP_OK)
        return status;
    struct gp__cuda_device *cuda = gp__calloc(1, sizeof *cuda);
    if (cuda == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory for the bookkeeping of cuda:%d (%zu bytes)", ordinal,
                            sizeof *cuda);
    cuda->api = api;
    cuda->base.driver = &cuda_driver;
    cuda->base.kind = GP_DEVICE_CUDA;
    cuda->base.ordinal = ordinal;
    cuda->base.device_accessible = true;
    cuda->base.state = cuda;
    snprintf(cuda->base.name, sizeof cuda->base.name, "cuda:%d", ordinal);
    status = open_native(cuda, error);
    if (status != GP_OK) {
        gp__free(cuda);
        return status;
    }
    *out = &cuda->base;
    return GP_OK;
}
