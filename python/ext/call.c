/* SPDX-License-Identifier: Apache-2.0
 *
 * Frames of calls into the core. It never decides what an operation does, only how its end looks in
 * Python.
 */
#include "call.h"

#include <string.h>

#include "../../backing/backing_internal.h"
#include "errors.h"
#include "gate.h"

static _Thread_local struct ext_call *current;

struct ext_call *ext_call_current(void)
{
    return current;
}

void ext_call_begin(struct ext_call *call, struct module_state *state, unsigned flags)
{
    memset(call, 0, sizeof(*call));
    call->state = state;
    call->flags = flags;
    call->previous = current;
    current = call;
    call->saved = ext_leave_python();
}

static void reattach(struct ext_call *call)
{
    ext_reenter_python(call->saved);
    current = call->previous;
}

/* Makes ReleaseWarning(message) with `exception` as its cause: a new reference or NULL. */
static PyObject *release_warning(struct module_state *state, PyObject *message, PyObject *exception)
{
    PyObject *warning = PyObject_CallOneArg(state->release_warning, message);
    if (warning != NULL)
        PyException_SetCause(warning, Py_NewRef(exception));
    return warning;
}

static void report_unraisable(struct module_state *state, PyObject *message, PyObject *exception,
                              PyObject *culprit)
{
    PyObject *warning = release_warning(state, message, exception);
    if (warning != NULL)
        py_raise_exception(warning);
    PyErr_WriteUnraisable(culprit);
}

static bool is_memory_error(PyObject *exception)
{
    return PyErr_GivenExceptionMatches(exception, PyExc_MemoryError);
}

/* Keeps what is raised: the last MemoryError, unless there is anything else, then the first of that. */
static void keep_exception(struct ext_call *call, PyObject *culprit)
{
    PyObject *exception = py_take_exception();
    if (call->exception == NULL || is_memory_error(call->exception)) {
        Py_XSETREF(call->exception, exception);
    } else if (is_memory_error(exception)) {
        Py_DECREF(exception);
    } else {
        py_raise_exception(exception);
        PyErr_WriteUnraisable(culprit);
    }
}

void ext_call_keep_exception(PyObject *culprit)
{
    if (current == NULL)
        PyErr_WriteUnraisable(culprit);
    else
        keep_exception(current, culprit);
}

void ext_call_keep_release_error(struct module_state *state, PyObject *culprit, PyObject *message)
{
    struct ext_call *call = current;
    PyObject *exception = py_take_exception();
    if (call == NULL) {
        report_unraisable(state, message, exception, culprit);
    } else if (call->base_exception == NULL &&
               !PyErr_GivenExceptionMatches(exception, PyExc_Exception)) {
        call->base_exception = Py_NewRef(exception);
    } else {
        PyObject *entry = PyTuple_Pack(2, message, exception);
        if (call->release_errors == NULL)
            call->release_errors = PyList_New(0);
        if (entry == NULL || call->release_errors == NULL ||
            PyList_Append(call->release_errors, entry) < 0)
            PyErr_WriteUnraisable(culprit);
        Py_XDECREF(entry);
    }
    Py_DECREF(exception);
}

/* warnings.warn(ReleaseWarning(message)) with its cause. -1 and raised when the filter says error. */
static int warn(struct ext_call *call, PyObject *message, PyObject *exception)
{
    PyObject *warning = release_warning(call->state, message, exception);
    PyObject *warnings = warning != NULL ? PyImport_ImportModule("warnings") : NULL;
    PyObject *result =
        warnings != NULL ? PyObject_CallMethod(warnings, "warn", "O", warning) : NULL;
    Py_XDECREF(warnings);
    Py_XDECREF(warning);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* What is raised and is no Exception, such as an interrupt, is kept, to be raised at the end above
 * everything else; true then. Of several the first. */
static bool keep_interrupt(struct ext_call *call)
{
    if (call == NULL || call->base_exception != NULL || PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    call->base_exception = py_take_exception();
    return true;
}

void ext_call_drop_exception(PyObject *culprit)
{
    if (PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    else if (!keep_interrupt(current))
        PyErr_WriteUnraisable(culprit);
}

/* What came of a warning while `raised` (taken over) is on its way: anything but an interrupt goes to
 * sys.unraisablehook, so nothing is lost. */
static void keep_warning_error(struct ext_call *call, PyObject *message, PyObject *raised)
{
    if (!keep_interrupt(call))
        PyErr_WriteUnraisable(message);
    py_raise_exception(raised);
}

/* Warns about the frees that failed, from `first` on. The first error of a call is the one that is
 * raised. */
static void warn_release_errors(struct ext_call *call, Py_ssize_t first)
{
    if (call->release_errors == NULL)
        return;
    for (Py_ssize_t i = first; i < PyList_GET_SIZE(call->release_errors); i++) {
        PyObject *entry = PyList_GET_ITEM(call->release_errors, i);
        PyObject *message = PyTuple_GET_ITEM(entry, 0);
        PyObject *raised = py_take_exception();
        if (warn(call, message, PyTuple_GET_ITEM(entry, 1)) == 0)
            py_raise_exception(raised);
        else if (raised != NULL)
            keep_warning_error(call, message, raised);
    }
}

/* Raises what the status says; returns how many release errors were used up by that. What a signal handler
 * raised is raised even if the operation came to its end all the same. */
static Py_ssize_t raise_status(struct ext_call *call, gp_status status)
{
    bool own = status == GP_ERR_CALLBACK || status == GP_ERR_INTERRUPTED;
    if (call->exception != NULL && (own || !is_memory_error(call->exception))) {
        py_raise_exception(call->exception);
        call->exception = NULL;
        return 0;
    }
    if (status == GP_OK)
        return 0;
    bool free_failed =
        status == GP_ERR_CALLBACK && (call->release_errors != NULL || call->base_exception != NULL);
    if (free_failed && !(call->flags & EXT_CALL_FREE_RAISES))
        return 0; /* reported as warnings; the operation itself did its work */
    if (free_failed && call->release_errors != NULL) {
        PyObject *entry = PyList_GET_ITEM(call->release_errors, 0);
        py_raise_exception(Py_NewRef(PyTuple_GET_ITEM(entry, 1)));
        return 1;
    }
    if (!free_failed)
        ext_raise(call->state, status, &call->error, call->exception);
    return 0;
}

/* Chains of contexts are followed this far at most: Python code can make one that is a circle. */
#define MAX_CONTEXTS 1000

/* The last of the exception's contexts, or `wanted` if that comes first. New reference. */
static PyObject *find_context(PyObject *exception, const PyObject *wanted)
{
    PyObject *link = Py_NewRef(exception), *next;
    for (int i = 0; i < MAX_CONTEXTS && link != wanted; i++) {
        next = PyException_GetContext(link);
        if (next == NULL)
            break;
        Py_SETREF(link, next);
    }
    return link;
}

/* Puts `earlier` at the far end of the exception's contexts, unless the two are linked already. */
static void add_context(PyObject *exception, PyObject *earlier)
{
    PyObject *last = find_context(exception, earlier);
    PyObject *first = find_context(earlier, exception);
    if (last != earlier && first != exception)
        PyException_SetContext(last, Py_NewRef(earlier));
    Py_DECREF(first);
    Py_DECREF(last);
}

bool ext_add_context(PyObject *const *args, Py_ssize_t nargs)
{
    if (PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    PyObject *raised = py_take_exception();
    if (nargs > 1 && PyExceptionInstance_Check(args[1]))
        add_context(raised, args[1]);
    py_raise_exception(raised);
    return true;
}

static void raise_base_exception(struct ext_call *call)
{
    PyObject *raised = py_take_exception();
    if (raised != NULL)
        add_context(call->base_exception, raised);
    Py_XDECREF(raised);
    py_raise_exception(call->base_exception);
    call->base_exception = NULL;
}

int ext_call_end(struct ext_call *call, gp_status status)
{
    reattach(call);
    if (status == GP_OK && call->exception == NULL && call->release_errors == NULL &&
        call->base_exception == NULL)
        return 0;
    warn_release_errors(call, raise_status(call, status));
    if (call->base_exception != NULL)
        raise_base_exception(call);
    /* Dropping exceptions can run anything: set ours aside meanwhile. */
    PyObject *raised = py_take_exception();
    Py_CLEAR(call->exception);
    Py_CLEAR(call->release_errors);
    if (raised == NULL)
        return 0;
    py_raise_exception(raised);
    return -1;
}

void ext_call_end_quietly(struct ext_call *call)
{
    reattach(call);
    for (Py_ssize_t i = 0; call->release_errors && i < PyList_GET_SIZE(call->release_errors); i++) {
        PyObject *entry = PyList_GET_ITEM(call->release_errors, i);
        report_unraisable(call->state, PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1),
                          NULL);
    }
    if (call->base_exception != NULL) {
        py_raise_exception(call->base_exception);
        PyErr_WriteUnraisable(NULL);
    }
    Py_CLEAR(call->exception);
    Py_CLEAR(call->release_errors);
}

static int raise_if_forked(struct module_state *state)
{
    gp_error error = {0};
    gp_status status = gp__check_fork(&error);
    if (status == GP_OK)
        return 0;
    ext_raise(state, status, &error, NULL);
    return -1;
}

int ext_call_interrupted(void *unused)
{
    (void)unused;
    struct ext_call *call = current;
    if (call == NULL)
        return 0;
    if (call->deadline != 0 && ext_now_ns() > call->deadline)
        return 1;
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return 1;
    int stop = PyErr_CheckSignals();
    if (stop == 0)
        stop = raise_if_forked(call->state); /* by a signal handler, which came back in the child */
    if (stop != 0)
        keep_exception(call, NULL);
    ext_detach(&attached);
    return stop != 0;
}
