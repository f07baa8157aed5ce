"""A GPU on a CPU, for this process: the driver that Rust's tests have, and torch's streams on top of it.

Tensors are the CPU's, and their memory is what the emulated GPU reaches. Kernels run on threads of the driver's, in the order of their
streams; what torch does with tensors is done at once, so it has to wait for the stream first.
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
#: Blocks of all launches together.
BLOCKS = 4


class Kernel(ctypes.Structure):
    """A kernel, as the driver takes it."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("kernel", ctypes.c_void_p),
        ("emulate", ctypes.c_void_p),
    ]


class Listed(ctypes.Structure):
    """A kernel, as the emulator lists it."""

    _fields_ = Kernel._fields_[:3]


class Stream:
    """A stream of the driver's, with what the library and the tests need of torch's."""

    def __init__(self, driver: Any) -> None:
        self._driver, handle = driver, ctypes.c_void_p()
        driver.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0)
        self.cuda_stream: int = handle.value

    def synchronize(self) -> None:
        """Waits for what it was given."""
        self._driver.cuStreamSynchronize(ctypes.c_void_p(self.cuda_stream))

    def wait_stream(self, other: Stream) -> None:
        """Has what comes next wait for what another was given."""
        event = Event()
        event.record(other)
        event.wait(self)

    def __enter__(self) -> None:
        self._before, CURRENT.stream = current_stream(), self

    def __exit__(self, *_: object) -> None:
        CURRENT.stream = self._before


class Event:
    """An event of the driver's."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        DRIVER.cuEventCreate(ctypes.byref(self._handle), 2)

    def record(self, stream: Stream) -> None:
        """Marks what a stream was given."""
        DRIVER.cuEventRecord(self._handle, ctypes.c_void_p(stream.cuda_stream))

    def wait(self, stream: Stream) -> None:
        """Has a stream wait for it."""
        DRIVER.cuStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), self._handle, 0)


#: Each thread's stream.
CURRENT = threading.local()
DRIVER: Any = None


def current_stream(device: Any = None) -> Stream:
    """This thread's stream."""
    if not hasattr(CURRENT, "stream"):
        CURRENT.stream = Stream(DRIVER)
    return CURRENT.stream


def compiled(folder: Path) -> tuple[Path, Path]:
    """The driver and the emulator."""
    driver, emulator = folder / "libcuda.so.1", folder / "emulator.so"
    source = CRATES / "uccl-device/tests/fake_driver/driver.c"
    flags = ["-shared", "-fPIC", "-O1"]
    subprocess.run(
        ["cc", *flags, "-pthread", "-Wl,-soname,libcuda.so.1", "-o", driver, source], check=True
    )
    here = CRATES / "uccl-ep/tests/emulator"
    subprocess.run(
        ["c++", "-x", "c++", "-std=c++17", *flags, "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-I", here]
        + [here / "emulator.cpp", "-o", emulator],
        check=True,
    )
    return driver, emulator


def load(folder: Path) -> None:
    """Has this process use it from now on."""
    global DRIVER
    paths = compiled(folder)
    # Whoever asks for CUDA's driver by its name gets this one.
    DRIVER = ctypes.CDLL(str(paths[0]))
    emulator = ctypes.CDLL(str(paths[1]))
    DRIVER.cuInit(0)
    emulate = ctypes.cast(emulator.emulate, ctypes.c_void_p).value
    DRIVER.fake_emulate.argtypes = [Kernel]
    listed = (Listed * 64).in_dll(emulator, "emulated_kernels")
    for one in listed:
        if not one.name:
            break
        DRIVER.fake_emulate(Kernel(one.name, one.len, one.kernel, emulate))
    patch()


def patch() -> None:
    """Has torch and the library take the CPU's tensors for those of GPU 0."""
    from uccl import _core
    from uccl.ep import _buffer, _device, _elastic, _gpu_group

    cpu, facts = torch.device("cpu"), SimpleNamespace(uuid="emulated", multi_processor_count=BLOCKS)
    group = _core.EpCudaGroup
    kept: list[torch.UntypedStorage] = []

    def empty(self: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        # The CPU's memory is free at once, and not when the stream has come to it. Nobody has written to it.
        tensor = torch.empty(shape, dtype=dtype)
        ctypes.memset(tensor.data_ptr(), 0xEE, tensor.nbytes)
        kept.append(tensor.untyped_storage())
        return tensor

    def first(*of: Any) -> Any:
        # Torch reads what a dispatch tells at once, and not when the stream has come to it.
        made = real_first(*of)
        current_stream().synchronize()
        return made

    def there(self: OnDevice, tensor: torch.Tensor) -> torch.Tensor:
        moved = real_there(self, tensor)
        kept.append(moved.untyped_storage())
        return moved

    real_first, real_there = _elastic.first, OnDevice.there
    for place, name, value in [
        (torch.cuda, "init", lambda: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "stream", lambda stream: stream),
        (torch.cuda, "Stream", lambda: Stream(DRIVER)),
        (torch.cuda, "Event", Event),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda device: facts),
        (_core, "EpCudaGroup", lambda **given: group(**{**given, "device": 0})),
        (_buffer, "place_of", lambda ranks, device, prefers_gpu: _device.Place(cpu)),
        (_elastic, "place_of", lambda ranks, device, prefers_gpu: _device.Place(cpu)),
        (_elastic, "first", first),
        (_gpu_group, "number_of_stream", lambda device: current_stream().cuda_stream),
        (_gpu_group.GpuGroup, "empty", empty),
        (OnDevice, "there", there),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
    ]:
        mock.patch.object(place, name, value).start()
