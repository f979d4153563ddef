/* SPDX-License-Identifier: Apache-2.0
 *
 * The module growpool._bench._native: its list of functions, and the helpers that all of them use.
 */
#include "bench.h"

#include <time.h>

const struct gp_c_api *bench_gp;

PyMODINIT_FUNC PyInit__native(void);

double bench_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

size_t *bench_sizes(PyObject *sequence, Py_ssize_t *count)
{
    PyObject *items = PySequence_Fast(sequence, "sizes are a sequence of ints");
    if (items == NULL)
        return NULL;
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(items);
    size_t *sizes = PyMem_Calloc((size_t)length + 1, sizeof *sizes);
    if (sizes == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; sizes != NULL && i < length; i++) {
        sizes[i] = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(items, i));
        if (!PyErr_Occurred() && sizes[i] == 0)
            PyErr_SetString(PyExc_ValueError, "a size is at least 1");
        if (PyErr_Occurred()) {
            PyMem_Free(sizes);
            sizes = NULL;
        }
    }
    if (sizes != NULL && length == 0) {
        PyErr_SetString(PyExc_ValueError, "no sizes");
        PyMem_Free(sizes);
        sizes = NULL;
    }
    Py_DECREF(items);
    *count = length;
    return sizes;
}

static PyMethodDef methods[] = {
    {"pair", bench_pair, METH_VARARGS,
     "pair(pool, size, stream, count): seconds that count times malloc and free took in C."},
    {"resize", bench_resize, METH_VARARGS,
     "resize(pool, size, touch): seconds of resizing a new range to size, and to nothing."},
    {"fill", bench_fill, METH_VARARGS,
     "fill(pool, size, stream, count): seconds for count mallocs, then for freeing them mixed."},
    {"threads", bench_threads, METH_VARARGS,
     "threads(pool, size, streams, count): seconds that a thread for each stream took together."},
    {"cuda_floor", bench_cuda_floor, METH_VARARGS,
     "cuda_floor(device, sizes): seconds of raw driver calls to get the chunks, to give them "
     "back."},
    {"cuda_memory", bench_cuda_memory, METH_VARARGS,
     "cuda_memory(device): free and total bytes, as the driver says."},
    {"cuda_alloc", bench_cuda_alloc, METH_VARARGS,
     "cuda_alloc(device, size): an address from cuMemAlloc."},
    {"cuda_free", bench_cuda_free, METH_VARARGS, "cuda_free(device, address): cuMemFree."},
    {"cuda_ask", bench_cuda_ask, METH_VARARGS,
     "cuda_ask(device, stream, count): seconds of asking whether it captures, and for its id."},
    {"cuda_copy", bench_cuda_copy, METH_VARARGS,
     "cuda_copy(device, to, source, size, count): seconds of count copies on the device."},
    {"host_floor", bench_host_floor, METH_VARARGS,
     "host_floor(sizes, touch): seconds of raw system calls to get the chunks, to give them back."},
    {"host_copy", bench_host_copy, METH_VARARGS,
     "host_copy(to, source, size, count): seconds of count calls of memcpy."},
    {"touch", bench_touch, METH_VARARGS, "touch(address, size): writes into every page."},
    {"touch_new", bench_touch_new, METH_VARARGS,
     "touch_new(size): maps fresh host memory, writes into every page, and unmaps it."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    (void)module;
    bench_gp = gp_c_api_import(GP_C_API_VERSION);
    return bench_gp != NULL ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "growpool._bench._native",
    .m_doc = "What the benchmark measures in C.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
