/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Pool: making one, closing it, and what becomes of it when nobody closes it.
 */
#include "pool.h"

#include "args.h"
#include "errors.h"
#include "gate.h"

/* Every pool that was not finalised; guarded by the GIL. Process-wide, as the gate is, so that a module
 * that was imported twice still closes all pools at the end. */
static struct pool_object *live_pools;

static void list_pool(struct pool_object *self)
{
    self->next = live_pools;
    if (self->next != NULL)
        self->next->previous = self;
    live_pools = self;
}

static void unlist_pool(struct pool_object *self)
{
    if (self->next != NULL)
        self->next->previous = self->previous;
    if (self->previous != NULL)
        self->previous->next = self->next;
    else if (live_pools == self)
        live_pools = self->next;
    self->next = self->previous = NULL;
}

gp_pool *ext_pool_get(struct pool_object *self)
{
    if (self->pool != NULL && !self->finishing)
        return self->pool;
    ext_raise_closed(ext_state((PyObject *)self), "the pool");
    return NULL;
}

static void hand_over(struct pool_object *self)
{
    gp_pool *pool = self->pool;
    gp_backing *backing = self->backing;
    self->pool = NULL;
    self->backing = NULL;
    self->adapter = NULL;
    ext_pool_forget_recent(self);
    if (pool == NULL)
        return;
    unlist_pool(self);
    PyThreadState *saved = ext_leave_python();
    gp_pool_release(pool);
    gp_backing_release(backing);
    ext_reenter_python(saved);
}

/* ---- making --------------------------------------------------------------------------------- */

enum pool_argument {
    ARG_DEVICE,
    ARG_ALLOC,
    ARG_FREE,
    ARG_BACKING,
    ARG_LIMIT,
    ARG_CHUNK_SIZE,
    ARG_ADDRESS_SPACE,
    ARG_NAME,
    ARG_PEERS,
    ARG_COUNT
};

/* None counts as left out. */
static PyObject *optional(PyObject *object)
{
    return object == Py_None ? NULL : object;
}

static int check_callable(PyObject *object, const char *name)
{
    if (PyCallable_Check(object))
        return 0;
    PyErr_Format(PyExc_TypeError, "%s must be callable, not %.200s", name,
                 Py_TYPE(object)->tp_name);
    return -1;
}

static int find_supplier(struct module_state *state, PyObject *const *given,
                         struct ext_supplier *supplier)
{
    PyObject *alloc = optional(given[ARG_ALLOC]), *free = optional(given[ARG_FREE]);
    PyObject *backing = optional(given[ARG_BACKING]);
    memset(supplier, 0, sizeof(*supplier));
    if ((alloc == NULL) != (free == NULL)) {
        PyErr_SetString(PyExc_TypeError, "a pool needs both alloc and free, or neither");
        return -1;
    }
    if (alloc != NULL && backing != NULL) {
        PyErr_SetString(PyExc_TypeError, "a pool takes alloc and free, or a backing, not both");
        return -1;
    }
    if (backing != NULL)
        return ext_supplier_of_object(state, backing, supplier);
    if (alloc != NULL) {
        if (check_callable(alloc, "alloc") < 0 || check_callable(free, "free") < 0)
            return -1;
        supplier->alloc = Py_NewRef(alloc);
        supplier->free = Py_NewRef(free);
        return 0;
    }
    gp_error error = {0};
    gp_status status = gp_backing_device(GP_LOCATION_DEVICE, &supplier->inner, &error);
    if (status == GP_OK)
        return 0;
    ext_raise(state, status, &error, NULL);
    return -1;
}

static int parse_options(struct module_state *state, PyObject *const *given,
                         gp_pool_options *options)
{
    if (ext_optional_size(given[ARG_LIMIT], "limit", GP_NO_LIMIT, &options->limit) < 0 ||
        ext_optional_size(given[ARG_CHUNK_SIZE], "chunk_size", 0, &options->chunk_size) < 0 ||
        ext_optional_size(given[ARG_ADDRESS_SPACE], "address_space", 0, &options->address_space) <
            0)
        return -1;
    bool zero = (optional(given[ARG_CHUNK_SIZE]) && options->chunk_size == 0) ||
                (optional(given[ARG_ADDRESS_SPACE]) && options->address_space == 0);
    if (zero) {
        PyErr_SetString(
            PyExc_ValueError,
            "chunk_size and address_space must not be 0: leave them out for the default");
        return -1;
    }
    options->name = "";
    if (optional(given[ARG_NAME]) != NULL) {
        if (!PyUnicode_Check(given[ARG_NAME])) {
            PyErr_Format(PyExc_TypeError, "name must be text, not %.200s",
                         Py_TYPE(given[ARG_NAME])->tp_name);
            return -1;
        }
        Py_ssize_t length;
        options->name = PyUnicode_AsUTF8AndSize(given[ARG_NAME], &length);
        if (options->name == NULL)
            return -1;
        if (strlen(options->name) != (size_t)length) {
            PyErr_SetString(PyExc_ValueError, "name must not contain a NUL character");
            return -1;
        }
    }
    options->interrupted = ext_call_interrupted;
    return ext_device(state, given[ARG_DEVICE], 0, &options->device);
}

/* Makes the adapter and the core's pool; takes over the supplier. On failure the object stays empty. */
static int open_pool(struct pool_object *self, struct ext_supplier *supplier,
                     gp_pool_options *options)
{
    struct module_state *state = ext_state((PyObject *)self);
    PyObject *streams = PyDict_New();
    if (streams == NULL)
        return -1;
    char who[64];
    PyOS_snprintf(who, sizeof(who), options->name[0] ? "pool '%.50s'" : "a pool%.0s",
                  options->name);
    struct ext_adapter *adapter =
        ext_adapter_create(PyType_GetModule(Py_TYPE(self)), supplier, who, &options->backing);
    if (adapter == NULL) {
        Py_DECREF(streams);
        return -1;
    }
    adapter->streams = streams;
    gp_error error = {0};
    gp_pool *pool = NULL;
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_pool_create(options, &pool, &error);
    ext_reenter_python(saved);
    if (status != GP_OK) {
        gp_backing_release(options->backing);
        ext_raise(state, status, &error, NULL);
        return -1;
    }
    self->pool = pool;
    self->backing = options->backing;
    self->adapter = adapter;
    list_pool(self);
    return 0;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device",     "alloc",         "free", "backing", "limit",
                                        "chunk_size", "address_space", "name", "peers",   NULL};
    static const struct ext_signature signature = {"Pool", names, 0, 1};
    struct module_state *state = PyType_GetModuleState(type);
    PyObject *given[ARG_COUNT];
    gp_pool_options options = {0};
    gp_device **peers = NULL;
    struct ext_supplier supplier;
    if (ext_parse_tuple(&signature, args, kwargs, given) < 0 ||
        find_supplier(state, given, &supplier) < 0)
        return NULL;
    struct pool_object *self = NULL;
    if (parse_options(state, given, &options) == 0 &&
        ext_pool_parse_peers(state, given[ARG_PEERS], &peers, &options.peer_count) == 0)
        self = (struct pool_object *)type->tp_alloc(type, 0);
    options.peers = peers;
    if (self != NULL)
        self->device = options.device; /* the collector shows the object while the rest is made */
    if (self != NULL && open_pool(self, &supplier, &options) < 0)
        Py_CLEAR(self);
    PyMem_Free(peers);
    ext_supplier_clear(&supplier);
    return (PyObject *)self;
}

/* ---- closing -------------------------------------------------------------------------------- */

/* A closed pool owns no memory, so no stream has to live for it. */
void ext_pool_drop_streams(struct pool_object *self)
{
    if (self->adapter != NULL && self->pool != NULL && gp_pool_is_closed(self->pool)) {
        ext_pool_forget_recent(self);
        PyDict_Clear(self->adapter->streams);
    }
}

/* -1 with an exception; *pinned says that live exports were the reason. */
static int close_pool(struct pool_object *self, bool *pinned)
{
    *pinned = false;
    if (self->pool == NULL || ext_gate_has_ended())
        return 0;
    gp_pool *pool = gp_pool_retain(self->pool);
    struct ext_call call;
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    gp_status status = gp_pool_close(pool, &call.error);
    gp_pool_release(pool);
    int failed = ext_call_end(&call, status);
    PyObject *raised = py_take_exception();
    ext_pool_drop_streams(self);
    py_raise_exception(raised);
    *pinned = status == GP_ERR_PINNED && PyErr_ExceptionMatches(PyExc_BufferError);
    return failed;
}

PyObject *ext_pool_close(struct pool_object *self, PyObject *unused)
{
    bool pinned;
    (void)unused;
    if (close_pool(self, &pinned) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *ext_pool_enter(struct pool_object *self, PyObject *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_get(self);
    if (pool == NULL || !gp_pool_is_closed(pool))
        return pool == NULL ? NULL : Py_NewRef(self);
    ext_raise_closed(ext_state((PyObject *)self), "the pool");
    return NULL;
}

/* With live exports the pool cannot be closed yet: it takes no more work and goes with the last one. */
static int finish_later(struct pool_object *self)
{
    gp_error error = {0};
    gp_status status = gp_pool_finish(self->pool, &error);
    if (status != GP_OK) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return -1;
    }
    self->finishing = true;
    return PyErr_WarnFormat(
        PyExc_ResourceWarning, 1,
        "pool '%s' has live exports at the end of its with block; it is closed when the last "
        "array, view or memoryview on its memory goes",
        gp_pool_name(self->pool));
}

PyObject *ext_pool_exit(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    bool body_raised = nargs > 0 && args[0] != Py_None;
    bool pinned;
    int failed = close_pool(self, &pinned);
    if (pinned) {
        PyErr_Clear();
        failed = self->pool != NULL ? finish_later(self) : 0;
    }
    if (failed == 0)
        Py_RETURN_NONE;
    if (!body_raised || ext_add_context(args, nargs))
        return NULL;
    /* The body's exception is the one to see. That a forked child cannot close is no news to it. */
    if (PyErr_ExceptionMatches(ext_state((PyObject *)self)->pool_state_error))
        PyErr_Clear();
    else
        PyErr_WriteUnraisable((PyObject *)self);
    Py_RETURN_NONE;
}

static void close_at_exit(struct pool_object *self, uint64_t deadline)
{
    if (self->pool == NULL || gp_pool_is_closed(self->pool))
        return;
    gp_pool *pool = gp_pool_retain(self->pool);
    struct ext_call call;
    ext_call_begin(&call, ext_state((PyObject *)self), 0);
    call.deadline = deadline;
    (void)gp_pool_close(pool, &call.error);
    gp_pool_release(pool);
    ext_call_end_quietly(&call);
}

void ext_pool_close_all(uint64_t deadline)
{
    PyObject *pools = PyList_New(0);
    for (struct pool_object *pool = live_pools; pools != NULL && pool != NULL; pool = pool->next) {
        if (PyList_Append(pools, (PyObject *)pool) < 0)
            Py_CLEAR(pools);
    }
    for (Py_ssize_t i = 0; pools != NULL && i < PyList_GET_SIZE(pools); i++)
        close_at_exit((struct pool_object *)PyList_GET_ITEM(pools, i), deadline);
    Py_XDECREF(pools);
    PyErr_Clear();
}

/* ---- life ----------------------------------------------------------------------------------- */

static int pool_traverse(struct pool_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return self->adapter != NULL ? ext_adapter_traverse(self->adapter, visit, arg) : 0;
}

/* Only retires and queues: free runs later, on the delivery thread. There is no tp_clear: after this the
 * object refers to nothing. */
static void pool_finalize(PyObject *self)
{
    PyObject *raised = py_take_exception();
    hand_over((struct pool_object *)self);
    py_raise_exception(raised);
}

static void pool_dealloc(struct pool_object *self)
{
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- what it shows --------------------------------------------------------------------------- */

static PyObject *pool_get_name(struct pool_object *self, void *unused)
{
    (void)unused;
    const char *name = self->pool != NULL ? gp_pool_name(self->pool) : "";
    return PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), "replace");
}

static PyObject *pool_get_device(struct pool_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(gp_device_name(self->device));
}

static PyObject *pool_get_device_id(struct pool_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(gp_device_id(self->device));
}

static PyObject *pool_get_is_closed(struct pool_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->pool == NULL || self->finishing || gp_pool_is_closed(self->pool));
}

static PyObject *pool_repr(struct pool_object *self)
{
    if (self->pool == NULL)
        return PyUnicode_FromFormat("<growpool.Pool on %s, closed>", gp_device_name(self->device));
    gp_pool_stats stats;
    gp_pool_get_stats(self->pool, &stats);
    char used[32], physical[32], limit[32];
    const bool limited = stats.limit != GP_NO_LIMIT;
    const bool closed = self->finishing || gp_pool_is_closed(self->pool);
    return PyUnicode_FromFormat(
        "<growpool.Pool '%s' on %s: %s used, %s physical%s%s%s>", gp_pool_name(self->pool),
        gp_device_name(self->device), ext_size_text(stats.used_bytes, used),
        ext_size_text(stats.physical_bytes, physical), limited ? " of " : "",
        limited ? ext_size_text(stats.limit, limit) : "", closed ? ", closed" : "");
}

static PyGetSetDef pool_getset[] = {
    {"name", (getter)pool_get_name, NULL, "For people.", NULL},
    {"device", (getter)pool_get_device, NULL, "The device as text, such as 'cuda:0'.", NULL},
    {"device_id", (getter)pool_get_device_id, NULL,
     "The device as callbacks get it: N for cuda:N, -1 for the host.", NULL},
    {"peers", (getter)ext_pool_get_peers, NULL,
     "The devices that get access to the pool's memory beside its own, as a tuple of text.", NULL},
    {"is_closed", (getter)pool_get_is_closed, NULL, "True when the pool takes no more work.", NULL},
    {"limit", (getter)ext_pool_get_limit, NULL,
     "Physical bytes that the pool may hold; None for no limit.", NULL},
    {"stats", (getter)ext_pool_get_stats, NULL, "The pool's figures now: a Stats.", NULL},
    {"unreturned", (getter)ext_pool_get_unreturned, NULL,
     "The chunks whose free failed, as a list of Chunk.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef pool_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct pool_object, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    pool_doc,
    "Pool(device=None, *, alloc=None, free=None, backing=None, limit=None, chunk_size=None,\n"
    "     address_space=None, name='', peers=None)\n--\n\n"
    "Memory that grows in place, stays under a limit, and shrinks when idle.\n\n"
    "Parameters\n----------\n"
    "device : str, int or object, optional\n"
    "    'cuda:N' or an int N, 'host' or 'cpu', or an object with device_id, index or id. Left "
    "out: the\n"
    "    first GPU, else the host.\n"
    "alloc : callable, optional\n"
    "    alloc(size, device, stream) -> Chunk of exactly `size` bytes, or None for no memory. All "
    "are\n"
    "    ints. MemoryError means no memory too; other exceptions reach the caller unchanged.\n"
    "free : callable, optional\n"
    "    free(chunk, size, device, stream) takes a chunk back, after every use of it has passed. "
    "It "
    "may keep,\n"
    "    close or forget it; what it returns is ignored. If it raises, the chunk is in "
    "`unreturned` "
    "and\n"
    "    counts until return_unreturned() succeeds.\n"
    "backing : object, optional\n"
    "    Instead of the two: an object with those two methods, or one of growpool's backings.\n"
    "limit : int or str, optional\n    Physical bytes that the pool may hold.\n"
    "chunk_size : int or str, optional\n"
    "    Bytes of every chunk, a multiple of the device's granularity. Left out: planned.\n"
    "address_space : int or str, optional\n"
    "    Bytes of addresses to reserve. Left out: twice the device's memory.\n"
    "name : str, optional\n    For messages.\n"
    "peers : list of devices, optional\n"
    "    Other devices of the same kind that may read and write the pool's memory, every new chunk "
    "included.\n"
    "    The pool's own device and doubles are dropped. Make a stream of the pool's device wait "
    "for "
    "what a peer\n    does in a buffer before that buffer is closed.\n\n"
    "Raises\n------\n"
    "TypeError, ValueError, OverflowError\n    A wrong argument.\n"
    "DriverError\n    The device does not exist on this machine, or a peer cannot reach its "
    "memory; "
    "the message\n    says what is missing.\n\n"
    "Notes\n-----\n"
    "Any thread, and from inside callbacks too, except that a callback that grows, trims, drains "
    "or closes\n"
    "its own pool gets RuntimeError. Whatever may wait runs detached from the interpreter and "
    "notices\n"
    "signals. A pool that is dropped without close() is closed by growpool's delivery thread once "
    "its\n"
    "memory is out of use; the callables live until then.\n\n"
    "`free` is called by that thread, or on the caller's by trim(), drain(), close(), "
    "return_unreturned(),\n"
    "the shrinking of a growable or range, and growth that fails or cannot do without idle chunks; "
    "never\n"
    "inside a garbage collection. The first three also close dropped pools of the same device "
    "whose memory\n"
    "was exported. Do not make those calls while holding a lock that `free` takes.\n\n"
    "In a forked child every method of the parent's pools raises PoolStateError, reason 'forked' "
    "(their\n"
    "figures can be read), and so does\n"
    "making a new one: start workers with multiprocessing's 'spawn' or 'forkserver'. A process "
    "that "
    "was\n"
    "forked before its parent used growpool starts afresh; importing it is no use.");

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, (void *)pool_doc},
    {Py_tp_new, pool_new},
    {Py_tp_methods, ext_pool_call_methods},
    {Py_tp_getset, pool_getset},
    {Py_tp_members, pool_members},
    {Py_tp_traverse, pool_traverse},
    {Py_tp_finalize, pool_finalize},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_repr, pool_repr},
    {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "growpool.Pool",
    .basicsize = sizeof(struct pool_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pool_slots,
};

int ext_add_pool(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &pool_spec, NULL, &state->pool_type);
}
