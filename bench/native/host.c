/* SPDX-License-Identifier: Apache-2.0
 *
 * The floor on host: the system calls that a chunk of the host device costs, in their order, with
 * nothing around them; and plain copies and touches. Addresses are reserved outside of the clock.
 */
#include "bench.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* older C libraries lack the name */
#endif

#define GRANULARITY ((size_t)2 << 20) /* bytes: what the host device aligns to */
#define SMALL_PAGE  4096
#define PRIVATE     (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

void bench_touch_pages(char *at, size_t size)
{
    for (size_t offset = 0; offset < size; offset += SMALL_PAGE)
        ((volatile char *)at)[offset] = 1;
}

/* 0 or errno. Moves pages and leaves the range that they came from empty. */
static int move(char *from, char *to, size_t size)
{
    void *moved = mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to);
    return moved == MAP_FAILED ? errno : 0;
}

static int get_chunk(char **home, char *va, size_t size)
{
    *home = mmap(NULL, size, PROT_NONE, PRIVATE, -1, 0);
    if (*home == MAP_FAILED) {
        *home = NULL;
        return errno;
    }
    (void)madvise(*home, size, MADV_HUGEPAGE);
    int code = move(*home, va, size);
    if (code == 0 && mprotect(va, size, PROT_READ | PROT_WRITE) != 0)
        code = errno;
    return code;
}

static int give_back_chunk(char *home, char *va, size_t size)
{
    if (mprotect(va, size, PROT_NONE) != 0)
        return errno;
    int code = move(va, home, size);
    if (code != 0)
        return code;
    if (mmap(va, size, PROT_NONE, PRIVATE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return errno;
    return 0;
}

struct floor {
    size_t *sizes;
    char **homes;
    Py_ssize_t count;
    bool touch;
    double get, back; /* seconds */
};

/* 0 or errno. What was got is unmapped in every case. */
static int run_floor(struct floor *floor, char *base)
{
    int code = 0;
    Py_ssize_t made = 0;
    char *va = base;
    const double begin = bench_now();
    for (; code == 0 && made < floor->count; made++) {
        code = get_chunk(&floor->homes[made], va, floor->sizes[made]);
        va += floor->sizes[made];
    }
    floor->get = bench_now() - begin;
    if (code == 0 && floor->touch)
        bench_touch_pages(base, (size_t)(va - base));
    const double middle = bench_now();
    va = base;
    for (Py_ssize_t i = 0; i < made && floor->homes[i] != NULL; i++) {
        int failed = give_back_chunk(floor->homes[i], va, floor->sizes[i]);
        if (munmap(floor->homes[i], floor->sizes[i]) != 0 && failed == 0)
            failed = errno;
        code = code == 0 ? failed : code;
        va += floor->sizes[i];
    }
    floor->back = bench_now() - middle;
    return code;
}

static int reserve_and_run(struct floor *floor)
{
    size_t total = GRANULARITY;
    for (Py_ssize_t i = 0; i < floor->count; i++) {
        if (floor->sizes[i] % GRANULARITY != 0 ||
            __builtin_add_overflow(total, floor->sizes[i], &total))
            return EINVAL;
    }
    char *start = mmap(NULL, total, PROT_NONE, PRIVATE, -1, 0);
    if (start == MAP_FAILED)
        return errno;
    const size_t head = -(uintptr_t)start % GRANULARITY;
    int code = run_floor(floor, start + head);
    (void)munmap(start, total);
    return code;
}

PyObject *bench_host_floor(PyObject *module, PyObject *args)
{
    PyObject *sequence;
    int touched, code = ENOMEM;
    (void)module;
    if (!PyArg_ParseTuple(args, "Op:host_floor", &sequence, &touched))
        return NULL;
    struct floor floor = {.touch = touched != 0};
    floor.sizes = bench_sizes(sequence, &floor.count);
    if (floor.sizes == NULL)
        return NULL;
    floor.homes = PyMem_Calloc((size_t)floor.count, sizeof *floor.homes);
    if (floor.homes != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        code = reserve_and_run(&floor);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(floor.sizes);
    PyMem_Free(floor.homes);
    if (code != 0) {
        errno = code;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("dd", floor.get, floor.back);
}

PyObject *bench_host_copy(PyObject *module, PyObject *args)
{
    PyObject *to_object, *from_object;
    Py_ssize_t size, count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnn:host_copy", &to_object, &from_object, &size, &count))
        return NULL;
    void *to = PyLong_AsVoidPtr(to_object);
    void *from = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(from_object);
    if (PyErr_Occurred())
        return NULL;
    if (to == NULL || from == NULL || size < 1 || count < 1)
        return PyErr_Format(PyExc_ValueError, "addresses, size and count are not 0");
    double took;
    Py_BEGIN_ALLOW_THREADS;
    const double begin = bench_now();
    for (Py_ssize_t i = 0; i < count; i++)
        memcpy(to, from, (size_t)size);
    took = bench_now() - begin;
    Py_END_ALLOW_THREADS;
    return PyFloat_FromDouble(took);
}

PyObject *bench_touch(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "On:touch", &object, &size))
        return NULL;
    char *at = PyLong_AsVoidPtr(object);
    if (PyErr_Occurred())
        return NULL;
    if (at == NULL || size < 1)
        return PyErr_Format(PyExc_ValueError, "address and size are not 0");
    Py_BEGIN_ALLOW_THREADS;
    bench_touch_pages(at, (size_t)size);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *bench_touch_new(PyObject *module, PyObject *args)
{
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "n:touch_new", &size))
        return NULL;
    if (size < 1)
        return PyErr_Format(PyExc_ValueError, "size is at least 1");
    char *pages = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, PRIVATE, -1, 0);
    if (pages == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_BEGIN_ALLOW_THREADS;
    (void)madvise(pages, (size_t)size, MADV_HUGEPAGE);
    bench_touch_pages(pages, (size_t)size);
    (void)munmap(pages, (size_t)size);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
