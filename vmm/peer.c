/* SPDX-License-Identifier: Apache-2.0
 *
 * A pool's peers: which other devices get access to its memory. Checked once, when the pool is made; every
 * new chunk is then mapped with access for them (grow.c). It never changes them later.
 */
#include "pool.h"

static bool is_listed(const struct gp__peers *peers, const gp_device *peer)
{
    for (size_t i = 0; i < peers->count; i++) {
        if (peers->devices[i] == peer)
            return true;
    }
    return false;
}

static const char *kind_text(gp_device_kind kind)
{
    switch (kind) {
    case GP_DEVICE_CUDA:
        return "GPUs";
    case GP_DEVICE_HOST:
        return "the host";
    case GP_DEVICE_SIM:
        return "simulated devices";
    }
    return "devices of its kind";
}

static gp_status check_peer(gp_device *device, gp_device *peer, gp_error *error)
{
    bool can = false;
    if (peer->kind != device->kind)
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "%s cannot be a peer of a pool on %s: only %s can reach its memory",
                            peer->name, device->name, kind_text(device->kind));
    gp__assert_no_lock();
    gp_status status = device->driver->can_access(device, peer, &can, error);
    if (status != GP_OK || can)
        return status;
    return gp_error_set(error, GP_ERR_UNAVAILABLE,
                        "%s cannot reach memory of %s: the two have no peer-to-peer connection; "
                        "leave it out of the pool's peers and copy instead",
                        peer->name, device->name);
}

gp_status gp__peers_set(struct gp__peers *peers, gp_device *device, gp_device *const *given,
                        size_t count, gp_error *error)
{
    if (count != 0 && given == NULL)
        return gp_error_set(error, GP_ERR_ARGUMENT, "%zu peers are counted and none given", count);
    for (size_t i = 0; i < count; i++) {
        if (given[i] == NULL)
            return gp_error_set(error, GP_ERR_ARGUMENT, "peer %zu is no device", i);
        if (given[i] == device || is_listed(peers, given[i]))
            continue;
        if (peers->count == GP__MOST_PEERS)
            return gp_error_set(error, GP_ERR_ARGUMENT, "a pool has at most %d peers",
                                GP__MOST_PEERS);
        gp_status status = check_peer(device, given[i], error);
        if (status != GP_OK)
            return status;
        peers->devices[peers->count++] = given[i];
    }
    return GP_OK;
}

size_t gp_pool_peer_count(const gp_pool *pool)
{
    return pool->peers.count;
}

gp_device *gp_pool_peer(const gp_pool *pool, size_t index)
{
    return index < pool->peers.count ? pool->peers.devices[index] : NULL;
}
