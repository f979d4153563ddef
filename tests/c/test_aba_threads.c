/* SPDX-License-Identifier: Apache-2.0
 *
 * A backing that gives a chunk to the next asker before its own free has returned: another thread maps the
 * same handle, often at the same address, while the first one still stands in the callback. Every count
 * must be right whichever comes back first.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "tests/support/world.h"
#include "vmm/pool.h"

#define MIB     CHECK_MIB
#define KEPT    16
#define WORKERS 4

enum kind {
    SAME_CHUNK, /* the very object is supplied again */
    SAME_HANDLE /* another object, with the handle of the old one */
};

/* A backing that keeps what comes back, the latest on top. */
static struct {
    enum kind kind;
    gp_device *device;
    pthread_mutex_t lock;
    gp_chunk *chunks[KEPT]; /* SAME_CHUNK */
    gp__memory handles[KEPT]; /* SAME_HANDLE */
    size_t kept;
    bool waits; /* the next free returns only when another thread has what it gave */
    unsigned fails; /* so many frees report that they did not take it */
    uint64_t supplied, taken; /* atomic */
} shelf;

static _Atomic bool offered; /* the chunk lies on the shelf, and its free has not returned */
static _Atomic bool received; /* another thread has it */

static struct world world; /* for its device and its checks; its own pool is not used */
static gp_backing *backing;

/* The bound only turns a hang into a failure. */
static void await(_Atomic bool *flag)
{
    for (int i = 0; i < 20000000 && !atomic_load(flag); i++)
        sched_yield();
}

static void let_handle_be(void *unused)
{
    (void)unused;
}

/* The top of the shelf as a chunk, or NULL. */
static gp_chunk *take_from_shelf(void)
{
    gp_chunk *chunk = NULL;
    gp__memory handle = 0;

    pthread_mutex_lock(&shelf.lock);
    if (shelf.kept > 0) {
        shelf.kept--;
        chunk = shelf.chunks[shelf.kept];
        handle = shelf.handles[shelf.kept];
    }
    pthread_mutex_unlock(&shelf.lock);
    if (handle != 0 && shelf.kind == SAME_HANDLE)
        (void)gp_chunk_adopt(shelf.device, handle, 2 * MIB, let_handle_be, NULL, &chunk, NULL);
    return chunk;
}

static gp_status make_chunk(gp_chunk **out, gp_error *error)
{
    const struct gp__driver *driver = shelf.device->driver;
    gp__memory handle = 0;

    if (shelf.kind == SAME_CHUNK)
        return gp_chunk_create(shelf.device, 2 * MIB, GP_LOCATION_DEVICE, 0, out, error);
    gp_status status = driver->create(shelf.device, 2 * MIB, GP_LOCATION_DEVICE, 0, &handle, error);
    if (status != GP_OK)
        return status;
    return gp_chunk_adopt(shelf.device, handle, 2 * MIB, let_handle_be, NULL, out, error);
}

static gp_status shelf_alloc(void *context, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    (void)context;
    if (request->size != 2 * MIB)
        return GP_ERR_OUT_OF_MEMORY;
    gp_chunk *chunk = take_from_shelf();
    gp_status status = GP_OK;
    if (chunk == NULL)
        status = make_chunk(&chunk, error);
    if (status != GP_OK)
        return status;
    __atomic_add_fetch(&shelf.supplied, 1, __ATOMIC_RELAXED);
    *out = chunk;
    return GP_OK;
}

static gp_status shelf_free(void *context, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    (void)context;
    (void)request;
    pthread_mutex_lock(&shelf.lock);
    bool waits = shelf.waits, fails = shelf.fails > 0;
    shelf.waits = false;
    shelf.fails -= fails;
    CHECK(shelf.kept < KEPT, "the shelf is full");
    shelf.handles[shelf.kept] = gp_chunk_handle(chunk);
    shelf.chunks[shelf.kept] = shelf.kind == SAME_CHUNK ? chunk : NULL;
    if (shelf.kind == SAME_CHUNK && fails)
        gp_chunk_retain(chunk); /* the caller keeps its own reference when free fails */
    shelf.kept++;
    pthread_mutex_unlock(&shelf.lock);
    __atomic_add_fetch(&shelf.taken, 1, __ATOMIC_RELAXED);
    if (waits) {
        atomic_store(&offered, true);
        await(&received);
    } else {
        sched_yield();
    }
    if (fails)
        return gp_error_set(error, GP_ERR_CALLBACK, "the shelf has it, and says it has not");
    if (shelf.kind == SAME_HANDLE)
        gp_chunk_release(chunk); /* an object of its own; the handle lives on */
    return GP_OK;
}

static const gp_backing_ops shelf_ops = {shelf_alloc, shelf_free, NULL};

static void begin(enum kind kind)
{
    world_begin(&world, NULL);
    memset(&shelf, 0, sizeof shelf);
    shelf.kind = kind;
    shelf.device = world.device;
    pthread_mutex_init(&shelf.lock, NULL);
    atomic_store(&offered, false);
    atomic_store(&received, false);
    CHECK_OK(gp_backing_create(&shelf_ops, NULL, &backing, NULL), NULL);
}

static void end(void)
{
    const struct gp__driver *driver = shelf.device->driver;

    for (; shelf.kept > 0; shelf.kept--) {
        if (shelf.kind == SAME_CHUNK)
            gp_chunk_release(shelf.chunks[shelf.kept - 1]);
        else
            CHECK_OK(driver->release(shelf.device, shelf.handles[shelf.kept - 1], 2 * MIB, NULL),
                     NULL);
    }
    gp_backing_release(backing);
    pthread_mutex_destroy(&shelf.lock);
    world_end(&world);
}

static gp_pool *open_pool(size_t limit)
{
    gp_pool *pool = NULL;
    gp_pool_options options = {.name = "aba",
                               .device = world.device,
                               .backing = backing,
                               .limit = limit,
                               .chunk_size = 2 * MIB,
                               .address_space = 64 * MIB};

    CHECK_OK(gp_pool_create(&options, &pool, &world.error), &world.error);
    return pool;
}

static gp_status allocate(gp_pool *pool, uintptr_t handle, uintptr_t *va)
{
    gp_stream *stream = NULL;
    gp_status status = gp_pool_stream(pool, handle, &stream, NULL);

    if (status == GP_OK)
        status = gp_pool_malloc(pool, 2 * MIB, stream, 0, va, NULL);
    gp_stream_release(stream);
    return status;
}

static void check_pool(gp_pool *pool, size_t physical, size_t used)
{
    gp_pool_stats stats;
    char message[256];

    CHECK(gp__pool_check(pool, message, sizeof message), "%s", message);
    gp_pool_get_stats(pool, &stats);
    assert_int_equal(stats.physical_bytes, physical);
    assert_int_equal(stats.used_bytes, used);
    assert_int_equal(stats.retiring_bytes + stats.unreturned_bytes, 0);
}

static void close_pool(gp_pool *pool)
{
    CHECK_OK(gp_pool_close(pool, &world.error), &world.error);
    check_pool(pool, 0, 0);
    gp_pool_release(pool);
}

/* ---- one thread in free, another with what it gave ---- */

struct receiver {
    gp_pool *pool;
    uintptr_t va;
    gp_status status;
    bool gives_back; /* at once: its free fails too */
};

static void *receive(void *context)
{
    struct receiver *receiver = context;

    await(&offered);
    receiver->status = allocate(receiver->pool, world.handle[1], &receiver->va);
    if (receiver->status == GP_OK && receiver->gives_back) {
        receiver->status = gp_pool_free(receiver->pool, receiver->va, NULL, 0, NULL);
        (void)gp_pool_trim(receiver->pool, 0, 0, NULL, NULL);
    }
    atomic_store(&received, true);
    return NULL;
}

/* One thread trims; its free stands still until the other one has the chunk in a block. */
static void hand_on(enum kind kind, bool to_same_pool, bool fails)
{
    pthread_t thread;
    uintptr_t va = 0;

    begin(kind);
    gp_pool *giver = open_pool(GP_NO_LIMIT);
    gp_pool *taker = to_same_pool ? gp_pool_retain(giver) : open_pool(GP_NO_LIMIT);
    struct receiver receiver = {taker, 0, GP_ERR_STATE, false};
    CHECK_OK(allocate(giver, world.handle[0], &va), NULL);
    CHECK_OK(gp_pool_free(giver, va, NULL, 0, NULL), NULL);
    shelf.waits = true;
    shelf.fails = fails;
    assert_int_equal(pthread_create(&thread, NULL, receive, &receiver), 0);
    CHECK_OK(gp_pool_trim(giver, 0, 0, NULL, &world.error), &world.error);
    assert_int_equal(pthread_join(thread, NULL), 0);
    CHECK_OK(receiver.status, NULL);
    CHECK(!shelf.waits && atomic_load(&received), "nobody came while free stood still");
    if (to_same_pool)
        assert_int_equal(receiver.va, va);
    gp__sim_launch(world.sim, world.handle[1], receiver.va, 2 * MIB);
    check_pool(taker, 2 * MIB, 2 * MIB);
    if (!to_same_pool)
        check_pool(giver, 0, 0);
    assert_int_equal(shelf.supplied, 2);
    assert_int_equal(world_ledger(&world).unreleased_count, 1);
    close_pool(giver);
    if (!to_same_pool)
        close_pool(taker);
    else
        gp_pool_release(taker);
    assert_int_equal(shelf.taken, 2);
    end();
}

static void a_chunk_is_supplied_to_its_pool_again_before_its_free_returned(void **state)
{
    (void)state;
    hand_on(SAME_CHUNK, true, false);
}

static void a_chunk_is_supplied_to_another_pool_before_its_free_returned(void **state)
{
    (void)state;
    hand_on(SAME_CHUNK, false, false);
}

static void a_handle_comes_back_at_its_address_before_its_free_returned(void **state)
{
    (void)state;
    hand_on(SAME_HANDLE, true, false);
}

static void a_handle_comes_to_another_pool_before_its_free_returned(void **state)
{
    (void)state;
    hand_on(SAME_HANDLE, false, false);
}

/* The chunk is in use elsewhere, so it is nobody's unreturned chunk, whatever free says. */
static void a_free_that_failed_does_not_take_the_chunk_from_its_next_user(void **state)
{
    (void)state;
    hand_on(SAME_CHUNK, true, true);
    hand_on(SAME_CHUNK, false, true);
}

/* Both say that they did not take the chunk. It is unreturned in the pool that had it last, and only there. */
static void of_two_frees_that_fail_the_later_pool_keeps_the_chunk(void **state)
{
    pthread_t thread;
    uintptr_t va = 0;
    gp_pool_stats stats;
    size_t returned = 0;

    (void)state;
    begin(SAME_CHUNK);
    gp_pool *giver = open_pool(GP_NO_LIMIT), *taker = open_pool(GP_NO_LIMIT);
    struct receiver receiver = {taker, 0, GP_ERR_STATE, true};
    CHECK_OK(allocate(giver, world.handle[0], &va), NULL);
    CHECK_OK(gp_pool_free(giver, va, NULL, 0, NULL), NULL);
    shelf.waits = true;
    shelf.fails = 2;
    assert_int_equal(pthread_create(&thread, NULL, receive, &receiver), 0);
    CHECK_OK(gp_pool_trim(giver, 0, 0, NULL, &world.error), &world.error);
    assert_int_equal(pthread_join(thread, NULL), 0);
    CHECK_OK(receiver.status, NULL);
    check_pool(giver, 0, 0);
    gp_pool_get_stats(taker, &stats);
    assert_int_equal(stats.unreturned_bytes, 2 * MIB);
    CHECK_OK(gp_pool_return_unreturned(taker, &returned, NULL), NULL);
    assert_int_equal(returned, 2 * MIB);
    close_pool(giver);
    close_pool(taker);
    end();
}

/* ---- many threads, few handles ---- */

struct worker {
    gp_pool *pool;
    uintptr_t handle;
    int rounds;
    int failures;
};

static void *swap_chunks(void *context)
{
    struct worker *worker = context;

    for (int i = 0; i < worker->rounds; i++) {
        uintptr_t va = 0;
        gp_status status = allocate(worker->pool, worker->handle, &va);
        if (status == GP_ERR_LIMIT)
            continue; /* the others have it all, or it is on its way */
        if (status != GP_OK) {
            worker->failures++;
            break;
        }
        gp__sim_launch(world.sim, worker->handle, va, 2 * MIB);
        worker->failures += gp_pool_free(worker->pool, va, NULL, 0, NULL) != GP_OK;
        worker->failures +=
            gp_pool_trim(worker->pool, 0, i % 3 == 0 ? GP_TRIM_NO_WAIT : 0, NULL, NULL) != GP_OK;
    }
    return NULL;
}

static void swap_in(enum kind kind)
{
    struct worker workers[WORKERS];
    pthread_t threads[WORKERS];
    gp_pool *pools[2];

    begin(kind);
    for (int i = 0; i < 2; i++)
        pools[i] = open_pool(4 * MIB);
    for (int i = 0; i < WORKERS; i++) {
        int rounds = (int)check_environment("GP_TEST_OPS", 20000) / 20;
        workers[i] = (struct worker){pools[i % 2], world.handle[i], rounds, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, swap_chunks, &workers[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(workers[i].failures, 0);
    }
    for (int i = 0; i < 2; i++)
        close_pool(pools[i]);
    assert_int_equal(shelf.supplied, shelf.taken);
    CHECK(shelf.kept <= 4, "%zu handles were made under limits of 4", shelf.kept);
    end();
}

static void threads_swap_chunks_through_a_backing(void **state)
{
    (void)state;
    swap_in(SAME_CHUNK);
}

static void threads_swap_handles_through_a_backing(void **state)
{
    (void)state;
    swap_in(SAME_HANDLE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chunk_is_supplied_to_its_pool_again_before_its_free_returned),
        cmocka_unit_test(a_chunk_is_supplied_to_another_pool_before_its_free_returned),
        cmocka_unit_test(a_handle_comes_back_at_its_address_before_its_free_returned),
        cmocka_unit_test(a_handle_comes_to_another_pool_before_its_free_returned),
        cmocka_unit_test(a_free_that_failed_does_not_take_the_chunk_from_its_next_user),
        cmocka_unit_test(of_two_frees_that_fail_the_later_pool_keeps_the_chunk),
        cmocka_unit_test(threads_swap_chunks_through_a_backing),
        cmocka_unit_test(threads_swap_handles_through_a_backing),
    };
    return cmocka_run_group_tests_name("the same chunk again", tests, NULL, NULL);
}
