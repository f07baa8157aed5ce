"""NIXL with its UCX backend."""

from bench.lib.cases import Case, Sample

from . import Context, Peer
from .pairs import installed, run_worker, why_no_import


class Nixl(Peer):
    """Two agents, DRAM, one transfer in flight, progress thread off (it costs NIXL about 3x on two cores)."""

    name = "nixl"
    distribution = "nixl-cu13"

    def available(self, context: Context) -> str | None:
        return why_no_import("import numpy, nixl_cu13._api")

    def version(self, context: Context) -> str:
        return installed(self.distribution)

    def covers(self, case: Case) -> bool:
        return case.op in ("write", "read") and case.memory == "any"

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        # Without tcp beside them, posix and cma alone have no way to notice a dead peer, and NIXL refuses them.
        transports = "tcp" if cases[0].link == "tcp" else "tcp,posix,cma"
        env = {"UCX_TLS": transports, "UCX_WARN_UNUSED_ENV_VARS": "n", "NIXL_LOG_LEVEL": "ERROR"}
        if transports == "tcp":
            env["UCX_NET_DEVICES"] = "lo"
        return run_worker("nixl_pair.py", cases, context, env)
