/* SPDX-License-Identifier: Apache-2.0
 *
 * The chunk plan: how much to map beyond what a request needs, and in chunks of which size. Pure policy;
 * the figures behind it were measured on an H200 (backing.h): the driver charges by the chunk, copies
 * over 2 MiB chunks run at half speed, and from 32 MiB on nothing is gained but fewer calls.
 */
#include "pool.h"

#define MIB               (UINT64_C(1) << 20)
#define SHARED_CHUNK_MAX  (128 * MIB) /* chunks that several blocks share */
#define PRIVATE_CHUNK_MAX (1024 * MIB) /* chunks of one block larger than that */
#define STEP_MAX          (32 * MIB)
#define STEP_SHARE        16 /* a step is this part of what is mapped */

size_t gp__plan_step(const gp_pool *pool, size_t new_bytes)
{
    size_t step = pool->mapped_bytes / STEP_SHARE / pool->page * pool->page;
    if (step > STEP_MAX)
        step = STEP_MAX / pool->page * pool->page;
    return pool->chunk_size != 0 || step <= new_bytes ? 0 : step - new_bytes;
}

size_t gp__plan_chunk(const gp_pool *pool, size_t left, size_t request, size_t cap)
{
    if (pool->chunk_size != 0)
        return pool->chunk_size;
    size_t most = request > SHARED_CHUNK_MAX ? PRIVATE_CHUNK_MAX : SHARED_CHUNK_MAX;
    if (most > cap)
        most = cap;
    most = most / pool->page * pool->page;
    if (most < pool->page)
        most = pool->page;
    return left < most ? left : most;
}
