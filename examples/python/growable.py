# SPDX-License-Identifier: Apache-2.0
"""A list that grows without moving: pointers into it stay good, and nothing is copied.

Run it with ``python examples/python/growable.py``. It uses host memory, so that Python can look.
"""

import ctypes

import growpool

MIB = 1 << 20
TEXT = b"here from the start"


def main() -> None:
    with growpool.Pool("host", name="growable") as pool:
        # Addresses for 64 GiB, and memory for none of it yet.
        memory = pool.growable("64 GiB")
        address = memory.handle
        print(f"reserved: 64 GiB of addresses at {address:#x}, {memory.size} bytes of memory")

        memory.resize("2 MiB")
        ctypes.memmove(address, TEXT, len(TEXT))
        size = 2 * MIB
        while size < 256 * MIB:
            size *= 2
            memory.resize(size)
        print(f"grown: {memory.size // MIB} MiB with {pool.stats.chunk_count} chunks")
        assert memory.handle == address
        print(f"unmoved: {ctypes.string_at(address, len(TEXT)).decode()}")

        # Chunks are given back whole. A cut through one keeps it, and the result says so.
        result = memory.resize("130 MiB")
        print(
            f"cut to 130 MiB: {result.released_bytes // MIB} MiB went back, "
            f"{result.kept_bytes // MIB} MiB stay in a chunk that was cut"
        )
        result = memory.resize("128 MiB")
        print(f"cut to 128 MiB: {result.released_bytes // MIB} MiB went back")
        memory.close()
    print("closed")


if __name__ == "__main__":
    main()
