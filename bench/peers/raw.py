"""The machine's own ceilings, measured by `raw.c`: the referee, which shares no code with the project."""

from bench.lib import native
from bench.lib.cases import Case, Sample
from bench.lib.congestion import Pin
from bench.lib.paths import BENCH, WORK
from bench.lib.proc import BenchError, run

from . import Context, Peer

_BINARY = WORK / "raw"


class Raw(Peer):
    """Plain system calls and memory copies between two processes."""

    name = "raw"

    def available(self, context: Context) -> str | None:
        return native.build(BENCH / "host/raw.c", _BINARY, ["-pthread"])

    def version(self, context: Context) -> str:
        return run(["gcc", "--version"], limit_s=10).out.splitlines()[0]

    def covers(self, case: Case) -> bool:
        return case.link == "raw"

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        arguments = [cases[0].op, str(context.seconds), *(str(case.size) for case in cases)]
        with Pin(cases[0].congestion) as pin:
            out = run([_BINARY, *arguments], limit_s=context.limit_s(cases), env=pin.env).out
            in_force = pin.in_force
        values = {
            int(size): float(value) for size, value in (line.split() for line in out.splitlines())
        }
        if any(case.size not in values for case in cases):
            raise BenchError("raw did not answer for every size")
        detail = {"in_flight": "1", "congestion": in_force, "command": "raw " + " ".join(arguments)}
        return [Sample(case, values[case.size], detail) for case in cases]
