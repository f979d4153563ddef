/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's memory calls: reservations, physical memory, mappings, access. They check
 * against the ledger what a GPU would crash on or silently accept; no address is ever touched.
 */
#include "sim_internal.h"

#include <string.h>

static const struct gp__sim_kind kinds[] = {
    {"memory_info", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"reserve", true, GP_ERR_ADDRESS_SPACE, GP__SIM_OUT_OF_MEMORY},
    {"free_address", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"create", true, GP_ERR_OUT_OF_MEMORY, GP__SIM_OUT_OF_MEMORY},
    {"release", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"map", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"set_access", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
    {"unmap", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN},
};
enum { MEMORY_INFO, RESERVE, FREE_ADDRESS, CREATE, RELEASE, MAP, SET_ACCESS, UNMAP };

static gp_status invalid(struct gp__sim_call *call, uintptr_t va, size_t bytes)
{
    return gp__sim_end(call, GP_ERR_DRIVER, GP__SIM_INVALID_VALUE, va, bytes);
}

static bool aligned(const gp__sim *sim, uint64_t value)
{
    return value % sim->options.granularity == 0;
}

/* The index of the first mapping that ends above va. */
static size_t mapping_after(const gp__sim *sim, uintptr_t va)
{
    size_t low = 0, high = sim->mapping_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (sim->mappings[middle].va + sim->mappings[middle].bytes <= va)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct gp__sim_mapping *overlapping_mapping(const gp__sim *sim, uintptr_t va, size_t bytes)
{
    size_t at = mapping_after(sim, va);

    if (at == sim->mapping_count || sim->mappings[at].va >= va + bytes)
        return NULL;
    return &sim->mappings[at];
}

static struct gp__sim_memory *find_memory(gp__sim *sim, gp__memory handle)
{
    size_t low = 0, high = sim->memory_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (sim->memories[middle].handle < handle)
            low = middle + 1;
        else
            high = middle;
    }
    return low < sim->memory_count && sim->memories[low].handle == handle ? &sim->memories[low]
                                                                          : NULL;
}

/* Physical memory lives until it is neither referenced nor mapped. */
static void drop_if_dead(gp__sim *sim, struct gp__sim_memory *memory)
{
    size_t at = (size_t)(memory - sim->memories);

    if (memory->unreleased || memory->mappings > 0)
        return;
    if (!gp__sim_shares(sim, memory))
        sim->physical_bytes -= memory->bytes;
    sim->memory_count--;
    memmove(memory, memory + 1, (sim->memory_count - at) * sizeof *memory);
}

bool gp__sim_covered(const gp__sim *sim, uintptr_t va, size_t bytes)
{
    return gp__sim_covered_for(sim, va, bytes, NULL);
}

bool gp__sim_covered_for(const gp__sim *sim, uintptr_t va, size_t bytes, const gp_device *from)
{
    uintptr_t end = va + bytes;

    for (size_t i = mapping_after(sim, va); i < sim->mapping_count && va < end; i++) {
        const struct gp__sim_mapping *mapping = &sim->mappings[i];

        if (mapping->va > va || !gp__sim_may_reach(mapping, from))
            return false;
        va = mapping->va + mapping->bytes;
    }
    return va >= end;
}

bool gp__sim_is_accessible(const gp__sim *sim, uintptr_t va, size_t bytes)
{
    struct gp__mutex *mutex = (struct gp__mutex *)&sim->mutex;
    bool covered;

    gp__mutex_lock(mutex);
    covered = gp__sim_covered(sim, va, bytes);
    gp__mutex_unlock(mutex);
    return covered;
}

gp_status gp__sim_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                              gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (!gp__sim_begin(&call, sim, &kinds[MEMORY_INFO], error, "memory_info"))
        return gp__sim_decided(&call);
    *total_bytes = sim->options.memory_bytes;
    *free_bytes = sim->physical_bytes < sim->options.memory_bytes
                      ? sim->options.memory_bytes - sim->physical_bytes
                      : 0;
    return gp__sim_end_ok(&call);
}

/* The lowest gap that fits: addresses are handed out again as soon as they are free, and neighbours
 * touch, so that a stale address or a merge across reservations shows. */
static size_t place_reservation(const gp__sim *sim, size_t bytes, uintptr_t *va)
{
    size_t at;

    *va = GP__SIM_BASE_VA + ((uintptr_t)sim->options.ordinal << 42);
    for (at = 0; at < sim->reservation_count; at++) {
        if (sim->reservations[at].va - *va >= bytes)
            break;
        *va = sim->reservations[at].va + sim->reservations[at].bytes;
    }
    return at;
}

gp_status gp__sim_reserve(gp_device *device, size_t bytes, uintptr_t *va, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    uintptr_t place;
    size_t at;

    if (!gp__sim_begin(&call, sim, &kinds[RESERVE], error, "reserve bytes=%zu", bytes))
        return gp__sim_decided(&call);
    if (bytes == 0 || !aligned(sim, bytes)) {
        gp__sim_violate(&call, "size is no multiple of the granularity");
        return invalid(&call, 0, bytes);
    }
    if (bytes > sim->options.largest_reserve ||
        bytes > sim->options.address_bytes - sim->reserved_bytes)
        return gp__sim_end(&call, GP_ERR_ADDRESS_SPACE, GP__SIM_OUT_OF_MEMORY, 0, bytes);
    at = place_reservation(sim, bytes, &place);
    sim->reservations = gp__sim_room(sim->reservations, sim->reservation_count,
                                     &sim->reservation_room, sizeof *sim->reservations);
    memmove(&sim->reservations[at + 1], &sim->reservations[at],
            (sim->reservation_count - at) * sizeof *sim->reservations);
    sim->reservations[at] = (struct gp__sim_reservation){place, bytes};
    sim->reservation_count++;
    sim->reserved_bytes += bytes;
    *va = place;
    gp__sim_note(&call, " va=0x%zx", (size_t)place);
    return gp__sim_end_ok(&call);
}

static struct gp__sim_reservation *reservation_at(gp__sim *sim, uintptr_t va)
{
    for (size_t i = 0; i < sim->reservation_count; i++) {
        struct gp__sim_reservation *reservation = &sim->reservations[i];

        if (va >= reservation->va && va - reservation->va < reservation->bytes)
            return reservation;
    }
    return NULL;
}

static void check_idle(struct gp__sim_call *call, uintptr_t va, size_t bytes)
{
    uint64_t stream_id = 0;
    const struct gp__sim_range *range = gp__sim_overlap(call->sim, va, bytes, 0, &stream_id);

    if (range != NULL)
        gp__sim_violate(call, "under pending work of stream id %llu on va=0x%zx bytes=%zu",
                        (unsigned long long)stream_id, (size_t)range->va, range->bytes);
}

gp_status gp__sim_free_address(gp_device *device, uintptr_t va, size_t bytes, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_reservation *reservation;
    size_t at;

    if (!gp__sim_begin(&call, sim, &kinds[FREE_ADDRESS], error, "free_address va=0x%zx bytes=%zu",
                       (size_t)va, bytes))
        return gp__sim_decided(&call);
    reservation = reservation_at(sim, va);
    if (reservation == NULL) {
        gp__sim_violate(&call, "not a reservation");
        return invalid(&call, va, bytes);
    }
    if (reservation->va != va || reservation->bytes != bytes) {
        gp__sim_violate(&call, "part of the reservation va=0x%zx bytes=%zu",
                        (size_t)reservation->va, reservation->bytes);
        return invalid(&call, va, bytes);
    }
    if (overlapping_mapping(sim, va, bytes) != NULL) {
        gp__sim_violate(&call, "a mapping is left in it");
        return invalid(&call, va, bytes);
    }
    check_idle(&call, va, bytes);
    at = (size_t)(reservation - sim->reservations);
    sim->reserved_bytes -= bytes;
    sim->reservation_count--;
    memmove(reservation, reservation + 1, (sim->reservation_count - at) * sizeof *reservation);
    return gp__sim_end_ok(&call);
}

gp__memory gp__sim_add_memory(gp__sim *sim, const struct gp__sim_memory *memory)
{
    struct gp__sim_memory *entry;

    sim->memories =
        gp__sim_room(sim->memories, sim->memory_count, &sim->memory_room, sizeof *sim->memories);
    entry = &sim->memories[sim->memory_count++];
    *entry = *memory;
    entry->handle = sim->next_memory++;
    if (!gp__sim_shares(sim, entry))
        sim->physical_bytes += entry->bytes;
    sim->unreleased_count++;
    return entry->handle;
}

gp_status gp__sim_create_memory(gp_device *device, size_t bytes, gp_location location,
                                unsigned flags, gp__memory *out, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (!gp__sim_begin(&call, sim, &kinds[CREATE], error, "create bytes=%zu", bytes))
        return gp__sim_decided(&call);
    if (bytes == 0 || !aligned(sim, bytes)) {
        gp__sim_violate(&call, "size is no multiple of the granularity");
        return invalid(&call, 0, bytes);
    }
    if (sim->physical_bytes > sim->options.memory_bytes ||
        bytes > sim->options.memory_bytes - sim->physical_bytes)
        return gp__sim_end(&call, GP_ERR_OUT_OF_MEMORY, GP__SIM_OUT_OF_MEMORY, 0, bytes);
    if (!gp__sim_may_create(&call, flags))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_NOT_SUPPORTED, 0, bytes);
    sim->rdma_created |= (flags & GP_CHUNK_GPU_DIRECT_RDMA) != 0;
    *out = gp__sim_add_memory(
        sim, &(struct gp__sim_memory){
                 .bytes = bytes, .location = location, .flags = flags, .unreleased = true});
    gp__sim_note(&call, " memory=%llu", (unsigned long long)*out);
    return gp__sim_end_ok(&call);
}

/* Junk and released handles end the process on real hardware, except a second release. */
struct gp__sim_memory *gp__sim_checked_memory(struct gp__sim_call *call, gp__memory handle,
                                              size_t bytes)
{
    struct gp__sim_memory *memory = find_memory(call->sim, handle);

    if (handle == 0 || handle >= call->sim->next_memory) {
        gp__sim_violate(call, "junk handle");
        return NULL;
    }
    if (memory == NULL || !memory->unreleased) {
        gp__sim_violate(call, "released handle");
        return NULL;
    }
    if (memory->bytes != bytes && !memory->imported) {
        gp__sim_violate(call, "the memory has %zu bytes", memory->bytes);
        return NULL;
    }
    return memory;
}

gp_status gp__sim_release(gp_device *device, gp__memory handle, size_t bytes, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_memory *memory;

    if (!gp__sim_begin(&call, sim, &kinds[RELEASE], error, "release memory=%llu bytes=%zu",
                       (unsigned long long)handle, bytes))
        return gp__sim_decided(&call);
    memory = gp__sim_checked_memory(&call, handle, bytes);
    if (memory == NULL)
        return invalid(&call, 0, bytes);
    memory->unreleased = false;
    sim->unreleased_count--;
    drop_if_dead(sim, memory);
    return gp__sim_end_ok(&call);
}

static bool may_map(struct gp__sim_call *call, uintptr_t va, size_t bytes)
{
    gp__sim *sim = call->sim;
    const struct gp__sim_reservation *reservation = reservation_at(sim, va);

    if (bytes == 0 || !aligned(sim, va) || !aligned(sim, bytes))
        gp__sim_violate(call, "address or size is no multiple of the granularity");
    else if (reservation == NULL || bytes > reservation->bytes - (va - reservation->va))
        gp__sim_violate(call, "outside every reservation");
    else if (overlapping_mapping(sim, va, bytes) != NULL)
        gp__sim_violate(call, "over a mapping");
    return !call->violated;
}

gp_status gp__sim_map(gp_device *device, uintptr_t va, size_t bytes, gp__memory handle,
                      gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_memory *memory;
    size_t at;

    if (!gp__sim_begin(&call, sim, &kinds[MAP], error, "map va=0x%zx bytes=%zu memory=%llu",
                       (size_t)va, bytes, (unsigned long long)handle))
        return gp__sim_decided(&call);
    memory = gp__sim_checked_memory(&call, handle, bytes);
    if (memory == NULL || !may_map(&call, va, bytes))
        return invalid(&call, va, bytes);
    if (memory->bytes != bytes)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_NOT_SUPPORTED, va, bytes);
    at = mapping_after(sim, va);
    sim->mappings =
        gp__sim_room(sim->mappings, sim->mapping_count, &sim->mapping_room, sizeof *sim->mappings);
    memmove(&sim->mappings[at + 1], &sim->mappings[at],
            (sim->mapping_count - at) * sizeof *sim->mappings);
    sim->mappings[at] = (struct gp__sim_mapping){.va = va, .bytes = bytes, .memory = handle};
    sim->mapping_count++;
    sim->mapped_bytes += bytes;
    memory->mappings++;
    return gp__sim_end_ok(&call);
}

static void grant(struct gp__sim_mapping *mapping, const struct gp__peers *peers)
{
    mapping->accessible = true;
    mapping->peer_count = peers == NULL ? 0 : (unsigned)peers->count;
    for (unsigned i = 0; i < mapping->peer_count; i++)
        mapping->peers[i] = peers->devices[i];
}

/* Gives access to whole mappings that tile the range; a violation otherwise. False when the driver
 * refuses it for what the memory is. */
static bool open_mappings(struct gp__sim_call *call, uintptr_t va, size_t bytes,
                          gp_location location, const struct gp__peers *peers)
{
    gp__sim *sim = call->sim;
    bool refused = false;
    size_t first = mapping_after(sim, va), last = first;
    uintptr_t end = va;

    while (last < sim->mapping_count && end < va + bytes && sim->mappings[last].va == end) {
        const struct gp__sim_memory *memory = find_memory(sim, sim->mappings[last].memory);

        if (memory->location != location)
            gp__sim_violate(call, "memory %llu is in another location",
                            (unsigned long long)memory->handle);
        refused |= gp__sim_rdma_fails(sim, memory);
        end += sim->mappings[last].bytes;
        last++;
    }
    if (bytes == 0 || end != va + bytes)
        gp__sim_violate(call, "does not cover whole mappings");
    for (size_t i = first; i < last && gp__sim_may_grant(call, peers) && !refused; i++)
        grant(&sim->mappings[i], peers);
    return !refused;
}

gp_status gp__sim_set_access(gp_device *device, uintptr_t va, size_t bytes, gp_location location,
                             const struct gp__peers *peers, gp_error *error)
{
    struct gp__sim_call call;

    if (!gp__sim_begin(&call, device->state, &kinds[SET_ACCESS], error,
                       "set_access va=0x%zx bytes=%zu", (size_t)va, bytes))
        return gp__sim_decided(&call);
    if (!open_mappings(&call, va, bytes, location, peers) && !call.violated)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_UNKNOWN, va, bytes);
    return call.violated ? invalid(&call, va, bytes) : gp__sim_end_ok(&call);
}

static void remove_mapping(gp__sim *sim, struct gp__sim_mapping *mapping)
{
    size_t at = (size_t)(mapping - sim->mappings);
    struct gp__sim_memory *memory = find_memory(sim, mapping->memory);

    memory->mappings--;
    drop_if_dead(sim, memory);
    sim->mapped_bytes -= mapping->bytes;
    sim->mapping_count--;
    memmove(mapping, mapping + 1, (sim->mapping_count - at) * sizeof *mapping);
}

gp_status gp__sim_unmap(gp_device *device, uintptr_t va, size_t bytes, gp__memory handle,
                        gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_mapping *mapping;

    if (!gp__sim_begin(&call, sim, &kinds[UNMAP], error, "unmap va=0x%zx bytes=%zu memory=%llu",
                       (size_t)va, bytes, (unsigned long long)handle))
        return gp__sim_decided(&call);
    mapping = overlapping_mapping(sim, va, bytes);
    if (mapping == NULL) {
        /* A real driver reports success, which hides the mistake. */
        gp__sim_violate(&call, "nothing is mapped there");
        return gp__sim_end_ok(&call);
    }
    if (mapping->va != va || mapping->bytes != bytes) {
        gp__sim_violate(&call, "not exactly one mapping (va=0x%zx bytes=%zu is)",
                        (size_t)mapping->va, mapping->bytes);
        return invalid(&call, va, bytes);
    }
    if (mapping->memory != handle)
        gp__sim_violate(&call, "memory %llu is mapped there", (unsigned long long)mapping->memory);
    check_idle(&call, va, bytes);
    remove_mapping(sim, mapping);
    return gp__sim_end_ok(&call);
}
