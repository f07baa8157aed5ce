"""An emulated GPU for this process: the fake driver of the Rust tests, with torch's streams on top.

Tensors are the CPU's, and the emulated GPU reaches their memory. Kernels run on threads of the
driver, in the order of their streams. torch's own operations run at once, so they have to wait for
the stream first.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from on_device import OnDevice

CRATES = Path(__file__).parents[2] / "crates"
#: Multiprocessors of the GPU, as torch says. The driver says 8, and launches share those.
MULTIPROCESSORS = 4


class Kernel(ctypes.Structure):
    """The driver's description of a kernel."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("kernel", ctypes.c_void_p),
        ("emulate", ctypes.c_void_p),
    ]


class Listed(ctypes.Structure):
    """The emulator's description of a kernel."""

    _fields_ = Kernel._fields_[:3]


class Stream:
    """A stream of the driver, with the parts of torch's interface that the library and the tests
    use."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        handle = ctypes.c_void_p()
        DRIVER.cuStreamCreateWithPriority(ctypes.byref(handle), 1, priority)
        self.cuda_stream: int = handle.value
        self._before: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, -5

    def synchronize(self) -> None:
        """Waits for the work on this stream."""
        DRIVER.cuStreamSynchronize(ctypes.c_void_p(self.cuda_stream))

    def wait_stream(self, other: Stream) -> None:
        """Has later work on this stream wait for the present work of another one."""
        event = Event()
        event.record(other)
        event.wait(self)

    def __enter__(self) -> None:
        self._before.append(current_stream())
        CURRENT.stream = self

    def __exit__(self, *_: object) -> None:
        CURRENT.stream = self._before.pop()


class Event:
    """An event of the driver's."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        DRIVER.cuEventCreate(ctypes.byref(self._handle), 2)

    def record(self, stream: Stream) -> None:
        """Marks the end of a stream's present work."""
        DRIVER.cuEventRecord(self._handle, ctypes.c_void_p(stream.cuda_stream))

    def wait(self, stream: Stream) -> None:
        """Has a stream wait for this event."""
        DRIVER.cuStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), self._handle, 0)


#: Memory of the CPU that streams may still use. A test that has waited for all streams may clear it.
KEPT: list[torch.UntypedStorage] = []
#: The current stream of each thread.
CURRENT = threading.local()
DRIVER: Any = None


def current_stream(device: Any = None) -> Stream:
    """The current stream of this thread."""
    if not hasattr(CURRENT, "stream"):
        CURRENT.stream = Stream()
    return CURRENT.stream


def compiled(folder: Path) -> tuple[Path, Path]:
    """Compiles the driver and the emulator, unless the folder has them."""
    driver, emulator = folder / "libcuda.so.1", folder / "emulator.so"
    if emulator.exists():
        return driver, emulator
    source = CRATES / "uccl-device/tests/fake_driver/driver.c"
    flags = ["-shared", "-fPIC", "-O1"]
    subprocess.run(
        ["cc", *flags, "-pthread", "-Wl,-soname,libcuda.so.1", "-o", str(driver), str(source)],
        check=True,
    )
    here = CRATES / "uccl-ep/tests/emulator"
    subprocess.run(
        [
            "c++",
            "-x",
            "c++",
            "-std=c++17",
            *flags,
            "-ffp-contract=off",
            "-U_FORTIFY_SOURCE",
            "-I",
            str(here),
        ]
        + [str(here / "emulator.cpp"), str(here / "wide.cpp"), "-o", str(emulator)],
        check=True,
    )
    return driver, emulator


def load(folder: Path) -> None:
    """Has this process use the emulated GPU from now on."""
    global DRIVER
    paths = compiled(folder)
    # A library that loads CUDA's driver by name gets this one.
    DRIVER = ctypes.CDLL(str(paths[0]))
    emulator = ctypes.CDLL(str(paths[1]))
    DRIVER.cuInit(0)
    emulate = ctypes.cast(emulator.emulate, ctypes.c_void_p).value
    DRIVER.fake_emulate.argtypes = [Kernel]
    for symbol in ("emulated_kernels", "emulated_wide_kernels"):
        for one in (Listed * 64).in_dll(emulator, symbol):
            if not one.name:
                break
            DRIVER.fake_emulate(Kernel(one.name, one.len, one.kernel, emulate))
    patch()


def patch() -> None:
    """Has torch and the library take the CPU's tensors for those of GPU 0."""
    from uccl import _core
    from uccl.ep import _base, _device, _elastic
    from uccl.ep._cuda import group as cuda_group
    from uccl.ep._cuda import streams

    cpu, facts = torch.device("cpu"), SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    group = _core.EpCudaGroup

    def empty(self: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        # The CPU's memory would be free before the stream has used it, so it is kept. It holds
        # 0xEE, so that reads of memory without a result are noticed.
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memset(tensor.data_ptr(), 0xEE, tensor.nbytes)
        KEPT.append(tensor.untyped_storage())
        return tensor

    def new_handle(elastic: Any, *args: Any) -> Any:
        # torch reads a dispatch's results at once, and not in the order of the stream.
        for stream in (current_stream(), elastic.get_comm_stream()):
            stream.synchronize()
        return real_new_handle(elastic, *args)

    def choose_device(ranks: Any, device: Any, prefers_gpu: bool) -> _device.DeviceChoice:
        return _device.DeviceChoice(None if device == "cpu" else cpu)

    def there(self: OnDevice, tensor: torch.Tensor) -> torch.Tensor:
        moved = real_there(self, tensor)
        KEPT.append(moved.untyped_storage())
        return moved

    buffer = _elastic.ElasticBuffer
    real_new_handle, real_there = buffer._new_handle, OnDevice.there
    for place, name, value in [
        (torch.cuda, "init", lambda: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "stream", lambda stream: stream),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda device: facts),
        (_core, "EpCudaGroup", lambda **given: group(**{**given, "device": 0})),
        (_base, "choose_device", choose_device),
        (buffer, "_new_handle", new_handle),
        (streams, "number_of_stream", lambda device: current_stream().cuda_stream),
        (cuda_group.CudaGroup, "empty", empty),
        (OnDevice, "there", there),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
    ]:
        mock.patch.object(place, name, value).start()
