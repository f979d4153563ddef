# SPDX-License-Identifier: Apache-2.0
"""Several devices at once, and peers: who gets asked with which number, and who may reach what."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier

Chunk = growpool.Chunk
Pool = growpool.Pool


# ---- several at once ----


def test_callbacks_get_the_ids_of_their_devices(sims: list[Any]) -> None:
    suppliers = [Supplier() for _ in sims]
    pools = [
        Pool(sim.device, backing=supplier, name=sim.device)
        for sim, supplier in zip(sims, suppliers, strict=True)
    ]
    streams = [sim.stream() for sim in sims]
    buffers = [
        pool.allocate((i + 1) * PAGE, stream=stream)
        for i, (pool, stream) in enumerate(zip(pools, streams, strict=True))
    ]
    for i, (sim, buffer, supplier) in enumerate(zip(sims, buffers, suppliers, strict=True)):
        assert buffer.device == sim.device
        assert buffer.device_id == sim.device_id == -2 - sim.ordinal
        assert [call[2:] for call in supplier.calls] == [(sim.device_id, streams[i])]
        assert sim.state.mapped_bytes == supplier.out_bytes >= (i + 1) * PAGE
        sim.launch(streams[i], buffer.handle, PAGE)
    for sim, pool, buffer in zip(sims, pools, buffers, strict=True):
        buffer.close()
        pool.trim()  # waits for its own device's work alone
        assert sim.work_all() == 0
        assert all(other.work_all() for other in sims[sims.index(sim) + 1 :])
    for pool, supplier in zip(pools, suppliers, strict=True):
        pool.close()
        assert supplier.out == []
        assert {call[2] for call in supplier.calls} == {pool.device_id}


def test_a_chunk_of_the_wrong_device_is_refused(sims: list[Any]) -> None:
    wrong = Chunk.create(PAGE, sims[1].device)
    with Pool(
        sims[0].device, alloc=lambda *_: wrong, free=lambda *_: None, chunk_size=PAGE
    ) as pool:
        with pytest.raises(ValueError, match=sims[1].device):
            pool.malloc(PAGE)
        assert not wrong.is_in_use
        assert pool.stats.physical_bytes == 0
    wrong.close()


def test_a_callback_may_use_pools_of_other_devices(sims: list[Any]) -> None:
    with Pool(sims[1].device) as second:
        taken: list[Any] = []

        def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
            taken.append(second.allocate(PAGE))
            return Chunk.create(size, device)

        with Pool(sims[0].device, alloc=alloc, free=lambda *_: None) as first:
            first.allocate(PAGE)
            assert taken[0].device_id == sims[1].device_id
            assert sims[0].state.mapped_bytes >= PAGE
            assert sims[1].state.mapped_bytes >= PAGE


def test_devices_on_several_threads(sims: list[Any]) -> None:
    errors: list[BaseException] = []

    def work(sim: Any) -> None:
        try:
            with Pool(sim.device, chunk_size=PAGE) as pool:
                stream = sim.stream()
                for size in range(1, 40):
                    buffer = pool.allocate(size % 5 * PAGE + 1, stream=stream)
                    sim.launch(stream, buffer.handle, buffer.size)
                    buffer.close()
                    if size % 7 == 0:
                        pool.trim()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(sim,)) for sim in sims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


# ---- peers ----


def test_peers_reach_every_new_chunk(sims: list[Any]) -> None:
    owner, *others = sims
    names = [others[0].device, others[2].device]
    with Pool(owner.device, peers=names, chunk_size=PAGE) as pool:
        assert pool.peers == tuple(names)
        for turn in range(3):
            buffer = pool.allocate((turn + 1) * PAGE)
            for peer in (others[0], others[2]):
                owner.launch_from(peer.ordinal, 0, buffer.handle, buffer.size)
            owner.complete_all()
            buffer.close()
            pool.trim()


def test_forms_of_peers(sims: list[Any]) -> None:
    owner, first, second, _ = sims
    first_like = SimpleNamespace(device_id=first.device_id)
    for peers, expected in [
        (None, ()),
        ([], ()),
        ((), ()),
        ([owner.device], ()),
        ((first.device, owner.device, first.device), (first.device,)),
        ([first_like, second.device], (first.device, second.device)),
        ({first.device}, (first.device,)),
    ]:
        with Pool(owner.device, peers=peers) as pool:
            assert pool.peers == expected
    with Pool("host", peers=["host", "cpu"]) as pool:
        assert pool.peers == ()


@pytest.mark.parametrize("peers", ["cuda:1", "", b"cuda:1", 1, 1.5, True, object(), {"cuda:1": 1}])
def test_peers_of_other_types(sim: Any, peers: Any) -> None:
    with pytest.raises(TypeError, match=r"peers must be a list of devices such as \['cuda:1'"):
        Pool(sim.device, peers=peers)


@pytest.mark.parametrize(
    ("item", "error", "words"),
    [
        (None, TypeError, r"peers\[1\] must be a device, not None"),
        ("gpu one", ValueError, "unknown device 'gpu one'"),
        (1.5, TypeError, "device must be text"),
        (True, TypeError, "must not be a bool"),
        (-1, ValueError, "unknown device -1"),
        ("host", ValueError, "host cannot be a peer of a pool on sim:"),
    ],
)
def test_bad_elements(sim: Any, item: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Pool(sim.device, peers=[sim.device, item])


def test_a_sequence_that_raises(sim: Any) -> None:
    class Broken(list[Any]):
        def __iter__(self) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Pool(sim.device, peers=Broken())


def test_a_peer_without_a_connection(sims: list[Any]) -> None:
    sims[0].set_peers(False)
    with pytest.raises(growpool.DriverError, match="no peer-to-peer connection"):
        Pool(sims[0].device, peers=[sims[1].device])
    with Pool(sims[0].device, peers=[sims[0].device]) as pool:
        assert pool.peers == ()


def test_peers_of_a_closed_pool(sims: list[Any]) -> None:
    pool = Pool(sims[0].device, peers=[sims[1].device])
    pool.close()
    assert pool.peers == (sims[1].device,)
