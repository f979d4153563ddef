/* SPDX-License-Identifier: Apache-2.0
 *
 * The ground: devices, chunks of physical memory, and the backings that supply them.
 * This file owns the words every other layer speaks. It never knows an address that a user holds,
 * a stream, or a policy.
 *
 * WORDS
 *   device    where memory lives: "cuda:N" (CUDA Driver API), "host" (this process's address space),
 *             and in test builds "sim:N" (a strict simulation that reports every illegal call).
 *   chunk     physical memory: the unit of mapping. Its size is a multiple of the device's
 *             granularity. It is mapped whole and unmapped whole.
 *   backing   who supplies chunks and takes them back: two functions and a context.
 *   accepted  a chunk that a pool took from a backing's alloc.
 *
 * PICTURE
 *
 *        pool (vmm/) ----- asks ----->  gp_backing  ----- makes ----->  gp_chunk
 *          |                          (C or Python)                        |
 *          |  maps, unmaps (sync/, vmm/)                                   |  create, release
 *          +-------------------------> driver table <---------------------+
 *                                  (driver.h: cuda, host, sim)
 *
 * DRIVER FACTS RELIED ON (NVIDIA H200, driver 580.159, CUDA 13.0, measured 2026-11-30)
 *   - No memory call (create, map, set access, unmap, release, reserve) needs a current context.
 *   - A chunk that is released while mapped lives until it is unmapped, so release order is free.
 *   - The driver crashes the process on a handle it does not know. Therefore a bare integer is
 *     never accepted from a backing: chunks are objects, and only gp_chunk_adopt() trusts a number.
 *   - The bill is per chunk, not per byte: 16 GiB costs 347 ms as 2 MiB chunks, 1.5 ms as 1 GiB.
 *
 * OWNERSHIP
 *   thing        holds                       undone by              depends on
 *   gp_device    the primary context (cuda)  process exit           nothing
 *   gp_chunk     one physical handle         gp_chunk_release()     its device
 *   gp_backing   its context                 gp_backing_release()   whatever the context holds
 *   accepted     one reference to the chunk  the backing's free     the pool that accepted it
 *
 * CHUNK STATES. gp__chunk_move() (chunk.c) is the one function that changes them and it asserts
 * that the step is legal.
 *
 *   IDLE --gp__backing_supply--> SUPPLIED ----grow----> MAPPED ---retire---> RETIRING
 *    |  ^                           |                     ^                     |  |
 *    |  |                           | undone              +---wanted again------+  | gp__reap
 *    |  |                           v                                              v
 *    |  +---gp__backing_return--- UNMAPPED <---------------------------------------+
 *    |                              ^
 *    +--its free failed--> UNRETURNED (another try)
 *    +--gp_chunk_close---> CLOSED
 *   SUPPLIED, RETIRING ---an undo failed in the driver---> ABANDONED
 *
 *   UNMAPPED --mapped anew by the pool that holds it--> SUPPLIED
 *
 *   A chunk is IDLE before the backing's free runs, because that function may hand it to another pool
 *   on another thread before it returns. If it fails instead, the chunk becomes UNRETURNED.
 *   "returned" is IDLE again: the same chunk may be supplied once more, so ledgers use its id
 *   together with its generation, which counts acceptances.
 *
 * INVARIANTS
 *   B1  An accepted chunk ends in exactly one of: returned (one successful free, after its owners
 *       passed and it was unmapped), unreturned (free failed), abandoned (an undo failed in the
 *       driver; counted), or left where it is at process exit.
 *   B2  No growpool lock is held across a backing call, a driver call that can block, a call into
 *       Python, or a wait.
 *   B3  A pool's physical bytes never exceed its limit at the moment bytes are claimed.
 *   P1  Lock order: the GIL first, then growpool locks by rank (lock.h); the GIL is never taken
 *       while one is held.
 *   P2  No exit, no abort, nothing printed, no global error state.
 *   P3  A driver error carries the call, the sizes, the address and the driver's name for it.
 *
 * LOCKS: see lock.h for the ranks. gp_chunk and gp_backing use atomics only; the caching backing
 * has a lock of rank GP__RANK_BACKING that is never held across its inner backing.
 *
 * REJECTED
 *   - Handles as integers in the callback contract: one typo ends the process inside the driver.
 *   - A global "last error": one failed probe then poisons every later call.
 *   - Closing devices: primary contexts are shared with every library in the process.
 */
#ifndef GROWPOOL_BACKING_H
#define GROWPOOL_BACKING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Stands before every public function, and only there: what the shared library exports. */
#define GP_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* What every function that can fail returns. Outputs are written on GP_OK only. */
typedef enum gp_status {
    GP_OK = 0,
    GP_NOT_READY, /* not an error: unfinished work, or a fast path that would have to grow */
    GP_ERR_ARGUMENT, /* the caller's argument is wrong; nothing happened */
    GP_ERR_HOST_MEMORY, /* malloc failed for growpool's own bookkeeping; nothing happened */
    GP_ERR_OUT_OF_MEMORY, /* the backing has no more chunks (a backing returns this for "no") */
    GP_ERR_LIMIT, /* the pool's limit leaves no room, even after reclaiming all that is idle */
    GP_ERR_ADDRESS_SPACE, /* no range of virtual addresses is left or could be reserved */
    GP_ERR_DRIVER, /* the device refused a call; gp_error says which and why */
    GP_ERR_CAPTURE, /* a stream that would have to be waited for is being captured, the capture was
                       invalidated, or a graph that lives may still use the memory */
    GP_ERR_STATE, /* the object is closed, forked, poisoned...: see gp_reason */
    GP_ERR_REENTRANT, /* called from inside this pool's own callback */
    GP_ERR_PINNED, /* live exports of the memory forbid it */
    GP_ERR_CALLBACK, /* a callback failed for a reason of its own; it keeps the details */
    GP_ERR_CONTRACT_TYPE, /* a callback answered with something that is no chunk */
    GP_ERR_CONTRACT_VALUE, /* a callback answered with a chunk that does not fit the request */
    GP_ERR_INTERRUPTED, /* the pool's interrupt hook asked a wait to stop */
    GP_ERR_UNAVAILABLE /* the device or feature does not exist on this machine */
} gp_status;

/* Why GP_ERR_STATE. */
typedef enum gp_reason {
    GP_REASON_NONE = 0,
    GP_REASON_CLOSED, /* closed by its owner */
    GP_REASON_FORKED, /* this process is a fork of the one that made the object */
    GP_REASON_POISONED, /* an undo failed in the driver; no more growth, everything else works */
    GP_REASON_EXITING, /* the process is shutting down */
    GP_REASON_IN_USE, /* a pool holds the chunk */
    GP_REASON_BUSY /* another thread is changing the same part of the range */
} gp_reason;

/* Details of a failure, in storage of the caller's; every function takes NULL for "not wanted".
 * The first error of an operation wins; later failures of its undo steps are counted in stats. */
typedef struct gp_error {
    gp_status status;
    gp_reason reason;
    int code; /* CUresult, or errno on host; 0 when no driver call failed */
    const char *call; /* the driver's function, a static string, or NULL */
    size_t size; /* bytes asked for */
    size_t physical; /* pool's physical bytes when it failed */
    size_t limit; /* pool's limit when it failed; SIZE_MAX for none */
    size_t largest_free; /* largest mapped free range of the pool when it failed, bytes */
    char name[48]; /* the driver's name for code, such as CUDA_ERROR_OUT_OF_MEMORY */
    char message[320]; /* one sentence for people: what happened, the sizes, what to do */
} gp_error;

/* Fills *error (when not NULL) and returns status, so that callers write
 * `return gp_error_set(error, GP_ERR_ARGUMENT, "...", ...)`. Any thread. */
GP_API gp_status gp_error_set(gp_error *error, gp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The status in words ("out of memory"): a static string. */
GP_API const char *gp_status_text(gp_status status);

/* ---- devices ------------------------------------------------------------------------------ */

/* A device: lives until the process ends; compare by pointer. Any thread. */
typedef struct gp_device gp_device;

typedef enum gp_device_kind { GP_DEVICE_CUDA, GP_DEVICE_HOST, GP_DEVICE_SIM } gp_device_kind;

/* Opens device `ordinal` (0 for the host) or finds it open already. The first CUDA device loads
 * libcuda.so.1, initialises it and retains the primary context; nothing before this call touches
 * the driver. Errors: GP_ERR_UNAVAILABLE with a sentence that says what is missing (no driver, too
 * old, no such device, no virtual memory management), GP_ERR_STATE in a forked child
 * of a process that had used growpool. */
GP_API gp_status gp_device_open(gp_device_kind kind, int ordinal, gp_device **out, gp_error *error);

GP_API gp_device_kind gp_device_kind_of(const gp_device *device);
GP_API int gp_device_ordinal(const gp_device *device);
/* The number that callbacks get: N for cuda, -1 for host, -2-N for sim:N. */
GP_API int gp_device_id(const gp_device *device);
/* "cuda:0", "host", "sim:0": a string that lives as long as the device. */
GP_API const char *gp_device_name(const gp_device *device);
/* Bytes; every chunk size is a multiple of it. 2 MiB on today's GPUs and on host. */
GP_API size_t gp_device_granularity(const gp_device *device);
/* True when the CPU can read and write this device's mapped memory through its addresses. */
GP_API bool gp_device_is_host_accessible(const gp_device *device);
GP_API bool gp_device_is_device_accessible(const gp_device *device);
/* Free and total bytes of the device, as its driver says. May block. */
GP_API gp_status gp_device_memory(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                                  gp_error *error);
/* GP_OK when CUDA device 0 could be opened; else GP_ERR_UNAVAILABLE, and *error says why.
 * Never initialises a CUDA context. */
GP_API gp_status gp_cuda_available(gp_error *error);

/* ---- chunks ------------------------------------------------------------------------------- */

/* Physical memory. Reference counted and thread safe: any thread may retain, release and read. */
typedef struct gp_chunk gp_chunk;

typedef enum gp_location {
    GP_LOCATION_DEVICE, /* the device's own memory */
    GP_LOCATION_HOST /* host memory near the device (CUDA: HOST_NUMA), mapped at device addresses,
                           readable by the CPU too */
} gp_location;

enum {
    /* gp_chunk_export_fd() works. On host such a chunk is a memory file: it holds a descriptor while it
     * lives, and a forked child cannot reach it, where ordinary chunks are copied on write. */
    GP_CHUNK_EXPORTABLE = 1,
    /* Network cards and the like may reach it. A wish: where the device or its driver says no, or a
     * trial shows that such memory cannot be used (one for each device), the chunk is made without, and
     * gp_chunk_flags() tells. */
    GP_CHUNK_GPU_DIRECT_RDMA = 2
};

/* Makes `size` bytes, a positive multiple of the granularity (else GP_ERR_ARGUMENT). *out is the first
 * reference. GP_ERR_OUT_OF_MEMORY when the device has no
 * room, GP_ERR_UNAVAILABLE when the location, or exporting, is not supported there. May block: hold no
 * lock. */
GP_API gp_status gp_chunk_create(gp_device *device, size_t size, gp_location location,
                                 unsigned flags, gp_chunk **out, gp_error *error);
/* A new POSIX file descriptor (close-on-exec, the caller's to close) that stands for the chunk's memory,
 * for another process to import. GP_ERR_ARGUMENT: not made with GP_CHUNK_EXPORTABLE; an imported chunk
 * cannot be exported again. GP_ERR_STATE: closed. Works while a pool has the chunk; a close that comes
 * meanwhile leaves the memory until the export is done. May block. */
GP_API gp_status gp_chunk_export_fd(gp_chunk *chunk, int *fd, gp_error *error);
/* The same memory from a descriptor that gp_chunk_export_fd() made, here or in another process; `size` is
 * the chunk's exact size, which is checked by a trial mapping (GP_ERR_ARGUMENT, as for memory of another
 * device and what is no open descriptor). GP_ERR_DRIVER: the driver finds no memory behind it;
 * GP_ERR_UNAVAILABLE: the device cannot share. The descriptor stays the caller's. Memory lives until its
 * last chunk and descriptor in any process are gone. Nothing orders the work of two processes on it. May
 * block. */
GP_API gp_status gp_chunk_import_fd(gp_device *device, int fd, size_t size, gp_chunk **out,
                                    gp_error *error);
GP_API unsigned gp_chunk_flags(const gp_chunk *chunk); /* GP_CHUNK_*, as it came to be */
/* Adopts a handle made elsewhere (for CUDA a CUmemGenericAllocationHandle). UNSAFE: the driver
 * crashes the process if the handle is not live. release(context) runs when the last reference
 * goes; with release NULL the handle itself is released then. Not on the host device. */
GP_API gp_status gp_chunk_adopt(gp_device *device, uint64_t handle, size_t size,
                                void (*release)(void *context), void *context, gp_chunk **out,
                                gp_error *error);
GP_API gp_chunk *gp_chunk_retain(gp_chunk *chunk);
/* Drops a reference; the last one releases the physical memory (may block: hold no lock). After
 * gp_begin_exit() or in a forked child the driver is left alone. NULL is allowed. */
GP_API void gp_chunk_release(gp_chunk *chunk);
/* Releases the physical memory now; no-op when closed. GP_ERR_STATE: in use while a pool holds it, or
 * forked, or exiting. */
GP_API gp_status gp_chunk_close(gp_chunk *chunk, gp_error *error);
GP_API bool gp_chunk_is_closed(const gp_chunk *chunk);
/* True while a pool holds it: accepted and not yet returned. */
GP_API bool gp_chunk_is_in_use(const gp_chunk *chunk);
GP_API size_t gp_chunk_size(const gp_chunk *chunk);
GP_API gp_device *gp_chunk_device(const gp_chunk *chunk);
GP_API gp_location gp_chunk_location(const gp_chunk *chunk);
/* The driver's number for the memory; on host the address of a description, not of the memory. */
GP_API uint64_t gp_chunk_handle(const gp_chunk *chunk);
GP_API uint64_t gp_chunk_id(const gp_chunk *chunk); /* unique in the process, never reused */
GP_API uint64_t gp_chunk_generation(const gp_chunk *chunk); /* how often a pool has accepted it */
/* One pointer for whoever wraps the chunk in another language. Borrowed: growpool never touches
 * what it points to. Set it before the chunk is shared between threads. */
GP_API void gp_chunk_set_user(gp_chunk *chunk, void *user);
GP_API void *gp_chunk_user(const gp_chunk *chunk);

/* ---- backings: the contract for suppliers --------------------------------------------------
 *
 * A supplier is two functions and a `void *context`. What it may count on, and what is asked of it, in ten
 * points; docs/contract.md says the same of Python's callables, which are one such supplier, with the tests
 * that hold each point.
 *
 *  1. SURROUNDINGS. alloc and free run with the device's context current, in relaxed capture mode, holding
 *     no growpool lock, on whichever thread grows or shrinks; context and mode are restored behind them.
 *     They may block. They must return: never unwind or longjmp through growpool.
 *  2. NO MEMORY is GP_ERR_OUT_OF_MEMORY. The pool then climbs one ladder (growpool.h): it gives its own
 *     idle chunks back, waits for what is about to become idle, asks for less, and reports
 *     GP_ERR_OUT_OF_MEMORY after at most 12 refusals. A limit that could not be met anyway asks nothing.
 *  3. ANY OTHER STATUS ends the operation and reaches its caller with the gp_error that was filled in, or,
 *     if none was, with a sentence of growpool's. The pool is as it was, but for idle chunks given back.
 *  4. A WRONG ANSWER is refused: success without a chunk is GP_ERR_CONTRACT_TYPE; a chunk that is not IDLE,
 *     of another size or of another device is GP_ERR_CONTRACT_VALUE. The reference that alloc passed is
 *     dropped; whoever holds another one still has the chunk, as it was.
 *  5. EACH ACCEPTED CHUNK ends in exactly one way (B1): returned by one successful free, after its owners
 *     passed and it was unmapped; unreturned; abandoned; or left where it is when the process ends.
 *  6. A FREE THAT FAILS leaves the chunk with the pool as unreturned: still counted, offered again by
 *     gp_pool_return_unreturned() only. It is no error of the operation that called it (that one included),
 *     which does the rest and succeeds: unreturned_bytes and callback_errors of the statistics tell.
 *  7. SEVERAL THREADS call at once, and none waits for another's callback (but for 100 ms on the ladder, for
 *     chunks that are being given back). A callback may use other pools, and free, abandon and unpin
 *     blocks of the same pool, record streams and read statistics. What would call the same pool's
 *     backing again on that thread, and waiting for the pool, is GP_ERR_REENTRANT.
 *  8. LIFETIME. The context lives until destroy, which comes once, after the last free and with the last
 *     reference. Frees, abandons, unpins and a new limit only queue: free runs in a growth, a trim or
 *     decommit that waits, drain, gp_pool_return_unreturned() or close, or on the reaper's thread.
 *     gp_pool_close() returns when no grower, queued chunk or free under way is left; gp_pool_drain() and a
 *     trim that waits, when no queued chunk or free is.
 *  9. THE END. After gp_begin_exit() neither alloc nor free is called, nor the driver; destroy only by
 *     who drops the last reference.
 * 10. FORK. In a forked child everything reports GP_ERR_STATE (forked): no callback but destroy, as in 9, no
 *     driver call, no lock; what the parent has is untouched. After a callback that forked the call that it
 *     belongs to fails in the child, whatever the callback answers there.
 */

typedef struct gp_request {
    size_t size; /* bytes, a multiple of the granularity */
    gp_device *device;
    uintptr_t stream; /* of the growth: a CUDA stream handle, or a host stream's id; 0 for none */
} gp_request;

/* The contract is the ten points above. */
typedef struct gp_backing_ops {
    /* On GP_OK *out holds an IDLE chunk of exactly request->size bytes on request->device, and its
     * reference passes to the pool. */
    gp_status (*alloc)(void *context, const gp_request *request, gp_chunk **out, gp_error *error);
    /* Takes a chunk back after its owners passed and it was unmapped. On GP_OK the reference
     * passes to the backing; on anything else the pool keeps it as unreturned. */
    gp_status (*free)(void *context, gp_chunk *chunk, const gp_request *request, gp_error *error);
    /* The last reference is gone. May be NULL. Any thread; no lock held. */
    void (*destroy)(void *context);
} gp_backing_ops;

/* Reference counted, thread safe. */
typedef struct gp_backing gp_backing;

/* `ops` must outlive the backing; alloc and free must both be set (else GP_ERR_ARGUMENT). On error
 * `context` stays the caller's. */
GP_API gp_status gp_backing_create(const gp_backing_ops *ops, void *context, gp_backing **out,
                                   gp_error *error);
GP_API gp_backing *gp_backing_retain(gp_backing *backing);
GP_API void gp_backing_release(gp_backing *backing); /* NULL is allowed; may call destroy */

/* Chunks straight from the device (or from host memory near it); free releases them. */
GP_API gp_status gp_backing_device(gp_location location, gp_backing **out, gp_error *error);

/* Keeps up to `keep_bytes` of returned chunks and hands them out again when size and device of the
 * request match; the oldest go back to `inner` first. When `inner` has no memory,
 * everything kept is given back and `inner` is asked once more. Retains `inner`. */
GP_API gp_status gp_backing_caching(gp_backing *inner, size_t keep_bytes, gp_backing **out,
                                    gp_error *error);
/* Bytes kept now. `backing` must come from gp_backing_caching (else 0). */
GP_API size_t gp_backing_cached_bytes(const gp_backing *backing);
/* Gives kept chunks back to the inner backing until at most `keep_bytes` remain; *released (may be
 * NULL) is how much went. An inner free that fails ends it with that status; the chunk is kept. */
GP_API gp_status gp_backing_trim(gp_backing *backing, size_t keep_bytes, size_t *released,
                                 gp_error *error);

/* Calls the backing directly, with the whole contract kept around the call: context current, relaxed
 * capture mode, answer checked. For backings made of backings: the chunk stays IDLE, and only the pool
 * at the end of the chain accepts it. Lending a chunk that a pool holds back to gp_backing_free() is
 * GP_ERR_STATE (in use). */
GP_API gp_status gp_backing_alloc(gp_backing *backing, const gp_request *request, gp_chunk **out,
                                  gp_error *error);
GP_API gp_status gp_backing_free(gp_backing *backing, gp_chunk *chunk, const gp_request *request,
                                 gp_error *error);

/* Bytes of host memory that growpool holds in this process for its own records, all pools together: not user
 * memory, and not what a language face adds. A pool's page map counts whole, 16 bytes for each page of
 * addresses that it has reserved, though of that only what was used becomes memory. Any thread, no lock; in a
 * forked child the parent's figure at the fork. */
GP_API size_t gp_bookkeeping_bytes(void);

/* From now on growpool makes no driver call and enters no callback: pools report
 * GP_REASON_EXITING. For the end of a process, after pools were closed. Irreversible. */
GP_API void gp_begin_exit(void);

#ifdef __cplusplus
}
#endif
#endif
