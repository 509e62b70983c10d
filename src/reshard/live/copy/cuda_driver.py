"""The calls of the CUDA driver that torch does not offer: memory of other processes, and signals.

An allocation is exported as a handle, and another process of the same host that opens the handle
reads the same memory. A signal is a number in host memory that several processes map: the stream of
one process writes it, the streams of others wait until it is there. No kernel runs meanwhile, and
the host can write the number as well: so a stream that waits for a process that has died can always
be released. (An interprocess event cannot: it is never complete then, and blocks the stream until
the process ends.)
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

HANDLE_BYTES = 64

BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID: a number that no other allocation of the process ever has."""

OPEN_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: also memory of another GPU

PORTABLE_AND_MAPPED = 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: for all GPUs of this process."""

WAIT, WRITE = 4, 5
"""CU_STREAM_MEM_OP_WAIT_VALUE_64, until the value is at least this, and _WRITE_VALUE_64."""

_OPERATION = struct.Struct("<6Q")  # kind, address, value; flags, alias and padding are 0
MAX_OPERATIONS = 255
"""The driver takes no more at once."""

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread that calls has none
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for work on the default stream


Operation = tuple[int, int, int]
"""What a stream does with a signal: `WAIT` or `WRITE`, the address of the signal, the value."""


class CudaError(Exception):
    """A call of the CUDA driver failed; the text names the error."""


class Allocation(NamedTuple):
    """Memory that the driver has allocated at once."""

    base: int
    num_bytes: int
    number: int  # never given to another allocation of the process


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class Driver:
    """The driver of NVIDIA, by way of ctypes, in the context that torch uses.

    Tests have a stand-in with the same public methods.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cuStreamBatchMemOp_v2.argtypes = c_void_p, c_uint, c_char_p, c_uint

    def _code(self, name: str, *arguments: Any) -> int:
        """Call the driver; in a thread that has no context yet, it gets that of its device.

        Autograd's threads have none until their first kernel or allocation.
        """
        function = getattr(self._library, name)
        code: int = function(*arguments)
        if code == NO_CONTEXT:
            device, context = c_int(), c_void_p()
            self._library.cuDeviceGet(byref(device), torch.cuda.current_device())
            self._library.cuDevicePrimaryCtxRetain(byref(context), device)
            self._library.cuCtxSetCurrent(context)
            code = function(*arguments)
        return code

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._code(name, *arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise CudaError(text.value.decode() if text.value else f"CUDA error {code}")

    def is_usable(self) -> bool:
        return torch.cuda.is_available()

    def gpu_of(self, device: torch.device) -> str:
        """A text that names the GPU of a device, on all processes alike."""
        number, uuid = c_int(), (ctypes.c_ubyte * 16)()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._call("cuDeviceGet", byref(number), c_int(index))
        self._call("cuDeviceGetUuid_v2", byref(uuid), number)
        return bytes(uuid).hex()

    def allocation(self, address: int) -> Allocation:
        """The allocation that an address is in."""
        base, size = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return Allocation(base.value, size.value, self.number(address))

    def number(self, address: int) -> int:
        """The number of the allocation that an address is in; 0 if there is none."""
        number = c_uint64()
        code = self._code("cuPointerGetAttribute", byref(number), BUFFER_ID, c_uint64(address))
        return 0 if code else number.value

    def export(self, base: int) -> bytes:
        """A handle with which other processes open the allocation that begins here."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address in this one."""
        address, theirs = c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), theirs, c_uint(OPEN_LAZILY))
        return address.value

    def close(self, address: int) -> None:
        """Unmap an allocation of another process."""
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory that can be exported, whatever torch's allocator is."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c_uint64(address))

    def write_word(self, address: int, value: int) -> None:
        """Write 8 bytes of device memory, on a stream of its own."""
        word = c_uint64(value)
        self._on_own_stream("cuMemcpyHtoDAsync_v2", c_uint64(address), byref(word), c_size_t(8))

    def read_word(self, address: int) -> int:
        """Read 8 bytes of device memory, on a stream of its own."""
        word = c_uint64()
        self._on_own_stream("cuMemcpyDtoHAsync_v2", byref(word), c_uint64(address), c_size_t(8))
        return word.value

    def _on_own_stream(self, name: str, *arguments: Any) -> None:
        """Call the driver on a stream that waits for no other, and wait for it."""
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), c_uint(NON_BLOCKING))
        try:
            self._call(name, *arguments, stream)
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy_v2", stream)

    def register(self, address: int, num_bytes: int) -> int:
        """Let GPUs access memory of the host; returns its address on devices."""
        memory, place = c_void_p(address), c_uint64()
        self._call("cuMemHostRegister_v2", memory, c_size_t(num_bytes), c_uint(PORTABLE_AND_MAPPED))
        self._call("cuMemHostGetDevicePointer_v2", byref(place), memory, c_uint(0))
        return place.value

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", c_void_p(address))

    def enqueue(self, stream: int, operations: Iterable[Operation]) -> None:
        """Let a stream wait for signals and write signals, after all of its work so far."""
        packed = [_OPERATION.pack(*one, 0, 0, 0) for one in operations]
        for at in range(0, len(packed), MAX_OPERATIONS):
            some = packed[at : at + MAX_OPERATIONS]
            self._call("cuStreamBatchMemOp_v2", stream, len(some), b"".join(some), 0)

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Device memory that torch has not allocated, as bytes that the tensor does not own."""
        make: Any = torch._C._construct_storage_from_data_pointer
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return empty.set_(make(address, device, num_bytes), 0, (num_bytes,), (1,))


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Takes 0.1 us and torch.cuda.current_stream 2.7 us; private to torch, so it may be missing."""


def stream_of(device: torch.device) -> int:
    """The handle of the current stream of a device; 0 if it is no GPU."""
    if device.type != "cuda":
        return 0
    if _raw_stream is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return _raw_stream(device.index)


@cache
def cuda_driver() -> Driver | None:
    """The driver of this machine; None where there is none, or one that lacks a function."""
    with contextlib.suppress(OSError, AttributeError):
        return Driver(ctypes.CDLL("libcuda.so.1"))
    return None
