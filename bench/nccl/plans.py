"""NCCL's plans and their times over this project's plugin, by the speed that its device has, beside NCCL's own sockets.

    cargo build --release -p uccl-nccl
    python3 -m bench.nccl.plans [--minutes 3.7] [--sizes 65536,262144,1048576,16777216] [--cases socket,uccl,...] [--json FILE]

Two GPUs of one host, each a host of its own, over loopback, in turns, each case with processes of its own. Beside each time is
NCCL's choice for that collective: its protocol and channels. ``uccl`` is the plugin as it is; the other cases change one variable.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "nccl"))

import nccl_ranks

#: The network and the variables of each case.
CASES = {
    "socket": ("socket", {}),
    "uccl": ("uccl", {}),
    "untuned": ("uccl", {"UCCL_NCCL_TUNER": "0"}),
    "local": ("uccl", {"UCCL_NCCL_LOCAL": "1"}),
    "24000": ("uccl", {"UCCL_NCCL_SPEED_MBPS": "24000"}),
    "96000": ("uccl", {"UCCL_NCCL_SPEED_MBPS": "96000"}),
    "40000": ("uccl", {"UCCL_NCCL_SPEED_MBPS": "40000"}),
    "8threads": ("uccl", {"UCCL_NCCL_THREADS": "8", "UCCL_NCCL_SPEED_MBPS": "40000"}),
    # As it was: eight channels, and LL up to 330 KB.
    "80000": ("uccl", {"UCCL_NCCL_SPEED_MBPS": "80000", "UCCL_NCCL_TUNER": "0"}),
    "socket4x4": ("socket4x4", {}),
}
SIZES = "8,65536,131072,262144,1048576,16777216"
LIMIT_S = 120
#: A line of NCCL's log about one collective.
CHOICE = re.compile(
    r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}"
)
CHANNELS = re.compile(r"(\d+) coll channels")

Key = tuple[str, int]


def one(case: str, options: argparse.Namespace) -> tuple[list[dict], dict[int, str], str]:
    """The rows of one run, NCCL's choices for its all-reduces, and the channels of its communicator."""
    network, variables = CASES[case]
    rank = str(Path(__file__).with_name("rank.py"))
    program = [rank, "--sizes", options.sizes, "--ops", "all_reduce,all_to_all", "--no-idle"]
    variables = {
        "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING",
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
        **variables,
    }
    with nccl_ranks.Ranks(program, 2, network=network, **variables) as ranks:
        ranks.succeed(LIMIT_S)
        said = ranks.said(0)
    used = "via NET/UCCL" if network == "uccl" else "via NET/Socket/"
    if used not in said:
        raise SystemExit(f"{case}: NCCL's log has no {used!r}:\n{said[-3000:]}")
    rows = [json.loads(row) for row in re.findall(r"^row (.*)$", said, re.MULTILINE)]
    choices = {}
    for collective, length, algorithm, protocol, low, high in CHOICE.findall(said):
        if collective == "AllReduce":
            count = int(high) - int(low) + 1
            choices[int(length)] = (
                f"{'' if algorithm == 'RING' else algorithm + ' '}{protocol} x{count}"
            )
    channels = CHANNELS.search(said)
    return rows, choices, channels.group(1) if channels else "?"


def table(
    found: dict[str, dict[Key, list[dict]]],
    choices: dict[str, dict[int, str]],
    channels: dict[str, str],
) -> str:
    """Medians in microseconds, the ratio to the sockets' time, and NCCL's choices."""
    cases = [case for case in found if found[case]]
    lines = [
        f"{'':11} {'bytes':>9}"
        + "".join(f"{case + ' (' + channels[case] + ')':>24}" for case in cases)
    ]
    keys = list(dict.fromkeys(key for case in cases for key in found[case]))
    for key in keys:
        line = f"{key[0]:11} {key[1]:>9}"
        base = [row["us"] for row in found.get("socket", {}).get(key, [])]
        for case in cases:
            times = [row["us"] for row in found[case].get(key, [])]
            if not times:
                line += f"{'-':>24}"
                continue
            us = statistics.median(times)
            ratio = f"{us / statistics.median(base):5.2f}" if base else "     "
            choice = choices[case].get(key[1], "") if key[0] == "all_reduce" else ""
            line += f"{us:8.1f} {ratio} {choice:>9}"
        lines.append(line)
    lines.append("")
    for case in cases:
        cores = [row["cores"] for rows in found[case].values() for row in rows]
        lines.append(f"{case:>10}: at most {max(cores):.1f} cores of a rank; {CASES[case][1]}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=3.7, help="no run begins that would end later"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=SIZES, help="bytes, with commas between them")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path, help="keep all rows")
    options = parser.parse_args()
    if nccl_ranks.plugin() is None:
        print("lacks the plugin: cargo build --release -p uccl-nccl", file=sys.stderr)
        return 1
    begun, longest = time.monotonic(), 0.0
    found: dict[str, dict[Key, list[dict]]] = {}
    choices: dict[str, dict[int, str]] = {}
    channels: dict[str, str] = {}
    for case in options.cases.split(",") * options.rounds:
        start = time.monotonic()
        if start + longest - begun > options.minutes * 60:
            print("out of time: fewer rounds", file=sys.stderr)
            break
        rows, choices[case], channels[case] = one(case, options)
        for row in rows:
            found.setdefault(case, defaultdict(list))[row["op"], row["bytes"]].append(row)
        longest = max(longest, time.monotonic() - start)
        print(f"{case}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(table(found, choices, channels))
    if options.json:
        kept = {
            case: [row for rows in keys.values() for row in rows] for case, keys in found.items()
        }
        options.json.write_text(json.dumps({"rows": kept, "choices": choices}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
