"""Runs NIXL's own tests and examples in Python, unchanged, with this project's plugin under UCX's name.

    python tests/upstream_nixl.py CHECKOUT                  # a clone of ai-dynamo/nixl, at the version of the installed wheel
    python tests/upstream_nixl.py CHECKOUT --beside-ucx     # each of them with UCX itself too
    python tests/upstream_nixl.py CHECKOUT --only two_peers

They name ``UCX``, and none is told of anything else. The environment needs NIXL's wheel, this project's, torch and
pytest; NIXL's wheel must be that of torch's CUDA. Nothing is built and nothing in the checkout changes.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uccl

SECONDS = 300
#: Time for a target to listen: it imports torch first.
PATIENCE = 60
#: The number of characters that are printed of a failure.
LENGTH = 4000


@dataclass(frozen=True)
class Outcome:
    """The result of one test or program: ``passed``, ``skipped`` or ``failed``, and the reason."""

    name: str
    result: str
    why: str = ""


def environment(folder: str | None) -> dict[str, str]:
    """That of the caller, with the folder of plugins; without one NIXL is as it is installed."""
    env = {name: value for name, value in os.environ.items() if name != "NIXL_PLUGIN_DIR"}
    return env if folder is None else {**env, "NIXL_PLUGIN_DIR": folder}


def tests(checkout: Path, env: dict[str, str]) -> Iterator[Outcome]:
    """``test/python`` by pytest, with the suite's default backend, which is UCX."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "."]
        ended = run(command, checkout / "test/python", env, "test/python")
        if not report.exists():
            yield ended
            return
        for case in ElementTree.parse(report).iter("testcase"):
            module = (case.get("classname") or "").rpartition(".")[2]
            name = f"{module}::{case.get('name')}"
            bad = next((part for tag in ("failure", "error") for part in case.findall(tag)), None)
            skipped = case.find("skipped")
            if bad is not None:
                yield Outcome(name, "failed", bad.text or bad.get("message") or "")
            elif skipped is not None:
                yield Outcome(name, "skipped", skipped.get("message") or "")
            else:
                yield Outcome(name, "passed")


def programs(checkout: Path, env: dict[str, str]) -> Iterator[Outcome]:
    """The programs that NIXL's own CI runs beside the tests."""
    for form in ("list", "array"):
        yield run(["prep_xfer_perf.py", form], checkout / "test/python", env)
    examples = checkout / "examples/python"
    ports = ["--init-port", str(free_port()), "--target-port", str(free_port())]
    # It deletes the variable where it does without etcd, and expects it to be there.
    without_etcd = {**env, "NIXL_ETCD_ENDPOINTS": "none"}
    yield run(["partial_md_example.py", *ports], examples, without_etcd, "partial_md_example.py")
    for script in ("basic_two_peers.py", "expanded_two_peers.py"):
        yield two_peers(script, examples, env)


def run(command: list[str], folder: Path, env: dict[str, str], name: str = "") -> Outcome:
    name = name or " ".join(command)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=env,
            timeout=SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, "failed", f"did not end within {SECONDS} s")
    output = done.stdout.decode(errors="replace")
    if done.returncode == 0:
        return Outcome(name, "passed")
    return Outcome(name, "failed", f"{output}\nexit status {done.returncode}")


def two_peers(script: str, folder: Path, env: dict[str, str]) -> Outcome:
    """A target, and an initiator once the target listens: both must end well."""
    port = free_port()
    options = ["--ip=127.0.0.1", f"--port={port}"]
    with tempfile.TemporaryFile() as output:
        target = subprocess.Popen(
            [sys.executable, script, "--mode=target", *options],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while not listens(port) and target.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            initiator = run([script, "--mode=initiator", *options], folder, env, script)
            try:
                code: int | str = target.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                code = f"not over {PATIENCE} s after its initiator"
        finally:
            target.kill()
            target.wait()
        output.seek(0)
        if initiator.result == "passed" and code != 0:
            said = output.read().decode(errors="replace")
            return Outcome(script, "failed", f"target: {code}\n{said}")
        return initiator


def free_port() -> int:
    """A TCP port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    """Whether there is a listener; a connection would be a peer to it."""
    listening, end = "0A", f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        fields = (line.split() for line in lines)
        if any(field[1].endswith(end) and field[3] == listening for field in fields):
            return True
    return False


def main() -> int:
    """Runs all of it; the exit status is 0 unless something fails that does not fail with UCX itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=lambda path: Path(path).resolve())
    parser.add_argument(
        "--only", default="", help="the programs with this in their names, and no tests"
    )
    parser.add_argument("--beside-ucx", action="store_true", help="with UCX itself too")
    options = parser.parse_args()

    def outcomes(folder: str | None) -> dict[str, Outcome]:
        env = environment(folder)
        steps = [programs] if options.only else [tests, programs]
        every = (outcome for step in steps for outcome in step(options.checkout, env))
        return {outcome.name: outcome for outcome in every if options.only in outcome.name}

    theirs = outcomes(None) if options.beside_ucx else {}
    failed = 0
    for name, ours in outcomes(uccl.nixl_plugin_dir(instead_of_ucx=True)).items():
        beside = theirs.get(name)
        told = "" if beside is None else f" (UCX itself: {beside.result})"
        print(f"{ours.result:8} {name}{told}", flush=True)
        if ours.why:
            print(ours.why[-LENGTH:])
        if beside is not None and beside.result == "failed":
            print(f"with UCX itself: {beside.why[-LENGTH:]}")
        failed += ours.result == "failed" and (beside is None or beside.result != "failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
