/* SPDX-License-Identifier: Apache-2.0
 *
 * Time: which streams own a piece of memory, and when all of them have passed.
 * This layer knows streams and fences. It never knows blocks, limits or policy, and never calls up.
 *
 * WORDS
 *   stream     an ordered queue of device work. Known by context and id, never by handle alone,
 *              because drivers hand a destroyed stream's handle to the next one.
 *   timeline   what one pool knows of its streams: slots, events in flight, and one clock.
 *   slot       a number from 0 to 62 that stands for a stream in owner sets. When more streams than
 *              that own memory at once, the last slot stands for several; it is then never "the sole
 *              owner", which costs a wait and never correctness.
 *   owners     a set of slots as one 64-bit mask, plus a ticket: {slots, ticket}, 16 bytes, copied
 *              by value, merged by OR and MAX. Bit 63 is `unknown`: users that we cannot see.
 *   ticket     a value of the timeline's clock. Memory that goes idle is stamped with the current
 *              one. A fence takes the current one and moves the clock on.
 *   passed     a slot has passed ticket t when a fence that took a ticket >= t completed on each of
 *              its streams.
 *   fence      an event recorded in a stream.
 *   retiring   an idle chunk that waits for its owners before it is unmapped.
 *   reaper     growpool's one background thread: it records fences for what retires, looks at them, and
 *              gives back what has passed. It starts with the first chunk that needs it.
 *
 * PICTURE        clock:  1   2   3   4   5   6 ...
 *   free x on A, stamp       2
 *   free y on A, stamp           3
 *   fence on A takes                 4  -> completes -> A has passed 4 -> x and y are free for all
 *   free z on A, stamp                  5   (needs a later fence)
 *
 * WHY ONE CLOCK FOR A POOL, not one for each stream: a stamp is then two words whatever the number
 * of owners, a free allocates nothing, and merging two ranges is exact about who and only rounds up
 * when: max(ticket) may wait for a fence that is later than strictly needed, never an earlier one.
 *
 * WHY IT IS SOUND. A stamp is made under the pool's lock after the caller enqueued its last use. A
 * fence takes its ticket under the same lock and is recorded afterwards, so every stamp with a
 * ticket <= the fence's was enqueued before the record. Two fences racing on one stream may be
 * recorded in either order: each still covers every stamp made before it took its ticket.
 *
 * DRIVER FACTS RELIED ON (H200, driver 580.159)
 *   - cuMemUnmap does not wait; under a running kernel it kills the context at the next synchronise.
 *   - cuEventRecord can block 200 to 325 ms behind another thread's cuMemAllocHost; cuEventQuery,
 *     cuStreamIsCapturing, cuStreamGetId and cuStreamGetCtx stayed under 60 us meanwhile.
 *   - Event and stream queries invalidate a capture in any mode but relaxed, so every call here runs
 *     inside driver->enter(). Records in a capturing stream would be captured, so is-capturing is
 *     asked first, and "implicitly" counts as capturing.
 *   - cuStreamGetId on a capturing stream invalidates the capture in every mode; cuStreamIsCapturing
 *     and cuStreamGetCtx do not. Any call on a destroyed stream crashes the process, until its handle is
 *     handed out again: then the id tells. Hence gp_pool_forget_stream().
 *   - cuCtxRecordEvent covers every stream of the context and invalidates any capture in it.
 *
 * OWNERSHIP
 *   thing       holds                              undone by              depends on
 *   gp_stream   its key, a slot while it owns      gp_stream_release      the pool's timeline
 *               memory, the events in flight
 *   event       one driver event                   timeline destruction   the stream's context
 *
 * THREAD-BOUND STREAMS (CUDA handle 2): only the owning thread can record on them. Freed there, the
 * fence is recorded at once; freed on another thread, the memory's owner becomes `unknown`.
 *
 * UNKNOWN owners take a context-wide fence (on host: a fence on every known stream), and only in
 * explicit calls: trim, close, drain, a decommit that waits, and a commit over memory that is still
 * mapped there. Every stream that a pool of the device knows is asked first whether
 * it captures; the caller answers for captures on streams that no pool has met.
 * A host buffer-protocol export does not make its memory unknown: releasing the export ends the use.
 *
 * INVARIANTS
 *   S1  Nothing is unmapped before every owner has passed.
 *   S2  gp__reap() is the one path that unmaps memory that was published to users.
 *   S3  No capture is invalidated, provided no other thread begins one on a stream between our check
 *       and our question or record, and none runs on unknown streams, or on the
 *       per-thread default stream of another thread, while memory with unknown owners is trimmed.
 *
 *   Both suppose that nobody destroys a stream that the pool knows without forget_stream: between our look
 *   at a handle and our record in it the driver could hand it to another stream, or crash.
 *
 * LOCKS. A timeline has no lock of its own: the pool's lock (GP__RANK_POOL) guards it. The list
 * of all timelines has one (capture.c), which is taken before any pool's. Functions
 * marked "lock: held" want it held; "lock: dropped" take and drop it themselves around driver calls.
 *
 * REJECTED
 *   - A ticket per stream in each owner set: unbounded sets, or a heap allocation inside free.
 *   - Recording at every free: 0.2 us on the hot path, and a stall behind other driver calls.
 *   - cuStreamSynchronize: not interruptible, and fatal on a stream that was destroyed.
 */
#ifndef GROWPOOL_STREAM_H
#define GROWPOOL_STREAM_H

#include "backing.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A stream as one pool knows it: other pools refuse it. Reference counted, any thread; made by
 * gp_pool_stream(), and may outlive its pool. Holding one does not keep the device's stream alive: call
 * gp_pool_forget_stream() before destroying it. */
typedef struct gp_stream gp_stream;

GP_API gp_stream *gp_stream_retain(gp_stream *stream);
GP_API void gp_stream_release(gp_stream *stream); /* NULL is allowed */
/* The handle that callbacks get: a CUDA stream handle, or a host stream's id. */
GP_API uintptr_t gp_stream_handle(const gp_stream *stream);
/* The driver's id: never reused within a process. 0 as long as it is not known: a stream that was met
 * while it captured may not be asked. */
GP_API uint64_t gp_stream_id(const gp_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
