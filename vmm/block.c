/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks: memory in users' hands. Handing out, taking back, and who else uses it. Nothing here blocks
 * except gp_pool_malloc(), and only through the ladder.
 */
#include "quick.h"

static size_t round_block(size_t bytes)
{
    return (bytes + GP_ALIGNMENT - 1) / GP_ALIGNMENT * GP_ALIGNMENT;
}

/* What is left of a span when a block took its beginning: memory of the same kind. */
static void file_rest(gp_pool *pool, struct gp__span *rest, gp_span_state state,
                      struct gp__owners owners)
{
    if (state == GP_SPAN_HELD)
        gp__arena_hold(pool, rest->arena, rest, owners);
    else
        gp__span_free(pool, rest, owners);
}

void gp__block_make(gp_pool *pool, struct gp__span *span, size_t bytes, gp_stream *stream,
                    unsigned flags, struct gp__arena *arena)
{
    gp_span_state before = span->state;
    struct gp__owners left_behind =
        before == GP_SPAN_FREE || before == GP_SPAN_HELD ? span->owners : (struct gp__owners){0, 0};
    struct gp__span *rest = NULL;
    if (bytes < span->bytes)
        rest = gp__span_cut(pool, span, span->va + bytes);
    span->state = GP_SPAN_USED;
    span->flags = flags;
    span->pins = 0;
    span->owners = (struct gp__owners){gp__timeline_bit(&pool->timeline, stream), 0};
    span->stream = gp_stream_retain(stream);
    span->arena = arena;
    if (arena != NULL)
        gp__arena_join(arena);
    if (before != GP_SPAN_HELD)
        gp__mapping_count(pool, span->segment, span->va, bytes, true);
    gp__index_add(pool, span);
    if (rest != NULL)
        file_rest(pool, rest, before, left_behind);
    gp__used_add(pool, bytes);
}

void gp__block_melt(gp_pool *pool, struct gp__span *span, struct gp__owners owners)
{
    gp_stream *own = span->stream;
    struct gp__arena *arena = span->arena;
    gp__index_remove(pool, span);
    pool->used_bytes -= span->bytes;
    span->stream = NULL;
    span->arena = NULL;
    if (arena != NULL && gp__arena_leave(arena)) {
        gp__arena_hold(pool, arena, span, owners);
    } else {
        gp__mapping_count(pool, span->segment, span->va, span->bytes, false);
        gp__span_free(pool, span, owners);
    }
    gp_stream_release(own);
}

void gp__block_end(gp_pool *pool, struct gp__span *span, gp_stream *stream, bool *record_now)
{
    gp__quick_forget(span);
    gp__used_note(pool);
    gp__block_melt(pool, span,
                   gp__timeline_stamp(&pool->timeline, span->owners.slots,
                                      stream != NULL ? stream : span->stream, record_now));
}

/* Memory that the stream may use at once, unfiled, or NULL: of its capture, else free for all it knows. */
static struct gp__span *find_span(gp_pool *pool, size_t bytes, gp_stream *stream,
                                  struct gp__arena *arena)
{
    struct gp__span *span = NULL;
    if (arena != NULL)
        span = gp__arena_take(pool, arena, bytes, stream);
    if (span != NULL)
        return span;
    span = gp__span_find(pool, bytes, arena != NULL ? NULL : stream);
    if (span != NULL)
        gp__span_unfile(pool, span);
    return span;
}

struct gp__span *gp__block_take(gp_pool *pool, size_t bytes, gp_stream *stream, unsigned flags,
                                struct gp__arena *arena, bool settle)
{
    struct gp__span *span = find_span(pool, bytes, stream, arena);
    if (span == NULL && settle) {
        gp__span_settle(pool);
        span = find_span(pool, bytes, stream, arena);
    }
    if (span != NULL)
        gp__block_make(pool, span, bytes, stream, flags, arena);
    return span;
}

gp_status gp__pool_stream_error(const gp_pool *pool, const gp_stream *stream, gp_error *error)
{
    if (!gp__pool_has_stream(pool, stream))
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "the stream belongs to another pool than '%s'; get it from "
                            "gp_pool_stream()",
                            pool->name);
    return gp_error_set(error, GP_ERR_ARGUMENT,
                        "stream %#zx was forgotten by pool '%s' and may be destroyed by now; name "
                        "another one, or get it from gp_pool_stream() again if it lives",
                        (size_t)stream->key.handle, pool->name);
}

/* Whether a stream that is known by its handle is still the one behind it and does not capture: GP_OK or
 * GP_NOT_READY. */
static gp_status check_handle(gp_device *device, const gp_stream *stream)
{
    struct gp__stream_key key = gp__stream_key(stream);
    return device->driver->stream_confirm(device, &key);
}

/* Whether the stream captures, or GP_NOT_READY of check_handle(). The default stream's handle is its own for
 * ever. */
static gp_status ask_stream(gp_device *device, const gp_stream *stream, unsigned flags,
                            bool *capturing, gp_error *error)
{
    if ((flags & GP_BLOCK_BY_HANDLE) == 0 || stream->key.handle == 0)
        return device->driver->stream_capturing(device, &stream->key, capturing, error);
    *capturing = false;
    return check_handle(device, stream);
}

/* What every allocation asks first. */
static gp_status check_request(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                               bool *capturing, gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK)
        return status;
    if (gp_pool_is_closed(pool))
        return gp__pool_closed_error(pool, error);
    status = gp__pool_check_live(pool, stream, error);
    if (status != GP_OK)
        return status;
    if (size > PTRDIFF_MAX - pool->page)
        return gp_error_set(error, GP_ERR_ARGUMENT, "%zu bytes is more than any pool can hold",
                            size);
    return ask_stream(pool->device, stream, flags, capturing, error);
}

/* The fast path: no driver call but is-capturing. GP_NOT_READY when there is nothing to take. */
static gp_status take(gp_pool *pool, size_t bytes, gp_stream *stream, unsigned flags,
                      struct gp__arena *arena, bool settle, uintptr_t *out, gp_error *error)
{
    gp__mutex_lock(&pool->lock);
    gp_status status = gp__pool_usable(pool, false, error);
    if (status == GP_OK)
        status = gp__span_reserve(pool, 1, error);
    if (status == GP_OK)
        status = gp__index_reserve(pool, error);
    if (status == GP_OK)
        status = gp__quick_open(pool, stream, error);
    if (status == GP_OK) {
        gp__quick_flush(pool, stream);
        struct gp__span *block = gp__block_take(pool, bytes, stream, flags, arena, settle);
        if (block != NULL)
            *out = block->va;
        else
            status = GP_NOT_READY;
    }
    gp__mutex_unlock(&pool->lock);
    return status;
}

static gp_status empty_block(gp_pool *pool, uintptr_t *out, gp_error *error)
{
    gp__mutex_lock(&pool->lock);
    gp_status status = gp__pool_usable(pool, false, error);
    gp__mutex_unlock(&pool->lock);
    if (status == GP_OK)
        *out = 0;
    return status;
}

/* Finds the arena of a stream that captures, keeping close() away meanwhile. */
static gp_status find_arena(gp_pool *pool, const gp_stream *stream, bool make,
                            struct gp__arena **out, gp_error *error)
{
    gp_status status = gp__pool_visit(pool, error);
    if (status != GP_OK)
        return status;
    status = gp__arena_of(pool, stream, make, out, error);
    gp__pool_leave(pool);
    return status;
}

gp_status gp_pool_try_malloc(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                             uintptr_t *out, gp_error *error)
{
    gp_device *device = pool->device;
    struct gp__entry entry;
    struct gp__arena *arena = NULL;
    bool capturing = false;
    gp_status status = check_request(pool, size, stream, flags, &capturing, error);
    if (status != GP_OK)
        return status;
    flags &= GP_BLOCK_OBJECT;
    if (size == 0)
        return empty_block(pool, out, error);
    size_t bytes = round_block(size);
    if (!capturing && gp__quick_malloc(stream, bytes, flags, out))
        return GP_OK;
    if (!capturing)
        status = take(pool, bytes, stream, flags, NULL, false, out, error);
    if (status != GP_NOT_READY && !capturing)
        return status;
    if (device->driver->enter(device, &entry, NULL) != GP_OK)
        return GP_NOT_READY; /* gp_pool_malloc() says what is wrong */
    status = capturing ? find_arena(pool, stream, false, &arena, error) : GP_OK;
    if (status == GP_OK)
        status = take(pool, bytes, stream, flags, arena, true, out, error);
    gp__arena_release(arena);
    device->driver->leave(device, &entry);
    return status;
}

static gp_status malloc_captured(gp_pool *pool, size_t bytes, gp_stream *stream, unsigned flags,
                                 uintptr_t *out, gp_error *error)
{
    gp_device *device = pool->device;
    struct gp__entry entry;
    struct gp__arena *arena = NULL;
    gp_status status = device->driver->enter(device, &entry, error);
    if (status != GP_OK)
        return status;
    status = find_arena(pool, stream, true, &arena, error);
    device->driver->leave(device, &entry);
    if (status != GP_OK)
        return status;
    struct gp__growth growth = {.pool = pool,
                                .stream = stream,
                                .bytes = bytes,
                                .flags = flags,
                                .arena = arena,
                                .taker = arena != NULL ? NULL : stream};
    status = gp__ladder(&growth, out, error);
    gp__arena_release(arena);
    return status;
}

/* Apart, so that the fast path needs no room for a growth. */
__attribute__((noinline)) static gp_status malloc_slowly(gp_pool *pool, size_t bytes,
                                                         gp_stream *stream, unsigned flags,
                                                         uintptr_t *out, gp_error *error)
{
    gp_status status = take(pool, bytes, stream, flags, NULL, false, out, error);
    if (status != GP_NOT_READY)
        return status;
    struct gp__growth growth = {
        .pool = pool, .stream = stream, .bytes = bytes, .flags = flags, .taker = stream};
    return gp__ladder(&growth, out, error);
}

gp_status gp_pool_malloc(gp_pool *pool, size_t size, gp_stream *stream, unsigned flags,
                         uintptr_t *out, gp_error *error)
{
    bool capturing = false;
    gp_status status = check_request(pool, size, stream, 0, &capturing, error);
    if (status != GP_OK)
        return status;
    flags &= GP_BLOCK_OBJECT;
    if (size == 0)
        return empty_block(pool, out, error);
    size_t bytes = round_block(size);
    if (capturing)
        return malloc_captured(pool, bytes, stream, flags, out, error);
    if (gp__quick_malloc(stream, bytes, flags, out))
        return GP_OK;
    return malloc_slowly(pool, bytes, stream, flags, out, error);
}

/* The block in use at the address, or NULL. lock: held. */
static struct gp__span *block_at(const gp_pool *pool, uintptr_t address)
{
    struct gp__span *span = gp__index_find(pool, address);
    return span == NULL || gp__quick_is_kept(span) ? NULL : span;
}

/* The same, or GP_ERR_ARGUMENT. lock: held. */
static gp_status find_block(const gp_pool *pool, uintptr_t address, struct gp__span **out,
                            gp_error *error)
{
    gp_status status = gp__pool_usable(pool, false, error);
    if (status != GP_OK)
        return status;
    *out = block_at(pool, address);
    if (*out != NULL)
        return GP_OK;
    return gp_error_set(error, GP_ERR_ARGUMENT,
                        "%#zx is no live block of pool '%s': it was freed already, or came from "
                        "elsewhere",
                        (size_t)address, pool->name);
}

/* Objects free their blocks themselves. */
static gp_status check_kind(const gp_pool *pool, const struct gp__span *span, unsigned flags,
                            gp_error *error)
{
    if ((span->flags & GP_BLOCK_OBJECT) == (flags & GP_BLOCK_OBJECT))
        return GP_OK;
    return gp_error_set(error, GP_ERR_ARGUMENT,
                        "%#zx (%zu bytes) belongs to %s of pool '%s' and is freed through it",
                        (size_t)span->va, span->bytes,
                        (span->flags & GP_BLOCK_OBJECT) != 0 ? "a buffer object" : "malloc",
                        pool->name);
}

static gp_status pinned_error(const gp_pool *pool, const struct gp__span *span, gp_error *error)
{
    return gp_error_set(error, GP_ERR_PINNED,
                        "%#zx (%zu bytes) of pool '%s' has %u live exports; release them first",
                        (size_t)span->va, span->bytes, pool->name, span->pins);
}

gp_status gp_pool_try_free(gp_pool *pool, uintptr_t address, gp_stream *stream, unsigned flags,
                           gp_error *error)
{
    gp_status status = gp__pool_enter(pool, error);
    if (status == GP_OK)
        status = gp__pool_check_stream(pool, stream, error);
    if (status == GP_OK && (flags & GP_BLOCK_BY_HANDLE) != 0 && stream->key.handle != 0)
        status = check_handle(pool->device, stream);
    if (status != GP_OK)
        return status;
    return gp__quick_free(pool, stream, address, flags & GP_BLOCK_OBJECT) ? GP_OK : GP_NOT_READY;
}

gp_status gp_pool_free(gp_pool *pool, uintptr_t address, gp_stream *stream, unsigned flags,
                       gp_error *error)
{
    struct gp__span *span = NULL;
    bool record_now = false;
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK || address == 0)
        return status;
    status = stream != NULL ? gp__pool_check_stream(pool, stream, error) : GP_OK;
    if (status != GP_OK || (stream != NULL && gp__quick_free(pool, stream, address, flags)))
        return status;
    gp__mutex_lock(&pool->lock);
    /* A free is accepted while the pool is being closed; close() may have ended the block already. */
    if ((pool->closing || pool->finishing) && !pool->closed)
        span = block_at(pool, address);
    else
        status = find_block(pool, address, &span, error);
    if (span != NULL)
        status = check_kind(pool, span, flags, error);
    if (status == GP_OK && span != NULL && span->pins > 0)
        status = pinned_error(pool, span, error);
    struct gp__owners owners = {0, 0};
    bool own = span != NULL && (stream == NULL || stream == span->stream);
    if (status == GP_OK && span != NULL && !(own && gp__quick_keep(pool, span))) {
        owners = (struct gp__owners){span->owners.slots, gp__timeline_now(&pool->timeline)};
        if (stream != NULL)
            owners.slots |= gp__timeline_bit(&pool->timeline, stream);
        gp__block_end(pool, span, stream, &record_now);
    }
    gp__mutex_unlock(&pool->lock);
    if (record_now)
        gp__pool_record_here(pool, owners);
    return status;
}

gp_status gp_pool_record_stream(gp_pool *pool, uintptr_t address, gp_stream *stream,
                                gp_error *error)
{
    struct gp__span *span = NULL;
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK || address == 0)
        return status;
    status = gp__pool_check_stream(pool, stream, error);
    if (status != GP_OK)
        return status;
    gp__mutex_lock(&pool->lock);
    status = find_block(pool, address, &span, error);
    if (status == GP_OK) {
        gp__quick_forget(span);
        span->owners.slots |= gp__timeline_bit(&pool->timeline, stream);
    }
    gp__mutex_unlock(&pool->lock);
    return status;
}

gp_status gp_pool_pin(gp_pool *pool, uintptr_t address, bool unknown, gp_error *error)
{
    struct gp__span *span = NULL;
    gp_status status = gp__pool_enter(pool, error);
    if (status != GP_OK || address == 0)
        return status;
    gp__mutex_lock(&pool->lock);
    status = find_block(pool, address, &span, error);
    if (status == GP_OK) {
        gp__quick_forget(span);
        span->pins++;
        pool->pinned++;
        gp_pool_retain(pool);
        if (unknown)
            span->owners.slots |= GP__UNKNOWN;
    }
    gp__mutex_unlock(&pool->lock);
    return status;
}

/* Ends a block from a finaliser. lock: held. */
static struct gp__owners end_quietly(gp_pool *pool, struct gp__span *span, bool *record_now)
{
    struct gp__owners owners = {span->owners.slots, gp__timeline_now(&pool->timeline)};
    gp__block_end(pool, span, NULL, record_now);
    return owners;
}

void gp_pool_unpin(gp_pool *pool, uintptr_t address)
{
    bool record_now = false, kick = false;
    struct gp__owners owners = {0, 0};
    if (gp__pool_enter(pool, NULL) != GP_OK || address == 0)
        return;
    gp__mutex_lock(&pool->lock);
    struct gp__span *span = gp__index_find(pool, address);
    bool pinned = span != NULL && span->pins > 0;
    if (pinned) {
        pool->pinned--;
        if (--span->pins == 0 && (span->flags & GP__BLOCK_ABANDONED) != 0)
            owners = end_quietly(pool, span, &record_now);
        kick = pool->pinned == 0 && pool->finishing;
    }
    gp__mutex_unlock(&pool->lock);
    if (record_now)
        gp__pool_record_here(pool, owners);
    if (kick)
        gp__reaper_kick(&pool->reaper);
    if (pinned)
        gp_pool_release(pool);
}

void gp_pool_abandon(gp_pool *pool, uintptr_t address, unsigned flags)
{
    bool record_now = false;
    struct gp__owners owners = {0, 0};
    if (gp__pool_enter(pool, NULL) != GP_OK || address == 0)
        return;
    gp__mutex_lock(&pool->lock);
    struct gp__span *span = pool->closed ? NULL : block_at(pool, address);
    if (span != NULL && check_kind(pool, span, flags, NULL) == GP_OK) {
        if (span->pins > 0)
            span->flags |= GP__BLOCK_ABANDONED;
        else if (!gp__quick_keep(pool, span))
            owners = end_quietly(pool, span, &record_now);
    }
    gp__mutex_unlock(&pool->lock);
    if (record_now)
        gp__pool_record_here(pool, owners);
}
