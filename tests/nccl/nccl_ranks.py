"""Ranks of NCCL on one host that take each other for other hosts, over a network of choice."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Variables of each network. `sizes` moves sizes and no bytes: NCCL's own ceiling.
NETWORKS = {
    "uccl": {"NCCL_NET": "UCCL"},
    "socket": {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"},
    "socket4x4": {
        "NCCL_NET_PLUGIN": "none",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
    "sizes": {"NCCL_NET": "Sockets", "NCCL_PROTO": "Simple"},
}


def plugin() -> str | None:
    """The plugin: of UCCL_NCCL_PLUGIN, of this tree's optimized build, or of the installed wheel."""
    given = os.environ.get("UCCL_NCCL_PLUGIN")
    if given:
        return given
    built = ROOT / "target" / "release" / "libnccl_net_uccl.so"
    if built.exists():
        return str(built)
    try:
        import uccl

        return uccl.nccl_plugin_path()
    except (ImportError, AttributeError, FileNotFoundError):
        return None


def sizes_plugin(folder: str) -> str | None:
    """The network that moves no bytes, compiled; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source = ROOT / "crates" / "uccl-nccl-check" / "tests" / "programs" / "net_plugin.c"
    library = Path(folder) / "libnccl-net-sizes.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-DSIZES_ONLY", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return str(library)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(network: str, rank: int, per_host: int, **more: str) -> dict[str, str]:
    """Variables of a rank; so many neighbouring ranks are on one pretended host."""
    variables = {
        "NCCL_HOSTID": f"h{rank // per_host}",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH",
        **NETWORKS[network],
        **more,
    }
    if network == "uccl":
        variables["NCCL_NET_PLUGIN"] = plugin() or ""
    return {**os.environ, **variables}


class Ranks:
    """Processes, each a rank of one program, with their output in files."""

    def __init__(
        self,
        program: list[str],
        ranks: int,
        *,
        network: str = "uccl",
        per_host: int = 1,
        **more: str,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="uccl-nccl-")
        if network == "sizes":
            more["NCCL_NET_PLUGIN"] = sizes_plugin(self.folder.name) or ""
        port = str(free_port())
        self.outputs = [Path(self.folder.name) / f"rank{rank}" for rank in range(ranks)]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            variables = environment(network, rank, per_host, **more)
            variables |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *program],
                        env=variables,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.folder.cleanup()

    def said(self, rank: int) -> str:
        """The output of a rank so far, NCCL's log among it."""
        return self.outputs[rank].read_text(errors="replace")

    def wait(self, limit_s: float, ranks: list[int] | None = None) -> list[int | None]:
        """The exit statuses of ranks; None for one that has not ended within the limit."""
        end = time.monotonic() + limit_s
        waited = range(len(self.processes)) if ranks is None else ranks
        while time.monotonic() < end:
            if all(self.processes[rank].poll() is not None for rank in waited):
                break
            time.sleep(0.05)
        return [self.processes[rank].poll() for rank in waited]

    def succeed(self, limit_s: float) -> None:
        """Waits for all ranks; an error with the end of the output of one that failed."""
        for rank, status in enumerate(self.wait(limit_s)):
            if status != 0:
                ended = "did not end" if status is None else f"ended with {status}"
                lines = self.said(rank).splitlines()[-40:]
                raise AssertionError(f"rank {rank} {ended}:\n" + "\n".join(lines))
