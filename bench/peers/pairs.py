"""The common part of the peers with a Python worker: starts it and reads its answer."""

import json
from dataclasses import asdict

from bench.lib.cases import Case, Sample
from bench.lib.congestion import Pin
from bench.lib.paths import BENCH, PYTHON, VENV
from bench.lib.proc import BenchError, run

from . import Context


def why_no_import(statement: str) -> str | None:
    """None when the virtual environment's Python can run `statement`, else the reason."""
    if not PYTHON.exists():
        return f"no virtual environment at {VENV.name} (run with --install)"
    try:
        run([PYTHON, "-c", statement], limit_s=60)
    except BenchError as failed:
        return str(failed)
    return None


def installed(distribution: str) -> str:
    """The version that is installed in the virtual environment."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return run([PYTHON, "-c", code], limit_s=30).out.strip()


def run_worker(
    script: str,
    cases: list[Case],
    context: Context,
    env: dict[str, str] | None = None,
    extra: dict | None = None,
) -> list[Sample]:
    """Runs a worker on cases of one group; one transfer is in flight at a time."""
    orders = {
        "cases": [asdict(case) for case in cases],
        "seconds": context.seconds,
        **(extra or {}),
    }
    with Pin(cases[0].congestion) as pin:
        ended = run(
            [PYTHON, BENCH / "workers" / script],
            limit_s=context.limit_s(cases),
            env={**(env or {}), **pin.env},
            stdin=json.dumps(orders) + "\n",
        )
        in_force = pin.in_force
    answers = [line for line in ended.out.splitlines() if line.startswith("@")]
    if not answers:
        raise BenchError("the worker gave no answer")
    results = json.loads(answers[-1][1:])
    return [
        Sample(
            case,
            result["gb_s"] if case.unit == "GB/s" else result["us"],
            {
                "in_flight": "1",
                "congestion": in_force,
                "transfers": result["transfers"],
                "command": " ".join(
                    [
                        *(f"{k}={v}" for k, v in (env or {}).items()),
                        "python",
                        f"bench/workers/{script}",
                    ]
                ),
            },
        )
        for case, result in zip(cases, results, strict=True)
    ]
