/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool: pools of GPU or host memory that grow in place, stay under a physical limit, and shrink
 * when idle, while a backing of yours supplies the physical memory.
 *
 * WORDS (device, chunk, backing: backing/backing.h; stream, owners, ticket: sync/stream.h)
 *   pool      a device, a backing, a limit, and segments.
 *   segment   one reserved range of virtual addresses, grown by mapping chunks into it.
 *   page      the pool's unit of growth: the device's granularity, or chunk_size where it is fixed.
 *   span      a run of a segment in one state; spans tile each segment without gaps.
 *   block     a USED span: memory in a user's hands.
 *   mapping   one chunk at its addresses.
 *   idle      said of a mapping in which no block lives and no grower has a claim.
 *   claim     pages and bytes that a grower took, before the backing was asked.
 *
 *   physical_bytes = claimed + mapped + retiring + being returned + unreturned + abandoned
 *   used_bytes     = in blocks (rounded up to 512)
 *   address_bytes  = reserved addresses
 *
 * PICTURE
 *   segment  |-------- mapping 1 --------|--- mapping 2 ---|                         |- mapping 3 -|
 *   spans    [USED][FREE][  USED  ][USED.................][..........HOLE..........][    FREE     ]
 *                     ^ owners: stream A, ticket 7                                      ^ idle
 *
 * SPAN STATES, and who changes them
 *   HOLE ------- claim (grow.c) ------> CLAIMED ---- publish (grow.c) ----> USED, FREE
 *     ^            FREE ---- claim -------^ |
 *     |              ^                      +------- undo (grow.c): back to HOLE or FREE
 *     |              +---- gp_pool_free (block.c) ---- USED <--- gp_pool_malloc (block.c) --- FREE
 *     +--- unmapped (retire.c) <--- RETIRING <--- retire (retire.c) --- FREE (a whole idle mapping)
 *                                       +------- wanted again (retire.c) -----> FREE
 *   RETIRING --- the driver refused to unmap ---> ABANDONED (until process exit)
 *
 * HOW A POOL GROWS. Under the lock: choose a place, claim exactly the pages and bytes it needs. Drop
 * the lock; ask the backing; map; set access. Lock again; check that the pool still wants it;
 * publish. On any failure everything is undone and the pool is as it was (V3). Growers never wait
 * for one another.
 *
 * THE LADDER, when memory is short (grow.c). First, if even reclaiming everything idle could not
 * meet the limit, GP_ERR_LIMIT at once and nothing is trimmed. Otherwise these rungs, each tried
 * once: the size wanted (growth step included); the size needed; own idle chunks given back; the
 * tickets of free ranges and retiring chunks waited for, and at most 100 ms for chunks that other threads
 * are giving back; chunks halved down to a page. At most 12 refusals by the backing, then
 * GP_ERR_OUT_OF_MEMORY. Addresses that run short are reclaimed by the same rungs. What a request
 * reclaims is its own to claim, as far as the limit allows. The ladder never waits for a stream that
 * captures nor for unknown owners.
 *
 * CHUNK PLAN (plan.c). A chunk is the run of new pages that a request needs: up to 128 MiB where
 * blocks share it, up to 1 GiB for a request larger than that. A growth step of a sixteenth of what
 * is mapped, at most 32 MiB, is added from spare headroom. chunk_size fixes it instead.
 *
 * PLACEMENT (place.c). Best fit over mapped free space that the stream may use; else the place that
 * needs fewest new pages among a bounded number of holes.
 *
 * REUSE. A free range carries its owners. The same stream takes it back at once and without a driver
 * call when it is the sole owner; everybody else after the ticket passed. A passed range melts into
 * an owned neighbour only when that neighbour is at least as large, or one stream is all there is:
 * a small free must not tie a large range to its stream.
 *
 * OWNERSHIP
 *   thing        holds                            undone by               depends on
 *   pool         backing, segments, timeline      gp_pool_close+release   device
 *   segment      one reservation                  gp_pool_close           nothing mapped in it
 *   mapping      an accepted chunk                unmap, then free        its owners' passing
 *   block        its bytes                        gp_pool_free            its mappings
 *
 * INVARIANTS (with B1-B3, S1-S3 of the other headers); gp__pool_check() asserts V4 and V5
 *   V1  A live address never moves.
 *   V2  A reservation is freed with its exact address and size.
 *   V3  A failed operation leaves the pool as it was (idle chunks that it gave back stay given back, and
 *       addresses that it reserved stay reserved).
 *   V4  Chunk states change in one function, gp__chunk_move(), that asserts legality.
 *   V5  Spans tile their segments; blocks plus free space plus claims equal what is mapped or claimed.
 *
 * LOCKS. One lock for each pool (GP__RANK_POOL) guards its spans, mappings, counters and timeline.
 *
 * THREADS. Every function may be called from any thread, inside backing callbacks too, except that
 * growing, trimming, draining or closing a pool inside its own callback is GP_ERR_REENTRANT.
 * FORK. In a forked child every function reports GP_REASON_FORKED and neither calls the driver nor
 * takes a lock; gp_pool_free and gp_pool_release do nothing there.
 *
 * REJECTED
 *   - A tag in front of each block: device memory cannot be read by the CPU.
 *   - A free list for each stream with memory of its own: idle memory of one stream starves another.
 *   - Growers queueing behind one lock: a slow callback would stop every other thread.
 *   - Slabs for small blocks: they save bookkeeping, not device memory; wait for a measurement.
 */
#ifndef GROWPOOL_H
#define GROWPOOL_H

#include "../backing/backing.h"
#include "../sync/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gp_pool gp_pool;

#define GP_NO_LIMIT  SIZE_MAX
#define GP_ALIGNMENT 512 /* bytes; every block's address is a multiple of it */

enum {
    GP_POOL_NO_REAPER = 1 /* no background thread: retiring chunks wait for an explicit call */
};

typedef struct gp_pool_options {
    const char *name; /* for people; copied, cut to 63 bytes; NULL: "" */
    gp_device *device; /* required */
    gp_backing *backing; /* retained; NULL: chunks straight from the device */
    size_t limit; /* physical bytes; GP_NO_LIMIT for none; 0 is a limit that allows nothing */
    size_t chunk_size; /* bytes, a multiple of the granularity; 0: the pool plans its chunks */
    size_t address_space; /* bytes of addresses for blocks; 0: twice the device's memory */
    unsigned flags; /* GP_POOL_* */
    /* Asked every few milliseconds while an explicit call waits; non-zero ends the wait with
     * GP_ERR_INTERRUPTED. Never called from the reaper. NULL: waits are not interruptible. */
    int (*interrupted)(void *context);
    void *interrupted_context;
} gp_pool_options;

/* Makes an empty pool: nothing is reserved or mapped before the first block. Options are copied.
 * GP_ERR_ARGUMENT: chunk_size off granularity. */
gp_status gp_pool_create(const gp_pool_options *options, gp_pool **out, gp_error *error);
gp_pool *gp_pool_retain(gp_pool *pool);
/* Drops a reference. A pool that was not closed is handed to the reaper, which closes it and lets it
 * go; no waiting here, so finalisers may call it. Chunks whose owners only a context-wide fence could
 * cover stay until the process ends: nobody answers for captures there. After gp_begin_exit(): left as
 * it is. */
void gp_pool_release(gp_pool *pool);
/* Ends every block, waits for all owners (unknown ones too), unmaps, returns every chunk, frees the
 * addresses. Returns when no grower, queued chunk or delivery of the pool is left. A second call is
 * GP_OK. GP_ERR_PINNED and GP_ERR_CAPTURE: nothing changed. GP_ERR_INTERRUPTED: the pool takes no
 * more work; call again to go on. A chunk whose free failed stays in gp_pool_unreturned(). */
gp_status gp_pool_close(gp_pool *pool, gp_error *error);
bool gp_pool_is_closed(const gp_pool *pool);
gp_device *gp_pool_device(const gp_pool *pool);
const char *gp_pool_name(const gp_pool *pool);

/* The pool's stream for a device handle: 0 is the legacy default stream (on host: the calling
 * thread). *out is a new reference. GP_ERR_ARGUMENT: no stream of this device. Never blocks. */
gp_status gp_pool_stream(gp_pool *pool, uintptr_t handle, gp_stream **out, gp_error *error);

enum {
    GP_BLOCK_OBJECT = 1 /* the block belongs to an object: gp_pool_free() wants the same flag */
};

/* A block of at least `size` bytes for work on `stream`. Size 0 gives address 0. May grow the pool,
 * call the backing, and wait. GP_ERR_CAPTURE while `stream` is being captured. */
gp_status gp_pool_malloc(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                         uintptr_t *out, gp_error *error);
/* The part of gp_pool_malloc() that never blocks and never calls out: GP_NOT_READY when memory that
 * the stream may use at once is not there. */
gp_status gp_pool_try_malloc(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                             uintptr_t *out, gp_error *error);
/* Ends a block whose last use was enqueued on `stream`, or on the stream it was allocated on when
 * NULL. Address 0 is a no-op, and so is a block that a close under way has ended. Allocates nothing,
 * calls nothing back, and never blocks, but for memory used on a CUDA per-thread default stream: its
 * fence is recorded on this thread at once, which can stall behind another thread's driver call.
 * GP_ERR_ARGUMENT: not a block of this pool, freed already, or the other kind of block (see flags).
 * GP_ERR_PINNED. */
gp_status gp_pool_free(gp_pool *pool, uintptr_t address, gp_stream *stream, unsigned flags,
                       gp_error *error);
/* `stream` uses the block too: it becomes an owner. */
gp_status gp_pool_record_stream(gp_pool *pool, uintptr_t address, gp_stream *stream,
                                gp_error *error);
/* Exports of a block's memory are counted; while any lives, freeing the block or closing the pool is
 * GP_ERR_PINNED. `unknown` marks the memory as used by streams that growpool cannot see. */
gp_status gp_pool_pin(gp_pool *pool, uintptr_t address, bool unknown, gp_error *error);
void gp_pool_unpin(gp_pool *pool, uintptr_t address);

enum {
    GP_TRIM_NO_WAIT = 1 /* set chunks retiring and return; the reaper gives them back */
};

/* Gives idle chunks back, oldest first, as long as at least min_bytes_to_keep bytes stay mapped. *released: bytes given back, or with GP_TRIM_NO_WAIT bytes set retiring. When it waits it
 * returns after every queued chunk and delivery of the pool is done. GP_ERR_CAPTURE: nothing changed. */
gp_status gp_pool_trim(gp_pool *pool, size_t min_bytes_to_keep, unsigned flags, size_t *released,
                       gp_error *error);
/* Waits until no chunk of the pool is retiring or being returned. */
gp_status gp_pool_drain(gp_pool *pool, gp_error *error);

typedef struct gp_limit_result {
    size_t limit;
    size_t physical_bytes;
    size_t overage_bytes; /* physical bytes above the limit */
    size_t deferred_bytes; /* overage that is retiring already and will go by itself */
} gp_limit_result;

/* Below the present use is legal: growth stops, idle chunks over the limit are set retiring, and the
 * rest is reported. */
gp_status gp_pool_set_limit(gp_pool *pool, size_t limit, gp_limit_result *out, gp_error *error);

/* Call before destroying a stream: waits for its work and lets go of it. Blocks allocated on it stay
 * alive and have no owner until they are freed with another stream. */
gp_status gp_pool_forget_stream(gp_pool *pool, uintptr_t handle, gp_error *error);
/* Tries again to return chunks whose free failed (they count against the limit until then); *returned (may be NULL) is bytes that went. */
gp_status gp_pool_return_unreturned(gp_pool *pool, size_t *returned, gp_error *error);
/* Copies references to the unreturned chunks into chunks[0..capacity) and returns how many there are. */
size_t gp_pool_unreturned(gp_pool *pool, gp_chunk **chunks, size_t capacity);

typedef struct gp_pool_stats {
    size_t used_bytes;
    size_t free_bytes; /* mapped and in no block, retiring not included */
    size_t physical_bytes;
    size_t retiring_bytes; /* retiring, being unmapped or being returned */
    size_t unreturned_bytes;
    size_t abandoned_bytes;
    size_t address_bytes;
    size_t peak_used_bytes;
    size_t peak_physical_bytes;
    size_t limit; /* GP_NO_LIMIT for none */
    uint64_t chunk_count; /* mapped or retiring now */
    uint64_t grow_count; /* growths that succeeded */
    uint64_t trim_count; /* chunks given back */
    uint64_t wait_count; /* waits for streams */
    uint64_t callback_errors; /* backing calls that failed for another reason than memory */
} gp_pool_stats;

/* A consistent picture. In a forked child or after close: what was left. */
void gp_pool_get_stats(gp_pool *pool, gp_pool_stats *out);
void gp_pool_reset_peak_stats(gp_pool *pool);

typedef enum gp_span_state {
    GP_SPAN_USED,
    GP_SPAN_FREE,
    GP_SPAN_CLAIMED,
    GP_SPAN_RETIRING,
    GP_SPAN_HOLE,
    GP_SPAN_ABANDONED
} gp_span_state;

typedef struct gp_span_info {
    uintptr_t address;
    size_t bytes;
    gp_span_state state;
    uint64_t stream_id; /* USED: the stream it was allocated on; else 0 */
    unsigned owner_count; /* owners that have not passed, unknown counted as one */
    bool segment_start; /* first span of its segment */
} gp_span_info;

typedef struct gp_chunk_info {
    uintptr_t address;
    size_t bytes;
    uint64_t id;
    bool retiring;
} gp_chunk_info;

typedef struct gp_pool_snapshot {
    gp_span_info *spans; /* by address */
    size_t span_count;
    gp_chunk_info *chunks; /* by address */
    size_t chunk_count;
} gp_pool_snapshot;

/* A copy of the pool's map, to be freed with gp_pool_snapshot_free(). */
gp_status gp_pool_take_snapshot(gp_pool *pool, gp_pool_snapshot *out, gp_error *error);
void gp_pool_snapshot_free(gp_pool_snapshot *snapshot);

#ifdef __cplusplus
}
#endif
#endif
