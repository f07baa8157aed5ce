"""Makes the virtual environment of the peers and installs them, each on its own so that one failure costs one peer."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from bench.lib import wheels
from bench.lib.paths import PYTHON, VENV, WORK
from bench.lib.proc import why_not

#: (peer, packages, options). NIXL declares CUDA's stack, which its host-memory path does not need.
_WHEELS = [
    ("numpy", ["numpy"], []),
    ("ucx", ["libucx-cu13==1.22.0"], []),
    ("mooncake", ["mooncake-transfer-engine-non-cuda==0.3.13.post1"], []),
    ("nixl", ["nixl-cu13==1.5.1", "nixl==1.5.1"], ["--no-deps"]),
]
#: Debian's packages: iperf3 itself, and libibverbs, which Mooncake's engine is linked to even for TCP.
_DEBIAN = ["iperf3", "libibverbs1"]


def _try(what: str, command: list[str], limit_s: int) -> str | None:
    """Runs one step; returns why it failed, or None."""
    print(f"{what}: {' '.join(command)}", file=sys.stderr, flush=True)
    return why_not(command, limit_s)


def install(with_torch: bool) -> dict[str, str]:
    """Installs each peer; returns the reasons of failures, by name."""
    failures: dict[str, str] = {}
    WORK.mkdir(exist_ok=True)
    if not PYTHON.exists():
        reason = _try("venv", [sys.executable, "-m", "venv", str(VENV)], 120)
        if reason:
            return {"venv": reason}
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wheels = _WHEELS + ([("gloo", ["torch"], [])] if with_torch else [])
    for peer, packages, options in wheels:
        reason = _try(peer, [*pip, *options, *packages], 1800)
        if reason:
            failures[peer] = reason
    if os.geteuid() == 0 and shutil.which("apt-get"):
        reason = _try("debian", ["apt-get", "install", "-y", *_DEBIAN], 600)
        if reason:
            # A fresh machine has no package list yet.
            reason = _try("debian", ["apt-get", "update"], 300) or _try(
                "debian", ["apt-get", "install", "-y", *_DEBIAN], 600
            )
        if reason:
            failures["debian"] = reason
    else:
        failures["debian"] = f"not root, or no apt-get: install {', '.join(_DEBIAN)} by hand"
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--with-torch",
        action="store_true",
        help="also torch for gloo: the CUDA build, about 3 GB to fetch",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="instead fetch the peers of the GPU bench as wheels, into DIR",
    )
    parser.add_argument(
        "--python-version",
        default="3.12",
        metavar="X.Y",
        help="with --wheels: for that Python (3.12)",
    )
    parser.add_argument(
        "--peers",
        default=",".join(wheels.WHEELS),
        metavar="NAME,...",
        help="with --wheels: these (all)",
    )
    options = parser.parse_args()
    peers = options.peers.split(",")
    if unknown := set(peers) - set(wheels.WHEELS):
        parser.error(f"no such peers: {', '.join(sorted(unknown))}")
    if options.wheels:
        failures = wheels.fetch(options.wheels, options.python_version, peers)
    else:
        failures = install(options.with_torch)
    for name, reason in failures.items():
        print(
            f"{name}: not {'fetched' if options.wheels else 'installed'}: {reason}", file=sys.stderr
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
