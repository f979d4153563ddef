/* SPDX-License-Identifier: Apache-2.0
 *
 * A pool's timeline: streams, slots, the clock, fences in flight. Words and proofs: stream.h.
 */
#ifndef GP__TIMELINE_H
#define GP__TIMELINE_H

#include "../backing/driver.h"
#include "../backing/lock.h"
#include "stream.h"

#define GP__SLOT_COUNT 63 /* bit 63 of a mask is GP__UNKNOWN */
#define GP__SLOT_NONE  (-1)
#define GP__UNKNOWN    (UINT64_C(1) << 63)

/* Who may still use a piece of memory. {0, 0} is nobody: passed. */
struct gp__owners {
    uint64_t slots;
    uint64_t ticket;
};

/* Asked between the steps of a wait; non-zero ends it with GP_ERR_INTERRUPTED. No lock is held. */
struct gp__interrupt {
    int (*check)(void *context); /* NULL: never */
    void *context;
};

struct gp__fence; /* an event in flight with its ticket */

struct gp_stream {
    struct gp__stream_key key;
    struct gp__timeline *timeline;
    uint64_t references; /* atomic */
    uint64_t thread; /* gp__thread_id() of the owner when key.thread_bound */
    int slot; /* GP__SLOT_NONE while it owns nothing we know of */
    bool gone; /* its handle now names another stream, or it was forgotten */
    uint64_t passed; /* highest ticket passed */
    uint64_t recorded; /* highest ticket of a fence recorded or being recorded */
    struct gp__fence *fences; /* oldest first */
    struct gp_stream *next; /* in the timeline's list */
};

struct gp__timeline {
    gp_device *device;
    struct gp__mutex *lock; /* the pool's */
    uint64_t clock; /* the ticket that a stamp made now gets; starts at 1 */
    struct gp_stream *streams;
    unsigned slot_streams[GP__SLOT_COUNT]; /* streams that share the slot */
    uint64_t slot_passed[GP__SLOT_COUNT]; /* the least `passed` of the slot's streams */
    uint64_t unknown_passed;
    struct gp__fence *spare; /* events to use again */
    /* Asked for a mask of the slots that own any memory, when all slots are taken: lets idle ones
     * be given to new streams. lock: held. */
    uint64_t (*slots_in_use)(void *context);
    void *slots_in_use_context;
};

/* lock: not needed. */
void gp__timeline_init(struct gp__timeline *timeline, gp_device *device, struct gp__mutex *lock,
                       uint64_t (*slots_in_use)(void *context), void *context);
/* Destroys events; leaves the driver alone when exiting or forked. No stream may own memory. */
void gp__timeline_destroy(struct gp__timeline *timeline);

/* Finds or adds the stream behind `handle`. lock: dropped. */
gp_status gp__timeline_stream(struct gp__timeline *timeline, uintptr_t handle, gp_stream **out,
                              gp_error *error);
/* The stream's bit, giving it a slot if it has none. Never fails. lock: held. */
uint64_t gp__timeline_bit(struct gp__timeline *timeline, gp_stream *stream);
/* As gp__timeline_bit, for a use that ends on this thread: GP__UNKNOWN for a gone stream, or a
 * thread-bound stream of another thread. lock: held. */
uint64_t gp__timeline_bit_at_free(struct gp__timeline *timeline, gp_stream *stream);
/* The bits among `slots` whose streams are thread-bound to this very thread: a free records their
 * fence at once. And those bound to other threads: a free replaces them by GP__UNKNOWN. lock: held. */
uint64_t gp__timeline_bound_here(const struct gp__timeline *timeline, uint64_t slots);
uint64_t gp__timeline_bound_elsewhere(const struct gp__timeline *timeline, uint64_t slots);
/* True when the bit stands for exactly this one stream. lock: held. */
bool gp__timeline_is_sole(const struct gp__timeline *timeline, uint64_t slots,
                          const gp_stream *stream);

/* lock: held. */
static inline uint64_t gp__timeline_now(const struct gp__timeline *timeline)
{
    return timeline->clock;
}
/* Pure comparison, no driver call. lock: held. */
bool gp__timeline_has_passed(const struct gp__timeline *timeline, struct gp__owners owners);
/* The owners that have not passed yet, {0, 0} if none: what a caller stores back. lock: held. */
struct gp__owners gp__timeline_remaining(const struct gp__timeline *timeline,
                                         struct gp__owners owners);
/* Queries fences in flight and moves `passed` on. True if anything moved. Never blocks. lock: held.
 * Caller is inside driver->enter(). */
bool gp__timeline_poll(struct gp__timeline *timeline);

/* GP_ERR_CAPTURE if any stream of `slots` captures; with GP__UNKNOWN among them, any stream of the
 * timeline. Driver failures count as not capturing. lock: dropped. */
gp_status gp__timeline_check_capture(struct gp__timeline *timeline, uint64_t slots,
                                     gp_error *error);
/* Sees to it that a fence with a ticket >= owners.ticket is recorded on every stream of
 * owners.slots, GP__UNKNOWN included. Streams that capture are left out and named by GP_ERR_CAPTURE
 * after the others are done. Inside driver->enter(). lock: dropped. */
gp_status gp__timeline_record(struct gp__timeline *timeline, struct gp__owners owners,
                              gp_error *error);
/* Records, then waits until the owners have passed. GP_ERR_INTERRUPTED leaves everything as it was.
 * Inside driver->enter(). lock: dropped. */
gp_status gp__timeline_wait(struct gp__timeline *timeline, struct gp__owners owners,
                            const struct gp__interrupt *interrupt, gp_error *error);
/* The stream ends: waits for all its work, then takes its slot away for good. lock: dropped. */
gp_status gp__timeline_forget(struct gp__timeline *timeline, gp_stream *stream,
                              const struct gp__interrupt *interrupt, gp_error *error);

/* A number for the calling thread, never reused (unlike pthread_self). */
uint64_t gp__thread_id(void);

#endif
