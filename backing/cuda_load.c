/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads libcuda.so.1 at run time, at the first use of a CUDA device and never at import, and answers
 * whether one could be used. Never links against it and never creates a context.
 */
#include "cuda_load.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "backing_internal.h"
#include "lock.h"

#define LIBRARY       "libcuda.so.1"
#define LEAST_VERSION 12000 /* CUDA 12.0: cuStreamGetId, the last call that we cannot do without */
#define NEEDS         "growpool needs a driver for CUDA 12.0 or newer (525 or newer)"
#define NO_DEVICE                                                                                  \
    "no CUDA device: the driver is installed but sees no GPU; check nvidia-smi and "               \
    "CUDA_VISIBLE_DEVICES"
#define UNNAMED_RESULT "an unnamed CUDA error"

enum load_state { NOT_LOADED, LOADED, FAILED };

/* `lock` is held across the driver's start, the one exception to B2: a second thread can do nothing
 * before the driver is there, and nothing that could call back runs meanwhile. */
static struct {
    struct gp__mutex lock;
    _Atomic int state; /* enum load_state; the fields below are final once it is not NOT_LOADED */
    struct gp__cuda_api api;
    gp_error failure;
} cuda = {.lock = GP__MUTEX_INIT(GP__RANK_DRIVER)};

static const char *library_name(void)
{
#ifdef GP_TESTING
    const char *name = getenv("GROWPOOL_CUDA_LIBRARY");
    if (name != NULL && name[0] != '\0')
        return name;
#endif
    return LIBRARY;
}

static gp_status open_library(gp__cu_get_proc_address *out, gp_error *error)
{
    void *library = dlopen(library_name(), RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "no NVIDIA driver: %s could not be loaded (%.160s); install the driver",
                            LIBRARY, why != NULL ? why : "no reason given");
    }
    /* POSIX lets a data pointer carry a function's address here; C has no cast for it. */
    *(void **)out = dlsym(library, "cuGetProcAddress");
    if (*out == NULL)
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "the NVIDIA driver is too old (before CUDA 11.3): " NEEDS);
    return GP_OK;
}

static void *find(gp__cu_get_proc_address get_proc_address, const char *name, int version)
{
    void *function = NULL;
    gp__cu_result code =
        get_proc_address(name, &function, version, GP__CU_GET_PROC_ADDRESS_LEGACY_STREAM);
    return code == GP__CUDA_SUCCESS ? function : NULL;
}

static gp_status check_version(gp__cu_get_proc_address get_proc_address, gp_error *error)
{
    gp__cu_result (*get_version)(int *) = NULL;
    int version = 0;
    *(void **)&get_version = find(get_proc_address, "cuDriverGetVersion", 2020);
    if (get_version == NULL || get_version(&version) != GP__CUDA_SUCCESS)
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "the NVIDIA driver does not tell its version; reinstall it");
    if (version < LEAST_VERSION)
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "the NVIDIA driver is too old: it is for CUDA %d.%d and " NEEDS,
                            version / 1000, version % 1000 / 10);
    return GP_OK;
}

enum need { OPTIONAL, REQUIRED };

static gp_status resolve(gp__cu_get_proc_address get_proc_address, gp_error *error)
{
    struct gp__cuda_api *api = &cuda.api;
    const struct {
        const char *name;
        int version;
        enum need need;
        void **slot;
    } wanted[] = {
#define WANTED(name, version, need, parameters) {#name, version, need, (void **)&api->name},
        GP__CUDA_FUNCTIONS(WANTED)
#undef WANTED
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        *wanted[i].slot = find(get_proc_address, wanted[i].name, wanted[i].version);
        if (*wanted[i].slot == NULL && wanted[i].need == REQUIRED)
            return gp_error_set(error, GP_ERR_UNAVAILABLE,
                                "the NVIDIA driver is too old or incomplete: it has no %s; " NEEDS,
                                wanted[i].name);
    }
    return GP_OK;
}

static const char *name_of(const struct gp__cuda_api *api, gp__cu_result code)
{
    const char *name = NULL;
    if (api->cuGetErrorName(code, &name) != GP__CUDA_SUCCESS || name == NULL)
        return UNNAMED_RESULT;
    return name;
}

/* `error` is never NULL. */
static gp_status start_driver(gp_error *error)
{
    gp__cu_result code = cuda.api.cuInit(0);
    if (code == GP__CUDA_SUCCESS)
        return GP_OK;
    const char *name = name_of(&cuda.api, code);
    if (code == GP__CUDA_ERROR_NO_DEVICE)
        gp_error_set(error, GP_ERR_UNAVAILABLE, NO_DEVICE);
    else if (code == GP__CUDA_ERROR_STUB_LIBRARY)
        gp_error_set(error, GP_ERR_UNAVAILABLE,
                     "no NVIDIA driver: the " LIBRARY " that was found is the toolkit's stub; take "
                     "its folder out of LD_LIBRARY_PATH");
    else
        gp_error_set(error, GP_ERR_UNAVAILABLE,
                     "the NVIDIA driver could not start: cuInit failed with %s (%u); check "
                     "nvidia-smi",
                     name, code);
    error->call = "cuInit";
    error->code = (int)code;
    snprintf(error->name, sizeof error->name, "%s", name);
    return GP_ERR_UNAVAILABLE;
}

/* `error` is never NULL. lock: held. */
static gp_status load_once(gp_error *error)
{
    gp__cu_get_proc_address get_proc_address = NULL;
    gp_status status = open_library(&get_proc_address, error);
    if (status == GP_OK)
        status = check_version(get_proc_address, error);
    if (status == GP_OK)
        status = resolve(get_proc_address, error);
    if (status == GP_OK)
        status = start_driver(error);
    return status;
}

static gp_status known_failure(gp_error *error)
{
    if (error != NULL)
        *error = cuda.failure;
    return cuda.failure.status;
}

gp_status gp__cuda_load(const struct gp__cuda_api **out, gp_error *error)
{
    int state = atomic_load_explicit(&cuda.state, memory_order_acquire);
    if (state == FAILED) /* true in a forked child as well, and needs no driver */
        return known_failure(error);
    gp_status status = gp__check_process(error);
    if (status != GP_OK)
        return status;
    if (state == NOT_LOADED) {
        gp__mutex_lock(&cuda.lock);
        state = atomic_load_explicit(&cuda.state, memory_order_relaxed);
        if (state == NOT_LOADED) {
            state = load_once(&cuda.failure) == GP_OK ? LOADED : FAILED;
            atomic_store_explicit(&cuda.state, state, memory_order_release);
        }
        gp__mutex_unlock(&cuda.lock);
    }
    if (state == FAILED)
        return known_failure(error);
    *out = &cuda.api;
    return GP_OK;
}

int gp__cuda_attribute(const struct gp__cuda_api *api, gp__cu_device device,
                       gp__cu_attribute attribute, int fallback)
{
    int value = 0;
    gp__cu_result code = api->cuDeviceGetAttribute(&value, attribute, device);
    return code == GP__CUDA_SUCCESS ? value : fallback;
}

gp_status gp__cuda_probe(const struct gp__cuda_api *api, int ordinal, gp__cu_device *out,
                         gp_error *error)
{
    int count = 0;
    gp__cu_device device = 0;
    gp__cu_result code = api->cuDeviceGetCount(&count);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(api, error, GP_ERR_UNAVAILABLE, "cuDeviceGetCount", code, 0, 0);
    if (count <= 0)
        return gp_error_set(error, GP_ERR_UNAVAILABLE, NO_DEVICE);
    if (ordinal < 0 || ordinal >= count)
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "there is no device cuda:%d: the driver sees %d, numbered from 0",
                            ordinal, count);
    code = api->cuDeviceGet(&device, ordinal);
    if (code != GP__CUDA_SUCCESS)
        return gp__cuda_error(api, error, GP_ERR_UNAVAILABLE, "cuDeviceGet", code, 0, 0);
    if (gp__cuda_attribute(api, device, GP__CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                           0) != 1)
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "device cuda:%d has no virtual memory management (VMM), without which "
                            "a pool cannot grow in place; virtual GPUs often lack it",
                            ordinal);
    *out = device;
    return GP_OK;
}

gp_status gp_cuda_available(gp_error *error)
{
    const struct gp__cuda_api *api = NULL;
    gp__cu_device device;
    gp_status status = gp__cuda_load(&api, error);
    return status == GP_OK ? gp__cuda_probe(api, 0, &device, error) : status;
}

gp_status gp__cuda_error(const struct gp__cuda_api *api, gp_error *error, gp_status status,
                         const char *call, gp__cu_result code, uintptr_t va, size_t size)
{
    return gp__driver_error(error, status, call, (int)code, name_of(api, code), va, size);
}
