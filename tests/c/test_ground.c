/* SPDX-License-Identifier: Apache-2.0
 *
 * The ground without chunks and backings: errors, the heap and its fault injector, forks and exit,
 * the device registry (P2, P3).
 */
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backing/backing_internal.h"
#include "backing/memory.h"
#include "child.h"
#include "fake_device.h"

#define PAGE (2 * CHECK_MIB)

/* ---- errors ------------------------------------------------------------------------------- */

static void errors_say_what_happened(void **state)
{
    (void)state;
    gp_error error;
    memset(&error, 0x5a, sizeof error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_error_set(&error, GP_ERR_ARGUMENT, "size %d", 3), NULL);
    assert_int_equal(error.status, GP_ERR_ARGUMENT);
    assert_int_equal(error.reason, GP_REASON_NONE);
    assert_int_equal(error.code, 0);
    assert_null(error.call);
    assert_int_equal(error.size, 0);
    assert_true(error.limit == SIZE_MAX);
    assert_string_equal(error.name, "");
    assert_string_equal(error.message, "size 3");
    CHECK_STATUS(GP_ERR_LIMIT, gp_error_set(NULL, GP_ERR_LIMIT, "nobody listens"), NULL);
    CHECK_STATUS(GP_ERR_STATE, gp__state_error(&error, GP_REASON_CLOSED, "over"), NULL);
    assert_int_equal(error.status, GP_ERR_STATE);
    assert_int_equal(error.reason, GP_REASON_CLOSED);
    CHECK_STATUS(GP_ERR_STATE, gp__state_error(NULL, GP_REASON_CLOSED, "over"), NULL);
}

static void a_message_can_be_wrapped_and_is_cut(void **state)
{
    (void)state;
    gp_error error;
    gp_error_set(&error, GP_ERR_DRIVER, "inner");
    gp_error_set(&error, GP_ERR_CALLBACK, "outer: %s", error.message);
    assert_string_equal(error.message, "outer: inner");
    char long_text[1000];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    gp_error_set(&error, GP_ERR_CALLBACK, "%s", long_text);
    assert_int_equal(strlen(error.message), sizeof error.message - 1);
}

static void driver_errors_carry_call_size_address_and_name(void **state)
{
    (void)state;
    gp_error error;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 gp__driver_error(&error, GP_ERR_OUT_OF_MEMORY, "cuMemCreate", 2,
                                  "CUDA_ERROR_OUT_OF_MEMORY", 0x7000, 4096),
                 NULL);
    assert_string_equal(error.call, "cuMemCreate");
    assert_int_equal(error.code, 2);
    assert_int_equal(error.size, 4096);
    assert_string_equal(error.name, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_string_equal(error.message,
                        "cuMemCreate of 4096 bytes at 0x7000 failed: CUDA_ERROR_OUT_OF_MEMORY (2); "
                        "free memory of the device, or ask for less");
    gp__driver_error(&error, GP_ERR_DRIVER, "cuEventRecord", 1, "CUDA_ERROR_INVALID_VALUE", 0, 0);
    assert_string_equal(error.message, "cuEventRecord failed: CUDA_ERROR_INVALID_VALUE (1)");
    gp__errno_error(&error, GP_ERR_ADDRESS_SPACE, "mmap", ENOMEM, 0, 8);
    assert_string_equal(error.name, "ENOMEM");
    assert_non_null(strstr(error.message, "addresses, not of memory"));
    gp__errno_error(&error, GP_ERR_DRIVER, "mmap", 4095, 0, 8);
    assert_string_equal(error.name, "errno 4095");
}

static void every_status_has_words_of_its_own(void **state)
{
    (void)state;
    for (int one = GP_OK; one <= GP_ERR_UNAVAILABLE; one++) {
        const char *text = gp_status_text((gp_status)one);
        assert_string_not_equal(text, "unknown status");
        for (int other = GP_OK; other < one; other++) {
            assert_string_not_equal(text, gp_status_text((gp_status)other));
        }
    }
    assert_string_equal(gp_status_text((gp_status)(GP_ERR_UNAVAILABLE + 1)), "unknown status");
}

/* ---- the heap ----------------------------------------------------------------------------- */

static void the_nth_allocation_fails_once(void **state)
{
    (void)state;
    int64_t live = gp__memory_live();
    gp__memory_fail_at(2, 0);
    void *first = gp__calloc(1, 8);
    void *second = gp__calloc(1, 8);
    void *third = gp__calloc(1, 8);
    assert_non_null(first);
    assert_null(second);
    assert_non_null(third);
    assert_int_equal(gp__memory_live() - live, 2);
    assert_int_equal(gp__memory_fail_at(0, 0), 3);
    gp__free(first);
    gp__free(third);
    gp__free(NULL);
    assert_int_equal(gp__memory_live(), live);
}

static void the_heap_says_what_it_holds(void **state)
{
    (void)state;
    size_t before = gp_bookkeeping_bytes();
    char *first = gp__calloc(10, 100);
    size_t one = gp_bookkeeping_bytes() - before;
    assert_true(one >= 1000 && one < 1100);
    first = gp__realloc(first, 300, 100);
    assert_true(gp_bookkeeping_bytes() - before >= 30000);
    gp__memory_fail_at(1, 0);
    assert_null(gp__realloc(first, 9000, 100));
    gp__memory_fail_at(0, 0);
    assert_true(gp_bookkeeping_bytes() - before < 31000);
    gp__free(first);
    assert_int_equal(gp_bookkeeping_bytes(), before);
}

static void all_later_allocations_fail(void **state)
{
    (void)state;
    gp__memory_fail_at(2, 1);
    unsigned char *array = gp__calloc(4, 1);
    assert_non_null(array);
    assert_int_equal(array[3], 0);
    array[3] = 7;
    assert_null(gp__realloc(array, 8, 1));
    assert_null(gp__calloc(1, 1));
    assert_null(gp__realloc(NULL, 1, 1));
    assert_int_equal(gp__memory_fail_at(0, 0), 4);
    /* A failed growth left the array alone. */
    assert_int_equal(array[3], 7);
    array = gp__realloc(array, 1024, 1);
    assert_non_null(array);
    assert_int_equal(array[3], 7);
    gp__free(array);
}

static void sizes_that_overflow_fail(void **state)
{
    (void)state;
    /* Out of the compiler's sight, which would rather warn than compile them. */
    volatile size_t half = SIZE_MAX / 2 + 1;
    int64_t live = gp__memory_live();
    assert_null(gp__calloc(half, 2));
    assert_null(gp__realloc(NULL, half, 2));
    assert_null(gp__realloc(NULL, half, 4));
    void *nothing = gp__calloc(0, 8);
    assert_non_null(nothing);
    nothing = gp__realloc(nothing, 0, 8);
    assert_non_null(nothing);
    gp__free(nothing);
    assert_int_equal(gp__memory_live(), live);
}

/* ---- forks and exit ------------------------------------------------------------------------- */

static bool is_forked_once(void *context)
{
    gp_error error;
    gp_device *device = NULL;
    (void)context;
    return gp__fork_generation() == 1 && gp__check_process(&error) == GP_ERR_STATE &&
           error.reason == GP_REASON_FORKED &&
           gp_device_open(GP_DEVICE_SIM, 90, &device, &error) == GP_ERR_STATE &&
           error.reason == GP_REASON_FORKED && device == NULL;
}

static bool grandchild_is_forked_twice(void *context)
{
    (void)context;
    pid_t child = fork();
    if (child == 0) {
        _exit(gp__fork_generation() == 2 ? 0 : 1);
    }
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0 &&
           gp__fork_generation() == 1;
}

static void forks_are_counted(void **state)
{
    (void)state;
    assert_int_equal(gp__fork_generation(), 0);
    CHECK_OK(gp__check_process(NULL), NULL);
    assert_int_equal(in_child(is_forked_once, NULL), 0);
    assert_int_equal(in_child(grandchild_is_forked_twice, NULL), 0);
    assert_int_equal(gp__fork_generation(), 0);
}

static bool child_leaves_the_driver_alone(void *context)
{
    gp_chunk *chunk = context;
    struct fake_device *fake = fake_of(gp_chunk_device(chunk));
    gp_chunk *other;
    gp_error error;
    bool refused = gp_chunk_create(&fake->device, PAGE, GP_LOCATION_DEVICE, 0, &other, &error) ==
                       GP_ERR_STATE &&
                   error.reason == GP_REASON_FORKED &&
                   gp_chunk_close(chunk, &error) == GP_ERR_STATE &&
                   error.reason == GP_REASON_FORKED;
    gp_chunk_release(chunk);
    return refused && atomic_load(&fake->creates) == 1 && atomic_load(&fake->releases) == 0;
}

static void a_forked_child_makes_no_driver_call(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *chunk;
    fake_device_init(&fake);
    CHECK_OK(gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, NULL), NULL);
    assert_int_equal(in_child(child_leaves_the_driver_alone, chunk), 0);
    gp_chunk_release(chunk);
    fake_device_check_clean(&fake);
}

static void count_release(void *context)
{
    ++*(int *)context;
}

/* Irreversible, so main() runs it last. */
static void after_begin_exit_nothing_is_called(void **state)
{
    (void)state;
    struct fake_device fake;
    gp_chunk *made;
    gp_chunk *adopted;
    gp_chunk *other;
    gp_device *device;
    gp_error error;
    int released = 0;
    fake_device_init(&fake);
    CHECK_OK(gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &made, NULL), NULL);
    CHECK_OK(gp_chunk_adopt(&fake.device, 9, PAGE, count_release, &released, &adopted, NULL), NULL);
    int64_t live = gp__memory_live();
    assert_false(gp__is_exiting());
    gp_begin_exit();
    assert_true(gp__is_exiting());
    CHECK_STATUS(GP_ERR_STATE, gp_chunk_close(made, &error), NULL);
    assert_int_equal(error.reason, GP_REASON_EXITING);
    CHECK_STATUS(GP_ERR_STATE,
                 gp_chunk_create(&fake.device, PAGE, GP_LOCATION_DEVICE, 0, &other, &error), NULL);
    assert_int_equal(error.reason, GP_REASON_EXITING);
    CHECK_STATUS(GP_ERR_STATE, gp_device_open(GP_DEVICE_HOST, 0, &device, &error), NULL);
    assert_int_equal(error.reason, GP_REASON_EXITING);
    gp_chunk_release(made);
    gp_chunk_release(adopted);
    assert_int_equal(atomic_load(&fake.releases), 0);
    assert_int_equal(released, 0);
    assert_int_equal(gp__memory_live(), live - 2);
}

/* ---- devices ------------------------------------------------------------------------------ */

static struct fake_device opened[2];
static int open_count;
static gp_status open_status;

static gp_status open_fake(int ordinal, gp_device **out, gp_error *error)
{
    open_count++;
    if (open_status != GP_OK) {
        return gp_error_set(error, open_status, "no fake device %d", ordinal);
    }
    fake_device_init(&opened[ordinal]);
    opened[ordinal].device.ordinal = ordinal;
    *out = &opened[ordinal].device;
    return GP_OK;
}

static void a_device_is_opened_once(void **state)
{
    (void)state;
    gp_device *device = NULL;
    gp_device *again;
    gp_device *other;
    gp_error error;
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_device_open(GP_DEVICE_SIM, 0, &device, &error), NULL);
    assert_null(device);
    gp__device_set_sim_opener(open_fake);
    open_status = GP_ERR_UNAVAILABLE;
    int64_t live = gp__memory_live();
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_device_open(GP_DEVICE_SIM, 0, &device, &error), NULL);
    assert_string_equal(error.message, "no fake device 0");
    assert_int_equal(gp__memory_live(), live);
    /* The failure is not remembered. */
    open_status = GP_OK;
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, gp_device_open(GP_DEVICE_SIM, 0, &device, &error), NULL);
    gp__memory_fail_at(0, 0);
    assert_null(device);
    open_count = 0;
    CHECK_OK(gp_device_open(GP_DEVICE_SIM, 0, &device, &error), &error);
    CHECK_OK(gp_device_open(GP_DEVICE_SIM, 0, &again, &error), &error);
    CHECK_OK(gp_device_open(GP_DEVICE_SIM, 1, &other, &error), &error);
    assert_ptr_equal(device, again);
    assert_ptr_not_equal(device, other);
    assert_int_equal(open_count, 2);
}

static void devices_answer_for_themselves(void **state)
{
    (void)state;
    struct fake_device fake;
    size_t free_bytes;
    size_t total_bytes;
    fake_device_init(&fake);
    assert_int_equal(gp_device_kind_of(&fake.device), GP_DEVICE_SIM);
    assert_int_equal(gp_device_ordinal(&fake.device), 3);
    assert_int_equal(gp_device_id(&fake.device), -5);
    assert_string_equal(gp_device_name(&fake.device), "sim:3");
    assert_int_equal(gp_device_granularity(&fake.device), PAGE);
    assert_true(gp_device_is_device_accessible(&fake.device));
    assert_false(gp_device_is_host_accessible(&fake.device));
    CHECK_OK(gp_device_memory(&fake.device, &free_bytes, &total_bytes, NULL), NULL);
    assert_int_equal(free_bytes, 3);
    assert_int_equal(total_bytes, 5);
    fake.device.kind = GP_DEVICE_CUDA;
    assert_int_equal(gp_device_id(&fake.device), 3);
    fake.device.kind = GP_DEVICE_HOST;
    assert_int_equal(gp_device_id(&fake.device), -1);
}

static void impossible_devices_are_refused(void **state)
{
    (void)state;
    gp_device *device = NULL;
    gp_error error;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_device_open(GP_DEVICE_CUDA, -1, &device, &error), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_device_open(GP_DEVICE_HOST, 1, &device, &error), NULL);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_device_open((gp_device_kind)77, 0, &device, &error), NULL);
    assert_null(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_say_what_happened),
        cmocka_unit_test(a_message_can_be_wrapped_and_is_cut),
        cmocka_unit_test(driver_errors_carry_call_size_address_and_name),
        cmocka_unit_test(every_status_has_words_of_its_own),
        cmocka_unit_test(the_nth_allocation_fails_once),
        cmocka_unit_test(the_heap_says_what_it_holds),
        cmocka_unit_test(all_later_allocations_fail),
        cmocka_unit_test(sizes_that_overflow_fail),
        cmocka_unit_test(forks_are_counted),
        cmocka_unit_test(a_forked_child_makes_no_driver_call),
        cmocka_unit_test(a_device_is_opened_once),
        cmocka_unit_test(devices_answer_for_themselves),
        cmocka_unit_test(impossible_devices_are_refused),
        cmocka_unit_test(after_begin_exit_nothing_is_called),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
