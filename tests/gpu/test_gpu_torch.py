# SPDX-License-Identifier: Apache-2.0
"""growpool.torch on a GPU: tensors over growpool's memory, under work on PyTorch's streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import growpool
import growpool.torch
import pytest
import torch
from cuda_driver import Gpu

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROW = 2 * MIB // 4  # float32 elements of a chunk


@pytest.fixture(scope="session", autouse=True)
def warm(gpu: Gpu) -> None:
    """What PyTorch makes on first use is made: its context, streams, kernels and workspaces."""
    torch.cuda.Stream()
    numbers = torch.randn(64, 64, device="cuda", requires_grad=True)
    (numbers.half() @ numbers.half()[0]).float().sum().backward()
    torch.cat([numbers, numbers]).double().sum(1).float()
    del numbers
    let_go()


def let_go() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def nothing_is_cached(device_memory_is_back: None) -> Iterator[None]:
    yield
    let_go()


@pytest.fixture
def pool() -> Iterator[growpool.Pool]:
    with growpool.Pool("cuda:0", chunk_size=2 * MIB) as pool:
        yield pool


def test_a_tensor_is_the_memory(pool: growpool.Pool) -> None:
    buffer = pool.allocate(4 * MIB)
    tensor = growpool.torch.tensor(buffer, torch.float16, (1024, 2048))
    assert tensor.device == torch.device("cuda:0") and tensor.data_ptr() == buffer.handle
    tensor.fill_(3)
    twice = growpool.torch.tensor(buffer, torch.float16)
    assert float(twice.float().sum()) == 3 * 2 * MIB
    with pytest.raises(BufferError):
        buffer.close()
    del tensor, twice
    buffer.close()


def test_it_grows_in_place_under_work(pool: growpool.Pool) -> None:
    with growpool.torch.growable(pool, (256, ROW)) as grown:
        address = grown.memory.handle
        for length in (1, 2, 5, 64, 256):
            before = len(grown)
            grown.resize(length)
            part = grown.tensor
            assert part.data_ptr() == address and part.shape == (length, ROW)
            part[before:] = torch.arange(before, length, device="cuda")[:, None].float()
            del part
        expected = torch.arange(256, device="cuda").float() * ROW
        assert torch.equal(grown.tensor.double().sum(1).float(), expected)
        assert grown.memory.physical_bytes == 512 * MIB


def test_a_shrink_waits_for_other_streams(pool: growpool.Pool) -> None:
    """Work that a stream of PyTorch's own has not done yet, on memory that is about to go."""
    stream = torch.cuda.Stream()
    with growpool.torch.growable(pool, (64, ROW)) as grown:
        grown.resize(64)
        tensor = grown.tensor
        tensor.fill_(1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            tensor.mul_(2)
            total = tensor.sum(dtype=torch.float64)
        with pytest.raises(BufferError):
            grown.resize(1)
        del tensor
        grown.resize(1)  # DLPack does not say which stream: every one of the device is waited for
        assert stream.query()
        assert pool.stats.physical_bytes == 2 * MIB
        assert float(total) == 2 * 64 * ROW
        assert float(grown.tensor.sum()) == 2 * ROW


def test_autograd_reads_it(pool: growpool.Pool) -> None:
    with growpool.torch.growable(pool, (8, 1024)) as grown:
        grown.resize(8)
        grown.tensor.copy_(torch.arange(8, device="cuda")[:, None].expand(8, 1024))
        weight = torch.ones(1024, device="cuda", requires_grad=True)
        (grown.tensor * weight).sum().backward()
        assert weight.grad is not None and float(weight.grad[0]) == 28
        del weight


def test_thirty_two_sequences_share_a_range(pool: growpool.Pool) -> None:
    """A cache of keys whose sequences grow, finish and begin anew, beside plain tensors."""
    heads, page = 64, 2 * MIB // (64 * 2)  # tokens of a page, float16
    most, sequences = 8 * page, 32
    generator = torch.Generator(device="cuda").manual_seed(7)
    with pool.range(sequences * 8 * 2 * MIB) as cache:
        plain: list[torch.Tensor] = [torch.empty(0, heads, device="cuda").half()] * sequences
        pages = [0] * sequences
        for step in range(120):
            number = step * 7 % sequences
            offset = number * 8 * 2 * MIB
            tokens = 1000 + 977 * step % 9000
            if len(plain[number]) + tokens > most:  # finished
                cache.decommit(offset, pages[number] * 2 * MIB)
                plain[number], pages[number] = plain[number][:0], 0
            old = len(plain[number])
            wanted = -(-(old + tokens) // page)
            if wanted > pages[number]:
                stream = torch.cuda.current_stream()
                cache.commit(offset, wanted * 2 * MIB, stream)
                pages[number] = wanted
            new = torch.randn(tokens, heads, device="cuda", generator=generator).half()
            keys = growpool.torch.tensor(cache, torch.float16, (old + tokens, heads), offset=offset)
            keys[old:] = new
            plain[number] = torch.cat([plain[number], new])
            query = torch.randn(heads, device="cuda", generator=generator).half()
            assert torch.equal(keys @ query, plain[number] @ query)
            del keys
            assert cache.committed_bytes == sum(pages) * 2 * MIB
        assert pool.stats.physical_bytes == sum(pages) * 2 * MIB
