/* SPDX-License-Identifier: Apache-2.0
 *
 * The backings in C as Python objects: DeviceBacking, HostNumaBacking, CachingBacking. Pools and caching
 * backings use the gp_backing inside directly; alloc() and free() are for Python code that composes.
 */
#include "args.h"
#include "backing.h"
#include "call.h"
#include "errors.h"

struct backing_object {
    PyObject_HEAD gp_backing *backing; /* NULL once finalised */
    struct ext_adapter *adapter; /* CachingBacking: around its inner, shown to the collector */
    struct ext_deferred *deferred; /* CachingBacking: for its finaliser */
    size_t keep_bytes;
    PyObject *weak_references;
};

static bool is_backing(struct module_state *state, PyObject *object)
{
    return Py_IS_TYPE(object, state->caching_backing_type) ||
           Py_IS_TYPE(object, state->device_backing_type) ||
           Py_IS_TYPE(object, state->host_numa_backing_type);
}

bool ext_backing_may_call(struct module_state *state, PyObject *object)
{
    return Py_IS_TYPE(object, state->caching_backing_type);
}

gp_backing *ext_backing_of(struct module_state *state, PyObject *object)
{
    if (!is_backing(state, object))
        return NULL;
    gp_backing *backing = ((struct backing_object *)object)->backing;
    if (backing == NULL)
        ext_raise_closed(state, "the backing");
    return backing;
}

/* ---- making --------------------------------------------------------------------------------- */

static PyObject *new_device_backing(PyTypeObject *type, PyObject *args, PyObject *kwargs,
                                    gp_location location)
{
    static const char *const names[] = {NULL};
    const struct ext_signature signature = {
        location == GP_LOCATION_HOST ? "HostNumaBacking" : "DeviceBacking", names, 0, 0};
    PyObject *none[1];
    if (ext_parse_tuple(&signature, args, kwargs, none) < 0)
        return NULL;
    struct backing_object *self = (struct backing_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    gp_error error = {0};
    gp_status status = gp_backing_device(location, &self->backing, &error);
    if (status == GP_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    ext_raise(PyType_GetModuleState(type), status, &error, NULL);
    return NULL;
}

static PyObject *device_backing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return new_device_backing(type, args, kwargs, GP_LOCATION_DEVICE);
}

static PyObject *host_numa_backing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return new_device_backing(type, args, kwargs, GP_LOCATION_HOST);
}

/* Fills a new CachingBacking; takes over the supplier. */
static int caching_init(struct backing_object *self, struct ext_supplier *supplier, size_t keep)
{
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    gp_backing *adapted = NULL;
    self->deferred = PyMem_RawCalloc(1, sizeof(*self->deferred));
    if (self->deferred == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    struct ext_adapter *adapter =
        ext_adapter_create(module, supplier, "the backing inside a CachingBacking", &adapted);
    if (adapter == NULL)
        return -1;
    adapter->lends = true;
    gp_error error = {0};
    gp_status status = gp_backing_caching(adapted, keep, &self->backing, &error);
    gp_backing_release(adapted); /* the caching backing has its own reference, or none is wanted */
    if (status != GP_OK) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return -1;
    }
    self->adapter = adapter;
    self->keep_bytes = keep;
    return 0;
}

static PyObject *caching_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"inner", "keep", NULL};
    static const struct ext_signature signature = {"CachingBacking", names, 2, 1};
    PyObject *given[2];
    size_t keep;
    struct ext_supplier supplier;
    if (ext_parse_tuple(&signature, args, kwargs, given) < 0 ||
        ext_size(given[1], "keep", &keep) < 0 ||
        ext_supplier_of_object(PyType_GetModuleState(type), given[0], &supplier) < 0)
        return NULL;
    struct backing_object *self = (struct backing_object *)type->tp_alloc(type, 0);
    if (self != NULL && caching_init(self, &supplier, keep) < 0)
        Py_CLEAR(self);
    ext_supplier_clear(&supplier);
    return (PyObject *)self;
}

/* ---- the contract, called from Python ------------------------------------------------------- */

static int parse_request(struct module_state *state, PyObject *size, PyObject *device,
                         PyObject *stream, gp_request *request)
{
    PyObject *keep;
    if (ext_size(size, "size", &request->size) < 0 ||
        ext_device(state, device, EXT_DEVICE_CALLBACK_IDS, &request->device) < 0 ||
        ext_stream(state, request->device, stream, &request->stream, &keep) < 0)
        return -1;
    Py_XDECREF(keep); /* the caller holds the argument as long as this call */
    return 0;
}

/* Undoes an alloc whose chunk cannot be handed out, while an exception is raised. */
static void give_back(struct module_state *state, gp_backing *backing, gp_chunk *chunk,
                      const gp_request *request)
{
    PyObject *raised = py_take_exception();
    struct ext_call call;
    ext_call_begin(&call, state, 0);
    if (gp_backing_free(backing, chunk, request, &call.error) != GP_OK)
        gp_chunk_release(chunk);
    ext_call_end_quietly(&call);
    py_raise_exception(raised);
}

PyDoc_STRVAR(
    alloc_doc,
    "alloc($self, /, size, device, stream=0)\n--\n\n"
    "Supply a chunk, as a pool asks for it.\n\n"
    "Parameters\n----------\n"
    "size : int or str\n    Bytes, a multiple of the device's granularity.\n"
    "device : int, str or object\n    As callbacks get it, or as Pool takes it.\n"
    "stream : int or object, optional\n    The stream of the growth.\n\n"
    "Returns\n-------\nChunk\n\n"
    "Raises\n------\n"
    "OutOfMemoryError\n    No memory. It is a MemoryError, so a callback may let it pass.\n\n"
    "Notes\n-----\nAny thread; detached from the interpreter while it waits.");

static PyObject *backing_alloc(struct backing_object *self, PyTypeObject *defining,
                               PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"size", "device", "stream", NULL};
    static const struct ext_signature signature = {"alloc", names, 2, 3};
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[3];
    gp_request request = {0};
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        parse_request(state, given[0], given[1], given[2], &request) < 0)
        return NULL;
    gp_backing *backing = ext_backing_of(state, (PyObject *)self);
    if (backing == NULL)
        return NULL;
    gp_chunk *chunk = NULL;
    struct ext_call call;
    ext_call_begin(&call, state, EXT_CALL_FREE_RAISES);
    gp_status status = gp_backing_alloc(backing, &request, &chunk, &call.error);
    int failed = ext_call_end(&call, status);
    PyObject *object = failed ? NULL : ext_chunk_object(state, chunk);
    if (object != NULL)
        ext_chunk_release(chunk);
    else if (chunk != NULL)
        give_back(state, backing, chunk, &request);
    return object;
}

/* What a chunk given back must be: -1 with ValueError for another size or device, or a closed one. */
static int check_returned(const gp_chunk *chunk, const gp_request *request)
{
    if (gp_chunk_is_closed(chunk))
        PyErr_SetString(PyExc_ValueError, "the chunk is closed: there is nothing to give back");
    else if (gp_chunk_size(chunk) != request->size)
        PyErr_Format(PyExc_ValueError, "the chunk has %zu bytes, not %zu", gp_chunk_size(chunk),
                     request->size);
    else if (gp_chunk_device(chunk) != request->device)
        PyErr_Format(PyExc_ValueError, "the chunk is on %s, not on %s",
                     gp_device_name(gp_chunk_device(chunk)), gp_device_name(request->device));
    else
        return 0;
    return -1;
}

PyDoc_STRVAR(free_doc, "free($self, /, chunk, size, device, stream=0)\n--\n\n"
                       "Take a chunk back, as a pool gives it.\n\n"
                       "Parameters\n----------\n"
                       "chunk : Chunk\n    A chunk that no pool holds.\n"
                       "size : int or str\n    Its bytes.\n"
                       "device : int, str or object\n    Its device.\n"
                       "stream : int or object, optional\n    The stream of the growth.\n\n"
                       "Raises\n------\n"
                       "ValueError\n    Size or device are not the chunk's.\n"
                       "PoolStateError\n    A pool holds the chunk (reason 'in_use').\n\n"
                       "Notes\n-----\nAny thread; detached from the interpreter while it waits.");

static PyObject *backing_free(struct backing_object *self, PyTypeObject *defining,
                              PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"chunk", "size", "device", "stream", NULL};
    static const struct ext_signature signature = {"free", names, 3, 4};
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[4];
    gp_request request = {0};
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0)
        return NULL;
    gp_chunk *chunk = ext_chunk_of(state, given[0], "chunk");
    if (chunk == NULL || parse_request(state, given[1], given[2], given[3], &request) < 0 ||
        check_returned(chunk, &request) < 0)
        return NULL;
    gp_backing *backing = ext_backing_of(state, (PyObject *)self);
    if (backing == NULL)
        return NULL;
    struct ext_call call;
    gp_chunk_retain(chunk);
    ext_call_begin(&call, state, EXT_CALL_FREE_RAISES);
    gp_status status = gp_backing_free(backing, chunk, &request, &call.error);
    if (status != GP_OK)
        gp_chunk_release(chunk);
    if (ext_call_end(&call, status) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    trim_doc,
    "trim($self, /, min_bytes_to_keep=0)\n--\n\n"
    "Give kept chunks back to the inner backing, the oldest first.\n\n"
    "Parameters\n----------\n"
    "min_bytes_to_keep : int or str, optional\n    Stop when at most this many bytes are kept.\n\n"
    "Returns\n-------\nint\n    Bytes given back.\n\n"
    "Raises\n------\n"
    "Exception\n    Whatever the inner free raised; that chunk stays kept.\n\n"
    "Notes\n-----\nAny thread; detached from the interpreter while it waits.");

static PyObject *caching_trim(struct backing_object *self, PyTypeObject *defining,
                              PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"min_bytes_to_keep", NULL};
    static const struct ext_signature signature = {"trim", names, 0, 1};
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[1];
    size_t keep, released = 0;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_optional_size(given[0], "min_bytes_to_keep", 0, &keep) < 0)
        return NULL;
    gp_backing *backing = ext_backing_of(state, (PyObject *)self);
    if (backing == NULL)
        return NULL;
    struct ext_call call;
    ext_call_begin(&call, state, EXT_CALL_FREE_RAISES);
    gp_status status = gp_backing_trim(backing, keep, &released, &call.error);
    if (ext_call_end(&call, status) < 0)
        return NULL;
    return PyLong_FromSize_t(released);
}

static PyObject *caching_get_cached_bytes(struct backing_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->backing != NULL ? gp_backing_cached_bytes(self->backing) : 0);
}

static PyObject *caching_get_keep(struct backing_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->keep_bytes);
}

/* ---- life ----------------------------------------------------------------------------------- */

static int backing_traverse(struct backing_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return self->adapter != NULL ? ext_adapter_traverse(self->adapter, visit, arg) : 0;
}

/* From here on the adapter's references belong to the gp_backing alone (backing.h). */
static void backing_finalize(PyObject *object)
{
    struct backing_object *self = (struct backing_object *)object;
    gp_backing *backing = self->backing;
    self->backing = NULL;
    self->adapter = NULL;
    if (backing == NULL)
        return;
    if (self->deferred != NULL) {
        ext_defer_release(self->deferred, backing);
        self->deferred = NULL;
    } else {
        gp_backing_release(backing);
    }
}

static void backing_dealloc(struct backing_object *self)
{
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    PyMem_RawFree(self->deferred);
    type->tp_free(self);
    Py_DECREF(type);
}

#define CALL_FLAGS       (METH_METHOD | METH_FASTCALL | METH_KEYWORDS)
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef backing_methods[] = {
    {"alloc", METHOD(backing_alloc), CALL_FLAGS, alloc_doc},
    {"free", METHOD(backing_free), CALL_FLAGS, free_doc},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef caching_methods[] = {
    {"alloc", METHOD(backing_alloc), CALL_FLAGS, alloc_doc},
    {"free", METHOD(backing_free), CALL_FLAGS, free_doc},
    {"trim", METHOD(caching_trim), CALL_FLAGS, trim_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef caching_getset[] = {
    {"cached_bytes", (getter)caching_get_cached_bytes, NULL, "Bytes kept now.", NULL},
    {"keep", (getter)caching_get_keep, NULL, "Bytes kept at most.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef backing_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct backing_object, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    device_backing_doc,
    "DeviceBacking()\n--\n\n"
    "Chunks straight from the device, in C. What a pool uses when it is given no backing.\n\n"
    "Notes\n-----\nAny thread. Keeps nothing: a chunk given back is released.");

PyDoc_STRVAR(
    host_numa_backing_doc,
    "HostNumaBacking()\n--\n\n"
    "Host memory near the GPU, mapped at device addresses, in C. The CPU can read and write it.\n\n"
    "Notes\n-----\nAny thread. A pool whose device does not support it raises DriverError when it "
    "grows.");

PyDoc_STRVAR(
    caching_doc,
    "CachingBacking(inner, *, keep)\n--\n\n"
    "Keeps returned chunks and hands them out again, so that a growth needs no driver call.\n\n"
    "Parameters\n----------\n"
    "inner : object\n"
    "    Where chunks come from: another backing of growpool, or any object with alloc and free.\n"
    "keep : int or str\n    Bytes kept at most; the oldest chunks go back to `inner` beyond "
    "that.\n\n"
    "Notes\n-----\n"
    "Any thread. When `inner` has no memory, everything kept is given back and `inner` is asked "
    "again.\n"
    "When the object goes, what it keeps is given back by growpool's delivery thread.");

#define COMMON_SLOTS                                                                               \
    {Py_tp_members, backing_members}, {Py_tp_traverse, backing_traverse},                          \
        {Py_tp_finalize, backing_finalize}, {Py_tp_dealloc, backing_dealloc},                      \
    {                                                                                              \
        0, NULL                                                                                    \
    }

static PyType_Slot device_backing_slots[] = {
    {Py_tp_doc, (void *)device_backing_doc},
    {Py_tp_new, device_backing_new},
    {Py_tp_methods, backing_methods},
    COMMON_SLOTS,
};

static PyType_Slot host_numa_backing_slots[] = {
    {Py_tp_doc, (void *)host_numa_backing_doc},
    {Py_tp_new, host_numa_backing_new},
    {Py_tp_methods, backing_methods},
    COMMON_SLOTS,
};

static PyType_Slot caching_slots[] = {
    {Py_tp_doc, (void *)caching_doc},
    {Py_tp_new, caching_new},
    {Py_tp_methods, caching_methods},
    {Py_tp_getset, caching_getset},
    COMMON_SLOTS,
};

#define BACKING_SPEC(name_, slots_)                                                                \
    {                                                                                              \
        .name = (name_), .basicsize = sizeof(struct backing_object),                               \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,               \
        .slots = (slots_),                                                                         \
    }

static PyType_Spec device_backing_spec =
    BACKING_SPEC("growpool.DeviceBacking", device_backing_slots);
static PyType_Spec host_numa_backing_spec =
    BACKING_SPEC("growpool.HostNumaBacking", host_numa_backing_slots);
static PyType_Spec caching_spec = BACKING_SPEC("growpool.CachingBacking", caching_slots);

int ext_add_backings(PyObject *module, struct module_state *state)
{
    if (ext_add_type(module, &device_backing_spec, NULL, &state->device_backing_type) < 0 ||
        ext_add_type(module, &host_numa_backing_spec, NULL, &state->host_numa_backing_type) < 0)
        return -1;
    return ext_add_type(module, &caching_spec, NULL, &state->caching_backing_type);
}
