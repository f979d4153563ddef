/* SPDX-License-Identifier: Apache-2.0
 *
 * A pool and its backing: refusals, answers that are wrong, failures of its own, chunks it will not take
 * back, calls back into the pool, undo steps that fail, and the reaper. Cases of others' bug reports are
 * named as project and number.
 *
 * Mutations that this file catches: leaving out the roll-back (every_k_of_n_is_undone), forgetting to
 * poison a pool (a_failed_undo_poisons_the_pool), calling the backing under a lock (the lock witness).
 */
#include "tests/support/model.h"

#include <time.h>

#define MIB CHECK_MIB

static struct world world;

static int set_up(void **state)
{
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB});
    world_open(&world);
    *state = &world;
    return 0;
}

static int set_up_planned(void **state)
{
    world_begin(&world, NULL);
    world_open(&world);
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    world_end(*state);
    return 0;
}

static void check_all(void)
{
    char message[400];

    CHECK(checker_compare(&world, message, sizeof message), "%s", message);
}

static gp_status try_malloc_on(size_t bytes, int s, uintptr_t *va)
{
    return gp_pool_malloc(world.pool, bytes, world.stream[s], 0, va, &world.error);
}

/* ---- refusals ---- */

static bool refuse_all(struct world *unused, size_t size)
{
    (void)unused;
    (void)size;
    return true;
}

static bool refuse_large(struct world *unused, size_t size)
{
    (void)unused;
    return size > 4 * MIB;
}

static void twelve_refusals_are_enough(void **state)
{
    uintptr_t va = 0, idle = world_malloc(&world, 2 * MIB, 0);

    (void)state;
    world_free(&world, idle, -1);
    world.refuse = refuse_all;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, try_malloc_on(100 * MIB, 0, &va), NULL);
    CHECK(world.refusals <= 12, "the backing was asked %llu times in vain",
          (unsigned long long)world.refusals);
    CHECK(world.refusals >= 2, "one refusal is no reason to give up");
    assert_int_equal(world.error.size, 100 * MIB);
    assert_int_equal(world_stats(&world).callback_errors, 0);
    check_all();
    world.refuse = NULL;
    world_malloc(&world, 100 * MIB, 0);
}

/* With idle memory to give back and a stream to wait for, halving chunks of a gigabyte would go on for a
 * thirteenth: the bound is what ends it. */
static void the_twelfth_refusal_is_the_last(void **state)
{
    uintptr_t va = 0, idle = world_malloc(&world, 512 * MIB, 0);
    uintptr_t used = world_malloc(&world, 512, 1), busy = world_malloc(&world, MIB, 1);

    (void)state;
    world_launch(&world, 1, busy, MIB);
    world_free(&world, busy, -1);
    world_free(&world, idle, -1);
    world.refuse = refuse_all;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, try_malloc_on(16384 * MIB, 0, &va), NULL);
    assert_int_equal(world.refusals, 12 - refusals());
    check_all();
    world_free(&world, used, -1);
}

/* A backing that has no large chunks left serves a large request in small ones. */
static void large_chunks_refused_small_ones_serve(void **state)
{
    (void)state;
    world.refuse = refuse_large;
    world_malloc(&world, 40 * MIB, 0);
    CHECK(world.refusals <= 12, "%llu refusals", (unsigned long long)world.refusals);
    CHECK(world_stats(&world).chunk_count >= 10, "%llu chunks",
          (unsigned long long)world_stats(&world).chunk_count);
    check_all();
}

/* Idle memory goes back before the pool gives up: the device has only so much. */
static void idle_memory_helps_a_full_device(void **state)
{
    uintptr_t va[3];

    (void)state;
    gp__sim_set_memory(world.sim, 6 * MIB);
    for (int i = 0; i < 3; i++)
        va[i] = world_malloc(&world, 2 * MIB, 0);
    world_free(&world, va[0], -1);
    world_free(&world, va[2], -1);
    world_malloc(&world, 4 * MIB, 1);
    assert_int_equal(world_stats(&world).physical_bytes, 6 * MIB);
    check_all();
}

/* kvcached 262: another process takes the memory between the question and the act. */
static void a_device_that_fills_up_is_a_typed_error(void **state)
{
    uintptr_t va = 7;

    (void)state;
    gp__sim_set_memory(world.sim, 5 * MIB);
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, try_malloc_on(6 * MIB, 0, &va), NULL);
    assert_int_equal(va, 7);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_ledger(&world).physical_bytes, 0);
    check_all();
}

/* ---- failures and wrong answers ---- */

/* kvcached 372: a failure that is not about memory reaches the caller unchanged, at once. */
static void other_failures_pass_through(void **state)
{
    const gp_status statuses[] = {GP_ERR_CALLBACK, GP_ERR_CONTRACT_TYPE, GP_ERR_DRIVER,
                                  GP_ERR_HOST_MEMORY, GP_ERR_UNAVAILABLE};
    uintptr_t va = 0;

    (void)state;
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        uint64_t asked = world.alloc_calls;

        world.alloc_status = statuses[i];
        CHECK_STATUS(statuses[i], try_malloc_on(3 * MIB, 0, &va), NULL);
        CHECK(strstr(world.error.message, "as told") != NULL, "\"%s\"", world.error.message);
        assert_int_equal(world.alloc_calls, asked + 1);
        assert_int_equal(world_stats(&world).callback_errors, i + 1);
        assert_int_equal(world_stats(&world).physical_bytes, 0);
        check_all();
    }
    world.alloc_status = GP_OK;
    world_malloc(&world, 3 * MIB, 0);
}

static gp_chunk *kept_chunk;

static gp_status answer_kept(struct world *unused, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    (void)unused;
    (void)request;
    (void)error;
    *out = gp_chunk_retain(kept_chunk);
    return GP_OK;
}

static void expect_refused_answer(const char *what)
{
    uintptr_t va = 0;

    world.answer = answer_kept;
    CHECK_STATUS(GP_ERR_CONTRACT_VALUE, try_malloc_on(2 * MIB, 0, &va), NULL);
    CHECK(world.error.message[0] != '\0', "%s: no words", what);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    CHECK(!gp_chunk_is_in_use(kept_chunk), "%s: the pool kept the chunk", what);
    world.answer = NULL;
    check_all();
}

static void wrong_chunks_are_refused_and_stay_the_callers(void **state)
{
    gp__sim *other = gp__sim_create(NULL);

    (void)state;
    CHECK_OK(gp_chunk_create(world.device, 4 * MIB, GP_LOCATION_DEVICE, 0, &kept_chunk, NULL),
             NULL);
    world.supplied_chunks = 1; /* the device holds it, the pool never does */
    world.supplied_bytes = 0;
    {
        uintptr_t va = 0;

        world.answer = answer_kept;
        CHECK_STATUS(GP_ERR_CONTRACT_VALUE, try_malloc_on(2 * MIB, 0, &va), NULL);
        assert_false(gp_chunk_is_in_use(kept_chunk));
    }
    gp_chunk_release(kept_chunk);
    world.supplied_chunks = 0;
    CHECK_OK(gp_chunk_create(world.device, 2 * MIB, GP_LOCATION_DEVICE, 0, &kept_chunk, NULL),
             NULL);
    CHECK_OK(gp_chunk_close(kept_chunk, NULL), NULL);
    expect_refused_answer("closed");
    gp_chunk_release(kept_chunk);
    CHECK_OK(
        gp_chunk_create(gp__sim_device(other), 2 * MIB, GP_LOCATION_DEVICE, 0, &kept_chunk, NULL),
        NULL);
    expect_refused_answer("other device");
    gp_chunk_release(kept_chunk);
    gp__sim_destroy(other);
}

static gp_status answer_first_again(struct world *w, const gp_request *request, gp_chunk **out,
                                    gp_error *error)
{
    if (kept_chunk != NULL)
        return answer_kept(w, request, out, error);
    CHECK_OK(gp_backing_alloc(w->inner, request, &kept_chunk, error), error);
    w->supplied_bytes += request->size;
    w->supplied_chunks++;
    *out = gp_chunk_retain(kept_chunk);
    return GP_OK;
}

/* The same chunk twice: the second time it is in use, and the first use is undone with the request. */
static void a_chunk_cannot_be_supplied_twice(void **state)
{
    uintptr_t va = 0;

    (void)state;
    kept_chunk = NULL;
    world.answer = answer_first_again;
    CHECK_STATUS(GP_ERR_CONTRACT_VALUE, try_malloc_on(4 * MIB, 0, &va), NULL);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world.free_calls, 1);
    assert_false(gp_chunk_is_in_use(kept_chunk));
    world.answer = NULL;
    gp_chunk_release(kept_chunk);
    check_all();
}

/* pytorch 188008: for every k of n chunks and every call, a failure undoes everything. */
static void every_k_of_n_is_undone(void **state)
{
    uintptr_t va = 0;
    bool ok = false;

    (void)state;
    for (uint64_t n = 1; !ok; n++) {
        gp__sim_fail_at(world.sim, n, false);
        ok = try_malloc_on(10 * MIB, 0, &va) == GP_OK && gp__sim_faults_fired(world.sim) == 0;
        gp__sim_fail_at(world.sim, 0, false);
        CHECK(n < 500, "the growth never got through");
        if (!ok && va != 0)
            world_free(&world, va, -1);
        if (!ok) {
            size_t released;

            CHECK_OK(gp_pool_return_unreturned(world.pool, NULL, NULL), NULL);
            CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
            assert_int_equal(world_ledger(&world).physical_bytes, 0);
            assert_int_equal(world_stats(&world).physical_bytes, 0);
            va = 0;
        }
    }
    check_all();
}

/* Paddle 79479: a failure inside the undo is counted, the pool stays consistent, stops growing, and
 * still hands out and takes back what it has. */
static void a_failed_undo_poisons_the_pool(void **state)
{
    uintptr_t live = world_malloc(&world, MIB, 0), va = 0;
    gp_pool_stats stats = {0};

    (void)state;
    for (uint64_t n = 1; n < 200 && stats.abandoned_bytes == 0; n++) {
        gp__sim_fail_at(world.sim, n, true);
        CHECK(try_malloc_on(4 * MIB, 0, &va) != GP_OK, "worked while everything fails");
        gp__sim_fail_at(world.sim, 0, false);
        CHECK_OK(gp_pool_return_unreturned(world.pool, NULL, NULL), NULL);
        stats = world_stats(&world);
        check_all();
    }
    CHECK(stats.abandoned_bytes > 0, "no undo failed");
    assert_int_equal(stats.physical_bytes, 2 * MIB + stats.abandoned_bytes);
    CHECK_STATUS(GP_ERR_STATE, try_malloc_on(4 * MIB, 0, &va), NULL);
    assert_int_equal(world.error.reason, GP_REASON_POISONED);
    va = world_malloc(&world, 4096, 0);
    world_free(&world, va, -1);
    world_free(&world, live, -1);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    stats = world_stats(&world);
    assert_int_equal(stats.physical_bytes, stats.abandoned_bytes);
    assert_int_equal(world_ledger(&world).mapped_bytes, stats.abandoned_bytes);
    assert_int_equal(world_ledger(&world).reserved_bytes, stats.address_bytes);
    check_all();
}

static int tear_down_leftovers(void **state)
{
    world_abandon(*state);
    return 0;
}

/* ---- giving back ---- */

static bool fail_all(struct world *unused, size_t size)
{
    (void)unused;
    (void)size;
    return true;
}

static void chunks_that_cannot_go_back_are_kept_and_named(void **state)
{
    uintptr_t a = world_malloc(&world, 4 * MIB, 1);
    gp_chunk *chunks[4] = {NULL};
    size_t released = 0, returned = 0;

    (void)state;
    world_free(&world, a, -1);
    world.fail_free = fail_all;
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    assert_int_equal(released, 0);
    assert_int_equal(world_stats(&world).unreturned_bytes, 4 * MIB);
    assert_int_equal(world_stats(&world).callback_errors, 2);
    assert_int_equal(world.free_calls,
                     2); /* one failure does not keep the other from being tried */
    assert_int_equal(gp_pool_unreturned(world.pool, chunks, 1), 2);
    assert_int_equal(gp_chunk_size(chunks[0]), 2 * MIB);
    gp_chunk_release(chunks[0]);
    CHECK_OK(gp_pool_return_unreturned(world.pool, &returned, NULL), NULL);
    assert_int_equal(returned, 0);
    check_all();
    world.fail_free = NULL;
    CHECK_OK(gp_pool_return_unreturned(world.pool, &returned, NULL), NULL);
    assert_int_equal(returned, 4 * MIB);
    assert_int_equal(world_stats(&world).unreturned_bytes, 0);
    assert_int_equal(world_stats(&world).physical_bytes, 0);
}

static void free_is_told_the_stream_of_the_growth(void **state)
{
    uintptr_t va = world_malloc(&world, 2 * MIB, 3);
    size_t released = 0;

    (void)state;
    world_free(&world, va, 1);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, NULL), NULL);
    assert_int_equal(world.last_free_stream, world.handle[3]);
}

/* ---- calls from inside ---- */

static gp_status inner_status[4];
static uintptr_t inner_block;

static void call_back(struct world *w)
{
    size_t released = 0;
    uintptr_t va = 0;

    inner_status[0] = gp_pool_malloc(w->pool, 64 * MIB, w->stream[0], 0, &va, NULL);
    inner_status[1] = gp_pool_trim(w->pool, 0, 0, &released, NULL);
    inner_status[2] = gp_pool_close(w->pool, NULL);
    inner_status[3] = gp_pool_drain(w->pool, NULL);
    if (inner_block != 0)
        CHECK_OK(gp_pool_free(w->pool, inner_block, NULL, 0, &w->error), &w->error);
    inner_block = 0;
    world_stats(w);
}

static bool call_back_on_alloc(struct world *w, size_t size)
{
    (void)size;
    call_back(w);
    return false;
}

static void call_back_on_free(struct world *w, const gp_request *request)
{
    (void)request;
    call_back(w);
}

static void expect_reentrant(void)
{
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(GP_ERR_REENTRANT, inner_status[i], NULL);
        inner_status[i] = GP_OK;
    }
}

static void a_callback_may_free_but_not_grow(void **state)
{
    uintptr_t va;
    size_t released = 0;

    (void)state;
    inner_block = world_malloc(&world, 512, 0);
    world.refuse = call_back_on_alloc;
    va = world_malloc(&world, 4 * MIB, 0);
    expect_reentrant();
    assert_int_equal(world_stats(&world).used_bytes, 4 * MIB);
    world.refuse = NULL;
    inner_block = world_malloc(&world, 512, 0);
    world_free(&world, va, -1);
    world.before_free = call_back_on_free;
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, &released, &world.error), &world.error);
    expect_reentrant();
    world.before_free = NULL;
    check_all();
}

/* ---- the reaper ---- */

static bool eventually(bool (*condition)(void))
{
    for (int i = 0; i < 5000; i++) {
        if (condition())
            return true;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return false;
}

static bool all_returned(void)
{
    gp__sim_complete_all(world.sim);
    return world_ledger(&world).physical_bytes == 0;
}

static bool all_gone(void)
{
    return all_returned() && world_ledger(&world).reserved_bytes == 0 &&
           world_ledger(&world).event_count == 0;
}

static int set_up_reaper(void **state)
{
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB, .with_reaper = true});
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    world_open(&world);
    *state = &world;
    return 0;
}

static void the_reaper_gives_back_what_passed(void **state)
{
    size_t released = 0;

    (void)state;
    for (int round = 0; round < 5; round++) {
        uintptr_t va = world_malloc(&world, 6 * MIB, round % WORLD_STREAMS);

        world_launch(&world, round % WORLD_STREAMS, va, 6 * MIB);
        world_free(&world, va, -1);
        CHECK_OK(gp_pool_trim(world.pool, 0, GP_TRIM_NO_WAIT, &released, NULL), NULL);
        assert_int_equal(released, 6 * MIB);
        CHECK(eventually(all_returned), "%zu bytes are still out",
              world_stats(&world).physical_bytes);
    }
    CHECK_OK(gp_pool_drain(world.pool, NULL), NULL);
    check_all();
}

static void the_reaper_closes_what_was_let_go(void **state)
{
    uintptr_t va = world_malloc(&world, 6 * MIB, 0);

    (void)state;
    world_launch(&world, 0, va, 6 * MIB);
    for (int s = 0; s < WORLD_STREAMS; s++) {
        gp_stream_release(world.stream[s]);
        world.stream[s] = NULL;
    }
    gp_pool_release(world.pool);
    world.pool = NULL;
    CHECK(eventually(all_gone), "an orphaned pool was never closed");
    nanosleep(&(struct timespec){0, 20000000},
              NULL); /* the reaper frees the pool itself after that */
}

#define TEST(name)         cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_PLANNED(name) cmocka_unit_test_setup_teardown(name, set_up_planned, tear_down)
#define TEST_REAPER(name)  cmocka_unit_test_setup_teardown(name, set_up_reaper, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST_PLANNED(twelve_refusals_are_enough),
        TEST_PLANNED(the_twelfth_refusal_is_the_last),
        TEST_PLANNED(large_chunks_refused_small_ones_serve),
        TEST(idle_memory_helps_a_full_device),
        TEST(a_device_that_fills_up_is_a_typed_error),
        TEST(other_failures_pass_through),
        TEST(wrong_chunks_are_refused_and_stay_the_callers),
        TEST(a_chunk_cannot_be_supplied_twice),
        TEST(every_k_of_n_is_undone),
        cmocka_unit_test_setup_teardown(a_failed_undo_poisons_the_pool, set_up,
                                        tear_down_leftovers),
        TEST(chunks_that_cannot_go_back_are_kept_and_named),
        TEST(free_is_told_the_stream_of_the_growth),
        TEST(a_callback_may_free_but_not_grow),
        TEST_REAPER(the_reaper_gives_back_what_passed),
        TEST_REAPER(the_reaper_closes_what_was_let_go),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
