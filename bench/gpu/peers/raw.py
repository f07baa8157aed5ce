"""The driver's own copies, measured by `raw_gpu.c`, which shares no code with the project."""

from bench.gpu.cases import PINNED_SIZES, RAW, RAW_WAIT, SIZES
from bench.lib import native
from bench.lib.cases import Case, Sample
from bench.lib.paths import BENCH, WORK
from bench.lib.proc import BenchError, run
from bench.peers import Peer

from . import GpuContext

_BINARY = WORK / "raw_gpu"
_SIZES = {"gpu": SIZES, "pinned": PINNED_SIZES}


class Raw(Peer):
    """Copies by the copy engine in one process, one after the other."""

    name = RAW
    op = {"write": "put", "read": "get"}

    def __init__(self, other: "Raw | None" = None) -> None:
        # One run answers for every size, both ways, waited for and not: it is kept for the rest of its round.
        self._kept: dict[tuple[int, str], dict[tuple[str, int], tuple[float, float]]] = (
            other._kept if other else {}
        )

    def available(self, context: GpuContext) -> str | None:
        reason = native.build(BENCH / "gpu/raw_gpu.c", _BINARY, ["-ldl"])
        if reason:
            return reason
        try:
            self._run("gpu", (64,), 0.001, context)
        except BenchError as failed:
            return str(failed)
        return None

    def version(self, context: GpuContext) -> str:
        return run(["gcc", "--version"], limit_s=10).out.splitlines()[0]

    def covers(self, case: Case) -> bool:
        return case.link == "gpu" and case.iovs == 1

    def measure(self, cases: list[Case], context: GpuContext) -> list[Sample]:
        samples = []
        for case in cases:
            key = (context.round, case.memory)
            if key not in self._kept:
                self._kept[key] = self._run(
                    case.memory, _SIZES[case.memory], context.seconds, context
                )
            us, gb_s = self._kept[key][(self.op[case.op], case.size)]
            detail = {"command": f"raw_gpu {case.memory}", "row": self.op[case.op]}
            samples.append(Sample(case, gb_s if case.unit == "GB/s" else us, detail))
        return samples

    def _run(
        self, memory: str, sizes: tuple[int, ...], seconds: float, context: GpuContext
    ) -> dict[tuple[str, int], tuple[float, float]]:
        arguments = [memory, *map(str, context.gpus), str(seconds), *map(str, sizes)]
        out = run([_BINARY, *arguments], limit_s=60 + len(sizes) * (8 * seconds + 2)).out
        lines = [line.split() for line in out.splitlines()]
        return {(op, int(size)): (float(us), float(gb_s)) for op, size, us, gb_s in lines}


class RawWait(Raw):
    """The same, each copy waited for."""

    name = RAW_WAIT
    op = {"write": "put-sync", "read": "get-sync"}
