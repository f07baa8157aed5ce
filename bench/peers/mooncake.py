"""Mooncake's transfer engine over TCP."""

from bench.lib.cases import Case, Sample

from . import Context, Peer
from .pairs import installed, run_worker, why_no_import


class Mooncake(Peer):
    """Two engines over TCP, the synchronous Python calls. Its wheel has no same-host path."""

    name = "mooncake"
    distribution = "mooncake-transfer-engine-non-cuda"

    def available(self, context: Context) -> str | None:
        return why_no_import("import numpy, mooncake.engine")

    def version(self, context: Context) -> str:
        return installed(self.distribution)

    def covers(self, case: Case) -> bool:
        return case.link == "tcp" and case.op in ("write", "read")

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        return run_worker("mooncake_pair.py", cases, context, {"MC_TCP_BIND_ADDRESS": "127.0.0.1"})
