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

static inline struct gp__owners gp__owners_merge(struct gp__owners a, struct gp__owners b)
{
    return (struct gp__owners){a.slots | b.slots, a.ticket > b.ticket ? a.ticket : b.ticket};
}

/* Asked between the steps of a wait; non-zero ends it with GP_ERR_INTERRUPTED. No lock is held. */
struct gp__interrupt {
    int (*check)(void *context); /* NULL: never */
    void *context;
};

/* An event recorded with a ticket; in flight on a stream, or spare. */
struct gp__fence {
    gp__event *event;
    uintptr_t context;
    uint64_t ticket;
    unsigned
        waiters; /* threads that wait for the event; it is not recorded anew while there are any */
    bool passed; /* out of its stream's list; the last waiter makes it spare */
    struct gp__fence *next;
};

/* What the owner of the timeline keeps with a stream: dropped with the stream, by any thread. */
struct gp__attached {
    void (*drop)(struct gp__attached *attached);
};

enum gp__stream_state {
    GP__STREAM_LIVE,
    GP__STREAM_LEAVING, /* being forgotten: takes no more fences */
    GP__STREAM_GONE, /* its handle names another stream now: its work cannot be fenced by itself */
    GP__STREAM_FORGOTTEN /* its work was waited for and its user promised no more */
};

struct gp_stream {
    struct gp__stream_key key;
    uint64_t number; /* in order of creation; the list goes from high to low */
    uint64_t timeline; /* the number of the timeline it belongs to */
    uint64_t references; /* atomic; the timeline's list holds one */
    uint64_t thread; /* gp__thread_id() of the owner when key.thread_bound */
    bool
        unnamed; /* met while it captured: its id cannot be asked for before the capture ends. Atomic */
    int slot; /* GP__SLOT_NONE while it owns nothing we know of */
    enum gp__stream_state state; /* changed under the lock, by gp__stream_set_state() */
    struct gp__attached *attached; /* atomic; NULL, or the owner's of the timeline */
    uint64_t passed; /* highest ticket passed */
    uint64_t recorded; /* highest ticket of a fence recorded */
    unsigned recording; /* threads that are putting a fence on it */
    struct gp__fence *fences; /* in flight, oldest first */
    struct gp_stream *next; /* in the timeline's list */
};

struct gp__timeline {
    uint64_t number; /* unique in the process: tells its streams from those of others */
    gp_device *device;
    struct gp__mutex *lock; /* the pool's */
    uint64_t
        clock; /* the ticket that a stamp made now gets; starts at 1. Atomic: read without the lock */
    struct gp_stream *streams;
    unsigned stream_count;
    unsigned slot_streams[GP__SLOT_COUNT]; /* streams that share the slot */
    uint64_t
        slot_passed[GP__SLOT_COUNT]; /* the least `passed` of its streams; UINT64_MAX for none */
    uint64_t unknown_passed;
    uint64_t touched; /* slots that have ever been given out */
    uint64_t peculiar; /* slots with a stream that is gone or thread-bound: stamps look closer */
    uint64_t passes; /* grows whenever anything passed: tells who looked before from who did not */
    uint64_t stream_total; /* streams ever listed */
    uint64_t wait_count; /* waits that did not end at once */
    struct gp__fence *spare;
    /* Asked, when all slots are taken, for the mask of slots that own memory or may come to own some:
     * the others are given to new streams. lock: held. */
    uint64_t (*slots_in_use)(void *context);
    /* Told before a stream that lives is gone or leaves: its owner's last chance to stamp with it what the
     * stream has used. lock: held. */
    void (*stream_ends)(void *context, gp_stream *stream);
    void *context; /* of both */
    struct gp__timeline *next; /* of the process's list; under its own lock (capture.c) */
    struct gp__timeline **link; /* what points to it there; NULL when it is not listed */
};

/* lock: not needed. */
void gp__timeline_init(struct gp__timeline *timeline, gp_device *device, struct gp__mutex *lock,
                       uint64_t (*slots_in_use)(void *context),
                       void (*stream_ends)(void *context, gp_stream *stream), void *context);
/* Destroys events; leaves the driver alone when exiting. No other call may be under way. */
void gp__timeline_destroy(struct gp__timeline *timeline);

/* Finds or adds the stream behind `handle`; *out is a new reference. While it captures, and
 * in a dead context, its id cannot be asked: then the stream that is known by that handle is found, and
 * if the handle changed hands unseen, the next fence notices. One that is met for the first time while it
 * captures stays unnamed until somebody can ask: it cannot have been destroyed before, unless behind our
 * back (S3). lock: dropped. */
gp_status gp__timeline_stream(struct gp__timeline *timeline, uintptr_t handle, gp_stream **out,
                              gp_error *error);
/* Whether the stream's slot is among `slots`. lock: held. */
static inline bool gp__stream_owns(const gp_stream *stream, uint64_t slots)
{
    return stream->slot != GP__SLOT_NONE && (slots >> stream->slot & 1) != 0;
}
/* The stream's id became known; it is read without the lock, but after `unnamed`. lock: held. */
static inline void gp__stream_name(gp_stream *stream, uint64_t id)
{
    __atomic_store_n(&stream->key.id, id, __ATOMIC_RELAXED);
    __atomic_store_n(&stream->unnamed, false, __ATOMIC_RELEASE);
}
/* The stream's key, for the device, while another thread may learn the id. lock: not needed. */
static inline struct gp__stream_key gp__stream_key(const gp_stream *stream)
{
    return (struct gp__stream_key){.handle = stream->key.handle,
                                   .context = stream->key.context,
                                   .id = gp_stream_id(stream),
                                   .always_passed = stream->key.always_passed,
                                   .thread_bound = stream->key.thread_bound};
}
static inline void gp__stream_set_state(gp_stream *stream, enum gp__stream_state state)
{
    __atomic_store_n(&stream->state, state, __ATOMIC_RELAXED);
}
/* Its handle may be that of a destroyed stream, about which no device may be asked. lock: not needed. */
static inline bool gp__stream_is_forgotten(const gp_stream *stream)
{
    return __atomic_load_n(&stream->state, __ATOMIC_RELAXED) == GP__STREAM_FORGOTTEN;
}
/* Takes the stream off the list and out of its slot; the list's reference is the caller's. lock: held. */
void gp__timeline_unlink(struct gp__timeline *timeline, gp_stream *stream);
/* Notes that the stream's handle no longer names it. lock: held. */
void gp__timeline_lose(struct gp__timeline *timeline, gp_stream *stream);
/* The stream's bit, giving it a slot if it has none. 0 for streams that have always passed and for
 * forgotten ones. Never fails. lock: held. */
uint64_t gp__timeline_bit(struct gp__timeline *timeline, gp_stream *stream);
/* The owners of memory whose use ends now, on this thread, by `slots` and (unless NULL) `stream`:
 * stamped, and with GP__UNKNOWN for what cannot be fenced from here. Sets *record_now when a fence
 * must be recorded on this very thread (a thread-bound stream). lock: held. */
struct gp__owners gp__timeline_stamp(struct gp__timeline *timeline, uint64_t slots,
                                     gp_stream *stream, bool *record_now);
/* True when `slots` is this one stream and nothing else. lock: held. */
bool gp__timeline_is_sole(const struct gp__timeline *timeline, uint64_t slots,
                          const gp_stream *stream);
/* True when a fence on the streams of `slots` cannot do: GP__UNKNOWN, a gone stream, or a stream bound
 * to another thread without a fence for `ticket`. lock: held. */
bool gp__timeline_is_unseen(const struct gp__timeline *timeline, struct gp__owners owners);
/* The clock: what a stamp made now would get. Also without the lock: a fence with that ticket or a later one
 * is recorded after whatever was enqueued before this call. */
static inline uint64_t gp__timeline_now(const struct gp__timeline *timeline)
{
    return __atomic_load_n(&timeline->clock, __ATOMIC_RELAXED);
}
/* The owners that have not passed yet; {0, 0} when all have. No driver call. lock: held. */
struct gp__owners gp__timeline_remaining(const struct gp__timeline *timeline,
                                         struct gp__owners owners);
/* Queries fences in flight and moves `passed` on. Never blocks. lock: held, inside driver->enter(). */
void gp__timeline_poll(struct gp__timeline *timeline);

enum gp__reach {
    GP__REACH_SEEN, /* fences on known streams only: the ladder and the reaper */
    GP__REACH_ALL /* a context-wide fence where one is needed: explicit trim, close, drain */
};

/* ---- capture.c ---- */
/* From enlist to delist the streams of the timeline are asked before a whole context is fenced. A second
 * delist does nothing. No pool's lock held. */
void gp__timeline_enlist(struct gp__timeline *timeline);
void gp__timeline_delist(struct gp__timeline *timeline);
/* GP_ERR_CAPTURE if a stream of `slots` captures; if the owners are unseen, any stream that a pool of the
 * device knows. lock: dropped. */
gp_status gp__timeline_check_capture(struct gp__timeline *timeline, struct gp__owners owners,
                                     gp_error *error);
/* GP_ERR_CAPTURE if any stream that a pool of the device knows captures. No pool's lock held. Both: the
 * driver's error if it cannot say. */
gp_status gp__device_check_capture(const gp_device *device, gp_error *error);

/* ---- fence.c, wait.c ---- */
/* Records a fence that covers `owners` on each of their streams that lacks one. Streams that capture
 * are left out, and GP_ERR_CAPTURE is returned after the rest is done; unseen owners are left out
 * silently. Inside driver->enter(). lock: dropped. */
gp_status gp__timeline_record(struct gp__timeline *timeline, struct gp__owners owners,
                              gp_error *error);
/* Records, then waits until the owners have passed. GP_NOT_READY when only unseen owners remain and
 * the reach does not extend to them; GP_ERR_INTERRUPTED leaves everything as it was. Inside
 * driver->enter(). lock: dropped. */
gp_status gp__timeline_wait(struct gp__timeline *timeline, struct gp__owners owners,
                            enum gp__reach reach, const struct gp__interrupt *interrupt,
                            gp_error *error);
/* Waits for what is enqueued on the stream by now. Inside driver->enter(). lock: dropped. */
gp_status gp__timeline_synchronize(struct gp__timeline *timeline, gp_stream *stream,
                                   const struct gp__interrupt *interrupt, gp_error *error);
/* Has `to` wait, on the device, for what is enqueued on `from` by now. GP_ERR_CAPTURE while either captures;
 * GP_ERR_ARGUMENT when no fence can be put on `from` here. Inside driver->enter(). lock: dropped. */
gp_status gp__timeline_join(struct gp__timeline *timeline, gp_stream *from, gp_stream *to,
                            gp_error *error);
/* The stream ends: waits for its work, then lets go of it. lock: dropped; enters the device. */
gp_status gp__timeline_forget(struct gp__timeline *timeline, gp_stream *stream,
                              const struct gp__interrupt *interrupt, gp_error *error);

/* A number for the calling thread, never reused (unlike pthread_self). */
uint64_t gp__thread_id(void);
/* Whether a pool has ever met a thread-bound stream of the calling thread. If so, whatever ends the use of
 * memory here may record a fence at once, and that can block; otherwise it makes no driver call. */
bool gp__thread_has_stream(void);
void gp__thread_gets_stream(void);

#endif
