"""One guest: its start, its control folder and its end."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot")
PR_SET_PDEATHSIG = 1
PEER_NETNS = "peer"
"""The network namespace of the b ends with --apart."""


def _assignments(values: Mapping[str, object], prefix: str = "") -> str:
    """Shell assignments of these values."""
    return "".join(f"{prefix}{name}={shlex.quote(str(value))}\n" for name, value in values.items())


class Guest:
    """A guest, and the control folder through which it and this process communicate."""

    def __init__(
        self,
        options: argparse.Namespace,
        rank: int,
        kernel: str,
        cables: list[tuple[socket.socket, socket.socket]],
        control: str,
        scratch: str,
    ) -> None:
        self.options, self.rank, self.control, self.scratch = options, rank, control, scratch
        os.mkdir(control)
        self._write_control()
        ends = [cable[rank].fileno() for cable in cables]
        arguments = (
            self._user_mode(kernel, ends) if options.engine == "uml" else self._qemu(kernel, ends)
        )
        with open(control + "/console", "wb") as console:
            self.process = subprocess.Popen(
                arguments,
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.streams = []
        for name, to in (("out", sys.stdout.buffer), ("err", sys.stderr.buffer)):
            self.write(name, "")
            self.streams.append((open(f"{control}/{name}", "rb"), to))

    def _write_control(self) -> None:
        """Writes the files that the scripts in boot/ read."""
        options, rank = self.options, self.rank
        here, there = ("a", "b") if rank == 0 else ("b", "a")
        rails = range(options.rails)
        config = {
            "ENGINE": options.engine,
            "NIC": "vec" if options.engine == "uml" else "eth",
            "RANK": rank,
            "END": here,
            "GUESTS": options.guests,
            "RAILS": options.rails,
            "MTU": options.mtu,
            "NETEM": options.netem,
            "HUGEPAGES": options.hugepages,
            "PEER_NETNS": PEER_NETNS if options.apart else "",
            "SCRATCH": self.scratch,
            "TIMEOUT": options.timeout,
        }
        environment = {name: value for name, value in os.environ.items() if name.isidentifier()}
        environment |= {
            "RDMA_VM_RANK": str(rank),
            "RDMA_VM_GUESTS": str(options.guests),
            "RDMA_VM_RAILS": str(options.rails),
            "RDMA_VM_DEVS": ",".join(f"rxe{rail}{here}" for rail in rails),
            "RDMA_VM_PEER_DEVS": ",".join(f"rxe{rail}{there}" for rail in rails),
            "RDMA_VM_ADDRS": ",".join(f"10.77.{rail}.{1 + rank}" for rail in rails),
            "RDMA_VM_PEER_ADDRS": ",".join(f"10.77.{rail}.{2 - rank}" for rail in rails),
            "RDMA_VM_GID_INDEX": "1",
            "RDMA_VM_SCRATCH": self.scratch,
        }
        if options.apart:
            environment["RDMA_VM_PEER_NETNS"] = f"/run/netns/{PEER_NETNS}"
        self.write("config", _assignments(config))
        command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(options.command)}\n"
        self.write("command", _assignments(environment, "export ") + command)
        shutil.copy(BOOT + "/userland.sh", self.control + "/init")
        with open(BOOT + "/uml.sh") as f:
            self.write("init0", f.read().replace("CTL", self.control))
        os.chmod(self.control + "/init0", 0o755)
        shutil.copy(
            "/proc/cpuinfo", self.control + "/cpuinfo"
        )  # user-mode Linux's own lacks the clock rate

    def _user_mode(self, kernel: str, ends: list[int]) -> list[str]:
        options = self.options
        arguments = [
            kernel + "/linux",
            f"mem={options.mem}M",
            f"ncpus={options.cpus}",
            "seccomp=on",
            "quiet",
            "panic=-1",
            "oops=panic",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"uml_dir={self.control}/",
            "umid=uml",
            f"init={self.control}/init0",
        ]
        return arguments + [
            f"vec{n}:transport=fd,fd={fd},mtu={options.mtu}" for n, fd in enumerate(ends)
        ]

    def _qemu(self, kernel: str, ends: list[int]) -> list[str]:
        options = self.options
        processor = (
            ["-accel", "kvm", "-cpu", "host"]
            if options.engine == "kvm"
            else ["-accel", "tcg", "-cpu", "max"]
        )
        arguments = [
            "qemu-system-x86_64",
            "-M",
            "q35",
            "-smp",
            str(options.cpus),
            "-m",
            str(options.mem),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-serial",
            "stdio",
            "-kernel",
            kernel + "/vmlinuz",
            "-initrd",
            kernel + "/initrd",
            "-append",
            "console=ttyS0 quiet panic=-1 oops=panic reboot=t mitigations=off nokaslr",
            *processor,
        ]
        shares = [
            ("root", "/", ",readonly=on"),
            ("ctl", self.control, ""),
            ("scratch", self.scratch, ""),
        ]
        for tag, path, more in shares:
            arguments += [
                "-fsdev",
                f"local,id={tag},path={path},security_model=none,multidevs=remap{more}",
                "-device",
                f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
            ]
        for n, fd in enumerate(ends):
            arguments += [
                "-netdev",
                f"socket,id=n{n},fd={fd}",
                "-device",
                f"virtio-net-pci,netdev=n{n},host_mtu={options.mtu}",
            ]
        return arguments

    def write(self, name: str, text: str) -> None:
        """Writes a file of the control folder."""
        with open(f"{self.control}/{name}", "w") as f:
            f.write(text)

    def read(self, name: str) -> str | None:
        """The text of a file of the control folder, or None."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"{self.control}/{name}", errors="replace") as f,
        ):
            return f.read()
        return None

    def pump(self) -> bool:
        """Passes on new output of the command; returns whether the guest still runs."""
        running = self.process.poll() is None
        for source, to in self.streams:
            if data := source.read():
                to.write(data)
                to.flush()
        return running

    def stop(self) -> None:
        """Ends the guest."""
        with contextlib.suppress(
            ProcessLookupError
        ):  # all of its session: user-mode Linux has several processes
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _end_with_parent() -> None:
    """The guest ends with this process, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
