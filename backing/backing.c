/* SPDX-License-Identifier: Apache-2.0
 *
 * The one door to a backing: the contract kept around each call, its answer checked, and a chunk's
 * acceptance and return. It knows no backing from another and keeps no chunk.
 */
#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

#include <assert.h>
#include <stdatomic.h>

struct gp_backing {
    const gp_backing_ops *ops;
    void *context;
    _Atomic uint64_t references;
};

gp_status gp_backing_create(const gp_backing_ops *ops, void *context, gp_backing **out,
                            gp_error *error)
{
    if (ops == NULL || ops->alloc == NULL || ops->free == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT, "a backing needs both alloc and free");
    }
    gp_backing *backing = gp__calloc(1, sizeof *backing);
    if (backing == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to describe a backing");
    }
    backing->ops = ops;
    backing->context = context;
    atomic_init(&backing->references, 1);
    *out = backing;
    return GP_OK;
}

gp_backing *gp_backing_retain(gp_backing *backing)
{
    atomic_fetch_add_explicit(&backing->references, 1, memory_order_relaxed);
    return backing;
}

void gp_backing_release(gp_backing *backing)
{
    if (backing == NULL ||
        atomic_fetch_sub_explicit(&backing->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (backing->ops->destroy != NULL) {
        gp__assert_no_lock();
        backing->ops->destroy(backing->context);
    }
    gp__free(backing);
}

void *gp__backing_context(const gp_backing *backing, const gp_backing_ops *ops)
{
    return backing->ops == ops ? backing->context : NULL;
}

/* ---- the call, with the contract around it ------------------------------------------------- */

static gp_status check_request(const gp_request *request, gp_error *error)
{
    if (request == NULL || request->device == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT, "a backing's request needs a device");
    }
    gp_status status = gp__check_chunk_size(request->device, request->size, error);
    return status != GP_OK ? status : gp__check_process(error);
}

/* A backing may fail without a word; the caller still gets a sentence. */
static gp_status pass_failure(gp_status status, const gp_error *told, const char *function,
                              const gp_request *request, gp_error *error)
{
    if (error == NULL) {
        return status;
    }
    if (told->status == status) {
        *error = *told;
        return status;
    }
    (void)gp_error_set(error, status, "the backing's %s of %zu bytes on %s reported: %s", function,
                       request->size, request->device->name, gp_status_text(status));
    error->size = request->size;
    return status;
}

/* A callback that forked comes back in the child too, where its success is nobody's. */
static gp_status in_this_process(gp_status status, gp_error *told)
{
    return status == GP_OK ? gp__check_fork(told) : status;
}

static gp_status call_alloc(gp_backing *backing, const gp_request *request, gp_chunk **out,
                            gp_error *error)
{
    const struct gp__driver *driver = request->device->driver;
    struct gp__entry entry = {0};
    gp__assert_no_lock();
    gp_status status = driver->enter(request->device, &entry, error);
    if (status != GP_OK) {
        return status;
    }
    gp_error told = {0};
    gp_chunk *chunk = NULL;
    status = backing->ops->alloc(backing->context, request, &chunk, &told);
    driver->leave(request->device, &entry);
    if (status == GP_OK && gp__check_fork(NULL) != GP_OK) {
        gp_chunk_release(chunk);
    }
    status = in_this_process(status, &told);
    if (status != GP_OK) {
        return pass_failure(status, &told, "alloc", request, error);
    }
    *out = chunk;
    return GP_OK;
}

static gp_status call_free(gp_backing *backing, gp_chunk *chunk, const gp_request *request,
                           gp_error *error)
{
    const struct gp__driver *driver = request->device->driver;
    struct gp__entry entry = {0};
    gp__assert_no_lock();
    gp_status status = driver->enter(request->device, &entry, error);
    if (status != GP_OK) {
        return status;
    }
    gp_error told = {0};
    status = backing->ops->free(backing->context, chunk, request, &told);
    driver->leave(request->device, &entry);
    status = in_this_process(status, &told);
    return status == GP_OK ? GP_OK : pass_failure(status, &told, "free", request, error);
}

/* ---- the answer --------------------------------------------------------------------------- */

static gp_status refuse(const gp_chunk *chunk, const gp_request *request, gp_error *error)
{
    gp_status status =
        gp_error_set(error, GP_ERR_CONTRACT_VALUE,
                     "alloc was asked for %zu bytes on %s and answered with chunk %llu of %zu "
                     "bytes on %s, which "
                     "is %s: answer with an idle chunk of that size on that device",
                     request->size, request->device->name, (unsigned long long)gp_chunk_id(chunk),
                     gp_chunk_size(chunk), gp_chunk_device(chunk)->name,
                     gp__chunk_state_text(gp__chunk_state_of(chunk)));
    if (error != NULL) {
        error->size = request->size;
    }
    return status;
}

static gp_status check_answer(const gp_chunk *chunk, const gp_request *request, gp_error *error)
{
    if (chunk == NULL) {
        return gp_error_set(error, GP_ERR_CONTRACT_TYPE,
                            "alloc was asked for %zu bytes on %s, reported success and gave no "
                            "chunk: report out of memory instead",
                            request->size, request->device->name);
    }
    if (gp__chunk_state_of(chunk) != GP__CHUNK_IDLE || gp_chunk_size(chunk) != request->size ||
        gp_chunk_device(chunk) != request->device) {
        return refuse(chunk, request, error);
    }
    return GP_OK;
}

gp_status gp_backing_alloc(gp_backing *backing, const gp_request *request, gp_chunk **out,
                           gp_error *error)
{
    gp_status status = check_request(request, error);
    if (status != GP_OK) {
        return status;
    }
    gp_chunk *chunk = NULL;
    status = call_alloc(backing, request, &chunk, error);
    if (status != GP_OK) {
        return status;
    }
    status = check_answer(chunk, request, error);
    if (status != GP_OK) {
        gp_chunk_release(chunk);
        return status;
    }
    *out = chunk;
    return GP_OK;
}

gp_status gp_backing_free(gp_backing *backing, gp_chunk *chunk, const gp_request *request,
                          gp_error *error)
{
    gp_status status = check_request(request, error);
    if (status != GP_OK) {
        return status;
    }
    if (gp_chunk_is_in_use(chunk)) {
        return gp__state_error(error, GP_REASON_IN_USE,
                               "chunk %llu of %zu bytes is in use by a pool: only the pool can "
                               "give it back",
                               (unsigned long long)gp_chunk_id(chunk), gp_chunk_size(chunk));
    }
    return call_free(backing, chunk, request, error);
}

/* ---- acceptance and return ----------------------------------------------------------------- */

gp_status gp__backing_supply(gp_backing *backing, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    gp_chunk *chunk = NULL;
    gp_status status = gp_backing_alloc(backing, request, &chunk, error);
    if (status != GP_OK) {
        return status;
    }
    if (!gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_SUPPLIED)) {
        status = refuse(chunk, request, error);
        gp_chunk_release(chunk);
        return status;
    }
    *out = chunk;
    return GP_OK;
}

/* The pool is sole owner of an accepted chunk, so none of these steps can lose a race. */
static void move_to_idle(gp_chunk *chunk)
{
    enum gp__chunk_state state = gp__chunk_state_of(chunk);
    bool moved = true;
    if (state != GP__CHUNK_UNMAPPED) {
        moved = gp__chunk_move(chunk, state, GP__CHUNK_UNMAPPED);
    }
    moved = moved && gp__chunk_move(chunk, GP__CHUNK_UNMAPPED, GP__CHUNK_IDLE);
    assert(moved);
    (void)moved;
}

gp_status gp__backing_return(gp_backing *backing, gp_chunk *chunk, const gp_request *request,
                             gp_error *error)
{
    move_to_idle(chunk);
    gp_status status = check_request(request, error);
    if (status == GP_OK) {
        status = call_free(backing, chunk, request, error);
    }
    if (status != GP_OK) {
        /* Losing this race is the edge that the header describes: the chunk went elsewhere. */
        (void)gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_UNRETURNED);
    }
    return status;
}
