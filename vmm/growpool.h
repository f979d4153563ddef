/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool: pools of GPU or host memory that grow in place, stay under a physical limit, and shrink
 * when idle, while a backing of yours supplies the physical memory.
 *
 * WORDS (device, chunk, backing, accepted: backing/backing.h; stream, owners, unknown, ticket, fence,
 * passed, retiring, reaper: sync/stream.h)
 *   pool      a device, a backing, a limit, and segments.
 *   segment   one reserved range of virtual addresses, grown by mapping chunks into it.
 *   page      the pool's unit of growth: the device's granularity, or chunk_size where it is fixed.
 *   span      a run of a segment in one state; spans tile each segment without gaps.
 *   block     a USED span: memory in a user's hands.
 *   range     one user's own segment, of which parts are committed (USED) and the rest is not.
 *   growable  a range that is committed from its start to its size.
 *   arena     the memory that blocks of one capture have had: it belongs to the captured graph.
 *   export    a use of memory by another library, counted as a pin.
 *   mapping   one chunk at its addresses.
 *   grower    a thread that adds chunks to a pool, inside gp_pool_malloc() or a commit.
 *   claim     pages and bytes that a grower took, before the backing was asked.
 *   idle      said of a mapping in which nothing is USED or HELD and no grower has a claim.
 *   delivery  a thread that has retiring chunks in hand: it waits, unmaps, calls the backing's free.
 *   unreturned, abandoned: chunks whose free failed; chunks that the driver would not unmap.
 *
 *   physical_bytes = claimed + mapped + retiring + being returned + unreturned + abandoned
 *   used_bytes     = in blocks (rounded up to 512) and in committed parts of ranges (whole pages)
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
 *   A block of a capture's arena: USED --- gp_pool_free (block.c) ---> HELD --- the graph is gone
 *   (arena.c) ---> FREE; and HELD --- a block of the same capture ---> USED.
 *   In a range's segment nothing but the range takes HOLE and FREE (range.c): commit claims and
 *   publishes them as USED, decommit makes USED FREE and sets the mappings that are idle by then
 *   retiring. FREE there is the rest of a chunk that a cut left mapped.
 *
 * HOW A POOL GROWS. Under the lock: choose a place, claim exactly the pages and bytes it needs. Drop
 * the lock; ask the backing; map; set access. Lock again; check that the pool still wants it;
 * publish. On any failure everything is undone and the pool is as it was (V3). Growers never wait
 * for one another.
 *
 * BEFORE IT GROWS for a block (ladder.c). Free memory of other streams would serve, if it has passed: their
 * fences are recorded, and an idle stream passes its own within microseconds. If the pool would become
 * larger than what was ever used of it at once, by more than a thousandth, idle chunks that everybody has passed
 * are unmapped and mapped again where they are needed; that costs what it costs to create and map new ones,
 * and the backing is not asked. Neither waits for a stream that is at work. Under a limit the ladder does
 * the same with chunks whose streams it waited for, and gives back those that do not fit.
 *
 * THE LADDER, when memory is short (ladder.c). First, if even reclaiming everything idle could not
 * meet the limit, GP_ERR_LIMIT at once and nothing is trimmed. Otherwise these rungs, each tried
 * once: the size wanted (growth step included); the size needed; own idle chunks given back; the
 * tickets of FREE spans and retiring chunks waited for, and at most 100 ms for chunks that other threads
 * are giving back; chunks halved down to a page. At most 12 refusals by the backing, then
 * GP_ERR_OUT_OF_MEMORY. Addresses that run short are reclaimed by the same rungs. What a request
 * reclaims is its own to claim, as far as the limit allows. The ladder never waits for a stream that
 * captures nor for unknown owners.
 *
 * CHUNK PLAN (plan.c). The run of new pages that a block needs is mapped in chunks of a sixteenth of the
 * block, at most 1 GiB, and at least 128 MiB; 8 MiB (32 MiB for blocks from 256 MiB on) once the pool is
 * larger than what was ever used of it at once. A growth step of a sixteenth of what is mapped, at most
 * 32 MiB, is added from spare headroom until then. chunk_size fixes the size instead.
 *
 * PLACEMENT (place.c). Best fit over mapped free space that the stream may use; else the place that
 * needs fewest new pages among a bounded number of holes.
 *
 * REUSE. A FREE span carries its owners. The same stream takes it back at once and without a driver
 * call when it is the sole owner; everybody else after the ticket passed. A passed span melts into
 * an owned neighbour only when that neighbour is at least as large, or one stream is all there is:
 * a small free must not tie a large span to its stream.
 *
 * BLOCKS AT HAND (quick.c). What a stream freed it may have back at once, if it asks for the same size: up to 32
 * blocks a stream are kept whole for that, without the pool's lock, so threads on streams of their own do not
 * meet. They count as free. A request that they cannot serve gives the stream's up, and whoever looks at free
 * memory (growing, trimming, limits, snapshots) all of them, so they cost no memory.
 *
 * RANGES. A range has a segment of its own, as large as it may become, so its address never changes
 * and growing copies nothing. Each commit maps chunks of its own: one up to 1 GiB, more beyond. A chunk is given back whole, so one that a cut goes through
 * stays, counted as kept, and goes with its last committed page; a pool with chunk_size equal to the
 * granularity is exact. Owners belong to the range as a whole: the stream it was made for, those that
 * committed, and those recorded. A commit waits for the owners of memory that is still mapped there,
 * for its addresses are the ones that the user wants: unknown ones too, with a fence of the whole
 * context, so it is an explicit call like a trim, and its caller answers for captures that growpool
 * does not know (S3). Commits and the bulk forms are all or nothing.
 *
 * CAPTURES. A block for a stream that captures belongs to the arena of that capture. It comes from
 * memory that everybody has passed, or from new chunks, and once freed it is used again inside the same
 * capture only: replays use it whenever they like. The graph holds a user object that says when it is
 * gone, executables and their launches included; then the arena's memory is like any other. A pool with
 * living graphs does not close (GP_ERR_CAPTURE). On the legacy stream beside a blocking capture, blocks
 * are ordinary ones. Ranges may grow in a capture too, but they know no graphs: what was committed stays
 * until it is decommitted, and whoever decommits it must not launch a graph over it again.
 *
 * ADDRESSES. Blocks live in segments of at most address_space bytes together; the first is that large,
 * or, where address_space is the default, an eighth of what is left of 16 TiB for all default
 * reservations of the process, so that thousands of pools fit into 128 TiB; the next ones follow as
 * needed. Ranges reserve what they ask for, beside that. A refusal is GP_ERR_ADDRESS_SPACE.
 *
 * WHO CLOSES A POOL THAT IS LET GO. gp_pool_finish() and the last gp_pool_release() leave it to the
 * reaper, which waits for streams that it can fence one by one. What unknown owners keep goes, once
 * it has found that (milliseconds after the last pin), with the next gp_pool_trim() that waits,
 * gp_pool_drain() or gp_pool_close() of any pool of that device, unless a stream that a
 * pool knows captures just then: those callers answer for captures, a background thread cannot.
 * GP_ERR_INTERRUPTED may end that part of their work as well, once their own pool is done.
 *
 * OWNERSHIP
 *   thing        holds                            undone by               depends on
 *   pool         backing, segments, timeline      gp_pool_close+release   device
 *   segment      one reservation                  gp_pool_close           nothing mapped in it
 *   mapping      an accepted chunk                unmap, then free        its owners' passing
 *   block        its bytes                        gp_pool_free            its mappings
 *   range        a segment, its pool, a stream    gp_range_close, release its mappings' passing
 *   arena        spans of one capture             the end of the graph    the graph
 *   pin          a block, or a part of a range    gp_pool_unpin,          whoever reads the export
 *                                                 gp_range_unpin
 *
 * INVARIANTS (with B1-B3, S1-S3 of the other headers); gp__pool_check() asserts V4 and V5
 *   V1  A live address never moves.
 *   V2  A reservation is freed with its exact address and size.
 *   V3  A failed operation leaves the pool as it was (idle chunks that it gave back stay given back, and
 *       addresses that it reserved stay reserved).
 *   V4  Chunk states change in one function, gp__chunk_move(), that asserts legality.
 *   V5  Spans tile their segments; blocks plus free space plus claims equal what is mapped or claimed.
 *
 * LOCKS. One lock for each pool (GP__RANK_POOL) guards its spans, mappings, counters and timeline; a latch for
 * each stream (GP__RANK_QUICK) the blocks that are at hand for it.
 *
 * THREADS. Every function may be called from any thread, inside backing callbacks too, except that
 * growing, trimming, draining or closing a pool inside its own callback is GP_ERR_REENTRANT. Pointers
 * that are passed in are the caller's to keep alive during the call.
 * ERRORS. Beside those that a function names, each may report GP_ERR_STATE (closed, forked, exiting; for
 * growth: poisoned), GP_ERR_HOST_MEMORY, GP_ERR_ARGUMENT for a stream of another pool, and, where it
 * asks the device, GP_ERR_DRIVER.
 * FORK. In a forked child every function reports GP_REASON_FORKED and neither calls the driver nor
 * takes a lock; gp_pool_free and gp_pool_release do nothing there. New pools are refused like old ones:
 * start workers by executing a program anew. Only a process that was forked before its parent used
 * growpool (which to load is not) starts afresh. A callback may fork; in the child the call that it
 * belongs to ends with an error and leaves everything as it is, so what the child sees of the pool is a
 * copy that may be half done.
 *
 * REJECTED
 *   - A tag in front of each block: device memory cannot be read by the CPU.
 *   - A free list for each stream with memory of its own: idle memory of one stream starves another.
 *   - Growers queueing behind one lock: a slow callback would stop every other thread.
 *   - Slabs for small blocks: they save bookkeeping, not device memory; wait for a measurement.
 */
#ifndef GROWPOOL_H
#define GROWPOOL_H

#include "backing.h"
#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gp_pool gp_pool;

#define GP_NO_LIMIT  SIZE_MAX
#define GP_ALIGNMENT 512 /* bytes; every block's address is a multiple of it */

enum {
    /* No background thread while the pool is in use: retiring chunks wait for an explicit call. */
    GP_POOL_NO_REAPER = 1
};

typedef struct gp_pool_options {
    const char *name; /* for people; copied, cut to 63 bytes; NULL: "" */
    gp_device *device; /* required */
    gp_backing *backing; /* retained; NULL: chunks straight from the device */
    size_t limit; /* physical bytes; GP_NO_LIMIT for none; 0 is a limit that allows nothing */
    size_t chunk_size; /* bytes, a multiple of the granularity; 0: the pool plans its chunks */
    /* Bytes of addresses for blocks; 0: twice the device's memory, see ADDRESSES. */
    size_t address_space;
    unsigned flags; /* GP_POOL_* */
    /* Asked every few milliseconds while an explicit call waits; non-zero ends the wait with
     * GP_ERR_INTERRUPTED. Never called from the reaper. NULL: waits are not interruptible. */
    int (*interrupted)(void *context);
    void *interrupted_context;
    /* Devices of the same kind that get access to every chunk, now and later; copied. The pool's own
     * device and doubles are dropped. GP_ERR_ARGUMENT: another kind; GP_ERR_UNAVAILABLE: one of them
     * cannot reach the memory. Fences are recorded on streams of the pool's device alone: before memory
     * that a peer works on is freed, one of those streams must be made to wait for that work. */
    gp_device *const *peers;
    size_t peer_count;
} gp_pool_options;

/* Makes an empty pool: nothing is reserved or mapped before the first block or range. Options are copied.
 * *out is the first reference: gp_pool_close(), then gp_pool_release(). GP_ERR_ARGUMENT: no device,
 * chunk_size off granularity, an address_space that no machine has. May block: with address_space 0 the
 * device is asked for its size. */
GP_API gp_status gp_pool_create(const gp_pool_options *options, gp_pool **out, gp_error *error);
/* One more reference; returns the pool. */
GP_API gp_pool *gp_pool_retain(gp_pool *pool);
/* Drops a reference; NULL is allowed. A pool that was not closed is handed to the reaper, which
 * closes it and lets it go; no waiting here, so finalisers may call it. Chunks whose owners only a
 * context-wide fence could cover wait for an explicit call, see WHO CLOSES A POOL THAT IS LET GO.
 * After gp_begin_exit(): left as it is. */
GP_API void gp_pool_release(gp_pool *pool);
/* Ends every block and range, waits for all owners (unknown ones too), unmaps, returns every chunk, frees the
 * addresses. Returns when no grower, retiring chunk or delivery of the pool is left. A second call is
 * GP_OK. GP_ERR_PINNED and GP_ERR_CAPTURE: nothing changed. GP_ERR_INTERRUPTED: the pool takes no
 * more work; call again to go on. A chunk whose free failed stays in gp_pool_unreturned(). */
GP_API gp_status gp_pool_close(gp_pool *pool, gp_error *error);
/* For a pool whose memory is still exported, or in graphs: it takes no more work from now on, and is
 * closed by the reaper after the last pin and graph; gp_pool_close() may still be called. Never waits. */
GP_API gp_status gp_pool_finish(gp_pool *pool, gp_error *error);
GP_API bool gp_pool_is_closed(const gp_pool *pool);
/* Here and below: borrowed, and constant while the pool lives. */
GP_API gp_device *gp_pool_device(const gp_pool *pool);
GP_API const char *gp_pool_name(const gp_pool *pool);
GP_API size_t gp_pool_peer_count(const gp_pool *pool);
/* The peers in the order given; NULL from gp_pool_peer_count() on. */
GP_API gp_device *gp_pool_peer(const gp_pool *pool, size_t index);

/* The pool's stream for a device handle: 0 is the legacy default stream (on host: the calling
 * thread). *out is a new reference, which may outlive the pool. GP_ERR_ARGUMENT: no stream of this
 * device. Never blocks. */
GP_API gp_status gp_pool_stream(gp_pool *pool, uintptr_t handle, gp_stream **out, gp_error *error);

enum {
    GP_BLOCK_OBJECT = 1, /* the block belongs to an object: gp_pool_free() wants the same flag */
    /* For gp_pool_try_malloc() and gp_pool_try_free(), where the caller knows the stream by its handle alone,
     * as other libraries name it: GP_NOT_READY if the handle names another stream by now, or captures. Then
     * gp_pool_stream() goes on. One question to the driver tells both. */
    GP_BLOCK_BY_HANDLE = 2
};

/* A block of at least `size` bytes for work on `stream`. Size 0 gives address 0. May grow the pool,
 * call the backing, and wait. While `stream` is being captured the block belongs to the graph (CAPTURES
 * above); GP_ERR_CAPTURE when the capture was invalidated. GP_ERR_OUT_OF_MEMORY, GP_ERR_LIMIT,
 * GP_ERR_ADDRESS_SPACE: the ladder's last word, with the pool's figures in the error. GP_ERR_REENTRANT,
 * GP_ERR_INTERRUPTED, GP_ERR_CONTRACT_*, and whatever else the backing answers: the pool is as it was.
 * GP_ERR_ARGUMENT: a size beyond all addresses, a stream that was forgotten. */
GP_API gp_status gp_pool_malloc(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                                uintptr_t *out, gp_error *error);
/* The part of gp_pool_malloc() that never blocks and never calls out: GP_NOT_READY when memory that
 * the stream may use at once is not there, and for the first block of a capture. */
GP_API gp_status gp_pool_try_malloc(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                                    uintptr_t *out, gp_error *error);
/* Ends a block whose last use was enqueued on `stream`, or on the stream it was allocated on when
 * NULL. Address 0 is a no-op, and so is a block that a close under way has ended. Allocates nothing,
 * calls nothing back, and never blocks, but for memory used on a CUDA per-thread default stream: its
 * fence is recorded on this thread at once, which can stall behind another thread's driver call.
 * GP_ERR_ARGUMENT: not a block of this pool, freed already, or the other kind of block (see flags).
 * GP_ERR_PINNED. */
GP_API gp_status gp_pool_free(gp_pool *pool, uintptr_t address, gp_stream *stream, unsigned flags,
                              gp_error *error);
/* The part of gp_pool_free() that takes no lock of the pool: GP_NOT_READY unless the block is one that
 * `stream` freed before and was given again; gp_pool_free() goes on. Address 0: GP_NOT_READY. */
GP_API gp_status gp_pool_try_free(gp_pool *pool, uintptr_t address, gp_stream *stream,
                                  unsigned flags, gp_error *error);
/* `stream` uses the block too: it becomes an owner. Address 0 is a no-op. Never blocks. GP_ERR_ARGUMENT:
 * not a block of this pool. */
GP_API gp_status gp_pool_record_stream(gp_pool *pool, uintptr_t address, gp_stream *stream,
                                       gp_error *error);
/* Exports of a block's memory are counted; while any lives, freeing the block or closing the pool
 * is GP_ERR_PINNED. Address 0 has nothing to pin. GP_ERR_ARGUMENT: not a block of this pool.
 * `unknown` marks the memory as used by streams that growpool cannot see. Each pin holds a
 * reference to the pool. */
GP_API gp_status gp_pool_pin(gp_pool *pool, uintptr_t address, bool unknown, gp_error *error);
/* Ends one pin; on any thread, and never waits. The last one ends a block that was abandoned to it. */
GP_API void gp_pool_unpin(gp_pool *pool, uintptr_t address);
/* For finalisers: frees the block now, or with its last pin. Its owners are those it has, and `unknown`
 * when it was pinned so. Never waits, reports nothing. */
GP_API void gp_pool_abandon(gp_pool *pool, uintptr_t address, unsigned flags);

/* ---- work on memory ------------------------------------------------------------------------ */

/* Enqueue a copy or a fill on the stream. Addresses may be the pool's or the host's. The caller says
 * record_stream where the stream is no owner yet, and keeps host memory as it is until the stream has
 * passed. On the host's calling thread they are done on return. May block: hold no lock.
 * GP_ERR_ARGUMENT, here and in the next three: the stream was forgotten. */
GP_API gp_status gp_pool_copy(gp_pool *pool, uintptr_t to, uintptr_t from, size_t bytes,
                              gp_stream *stream, gp_error *error);
GP_API gp_status gp_pool_fill(gp_pool *pool, uintptr_t to, size_t bytes, unsigned char value,
                              gp_stream *stream, gp_error *error);
/* Waits until everything enqueued on the stream by now is done. GP_ERR_CAPTURE, GP_ERR_INTERRUPTED.
 * With `whole` interrupts are not noticed. */
GP_API gp_status gp_pool_synchronize(gp_pool *pool, gp_stream *stream, bool whole, gp_error *error);
/* Makes `to` wait, on the device, for what is enqueued on `from` by now. Nothing to do when they are one
 * stream, or when `from` was forgotten: its work is done. GP_ERR_CAPTURE while either captures. */
GP_API gp_status gp_pool_join(gp_pool *pool, gp_stream *from, gp_stream *to, gp_error *error);
/* The stream that a block was allocated on; *out is a new reference. */
GP_API gp_status gp_pool_block_stream(gp_pool *pool, uintptr_t address, gp_stream **out,
                                      gp_error *error);

/* ---- ranges -------------------------------------------------------------------------------- */

/* Reference counted; holds its pool, which it does not keep from being closed. Any thread. Two
 * calls that change overlapping parts at once, or two resizes, are GP_ERR_STATE (GP_REASON_BUSY)
 * for the later one. */
typedef struct gp_range gp_range;

typedef struct gp_interval {
    size_t offset; /* bytes, both multiples of gp_range_granularity() */
    size_t bytes;
} gp_interval;

typedef struct gp_release_result {
    size_t released_bytes; /* given back, or with GP_TRIM_NO_WAIT set retiring */
    size_t kept_bytes; /* of the part, still mapped: in chunks that other committed pages share, or
                          waiting for an explicit call */
} gp_release_result;

/* Reserves addresses for max_bytes (rounded up to pages; 0 is a valid empty range with address 0) and
 * commits nothing; `stream` is the range's own. *out is the first reference. GP_ERR_ADDRESS_SPACE;
 * GP_ERR_ARGUMENT: more than any device can reserve. May block. */
GP_API gp_status gp_range_create(gp_pool *pool, size_t max_bytes, gp_stream *stream, gp_range **out,
                                 gp_error *error);
GP_API gp_range *gp_range_retain(gp_range *range);
/* Drops a reference; NULL is allowed. The last one ends the range as gp_range_close() does; pins hold
 * references of their own. Never waits. */
GP_API void gp_range_release(gp_range *range);
/* Decommits everything after its last use on `stream` (NULL: its own) and lets go of the addresses once
 * the memory has passed. Never waits. A second call is GP_OK. GP_ERR_PINNED. */
GP_API gp_status gp_range_close(gp_range *range, gp_stream *stream, gp_error *error);
GP_API bool gp_range_is_closed(const gp_range *range); /* of itself or with its pool */

GP_API uintptr_t gp_range_address(const gp_range *range);
GP_API size_t gp_range_max_bytes(const gp_range *range);
GP_API size_t gp_range_granularity(const gp_range *range);
GP_API size_t gp_range_size(const gp_range *range); /* bytes, of the last gp_range_resize() */
GP_API gp_pool *gp_range_pool(const gp_range *range); /* borrowed */
GP_API gp_stream *gp_range_stream(const gp_range *range); /* borrowed: the one it was made for */
GP_API size_t gp_range_committed_bytes(const gp_range *range);
/* Of chunks at its addresses, retiring ones too. */
GP_API size_t gp_range_physical_bytes(const gp_range *range);
/* Copies committed intervals, by offset and as long as possible each, to out[0..capacity) and returns
 * how many there are. */
GP_API size_t gp_range_committed(const gp_range *range, gp_interval *out, size_t capacity);

/* Commits every page of the intervals for work on `stream` (NULL: its own); pages that are
 * committed stay as they are. Intervals may be in any order and overlap. All or nothing.
 * *committed (may be NULL): bytes that this call added. May call the backing and wait, as
 * gp_pool_malloc() does, and has its errors; and GP_ERR_ARGUMENT: off the granularity, outside of
 * the range, a stream that was forgotten; GP_ERR_CAPTURE: memory that is still mapped there was
 * last used by a stream that captures. */
GP_API gp_status gp_range_commit(gp_range *range, const gp_interval *intervals, size_t count,
                                 gp_stream *stream, size_t *committed, gp_error *error);
/* Decommits the intervals after their last use on `stream` (NULL: its own); pages that are not
 * committed stay as they are. Chunks without a committed page are given back after one fence of
 * each owner for all of them (with flag GP_TRIM_NO_WAIT: by the reaper). GP_ERR_PINNED,
 * GP_ERR_CAPTURE and GP_ERR_STATE: nothing changed; a capture by any owner is one.
 * GP_ERR_INTERRUPTED, and errors of the device or of host memory that come while it waits:
 * decommitted (gp_range_committed() tells), and given back later. */
GP_API gp_status gp_range_decommit(gp_range *range, const gp_interval *intervals, size_t count,
                                   gp_stream *stream, unsigned flags, gp_release_result *out,
                                   gp_error *error);
/* For ranges that are used as growables: commits from the start to `size`, rounded up to a page, when that
 * is more than before; decommits everything behind it when it is less. Contents below stay. Errors as of
 * the two above, and GP_ERR_ARGUMENT: above the maximum. The size changes when the pages do. */
GP_API gp_status gp_range_resize(gp_range *range, size_t size, gp_stream *stream, unsigned flags,
                                 gp_release_result *out, gp_error *error);
/* `stream` uses the range too, now and later: it becomes an owner. */
GP_API gp_status gp_range_record_stream(gp_range *range, gp_stream *stream, gp_error *error);
/* As gp_pool_pin(), for [offset, offset + bytes), at any byte, all of it committed (else
 * GP_ERR_ARGUMENT): what overlaps it is not decommitted meanwhile. Each pin holds a reference to the
 * range and ends with a gp_range_unpin() of the same numbers, on any thread, which never waits. */
GP_API gp_status gp_range_pin(gp_range *range, size_t offset, size_t bytes, bool unknown,
                              gp_error *error);
GP_API void gp_range_unpin(gp_range *range, size_t offset, size_t bytes);

/* ---- shrinking ----------------------------------------------------------------------------- */

enum {
    GP_TRIM_NO_WAIT = 1 /* set chunks retiring and return; the reaper gives them back */
};

/* Gives idle chunks back, oldest first, as long as at least min_bytes_to_keep bytes stay mapped. *released
 * (may be NULL): bytes given back, or with GP_TRIM_NO_WAIT bytes set retiring. When it waits it returns
 * after every retiring chunk and delivery of the pool is done. GP_ERR_CAPTURE: nothing changed.
 * GP_ERR_INTERRUPTED: what was retiring stays so, and goes later. A chunk that the backing's free did not
 * take is in gp_pool_unreturned(), and counted in callback_errors: the rest was given back all the same,
 * and the status is GP_OK. GP_ERR_REENTRANT. */
GP_API gp_status gp_pool_trim(gp_pool *pool, size_t min_bytes_to_keep, unsigned flags,
                              size_t *released, gp_error *error);
/* Waits until no chunk of the pool is retiring or being returned. Errors as of a trim that waits. */
GP_API gp_status gp_pool_drain(gp_pool *pool, gp_error *error);

typedef struct gp_limit_result {
    size_t limit;
    size_t physical_bytes;
    size_t overage_bytes; /* physical bytes above the limit */
    size_t deferred_bytes; /* overage that is retiring already and will go by itself */
} gp_limit_result;

/* Below the present use is legal: growth stops, idle chunks over the limit are set retiring, and the
 * rest is reported in *out (may be NULL). Never waits. */
GP_API gp_status gp_pool_set_limit(gp_pool *pool, size_t limit, gp_limit_result *out,
                                   gp_error *error);

/* Call before destroying a stream: waits for its work and lets go of it. Blocks allocated on it stay
 * alive and have no owner until they are freed with another stream. */
GP_API gp_status gp_pool_forget_stream(gp_pool *pool, uintptr_t handle, gp_error *error);
/* Tries again to return chunks whose free failed (they count against the limit until then). *returned (may
 * be NULL) is the bytes that went. Works on a closed pool too. */
GP_API gp_status gp_pool_return_unreturned(gp_pool *pool, size_t *returned, gp_error *error);
/* Copies references to the unreturned chunks into chunks[0..capacity) and returns how many there are. */
GP_API size_t gp_pool_unreturned(gp_pool *pool, gp_chunk **chunks, size_t capacity);

typedef struct gp_pool_stats {
    size_t used_bytes;
    size_t free_bytes; /* mapped and not used; held by graphs or kept by cuts too, retiring not */
    size_t physical_bytes;
    size_t retiring_bytes; /* retiring, being unmapped or being returned */
    size_t unreturned_bytes;
    size_t abandoned_bytes;
    size_t address_bytes;
    size_t
        peak_used_bytes; /* exact with one stream; with several, never less than there was, and more by what
                               their quick lists kept at most */
    size_t peak_physical_bytes;
    size_t limit; /* GP_NO_LIMIT for none */
    uint64_t chunk_count; /* mapped or retiring now */
    uint64_t grow_count; /* growths that succeeded */
    uint64_t trim_count; /* chunks given back */
    uint64_t wait_count; /* waits for streams */
    uint64_t callback_errors; /* backing calls that failed for another reason than memory */
} gp_pool_stats;

/* A consistent picture. In a forked child or after close: what was left. */
GP_API void gp_pool_get_stats(gp_pool *pool, gp_pool_stats *out);
GP_API void gp_pool_reset_peak_stats(gp_pool *pool);

typedef enum gp_span_state {
    GP_SPAN_USED,
    GP_SPAN_FREE,
    GP_SPAN_CLAIMED,
    GP_SPAN_RETIRING,
    GP_SPAN_HOLE,
    GP_SPAN_ABANDONED,
    GP_SPAN_HELD /* free, for the capture that it belongs to */
} gp_span_state;

typedef struct gp_span_info {
    uintptr_t address;
    size_t bytes;
    gp_span_state state;
    uint64_t stream_id; /* of a block: the stream it was allocated on; else 0 */
    unsigned owner_count; /* that have not passed (USED: all); unknown counts as one */
    bool segment_start; /* first span of its segment */
    bool in_range; /* of a range's segment */
} gp_span_info;

typedef struct gp_chunk_info {
    uintptr_t address;
    size_t bytes;
    uint64_t id;
    bool retiring; /* or being unmapped, or abandoned */
} gp_chunk_info;

typedef struct gp_pool_snapshot {
    gp_span_info *spans; /* by address */
    size_t span_count;
    gp_chunk_info *chunks; /* by address */
    size_t chunk_count;
} gp_pool_snapshot;

/* A copy of the pool's map, to be freed with gp_pool_snapshot_free(). */
GP_API gp_status gp_pool_take_snapshot(gp_pool *pool, gp_pool_snapshot *out, gp_error *error);
GP_API void gp_pool_snapshot_free(gp_pool_snapshot *snapshot);

#ifdef __cplusplus
}
#endif
#endif
