"""Collectives that copy over this project's backend for torch.distributed beside gloo, in turns, in the same processes.

    python -m bench.collective.run [--ranks 2,4] [--apart] [--mbit 2000] [--rounds 5] [--python PYTHON] [--json FILE]

Run it by, or with, a Python that has torch and the wheel. ``--apart`` gives each rank a network namespace of its own, which
a bridge joins with the others: data goes over TCP there. ``--mbit`` limits what each of these sends and receives, as its
NIC would: without it the processors are the limit. ``bytes`` are those of each pair of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SIZES = "64,4096,65536,1048576,16777216"
LIMIT_S = 1200
SUBNET = "10.77.41"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def limit(mbit: int, *device: str) -> None:
    """Has a device send so many Mbit/s at most."""
    rate = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    at, name = device[:-1], device[-1]
    subprocess.run(["tc", *at, "qdisc", "add", "dev", name, "root", "tbf", *rate], check=True)


@contextmanager
def apart(ranks: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces, one for each rank, that a bridge joins; ``mbit`` is the rate of each, 0 for any."""
    bridge, names = f"ucb{os.getpid()}", [f"uccl-bench-{os.getpid()}-{i}" for i in range(ranks)]
    with ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            near = f"uc{os.getpid()}{i}"
            ip("link", "add", near, "type", "veth", "peer", "name", "e0", "netns", name)
            ip("link", "set", near, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "e0")
            ip("-n", name, "link", "set", "e0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if mbit:
                limit(mbit, "-n", name, "e0")
                limit(mbit, near)
        yield names


def one(options: argparse.Namespace, ranks: int) -> list[dict]:
    """The rows of one number of ranks."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = stack.enter_context(apart(ranks, options.mbit)) if options.apart else []
        processes = []
        for rank in range(ranks):
            command = [options.python, str(Path(__file__).with_name("rank.py"))]
            command += ["--sizes", options.sizes, "--ops", options.ops]
            command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            command += ["--store", f"{folder}/store"]
            if names:
                command = ["ip", "netns", "exec", names[rank], *command]
            interface = "e0" if names else "lo"
            to = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            env |= {"GLOO_SOCKET_IFNAME": interface, "UCCL_SOCKET_IFNAME": interface}
            processes.append(subprocess.Popen(command, stdout=to, text=True, env=env))
        try:
            said, _ = processes[0].communicate(timeout=LIMIT_S)
            for process in processes[1:]:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise SystemExit(f"a rank of {ranks} has failed")
    lines = [line for line in said.splitlines() if line.startswith("row ")]
    return [json.loads(line.partition(" ")[2]) for line in lines]


def table(rows: list[dict]) -> str:
    """Medians, the rate of a pair, and the time of gloo in those of uccl, round by round."""
    lines = [
        f"{'':12} {'ranks':>5} {'bytes':>10} {'uccl us':>10} {'gloo us':>10} {'GB/s':>7} {'x':>6}"
    ]
    for row in rows:
        ours, theirs = row["seconds"]["uccl"], row["seconds"]["gloo"]
        ratio = statistics.median(b / a for a, b in zip(ours, theirs))
        mine, other = statistics.median(ours), statistics.median(theirs)
        rate = row["bytes"] / mine / 1e9
        lines.append(
            f"{row['op']:12} {row['ranks']:>5} {row['bytes']:>10} {mine * 1e6:10.1f} {other * 1e6:10.1f} "
            f"{rate:7.2f} {ratio:6.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas between them")
    parser.add_argument("--apart", action="store_true", help="a network namespace for each rank")
    parser.add_argument("--mbit", type=int, default=0, help="the rate of each namespace, in Mbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement")
    parser.add_argument("--sizes", default=SIZES, help="bytes, with commas between them")
    parser.add_argument("--ops", default="all_gather,all_to_all,broadcast")
    parser.add_argument("--python", default=sys.executable, help="the Python of the ranks")
    parser.add_argument("--json", type=Path, help="keep all rows")
    options = parser.parse_args()
    rows = [row for ranks in options.ranks.split(",") for row in one(options, int(ranks))]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
