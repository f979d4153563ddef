/* SPDX-License-Identifier: Apache-2.0
 *
 * The shadow model: what a pool ought to hold, kept by much simpler means, and the checker that
 * compares. It knows blocks by address and asks the simulator about work; it never steers the pool.
 *
 * WHAT IS COMPARED
 *   blocks    no two overlap; aligned to 512; mapped with access; when handed to a stream, no pending
 *             work of another stream touches them.
 *   bytes     used_bytes is the sum of the model's blocks; physical_bytes is what the backing has out.
 *   ledger    mapped bytes, chunks and reservations of the pool are exactly the device's.
 *   pool      gp__pool_check(): the pool's own equations.
 */
#ifndef GP__MODEL_H
#define GP__MODEL_H

#include "world.h"

struct model_block {
    uintptr_t va;
    size_t bytes; /* as asked */
    size_t rounded; /* up to 512 */
    unsigned flags; /* GP_BLOCK_* */
    int stream; /* index in the world it was allocated on; -1: forgotten since */
    unsigned recorded; /* bit s: world stream s may work on it */
};

struct model {
    struct world *world;
    struct model_block *blocks; /* by address */
    size_t count, room;
    size_t used_bytes;
};

void model_begin(struct model *model, struct world *world);
void model_end(struct model *model);
/* A block that the pool has just handed to world stream `s`: checks it and remembers it. */
void model_add(struct model *model, uintptr_t va, size_t bytes, int s, unsigned flags);
void model_remove(struct model *model, size_t index);
/* Forgets every block (the pool was closed). */
void model_clear(struct model *model);
/* Calls the pool and keeps the model in step; the status is the pool's. */
gp_status model_malloc(struct model *model, size_t bytes, int s, gp_error *error);
gp_status model_free(struct model *model, size_t index, int s, gp_error *error);

/* Compares everything; ends the test with `where` in the message if anything differs. Call it while no
 * operation of the pool is under way. */
void model_check(const struct model *model, const char *where);
/* The part that needs no model: pool and ledger. False with a sentence in message. */
bool checker_compare(const struct world *world, char *message, size_t size);

#endif
