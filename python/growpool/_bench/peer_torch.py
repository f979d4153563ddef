# SPDX-License-Identifier: Apache-2.0
"""PyTorch as a player, in a process of its own: its allocator is chosen before CUDA starts.

usage: python -m growpool._bench.peer_torch MODE WORK DEVICE NUMBER. Prints one JSON object. The
number is that of rounds for "pairs", of bytes for "first" and "doubling", which a process does once
(see once.py).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import time
from typing import Any

MODES = {
    "default": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
}
MIB = 1 << 20


def pairs(torch: Any, device: int, rounds: int) -> dict[str, float]:
    """Seconds of a raw pair, and of torch.empty and del, for 1 MiB."""
    stream = torch.cuda.current_stream().cuda_stream
    get = torch._C._cuda_cudaCachingAllocator_raw_alloc
    give = torch._C._cuda_cudaCachingAllocator_raw_delete
    raw, tensors = [], []
    count = 20_000
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(count):
            give(get(MIB, stream))
        raw.append((time.perf_counter() - begin) / count)
        begin = time.perf_counter()
        for _ in range(count):
            tensor = torch.empty(MIB, dtype=torch.uint8, device=f"cuda:{device}")
            del tensor
        tensors.append((time.perf_counter() - begin) / count)
    return {"raw": statistics.median(raw[1:]), "tensor": statistics.median(tensors[1:])}


def first(torch: Any, device: int, size: int) -> dict[str, float]:
    """Seconds for the first tensor of `size` bytes, and for giving it back; the same once more."""
    get, back = [], []
    for _ in range(2):
        begin = time.perf_counter()
        tensor = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        get.append(time.perf_counter() - begin)
        del tensor
        begin = time.perf_counter()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        back.append(time.perf_counter() - begin)
        time.sleep(1)
    return {"get": get[0], "back": back[0], "get again": get[1], "back again": back[1]}


def doubling(torch: Any, device: int, last: int) -> dict[str, float]:
    """Seconds and peak bytes of growing from 64 MiB to `last` by allocating and copying."""
    base, peak, took = torch.cuda.mem_get_info()[0], 0, 0.0
    small = torch.empty(1024, dtype=torch.uint8, device=f"cuda:{device}")
    small[:512].copy_(small[512:])  # the copy's kernel is loaded before the clock runs
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize()
    size = 128 * MIB
    while size <= last:
        begin = time.perf_counter()
        larger = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        larger[: tensor.numel()].copy_(tensor)
        torch.cuda.synchronize()
        took += time.perf_counter() - begin
        peak = max(peak, base - torch.cuda.mem_get_info()[0])
        tensor = larger
        del larger
        size *= 2
    return {"took": took, "peak": float(peak)}


def main(arguments: list[str]) -> None:
    mode, work, device, number = arguments[0], arguments[1], int(arguments[2]), int(arguments[3])
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = MODES[mode]
    os.environ["PYTORCH_ALLOC_CONF"] = MODES[mode]
    if not MODES[mode]:
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF")
        os.environ.pop("PYTORCH_ALLOC_CONF")
    torch: Any = importlib.import_module("torch")
    torch.cuda.set_device(device)
    torch.zeros(1, device=f"cuda:{device}")
    torch.cuda.synchronize()
    gc.disable()
    if work == "pairs":
        answer = pairs(torch, device, number)
    elif work == "first":
        answer = first(torch, device, number)
    else:
        answer = doubling(torch, device, number)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
