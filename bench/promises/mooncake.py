"""``mooncake.engine`` of this project beside Mooncake's own, over TCP on loopback: the same program.

``workers/mooncake_pair.py`` runs with either module in turns, round by round. A folder for the second
one: ``pip download --no-deps mooncake-transfer-engine-non-cuda``, and unzip it.

    python3 -m bench.promises.mooncake FOLDER [--rounds 5] [--seconds 0.5]

Column "host" is this project's module as it is installed, within a host; "tcp" with MC_FORCE_TCP=1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
OURS = HERE.parent / "python" / "mooncake"
KIB, MIB = 1 << 10, 1 << 20
CASES = [
    {"op": op, "size": size, "iovs": iovs}
    for size, iovs in [(64, 1), (64 * KIB, 1), (MIB, 1), (64 * MIB, 1), (4 * KIB, 1024)]
    for op in ("write", "read")
]


def run(module: Path, settings: dict[str, str], seconds: float) -> list[dict]:
    """One round of all cases with this module."""
    path = os.pathsep.join([str(module), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "MC_TCP_BIND_ADDRESS": "127.0.0.1", **settings}
    orders = json.dumps({"cases": CASES, "seconds": seconds})
    ran = subprocess.run(
        [sys.executable, str(HERE / "workers" / "mooncake_pair.py")],
        input=orders + "\n",
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [line for line in ran.stdout.splitlines() if line.startswith("@")]
    if ran.returncode != 0 or not answers:
        raise SystemExit(f"{module}: {ran.stderr[-2000:]}")
    return json.loads(answers[-1][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with Mooncake's package in it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    peers = {
        "theirs": (args.folder, {}),
        "tcp": (OURS, {"MC_FORCE_TCP": "1"}),
        "host": (OURS, {}),
    }
    rounds: dict[str, list[list[dict]]] = {name: [] for name in peers}
    for _ in range(args.rounds):
        for name, (module, settings) in peers.items():
            rounds[name].append(run(module, settings, args.seconds))
    print("| case | theirs us | tcp us | host us | theirs GB/s | tcp | host | tcp / theirs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for at, case in enumerate(CASES):
        us, rate = (
            {name: statistics.median(one[at][key] for one in of) for name, of in rounds.items()}
            for key in ("us", "gb_s")
        )
        # Of one round each: what disturbs the machine disturbs both.
        ratio = statistics.median(
            ours[at]["gb_s"] / theirs[at]["gb_s"]
            for ours, theirs in zip(rounds["tcp"], rounds["theirs"])
        )
        columns = [f"{us[name]:.0f}" for name in peers]
        columns += [f"{rate[name]:.3f}" for name in peers]
        name = f"{case['op']} {case['iovs']} x {case['size']} B"
        print(f"| {name} | {' | '.join(columns)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
