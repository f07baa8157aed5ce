"""torch.distributed with gloo."""

from bench.lib.cases import Case, Sample
from bench.lib.proc import free_port

from . import Context, Peer
from .pairs import installed, run_worker, why_no_import


class Gloo(Peer):
    """Send and receive between two ranks; there is no one-sided call, so it stands beside the writes only."""

    name = "gloo"
    distribution = "torch"

    def available(self, context: Context) -> str | None:
        reason = why_no_import("import torch.distributed as d; assert d.is_gloo_available()")
        if reason and "No module named 'torch'" in reason:
            return "torch is not installed (its only wheel here is the CUDA build, gigabytes: --install --with-torch)"
        return reason

    def version(self, context: Context) -> str:
        return installed(self.distribution)

    def covers(self, case: Case) -> bool:
        return case.link == "tcp" and case.op == "write" and case.iovs == 1

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        return run_worker("gloo_pair.py", cases, context, extra={"port": free_port()})
