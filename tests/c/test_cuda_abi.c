/* SPDX-License-Identifier: Apache-2.0
 *
 * Holds backing/cuda_abi.h against NVIDIA's own headers: every constant, every type and field, every
 * function at the version that we ask the driver for. What can be wrong is found by the compiler, so
 * this file proves its point by being built; it is the one test that includes <cuda.h>.
 */
#include "backing/cuda_abi.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include "tests/support/check.h"

#define SAME_TYPE(ours, theirs)                                                                    \
    _Static_assert(__builtin_types_compatible_p(ours, theirs), #ours " is not " #theirs)
#define SAME_SIZE(ours, theirs)                                                                    \
    _Static_assert(sizeof(ours) == sizeof(theirs) && _Alignof(ours) == _Alignof(theirs),           \
                   #ours " is not laid out as " #theirs)
#define SAME_FIELD(ours, theirs, field)                                                            \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, field) &&                             \
                       sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->field),                 \
                   #ours "." #field " is not where " #theirs " has it")

/* ---- constants ----------------------------------------------------------------------------- */

#define SAME_CONSTANT(name, value) _Static_assert((int)GP__##name == (int)(name), #name);
GP__CUDA_CONSTANTS(SAME_CONSTANT)

/* ---- types --------------------------------------------------------------------------------- */

/* In C an enum is compatible with the integer type that holds it. */
SAME_TYPE(gp__cu_result, CUresult);
SAME_TYPE(gp__cu_attribute, CUdevice_attribute);
SAME_TYPE(gp__cu_capture_mode, CUstreamCaptureMode);
SAME_TYPE(gp__cu_capture_status, CUstreamCaptureStatus);
SAME_TYPE(gp__cu_granularity, CUmemAllocationGranularity_flags);
SAME_TYPE(gp__cu_handle_type, CUmemAllocationHandleType);
SAME_TYPE(gp__cu_device, CUdevice);
SAME_TYPE(gp__cu_pointer, CUdeviceptr);
SAME_TYPE(gp__cu_memory, CUmemGenericAllocationHandle);
SAME_TYPE(gp__cu_get_proc_address, PFN_cuGetProcAddress_v11030);
SAME_SIZE(gp__cu_context, CUcontext);
SAME_SIZE(gp__cu_stream, CUstream);
SAME_SIZE(gp__cu_event, CUevent);
SAME_SIZE(gp__cu_graph, CUgraph);
SAME_SIZE(gp__cu_node, CUgraphNode);
SAME_SIZE(gp__cu_user_object, CUuserObject);

SAME_SIZE(gp__cu_location, CUmemLocation);
SAME_FIELD(gp__cu_location, CUmemLocation, type);
SAME_FIELD(gp__cu_location, CUmemLocation, id);

SAME_SIZE(gp__cu_allocation, CUmemAllocationProp);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, type);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, location);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, allocFlags);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, allocFlags.compressionType);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, allocFlags.usage);
SAME_FIELD(gp__cu_allocation, CUmemAllocationProp, allocFlags.reserved);

SAME_SIZE(gp__cu_access, CUmemAccessDesc);
SAME_FIELD(gp__cu_access, CUmemAccessDesc, location);
SAME_FIELD(gp__cu_access, CUmemAccessDesc, flags);

/* ---- functions ----------------------------------------------------------------------------- */

/* Our own structs and handles were held against theirs above. Under their names our parameter lists
 * must spell the very types that NVIDIA publishes for that version of the function. */
#define gp__cu_context     CUcontext
#define gp__cu_stream      CUstream
#define gp__cu_event       CUevent
#define gp__cu_graph       CUgraph
#define gp__cu_node        CUgraphNode
#define gp__cu_user_object CUuserObject
#define gp__cu_allocation  CUmemAllocationProp
#define gp__cu_access      CUmemAccessDesc

#define SAME_FUNCTION(name, version, need, parameters)                                             \
    _Static_assert(                                                                                \
        __builtin_types_compatible_p(gp__cu_result(*) parameters, PFN_##name##_v##version),        \
        #name " differs in version " #version);
GP__CUDA_FUNCTIONS(SAME_FUNCTION)

/* ---- what only running shows ---------------------------------------------------------------- */

static void special_streams_have_their_numbers(void **state)
{
    (void)state;
    assert_int_equal(GP__CU_STREAM_LEGACY, (uintptr_t)CU_STREAM_LEGACY);
    assert_int_equal(GP__CU_STREAM_PER_THREAD, (uintptr_t)CU_STREAM_PER_THREAD);
}

/* A checker that accepts everything would pass above. */
static void a_wrong_signature_would_be_seen(void **state)
{
    (void)state;
    assert_false(
        __builtin_types_compatible_p(CUresult(*)(CUcontext, size_t), PFN_cuCtxRecordEvent_v12050));
    assert_false(__builtin_types_compatible_p(CUresult(*)(CUdeviceptr, unsigned int),
                                              PFN_cuMemUnmap_v10020));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(special_streams_have_their_numbers),
        cmocka_unit_test(a_wrong_signature_would_be_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
