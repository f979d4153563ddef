/* SPDX-License-Identifier: Apache-2.0
 *
 * Backings: the contract around each call, acceptance and return (B1), and what callees may do to a
 * chunk meanwhile (plan item 11: the same chunk supplied again before free returns).
 */
#include <pthread.h>

#include "backing/backing_internal.h"
#include "backing/memory.h"
#include "child.h"
#include "fake_device.h"

#define PAGE (2 * CHECK_MIB)

/* A backing that does what the test says. */
struct script {
    struct fake_device fake;
    gp_backing *backing;
    gp_request request;
    gp_status alloc_status;
    gp_status free_status;
    bool tells; /* fills *error when it fails */
    gp_chunk *answer; /* handed out by alloc; NULL: makes one */
    bool answers_nothing;
    unsigned alloc_count;
    unsigned free_count;
    unsigned destroy_count;
    int entered_inside; /* enters without leave, seen from inside the last call */
    gp_chunk *freed; /* the last chunk that free took: a reference */
    void (*inside_free)(struct script *script, gp_chunk *chunk);
};

static gp_status script_fails(struct script *script, gp_status status, gp_error *error)
{
    return script->tells ? gp_error_set(error, status, "the script says so") : status;
}

static gp_status script_alloc(void *context, const gp_request *request, gp_chunk **out,
                              gp_error *error)
{
    struct script *script = context;
    script->alloc_count++;
    script->entered_inside = atomic_load(&script->fake.entered);
    if (script->alloc_status != GP_OK) {
        return script_fails(script, script->alloc_status, error);
    }
    if (script->answers_nothing) {
        return GP_OK;
    }
    if (script->answer != NULL) {
        *out = gp_chunk_retain(script->answer);
        return GP_OK;
    }
    return gp_chunk_create(request->device, request->size, GP_LOCATION_DEVICE, 0, out, error);
}

static gp_status script_free(void *context, gp_chunk *chunk, const gp_request *request,
                             gp_error *error)
{
    struct script *script = context;
    script->free_count++;
    script->entered_inside = atomic_load(&script->fake.entered);
    assert_int_equal(request->stream, script->request.stream);
    if (script->inside_free != NULL) {
        script->inside_free(script, chunk);
    }
    if (script->free_status != GP_OK) {
        return script_fails(script, script->free_status, error);
    }
    gp_chunk_release(script->freed);
    script->freed = chunk;
    return GP_OK;
}

static void script_destroy(void *context)
{
    struct script *script = context;
    script->destroy_count++;
}

static const gp_backing_ops script_ops = {
    .alloc = script_alloc,
    .free = script_free,
    .destroy = script_destroy,
};

static void script_init(struct script *script)
{
    memset(script, 0, sizeof *script);
    fake_device_init(&script->fake);
    script->request = (gp_request){.size = PAGE, .device = &script->fake.device, .stream = 42};
    CHECK_OK(gp_backing_create(&script_ops, script, &script->backing, NULL), NULL);
}

static void script_end(struct script *script)
{
    gp_chunk_release(script->freed);
    gp_backing_release(script->backing);
    assert_int_equal(script->destroy_count, 1);
    fake_device_check_clean(&script->fake);
}

static gp_chunk *supply(struct script *script)
{
    gp_chunk *chunk;
    gp_error error;
    CHECK_OK(gp__backing_supply(script->backing, &script->request, &chunk, &error), &error);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_SUPPLIED);
    return chunk;
}

/* As a pool does between growth and return. */
static void map_and_unmap(gp_chunk *chunk)
{
    assert_true(gp__chunk_move(chunk, GP__CHUNK_SUPPLIED, GP__CHUNK_MAPPED));
    assert_true(gp__chunk_move(chunk, GP__CHUNK_MAPPED, GP__CHUNK_RETIRING));
    assert_true(gp__chunk_move(chunk, GP__CHUNK_RETIRING, GP__CHUNK_UNMAPPED));
}

/* ---- lifetime ----------------------------------------------------------------------------- */

static void a_backing_is_checked_and_counted(void **state)
{
    (void)state;
    struct script script;
    gp_backing *backing = NULL;
    gp_error error;
    int64_t live = gp__memory_live();
    gp_backing_ops ops = script_ops;
    ops.free = NULL;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_create(&ops, NULL, &backing, &error), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_create(NULL, NULL, &backing, &error), NULL);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, gp_backing_create(&script_ops, NULL, &backing, &error), NULL);
    gp__memory_fail_at(0, 0);
    assert_null(backing);
    script_init(&script);
    assert_ptr_equal(gp_backing_retain(script.backing), script.backing);
    gp_backing_release(script.backing);
    assert_int_equal(script.destroy_count, 0);
    script_end(&script);
    gp_backing_release(NULL);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- the call ----------------------------------------------------------------------------- */

static void a_direct_call_leaves_the_state_alone(void **state)
{
    (void)state;
    struct script script;
    gp_chunk *chunk;
    script_init(&script);
    CHECK_OK(gp_backing_alloc(script.backing, &script.request, &chunk, NULL), NULL);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_IDLE);
    assert_int_equal(gp_chunk_generation(chunk), 0);
    assert_int_equal(script.entered_inside, 1);
    assert_int_equal(atomic_load(&script.fake.entered), 0);
    CHECK_OK(gp_backing_free(script.backing, chunk, &script.request, NULL), NULL);
    assert_int_equal(script.entered_inside, 1);
    assert_int_equal(atomic_load(&script.fake.entered), 0);
    assert_ptr_equal(script.freed, chunk);
    script_end(&script);
}

static void failures_arrive_unchanged(void **state)
{
    (void)state;
    struct script script;
    gp_error error;
    script_init(&script);
    static const gp_status statuses[] = {GP_ERR_OUT_OF_MEMORY, GP_ERR_CALLBACK, GP_ERR_STATE,
                                         GP_NOT_READY};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        gp_chunk *chunk = NULL;
        script.alloc_status = statuses[i];
        script.tells = true;
        CHECK_STATUS(statuses[i],
                     gp__backing_supply(script.backing, &script.request, &chunk, &error), NULL);
        assert_string_equal(error.message, "the script says so");
        /* A backing that fails without a word still gets a sentence. */
        script.tells = false;
        memset(&error, 0, sizeof error);
        CHECK_STATUS(statuses[i],
                     gp__backing_supply(script.backing, &script.request, &chunk, &error), NULL);
        assert_int_equal(error.status, statuses[i]);
        assert_non_null(strstr(error.message, "alloc of 2097152 bytes on sim:3"));
        assert_int_equal(error.size, PAGE);
        CHECK_STATUS(statuses[i], gp__backing_supply(script.backing, &script.request, &chunk, NULL),
                     NULL);
        assert_null(chunk);
        assert_int_equal(atomic_load(&script.fake.entered), 0);
    }
    script_end(&script);
}

static void a_request_that_makes_no_sense_never_reaches_the_backing(void **state)
{
    (void)state;
    struct script script;
    gp_chunk *chunk = NULL;
    gp_error error;
    script_init(&script);
    gp_request request = script.request;
    request.size = PAGE - 1;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_alloc(script.backing, &request, &chunk, &error), NULL);
    request.size = 0;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_alloc(script.backing, &request, &chunk, &error), NULL);
    request = script.request;
    request.device = NULL;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_alloc(script.backing, &request, &chunk, &error), NULL);
    script.fake.enter_status = GP_ERR_DRIVER;
    CHECK_STATUS(GP_ERR_DRIVER, gp_backing_alloc(script.backing, &script.request, &chunk, &error),
                 NULL);
    assert_string_equal(error.call, "fake_enter");
    assert_int_equal(script.alloc_count, 0);
    assert_null(chunk);
    script_end(&script);
}

/* ---- answers ------------------------------------------------------------------------------ */

static void check_refused(struct script *script, gp_status status, const char *words)
{
    gp_chunk *chunk = NULL;
    gp_error error;
    CHECK_STATUS(status, gp__backing_supply(script->backing, &script->request, &chunk, &error),
                 NULL);
    CHECK(strstr(error.message, words) != NULL, "want \"%s\" in \"%s\"", words, error.message);
    assert_int_equal(error.size == 0 || error.size == PAGE, 1);
    assert_null(chunk);
    assert_int_equal(script->free_count, 0);
}

static void wrong_answers_are_refused(void **state)
{
    (void)state;
    struct script script;
    struct fake_device elsewhere;
    script_init(&script);
    fake_device_init(&elsewhere);
    script.answers_nothing = true;
    check_refused(&script, GP_ERR_CONTRACT_TYPE, "gave no chunk");
    script.answers_nothing = false;

    CHECK_OK(
        gp_chunk_create(&script.fake.device, 2 * PAGE, GP_LOCATION_DEVICE, 0, &script.answer, NULL),
        NULL);
    check_refused(&script, GP_ERR_CONTRACT_VALUE, "of 4194304 bytes");
    gp_chunk_release(script.answer);

    CHECK_OK(gp_chunk_create(&elsewhere.device, PAGE, GP_LOCATION_DEVICE, 0, &script.answer, NULL),
             NULL);
    check_refused(&script, GP_ERR_CONTRACT_VALUE, "on sim:3");
    gp_chunk_release(script.answer);

    CHECK_OK(
        gp_chunk_create(&script.fake.device, PAGE, GP_LOCATION_DEVICE, 0, &script.answer, NULL),
        NULL);
    CHECK_OK(gp_chunk_close(script.answer, NULL), NULL);
    check_refused(&script, GP_ERR_CONTRACT_VALUE, "which is closed");
    gp_chunk_release(script.answer);
    fake_device_check_clean(&elsewhere);
    script_end(&script);
}

static void a_chunk_is_accepted_once(void **state)
{
    (void)state;
    struct script script;
    gp_error error;
    script_init(&script);
    CHECK_OK(
        gp_chunk_create(&script.fake.device, PAGE, GP_LOCATION_DEVICE, 0, &script.answer, NULL),
        NULL);
    gp_chunk *chunk = supply(&script);
    assert_ptr_equal(chunk, script.answer);
    check_refused(&script, GP_ERR_CONTRACT_VALUE, "which is supplied");
    assert_int_equal(gp_chunk_generation(chunk), 1);
    /* Nor does somebody else give it back. */
    CHECK_STATUS(GP_ERR_STATE, gp_backing_free(script.backing, chunk, &script.request, &error),
                 NULL);
    assert_int_equal(error.reason, GP_REASON_IN_USE);
    map_and_unmap(chunk);
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, &error), &error);
    gp_chunk *again = supply(&script);
    assert_int_equal(gp_chunk_generation(again), 2);
    CHECK_OK(gp__backing_return(script.backing, again, &script.request, &error), &error);
    gp_chunk_release(script.answer);
    script_end(&script);
}

/* ---- returning ---------------------------------------------------------------------------- */

static void a_returned_chunk_is_idle_inside_free(struct script *script, gp_chunk *chunk)
{
    (void)script;
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_IDLE);
}

static void chunks_go_back_from_every_state_that_may(void **state)
{
    (void)state;
    struct script script;
    script_init(&script);
    script.inside_free = a_returned_chunk_is_idle_inside_free;
    gp_chunk *chunk = supply(&script);
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, NULL), NULL);
    chunk = supply(&script);
    map_and_unmap(chunk);
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, NULL), NULL);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_IDLE);
    assert_int_equal(script.free_count, 2);
    script_end(&script);
}

static void a_failed_free_leaves_the_chunk_unreturned(void **state)
{
    (void)state;
    struct script script;
    gp_error error;
    script_init(&script);
    gp_chunk *chunk = supply(&script);
    uint64_t generation = gp_chunk_generation(chunk);
    map_and_unmap(chunk);
    script.free_status = GP_ERR_CALLBACK;
    script.tells = true;
    for (unsigned tries = 1; tries <= 3; tries++) {
        CHECK_STATUS(GP_ERR_CALLBACK,
                     gp__backing_return(script.backing, chunk, &script.request, &error), NULL);
        assert_string_equal(error.message, "the script says so");
        assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_UNRETURNED);
        assert_true(gp__backing_left_unreturned(chunk, generation));
        assert_true(gp_chunk_is_in_use(chunk));
        assert_int_equal(script.free_count, tries);
    }
    /* A free that could not even be called is a failure like any other. */
    script.fake.enter_status = GP_ERR_DRIVER;
    CHECK_STATUS(GP_ERR_DRIVER, gp__backing_return(script.backing, chunk, &script.request, &error),
                 NULL);
    assert_true(gp__backing_left_unreturned(chunk, generation));
    assert_int_equal(script.free_count, 3);
    script.fake.enter_status = GP_OK;
    script.free_status = GP_OK;
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, &error), &error);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_IDLE);
    script_end(&script);
}

/* ---- what the callee may do before free returns ---------------------------------------------- */

static void *accept_elsewhere(void *context)
{
    gp_chunk *chunk = context;
    return gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_SUPPLIED) ? chunk : NULL;
}

/* Another pool's thread takes the chunk while free is still running. */
static void supply_elsewhere(struct script *script, gp_chunk *chunk)
{
    pthread_t thread;
    void *accepted = NULL;
    (void)script;
    CHECK(pthread_create(&thread, NULL, accept_elsewhere, chunk) == 0, "no thread");
    CHECK(pthread_join(thread, &accepted) == 0, "no join");
    assert_ptr_equal(accepted, chunk);
}

static void a_chunk_may_be_supplied_again_before_free_returns(void **state)
{
    (void)state;
    struct script script;
    script_init(&script);
    gp_chunk *chunk = supply(&script);
    map_and_unmap(chunk);
    script.inside_free = supply_elsewhere;
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, NULL), NULL);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_SUPPLIED);
    assert_int_equal(gp_chunk_generation(chunk), 2);
    script.inside_free = NULL;
    gp_chunk_retain(chunk); /* the other pool's */
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, NULL), NULL);
    script_end(&script);
}

/* The edge in backing_internal.h: free fails and yet the chunk is somebody else's. */
static void a_failed_free_of_a_chunk_that_went_elsewhere_keeps_nothing(void **state)
{
    (void)state;
    struct script script;
    script_init(&script);
    gp_chunk *chunk = supply(&script);
    uint64_t generation = gp_chunk_generation(chunk);
    map_and_unmap(chunk);
    script.inside_free = supply_elsewhere;
    script.free_status = GP_ERR_CALLBACK;
    CHECK_STATUS(GP_ERR_CALLBACK, gp__backing_return(script.backing, chunk, &script.request, NULL),
                 NULL);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_SUPPLIED);
    assert_false(gp__backing_left_unreturned(chunk, generation));
    /* The other pool cannot give it back either: unreturned, but not the first one's. */
    script.inside_free = NULL;
    CHECK_STATUS(GP_ERR_CALLBACK, gp__backing_return(script.backing, chunk, &script.request, NULL),
                 NULL);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_UNRETURNED);
    assert_false(gp__backing_left_unreturned(chunk, generation));
    assert_true(gp__backing_left_unreturned(chunk, generation + 1));
    gp_chunk_release(chunk);
    script_end(&script);
}

static void close_it(struct script *script, gp_chunk *chunk)
{
    (void)script;
    CHECK_OK(gp_chunk_close(chunk, NULL), NULL);
}

static void free_may_close_the_chunk(void **state)
{
    (void)state;
    struct script script;
    script_init(&script);
    script.inside_free = close_it;
    gp_chunk *chunk = supply(&script);
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, NULL), NULL);
    assert_true(gp_chunk_is_closed(chunk));
    chunk = supply(&script);
    uint64_t generation = gp_chunk_generation(chunk);
    script.free_status = GP_ERR_CALLBACK;
    CHECK_STATUS(GP_ERR_CALLBACK, gp__backing_return(script.backing, chunk, &script.request, NULL),
                 NULL);
    assert_false(gp__backing_left_unreturned(chunk, generation));
    gp_chunk_release(chunk);
    script_end(&script);
}

/* ---- the device backing --------------------------------------------------------------------- */

static void the_device_backing_makes_and_releases(void **state)
{
    (void)state;
    static const gp_location locations[] = {GP_LOCATION_DEVICE, GP_LOCATION_HOST};
    gp_error error;
    gp_backing *backing = NULL;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_backing_device((gp_location)9, &backing, &error), NULL);
    assert_null(backing);
    for (size_t i = 0; i < 2; i++) {
        struct fake_device fake;
        gp_chunk *chunk;
        fake_device_init(&fake);
        gp_request request = {.size = 3 * PAGE, .device = &fake.device};
        CHECK_OK(gp_backing_device(locations[i], &backing, &error), &error);
        CHECK_OK(gp__backing_supply(backing, &request, &chunk, &error), &error);
        assert_int_equal(gp_chunk_location(chunk), locations[i]);
        assert_int_equal(atomic_load(&fake.last_location), locations[i]);
        assert_int_equal(gp_chunk_size(chunk), 3 * PAGE);
        CHECK_OK(gp__backing_return(backing, chunk, &request, &error), &error);
        fake_device_check_clean(&fake);
        fake.create_status = GP_ERR_OUT_OF_MEMORY;
        CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, gp__backing_supply(backing, &request, &chunk, &error),
                     NULL);
        assert_string_equal(error.call, "fake_create");
        gp_backing_release(backing);
    }
}

/* ---- forks --------------------------------------------------------------------------------- */

static bool child_enters_no_backing(void *context)
{
    struct script *script = context;
    gp_chunk *chunk;
    gp_error error;
    unsigned before = script->alloc_count + script->free_count;
    bool refused =
        gp__backing_supply(script->backing, &script->request, &chunk, &error) == GP_ERR_STATE &&
        error.reason == GP_REASON_FORKED &&
        gp_backing_free(script->backing, script->freed, &script->request, &error) == GP_ERR_STATE &&
        error.reason == GP_REASON_FORKED;
    return refused && script->alloc_count + script->free_count == before;
}

static void a_forked_child_enters_no_backing(void **state)
{
    (void)state;
    struct script script;
    script_init(&script);
    gp_chunk *chunk = supply(&script);
    CHECK_OK(gp__backing_return(script.backing, chunk, &script.request, NULL), NULL);
    assert_int_equal(in_child(child_enters_no_backing, &script), 0);
    script_end(&script);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_backing_is_checked_and_counted),
        cmocka_unit_test(a_direct_call_leaves_the_state_alone),
        cmocka_unit_test(failures_arrive_unchanged),
        cmocka_unit_test(a_request_that_makes_no_sense_never_reaches_the_backing),
        cmocka_unit_test(wrong_answers_are_refused),
        cmocka_unit_test(a_chunk_is_accepted_once),
        cmocka_unit_test(chunks_go_back_from_every_state_that_may),
        cmocka_unit_test(a_failed_free_leaves_the_chunk_unreturned),
        cmocka_unit_test(a_chunk_may_be_supplied_again_before_free_returns),
        cmocka_unit_test(a_failed_free_of_a_chunk_that_went_elsewhere_keeps_nothing),
        cmocka_unit_test(free_may_close_the_chunk),
        cmocka_unit_test(the_device_backing_makes_and_releases),
        cmocka_unit_test(a_forked_child_enters_no_backing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
