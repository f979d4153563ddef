/* SPDX-License-Identifier: Apache-2.0
 *
 * backing/cuda.c against a stand-in for the driver: what is said when the driver is missing, old or
 * short of something, what memory calls pass on and report, and that a forked child and an exiting
 * process leave the driver alone. Real memory is for tests/gpu.
 */
#include "tests/support/cuda_case.h"

#include "backing/cuda_abi.h"
#include "backing/cuda_stream.h"
#include "backing/memory.h"

#define PAGE ((size_t)2 << 20)

/* ---- is there a device? ---------------------------------------------------------------------- */

/* Both doors must give the same answer, and give it again. */
static void expect_unavailable(const char *part)
{
    gp_device *device = NULL;
    gp_error error = {0}, opening = {0};
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_cuda_available(&error), &error);
    expect_text(error.message, part);
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_device_open(GP_DEVICE_CUDA, 0, &device, &opening),
                 &opening);
    assert_string_equal(error.message, opening.message);
    assert_null(device);
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_cuda_available(NULL), NULL);
    assert_int_equal(fake_calls("cuDevicePrimaryCtxRetain"), 0);
}

static void no_library(void **state)
{
    (void)state;
    expect_unavailable("no NVIDIA driver: libcuda.so.1 could not be loaded");
}

static void library_without_entry(void **state)
{
    (void)state;
    expect_unavailable("too old (before CUDA 11.3)");
}

static void old_driver(void **state)
{
    (void)state;
    expect_unavailable("it is for CUDA 11.8 and growpool needs a driver for CUDA 12.0");
    assert_int_equal(fake_calls("cuInit"), 0);
}

static void driver_without_version(void **state)
{
    (void)state;
    expect_unavailable("does not tell its version");
}

static void driver_without_function(void **state)
{
    (void)state;
    expect_unavailable("it has no cuMemSetAccess");
}

static void no_device_at_start(void **state)
{
    gp_error error;
    (void)state;
    expect_unavailable("no CUDA device");
    gp_cuda_available(&error);
    assert_int_equal(error.code, 100);
    assert_string_equal(error.name, "CUDA_ERROR_NO_DEVICE");
    assert_string_equal(error.call, "cuInit");
    assert_int_equal(fake_calls("cuInit"), 1);
}

static void no_device_counted(void **state)
{
    (void)state;
    expect_unavailable("no CUDA device");
}

static void toolkit_stub(void **state)
{
    (void)state;
    expect_unavailable("the toolkit's stub");
}

static void driver_does_not_start(void **state)
{
    (void)state;
    expect_unavailable("cuInit failed with CUDA_ERROR_UNKNOWN (999)");
}

static void no_virtual_memory(void **state)
{
    (void)state;
    expect_unavailable("no virtual memory management (VMM)");
}

static void no_such_device(void **state)
{
    gp_device *device = NULL;
    gp_error error;
    (void)state;
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_device_open(GP_DEVICE_CUDA, 2, &device, &error), &error);
    expect_text(error.message, "there is no device cuda:2: the driver sees 2");
}

static void available_without_context(void **state)
{
    gp_error error;
    (void)state;
    assert_int_equal(fake_calls(NULL), 0); /* nothing at load time */
    CHECK_OK(gp_cuda_available(&error), &error);
    CHECK_OK(gp_cuda_available(NULL), NULL);
    assert_int_equal(fake_calls("cuInit"), 1);
    assert_int_equal(fake_calls("cuDevicePrimaryCtxRetain"), 0);
    assert_int_equal(fake_calls("cuCtxPushCurrent"), 0);
}

/* ---- opening --------------------------------------------------------------------------------- */

static void opens_once(void **state)
{
    gp_device *device = open_device(1);
    (void)state;
    assert_ptr_equal(device, open_device(1));
    assert_int_equal(fake_calls("cuDevicePrimaryCtxRetain"), 1);
    assert_string_equal(gp_device_name(device), "cuda:1");
    assert_int_equal(gp_device_id(device), 1);
    assert_int_equal(gp_device_granularity(device), PAGE);
    assert_true(gp_device_is_device_accessible(device));
    assert_false(gp_device_is_host_accessible(device));
    assert_ptr_not_equal(device, open_device(0));
    assert_int_equal(fake_calls("cuInit"), 1);
}

static void opening_fails(void **state)
{
    gp_device *device = NULL;
    gp_error error;
    int64_t live = gp__memory_live();
    (void)state;
    CHECK_STATUS(GP_ERR_DRIVER, gp_device_open(GP_DEVICE_CUDA, 0, &device, &error), &error);
    expect_driver_error(&error, "cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_int_equal(gp__memory_live(), live);
    fake_set("cuDevicePrimaryCtxRetain", 0);
    fake_set("cuMemGetAllocationGranularity", 1);
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_device_open(GP_DEVICE_CUDA, 0, &device, &error), &error);
    assert_string_equal(error.call, "cuMemGetAllocationGranularity");
    fake_set("cuMemGetAllocationGranularity", 0);
    for (uint64_t n = 1; n <= 2; n++) {
        gp__memory_fail_at(n, 0);
        CHECK_STATUS(GP_ERR_HOST_MEMORY, gp_device_open(GP_DEVICE_CUDA, 0, &device, &error),
                     &error);
        gp__memory_fail_at(0, 0);
        assert_int_equal(gp__memory_live(), live);
    }
    assert_null(device);
    open_device(0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void memory_calls_pass_on(void **state)
{
    gp_device *device = open_device(1);
    const struct gp__driver *driver = device->driver;
    size_t available = 0, total = 0;
    uintptr_t va = 0;
    gp__memory memory = 0;
    (void)state;
    CHECK_OK(driver->memory_info(device, &available, &total, NULL), NULL);
    assert_int_equal(available, (size_t)3 << 30);
    assert_int_equal(total, (size_t)5 << 30); /* of device 1: its context was current */
    CHECK_OK(driver->reserve(device, 4 * PAGE, &va, NULL), NULL);
    assert_string_equal(fake_last("cuMemAddressReserve"),
                        "size=8388608 alignment=0 hint=0 flags=0");
    CHECK_OK(driver->create(device, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    assert_string_equal(fake_last("cuMemCreate"),
                        "size=2097152 type=1 handles=0 location=1 id=1 flags=0");
    CHECK_OK(driver->map(device, va, PAGE, memory, NULL), NULL);
    assert_string_equal(fake_last("cuMemMap"),
                        "va=1099511627776 size=2097152 offset=0 memory=4711 flags=0");
    CHECK_OK(driver->set_access(device, va, PAGE, GP_LOCATION_DEVICE, NULL, NULL), NULL);
    assert_string_equal(fake_last("cuMemSetAccess"),
                        "va=1099511627776 size=2097152 count=1 first=1:1:3 last=1:1:3");
    CHECK_OK(driver->unmap(device, va, PAGE, memory, NULL), NULL);
    assert_string_equal(fake_last("cuMemUnmap"), "va=1099511627776 size=2097152");
    CHECK_OK(driver->release(device, memory, PAGE, NULL), NULL);
    assert_string_equal(fake_last("cuMemRelease"), "memory=4711");
    CHECK_OK(driver->free_address(device, va, 4 * PAGE, NULL), NULL);
    assert_string_equal(fake_last("cuMemAddressFree"), "va=1099511627776 size=8388608");
    assert_int_equal(fake_calls("cuCtxPushCurrent"), fake_calls("cuCtxPopCurrent"));
}

static void host_memory_is_near_the_device(void **state)
{
    gp_device *device = open_device(1);
    gp__memory memory = 0;
    (void)state;
    CHECK_OK(device->driver->create(device, PAGE, GP_LOCATION_HOST, 0, &memory, NULL), NULL);
    assert_string_equal(fake_last("cuMemCreate"),
                        "size=2097152 type=1 handles=0 location=3 id=3 flags=0");
    CHECK_OK(device->driver->set_access(device, 1 << 21, PAGE, GP_LOCATION_HOST, NULL, NULL), NULL);
    expect_text(fake_last("cuMemSetAccess"), "count=2 first=1:1:3 last=3:3:3");
    fake_set("cuMemCreate", GP__CUDA_ERROR_NOT_SUPPORTED);
    CHECK_STATUS(GP_ERR_UNAVAILABLE,
                 device->driver->create(device, PAGE, GP_LOCATION_HOST, 0, &memory, NULL), NULL);
}

static void host_memory_without_numa(void **state)
{
    gp_device *device = open_device(0);
    gp__memory memory = 0;
    (void)state;
    CHECK_OK(device->driver->create(device, PAGE, GP_LOCATION_HOST, 0, &memory, NULL), NULL);
    expect_text(fake_last("cuMemCreate"), "location=3 id=0");
}

static void host_memory_unsupported(void **state)
{
    gp_device *device = open_device(0);
    gp_error error;
    gp__memory memory = 0;
    (void)state;
    CHECK_STATUS(GP_ERR_UNAVAILABLE,
                 device->driver->create(device, PAGE, GP_LOCATION_HOST, 0, &memory, &error),
                 &error);
    expect_text(error.message, "cannot map host memory");
    assert_int_equal(fake_calls("cuMemCreate"), 0);
}

static void out_of_memory_has_its_status(void **state)
{
    gp_device *device = open_device(0);
    gp__memory memory = 0;
    uintptr_t va = 0;
    gp_error error;
    (void)state;
    fake_set("cuMemCreate", GP__CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 device->driver->create(device, PAGE, GP_LOCATION_DEVICE, 0, &memory, &error),
                 &error);
    expect_driver_error(&error, "cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_int_equal(error.size, PAGE);
    fake_set("cuMemAddressReserve", GP__CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, device->driver->reserve(device, PAGE, &va, &error), &error);
    expect_driver_error(&error, "cuMemAddressReserve", 2, "CUDA_ERROR_OUT_OF_MEMORY");
    expect_text(error.message, "addresses");
    assert_int_equal(memory, 0);
    assert_int_equal(va, 0);
}

static gp_status call_memory(gp_device *device, size_t which, gp_error *error)
{
    const struct gp__driver *driver = device->driver;
    size_t a, b;
    uintptr_t va;
    gp__memory memory;
    switch (which) {
    case 0:
        return driver->memory_info(device, &a, &b, error);
    case 1:
        return driver->reserve(device, PAGE, &va, error);
    case 2:
        return driver->free_address(device, PAGE, PAGE, error);
    case 3:
        return driver->create(device, PAGE, GP_LOCATION_DEVICE, 0, &memory, error);
    case 4:
        return driver->release(device, 4711, PAGE, error);
    case 5:
        return driver->map(device, PAGE, PAGE, 4711, error);
    case 6:
        return driver->set_access(device, PAGE, PAGE, GP_LOCATION_DEVICE, NULL, error);
    default:
        return driver->unmap(device, PAGE, PAGE, 4711, error);
    }
}

static const char *const memory_calls[] = {
    "cuMemGetInfo", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease",
    "cuMemMap",     "cuMemSetAccess",      "cuMemUnmap",
};

static void every_memory_error_is_reported(void **state)
{
    gp_device *device = open_device(0);
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(memory_calls); i++) {
        gp_error error;
        fake_set(memory_calls[i], GP__CUDA_ERROR_INVALID_VALUE);
        CHECK_STATUS(GP_ERR_DRIVER, call_memory(device, i, &error), &error);
        expect_driver_error(&error, memory_calls[i], 1, "CUDA_ERROR_INVALID_VALUE");
        CHECK_STATUS(GP_ERR_DRIVER, call_memory(device, i, NULL), NULL);
        if (i > 0)
            expect_text(error.message, "2097152");
        fake_set(memory_calls[i], 0);
        CHECK_OK(call_memory(device, i, &error), &error);
    }
    assert_int_equal(fake_calls("cuCtxPushCurrent"), fake_calls("cuCtxPopCurrent"));
}

static void unnamed_errors_have_a_text(void **state)
{
    gp_device *device = open_device(0);
    gp_error error;
    (void)state;
    fake_set("cuMemMap", 12345);
    CHECK_STATUS(GP_ERR_DRIVER, call_memory(device, 5, &error), &error);
    expect_text(error.message, "an unnamed CUDA error (12345)");
}

/* ---- a process that must leave the driver alone ------------------------------------------------ */

/* Every entry, with arguments that would work. */
static void expect_all_refused(gp_device *device, gp__event *event, gp_reason reason)
{
    const struct gp__driver *driver = device->driver;
    unsigned long before = fake_calls(NULL);
    struct gp__stream_key key = {.handle = 0, .context = device->context};
    struct gp__entry entry = {0, true};
    gp_device *opened = NULL;
    gp__event *made;
    struct gp__imported imported;
    bool capturing, can;
    uint64_t id;
    gp_error error;
    uintptr_t handle;
    int fd;
#define REFUSED(call)                                                                              \
    do {                                                                                           \
        CHECK_STATUS(GP_ERR_STATE, call, &error);                                                  \
        assert_int_equal(error.reason, reason);                                                    \
    } while (0)
    for (size_t i = 0; i < CASE_COUNT(memory_calls); i++)
        REFUSED(call_memory(device, i, &error));
    REFUSED(driver->export_fd(device, 4711, PAGE, &fd, &error));
    REFUSED(driver->import_fd(device, 0, PAGE, &imported, &error));
    REFUSED(driver->can_access(device, device, &can, &error));
    REFUSED(driver->stream_resolve(device, 2, &key, &error));
    REFUSED(driver->stream_capturing(device, &key, &capturing, &error));
    REFUSED(driver->event_create(device, device->context, &made, &error));
    REFUSED(driver->event_record(device, event, &key, &error));
    REFUSED(driver->event_record_context(device, event, &error));
    REFUSED(driver->event_query(device, event, &error));
    REFUSED(driver->event_wait(device, event, 1000, &error));
    REFUSED(driver->copy(device, PAGE, PAGE, 8, &key, &error));
    REFUSED(driver->fill(device, PAGE, 8, 1, &key, &error));
    REFUSED(driver->stream_wait(device, &key, event, &error));
    REFUSED(driver->capture_id(device, &key, &id, &error));
    REFUSED(driver->capture_keep(device, &key, free, NULL, &error));
    REFUSED(driver->enter(device, &entry, &error));
    REFUSED(gp_device_open(GP_DEVICE_CUDA, 1, &opened, &error));
    REFUSED(gp_cuda_available(&error));
    REFUSED(gp_cuda_stream_create(device, 0, &handle, &error));
    REFUSED(gp_cuda_stream_query(device, 0, &error));
    REFUSED(gp_cuda_stream_destroy(device, 4096, &error));
    REFUSED(gp_cuda_fill(device, 0, PAGE, 1, 8, &error));
    REFUSED(gp_cuda_copy(device, 0, PAGE, PAGE, 8, &error));
#undef REFUSED
    driver->leave(device, &entry);
    driver->event_destroy(device, event);
    assert_int_equal(fake_calls(NULL), before);
}

static gp__event *make_event(gp_device *device)
{
    gp__event *event = NULL;
    CHECK_OK(device->driver->event_create(device, device->context, &event, NULL), NULL);
    return event;
}

static void exiting_process_is_refused(void **state)
{
    gp_device *device = open_device(0);
    gp__event *event = make_event(device);
    (void)state;
    gp_begin_exit();
    expect_all_refused(device, event, GP_REASON_EXITING);
}

static void forked_child_is_refused(void **state)
{
    gp_device *device = open_device(0);
    gp__event *event = make_event(device);
    int status = -1;
    (void)state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        expect_all_refused(device, event, GP_REASON_FORKED); /* fails by leaving the test */
        _exit(42);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 42);
    CHECK_OK(device->driver->event_query(device, event, NULL), NULL);
    device->driver->event_destroy(device, event);
}

/* What was found out before the fork needs no driver to be said again. */
static void forked_child_knows_there_is_no_driver(void **state)
{
    gp_error error;
    int status = -1;
    (void)state;
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_cuda_available(&error), &error);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(gp_cuda_available(&error) == GP_ERR_UNAVAILABLE ? 42 : 1);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(WEXITSTATUS(status), 42);
}

#define CASE(function, ...)                                                                        \
    {                                                                                              \
        .name = #function, .run = function, __VA_ARGS__                                            \
    }

int main(int argc, char **argv)
{
    static const struct cuda_case cases[] = {
        CASE(no_library, .library = "/nonexistent/libcuda.so.1"),
        CASE(library_without_entry, .library = "libm.so.6"),
        CASE(old_driver, .settings = "version=11080"),
        CASE(driver_without_version, .settings = "cuDriverGetVersion=999"),
        CASE(driver_without_function, .settings = "no:cuMemSetAccess=1"),
        CASE(no_device_at_start, .settings = "cuInit=100"),
        CASE(no_device_counted, .settings = "devices=0"),
        CASE(toolkit_stub, .settings = "cuInit=34"),
        CASE(driver_does_not_start, .settings = "cuInit=999"),
        CASE(no_virtual_memory, .settings = "vmm=0"),
        {"probe_answers_invalid_value", no_virtual_memory, "cuDeviceGetAttribute=1", NULL},
        CASE(no_such_device, .settings = NULL),
        CASE(available_without_context, .settings = NULL),
        CASE(opens_once, .settings = NULL),
        CASE(opening_fails, .settings = "cuDevicePrimaryCtxRetain=2"),
        CASE(memory_calls_pass_on, .settings = NULL),
        CASE(host_memory_is_near_the_device, .settings = NULL),
        CASE(host_memory_without_numa, .settings = "host_node=-1"),
        CASE(host_memory_unsupported, .settings = "host_numa=0"),
        CASE(out_of_memory_has_its_status, .settings = NULL),
        CASE(every_memory_error_is_reported, .settings = NULL),
        CASE(unnamed_errors_have_a_text, .settings = NULL),
        CASE(exiting_process_is_refused, .settings = NULL),
        CASE(forked_child_is_refused, .settings = NULL),
        CASE(forked_child_knows_there_is_no_driver, .settings = "version=11080"),
    };
    return run_cases(argc, argv, cases, CASE_COUNT(cases));
}
