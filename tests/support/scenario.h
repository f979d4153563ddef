/* SPDX-License-Identifier: Apache-2.0
 *
 * Named pieces of a pool's life, each with a preparation and one act that the fault sweeps make fail.
 * It says what a scenario does and what must hold after it; how faults are injected is the tests'.
 */
#ifndef GP__SCENARIO_H
#define GP__SCENARIO_H

#include "model.h"

enum {
    SCENARIO_SHRINKS = 1, /* a failed act may have given idle memory back (V3) */
    SCENARIO_CLOSES = 2, /* the act closes the pool: after a failure it takes no more work */
    SCENARIO_RETURNS = 4, /* the act may have put chunks back partly: retiring or returned */
    SCENARIO_DECOMMITS = 8, /* memory of a range may have left it although waiting for it failed */
    SCENARIO_ASKS = 16, /* a question that the driver fails to answer means "unavailable" */
    SCENARIO_LARGE = 32 /* so many calls that only some of its pairs are tried */
};

#define SCENARIO_EXTRA 70

struct scenario_run {
    struct world world;
    struct model model;
    uintptr_t block[8];
    unsigned step; /* parts of the act that are done: a retry goes on from here */
    size_t released; /* what the act reported */
    uint64_t countdown; /* for the backing's knobs */
    gp_chunk *chunk[2]; /* of an act without a pool */
    int fd; /* of chunk[0], when step says so */
    bool capturing; /* stream 0 */
    gp__sim_graph *graph;
    gp_stream *extra[SCENARIO_EXTRA]; /* streams beside the world's */
};

struct scenario {
    const char *name;
    struct world_options options;
    unsigned shape; /* SCENARIO_* */
    void (*prepare)(struct scenario_run *run);
    gp_status (*act)(struct scenario_run *run, gp_error *error);
    void (*verify)(struct scenario_run *run); /* after a successful act; may be NULL */
    void (*settle)(struct scenario_run *run); /* ends what lies outside of the pool; may be NULL */
};

extern const struct scenario scenarios[];
extern const size_t scenario_count;
extern const struct scenario range_scenarios[]; /* scenario_range.c */
extern const size_t range_scenario_count;
extern const struct scenario more_scenarios[]; /* scenario_more.c */
extern const size_t more_scenario_count;
/* All of them in turn; NULL from the last one on. */
const struct scenario *scenario_at(size_t index);

/* A knob of the backing: true as often as run->countdown says, with run->world.knob pointing there. */
bool scenario_refuse(struct world *world, size_t size);

/* Makes the world and prepares it. */
void scenario_begin(struct scenario_run *run, const struct scenario *scenario);
/* After a successful act: everything that must hold. */
void scenario_verify(struct scenario_run *run, const struct scenario *scenario);

/* Before the pool is closed, with no faults: captures, graphs, chunks and streams of the run go. */
void scenario_settle(struct scenario_run *run, const struct scenario *scenario);

/* What a failed act must leave alone. */
struct scenario_state {
    bool open; /* the pool exists */
    gp_pool_stats stats;
    size_t block_count;
    size_t step;
};

struct scenario_state scenario_state(const struct scenario_run *run);
/* Compares with the state before, as far as the scenario's shape allows; checks the whole pool. */
void scenario_check_unchanged(const struct scenario_run *run, const struct scenario *scenario,
                              const struct scenario_state *before);

#endif
