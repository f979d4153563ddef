/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranges of real memory: what is written stays where it is while the range grows, shrinks and is
 * cut, and what was given back is out of reach. The host device's memory can be read and written
 * here.
 */
#include "child.h"
#include "host_case.h"

#include <pthread.h>

#include "backing/host_stream.h"
#include "backing/memory.h"
#include "vmm/growpool.h"
#include "vmm/pool.h"

static gp_pool *pool;
static gp_stream *stream;
static int64_t live_before;

static void open_pool(size_t chunk_size)
{
    gp_pool_options options = {.device = host,
                               .limit = GP_NO_LIMIT,
                               .chunk_size = chunk_size,
                               .address_space = 64 * PAGE,
                               .flags = GP_POOL_NO_REAPER};
    gp_error error;

    live_before = gp__memory_live();
    CHECK_OK(gp_pool_create(&options, &pool, &error), &error);
    CHECK_OK(gp_pool_stream(pool, 0, &stream, &error), &error);
}

static void close_pool(void)
{
    gp_error error;
    char message[256];

    CHECK(gp__pool_check(pool, message, sizeof message), "%s", message);
    gp_stream_release(stream);
    CHECK_OK(gp_pool_close(pool, &error), &error);
    gp_pool_release(pool);
}

/* Not where a stream's worker may still be ending. */
static void expect_all_freed(void)
{
    assert_int_equal(gp__memory_live(), live_before);
}

static gp_range *make_range(size_t pages)
{
    gp_range *range = NULL;
    gp_error error;

    CHECK_OK(gp_range_create(pool, pages * PAGE, stream, &range, &error), &error);
    return range;
}

static void resize(gp_range *range, size_t bytes)
{
    gp_error error;

    CHECK_OK(gp_range_resize(range, bytes, NULL, 0, NULL, &error), &error);
}

static void set_committed(gp_range *range, size_t first, size_t count, bool committed)
{
    gp_interval part = {first * PAGE, count * PAGE};
    gp_error error;

    CHECK_OK(committed ? gp_range_commit(range, &part, 1, NULL, NULL, &error)
                       : gp_range_decommit(range, &part, 1, NULL, 0, NULL, &error),
             &error);
}

static void growing_keeps_address_and_contents(void **state)
{
    gp_range *range;
    uintptr_t va;

    (void)state;
    open_pool(0);
    range = make_range(64);
    va = gp_range_address(range);
    for (size_t pages = 1; pages <= 64; pages *= 2) {
        resize(range, pages * PAGE);
        assert_int_equal(gp_range_address(range), va);
        for (size_t page = pages / 2; page < pages; page++)
            write_marks(va + page * PAGE, PAGE, (unsigned char)page);
        for (size_t page = 0; page < pages; page++)
            check_marks(va + page * PAGE, PAGE, (unsigned char)page);
    }
    resize(range, 20 * PAGE);
    for (size_t page = 0; page < 20; page++)
        check_marks(va + page * PAGE, PAGE, (unsigned char)page);
    resize(range, 30 * PAGE); /* of what was kept */
    for (size_t page = 0; page < 20; page++)
        check_marks(va + page * PAGE, PAGE, (unsigned char)page);
    gp_range_release(range);
    close_pool();
    expect_all_freed();
}

static void holes_are_out_of_reach_and_neighbours_stay(void **state)
{
    gp_range *range;
    uintptr_t va;

    (void)state;
    open_pool(PAGE);
    range = make_range(8);
    va = gp_range_address(range);
    assert_false(is_readable(va));
    set_committed(range, 1, 6, true);
    for (size_t page = 1; page < 7; page++)
        write_marks(va + page * PAGE, PAGE, (unsigned char)(page * 20));
    set_committed(range, 3, 2, false);
    for (size_t page = 0; page < 8; page++) {
        bool committed = page == 1 || page == 2 || page == 5 || page == 6;

        assert_int_equal(is_readable(va + page * PAGE), committed);
        if (committed)
            check_marks(va + page * PAGE, PAGE, (unsigned char)(page * 20));
    }
    assert_true(is_occupied(va, 8 * PAGE)); /* the addresses stay the range's */
    set_committed(range, 0, 8, true);
    check_marks(va + 2 * PAGE, PAGE, 40);
    check_marks(va + 5 * PAGE, PAGE, 100);
    assert_int_equal(*byte_at(va + 3 * PAGE), 0);
    gp_range_release(range);
    close_pool();
    expect_all_freed();
}

/* Pages cut out of a chunk are still mapped; committed again they are written like any others. */
static void cut_pages_come_back(void **state)
{
    gp_range *range;
    uintptr_t va;

    (void)state;
    open_pool(0);
    range = make_range(8);
    va = gp_range_address(range);
    set_committed(range, 0, 4, true);
    write_marks(va, PAGE, 1);
    write_marks(va + 3 * PAGE, PAGE, 60);
    set_committed(range, 1, 2, false);
    set_committed(range, 1, 4, true);
    *byte_at(va + PAGE) = 5;
    *byte_at(va + 5 * PAGE - 1) = 6;
    check_marks(va, PAGE, 1);
    check_marks(va + 3 * PAGE, PAGE, 60);
    gp_range_release(range);
    close_pool();
    expect_all_freed();
}

struct slow_write {
    pthread_mutex_t gate;
    uintptr_t va;
    size_t bytes;
};

static void write_slowly(void *context)
{
    struct slow_write *work = context;

    pthread_mutex_lock(&work->gate); /* until the decommit is under way */
    for (size_t at = 0; at < work->bytes; at += 4096)
        *byte_at(work->va + at) = 7;
    pthread_mutex_unlock(&work->gate);
}

/* vllm 43020, TensorRT-LLM 11641: a shrink and a close under queued work wait for it, or it would
 * fault. */
static void queued_work_is_waited_for(void **state)
{
    struct slow_write work = {.gate = PTHREAD_MUTEX_INITIALIZER, .bytes = 4 * PAGE};
    gp_host_stream *worker;
    gp_stream *its;
    gp_range *range;
    gp_error error;

    (void)state;
    open_pool(PAGE);
    CHECK_OK(gp_host_stream_create(&worker, &error), &error);
    CHECK_OK(gp_pool_stream(pool, (uintptr_t)gp_host_stream_id(worker), &its, &error), &error);
    for (int round = 0; round < 20; round++) {
        gp_interval all = {0, 4 * PAGE};

        range = make_range(4);
        set_committed(range, 0, 4, true);
        CHECK_OK(gp_range_record_stream(range, its, &error), &error);
        work.va = gp_range_address(range);
        pthread_mutex_lock(&work.gate);
        CHECK_OK(gp_host_stream_submit(worker, write_slowly, &work, &error), &error);
        if (round % 2 == 0) {
            CHECK_OK(gp_range_decommit(range, &all, 1, NULL, GP_TRIM_NO_WAIT, NULL, &error),
                     &error);
            pthread_mutex_unlock(&work.gate);
            set_committed(range, 0, 4, true); /* waits: two streams own what is there */
            *byte_at(work.va) = 1;
            CHECK_OK(gp_range_close(range, NULL, &error), &error);
        } else {
            CHECK_OK(gp_range_close(range, its, &error), &error);
            pthread_mutex_unlock(&work.gate);
        }
        gp_range_release(range);
        CHECK_OK(gp_pool_drain(pool, &error), &error);
    }
    gp_stream_release(its);
    gp_host_stream_close(worker);
    close_pool();
}

/* A child changes nothing of the parent's, and is told so; letting go there is harmless. */
static bool child_is_told(void *context)
{
    gp_range *range = context, *other = NULL;
    gp_interval part = {0, PAGE};
    gp_error error = {0};
    const gp_status statuses[] = {
        gp_range_create(pool, PAGE, stream, &other, &error),
        gp_range_commit(range, &part, 1, NULL, NULL, &error),
        gp_range_decommit(range, &part, 1, NULL, 0, NULL, &error),
        gp_range_resize(range, 0, NULL, GP_TRIM_NO_WAIT, NULL, &error),
        gp_range_pin(range, 0, 1, false, &error),
        gp_range_record_stream(range, stream, &error),
        gp_range_close(range, NULL, &error),
    };

    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i] != GP_ERR_STATE)
            return false;
    gp_range_unpin(range, 0, 512);
    gp_range_release(range);
    return error.reason == GP_REASON_FORKED && gp_range_size(range) == 2 * PAGE &&
           gp_range_committed_bytes(range) == 2 * PAGE && gp_range_committed(range, NULL, 0) == 0 &&
           *byte_at(gp_range_address(range)) == 1;
}

static void a_forked_child_cannot_use_a_range(void **state)
{
    gp_range *range;
    gp_error error;

    (void)state;
    open_pool(PAGE);
    range = make_range(8);
    resize(range, 2 * PAGE);
    write_marks(gp_range_address(range), PAGE, 1);
    CHECK_OK(gp_range_pin(range, 0, 512, false, &error), &error);
    assert_int_equal(in_child(child_is_told, range), 0);
    gp_range_unpin(range, 0, 512);
    check_marks(gp_range_address(range), PAGE, 1);
    gp_range_release(range);
    close_pool();
    expect_all_freed();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(growing_keeps_address_and_contents),
        cmocka_unit_test(holes_are_out_of_reach_and_neighbours_stay),
        cmocka_unit_test(cut_pages_come_back),
        cmocka_unit_test(a_forked_child_cannot_use_a_range),
        cmocka_unit_test(queued_work_is_waited_for),
    };
    return cmocka_run_group_tests(tests, open_host, NULL);
}
