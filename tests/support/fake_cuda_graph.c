/* SPDX-License-Identifier: Apache-2.0
 *
 * The captures of the stand-in for libcuda: one graph, which every stream captures into when a test
 * says that streams capture, and the user objects it holds.
 */
#include "tests/support/fake_cuda.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "tests/support/fake_cuda_internal.h"

struct gp__cu_graph_object {
    int unused;
};
struct gp__cu_user_object_object {
    void (*destroy)(void *context); /* NULL: not in use */
    void *context;
    unsigned references;
    bool in_graph;
};

static struct gp__cu_graph_object graph; /* the one that every stream captures into */
static struct gp__cu_user_object_object user_objects[MOST_OBJECTS];

gp__cu_result fake_cuStreamGetCaptureInfo(gp__cu_stream stream, gp__cu_capture_status *status,
                                          uint64_t *id, gp__cu_graph *captured,
                                          const gp__cu_node **dependencies, size_t *count)
{
    CALLED(cuStreamGetCaptureInfo, "stream=%p", (void *)stream);
    if (context_of(stream) == NULL || context_of(stream) != current())
        return GP__CUDA_ERROR_INVALID_CONTEXT;
    *status = (gp__cu_capture_status)setting("capture", GP__CU_STREAM_CAPTURE_STATUS_NONE);
    if (*status != GP__CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return GP__CUDA_SUCCESS;
    *id = (uint64_t)setting("capture_id", 31);
    *captured = &graph;
    return dependencies == NULL && count == NULL ? GP__CUDA_SUCCESS : GP__CUDA_ERROR_INVALID_VALUE;
}

gp__cu_result fake_cuUserObjectCreate(gp__cu_user_object *object, void *context,
                                      void (*destroy)(void *context), unsigned int count,
                                      unsigned int flags)
{
    CALLED(cuUserObjectCreate, "count=%u flags=%u", count, flags);
    if (destroy == NULL || count == 0 || flags != GP__CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return GP__CUDA_ERROR_INVALID_VALUE;
    struct gp__cu_user_object_object *made = user_objects;
    while (made->destroy != NULL)
        made++;
    *made = (struct gp__cu_user_object_object){destroy, context, count, false};
    *object = made;
    return GP__CUDA_SUCCESS;
}

static void drop_reference(struct gp__cu_user_object_object *object)
{
    if (--object->references > 0)
        return;
    void (*destroy)(void *) = object->destroy;
    object->destroy = NULL;
    destroy(object->context);
}

gp__cu_result fake_cuUserObjectRelease(gp__cu_user_object object, unsigned int count)
{
    CALLED(cuUserObjectRelease, "count=%u", count);
    if (object->in_graph || count != 1)
        return GP__CUDA_ERROR_INVALID_VALUE;
    drop_reference(object);
    return GP__CUDA_SUCCESS;
}

gp__cu_result fake_cuGraphRetainUserObject(gp__cu_graph retaining, gp__cu_user_object object,
                                           unsigned int count, unsigned int flags)
{
    CALLED(cuGraphRetainUserObject, "count=%u flags=%u", count, flags);
    if (retaining != &graph || count != 1 || flags != GP__CU_GRAPH_USER_OBJECT_MOVE)
        return GP__CUDA_ERROR_INVALID_VALUE;
    object->in_graph = true;
    return GP__CUDA_SUCCESS;
}

EXPORT unsigned long fake_cuda_drop_graph(void);
EXPORT unsigned long fake_cuda_user_objects(void);

static void *drop_on_thread(void *dropped)
{
    for (size_t i = 0; i < MOST_OBJECTS; i++) {
        if (user_objects[i].destroy != NULL && user_objects[i].in_graph) {
            drop_reference(&user_objects[i]);
            ++*(unsigned long *)dropped;
        }
    }
    return NULL;
}

/* As the driver does, on a thread of its own. */
unsigned long fake_cuda_drop_graph(void)
{
    unsigned long dropped = 0;
    pthread_t thread;
    if (pthread_create(&thread, NULL, drop_on_thread, &dropped) != 0)
        abort();
    pthread_join(thread, NULL);
    return dropped;
}

unsigned long fake_cuda_user_objects(void)
{
    unsigned long live = 0;
    for (size_t i = 0; i < MOST_OBJECTS; i++)
        live += user_objects[i].destroy != NULL;
    return live;
}
