/* SPDX-License-Identifier: Apache-2.0
 *
 * A cache that grows with every sequence, as language models keep one: each sequence has addresses for
 * its longest case, one behind the other in a range, and memory only behind those it has come to. A
 * sequence is contiguous, nothing is copied when it grows, and what it held is back when it finishes.
 */
#include <growpool/growpool.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

enum {
    SLOTS = 16, /* sequences at a time */
    SEQUENCES = 48, /* in all */
    TOKEN_BYTES = 64 * 1024,
    MOST_TOKENS = 512
};

#define SLOT_BYTES ((size_t)MOST_TOKENS * TOKEN_BYTES)

struct sequence {
    bool active;
    int tokens; /* so far */
    int last; /* how long it will get */
    size_t committed; /* bytes, from the start of its slot */
};

struct cache {
    gp_range *range;
    size_t page;
    struct sequence slots[SLOTS];
    int started, finished;
};

static void must(gp_status status, const gp_error *error)
{
    if (status == GP_OK)
        return;
    fprintf(stderr, "kv_cache: %s: %s\n", gp_status_text(status), error->message);
    exit(1);
}

/* The same lengths on every run. */
static int next_length(void)
{
    static unsigned seed = 1;
    seed = seed * 1103515245U + 12345U;
    return 32 + (int)(seed >> 16) % (MOST_TOKENS - 32);
}

static void start_sequences(struct cache *cache)
{
    for (int i = 0; i < SLOTS && cache->started < SEQUENCES; i++) {
        if (cache->slots[i].active)
            continue;
        cache->slots[i] = (struct sequence){.active = true, .last = next_length()};
        cache->started++;
    }
}

/* One more token for every sequence. Those that come to a new page ask for it all together. */
static void grow_sequences(struct cache *cache)
{
    gp_error error = {0};
    gp_interval wanted[SLOTS];
    size_t count = 0;
    for (size_t i = 0; i < SLOTS; i++) {
        struct sequence *sequence = &cache->slots[i];
        if (!sequence->active)
            continue;
        sequence->tokens++;
        if ((size_t)sequence->tokens * TOKEN_BYTES > sequence->committed) {
            wanted[count++] = (gp_interval){i * SLOT_BYTES + sequence->committed, cache->page};
            sequence->committed += cache->page;
        }
    }
    must(gp_range_commit(cache->range, wanted, count, NULL, NULL, &error), &error);
}

static void write_tokens(struct cache *cache)
{
    for (size_t i = 0; i < SLOTS; i++) {
        const struct sequence *sequence = &cache->slots[i];
        if (!sequence->active)
            continue;
        size_t offset = i * SLOT_BYTES + (size_t)(sequence->tokens - 1) * TOKEN_BYTES;
        memset((char *)gp_range_address(cache->range) + offset, sequence->tokens, TOKEN_BYTES);
    }
}

/* The pages of every sequence that is done go back with one call. */
static void finish_sequences(struct cache *cache)
{
    gp_error error = {0};
    gp_release_result result = {0};
    gp_interval done[SLOTS];
    size_t count = 0;
    for (size_t i = 0; i < SLOTS; i++) {
        struct sequence *sequence = &cache->slots[i];
        if (!sequence->active || sequence->tokens < sequence->last)
            continue;
        done[count++] = (gp_interval){i * SLOT_BYTES, sequence->committed};
        sequence->active = false;
        cache->finished++;
    }
    must(gp_range_decommit(cache->range, done, count, NULL, 0, &result, &error), &error);
}

static void run(struct cache *cache, gp_pool *pool)
{
    for (int step = 0; cache->finished < SEQUENCES; step++) {
        start_sequences(cache);
        grow_sequences(cache);
        write_tokens(cache);
        finish_sequences(cache);
        if (step % 100 == 0)
            printf("step %4d: %2d finished, %4zu MiB committed\n", step, cache->finished,
                   gp_range_committed_bytes(cache->range) / MIB);
    }
    gp_pool_stats stats;
    gp_pool_get_stats(pool, &stats);
    printf("%d sequences finished; the most memory at a time was %zu MiB of %zu MiB of addresses\n",
           cache->finished, stats.peak_physical_bytes / MIB, SLOTS * SLOT_BYTES / MIB);
    printf("%zu MiB are left\n", stats.physical_bytes / MIB);
}

int main(void)
{
    gp_error error = {0};
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    gp_pool_options options = {.name = "kv", .limit = GP_NO_LIMIT};
    must(gp_device_open(GP_DEVICE_HOST, 0, &options.device, &error), &error);
    /* Chunks of one page each, so that every page can go back by itself. */
    options.chunk_size = gp_device_granularity(options.device);
    must(gp_pool_create(&options, &pool, &error), &error);
    must(gp_pool_stream(pool, 0, &stream, &error), &error);

    struct cache cache = {0};
    must(gp_range_create(pool, SLOTS * SLOT_BYTES, stream, &cache.range, &error), &error);
    cache.page = gp_range_granularity(cache.range);
    run(&cache, pool);

    must(gp_range_close(cache.range, NULL, &error), &error);
    gp_range_release(cache.range);
    must(gp_pool_close(pool, &error), &error);
    gp_stream_release(stream);
    gp_pool_release(pool);
    return 0;
}
