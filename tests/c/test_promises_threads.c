/* SPDX-License-Identifier: Apache-2.0
 *
 * What a close, a trim and a growth do while another thread is inside a callback of the same pool: the first
 * two wait for it, the last does not for long. The callbacks look for a breach for a moment, since a promise
 * that is kept shows in nothing.
 */
#include "tests/support/world.h"

#include <pthread.h>
#include <time.h>

#define MIB CHECK_MIB

static struct world world;
static bool inside; /* the callback is under way; all of these are atomic */
static bool may_end; /* the callback need not look any longer */
static bool breached; /* the call returned although the callback was under way */
static bool returned; /* the call that must wait has returned */
static unsigned asked; /* how often the interrupt hook was called */

static bool is_set(const bool *flag)
{
    return __atomic_load_n(flag, __ATOMIC_SEQ_CST);
}

static void set(bool *flag, bool value)
{
    __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
}

static void rest(void)
{
    const struct timespec moment = {0, 1000000};

    nanosleep(&moment, NULL);
}

static void wait_for(const bool *flag)
{
    while (!is_set(flag))
        rest();
}

/* Inside a callback: the call that waits for it must not return meanwhile. */
static void look_for_a_breach(void)
{
    set(&inside, true);
    wait_for(&may_end);
    for (int i = 0; i < 50 && !is_set(&returned); i++)
        rest();
    set(&breached, is_set(&returned));
}

/* A hook that asks the pool: no lock of it may be held. */
static int ask_stats(void *unused)
{
    (void)unused;
    (void)world_stats(&world);
    __atomic_add_fetch(&asked, 1, __ATOMIC_SEQ_CST);
    set(&may_end, true);
    return 0;
}

static int set_up(void **state)
{
    set(&inside, false);
    set(&may_end, false);
    set(&breached, false);
    set(&returned, false);
    asked = 0;
    world_begin(&world, &(struct world_options){.chunk_size = 2 * MIB, .interrupted = ask_stats});
    world_open(&world);
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    world_end(*state);
    return 0;
}

struct growth {
    pthread_t thread;
    uintptr_t va;
    gp_status status;
    gp_error error;
};

static void *grow(void *context)
{
    struct growth *growth = context;

    growth->status =
        gp_pool_malloc(world.pool, 2 * MIB, world.stream[1], 0, &growth->va, &growth->error);
    return NULL;
}

static bool slow_alloc(struct world *unused, size_t size)
{
    (void)unused;
    (void)size;
    look_for_a_breach();
    return false;
}

static void a_close_waits_for_a_growth_which_fails(void **state)
{
    struct growth growth = {0};

    (void)state;
    world.refuse = slow_alloc;
    assert_int_equal(pthread_create(&growth.thread, NULL, grow, &growth), 0);
    wait_for(&inside);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    set(&returned, true);
    assert_int_equal(world.supplied_chunks, 0);
    assert_int_equal(pthread_join(growth.thread, NULL), 0);
    CHECK(!breached, "the pool was closed while alloc was under way");
    CHECK_STATUS(GP_ERR_STATE, growth.status, &growth.error);
    assert_int_equal(growth.error.reason, GP_REASON_CLOSED);
    assert_true(asked > 0);
}

static void slow_free(struct world *unused, const gp_request *request)
{
    (void)unused;
    (void)request;
    look_for_a_breach();
}

static void *trim(void *unused)
{
    (void)unused;
    (void)gp_pool_trim(world.pool, 0, 0, NULL, NULL);
    return NULL;
}

/* Another thread is inside free. */
static pthread_t begin_delivery(void (*before_free)(struct world *, const gp_request *))
{
    pthread_t thread;
    uintptr_t va = world_malloc(&world, 2 * MIB, 0);

    world_free(&world, va, -1);
    world.before_free = before_free;
    assert_int_equal(pthread_create(&thread, NULL, trim, NULL), 0);
    wait_for(&inside);
    return thread;
}

static void end_delivery(pthread_t thread)
{
    set(&returned, true);
    assert_int_equal(world.supplied_chunks, 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    CHECK(!breached, "the call returned while free was under way");
}

static void a_close_waits_for_a_delivery(void **state)
{
    pthread_t thread;

    (void)state;
    thread = begin_delivery(slow_free);
    CHECK_OK(gp_pool_close(world.pool, &world.error), &world.error);
    end_delivery(thread);
}

static void a_trim_waits_for_a_delivery(void **state)
{
    pthread_t thread;

    (void)state;
    thread = begin_delivery(slow_free);
    CHECK_OK(gp_pool_trim(world.pool, 0, 0, NULL, &world.error), &world.error);
    end_delivery(thread);
}

static void free_that_waits_for_a_growth(struct world *unused, const gp_request *request)
{
    (void)unused;
    (void)request;
    set(&inside, true);
    wait_for(&returned);
}

static bool refuse_once(struct world *unused, size_t size)
{
    (void)size;
    return unused->refusals == 0;
}

/* A growth that is refused looks for what others give back, but a free may be waiting for that growth. */
static void a_growth_does_not_wait_for_a_free_that_waits_for_it(void **state)
{
    pthread_t thread;
    uintptr_t va = 0;

    (void)state;
    /* The free half of a chunk, and a stream to wait for: reason enough to ask once more. */
    uintptr_t busy = world_malloc(&world, MIB, 2), kept = world_malloc(&world, MIB, 2);
    thread = begin_delivery(free_that_waits_for_a_growth);
    world.refuse = refuse_once;
    world_launch(&world, 2, busy, MIB);
    world_free(&world, busy, -1);
    CHECK_OK(gp_pool_malloc(world.pool, 2 * MIB, world.stream[1], 0, &va, &world.error),
             &world.error);
    set(&returned, true);
    assert_int_equal(pthread_join(thread, NULL), 0);
    world_free(&world, va, -1);
    world_free(&world, kept, -1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_close_waits_for_a_growth_which_fails),
        TEST(a_close_waits_for_a_delivery),
        TEST(a_trim_waits_for_a_delivery),
        TEST(a_growth_does_not_wait_for_a_free_that_waits_for_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
