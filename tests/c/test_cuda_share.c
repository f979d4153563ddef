/* SPDX-License-Identifier: Apache-2.0
 *
 * backing/cuda_share.c against a stand-in for the driver: memory for other processes, for network cards
 * and for peers, what is asked of the driver for each, and what every refusal of its leaves behind.
 */
#include "tests/support/cuda_case.h"

#include <fcntl.h>

#include "backing/cuda_abi.h"
#include "backing/memory.h"
#include "vmm/growpool.h"

#define PAGE ((size_t)2 << 20)
#define RDMA GP_CHUNK_GPU_DIRECT_RDMA

static gp_chunk *make(gp_device *device, gp_location location, unsigned flags)
{
    gp_chunk *chunk = NULL;
    gp_error error;
    CHECK_OK(gp_chunk_create(device, PAGE, location, flags, &chunk, &error), &error);
    return chunk;
}

/* Whatever was made, mapped or reserved was undone. */
static void expect_nothing_left(unsigned long chunks)
{
    assert_int_equal(fake_calls("cuMemAddressReserve"), fake_calls("cuMemAddressFree"));
    assert_int_equal(chunks, fake_calls("cuMemRelease"));
    assert_int_equal(fake_calls("cuCtxPushCurrent"), fake_calls("cuCtxPopCurrent"));
}

/* ---- making ----------------------------------------------------------------------------------- */

static void flags_reach_the_driver(void **state)
{
    gp_device *device = open_device(1);
    (void)state;
    gp_chunk *chunk = make(device, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    assert_string_equal(fake_last("cuMemCreate"),
                        "size=2097152 type=1 handles=1 location=1 id=1 flags=0");
    gp_chunk_release(chunk);
    chunk = make(device, GP_LOCATION_HOST, GP_CHUNK_EXPORTABLE | RDMA);
    assert_string_equal(fake_last("cuMemCreate"),
                        "size=2097152 type=1 handles=1 location=3 id=3 flags=0 rdma");
    assert_int_equal(gp_chunk_flags(chunk), GP_CHUNK_EXPORTABLE | RDMA);
    gp_chunk_release(chunk);
    chunk = make(device, GP_LOCATION_DEVICE, RDMA);
    assert_string_equal(fake_last("cuMemCreate"),
                        "size=2097152 type=1 handles=0 location=1 id=1 flags=0 rdma");
    gp_chunk_release(chunk);
    expect_nothing_left(fake_calls("cuMemCreate"));
}

/* Whatever the device claims, or fails to say, a wish is only a wish. */
static void made_without(void **state)
{
    gp_device *device = open_device(0);
    (void)state;
    for (int i = 0; i < 2; i++) {
        gp_chunk *chunk = make(device, GP_LOCATION_DEVICE, RDMA);
        assert_int_equal(gp_chunk_flags(chunk), 0);
        assert_string_equal(fake_last("cuMemCreate"),
                            "size=2097152 type=1 handles=0 location=1 id=0 flags=0");
        gp_chunk_release(chunk);
    }
    /* Two chunks, and one trial where the device claims it; a create that failed made nothing. */
    bool tried = device->chunk_flags & RDMA;
    unsigned long accesses = fake_calls("cuMemSetAccess");
    assert_int_equal(fake_calls("cuMemCreate"), tried ? 3 : 2);
    assert_true(accesses <= tried);
    expect_nothing_left(2 + accesses);
}

static void exporting_unsupported(void **state)
{
    gp_device *device = open_device(0);
    gp_chunk *chunk = NULL;
    gp_error error;
    (void)state;
    CHECK_STATUS(
        GP_ERR_UNAVAILABLE,
        gp_chunk_create(device, PAGE, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE, &chunk, &error),
        &error);
    expect_text(error.message, "cuda:0 cannot share memory by file descriptor");
    CHECK_STATUS(GP_ERR_UNAVAILABLE, gp_chunk_import_fd(device, 0, PAGE, &chunk, &error), &error);
    assert_null(chunk);
    assert_int_equal(fake_calls("cuMemCreate"), 0);
    assert_int_equal(fake_calls("cuMemImportFromShareableHandle"), 0);
}

/* ---- exporting -------------------------------------------------------------------------------- */

static void exports_close_on_exec(void **state)
{
    gp_device *device = open_device(0);
    gp_chunk *chunk = make(device, GP_LOCATION_DEVICE, GP_CHUNK_EXPORTABLE);
    gp_error error;
    int fd = -1, none = -1;
    (void)state;
    CHECK_OK(gp_chunk_export_fd(chunk, &fd, &error), &error);
    assert_string_equal(fake_last("cuMemExportToShareableHandle"), "memory=4711 type=1 flags=0");
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    assert_int_equal(close(fd), 0);
    fake_set("cuMemExportToShareableHandle", GP__CUDA_ERROR_INVALID_VALUE);
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_export_fd(chunk, &none, &error), &error);
    expect_driver_error(&error, "cuMemExportToShareableHandle", 1, "CUDA_ERROR_INVALID_VALUE");
    expect_text(error.message, "2097152");
    fake_set("cuMemExportToShareableHandle", 0);
    fake_set("bad_fd", 1);
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_export_fd(chunk, &none, &error), &error);
    assert_string_equal(error.call, "fcntl");
    assert_string_equal(error.name, "EBADF");
    assert_int_equal(none, -1);
    gp_chunk_release(chunk);
    expect_nothing_left(1);
}

/* ---- importing -------------------------------------------------------------------------------- */

static void imports_and_proves_the_size(void **state)
{
    gp_device *device = open_device(1);
    gp_chunk *chunk = NULL;
    gp_error error;
    char expected[64];
    int fd = dup(STDIN_FILENO);
    (void)state;
    fake_set("imported_id", 1);
    CHECK_OK(gp_chunk_import_fd(device, fd, 3 * PAGE, &chunk, &error), &error);
    snprintf(expected, sizeof expected, "fd=%d type=1", fd);
    assert_string_equal(fake_last("cuMemImportFromShareableHandle"), expected);
    assert_string_equal(fake_last("cuMemGetAllocationPropertiesFromHandle"), "memory=4712");
    assert_string_equal(fake_last("cuMemMap"),
                        "va=1099511627776 size=6291456 offset=0 memory=4712 flags=0");
    assert_string_equal(fake_last("cuMemUnmap"), "va=1099511627776 size=6291456");
    assert_string_equal(fake_last("cuMemAddressFree"), "va=1099511627776 size=6291456");
    assert_int_equal(fake_calls("cuMemSetAccess"), 0);
    assert_int_equal(gp_chunk_handle(chunk), 4712);
    assert_int_equal(gp_chunk_location(chunk), GP_LOCATION_DEVICE);
    assert_int_equal(gp_chunk_flags(chunk), 0);
    assert_int_equal(fcntl(fd, F_GETFD) >= 0, true); /* the caller's, still open */
    gp_chunk_release(chunk);
    assert_string_equal(fake_last("cuMemRelease"), "memory=4712");
    assert_int_equal(close(fd), 0);
    expect_nothing_left(1);
}

static void the_properties_say_where_it_lives(void **state)
{
    gp_device *device = open_device(0);
    gp_chunk *chunk = NULL;
    gp_error error;
    (void)state;
    fake_set("imported_type", GP__CU_MEM_LOCATION_TYPE_HOST_NUMA);
    fake_set("imported_id", 3);
    fake_set("imported_rdma", 1);
    CHECK_OK(gp_chunk_import_fd(device, 0, PAGE, &chunk, &error), &error);
    assert_int_equal(gp_chunk_location(chunk), GP_LOCATION_HOST);
    assert_int_equal(gp_chunk_flags(chunk), RDMA);
    gp_chunk_release(chunk);
    chunk = NULL;
    fake_set("imported_type", GP__CU_MEM_LOCATION_TYPE_DEVICE);
    fake_set("imported_id", 1);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, 0, PAGE, &chunk, &error), &error);
    expect_text(error.message, "the descriptor's memory lives on cuda:1");
    expect_text(error.message, "cuda:0");
    assert_null(chunk);
    expect_nothing_left(2);
}

/* Every refusal of the driver on the way; nothing stays imported, reserved or mapped. */
static void refused_imports_leave_nothing(void **state)
{
    static const struct {
        const char *call;
        int code;
        gp_status status;
        unsigned long imports;
    } refusals[] = {
        {"cuMemImportFromShareableHandle", 999, GP_ERR_DRIVER, 0},
        {"cuMemGetAllocationPropertiesFromHandle", 1, GP_ERR_DRIVER, 1},
        {"cuMemAddressReserve", 2, GP_ERR_ADDRESS_SPACE, 1},
        {"cuMemMap", 1, GP_ERR_DRIVER, 1},
    };
    gp_device *device = open_device(0);
    int64_t live = gp__memory_live();
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(refusals); i++) {
        gp_chunk *chunk = NULL;
        gp_error error;
        unsigned long released = fake_calls("cuMemRelease");
        fake_set(refusals[i].call, refusals[i].code);
        CHECK_STATUS(refusals[i].status, gp_chunk_import_fd(device, 0, PAGE, &chunk, &error),
                     &error);
        CHECK_STATUS(refusals[i].status, gp_chunk_import_fd(device, 0, PAGE, &chunk, NULL), NULL);
        assert_string_equal(error.call, refusals[i].call);
        assert_int_equal(error.code, refusals[i].code);
        fake_set(refusals[i].call, 0);
        assert_null(chunk);
        assert_int_equal(fake_calls("cuMemRelease"), released + 2 * refusals[i].imports);
        assert_int_equal(gp__memory_live(), live);
    }
    assert_int_equal(fake_calls("cuMemAddressFree"), 2); /* of the refused maps */
    assert_int_equal(fake_calls("cuMemUnmap"), 0);
}

static void another_size_is_found_out(void **state)
{
    gp_device *device = open_device(0);
    gp_chunk *chunk = NULL;
    gp_error error;
    (void)state;
    fake_set("cuMemMap", GP__CUDA_ERROR_NOT_SUPPORTED);
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_chunk_import_fd(device, 0, 4 * PAGE, &chunk, &error), &error);
    expect_text(error.message, "is not 8 MiB");
    expect_text(error.message, "give the exact size");
    assert_int_equal(error.size, 4 * PAGE);
    assert_null(chunk);
    expect_nothing_left(1);
}

/* The undo of the trial is asked for twice; what stays mapped is an error and not a chunk. */
static void an_undo_that_fails_is_told(void **state)
{
    gp_device *device = open_device(0);
    gp_chunk *chunk = NULL;
    gp_error error;
    (void)state;
    fake_set("cuMemUnmap", GP__CUDA_ERROR_UNKNOWN);
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_import_fd(device, 0, PAGE, &chunk, &error), &error);
    assert_string_equal(error.call, "cuMemUnmap");
    assert_int_equal(fake_calls("cuMemUnmap"), 2);
    assert_int_equal(fake_calls("cuMemAddressFree"), 0); /* never under a mapping */
    assert_int_equal(fake_calls("cuMemRelease"), 1);
    fake_set("cuMemUnmap", 0);
    fake_set("cuMemAddressFree", GP__CUDA_ERROR_UNKNOWN);
    CHECK_STATUS(GP_ERR_DRIVER, gp_chunk_import_fd(device, 0, PAGE, &chunk, &error), &error);
    assert_string_equal(error.call, "cuMemAddressFree");
    assert_int_equal(fake_calls("cuMemAddressFree"), 2);
    assert_int_equal(fake_calls("cuMemRelease"), 2);
    assert_null(chunk);
}

/* ---- peers ------------------------------------------------------------------------------------ */

static gp_status open_pool(gp_device *device, gp_device *peer, gp_pool **pool, gp_error *error)
{
    gp_device *const peers[] = {peer, device, peer};
    gp_pool_options options = {.device = device,
                               .limit = GP_NO_LIMIT,
                               .flags = GP_POOL_NO_REAPER,
                               .peers = peers,
                               .peer_count = 3};
    return gp_pool_create(&options, pool, error);
}

static void peers_get_access_in_the_same_call(void **state)
{
    gp_device *device = open_device(0), *peer = open_device(1);
    gp_pool *pool = NULL;
    gp_stream *stream = NULL;
    gp_error error;
    uintptr_t va = 0;
    (void)state;
    CHECK_OK(open_pool(device, peer, &pool, &error), &error);
    /* Whether 1 can reach 0's memory, and not the other way round. */
    assert_string_equal(fake_last("cuDeviceCanAccessPeer"), "device=1 peer=0");
    assert_int_equal(fake_calls("cuDeviceCanAccessPeer"), 1);
    CHECK_OK(gp_pool_stream(pool, 0, &stream, &error), &error);
    CHECK_OK(gp_pool_malloc(pool, PAGE, stream, 0, &va, &error), &error);
    assert_int_equal(fake_calls("cuMemSetAccess"), 1);
    expect_text(fake_last("cuMemSetAccess"), "count=2 first=1:0:3 last=1:1:3");
    struct gp__peers peers = {.count = 1, .devices = {peer}};
    CHECK_OK(device->driver->set_access(device, PAGE, PAGE, GP_LOCATION_HOST, &peers, NULL), NULL);
    expect_text(fake_last("cuMemSetAccess"), "count=3 first=1:0:3 last=1:1:3");
    gp_stream_release(stream);
    CHECK_OK(gp_pool_close(pool, &error), &error);
    gp_pool_release(pool);
}

static void unreachable_peers_are_refused(void **state)
{
    gp_device *device = open_device(0), *peer = open_device(1);
    gp_pool *pool = NULL;
    gp_error error;
    int64_t live = gp__memory_live();
    (void)state;
    CHECK_STATUS(GP_ERR_UNAVAILABLE, open_pool(device, peer, &pool, &error), &error);
    expect_text(error.message, "cuda:1 cannot reach memory of cuda:0");
    assert_null(pool);
    assert_int_equal(gp__memory_live(), live);
}

#define CASE(function, ...)                                                                        \
    {                                                                                              \
        .name = #function, .run = function, __VA_ARGS__                                            \
    }

int main(int argc, char **argv)
{
    static const struct cuda_case cases[] = {
        CASE(flags_reach_the_driver, .settings = NULL),
        {"rdma_absent", made_without, "rdma=0", NULL},
        {"rdma_not_created", made_without, "rdma_create=801", NULL},
        {"rdma_not_created_with_999", made_without, "rdma_create=999", NULL},
        {"rdma_without_access", made_without, "rdma_access=999", NULL},
        CASE(exporting_unsupported, .settings = "posix_fd=0"),
        CASE(exports_close_on_exec, .settings = NULL),
        CASE(imports_and_proves_the_size, .settings = NULL),
        CASE(the_properties_say_where_it_lives, .settings = NULL),
        CASE(refused_imports_leave_nothing, .settings = NULL),
        CASE(another_size_is_found_out, .settings = NULL),
        CASE(an_undo_that_fails_is_told, .settings = NULL),
        CASE(peers_get_access_in_the_same_call, .settings = NULL),
        CASE(unreachable_peers_are_refused, .settings = "peers=0"),
        {"a_probe_of_peers_fails", unreachable_peers_are_refused, "cuDeviceCanAccessPeer=1", NULL},
    };
    return run_cases(argc, argv, cases, CASE_COUNT(cases));
}
