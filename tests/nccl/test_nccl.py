"""Stock NCCL over this project's plugin: two ranks on one GPU, or each on its own, as two hosts.

    cargo build --release -p uccl-nccl
    python -m pytest tests/nccl                  # beside torch with CUDA; UCCL_NCCL_PLUGIN names another file
    UCCL_TEST_NCCL_SECONDS=600 UCCL_TEST_NCCL_TIMES=100 UCCL_TEST_NCCL_MIB=1024 python -m pytest tests/nccl

Two ranks on one GPU take turns of milliseconds: right for bytes, useless for times.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="lacks torch")

import nccl_ranks
from nccl_ranks import Ranks

if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
    pytest.skip("lacks a GPU, or torch with NCCL", allow_module_level=True)
if nccl_ranks.plugin() is None:
    pytest.skip("lacks the plugin: cargo build --release -p uccl-nccl", allow_module_level=True)

pytestmark = [pytest.mark.xdist_group("nccl"), pytest.mark.timeout(1200)]

RANK = str(Path(__file__).with_name("nccl_rank.py"))
MAX_BYTES = int(os.environ.get("UCCL_TEST_NCCL_MIB", "16")) << 20
SECONDS = os.environ.get("UCCL_TEST_NCCL_SECONDS", "20")
TIMES = os.environ.get("UCCL_TEST_NCCL_TIMES", "20")
LIMIT_S = 300 + 2 * float(SECONDS)
#: Seconds for which a peer may be silent.
TIMEOUT_S = 5


def run(
    case: str,
    *arguments: str,
    variables: dict[str, str] | None = None,
    ranks: int = 2,
    per_host: int = 1,
) -> str:
    """Runs a case to its end; the output of the first rank."""
    program = [RANK, case, *arguments]
    with Ranks(program, ranks, per_host=per_host, **variables or {}) as started:
        started.succeed(LIMIT_S)
        said = started.said(0)
    assert "via NET/UCCL" in said, said[-3000:]
    assert "via NET/Socket" not in said
    return said


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NCCL_PROTO": "LL"},
        {"NCCL_PROTO": "Simple"},
        {"NCCL_OOB_NET_ENABLE": "1"},
        {"UCCL_NCCL_SPEED_MBPS": "400000"},
        # Trees are for all_reduce alone.
        {"NCCL_ALGO": "allreduce:tree"},
    ],
    ids=["defaults", "LL", "Simple", "bootstrap", "four channels", "trees"],
)
def test_every_collective_is_right(variables: dict[str, str]) -> None:
    run("sweep", "--max-bytes", str(MAX_BYTES), variables=variables)


def test_sizes_at_random() -> None:
    run("random", "--seconds", SECONDS, "--max-bytes", str(MAX_BYTES))


@pytest.mark.parametrize("case", ["together", "graphs", "split"])
def test_other_uses(case: str) -> None:
    run(case)


def test_communicators_are_made_again() -> None:
    # NCCL 2.28 forgets the name of a plugin that it unloads with the last communicator.
    run("remade", "--times", TIMES, variables={"NCCL_NET_PLUGIN_REF_COUNT": "1"})


def test_four_ranks_as_two_hosts() -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("lacks four GPUs")
    run("sweep", "--max-bytes", str(MAX_BYTES), ranks=4, per_host=2)


def test_a_dead_peer_is_an_error_that_names_it() -> None:
    with Ranks([RANK, "dies"], 2, UCCL_NCCL_TIMEOUT_SECS=str(TIMEOUT_S)) as ranks:
        assert ranks.wait(LIMIT_S, [1]) == [0]
        # The network's error comes first; torch ends the process by it, or by its own.
        end, errors = time.monotonic() + TIMEOUT_S + 60, []
        while time.monotonic() < end:
            errors = re.findall("NET/UCCL: (?:send|receive): .*", ranks.said(0))
            if errors:
                break
            time.sleep(0.1)
        assert errors and "127.0.0.1" in errors[0], ranks.said(0)[-3000:]
        [status] = ranks.wait(120, [0])
        assert status not in (None, 0), ranks.said(0)[-3000:]
