/* SPDX-License-Identifier: Apache-2.0
 *
 * Python callables as a gp_backing: asks them, checks their answers, and keeps the chunk objects that
 * a pool accepted, so that free gets the very object that alloc gave. It never decides what happens
 * after a refusal.
 */
#include "backing.h"

#include <string.h>

#include "args.h"
#include "call.h"
#include "errors.h"
#include "gate.h"

/* ---- accepted chunks ------------------------------------------------------------------------ */

/* Takes the reference; -1 without memory. */
static int accept(struct ext_adapter *adapter, struct chunk_object *chunk)
{
    struct ext_hold *hold = &chunk->first;
    if (hold->adapter != NULL && (hold = PyMem_RawMalloc(sizeof(*hold))) == NULL)
        return -1;
    *hold = (struct ext_hold){adapter, chunk, adapter->accepted, NULL, chunk->holds};
    if (hold->next != NULL)
        hold->next->previous = hold;
    adapter->accepted = chunk->holds = hold;
    return 0;
}

/* Gives the reference back; false when the chunk is not accepted here. */
static bool let_go(struct ext_adapter *adapter, struct chunk_object *chunk)
{
    struct ext_hold **link = &chunk->holds;
    while (*link != NULL && (*link)->adapter != adapter)
        link = &(*link)->other;
    struct ext_hold *hold = *link;
    if (hold == NULL)
        return false;
    *link = hold->other;
    if (hold->next != NULL)
        hold->next->previous = hold->previous;
    if (hold->previous != NULL)
        hold->previous->next = hold->next;
    else
        adapter->accepted = hold->next;
    hold->adapter = NULL;
    if (hold != &chunk->first)
        PyMem_RawFree(hold);
    return true;
}

/* Whether this adapter, or one whose chunks nobody may pass on, has the chunk. */
static bool is_accepted(const struct ext_adapter *adapter, const struct chunk_object *chunk)
{
    const struct ext_hold *hold = chunk->holds;
    while (hold != NULL && hold->adapter != adapter && hold->adapter->lends)
        hold = hold->other;
    return hold != NULL;
}

void ext_adapter_forget(struct chunk_object *chunk)
{
    while (chunk->holds != NULL && let_go(chunk->holds->adapter, chunk))
        Py_DECREF(chunk);
}

/* ---- alloc ---------------------------------------------------------------------------------- */

/* callable(size, device, stream), with `first` in front unless it is NULL. New reference or NULL. */
static PyObject *call_with_request(PyObject *callable, PyObject *first, const gp_request *request)
{
    PyObject *args[] = {NULL, first, PyLong_FromSize_t(request->size),
                        PyLong_FromLong(gp_device_id(request->device)),
                        PyLong_FromSize_t(request->stream)};
    PyObject *result = NULL;
    if (args[2] != NULL && args[3] != NULL && args[4] != NULL) {
        Py_INCREF(callable); /* it may replace itself while it runs */
        if (first != NULL)
            result =
                PyObject_Vectorcall(callable, args + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        else
            result =
                PyObject_Vectorcall(callable, args + 2, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        Py_DECREF(callable);
    }
    for (size_t i = 2; i < 5; i++)
        Py_XDECREF(args[i]);
    return result;
}

static gp_status alloc_raised(struct ext_adapter *adapter, const gp_request *request,
                              gp_error *error)
{
    bool no_memory = PyErr_ExceptionMatches(PyExc_MemoryError);
    ext_call_keep_exception(adapter->alloc);
    if (no_memory)
        return gp_error_set(error, GP_ERR_OUT_OF_MEMORY,
                            "the alloc of %s raised MemoryError when asked for %zu bytes",
                            adapter->name, request->size);
    return gp_error_set(error, GP_ERR_CALLBACK,
                        "the alloc of %s raised an exception when asked for %zu bytes",
                        adapter->name, request->size);
}

static gp_status wrong_value(struct ext_adapter *adapter, const gp_request *request,
                             const gp_chunk *chunk, const char *problem, gp_error *error)
{
    return gp_error_set(error, GP_ERR_CONTRACT_VALUE,
                        "the alloc of %s was asked for %zu bytes on %s but answered with chunk "
                        "%llu of %zu bytes on "
                        "%s, which %s; the chunk stays yours",
                        adapter->name, request->size, gp_device_name(request->device),
                        (unsigned long long)gp_chunk_id(chunk), gp_chunk_size(chunk),
                        gp_device_name(gp_chunk_device(chunk)), problem);
}

/* The core checks the same again for backings in C; here the answer is refused before anything holds
 * on to it, so that a wrong chunk stays the callback's. */
static gp_status check_answer(struct ext_adapter *adapter, const gp_request *request,
                              PyObject *answer, gp_error *error)
{
    if (!Py_IS_TYPE(answer, adapter->state->chunk_type))
        return gp_error_set(error, GP_ERR_CONTRACT_TYPE,
                            "the alloc of %s must return a growpool.Chunk or None, not %.100s",
                            adapter->name, Py_TYPE(answer)->tp_name);
    const struct chunk_object *object = (struct chunk_object *)answer;
    const gp_chunk *chunk = object->chunk;
    if (gp_chunk_is_closed(chunk))
        return wrong_value(adapter, request, chunk, "is closed", error);
    if (is_accepted(adapter, object) || gp_chunk_is_in_use(chunk))
        return wrong_value(adapter, request, chunk, "a pool holds already", error);
    if (gp_chunk_device(chunk) != request->device)
        return wrong_value(adapter, request, chunk, "is on another device", error);
    if (gp_chunk_size(chunk) != request->size)
        return wrong_value(adapter, request, chunk, "has another size", error);
    return GP_OK;
}

static gp_status ask_python(struct ext_adapter *adapter, const gp_request *request, gp_chunk **out,
                            gp_error *error)
{
    PyObject *answer = call_with_request(adapter->alloc, NULL, request);
    if (answer == NULL)
        return alloc_raised(adapter, request, error);
    gp_status status;
    if (answer == Py_None)
        status =
            gp_error_set(error, GP_ERR_OUT_OF_MEMORY, "the alloc of %s had no memory for %zu bytes",
                         adapter->name, request->size);
    else
        status = check_answer(adapter, request, answer, error);
    struct chunk_object *object = (struct chunk_object *)answer;
    if (status == GP_OK && accept(adapter, object) < 0)
        status = gp_error_set(error, GP_ERR_HOST_MEMORY,
                              "no host memory to keep the chunk that the alloc of %s answered with",
                              adapter->name);
    if (status != GP_OK) {
        Py_DECREF(answer);
        return status;
    }
    *out = gp_chunk_retain(object->chunk);
    return GP_OK;
}

static gp_status exiting(gp_error *error)
{
    gp_error_set(error, GP_ERR_STATE,
                 "the process is shutting down: Python is not called any more");
    if (error != NULL)
        error->reason = GP_REASON_EXITING;
    return GP_ERR_STATE;
}

static gp_status adapter_alloc(void *context, const gp_request *request, gp_chunk **out,
                               gp_error *error)
{
    struct ext_adapter *adapter = context;
    if (adapter->inner != NULL)
        return gp_backing_alloc(adapter->inner, request, out, error);
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return exiting(error);
    gp_status status = ask_python(adapter, request, out, error);
    ext_detach(&attached);
    return status;
}

/* ---- free ----------------------------------------------------------------------------------- */

/* Whether free did away with the chunk before it raised: then nothing is left to return. */
static bool is_gone(const gp_chunk *chunk)
{
    return gp_chunk_is_closed(chunk) || gp_chunk_is_in_use(chunk);
}

/* Where the chunk is after its free raised, and what to do. */
static const char *whereabouts(const struct ext_adapter *adapter, const gp_chunk *chunk)
{
    const struct chunk_object *object = gp_chunk_user(chunk);
    if (gp_chunk_is_closed(chunk))
        return "the chunk is closed, so nothing is left to return";
    if (gp_chunk_is_in_use(chunk) || (object != NULL && is_accepted(adapter, object)))
        return "another pool has taken the chunk meanwhile, so it is that pool's to return";
    if (adapter->lends)
        return "the chunk stays with whoever gave it back: mend free, then call trim() of the "
               "CachingBacking or return_unreturned() of the pool";
    return "the chunk is in unreturned: mend free, then call return_unreturned()";
}

/* The text of the ReleaseWarning: a new reference, whatever the exception's __repr__ does. */
static PyObject *release_message(const struct ext_adapter *adapter, const gp_chunk *chunk,
                                 const gp_request *request, PyObject *exception)
{
    char size[32];
    PyObject *name = PyObject_Repr(exception);
    if (name == NULL) {
        ext_call_drop_exception(adapter->free);
        name = PyUnicode_FromString(Py_TYPE(exception)->tp_name);
    }
    PyObject *message = NULL;
    if (name != NULL)
        message =
            PyUnicode_FromFormat("the free of %s raised %U for chunk %llu of %s; %s", adapter->name,
                                 name, (unsigned long long)gp_chunk_id(chunk),
                                 ext_size_text(request->size, size), whereabouts(adapter, chunk));
    Py_XDECREF(name);
    if (message == NULL) {
        PyErr_Clear();
        message = Py_NewRef(adapter->state->name_free);
    }
    return message;
}

static gp_status free_raised(struct ext_adapter *adapter, const gp_chunk *chunk,
                             const gp_request *request, gp_error *error)
{
    PyObject *exception = py_take_exception();
    PyObject *message = release_message(adapter, chunk, request, exception);
    py_raise_exception(exception);
    ext_call_keep_release_error(adapter->state, adapter->free, message);
    Py_DECREF(message);
    return gp_error_set(error, GP_ERR_CALLBACK,
                        "the free of %s raised an exception for chunk %llu of %zu bytes",
                        adapter->name, (unsigned long long)gp_chunk_id(chunk), request->size);
}

/* The object leaves the accepted list before free runs: free may hand it to another thread, whose
 * alloc may supply it again before this call is back. */
static gp_status return_to_python(struct ext_adapter *adapter, gp_chunk *chunk,
                                  const gp_request *request, gp_error *error)
{
    struct chunk_object *object = (struct chunk_object *)ext_chunk_object(adapter->state, chunk);
    if (object == NULL)
        return free_raised(adapter, chunk, request, error);
    if (let_go(adapter, object))
        Py_DECREF(object);
    PyObject *result = call_with_request(adapter->free, (PyObject *)object, request);
    if (result != NULL) {
        Py_DECREF(result);
        /* The pool's reference; the object still has its own, so this blocks nothing. */
        gp_chunk_release(chunk);
        Py_DECREF(object);
        return GP_OK;
    }
    gp_status status = free_raised(adapter, chunk, request, error);
    bool gone = is_gone(chunk);
    if (!gone && is_accepted(adapter, object)) {
        /* An alloc answered with it, and the pool that asked is about to take it: were it kept as unreturned,
         * that pool would be refused what its adapter has accepted. */
        gp_chunk_release(chunk);
        status = GP_OK;
        gone = true;
    }
    if (gone || accept(adapter, object) < 0)
        Py_DECREF(object);
    return status;
}

/* A backing in C that cannot take a chunk back is reported like a free that raised. One that ended in
 * Python below has reported already; at the end of the process there is nobody to tell. */
static void inner_free_failed(struct ext_adapter *adapter, gp_status status, const gp_chunk *chunk,
                              const gp_request *request, const gp_error *told)
{
    struct ext_attached attached;
    if (status == GP_ERR_CALLBACK || status == GP_ERR_STATE || !ext_attach(&attached))
        return;
    ext_raise(adapter->state, status, told, NULL);
    (void)free_raised(adapter, chunk, request, NULL);
    ext_detach(&attached);
}

static gp_status free_inner(struct ext_adapter *adapter, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    gp_error told = {0};
    gp_status status = gp_backing_free(adapter->inner, chunk, request, &told);
    if (status == GP_OK)
        return status;
    inner_free_failed(adapter, status, chunk, request, &told);
    if (error != NULL)
        *error = told;
    return status;
}

static gp_status adapter_free(void *context, gp_chunk *chunk, const gp_request *request,
                              gp_error *error)
{
    struct ext_adapter *adapter = context;
    if (adapter->inner != NULL)
        return free_inner(adapter, chunk, request, error);
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return exiting(error);
    gp_status status = return_to_python(adapter, chunk, request, error);
    ext_detach(&attached);
    return status;
}

/* ---- life ----------------------------------------------------------------------------------- */

static void drop_python(struct ext_adapter *adapter)
{
    while (adapter->accepted != NULL) {
        struct chunk_object *chunk = adapter->accepted->chunk;
        let_go(adapter, chunk);
        Py_DECREF(chunk);
    }
    Py_CLEAR(adapter->alloc);
    Py_CLEAR(adapter->free);
    Py_CLEAR(adapter->object);
    Py_CLEAR(adapter->streams);
    Py_CLEAR(adapter->module);
}

/* After the gate is closed the Python objects are left to the end of the process. */
static void adapter_destroy(void *context)
{
    struct ext_adapter *adapter = context;
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return;
    if (adapter->deferred != NULL)
        ext_defer_release(adapter->deferred, adapter->inner);
    else
        gp_backing_release(adapter->inner);
    drop_python(adapter);
    PyMem_RawFree(adapter);
    ext_detach(&attached);
}

static const gp_backing_ops adapter_ops = {adapter_alloc, adapter_free, adapter_destroy};

static struct ext_adapter *new_adapter(bool defers)
{
    struct ext_adapter *adapter = PyMem_RawCalloc(1, sizeof(*adapter));
    if (adapter != NULL && defers) {
        adapter->deferred = PyMem_RawCalloc(1, sizeof(*adapter->deferred));
        if (adapter->deferred == NULL) {
            PyMem_RawFree(adapter);
            adapter = NULL;
        }
    }
    if (adapter == NULL)
        PyErr_NoMemory();
    return adapter;
}

struct ext_adapter *ext_adapter_create(PyObject *module, struct ext_supplier *supplier,
                                       const char *name, gp_backing **out)
{
    struct module_state *state = PyModule_GetState(module);
    struct ext_adapter *adapter =
        new_adapter(supplier->object != NULL && ext_backing_may_call(state, supplier->object));
    if (adapter == NULL)
        return NULL;
    gp_error error = {0};
    gp_status status = gp_backing_create(&adapter_ops, adapter, out, &error);
    if (status != GP_OK) {
        PyMem_RawFree(adapter->deferred);
        PyMem_RawFree(adapter);
        ext_raise(state, status, &error, NULL);
        return NULL;
    }
    adapter->state = state;
    adapter->module = Py_NewRef(module);
    adapter->inner = supplier->inner;
    adapter->alloc = supplier->alloc;
    adapter->free = supplier->free;
    adapter->object = supplier->object;
    memset(supplier, 0, sizeof(*supplier));
    PyOS_snprintf(adapter->name, sizeof(adapter->name), "%s", name);
    return adapter;
}

int ext_adapter_traverse(struct ext_adapter *adapter, visitproc visit, void *arg)
{
    Py_VISIT(adapter->module);
    Py_VISIT(adapter->alloc);
    Py_VISIT(adapter->free);
    Py_VISIT(adapter->object);
    Py_VISIT(adapter->streams);
    for (struct ext_hold *hold = adapter->accepted; hold != NULL; hold = hold->next)
        Py_VISIT(hold->chunk);
    return 0;
}

/* ---- suppliers ------------------------------------------------------------------------------ */

static PyObject *callable_of(PyObject *object, PyObject *name)
{
    PyObject *callable = PyObject_GetAttr(object, name);
    if (callable != NULL && PyCallable_Check(callable))
        return callable;
    if (callable != NULL || PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Format(PyExc_TypeError, "a backing needs callable alloc and free; %.200s has no %U",
                     Py_TYPE(object)->tp_name, name);
    Py_XDECREF(callable);
    return NULL;
}

int ext_supplier_of_object(struct module_state *state, PyObject *object,
                           struct ext_supplier *supplier)
{
    memset(supplier, 0, sizeof(*supplier));
    gp_backing *inner = ext_backing_of(state, object);
    if (inner == NULL && PyErr_Occurred())
        return -1;
    if (inner != NULL) {
        supplier->inner = gp_backing_retain(inner);
    } else {
        supplier->alloc = callable_of(object, state->name_alloc);
        supplier->free = supplier->alloc != NULL ? callable_of(object, state->name_free) : NULL;
        if (supplier->free == NULL) {
            ext_supplier_clear(supplier);
            return -1;
        }
    }
    supplier->object = Py_NewRef(object);
    return 0;
}

void ext_supplier_clear(struct ext_supplier *supplier)
{
    gp_backing_release(supplier->inner);
    supplier->inner = NULL;
    Py_CLEAR(supplier->alloc);
    Py_CLEAR(supplier->free);
    Py_CLEAR(supplier->object);
}
