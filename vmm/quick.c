/* SPDX-License-Identifier: Apache-2.0
 *
 * Quick lists: the blocks that a stream has freed a moment ago and may have back at once. A list is its
 * stream's own, so threads that work on streams of their own meet no lock of the pool here. It only ever
 * holds USED spans and touches none of them: to the rest of the pool nothing happens on the fast path.
 *
 * WORDS   known   the block is an entry of its stream's list: lent or kept.
 *         lent    a user has it.
 *         kept    the user has freed it; its memory is not free memory yet: not melted with its
 *                 neighbours, not findable by others, its mapping not idle.
 *
 *   an ordinary block --- gp_pool_free on its own stream, its sole owner (gp__quick_keep) ---> kept
 *   kept --- gp_pool_malloc, same stream, same bytes (gp__quick_malloc) ---> lent
 *   lent --- gp_pool_free, same stream (gp__quick_free) ---> kept
 *   lent --- other owners, a pin, no room, the stream or the pool ends ---> an ordinary block
 *   kept --- whoever needs to see free memory (gp__quick_flush, gp__quick_lock) ---> free memory
 *
 * WHY. Most programs ask again for what they freed last. To split and to melt for that costs three times
 * what all the rest does, and under the pool's one lock threads would get slower the more there are. It
 * costs no memory: a request that its list cannot serve first gives that list up, so placement sees what
 * it would see without lists; and no pool grows, trims or refuses before all lists were given up.
 *
 * A kept block has the ticket of its free: the clock is read without the pool's lock, and a fence that took
 * its ticket later is recorded later than the work that was enqueued before the free, because the device
 * orders what is enqueued on one stream.
 *
 * REJECTED: lists by thread (a block belongs to a stream, and threads come and go); lists as an array
 * searched from end to end (30 ns at 32 entries); entries inside the spans (threads would share the
 * cache lines of neighbouring spans).
 */
#include "quick.h"

#include "../backing/memory.h"

#define ENTRIES 32 /* a bit each in a mask */
#define BUCKETS 16 /* a power of two */

struct entry {
    uintptr_t va;
    size_t bytes;
    struct gp__span *span;
    uint64_t ticket; /* kept: of its free */
    unsigned flags; /* of the block */
};

/* Guarded by `lock`, but for `span` of an entry and the set of entries that are known: those change under
 * the pool's lock too. */
struct gp__quick {
    struct gp__attached attached; /* to the stream. First member */
    struct gp__latch lock;
    bool open; /* takes new entries */
    uint32_t kept; /* atomic: read without the lock too */
    uint32_t lent;
    unsigned next; /* who gives way when all entries are known */
    size_t kept_bytes;
    size_t least_kept; /* bytes: since gp__quick_least() was asked */
    uint32_t by_bytes[BUCKETS]; /* entries by the hash of their bytes, of their address */
    uint32_t by_va[BUCKETS];
    struct entry entries[ENTRIES];
    char apart[64]; /* the next list in memory is another thread's */
};

static size_t hash(uint64_t value)
{
    return (size_t)(value / GP_ALIGNMENT * UINT64_C(0x9E3779B97F4A7C15) >> 60);
}

static struct gp__quick *list_of(const gp_stream *stream)
{
    return (struct gp__quick *)__atomic_load_n(&stream->attached, __ATOMIC_ACQUIRE);
}

static uint32_t kept_of(const struct gp__quick *quick)
{
    return __atomic_load_n(&quick->kept, __ATOMIC_RELAXED);
}

static void set_kept(struct gp__quick *quick, uint32_t kept, size_t bytes)
{
    __atomic_store_n(&quick->kept, kept, __ATOMIC_RELAXED);
    quick->kept_bytes = bytes;
    if (quick->least_kept > bytes)
        quick->least_kept = bytes;
}

/* The entry of `among` with these bytes (or this address) and flags, or -1. */
static int find_bytes(const struct gp__quick *quick, size_t bytes, unsigned flags)
{
    for (uint32_t left = quick->by_bytes[hash(bytes)] & quick->kept; left != 0; left &= left - 1) {
        int i = __builtin_ctz(left);
        if (quick->entries[i].bytes == bytes && quick->entries[i].flags == flags)
            return i;
    }
    return -1;
}

static int find_va(const struct gp__quick *quick, uintptr_t va)
{
    for (uint32_t left = quick->by_va[hash(va)] & (quick->kept | quick->lent); left != 0;
         left &= left - 1) {
        int i = __builtin_ctz(left);
        if (quick->entries[i].va == va)
            return i;
    }
    return -1;
}

/* ---- the fast path; no lock but the list's ----------------------------------------------------- */

bool gp__quick_malloc(gp_stream *stream, size_t bytes, unsigned flags, uintptr_t *out)
{
    struct gp__quick *quick = list_of(stream);
    if (quick == NULL || kept_of(quick) == 0)
        return false;
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    int i = find_bytes(quick, bytes, flags);
    if (i >= 0) {
        uint32_t bit = UINT32_C(1) << i;
        set_kept(quick, quick->kept & ~bit, quick->kept_bytes - bytes);
        quick->lent |= bit;
        *out = quick->entries[i].va;
    }
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    return i >= 0;
}

/* A lent entry becomes kept. lock: the list's. */
static void keep(const gp_pool *pool, struct gp__quick *quick, int i)
{
    uint32_t bit = UINT32_C(1) << i;
    quick->entries[i].ticket = gp__timeline_now(&pool->timeline);
    quick->lent &= ~bit;
    set_kept(quick, quick->kept | bit, quick->kept_bytes + quick->entries[i].bytes);
}

bool gp__quick_free(const gp_pool *pool, gp_stream *stream, uintptr_t address, unsigned flags)
{
    struct gp__quick *quick = list_of(stream);
    if (quick == NULL)
        return false;
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    int i = find_va(quick, address);
    bool ours = i >= 0 && (quick->lent >> i & 1) != 0 && quick->entries[i].flags == flags;
    if (ours)
        keep(pool, quick, i);
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    return ours;
}

/* ---- entries come and go; lock: the pool's and the list's --------------------------------------- */

static void insert(struct gp__quick *quick, struct gp__span *span, int i)
{
    uint32_t bit = UINT32_C(1) << i;
    quick->entries[i] =
        (struct entry){.va = span->va, .bytes = span->bytes, .span = span, .flags = span->flags};
    quick->by_bytes[hash(span->bytes)] |= bit;
    quick->by_va[hash(span->va)] |= bit;
    quick->lent |= bit;
    span->known = true;
}

/* The entry of a block becomes free for another. */
static void erase(struct gp__quick *quick, int i)
{
    uint32_t bit = UINT32_C(1) << i;
    struct entry *entry = &quick->entries[i];
    if ((quick->kept & bit) != 0)
        set_kept(quick, quick->kept & ~bit, quick->kept_bytes - entry->bytes);
    quick->lent &= ~bit;
    quick->by_bytes[hash(entry->bytes)] &= ~bit;
    quick->by_va[hash(entry->va)] &= ~bit;
    entry->span->known = false;
}

/* Ends a kept block, as its free would have done. */
static void end(gp_pool *pool, const struct entry *entry)
{
    uint64_t slots = entry->span->owners.slots;
    gp__block_melt(pool, entry->span,
                   slots == 0 ? (struct gp__owners){0, 0}
                              : (struct gp__owners){slots, entry->ticket});
}

/* ---- under the pool's lock ---------------------------------------------------------------------- */

static void drop(struct gp__attached *attached)
{
    gp__free(attached);
}

gp_status gp__quick_open(gp_pool *pool, gp_stream *stream, gp_error *error)
{
    struct gp__quick *quick = list_of(stream);
    if (quick != NULL && (quick->open || stream->state != GP__STREAM_LIVE))
        return GP_OK;
    bool fresh = quick == NULL;
    if (fresh)
        quick = gp__calloc(1, sizeof *quick);
    if (quick == NULL)
        return gp_error_set(error, GP_ERR_HOST_MEMORY,
                            "no host memory for the blocks that pool '%s' keeps at hand",
                            pool->name);
    if (fresh)
        quick->attached.drop = drop;
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    quick->open = true; /* anew, after a gp_pool_forget_stream() that was interrupted */
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    if (fresh)
        __atomic_store_n(&stream->attached, &quick->attached, __ATOMIC_RELEASE);
    return GP_OK;
}

/* Whether nobody but its own stream, on which fences can be put from any thread, has used the block. A slot
 * that several streams share does not say which of them did. */
static bool is_plain(gp_pool *pool, const struct gp__span *span)
{
    const gp_stream *own = span->stream;
    uint64_t slots = span->owners.slots;
    return (slots == 0 || gp__timeline_is_sole(&pool->timeline, slots, own)) && span->pins == 0 &&
           span->arena == NULL && !own->key.thread_bound && own->state == GP__STREAM_LIVE;
}

bool gp__quick_keep(gp_pool *pool, struct gp__span *span)
{
    struct entry gone = {.span = NULL};
    struct gp__quick *quick = list_of(span->stream);
    if (quick == NULL || !is_plain(pool, span))
        return false;
    gp__used_note(pool);
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    bool open = quick->open;
    if (open && !span->known) {
        uint32_t unused = ~(quick->kept | quick->lent);
        int i = unused != 0 ? __builtin_ctz(unused) : (int)(quick->next++ % ENTRIES);
        if (unused == 0) {
            if ((quick->kept >> i & 1) != 0)
                gone = quick->entries[i];
            erase(quick, i);
        }
        insert(quick, span, i);
    }
    int at = open ? find_va(quick, span->va) : -1;
    if (open &&
        (quick->lent >> at & 1) != 0) /* else two threads free it at once, and one was first */
        keep(pool, quick, at);
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    if (gone.span != NULL)
        end(pool, &gone);
    return open;
}

bool gp__quick_is_kept(const struct gp__span *span)
{
    if (!span->known)
        return false;
    struct gp__quick *quick = list_of(span->stream);
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    bool kept = (quick->kept >> find_va(quick, span->va) & 1) != 0;
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    return kept;
}

void gp__quick_forget(struct gp__span *span)
{
    if (!span->known)
        return;
    struct gp__quick *quick = list_of(span->stream);
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    erase(quick, find_va(quick, span->va));
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
}

/* Ends what is kept; with `all` the lent blocks become ordinary ones, and the list takes no more. */
static void flush(gp_pool *pool, const gp_stream *stream, bool all)
{
    struct entry gone[ENTRIES];
    int count = 0;
    struct gp__quick *quick = list_of(stream);
    if (quick == NULL || (!all && kept_of(quick) == 0))
        return;
    gp__used_note(pool);
    gp__latch_lock(&quick->lock, GP__RANK_QUICK);
    for (uint32_t left = quick->kept; left != 0; left &= left - 1) {
        int i = __builtin_ctz(left);
        gone[count++] = quick->entries[i];
        erase(quick, i);
    }
    for (; all && quick->lent != 0;)
        erase(quick, __builtin_ctz(quick->lent));
    quick->open = quick->open && !all;
    gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    while (count > 0)
        end(pool, &gone[--count]);
}

void gp__quick_flush(gp_pool *pool, const gp_stream *stream)
{
    flush(pool, stream, false);
}

void gp__quick_flush_all(gp_pool *pool)
{
    for (const gp_stream *stream = pool->timeline.streams; stream != NULL; stream = stream->next)
        flush(pool, stream, false);
}

void gp__quick_lock(gp_pool *pool)
{
    gp__mutex_lock(&pool->lock);
    gp__quick_flush_all(pool);
}

void gp__quick_end(void *context, gp_stream *stream)
{
    flush(context, stream, true);
}

void gp__quick_end_all(gp_pool *pool)
{
    for (const gp_stream *stream = pool->timeline.streams; stream != NULL; stream = stream->next)
        flush(pool, stream, true);
}

/* ---- figures ------------------------------------------------------------------------------------ */

size_t gp__quick_kept_bytes(const gp_pool *pool)
{
    size_t bytes = 0;
    for (const gp_stream *stream = pool->timeline.streams; stream != NULL; stream = stream->next) {
        struct gp__quick *quick = list_of(stream);
        if (quick == NULL || kept_of(quick) == 0)
            continue;
        gp__latch_lock(&quick->lock, GP__RANK_QUICK);
        bytes += quick->kept_bytes;
        gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    }
    return bytes;
}

size_t gp__quick_least_bytes(const gp_pool *pool, size_t *kept)
{
    size_t bytes = 0;
    *kept = 0;
    for (const gp_stream *stream = pool->timeline.streams; stream != NULL; stream = stream->next) {
        struct gp__quick *quick = list_of(stream);
        if (quick == NULL || kept_of(quick) == 0)
            continue; /* nothing is kept, and so nothing was at least */
        gp__latch_lock(&quick->lock, GP__RANK_QUICK);
        bytes += quick->least_kept;
        *kept += quick->kept_bytes;
        quick->least_kept = quick->kept_bytes;
        gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    }
    return bytes;
}

#ifdef GP_TESTING
static bool is_sound(const struct gp__quick *quick, const gp_stream *stream, int i)
{
    const struct entry *entry = &quick->entries[i];
    uint32_t bit = UINT32_C(1) << i;
    return entry->span->known && entry->span->stream == stream &&
           entry->span->state == GP_SPAN_USED && entry->span->va == entry->va &&
           entry->span->bytes == entry->bytes && entry->span->flags == entry->flags &&
           (quick->by_va[hash(entry->va)] & bit) != 0 &&
           (quick->by_bytes[hash(entry->bytes)] & bit) != 0;
}

size_t gp__quick_count(const gp_pool *pool)
{
    size_t count = 0;
    bool sound = true;
    for (const gp_stream *stream = pool->timeline.streams; stream != NULL; stream = stream->next) {
        struct gp__quick *quick = list_of(stream);
        size_t kept_bytes = 0;
        if (quick == NULL)
            continue;
        gp__latch_lock(&quick->lock, GP__RANK_QUICK);
        for (uint32_t left = quick->kept | quick->lent; left != 0; left &= left - 1, count++) {
            int i = __builtin_ctz(left);
            sound = sound && is_sound(quick, stream, i);
            kept_bytes += (quick->kept >> i & 1) != 0 ? quick->entries[i].bytes : 0;
        }
        sound = sound && kept_bytes == quick->kept_bytes && (quick->kept & quick->lent) == 0;
        gp__latch_unlock(&quick->lock, GP__RANK_QUICK);
    }
    return sound ? count : SIZE_MAX;
}
#endif
