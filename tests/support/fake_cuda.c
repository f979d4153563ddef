/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for libcuda.so.1, for the loading and error paths of backing/cuda*.c on machines without
 * a GPU. It answers with what a test set, counts calls, and insists on the rules that a real driver
 * has for contexts and that cuda.c could break unseen. It simulates no memory: tests/support/sim.c
 * does that.
 */
#include "tests/support/fake_cuda_internal.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/fake_cuda_internal.h"

#define MOST_SETTINGS 64
#define MOST_DEVICES  4
#define MOST_DEPTH    16

static struct {
    char name[64];
    long value;
} settings[MOST_SETTINGS];
static size_t setting_count;

static struct gp__cu_context_object contexts[MOST_DEVICES];
/* As in the driver, what nobody destroyed is no leak of the process. */
static struct gp__cu_stream_object streams[MOST_OBJECTS]; /* more than any test makes */
static struct gp__cu_event_object events[MOST_OBJECTS];
static _Thread_local gp__cu_context stack[MOST_DEPTH];
static _Thread_local unsigned depth;
static _Thread_local gp__cu_capture_mode mode;
static unsigned long long stream_count = 100;
static bool initialised;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards settings, counts, arguments */

/* ---- settings, counts, arguments ------------------------------------------------------------- */

EXPORT void fake_cuda_set(const char *name, long value);
EXPORT unsigned long fake_cuda_calls(const char *name);
EXPORT const char *fake_cuda_last(const char *name);

/* The place of the setting, or of the next new one. lock: held. */
static size_t find_setting(const char *name)
{
    size_t i = 0;
    while (i < setting_count && strcmp(settings[i].name, name) != 0)
        i++;
    return i;
}

void fake_cuda_set(const char *name, long value)
{
    pthread_mutex_lock(&lock);
    size_t i = find_setting(name);
    if (i == MOST_SETTINGS)
        abort();
    snprintf(settings[i].name, sizeof settings[i].name, "%s", name);
    settings[i].value = value;
    setting_count += i == setting_count;
    pthread_mutex_unlock(&lock);
}

long setting(const char *name, long otherwise)
{
    pthread_mutex_lock(&lock);
    size_t i = find_setting(name);
    long value = i < setting_count ? settings[i].value : otherwise;
    pthread_mutex_unlock(&lock);
    return value;
}

__attribute__((constructor)) static void read_environment(void)
{
    const char *text = getenv("FAKE_CUDA");
    char name[64];
    long value;
    int used;
    while (text != NULL && sscanf(text, "%63[^=]=%ld%n", name, &value, &used) == 2) {
        fake_cuda_set(name, value);
        text += used;
        text += *text == ',';
    }
}

static const char *const names[] = {
#define NAME(name, version, need, parameters) #name,
    GP__CUDA_FUNCTIONS(NAME)
#undef NAME
};

static unsigned long counts[FUNCTION_COUNT];
static char arguments[FUNCTION_COUNT][160];

static enum function find_function(const char *name)
{
    unsigned i = 0;
    while (i < FUNCTION_COUNT && strcmp(names[i], name) != 0)
        i++;
    return (enum function)i;
}

unsigned long fake_cuda_calls(const char *name)
{
    unsigned long total = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < FUNCTION_COUNT; i++) {
        if (name == NULL || strcmp(names[i], name) == 0)
            total += counts[i];
    }
    pthread_mutex_unlock(&lock);
    return total;
}

const char *fake_cuda_last(const char *name)
{
    enum function function = find_function(name);
    return function == FUNCTION_COUNT ? "" : arguments[function];
}

gp__cu_result called(enum function function, const char *format, ...)
{
    va_list list;
    pthread_mutex_lock(&lock);
    counts[function]++;
    va_start(list, format);
    vsnprintf(arguments[function], sizeof arguments[function], format, list);
    va_end(list);
    pthread_mutex_unlock(&lock);
    if (!initialised && function != FN_cuInit && function != FN_cuDriverGetVersion &&
        function != FN_cuGetErrorName)
        return GP__CUDA_ERROR_NOT_INITIALIZED;
    return (gp__cu_result)setting(names[function], GP__CUDA_SUCCESS);
}

/* ---- the driver and its devices -------------------------------------------------------------- */

static gp__cu_result fake_cuDriverGetVersion(int *version)
{
    CALLED(cuDriverGetVersion, "-");
    *version = (int)setting("version", 13000);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuInit(unsigned int flags)
{
    CALLED(cuInit, "flags=%u", flags);
    initialised = true;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuGetErrorName(gp__cu_result code, const char **name)
{
    CALLED(cuGetErrorName, "code=%u", code);
    static const struct {
        const char *name;
        gp__cu_result value;
    } known[] = {
#define KNOWN(constant, value) {#constant, value},
        GP__CUDA_CONSTANTS(KNOWN)
#undef KNOWN
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strncmp(known[i].name, "CUDA_", 5) == 0 && known[i].value == code) {
            *name = known[i].name;
            return GP__CUDA_SUCCESS;
        }
    }
    return GP__CUDA_ERROR_INVALID_VALUE;
}

static gp__cu_result fake_cuDeviceGetCount(int *count)
{
    CALLED(cuDeviceGetCount, "-");
    *count = (int)setting("devices", 2);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuDeviceGet(gp__cu_device *device, int ordinal)
{
    CALLED(cuDeviceGet, "ordinal=%d", ordinal);
    if (ordinal < 0 || ordinal >= setting("devices", 2))
        return GP__CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuDeviceGetAttribute(int *value, gp__cu_attribute attribute,
                                               gp__cu_device device)
{
    CALLED(cuDeviceGetAttribute, "attribute=%u device=%d", attribute, device);
    switch (attribute) {
    case GP__CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        *value = (int)setting("vmm", 1);
        return GP__CUDA_SUCCESS;
    case GP__CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = (int)setting("posix_fd", 1);
        return GP__CUDA_SUCCESS;
    case GP__CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        *value = (int)setting("rdma", 1);
        return GP__CUDA_SUCCESS;
    case GP__CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        *value = (int)setting("host_node", 3);
        return GP__CUDA_SUCCESS;
    case GP__CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        *value = (int)setting("host_numa", 1);
        return GP__CUDA_SUCCESS;
    default:
        return GP__CUDA_ERROR_INVALID_VALUE;
    }
}

static gp__cu_result fake_cuDevicePrimaryCtxRetain(gp__cu_context *context, gp__cu_device device)
{
    CALLED(cuDevicePrimaryCtxRetain, "device=%d", device);
    contexts[device].device = device;
    *context = &contexts[device];
    return GP__CUDA_SUCCESS;
}

/* ---- contexts -------------------------------------------------------------------------------- */

gp__cu_context current(void)
{
    return depth == 0 ? NULL : stack[depth - 1];
}

static gp__cu_result fake_cuCtxGetCurrent(gp__cu_context *context)
{
    CALLED(cuCtxGetCurrent, "-");
    *context = current();
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuCtxPushCurrent(gp__cu_context context)
{
    CALLED(cuCtxPushCurrent, "context=%p", (void *)context);
    if (context < contexts || context >= contexts + MOST_DEVICES || depth == MOST_DEPTH)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuCtxPopCurrent(gp__cu_context *context)
{
    CALLED(cuCtxPopCurrent, "-");
    if (depth == 0)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuCtxGetDevice(gp__cu_device *device)
{
    CALLED(cuCtxGetDevice, "-");
    if (current() == NULL)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuCtxRecordEvent(gp__cu_context context, gp__cu_event event)
{
    CALLED(cuCtxRecordEvent, "context=%p", (void *)context);
    return event->context == context ? GP__CUDA_SUCCESS : GP__CUDA_ERROR_INVALID_HANDLE;
}

static gp__cu_result fake_cuThreadExchangeStreamCaptureMode(gp__cu_capture_mode *exchanged)
{
    gp__cu_capture_mode previous = mode;
    CALLED(cuThreadExchangeStreamCaptureMode, "mode=%u", *exchanged);
    mode = *exchanged;
    *exchanged = previous;
    return GP__CUDA_SUCCESS;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static gp__cu_result fake_cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    CALLED(cuMemGetInfo, "-");
    if (current() == NULL)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    *free_bytes = (size_t)3 << 30;
    *total_bytes = (size_t)(4 + current()->device) << 30;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemGetAllocationGranularity(size_t *granularity,
                                                        const gp__cu_allocation *properties,
                                                        gp__cu_granularity option)
{
    CALLED(cuMemGetAllocationGranularity, "type=%u option=%u", properties->location.type, option);
    *granularity = (size_t)2 << 20;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemAddressReserve(gp__cu_pointer *va, size_t size, size_t alignment,
                                              gp__cu_pointer hint, unsigned long long flags)
{
    CALLED(cuMemAddressReserve, "size=%zu alignment=%zu hint=%llu flags=%llu", size, alignment,
           hint, flags);
    *va = (gp__cu_pointer)1 << 40;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemAddressFree(gp__cu_pointer va, size_t size)
{
    CALLED(cuMemAddressFree, "va=%llu size=%zu", va, size);
    return GP__CUDA_SUCCESS;
}

static bool rdma_made; /* the latest memory is for network cards */

static gp__cu_result fake_cuMemCreate(gp__cu_memory *memory, size_t size,
                                      const gp__cu_allocation *properties, unsigned long long flags)
{
    const bool rdma = properties->allocFlags.gpuDirectRDMACapable != 0;
    CALLED(cuMemCreate, "size=%zu type=%u handles=%u location=%u id=%d flags=%llu%s", size,
           properties->type, properties->requestedHandleTypes, properties->location.type,
           properties->location.id, flags, rdma ? " rdma" : "");
    if (rdma && setting("rdma_create", 0) != 0)
        return (gp__cu_result)setting("rdma_create", 0);
    rdma_made = rdma;
    *memory = 4711;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemRelease(gp__cu_memory memory)
{
    CALLED(cuMemRelease, "memory=%llu", memory);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemMap(gp__cu_pointer va, size_t size, size_t offset,
                                   gp__cu_memory memory, unsigned long long flags)
{
    CALLED(cuMemMap, "va=%llu size=%zu offset=%zu memory=%llu flags=%llu", va, size, offset, memory,
           flags);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemSetAccess(gp__cu_pointer va, size_t size,
                                         const gp__cu_access *access, size_t count)
{
    const gp__cu_access *last = &access[count - 1];
    CALLED(cuMemSetAccess, "va=%llu size=%zu count=%zu first=%u:%d:%u last=%u:%d:%u", va, size,
           count, access->location.type, access->location.id, access->flags, last->location.type,
           last->location.id, last->flags);
    return rdma_made ? (gp__cu_result)setting("rdma_access", 0) : GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemUnmap(gp__cu_pointer va, size_t size)
{
    CALLED(cuMemUnmap, "va=%llu size=%zu", va, size);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemcpyAsync(gp__cu_pointer to, gp__cu_pointer from, size_t size,
                                        gp__cu_stream stream)
{
    CALLED(cuMemcpyAsync, "to=%llu from=%llu size=%zu stream=%p", to, from, size, (void *)stream);
    return current() == NULL ? GP__CUDA_ERROR_INVALID_CONTEXT : GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuMemsetD8Async(gp__cu_pointer va, unsigned char value, size_t size,
                                          gp__cu_stream stream)
{
    CALLED(cuMemsetD8Async, "va=%llu value=%d size=%zu stream=%p", va, value, size, (void *)stream);
    return current() == NULL ? GP__CUDA_ERROR_INVALID_CONTEXT : GP__CUDA_SUCCESS;
}

/* ---- streams and events ---------------------------------------------------------------------- */

static bool is_default(gp__cu_stream stream)
{
    return (uintptr_t)stream <= GP__CU_STREAM_PER_THREAD;
}

gp__cu_context context_of(gp__cu_stream stream)
{
    return is_default(stream) ? current() : stream->context;
}

static gp__cu_result fake_cuStreamCreate(gp__cu_stream *stream, unsigned int flags)
{
    CALLED(cuStreamCreate, "flags=%u", flags);
    if (current() == NULL)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    struct gp__cu_stream_object *made = streams;
    while (made->context != NULL)
        made++;
    made->context = current();
    made->id = ++stream_count;
    *stream = made;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuStreamDestroy(gp__cu_stream stream)
{
    CALLED(cuStreamDestroy, "stream=%p", (void *)stream);
    stream->context = NULL;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuStreamQuery(gp__cu_stream stream)
{
    CALLED(cuStreamQuery, "stream=%p", (void *)stream);
    return setting("busy", 0) != 0 ? GP__CUDA_ERROR_NOT_READY : GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuStreamGetId(gp__cu_stream stream, unsigned long long *id)
{
    static _Thread_local unsigned long long own_id;
    CALLED(cuStreamGetId, "stream=%p", (void *)stream);
    if (context_of(stream) == NULL)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    /* As the real driver does; there it invalidates the capture as well. */
    if (setting("capture", GP__CU_STREAM_CAPTURE_STATUS_NONE) != GP__CU_STREAM_CAPTURE_STATUS_NONE)
        return GP__CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if ((uintptr_t)stream == GP__CU_STREAM_PER_THREAD) {
        own_id = own_id != 0 ? own_id : ++stream_count;
        *id = own_id;
    } else {
        *id = is_default(stream) ? 7 : stream->id;
    }
    *id += (unsigned long long)setting("reused", 0);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuStreamGetCtx(gp__cu_stream stream, gp__cu_context *context)
{
    CALLED(cuStreamGetCtx, "stream=%p", (void *)stream);
    *context = context_of(stream);
    return *context == NULL ? GP__CUDA_ERROR_INVALID_CONTEXT : GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuStreamIsCapturing(gp__cu_stream stream, gp__cu_capture_status *status)
{
    CALLED(cuStreamIsCapturing, "stream=%p", (void *)stream);
    if (context_of(stream) == NULL)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    *status = (gp__cu_capture_status)setting("capture", GP__CU_STREAM_CAPTURE_STATUS_NONE);
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuEventCreate(gp__cu_event *event, unsigned int flags)
{
    CALLED(cuEventCreate, "flags=%u device=%d", flags, current() ? current()->device : -1);
    if (current() == NULL)
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    struct gp__cu_event_object *made = events;
    while (made->context != NULL)
        made++;
    made->context = current();
    *event = made;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuEventDestroy(gp__cu_event event)
{
    CALLED(cuEventDestroy, "event=%p", (void *)event);
    event->context = NULL;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuEventRecord(gp__cu_event event, gp__cu_stream stream)
{
    CALLED(cuEventRecord, "stream=%p device=%d", (void *)stream,
           current() ? current()->device : -1);
    /* Stricter than the driver: the context must be current too, as cuda.c promises. */
    if (event->context != context_of(stream) || event->context != current())
        return GP__CUDA_ERROR_INVALID_HANDLE;
    return GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuEventQuery(gp__cu_event event)
{
    CALLED(cuEventQuery, "event=%p", (void *)event);
    return setting("busy", 0) != 0 ? GP__CUDA_ERROR_NOT_READY : GP__CUDA_SUCCESS;
}

static gp__cu_result fake_cuStreamWaitEvent(gp__cu_stream stream, gp__cu_event event,
                                            unsigned int flags)
{
    CALLED(cuStreamWaitEvent, "stream=%p flags=%u device=%d", (void *)stream, flags,
           current() ? current()->device : -1);
    /* An event of another context may be waited for; the stream's own must be current. */
    if (event->context == NULL || context_of(stream) != current())
        return GP__CUDA_ERROR_INVALID_HANDLE;
    return GP__CUDA_SUCCESS;
}

/* ---- the one exported function ---------------------------------------------------------------- */

EXPORT gp__cu_result cuGetProcAddress(const char *symbol, void **function, int version,
                                      uint64_t flags);

gp__cu_result cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    static const struct {
        int version;
        void *function;
    } table[] = {
#define ENTRY(name, version, need, parameters) {version, (void *)fake_##name},
        GP__CUDA_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    char absent[80];
    enum function found = find_function(symbol);
    snprintf(absent, sizeof absent, "no:%s", symbol);
    if (flags != GP__CU_GET_PROC_ADDRESS_LEGACY_STREAM)
        return GP__CUDA_ERROR_INVALID_VALUE;
    if (found == FUNCTION_COUNT || setting(absent, 0) != 0 || table[found].version != version ||
        version > setting("version", 13000))
        return GP__CUDA_ERROR_NOT_FOUND;
    *function = table[found].function;
    return GP__CUDA_SUCCESS;
}
