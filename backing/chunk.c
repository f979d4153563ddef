/* SPDX-License-Identifier: Apache-2.0
 *
 * Chunks: physical memory with a reference count and a state. The one place that releases physical
 * memory, and the one function that changes a chunk's state. It never maps anything; chunk_share.c tries
 * what has to be tried.
 */
#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

#include <assert.h>
#include <stdatomic.h>

struct gp_chunk {
    gp_device *device;
    size_t size;
    gp_location location;
    unsigned flags; /* GP_CHUNK_*, as it came to be */
    bool imported;
    gp__memory memory;
    uint64_t id;
    void (*release)(void *context); /* of an adopted handle; NULL: the driver releases it */
    void *release_context;
    void *user;
    _Atomic uint64_t generation;
    _Atomic uint64_t references;
    _Atomic int state; /* enum gp__chunk_state */
    _Atomic bool kept; /* on a cache's list */
    /* Who must be done before close() may release the memory: the chunk itself, until it is closed, and
     * every export under way. Whoever is last releases it. */
    _Atomic uint64_t holds;
};

static _Atomic uint64_t last_id;
static _Atomic uint64_t failed_releases;

/* ---- states ------------------------------------------------------------------------------- */

#define STEP_TO(state) (1u << (state))

/* The drawing in backing.h, as one row of allowed targets for each state. */
static const unsigned legal_steps[] = {
    [GP__CHUNK_IDLE] =
        STEP_TO(GP__CHUNK_SUPPLIED) | STEP_TO(GP__CHUNK_CLOSED) | STEP_TO(GP__CHUNK_UNRETURNED),
    [GP__CHUNK_SUPPLIED] =
        STEP_TO(GP__CHUNK_MAPPED) | STEP_TO(GP__CHUNK_UNMAPPED) | STEP_TO(GP__CHUNK_ABANDONED),
    [GP__CHUNK_MAPPED] = STEP_TO(GP__CHUNK_RETIRING),
    [GP__CHUNK_RETIRING] =
        STEP_TO(GP__CHUNK_MAPPED) | STEP_TO(GP__CHUNK_UNMAPPED) | STEP_TO(GP__CHUNK_ABANDONED),
    [GP__CHUNK_UNMAPPED] = STEP_TO(GP__CHUNK_IDLE) | STEP_TO(GP__CHUNK_SUPPLIED),
    [GP__CHUNK_UNRETURNED] = STEP_TO(GP__CHUNK_UNMAPPED),
    [GP__CHUNK_ABANDONED] = 0,
    [GP__CHUNK_CLOSED] = 0,
};

static bool is_legal(enum gp__chunk_state from, enum gp__chunk_state to)
{
    return (legal_steps[from] & STEP_TO(to)) != 0;
}

bool gp__chunk_move(gp_chunk *chunk, enum gp__chunk_state from, enum gp__chunk_state to)
{
    assert(is_legal(from, to));
    if (!is_legal(from, to)) {
        return false;
    }
    int expected = (int)from;
    if (!atomic_compare_exchange_strong(&chunk->state, &expected, (int)to)) {
        return false;
    }
    if (to == GP__CHUNK_SUPPLIED) {
        atomic_fetch_add(&chunk->generation, 1);
    }
    return true;
}

enum gp__chunk_state gp__chunk_state_of(const gp_chunk *chunk)
{
    return (enum gp__chunk_state)atomic_load(&chunk->state);
}

const char *gp__chunk_state_text(enum gp__chunk_state state)
{
    static const char *const texts[] = {
        [GP__CHUNK_IDLE] = "idle",           [GP__CHUNK_SUPPLIED] = "supplied",
        [GP__CHUNK_MAPPED] = "mapped",       [GP__CHUNK_RETIRING] = "retiring",
        [GP__CHUNK_UNMAPPED] = "unmapped",   [GP__CHUNK_UNRETURNED] = "unreturned",
        [GP__CHUNK_ABANDONED] = "abandoned", [GP__CHUNK_CLOSED] = "closed",
    };
    return texts[state];
}

/* ---- making ------------------------------------------------------------------------------- */

static gp_chunk *new_chunk(gp_device *device, size_t size, gp_location location, gp_error *error)
{
    gp_chunk *chunk = gp__calloc(1, sizeof *chunk);
    if (chunk == NULL) {
        (void)gp_error_set(error, GP_ERR_HOST_MEMORY,
                           "no host memory to describe a chunk of %zu bytes", size);
        return NULL;
    }
    chunk->device = device;
    chunk->size = size;
    chunk->location = location;
    chunk->id = atomic_fetch_add(&last_id, 1) + 1;
    atomic_init(&chunk->generation, 0);
    atomic_init(&chunk->references, 1);
    atomic_init(&chunk->state, GP__CHUNK_IDLE);
    atomic_init(&chunk->holds, 1);
    return chunk;
}

static gp_status check_new(gp_device *device, size_t size, gp_error *error)
{
    if (device == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT, "a chunk needs a device");
    }
    gp_status status = gp__check_chunk_size(device, size, error);
    return status != GP_OK ? status : gp__check_process(error);
}

gp_status gp_chunk_create(gp_device *device, size_t size, gp_location location, unsigned flags,
                          gp_chunk **out, gp_error *error)
{
    gp__assert_no_lock();
    gp_status status = check_new(device, size, error);
    if (status != GP_OK) {
        return status;
    }
    gp_chunk *chunk = new_chunk(device, size, location, error);
    if (chunk == NULL) {
        return GP_ERR_HOST_MEMORY;
    }
    chunk->flags = flags;
    status = gp__share_create(device, size, location, &chunk->flags, &chunk->memory, error);
    if (status != GP_OK) {
        gp__free(chunk);
        return status;
    }
    *out = chunk;
    return GP_OK;
}

gp_status gp_chunk_import_fd(gp_device *device, int fd, size_t size, gp_chunk **out,
                             gp_error *error)
{
    struct gp__imported found;
    gp__assert_no_lock();
    gp_status status = check_new(device, size, error);
    if (status != GP_OK) {
        return status;
    }
    gp_chunk *chunk = new_chunk(device, size, GP_LOCATION_DEVICE, error);
    if (chunk == NULL) {
        return GP_ERR_HOST_MEMORY;
    }
    status = gp__share_import(device, fd, size, &found, error);
    if (status != GP_OK) {
        gp__free(chunk);
        return status;
    }
    chunk->memory = found.memory;
    chunk->location = found.location;
    chunk->flags = found.flags;
    chunk->imported = true;
    *out = chunk;
    return GP_OK;
}

gp_status gp_chunk_adopt(gp_device *device, uint64_t handle, size_t size,
                         void (*release)(void *context), void *context, gp_chunk **out,
                         gp_error *error)
{
    gp_status status = check_new(device, size, error);
    if (status != GP_OK) {
        return status;
    }
    if (device->kind == GP_DEVICE_HOST || handle == 0) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "handle %#llx cannot be adopted on %s: only handles that a GPU driver "
                            "made can",
                            (unsigned long long)handle, device->name);
    }
    gp_chunk *chunk = new_chunk(device, size, GP_LOCATION_DEVICE, error);
    if (chunk == NULL) {
        return GP_ERR_HOST_MEMORY;
    }
    chunk->memory = handle;
    chunk->release = release;
    chunk->release_context = context;
    *out = chunk;
    return GP_OK;
}

/* ---- letting go --------------------------------------------------------------------------- */

gp_status gp__release_memory(gp_device *device, gp__memory memory, size_t bytes, gp_error *error)
{
    const struct gp__driver *driver = device->driver;
    gp_status status = driver->release(device, memory, bytes, error);
    /* Nobody will come back for this memory, so a driver that refuses is asked once more. */
    if (status != GP_OK) {
        status = driver->release(device, memory, bytes, error);
    }
    if (status != GP_OK) {
        atomic_fetch_add(&failed_releases, 1);
    }
    return status;
}

/* Once for each chunk. Context: may block and call out; no lock held. */
static gp_status release_memory(gp_chunk *chunk, gp_error *error)
{
    gp__assert_no_lock();
    if (chunk->release != NULL) {
        chunk->release(chunk->release_context);
        return GP_OK;
    }
    return gp__release_memory(chunk->device, chunk->memory, chunk->size, error);
}

static bool hold(gp_chunk *chunk)
{
    uint64_t holds = atomic_load(&chunk->holds);
    while (holds != 0 && !atomic_compare_exchange_weak(&chunk->holds, &holds, holds + 1)) {
    }
    return holds != 0;
}

/* Releases the memory when this was the last hold of a closed chunk. */
static gp_status let_go(gp_chunk *chunk, gp_error *error)
{
    return atomic_fetch_sub(&chunk->holds, 1) == 1 ? release_memory(chunk, error) : GP_OK;
}

gp_chunk *gp_chunk_retain(gp_chunk *chunk)
{
    atomic_fetch_add_explicit(&chunk->references, 1, memory_order_relaxed);
    return chunk;
}

/* With no reference left, memory that may still be mapped (its pool vanished, or the driver would
 * not unmap it) is left to the end of the process: taking it away could hit whoever uses the
 * addresses. */
static bool owns_memory(const gp_chunk *chunk)
{
    switch (gp__chunk_state_of(chunk)) {
    case GP__CHUNK_IDLE:
    case GP__CHUNK_UNMAPPED:
    case GP__CHUNK_UNRETURNED:
        return true;
    case GP__CHUNK_SUPPLIED:
    case GP__CHUNK_MAPPED:
    case GP__CHUNK_RETIRING:
    case GP__CHUNK_ABANDONED:
    case GP__CHUNK_CLOSED:
        break;
    }
    return false;
}

void gp_chunk_release(gp_chunk *chunk)
{
    if (chunk == NULL ||
        atomic_fetch_sub_explicit(&chunk->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (owns_memory(chunk) && gp__check_process(NULL) == GP_OK) {
        (void)release_memory(chunk, NULL);
    }
    gp__free(chunk);
}

gp_status gp_chunk_close(gp_chunk *chunk, gp_error *error)
{
    if (gp_chunk_is_closed(chunk)) {
        return GP_OK;
    }
    gp_status status = gp__check_process(error);
    if (status != GP_OK) {
        return status;
    }
    if (gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_CLOSED)) {
        return let_go(chunk, error);
    }
    if (gp_chunk_is_closed(chunk)) {
        return GP_OK;
    }
    return gp__state_error(error, GP_REASON_IN_USE,
                           "chunk %llu of %zu bytes is in use by a pool: it can be closed after "
                           "the pool has given it back",
                           (unsigned long long)chunk->id, chunk->size);
}

/* ---- sharing ------------------------------------------------------------------------------- */

gp_status gp_chunk_export_fd(gp_chunk *chunk, int *fd, gp_error *error)
{
    char text[32];
    gp__assert_no_lock();
    gp_status status = gp__check_process(error);
    if (status != GP_OK) {
        return status;
    }
    if ((chunk->flags & GP_CHUNK_EXPORTABLE) == 0) {
        return gp_error_set(
            error, GP_ERR_ARGUMENT, "chunk %llu of %s on %s cannot be exported: %s",
            (unsigned long long)chunk->id, gp__size_text(chunk->size, text), chunk->device->name,
            chunk->imported ? "it was imported, and only the process that made it can"
                            : "it was not made so (GP_CHUNK_EXPORTABLE, or "
                              "handle_type='posix_fd' in Python)");
    }
    if (gp_chunk_is_closed(chunk) || !hold(chunk)) {
        return gp__state_error(error, GP_REASON_CLOSED,
                               "chunk %llu of %s is closed: it has no memory to export",
                               (unsigned long long)chunk->id, gp__size_text(chunk->size, text));
    }
    status = chunk->device->driver->export_fd(chunk->device, chunk->memory, chunk->size, fd, error);
    (void)let_go(chunk, NULL);
    return status;
}

unsigned gp_chunk_flags(const gp_chunk *chunk)
{
    return chunk->flags;
}

/* ---- reading ------------------------------------------------------------------------------ */

bool gp_chunk_is_closed(const gp_chunk *chunk)
{
    return gp__chunk_state_of(chunk) == GP__CHUNK_CLOSED;
}

bool gp_chunk_is_in_use(const gp_chunk *chunk)
{
    enum gp__chunk_state state = gp__chunk_state_of(chunk);
    return state != GP__CHUNK_IDLE && state != GP__CHUNK_CLOSED;
}

size_t gp_chunk_size(const gp_chunk *chunk)
{
    return chunk->size;
}

gp_device *gp_chunk_device(const gp_chunk *chunk)
{
    return chunk->device;
}

gp_location gp_chunk_location(const gp_chunk *chunk)
{
    return chunk->location;
}

uint64_t gp_chunk_handle(const gp_chunk *chunk)
{
    return chunk->memory;
}

uint64_t gp_chunk_id(const gp_chunk *chunk)
{
    return chunk->id;
}

uint64_t gp_chunk_generation(const gp_chunk *chunk)
{
    return atomic_load(&chunk->generation);
}

void gp_chunk_set_user(gp_chunk *chunk, void *user)
{
    chunk->user = user;
}

void *gp_chunk_user(const gp_chunk *chunk)
{
    return chunk->user;
}

bool gp__chunk_keep(gp_chunk *chunk)
{
    return !atomic_exchange(&chunk->kept, true);
}

void gp__chunk_let_go(gp_chunk *chunk)
{
    atomic_store(&chunk->kept, false);
}

gp__memory gp__chunk_memory(const gp_chunk *chunk)
{
    return chunk->memory;
}

uint64_t gp__chunk_failed_releases(void)
{
    return atomic_load(&failed_releases);
}
