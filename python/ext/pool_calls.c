/* SPDX-License-Identifier: Apache-2.0
 *
 * What a growpool.Pool does: blocks, trimming, limits. Whatever may wait, grow or call back runs
 * detached from the interpreter, inside an ext_call.
 */
#include "args.h"
#include "buffer.h"
#include "errors.h"
#include "gate.h"
#include "pool.h"
#include "range.h"

/* ---- blocks --------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    malloc_doc,
    "malloc($self, /, size, stream=None)\n--\n\n"
    "A block as a plain address: the fast path.\n\n"
    "Parameters\n----------\n"
    "size : int or str\n    Bytes; 0 gives address 0.\n"
    "stream : stream, optional\n"
    "    Where it is used first: an object with __cuda_stream__, cuda_stream or ptr, a growpool "
    "stream, or\n"
    "    an int. Left out: the device's default stream (on the host: the calling thread).\n\n"
    "Returns\n-------\nint\n    An address, a multiple of 512.\n\n"
    "Raises\n------\n"
    "LimitExceededError\n    The limit leaves no room, even after reclaiming all that is idle.\n"
    "OutOfMemoryError\n    The backing has no memory.\n"
    "AddressSpaceError\n    No addresses are left.\n"
    "CaptureError\n    The stream's capture was invalidated.\n"
    "PoolStateError\n    The pool is closed, forked, poisoned, or the process exits.\n"
    "TypeError, ValueError, OverflowError\n    A wrong argument, or a wrong answer of alloc.\n"
    "RuntimeError\n    Called by the pool's own callback and the pool would have to grow.\n"
    "BaseException\n    Whatever alloc or a signal handler raised; or free, if it is no Exception, "
    "when idle\n    chunks went back to make room. No block is lost.\n\n"
    "Warns\n-----\nReleaseWarning\n    free raised an Exception; the chunk is in `unreturned`.\n\n"
    "Notes\n-----\nAny thread. Memory of this stream is reused at once and without waiting.");

static PyObject *pool_malloc(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
    static const char *const names[] = {"size", "stream", NULL};
    static const struct ext_signature signature = {"malloc", names, 1, 2};
    PyObject *given[2];
    size_t size;
    uintptr_t address;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_size(given[0], "size", &size) < 0 ||
        ext_pool_block(self, size, given[1], 0, &address) < 0)
        return NULL;
    return PyLong_FromSize_t(address);
}

PyDoc_STRVAR(free_doc,
             "free($self, /, ptr, stream=None)\n--\n\n"
             "Give back a block made by malloc().\n\n"
             "Parameters\n----------\n"
             "ptr : int\n    Its address; 0 does nothing.\n"
             "stream : stream, optional\n"
             "    Where its last use was enqueued; the stream it was allocated on if left out.\n\n"
             "Raises\n------\n"
             "ValueError\n    Not a live block of this pool, or it belongs to a Buffer: close that "
             "instead.\n"
             "TypeError\n    Not an int, or not a stream of the pool's device.\n"
             "PoolStateError\n    The pool is closed or forked.\n\n"
             "Notes\n-----\nAny thread, callbacks included. Never waits.");

static PyObject *pool_free(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    static const char *const names[] = {"ptr", "stream", NULL};
    static const struct ext_signature signature = {"free", names, 1, 2};
    PyObject *given[2];
    uintptr_t address;
    gp_stream *stream = NULL;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_address(given[0], "ptr", &address) < 0)
        return NULL;
    if (ext_gate_has_ended() || ext_pool_quick_free(self, address, given[1], 0))
        Py_RETURN_NONE;
    if (ext_pool_readable(self) == NULL ||
        ext_pool_stream(self, self->pool, given[1], EXT_STREAM_LAST_USE, &stream) < 0)
        return NULL;
    gp_error error = {0};
    gp_status status = GP_ERR_STATE;
    gp_pool *pool = ext_pool_readable(self);
    if (pool != NULL) {
        gp_pool_retain(pool);
        PyThreadState *saved = ext_leave_to_free();
        status = gp_pool_free(pool, address, stream, 0, &error);
        gp_pool_release(pool);
        ext_return_from_free(saved);
    }
    gp_stream_release(stream);
    if (status == GP_OK)
        Py_RETURN_NONE;
    if (pool != NULL)
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
    return NULL;
}

PyDoc_STRVAR(allocate_doc, "allocate($self, /, size, stream=None)\n--\n\n"
                           "A block as a Buffer, which gives it back when it goes.\n\n"
                           "Parameters, errors and thread rule are those of malloc(). Size 0 gives "
                           "a valid empty buffer.\n\n"
                           "Returns\n-------\nBuffer");

static PyObject *pool_allocate(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
    static const char *const names[] = {"size", "stream", NULL};
    static const struct ext_signature signature = {"allocate", names, 1, 2};
    PyObject *given[2];
    size_t size;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_size(given[0], "size", &size) < 0)
        return NULL;
    return ext_buffer_allocate(self, size, given[1]);
}

PyDoc_STRVAR(growable_doc,
             "growable($self, /, max_size, *, stream=None)\n--\n\n"
             "Memory that grows and shrinks in place: empty at first, see Growable.resize().\n\n"
             "Parameters\n----------\n"
             "max_size : int or str\n    Bytes of addresses to reserve; they cost no memory.\n"
             "stream : stream, optional\n    Its own stream, as of malloc().\n\n"
             "Returns\n-------\nGrowable\n\n"
             "Raises\n------\n"
             "AddressSpaceError\n    There are not so many addresses.\n"
             "PoolStateError\n    The pool is closed, forked, poisoned, or the process exits.\n"
             "TypeError, ValueError, OverflowError\n    A wrong argument.\n\n"
             "Notes\n-----\nAny thread.");

static PyObject *pool_growable(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
    static const char *const names[] = {"max_size", "stream", NULL};
    static const struct ext_signature signature = {"growable", names, 1, 1};
    PyObject *given[2];
    size_t size;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_size(given[0], "max_size", &size) < 0)
        return NULL;
    return ext_growable_new(self, size, given[1]);
}

PyDoc_STRVAR(range_doc, "range($self, /, size, *, stream=None)\n--\n\n"
                        "Addresses of which any part can have memory; see Range.commit().\n\n"
                        "Parameters\n----------\n"
                        "size : int or str\n    Bytes of addresses to reserve, rounded up to "
                        "pages; they cost no memory.\n"
                        "stream : stream, optional\n    Its own stream, as of malloc().\n\n"
                        "Returns\n-------\nRange\n\n"
                        "Errors and thread rule are those of growable().");

static PyObject *pool_range(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
    static const char *const names[] = {"size", "stream", NULL};
    static const struct ext_signature signature = {"range", names, 1, 1};
    PyObject *given[2];
    size_t size;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_size(given[0], "size", &size) < 0)
        return NULL;
    return ext_range_new(self, size, given[1]);
}

/* ---- shrinking ------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    trim_doc,
    "trim($self, /, min_bytes_to_keep=0, wait=True)\n--\n\n"
    "Give idle chunks back.\n\n"
    "Parameters\n----------\n"
    "min_bytes_to_keep : int or str, optional\n    Physical bytes that stay mapped at least.\n"
    "wait : bool, optional\n"
    "    True: wait for the streams that own the idle memory, and return when it was given back.\n"
    "    False: set it retiring and return; it goes back in the background.\n\n"
    "Returns\n-------\nint\n    Bytes given back, or with wait=False bytes set retiring.\n\n"
    "Raises\n------\n"
    "CaptureError\n    A stream that would have to be waited for is being captured; nothing "
    "changed.\n"
    "RuntimeError\n    Called by the pool's own callback.\n"
    "PoolStateError\n    The pool is closed or forked.\n"
    "BaseException\n    What free raised, if it is no Exception, or what a signal handler "
    "raised.\n\n"
    "Warns\n-----\nReleaseWarning\n    free raised an Exception; the chunk is in `unreturned`.\n\n"
    "Notes\n-----\nAny thread. Notices signals while it waits; what was retiring then stays so.");

static PyObject *pool_trim(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    static const char *const names[] = {"min_bytes_to_keep", "wait", NULL};
    static const struct ext_signature signature = {"trim", names, 0, 2};
    PyObject *given[2];
    size_t keep, released = 0;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_optional_size(given[0], "min_bytes_to_keep", 0, &keep) < 0)
        return NULL;
    int wait = given[1] != NULL ? PyObject_IsTrue(given[1]) : 1;
    gp_pool *pool = wait < 0 ? NULL : ext_pool_get(self);
    if (pool == NULL)
        return NULL;
    struct ext_call call;
    gp_pool_retain(pool);
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_status status = gp_pool_trim(pool, keep, wait ? 0 : GP_TRIM_NO_WAIT, &released, &call.error);
    gp_pool_release(pool);
    return ext_call_end(&call, status) < 0 ? NULL : PyLong_FromSize_t(released);
}

PyDoc_STRVAR(drain_doc, "drain($self, /)\n--\n\n"
                        "Wait until no chunk is retiring or on its way back.\n\n"
                        "Raises and warns as trim() does.\n\n"
                        "Notes\n-----\nAny thread. Notices signals while it waits.");

static PyObject *pool_drain(struct pool_object *self, PyObject *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_get(self);
    if (pool == NULL)
        return NULL;
    struct ext_call call;
    gp_pool_retain(pool);
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_status status = gp_pool_drain(pool, &call.error);
    gp_pool_release(pool);
    if (ext_call_end(&call, status) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(return_unreturned_doc,
             "return_unreturned($self, /)\n--\n\n"
             "Call free again for the chunks in `unreturned`.\n\n"
             "Returns\n-------\nint\n    Bytes that went back.\n\n"
             "Raises and warns as trim() does. Works on a closed pool too.\n\n"
             "Notes\n-----\nAny thread.");

static PyObject *pool_return_unreturned(struct pool_object *self, PyObject *unused)
{
    (void)unused;
    size_t returned = 0;
    if (ext_pool_readable(self) == NULL)
        return NULL;
    gp_pool *pool = gp_pool_retain(self->pool);
    struct ext_call call;
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_status status = gp_pool_return_unreturned(pool, &returned, &call.error);
    gp_pool_release(pool);
    return ext_call_end(&call, status) < 0 ? NULL : PyLong_FromSize_t(returned);
}

PyDoc_STRVAR(set_limit_doc, "set_limit($self, limit, /)\n--\n\n"
                            "Change the limit while the pool lives.\n\n"
                            "Parameters\n----------\n"
                            "limit : int, str or None\n"
                            "    Physical bytes; None for no limit. Below the present use is "
                            "legal: growth stops, idle chunks over\n"
                            "    the limit are set retiring, and the rest is reported.\n\n"
                            "Returns\n-------\nLimitResult\n\n"
                            "Raises\n------\n"
                            "TypeError, ValueError, OverflowError\n    A wrong limit.\n"
                            "PoolStateError\n    The pool is closed or forked.\n\n"
                            "Notes\n-----\nAny thread. Does not wait for streams.");

static PyObject *pool_set_limit(struct pool_object *self, PyObject *limit_object)
{
    size_t limit;
    gp_pool *pool;
    if (ext_optional_size(limit_object, "limit", GP_NO_LIMIT, &limit) < 0 ||
        (pool = ext_pool_get(self)) == NULL)
        return NULL;
    struct module_state *state = ext_state((PyObject *)self);
    gp_limit_result result = {0};
    struct ext_call call;
    gp_pool_retain(pool);
    ext_call_begin(&call, state, 0);
    gp_status status = gp_pool_set_limit(pool, limit, &result, &call.error);
    gp_pool_release(pool);
    return ext_call_end(&call, status) < 0 ? NULL : ext_limit_result(state, &result);
}

PyDoc_STRVAR(forget_stream_doc,
             "forget_stream($self, stream, /)\n--\n\n"
             "Wait for a stream's work and let go of it. Call it before a stream is destroyed.\n\n"
             "Parameters\n----------\n"
             "stream : stream or None\n    None is the device's default stream.\n\n"
             "Raises\n------\n"
             "TypeError, ValueError\n    Not a stream of the pool's device.\n"
             "CaptureError\n    The stream's capture was invalidated.\n"
             "PoolStateError\n    The pool is closed or forked.\n\n"
             "Notes\n-----\n"
             "Any thread. Notices signals while it waits. Blocks allocated on the stream stay "
             "alive; free them with\n"
             "another stream if they are used on one.");

/* Lets the object go that was kept for the stream. */
static int drop_stream(struct pool_object *self, uint64_t stream_id)
{
    if (self->adapter == NULL)
        return 0;
    PyObject *id = PyLong_FromUnsignedLongLong(stream_id);
    if (id == NULL)
        return -1;
    ext_pool_forget_recent(self);
    PyObject *streams = Py_NewRef(self->adapter->streams);
    int result = PyDict_Contains(streams, id);
    if (result > 0)
        result = PyDict_DelItem(streams, id);
    Py_DECREF(streams);
    Py_DECREF(id);
    return result;
}

static PyObject *pool_forget_stream(struct pool_object *self, PyObject *stream_object)
{
    gp_stream *stream = NULL;
    gp_pool *pool = ext_pool_get(self);
    uintptr_t closed;
    if (pool == NULL)
        return NULL;
    /* None is a stream here, the default one. */
    unsigned flags = ext_stream_is_closed(ext_state((PyObject *)self), stream_object, &closed)
                         ? EXT_STREAM_LAST_USE
                         : 0;
    if (ext_pool_stream(self, pool, stream_object, flags, &stream) < 0)
        return NULL;
    if (stream == NULL) { /* closed, and without work */
        if (closed != 0 && drop_stream(self, closed) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    uint64_t id = gp_stream_id(stream);
    uintptr_t handle = gp_stream_handle(stream);
    gp_stream_release(stream);
    pool = ext_pool_get(self);
    if (pool == NULL)
        return NULL;
    struct ext_call call;
    gp_pool_retain(pool);
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_status status = gp_pool_forget_stream(pool, handle, &call.error);
    gp_pool_release(pool);
    if (ext_call_end(&call, status) < 0 || drop_stream(self, id) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reset_peak_stats_doc, "reset_peak_stats($self, /)\n--\n\n"
                                   "Set the peaks in `stats` to the present figures.\n\n"
                                   "Notes\n-----\nAny thread.");

static PyObject *pool_reset_peak_stats(struct pool_object *self, PyObject *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_get(self);
    if (pool == NULL)
        return NULL;
    gp_pool_reset_peak_stats(pool);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    close_doc,
    "close($self, /)\n--\n\n"
    "Close every object of the pool, wait for all streams that own memory, and give every chunk "
    "back.\n\n"
    "A second call does nothing. When it returns, no callback of the pool runs any more.\n\n"
    "Raises\n------\n"
    "BufferError\n    Arrays or memoryviews on its memory are alive; nothing changed.\n"
    "CaptureError\n    A stream that would have to be waited for is being captured; nothing "
    "changed.\n"
    "RuntimeError\n    Called by the pool's own callback.\n"
    "PoolStateError\n    This process is a fork of the one that made the pool.\n"
    "BaseException\n    What free raised, if it is no Exception, or what a signal handler raised: "
    "the pool\n"
    "    takes no more work then; call close() again to go on.\n\n"
    "Warns\n-----\nReleaseWarning\n    free raised an Exception; the chunk is in `unreturned`.\n\n"
    "Notes\n-----\nAny thread. Notices signals while it waits.");

PyDoc_STRVAR(
    snapshot_doc,
    "snapshot($self, /)\n--\n\n"
    "A copy of the pool's map, in the order of addresses.\n\n"
    "Returns\n-------\n"
    "dict\n"
    "    'segments': list of {'address', 'bytes', 'spans'}; a span is {'address', 'bytes', "
    "'state',\n"
    "    'stream', 'owners'}, with state one of 'used', 'free', 'claimed', 'retiring', 'hole',\n"
    "    'abandoned', 'held' (free, for the capture it belongs to), the id of the stream it was\n"
    "    allocated on, and how many owners may still use it.\n"
    "    'chunks': list of {'address', 'bytes', 'id', 'retiring'}.\n\n"
    "Raises\n------\nPoolStateError\n    The pool was forked. A closed pool has an empty map.\n\n"
    "Notes\n-----\nAny thread.");

#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

PyMethodDef ext_pool_call_methods[] = {
    {"malloc", METHOD(pool_malloc), METH_FASTCALL | METH_KEYWORDS, malloc_doc},
    {"free", METHOD(pool_free), METH_FASTCALL | METH_KEYWORDS, free_doc},
    {"allocate", METHOD(pool_allocate), METH_FASTCALL | METH_KEYWORDS, allocate_doc},
    {"growable", METHOD(pool_growable), METH_FASTCALL | METH_KEYWORDS, growable_doc},
    {"range", METHOD(pool_range), METH_FASTCALL | METH_KEYWORDS, range_doc},
    {"trim", METHOD(pool_trim), METH_FASTCALL | METH_KEYWORDS, trim_doc},
    {"drain", METHOD(pool_drain), METH_NOARGS, drain_doc},
    {"set_limit", METHOD(pool_set_limit), METH_O, set_limit_doc},
    {"forget_stream", METHOD(pool_forget_stream), METH_O, forget_stream_doc},
    {"return_unreturned", METHOD(pool_return_unreturned), METH_NOARGS, return_unreturned_doc},
    {"reset_peak_stats", METHOD(pool_reset_peak_stats), METH_NOARGS, reset_peak_stats_doc},
    {"snapshot", METHOD(ext_pool_snapshot), METH_NOARGS, snapshot_doc},
    {"close", METHOD(ext_pool_close), METH_NOARGS, close_doc},
    {"__enter__", METHOD(ext_pool_enter), METH_NOARGS, EXT_ENTER_DOC},
    {"__exit__", METHOD(ext_pool_exit), METH_FASTCALL, EXT_EXIT_DOC},
    {NULL, NULL, 0, NULL},
};
