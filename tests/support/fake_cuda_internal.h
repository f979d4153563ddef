/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the stand-in for libcuda.so.1 share: settings, the frame of a call, and the functions
 * that fake_cuda_share.c has.
 */
#ifndef FAKE_CUDA_INTERNAL_H
#define FAKE_CUDA_INTERNAL_H

#include "backing/cuda_abi.h"
#include "tests/support/fake_cuda.h"

enum function {
#define ENUMERATE(name, version, need, parameters) FN_##name,
    GP__CUDA_FUNCTIONS(ENUMERATE) FUNCTION_COUNT
#undef ENUMERATE
};

/* The setting, or `otherwise`. */
long fake_setting(const char *name, long otherwise);
/* Counts the call, keeps its arguments, and says what it has to answer. */
gp__cu_result fake_called(enum function function, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#define CALLED(name, ...)                                                                          \
    do {                                                                                           \
        gp__cu_result code_ = fake_called(FN_##name, __VA_ARGS__);                                 \
        if (code_ != GP__CUDA_SUCCESS)                                                             \
            return code_;                                                                          \
    } while (0)

/* fake_cuda_share.c */
gp__cu_result fake_cuDeviceCanAccessPeer(int *can_access, gp__cu_device device, gp__cu_device peer);
gp__cu_result fake_cuMemExportToShareableHandle(void *shareable, gp__cu_memory memory,
                                                gp__cu_handle_type type, unsigned long long flags);
gp__cu_result fake_cuMemImportFromShareableHandle(gp__cu_memory *memory, void *shareable,
                                                  gp__cu_handle_type type);
gp__cu_result fake_cuMemGetAllocationPropertiesFromHandle(gp__cu_allocation *properties,
                                                          gp__cu_memory memory);

#endif
