/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Range: addresses of which parts are committed and decommitted; and what a Growable has of it.
 */
#include "range.h"

#include "args.h"
#include "errors.h"
#include "gate.h"

/* ---- what Growable shares -------------------------------------------------------------------- */

static int create(struct memory_object *self, gp_pool *pool, size_t bytes, gp_stream *stream)
{
    gp_pool_retain(pool);
    struct ext_call call;
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_range *range = NULL;
    gp_status status = gp_range_create(pool, bytes, stream, &range, &call.error);
    gp_pool_release(pool);
    int result = ext_call_end(&call, status);
    self->range = range; /* also when only a warning was raised: it goes with the object */
    if (result < 0)
        return -1;
    self->address = gp_range_address(range);
    self->size = gp_range_max_bytes(range);
    self->closed = false;
    return 0;
}

struct memory_object *ext_range_make(struct pool_object *pool, PyTypeObject *type,
                                     enum ext_memory_kind kind, size_t bytes,
                                     PyObject *stream_object)
{
    gp_stream *stream = NULL;
    gp_pool *core = ext_pool_get(pool);
    if (core == NULL || ext_pool_stream(pool, core, stream_object, 0, &stream) < 0)
        return NULL;
    struct memory_object *self = ext_memory_new(pool, type, kind);
    core = self != NULL ? ext_pool_get(pool) : NULL; /* the stream's object may have closed it */
    if (self != NULL && (core == NULL || create(self, core, bytes, stream) < 0)) {
        PyObject *raised = py_take_exception();
        Py_CLEAR(self);
        py_raise_exception(raised);
    }
    gp_stream_release(stream);
    return self;
}

int ext_change_begin(struct memory_object *self, PyObject *stream, unsigned stream_flags,
                     PyObject *wait_object, struct ext_change *change)
{
    int wait = wait_object != NULL ? PyObject_IsTrue(wait_object) : 1;
    change->stream = NULL;
    change->flags = wait ? 0 : GP_TRIM_NO_WAIT;
    if (wait < 0 || ext_memory_check_open(self) < 0 ||
        ext_pool_stream(self->pool, self->pool->pool, stream, stream_flags, &change->stream) < 0)
        return -1;
    if (ext_memory_check_open(self) < 0) { /* the stream's object may have closed it */
        gp_stream_release(change->stream);
        return -1;
    }
    ext_call_begin(&change->call, ext_state((PyObject *)self), 0);
    return 0;
}

int ext_change_end(struct ext_change *change, gp_status status)
{
    gp_stream_release(change->stream);
    return ext_call_end(&change->call, status);
}

PyObject *ext_range_get_physical_bytes(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->range != NULL ? gp_range_physical_bytes(self->range) : 0);
}

PyObject *ext_range_get_granularity(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->range != NULL ? gp_range_granularity(self->range) : 0);
}

/* ---- making --------------------------------------------------------------------------------- */

PyObject *ext_range_new(struct pool_object *pool, size_t size, PyObject *stream)
{
    PyTypeObject *type = ext_state((PyObject *)pool)->range_type;
    return (PyObject *)ext_range_make(pool, type, EXT_RANGE, size, stream);
}

/* ---- intervals ------------------------------------------------------------------------------- */

gp_interval *ext_range_committed(const struct memory_object *self, size_t *count)
{
    size_t capacity = 16;
    gp_interval *intervals = NULL;
    for (;;) {
        gp_interval *more = PyMem_Realloc(intervals, capacity * sizeof(*intervals));
        if (more == NULL) {
            PyMem_Free(intervals);
            PyErr_NoMemory();
            return NULL;
        }
        intervals = more;
        *count = self->range != NULL ? gp_range_committed(self->range, intervals, capacity) : 0;
        if (*count <= capacity)
            return intervals;
        capacity = *count + *count / 8; /* another thread may commit more meanwhile */
    }
}

/* offset and size of one interval; the most common form, ints, makes no object. */
static int parse_sizes(PyObject *offset, PyObject *size, gp_interval *out)
{
    if (ext_size(offset, "offset", &out->offset) < 0)
        return -1;
    return ext_size(size, "size", &out->bytes);
}

/* One item of an iterable of pairs. */
static int parse_item(PyObject *item, Py_ssize_t index, gp_interval *out)
{
    if (PyTuple_CheckExact(item) && PyTuple_GET_SIZE(item) == 2)
        return parse_sizes(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1), out);
    const bool iterable = Py_TYPE(item)->tp_iter != NULL || PySequence_Check(item);
    PyObject *pair = NULL;
    if (iterable && !PyUnicode_Check(item) && !PyBytes_Check(item)) {
        pair = PySequence_Tuple(item);
        if (pair == NULL)
            return -1;
    }
    if (pair == NULL || PyTuple_GET_SIZE(pair) != 2) {
        /* Without %R: an int of thousands of digits cannot be shown. */
        PyErr_Format(PyExc_TypeError, "intervals[%zd] must be a pair (offset, size), not %.200s%s",
                     index, Py_TYPE(item)->tp_name, pair != NULL ? " of another length" : "");
        Py_XDECREF(pair);
        return -1;
    }
    int result = parse_sizes(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), out);
    Py_DECREF(pair);
    return result;
}

/* The whole list, before anything happens; memory of PyMem_Malloc(). A tuple of its own, because reading
 * one item may run code that changes the list. */
static gp_interval *parse_intervals(PyObject *object, size_t *count)
{
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError) && Py_TYPE(object)->tp_iter == NULL &&
            !PySequence_Check(object))
            PyErr_Format(PyExc_TypeError,
                         "intervals must be an iterable of pairs (offset, size), not %.200s",
                         Py_TYPE(object)->tp_name);
        return NULL;
    }
    Py_ssize_t length = PyTuple_GET_SIZE(items);
    gp_interval *intervals = PyMem_Calloc((size_t)length + 1, sizeof(*intervals));
    if (intervals == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; intervals != NULL && i < length; i++) {
        if (parse_item(PyTuple_GET_ITEM(items, i), i, &intervals[i]) < 0) {
            PyMem_Free(intervals);
            intervals = NULL;
        }
    }
    Py_DECREF(items);
    *count = (size_t)length;
    return intervals;
}

/* ---- committing ------------------------------------------------------------------------------ */

static PyObject *commit(struct memory_object *self, const gp_interval *intervals, size_t count,
                        PyObject *stream)
{
    struct ext_change change;
    size_t added = 0;
    if (ext_change_begin(self, stream, EXT_STREAM_OPTIONAL, NULL, &change) < 0)
        return NULL;
    gp_status status =
        gp_range_commit(self->range, intervals, count, change.stream, &added, &change.call.error);
    return ext_change_end(&change, status) < 0 ? NULL : PyLong_FromSize_t(added);
}

static PyObject *decommit(struct memory_object *self, const gp_interval *intervals, size_t count,
                          PyObject *stream, PyObject *wait)
{
    struct ext_change change;
    gp_release_result result = {0, 0};
    if (ext_change_begin(self, stream, EXT_STREAM_LAST_USE, wait, &change) < 0)
        return NULL;
    gp_status status = gp_range_decommit(self->range, intervals, count, change.stream, change.flags,
                                         &result, &change.call.error);
    if (ext_change_end(&change, status) < 0)
        return NULL;
    return ext_release_result(ext_state((PyObject *)self), &result);
}

#define COMMIT_ERRORS                                                                              \
    "Returns\n-------\nint\n    Bytes that were not committed before.\n\n"                         \
    "Raises\n------\n"                                                                             \
    "ValueError\n    Not in whole pages (see granularity), or behind the end.\n"                   \
    "LimitExceededError, OutOfMemoryError\n    There is no memory for all of it.\n"                \
    "PoolStateError\n    It is closed; or another thread changes a part of it now (reason "        \
    "'busy').\n"                                                                                   \
    "TypeError, OverflowError\n    A wrong argument.\n"                                            \
    "RuntimeError\n    Called by the pool's own callback.\n"                                       \
    "BaseException\n    Whatever alloc or a signal handler raised. In all these cases nothing "    \
    "changed. What\n    free raised, if it is no Exception, comes after the rest was done: "       \
    "`committed` tells.\n\n"                                                                       \
    "Warns\n-----\nReleaseWarning\n    free raised an Exception when idle chunks, or those of a "  \
    "growth that\n    failed, went back; the chunk is in Pool.unreturned.\n\n"                     \
    "Notes\n-----\n"                                                                               \
    "Any thread. May wait for streams that used memory which is still mapped there; notices "      \
    "signals."

PyDoc_STRVAR(
    commit_doc,
    "commit($self, /, offset, size, stream=None)\n--\n\n"
    "Give a part of the range memory. Pages that are committed stay as they are, contents and "
    "all;\n"
    "what new ones contain is undefined. All or nothing.\n\n"
    "Parameters\n----------\n"
    "offset, size : int or str\n    Bytes, both multiples of the granularity.\n"
    "stream : stream, optional\n"
    "    Where the part is used first; it becomes an owner. The range's own stream if left "
    "out.\n\n" COMMIT_ERRORS);

static PyObject *range_commit(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
    static const char *const names[] = {"offset", "size", "stream", NULL};
    static const struct ext_signature signature = {"commit", names, 2, 3};
    PyObject *given[3];
    gp_interval interval;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        parse_sizes(given[0], given[1], &interval) < 0)
        return NULL;
    return commit(self, &interval, 1, given[2]);
}

PyDoc_STRVAR(commit_many_doc,
             "commit_many($self, /, intervals, stream=None)\n--\n\n"
             "commit() for many parts at once, all or nothing.\n\n"
             "Parameters\n----------\n"
             "intervals : iterable of (offset, size)\n"
             "    Read to its end before anything happens. In any order; parts may overlap.\n"
             "stream : stream, optional\n    As of commit().\n\n" COMMIT_ERRORS);

static PyObject *range_commit_many(struct memory_object *self, PyObject *const *args,
                                   Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"intervals", "stream", NULL};
    static const struct ext_signature signature = {"commit_many", names, 1, 2};
    PyObject *given[2];
    size_t count;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0)
        return NULL;
    gp_interval *intervals = parse_intervals(given[0], &count);
    if (intervals == NULL)
        return NULL;
    PyObject *result = commit(self, intervals, count, given[1]);
    PyMem_Free(intervals);
    return result;
}

#define DECOMMIT_ERRORS                                                                            \
    "wait : bool, optional\n"                                                                      \
    "    True: wait for the streams that own the memory, and return when its chunks were given\n"  \
    "    back. False: set them retiring and return; they go back in the background.\n\n"           \
    "Returns\n-------\nReleaseResult\n\n"                                                          \
    "Raises\n------\n"                                                                             \
    "ValueError\n    Not in whole pages (see granularity), or behind the end.\n"                   \
    "BufferError\n    A view or an export uses a part of it; nothing changed.\n"                   \
    "CaptureError\n    A stream that would have to be waited for is being captured; nothing "      \
    "changed.\n"                                                                                   \
    "PoolStateError\n    It is closed; or another thread changes a part of it now (reason "        \
    "'busy').\n"                                                                                   \
    "TypeError, OverflowError\n    A wrong argument.\n"                                            \
    "RuntimeError\n    Called by the pool's own callback.\n"                                       \
    "BaseException\n    What free raised, if it is no Exception, or what a signal handler "        \
    "raised: the\n    part is decommitted, and its chunks go back later.\n\n"                      \
    "Warns\n-----\nReleaseWarning\n    free raised an Exception; the chunk is in "                 \
    "Pool.unreturned.\n\n"                                                                         \
    "Notes\n-----\nAny thread. Notices signals while it waits."

PyDoc_STRVAR(
    decommit_doc,
    "decommit($self, /, offset, size, stream=None, *, wait=True)\n--\n\n"
    "Take the memory of a part away; its contents are lost. Pages that are not committed stay so.\n"
    "A chunk is given back whole: one that other committed pages share stays mapped, is counted "
    "as\n"
    "kept, and goes with the last of them.\n\n"
    "Parameters\n----------\n"
    "offset, size : int or str\n    Bytes, both multiples of the granularity.\n"
    "stream : stream, optional\n"
    "    Where the last use of the part was enqueued. The range's own stream if left "
    "out.\n" DECOMMIT_ERRORS);

static PyObject *range_decommit(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *kwnames)
{
    static const char *const names[] = {"offset", "size", "stream", "wait", NULL};
    static const struct ext_signature signature = {"decommit", names, 2, 3};
    PyObject *given[4];
    gp_interval interval;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        parse_sizes(given[0], given[1], &interval) < 0)
        return NULL;
    return decommit(self, &interval, 1, given[2], given[3]);
}

PyDoc_STRVAR(decommit_many_doc,
             "decommit_many($self, /, intervals, stream=None, *, wait=True)\n--\n\n"
             "decommit() for many parts at once, with one wait for all of them.\n\n"
             "Parameters\n----------\n"
             "intervals : iterable of (offset, size)\n"
             "    Read to its end before anything happens. In any order; parts may overlap.\n"
             "stream : stream, optional\n    As of decommit().\n" DECOMMIT_ERRORS);

static PyObject *range_decommit_many(struct memory_object *self, PyObject *const *args,
                                     Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"intervals", "stream", "wait", NULL};
    static const struct ext_signature signature = {"decommit_many", names, 1, 2};
    PyObject *given[3];
    size_t count;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0)
        return NULL;
    gp_interval *intervals = parse_intervals(given[0], &count);
    if (intervals == NULL)
        return NULL;
    PyObject *result = decommit(self, intervals, count, given[1], given[2]);
    PyMem_Free(intervals);
    return result;
}

/* ---- what it shows --------------------------------------------------------------------------- */

static PyObject *range_get_committed(struct memory_object *self, void *unused)
{
    (void)unused;
    size_t count;
    gp_interval *intervals = ext_range_committed(self, &count);
    PyObject *list = intervals != NULL ? PyList_New((Py_ssize_t)count) : NULL;
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(KK)", (unsigned long long)intervals[i].offset,
                                       (unsigned long long)intervals[i].bytes);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
    }
    PyMem_Free(intervals);
    return list;
}

static PyObject *range_get_committed_bytes(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->range != NULL ? gp_range_committed_bytes(self->range) : 0);
}

static PyObject *range_repr(struct memory_object *self)
{
    char size[32], committed[32];
    const char *device = gp_device_name(self->pool->device);
    ext_size_text(self->size, size);
    if (ext_memory_is_closed(self))
        return PyUnicode_FromFormat("<growpool.Range: %s on %s, closed>", size, device);
    ext_size_text(gp_range_committed_bytes(self->range), committed);
    return PyUnicode_FromFormat("<growpool.Range: %s on %s at %p, %s committed>", size, device,
                                (void *)self->address, committed);
}

#define METHOD(function) ((PyCFunction)(void (*)(void))(function))
#define KEYWORDS         (METH_FASTCALL | METH_KEYWORDS)

static PyMethodDef range_methods[] = {
    {"commit", METHOD(range_commit), KEYWORDS, commit_doc},
    {"commit_many", METHOD(range_commit_many), KEYWORDS, commit_many_doc},
    {"decommit", METHOD(range_decommit), KEYWORDS, decommit_doc},
    {"decommit_many", METHOD(range_decommit_many), KEYWORDS, decommit_many_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef range_getset[] = {
    {"size", (getter)ext_memory_get_size, NULL, "Bytes of addresses.", NULL},
    {"committed", (getter)range_get_committed, NULL,
     "The committed parts as a list of (offset, size), in order, each as long as possible.", NULL},
    {"committed_bytes", (getter)range_get_committed_bytes, NULL, "Bytes that are committed.", NULL},
    {"granularity", (getter)ext_range_get_granularity, NULL,
     "Bytes of a page: the unit of offsets and sizes.", NULL},
    {"physical_bytes", (getter)ext_range_get_physical_bytes, NULL,
     "Bytes of the chunks at its addresses, those on their way back too.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    range_doc,
    "Addresses of which any part can have memory: made by Pool.range().\n\n"
    "Nothing is committed at first, and only committed parts may be used: touching another one "
    "ends the\n"
    "process, or the GPU's context.\n\n"
    "Notes\n-----\n"
    "Any thread. Going out of scope counts as a last use on the stream it was made for: call\n"
    "record_stream() or close(stream) where that is another one.");

static PyType_Slot range_slots[] = {
    {Py_tp_doc, (void *)range_doc},
    {Py_tp_methods, range_methods},
    {Py_tp_getset, range_getset},
    {Py_tp_repr, range_repr},
    EXT_MEMORY_SLOTS,
    {0, NULL},
};

static PyType_Spec range_spec = {
    .name = "growpool.Range",
    .basicsize = sizeof(struct memory_object),
    .flags = EXT_MEMORY_FLAGS,
    .slots = range_slots,
};

int ext_add_range(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &range_spec, state->memory_type, &state->range_type);
}
