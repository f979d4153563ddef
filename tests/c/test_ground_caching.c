/* SPDX-License-Identifier: Apache-2.0
 *
 * The caching backing: what it keeps, hands out again and gives back, in which order, and that no
 * chunk is lost or handed out twice whatever its inner backing does (B1).
 */
#include <pthread.h>

#include "backing/backing_internal.h"
#include "backing/memory.h"
#include "child.h"
#include "fake_device.h"

#define PAGE (2 * CHECK_MIB)

/* The inner backing: makes chunks up to a bound, and remembers in which order they came back. */
struct inner {
    struct fake_device fake;
    gp_backing *backing;
    gp_backing *cache;
    unsigned room; /* chunks it still makes */
    unsigned asked_count;
    gp_status free_status;
    uint64_t freed_ids[64];
    uintptr_t freed_streams[64];
    unsigned freed_count;
    bool destroyed;
};

static gp_status inner_alloc(void *context, const gp_request *request, gp_chunk **out,
                             gp_error *error)
{
    struct inner *inner = context;
    inner->asked_count++;
    if (inner->room == 0) {
        return gp_error_set(error, GP_ERR_OUT_OF_MEMORY, "no room");
    }
    gp_status status =
        gp_chunk_create(request->device, request->size, GP_LOCATION_DEVICE, 0, out, error);
    inner->room -= status == GP_OK;
    return status;
}

static gp_status inner_free(void *context, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    struct inner *inner = context;
    if (inner->free_status != GP_OK) {
        return gp_error_set(error, inner->free_status, "the inner free fails");
    }
    inner->freed_ids[inner->freed_count] = gp_chunk_id(chunk);
    inner->freed_streams[inner->freed_count] = request->stream;
    inner->freed_count++;
    inner->room++;
    gp_chunk_release(chunk);
    return GP_OK;
}

static void inner_destroy(void *context)
{
    struct inner *inner = context;
    inner->destroyed = true;
}

static const gp_backing_ops inner_ops = {inner_alloc, inner_free, inner_destroy};

static void inner_init(struct inner *inner, size_t keep_bytes)
{
    memset(inner, 0, sizeof *inner);
    fake_device_init(&inner->fake);
    inner->room = 1000;
    CHECK_OK(gp_backing_create(&inner_ops, inner, &inner->backing, NULL), NULL);
    CHECK_OK(gp_backing_caching(inner->backing, keep_bytes, &inner->cache, NULL), NULL);
    gp_backing_release(inner->backing); /* the cache holds it now */
}

static void inner_end(struct inner *inner)
{
    gp_backing_release(inner->cache);
    assert_true(inner->destroyed);
    fake_device_check_clean(&inner->fake);
}

static gp_request request_of(struct inner *inner, unsigned pages, uintptr_t stream)
{
    return (gp_request){.size = pages * PAGE, .device = &inner->fake.device, .stream = stream};
}

static gp_chunk *take(struct inner *inner, unsigned pages)
{
    gp_request request = request_of(inner, pages, 0);
    gp_chunk *chunk;
    gp_error error;
    CHECK_OK(gp__backing_supply(inner->cache, &request, &chunk, &error), &error);
    assert_int_equal(gp_chunk_size(chunk), pages * PAGE);
    return chunk;
}

static gp_status try_give(struct inner *inner, gp_chunk *chunk, uintptr_t stream, gp_error *error)
{
    gp_request request = request_of(inner, (unsigned)(gp_chunk_size(chunk) / PAGE), stream);
    return gp__backing_return(inner->cache, chunk, &request, error);
}

static void give(struct inner *inner, gp_chunk *chunk, uintptr_t stream)
{
    gp_error error;
    CHECK_OK(try_give(inner, chunk, stream, &error), &error);
}

/* ---- keeping ------------------------------------------------------------------------------ */

static void a_kept_chunk_is_handed_out_again(void **state)
{
    (void)state;
    struct inner inner;
    inner_init(&inner, 8 * PAGE);
    gp_chunk *chunk = take(&inner, 2);
    assert_int_equal(inner.asked_count, 1);
    give(&inner, chunk, 1);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 2 * PAGE);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_IDLE);
    assert_int_equal(inner.freed_count, 0);
    gp_chunk *smaller = take(&inner, 1); /* another size: a new one */
    assert_ptr_not_equal(smaller, chunk);
    gp_chunk *again = take(&inner, 2);
    assert_ptr_equal(again, chunk);
    assert_int_equal(gp_chunk_generation(again), 2);
    assert_int_equal(inner.asked_count, 2);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 0);
    give(&inner, again, 1);
    give(&inner, smaller, 1);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 3 * PAGE);
    inner_end(&inner);
    assert_int_equal(inner.freed_count, 2); /* destroying gives the kept ones back */
}

static void a_chunk_given_back_twice_is_refused(void **state)
{
    (void)state;
    struct inner inner;
    gp_error error;
    inner_init(&inner, 8 * PAGE);
    gp_request request = request_of(&inner, 1, 0);
    gp_chunk *chunk, *first, *second;
    CHECK_OK(gp_backing_alloc(inner.cache, &request, &chunk, &error), &error);
    gp_chunk_retain(chunk);
    CHECK_OK(gp_backing_free(inner.cache, chunk, &request, &error), &error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_free(inner.cache, chunk, &request, &error), &error);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), PAGE);
    CHECK_OK(gp_backing_alloc(inner.cache, &request, &first, &error), &error);
    CHECK_OK(gp_backing_alloc(inner.cache, &request, &second, &error), &error);
    assert_ptr_equal(first, chunk);
    assert_ptr_not_equal(second, chunk);
    gp_chunk_release(first);
    gp_chunk_release(second);
    gp_chunk_release(chunk);
    inner_end(&inner);
}

static void a_chunk_of_another_device_is_not_handed_out(void **state)
{
    (void)state;
    struct inner inner;
    struct fake_device other;
    gp_chunk *chunk;
    inner_init(&inner, 8 * PAGE);
    fake_device_init(&other);
    give(&inner, take(&inner, 1), 0);
    gp_request request = {.size = PAGE, .device = &other.device};
    CHECK_OK(gp__backing_supply(inner.cache, &request, &chunk, NULL), NULL);
    assert_ptr_equal(gp_chunk_device(chunk), &other.device);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), PAGE);
    CHECK_OK(gp__backing_return(inner.cache, chunk, &request, NULL), NULL);
    inner_end(&inner);
    fake_device_check_clean(&other);
}

static void the_oldest_go_back_first(void **state)
{
    (void)state;
    struct inner inner;
    gp_chunk *chunks[5];
    uint64_t ids[5];
    inner_init(&inner, 3 * PAGE);
    for (size_t i = 0; i < 5; i++) {
        chunks[i] = take(&inner, 1);
        ids[i] = gp_chunk_id(chunks[i]);
    }
    for (size_t i = 0; i < 5; i++) {
        give(&inner, chunks[i], 100 + i);
        assert_true(gp_backing_cached_bytes(inner.cache) <= 3 * PAGE);
    }
    assert_int_equal(inner.freed_count, 2);
    assert_int_equal(inner.freed_ids[0], ids[0]);
    assert_int_equal(inner.freed_ids[1], ids[1]);
    assert_int_equal(inner.freed_streams[0], 100); /* the stream of its own growth */
    assert_int_equal(inner.freed_streams[1], 101);
    gp_chunk *newest = take(&inner, 1);
    assert_int_equal(gp_chunk_id(newest), ids[4]);
    give(&inner, newest, 0);
    inner_end(&inner);
}

static void what_is_larger_than_the_bound_goes_straight_back(void **state)
{
    (void)state;
    struct inner inner;
    inner_init(&inner, 2 * PAGE);
    gp_chunk *kept = take(&inner, 2);
    gp_chunk *large = take(&inner, 3);
    give(&inner, kept, 0);
    give(&inner, large, 0);
    assert_int_equal(inner.freed_count, 1);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 2 * PAGE);
    inner_end(&inner);

    inner_init(&inner, 0);
    give(&inner, take(&inner, 1), 0);
    assert_int_equal(inner.freed_count, 1);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 0);
    inner_end(&inner);
}

/* ---- shortage ----------------------------------------------------------------------------- */

static void everything_kept_goes_back_when_memory_is_short(void **state)
{
    (void)state;
    struct inner inner;
    gp_chunk *chunk = NULL;
    gp_error error;
    inner_init(&inner, 8 * PAGE);
    inner.room = 2;
    gp_chunk *first = take(&inner, 1);
    gp_chunk *second = take(&inner, 2);
    gp_request request = request_of(&inner, 3, 0);
    /* Nothing is kept: asked once, and no more. */
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, gp__backing_supply(inner.cache, &request, &chunk, &error),
                 NULL);
    assert_string_equal(error.message, "no room");
    assert_int_equal(inner.asked_count, 3);
    give(&inner, first, 0);
    give(&inner, second, 0);
    inner.asked_count = 0;
    chunk = take(&inner, 3);
    assert_int_equal(inner.asked_count, 2);
    assert_int_equal(inner.freed_count, 2);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 0);
    give(&inner, chunk, 0);
    inner_end(&inner);
}

/* ---- an inner backing that will not take chunks back
 * --------------------------------------------- */

static void a_failed_inner_free_loses_nothing(void **state)
{
    (void)state;
    struct inner inner;
    gp_chunk *chunk = NULL;
    size_t released = 77;
    gp_error error;
    inner_init(&inner, 2 * PAGE);
    gp_chunk *old = take(&inner, 2);
    gp_chunk *young = take(&inner, 1);
    give(&inner, old, 0);
    inner.free_status = GP_ERR_CALLBACK;
    /* No room can be made, so this free fails as a whole: the chunk stays with its pool. */
    CHECK_STATUS(GP_ERR_CALLBACK, try_give(&inner, young, 0, &error), NULL);
    assert_string_equal(error.message, "the inner free fails");
    assert_int_equal(gp__chunk_state_of(young), GP__CHUNK_UNRETURNED);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 2 * PAGE);
    CHECK_STATUS(GP_ERR_CALLBACK, gp_backing_trim(inner.cache, 0, &released, &error), NULL);
    assert_int_equal(released, 77);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 2 * PAGE);
    /* Short of memory it cannot give anything back either, and says why. */
    inner.room = 0;
    gp_request request = request_of(&inner, 3, 0);
    CHECK_STATUS(GP_ERR_CALLBACK, gp__backing_supply(inner.cache, &request, &chunk, &error), NULL);
    assert_null(chunk);
    inner.free_status = GP_OK;
    give(&inner, young, 0);
    assert_int_equal(inner.freed_count, 1);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), PAGE);
    inner_end(&inner);
}

static void destroying_lets_go_of_what_cannot_go_back(void **state)
{
    (void)state;
    struct inner inner;
    int64_t live = gp__memory_live();
    inner_init(&inner, 4 * PAGE);
    gp_chunk *first = take(&inner, 1);
    gp_chunk *second = take(&inner, 1);
    give(&inner, first, 0);
    give(&inner, second, 0);
    inner.free_status = GP_ERR_CALLBACK;
    inner_end(&inner); /* the memory is released all the same */
    assert_int_equal(gp__memory_live(), live);
}

/* ---- chunks that somebody else touches meanwhile --------------------------------------------- */

static void a_kept_chunk_that_was_closed_is_not_handed_out(void **state)
{
    (void)state;
    struct inner inner;
    size_t released;
    inner_init(&inner, 4 * PAGE);
    gp_chunk *chunk = take(&inner, 1);
    gp_chunk_retain(chunk);
    give(&inner, chunk, 0);
    CHECK_OK(gp_chunk_close(chunk, NULL), NULL);
    gp_chunk *other = take(&inner, 1);
    assert_ptr_not_equal(other, chunk);
    give(&inner, other, 0);
    CHECK_OK(gp_backing_trim(inner.cache, 0, &released, NULL), NULL);
    assert_int_equal(inner.freed_count, 2); /* the inner backing hears of both */
    gp_chunk_release(chunk);
    inner_end(&inner);
}

static void a_kept_chunk_that_another_pool_accepted_is_left_to_it(void **state)
{
    (void)state;
    struct inner inner;
    size_t released;
    inner_init(&inner, 4 * PAGE);
    gp_chunk *chunk = take(&inner, 1);
    give(&inner, chunk, 0);
    gp_chunk_retain(chunk); /* the other pool's reference, from whoever made the chunk */
    assert_true(gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_SUPPLIED));
    gp_chunk *other = take(&inner, 1);
    assert_ptr_not_equal(other, chunk);
    CHECK_OK(gp_backing_trim(inner.cache, 0, &released, NULL), NULL);
    assert_int_equal(inner.freed_count, 0); /* its free comes from the other pool */
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_SUPPLIED);
    give(&inner, chunk, 0);
    give(&inner, other, 0);
    inner_end(&inner);
}

/* ---- trimming ------------------------------------------------------------------------------ */

static void trimming_stops_at_the_bound(void **state)
{
    (void)state;
    struct inner inner;
    gp_chunk *chunks[4];
    size_t released;
    gp_error error;
    inner_init(&inner, 8 * PAGE);
    for (size_t i = 0; i < 4; i++) {
        chunks[i] = take(&inner, 2);
    }
    uint64_t oldest = gp_chunk_id(chunks[0]);
    for (size_t i = 0; i < 4; i++) {
        give(&inner, chunks[i], 0);
    }
    CHECK_OK(gp_backing_trim(inner.cache, 8 * PAGE, &released, &error), &error);
    assert_int_equal(released, 0);
    CHECK_OK(gp_backing_trim(inner.cache, 5 * PAGE, &released, &error), &error);
    assert_int_equal(released, 4 * PAGE);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 4 * PAGE);
    assert_int_equal(inner.freed_ids[0], oldest);
    CHECK_OK(gp_backing_trim(inner.cache, 0, NULL, &error), &error);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 0);
    inner_end(&inner);
}

static void only_a_cache_can_be_trimmed(void **state)
{
    (void)state;
    gp_backing *device;
    gp_backing *cache = NULL;
    size_t released = 5;
    gp_error error;
    int64_t live = gp__memory_live();
    CHECK_OK(gp_backing_device(GP_LOCATION_DEVICE, &device, NULL), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_trim(device, 0, &released, &error), NULL);
    assert_int_equal(released, 5);
    assert_int_equal(gp_backing_cached_bytes(device), 0);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_caching(NULL, 0, &cache, &error), NULL);
    for (uint64_t n = 1; n <= 2; n++) {
        gp__memory_fail_at(n, 0);
        CHECK_STATUS(GP_ERR_HOST_MEMORY, gp_backing_caching(device, 0, &cache, &error), NULL);
    }
    gp__memory_fail_at(0, 0);
    assert_null(cache);
    gp_backing_release(device);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- host memory --------------------------------------------------------------------------- */

static void without_host_memory_a_chunk_goes_straight_back(void **state)
{
    (void)state;
    struct inner inner;
    inner_init(&inner, 4 * PAGE);
    gp_chunk *chunk = take(&inner, 1);
    gp__memory_fail_at(1, 1);
    give(&inner, chunk, 0);
    gp__memory_fail_at(0, 0);
    assert_int_equal(inner.freed_count, 1);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), 0);
    inner_end(&inner);
}

/* ---- stacking ------------------------------------------------------------------------------ */

/* As a callback in another language does: it asks a built-in backing directly. */
static gp_status forward_alloc(void *context, const gp_request *request, gp_chunk **out,
                               gp_error *error)
{
    return gp_backing_alloc(context, request, out, error);
}

static gp_status forward_free(void *context, gp_chunk *chunk, const gp_request *request,
                              gp_error *error)
{
    return gp_backing_free(context, chunk, request, error);
}

static void forward_destroy(void *context)
{
    gp_backing_release(context);
}

static void backings_stack(void **state)
{
    (void)state;
    static const gp_backing_ops forward_ops = {forward_alloc, forward_free, forward_destroy};
    struct fake_device fake;
    gp_backing *layers[4];
    gp_chunk *chunk;
    int64_t live = gp__memory_live();
    fake_device_init(&fake);
    gp_request request = {.size = PAGE, .device = &fake.device};
    CHECK_OK(gp_backing_device(GP_LOCATION_DEVICE, &layers[0], NULL), NULL);
    CHECK_OK(gp_backing_caching(layers[0], PAGE, &layers[1], NULL), NULL);
    CHECK_OK(gp_backing_create(&forward_ops, layers[1], &layers[2], NULL), NULL);
    CHECK_OK(gp_backing_caching(layers[2], PAGE, &layers[3], NULL), NULL);
    gp_backing_release(layers[0]);
    gp_backing_release(layers[2]);
    for (int round = 0; round < 3; round++) {
        CHECK_OK(gp__backing_supply(layers[3], &request, &chunk, NULL), NULL);
        assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_SUPPLIED);
        CHECK_OK(gp__backing_return(layers[3], chunk, &request, NULL), NULL);
    }
    assert_int_equal(atomic_load(&fake.creates), 1);
    CHECK_OK(gp_backing_trim(layers[3], 0, NULL, NULL), NULL);
    assert_int_equal(gp_backing_cached_bytes(layers[1]), PAGE); /* one layer down */
    gp_backing_release(layers[3]);
    fake_device_check_clean(&fake);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- threads ------------------------------------------------------------------------------ */

struct user {
    gp_backing *cache;
    gp_device *device;
    unsigned seed;
    unsigned failures;
};

static void *use_cache(void *context)
{
    struct user *user = context;
    unsigned random = user->seed;
    for (unsigned round = 0; round < 2000; round++) {
        random = random * 1664525u + 1013904223u;
        gp_request request = {.size = ((random >> 20) % 3 + 1) * PAGE, .device = user->device};
        gp_chunk *chunk;
        if (gp__backing_supply(user->cache, &request, &chunk, NULL) != GP_OK ||
            gp__backing_return(user->cache, chunk, &request, NULL) != GP_OK) {
            user->failures++;
        }
        if (round % 64 == 0) {
            user->failures += gp_backing_trim(user->cache, PAGE, NULL, NULL) != GP_OK;
        }
    }
    return NULL;
}

static void threads_share_a_cache(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_backing *device;
    struct user users[4];
    pthread_t threads[4];
    int64_t live = gp__memory_live();
    fake_device_init(&fake);
    CHECK_OK(gp_backing_device(GP_LOCATION_DEVICE, &device, NULL), NULL);
    gp_backing *cache;
    CHECK_OK(gp_backing_caching(device, 5 * PAGE, &cache, NULL), NULL);
    gp_backing_release(device);
    for (unsigned i = 0; i < 4; i++) {
        users[i] = (struct user){.cache = cache, .device = &fake.device, .seed = i + 1};
        CHECK(pthread_create(&threads[i], NULL, use_cache, &users[i]) == 0, "no thread");
    }
    for (unsigned i = 0; i < 4; i++) {
        (void)pthread_join(threads[i], NULL);
        assert_int_equal(users[i].failures, 0);
    }
    assert_true(gp_backing_cached_bytes(cache) <= 5 * PAGE);
    gp_backing_release(cache);
    fake_device_check_clean(&fake);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- forks --------------------------------------------------------------------------------- */

static bool child_leaves_the_cache_alone(void *context)
{
    struct inner *inner = context;
    gp_error error;
    bool refused = gp_backing_trim(inner->cache, 0, NULL, &error) == GP_ERR_STATE &&
                   error.reason == GP_REASON_FORKED && gp_backing_cached_bytes(inner->cache) == 0;
    gp_backing_release(inner->cache);
    return refused && inner->freed_count == 0 && atomic_load(&inner->fake.releases) == 0;
}

static void a_forked_child_leaves_the_cache_alone(void **state)
{
    (void)state;
    struct inner inner;
    inner_init(&inner, 4 * PAGE);
    give(&inner, take(&inner, 1), 0);
    assert_int_equal(in_child(child_leaves_the_cache_alone, &inner), 0);
    assert_int_equal(gp_backing_cached_bytes(inner.cache), PAGE);
    inner_end(&inner);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kept_chunk_is_handed_out_again),
        cmocka_unit_test(a_chunk_given_back_twice_is_refused),
        cmocka_unit_test(a_chunk_of_another_device_is_not_handed_out),
        cmocka_unit_test(the_oldest_go_back_first),
        cmocka_unit_test(what_is_larger_than_the_bound_goes_straight_back),
        cmocka_unit_test(everything_kept_goes_back_when_memory_is_short),
        cmocka_unit_test(a_failed_inner_free_loses_nothing),
        cmocka_unit_test(destroying_lets_go_of_what_cannot_go_back),
        cmocka_unit_test(a_kept_chunk_that_was_closed_is_not_handed_out),
        cmocka_unit_test(a_kept_chunk_that_another_pool_accepted_is_left_to_it),
        cmocka_unit_test(trimming_stops_at_the_bound),
        cmocka_unit_test(only_a_cache_can_be_trimmed),
        cmocka_unit_test(without_host_memory_a_chunk_goes_straight_back),
        cmocka_unit_test(backings_stack),
        cmocka_unit_test(threads_share_a_cache),
        cmocka_unit_test(a_forked_child_leaves_the_cache_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
