/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads that Python never saw, in an extension of somebody else's: they wait for commands, and allocate and
 * free on pools that were made in Python, through growpool's capsule. Tests start and watch them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <growpool/capi.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define MOST_THREADS   16
#define LONGEST_WAIT_S 15 /* a thread that hangs becomes a failure */

static const struct gp_c_api *gp;

PyMODINIT_FUNC PyInit_foreign(void);

/* Of count_malloc.c, where that is preloaded. */
static void (*count_begin)(void);
static uint64_t (*count_end)(void);

/* ---- a thread and its commands ----------------------------------------------------------------- */

struct foreign {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    gp_pool *pool;
    gp_range *range;
    char
        command; /* 'a' allocate, 'f' free, 'c' commit every other page of a new range, 'd' drop it,
                     't' trim, 'r' release its pool, 'q' end; 0: none */
    size_t number; /* bytes or address */
    uintptr_t address; /* result of 'a' */
    gp_status status;
    gp_error error;
    uint64_t mallocs; /* made by the thread in the latest command */
};

static struct foreign threads[MOST_THREADS];

static gp_status allocate(gp_pool *pool, size_t bytes, uintptr_t *address, gp_error *error)
{
    gp_stream *stream = NULL;
    gp_status status = gp->pool_stream(pool, 0, &stream, error);
    if (status == GP_OK)
        status = gp->pool_malloc(pool, bytes, stream, 0, address, error);
    gp->stream_release(stream);
    return status;
}

/* Every other page of a new range, `count` of them. */
static gp_status commit(struct foreign *self, size_t count)
{
    gp_stream *stream = NULL;
    gp_status status = gp->pool_stream(self->pool, 0, &stream, &self->error);
    if (status == GP_OK)
        status = gp->range_create(self->pool, (size_t)1 << 30, stream, &self->range, &self->error);
    gp->stream_release(stream);
    for (size_t i = 0; i < count && status == GP_OK; i++) {
        size_t page = gp->range_granularity(self->range);
        gp_interval part = {2 * i * page, page};
        status = gp->range_commit(self->range, &part, 1, NULL, NULL, &self->error);
    }
    return status;
}

static gp_status obey(struct foreign *self, char command)
{
    switch (command) {
    case 'a':
        return allocate(self->pool, self->number, &self->address, &self->error);
    case 'f':
        return gp->pool_free(self->pool, (uintptr_t)self->number, NULL, 0, &self->error);
    case 'c':
        return commit(self, self->number);
    case 'd':
        gp->range_release(self->range);
        self->range = NULL;
        return GP_OK;
    case 't':
        return gp->pool_trim(self->pool, 0, 0, NULL, &self->error);
    default:
        gp->pool_release(self->pool);
        self->pool = NULL;
        return GP_OK;
    }
}

static void *serve(void *context)
{
    struct foreign *self = context;
    gp_pool_stats stats;
    gp->pool_get_stats(self->pool, &stats); /* what a thread's first call prepares is not counted */
    pthread_mutex_lock(&self->lock);
    while (self->command != 'q') {
        char command = self->command;
        if (command == 0) {
            pthread_cond_wait(&self->changed, &self->lock);
            continue;
        }
        pthread_mutex_unlock(&self->lock);
        if (count_begin != NULL)
            count_begin();
        gp_status status = obey(self, command);
        uint64_t mallocs = count_end != NULL ? count_end() : 0;
        pthread_mutex_lock(&self->lock);
        self->status = status;
        self->mallocs = mallocs;
        self->command = 0;
        pthread_cond_broadcast(&self->changed);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

static void give(struct foreign *self, char command, size_t number)
{
    pthread_mutex_lock(&self->lock);
    self->number = number;
    self->error = (gp_error){0};
    self->command = command;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
}

/* True when the latest command is done. */
static int wait_until_done(struct foreign *self)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += LONGEST_WAIT_S;
    int timed_out = 0;
    pthread_mutex_lock(&self->lock);
    while (self->command != 0 && !timed_out)
        timed_out = pthread_cond_timedwait(&self->changed, &self->lock, &end) != 0;
    pthread_mutex_unlock(&self->lock);
    return !timed_out;
}

/* ---- what Python sees -------------------------------------------------------------------------- */

static struct foreign *thread_of(PyObject *number)
{
    long index = PyLong_AsLong(number);
    if (index >= 0 && index < MOST_THREADS && threads[index].thread != 0)
        return &threads[index];
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no such thread");
    return NULL;
}

/* start(pool) -> number of a new thread, which holds a reference to the pool. */
static PyObject *py_start(PyObject *module, PyObject *object)
{
    int index = 0;
    (void)module;
    while (index < MOST_THREADS && threads[index].thread != 0)
        index++;
    if (index == MOST_THREADS)
        return PyErr_Format(PyExc_RuntimeError, "%d threads are enough", MOST_THREADS);
    struct foreign *self = &threads[index];
    memset(self, 0, sizeof *self);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    self->pool = gp->pool_of(object);
    if (self->pool == NULL)
        return NULL;
    if (pthread_create(&self->thread, NULL, serve, self) != 0)
        return PyErr_Format(PyExc_RuntimeError, "no thread");
    return PyLong_FromLong(index);
}

/* begin(thread, command, number=0): returns at once. */
static PyObject *py_begin(PyObject *module, PyObject *args)
{
    PyObject *number;
    const char *command;
    Py_ssize_t value = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "Os|n", &number, &command, &value))
        return NULL;
    struct foreign *self = thread_of(number);
    if (self == NULL)
        return NULL;
    give(self, command[0], (size_t)value);
    Py_RETURN_NONE;
}

static PyObject *result_of(const struct foreign *self, int done)
{
    if (!done)
        return PyErr_Format(PyExc_TimeoutError, "the thread hangs");
    if (self->status == GP_OK)
        return PyLong_FromSize_t(self->address);
    return PyErr_Format(PyExc_RuntimeError, "%s: %s", gp->status_text(self->status),
                        self->error.message);
}

/* wait(thread) -> the address of the latest allocation. Detached. */
static PyObject *py_wait(PyObject *module, PyObject *number)
{
    struct foreign *self = thread_of(number);
    int done;
    (void)module;
    if (self == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS done = wait_until_done(self);
    Py_END_ALLOW_THREADS return result_of(self, done);
}

/* wait_attached(thread): the same, and no other thread can have the interpreter meanwhile. */
static PyObject *py_wait_attached(PyObject *module, PyObject *number)
{
    struct foreign *self = thread_of(number);
    (void)module;
    return self != NULL ? result_of(self, wait_until_done(self)) : NULL;
}

/* mallocs(thread): how often the latest command called malloc and its kin; None if nobody counts. */
static PyObject *py_mallocs(PyObject *module, PyObject *number)
{
    struct foreign *self = thread_of(number);
    (void)module;
    if (self != NULL && count_begin == NULL)
        Py_RETURN_NONE;
    return self != NULL ? PyLong_FromUnsignedLongLong(self->mallocs) : NULL;
}

/* end(thread): it ends, and lets go of its pool. Detached. */
static PyObject *py_end(PyObject *module, PyObject *number)
{
    struct foreign *self = thread_of(number);
    (void)module;
    if (self == NULL)
        return NULL;
    give(self, 'q', 0);
    Py_BEGIN_ALLOW_THREADS pthread_join(self->thread, NULL);
    gp->pool_release(self->pool);
    Py_END_ALLOW_THREADS self->thread = 0;
    Py_RETURN_NONE;
}

/* ---- many threads at once ---------------------------------------------------------------------- */

#define BOXES 32

static struct storm {
    gp_pool *pool;
    int rounds;
    _Atomic(uintptr_t) boxes[BOXES]; /* blocks on their way to another thread; 0: none */
    _Atomic unsigned long allocations, refusals, failures;
    _Atomic unsigned seeds;
} storm;

static void *rage(void *unused)
{
    unsigned seed = atomic_fetch_add(&storm.seeds, 1);
    (void)unused;
    for (int i = 0; i < storm.rounds; i++) {
        uintptr_t address = 0;
        gp_status status =
            allocate(storm.pool, 512 + (size_t)rand_r(&seed) % (3u << 20), &address, NULL);
        if (status != GP_OK && status != GP_ERR_LIMIT && status != GP_ERR_OUT_OF_MEMORY)
            atomic_fetch_add(&storm.failures, 1);
        atomic_fetch_add(status == GP_OK ? &storm.allocations : &storm.refusals, 1);
        address = atomic_exchange(&storm.boxes[(unsigned)rand_r(&seed) % BOXES], address);
        if (address != 0 && gp->pool_free(storm.pool, address, NULL, 0, NULL) != GP_OK)
            atomic_fetch_add(&storm.failures, 1);
        if (rand_r(&seed) % 16 == 0 &&
            gp->pool_trim(storm.pool, 0, GP_TRIM_NO_WAIT, NULL, NULL) != GP_OK)
            atomic_fetch_add(&storm.failures, 1);
    }
    return NULL;
}

static void run_storm(int count)
{
    pthread_t raging[MOST_THREADS];
    for (int i = 0; i < count; i++)
        if (pthread_create(&raging[i], NULL, rage, NULL) != 0)
            abort();
    for (int i = 0; i < count; i++)
        pthread_join(raging[i], NULL);
    for (int i = 0; i < BOXES; i++)
        (void)gp->pool_free(storm.pool, atomic_exchange(&storm.boxes[i], 0), NULL, 0, NULL);
}

/* storm(pool, threads, rounds) -> (allocations, refusals, failures). Detached. */
static PyObject *py_storm(PyObject *module, PyObject *args)
{
    PyObject *object;
    int count;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oii", &object, &count, &storm.rounds))
        return NULL;
    storm.pool = count <= MOST_THREADS ? gp->pool_of(object) : NULL;
    if (storm.pool == NULL)
        return NULL;
    storm.allocations = storm.refusals = storm.failures = 0;
    Py_BEGIN_ALLOW_THREADS run_storm(count);
    gp->pool_release(storm.pool);
    Py_END_ALLOW_THREADS return Py_BuildValue("kkk", storm.allocations, storm.refusals,
                                              storm.failures);
}

static PyMethodDef methods[] = {
    {"start", py_start, METH_O, NULL},       {"begin", py_begin, METH_VARARGS, NULL},
    {"wait", py_wait, METH_O, NULL},         {"wait_attached", py_wait_attached, METH_O, NULL},
    {"mallocs", py_mallocs, METH_O, NULL},   {"end", py_end, METH_O, NULL},
    {"storm", py_storm, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "foreign", .m_size = -1,
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit_foreign(void)
{
    *(void **)&count_begin = dlsym(RTLD_DEFAULT, "count_malloc_begin");
    *(void **)&count_end = dlsym(RTLD_DEFAULT, "count_malloc_end");
    gp = gp_c_api_import(GP_C_API_VERSION);
    return gp != NULL ? PyModule_Create(&definition) : NULL;
}
