/* SPDX-License-Identifier: Apache-2.0
 *
 * A forked child: every call on a pool, a range or a stream of the parent's says so, or does nothing. The
 * pool's lock is held while the process forks, as it would be by a thread of the parent's, so a call that
 * takes it is reported by the lock witness.
 */
#include "child.h"
#include "vmm/pool.h"

#define PAGE ((size_t)2 << 20)

struct parent {
    gp_pool *pool;
    gp_stream *stream;
    gp_range *range;
    uintptr_t block;
};

static bool is_forked(gp_status status, const gp_error *error)
{
    return status == GP_ERR_STATE && error->reason == GP_REASON_FORKED;
}

#define FORKED(call)                                                                               \
    do {                                                                                           \
        memset(&error, 0, sizeof error);                                                           \
        if (!is_forked(call, &error))                                                              \
            return false;                                                                          \
    } while (0)

static bool blocks_say_so(void *context)
{
    struct parent *p = context;
    gp_error error;
    gp_stream *stream = NULL;
    uintptr_t out = 0;

    FORKED(gp_pool_malloc(p->pool, 512, p->stream, 0, &out, &error));
    FORKED(gp_pool_try_malloc(p->pool, 512, p->stream, 0, &out, &error));
    FORKED(gp_pool_free(p->pool, p->block, NULL, 0, &error));
    FORKED(gp_pool_record_stream(p->pool, p->block, p->stream, &error));
    FORKED(gp_pool_pin(p->pool, p->block, true, &error));
    FORKED(gp_pool_stream(p->pool, 0, &stream, &error));
    FORKED(gp_pool_block_stream(p->pool, p->block, &stream, &error));
    gp_pool_unpin(p->pool, p->block);
    gp_pool_abandon(p->pool, p->block, 0);
    return out == 0 && stream == NULL;
}

static bool work_says_so(void *context)
{
    struct parent *p = context;
    gp_error error;

    FORKED(gp_pool_copy(p->pool, p->block, p->block + 256, 16, p->stream, &error));
    FORKED(gp_pool_fill(p->pool, p->block, 16, 0, p->stream, &error));
    FORKED(gp_pool_synchronize(p->pool, p->stream, false, &error));
    FORKED(gp_pool_join(p->pool, p->stream, p->stream, &error));
    FORKED(gp_pool_forget_stream(p->pool, gp_stream_handle(p->stream), &error));
    return true;
}

static bool ranges_say_so(void *context)
{
    struct parent *p = context;
    const gp_interval part = {0, PAGE};
    gp_interval found;
    gp_error error;
    gp_range *range = NULL;

    FORKED(gp_range_create(p->pool, PAGE, p->stream, &range, &error));
    FORKED(gp_range_commit(p->range, &part, 1, NULL, NULL, &error));
    FORKED(gp_range_decommit(p->range, &part, 1, NULL, 0, NULL, &error));
    FORKED(gp_range_resize(p->range, 2 * PAGE, NULL, 0, NULL, &error));
    FORKED(gp_range_record_stream(p->range, p->stream, &error));
    FORKED(gp_range_pin(p->range, 0, 512, true, &error));
    FORKED(gp_range_close(p->range, NULL, &error));
    gp_range_unpin(p->range, 0, 512);
    gp_range_release(gp_range_retain(p->range));
    return range == NULL && gp_range_size(p->range) == PAGE &&
           gp_range_committed_bytes(p->range) == PAGE && gp_range_physical_bytes(p->range) == 0 &&
           gp_range_committed(p->range, &found, 1) == 0 && !gp_range_is_closed(p->range);
}

static bool pools_say_so(void *context)
{
    struct parent *p = context;
    gp_pool_snapshot snapshot;
    gp_pool_stats stats;
    gp_error error;

    FORKED(gp_pool_trim(p->pool, 0, 0, NULL, &error));
    FORKED(gp_pool_trim(p->pool, 0, GP_TRIM_NO_WAIT, NULL, &error));
    FORKED(gp_pool_drain(p->pool, &error));
    FORKED(gp_pool_set_limit(p->pool, PAGE, NULL, &error));
    FORKED(gp_pool_return_unreturned(p->pool, NULL, &error));
    FORKED(gp_pool_take_snapshot(p->pool, &snapshot, &error));
    FORKED(gp_pool_finish(p->pool, &error));
    FORKED(gp_pool_close(p->pool, &error));
    gp_pool_reset_peak_stats(p->pool);
    gp_pool_get_stats(p->pool, &stats);
    gp_pool_release(p->pool);
    return stats.used_bytes == PAGE + 512 && gp_pool_unreturned(p->pool, NULL, 0) == 0 &&
           !gp_pool_is_closed(p->pool);
}

static bool (*const bodies[])(void *) = {blocks_say_so, work_says_so, ranges_say_so, pools_say_so};

static void every_call_in_a_forked_child_says_so(void **state)
{
    struct parent p = {0};
    gp_error error = {0};
    gp_pool_options options = {.limit = GP_NO_LIMIT, .chunk_size = PAGE};

    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &options.device, &error), &error);
    CHECK_OK(gp_pool_create(&options, &p.pool, &error), &error);
    CHECK_OK(gp_pool_stream(p.pool, 0, &p.stream, &error), &error);
    CHECK_OK(gp_pool_malloc(p.pool, 512, p.stream, 0, &p.block, &error), &error);
    CHECK_OK(gp_range_create(p.pool, 4 * PAGE, p.stream, &p.range, &error), &error);
    CHECK_OK(gp_range_resize(p.range, PAGE, NULL, 0, NULL, &error), &error);
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        gp__mutex_lock(&p.pool->lock);
        int status = in_child(bodies[i], &p);
        gp__mutex_unlock(&p.pool->lock);
        CHECK(status == 0, "child %zu ended with %#x", i, (unsigned)status);
    }
    CHECK_OK(gp_pool_free(p.pool, p.block, NULL, 0, &error), &error);
    gp_range_release(p.range);
    gp_stream_release(p.stream);
    CHECK_OK(gp_pool_close(p.pool, &error), &error);
    gp_pool_release(p.pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_in_a_forked_child_says_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
