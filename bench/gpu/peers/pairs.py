"""Peers that are called from Python: a pair of processes each, kept for the whole run."""

from bench.gpu.cases import NIXL_TCP, PYTHON, SIZES, TCP_SIZE, VECTORS
from bench.lib import wheels
from bench.lib.cases import Case, Sample
from bench.lib.paths import BENCH
from bench.lib.proc import BenchError, Conversation, run
from bench.peers import Peer

from . import GpuContext

#: The longest transfer with the gaps between its pieces, and the longest to or from the host, in
#: bytes.
_ROOM = max(*SIZES, *(count * (size + 64) for count, size in VECTORS))
_HOST_ROOM = max(*SIZES, TCP_SIZE)
#: By unit: the value's name in a worker's answer.
VALUES = {"GB/s": "gb_s", "us": "us", "ns": "ns"}
#: How long a pair may take to start: it imports torch and makes two contexts.
_START_S = 90


class Pair(Peer):
    """A worker that starts its own other side, and the questions to it."""

    script = ""
    #: A statement that must succeed in the worker's Python.
    needs = ""
    env: dict[str, str] = {}
    #: Additional fields of the worker's greeting.
    settings: dict[str, object] = {}
    #: After this many failures of its processes it is not started again.
    LIVES = 3

    def __init__(self) -> None:
        self._talk: Conversation | None = None
        self._lost: list[str] = []

    def available(self, context: GpuContext) -> str | None:
        check = f"import torch; assert torch.cuda.device_count() > {max(context.gpus)}, 'too few GPUs'; {self.needs}"
        try:
            run([context.python, "-c", check], limit_s=120, env=self._environment(context))
        except BenchError as failed:
            return str(failed)
        return None

    def version(self, context: GpuContext) -> str:
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        out = run([context.python, "-c", code], limit_s=30, env=self._environment(context)).out
        return f"{self.distribution} {out.strip()}"

    def covers(self, case: Case) -> bool:
        return case.link == "gpu"

    def measure(self, cases: list[Case], context: GpuContext) -> list[Sample]:
        return [self._one(case, context) for case in cases]

    def close(self) -> None:
        """Ends its processes."""
        if self._talk:
            self._talk.end()
        self._talk = None

    def _one(self, case: Case, context: GpuContext) -> Sample:
        if len(self._lost) >= self.LIVES:
            raise BenchError(f"given up after {self.LIVES} attempts, the last: {self._lost[-1]}")
        question = {**self.question(case), "seconds": context.seconds}
        try:
            if self._talk is None:
                self._start(context)
            answer = self._talk.ask(question, context.limit_s([case]))
        except BenchError as failed:
            self._talk = None
            self._lost.append(str(failed))
            raise
        if "error" in answer:
            raise BenchError(answer["error"])
        detail = {
            "in_flight": "1",
            **{name: answer[name] for name in ("transfers", *VALUES.values()) if name in answer},
            "verified": answer["verified"],
            "command": " ".join(
                [*(f"{k}={v}" for k, v in self.env.items()), f"bench/workers/{self.script}"]
            ),
        }
        return Sample(case, answer[VALUES[case.unit]], detail)

    def question(self, case: Case) -> dict[str, object]:
        """A case as the worker understands it."""
        return {name: getattr(case, name) for name in ("op", "size", "iovs", "memory")}

    def _start(self, context: GpuContext) -> None:
        talk = Conversation(
            [context.python, BENCH / "workers" / self.script], env=self._environment(context)
        )
        hello = {"gpus": context.gpus, "room": _ROOM, "host_room": _HOST_ROOM, **self.settings}
        answer = talk.ask(hello, _START_S)
        if "error" in answer:
            talk.end()
            raise BenchError(answer["error"])
        self._talk = talk

    def _environment(self, context: GpuContext) -> dict[str, str]:
        folder = (context.folders or {}).get(self.name)
        return {**self.env, **(wheels.environment(folder) if folder else {})}


class Python(Pair):
    """This project from Python: blocking calls."""

    name = PYTHON
    distribution = "uccl-rs"
    script = "gpu_uccl.py"
    needs = "import importlib.metadata as m; m.version('uccl-rs'); from uccl import p2p"


class Upstream(Pair):
    """UCCL's own wheel: its calls for one host (`write_ipc` and the like), blocking."""

    name = "uccl-0.1.1"
    distribution = "uccl"
    script = "gpu_upstream.py"
    needs = "import importlib.metadata as m; m.version('uccl'); from uccl import p2p; p2p.Endpoint.write_ipc"
    # Its default looks for RDMA devices and aborts without one.
    env = {"UCCL_P2P_TRANSPORT": "tcp"}

    def covers(self, case: Case) -> bool:
        return case.link == "gpu" and case.memory == "gpu"


class Nixl(Pair):
    """Two NIXL agents, UCX as it comes, progress thread off, both sides spin."""

    name = "nixl"
    distribution = "nixl"
    script = "gpu_nixl.py"
    needs = "import nixl._api"
    env = {"UCX_WARN_UNUSED_ENV_VARS": "n", "NIXL_LOG_LEVEL": "ERROR"}


class NixlTcp(Nixl):
    """NIXL, where UCX has TCP alone between the processes."""

    name = NIXL_TCP
    env = {**Nixl.env, "UCX_TLS": "tcp,cuda_copy", "UCX_NET_DEVICES": "lo"}

    def covers(self, case: Case) -> bool:
        return case.link == "tcp"


class Nccl(Pair):
    """torch.distributed: a send that a receive on the other GPU meets; vectors as one group."""

    name = "nccl"
    script = "gpu_nccl.py"
    needs = "import torch.distributed as d; assert d.is_nccl_available()"
    #: NCCL refuses larger groups, or takes them apart.
    longest_group = 512

    def version(self, context: GpuContext) -> str:
        code = "import torch; print(torch.__version__, *torch.cuda.nccl.version())"
        torch, *nccl = run([context.python, "-c", code], limit_s=60).out.split()
        return f"torch {torch}, NCCL {'.'.join(nccl)}"

    def covers(self, case: Case) -> bool:
        return (
            case.link == "gpu"
            and (case.op, case.memory) == ("write", "gpu")
            and case.iovs <= self.longest_group
        )


class Mooncake(Pair):
    """Two Mooncake engines, its NVLink path within a host, synchronous calls."""

    name = "mooncake"
    distribution = "mooncake-transfer-engine-cuda13"
    script = "gpu_mooncake.py"
    needs = "import mooncake.engine"
    env = {"MC_INTRANODE_NVLINK": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}

    def covers(self, case: Case) -> bool:
        return case.link == "gpu" and case.memory == "gpu"
