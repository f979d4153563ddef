/* SPDX-License-Identifier: Apache-2.0
 *
 * The shadow model and the checker: straightforward and slow on purpose.
 */
#include "model.h"

#include "vmm/pool.h"

static size_t round_up(size_t bytes)
{
    return (bytes + GP_ALIGNMENT - 1) / GP_ALIGNMENT * GP_ALIGNMENT;
}

void model_begin(struct model *model, struct world *world)
{
    memset(model, 0, sizeof *model);
    model->world = world;
}

void model_end(struct model *model)
{
    model_ranges_end(model);
    free(model->blocks);
    memset(model, 0, sizeof *model);
}

void model_clear(struct model *model)
{
    for (size_t i = 0; i < MODEL_RANGES; i++)
        model_range_forget(model, &model->ranges[i]);
    model->count = 0;
    model->used_bytes = 0;
}

/* The index of the first block that ends above va. */
static size_t block_after(const struct model *model, uintptr_t va)
{
    size_t low = 0, high = model->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (model->blocks[middle].va + model->blocks[middle].rounded <= va)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void check_new_block(const struct model *model, const struct model_block *block, size_t at)
{
    const struct world *world = model->world;
    uint64_t id = gp__sim_stream_id(world->sim, world->handle[block->stream]);

    CHECK(block->va % GP_ALIGNMENT == 0, "block %#zx is not aligned", (size_t)block->va);
    CHECK(at == model->count || model->blocks[at].va >= block->va + block->rounded,
          "block %#zx of %zu bytes overlaps block %#zx of %zu", (size_t)block->va, block->bytes,
          (size_t)model->blocks[at].va, model->blocks[at].bytes);
    CHECK(gp__sim_is_accessible(world->sim, block->va, block->rounded),
          "block %#zx of %zu bytes is not mapped throughout", (size_t)block->va, block->bytes);
    CHECK(!gp__sim_busy(world->sim, block->va, block->rounded, id),
          "block %#zx of %zu bytes went to stream %d under pending work of another stream",
          (size_t)block->va, block->bytes, block->stream);
}

void model_add(struct model *model, uintptr_t va, size_t bytes, int s, unsigned flags)
{
    struct model_block block = {.va = va,
                                .bytes = bytes,
                                .rounded = round_up(bytes),
                                .flags = flags,
                                .stream = s,
                                .recorded = 1u << s};
    size_t at = block_after(model, va);

    if (bytes == 0) {
        CHECK(va == 0, "size 0 gave address %#zx", (size_t)va);
        return;
    }
    check_new_block(model, &block, at);
    if (model->count == model->room) {
        model->room = model->room == 0 ? 64 : model->room * 2;
        model->blocks = realloc(model->blocks, model->room * sizeof *model->blocks);
        CHECK(model->blocks != NULL, "no memory for the model");
    }
    memmove(&model->blocks[at + 1], &model->blocks[at],
            (model->count - at) * sizeof *model->blocks);
    model->blocks[at] = block;
    model->count++;
    model->used_bytes += block.rounded;
}

void model_remove(struct model *model, size_t index)
{
    model->used_bytes -= model->blocks[index].rounded;
    model->count--;
    memmove(&model->blocks[index], &model->blocks[index + 1],
            (model->count - index) * sizeof *model->blocks);
}

gp_status model_malloc(struct model *model, size_t bytes, int s, gp_error *error)
{
    struct world *world = model->world;
    uintptr_t va = UINTPTR_MAX;
    gp_status status = gp_pool_malloc(world->pool, bytes, world->stream[s], 0, &va, error);

    if (status == GP_OK)
        model_add(model, va, bytes, s, 0);
    else
        CHECK(va == UINTPTR_MAX, "malloc failed and yet wrote its output");
    return status;
}

gp_status model_free(struct model *model, size_t index, int s, gp_error *error)
{
    struct world *world = model->world;
    const struct model_block *block = &model->blocks[index];
    gp_status status =
        gp_pool_free(world->pool, block->va, s < 0 ? NULL : world->stream[s], block->flags, error);

    if (status == GP_OK)
        model_remove(model, index);
    return status;
}

static bool differ(char *message, size_t size, const char *what, uint64_t pool, uint64_t other)
{
    snprintf(message, size, "%s: the pool says %llu, the device or the backing %llu", what,
             (unsigned long long)pool, (unsigned long long)other);
    return false;
}

bool checker_compare(const struct world *world, char *message, size_t size)
{
    gp_pool_stats stats = world_stats(world);
    struct gp__sim_ledger ledger = world_ledger(world);
    uint64_t leaked = world_leaked_chunks(world);
    size_t unreturned = gp_pool_unreturned(world->pool, NULL, 0);
    size_t out = stats.physical_bytes, cached = world_cached_bytes(world);
    size_t cached_chunks = cached == 0 ? 0 : cached / world->options.chunk_size;

    if (!gp__pool_check(world->pool, message, size))
        return false;
    if (stats.address_bytes != ledger.reserved_bytes)
        return differ(message, size, "address bytes", stats.address_bytes, ledger.reserved_bytes);
    if (out - stats.unreturned_bytes != ledger.mapped_bytes)
        return differ(message, size, "mapped bytes", out - stats.unreturned_bytes,
                      ledger.mapped_bytes);
    if (out + cached != world->supplied_bytes)
        return differ(message, size, "physical bytes", out + cached, world->supplied_bytes);
    if (leaked == 0 && out + cached != ledger.physical_bytes)
        return differ(message, size, "physical bytes", out + cached, ledger.physical_bytes);
    if (world->supplied_chunks + leaked != ledger.chunk_count)
        return differ(message, size, "chunks", world->supplied_chunks + leaked, ledger.chunk_count);
    if (stats.abandoned_bytes == 0 &&
        stats.chunk_count + unreturned + cached_chunks != world->supplied_chunks)
        return differ(message, size, "chunk count", stats.chunk_count + unreturned + cached_chunks,
                      world->supplied_chunks);
    if (stats.free_bytes + stats.used_bytes + stats.retiring_bytes + stats.abandoned_bytes !=
        ledger.mapped_bytes)
        return differ(message, size, "free, used and retiring bytes",
                      stats.free_bytes + stats.used_bytes + stats.retiring_bytes +
                          stats.abandoned_bytes,
                      ledger.mapped_bytes);
    if (ledger.entered != 0)
        return differ(message, size, "entries without leave", 0, ledger.entered);
    return true;
}

void model_check(const struct model *model, const char *where)
{
    gp_pool_stats stats = world_stats(model->world);
    char message[400];

    CHECK(stats.used_bytes == model->used_bytes, "%s: used_bytes %zu, the model has %zu", where,
          stats.used_bytes, model->used_bytes);
    CHECK(stats.peak_used_bytes >= stats.used_bytes &&
              stats.peak_physical_bytes >= stats.physical_bytes,
          "%s: a peak is below the present", where);
    model_check_ranges(model, where);
    CHECK(checker_compare(model->world, message, sizeof message), "%s: %s", where, message);
}
