# SPDX-License-Identifier: Apache-2.0
"""A cache for 32 sequences at a time, as a language model keeps one, in one sparse range.

Each sequence has addresses for its longest case and memory only for the tokens it has come to. It
is contiguous, nothing moves when it grows, and what it held is back when it finishes. Run it with
``python examples/python/kv_cache.py [device]``.
"""

import random
import sys
from dataclasses import dataclass

import growpool

MIB = 1 << 20
PAGE = 2 * MIB
SEQUENCES_AT_A_TIME = 32
SEQUENCES = 100
TOKEN_BYTES = 128 * 1024
MOST_TOKENS = 512
SLOT_BYTES = MOST_TOKENS * TOKEN_BYTES


@dataclass
class Sequence:
    slot: int
    last: int  # how many tokens it will get
    tokens: int = 0
    committed: int = 0  # bytes, from the start of its slot

    @property
    def start(self) -> int:
        return self.slot * SLOT_BYTES


class Cache:
    """Slots in one range. Pages come and go for all sequences of a step with one call."""

    def __init__(self, pool: growpool.Pool) -> None:
        self.range = pool.range(SEQUENCES_AT_A_TIME * SLOT_BYTES)
        self.free_slots = list(range(SEQUENCES_AT_A_TIME))

    def grow(self, sequences: list[Sequence]) -> None:
        """Make room for one more token of each."""
        wanted = []
        for sequence in sequences:
            sequence.tokens += 1
            if sequence.tokens * TOKEN_BYTES > sequence.committed:
                wanted.append((sequence.start + sequence.committed, PAGE))
                sequence.committed += PAGE
        if wanted:
            self.range.commit_many(wanted)

    def finish(self, sequences: list[Sequence]) -> None:
        """Give back everything they held."""
        if sequences:
            self.range.decommit_many([(one.start, one.committed) for one in sequences])
        self.free_slots += [one.slot for one in sequences]


def main(device: str) -> None:
    chance = random.Random(1)
    # Chunks of one page each, so that every page can go back by itself.
    with growpool.Pool(device, chunk_size=PAGE, name="kv") as pool:
        cache = Cache(pool)
        active: list[Sequence] = []
        waiting, finished, step = SEQUENCES, 0, 0
        while active or waiting:
            while waiting and cache.free_slots:
                active.append(Sequence(cache.free_slots.pop(), chance.randint(16, MOST_TOKENS)))
                waiting -= 1
            cache.grow(active)
            done = [one for one in active if one.tokens == one.last]
            cache.finish(done)
            active = [one for one in active if one.tokens < one.last]
            finished += len(done)
            if step % 200 == 0:
                held = pool.stats.used_bytes // MIB
                print(f"step {step}: {len(active)} sequences hold {held} MiB")
            step += 1
        assert list(cache.range.committed) == []
        peak, whole = pool.stats.peak_physical_bytes // MIB, SEQUENCES_AT_A_TIME * SLOT_BYTES // MIB
        print(f"{finished} sequences finished; at most {peak} MiB of {whole} MiB were in use")
        print(f"{pool.stats.physical_bytes} bytes are left")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "host")
