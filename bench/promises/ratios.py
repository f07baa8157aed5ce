"""Rates of sends and notifications beside writes of the same bytes, in one interleaved run.

python -m bench.promises.ratios [--links tcp,local] [--memory heap,alloc]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SENDS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
NOTIFS = (MIB, 64 * MIB)
#: The bars: a send's share of a write's rate, and a notification's share of a send's.
SEND, NOTIF = 0.9, 0.7


def rate(binary: Path, link: str, memory: str, op: str, size: int, seconds: float) -> float:
    words = [
        *(str(binary), "bench", "--json", "-", "--transport", link, "--memory", memory, "--op", op),
        *(
            "--size",
            str(size),
            "--inflight",
            "1",
            "--buffers",
            "1",
            "--duration",
            f"{round(seconds * 1000)}ms",
        ),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return float(
        next(row["gb_per_s"] for row in json.loads(done.stdout)["rows"] if row["op"] == op)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="tcp,local", help="links, with commas between them")
    parser.add_argument("--memory", default="heap,alloc", help="where memory comes from")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts")
    parser.add_argument("--seconds", type=float, default=0.4, help="time for each value")
    parser.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="the command"
    )
    args = parser.parse_args()
    missed = 0
    for link in args.links.split(","):
        for memory in args.memory.split(","):
            for size in SENDS:
                ops = ("write", "send", "notif") if size in NOTIFS else ("write", "send")
                rates: dict[str, list[float]] = {op: [] for op in ops}
                for _ in range(args.rounds):
                    for op in ops:
                        rates[op].append(rate(args.uccl_bin, link, memory, op, size, args.seconds))
                pairs = [("send", "write", SEND)] + (
                    [("notif", "send", NOTIF)] if "notif" in ops else []
                )
                for op, of, bar in pairs:
                    each = [a / b for a, b in zip(rates[op], rates[of])]
                    said = {"link": link, "memory": memory, "mib": size // MIB, "op": op, "of": of}
                    said |= {
                        "gb_per_s": round(median(rates[op]), 2),
                        "ratio": round(median(each), 3),
                    }
                    said |= {"bar": bar, "met": median(each) >= bar}
                    missed += not said["met"]
                    print(json.dumps(said), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
