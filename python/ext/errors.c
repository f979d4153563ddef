/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes Python exceptions of gp_error. The sentence in it is the message; the numbers become attributes.
 */
#include "errors.h"

#include "gate.h"

#include <stdint.h>

static const char *reason_text(gp_reason reason)
{
    switch (reason) {
    case GP_REASON_CLOSED:
        return "closed";
    case GP_REASON_FORKED:
        return "forked";
    case GP_REASON_POISONED:
        return "poisoned";
    case GP_REASON_EXITING:
        return "exiting";
    case GP_REASON_BUSY:
        return "busy";
    case GP_REASON_IN_USE:
        return "in_use";
    case GP_REASON_NONE:
        break;
    }
    return "";
}

PyObject *ext_limit_object(size_t limit)
{
    if (limit == SIZE_MAX)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(limit);
}

/* The message; a status without one still says what it is. New reference. */
static PyObject *message_of(gp_status status, const gp_error *error)
{
    const char *text = error != NULL ? error->message : "";
    if (text[0] == '\0')
        text = gp_status_text(status);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *out_of_memory(PyObject *class, PyObject *message, const gp_error *error)
{
    PyObject *limit = ext_limit_object(error->limit);
    if (limit == NULL)
        return NULL;
    return PyObject_CallFunction(class, "OnnNn", message, (Py_ssize_t)error->size,
                                 (Py_ssize_t)error->physical, limit,
                                 (Py_ssize_t)error->largest_free);
}

/* New reference, NULL with another exception raised. */
static PyObject *make_exception(struct module_state *state, gp_status status, const gp_error *error,
                                PyObject *message)
{
    switch (status) {
    case GP_ERR_OUT_OF_MEMORY:
        return out_of_memory(state->out_of_memory_error, message, error);
    case GP_ERR_LIMIT:
        return out_of_memory(state->limit_exceeded_error, message, error);
    case GP_ERR_ADDRESS_SPACE:
        return PyObject_CallOneArg(state->address_space_error, message);
    case GP_ERR_DRIVER:
    case GP_ERR_UNAVAILABLE:
        return PyObject_CallFunction(state->driver_error, "Oiss", message, error->code, error->name,
                                     error->call != NULL ? error->call : "");
    case GP_ERR_CAPTURE:
        return PyObject_CallOneArg(state->capture_error, message);
    case GP_ERR_STATE:
        return PyObject_CallFunction(state->pool_state_error, "Os", message,
                                     reason_text(error->reason));
    case GP_ERR_ARGUMENT:
    case GP_ERR_CONTRACT_VALUE:
        return PyObject_CallOneArg(PyExc_ValueError, message);
    case GP_ERR_CONTRACT_TYPE:
        return PyObject_CallOneArg(PyExc_TypeError, message);
    case GP_ERR_HOST_MEMORY:
        return PyObject_CallOneArg(PyExc_MemoryError, message);
    case GP_ERR_PINNED:
        return PyObject_CallOneArg(PyExc_BufferError, message);
    case GP_ERR_INTERRUPTED:
    case GP_ERR_REENTRANT:
    case GP_ERR_CALLBACK:
    case GP_NOT_READY:
    case GP_OK:
        break;
    }
    return PyObject_CallOneArg(PyExc_RuntimeError, message);
}

void ext_raise(struct module_state *state, gp_status status, const gp_error *error, PyObject *cause)
{
    static const gp_error no_details = {.limit = SIZE_MAX};
    if (status == GP_ERR_STATE && error != NULL &&
        (error->reason == GP_REASON_CLOSED || error->reason == GP_REASON_EXITING))
        ext_gate_park_if_ending();
    PyObject *message = message_of(status, error);
    if (message == NULL)
        return;
    PyObject *exception =
        make_exception(state, status, error != NULL ? error : &no_details, message);
    Py_DECREF(message);
    if (exception == NULL)
        return;
    if (cause != NULL)
        PyException_SetCause(exception, Py_NewRef(cause));
    PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_DECREF(exception);
}

void ext_raise_closed(struct module_state *state, const char *what)
{
    gp_error error = {0};
    gp_error_set(&error, GP_ERR_STATE, "%s is closed", what);
    error.reason = GP_REASON_CLOSED;
    ext_raise(state, GP_ERR_STATE, &error, NULL);
}

int ext_load_errors(struct module_state *state)
{
    const struct {
        const char *name;
        PyObject **slot;
    } classes[] = {
        {"Error", &state->error},
        {"OutOfMemoryError", &state->out_of_memory_error},
        {"LimitExceededError", &state->limit_exceeded_error},
        {"AddressSpaceError", &state->address_space_error},
        {"DriverError", &state->driver_error},
        {"CaptureError", &state->capture_error},
        {"PoolStateError", &state->pool_state_error},
        {"ReleaseWarning", &state->release_warning},
    };
    PyObject *module = PyImport_ImportModule("growpool._errors");
    if (module == NULL)
        return -1;
    int result = 0;
    for (size_t i = 0; result == 0 && i < sizeof(classes) / sizeof(classes[0]); i++) {
        *classes[i].slot = PyObject_GetAttrString(module, classes[i].name);
        result = *classes[i].slot == NULL ? -1 : 0;
    }
    Py_DECREF(module);
    return result;
}
