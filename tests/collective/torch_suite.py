"""torch's own tests of its distributed calls, as the installed torch has them, on CPUs with the backend of ``BACKEND``.

BACKEND=uccl WORLD_SIZE=3 TEMP_DIR=/some/folder python tests/collective/torch_suite.py [-k NAME]
"""

from __future__ import annotations

import os
import unittest
from pathlib import Path

# Both are read when torch's file is imported.
os.environ.setdefault("BACKEND", "uccl")
os.environ.setdefault("WORLD_SIZE", "3")
Path(os.environ["TEMP_DIR"], "barrier").touch()

import torch
import uccl.distributed  # noqa: F401
from torch.testing._internal.common_distributed import DistTestCases

DistTestCases.skip_collective["sendrecv anysource"].add("uccl")
DistTestCases.backend_feature["plugin"].add("uccl")

# Some conditions name the only backend of torch's that has a call on CPUs.
os.environ["BACKEND"] = os.environ.get("UCCL_TEST_CONDITIONS_OF", os.environ["BACKEND"])
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

distributed_test.BACKEND = "uccl"


class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):
    """Ranks are forked: each test would import torch in each of them otherwise."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    unittest.main()
