/* SPDX-License-Identifier: Apache-2.0
 *
 * The world that pool tests live in: a simulated device, a backing that can be told to refuse, streams,
 * a pool on top. It makes and unmakes these things; what they ought to do is model.h's business.
 */
#ifndef GP__WORLD_H
#define GP__WORLD_H

#include "tests/support/check.h"
#include "tests/support/sim.h"
#include "vmm/growpool.h"

#define WORLD_STREAMS 4
#define WORLD_PAGE    (UINT64_C(2) << 20)

struct world_options {
    size_t memory_bytes; /* of the device; 0: 64 GiB */
    size_t limit; /* 0: none */
    size_t chunk_size; /* 0: planned by the pool */
    size_t address_space; /* 0: the pool's default */
    size_t largest_reserve; /* 0: no bound */
    size_t device_addresses; /* that the device has in all; 0: 1 TiB */
    bool with_reaper;
    bool with_peer; /* a second device has access to everything */
    size_t cache_bytes; /* not 0: the pool asks a cache of so many bytes, and that the backing */
    int (*interrupted)(void *context);
    void *interrupted_context;
};

struct world {
    struct world_options options;
    gp__sim *sim;
    gp_device *device;
    gp_backing *inner; /* the device itself */
    gp_backing *backing; /* wraps it; what the pool asks */
    gp_backing *cache; /* NULL, or wraps that, and is what the pool asks */
    gp__sim *peer_sim; /* NULL: no peer */
    gp_pool *pool;
    uintptr_t handle[WORLD_STREAMS];
    gp_stream *stream[WORLD_STREAMS];
    gp_error error; /* for whoever needs one */

    /* The backing's knobs. refuse is asked before each alloc; true means "no memory". fail_free is
     * asked before each free; true means GP_ERR_CALLBACK. NULL: never. */
    bool (*refuse)(struct world *world, size_t size);
    bool (*fail_free)(struct world *world, size_t size);
    void *knob; /* for the two */
    gp_status alloc_status; /* when not GP_OK, what alloc answers instead of asking the device */
    gp_status (*answer)(struct world *world, const gp_request *request, gp_chunk **out,
                        gp_error *error); /* replaces alloc altogether */
    void (*before_free)(struct world *world, const gp_request *request);

    uint64_t alloc_calls, refusals, free_calls;
    uintptr_t last_free_stream;
    size_t supplied_bytes, supplied_chunks; /* that the backing gave and did not take back */

    int64_t live_before; /* growpool's own allocations when the world began */
    uint64_t failed_releases_before;
};

/* Makes the world without a pool; NULL options: defaults. A failure ends the test. */
void world_begin(struct world *world, const struct world_options *options);
/* Makes the pool and its view of the streams. */
void world_open(struct world *world);
gp_status world_try_open(struct world *world, gp_error *error);
/* Lets go of the streams and the pool, closed or not yet (then closes it). */
void world_close(struct world *world);
/* Asserts that nothing at all is left, neither in the device nor in growpool's heap, and ends. */
void world_end(struct world *world);
/* The same without asserting about the device's ledger: after faults that leave something. */
void world_abandon(struct world *world);

/* What the device's driver refused to release, in chunks. */
uint64_t world_leaked_chunks(const struct world *world);
/* gp_pool_malloc on stream `s`, which must succeed. */
uintptr_t world_malloc(struct world *world, size_t bytes, int s);
/* gp_pool_free on stream `s`, or on the block's own one for -1; must succeed. */
void world_free(struct world *world, uintptr_t va, int s);
void world_launch(struct world *world, int s, uintptr_t va, size_t bytes);
gp_pool_stats world_stats(const struct world *world);
struct gp__sim_ledger world_ledger(const struct world *world);
/* Bytes that the cache keeps; 0 without one. */
size_t world_cached_bytes(const struct world *world);

#endif
