/* SPDX-License-Identifier: Apache-2.0
 *
 * The seam between growpool and a device: one table of calls, with their preconditions stated once.
 * Implemented by cuda.c, host.c and, in test builds, tests/support/sim.c; mocked for golden order.
 *
 * Rules for every entry:
 *   - "may block" entries are never called under a growpool lock, nor with the GIL held (B2).
 *   - Memory entries work from any thread with no context current.
 *   - A failure fills *error through gp__driver_error() and leaves the device as it was.
 *   - Sizes and addresses are multiples of the granularity.
 */
#ifndef GP__DRIVER_H
#define GP__DRIVER_H

#include "backing.h"

/* The driver's number for a piece of physical memory. */
typedef uint64_t gp__memory;

/* A fence in a stream: made by event_create for one context, recorded many times. */
typedef struct gp__event gp__event;

/* Who a stream is. Two handles are the same stream when context and id agree: handles are reused by
 * drivers after a destroy, ids never are. */
struct gp__stream_key {
    uintptr_t handle; /* canonical: CUDA's 0, 1 are both 0; on host the stream's id */
    uintptr_t context; /* CUcontext; 0 where the device has none */
    uint64_t id;
    bool
        always_passed; /* work on it is complete whenever its caller returns (host, calling thread) */
    bool thread_bound; /* CUDA's per-thread default stream: only this thread can record on it */
};

/* What enter() saved for leave(). */
struct gp__entry {
    int previous_mode;
    bool pushed;
};

/* Devices beside the own one that work on memory: all of the same kind, none twice, not the own. */
#define GP__MOST_PEERS 32
struct gp__peers {
    size_t count;
    gp_device *devices[GP__MOST_PEERS];
};

/* What import_fd() found behind a descriptor. */
struct gp__imported {
    gp__memory memory;
    gp_location location;
    unsigned flags; /* GP_CHUNK_GPU_DIRECT_RDMA or 0 */
};

struct gp__driver {
    /* -- memory: any thread, no context, may block -- */
    gp_status (*memory_info)(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                             gp_error *error);
    /* Reserves `bytes` of addresses without memory behind them. GP_ERR_ADDRESS_SPACE if refused. */
    gp_status (*reserve)(gp_device *device, size_t bytes, uintptr_t *va, gp_error *error);
    /* Exactly the address and size that reserve gave (V2); nothing may be mapped in it. */
    gp_status (*free_address)(gp_device *device, uintptr_t va, size_t bytes, gp_error *error);
    /* GP_ERR_OUT_OF_MEMORY if the device has no room; GP_ERR_UNAVAILABLE for the location. `flags`
     * (GP_CHUNK_*) is a subset of device->chunk_flags; all of them or none: chunk_share.c decides what
     * to do without. */
    gp_status (*create)(gp_device *device, size_t bytes, gp_location location, unsigned flags,
                        gp__memory *out, gp_error *error);
    gp_status (*release)(gp_device *device, gp__memory memory, size_t bytes, gp_error *error);
    /* A new descriptor for memory that create() made here with GP_CHUNK_EXPORTABLE and that is not
     * released; close-on-exec, the caller's to close. */
    gp_status (*export_fd)(gp_device *device, gp__memory memory, size_t bytes, int *fd,
                           gp_error *error);
    /* Memory of this device behind an open descriptor, to be released like any other; the descriptor
     * stays the caller's. GP_ERR_ARGUMENT: memory of another device, and, where that can be told, no
     * memory, or not `bytes` of it. Where the size cannot be told, map() fails with
     * device->wrong_size_code and release() takes any size. */
    gp_status (*import_fd)(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                           gp_error *error);
    /* *can: work on `peer`, another device of this kind, can reach memory of this one through its
     * addresses. A question that fails counts as no, so callers look at the status for a fork or an
     * exit only. */
    gp_status (*can_access)(gp_device *device, gp_device *peer, bool *can, gp_error *error);
    /* Maps the whole of `memory` at va, inside a reservation, where nothing is mapped. No access yet. */
    gp_status (*map)(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                     gp_error *error);
    /* Read and write for the device (and the CPU where `location` says so) and for all `peers` (NULL:
     * none), which can_access(); covers whole mappings. */
    gp_status (*set_access)(gp_device *device, uintptr_t va, size_t bytes, gp_location location,
                            const struct gp__peers *peers, gp_error *error);
    /* Exactly one mapping. Does NOT wait for work: only gp__reap() and a grow's undo call it. */
    gp_status (*unmap)(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                       gp_error *error);

    /* -- streams: the first three never block and may run with the GIL held -- */
    /* GP_ERR_ARGUMENT for a handle that is no stream of this device, where that can be told: CUDA
     * crashes on the handle of a destroyed stream, whatever is asked. GP_ERR_CAPTURE while the stream is
     * being captured, and *out is then filled but for the id: asking CUDA for the id of such a stream invalidates its capture, in every mode
     * (measured on an H200, driver 580.159; asking for its context or whether it captures does not). */
    gp_status (*stream_resolve)(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                gp_error *error);
    /* GP_OK: the handle still names the stream that was resolved, which does not capture; GP_NOT_READY: it
     * does not, it captures, or that cannot be told. Not for handle 0. An id is never used again, so the
     * context need not be asked for: CUDA needs two calls for this and three to resolve. */
    gp_status (*stream_confirm)(gp_device *device, const struct gp__stream_key *stream);
    /* *capturing also when the answer is "implicitly": the legacy stream beside a blocking capture. In a
     * dead context (a sticky error, or destroyed) nothing captures, and events are made and recorded
     * with success and have passed. */
    gp_status (*stream_capturing)(gp_device *device, const struct gp__stream_key *stream,
                                  bool *capturing, gp_error *error);
    /* Both may block. */
    gp_status (*event_create)(gp_device *device, uintptr_t context, gp__event **out,
                              gp_error *error);
    void (*event_destroy)(gp_device *device, gp__event *event);
    /* May block. Precondition: the stream does not capture; thread-bound streams on their thread. */
    gp_status (*event_record)(gp_device *device, gp__event *event,
                              const struct gp__stream_key *stream, gp_error *error);
    /* Covers all work of the event's context, streams unknown to us included. May block.
     * Invalidates any capture in that context: callers check the streams they know first. */
    gp_status (*event_record_context)(gp_device *device, gp__event *event, gp_error *error);
    /* GP_OK passed, GP_NOT_READY. Never blocks. An event whose context is dead (a sticky error, or
     * destroyed) has passed: nothing in it can still run. Never-recorded events have passed. */
    gp_status (*event_query)(gp_device *device, gp__event *event, gp_error *error);
    /* The same after waiting at most timeout_ns. */
    gp_status (*event_wait)(gp_device *device, gp__event *event, uint64_t timeout_ns,
                            gp_error *error);

    /* -- work, inside enter(): enqueued on a stream, and part of the graph when it captures -- */
    /* Copies `bytes`; `to` and `from` are memory of the device or of the host. May block: pageable
     * host memory is staged. Host memory must stay as it is until the stream has passed. */
    gp_status (*copy)(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                      const struct gp__stream_key *stream, gp_error *error);
    /* Every byte becomes `value`. May block. */
    gp_status (*fill)(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                      const struct gp__stream_key *stream, gp_error *error);
    /* What is enqueued on the stream from now on waits, on the device, for the event's latest record.
     * Precondition: neither the stream nor the event's captures, "implicitly" included: that would
     * invalidate the capture (measured on an H200). May block. */
    gp_status (*stream_wait)(gp_device *device, const struct gp__stream_key *stream,
                             gp__event *event, gp_error *error);

    /* -- captures: inside enter() -- */
    /* *id: the capture that the stream is part of, never reused; 0 for none, and for the legacy stream
     * beside a blocking capture, which is part of nothing. GP_ERR_CAPTURE: the capture was invalidated.
     * Never blocks (33 ns measured), changes no capture in relaxed mode. */
    gp_status (*capture_id)(gp_device *device, const struct gp__stream_key *stream, uint64_t *id,
                            gp_error *error);
    /* Has gone(context) called once when nothing can replay the graph being captured on the stream any
     * more: after the last graph and executable made of it is destroyed and every launch of those has
     * completed, or after the capture failed (both measured: an executable destroyed under two running
     * launches calls it when the second ends). On any thread, which must not call the driver: it may
     * only set a flag. Not called when this fails. May block. */
    gp_status (*capture_keep)(gp_device *device, const struct gp__stream_key *stream,
                              void (*gone)(void *context), void *context, gp_error *error);

    /* Makes the device's context current and the thread's capture mode relaxed; leave() undoes it.
     * Cheap and non-blocking (70 ns on CUDA). Around every callback, every record, query and wait. In a
     * forked child leave() does nothing: a callback that forked comes back there too. */
    gp_status (*enter)(gp_device *device, struct gp__entry *entry, gp_error *error);
    void (*leave)(gp_device *device, const struct gp__entry *entry);
};

struct gp_device {
    const struct gp__driver *driver;
    gp_device_kind kind;
    int ordinal;
    size_t granularity;
    uintptr_t context; /* default context of the device, as in gp__stream_key; 0 where none */
    bool host_accessible;
    bool device_accessible;
    bool
        ended_streams_passed; /* a stream that no longer resolves has no work left (host, not CUDA) */
    char name[24];
    void *state; /* the implementation's own */
    unsigned chunk_flags; /* GP_CHUNK_* that create() understands here; constant once opened */
    int wrong_size_code; /* the code of a map() whose size is not the memory's; 0: never so */
    /* chunk_share.c's own, by gp_location: whether GP_CHUNK_GPU_DIRECT_RDMA memory has proved usable.
     * Atomic. */
    int rdma_trial[2];
};

/* Openers, one per implementation; device.c calls them under its registry lock, once per ordinal. */
gp_status gp__cuda_open(int ordinal, gp_device **out, gp_error *error);
gp_status gp__host_open(int ordinal, gp_device **out, gp_error *error);

/* Test builds register the simulated device here; NULL otherwise. Set before any device is opened. */
typedef gp_status (*gp__device_opener)(int ordinal, gp_device **out, gp_error *error);
void gp__device_set_sim_opener(gp__device_opener opener);

/* Fills *error for a failed driver call (P3) and returns `status`. va 0 and size 0 mean "not
 * applicable". `name` is the driver's name for `code`. */
gp_status gp__driver_error(gp_error *error, gp_status status, const char *call, int code,
                           const char *name, uintptr_t va, size_t size);

/* 0 in the process that first used growpool, and one more in every fork of it; a process that only
 * loaded growpool passes nothing on, so its children count as the first again. Anything but 0 means
 * "this is a forked child", where every object is the parent's, for none can be made. No lock. */
unsigned gp__fork_generation(void);
/* True says at one look that somebody uses growpool, that this is no forked child, and that the process does
 * not end: nearly always. False says nothing. No lock. */
extern int gp__process_is_ready; /* atomic */
static inline bool gp__process_ready(void)
{
    return __atomic_load_n(&gp__process_is_ready, __ATOMIC_ACQUIRE) != 0;
}
static inline bool gp__is_forked_child(void)
{
    return !gp__process_ready() && gp__fork_generation() != 0;
}
/* Before anything that could be found half done by a fork, the first lock included. No lock. */
void gp__note_use(void);
/* True after gp_begin_exit(). No lock. */
bool gp__is_exiting(void);

#endif
