/* SPDX-License-Identifier: Apache-2.0
 *
 * Chunks: references, adoption, closing, and a state machine that takes the drawn steps and no
 * other (V4).
 */
#include "backing/backing_internal.h"
#include "backing/memory.h"
#include "child.h"
#include "fake_device.h"

#define PAGE (2 * CHECK_MIB)

static void count_release(void *context)
{
    ++*(int *)context;
}

static void a_chunk_lives_as_long_as_its_references(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *chunk;
    gp_chunk *next;
    int user;
    int64_t live = gp__memory_live();
    fake_device_init(&fake);
    CHECK_OK(gp_chunk_create(&fake.device, 2 * PAGE, GP_LOCATION_HOST, 0, &chunk, NULL), NULL);
    CHECK_OK(gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &next, NULL), NULL);
    assert_int_equal(gp_chunk_size(chunk), 2 * PAGE);
    assert_ptr_equal(gp_chunk_device(chunk), &fake.device);
    assert_int_equal(gp_chunk_location(chunk), GP_LOCATION_HOST);
    assert_int_equal(gp_chunk_handle(chunk), 1);
    assert_int_equal(gp__chunk_memory(chunk), 1);
    assert_int_equal(gp_chunk_id(next), gp_chunk_id(chunk) + 1);
    assert_int_equal(gp_chunk_generation(chunk), 0);
    assert_null(gp_chunk_user(chunk));
    gp_chunk_set_user(chunk, &user);
    assert_ptr_equal(gp_chunk_user(chunk), &user);
    assert_ptr_equal(gp_chunk_retain(chunk), chunk);
    gp_chunk_release(chunk);
    assert_int_equal(atomic_load(&fake.releases), 0);
    gp_chunk_release(chunk);
    assert_int_equal(atomic_load(&fake.releases), 1);
    gp_chunk_release(next);
    gp_chunk_release(NULL);
    fake_device_check_clean(&fake);
    assert_int_equal(gp__memory_live(), live);
}

static void a_chunk_that_cannot_be_made_leaves_nothing(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *chunk = NULL;
    gp_error error;
    int64_t live = gp__memory_live();
    fake_device_init(&fake);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_chunk_create(&fake.device, 0, GP_LOCATION_DEVICE, 0, &chunk, &error), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_chunk_create(&fake.device, PAGE + 1, GP_LOCATION_DEVICE, 0, &chunk, &error),
                 NULL);
    assert_int_equal(error.size, PAGE + 1);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_chunk_create(NULL, PAGE, GP_LOCATION_DEVICE, 0, &chunk, &error), NULL);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY,
                 gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, &error), NULL);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY,
                 gp_chunk_adopt(&fake.device, 5, PAGE, NULL, NULL, &chunk, &error), NULL);
    gp__memory_fail_at(0, 0);
    fake.create_status = GP_ERR_OUT_OF_MEMORY;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, &error), NULL);
    assert_string_equal(error.call, "fake_create");
    assert_null(chunk);
    fake_device_check_clean(&fake);
    assert_int_equal(gp__memory_live(), live);
}

static void an_adopted_handle_is_released_as_its_owner_says(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *chunk;
    gp_error error;
    int released = 0;
    fake_device_init(&fake);
    CHECK_OK(gp_chunk_adopt(&fake.device, 77, PAGE, count_release, &released, &chunk, NULL), NULL);
    assert_int_equal(gp_chunk_handle(chunk), 77);
    gp_chunk_release(chunk);
    assert_int_equal(released, 1);
    assert_int_equal(atomic_load(&fake.releases), 0);
    CHECK_OK(gp_chunk_adopt(&fake.device, 78, PAGE, NULL, NULL, &chunk, NULL), NULL);
    gp_chunk_release(chunk);
    assert_int_equal(atomic_load(&fake.releases), 1);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_adopt(&fake.device, 0, PAGE, NULL, NULL, &chunk, &error),
                 NULL);
    fake.device.kind = GP_DEVICE_HOST;
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_chunk_adopt(&fake.device, 79, PAGE, NULL, NULL, &chunk, &error), NULL);
}

static void closing_releases_at_once_and_once(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *chunk;
    gp_error error;
    fake_device_init(&fake);
    CHECK_OK(gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, NULL), NULL);
    assert_true(gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_SUPPLIED));
    assert_true(gp_chunk_is_in_use(chunk));
    CHECK_STATUS(GP_ERR_STATE, gp_chunk_close(chunk, &error), NULL);
    assert_int_equal(error.reason, GP_REASON_IN_USE);
    assert_false(gp_chunk_is_closed(chunk));
    assert_true(gp__chunk_move(chunk, GP__CHUNK_SUPPLIED, GP__CHUNK_UNMAPPED));
    assert_true(gp__chunk_move(chunk, GP__CHUNK_UNMAPPED, GP__CHUNK_IDLE));
    CHECK_OK(gp_chunk_close(chunk, &error), &error);
    assert_true(gp_chunk_is_closed(chunk));
    assert_false(gp_chunk_is_in_use(chunk));
    CHECK_OK(gp_chunk_close(chunk, &error), &error);
    assert_int_equal(atomic_load(&fake.releases), 1);
    /* A pool that comes too late does not get it. */
    assert_false(gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_SUPPLIED));
    gp_chunk_release(chunk);
    fake_device_check_clean(&fake);
}

static void a_release_that_the_driver_refuses_is_counted(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *chunk;
    gp_error error;
    uint64_t failed = gp__chunk_failed_releases();
    fake_device_init(&fake);
    CHECK_OK(gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, NULL), NULL);
    fake.release_status = GP_ERR_DRIVER;
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_close(chunk, &error), NULL);
    assert_string_equal(error.call, "fake_release");
    assert_true(gp_chunk_is_closed(chunk));
    gp_chunk_release(chunk);
    assert_int_equal(gp__chunk_failed_releases(), failed + 1);
    CHECK_OK(gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, NULL), NULL);
    gp_chunk_release(chunk);
    assert_int_equal(gp__chunk_failed_releases(), failed + 2);
}

/* ---- chunk states: the drawing in backing.h -------------------------------------------------- */

#define STATE_COUNT (GP__CHUNK_CLOSED + 1)

static const bool drawn[STATE_COUNT][STATE_COUNT] = {
    [GP__CHUNK_IDLE] =
        {[GP__CHUNK_SUPPLIED] = true, [GP__CHUNK_CLOSED] = true, [GP__CHUNK_UNRETURNED] = true},
    [GP__CHUNK_SUPPLIED] =
        {[GP__CHUNK_MAPPED] = true, [GP__CHUNK_UNMAPPED] = true, [GP__CHUNK_ABANDONED] = true},
    [GP__CHUNK_MAPPED] = {[GP__CHUNK_RETIRING] = true},
    [GP__CHUNK_RETIRING] =
        {[GP__CHUNK_MAPPED] = true, [GP__CHUNK_UNMAPPED] = true, [GP__CHUNK_ABANDONED] = true},
    [GP__CHUNK_UNMAPPED] = {[GP__CHUNK_IDLE] = true, [GP__CHUNK_SUPPLIED] = true},
    [GP__CHUNK_UNRETURNED] = {[GP__CHUNK_UNMAPPED] = true},
};

/* A way to each state, as steps from IDLE. */
static const enum gp__chunk_state ways[STATE_COUNT][4] = {
    [GP__CHUNK_SUPPLIED] = {GP__CHUNK_SUPPLIED},
    [GP__CHUNK_MAPPED] = {GP__CHUNK_SUPPLIED, GP__CHUNK_MAPPED},
    [GP__CHUNK_RETIRING] = {GP__CHUNK_SUPPLIED, GP__CHUNK_MAPPED, GP__CHUNK_RETIRING},
    [GP__CHUNK_UNMAPPED] = {GP__CHUNK_SUPPLIED, GP__CHUNK_UNMAPPED},
    [GP__CHUNK_UNRETURNED] = {GP__CHUNK_UNRETURNED},
    [GP__CHUNK_ABANDONED] = {GP__CHUNK_SUPPLIED, GP__CHUNK_ABANDONED},
    [GP__CHUNK_CLOSED] = {GP__CHUNK_CLOSED},
};

static gp_chunk *chunk_in(struct fake_device *fake, enum gp__chunk_state state)
{
    gp_chunk *chunk;
    CHECK_OK(gp_chunk_create(&fake->device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, NULL), NULL);
    for (size_t i = 0; i < 4 && ways[state][i] != GP__CHUNK_IDLE; i++) {
        assert_true(gp__chunk_move(chunk, gp__chunk_state_of(chunk), ways[state][i]));
    }
    assert_int_equal(gp__chunk_state_of(chunk), state);
    return chunk;
}

struct step {
    gp_chunk *chunk;
    enum gp__chunk_state from;
    enum gp__chunk_state to;
};

static bool take_step(void *context)
{
    const struct step *step = context;
    return gp__chunk_move(step->chunk, step->from, step->to);
}

static void exactly_the_drawn_steps_are_legal(void **state)
{
    (void)state;
    struct fake_device fake;
    fake_device_init(&fake);
    for (int from = 0; from < STATE_COUNT; from++) {
        for (int to = 0; to < STATE_COUNT; to++) {
            struct step step = {.from = (enum gp__chunk_state)from, .to = (enum gp__chunk_state)to};
            step.chunk = chunk_in(&fake, step.from);
            int status = in_child(take_step, &step);
            bool legal = WIFEXITED(status) && WEXITSTATUS(status) == 0;
            bool aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
            CHECK(legal == drawn[from][to] && aborted == !legal, "%s -> %s: wait status %#x",
                  gp__chunk_state_text(step.from), gp__chunk_state_text(step.to), status);
            gp_chunk_release(step.chunk);
        }
    }
}

static void a_step_from_another_state_changes_nothing(void **state)
{
    (void)state;
    struct fake_device fake;
    fake_device_init(&fake);
    gp_chunk *chunk = chunk_in(&fake, GP__CHUNK_MAPPED);
    assert_int_equal(gp_chunk_generation(chunk), 1);
    assert_false(gp__chunk_move(chunk, GP__CHUNK_IDLE, GP__CHUNK_SUPPLIED));
    assert_int_equal(gp_chunk_generation(chunk), 1);
    assert_int_equal(gp__chunk_state_of(chunk), GP__CHUNK_MAPPED);
    gp_chunk_release(chunk);
}

/* With its last reference a chunk gives its memory back only where nothing can be mapped any more.
 * */
static void memory_that_may_be_mapped_is_left_alone(void **state)
{
    (void)state;
    for (int one = 0; one < STATE_COUNT; one++) {
        struct fake_device fake;
        fake_device_init(&fake);
        gp_chunk *chunk = chunk_in(&fake, (enum gp__chunk_state)one);
        gp_chunk_release(chunk);
        bool expected =
            one == GP__CHUNK_IDLE || one == GP__CHUNK_UNMAPPED || one == GP__CHUNK_UNRETURNED;
        CHECK(atomic_load(&fake.releases) == (expected ? 1 : 0), "state %s",
              gp__chunk_state_text((enum gp__chunk_state)one));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chunk_lives_as_long_as_its_references),
        cmocka_unit_test(a_chunk_that_cannot_be_made_leaves_nothing),
        cmocka_unit_test(an_adopted_handle_is_released_as_its_owner_says),
        cmocka_unit_test(closing_releases_at_once_and_once),
        cmocka_unit_test(a_release_that_the_driver_refuses_is_counted),
        cmocka_unit_test(exactly_the_drawn_steps_are_legal),
        cmocka_unit_test(a_step_from_another_state_changes_nothing),
        cmocka_unit_test(memory_that_may_be_mapped_is_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
