"""This project's own command, `uccl bench`."""

import json
from pathlib import Path

from bench.lib.cases import Case, Sample
from bench.lib.congestion import Pin
from bench.lib.proc import BenchError, run

from . import Context, Peer

_OP = {"write": "write", "read": "read", "send": "notif"}
_MEMORY = {"any": "heap", "alloc": "alloc"}


def why_no_binary(binary: Path) -> str | None:
    """None when the command is there and knows `bench`, else the reason."""
    if not binary.exists():
        return f"{binary} does not exist (cargo build --release -p uccl-cli, or --uccl-bin)"
    try:
        if "--inflight" not in run([binary, "bench", "--help"], limit_s=10).out:
            return f"{binary} bench --help says nothing of --inflight: built from another tree?"
    except (BenchError, OSError) as error:
        return f"{binary} bench --help: {error}"
    return None


def version(binary: Path) -> str:
    """The command's name and version."""
    return run([binary, "--version"], limit_s=10).out.strip()


def rows(binary: Path, arguments: list[str], *, limit_s: float, env: dict[str, str]) -> list[dict]:
    """The rows of the command's JSON report."""
    out = run([binary, *arguments], limit_s=limit_s, env=env).out
    try:
        return json.loads(out)["rows"]
    except (ValueError, KeyError) as error:
        raise BenchError(f"its JSON could not be read: {error!r}") from error


def value(row: dict, unit: str) -> float:
    """A row's number in a case's unit."""
    number = row.get("gb_per_s") if unit == "GB/s" else (row.get("latency_us") or {}).get("p50")
    if number is None:
        raise BenchError(
            f"no {unit} for {row.get('op')} of {row.get('size_bytes')} bytes: {row.get('note') or 'no reason given'}"
        )
    return number


class Uccl(Peer):
    """Two processes made by `uccl bench`, which looks at every byte in a last, untimed round.

    Over TCP four transfers are in flight (UCX: its window of 32). Same host it is one: the copy is done on
    the caller's thread, and each transfer in flight would have buffers of its own, where UCX reuses one.
    A small message is a notification, half of its ping-pong.
    """

    name = "uccl"

    def available(self, context: Context) -> str | None:
        return why_no_binary(context.uccl_bin)

    def version(self, context: Context) -> str:
        return version(context.uccl_bin)

    def covers(self, case: Case) -> bool:
        return case.link in ("tcp", "local")

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        group = cases[0].group
        inflight = 4 if group.link == "tcp" and group.unit == "GB/s" else 1
        arguments = [
            *("bench", "--json", "-", "--transport", group.link, "--op", _OP[group.op]),
            *("--size", ",".join(str(case.size) for case in cases), "--iovs", str(group.iovs)),
            # One buffer, as the peers have: more are measured in other caches.
            *("--memory", _MEMORY[group.memory], "--inflight", str(inflight), "--buffers", "1"),
            *("--duration", f"{round(context.seconds * 1000)}ms"),
        ]
        with Pin(group.congestion) as pin:
            found = rows(context.uccl_bin, arguments, limit_s=context.limit_s(cases), env=pin.env)
            in_force = pin.in_force
        by_size = {row["size_bytes"]: row for row in found}
        samples = []
        for case in cases:
            row = by_size.get(case.size)
            if row is None:
                raise BenchError(f"uccl bench has no row for {case.size} bytes")
            if row.get("verified") == "no":
                raise BenchError(f"{case.size} bytes arrived, and not those that were sent")
            detail = {
                "in_flight": row.get("inflight"),
                "congestion": in_force,
                "path": row.get("path"),
                "verified": row.get("verified"),
                "note": row.get("note"),
                "command": "uccl " + " ".join(arguments),
            }
            samples.append(Sample(case, value(row, case.unit), detail))
        return samples
