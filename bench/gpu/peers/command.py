"""This project's own command: `uccl bench --device gpu`, and its `--limits`."""

import json

from bench.gpu.cases import LIMITS, LIMITS_WAIT, PINNED_SIZES, SIZES, TCP_SIZE
from bench.lib.bars import OURS
from bench.lib.cases import Case, Sample
from bench.lib.proc import BenchError, run
from bench.peers import Peer
from bench.peers.uccl import value, version, why_no_binary

from . import GpuContext

#: By link and memory of the other side: the sizes of one run of the command.
_SIZES = {
    ("gpu", "gpu"): SIZES,
    ("gpu", "pinned"): PINNED_SIZES,
    ("tcp", "gpu"): (TCP_SIZE,),
    ("tcp", "host"): (TCP_SIZE,),
}


class _Runs(Peer):
    """Keeps the rows of a run of the command for the rest of its round."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], list[dict] | BenchError] = {}

    def available(self, context: GpuContext) -> str | None:
        reason = why_no_binary(context.uccl_bin)
        if reason:
            return reason
        try:
            # The shortest run reports missing requirements.
            self._run(
                ["--device", "gpu", "--op", "write", "--size", "64", "--duration", "1ms"],
                context,
                60,
            )
        except BenchError as failed:
            return str(failed)
        return None

    def version(self, context: GpuContext) -> str:
        return version(context.uccl_bin)

    def rows(self, arguments: list[str], sizes: tuple[int, ...], context: GpuContext) -> list[dict]:
        """The rows of a run on these sizes, from this round or measured now."""
        key = (context.round, *arguments, *sizes)
        if key not in self._kept:
            words = [
                *(
                    "--size",
                    ",".join(map(str, sizes)),
                    "--duration",
                    f"{round(context.seconds * 1000)}ms",
                ),
                *("--gpu", str(context.gpus[0]), "--peer-gpu", str(context.gpus[1]), *arguments),
            ]
            limit_s = 60 + len(sizes) * (8 * context.seconds + 5)
            try:
                self._kept[key] = self._run(words, context, limit_s)
            except BenchError as failed:
                self._kept[key] = failed
        kept = self._kept[key]
        if isinstance(kept, BenchError):
            raise kept
        return kept

    def _run(self, arguments: list[str], context: GpuContext, limit_s: float) -> list[dict]:
        out = run([context.uccl_bin, "bench", "--json", "-", *arguments], limit_s=limit_s).out
        try:
            return json.loads(out)["rows"]
        except (ValueError, KeyError) as error:
            raise BenchError(f"its JSON could not be read: {error!r}") from error


def _of_size(rows: list[dict], case: Case, op: str) -> dict:
    for row in rows:
        if (row["size_bytes"], row["op"]) == (case.size, op):
            return row
    raise BenchError(f"no row for {op} of {case.size} bytes")


class Command(_Runs):
    """Two processes made by `uccl bench`, one transfer in flight, every byte looked at in a last, untimed round."""

    name = OURS

    def covers(self, case: Case) -> bool:
        return case.link in ("gpu", "tcp")

    def measure(self, cases: list[Case], context: GpuContext) -> list[Sample]:
        return [self._one(case, context) for case in cases]

    def _one(self, case: Case, context: GpuContext) -> Sample:
        transport = "tcp" if case.link == "tcp" else "local"
        device = "cpu" if case.memory == "host" else "gpu"
        other = {"host": "cpu"}.get(case.memory, case.memory)
        arguments = [
            *("--op", case.op, "--iovs", str(case.iovs), "--transport", transport),
            *("--device", device, "--peer-device", other, "--inflight", "1"),
        ]
        sizes = (case.size,) if case.iovs > 1 else _SIZES[(case.link, case.memory)]
        row = _of_size(self.rows(arguments, sizes, context), case, case.op)
        if row["verified"] != "yes":
            raise BenchError(f"{case.size} bytes arrived, and not those that were sent")
        detail = {
            "in_flight": row["inflight"],
            "transfers": row["count"],
            "us": (row["latency_us"] or {}).get("p50"),
            "gb_s": row["gb_per_s"],
            "path": row["path"],
            "verified": row["verified"],
            "command": "uccl bench " + " ".join(arguments),
        }
        return Sample(case, value(row, case.unit), detail)


class Limits(_Runs):
    """The driver's own copies, by this project's command: one after the other."""

    name = LIMITS
    op = {"write": "put", "read": "get"}

    def __init__(self, other: "Limits | None" = None) -> None:
        super().__init__()
        if other:
            # One run answers for both.
            self._kept = other._kept

    def covers(self, case: Case) -> bool:
        return case.link == "gpu" and case.iovs == 1

    def measure(self, cases: list[Case], context: GpuContext) -> list[Sample]:
        return [self._one(case, context) for case in cases]

    def _one(self, case: Case, context: GpuContext) -> Sample:
        arguments = ["--limits", "--device", "gpu", "--peer-device", case.memory]
        row = _of_size(
            self.rows(arguments, _SIZES[("gpu", case.memory)], context), case, self.op[case.op]
        )
        us = (row.get("latency_us") or {}).get("p50") or case.bytes / row["gb_per_s"] / 1e3
        detail = {"command": "uccl bench " + " ".join(arguments), "row": row["op"]}
        return Sample(case, us if case.unit == "us" else row["gb_per_s"], detail)


class LimitsWait(Limits):
    """The same, each copy waited for."""

    name = LIMITS_WAIT
    op = {"write": "put-sync", "read": "get-sync"}
