/* SPDX-License-Identifier: Apache-2.0
 *
 * The host device: this process's own address space and memory, through mmap, mremap and mprotect.
 * Streams are in host_stream.c, sizes in host_info.c, chunks for other processes in host_share.c. It never leaves a hole in an address range
 * that it owns, and a forked child can never change the parent's memory.
 *
 *   reservation   PROT_NONE pages, private, not accounted.
 *   chunk         private anonymous pages with addresses of their own, the home, where they stay,
 *                 out of reach, while the chunk is not mapped.
 *   map           moves the pages from home to the reservation; the home stays behind, empty.
 *   unmap         takes access away, then moves the pages home; what stays behind in the
 *                 reservation is empty. Contents survive both ways.
 *
 * MREMAP_DONTUNMAP is what leaves the empty range behind: without it another thread's mmap could
 * take the addresses between two system calls. It needs Linux 5.7.
 */
#include "host_internal.h"

#include "backing_internal.h"
#include "lock.h"
#include "memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* older C libraries lack the name */
#endif

#define GRANULARITY   ((size_t)2 << 20) /* bytes: one huge page on x86-64 */
#define PRIVATE_PAGES GP__HOST_PRIVATE_PAGES

/* What a gp__memory of this device points to. A chunk has one user at a time, so it needs no lock.
 * */
struct host_memory {
    uintptr_t home; /* 0 when its addresses were lost while the chunk was mapped */
    size_t bytes;
    uintptr_t mapped_va; /* 0 while at home */
    int descriptor; /* of the memory file that it is, which needs no home; -1: private pages */
};

struct reservation {
    uintptr_t va;
    size_t bytes;
    size_t mapping_count;
    bool torn; /* a part of it was lost: never mapped nor freed again */
};

static struct gp__mutex table_lock = GP__MUTEX_INIT(GP__RANK_DRIVER);
static struct reservation
    *reservations; /* by address; guarded by table_lock, as are the next two */
static size_t reservation_count;
static size_t reservation_capacity;

/* ---- system calls -------------------------------------------------------------------------- */

static void *pointer_to(uintptr_t va)
{
    return (void *)va; /* addresses are numbers everywhere else */
}

/* Out-of-reach pages at an address that is a multiple of the granularity. Linux from 6.7 on aligns ranges
 * of huge pages by itself; elsewhere this asks for more and gives the ends back, which is two calls
 * more for each chunk. 0 with errno set when the system refuses. */
static uintptr_t map_aligned(size_t bytes)
{
    static _Atomic bool unaligned; /* this kernel does not */
    size_t padded;
    if (__builtin_add_overflow(bytes, GRANULARITY, &padded)) {
        errno = ENOMEM;
        return 0;
    }
    if (!atomic_load_explicit(&unaligned, memory_order_relaxed)) {
        void *exact = mmap(NULL, bytes, PROT_NONE, PRIVATE_PAGES, -1, 0);
        if (exact != MAP_FAILED && (uintptr_t)exact % GRANULARITY == 0)
            return (uintptr_t)exact;
        if (exact != MAP_FAILED)
            (void)munmap(exact, bytes);
        atomic_store_explicit(&unaligned, exact != MAP_FAILED, memory_order_relaxed);
    }
    void *pointer = mmap(NULL, padded, PROT_NONE, PRIVATE_PAGES, -1, 0);
    if (pointer == MAP_FAILED) {
        return 0;
    }
    uintptr_t start = (uintptr_t)pointer;
    uintptr_t va = (start + GRANULARITY - 1) & ~(uintptr_t)(GRANULARITY - 1);
    size_t head = va - start;
    size_t tail = padded - head - bytes;
    if ((head == 0 || munmap(pointer, head) == 0) &&
        (tail == 0 || munmap(pointer_to(va + bytes), tail) == 0)) {
        return va;
    }
    int code = errno;
    (void)munmap(pointer, padded);
    errno = code;
    return 0;
}

/* Moves pages and leaves the range they came from empty, with the protection they had. */
static enum gp__host_move move_pages(uintptr_t from, uintptr_t to, size_t bytes)
{
    void *moved = mremap(pointer_to(from), bytes, bytes,
                         MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, pointer_to(to));
    if (moved != MAP_FAILED) {
        return GP__HOST_MOVED;
    }
    /* The kernel clears the target before it moves, so a failure after that left a hole: fill it.
     * NOREPLACE, because in every other case the target is still there. */
    int code = errno;
    void *filled =
        mmap(pointer_to(to), bytes, PROT_NONE, PRIVATE_PAGES | MAP_FIXED_NOREPLACE, -1, 0);
    bool lost = filled == MAP_FAILED && errno != EEXIST;
    errno = code;
    return lost ? GP__HOST_TARGET_LOST : GP__HOST_NOT_MOVED;
}

/* Replaces what a mapping left behind by pages like those around it, in one step, so that the
 * kernel can join them: mappings of a process are few (65,530). Without it the range is still out
 * of reach, so a failure is no error. */
static void renew(uintptr_t va, size_t bytes)
{
    (void)mmap(pointer_to(va), bytes, PROT_NONE, PRIVATE_PAGES | MAP_FIXED, -1, 0);
}

/* ---- reservations ------------------------------------------------------------------------- */

/* The first reservation above va; the one that may contain va is before it. lock: held. */
static size_t index_above(uintptr_t va)
{
    size_t low = 0;
    size_t high = reservation_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (reservations[middle].va <= va) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The reservation that contains the range, or NULL. lock: held. */
static struct reservation *find_reservation(uintptr_t va, size_t bytes)
{
    size_t above = index_above(va);
    if (above == 0) {
        return NULL;
    }
    struct reservation *reservation = &reservations[above - 1];
    size_t offset = va - reservation->va;
    bool inside = offset <= reservation->bytes && bytes <= reservation->bytes - offset;
    return inside ? reservation : NULL;
}

/* Room for one more entry. lock: held. */
static bool grow_table(void)
{
    if (reservation_count < reservation_capacity) {
        return true;
    }
    size_t capacity = reservation_capacity == 0 ? 16 : reservation_capacity * 2;
    struct reservation *grown = gp__realloc(reservations, capacity, sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    reservations = grown;
    reservation_capacity = capacity;
    return true;
}

static bool list_reservation(uintptr_t va, size_t bytes)
{
    gp__mutex_lock(&table_lock);
    bool room = grow_table();
    if (room) {
        size_t at = index_above(va);
        memmove(&reservations[at + 1], &reservations[at],
                (reservation_count - at) * sizeof *reservations);
        reservations[at] = (struct reservation){.va = va, .bytes = bytes};
        reservation_count++;
    }
    gp__mutex_unlock(&table_lock);
    return room;
}

/* lock: held. */
static void unlist_reservation(struct reservation *reservation)
{
    size_t at = (size_t)(reservation - reservations);
    reservation_count--;
    memmove(reservation, reservation + 1, (reservation_count - at) * sizeof *reservations);
    if (reservation_count == 0) {
        gp__free(reservations);
        reservations = NULL;
        reservation_capacity = 0;
    }
}

/* Adds `change` to the mappings of the reservation around the range; false when there is none, or
 * when new mappings are not safe there. */
static bool count_mapping(uintptr_t va, size_t bytes, int change)
{
    gp__mutex_lock(&table_lock);
    struct reservation *reservation = find_reservation(va, bytes);
    bool usable = reservation != NULL && (change <= 0 || !reservation->torn);
    if (usable) {
        reservation->mapping_count += (size_t)change;
    }
    gp__mutex_unlock(&table_lock);
    return usable;
}

static void mark_torn(uintptr_t va, size_t bytes)
{
    gp__mutex_lock(&table_lock);
    struct reservation *reservation = find_reservation(va, bytes);
    if (reservation != NULL) {
        reservation->torn = true;
    }
    gp__mutex_unlock(&table_lock);
}

static gp_status check_bytes(const char *call, size_t bytes, gp_error *error)
{
    if (bytes != 0 && bytes % GRANULARITY == 0) {
        return GP_OK;
    }
    return gp__errno_error(error, GP_ERR_DRIVER, call, EINVAL, 0, bytes);
}

static gp_status reserve(gp_device *device, size_t bytes, uintptr_t *va, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        status = check_bytes("mmap", bytes, error);
    }
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    uintptr_t reserved = map_aligned(bytes);
    if (reserved == 0) {
        return gp__errno_error(error, GP_ERR_ADDRESS_SPACE, "mmap", errno, 0, bytes);
    }
    if (!list_reservation(reserved, bytes)) {
        (void)munmap(pointer_to(reserved), bytes);
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory to list a reservation of %zu bytes", bytes);
    }
    *va = reserved;
    return GP_OK;
}

static gp_status free_address(gp_device *device, uintptr_t va, size_t bytes, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    gp__mutex_lock(&table_lock);
    struct reservation *reservation = find_reservation(va, bytes);
    if (reservation == NULL || reservation->va != va || reservation->bytes != bytes) {
        status =
            gp_error_set(error, GP_ERR_ARGUMENT,
                         "no reservation of %zu bytes at %#zx exists: addresses are freed with "
                         "exactly the address and size that were reserved",
                         bytes, (size_t)va);
    } else if (reservation->mapping_count != 0) {
        status = gp__errno_error(error, GP_ERR_DRIVER, "munmap", EBUSY, va, bytes);
    } else if (!reservation->torn && munmap(pointer_to(va), bytes) != 0) {
        status = gp__errno_error(error, GP_ERR_DRIVER, "munmap", errno, va, bytes);
    } else {
        /* Still under the lock: the addresses may be another thread's reservation at once. */
        unlist_reservation(reservation);
    }
    gp__mutex_unlock(&table_lock);
    return status;
}

/* ---- chunks ------------------------------------------------------------------------------- */

static struct host_memory *memory_behind(gp__memory memory)
{
    return pointer_to((uintptr_t)memory);
}

static gp_status check_create(size_t bytes, gp_location location, gp_error *error)
{
    if (location != GP_LOCATION_DEVICE) {
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "the host device has one kind of memory: make chunks there without "
                            "asking for host memory near a device");
    }
    size_t total = gp__host_physical_bytes();
    if (bytes <= total) {
        return GP_OK;
    }
    gp_status status = gp_error_set(error, GP_ERR_OUT_OF_MEMORY,
                                    "a chunk of %zu bytes is larger than the %zu bytes of memory "
                                    "that this machine has: ask for less",
                                    bytes, total);
    if (error != NULL) {
        error->size = bytes;
    }
    return status;
}

gp_status gp__host_share_wrap(int descriptor, size_t bytes, gp__memory *out, gp_error *error)
{
    struct host_memory *memory = gp__calloc(1, sizeof *memory);
    if (memory == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory to describe a chunk of %zu bytes", bytes);
    }
    memory->bytes = bytes;
    memory->descriptor = descriptor;
    *out = (uintptr_t)memory;
    return GP_OK;
}

int gp__host_descriptor(gp__memory memory)
{
    return memory_behind(memory)->descriptor;
}

static gp_status create_shared(size_t bytes, gp__memory *out, gp_error *error)
{
    int descriptor = -1;
    gp_status status = gp__host_share_create(bytes, &descriptor, error);
    if (status != GP_OK) {
        return status;
    }
    status = gp__host_share_wrap(descriptor, bytes, out, error);
    if (status != GP_OK) {
        (void)close(descriptor);
    }
    return status;
}

static gp_status create(gp_device *device, size_t bytes, gp_location location, unsigned flags,
                        gp__memory *out, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        status = check_bytes("mmap", bytes, error);
    }
    if (status == GP_OK) {
        status = check_create(bytes, location, error);
    }
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    if ((flags & GP_CHUNK_EXPORTABLE) != 0) {
        return create_shared(bytes, out, error);
    }
    gp__memory described = 0;
    status = gp__host_share_wrap(-1, bytes, &described, error);
    if (status != GP_OK) {
        return status;
    }
    struct host_memory *memory = memory_behind(described);
    memory->home = map_aligned(bytes);
    if (memory->home == 0) {
        status = gp__errno_error(error, GP_ERR_OUT_OF_MEMORY, "mmap", errno, 0, bytes);
        gp__free(memory);
        return status;
    }
    /* Only faster: a kernel without huge pages refuses, and the chunk works all the same. */
    (void)madvise(pointer_to(memory->home), bytes, MADV_HUGEPAGE);
    *out = described;
    return GP_OK;
}

static gp_status release(gp_device *device, gp__memory handle, size_t bytes, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    struct host_memory *memory = memory_behind(handle);
    if (memory->mapped_va != 0 || memory->bytes != bytes) {
        int code = memory->mapped_va != 0 ? EBUSY : EINVAL;
        return gp__errno_error(error, GP_ERR_DRIVER, "munmap", code, memory->mapped_va, bytes);
    }
    if (memory->descriptor >= 0) {
        (void)close(memory->descriptor);
    } else if (munmap(pointer_to(memory->home), bytes) != 0) {
        return gp__errno_error(error, GP_ERR_DRIVER, "munmap", errno, memory->home, bytes);
    }
    gp__free(memory);
    return GP_OK;
}

static gp_status map(gp_device *device, uintptr_t va, size_t bytes, gp__memory handle,
                     gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    struct host_memory *memory = memory_behind(handle);
    bool fits = memory->bytes == bytes && va % GRANULARITY == 0;
    if (!fits || memory->mapped_va != 0 || !count_mapping(va, bytes, 1)) {
        return gp__errno_error(error, GP_ERR_DRIVER, "mremap", EINVAL, va, bytes);
    }
    bool shared = memory->descriptor >= 0;
    enum gp__host_move result = shared ? gp__host_share_map(memory->descriptor, va, bytes)
                                       : move_pages(memory->home, va, bytes);
    if (result != GP__HOST_MOVED) {
        int code = errno;
        (void)count_mapping(va, bytes, -1);
        if (result == GP__HOST_TARGET_LOST) {
            mark_torn(va, bytes);
        }
        return gp__errno_error(error, GP_ERR_DRIVER, shared ? "mmap" : "mremap", code, va, bytes);
    }
    memory->mapped_va = va;
    return GP_OK;
}

static gp_status set_access(gp_device *device, uintptr_t va, size_t bytes, gp_location location,
                            const struct gp__peers *peers, gp_error *error)
{
    (void)device;
    (void)location;
    (void)peers; /* nobody but the host itself can be one */
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    if (!count_mapping(va, bytes, 0)) {
        return gp__errno_error(error, GP_ERR_DRIVER, "mprotect", EINVAL, va, bytes);
    }
    if (mprotect(pointer_to(va), bytes, PROT_READ | PROT_WRITE) != 0) {
        return gp__errno_error(error, GP_ERR_DRIVER, "mprotect", errno, va, bytes);
    }
    return GP_OK;
}

/* 0 or errno. */
static int send_home(struct host_memory *memory, uintptr_t va, size_t bytes)
{
    if (memory->descriptor >= 0) {
        bool lost;
        int code = gp__host_share_unmap(va, bytes, &lost);
        if (lost) {
            mark_torn(va, bytes);
        }
        return code;
    }
    if (memory->home == 0) {
        memory->home = map_aligned(bytes); /* an earlier try lost it */
    }
    if (memory->home == 0) {
        return errno;
    }
    enum gp__host_move result = move_pages(va, memory->home, bytes);
    if (result == GP__HOST_MOVED) {
        return 0;
    }
    int code = errno;
    if (result == GP__HOST_TARGET_LOST) {
        memory->home = 0;
    }
    return code;
}

static gp_status unmap(gp_device *device, uintptr_t va, size_t bytes, gp__memory handle,
                       gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__assert_no_lock();
    struct host_memory *memory = memory_behind(handle);
    if (memory->mapped_va != va || memory->bytes != bytes) {
        return gp__errno_error(error, GP_ERR_DRIVER, "mremap", EINVAL, va, bytes);
    }
    /* Before the move, so that a use that comes too late faults instead of writing into nothing. */
    if (mprotect(pointer_to(va), bytes, PROT_NONE) != 0) {
        return gp__errno_error(error, GP_ERR_DRIVER, "mprotect", errno, va, bytes);
    }
    int code = send_home(memory, va, bytes);
    if (code != 0) {
        (void)mprotect(pointer_to(va), bytes, PROT_READ | PROT_WRITE);
        const char *call = memory->descriptor >= 0 ? "mmap" : "mremap";
        return gp__errno_error(error, GP_ERR_DRIVER, call, code, va, bytes);
    }
    memory->mapped_va = 0;
    if (memory->descriptor < 0) {
        renew(va, bytes);
    }
    (void)count_mapping(va, bytes, -1);
    return GP_OK;
}

/* ---- the device --------------------------------------------------------------------------- */

/* The calling thread needs no context and has no capture mode here. */
static gp_status enter(gp_device *device, struct gp__entry *entry, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        *entry = (struct gp__entry){0};
    }
    return status;
}

static void leave(gp_device *device, const struct gp__entry *entry)
{
    (void)device;
    (void)entry;
}

static const struct gp__driver host_driver = {
    .memory_info = gp__host_memory_info,
    .reserve = reserve,
    .free_address = free_address,
    .create = create,
    .export_fd = gp__host_export_fd,
    .import_fd = gp__host_import_fd,
    .can_access = gp__host_can_access,
    .release = release,
    .map = map,
    .set_access = set_access,
    .unmap = unmap,
    .stream_resolve = gp__host_stream_resolve,
    .stream_confirm = gp__host_stream_confirm,
    .stream_capturing = gp__host_stream_capturing,
    .event_create = gp__host_event_create,
    .event_destroy = gp__host_event_destroy,
    .event_record = gp__host_event_record,
    .event_record_context = gp__host_event_record_context,
    .event_query = gp__host_event_query,
    .event_wait = gp__host_event_wait,
    .copy = gp__host_copy,
    .fill = gp__host_fill,
    .stream_wait = gp__host_stream_wait,
    .capture_id = gp__host_capture_id,
    .capture_keep = gp__host_capture_keep,
    .enter = enter,
    .leave = leave,
};

static gp_device host_device = {
    .driver = &host_driver,
    .kind = GP_DEVICE_HOST,
    .granularity = GRANULARITY,
    .host_accessible = true,
    .ended_streams_passed = true,
    .chunk_flags = GP_CHUNK_EXPORTABLE,
    .name = "host",
};

/* Tries what every map does, once, on the smallest piece of memory there is. */
static int try_moving(void)
{
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *pages = mmap(NULL, 2 * bytes, PROT_NONE, PRIVATE_PAGES, -1, 0);
    if (pages == MAP_FAILED) {
        return errno;
    }
    enum gp__host_move result = move_pages((uintptr_t)pages, (uintptr_t)pages + bytes, bytes);
    int code = result == GP__HOST_MOVED ? 0 : errno;
    (void)munmap(pages, 2 * bytes);
    return code;
}

gp_status gp__host_open(int ordinal, gp_device **out, gp_error *error)
{
    (void)ordinal; /* there is one host */
    int code = try_moving();
    if (code == EINVAL) {
        return gp_error_set(error, GP_ERR_UNAVAILABLE,
                            "the host device needs Linux 5.7 or newer: this kernel has no "
                            "MREMAP_DONTUNMAP");
    }
    if (code != 0) {
        return gp__errno_error(error, GP_ERR_DRIVER, "mremap", code, 0, 0);
    }
    *out = &host_device;
    return GP_OK;
}
