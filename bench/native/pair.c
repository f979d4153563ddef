/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools made in Python, used from C: one thread, several threads, many live blocks. Every function
 * resolves its streams before the clock starts, and leaves no block behind when it fails.
 */
#include "bench.h"

#include <pthread.h>
#include <stdio.h>

/* One loop of malloc and free, and where it ran. */
struct work {
    gp_pool *pool;
    gp_stream *stream;
    size_t size;
    size_t count;
    pthread_mutex_t *gate; /* closed until all threads are there; NULL: none */
    const bool *cancelled; /* read behind the gate */
    double begin, end; /* seconds */
    gp_status status;
    gp_error error;
};

static PyObject *raise_status(gp_status status, const gp_error *error)
{
    return PyErr_Format(PyExc_RuntimeError, "%s: %s", bench_gp->status_text(status),
                        error->message);
}

/* A new range to `size` and back to nothing: seconds of each. Its addresses are reserved outside of the clock,
 * as the floor's are, which also leaves the caches as the floor finds them. */
static gp_status run_resize(gp_pool *pool, size_t size, bool touch, double *grown, double *shrunk,
                            gp_error *error)
{
    const struct gp_c_api *gp = bench_gp;
    gp_stream *stream = NULL;
    gp_range *range = NULL;
    gp_status status = gp->pool_stream(pool, 0, &stream, error);
    if (status == GP_OK)
        status = gp->range_create(pool, size, stream, &range, error);
    double begin = bench_now();
    if (status == GP_OK)
        status = gp->range_resize(range, size, NULL, 0, NULL, error);
    *grown = bench_now() - begin;
    if (status == GP_OK && touch)
        bench_touch_pages((char *)gp->range_address(range), size);
    begin = bench_now();
    if (status == GP_OK)
        status = gp->range_resize(range, 0, NULL, 0, NULL, error);
    if (status == GP_OK)
        status = gp->pool_trim(pool, 0, 0, NULL, error);
    *shrunk = bench_now() - begin;
    gp->range_release(range);
    gp->stream_release(stream);
    return status;
}

static void run_pairs(struct work *work)
{
    const struct gp_c_api *gp = bench_gp;
    uintptr_t address = 0;
    work->begin = bench_now();
    for (size_t i = 0; i < work->count && work->status == GP_OK; i++) {
        work->status =
            gp->pool_malloc(work->pool, work->size, work->stream, 0, &address, &work->error);
        if (work->status == GP_OK)
            work->status = gp->pool_free(work->pool, address, work->stream, 0, &work->error);
    }
    work->end = bench_now();
}

/* The pool and a stream of it; false with an exception. */
static bool open_work(struct work *work, PyObject *object, Py_ssize_t size, Py_ssize_t count)
{
    if (size < 1 || count < 1) {
        PyErr_SetString(PyExc_ValueError, "size and count are at least 1");
        return false;
    }
    work->size = (size_t)size;
    work->count = (size_t)count;
    work->pool = bench_gp->pool_of(object);
    return work->pool != NULL;
}

static bool open_stream(struct work *work, PyObject *handle)
{
    const size_t number = PyLong_AsSize_t(handle);
    if (PyErr_Occurred())
        return false;
    gp_status status = bench_gp->pool_stream(work->pool, number, &work->stream, &work->error);
    if (status != GP_OK)
        raise_status(status, &work->error);
    return status == GP_OK;
}

static void close_work(struct work *work)
{
    bench_gp->stream_release(work->stream);
    if (work->pool != NULL)
        bench_gp->pool_release(work->pool);
}

PyObject *bench_resize(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t size;
    int touch;
    double grown = 0, shrunk = 0;
    gp_error error = {0};
    gp_status status;
    (void)module;
    if (!PyArg_ParseTuple(args, "Onp:resize", &object, &size, &touch))
        return NULL;
    if (size < 1)
        return PyErr_Format(PyExc_ValueError, "size is at least 1");
    gp_pool *pool = bench_gp->pool_of(object);
    if (pool == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = run_resize(pool, (size_t)size, touch != 0, &grown, &shrunk, &error);
    bench_gp->pool_release(pool);
    Py_END_ALLOW_THREADS;
    if (status != GP_OK)
        return raise_status(status, &error);
    return Py_BuildValue("dd", grown, shrunk);
}

PyObject *bench_pair(PyObject *module, PyObject *args)
{
    PyObject *object, *handle, *result = NULL;
    Py_ssize_t size, count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOn:pair", &object, &size, &handle, &count))
        return NULL;
    struct work work = {.status = GP_OK};
    if (open_work(&work, object, size, count) && open_stream(&work, handle)) {
        Py_BEGIN_ALLOW_THREADS;
        run_pairs(&work);
        Py_END_ALLOW_THREADS;
        result = work.status == GP_OK ? PyFloat_FromDouble(work.end - work.begin)
                                      : raise_status(work.status, &work.error);
    }
    close_work(&work);
    return result;
}

/* ---- many live blocks -------------------------------------------------------------------------- */

/* Sets the seconds of both halves; on failure what was allocated is freed all the same. */
static void run_fill(struct work *work, uintptr_t *blocks, double *took, double *freed)
{
    const struct gp_c_api *gp = bench_gp;
    size_t made = 0;
    const double begin = bench_now();
    while (made < work->count && work->status == GP_OK) {
        work->status =
            gp->pool_malloc(work->pool, work->size, work->stream, 0, &blocks[made], &work->error);
        made += work->status == GP_OK;
    }
    *took = bench_now() - begin;
    /* A fixed shuffle, so that frees meet neighbours in every state. */
    uint64_t random = 88172645463325252u;
    for (size_t i = made; i > 1; i--) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        const size_t other = (size_t)(random % i);
        const uintptr_t kept = blocks[i - 1];
        blocks[i - 1] = blocks[other];
        blocks[other] = kept;
    }
    const double middle = bench_now();
    for (size_t i = 0; i < made; i++) {
        gp_error error = {0};
        gp_status status = gp->pool_free(work->pool, blocks[i], work->stream, 0, &error);
        if (status != GP_OK && work->status == GP_OK) {
            work->status = status;
            work->error = error;
        }
    }
    *freed = bench_now() - middle;
}

PyObject *bench_fill(PyObject *module, PyObject *args)
{
    PyObject *object, *handle, *result = NULL;
    Py_ssize_t size, count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOn:fill", &object, &size, &handle, &count))
        return NULL;
    struct work work = {.status = GP_OK};
    uintptr_t *blocks = NULL;
    if (!open_work(&work, object, size, count) || !open_stream(&work, handle))
        goto done;
    blocks = PyMem_Calloc((size_t)count, sizeof *blocks);
    if (blocks == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    double took = 0, freed = 0;
    Py_BEGIN_ALLOW_THREADS;
    run_fill(&work, blocks, &took, &freed);
    Py_END_ALLOW_THREADS;
    result = work.status == GP_OK ? Py_BuildValue("dd", took, freed)
                                  : raise_status(work.status, &work.error);
done:
    PyMem_Free(blocks);
    close_work(&work);
    return result;
}

/* ---- several threads --------------------------------------------------------------------------- */

static void *run_thread(void *argument)
{
    struct work *work = argument;
    pthread_mutex_lock(work->gate);
    const bool cancelled = *work->cancelled;
    pthread_mutex_unlock(work->gate);
    if (!cancelled)
        run_pairs(work);
    return NULL;
}

/* Starts a thread for each work behind a closed gate, opens it, waits for all. False: no thread. */
static bool run_threads(struct work *works, pthread_t *threads, Py_ssize_t count)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    bool cancelled = false;
    Py_ssize_t started = 0;
    pthread_mutex_lock(&gate);
    for (; started < count; started++) {
        works[started].gate = &gate;
        works[started].cancelled = &cancelled;
        if (pthread_create(&threads[started], NULL, run_thread, &works[started]) != 0)
            break;
    }
    cancelled = started < count;
    pthread_mutex_unlock(&gate);
    for (Py_ssize_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&gate);
    return !cancelled;
}

/* From the first thread's begin to the last one's end, or an exception. */
static PyObject *time_of_all(const struct work *works, Py_ssize_t count)
{
    double begin = works[0].begin, end = works[0].end;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (works[i].status != GP_OK)
            return raise_status(works[i].status, &works[i].error);
        begin = works[i].begin < begin ? works[i].begin : begin;
        end = works[i].end > end ? works[i].end : end;
    }
    return PyFloat_FromDouble(end - begin);
}

PyObject *bench_threads(PyObject *module, PyObject *args)
{
    PyObject *object, *handles, *result = NULL;
    Py_ssize_t size, count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOn:threads", &object, &size, &handles, &count))
        return NULL;
    PyObject *items = PySequence_Fast(handles, "streams are a sequence of ints");
    if (items == NULL)
        return NULL;
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(items);
    struct work *works = PyMem_Calloc((size_t)length + 1, sizeof *works);
    pthread_t *threads = PyMem_Calloc((size_t)length + 1, sizeof *threads);
    bool ready = works != NULL && threads != NULL;
    if (!ready) {
        PyErr_NoMemory();
    } else if (length == 0) {
        PyErr_SetString(PyExc_ValueError, "no streams");
        ready = false;
    }
    for (Py_ssize_t i = 0; ready && i < length; i++)
        ready = open_work(&works[i], object, size, count) &&
                open_stream(&works[i], PySequence_Fast_GET_ITEM(items, i));
    if (ready) {
        Py_BEGIN_ALLOW_THREADS;
        ready = run_threads(works, threads, length);
        Py_END_ALLOW_THREADS;
        if (!ready)
            PyErr_SetString(PyExc_RuntimeError, "the system starts no more threads");
        else
            result = time_of_all(works, length);
    }
    for (Py_ssize_t i = 0; works != NULL && i < length; i++)
        close_work(&works[i]);
    PyMem_Free(works);
    PyMem_Free(threads);
    Py_DECREF(items);
    return result;
}
