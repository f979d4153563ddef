/* SPDX-License-Identifier: Apache-2.0
 *
 * The one include of Python.h, and what differs between the CPython versions that growpool is built
 * for (3.11 and later). It declares nothing of growpool's own.
 */
#ifndef EXT_PY_H
#define EXT_PY_H

/* CPython's own inline functions are not written for our warning flags. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#pragma GCC diagnostic pop

#include <stdbool.h>

#if PY_VERSION_HEX < 0x030B0000
#error "growpool needs CPython 3.11 or later"
#endif

/* One name for test builds, whichever of the two the build sets. */
#if defined(GP_TESTING) && !defined(GROWPOOL_TESTING)
#define GROWPOOL_TESTING 1
#endif

/* Takes the raised exception away: a new reference with its traceback attached, or NULL for none. */
static inline PyObject *py_take_exception(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL && value != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* Raises an exception object, unchanged; takes the reference. NULL clears what is raised. */
static inline void py_raise_exception(PyObject *exception)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(exception);
#else
    if (exception == NULL) {
        PyErr_Clear();
        return;
    }
    PyObject *type = (PyObject *)Py_TYPE(exception);
    Py_INCREF(type);
    PyErr_Restore(type, exception, PyException_GetTraceback(exception));
#endif
}

/* Whether the calling thread holds the interpreter. PyGILState_Check() says yes to everybody once there
 * was a subinterpreter. */
static inline bool py_is_attached(void)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyThreadState *current = PyThreadState_GetUnchecked();
#else
    PyThreadState *current = _PyThreadState_UncheckedGet();
#endif
    return current != NULL && current == PyGILState_GetThisThreadState();
}

#endif
