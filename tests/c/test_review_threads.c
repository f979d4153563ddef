/* SPDX-License-Identifier: Apache-2.0
 *
 * Two threads at the one place where each could find the other halfway: the last release of a range beside
 * its burial, a pin beside a close, a pool closed by its user and by the reaper at once.
 */
#include "tests/support/model.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "backing/memory.h"
#include "vmm/pool.h"

#define MIB        CHECK_MIB
#define PIN_ROUNDS 20000
#define ORPHANS    5000

static struct world world;
static const struct gp__driver *real;
static struct gp__driver hooked;

static int set_up(void **state)
{
    world_begin(&world, NULL);
    world_open(&world);
    real = world.device->driver;
    hooked = *real;
    world.device->driver = &hooked;
    *state = &world;
    return 0;
}

static int tear_down(void **state)
{
    world.device->driver = real;
    world_end(*state);
    return 0;
}

static void until(const bool *flag)
{
    while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void raise_flag(bool *flag)
{
    __atomic_store_n(flag, true, __ATOMIC_RELEASE);
}

/* ---- the last release of a range ---- */

static gp_range *released;
static pthread_t releaser;

static void *release_range(void *unused)
{
    (void)unused;
    gp_range_release(released);
    return NULL;
}

/* The range's last chunk is unmapped, and just then its last holder lets go: the holder finds the pool's
 * lock taken, and the range is buried before it gets it. */
static gp_status unmap_beside_release(gp_device *device, uintptr_t va, size_t bytes,
                                      gp__memory memory, gp_error *error)
{
    gp_status status = real->unmap(device, va, bytes, memory, error);

    gp__mutex_lock(&world.pool->lock);
    assert_int_equal(pthread_create(&releaser, NULL, release_range, NULL), 0);
    while (__atomic_load_n(&released->references, __ATOMIC_ACQUIRE) != 0)
        sched_yield();
    gp__mutex_unlock(&world.pool->lock);
    return status;
}

static void a_range_may_be_released_while_it_is_buried(void **state)
{
    gp_interval part = {0, 2 * MIB};

    (void)state;
    for (int i = 0; i < 50; i++) {
        hooked.unmap = real->unmap;
        CHECK_OK(gp_range_create(world.pool, 2 * MIB, world.stream[0], &released, &world.error),
                 &world.error);
        CHECK_OK(gp_range_commit(released, &part, 1, NULL, NULL, &world.error), &world.error);
        CHECK_OK(gp_range_close(released, NULL, &world.error), &world.error);
        hooked.unmap = unmap_beside_release;
        CHECK_OK(gp_pool_drain(world.pool, &world.error), &world.error);
        assert_int_equal(pthread_join(releaser, NULL), 0);
        assert_int_equal(world_stats(&world).address_bytes, 0);
    }
}

/* ---- a pin beside a close ---- */

struct race {
    gp_range *range;
    unsigned round; /* atomic: the pinning thread's turn begins */
    unsigned done; /* atomic: and ended */
    gp_status pinned;
};

static void *pin_ranges(void *context)
{
    struct race *race = context;

    for (unsigned round = 1;; round++) {
        while (__atomic_load_n(&race->round, __ATOMIC_ACQUIRE) != round)
            sched_yield();
        if (race->range == NULL)
            return NULL;
        for (volatile unsigned spin = round % 400; spin > 0; spin--) {
        }
        race->pinned = gp_range_pin(race->range, 0, 0, false, NULL);
        __atomic_store_n(&race->done, round, __ATOMIC_RELEASE);
    }
}

static void a_range_with_a_pin_is_not_closed(void **state)
{
    struct race race = {NULL, 0, 0, GP_OK};
    pthread_t thread;
    unsigned round = 0;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, pin_ranges, &race), 0);
    while (round < PIN_ROUNDS) {
        CHECK_OK(gp_range_create(world.pool, 0, world.stream[0], &race.range, &world.error),
                 &world.error);
        __atomic_store_n(&race.round, ++round, __ATOMIC_RELEASE);
        gp_status closed = gp_range_close(race.range, NULL, NULL);
        while (__atomic_load_n(&race.done, __ATOMIC_ACQUIRE) != round)
            sched_yield();
        CHECK(closed != GP_OK || race.pinned != GP_OK, "round %u: closed under a live pin", round);
        if (race.pinned == GP_OK)
            gp_range_unpin(race.range, 0, 0);
        gp_range_release(race.range);
    }
    race.range = NULL;
    __atomic_store_n(&race.round, round + 1, __ATOMIC_RELEASE);
    assert_int_equal(pthread_join(thread, NULL), 0);
}

/* ---- a pool closed twice at once ---- */

static bool reaper_is_freeing, user_is_done, user_waits;
static _Thread_local bool is_user;

/* The user's close is held up before it has looked at anything. */
static gp_status enter_late(gp_device *device, struct gp__entry *entry, gp_error *error)
{
    if (is_user && !__atomic_load_n(&reaper_is_freeing, __ATOMIC_ACQUIRE)) {
        raise_flag(&user_waits);
        until(&reaper_is_freeing);
    }
    return real->enter(device, entry, error);
}

static gp_status free_address_slowly(gp_device *device, uintptr_t va, size_t bytes, gp_error *error)
{
    raise_flag(&reaper_is_freeing);
    until(&user_is_done);
    return real->free_address(device, va, bytes, error);
}

static void *close_and_release(void *context)
{
    gp_pool *pool = context;

    is_user = true;
    CHECK_OK(gp_pool_close(pool, NULL), NULL);
    gp_pool_release(pool);
    raise_flag(&user_is_done);
    return NULL;
}

static void the_reaper_holds_the_pool_that_it_closes(void **state)
{
    gp_pool_options options = {
        .name = "finished", .device = world.device, .backing = world.backing, .limit = GP_NO_LIMIT};
    int64_t live = gp__memory_live();
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    pthread_t user;
    uintptr_t va = 0;

    (void)state;
    CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(pool, world.handle[0], &stream, &world.error), &world.error);
    CHECK_OK(gp_pool_malloc(pool, MIB, stream, 0, &va, &world.error), &world.error);
    gp_stream_release(stream);
    hooked.enter = enter_late;
    hooked.free_address = free_address_slowly;
    assert_int_equal(pthread_create(&user, NULL, close_and_release, pool), 0);
    until(&user_waits);
    CHECK_OK(gp_pool_finish(pool, &world.error), &world.error);
    assert_int_equal(pthread_join(user, NULL), 0);
    while (gp__memory_live() != live)
        sched_yield();
}

/* ---- a stream that gets its name ---- */

static bool stop_reading;
static unsigned reads;

static void *read_id(void *context)
{
    uint64_t known = 0;

    while (!__atomic_load_n(&stop_reading, __ATOMIC_ACQUIRE)) {
        uint64_t id = gp_stream_id(context);
        CHECK(known == 0 || known == id, "an id changed from %llu to %llu",
              (unsigned long long)known, (unsigned long long)id);
        known = id;
        __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* The id of a stream that was met while it captured is found out later, on any thread. */
static void an_id_may_be_read_while_it_becomes_known(void **state)
{
    uintptr_t handle = gp__sim_stream_create(world.sim, 0);
    gp_stream *met = NULL, *named = NULL;
    pthread_t thread;

    (void)state;
    gp__sim_capture_begin(world.sim, handle, GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(gp_pool_stream(world.pool, handle, &met, &world.error), &world.error);
    assert_int_equal(pthread_create(&thread, NULL, read_id, met), 0);
    while (__atomic_load_n(&reads, __ATOMIC_RELAXED) < 10)
        sched_yield();
    assert_true(gp__sim_capture_end(world.sim, handle));
    CHECK_OK(gp_pool_stream(world.pool, handle, &named, &world.error), &world.error);
    raise_flag(&stop_reading);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ptr_equal(met, named);
    assert_int_equal(gp_stream_id(met), gp__sim_stream_id(world.sim, handle));
    gp_stream_release(met);
    gp_stream_release(named);
}

/* ---- the last release of a pool ---- */

static bool stop_kicking;

static uint64_t do_nothing(void *unused)
{
    (void)unused;
    return UINT64_MAX;
}

/* Keeps the reaper's lock busy, so that who kicks often has to wait for it. */
static void *kick_another(void *context)
{
    while (!__atomic_load_n(&stop_kicking, __ATOMIC_ACQUIRE))
        gp__reaper_kick(context);
    return NULL;
}

static void a_pool_is_let_go_of_while_the_reaper_looks_at_it(void **state)
{
    struct gp__reaper_client client = {.function = do_nothing};
    gp_pool_options options = {
        .name = "orphan", .device = world.device, .backing = world.backing, .limit = GP_NO_LIMIT};
    int64_t live = gp__memory_live();
    pthread_t kickers[2];

    (void)state;
    __atomic_store_n(&stop_kicking, false, __ATOMIC_RELEASE);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&kickers[i], NULL, kick_another, &client), 0);
    for (int i = 0; i < ORPHANS; i++) {
        gp_pool *pool = NULL;
        CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
        gp__pool_kick(pool);
        for (volatile int spin = i % 500; spin > 0; spin--) {
        }
        gp_pool_release(pool);
    }
    raise_flag(&stop_kicking);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(kickers[i], NULL), 0);
    gp__reaper_remove(&client);
    while (gp__memory_live() != live)
        sched_yield();
}

static bool holder_is_gone, callback_is_last;

/* The callback's own reference is the last one. */
static void let_go_in_callback(struct world *w, const gp_request *request)
{
    gp_pool *pool = w->knob;

    (void)request;
    if (pool == NULL)
        return;
    w->knob = NULL;
    until(&holder_is_gone);
    gp_pool_release(pool);
    raise_flag(&callback_is_last);
}

/* The reaper ignores a kick inside its own call, and must look for itself afterwards. */
static void a_pool_let_go_in_a_callback_of_the_reaper_is_closed(void **state)
{
    gp_pool_options options = {
        .name = "orphan", .device = world.device, .backing = world.backing, .limit = GP_NO_LIMIT};
    int64_t live = gp__memory_live();
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    uintptr_t va = 0;

    (void)state;
    CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
    CHECK_OK(gp_pool_stream(pool, world.handle[0], &stream, &world.error), &world.error);
    CHECK_OK(gp_pool_malloc(pool, MIB, stream, 0, &va, &world.error), &world.error);
    CHECK_OK(gp_pool_free(pool, va, NULL, 0, &world.error), &world.error);
    gp_stream_release(stream);
    world.knob = gp_pool_retain(pool);
    world.before_free = let_go_in_callback;
    CHECK_OK(gp_pool_trim(pool, 0, GP_TRIM_NO_WAIT, NULL, &world.error), &world.error);
    gp_pool_release(pool);
    raise_flag(&holder_is_gone);
    while (!__atomic_load_n(&callback_is_last, __ATOMIC_ACQUIRE)) {
        gp__sim_complete_all(world.sim); /* the fence, once the reaper has recorded it */
        sched_yield();
    }
    for (int i = 0; i < 5000 && gp__memory_live() != live; i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- a stream that was met while it captured ---- */

#define NAMINGS 3000

struct naming {
    gp_stream *stream;
    unsigned round; /* atomic: begins */
    unsigned done; /* atomic: threads that are through with it */
};

static void *ask_for_stream(void *context)
{
    struct naming *naming = context;

    for (unsigned round = 1; round <= NAMINGS; round++) {
        while (__atomic_load_n(&naming->round, __ATOMIC_ACQUIRE) != round)
            sched_yield();
        CHECK_OK(gp_pool_synchronize(world.pool, naming->stream, false, NULL), NULL);
        __atomic_add_fetch(&naming->done, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

/* Its id is not known before the capture ends; then several threads learn it at once. */
static void several_threads_may_learn_who_a_stream_is(void **state)
{
    struct naming naming = {NULL, 0, 0};
    pthread_t threads[2];

    (void)state;
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask_for_stream, &naming), 0);
    for (unsigned round = 1; round <= NAMINGS; round++) {
        uintptr_t handle = gp__sim_stream_create(world.sim, 0);
        gp__sim_capture_begin(world.sim, handle, GP__SIM_CAPTURE_RELAXED);
        CHECK_OK(gp_pool_stream(world.pool, handle, &naming.stream, &world.error), &world.error);
        assert_true(gp__sim_capture_end(world.sim, handle));
        __atomic_store_n(&naming.round, round, __ATOMIC_RELEASE);
        while (__atomic_load_n(&naming.done, __ATOMIC_ACQUIRE) != 2 * round)
            sched_yield();
        CHECK(gp_stream_id(naming.stream) != 0, "round %u: the stream lost its id", round);
        CHECK_OK(gp_pool_forget_stream(world.pool, handle, &world.error), &world.error);
        gp_stream_release(naming.stream);
        gp__sim_stream_destroy(world.sim, handle);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(several_threads_may_learn_who_a_stream_is, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_range_may_be_released_while_it_is_buried, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_range_with_a_pin_is_not_closed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_reaper_holds_the_pool_that_it_closes, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(an_id_may_be_read_while_it_becomes_known, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_pool_is_let_go_of_while_the_reaper_looks_at_it, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_pool_let_go_in_a_callback_of_the_reaper_is_closed, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests_name("two threads halfway", tests, NULL, NULL);
}
