/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the stand-in for libcuda share: its objects, how a call is counted and what it has
 * to answer. Tests see fake_cuda.h.
 */
#ifndef FAKE_CUDA_INTERNAL_H
#define FAKE_CUDA_INTERNAL_H

#include "backing/cuda_abi.h"

#define EXPORT       __attribute__((visibility("default")))
#define MOST_OBJECTS 64 /* of each kind; more than any test makes */

struct gp__cu_context_object {
    int device;
};
struct gp__cu_stream_object {
    gp__cu_context context; /* NULL: not in use */
    unsigned long long id;
};
struct gp__cu_event_object {
    gp__cu_context context; /* NULL: not in use */
};

enum function {
#define ENUMERATE(name, version, need, parameters) FN_##name,
    GP__CUDA_FUNCTIONS(ENUMERATE) FUNCTION_COUNT
#undef ENUMERATE
};

#pragma GCC visibility push(hidden)
/* Counts the call, keeps its arguments, and says what it has to answer. */
gp__cu_result called(enum function function, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* What a test has set, or `otherwise`. */
long setting(const char *name, long otherwise);
/* The calling thread's context, or NULL; the stream's own, for default streams the thread's. */
gp__cu_context current(void);
gp__cu_context context_of(gp__cu_stream stream);
#pragma GCC visibility pop

#define CALLED(name, ...)                                                                          \
    do {                                                                                           \
        gp__cu_result code_ = called(FN_##name, __VA_ARGS__);                                      \
        if (code_ != GP__CUDA_SUCCESS)                                                             \
            return code_;                                                                          \
    } while (0)

/* fake_cuda_graph.c, for the table in fake_cuda.c. */
gp__cu_result fake_cuStreamGetCaptureInfo(gp__cu_stream stream, gp__cu_capture_status *status,
                                          uint64_t *id, gp__cu_graph *captured,
                                          const gp__cu_node **dependencies, size_t *count);
gp__cu_result fake_cuUserObjectCreate(gp__cu_user_object *object, void *context,
                                      void (*destroy)(void *context), unsigned int count,
                                      unsigned int flags);
gp__cu_result fake_cuUserObjectRelease(gp__cu_user_object object, unsigned int count);
gp__cu_result fake_cuGraphRetainUserObject(gp__cu_graph retaining, gp__cu_user_object object,
                                           unsigned int count, unsigned int flags);
/* fake_cuda_share.c */
gp__cu_result fake_cuDeviceCanAccessPeer(int *can_access, gp__cu_device device, gp__cu_device peer);
gp__cu_result fake_cuMemExportToShareableHandle(void *shareable, gp__cu_memory memory,
                                                gp__cu_handle_type type, unsigned long long flags);
gp__cu_result fake_cuMemImportFromShareableHandle(gp__cu_memory *memory, void *shareable,
                                                  gp__cu_handle_type type);
gp__cu_result fake_cuMemGetAllocationPropertiesFromHandle(gp__cu_allocation *properties,
                                                          gp__cu_memory memory);

#endif
