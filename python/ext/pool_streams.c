/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams as a growpool.Pool meets them, and blocks on them: the way that most calls take, which asks for
 * the stream of last time first, and the one that grows, waits and calls back.
 */
#include "args.h"
#include "errors.h"
#include "gate.h"
#include "pool.h"

#define CUDA_PER_THREAD 2 /* CU_STREAM_PER_THREAD: another stream on every thread */

/* ---- streams that are kept ------------------------------------------------------------------- */

/* The first object seen for a stream lives as long as the pool may own memory on it: *kept (borrowed). */
static int keep_stream(struct pool_object *self, const gp_stream *stream, PyObject *keep,
                       PyObject **kept)
{
    *kept = NULL;
    if (self->adapter == NULL)
        return 0;
    PyObject *id = PyLong_FromUnsignedLongLong(gp_stream_id(stream));
    if (id == NULL)
        return -1;
    *kept = PyDict_SetDefault(self->adapter->streams, id, keep);
    Py_DECREF(id);
    return *kept == NULL ? -1 : 0;
}

int ext_pool_keep_from(struct pool_object *self, const gp_stream *stream,
                       const struct pool_object *other, const gp_stream *known)
{
    if (other->adapter == NULL)
        return 0;
    PyObject *id = PyLong_FromUnsignedLongLong(gp_stream_id(known));
    if (id == NULL)
        return -1;
    PyObject *kept = PyDict_GetItemWithError(other->adapter->streams, id);
    Py_DECREF(id);
    if (kept == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(kept);
    PyObject *unused;
    int result = keep_stream(self, stream, kept, &unused);
    Py_DECREF(kept);
    return result;
}

/* A closed host stream may have work left, and is known until that is done; a CUDA stream is destroyed
 * when it is closed, and its handle may be another's by now. *out stays NULL without work. */
static int closed_stream(struct module_state *state, gp_pool *pool, uintptr_t handle,
                         gp_stream **out)
{
    gp_error error = {0};
    gp_status status = gp_pool_stream(pool, handle, out, &error);
    if (status == GP_OK || status == GP_ERR_ARGUMENT)
        return 0;
    ext_raise(state, status, &error, NULL);
    return -1;
}

/* ---- the stream of last time ----------------------------------------------------------------- */

void ext_pool_forget_recent(struct pool_object *self)
{
    gp_stream *stream = self->recent;
    self->recent = NULL;
    self->recent_object = NULL;
    self->recent_is_kept = false;
    gp_stream_release(stream);
}

static bool is_own_kind(const struct module_state *state, PyObject *object)
{
    return Py_IS_TYPE(object, state->cuda_stream_type) ||
           Py_IS_TYPE(object, state->host_stream_type);
}

/* `kept` is the object that the pool keeps for the stream, `object` the one that named it; both NULL for a
 * handle. A stream of the calling thread alone is asked for anew each time. */
static void remember(struct pool_object *self, gp_stream *stream, PyObject *object, PyObject *kept)
{
    bool host = gp_device_kind_of(self->device) == GP_DEVICE_HOST;
    if ((!host && gp_stream_handle(stream) == CUDA_PER_THREAD) || self->adapter == NULL)
        return;
    if (self->recent != stream) {
        ext_pool_forget_recent(self);
        self->recent = gp_stream_retain(stream);
    }
    self->recent_is_kept = self->recent_is_kept || kept != NULL;
    if (kept != NULL && kept == object && is_own_kind(ext_state((PyObject *)self), object))
        self->recent_object = object; /* lives as long as it is here, and its handle with it */
}

/* Whether the argument, an int, None or the very object of last time, names the stream of last time. Runs
 * nothing. *flags is what gp_pool_try_malloc() needs to know. */
static bool is_recent(struct pool_object *self, PyObject *object, unsigned *flags)
{
    size_t handle = 0;
    uintptr_t closed;
    *flags = GP_BLOCK_BY_HANDLE;
    if (self->recent == NULL)
        return false;
    if (object != NULL && object == self->recent_object) {
        *flags = 0; /* its handle is its own while it is open */
        return !ext_stream_is_closed(ext_state((PyObject *)self), object, &closed);
    }
    if (!ext_is_none(object)) {
        if (!PyLong_CheckExact(object))
            return false;
        handle = PyLong_AsSize_t(object);
        if (handle == (size_t)-1 && PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
    }
    return handle == gp_stream_handle(self->recent);
}

/* ---- streams as arguments -------------------------------------------------------------------- */

static int find_stream(struct pool_object *self, gp_pool *pool, uintptr_t handle, PyObject *keep,
                       gp_stream **out)
{
    gp_error error = {0};
    gp_stream *stream = NULL;
    PyObject *kept = NULL;
    gp_status status = gp_pool_stream(pool, handle, &stream, &error);
    if (status != GP_OK) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return -1;
    }
    if (keep != NULL && keep_stream(self, stream, keep, &kept) < 0) {
        gp_stream_release(stream);
        return -1;
    }
    remember(self, stream, keep, kept);
    *out = stream;
    return 0;
}

/* The pool is asked each time, even for a handle seen before: drivers hand the handle of a destroyed
 * stream to the next one, and only the pool can tell. */
int ext_pool_stream(struct pool_object *self, gp_pool *pool, PyObject *object, unsigned flags,
                    gp_stream **out)
{
    uintptr_t handle;
    PyObject *keep;
    unsigned how;
    struct module_state *state = ext_state((PyObject *)self);
    *out = NULL;
    if (flags != 0 && ext_is_none(object))
        return 0;
    if (is_recent(self, object, &how) && how == 0) {
        *out = gp_stream_retain(self->recent);
        return 0;
    }
    if ((flags & EXT_STREAM_LAST_USE) && ext_stream_is_closed(state, object, &handle))
        return handle != 0 ? closed_stream(state, pool, handle, out) : 0;
    gp_pool_retain(pool); /* asking the object for its handle may run anything */
    int result = ext_stream(state, self->device, object, &handle, &keep);
    if (result == 0)
        result = find_stream(self, pool, handle, keep, out);
    Py_XDECREF(keep);
    gp_pool_release(pool);
    return result;
}

/* ---- blocks --------------------------------------------------------------------------------- */

/* The way that grows, waits and calls back. The end of the call may raise after the block was made (a
 * warning that is an error): then the block goes back. */
static int block_detached(struct pool_object *self, gp_pool *pool, size_t size, gp_stream *stream,
                          unsigned flags, uintptr_t *address)
{
    struct ext_call call;
    gp_pool_retain(pool);
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_status status = gp_pool_malloc(pool, size, stream, flags, address, &call.error);
    int result = ext_call_end(&call, status);
    if (result < 0 && status == GP_OK) {
        PyThreadState *saved = ext_leave_to_free();
        (void)gp_pool_free(pool, *address, stream, flags, NULL);
        ext_return_from_free(saved);
    }
    gp_pool_release(pool);
    return result;
}

/* The pool may have been closed by whoever was asked for the handle. */
static int block_at_last(struct pool_object *self, size_t size, gp_stream *stream, unsigned flags,
                         uintptr_t *address)
{
    gp_error error = {0};
    gp_pool *pool = ext_pool_get(self);
    if (pool == NULL)
        return -1;
    gp_status status = gp_pool_try_malloc(pool, size, stream, flags, address, &error);
    if (status == GP_NOT_READY)
        return block_detached(self, pool, size, stream, flags, address);
    if (status == GP_OK)
        return 0;
    ext_raise(ext_state((PyObject *)self), status, &error, NULL);
    return -1;
}

/* A block on the stream of last time, if it is at hand and the stream still what it was. */
static bool block_on_recent(struct pool_object *self, gp_pool *pool, size_t size, unsigned flags,
                            uintptr_t *address)
{
    return gp_pool_try_malloc(pool, size, self->recent, flags, address, NULL) == GP_OK;
}

/* The stream that an object of another library names: its handle is asked for each time, and what that runs
 * may close the pool. */
static int block_on_object(struct pool_object *self, size_t size, PyObject *object, unsigned flags,
                           uintptr_t *address)
{
    uintptr_t handle;
    PyObject *keep;
    gp_stream *stream = NULL;
    if (ext_stream(ext_state((PyObject *)self), self->device, object, &handle, &keep) < 0)
        return -1;
    gp_pool *pool = ext_pool_get(self);
    int result = pool != NULL ? 0 : -1;
    if (result == 0 && self->recent != NULL && gp_stream_handle(self->recent) == handle &&
        (keep == NULL || self->recent_is_kept) &&
        block_on_recent(self, pool, size, flags | GP_BLOCK_BY_HANDLE, address)) {
        Py_XDECREF(keep);
        return 0;
    }
    if (result == 0)
        result = find_stream(self, pool, handle, keep, &stream);
    Py_XDECREF(keep);
    if (result == 0)
        result = block_at_last(self, size, stream, flags, address);
    gp_stream_release(stream);
    return result;
}

int ext_pool_block(struct pool_object *self, size_t size, PyObject *stream, unsigned flags,
                   uintptr_t *address)
{
    unsigned how;
    gp_pool *pool = ext_pool_get(self);
    if (pool == NULL)
        return -1;
    if (is_recent(self, stream, &how) && block_on_recent(self, pool, size, flags | how, address))
        return 0;
    return block_on_object(self, size, stream, flags, address);
}

bool ext_pool_quick_free(struct pool_object *self, uintptr_t address, PyObject *stream,
                         unsigned flags)
{
    unsigned how = 0;
    if (self->recent == NULL || self->pool == NULL ||
        (!ext_is_none(stream) && !is_recent(self, stream, &how)))
        return false;
    return gp_pool_try_free(self->pool, address, self->recent, flags | how, NULL) == GP_OK;
}
