/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's life, its table, and the frame around every call: fork check, lock, fault,
 * log, violation report. It never knows what a call means.
 */
#include "sim_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

const struct gp__driver gp__sim_driver = {
    .memory_info = gp__sim_memory_info,
    .reserve = gp__sim_reserve,
    .free_address = gp__sim_free_address,
    .create = gp__sim_create_memory,
    .export_fd = gp__sim_export_fd,
    .import_fd = gp__sim_import_fd,
    .can_access = gp__sim_can_access,
    .release = gp__sim_release,
    .map = gp__sim_map,
    .set_access = gp__sim_set_access,
    .unmap = gp__sim_unmap,
    .stream_resolve = gp__sim_stream_resolve,
    .stream_confirm = gp__sim_stream_confirm,
    .stream_capturing = gp__sim_stream_capturing,
    .event_create = gp__sim_event_create,
    .event_destroy = gp__sim_event_destroy,
    .event_record = gp__sim_event_record,
    .event_record_context = gp__sim_event_record_context,
    .event_query = gp__sim_event_query,
    .event_wait = gp__sim_event_wait,
    .copy = gp__sim_copy,
    .fill = gp__sim_fill,
    .stream_wait = gp__sim_stream_wait,
    .capture_id = gp__sim_capture_id,
    .capture_keep = gp__sim_capture_keep,
    .enter = gp__sim_enter,
    .leave = gp__sim_leave,
};

void *gp__sim_calloc(size_t bytes)
{
    void *memory = calloc(1, bytes);

    if (memory == NULL) {
        fputs("sim: the host has no memory for the simulator itself\n", stderr);
        abort();
    }
    return memory;
}

void *gp__sim_room(void *array, size_t count, size_t *room, size_t entry)
{
    void *grown;

    if (count < *room)
        return array;
    *room = *room == 0 ? 16 : *room * 2;
    grown = gp__sim_calloc(*room * entry);
    if (count > 0)
        memcpy(grown, array, count * entry);
    free(array);
    return grown;
}

static void fill_defaults(struct gp__sim_options *options)
{
    if (options->granularity == 0)
        options->granularity = 2 * MIB;
    if (options->memory_bytes == 0)
        options->memory_bytes = 64 * GIB;
    if (options->address_bytes == 0)
        options->address_bytes = 1024 * GIB;
    if (options->largest_reserve == 0)
        options->largest_reserve = SIZE_MAX;
}

static void fill_device(gp__sim *sim)
{
    gp_device *device = &sim->device;

    device->driver = &gp__sim_driver;
    device->kind = GP_DEVICE_SIM;
    device->ordinal = sim->options.ordinal;
    device->granularity = sim->options.granularity;
    device->context = GP__SIM_CONTEXT + (uintptr_t)sim->options.ordinal;
    device->host_accessible = false;
    device->device_accessible = true;
    snprintf(device->name, sizeof device->name, "sim:%d", sim->options.ordinal);
    device->state = sim;
    device->chunk_flags = GP_CHUNK_EXPORTABLE | GP_CHUNK_GPU_DIRECT_RDMA;
    device->wrong_size_code = GP__SIM_NOT_SUPPORTED;
}

gp__sim *gp__sim_create(const struct gp__sim_options *options)
{
    gp__sim *sim = calloc(1, sizeof *sim);
    struct gp__sim_stream *legacy;

    if (sim == NULL)
        return NULL;
    legacy = calloc(1, sizeof *legacy);
    if (legacy == NULL) {
        free(sim);
        return NULL;
    }
    if (options != NULL)
        sim->options = *options;
    fill_defaults(&sim->options);
    fill_device(sim);
    gp__mutex_init(&sim->mutex, GP__RANK_DRIVER);
    sim->process = getpid();
    sim->next_memory = 1;
    sim->next_id = 16;
    sim->next_handle = 0x1000;
    sim->log_enabled = true;
    sim->faults.name = "";
    legacy->id = GP__SIM_LEGACY_ID;
    legacy->flags = GP__SIM_STREAM_BLOCKING;
    legacy->live = true;
    sim->streams = legacy;
    return sim;
}

void gp__sim_destroy(gp__sim *sim)
{
    if (sim == NULL)
        return;
    while (sim->streams != NULL) {
        struct gp__sim_stream *stream = sim->streams;

        sim->streams = stream->next;
        while (stream->first != NULL) {
            struct gp__sim_item *item = stream->first;

            stream->first = item->next;
            free(item);
        }
        free(stream);
    }
    while (sim->events != NULL) {
        gp__event *event = sim->events;

        sim->events = event->next;
        free(event);
    }
    gp__sim_free_graphs(sim);
    gp__mutex_destroy(&sim->mutex);
    free(sim->reservations);
    free(sim->memories);
    free(sim->mappings);
    free(sim->free_handles);
    free(sim->log);
    free(sim);
}

gp_device *gp__sim_device(gp__sim *sim)
{
    return &sim->device;
}

gp__sim *gp__sim_of(gp_device *device)
{
    return device->state;
}

static gp_status open_registered(int ordinal, gp_device **out, gp_error *error)
{
    struct gp__sim_options options = {.ordinal = ordinal, .address_bytes = (size_t)16 << 40};
    gp__sim *sim = gp__sim_create(&options);

    if (sim == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for a simulated device");
    *out = gp__sim_device(sim);
    return GP_OK;
}

void gp__sim_register(void)
{
    gp__device_set_sim_opener(open_registered);
}

static const char *code_name(int code)
{
    switch (code) {
    case GP__SIM_SUCCESS:
        return "ok";
    case GP__SIM_INVALID_VALUE:
        return "CUDA_ERROR_INVALID_VALUE";
    case GP__SIM_OUT_OF_MEMORY:
        return "CUDA_ERROR_OUT_OF_MEMORY";
    case GP__SIM_NOT_INITIALIZED:
        return "CUDA_ERROR_NOT_INITIALIZED";
    case GP__SIM_INVALID_HANDLE:
        return "CUDA_ERROR_INVALID_HANDLE";
    case GP__SIM_NOT_READY:
        return "CUDA_ERROR_NOT_READY";
    case GP__SIM_ILLEGAL_ADDRESS:
        return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case GP__SIM_NOT_SUPPORTED:
        return "CUDA_ERROR_NOT_SUPPORTED";
    case GP__SIM_CAPTURE_UNSUPPORTED:
        return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    case GP__SIM_CAPTURE_INVALIDATED:
        return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    case GP__SIM_CAPTURE_ISOLATION:
        return "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    case GP__SIM_CAPTURE_IMPLICIT:
        return "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    case GP__SIM_CAPTURED_EVENT:
        return "CUDA_ERROR_CAPTURED_EVENT";
    default:
        return "CUDA_ERROR_UNKNOWN";
    }
}

static void append(char *text, size_t room, const char *format, va_list arguments)
{
    size_t used = strlen(text);

    vsnprintf(text + used, room - used, format, arguments);
}

void gp__sim_violate(struct gp__sim_call *call, const char *format, ...)
{
    va_list arguments;

    if (call->violated)
        return;
    call->violated = true;
    snprintf(call->violation, sizeof call->violation, "%s: ", call->text);
    va_start(arguments, format);
    append(call->violation, sizeof call->violation, format, arguments);
    va_end(arguments);
}

void gp__sim_note(struct gp__sim_call *call, const char *format, ...)
{
    va_list arguments;

    if (call->sim->quiet)
        return;
    va_start(arguments, format);
    append(call->text, sizeof call->text, format, arguments);
    va_end(arguments);
}

static gp__sim_call_hook call_hook;

void gp__sim_on_call(gp__sim_call_hook hook)
{
    __atomic_store_n(&call_hook, hook, __ATOMIC_RELEASE);
}

static void before_call(struct gp__sim_call *call)
{
    gp__sim_call_hook hook = __atomic_load_n(&call_hook, __ATOMIC_ACQUIRE);
    const struct gp__sim_kind *kind = call->kind;
    const char *complaint;

    if (kind->may_block)
        gp__assert_no_lock();
    complaint = hook != NULL ? hook(call->sim, kind->name, kind->may_block) : NULL;
    if (complaint != NULL)
        gp__sim_violate(call, "%s", complaint);
}

bool gp__sim_begin(struct gp__sim_call *call, gp__sim *sim, const struct gp__sim_kind *kind,
                   gp_error *error, const char *format, ...)
{
    va_list arguments;

    memset(call, 0, sizeof *call);
    call->sim = sim;
    call->kind = kind;
    call->error = error;
    if (!sim->quiet) {
        va_start(arguments, format);
        append(call->text, sizeof call->text, format, arguments);
        va_end(arguments);
    } else if (kind != NULL) {
        snprintf(call->text, sizeof call->text, "%s", kind->name);
    }
    /* Another thread may have held the lock when the process forked: leave it alone. */
    call->forked = getpid() != sim->process;
    if (call->forked) {
        gp__sim_violate(call, "called in a forked child");
        return false;
    }
    if (kind != NULL)
        before_call(call);
    gp__mutex_lock(&sim->mutex);
    if (kind != NULL) {
        sim->calls++;
        call->fault = gp__sim_take_fault(sim, kind);
    }
    return !call->fault;
}

void gp__sim_print_latest(const gp__sim *sim)
{
    uint64_t first = sim->ring_count < 20 ? 0 : sim->ring_count - 20;

    fprintf(stderr, "sim: the latest calls, oldest first:\n");
    for (uint64_t i = first; i < sim->ring_count; i++)
        fprintf(stderr, "sim:   %s\n", sim->ring[i % GP__SIM_RING]);
}

/* Counts the violation. The handler to call once the lock is dropped; NULL for the default. */
static gp__sim_violation_handler note_violation(struct gp__sim_call *call)
{
    gp__sim *sim = call->sim;

    sim->violations++;
    memcpy(sim->violation, call->violation, sizeof sim->violation);
    return sim->handler;
}

static void report(struct gp__sim_call *call, gp__sim_violation_handler handler)
{
    gp__sim *sim = call->sim;

    if (handler != NULL) {
        handler(sim->handler_context, call->violation);
        return;
    }
    fprintf(stderr, "sim: VIOLATION %s\n", call->violation);
    gp__sim_print_latest(sim);
    abort();
}

gp_status gp__sim_end(struct gp__sim_call *call, gp_status status, int code, uintptr_t va,
                      size_t size)
{
    gp__sim_violation_handler handler = NULL;
    struct gp__sim_keep *gone = NULL;

    if (call->kind != NULL && status != GP_OK && status != GP_NOT_READY)
        gp__driver_error(call->error, status, call->kind->name, code, code_name(code), va, size);
    if (!call->forked) {
        gp__sim_note(call, "%s%s%s", call->kind == NULL ? "" : " -> ",
                     call->kind == NULL ? "" : code_name(code), call->fault ? " (fault)" : "");
        if (!call->sim->quiet)
            gp__sim_log(call->sim, call->text, call->kind != NULL);
        gone = gp__sim_take_gone(call->sim);
    }
    if (call->violated)
        handler = note_violation(call);
    if (!call->forked)
        gp__mutex_unlock(&call->sim->mutex);
    gp__sim_tell_gone(gone);
    if (call->violated)
        report(call, handler);
    return status;
}

gp_status gp__sim_decided(struct gp__sim_call *call)
{
    gp_status status = call->kind->fault_status;
    int code = call->kind->fault_code;

    if (call->forked)
        return gp__sim_end(call, GP_ERR_DRIVER, GP__SIM_NOT_INITIALIZED, 0, 0);
    if (call->sim->faults.as_driver_error) {
        status = GP_ERR_DRIVER;
        code = GP__SIM_UNKNOWN;
    }
    return gp__sim_end(call, status, code, 0, 0);
}

void gp__sim_on_violation(gp__sim *sim, gp__sim_violation_handler handler, void *context)
{
    gp__mutex_lock(&sim->mutex);
    sim->handler = handler;
    sim->handler_context = context;
    gp__mutex_unlock(&sim->mutex);
}

uint64_t gp__sim_violations(const gp__sim *sim)
{
    return sim->violations;
}

void gp__sim_forget_violations(gp__sim *sim)
{
    gp__mutex_lock(&sim->mutex);
    sim->violations = 0;
    sim->violation[0] = '\0';
    gp__mutex_unlock(&sim->mutex);
}

const char *gp__sim_violation_text(const gp__sim *sim)
{
    return sim->violation;
}

void gp__sim_get_ledger(const gp__sim *sim, struct gp__sim_ledger *out)
{
    struct gp__mutex *mutex = (struct gp__mutex *)&sim->mutex;

    gp__mutex_lock(mutex);
    *out = (struct gp__sim_ledger){
        .reservation_count = sim->reservation_count,
        .reserved_bytes = sim->reserved_bytes,
        .chunk_count = sim->memory_count,
        .physical_bytes = sim->physical_bytes,
        .unreleased_count = sim->unreleased_count,
        .mapping_count = sim->mapping_count,
        .mapped_bytes = sim->mapped_bytes,
        .event_count = sim->event_count,
        .keep_count = sim->keep_count,
        .entered = sim->entered,
        .calls = sim->calls,
    };
    gp__mutex_unlock(mutex);
}
