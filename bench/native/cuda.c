/* SPDX-License-Identifier: Apache-2.0
 *
 * The floor on a GPU: the driver's own calls for a list of chunks, and copies beside cuMemAlloc. It
 * loads the driver when it is first asked, keeps each device's primary context for the life of the
 * process, and changes no setting of the device. All functions want the GIL on entry.
 */
#include "bench.h"

#include "../../backing/cuda_abi.h"

#include <dlfcn.h>
#include <stdio.h>

#define MOST_DEVICES 64

/* What the floor calls of the list in cuda_abi.h. */
#define NEEDED(X)                                                                                  \
    X(cuInit, 2000)                                                                                \
    X(cuGetErrorName, 6000)                                                                        \
    X(cuDeviceGet, 2000)                                                                           \
    X(cuDevicePrimaryCtxRetain, 7000)                                                              \
    X(cuCtxPushCurrent, 4000)                                                                      \
    X(cuCtxPopCurrent, 4000)                                                                       \
    X(cuMemGetInfo, 3020)                                                                          \
    X(cuMemAddressReserve, 10020)                                                                  \
    X(cuMemAddressFree, 10020)                                                                     \
    X(cuMemCreate, 10020)                                                                          \
    X(cuMemRelease, 10020)                                                                         \
    X(cuMemMap, 10020)                                                                             \
    X(cuMemSetAccess, 10020)                                                                       \
    X(cuMemUnmap, 10020)                                                                           \
    X(cuMemcpyAsync, 4000)                                                                         \
    X(cuStreamIsCapturing, 10000)                                                                  \
    X(cuStreamGetId, 12000)

static struct gp__cuda_api cu;
/* Beyond that list: for comparison alone, by their exported names. */
static gp__cu_result (*mem_alloc)(gp__cu_pointer *out, size_t size);
static gp__cu_result (*mem_free)(gp__cu_pointer at);
static gp__cu_result (*context_synchronize)(void);
static gp__cu_context contexts[MOST_DEVICES];
static bool loaded;

static bool say(const char *call, gp__cu_result code)
{
    const char *name = NULL;
    if (cu.cuGetErrorName != NULL)
        (void)cu.cuGetErrorName(code, &name);
    PyErr_Format(PyExc_RuntimeError, "%s: %s (%u)", call, name != NULL ? name : "?", code);
    return false;
}

static bool load(void)
{
    if (loaded)
        return true;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        PyErr_Format(PyExc_RuntimeError, "no CUDA driver: %s", dlerror());
        return false;
    }
    gp__cu_get_proc_address find = NULL;
    *(void **)&find = dlsym(library, "cuGetProcAddress");
    *(void **)&mem_alloc = dlsym(library, "cuMemAlloc_v2");
    *(void **)&mem_free = dlsym(library, "cuMemFree_v2");
    *(void **)&context_synchronize = dlsym(library, "cuCtxSynchronize");
    bool found = find != NULL;
#define FIND(name, version)                                                                        \
    found = found &&                                                                               \
            find(#name, (void **)&cu.name, (version), GP__CU_GET_PROC_ADDRESS_LEGACY_STREAM) ==    \
                GP__CUDA_SUCCESS &&                                                                \
            cu.name != NULL;
    NEEDED(FIND)
#undef FIND
    if (!found) {
        PyErr_SetString(PyExc_RuntimeError, "the CUDA driver lacks a function: too old");
        return false;
    }
    gp__cu_result code = cu.cuInit(0);
    loaded = code == GP__CUDA_SUCCESS;
    return loaded || say("cuInit", code);
}

/* Loads, and makes the device's primary context current; leave() undoes the latter. */
static bool enter(int device)
{
    if (device < 0 || device >= MOST_DEVICES) {
        PyErr_Format(PyExc_ValueError, "no device %d", device);
        return false;
    }
    if (!load())
        return false;
    gp__cu_result code;
    if (contexts[device] == NULL) {
        gp__cu_device found;
        code = cu.cuDeviceGet(&found, device);
        if (code == GP__CUDA_SUCCESS)
            code = cu.cuDevicePrimaryCtxRetain(&contexts[device], found);
        if (code != GP__CUDA_SUCCESS)
            return say("cuDevicePrimaryCtxRetain", code);
    }
    code = cu.cuCtxPushCurrent(contexts[device]);
    return code == GP__CUDA_SUCCESS || say("cuCtxPushCurrent", code);
}

static void leave(void)
{
    gp__cu_context was;
    (void)cu.cuCtxPopCurrent(&was);
}

/* ---- chunks ------------------------------------------------------------------------------------ */

struct floor {
    int device;
    const size_t *sizes;
    gp__cu_memory *handles;
    Py_ssize_t count;
    size_t total;
    Py_ssize_t created, mapped; /* how many chunks came so far */
    gp__cu_pointer base;
    double get, back; /* seconds */
};

/* CUDA's word; the call's name in *call. */
static gp__cu_result get_all(struct floor *floor, const char **call)
{
    const gp__cu_location here = {GP__CU_MEM_LOCATION_TYPE_DEVICE, floor->device};
    const gp__cu_allocation kind = {.type = GP__CU_MEM_ALLOCATION_TYPE_PINNED, .location = here};
    const gp__cu_access access = {here, GP__CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    *call = "cuMemAddressReserve";
    gp__cu_result code = cu.cuMemAddressReserve(&floor->base, floor->total, 0, 0, 0);
    gp__cu_pointer va = floor->base;
    for (Py_ssize_t i = 0; code == GP__CUDA_SUCCESS && i < floor->count; i++) {
        *call = "cuMemCreate";
        code = cu.cuMemCreate(&floor->handles[i], floor->sizes[i], &kind, 0);
        if (code != GP__CUDA_SUCCESS)
            return code;
        floor->created++;
        *call = "cuMemMap";
        code = cu.cuMemMap(va, floor->sizes[i], 0, floor->handles[i], 0);
        if (code != GP__CUDA_SUCCESS)
            return code;
        floor->mapped++;
        *call = "cuMemSetAccess";
        code = cu.cuMemSetAccess(va, floor->sizes[i], &access, 1);
        va += floor->sizes[i];
    }
    return code;
}

static gp__cu_result give_back(const struct floor *floor, const char **call)
{
    gp__cu_result first = GP__CUDA_SUCCESS;
    gp__cu_pointer va = floor->base;
    for (Py_ssize_t i = 0; i < floor->created; i++) {
        gp__cu_result code =
            i < floor->mapped ? cu.cuMemUnmap(va, floor->sizes[i]) : GP__CUDA_SUCCESS;
        if (code == GP__CUDA_SUCCESS)
            code = cu.cuMemRelease(floor->handles[i]);
        if (first == GP__CUDA_SUCCESS && code != GP__CUDA_SUCCESS) {
            first = code;
            *call = "cuMemUnmap, cuMemRelease";
        }
        va += floor->sizes[i];
    }
    return first;
}

static gp__cu_result run_floor(struct floor *floor, const char **call)
{
    const double begin = bench_now();
    gp__cu_result code = get_all(floor, call);
    const double middle = bench_now();
    const char *late = "";
    gp__cu_result undone = give_back(floor, &late);
    floor->get = middle - begin;
    floor->back = bench_now() - middle;
    if (floor->base != 0 && undone == GP__CUDA_SUCCESS) {
        late = "cuMemAddressFree";
        undone = cu.cuMemAddressFree(floor->base, floor->total);
    }
    if (code == GP__CUDA_SUCCESS && undone != GP__CUDA_SUCCESS) {
        *call = late;
        code = undone;
    }
    return code;
}

PyObject *bench_cuda_floor(PyObject *module, PyObject *args)
{
    struct floor floor = {0};
    PyObject *sequence, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "iO:cuda_floor", &floor.device, &sequence))
        return NULL;
    size_t *sizes = bench_sizes(sequence, &floor.count);
    if (sizes == NULL)
        return NULL;
    bool fits = true;
    for (Py_ssize_t i = 0; i < floor.count; i++)
        fits = fits && !__builtin_add_overflow(floor.total, sizes[i], &floor.total);
    floor.sizes = sizes;
    floor.handles = PyMem_Calloc((size_t)floor.count, sizeof *floor.handles);
    if (!fits) {
        PyErr_SetString(PyExc_OverflowError, "the sizes are beyond all addresses");
    } else if (floor.handles == NULL) {
        PyErr_NoMemory();
    } else if (enter(floor.device)) {
        const char *call = "";
        gp__cu_result code;
        Py_BEGIN_ALLOW_THREADS;
        code = run_floor(&floor, &call);
        leave();
        Py_END_ALLOW_THREADS;
        if (code == GP__CUDA_SUCCESS)
            result = Py_BuildValue("dd", floor.get, floor.back);
        else
            (void)say(call, code);
    }
    PyMem_Free(floor.handles);
    PyMem_Free(sizes);
    return result;
}

/* ---- the rest ---------------------------------------------------------------------------------- */

PyObject *bench_cuda_memory(PyObject *module, PyObject *args)
{
    int device;
    (void)module;
    if (!PyArg_ParseTuple(args, "i:cuda_memory", &device) || !enter(device))
        return NULL;
    size_t free_bytes = 0, total = 0;
    gp__cu_result code;
    Py_BEGIN_ALLOW_THREADS;
    code = cu.cuMemGetInfo(&free_bytes, &total);
    leave();
    Py_END_ALLOW_THREADS;
    if (code != GP__CUDA_SUCCESS) {
        (void)say("cuMemGetInfo", code);
        return NULL;
    }
    return Py_BuildValue("nn", (Py_ssize_t)free_bytes, (Py_ssize_t)total);
}

PyObject *bench_cuda_alloc(PyObject *module, PyObject *args)
{
    int device;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "in:cuda_alloc", &device, &size))
        return NULL;
    if (size < 1)
        return PyErr_Format(PyExc_ValueError, "size is at least 1");
    if (!enter(device))
        return NULL;
    gp__cu_pointer at = 0;
    gp__cu_result code = GP__CUDA_ERROR_NOT_FOUND;
    Py_BEGIN_ALLOW_THREADS;
    if (mem_alloc != NULL)
        code = mem_alloc(&at, (size_t)size);
    leave();
    Py_END_ALLOW_THREADS;
    if (code != GP__CUDA_SUCCESS) {
        (void)say("cuMemAlloc", code);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(at);
}

PyObject *bench_cuda_free(PyObject *module, PyObject *args)
{
    int device;
    unsigned long long at;
    (void)module;
    if (!PyArg_ParseTuple(args, "iK:cuda_free", &device, &at) || !enter(device))
        return NULL;
    gp__cu_result code = GP__CUDA_ERROR_NOT_FOUND;
    Py_BEGIN_ALLOW_THREADS;
    if (mem_free != NULL)
        code = mem_free(at);
    leave();
    Py_END_ALLOW_THREADS;
    if (code != GP__CUDA_SUCCESS) {
        (void)say("cuMemFree", code);
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *bench_cuda_ask(PyObject *module, PyObject *args)
{
    int device;
    unsigned long long stream;
    Py_ssize_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "iKn:cuda_ask", &device, &stream, &count))
        return NULL;
    if (count < 1)
        return PyErr_Format(PyExc_ValueError, "count is at least 1");
    if (!enter(device))
        return NULL;
    gp__cu_stream asked = (gp__cu_stream)(uintptr_t)stream;
    gp__cu_capture_status capture;
    unsigned long long id;
    gp__cu_result code = GP__CUDA_SUCCESS;
    double begin = bench_now();
    for (Py_ssize_t i = 0; code == GP__CUDA_SUCCESS && i < count; i++)
        code = cu.cuStreamIsCapturing(asked, &capture);
    const double capturing = bench_now() - begin;
    begin = bench_now();
    for (Py_ssize_t i = 0; code == GP__CUDA_SUCCESS && i < count; i++)
        code = cu.cuStreamGetId(asked, &id);
    const double named = bench_now() - begin;
    leave();
    if (code != GP__CUDA_SUCCESS) {
        (void)say("cuStreamIsCapturing, cuStreamGetId", code);
        return NULL;
    }
    return Py_BuildValue("dd", capturing, named);
}

PyObject *bench_cuda_copy(PyObject *module, PyObject *args)
{
    int device;
    unsigned long long to, from;
    Py_ssize_t size, count;
    (void)module;
    if (!PyArg_ParseTuple(args, "iKKnn:cuda_copy", &device, &to, &from, &size, &count))
        return NULL;
    if (size < 1 || count < 1)
        return PyErr_Format(PyExc_ValueError, "size and count are at least 1");
    if (!enter(device))
        return NULL;
    gp__cu_result code = GP__CUDA_ERROR_NOT_FOUND;
    double took = 0;
    Py_BEGIN_ALLOW_THREADS;
    if (context_synchronize != NULL) {
        const double begin = bench_now();
        code = GP__CUDA_SUCCESS;
        for (Py_ssize_t i = 0; code == GP__CUDA_SUCCESS && i < count; i++)
            code = cu.cuMemcpyAsync(to, from, (size_t)size, NULL);
        gp__cu_result waited = context_synchronize();
        code = code == GP__CUDA_SUCCESS ? waited : code;
        took = bench_now() - begin;
    }
    leave();
    Py_END_ALLOW_THREADS;
    if (code != GP__CUDA_SUCCESS) {
        (void)say("cuMemcpyAsync, cuCtxSynchronize", code);
        return NULL;
    }
    return PyFloat_FromDouble(took);
}
