"""NCCL over this project's plugin beside NCCL's own sockets, in one run, in turns.

    cargo build --release -p uccl-nccl
    python -m bench.nccl.run [--ranks 2] [--rounds 5] [--networks uccl,socket,socket4x4,sizes] [--json FILE]

Each rank has a GPU and is a host of its own (``NCCL_HOSTID``); data goes over loopback. ``sizes`` moves sizes and no bytes:
NCCL's own ceiling, with the protocol Simple. Two ranks on one GPU take turns of milliseconds, which no network changes.
A variable of NCCL's for all networks goes in front: ``NCCL_MIN_NCHANNELS=8 python -m bench.nccl.run``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "nccl"))

import nccl_ranks

SIZES = "8,1024,8192,65536,262144,1048576,16777216,268435456"
LIMIT_S = 600

Key = tuple[str, int]


def one(network: str, options: argparse.Namespace) -> list[dict]:
    """The rows of one run of a network."""
    rank = str(Path(__file__).with_name("rank.py"))
    program = [rank, "--sizes", options.sizes, "--ops", options.ops]
    with nccl_ranks.Ranks(
        program, options.ranks, network=network, per_host=options.per_host
    ) as ranks:
        ranks.succeed(LIMIT_S)
        said = ranks.said(0)
    used = {"uccl": "via NET/UCCL", "sizes": "via NET/Sockets"}.get(network, "via NET/Socket/")
    if used not in said:
        raise SystemExit(f"{network}: NCCL's log has no {used!r}:\n{said[-3000:]}")
    rows = [line.partition("row ")[2] for line in said.splitlines() if line.startswith("row ")]
    return [json.loads(row) for row in rows]


def table(found: dict[str, dict[Key, list[dict]]], networks: list[str]) -> str:
    """Medians, and the ratio of the first network's time to each other one's."""
    lines = []
    head = f"{'':15} {'bytes':>11}"
    for network in networks:
        head += f" {network + ' us':>14} {'bus GB/s':>9} {'cores':>6}"
    head += "".join(f" {'/ ' + network:>12}" for network in networks[1:])
    lines.append(head)
    for key in found[networks[0]]:
        line = f"{key[0]:15} {key[1]:>11}"
        times = {}
        for network in networks:
            rows = found[network].get(key, [])
            if not rows:
                line += f" {'-':>14} {'-':>9} {'-':>6}"
                continue
            cores = statistics.median(row["cores"] for row in rows)
            if key[0] == "idle":
                line += f" {'':>14} {'':>9} {cores:6.2f}"
                continue
            times[network] = statistics.median(row["us"] for row in rows)
            rate = statistics.median(row["bus_gb_per_s"] for row in rows)
            line += f" {times[network]:14.1f} {rate:9.2f} {cores:6.1f}"
        for network in networks[1:]:
            if network in times and networks[0] in times:
                line += f" {times[networks[0]] / times[network]:12.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", default="uccl,socket,socket4x4")
    parser.add_argument("--sizes", default=SIZES, help="bytes, with commas between them")
    parser.add_argument("--ops", default="all_reduce,all_to_all")
    parser.add_argument("--json", type=Path, help="keep all rows")
    options = parser.parse_args()
    networks = options.networks.split(",")
    if "uccl" in networks and nccl_ranks.plugin() is None:
        print("lacks the plugin: cargo build --release -p uccl-nccl", file=sys.stderr)
        return 1
    found: dict[str, dict[Key, list[dict]]] = {name: defaultdict(list) for name in networks}
    for number in range(options.rounds):
        # In another order each time.
        turn = number % len(networks)
        for network in networks[turn:] + networks[:turn]:
            for row in one(network, options):
                found[network][row["op"], row["bytes"]].append(row)
            print(f"round {number + 1} of {options.rounds}: {network}", file=sys.stderr)
    print(table(found, networks))
    if options.json:
        kept = {
            name: [row for rows in keys.values() for row in rows] for name, keys in found.items()
        }
        options.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
