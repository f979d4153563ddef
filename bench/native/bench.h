/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of growpool._bench._native share. The module measures: pools through the public C
 * API, and the floors, which are the raw calls that the same memory costs without a pool. It owns no
 * memory beyond a call, except what cuda_alloc() hands out, and never prints.
 */
#ifndef BENCH_NATIVE_H
#define BENCH_NATIVE_H

#include "../../python/ext/py.h"

#include "../../python/ext/capi.h"

/* The extension's table; set once when the module is imported. */
extern const struct gp_c_api *bench_gp;

/* Seconds of a clock that only goes forward. */
double bench_now(void);

/* A list of positive sizes from a Python sequence of ints: *count of them, to be freed with
 * PyMem_Free(). NULL with an exception. Attached. */
size_t *bench_sizes(PyObject *sequence, Py_ssize_t *count);

/* Writes into every small page. */
void bench_touch_pages(char *at, size_t size);

/* Methods of the module: METH_VARARGS, attached; each lets go of the GIL for what it times. */
PyObject *bench_pair(PyObject *module, PyObject *args);
PyObject *bench_resize(PyObject *module, PyObject *args);
PyObject *bench_fill(PyObject *module, PyObject *args);
PyObject *bench_threads(PyObject *module, PyObject *args);
PyObject *bench_cuda_floor(PyObject *module, PyObject *args);
PyObject *bench_cuda_memory(PyObject *module, PyObject *args);
PyObject *bench_cuda_alloc(PyObject *module, PyObject *args);
PyObject *bench_cuda_free(PyObject *module, PyObject *args);
PyObject *bench_cuda_ask(PyObject *module, PyObject *args);
PyObject *bench_cuda_copy(PyObject *module, PyObject *args);
PyObject *bench_host_floor(PyObject *module, PyObject *args);
PyObject *bench_host_copy(PyObject *module, PyObject *args);
PyObject *bench_touch(PyObject *module, PyObject *args);
PyObject *bench_touch_new(PyObject *module, PyObject *args);

#endif
