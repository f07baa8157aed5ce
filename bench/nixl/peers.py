"""NIXL's backends: a pair of agents for each link, kept for the whole run."""

import os
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.peers import GpuContext
from bench.gpu.peers.pairs import Nixl
from bench.lib.bars import OURS
from bench.lib.cases import Case, Sample
from bench.lib.proc import BenchError, run
from bench.nixl.cases import BLOCKS, POSTS, UCX
from bench.peers import Peer

#: Environment that makes a backend take a link; empty where it takes the link by itself.
LINKS = {
    UCX: {
        # Without tcp beside them, posix and cma alone have no way to notice a dead peer, and NIXL refuses them.
        "local": {"UCX_TLS": "tcp,posix,cma"},
        "tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        "gpu": {},
    },
    OURS: {
        "local": {},
        "tcp": {"UCCL_P2P_TRANSPORT": "tcp", "UCCL_P2P_BIND": "127.0.0.1"},
        "gpu": {},
    },
}
#: The name of an earlier plugin of this project in the tables.
BEFORE = "before"
#: The key of this project's wheel among the unpacked folders.
WHEEL = "uccl-py"


@dataclass
class NixlContext(GpuContext):
    """The context of a measurement of NIXL's backends."""

    #: Whether agents have a thread that makes progress.
    progress_thread: bool = False
    #: A folder with this project's plugin, instead of the one that its wheel makes.
    plugin_dir: Path | None = None
    #: A folder with an earlier plugin of this project.
    before_plugin_dir: Path | None = None


class Agents(Nixl):
    """Two agents with one backend, over one link."""

    def __init__(self, backend: str, link: str):
        super().__init__()
        self.name, self.link = "nixl", link
        self.env = {**Nixl.env, **LINKS[backend][link]}
        self.settings = {"backend": backend.upper()}

    def question(self, case: Case) -> dict[str, object]:
        memory = "gpu" if case.memory == "gpu" else "host"
        if case.op in POSTS:
            return {
                "op": "write",
                "size": case.size,
                "iovs": case.iovs,
                "memory": memory,
                "cost": case.op,
                # On two processors, workers of ours would share the caller's with it.
                "naps": case.unit == "us",
            }
        if case.op in BLOCKS:
            at_once, is_fresh = BLOCKS[case.op]
            return {
                "op": "read",
                "size": case.size,
                "iovs": case.iovs,
                "memory": memory,
                "at_once": at_once,
                "fresh": is_fresh,
            }
        return {**super().question(case), "memory": memory}


class Backend(Peer):
    """One of NIXL's backends."""

    def __init__(self, name: str):
        self.name = name
        self.links = {link: Agents(name, link) for link in LINKS[name]}
        self._no_gpus: str | None = None

    def available(self, context: NixlContext) -> str | None:
        try:
            self._ask(context, "import nixl._api")
            self._prepare(context)
        except BenchError as failed:
            return str(failed)
        self._no_gpus = self.links["gpu"].available(context)
        return None

    def version(self, context: NixlContext) -> str:
        said = self._ask(context, "import importlib.metadata as m; print(m.version('nixl'))")
        gpus = f"; no GPU memory: {self._no_gpus}" if self._no_gpus else ""
        return f"NIXL {said}, {'progress thread' if context.progress_thread else 'no progress thread'}{gpus}"

    def covers(self, case: Case) -> bool:
        return case.link != "gpu" or not self._no_gpus

    def measure(self, cases: list[Case], context: NixlContext) -> list[Sample]:
        return [
            sample for case in cases for sample in self.links[case.link].measure([case], context)
        ]

    def close(self) -> None:
        """Ends its processes."""
        for agents in self.links.values():
            agents.close()

    def _prepare(self, context: NixlContext) -> None:
        for agents in self.links.values():
            agents.settings["progress_thread"] = context.progress_thread

    def _ask(self, context: NixlContext, code: str, **env: str) -> str:
        """The output of NIXL's Python."""
        # Python must not import bench/nixl/run.py from the current folder.
        env = {**self.links["local"]._environment(context), "PYTHONSAFEPATH": "1", **env}
        return run([context.python, "-c", code], limit_s=60, env=env).out.strip()


class Uccl(Backend):
    """This project's backend, from its wheel."""

    def _prepare(self, context: NixlContext) -> None:
        super()._prepare(context)
        wheel = (context.folders or {}).get(WHEEL)
        path = {}
        if wheel:
            nixl = self.links["local"]._environment(context).get("PYTHONPATH") or os.environ.get(
                "PYTHONPATH"
            )
            path["PYTHONPATH"] = os.pathsep.join(filter(None, [str(wheel), nixl]))
        folder = self.folder(context) or self._ask(
            context, "import uccl; print(uccl.nixl_plugin_dir())", **path
        )
        for agents in self.links.values():
            agents.env["NIXL_PLUGIN_DIR"] = str(folder)

    def folder(self, context: NixlContext) -> Path | None:
        """The folder with the plugin, if it is not to be the wheel's."""
        return context.plugin_dir


class Before(Uccl):
    """An earlier plugin of this project."""

    def __init__(self) -> None:
        super().__init__(OURS)
        self.name = BEFORE

    def available(self, context: NixlContext) -> str | None:
        if context.before_plugin_dir is None:
            return "--before-plugin-dir is not given"
        return super().available(context)

    def folder(self, context: NixlContext) -> Path | None:
        return context.before_plugin_dir


def every() -> list[Backend]:
    """All, this project's first."""
    return [Uccl(OURS), Before(), Backend(UCX)]
