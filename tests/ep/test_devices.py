"""The device of buffers: the CPU or the current GPU, as the caller, the environment, the group or
the first tensor decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from thread_ranks import Ranks

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]

GPU = torch.device("cuda", 0)


class Alone:
    """A communicator of one rank."""

    Get_rank, Get_size = (lambda self: 0), (lambda self: 1)

    def allgather(self, mine: Any) -> list[Any]:
        """Returns the one rank's value."""
        return [mine]


class Backend:
    """A group of one rank; its backend for GPUs is called ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name

    rank, size = (lambda self: 0), (lambda self: 1)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._name)


@pytest.fixture
def gpus(monkeypatch):
    """Has torch report a GPU that this process has not used yet. Returns the devices of the groups
    that are made."""
    from uccl import _core
    from uccl.ep import _ranks
    from uccl.ep._cuda import backend

    made: list[torch.device] = []

    class Group:
        """A stand-in for a group on a GPU."""

        def __init__(self, ranks: Any, params: Any, timeout: float, device: torch.device) -> None:
            made.append(device)
            self.native = SimpleNamespace(nodes=_core.EpNodes(1, ranks.size))

    monkeypatch.delenv("UCCL_EP_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend, "CudaGroup", Group)
    monkeypatch.setattr(torch.distributed, "ProcessGroup", Backend)
    # torch gathers objects only in its own groups.
    gather = _ranks.Ranks.exchange
    monkeypatch.setattr(
        _ranks.Ranks,
        "exchange",
        lambda self, mine: [mine] if isinstance(self.group, Backend) else gather(self, mine),
    )
    return made


def both(name: str) -> list[Any]:
    """The buffer classes of a module."""
    module = pytest.importorskip(name)
    return [module.Buffer, module.ElasticBuffer]


@pytest.fixture(autouse=True)
def shim(monkeypatch):
    """Adds the distribution that only has DeepEP's name to the path, for a machine without it."""
    import sys
    from pathlib import Path

    monkeypatch.setattr(
        sys, "path", [*sys.path, str(Path(__file__).parents[2] / "python" / "deep_ep")]
    )


def test_a_buffer_of_deepeps_name_is_on_the_current_gpu(gpus, monkeypatch):
    for make in both("deep_ep"):
        assert make(None, 1 << 20, comm=Alone()).device == GPU
        assert make(Backend("gloo"), 1 << 20).device == GPU
        assert make(None, 1 << 20, comm=Alone(), device="cpu").device.type == "cpu"
        monkeypatch.setenv("UCCL_EP_DEVICE", "cpu")
        assert make(None, 1 << 20, comm=Alone()).device.type == "cpu"
        monkeypatch.delenv("UCCL_EP_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for make in both("deep_ep"):
        assert make(None, 1 << 20, comm=Alone()).device.type == "cpu"


def test_a_group_of_nccl_or_a_process_that_uses_cuda_is_on_the_current_gpu(gpus, monkeypatch):
    for make in both("uccl.ep"):
        assert make(Backend("nccl"), 1 << 20).device == GPU
        assert make(Backend("gloo"), 1 << 20).device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for make in both("uccl.ep"):
        assert make(None, 1 << 20, comm=Alone()).device == GPU
        # This buffer meets the other ranks later, by a store; buffers on GPUs cannot.
        assert (
            make(
                None, 1 << 20, store=torch.distributed.HashStore(), rank=0, num_ranks=2
            ).device.type
            == "cpu"
        )


def test_a_group_that_torchs_world_does_not_know_is_none_of_nccl():
    from uccl.ep._device import has_nccl

    # vLLM makes such groups.
    stateless = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    with pytest.raises(ValueError, match="not initialized in the world"):
        torch.distributed.get_backend(stateless)
    assert not has_nccl(stateless) and not has_nccl(None) and not has_nccl(Alone())


def test_the_first_tensor_says_where_a_buffer_is(gpus):
    from uccl.ep import Buffer, ElasticBuffer

    on_gpu = SimpleNamespace(device=GPU)
    for buffer in (
        Buffer(None, 1 << 20, comm=Alone(), timeout=3),
        ElasticBuffer(None, 1 << 20, comm=Alone()),
    ):
        assert buffer.device.type == "cpu" and not gpus
        buffer._begin(on_gpu)
        assert buffer.device == GPU and gpus == [GPU]
        buffer._begin(on_gpu)
        assert gpus.pop() == GPU and not gpus
    # The caller has named the device, or a call was made.
    said = Buffer(None, 1 << 20, comm=Alone(), device="cpu")
    used = Buffer(None, 1 << 20, comm=Alone())
    used.get_dispatch_layout(torch.zeros((2, 1), dtype=torch.int64), 4)
    for buffer in (said, used):
        buffer._begin(on_gpu)
        assert buffer.device.type == "cpu" and not gpus


def test_a_tensor_that_is_elsewhere_is_answered_with_the_setting(gpus):
    from uccl.ep import Buffer
    from uccl.ep._checks import on_device

    buffer = Buffer(None, 1 << 20, comm=Alone(), device="cpu")
    elsewhere = torch.zeros((2, 64), device="meta")
    with pytest.raises(
        ValueError,
        match="x is on meta, .* on cpu: make it with device='meta', or set UCCL_EP_DEVICE=meta",
    ):
        buffer.low_latency_dispatch(elsewhere.bfloat16(), None, 2, 4)
    with pytest.raises(
        ValueError, match="on cuda:1, .* on cuda:0: a buffer is on the GPU that was the current one"
    ):
        on_device("x", SimpleNamespace(device=torch.device("cuda:1")), GPU)


def spread(places: list[str]) -> list[str]:
    """The places, or the errors, of ranks in threads that ask for these devices; "" asks for
    none."""
    from concurrent.futures import ThreadPoolExecutor

    from thread_ranks import Rank
    from uccl.ep import _device
    from uccl.ep._ranks import Ranks as Meeting

    ranks = Ranks(len(places))

    def answer(number: int) -> str:
        try:
            return str(
                _device.choose_device(
                    Meeting(None, Rank(ranks, number)), places[number] or None, False
                )
            )
        except (RuntimeError, ValueError) as why:
            return str(why)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(answer, range(len(places))))


def test_all_ranks_are_on_gpus_or_none_is(gpus):
    on_cpu, on_gpu, either = (
        "DeviceChoice(gpu=None, may_move=False)",
        f"DeviceChoice(gpu={GPU!r}, may_move=False)",
        "DeviceChoice(gpu=None, may_move=True)",
    )
    assert spread(["", ""]) == [either] * 2
    assert spread(["cuda", ""]) == [on_gpu] * 2
    assert spread(["", "cpu", ""]) == [on_cpu] * 3
    for said in spread(["cuda", "cpu", ""]):
        assert (
            "buffers of ranks [0] are on GPUs, and those of ranks [1] on the CPU" in said
            and "UCCL_EP_DEVICE" in said
        )
    own, other = spread(["meta", ""])
    assert (
        "not meta" in own
        and other.startswith("rank 0 made no buffer: a buffer's device is")
        and "not meta" in other
    )
