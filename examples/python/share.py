# SPDX-License-Identifier: Apache-2.0
"""Two processes on the same memory: a chunk goes over a Unix socket as a file descriptor.

Run it with ``python examples/python/share.py``. It uses host memory, so that Python can look; on a
GPU the same calls share device memory.
"""

import os
import socket
import subprocess
import sys

import growpool

PAGE = 2 << 20


def pool_on(chunk: growpool.Chunk) -> growpool.Pool:
    """Make a pool that has this chunk for memory and no other."""
    chunks = [chunk]
    return growpool.Pool(
        "host",
        alloc=lambda size, device, stream: chunks.pop() if chunks else None,
        free=lambda chunk, size, device, stream: chunks.append(chunk),
        chunk_size=chunk.size,
    )


def first_process() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        chunk = growpool.Chunk.create(PAGE, "host", handle_type="posix_fd")
        with pool_on(chunk) as pool, pool.allocate(PAGE) as block:
            memory = memoryview(block).cast("B")
            memory[:5] = b"hello"
            descriptor = chunk.export_fd()
            socket.send_fds(ours, [b"a chunk"], [descriptor])
            os.close(descriptor)
            ours.recv(1)  # the other one has answered
            print(f"the first process reads: {bytes(memory[:12]).decode()}", flush=True)
            memory.release()
        assert child.wait(30) == 0


def second_process(number: int) -> None:
    with socket.socket(fileno=number) as link:
        _, (descriptor,), _, _ = socket.recv_fds(link, 16, 1)
        chunk = growpool.Chunk.from_fd(descriptor, PAGE, "host")
        os.close(descriptor)  # the chunk does not need it
        with pool_on(chunk) as pool, pool.allocate(PAGE) as block:
            memory = memoryview(block).cast("B")
            print(f"the second process reads: {bytes(memory[:5]).decode()}", flush=True)
            memory[5:12] = b" to you"
            memory.release()
        link.send(b".")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        second_process(int(sys.argv[1]))
    else:
        first_process()
