/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of the CUDA Driver API that growpool calls, declared by ourselves: types, constants and
 * functions, each with the CUDA version whose binary interface it follows. Declares nothing else.
 *
 * WHY OUR OWN and not NVIDIA's header wheel as a build requirement: a few dozen declarations are all
 * we use and they have not changed since CUDA 10 to 12; `pip install` from source then works on any
 * Linux machine, offline too, without a dependency in the 100 MB class; and we ask the driver for
 * each function at a fixed version, so a newer header could not change what a call means. The price,
 * that we could copy one wrong, is paid by tests/c/test_cuda_abi.c: it compiles every line of the
 * lists below against the real cuda.h and cudaTypedefs.h.
 */
#ifndef GP__CUDA_ABI_H
#define GP__CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

/* NVIDIA's enums have no negative members, so they are unsigned int to the compiler. */
typedef unsigned int gp__cu_result;
typedef unsigned int gp__cu_attribute;
typedef unsigned int gp__cu_capture_mode;
typedef unsigned int gp__cu_capture_status;
typedef unsigned int gp__cu_granularity;
typedef unsigned int gp__cu_handle_type;
typedef int gp__cu_device;
typedef unsigned long long gp__cu_pointer;
typedef unsigned long long gp__cu_memory;
typedef struct gp__cu_context_object *gp__cu_context;
typedef struct gp__cu_stream_object *gp__cu_stream;
typedef struct gp__cu_event_object *gp__cu_event;
typedef struct gp__cu_graph_object *gp__cu_graph;
typedef struct gp__cu_node_object *gp__cu_node;
typedef struct gp__cu_user_object_object *gp__cu_user_object;

typedef struct gp__cu_location {
    unsigned int type; /* CU_MEM_LOCATION_TYPE_* */
    int id; /* device ordinal, or NUMA node */
} gp__cu_location;

typedef struct gp__cu_allocation {
    unsigned int type; /* CU_MEM_ALLOCATION_TYPE_PINNED */
    unsigned int requestedHandleTypes; /* CU_MEM_HANDLE_TYPE_*; 0: no export */
    gp__cu_location location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} gp__cu_allocation;

typedef struct gp__cu_access {
    gp__cu_location location;
    unsigned int flags; /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
} gp__cu_access;

/* X(NVIDIA's name, value): each becomes GP__<name>. A few results are here for the sake of the tests'
 * stand-in for the driver, which gives them their names. */
#define GP__CUDA_CONSTANTS(X)                                                                      \
    X(CUDA_SUCCESS, 0)                                                                             \
    X(CUDA_ERROR_INVALID_VALUE, 1)                                                                 \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2)                                                                 \
    X(CUDA_ERROR_NOT_INITIALIZED, 3)                                                               \
    X(CUDA_ERROR_DEINITIALIZED, 4)                                                                 \
    X(CUDA_ERROR_STUB_LIBRARY, 34)                                                                 \
    X(CUDA_ERROR_NO_DEVICE, 100)                                                                   \
    X(CUDA_ERROR_INVALID_DEVICE, 101)                                                              \
    X(CUDA_ERROR_INVALID_CONTEXT, 201)                                                             \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, 214)                                                           \
    X(CUDA_ERROR_NVLINK_UNCORRECTABLE, 220)                                                        \
    X(CUDA_ERROR_CONTAINED, 226)                                                                   \
    X(CUDA_ERROR_INVALID_HANDLE, 400)                                                              \
    X(CUDA_ERROR_NOT_FOUND, 500)                                                                   \
    X(CUDA_ERROR_NOT_READY, 600)                                                                   \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                                                             \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)                                                              \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)                                                        \
    X(CUDA_ERROR_ASSERT, 710)                                                                      \
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714)                                                        \
    X(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715)                                                         \
    X(CUDA_ERROR_MISALIGNED_ADDRESS, 716)                                                          \
    X(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717)                                                       \
    X(CUDA_ERROR_INVALID_PC, 718)                                                                  \
    X(CUDA_ERROR_LAUNCH_FAILED, 719)                                                               \
    X(CUDA_ERROR_TENSOR_MEMORY_LEAK, 721)                                                          \
    X(CUDA_ERROR_NOT_SUPPORTED, 801)                                                               \
    X(CUDA_ERROR_MPS_CLIENT_TERMINATED, 810)                                                       \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)                                                  \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901)                                                  \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905)                                                    \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)                                                     \
    X(CUDA_ERROR_CAPTURED_EVENT, 907)                                                              \
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908)                                                 \
    X(CUDA_ERROR_EXTERNAL_DEVICE, 911)                                                             \
    X(CUDA_ERROR_UNKNOWN, 999)                                                                     \
    X(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)                                \
    X(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103)                        \
    X(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 110)                            \
    X(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 134)                                                       \
    X(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 141)                      \
    X(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                                            \
    X(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                                                 \
    X(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                                              \
    X(CU_MEM_LOCATION_TYPE_HOST_NUMA, 3)                                                           \
    X(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                                       \
    X(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0)                                                         \
    X(CU_STREAM_DEFAULT, 0)                                                                        \
    X(CU_STREAM_NON_BLOCKING, 1)                                                                   \
    X(CU_STREAM_CAPTURE_STATUS_NONE, 0)                                                            \
    X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)                                                          \
    X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)                                                     \
    X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                                           \
    X(CU_EVENT_DISABLE_TIMING, 2)                                                                  \
    X(CU_EVENT_WAIT_DEFAULT, 0)                                                                    \
    X(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, 1)                                                        \
    X(CU_GRAPH_USER_OBJECT_MOVE, 1)                                                                \
    X(CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)

#define GP__CUDA_CONSTANT(name, value) GP__##name = (value),
enum gp__cuda_constant { GP__CUDA_CONSTANTS(GP__CUDA_CONSTANT) };

/* Stream handles with a meaning of their own; the header has them as pointers. */
#define GP__CU_STREAM_LEGACY     1
#define GP__CU_STREAM_PER_THREAD 2

/* X(name, CUDA version of its interface, REQUIRED or OPTIONAL, parameters). Everything required is
 * in CUDA 12.0. The version is what cuGetProcAddress is asked for: 12050 means CUDA 12.5. */
#define GP__CUDA_FUNCTIONS(X)                                                                      \
    X(cuDriverGetVersion, 2020, REQUIRED, (int *version))                                          \
    X(cuInit, 2000, REQUIRED, (unsigned int flags))                                                \
    X(cuGetErrorName, 6000, REQUIRED, (gp__cu_result code, const char **name))                     \
    X(cuDeviceGetCount, 2000, REQUIRED, (int *count))                                              \
    X(cuDeviceGet, 2000, REQUIRED, (gp__cu_device * device, int ordinal))                          \
    X(cuDeviceGetAttribute, 2000, REQUIRED,                                                        \
      (int *value, gp__cu_attribute attribute, gp__cu_device device))                              \
    X(cuDeviceCanAccessPeer, 4000, REQUIRED,                                                       \
      (int *can_access, gp__cu_device device, gp__cu_device peer))                                 \
    X(cuDevicePrimaryCtxRetain, 7000, REQUIRED, (gp__cu_context * context, gp__cu_device device))  \
    X(cuCtxGetCurrent, 4000, REQUIRED, (gp__cu_context * context))                                 \
    X(cuCtxPushCurrent, 4000, REQUIRED, (gp__cu_context context))                                  \
    X(cuCtxPopCurrent, 4000, REQUIRED, (gp__cu_context * context))                                 \
    X(cuCtxGetDevice, 2000, REQUIRED, (gp__cu_device * device))                                    \
    X(cuCtxRecordEvent, 12050, OPTIONAL, (gp__cu_context context, gp__cu_event event))             \
    X(cuThreadExchangeStreamCaptureMode, 10010, REQUIRED, (gp__cu_capture_mode * mode))            \
    X(cuMemGetInfo, 3020, REQUIRED, (size_t * free_bytes, size_t * total_bytes))                   \
    X(cuMemGetAllocationGranularity, 10020, REQUIRED,                                              \
      (size_t * granularity, const gp__cu_allocation *properties, gp__cu_granularity option))      \
    X(cuMemAddressReserve, 10020, REQUIRED,                                                        \
      (gp__cu_pointer * va, size_t size, size_t alignment, gp__cu_pointer hint,                    \
       unsigned long long flags))                                                                  \
    X(cuMemAddressFree, 10020, REQUIRED, (gp__cu_pointer va, size_t size))                         \
    X(cuMemCreate, 10020, REQUIRED,                                                                \
      (gp__cu_memory * memory, size_t size, const gp__cu_allocation *properties,                   \
       unsigned long long flags))                                                                  \
    X(cuMemRelease, 10020, REQUIRED, (gp__cu_memory memory))                                       \
    X(cuMemExportToShareableHandle, 10020, REQUIRED,                                               \
      (void *shareable, gp__cu_memory memory, gp__cu_handle_type type, unsigned long long flags))  \
    X(cuMemImportFromShareableHandle, 10020, REQUIRED,                                             \
      (gp__cu_memory * memory, void *shareable, gp__cu_handle_type type))                          \
    X(cuMemGetAllocationPropertiesFromHandle, 10020, REQUIRED,                                     \
      (gp__cu_allocation * properties, gp__cu_memory memory))                                      \
    X(cuMemMap, 10020, REQUIRED,                                                                   \
      (gp__cu_pointer va, size_t size, size_t offset, gp__cu_memory memory,                        \
       unsigned long long flags))                                                                  \
    X(cuMemSetAccess, 10020, REQUIRED,                                                             \
      (gp__cu_pointer va, size_t size, const gp__cu_access *access, size_t count))                 \
    X(cuMemUnmap, 10020, REQUIRED, (gp__cu_pointer va, size_t size))                               \
    X(cuMemcpyAsync, 4000, REQUIRED,                                                               \
      (gp__cu_pointer to, gp__cu_pointer from, size_t size, gp__cu_stream stream))                 \
    X(cuMemsetD8Async, 3020, REQUIRED,                                                             \
      (gp__cu_pointer va, unsigned char value, size_t size, gp__cu_stream stream))                 \
    X(cuStreamCreate, 2000, REQUIRED, (gp__cu_stream * stream, unsigned int flags))                \
    X(cuStreamDestroy, 4000, REQUIRED, (gp__cu_stream stream))                                     \
    X(cuStreamQuery, 2000, REQUIRED, (gp__cu_stream stream))                                       \
    X(cuStreamGetId, 12000, REQUIRED, (gp__cu_stream stream, unsigned long long *id))              \
    X(cuStreamGetCtx, 9020, REQUIRED, (gp__cu_stream stream, gp__cu_context * context))            \
    X(cuStreamIsCapturing, 10000, REQUIRED,                                                        \
      (gp__cu_stream stream, gp__cu_capture_status * status))                                      \
    X(cuStreamGetCaptureInfo, 11030, REQUIRED,                                                     \
      (gp__cu_stream stream, gp__cu_capture_status * status, uint64_t * id, gp__cu_graph * graph,  \
       const gp__cu_node **dependencies, size_t *count))                                           \
    X(cuStreamWaitEvent, 3020, REQUIRED,                                                           \
      (gp__cu_stream stream, gp__cu_event event, unsigned int flags))                              \
    X(cuUserObjectCreate, 11030, REQUIRED,                                                         \
      (gp__cu_user_object * object, void *context, void (*destroy)(void *context),                 \
       unsigned int count, unsigned int flags))                                                    \
    X(cuUserObjectRelease, 11030, REQUIRED, (gp__cu_user_object object, unsigned int count))       \
    X(cuGraphRetainUserObject, 11030, REQUIRED,                                                    \
      (gp__cu_graph graph, gp__cu_user_object object, unsigned int count, unsigned int flags))     \
    X(cuEventCreate, 2000, REQUIRED, (gp__cu_event * event, unsigned int flags))                   \
    X(cuEventDestroy, 4000, REQUIRED, (gp__cu_event event))                                        \
    X(cuEventRecord, 2000, REQUIRED, (gp__cu_event event, gp__cu_stream stream))                   \
    X(cuEventQuery, 2000, REQUIRED, (gp__cu_event event))

/* The one function found by name in the library; it finds all others. This is its CUDA 11.3 form,
 * which every later driver still has, so that an old driver can be named by its version. */
typedef gp__cu_result (*gp__cu_get_proc_address)(const char *symbol, void **function, int version,
                                                 uint64_t flags);

#define GP__CUDA_MEMBER(name, version, need, parameters) gp__cu_result(*name) parameters;
/* The driver's functions. Optional ones are NULL where the driver is too old. */
struct gp__cuda_api {
    GP__CUDA_FUNCTIONS(GP__CUDA_MEMBER)
};

#endif
