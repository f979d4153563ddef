/* SPDX-License-Identifier: Apache-2.0
 *
 * The chunk plan: how much to map beyond what a request needs, in chunks of which size, and when a pool is
 * larger than it should be. Pure policy.
 *
 * WHY THESE SIZES. The driver charges by the chunk, so few large ones are quick to get: 16 GiB took 28.6 ms
 * in chunks of 20 MiB and 1.5 ms in chunks of 1 GiB (H200, driver 580.159). Copies between chunks of 2 MiB
 * run at half speed, from 32 MiB on at 0.95 and more of the full one. But an idle chunk moves to where it is
 * needed only whole, so large ones leave a pool larger than it has to be. So chunks are large while all that
 * the pool has is used, as when a model is loaded, and small from when some of it is not. Six recorded
 * traces, peak of physical memory over peak of use, chunks made for gpt; idle chunks moved beyond 1/64 of waste,
 * and in the fourth row beyond 1/1024:
 *
 *   chunks of a sixteenth of the block, but at least   gnn    gpt    llm    rl     streams vision
 *   128 MiB                                            1.106  1.007  1.061  1.049  1.035   1.003     537
 *   32 MiB                                             1.038  1.007  1.114  1.030  1.047   1.003     951
 *   8 MiB                                              1.013  1.006  1.040  1.036  1.017   1.001   2,800
 *   128 MiB, then 8 MiB: as it is                      1.009  1.006  1.041  1.033  1.015   1.001   2,652
 *   the same, beyond 1/64                              1.040  1.007  1.034  1.028  1.032   1.003     705
 *
 * and, without moving idle chunks, 1.790 for gnn. With PyTorch's expandable segments the peaks were 1.232,
 * 1.038, 1.045, 1.066, 1.018 and 1.010.
 */
#include "pool.h"

#define MIB          (UINT64_C(1) << 20)
#define CHUNK_SHARE  16 /* a chunk is this part of the block that it is for, but at least: */
#define FRESH_LEAST  (128 * MIB) /* while the pool is no larger than it should be */
#define CHUNK_LEAST  (8 * MIB) /* then */
#define COPIED_FROM  (256 * MIB) /* blocks that are likely to be copied as a whole */
#define COPIED_LEAST (32 * MIB)
#define CHUNK_MOST   (1024 * MIB)
#define WASTE_SHARE  1024 /* a pool may exceed what was used of it at most by this part */
#define STEP_MAX     (32 * MIB)
#define STEP_SHARE   16 /* a step is this part of what is mapped */

bool gp__plan_is_wasteful(const gp_pool *pool, size_t bytes, size_t physical)
{
    size_t most = pool->used_bytes + bytes;
    if (most < pool->peak_used)
        most = pool->peak_used;
    most += most / WASTE_SHARE;
    if (most > pool->limit)
        most = pool->limit;
    return physical > most;
}

size_t gp__plan_step(const gp_pool *pool, size_t new_bytes)
{
    size_t step = pool->mapped_bytes / STEP_SHARE / pool->page * pool->page;
    if (step > STEP_MAX)
        step = STEP_MAX / pool->page * pool->page;
    return pool->chunk_size != 0 || step <= new_bytes ? 0 : step - new_bytes;
}

size_t gp__plan_chunk(const gp_pool *pool, size_t left, size_t request, bool wasteful, size_t cap)
{
    if (pool->chunk_size != 0)
        return pool->chunk_size;
    size_t most = request / CHUNK_SHARE;
    size_t least = request >= COPIED_FROM ? COPIED_LEAST : CHUNK_LEAST;
    if (!wasteful)
        least = FRESH_LEAST;
    if (most < least)
        most = least;
    if (most > CHUNK_MOST)
        most = CHUNK_MOST;
    if (most > cap)
        most = cap;
    most = most / pool->page * pool->page;
    if (most < pool->page)
        most = pool->page;
    return left < most ? left : most;
}
