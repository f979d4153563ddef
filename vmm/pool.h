/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside a pool: the structures that growpool.h draws, and which file owns which step.
 *
 *   span.c    tiles segments with spans; bins, trees and queues that find them; splits and melts
 *   segment.c reserves and frees ranges of addresses; the page map
 *   index.c   from a block's address to its span
 *   place.c   policy: where a request goes and how many new pages that takes
 *   plan.c    policy: how large the chunks of a growth are
 *   grow.c    mechanism: claim, ask, map, publish, undo          ladder.c  what to try when refused
 *   retire.c  idle mappings -> retiring -> unmapped -> returned
 *   block.c   malloc, free, record_stream, pin
 *   trim.c    trim, drain, limit, forget_stream, unreturned      close.c   create, close, release
 *   stats.c   stats and snapshots                                check.c   the invariants
 *   peer.c    which other devices get access
 *
 * FIELDS are guarded by `lock` unless said otherwise.
 *
 * EQUATIONS, asserted by gp__pool_check():
 *   physical = claimed_bytes + mapped_bytes + retiring_bytes + unreturned_bytes + abandoned_bytes
 *              + credit_bytes
 *   mapped_bytes = bytes of mappings whose chunk is MAPPED; idle_bytes = those with live == 0
 *   mapped_bytes = USED + FREE + (CLAIMED that was FREE) spans
 *   used_bytes = sum of USED spans
 *   claimed_bytes = sum of CLAIMED spans that were HOLE
 */
#ifndef GP__POOL_H
#define GP__POOL_H

#include <pthread.h>

#include "../backing/backing_internal.h"
#include "../backing/lock.h"
#include "../sync/reap.h"
#include "../sync/reaper.h"
#include "../sync/timeline.h"
#include "growpool.h"
#include "tree.h"

struct gp__segment;

struct gp__span {
    struct gp__tree_node
        node; /* FREE: in its bin's tree; HOLE: in the pool's holes. First member. */
    uintptr_t va;
    size_t bytes;
    gp_span_state state;
    unsigned flags; /* USED: GP_BLOCK_* */
    unsigned pins; /* USED: live exports */
    bool was_hole; /* CLAIMED: what an undo makes of it */
    struct gp__segment *segment;
    struct gp__span *previous; /* by address, within the segment */
    struct gp__span *next; /* ... and the link of the spare list and of the index's chains */
    struct gp__owners owners; /* USED: slots only; FREE: stamped; others: {0, 0} */
    gp_stream *stream; /* USED: allocated on; holds a reference */
    struct gp__span *chain; /* USED: the next span of its index bucket */
    struct gp__span *queue_previous; /* FREE with owners: its bin's queue, by ticket */
    struct gp__span *queue_next;
};

/* FREE spans by who may take them. One bin for each slot (sole owner), one for nobody (passed), one for
 * everything else, whose tree is not searched. */
enum { GP__BIN_PASSED = GP__SLOT_COUNT, GP__BIN_MIXED, GP__BIN_COUNT };

struct gp__bin {
    struct gp__tree tree;
    struct gp__span *oldest; /* queue of spans that wait for a ticket */
    struct gp__span *newest;
};

/* One chunk at its addresses. */
struct gp__mapping {
    struct gp__retired retired; /* chunk, va, bytes, owners while retiring. First member. */
    struct gp__segment *segment;
    uintptr_t stream; /* the handle that the backing was asked with */
    uint64_t generation; /* of the chunk, when it was accepted */
    size_t live; /* USED and CLAIMED spans that touch it */
    struct gp__mapping *previous; /* in the pool's idle list, when live == 0 */
    struct gp__mapping *next;
};

struct gp__page {
    struct gp__mapping *mapping; /* NULL where nothing is mapped */
    struct gp__span *first; /* the lowest span that starts in this page, or NULL */
};

struct gp__segment {
    uintptr_t va;
    size_t bytes;
    bool lost; /* something in it was abandoned: its addresses are never freed */
    struct gp__span *first;
    struct gp__page *pages;
    struct gp__segment *next;
};

struct gp_pool {
    /* Constant after creation. */
    char name[64];
    gp_device *device;
    struct gp__peers peers; /* get access to every chunk */
    gp_backing *backing;
    size_t page; /* bytes: the unit of growth */
    size_t chunk_size; /* 0: planned */
    size_t address_space;
    unsigned flags;
    int (*interrupted)(void *context); /* the user's hook; NULL: none */
    void *interrupted_context;
    struct gp__interrupt interrupt; /* gp__pool_interrupted(), around that hook */
    unsigned generation; /* of the process that made it */

    uint64_t references; /* atomic */
    struct gp__mutex lock;
    pthread_cond_t changed; /* growers, deliveries or state */

    bool closing; /* takes no new work */
    bool closed; /* nothing is left */
    bool orphaned; /* its last user let go of it without closing */
    bool poisoned;
    bool reserving; /* a thread is adding a segment */
    unsigned growers; /* threads inside a growth */
    unsigned deliveries; /* threads that hold retired or unreturned chunks in a list of their own */
    unsigned visitors; /* threads that use the timeline without the lock */

    struct gp__timeline timeline;
    struct gp__segment *segments;
    struct gp__bin bins[GP__BIN_COUNT];
    struct gp__tree holes;
    struct gp__span *spare_spans;
    size_t spare_span_count;
    struct gp__span **index;
    size_t index_size; /* buckets: a power of two */
    size_t block_count;
    unsigned pinned; /* exports of all blocks */

    struct gp__mapping *idle_oldest;
    struct gp__mapping *idle_newest;
    struct gp__retired *retiring; /* not in anybody's hands */
    struct gp__retired *unreturned;
    uint64_t record_slots; /* slots whose fences the reaper should record */
    uint64_t service_delay; /* ns until the reaper looks again */
    uint64_t settled; /* timeline.passes when free ranges were last refiled */

    size_t limit;
    size_t physical, claimed_bytes, mapped_bytes, idle_bytes, retiring_bytes;
    size_t unreturned_bytes, abandoned_bytes, credit_bytes;
    size_t used_bytes, address_bytes, peak_used, peak_physical;
    uint64_t chunk_count, grow_count, trim_count, callback_errors;

    struct gp__reaper_client reaper; /* its own lock */
};

/* ---- common (close.c) ---- */
/* GP_OK, or GP_ERR_STATE forked or exiting. No lock, no driver. */
gp_status gp__pool_enter(const gp_pool *pool, gp_error *error);
static inline size_t gp__round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}
/* GP_ERR_STATE closed. */
gp_status gp__pool_closed_error(const gp_pool *pool, gp_error *error);
/* GP_OK, or GP_ERR_STATE closed or poisoned. lock: held. */
gp_status gp__pool_usable(const gp_pool *pool, bool growing, gp_error *error);
/* GP_ERR_REENTRANT inside a callback of this pool on this thread. */
gp_status gp__pool_not_inside(const gp_pool *pool, const char *operation, gp_error *error);
/* Counts this thread among those that close() waits for; GP_ERR_STATE when it is too late. */
gp_status gp__pool_visit(gp_pool *pool, gp_error *error);
void gp__pool_leave(gp_pool *pool);
/* Sleeps a little on `changed`. GP_ERR_INTERRUPTED if the hook says so. lock: held, dropped inside. */
gp_status gp__pool_sleep(gp_pool *pool, gp_error *error);
/* Looks at fences and refiles what has passed. lock: dropped. */
void gp__pool_poll(gp_pool *pool);
/* Records the fences of thread-bound streams on the thread that freed. Best effort: without a fence the
 * memory waits for an explicit trim. lock: dropped. */
void gp__pool_record_here(gp_pool *pool, struct gp__owners owners);
/* Adds the pool's figures to an error about memory. lock: held. */
void gp__pool_figures(const gp_pool *pool, size_t size, size_t physical, gp_error *error);

/* ---- peer.c ---- */
/* Adds the given devices to `peers`, without `device` itself and doubles. GP_ERR_ARGUMENT: another kind;
 * GP_ERR_UNAVAILABLE: one cannot reach the memory. May block. */
gp_status gp__peers_set(struct gp__peers *peers, gp_device *device, gp_device *const *given,
                        size_t count, gp_error *error);

/* ---- span.c; lock: held everywhere ---- */
/* Makes sure that `count` descriptors are spare, so that what follows cannot fail. */
gp_status gp__span_reserve(gp_pool *pool, size_t count, gp_error *error);
struct gp__span *gp__span_new(gp_pool *pool);
void gp__span_drop(gp_pool *pool, struct gp__span *span);
/* Cuts the span so that it ends at va; the rest becomes a new span of the same state, linked after it.
 * Needs one spare descriptor. Neither may be in a tree or queue. */
struct gp__span *gp__span_cut(gp_pool *pool, struct gp__span *span, uintptr_t va);
/* Makes the span FREE with these owners, melts it with its neighbours, files it in its bin. Returns the
 * span that now contains it. */
struct gp__span *gp__span_free(gp_pool *pool, struct gp__span *span, struct gp__owners owners);
/* The same for holes. */
struct gp__span *gp__span_hole(gp_pool *pool, struct gp__span *span);
/* Takes a FREE or HOLE span out of its tree and queue, or puts it in as it is, without melting. */
void gp__span_unfile(gp_pool *pool, struct gp__span *span);
void gp__span_file(gp_pool *pool, struct gp__span *span);
/* Files the one span of a new segment, segment->first: a hole from end to end. */
void gp__span_start(gp_pool *pool, struct gp__segment *segment);
/* The span that contains va. Costs one step for each page that the span reaches back. */
struct gp__span *gp__span_at(const gp_pool *pool, struct gp__segment *segment, uintptr_t va);
/* Joins `span` and its successor into one that keeps the first one's fields. */
void gp__span_join(gp_pool *pool, struct gp__span *span);
/* The best fit that the stream may use at once, or NULL. */
struct gp__span *gp__span_find(gp_pool *pool, size_t bytes, const gp_stream *stream);
/* Whether the stream may use this FREE span at once. */
bool gp__span_is_usable(const gp_pool *pool, const struct gp__span *span, const gp_stream *stream);
/* Refiles spans whose owners have passed since. Inside driver->enter() (it polls). */
void gp__span_settle(gp_pool *pool);

/* ---- segment.c ---- */
/* Reserves a segment that holds `bytes`: of the pool's address space what is left, halved while the
 * device refuses. lock: held, dropped inside. */
gp_status gp__segment_add(gp_pool *pool, size_t bytes, gp_error *error);
/* Frees the addresses and the descriptions of segments that the pool no longer lists; those that are lost
 * or refused stay reserved. Returns the bytes freed. lock: not held. */
size_t gp__segments_free(gp_pool *pool, struct gp__segment *segments);

struct gp__mapping *gp__mapping_at(const gp_pool *pool, const struct gp__segment *segment,
                                   uintptr_t va);
/* Enters the mapping into the page map, or clears its pages. */
void gp__mapping_enter(gp_pool *pool, struct gp__mapping *mapping);
void gp__mapping_erase(gp_pool *pool, struct gp__mapping *mapping);
/* A USED or CLAIMED span begins (+1) or ends (-1) over these mappings; keeps the idle list. */
void gp__mapping_count(gp_pool *pool, const struct gp__span *span, int change);
void gp__mapping_idle_add(gp_pool *pool, struct gp__mapping *mapping);
void gp__mapping_idle_remove(gp_pool *pool, struct gp__mapping *mapping);

/* ---- index.c; lock: held ---- */
gp_status gp__index_reserve(gp_pool *pool, gp_error *error);
void gp__index_add(gp_pool *pool, struct gp__span *span);
void gp__index_remove(gp_pool *pool, struct gp__span *span);
struct gp__span *gp__index_find(const gp_pool *pool, uintptr_t va);

/* ---- place.c; lock: held ---- */
struct gp__place {
    struct gp__span *first; /* NULL: nowhere */
    size_t new_bytes; /* whole pages to be mapped */
    size_t room; /* bytes of hole behind the last new page */
};

struct gp__place gp__place_find(gp_pool *pool, size_t bytes, const gp_stream *stream);
/* The fewest physical bytes the pool could have with the request in it, if every seen owner had passed
 * and all idle memory were given back. SIZE_MAX when there is no place. */
size_t gp__place_least_physical(const gp_pool *pool, size_t bytes);

/* ---- plan.c ---- */
/* Pages to add to a growth of new_bytes, for those who come next. */
size_t gp__plan_step(const gp_pool *pool, size_t new_bytes);
/* The size of the next chunk of a run of which `left` bytes are still to be mapped; at most `cap`. */
size_t gp__plan_chunk(const gp_pool *pool, size_t left, size_t request, size_t cap);

/* ---- grow.c ---- */
enum gp__obstacle {
    GP__OBSTACLE_NONE, /* the error is final */
    GP__OBSTACLE_ADDRESS, /* no run of addresses; idle memory holds some */
    GP__OBSTACLE_LIMIT,
    GP__OBSTACLE_BACKING /* it said "no memory" */
};

/* One request on its way up the ladder. */
struct gp__growth {
    gp_pool *pool;
    gp_stream *stream;
    size_t bytes; /* of the block, rounded */
    unsigned flags;
    bool step; /* add a growth step */
    bool halve; /* ask for less when refused */
    enum gp__obstacle obstacle; /* what stopped the last attempt */
    size_t stepped; /* the step of the last attempt */
    size_t deficit; /* bytes that it lacked under the limit */
    size_t credit; /* physical bytes that this request reclaimed and may claim again */
    unsigned refusals;
};

/* One attempt: takes free memory if there is some, else grows. On GP_OK *out is the block's address.
 * Inside driver->enter(). lock: dropped. */
gp_status gp__grow_attempt(struct gp__growth *growth, uintptr_t *out, gp_error *error);

/* ---- ladder.c ---- */
/* Attempts until one succeeds or nothing is left to try. lock: dropped. */
gp_status gp__ladder(gp_pool *pool, size_t bytes, gp_stream *stream, unsigned flags, uintptr_t *out,
                     gp_error *error);

/* ---- block.c; lock: held ---- */
/* A free range that the stream may use at once becomes a block; NULL if there is none, and then, with
 * `settle`, after looking at fences again (inside driver->enter()). Needs one spare descriptor and an
 * index place. */
struct gp__span *gp__block_take(gp_pool *pool, size_t bytes, gp_stream *stream, unsigned flags,
                                bool settle);
/* Makes `bytes` at the start of an unfiled, FREE or CLAIMED span a USED block. Needs one spare
 * descriptor and an index place. */
void gp__block_make(gp_pool *pool, struct gp__span *span, size_t bytes, gp_stream *stream,
                    unsigned flags);
/* Ends a block: it becomes free memory with its owners. */
void gp__block_end(gp_pool *pool, struct gp__span *span, gp_stream *stream, bool *record_now);

/* ---- retire.c ---- */
enum gp__retire_which { GP__RETIRE_SEEN, GP__RETIRE_ALL };

/* Sets idle mappings retiring, oldest first, until at least `goal` bytes are, and never more than `most`;
 * RETIRE_SEEN passes over mappings whose owners cannot be fenced one by one. Puts them into *list and
 * returns the bytes. lock: held. */
size_t gp__retire(gp_pool *pool, size_t goal, size_t most, enum gp__retire_which which,
                  struct gp__retired **list);
/* The owners of everything that gp__retire(pool, SIZE_MAX, most, GP__RETIRE_ALL) would take. lock: held. */
struct gp__owners gp__retire_owners(gp_pool *pool, size_t most);
/* A retiring mapping becomes free memory again. lock: held. */
void gp__unretire(gp_pool *pool, struct gp__retired *item);
/* Moves all that is retiring and in nobody's hands to the front of *list. lock: held. */
void gp__retiring_take(gp_pool *pool, struct gp__retired **list);
/* Says that this thread is about to hold a list, in the same section that fills it: until
 * gp__retire_finish() others know that chunks are under way. lock: held. */
void gp__retire_hold(gp_pool *pool, const struct gp__retired *list);
/* Bytes of idle and retiring mappings that a request may have given back. lock: held. */
size_t gp__retirable_bytes(const gp_pool *pool);
/* Reaps the list (held, see above), gives the chunks back, and keeps the rest retiring. Returned bytes become *credit
 * (may be NULL) instead of room for others. *returned counts them. lock: dropped. */
gp_status gp__retire_finish(gp_pool *pool, struct gp__retired *list, enum gp__reap_mode mode,
                            const struct gp__interrupt *interrupt, size_t *credit, size_t *returned,
                            gp_error *error);
/* Gives one unmapped, accepted chunk back to the backing and frees the mapping, or keeps both as
 * unreturned. *counter is the pool's field that its bytes are counted in now; what was returned goes
 * to *credit, or (NULL) is room for others. lock: dropped. */
gp_status gp__return_chunk(gp_pool *pool, struct gp__mapping *mapping, size_t *counter,
                           size_t *credit, gp_error *error);
/* Asks the backing for a chunk, marking this thread as inside the pool's callback. lock: dropped. */
gp_status gp__ask_backing(gp_pool *pool, const gp_request *request, gp_chunk **out,
                          gp_error *error);
/* Asks the user's hook, which may run a signal handler: the thread counts as inside the pool's callback
 * meanwhile, so a handler that would wait for this very operation is told so. */
int gp__pool_interrupted(void *pool);
/* What the reaper runs; and one slice of closing a pool that nobody holds, after which the pool may be
 * gone. */
uint64_t gp__pool_service(void *context);
uint64_t gp__pool_close_orphan(gp_pool *pool);
void gp__pool_kick(gp_pool *pool);

/* ---- check.c ---- */
#ifdef GP_TESTING
/* True when every invariant holds; else a sentence in message. Takes the lock. */
bool gp__pool_check(gp_pool *pool, char *message, size_t size);
#endif

#endif
