"""``nixl_ep`` of ranks that have a process group, by its store or by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]

PYTHON = str(Path(__file__).parents[2] / "python" / "nixl_ep")
TOKENS, HIDDEN, LOCAL = 8, 512, 2


def buffer_of(all_of_them: Any, **ways: Any) -> Any:
    """A rank's buffer, which is connected to all others."""
    sys.path.append(PYTHON)
    import nixl_ep

    ranks = all_of_them.size()
    size = nixl_ep.Buffer.get_rdma_size_hint(TOKENS, HIDDEN, ranks, ranks * LOCAL)
    buffer = nixl_ep.Buffer(rank=all_of_them.rank(), **ways)
    buffer.update_memory_buffers(ranks, LOCAL, size)
    buffer.connect_ranks(list(range(ranks)))
    return buffer


def sums_are_right(group: Any, buffer: Any) -> None:
    """A dispatch and a combine of rows unchanged."""
    torch.manual_seed(group.rank())
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    ids = torch.rand(TOKENS, group.size() * LOCAL).topk(2).indices
    rows, _, handle, _, _ = buffer.dispatch(x, ids, TOKENS, use_fp8=False)
    out, _, _ = buffer.combine(rows, ids, torch.ones(TOKENS, 2), handle)
    assert torch.equal(out, x * 2)


def by_its_store(group: Any) -> None:
    """vLLM without elasticity: all2all.py:434-440 of 0.33.0."""
    store = torch.distributed.PrefixStore("nixl_ep", group.get_group_store())
    sums_are_right(group, buffer_of(group, tcp_store_group=store))


def by_itself(group: Any) -> None:
    """Without a store all ranks of the group meet by it, and no others."""
    buffer = buffer_of(group, group=group)
    sums_are_right(group, buffer)
    buffer.disconnect_ranks([1 - group.rank()])
    with pytest.raises(ValueError, match="activate=False.* needs a store"):
        buffer.connect_ranks([0, 1], activate=False)
    buffer.connect_ranks([0, 1])
    sums_are_right(group, buffer)
    import nixl_ep

    other = nixl_ep.Buffer(rank=group.rank(), group=group)
    other.update_memory_buffers(3, LOCAL, 1 << 20)
    with pytest.raises(ValueError, match=r"meets ranks \[0, 1, 2\], and is rank . of a group of 2"):
        other.connect_ranks([0, 1, 2])


@pytest.mark.parametrize("case", [by_its_store, by_itself], ids=lambda case: case.__name__)
def test_ranks_meet(world, case):
    world.run(2, case)


def test_ucxs_variable_keeps_gpus_apart(monkeypatch):
    """NIXL EP sets it for ``disable_ll_nvlink``."""
    monkeypatch.syspath_prepend(PYTHON)
    from nixl_ep._engine import refuses_nvlink

    assert refuses_nvlink("^cuda_ipc") and refuses_nvlink("^tcp,cuda_ipc")
    assert not any(map(refuses_nvlink, (None, "", "cuda_ipc,rc", "^tcp", "all")))
