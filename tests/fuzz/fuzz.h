/* SPDX-License-Identifier: Apache-2.0
 *
 * The fuzz target: bytes become operations on pools of the simulated device, faults, and completions of
 * work, and after each operation everything is compared. This header owns what its files share; what a
 * pool ought to hold is tests/support/model.h's business.
 *
 * INPUT       eight bytes of options, then operations: a number and the bytes it takes. Bytes that are
 *             missing read as 0; the run ends with the last byte. Every sequence of bytes is a legal use
 *             of growpool: what a user must not do is left out, and the operation then does nothing.
 * SAME BYTES, SAME RUN. One thread (but for frees on another one, which is joined at once). The reaper is
 *             replaced by reaper_by_hand.c, which does a turn when an operation says so, and the clock by
 *             one that moves a millisecond whenever it is read. Operations that would touch what the
 *             process remembers from one run to the next are left out.
 * FAILURES    end the process, after a line that names the step.
 */
#ifndef GP__FUZZ_H
#define GP__FUZZ_H

#include "tests/support/model.h"

#include "vmm/pool.h"

#define FUZZ_POOLS  3
#define FUZZ_GRAPHS 4
#define FUZZ_CROWD  66
#define FUZZ_BLOCKS 96 /* live in one pool */
#define FUZZ_QUEUED 48 /* items on one stream */
#define FUZZ_NONE   (-1)

#define FUZZ_DEEPEST 2 /* operations inside callbacks inside operations... */

/* One pool in its own view of the world: the simulator and the handles are everybody's. */
struct fuzz_pool {
    struct world world; /* world.pool: the pool, while `alive` */
    struct model model;
    gp_backing *cache; /* between the pool's backing and the world's; NULL: none */
    bool alive; /* its memory exists: destroy has not been called */
    bool held; /* the user's reference */
    bool finishing;
    bool ending; /* is being closed, or nobody can reach it: the model does not follow any more */
    bool whole_pages; /* one page is the unit of growth: ranges fit the model */
    bool dropped[MODEL_RANGES]; /* the range lives for its pins only */
    unsigned unknown_pins[MODEL_RANGES]; /* bit p: pin p of the range has users that nobody sees */
    size_t supplied_bytes, supplied_chunks; /* that the pool has */
};

/* A capture that goes on, or the graph that it became. */
struct fuzz_graph {
    bool used;
    int s; /* the stream that began it; FUZZ_NONE: ended */
    bool spoiled; /* invalidated on purpose */
    gp__sim_graph *made;
    unsigned serial; /* tags the blocks of this capture; 0 tags none */
};

/* How the backing behaves for its next calls. */
enum fuzz_mood {
    MOOD_GOOD,
    MOOD_REFUSES,
    MOOD_FAILS, /* GP_ERR_CALLBACK */
    MOOD_NOT_READY,
    MOOD_NOTHING, /* GP_OK without a chunk */
    MOOD_WRONG_SIZE,
    MOOD_TWICE, /* a chunk that it gave before */
    MOOD_CLOSED, /* a chunk that is closed */
    MOOD_REENTERS, /* an operation inside, then as usual */
    MOOD_COUNT
};

struct fuzz {
    const uint8_t *data;
    size_t size, at;
    const char *name; /* of the input */
    bool trace;
    unsigned step;
    uint64_t driver_calls; /* of the whole run, at its end */

    struct world world;
    gp__sim *peer; /* NULL: none */
    struct fuzz_pool pools[FUZZ_POOLS];
    unsigned now; /* the pool that operations are about */
    struct fuzz_graph graphs[FUZZ_GRAPHS];
    int capture[WORLD_STREAMS]; /* the graph that the stream records into, or FUZZ_NONE */
    unsigned serials;
    bool blocking[WORLD_STREAMS]; /* flags of each stream */
    bool dead; /* the context was killed */
    bool driver_faults; /* may be injected */
    uintptr_t crowd[FUZZ_CROWD]; /* handles beyond the world's streams */
    size_t crowd_count;
    uint8_t options[8];

    /* What is left for ever of pools that are gone. */
    struct {
        size_t abandoned_bytes, address_bytes;
    } gone;

    enum fuzz_mood alloc_mood, free_mood;
    unsigned alloc_moody, free_moody; /* calls that the mood lasts */
    unsigned refuse_base,
        fail_base; /* calls that the world's backing refuses, will not take back */
    gp_chunk *latest; /* a reference to the latest chunk given, for MOOD_TWICE */
    unsigned patience; /* times that the interrupt hook says "go on" */
    unsigned asked; /* times that it was asked while the device waited for it */
    bool times_out; /* waits end at once; the hook lets the device run */

    /* Of the operation that runs. */
    uint64_t heap_fault; /* 0: none */
    uint64_t fired; /* driver faults before it */
    bool heap_error; /* GP_ERR_HOST_MEMORY was seen */
    bool moody; /* the backing misbehaved */
    bool interrupted; /* the hook said stop */
    unsigned inside; /* depth in callbacks */
    unsigned inside_count; /* operations done in callbacks */
};

extern struct fuzz fuzz;

/* ---- fuzz.c: the input and the run ---- */
/* Runs one input from a fresh world to an empty one. Ends the process when anything is wrong. */
void fuzz_run(const char *name, const uint8_t *data, size_t size);
uint8_t fuzz_byte(void);
size_t fuzz_below(size_t bound); /* from one byte; two when the bound needs them */
size_t fuzz_block_size(void);
int fuzz_stream(void);
/* One operation from inside a callback of `pool`. */
void fuzz_reenter(struct fuzz_pool *pool);
/* What the operation does, for people: printed with GP_FUZZ_TRACE=1. */
void fuzz_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- fuzz_check.c ---- */
/* Checks a status of the pool (NULL: none's) against what may happen now and what `allowed` names (bits
 * 1 << GP_ERR_...), and that the error tells. */
void fuzz_expect(const struct fuzz_pool *pool, gp_status status, const gp_error *error,
                 unsigned allowed);
/* Checks that a wrong argument was refused. */
void fuzz_refused(gp_status status, const gp_error *error);
#define FUZZ_MEMORY (1u << GP_ERR_OUT_OF_MEMORY | 1u << GP_ERR_LIMIT | 1u << GP_ERR_ADDRESS_SPACE)
/* Every pool with its model and its own equations, and all of them together with the device. */
void fuzz_check(void);
/* Notices pools that began to close and pools that nobody can reach. */
void fuzz_follow(void);
/* The pool takes no more work, or a close is under way. */
bool fuzz_is_leaving(const struct fuzz_pool *pool);
bool fuzz_is_capturing(void);
void fuzz_forget_faults(void);
/* After a growth of any kind: a failed one added nothing (V3), and the limit held (B3). */
void fuzz_check_growth(const struct fuzz_pool *pool, gp_status status, const gp_pool_stats *before);

/* ---- fuzz_backing.c ---- */
gp_status fuzz_backing_create(struct fuzz_pool *pool, gp_backing **out, gp_error *error);
void fuzz_op_mood(void);
void fuzz_op_base_knobs(void);
void fuzz_op_cache_trim(void);
int fuzz_interrupted(void *context);

/* ---- fuzz_blocks.c: operations ---- */
void fuzz_op_malloc(void);
void fuzz_op_try_malloc(void);
void fuzz_op_free(void);
void fuzz_op_free_elsewhere(void);
void fuzz_op_bad_free(void);
void fuzz_op_launch(void);
void fuzz_op_record(void);
void fuzz_op_pin(void);
void fuzz_op_unpin(void);
void fuzz_op_abandon(void);
void fuzz_op_copy(void);
void fuzz_op_fill(void);
void fuzz_unpin_all(struct fuzz_pool *pool);

/* ---- fuzz_ranges.c ---- */
void fuzz_op_range_create(void);
void fuzz_op_range_close(void);
void fuzz_op_range_drop(void);
void fuzz_op_commit(void);
void fuzz_op_decommit(void);
void fuzz_op_resize(void);
void fuzz_op_range_use(void);
void fuzz_op_range_pin(void);
void fuzz_op_range_unpin(void);
void fuzz_op_range_bad(void);
void fuzz_ranges_unpin(struct fuzz_pool *pool);
/* Lets go of all of them; none may be pinned. */
void fuzz_ranges_end(struct fuzz_pool *pool);
size_t fuzz_range_count(const struct fuzz_pool *pool);

/* ---- fuzz_time.c ---- */
void fuzz_op_complete(void);
void fuzz_op_complete_all(void);
void fuzz_op_reaper(void);
void fuzz_op_wait_mode(void);
void fuzz_op_synchronize(void);
void fuzz_op_join(void);
void fuzz_op_forget(void);
void fuzz_op_replace(void);
void fuzz_op_crowd(void);
void fuzz_op_capture_begin(void);
void fuzz_op_capture_join(void);
void fuzz_op_capture_end(void);
void fuzz_op_capture_spoil(void);
void fuzz_op_stranger(void);
void fuzz_op_graph_launch(void);
void fuzz_op_graph_destroy(void);
void fuzz_op_kill(void);
void fuzz_graphs_end(void);
/* Work on stream s; where there are peers, half of it is done by one of them. */
void fuzz_launch(int s, uintptr_t va, size_t bytes);
/* True when the stream is the legacy one and a blocking stream captures: users keep off it. */
bool fuzz_is_implicit(int s);

/* ---- fuzz_pools.c ---- */
void fuzz_op_select(void);
void fuzz_op_open(void);
void fuzz_op_open_bad(void);
void fuzz_op_close(void);
void fuzz_op_finish(void);
void fuzz_op_release(void);
void fuzz_op_trim(void);
void fuzz_op_trim_no_wait(void);
void fuzz_op_drain(void);
void fuzz_op_limit(void);
void fuzz_op_unreturned(void);
void fuzz_op_look(void);
void fuzz_op_device_memory(void);
/* Gets the pool's view of stream s, where there is none. */
void fuzz_resolve(struct fuzz_pool *pool, int s);
/* The pool that operations are about, as long as the user holds it; else NULL. */
struct fuzz_pool *fuzz_held(void);
void fuzz_pools_end(void);

/* ---- reaper_by_hand.c ---- */
/* Calls each client that is due once; how many there were. */
size_t fuzz_reaper_turn(void);

#endif
