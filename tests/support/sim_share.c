/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's shared memory: descriptors that stand for it, access for peers, network cards
 * that may reach it, and the switches that make each of them fail as hardware does. A descriptor is a
 * memory file with a token in it; its own hold on the memory is not counted in the ledger.
 */
#include "sim_internal.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TOKEN_MAGIC UINT64_C(0x6b6e7568636d6973)

static const struct gp__sim_kind export_kind = {"export_fd", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN};
static const struct gp__sim_kind import_kind = {"import_fd", true, GP_ERR_DRIVER, GP__SIM_UNKNOWN};
static const struct gp__sim_kind can_access_kind = {"can_access", true, GP_ERR_DRIVER,
                                                    GP__SIM_UNKNOWN};

/* What a descriptor's file holds. */
struct token {
    uint64_t magic;
    uint64_t process;
    uint64_t shared;
    uint64_t bytes;
    uint64_t ordinal;
    uint64_t location;
    uint64_t flags;
};

/* ---- switches ------------------------------------------------------------------------------- */

void gp__sim_set_sharing(gp__sim *sim, bool supported)
{
    gp__mutex_lock(&sim->mutex);
    if (supported)
        sim->device.chunk_flags |= GP_CHUNK_EXPORTABLE;
    else
        sim->device.chunk_flags &= ~(unsigned)GP_CHUNK_EXPORTABLE;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_set_rdma(gp__sim *sim, enum gp__sim_rdma rdma)
{
    gp__mutex_lock(&sim->mutex);
    sim->rdma = rdma;
    if (rdma == GP__SIM_RDMA_ABSENT)
        sim->device.chunk_flags &= ~(unsigned)GP_CHUNK_GPU_DIRECT_RDMA;
    else
        sim->device.chunk_flags |= GP_CHUNK_GPU_DIRECT_RDMA;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_set_peers(gp__sim *sim, bool reachable)
{
    gp__mutex_lock(&sim->mutex);
    sim->out_of_reach = !reachable;
    gp__mutex_unlock(&sim->mutex);
}

/* ---- what the memory calls ask ---------------------------------------------------------------- */

bool gp__sim_may_create(struct gp__sim_call *call, unsigned flags)
{
    const gp__sim *sim = call->sim;

    if ((flags & ~sim->device.chunk_flags) != 0)
        gp__sim_violate(call, "flags %#x, of which the device knows %#x", flags,
                        sim->device.chunk_flags);
    if ((flags & GP_CHUNK_GPU_DIRECT_RDMA) == 0)
        return true;
    return sim->rdma != GP__SIM_RDMA_NO_CREATE &&
           !(sim->rdma == GP__SIM_RDMA_SMALL_ONLY && sim->rdma_created);
}

bool gp__sim_rdma_fails(const gp__sim *sim, const struct gp__sim_memory *memory)
{
    return sim->rdma == GP__SIM_RDMA_NO_ACCESS && (memory->flags & GP_CHUNK_GPU_DIRECT_RDMA) != 0;
}

bool gp__sim_shares(const gp__sim *sim, const struct gp__sim_memory *memory)
{
    for (size_t i = 0; memory->shared != 0 && i < sim->memory_count; i++)
        if (&sim->memories[i] != memory && sim->memories[i].shared == memory->shared)
            return true;
    return false;
}

/* Every peer must be another device of this kind that reaches the memory, and none come twice. */
bool gp__sim_may_grant(struct gp__sim_call *call, const struct gp__peers *peers)
{
    for (size_t i = 0; peers != NULL && i < peers->count; i++) {
        const gp_device *peer = peers->devices[i];

        if (peer == NULL || peer->kind != GP_DEVICE_SIM)
            gp__sim_violate(call, "peer %zu is no simulated device", i);
        else if (peer == &call->sim->device)
            gp__sim_violate(call, "the device itself as a peer");
        else if (call->sim->out_of_reach)
            gp__sim_violate(call, "%s cannot reach the memory", peer->name);
        for (size_t j = 0; j < i; j++)
            if (peers->devices[j] == peer)
                gp__sim_violate(call, "a peer twice");
    }
    if (peers != NULL && peers->count > GP__SIM_MOST_PEERS)
        gp__sim_violate(call, "%zu peers: the simulator keeps %d", peers->count,
                        GP__SIM_MOST_PEERS);
    return !call->violated;
}

bool gp__sim_may_reach(const struct gp__sim_mapping *mapping, const gp_device *from)
{
    if (!mapping->accessible || from == NULL)
        return mapping->accessible;
    for (unsigned i = 0; i < mapping->peer_count; i++)
        if (mapping->peers[i] == from)
            return true;
    return false;
}

/* ---- the table -------------------------------------------------------------------------------- */

static int write_token(const struct token *token)
{
    int fd = memfd_create("growpool-sim", MFD_CLOEXEC);

    if (fd >= 0 && write(fd, token, sizeof *token) == (ssize_t)sizeof *token)
        return fd;
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

gp_status gp__sim_export_fd(gp_device *device, gp__memory handle, size_t bytes, int *fd,
                            gp_error *error)
{
    static _Atomic uint64_t last;
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_memory *memory;
    int made = -1;

    if (!gp__sim_begin(&call, sim, &export_kind, error, "export_fd memory=%llu bytes=%zu",
                       (unsigned long long)handle, bytes))
        return gp__sim_decided(&call);
    memory = gp__sim_checked_memory(&call, handle, bytes);
    if (memory != NULL && (memory->imported || (memory->flags & GP_CHUNK_EXPORTABLE) == 0))
        gp__sim_violate(&call, memory->imported ? "imported memory" : "not created exportable");
    if (!call.violated) {
        if (memory->shared == 0)
            memory->shared = atomic_fetch_add(&last, 1) + 1;
        made = write_token(&(struct token){TOKEN_MAGIC, (uint64_t)getpid(), memory->shared,
                                           memory->bytes, (uint64_t)device->ordinal,
                                           (uint64_t)memory->location, memory->flags});
    }
    if (made < 0)
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_INVALID_VALUE, 0, bytes);
    *fd = made;
    return gp__sim_end_ok(&call);
}

static bool read_token(int fd, struct token *token)
{
    return pread(fd, token, sizeof *token, 0) == (ssize_t)sizeof *token &&
           token->magic == TOKEN_MAGIC && token->process == (uint64_t)getpid();
}

gp_status gp__sim_import_fd(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                            gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_memory memory = {.unreleased = true, .imported = true};
    struct token token;

    if (!gp__sim_begin(&call, sim, &import_kind, error, "import_fd bytes=%zu", bytes))
        return gp__sim_decided(&call);
    if ((device->chunk_flags & GP_CHUNK_EXPORTABLE) == 0)
        gp__sim_violate(&call, "the device does not share memory");
    if (call.violated || !read_token(fd, &token))
        return gp__sim_end(&call, GP_ERR_DRIVER, GP__SIM_UNKNOWN, 0, bytes);
    if (token.ordinal != (uint64_t)device->ordinal)
        return gp__sim_end(&call, GP_ERR_ARGUMENT, GP__SIM_INVALID_VALUE, 0, bytes);
    memory.bytes = token.bytes; /* whatever was asked for: the driver does not look at it */
    memory.shared = token.shared;
    memory.location = (gp_location)token.location;
    memory.flags = (unsigned)token.flags & GP_CHUNK_GPU_DIRECT_RDMA;
    *out = (struct gp__imported){gp__sim_add_memory(sim, &memory), memory.location, memory.flags};
    gp__sim_note(&call, " memory=%llu", (unsigned long long)out->memory);
    return gp__sim_end_ok(&call);
}

gp_status gp__sim_can_access(gp_device *device, gp_device *peer, bool *can, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;

    if (!gp__sim_begin(&call, sim, &can_access_kind, error, "can_access peer=%s", peer->name)) {
        /* A probe that fails means no; only a forked child is told. */
        gp_status status = gp__sim_decided(&call);

        *can = false;
        return call.forked ? status : GP_OK;
    }
    if (peer == device || peer->kind != GP_DEVICE_SIM)
        gp__sim_violate(&call, "not another simulated device");
    *can = !sim->out_of_reach;
    return gp__sim_end_ok(&call);
}
