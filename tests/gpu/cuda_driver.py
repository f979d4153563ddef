# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver for the GPU tests, by ctypes: streams, captures, memory figures and four kernels.

Knows nothing of growpool, so that what it sees is the driver's own word. Every call makes the
primary context current and takes it away again: a thread that had none has none afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

NOT_READY = 600
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
BLOCKING, NON_BLOCKING = 0, 1

MASK = 0xFFFFFFFF
FACTOR = 0x9E3779B1

# A word's value is its address / 4 times FACTOR, xor the seed. `verify` adds to two counters:
# words that differ, and words looked at, so that a check which never ran cannot pass. `latch` says
# that it runs and then waits until *flag is not 0: at most `spins` naps of about a microsecond, so
# that it ends by itself whatever happens to the test. `delay` lasts `cycles` clock cycles.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 p_base, .param .u64 p_words, .param .u32 p_seed)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [p_base];
    ld.param.u64 %rd2, [p_words];
    ld.param.u32 %r1, [p_seed];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    cvt.u64.u32 %rd3, %r5;
    mov.u32 %r6, %nctaid.x;
    mul.lo.u32 %r7, %r6, %r3;
    cvt.u64.u32 %rd4, %r7;
FILL_LOOP:
    setp.ge.u64 %p1, %rd3, %rd2;
    @%p1 bra FILL_DONE;
    shl.b64 %rd5, %rd3, 2;
    add.u64 %rd6, %rd1, %rd5;
    shr.u64 %rd7, %rd6, 2;
    cvt.u32.u64 %r8, %rd7;
    mul.lo.u32 %r8, %r8, 0x9E3779B1;
    xor.b32 %r8, %r8, %r1;
    st.global.u32 [%rd6], %r8;
    add.u64 %rd3, %rd3, %rd4;
    bra FILL_LOOP;
FILL_DONE:
    ret;
}

.visible .entry verify(.param .u64 p_base, .param .u64 p_words, .param .u32 p_seed,
                       .param .u64 p_counters)
{
    .reg .pred %p<3>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [p_base];
    ld.param.u64 %rd2, [p_words];
    ld.param.u32 %r1, [p_seed];
    ld.param.u64 %rd8, [p_counters];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    cvt.u64.u32 %rd3, %r5;
    mov.u32 %r6, %nctaid.x;
    mul.lo.u32 %r7, %r6, %r3;
    cvt.u64.u32 %rd4, %r7;
    mov.u64 %rd9, 0;
    mov.u64 %rd10, 0;
VERIFY_LOOP:
    setp.ge.u64 %p1, %rd3, %rd2;
    @%p1 bra VERIFY_DONE;
    shl.b64 %rd5, %rd3, 2;
    add.u64 %rd6, %rd1, %rd5;
    shr.u64 %rd7, %rd6, 2;
    cvt.u32.u64 %r8, %rd7;
    mul.lo.u32 %r8, %r8, 0x9E3779B1;
    xor.b32 %r8, %r8, %r1;
    ld.global.u32 %r9, [%rd6];
    setp.ne.u32 %p2, %r8, %r9;
    @%p2 add.u64 %rd9, %rd9, 1;
    add.u64 %rd10, %rd10, 1;
    add.u64 %rd3, %rd3, %rd4;
    bra VERIFY_LOOP;
VERIFY_DONE:
    atom.global.add.u64 %rd11, [%rd8], %rd9;
    atom.global.add.u64 %rd11, [%rd8+8], %rd10;
    ret;
}

.visible .entry latch(.param .u64 p_flag, .param .u64 p_started, .param .u32 p_spins)
{
    .reg .pred %p<2>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [p_flag];
    ld.param.u64 %rd2, [p_started];
    ld.param.u32 %r1, [p_spins];
    mov.u32 %r2, 1;
    st.volatile.global.u32 [%rd2], %r2;
    membar.sys;
LATCH_LOOP:
    ld.volatile.global.u32 %r3, [%rd1];
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra LATCH_DONE;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra LATCH_DONE;
    sub.u32 %r1, %r1, 1;
    mov.u32 %r4, 1000;
    nanosleep.u32 %r4;
    bra LATCH_LOOP;
LATCH_DONE:
    ret;
}

.visible .entry delay(.param .u64 p_cycles)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [p_cycles];
    mov.u64 %rd2, %clock64;
DELAY_LOOP:
    mov.u64 %rd3, %clock64;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra DELAY_LOOP;
    ret;
}
"""


class CudaError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        self.code = code
        super().__init__(f"{call} failed with CUresult {code}")


class _Function:
    """A function of the driver: called, it raises for any result but success."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.raw = function
        self.raw.restype = c_int

    def __call__(self, *arguments: object) -> None:
        code = self.raw(*arguments)
        if code != 0:
            raise CudaError(self.name, code)


class _Library:
    """libcuda's functions by name. Calls are made without the GIL, as a real user's are."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> _Function:
        function = _Function(name, getattr(self._library, name))
        setattr(self, name, function)
        return function


def pattern(address: int, words: int, seed: int) -> list[int]:
    """What `fill` writes: for checks by the CPU."""
    first = address >> 2
    return [((first + i) * FACTOR & MASK) ^ seed for i in range(words)]


class Gpu:
    """Device 0: its primary context, and the kernels loaded into it."""

    def __init__(self, ordinal: int = 0) -> None:
        self.cuda = _Library()
        self.ordinal = ordinal
        self.cuda.cuInit(0)
        device = c_int()
        self.cuda.cuDeviceGet(byref(device), ordinal)
        self.context = c_void_p()
        self.cuda.cuDevicePrimaryCtxRetain(byref(self.context), device)
        self._module = c_void_p()
        self._kernels: dict[str, c_void_p] = {}
        with self.current():
            self.cuda.cuModuleLoadData(byref(self._module), c_char_p(PTX))
            for name in ("fill", "verify", "latch", "delay"):
                function = c_void_p()
                self.cuda.cuModuleGetFunction(byref(function), self._module, name.encode())
                self._kernels[name] = function

    # -- contexts --

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.cuda.cuCtxPushCurrent_v2(self.context)
        try:
            yield
        finally:
            popped = c_void_p()
            self.cuda.cuCtxPopCurrent_v2(byref(popped))

    def current_context(self) -> int:
        """The calling thread's context, 0 for none."""
        context = c_void_p()
        self.cuda.cuCtxGetCurrent(byref(context))
        return context.value or 0

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Lets this thread query and wait while some stream captures."""
        mode = c_int(RELAXED)
        self.cuda.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield
        finally:
            self.cuda.cuThreadExchangeStreamCaptureMode(byref(mode))

    def synchronize(self) -> None:
        """Waits for the whole context. Raises what a kernel did wrong."""
        with self.current():
            self.cuda.cuCtxSynchronize()

    # -- memory --

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        with self.current():
            self.cuda.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value, total.value

    def free_memory(self) -> int:
        return self.memory_info()[0]

    def allocate(self, size: int) -> int:
        address = c_ulonglong()
        with self.current():
            self.cuda.cuMemAlloc_v2(byref(address), c_size_t(size))
        return address.value

    def release(self, address: int) -> None:
        with self.current():
            self.cuda.cuMemFree_v2(c_ulonglong(address))

    def read(self, address: int, size: int) -> bytes:
        """Bytes at a device address; waits for nothing but the copy."""
        target = ctypes.create_string_buffer(size)
        with self.current():
            self.cuda.cuMemcpyDtoH_v2(target, c_ulonglong(address), c_size_t(size))
        return target.raw

    def zero(self, address: int, size: int) -> None:
        with self.current():
            self.cuda.cuMemsetD8_v2(c_ulonglong(address), ctypes.c_ubyte(0), c_size_t(size))
            self.cuda.cuCtxSynchronize()

    # -- streams --

    def create_stream(self, flags: int = NON_BLOCKING) -> int:
        stream = c_void_p()
        with self.current():
            self.cuda.cuStreamCreate(byref(stream), c_uint(flags))
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        with self.current():
            self.cuda.cuStreamDestroy_v2(c_void_p(stream))

    def synchronize_stream(self, stream: int) -> None:
        with self.current():
            self.cuda.cuStreamSynchronize(c_void_p(stream))

    def is_idle(self, stream: int) -> bool:
        with self.current():
            code: int = self.cuda.cuStreamQuery.raw(c_void_p(stream))
        if code not in (0, NOT_READY):
            raise CudaError("cuStreamQuery", code)
        return code == 0

    def wait_for(self, waiter: int, other: int) -> None:
        """Work put on `waiter` from now runs after what is on `other` now."""
        event = c_void_p()
        with self.current():
            self.cuda.cuEventCreate(byref(event), c_uint(2))
            self.cuda.cuEventRecord(event, c_void_p(other))
            self.cuda.cuStreamWaitEvent(c_void_p(waiter), event, c_uint(0))
            self.cuda.cuEventDestroy_v2(event)

    # -- kernels --

    def launch(
        self, name: str, stream: int, *arguments: Any, blocks: int = 1, threads: int = 1
    ) -> None:
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        with self.current():
            self.cuda.cuLaunchKernel(
                self._kernels[name],
                c_uint(blocks),
                c_uint(1),
                c_uint(1),
                c_uint(threads),
                c_uint(1),
                c_uint(1),
                c_uint(0),
                c_void_p(stream),
                pointers,
                c_void_p(None),
            )

    def fill(self, stream: int, address: int, size: int, seed: int) -> None:
        """Writes the pattern over `size` bytes (a multiple of 4)."""
        words = size // 4
        blocks = max(1, min(264, (words + 255) // 256))
        arguments = (c_ulonglong(address), c_ulonglong(words), c_uint(seed))
        self.launch("fill", stream, *arguments, blocks=blocks, threads=256)

    def verify(self, stream: int, address: int, size: int, seed: int, counter: Counter) -> None:
        """Compares `size` bytes with the pattern; the counter says how it went."""
        words = size // 4
        blocks = max(1, min(264, (words + 255) // 256))
        arguments = (
            c_ulonglong(address),
            c_ulonglong(words),
            c_uint(seed),
            c_ulonglong(counter.address),
        )
        self.launch("verify", stream, *arguments, blocks=blocks, threads=256)
        counter.expected += words

    def delay(self, stream: int, cycles: int) -> None:
        self.launch("delay", stream, c_ulonglong(cycles))


class Counter:
    """Two numbers in device memory that `verify` adds to."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.address = gpu.allocate(16)
        self.expected = 0
        gpu.zero(self.address, 16)

    def close(self) -> None:
        self.gpu.release(self.address)

    def check(self) -> None:
        """Synchronises; every word that was to be checked must have been, and been right."""
        self.gpu.synchronize()
        raw = self.gpu.read(self.address, 16)
        wrong, looked = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
        assert looked == self.expected, f"{looked} words were checked of {self.expected}"
        assert wrong == 0, f"{wrong} of {looked} words are wrong"


class Latch:
    """A kernel that holds its stream until open(); by itself it opens after `seconds`."""

    def __init__(self, gpu: Gpu, seconds: int = 20) -> None:
        self.gpu = gpu
        self.spins = seconds * 1_000_000
        host = c_void_p()
        with gpu.current():
            # Mapped and portable: under unified addressing the GPU reads it at the same address.
            gpu.cuda.cuMemHostAlloc(byref(host), c_size_t(4096), c_uint(3))
        assert host.value is not None
        self.address = host.value
        self._words = (c_uint * 2).from_address(self.address)
        self._words[0] = self._words[1] = 0

    def hold(self, stream: int) -> None:
        """Launches the kernel and returns when it runs."""
        arguments = (c_ulonglong(self.address), c_ulonglong(self.address + 4), c_uint(self.spins))
        self.gpu.launch("latch", stream, *arguments)
        deadline = time.monotonic() + 10
        while self._words[1] == 0:
            assert time.monotonic() < deadline, "the latch kernel did not start"
            time.sleep(0.0005)

    def open(self) -> None:
        self._words[0] = 1

    def close(self) -> None:
        self.open()
        self.gpu.synchronize()
        with self.gpu.current():
            self.gpu.cuda.cuMemFreeHost(c_void_p(self.address))


class Capture:
    """A capture of one stream, begun; end() gives the graph, or raises when it was invalidated."""

    def __init__(self, gpu: Gpu, stream: int, mode: int) -> None:
        self.gpu = gpu
        self.stream = stream
        self._graph = c_void_p()
        self._executable = c_void_p()
        with gpu.current():
            gpu.cuda.cuStreamBeginCapture_v2(c_void_p(stream), c_int(mode))

    def end(self) -> None:
        with self.gpu.current():
            self.gpu.cuda.cuStreamEndCapture(c_void_p(self.stream), byref(self._graph))

    def launch(self, stream: int) -> None:
        with self.gpu.current():
            if not self._executable:
                self.gpu.cuda.cuGraphInstantiateWithFlags(
                    byref(self._executable), self._graph, c_ulonglong(0)
                )
            self.gpu.cuda.cuGraphLaunch(self._executable, c_void_p(stream))

    def close(self) -> None:
        with self.gpu.current():
            if self._executable:
                self.gpu.cuda.cuGraphExecDestroy(self._executable)
            if self._graph:
                self.gpu.cuda.cuGraphDestroy(self._graph)
