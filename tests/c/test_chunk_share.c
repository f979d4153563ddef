/* SPDX-License-Identifier: Apache-2.0
 *
 * Chunks that are shared: export and import on the simulated device, the size that a trial mapping
 * proves, memory for network cards and the trial that it wants, every failing call of each, and a close
 * that meets an export.
 */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "backing/backing_internal.h"
#include "backing/memory.h"
#include "child.h"
#include "fake_device.h"
#include "tests/support/sim.h"

#define PAGE (2 * CHECK_MIB)
#define RDMA GP_CHUNK_GPU_DIRECT_RDMA

static gp__sim *sim;
static gp_device *device;
static int64_t live;
static uint64_t failed_releases;

static int set_up(void **state)
{
    (void)state;
    live = gp__memory_live();
    failed_releases = gp__chunk_failed_releases();
    sim = gp__sim_create(NULL);
    assert_non_null(sim);
    device = gp__sim_device(sim);
    return 0;
}

static struct gp__sim_ledger ledger(void)
{
    struct gp__sim_ledger now;
    gp__sim_get_ledger(sim, &now);
    return now;
}

static void expect_empty(void)
{
    struct gp__sim_ledger now = ledger();
    assert_int_equal(now.chunk_count, 0);
    assert_int_equal(now.physical_bytes, 0);
    assert_int_equal(now.unreleased_count, 0);
    assert_int_equal(now.mapping_count, 0);
    assert_int_equal(now.reservation_count, 0);
}

static int tear_down(void **state)
{
    (void)state;
    expect_empty();
    gp__sim_destroy(sim);
    assert_int_equal(gp__memory_live(), live);
    assert_int_equal(gp__chunk_failed_releases(), failed_releases);
    return 0;
}

static gp_chunk *make(gp_location location, unsigned flags)
{
    gp_chunk *chunk = NULL;
    gp_error error;
    CHECK_OK(gp_chunk_create(device, 2 * PAGE, location, flags, &chunk, &error), &error);
    return chunk;
}

static int export_chunk(gp_chunk *chunk)
{
    int fd = -1;
    gp_error error;
    CHECK_OK(gp_chunk_export_fd(chunk, &fd, &error), &error);
    assert_true(fd >= 0);
    return fd;
}

static void expect_text(const gp_error *error, const char *part)
{
    CHECK(strstr(error->message, part) != NULL, "\"%s\" does not say \"%s\"", error->message, part);
}

/* How many calls the log has that begin with these words and were answered so. */
static size_t logged(const char *words, const char *outcome)
{
    size_t count = 0;
    for (size_t i = 0; i < gp__sim_log_count(sim); i++) {
        const char *line = gp__sim_log_line(sim, i);
        count += strncmp(line, words, strlen(words)) == 0 && strstr(line, outcome) != NULL;
    }
    return count;
}

/* ---- export and import ---------------------------------------------------------------------- */

static void an_exported_chunk_is_the_same_memory(void **state)
{
    (void)state;
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    gp_chunk *imported = NULL;
    gp_error error;
    assert_int_equal(gp_chunk_flags(chunk), GP_CHUNK_EXPORTABLE);
    int fd = export_chunk(chunk);
    int second = export_chunk(chunk);
    assert_int_not_equal(fd, second);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    CHECK_OK(gp_chunk_import_fd(device, second, 2 * PAGE, &imported, &error), &error);
    assert_int_equal(close(fd), 0); /* still the caller's */
    assert_int_equal(close(second), 0);
    assert_int_equal(gp_chunk_size(imported), 2 * PAGE);
    assert_ptr_equal(gp_chunk_device(imported), device);
    assert_int_equal(gp_chunk_location(imported), GP_LOCATION_DEVICE);
    assert_int_equal(gp_chunk_flags(imported), 0);
    assert_int_not_equal(gp_chunk_handle(imported), gp_chunk_handle(chunk));
    assert_int_equal(ledger().physical_bytes, 2 * PAGE); /* once */
    assert_int_equal(ledger().unreleased_count, 2);
    assert_int_equal(ledger().reservation_count, 0); /* the trial's is gone */
    gp_chunk_release(chunk);
    assert_int_equal(ledger().physical_bytes, 2 * PAGE);
    gp_chunk_release(imported);
}

static void what_the_memory_is_comes_along(void **state)
{
    (void)state;
    gp_chunk *chunk = make(GP_LOCATION_HOST, GP_CHUNK_EXPORTABLE | RDMA);
    gp_chunk *imported = NULL;
    gp_error error;
    assert_int_equal(gp_chunk_flags(chunk), GP_CHUNK_EXPORTABLE | RDMA);
    int fd = export_chunk(chunk);
    CHECK_OK(gp_chunk_import_fd(device, fd, 2 * PAGE, &imported, &error), &error);
    assert_int_equal(gp_chunk_location(imported), GP_LOCATION_HOST);
    assert_int_equal(gp_chunk_flags(imported), RDMA);
    assert_int_equal(close(fd), 0);
    gp_chunk_release(imported);
    gp_chunk_release(chunk);
}

static void only_what_was_made_for_it_is_exported(void **state)
{
    (void)state;
    gp_chunk *plain = make(GP_LOCATION_DEVICE, 0);
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    gp_chunk *imported = NULL;
    gp_error error;
    int fd = export_chunk(chunk), none = -1;
    CHECK_OK(gp_chunk_import_fd(device, fd, 2 * PAGE, &imported, &error), &error);
    uint64_t calls = ledger().calls;
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_export_fd(plain, &none, &error), &error);
    expect_text(&error, "not made so");
    expect_text(&error, "4 MiB");
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_export_fd(imported, &none, &error), &error);
    expect_text(&error, "it was imported");
    CHECK_OK(gp_chunk_close(chunk, &error), &error);
    CHECK_STATUS(GP_ERR_STATE, gp_chunk_export_fd(chunk, &none, &error), &error);
    assert_int_equal(error.reason, GP_REASON_CLOSED);
    assert_int_equal(none, -1);
    assert_int_equal(ledger().calls, calls + 1); /* the release */
    assert_int_equal(close(fd), 0);
    gp_chunk_release(plain);
    gp_chunk_release(chunk);
    gp_chunk_release(imported);
}

static void another_size_is_found_out(void **state)
{
    (void)state;
    static const size_t sizes[] = {PAGE, 4 * PAGE, 3 * PAGE};
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    gp_chunk *imported = NULL;
    gp_error error;
    int fd = export_chunk(chunk);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, fd, sizes[i], &imported, &error),
                     &error);
        expect_text(&error, "is not");
        expect_text(&error, "give the exact size of the chunk that was exported");
        assert_int_equal(error.size, sizes[i]);
        CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, fd, sizes[i], &imported, NULL),
                     NULL);
        assert_int_equal(ledger().unreleased_count, 1);
        assert_int_equal(ledger().reservation_count, 0);
    }
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, fd, PAGE + 1, &imported, &error),
                 &error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, fd, 0, &imported, &error), &error);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(NULL, fd, PAGE, &imported, &error), &error);
    assert_null(imported);
    assert_int_equal(close(fd), 0);
    gp_chunk_release(chunk);
}

static void what_is_no_chunk_is_refused(void **state)
{
    (void)state;
    gp_chunk *imported = NULL;
    gp_error error;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    assert_true(null >= 0);
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_import_fd(device, null, PAGE, &imported, &error), &error);
    assert_int_equal(error.code, 999);
    assert_int_equal(close(null), 0);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, null, PAGE, &imported, &error),
                 &error);
    expect_text(&error, "no open file descriptor");
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, -1, PAGE, &imported, &error), &error);
    expect_text(&error, "-1 is no open file descriptor");
    assert_int_equal(logged("import_fd", ""), 1);
    assert_null(imported);
}

static void memory_of_another_device_is_refused(void **state)
{
    (void)state;
    struct gp__sim_options options = {.ordinal = 1};
    gp__sim *other = gp__sim_create(&options);
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE), *imported = NULL;
    gp_error error;
    struct gp__sim_ledger left;
    int fd = export_chunk(chunk);
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_chunk_import_fd(gp__sim_device(other), fd, 2 * PAGE, &imported, &error), NULL);
    gp__sim_get_ledger(other, &left);
    assert_int_equal(left.unreleased_count, 0);
    assert_int_equal(left.reservation_count, 0);
    assert_int_equal(close(fd), 0);
    gp_chunk_release(chunk);
    gp__sim_destroy(other);
}

static void a_device_may_not_share(void **state)
{
    (void)state;
    gp_chunk *chunk = NULL;
    gp_error error;
    gp__sim_set_sharing(sim, false);
    CHECK_STATUS(
        GP_ERR_UNAVAILABLE,
        gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &chunk, &error),
        &error);
    expect_text(&error, "sim:0 cannot share memory");
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_chunk_import_fd(device, 0, PAGE, &chunk, &error), &error);
    assert_int_equal(ledger().calls, 0);
    CHECK_OK(gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE, 0, &chunk, &error), &error);
    gp_chunk_release(chunk);
    chunk = NULL;
    CHECK_STATUS(GP_ERR_ARGUMENT,
                 gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE, 4, &chunk, &error), &error);
    expect_text(&error, "flags 0x4 are unknown");
    assert_null(chunk);
}

static bool refuse_in_child(void *context)
{
    gp_chunk *chunk = context, *imported = NULL;
    gp_error exporting = {0}, importing = {0};
    int fd = -1;
    return gp_chunk_export_fd(chunk, &fd, &exporting) == GP_ERR_STATE &&
           exporting.reason == GP_REASON_FORKED &&
           gp_chunk_import_fd(device, 0, PAGE, &imported, &importing) == GP_ERR_STATE &&
           importing.reason == GP_REASON_FORKED && fd == -1 && imported == NULL;
}

static void a_forked_child_shares_nothing(void **state)
{
    (void)state;
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    assert_int_equal(in_child(refuse_in_child, chunk), 0);
    gp_chunk_release(chunk);
}

/* ---- network cards --------------------------------------------------------------------------- */

/* Makes a chunk under the rule, and says what came of the wish. */
static unsigned wish(enum gp__sim_rdma rule, gp_location location)
{
    gp__sim_set_rdma(sim, rule);
    gp_chunk *chunk = make(location, RDMA);
    unsigned flags = gp_chunk_flags(chunk);
    assert_int_equal(ledger().unreleased_count, 1);
    assert_int_equal(ledger().reservation_count, 0);
    gp_chunk_release(chunk);
    return flags;
}

static void the_trial_is_made_once(void **state)
{
    (void)state;
    assert_int_equal(wish(GP__SIM_RDMA_WORKS, GP_LOCATION_DEVICE), RDMA);
    assert_int_equal(logged("create", ""), 2);
    assert_int_equal(logged("create bytes=2097152", ""), 1); /* the trial's */
    assert_int_equal(logged("set_access", ""), 1);
    assert_int_equal(logged("unmap", ""), 1);
    assert_int_equal(wish(GP__SIM_RDMA_WORKS, GP_LOCATION_DEVICE), RDMA);
    assert_int_equal(logged("create", ""), 3);
    assert_int_equal(logged("set_access", ""), 1);
    /* Host memory near the device is another matter. */
    assert_int_equal(wish(GP__SIM_RDMA_NO_ACCESS, GP_LOCATION_HOST), 0);
    assert_int_equal(logged("set_access", "CUDA_ERROR_UNKNOWN"), 1);
    assert_int_equal(wish(GP__SIM_RDMA_WORKS, GP_LOCATION_HOST), 0); /* remembered */
    assert_int_equal(wish(GP__SIM_RDMA_WORKS, GP_LOCATION_DEVICE), RDMA);
}

static void a_device_without_it_is_not_tried(void **state)
{
    (void)state;
    assert_int_equal(wish(GP__SIM_RDMA_ABSENT, GP_LOCATION_DEVICE), 0);
    assert_int_equal(logged("create", ""), 1);
}

static void a_create_that_fails_with_it(void **state)
{
    (void)state;
    assert_int_equal(wish(GP__SIM_RDMA_NO_CREATE, GP_LOCATION_DEVICE), 0);
    assert_int_equal(logged("create", "NOT_SUPPORTED"), 1);
    assert_int_equal(wish(GP__SIM_RDMA_WORKS, GP_LOCATION_DEVICE), 0); /* remembered */
    assert_int_equal(logged("create", ""), 3);
}

static void a_trial_that_works_and_a_chunk_that_does_not(void **state)
{
    (void)state;
    assert_int_equal(wish(GP__SIM_RDMA_SMALL_ONLY, GP_LOCATION_DEVICE), 0);
    assert_int_equal(logged("create", "NOT_SUPPORTED"), 1);
    assert_int_equal(logged("create", "ok"), 2);
}

/* PyTorch 192330: advertised, and then set access answers 999. */
static void access_that_fails_with_it(void **state)
{
    (void)state;
    assert_int_equal(wish(GP__SIM_RDMA_NO_ACCESS, GP_LOCATION_DEVICE), 0);
    assert_int_equal(logged("set_access", "CUDA_ERROR_UNKNOWN"), 1);
    assert_int_equal(wish(GP__SIM_RDMA_NO_ACCESS, GP_LOCATION_DEVICE), 0);
    assert_int_equal(logged("set_access", ""), 1);
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, RDMA | GP_CHUNK_EXPORTABLE);
    assert_int_equal(gp_chunk_flags(chunk), GP_CHUNK_EXPORTABLE);
    gp_chunk_release(chunk);
}

static void a_full_device_proves_nothing(void **state)
{
    (void)state;
    gp_chunk *chunk = NULL;
    gp_error error;
    gp__sim_set_memory(sim, 0);
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE, RDMA, &chunk, &error), &error);
    gp__sim_set_memory(sim, CHECK_GIB);
    assert_int_equal(wish(GP__SIM_RDMA_WORKS, GP_LOCATION_DEVICE), RDMA);
}

/* ---- every failing call ---------------------------------------------------------------------- */

typedef gp_status (*scenario)(int fd, gp_chunk **out, gp_error *error);

static gp_status import_it(int fd, gp_chunk **out, gp_error *error)
{
    return gp_chunk_import_fd(device, fd, 2 * PAGE, out, error);
}

static gp_status make_for_cards(int fd, gp_chunk **out, gp_error *error)
{
    (void)fd;
    device->rdma_trial[0] = 0; /* as new */
    return gp_chunk_create(device, 2 * PAGE, GP_LOCATION_DEVICE, RDMA | GP_CHUNK_EXPORTABLE, out,
                           error);
}

static void expect_as_before(uint64_t n, const struct gp__sim_ledger *before)
{
    struct gp__sim_ledger now = ledger();
    CHECK(now.unreleased_count == before->unreleased_count &&
              now.physical_bytes == before->physical_bytes && now.reservation_count == 0 &&
              now.mapping_count == 0,
          "fault %llu (%s): %zu chunks, %zu reservations, %zu mappings are left",
          (unsigned long long)n, gp__sim_fault_name(sim), now.unreleased_count,
          now.reservation_count, now.mapping_count);
}

/* One failing driver call at a time: an error that names it or a chunk, and nothing else is left. */
static uint64_t sweep(scenario run, int fd, unsigned *succeeded)
{
    struct gp__sim_ledger before = ledger();
    uint64_t n = 0, calls = 0;
    *succeeded = 0;
    do {
        gp_chunk *chunk = NULL;
        gp_error error = {0};
        gp__sim_fail_at(sim, ++n, false);
        gp_status status = run(fd, &chunk, &error);
        calls = gp__sim_fault_calls(sim);
        if (status == GP_OK) {
            ++*succeeded;
            gp_chunk_release(chunk);
        } else {
            CHECK(error.call != NULL && strcmp(error.call, gp__sim_fault_name(sim)) == 0,
                  "fault %llu (%s) was told as \"%s\"", (unsigned long long)n,
                  gp__sim_fault_name(sim), error.message);
            assert_null(chunk);
        }
        expect_as_before(n, &before);
    } while (n <= calls);
    gp__sim_fail_at(sim, 0, false);
    return n - 1;
}

static void every_failing_call_of_an_import(void **state)
{
    (void)state;
    unsigned succeeded;
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    int fd = export_chunk(chunk);
    /* import, reserve, map, and unmap and free address, which are asked twice. */
    assert_int_equal(sweep(import_it, fd, &succeeded), 5);
    assert_int_equal(succeeded, 3);
    gp_chunk *none = NULL;
    gp_error error;
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, import_it(fd, &none, &error), &error);
    gp__memory_fail_at(0, 0);
    assert_null(none);
    assert_int_equal(close(fd), 0);
    gp_chunk_release(chunk);
}

static void every_failing_call_of_a_wish(void **state)
{
    (void)state;
    unsigned succeeded;
    /* create, reserve, map, set access, unmap, free address, release of the trial; then create. The
     * failing ones of the trial cost the property, a failing create is made again without it. */
    uint64_t most = sweep(make_for_cards, -1, &succeeded);
    assert_int_equal(most, 8);
    assert_int_equal(succeeded, most + 1);
}

static void a_driver_that_fails_for_ever(void **state)
{
    (void)state;
    gp_chunk *chunk = make(GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE), *none = NULL;
    gp_error error;
    int fd = export_chunk(chunk), other = -1;
    for (uint64_t n = 1; n <= 2; n++) {
        gp__sim_fail_at(sim, n, true);
        assert_int_not_equal(import_it(fd, &none, &error), GP_OK);
        assert_true(gp__sim_fault_calls(sim) < 12);
        gp__sim_fail_at(sim, 0, false);
        assert_null(none);
    }
    /* What was imported and could not be released is counted as the driver's leak. */
    assert_int_equal(gp__chunk_failed_releases(), failed_releases + 1);
    failed_releases++;
    assert_int_equal(ledger().unreleased_count, 2);
    CHECK_OK(device->driver->release(device, gp_chunk_handle(chunk) + 1, 2 * PAGE, NULL), NULL);
    gp__sim_fail_at(sim, 1, false);
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_export_fd(chunk, &other, &error), &error);
    assert_string_equal(error.call, "export_fd");
    assert_int_equal(other, -1);
    gp__sim_fail_at(sim, 0, false);
    assert_int_equal(close(fd), 0);
    gp_chunk_release(chunk);
}

/* ---- a close that meets an export ------------------------------------------------------------- */

static struct {
    gp_chunk *chunk;
    struct fake_device fake;
    uint64_t releases_inside;
    gp_status second;
} meeting;

/* Another thread's close comes while the driver works. */
static gp_status export_and_close(gp_device *fake, gp__memory memory, size_t bytes, int *fd,
                                  gp_error *error)
{
    int none = -1;
    (void)fake;
    (void)memory;
    (void)bytes;
    CHECK_OK(gp_chunk_close(meeting.chunk, error), error);
    meeting.releases_inside = atomic_load(&meeting.fake.releases);
    meeting.second = gp_chunk_export_fd(meeting.chunk, &none, NULL);
    *fd = 77;
    return GP_OK;
}

static void a_close_waits_for_the_export(void **state)
{
    (void)state;
    gp_error error;
    int fd = -1;
    fake_device_init(&meeting.fake);
    meeting.fake.driver.export_fd = export_and_close;
    meeting.fake.device.chunk_flags = GP_CHUNK_EXPORTABLE;
    CHECK_OK(gp_chunk_create(&meeting.fake.device, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE,
                             &meeting.chunk, &error),
             &error);
    CHECK_OK(gp_chunk_export_fd(meeting.chunk, &fd, &error), &error);
    assert_int_equal(fd, 77);
    assert_int_equal(meeting.releases_inside, 0);
    assert_int_equal(meeting.second, GP_ERR_STATE);
    assert_true(gp_chunk_is_closed(meeting.chunk));
    assert_int_equal(atomic_load(&meeting.fake.releases), 1);
    CHECK_OK(gp_chunk_close(meeting.chunk, &error), &error);
    gp_chunk_release(meeting.chunk);
    fake_device_check_clean(&meeting.fake);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(an_exported_chunk_is_the_same_memory),
        TEST(what_the_memory_is_comes_along),
        TEST(only_what_was_made_for_it_is_exported),
        TEST(another_size_is_found_out),
        TEST(what_is_no_chunk_is_refused),
        TEST(memory_of_another_device_is_refused),
        TEST(a_device_may_not_share),
        TEST(a_forked_child_shares_nothing),
        TEST(the_trial_is_made_once),
        TEST(a_device_without_it_is_not_tried),
        TEST(a_create_that_fails_with_it),
        TEST(a_trial_that_works_and_a_chunk_that_does_not),
        TEST(access_that_fails_with_it),
        TEST(a_full_device_proves_nothing),
        TEST(every_failing_call_of_an_import),
        TEST(every_failing_call_of_a_wish),
        TEST(a_driver_that_fails_for_ever),
        TEST(a_close_waits_for_the_export),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
