"""The ceilings as this project's own command measures them: `uccl bench --limits`."""

from bench.lib.cases import DEFAULT, Case, Sample
from bench.lib.congestion import Pin
from bench.lib.machine import NOISY, Noise
from bench.lib.proc import BenchError

from . import Context, Peer
from .uccl import rows, value, version, why_no_binary

#: By raw case: the command's name of it, and the divisor of its number (it times round trips).
_NAMES = {
    "tcp_stream": ("tcp-stream", 1),
    "tcp_ping": ("tcp-rtt", 1),
    "vm_read": ("vm-read", 1),
    "vm_write": ("vm-write", 1),
    "memcpy": ("memcpy", 1),
    "shm_ping": ("shm-rtt", 2),
    "queue_hop": ("thread-hop", 1),
}
#: Cases that are only comparable at their size.
_SIZED = {"vm_read", "vm_write", "memcpy"}
_SIZES = "64K,256K,1M,4M,64M"


class Limits(Peer):
    """A second opinion on the ceilings; where it is higher than `raw`, the bars are held against it."""

    name = "limits"

    def __init__(self) -> None:
        # One run answers for every limit of a kind: a calm one is kept for the rest of its round.
        self._kept: dict[tuple[int, bool], tuple[list[dict], str]] = {}

    def available(self, context: Context) -> str | None:
        return why_no_binary(context.uccl_bin)

    def version(self, context: Context) -> str:
        return version(context.uccl_bin)

    def covers(self, case: Case) -> bool:
        # The command itself takes the better of the default and cubic.
        return case.link == "raw" and case.congestion in ("", DEFAULT)

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        sized = cases[0].op in _SIZED
        found, in_force = self._rows(sized, context)
        name, divisor = _NAMES[cases[0].op]
        samples = []
        for case in cases:
            row = next(
                (
                    r
                    for r in found
                    if r["op"] == name and (not sized or r["size_bytes"] == case.size)
                ),
                None,
            )
            if row is None:
                raise BenchError(f"no limit called {name} of {case.size} bytes")
            congestion = (row.get("note") or in_force) if case.congestion else ""
            samples.append(
                Sample(
                    case,
                    value(row, case.unit) / divisor,
                    {"congestion": congestion, "note": row.get("note")},
                )
            )
        return samples

    def _rows(self, sized: bool, context: Context) -> tuple[list[dict], str]:
        key = (context.round, sized)
        if key not in self._kept:
            sizes = _SIZES if sized else "4K"
            arguments = ["bench", "--limits", "--size", sizes, "--json", "-"]
            arguments += ["--duration", f"{round(context.seconds * 1000)}ms"]
            meter = Noise()
            with Pin(DEFAULT) as pin:
                found = rows(
                    context.uccl_bin, arguments, limit_s=60 + 60 * context.seconds, env=pin.env
                )
                in_force = pin.in_force
            if meter.share() > NOISY:
                return found, in_force
            self._kept[key] = (found, in_force)
        return self._kept[key]
