"""torch's own tests of the calls that the backend has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="lacks torch")

from packages import unpacked

SUITE = Path(__file__).with_name("torch_suite.py")
#: Tests that no backend but gloo or NCCL runs, by torch's own conditions, are left out.
NAMES = {
    "messages": "isend irecv send_recv send_recv_with_tag",
    "gathers": "all_gather all_gather_complex all_gather_group all_gather_full_group gather gather_checks gather_group",
    "scatters": "scatter scatter_checks scatter_complex scatter_group scatter_full_group broadcast broadcast_group",
    "exchanges": """all_to_all all_to_all_complex all_to_all_group all_to_all_full_group all_to_all_single_equal_split
        all_to_all_single_unequal_split all_to_all_single_unequal_split_complex all_to_all_single_equal_split_group
        all_to_all_single_unequal_split_group all_to_all_single_unequal_split_full_group""",
    "barriers and groups": """barrier barrier_group barrier_full_group get_backend get_rank destroy_group
        destroy_full_group get_rank_size_group""",
    "objects": "all_gather_object_default_pg gather_object broadcast_object_list scatter_object_list",
    "reductions": """all_reduce_sum all_reduce_sum_async all_reduce_sum_complex all_reduce_product all_reduce_min
        all_reduce_max all_reduce_group_sum reduce_sum reduce_product reduce_max reduce_group_sum""",
}


def run(names: list[str], folder: Path, conditions: str) -> tuple[int, str]:
    """The exit status and the text of some tests."""
    # torch's file imports a package that does not come with torch.
    path = [str(unpacked("expecttest==0.3.0")), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "BACKEND": "uccl",
        "WORLD_SIZE": "3",
        "TEMP_DIR": str(folder),
        "UCCL_TEST_CONDITIONS_OF": conditions,
        "MASTER_ADDR": "127.0.0.1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(SUITE), "-v", *(f"TorchSuite.test_{name}" for name in names)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.timeout(220)
@pytest.mark.parametrize("subject", NAMES)
def test_torchs_own_tests(subject: str, tmp_path: Path) -> None:
    names = NAMES[subject].split()
    # MPI's is the only backend of torch's with all_to_all on CPUs.
    conditions = "mpi" if subject == "exchanges" else "uccl"
    status, text = run(names, tmp_path, conditions)
    assert status == 0, text[-6000:]
    skipped = re.findall(r"test_(\w+) .*skipped '(.*)'", text)
    assert not skipped, f"a test that says nothing: {skipped}"
    assert f"Ran {len(names)} tests" in text, text[-2000:]
