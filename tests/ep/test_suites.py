"""Tests the program that runs DeepEP's own suites, with a stand-in for a suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(200)]

PROGRAM = Path(__file__).parents[1] / "deepep" / "run.py"

#: A suite with ranks that meet and dispatch to each other, as DeepEP's do.
SUITE = """
import argparse
import torch
import torch.distributed as dist

import deep_ep
from deep_ep.utils.math import twice
from deep_ep.utils.testing import bench_kineto


def rank_of(number, ranks):
    dist.init_process_group("nccl", rank=number, world_size=ranks, device_id=torch.device("cuda", number))
    torch.set_default_device("cuda")
    torch.cuda.set_device(number)
    group = dist.new_group(list(range(ranks)))
    assert (dist.get_rank(), dist.get_world_size(), group.size()) == (number, ranks, ranks)
    everyone = torch.empty(ranks, 2, device="cuda")
    dist.all_gather_into_tensor(everyone, torch.full((1, 2), float(number), device="cuda"), group=group)
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    assert everyone[:, 0].tolist() == list(range(ranks)) and total.item() == ranks
    arrived = torch.empty(ranks, dtype=torch.int32)
    dist.all_to_all_single(arrived, torch.full((ranks,), number, dtype=torch.int32))
    assert arrived.tolist() == list(range(ranks))
    assert bench_kineto(None, ("one", "other"), num_kernels_per_period=2) == ([1.0, 1.0], [1.0, 1.0])
    buffer = deep_ep.Buffer(group, 0, deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 128, ranks, 2 * ranks))
    x = torch.full((4, 128), twice(number), dtype=torch.bfloat16, device="cuda")
    chosen = torch.arange(2 * ranks, device="cuda")[-2:].repeat(4, 1)
    rows, count, handle, _, _ = buffer.low_latency_dispatch(x, chosen, 4, 2 * ranks, use_fp8=False)
    assert count.tolist() == [4 * ranks * (number == ranks - 1)] * 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-processes", type=int)
    options, _ = parser.parse_known_args()
    torch.multiprocessing.spawn(rank_of, args=(options.num_processes,), nprocs=options.num_processes)
"""


def test_a_suite_runs_on_threads_with_deepeps_helpers_beside_our_modules(tmp_path):
    utils, suites = tmp_path / "deep_ep" / "utils", tmp_path / "tests"
    for folder in (utils, suites / "legacy", suites / "elastic"):
        folder.mkdir(parents=True)
    (utils / "math.py").write_text("def twice(x):\n    return 2 * x\n")
    # Our `event.py` stays, and DeepEP's `testing.py` is replaced.
    (utils / "event.py").write_text("raise ImportError\n")
    (utils / "testing.py").write_text(
        "def flush_l2_cache(): ...\ndef bench(): ...\ndef bench_kineto(): ...\n"
    )
    (suites / "legacy" / "test_intranode.py").write_text(SUITE)
    (suites / "elastic" / "test_barrier.py").write_text(
        "raise AssertionError('as it was told to')\n"
    )
    command = [
        sys.executable,
        str(PROGRAM),
        str(tmp_path),
        "--on",
        "cpu",
        "--ranks",
        "2",
        "--only",
        "intranode,shrink,barrier",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert "2 ranks, intranode: passed" in done.stdout, done.stdout + done.stderr
    assert "2 ranks, low latency shrink: not run: needs 6 ranks" in done.stdout
    assert (
        "2 ranks, barrier: failed: 1" in done.stdout
        and "AssertionError: as it was told to" in done.stdout
    )
    assert done.returncode == 1
