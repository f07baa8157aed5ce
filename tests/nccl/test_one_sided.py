"""NCCL's one-sided calls over this project's plugin: two ranks as two hosts, on one GPU or two.

    cargo build --release -p uccl-nccl
    UCCL_TEST_NCCL_LIBRARY=/where/nccl/2.30.7/is/libnccl.so.2 python -m pytest tests/nccl/test_one_sided.py

The library is loaded in place of torch's own, which may be older.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")

import nccl_ranks
from nccl_ranks import Ranks

if not torch.cuda.is_available():
    pytest.skip("lacks a GPU", allow_module_level=True)
if nccl_ranks.plugin() is None:
    pytest.skip("lacks the plugin: cargo build --release -p uccl-nccl", allow_module_level=True)
LIBRARY = os.environ.get("UCCL_TEST_NCCL_LIBRARY", "")
if not LIBRARY and torch.cuda.nccl.version() < (2, 30, 7):
    pytest.skip("lacks NCCL 2.30.7: UCCL_TEST_NCCL_LIBRARY names it", allow_module_level=True)

pytestmark = [pytest.mark.xdist_group("nccl"), pytest.mark.timeout(1200)]

RANK = str(Path(__file__).with_name("one_sided_rank.py"))
SECONDS = os.environ.get("UCCL_TEST_NCCL_SECONDS", "20")


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_puts_and_signals_are_right(transport: str) -> None:
    variables = {
        "UCCL_NCCL_RMA": "1",
        "UCCL_P2P_TRANSPORT": transport,
        "NCCL_GIN_TYPE": "2",
        "NCCL_CUMEM_ENABLE": "1",
        "LD_PRELOAD": LIBRARY,
    }
    with Ranks([RANK, "--seconds", SECONDS], 2, **variables) as started:
        started.succeed(300 + 2 * float(SECONDS))
        said = started.said(0)
    assert "Assigned RMA plugin UCCL" in said, said[-3000:]
    assert "Symmetric memory is not supported" not in said
    assert "all right" in said
