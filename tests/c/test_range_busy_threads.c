/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls on one range that meet: the backing's callback is the place where a second thread, or the
 * same one, comes in between. Every meeting is arranged, none is left to chance.
 */
#include <sched.h>

#include "range_case.h"
#include "vmm/pool.h"

/* What the callback does once, and in which thread. */
struct meeting {
    void (*act)(gp_range *range);
    gp_range *range;
    bool same_thread;
};

static struct meeting meeting;

static void *run_act(void *unused)
{
    (void)unused;
    meeting.act(meeting.range);
    return NULL;
}

static void meet(void)
{
    void (*act)(gp_range *) = meeting.act;
    pthread_t thread;

    if (act == NULL)
        return;
    if (meeting.same_thread) {
        meeting.act = NULL;
        act(meeting.range);
        return;
    }
    CHECK(pthread_create(&thread, NULL, run_act, NULL) == 0, "no thread");
    pthread_join(thread, NULL);
    meeting.act = NULL;
}

static gp_status answer(struct world *unused, const gp_request *request, gp_chunk **out,
                        gp_error *error)
{
    gp_status status;

    (void)unused;
    meet();
    status = gp_backing_alloc(world.inner, request, out, error);
    if (status == GP_OK) {
        __atomic_add_fetch(&world.supplied_bytes, request->size, __ATOMIC_RELAXED);
        __atomic_add_fetch(&world.supplied_chunks, 1, __ATOMIC_RELAXED);
    }
    return status;
}

static void meet_in_alloc(gp_range *range, void (*act)(gp_range *), bool same_thread)
{
    meeting = (struct meeting){act, range, same_thread};
    world.answer = answer;
}

/* Statuses are compared in the thread that runs the test: a failed check leaves by longjmp. */
static struct {
    gp_status status[8];
    gp_reason reason[8];
    size_t count;
} seen;

static void note(gp_status status, const gp_error *error)
{
    seen.status[seen.count] = status;
    seen.reason[seen.count++] = status == GP_OK ? GP_REASON_NONE : error->reason;
}

static void expect_seen(size_t i, gp_status status, gp_reason reason)
{
    CHECK(i < seen.count && seen.status[i] == status && seen.reason[i] == reason,
          "call %zu of %zu: %s, reason %d", i, seen.count, gp_status_text(seen.status[i]),
          (int)seen.reason[i]);
}

static int set_up_meeting(void **state)
{
    memset(&seen, 0, sizeof seen);
    return set_up(state);
}

static int set_up_meeting_planned(void **state)
{
    memset(&seen, 0, sizeof seen);
    return set_up_planned(state);
}

static void commit_part(gp_range *range, size_t first, size_t count)
{
    gp_interval part = {first * PAGE, count * PAGE};
    gp_error error = {0};

    note(gp_range_commit(range, &part, 1, world.stream[1], NULL, &error), &error);
}

static void decommit_part(gp_range *range, size_t first, size_t count, unsigned flags)
{
    gp_interval part = {first * PAGE, count * PAGE};
    gp_error error = {0};

    note(gp_range_decommit(range, &part, 1, NULL, flags, NULL, &error), &error);
}

/* ---- two threads ---- */

static void commit_overlapping_parts(gp_range *range)
{
    meeting.act = NULL; /* the callbacks of this thread just serve */
    commit_part(range, 3, 2);
    commit_part(range, 0, 8);
    decommit_part(range, 2, 1, 0);
    decommit_part(range, 2, 1, GP_TRIM_NO_WAIT);
    commit_part(range, 6, 2);
    decommit_part(range, 4, 3, 0);
}

static void the_same_part_is_busy_and_another_is_not(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    meet_in_alloc(range, commit_overlapping_parts, false);
    assert_int_equal(commit(range, 2, 2, -1), 2);
    for (size_t i = 0; i < 4; i++)
        expect_seen(i, GP_ERR_STATE, GP_REASON_BUSY);
    expect_seen(4, GP_OK, GP_REASON_NONE);
    expect_seen(5, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    expect_committed(range, "..##...#");
    end_range(range);
}

static void resize_too(gp_range *range)
{
    gp_error error = {0};

    meeting.act = NULL;
    note(gp_range_resize(range, PAGE, world.stream[1], 0, NULL, &error), &error);
    note(gp_range_resize(range, 0, NULL, GP_TRIM_NO_WAIT, NULL, &error), &error);
    commit_part(range, 6, 1);
}

static void two_resizes_are_busy(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    meet_in_alloc(range, resize_too, false);
    CHECK_OK(gp_range_resize(range, 3 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    expect_seen(0, GP_ERR_STATE, GP_REASON_BUSY);
    expect_seen(1, GP_ERR_STATE, GP_REASON_BUSY);
    expect_seen(2, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    assert_int_equal(gp_range_size(range), 3 * PAGE);
    expect_committed(range, "###...#");
    CHECK_OK(gp_range_resize(range, PAGE, NULL, 0, NULL, &world.error), &world.error);
    expect_committed(range, "#");
    end_range(range);
}

/* A cut chunk of which another thread is committing a part is not given back with the rest. */
static void decommit_the_rest(gp_range *range)
{
    meeting.act = NULL;
    decommit_part(range, 0, 2, 0);
}

static void a_claimed_rest_keeps_its_chunk(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 4, -1);
    decommit(range, 2, 2, 0, 0, 2);
    meet_in_alloc(range, decommit_the_rest, false);
    assert_int_equal(commit(range, 2, 3, -1), 3); /* two kept pages and a new one */
    expect_seen(0, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    expect_committed(range, "..###");
    assert_int_equal(gp_range_physical_bytes(range), 5 * PAGE);
    end_range(range);
}

static void close_range(gp_range *range)
{
    gp_error error = {0};

    note(gp_range_close(range, NULL, &error), &error);
}

static void closing_under_a_commit_undoes_it(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 1, -1);
    meet_in_alloc(range, close_range, false);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 0, 4, -1), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    expect_seen(0, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    check_all();
    drain();
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    gp_range_release(range);
}

/* With nothing else mapped the undo is what buries the range. */
static void the_undo_buries_a_closed_range(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    meet_in_alloc(range, close_range, true); /* closing is allowed in the own callback */
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 0, 4, -1), NULL);
    expect_seen(0, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    check_all();
    gp_range_release(range);
}

/* The rest of a cut chunk was claimed when the range closed: it goes too. */
static void closing_under_a_commit_leaves_no_cut_chunk(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 4, -1);
    decommit(range, 1, 2, 0, 0, 2);
    meet_in_alloc(range, close_range, false);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 1, 5, -1), NULL);
    world.answer = NULL;
    check_all();
    drain();
    CHECK(world_stats(&world).physical_bytes == 0, "%zu bytes of a closed range stay mapped",
          world_stats(&world).physical_bytes);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    gp_range_release(range);
}

/* The pool cannot close before the grower is gone, and the grower learns of it. */
static bool closing_has_begun(void)
{
    return __atomic_load_n(&world.pool->closing, __ATOMIC_RELAXED);
}

static void *close_pool(void *unused)
{
    gp_error error = {0};

    (void)unused;
    note(gp_pool_close(world.pool, &error), &error);
    return NULL;
}

static pthread_t closer;

static void begin_closing_the_pool(gp_range *range)
{
    (void)range;
    CHECK(pthread_create(&closer, NULL, close_pool, NULL) == 0, "no thread");
    for (bool begun = false; !begun;) {
        gp__mutex_lock(&world.pool->lock);
        begun = closing_has_begun();
        gp__mutex_unlock(&world.pool->lock);
        sched_yield();
    }
}

static void closing_the_pool_under_a_commit_undoes_it(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 1, -1);
    meet_in_alloc(range, begin_closing_the_pool, true);
    CHECK_STATUS(GP_ERR_STATE, try_commit(range, 0, 4, -1), NULL);
    assert_int_equal(world.error.reason, GP_REASON_CLOSED);
    pthread_join(closer, NULL);
    expect_seen(0, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    assert_true(gp_range_is_closed(range));
    assert_int_equal(world_stats(&world).physical_bytes, 0);
    assert_int_equal(world_stats(&world).address_bytes, 0);
    gp_range_release(range);
}

/* ---- one thread, inside its own callback ---- */

static void try_everything(gp_range *range)
{
    gp_error error = {0};

    commit_part(range, 6, 1);
    decommit_part(range, 0, 1, 0);
    note(gp_range_resize(range, 2 * PAGE, NULL, 0, NULL, &error), &error);
    decommit_part(range, 0, 1, GP_TRIM_NO_WAIT); /* waits for nobody, so it is allowed */
    note(gp_range_record_stream(range, world.stream[2], &error), &error);
}

static void inside_the_own_callback_nothing_grows(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    meet_in_alloc(range, try_everything, true);
    assert_int_equal(commit(range, 3, 1, -1), 1);
    for (size_t i = 0; i < 3; i++)
        expect_seen(i, GP_ERR_REENTRANT, GP_REASON_NONE);
    expect_seen(3, GP_OK, GP_REASON_NONE);
    expect_seen(4, GP_OK, GP_REASON_NONE);
    world.answer = NULL;
    expect_committed(range, ".#.#");
    end_range(range);
}

static void release_range(gp_range *range)
{
    gp_range_release(range);
}

/* A finaliser may run anywhere: another range of the pool is dropped inside the callback. */
static void a_range_may_be_dropped_in_a_callback(void **state)
{
    gp_range *range = make_range(8, 0), *dropped = make_range(8, 1);

    (void)state;
    commit(dropped, 0, 3, -1);
    meet_in_alloc(dropped, release_range, true);
    assert_int_equal(commit(range, 0, 2, -1), 2);
    world.answer = NULL;
    expect_committed(range, "##");
    assert_int_equal(world_stats(&world).used_bytes, 2 * PAGE);
    drain();
    assert_int_equal(world_stats(&world).address_bytes, 8 * PAGE);
    end_range(range);
}

/* ---- memory that another thread is unmapping ---- */

/* The chunk is unmapped and on its way back to the backing: its addresses can be had already. */
static void before_free(struct world *unused, const gp_request *request)
{
    (void)unused;
    (void)request;
    meet();
}

static void commit_there(gp_range *range)
{
    meeting.act = NULL;
    commit_part(range, 0, 2);
}

static void addresses_are_free_before_the_chunk_is_back(void **state)
{
    gp_range *range = make_range(8, 0);

    (void)state;
    commit(range, 0, 2, -1);
    meeting = (struct meeting){commit_there, range, false};
    world.before_free = before_free;
    decommit(range, 0, 2, 0, 2, 0);
    expect_seen(0, GP_OK, GP_REASON_NONE);
    world.before_free = NULL;
    expect_committed(range, "##");
    end_range(range);
}

/* A decommit in another thread holds the chunks and waits for work; a commit of the same pages
 * waits for it, and gets fresh memory. The interrupt hook of the commit is what lets the work
 * finish. */
static pthread_t waiter;
static bool complete_when_asked;

static int interrupt(void *context)
{
    (void)context;
    if (__atomic_load_n(&complete_when_asked, __ATOMIC_ACQUIRE))
        gp__sim_complete_all(world.sim);
    return 0;
}

static void *wait_in_a_decommit(void *context)
{
    decommit_part(context, 0, 2, 0);
    return NULL;
}

static void a_commit_waits_for_memory_in_other_hands(void **state)
{
    gp_range *range;
    bool held = false;

    memset(&seen, 0, sizeof seen);
    complete_when_asked = false;
    begin_with(state, (struct world_options){.chunk_size = PAGE, .interrupted = interrupt});
    gp__sim_set_wait_mode(world.sim, GP__SIM_WAIT_TIMES_OUT);
    range = make_range(8, 0);
    commit(range, 0, 2, -1);
    world_launch(&world, 0, gp_range_address(range), 2 * PAGE);
    CHECK(pthread_create(&waiter, NULL, wait_in_a_decommit, range) == 0, "no thread");
    while (!held) {
        gp__mutex_lock(&world.pool->lock);
        held = world.pool->deliveries > 0;
        gp__mutex_unlock(&world.pool->lock);
        sched_yield();
    }
    __atomic_store_n(&complete_when_asked, true, __ATOMIC_RELEASE);
    assert_int_equal(commit(range, 0, 2, 1), 2);
    pthread_join(waiter, NULL);
    expect_seen(0, GP_OK, GP_REASON_NONE);
    expect_committed(range, "##");
    assert_int_equal(world.alloc_calls, 4);
    end_range(range);
}

#define TEST(name)         cmocka_unit_test_setup_teardown(name, set_up_meeting, tear_down)
#define TEST_PLANNED(name) cmocka_unit_test_setup_teardown(name, set_up_meeting_planned, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_same_part_is_busy_and_another_is_not),
        TEST(two_resizes_are_busy),
        TEST_PLANNED(a_claimed_rest_keeps_its_chunk),
        TEST(closing_under_a_commit_undoes_it),
        TEST(the_undo_buries_a_closed_range),
        TEST_PLANNED(closing_under_a_commit_leaves_no_cut_chunk),
        TEST(closing_the_pool_under_a_commit_undoes_it),
        TEST(inside_the_own_callback_nothing_grows),
        TEST(a_range_may_be_dropped_in_a_callback),
        TEST(addresses_are_free_before_the_chunk_is_back),
        cmocka_unit_test_setup_teardown(a_commit_waits_for_memory_in_other_hands, NULL, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
