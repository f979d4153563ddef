/* SPDX-License-Identifier: Apache-2.0
 *
 * The registry of open devices, and what can be asked of one. It opens each device once and never
 * closes any: primary contexts are shared with every library in the process.
 */
#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

struct open_device {
    gp_device *device;
    struct open_device *next;
};

static struct gp__mutex registry_lock = GP__MUTEX_INIT(GP__RANK_REGISTRY);
static struct open_device *open_devices; /* guarded by registry_lock */
static gp__device_opener sim_opener; /* set before any device is opened */

void gp__device_set_sim_opener(gp__device_opener opener)
{
    sim_opener = opener;
}

static gp_device *find_open(gp_device_kind kind, int ordinal)
{
    for (struct open_device *entry = open_devices; entry != NULL; entry = entry->next) {
        if (entry->device->kind == kind && entry->device->ordinal == ordinal) {
            return entry->device;
        }
    }
    return NULL;
}

static gp_status check_ordinal(gp_device_kind kind, int ordinal, gp_error *error)
{
    if (ordinal < 0) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "device number %d is negative: devices are numbered from 0", ordinal);
    }
    if (kind == GP_DEVICE_HOST && ordinal != 0) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "host device number %d does not exist: there is one, number 0",
                            ordinal);
    }
    return GP_OK;
}

static gp_status call_opener(gp_device_kind kind, int ordinal, gp_device **out, gp_error *error)
{
    switch (kind) {
    case GP_DEVICE_CUDA:
        return gp__cuda_open(ordinal, out, error);
    case GP_DEVICE_HOST:
        return gp__host_open(ordinal, out, error);
    case GP_DEVICE_SIM:
        if (sim_opener == NULL) {
            return gp_error_set(error, GP_ERR_UNAVAILABLE,
                                "simulated devices exist in test builds only");
        }
        return sim_opener(ordinal, out, error);
    }
    return gp_error_set(error, GP_ERR_ARGUMENT, "device kind %d is unknown", (int)kind);
}

/* lock: registry held. */
static gp_status open_and_list(gp_device_kind kind, int ordinal, gp_device **out, gp_error *error)
{
    struct open_device *entry = gp__calloc(1, sizeof *entry);
    if (entry == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to list a device");
    }
    gp_status status = call_opener(kind, ordinal, &entry->device, error);
    if (status != GP_OK) {
        gp__free(entry);
        return status;
    }
    entry->next = open_devices;
    open_devices = entry;
    *out = entry->device;
    return GP_OK;
}

gp_status gp_device_open(gp_device_kind kind, int ordinal, gp_device **out, gp_error *error)
{
    gp_status status = check_ordinal(kind, ordinal, error);
    if (status == GP_OK) {
        status = gp__check_process(error);
    }
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    gp__mutex_lock(&registry_lock);
    gp_device *device = find_open(kind, ordinal);
    if (device == NULL) {
        status = open_and_list(kind, ordinal, &device, error);
    }
    gp__mutex_unlock(&registry_lock);
    if (status == GP_OK) {
        *out = device;
    }
    return status;
}

gp_device_kind gp_device_kind_of(const gp_device *device)
{
    return device->kind;
}

int gp_device_ordinal(const gp_device *device)
{
    return device->ordinal;
}

int gp_device_id(const gp_device *device)
{
    switch (device->kind) {
    case GP_DEVICE_HOST:
        return -1;
    case GP_DEVICE_SIM:
        return -2 - device->ordinal;
    case GP_DEVICE_CUDA:
        break;
    }
    return device->ordinal;
}

const char *gp_device_name(const gp_device *device)
{
    return device->name;
}

size_t gp_device_granularity(const gp_device *device)
{
    return device->granularity;
}

bool gp_device_is_host_accessible(const gp_device *device)
{
    return device->host_accessible;
}

bool gp_device_is_device_accessible(const gp_device *device)
{
    return device->device_accessible;
}

gp_status gp_device_memory(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                           gp_error *error)
{
    gp_status status = gp__check_process(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    return device->driver->memory_info(device, free_bytes, total_bytes, error);
}

gp_status gp__check_chunk_size(const gp_device *device, size_t size, gp_error *error)
{
    if (size != 0 && size % device->granularity == 0) {
        return GP_OK;
    }
    gp_status status = gp_error_set(error, GP_ERR_ARGUMENT,
                                    "a chunk of %zu bytes is impossible on %s: the size must be a "
                                    "positive multiple of %zu",
                                    size, device->name, device->granularity);
    if (error != NULL) {
        error->size = size;
    }
    return status;
}
