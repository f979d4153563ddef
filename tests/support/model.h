/* SPDX-License-Identifier: Apache-2.0
 *
 * The shadow model: what a pool ought to hold, kept by much simpler means, and the checker that
 * compares. It knows blocks by address and asks the simulator about work; it never steers the pool.
 *
 * WHAT IS COMPARED
 *   blocks    no two overlap; aligned to 512; mapped with access; when handed to a stream, no pending
 *             work of another stream touches them.
 *   ranges    the committed pages are exactly the model's; each newly given page is mapped and free
 *             of others' work; sizes and addresses.
 *   bytes     used_bytes is the sum of the model's blocks and committed pages; physical_bytes is what
 *             the backing has out.
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
    /* Kept by the test, where it does such things. */
    unsigned pins; /* live exports */
    bool exported; /* with users that nobody sees: while pinned, any stream may work on it */
    bool abandoned; /* ends with its last pin */
    unsigned capture; /* a number for the capture that it belongs to; 0: none */
};

#define MODEL_RANGES 6
#define MODEL_PAGES  64
#define MODEL_PINS   4

struct model_range {
    gp_range *range; /* NULL: none */
    uintptr_t va;
    size_t pages;
    size_t size; /* of the last resize */
    bool page[MODEL_PAGES]; /* committed */
    int stream; /* index in the world of the one it was made for */
    unsigned users; /* bit s: world stream s may work on it */
    gp_interval pin[MODEL_PINS];
    size_t pin_count;
};

struct model {
    struct world *world;
    struct model_range ranges[MODEL_RANGES];
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

/* Ranges (model_range.c): the same for the calls of growpool.h, by the place of the range. */
gp_status model_range_create(struct model *model, size_t index, size_t pages, int s,
                             gp_error *error);
/* Closes the range and lets go of it. */
gp_status model_range_close(struct model *model, size_t index, int s, gp_error *error);
gp_status model_commit(struct model *model, size_t index, const gp_interval *parts, size_t count,
                       int s, gp_error *error);
/* After GP_ERR_DRIVER, GP_ERR_HOST_MEMORY and GP_ERR_INTERRUPTED all of the parts may be
 * decommitted, or none; after other errors none. */
gp_status model_decommit(struct model *model, size_t index, const gp_interval *parts, size_t count,
                         int s, unsigned flags, gp_error *error);
gp_status model_resize(struct model *model, size_t index, size_t bytes, int s, unsigned flags,
                       gp_error *error);
gp_status model_pin(struct model *model, size_t index, size_t offset, size_t bytes, bool unknown,
                    gp_error *error);
void model_unpin(struct model *model, size_t index, size_t pin);
/* Nothing of the range is committed any more. */
void model_range_forget(struct model *model, struct model_range *range);
/* Unpins and releases every range. */
void model_ranges_end(struct model *model);
void model_check_ranges(const struct model *model, const char *where);

/* Compares everything; ends the test with `where` in the message if anything differs. Call it while no
 * operation of the pool is under way. */
void model_check(const struct model *model, const char *where);
/* The part that needs no model: pool and ledger. False with a sentence in message. */
bool checker_compare(const struct world *world, char *message, size_t size);

#endif
