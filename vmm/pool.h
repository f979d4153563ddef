/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside a pool: the structures that growpool.h draws, and which file owns which step.
 *
 *   span.c    tiles segments with spans; bins, trees and queues that find them; splits and melts
 *   segment.c reserves and frees addresses; the page map; how much the default reserves
 *   index.c   from a block's address to its span
 *   place.c   policy: where a request goes and how many new pages that takes
 *   plan.c    policy: how large the chunks of a growth are
 *   grow.c    mechanism: claim, ask, map, publish, undo          ladder.c  what to try when refused
 *   commit.c  the claim and the publication of a range's commit  range.c   ranges: life, pins
 *   resize.c  commit, decommit, resize of ranges                 arena.c   the memory of captures
 *   retire.c  idle mappings -> retiring -> unmapped -> returned
 *   block.c   malloc, free, record_stream, pin                   work.c    copies, fills, joins
 *   quick.c   blocks at hand: freed, and taken again by their stream without the pool's lock
 *   trim.c    trim, drain, limit, forget_stream, unreturned      close.c   create, close, release
 *   orphan.c  pools that are let go, and what they leave
 *   stats.c   stats and snapshots                                check.c   the invariants
 *   peer.c    which other devices get access
 *
 * FIELDS are guarded by `lock` unless said otherwise.
 *
 * EQUATIONS, asserted by gp__pool_check():
 *   physical = claimed_bytes + mapped_bytes + retiring_bytes + unreturned_bytes + abandoned_bytes
 *              + credit_bytes + stock_bytes
 *   mapped_bytes = bytes of mappings whose chunk is MAPPED; idle_bytes = those with live == 0
 *   mapped_bytes = USED + HELD + FREE + (CLAIMED that was FREE) spans
 *   used_bytes = sum of USED spans, those that quick lists keep included
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
#include "segment.h"
#include "tree.h"

struct gp__arena;
struct gp__segment;

struct gp__span {
    struct gp__tree_node
        node; /* FREE: in its bin's tree; HOLE: in the pool's holes; HELD: in its arena's. First member. */
    uintptr_t va;
    size_t bytes;
    gp_span_state state;
    unsigned flags; /* USED: GP_BLOCK_*, GP__BLOCK_* */
    unsigned pins; /* USED: live exports */
    bool was_hole; /* CLAIMED: what an undo makes of it */
    bool known; /* USED: the block is an entry of its stream's quick list */
    struct gp__segment *segment;
    struct gp__span *previous; /* by address, within the segment */
    struct gp__span *next; /* ... and the link of the spare list and of the index's chains */
    struct gp__owners
        owners; /* USED: slots only; FREE, HELD: stamped; others: {0, 0}; a range's USED
                                 spans too, whose owners are the range's */
    gp_stream *stream; /* a block: allocated on; holds a reference */
    struct gp__arena *arena; /* of a block; HELD */
    struct gp__span *chain; /* a block: the next span of its index bucket */
    struct gp__span *queue_previous; /* FREE with owners: its bin's queue, by ticket */
    struct gp__span *queue_next; /* ... and CLAIMED: the next span of the claim */
};

enum {
    GP__BLOCK_ABANDONED = 1 << 16 /* nobody will free it: the last unpin does */
};

/* FREE spans by who may take them. One bin for each slot (sole owner), one for nobody (passed), one for
 * everything else, whose tree is not searched. */
enum { GP__BIN_PASSED = GP__SLOT_COUNT, GP__BIN_MIXED, GP__BIN_COUNT };

struct gp__bin {
    struct gp__tree tree;
    struct gp__span *oldest; /* queue of spans that wait for a ticket */
    struct gp__span *newest;
};

/* A part of a range that is exported. */
struct gp__range_pin {
    struct gp__tree_node node; /* `bytes` is the offset, `va` a number. First member. */
    size_t offset;
    size_t bytes;
};

/* STATES. open --close or last release--> closed --nothing mapped, no claim--> buried (segment NULL,
 * off the list). A pool's close buries every range at once. The pool's list keeps a closed range that
 * nobody holds until it is buried. */
struct gp_range {
    gp_pool *pool; /* a reference while anybody holds the range */
    gp_stream *stream; /* a reference */
    uintptr_t address;
    size_t max_bytes; /* as asked */
    uint64_t references; /* atomic; each pin holds one */
    /* Guarded by the pool's lock. */
    struct gp__segment *segment; /* NULL: empty or buried */
    uint64_t slots; /* owners */
    uint64_t unpinned; /* the clock when the last pin went */
    struct gp__tree pins; /* by offset, then in the order they came */
    size_t longest_pin; /* bytes: of those pinned now, or more */
    uint64_t pin_total; /* ever made */
    size_t size; /* of the last resize */
    size_t committed_bytes;
    unsigned claims; /* commits under way */
    bool resizing;
    bool closed;
    bool unheld; /* its last holder has let go, and does not look at it any more */
    gp_range *previous; /* the pool's ranges that have a segment */
    gp_range *next;
};

/* The memory of one capture. The graph's user object, the pool's list, each block of it, and each request
 * that is on its way hold a reference. HELD spans name only arenas that are on the list. */
struct gp__arena {
    uint64_t capture; /* id */
    uint64_t references; /* atomic */
    bool gone; /* atomic: no graph can use it any more; set by the user object */
    struct gp__tree held;
    size_t blocks; /* USED spans that name it */
    struct gp__arena *next;
};

struct gp_pool {
    /* Constant after creation. */
    char name[64];
    gp_device *device;
    struct gp__peers peers; /* get access to every chunk */
    gp_backing *backing;
    size_t page; /* bytes: the unit of growth */
    size_t chunk_size; /* 0: planned */
    size_t address_space; /* for blocks */
    bool default_addresses; /* nobody said how many */
    unsigned flags;
    int (*interrupted)(void *context); /* the user's hook; NULL: none */
    void *interrupted_context;
    struct gp__interrupt interrupt; /* gp__pool_interrupted(), around that hook */

    uint64_t references; /* atomic */
    struct gp__mutex lock;
    pthread_cond_t changed; /* growers, deliveries or state */

    bool finishing; /* takes no new work; the reaper closes it when it can */
    bool closing; /* the same, and close is under way */
    bool closed; /* nothing is left */
    bool orphaned; /* its last user let go of it without closing */
    bool left; /* on the list of orphan.c, which is guarded by a lock of its own */
    struct gp_pool *next_left;
    bool poisoned;
    bool reserving; /* a thread is adding a segment */
    unsigned growers; /* threads inside a growth */
    unsigned deliveries; /* threads that hold retired or unreturned chunks in a list of their own */
    unsigned visitors; /* threads that use the timeline without the lock */

    struct gp__timeline timeline;
    struct gp__segment *segments; /* for blocks */
    gp_range *ranges; /* that have a segment */
    struct gp__segment *parted; /* of buried ranges, whose addresses are yet to be freed */
    struct gp__arena *arenas;
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
    size_t unreturned_bytes, abandoned_bytes, credit_bytes, stock_bytes;
    size_t held_bytes; /* HELD */
    size_t used_bytes, address_bytes, peak_used, peak_physical;
    size_t block_address_bytes; /* of address_bytes, the segments for blocks */
    size_t parted_bytes; /* of address_bytes, in no listed segment: being freed, or lost */
    uint64_t chunk_count, grow_count, trim_count, callback_errors;

    struct gp__reaper_client reaper; /* its own lock */
};

/* ---- common (close.c) ---- */
/* GP_OK, or GP_ERR_STATE forked or exiting. No lock, no driver. */
gp_status gp__pool_enter_slowly(const gp_pool *pool, gp_error *error);
static inline gp_status gp__pool_enter(const gp_pool *pool, gp_error *error)
{
    return gp__process_ready() ? GP_OK : gp__pool_enter_slowly(pool, error);
}
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
/* Sleeps a little on `changed`. GP_ERR_INTERRUPTED if the interrupt (may be NULL) says so; GP_ERR_STATE at once
 * in a forked child. lock: held, dropped inside. */
gp_status gp__pool_sleep(gp_pool *pool, const struct gp__interrupt *interrupt, gp_error *error);
static inline bool gp__pool_has_stream(const gp_pool *pool, const gp_stream *stream)
{
    return stream != NULL && stream->timeline == pool->timeline.number;
}
/* GP_ERR_ARGUMENT for a stream that one of the next two refuses. */
gp_status gp__pool_stream_error(const gp_pool *pool, const gp_stream *stream, gp_error *error);
/* GP_ERR_ARGUMENT for a stream of another pool. */
static inline gp_status gp__pool_check_stream(const gp_pool *pool, const gp_stream *stream,
                                              gp_error *error)
{
    return gp__pool_has_stream(pool, stream) ? GP_OK : gp__pool_stream_error(pool, stream, error);
}
/* The same, and for a forgotten one: no new work is for it. lock: not needed. */
static inline gp_status gp__pool_check_live(const gp_pool *pool, const gp_stream *stream,
                                            gp_error *error)
{
    bool live = gp__pool_has_stream(pool, stream) && !gp__stream_is_forgotten(stream);
    return live ? GP_OK : gp__pool_stream_error(pool, stream, error);
}
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
/* The span that contains va. */
struct gp__span *gp__span_at(const gp_pool *pool, const struct gp__segment *segment, uintptr_t va);
/* Joins `span` and its successor into one that keeps the first one's fields. */
void gp__span_join(gp_pool *pool, struct gp__span *span);
/* The best fit that the stream may use at once, or NULL. Here and below a NULL stream may use what
 * everybody has passed, and nothing else. */
struct gp__span *gp__span_find(gp_pool *pool, size_t bytes, const gp_stream *stream);
/* Whether the stream may use memory with these owners at once. */
bool gp__span_is_usable(const gp_pool *pool, struct gp__owners owners, const gp_stream *stream);
/* Refiles spans whose owners have passed since. Inside driver->enter() (it polls). */
void gp__span_settle(gp_pool *pool);

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
/* Bytes of [from, to), mapped throughout, that lie in idle mappings: they would have to be mapped anew if
 * those went. */
size_t gp__place_idle_bytes(const gp_pool *pool, const struct gp__segment *segment, uintptr_t from,
                            uintptr_t to);

/* ---- plan.c ---- */
/* Whether `physical` bytes, with a block of `bytes` in use, are more than what was ever used of the pool at once
 * calls for, or than its limit. */
bool gp__plan_is_wasteful(const gp_pool *pool, size_t bytes, size_t physical);
/* Pages to add to a growth of new_bytes, for those who come next. */
size_t gp__plan_step(const gp_pool *pool, size_t new_bytes);
/* The size of the next chunk of a run of which `left` bytes are still to be mapped, for a block of `request`
 * bytes; at most `cap`. */
size_t gp__plan_chunk(const gp_pool *pool, size_t left, size_t request, bool wasteful, size_t cap);

/* ---- grow.c ---- */
enum gp__obstacle {
    GP__OBSTACLE_NONE, /* the error is final */
    GP__OBSTACLE_ADDRESS, /* no run of addresses; idle memory holds some */
    GP__OBSTACLE_LIMIT,
    GP__OBSTACLE_BACKING /* it said "no memory" */
};

/* What a request reclaimed and may use again: nobody else can take it meanwhile. Chunks that fit into what it
 * has to map are its stock, mapped anew where they are needed; of all others it is the bytes, which it may
 * claim. */
struct gp__credit {
    struct gp__retired *stock; /* UNMAPPED; va: where it is to go, 0: nowhere yet */
    size_t stock_room; /* bytes that it may still take into stock */
    size_t bytes;
    size_t most; /* what the request can need: whatever comes back beyond it is room for all */
    size_t reclaimed; /* bytes that came back in all */
};

/* One request on its way up the ladder. */
struct gp__growth {
    gp_pool *pool;
    gp_stream *stream;
    size_t bytes; /* of the block, rounded; of all parts */
    unsigned flags;
    struct gp__arena *arena; /* of a block for a capture */
    const gp_stream *taker; /* whose free memory may be taken: the stream, or NULL in a capture */
    gp_range *range; /* NULL: a block */
    const gp_interval *parts; /* of the range: whole pages, by offset, apart */
    size_t part_count;
    bool step; /* add a growth step */
    bool halve; /* ask for less when refused */
    enum gp__obstacle obstacle; /* what stopped the last attempt */
    size_t stepped; /* the step of the last attempt */
    size_t deficit; /* bytes that it lacked under the limit */
    size_t lacking; /* bytes that the last attempt had to map */
    bool wasteful; /* as gp__plan_is_wasteful() said of it */
    struct gp__credit credit;
    unsigned refusals;
};

/* Pages and bytes taken out of the pool for one attempt: CLAIMED spans by address, linked through
 * queue_next. Nobody else touches them, so they are read without the lock. */
struct gp__claim {
    struct gp__span *first;
    struct gp__span **last; /* where the next one is linked */
    size_t new_bytes; /* of holes */
    size_t moved_bytes; /* of those, where chunks from the stock go */
    struct gp__retired *mappings; /* accepted chunks, by address */
    struct gp__retired **tail;
    size_t mapped_count; /* of those, how many are mapped in the driver */
};

/* One attempt: takes free memory if there is some, else grows. On GP_OK *out is the block's address, or
 * the bytes that a range's commit added. Inside driver->enter(). lock: dropped. */
gp_status gp__grow_attempt(struct gp__growth *growth, uintptr_t *out, gp_error *error);
/* GP_ERR_LIMIT when the limit leaves no room for new_bytes more. lock: held. */
gp_status gp__grow_check_limit(struct gp__growth *growth, size_t new_bytes, gp_error *error);
/* Takes the first `bytes` of an unfiled HOLE or FREE span into the claim and files the rest. Needs one
 * spare descriptor. lock: held. */
void gp__claim_span(gp_pool *pool, struct gp__claim *claim, struct gp__span *span, size_t bytes);
/* What cannot fail later: `spans` descriptors, the index, and that the pool, and the range, want to grow.
 * lock: held. */
gp_status gp__grow_prepare(struct gp__growth *growth, size_t spans, gp_error *error);

enum gp__retire_which { GP__RETIRE_SEEN, GP__RETIRE_ALL };

/* ---- commit.c; lock: held ---- */
/* Claims what the parts lack. GP_OK with an empty claim: everything is committed. Waits for owners of memory
 * that is mapped there, dropping the lock inside. */
gp_status gp__commit_claim(struct gp__growth *growth, struct gp__claim *claim, gp_error *error);
/* Makes the claimed spans, mapped by now, part of the range. Returns their bytes. */
size_t gp__commit_publish(struct gp__growth *growth, struct gp__claim *claim);
/* GP_ERR_STATE: another commit is at work in the same part. */
gp_status gp__range_busy(const gp_range *range, gp_error *error);
/* After a commit that failed: idle memory of the parts is set retiring again. lock: dropped. */
void gp__commit_let_go(struct gp__growth *growth);
/* The fewest physical bytes the pool could have with the parts committed, as gp__place_least_physical(). */
size_t gp__commit_least_physical(const gp_pool *pool, const gp_range *range,
                                 const gp_interval *parts, size_t count);

/* ---- range.c ---- */
/* Every range ends, with its owners. lock: held. */
void gp__ranges_end(gp_pool *pool);
/* Takes all segments of ranges, parted ones too, off the pool, as a list. lock: held. */
struct gp__segment *gp__ranges_take(gp_pool *pool);
/* Takes the segment of a closed range off the pool when nothing is mapped in it and no commit is under
 * way; else, and for NULL, NULL. The range may be gone afterwards. lock: held. */
struct gp__segment *gp__range_bury(gp_pool *pool, gp_range *range);
/* A commit gave its claim back. If the range was closed meanwhile, what the claim kept goes too: *dead as
 * of gp__range_bury(), and true when the reaper is to be kicked. lock: held. */
bool gp__range_unclaim(gp_range *range, struct gp__segment **dead);
/* Frees the addresses that closed ranges left. lock: not held. */
void gp__range_free_parted(gp_pool *pool);
/* Frees what gp__range_bury() gave. lock: not held. */
void gp__range_free_segments(gp_pool *pool, struct gp__segment *segments);

/* ---- resize.c; lock: held ---- */
/* GP_OK when the range takes work. */
gp_status gp__range_check_open(const gp_range *range, gp_error *error);
/* GP_ERR_PINNED, by this pin. */
gp_status gp__range_pinned(const gp_range *range, const struct gp__tree_node *pin, gp_error *error);
/* The range's owners, and this stream (NULL: its own), stamped now. Unknown users that are known to be done
 * are left out. */
struct gp__owners gp__range_stamp(gp_range *range, gp_stream *stream, bool *record_now);
/* What is committed in [va, end) becomes free memory. Needs two spare descriptors, unless it is the whole
 * range. */
void gp__range_free_part(gp_range *range, uintptr_t va, uintptr_t end, struct gp__owners owners);
/* Retires the mappings under [va, end) that are idle, and counts what is released and kept. */
void gp__range_retire_part(gp_range *range, uintptr_t va, uintptr_t end,
                           enum gp__retire_which which, struct gp__retired **list,
                           gp_release_result *result);

/* ---- arena.c ---- */
/* The arena of the capture that the stream is part of; NULL when that is none (the legacy stream beside a
 * blocking capture). `make`: a first block is to come; else GP_NOT_READY when there is none yet. *out is a
 * reference. Inside driver->enter(). lock: dropped. */
gp_status gp__arena_of(gp_pool *pool, const gp_stream *stream, bool make, struct gp__arena **out,
                       gp_error *error);
void gp__arena_release(struct gp__arena *arena); /* NULL is allowed */
/* The rest is lock: held. A HELD span of at least `bytes` that the stream may take, unfiled, or NULL. */
struct gp__span *gp__arena_take(gp_pool *pool, struct gp__arena *arena, size_t bytes,
                                const gp_stream *stream);
/* An unfiled span becomes HELD memory of the arena, with these owners. */
void gp__arena_hold(gp_pool *pool, struct gp__arena *arena, struct gp__span *span,
                    struct gp__owners owners);
/* A block of the arena begins; ends. The latter is true when its memory is the graph's still. */
void gp__arena_join(struct gp__arena *arena);
bool gp__arena_leave(struct gp__arena *arena);
/* Memory of graphs that are gone becomes free. */
void gp__arenas_sweep(gp_pool *pool);
/* Whether a graph that lives may use memory of the pool. */
bool gp__arenas_alive(const gp_pool *pool);
void gp__arenas_drop(gp_pool *pool);

/* ---- stats.c; lock: held ---- */
/* Brings the peak of what is used up to date: before anything is kept, ended or made. */
void gp__used_note(gp_pool *pool);
void gp__used_add(gp_pool *pool, size_t bytes);

/* ---- ladder.c ---- */
/* Attempts until one succeeds or nothing is left to try. The growth names the request; the rest of it
 * is set here. lock: dropped. */
gp_status gp__ladder(struct gp__growth *growth, uintptr_t *out, gp_error *error);

/* ---- block.c; lock: held ---- */
/* A free range that the stream may use at once becomes a block; NULL if there is none, and then, with
 * `settle`, after looking at fences again (inside driver->enter()). Needs one spare descriptor and an
 * index place. */
struct gp__span *gp__block_take(gp_pool *pool, size_t bytes, gp_stream *stream, unsigned flags,
                                struct gp__arena *arena, bool settle);
/* Makes `bytes` at the start of an unfiled, FREE, HELD or CLAIMED span a USED block. Needs one spare
 * descriptor and an index place. */
void gp__block_make(gp_pool *pool, struct gp__span *span, size_t bytes, gp_stream *stream,
                    unsigned flags, struct gp__arena *arena);
/* Ends a block: it becomes free memory with its owners. */
void gp__block_end(gp_pool *pool, struct gp__span *span, gp_stream *stream, bool *record_now);
/* The same for one that no quick list knows, with owners that are stamped. */
void gp__block_melt(gp_pool *pool, struct gp__span *span, struct gp__owners owners);

/* ---- retire.c ---- */
/* The owners of the free memory that the mapping lies in. lock: held. */
struct gp__owners gp__retire_owners_of(const gp_pool *pool, const struct gp__mapping *mapping);
/* Sets one idle mapping retiring and puts it in front of *list; false when it was passed over, or there
 * is no host memory for it. lock: held. */
bool gp__retire_one(gp_pool *pool, struct gp__mapping *mapping, enum gp__retire_which which,
                    struct gp__retired **list);
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
/* Idle mappings that may move to [from, to): outside of it, no range's, oldest first, at most `most` bytes together,
 * within a bounded number of looks, and with owners that can be fenced one by one. First the slots that have to
 * pass for that; once none is left, the second sets them retiring and puts them into *list. lock: held. */
uint64_t gp__retire_slots(const gp_pool *pool, size_t most, uintptr_t from, uintptr_t to);
void gp__retire_movable(gp_pool *pool, size_t most, uintptr_t from, uintptr_t to,
                        struct gp__retired **list);
/* Puts a list of retiring mappings where the reaper finds it. lock: held. */
void gp__retiring_add(gp_pool *pool, struct gp__retired *list);
/* Says that this thread is about to hold a list, in the same section that fills it: until
 * gp__retire_finish() others know that chunks are under way. lock: held. */
void gp__retire_hold(gp_pool *pool, const struct gp__retired *list);
/* Bytes of idle and retiring mappings that a request may have given back. lock: held. */
size_t gp__retirable_bytes(const gp_pool *pool);
/* Physical bytes that have come free go to the credit, as far as that has need of them (NULL: none), and are
 * room for all beyond. lock: held. */
void gp__credit_add(gp_pool *pool, struct gp__credit *credit, size_t bytes);
/* Reaps the list (held, see above), gives the chunks back, and keeps the rest retiring. With a credit (may be
 * NULL) chunks go into its stock while that has room; bytes that come back go to it too; *returned counts
 * those that free took. lock: dropped. */
gp_status gp__retire_finish(gp_pool *pool, struct gp__retired *list, enum gp__reap_mode mode,
                            const struct gp__interrupt *interrupt, struct gp__credit *credit,
                            size_t *returned, gp_error *error);
/* Gives back what is left of the stock. lock: dropped. */
void gp__stock_return(gp_pool *pool, struct gp__credit *credit);
/* Gives one unmapped, accepted chunk back to the backing and frees the mapping, or keeps both as
 * unreturned. *counter is the pool's field that its bytes are counted in now; what was returned goes
 * to the credit (may be NULL). lock: dropped. */
gp_status gp__return_chunk(gp_pool *pool, struct gp__mapping *mapping, size_t *counter,
                           struct gp__credit *credit, gp_error *error);
/* Asks the backing for a chunk, marking this thread as inside the pool's callback. lock: dropped. */
gp_status gp__ask_backing(gp_pool *pool, const gp_request *request, gp_chunk **out,
                          gp_error *error);
/* Asks the user's hook, which may run a signal handler: the thread counts as inside the pool's callback
 * meanwhile, so a handler that would wait for this very operation is told so. */
int gp__pool_interrupted(void *pool);
/* What the reaper runs. */
uint64_t gp__pool_service(void *context);
void gp__pool_kick(gp_pool *pool);

/* ---- close.c, orphan.c ---- */
/* One close with the waits of `mode`. GP_NOT_READY: something is left. lock: not held. */
gp_status gp__pool_close(gp_pool *pool, enum gp__reap_mode mode,
                         const struct gp__interrupt *interrupt, gp_error *error);
/* Frees a closed pool that nobody holds. */
void gp__pool_destroy(gp_pool *pool);
/* One slice of closing a pool that was let go, on the reaper; the pool may be gone afterwards. Returns
 * when to come again. */
uint64_t gp__orphan_service(gp_pool *pool);
/* Drops what gp_pool_finish() and the list of left pools hold once the pool is closed; the pool may be gone
 * afterwards. */
void gp__orphan_finished(gp_pool *pool);
/* How many pools of the device wait for an explicit call to close them. */
size_t gp__orphans_left(const gp_device *device);
/* Whether pools of the device were left, and no stream that any pool knows captures: the fence of a whole
 * context would invalidate the capture. lock: not held. */
bool gp__orphans_wanted(gp_pool *pool);
/* At the end of an explicit call: closes what pools of the device left because of owners that only a
 * context-wide fence covers. GP_OK, or GP_ERR_INTERRUPTED: the rest is left to the next such call; or what
 * is told to a child in which a callback came back. lock: not held. */
gp_status gp__orphans_close(gp_device *device, const struct gp__interrupt *interrupt,
                            gp_error *error);

/* ---- check.c ---- */
#ifdef GP_TESTING
/* True when every invariant holds; else a sentence in message. Takes the lock. */
bool gp__pool_check(gp_pool *pool, char *message, size_t size);
/* Emergency mode, for every pool of the process: each growth is told "no memory" once, before its backing
 * is asked, and must get on by the rungs of the ladder. No lock. */
void gp__set_emergency(bool enabled);
bool gp__in_emergency(void);
#else
static inline bool gp__in_emergency(void)
{
    return false;
}
#endif

#endif
