# SPDX-License-Identifier: Apache-2.0
"""A first pool: two functions of yours supply the memory, a limit holds, and a trim gives it back.

Run it with ``python examples/python/first_pool.py [device]``; the device is "host" if left out.
"""

import sys

import growpool

MIB = 1 << 20

taken: set[growpool.Chunk] = set()


def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
    """Supply a chunk of physical memory. Return None to say no."""
    chunk = growpool.Chunk.create(size, device)
    taken.add(chunk)
    print(f"    alloc: {size // MIB} MiB")
    return chunk


def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
    """Take a chunk back: nobody uses it any more, and it has no address."""
    taken.remove(chunk)
    print(f"    free: {size // MIB} MiB")


def main(device: str) -> None:
    with growpool.Pool(device, alloc=alloc, free=free, limit="128 MiB", name="first") as pool:
        print("a block makes the pool grow:")
        block = pool.allocate("48 MiB")
        print(f"    {block.size // MIB} MiB at {block.handle:#x}")

        print("a smaller one fits what is there, or grows it a little:")
        small = pool.malloc(1000)

        print("the limit holds:")
        try:
            pool.allocate("256 MiB")
        except growpool.LimitExceededError as error:
            print(f"    {error}")

        print("what is free stays in the pool until you trim it:")
        pool.free(small)
        block.close()
        print(f"    {pool.trim() // MIB} MiB went back")
        print(f"    {pool.stats.physical_bytes} bytes are left")
    print(f"{len(taken)} chunks are out")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "host")
