"""This project's own command, `uccl bench`."""

import json
from pathlib import Path

from cases import Case, Sample
from congestion import Pin
from proc import Failed, run

from . import Context, Peer


def why_no_binary(binary: Path) -> str | None:
    """None when the command is there and says its version, else the reason."""
    if not binary.exists():
        return f"{binary} does not exist (cargo build --release -p uccl-cli, or --uccl-bin)"
    try:
        if not run([binary, "--version"], limit_s=10).out.strip():
            return f"{binary} --version says nothing: not built from this tree?"
    except (Failed, OSError) as error:
        return f"{binary} --version: {error}"
    return None


def first_json(text: str) -> object:
    """The JSON document in a command's output."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Failed(f"its JSON could not be read: {error}") from error


class Uccl(Peer):
    """Two processes made by `uccl bench`, the writer or reader being timed."""

    name = "uccl"

    def available(self, context: Context) -> str | None:
        return why_no_binary(context.uccl_bin)

    def version(self, context: Context) -> str:
        return run([context.uccl_bin, "--version"], limit_s=10).out.strip()

    def covers(self, case: Case) -> bool:
        return case.link in ("tcp", "local")

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        group = cases[0].group
        arguments = [
            *("bench", "--json", "-", "--path", "tcp" if group.link == "tcp" else "local"),
            *("--op", group.op, "--sizes", ",".join(str(case.size) for case in cases)),
            *("--iovs", str(group.iovs), "--memory", group.memory, "--seconds", str(context.seconds)),
        ]
        with Pin(group.congestion) as pin:
            ended = run([context.uccl_bin, *arguments], limit_s=context.limit_s(cases), env=pin.env)
            in_force = pin.in_force
        rows = {row["size"]: row for row in first_json(ended.out)["results"]}
        samples = []
        for case in cases:
            if case.size not in rows:
                raise Failed(f"uccl bench reported no {case.size} bytes")
            row = rows[case.size]
            detail = {
                "in_flight": row.get("in_flight", 1),
                "congestion": in_force,
                "path": row.get("path"),
                "command": "uccl " + " ".join(arguments),
            }
            samples.append(Sample(case, row["gb_s" if case.unit == "GB/s" else "us"], detail))
        return samples
