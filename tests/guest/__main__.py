"""Runs a command on real RDMA verbs devices, inside a throw-away guest.

The guest is a Linux kernel with a software RDMA driver (soft-RoCE, rdma_rxe). It sees the host's /
at the same paths under a copy-on-write overlay: programs built on the host run with the host's
libraries, and their writes are thrown away, but for the scratch folder, which is the host's own.

Engines: "uml", a user-mode kernel (an ordinary process: native code, about one second to boot,
nothing asked of the machine), built once from Debian's linux-source (some minutes on two cores);
"kvm" and "tcg", QEMU with Debian's stock kernel on the processor's virtualization or by emulation.
"auto" is kvm where the processor has virtualization, uml elsewhere and for --apart. With uml,
threads of one process run one at a time: on the default single CPU a thread that spins until
another acts waits for the next tick (1 ms); --cpus 2 makes processes that poll faster, and such
threads much slower.
Each stretch of a process's memory that is contiguous in the guest is a mapping of the host, which
allows a process /proc/sys/vm/max_map_count mappings. A process beyond this limit, at some 256 MiB
of scattered pages, hangs without a message. Memory that is populated at once (MAP_POPULATE) in a
fresh guest needs few mappings, and a tenth of the time.

One guest has both ends of every rail (a veth pair rail<i>a - rail<i>b with devices rxe<i>a and
rxe<i>b); with --apart, the b ends are in a network namespace of their own, and a process there
reaches the a ends over the cable. Two guests are joined by virtual cables: the first has the a
ends, the second the b ends, and both run COMMAND. Its environment is the caller's, and
  RDMA_VM_RANK, _GUESTS, _RAILS       this guest's number (0, 1); how many of each
  RDMA_VM_DEVS, RDMA_VM_PEER_DEVS     devices of this and of the other end: rxe0a,rxe1a
  RDMA_VM_ADDRS, RDMA_VM_PEER_ADDRS   their IPv4 addresses: rail i is 10.77.<i>.1 and .2
  RDMA_VM_GID_INDEX                   1, the RoCEv2 GID made of that address
  RDMA_VM_PEER_NETNS                  with --apart, the file of the other end's network namespace
  RDMA_VM_SCRATCH                     the folder that outlives the guest
Exit status: COMMAND's (of two guests, the first that is not 0); 77 when this machine lacks a part
of the guest; 124 when COMMAND ran past --timeout; 125 when the guest failed (its console is shown).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time

from machine import Guest
from shell import FAILED, GuestError

from kernels import prepare  # type: ignore[attr-defined]

HANGS_AFTER_S = 180
"""A guest enforces the time limit itself. After these seconds beyond the limit it counts as
hanging."""


def parse() -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(
        prog="guest",
        usage="guest [options] -- COMMAND [ARG...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--guests", type=int, choices=(1, 2), default=1)
    p.add_argument(
        "--rails",
        type=int,
        default=1,
        metavar="N",
        help="links, each with a device at both ends (1)",
    )
    p.add_argument(
        "--apart",
        action="store_true",
        help="the b ends in a network namespace of their own (one guest, --engine uml)",
    )
    p.add_argument(
        "--loss", type=float, default=0, metavar="PCT", help="per cent of packets lost, each way"
    )
    p.add_argument(
        "--netem", default="", metavar="ARGS", help="any words of tc-netem: 'delay 1ms reorder 5%%'"
    )
    p.add_argument(
        "--mtu", type=int, default=4200, help="of the links (4200, for an RDMA MTU of 4096)"
    )
    p.add_argument(
        "--timeout", type=int, default=300, metavar="S", help="seconds COMMAND may take (300)"
    )
    p.add_argument(
        "--scratch", metavar="DIR", help="the folder that outlives the guest (a temporary one)"
    )
    p.add_argument("--engine", choices=("auto", "uml", "kvm", "tcg"), default="auto")
    p.add_argument(
        "--suite",
        help="Debian suite of the kernel; host: the host's own (host; uml: trixie-backports)",
    )
    p.add_argument("--cpus", type=int, help="(uml: 1; else 2)")
    p.add_argument("--mem", type=int, default=2048, help="MiB (2048)")
    p.add_argument(
        "--hugepages", type=int, default=0, metavar="N", help="2 MiB pages to set aside (kvm, tcg)"
    )
    p.add_argument(
        "--prepare", action="store_true", help="install and build what is needed, and end"
    )
    p.add_argument(
        "-v", "--verbose", action="store_true", help="show the guest's console afterwards"
    )
    p.add_argument("command", nargs="*")
    options = p.parse_args()
    if not options.command and not options.prepare:
        p.error("no command")
    if options.apart and options.guests == 2:
        p.error("two guests are apart without --apart")
    if options.engine == "auto":
        # In a stock kernel soft-RoCE's sockets may all be in the first network namespace.
        options.engine = "kvm" if has_virtualization() and not options.apart else "uml"
    options.cpus = options.cpus or (1 if options.engine == "uml" else 2)
    if options.loss:
        options.netem = f"loss {options.loss}% {options.netem}"
    return options


def has_virtualization() -> bool:
    """Whether the processor has virtualization; software stand-ins for KVM cannot run a stock
    kernel."""
    with open("/proc/cpuinfo") as f:
        flags = set(f.read().split())
    return bool({"svm", "vmx"} & flags) and os.access("/dev/kvm", os.R_OK | os.W_OK)


def run(options: argparse.Namespace, kernel: str) -> int:
    """Boots the guests, runs the command in them and ends them; returns the exit status."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="rdma-vm.")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        scratch = os.path.abspath(options.scratch or folder + "/scratch")
        os.makedirs(scratch, exist_ok=True)
        kind = socket.SOCK_DGRAM if options.engine == "uml" else socket.SOCK_STREAM
        cables = [
            socket.socketpair(type=kind) for _ in range(options.rails if options.guests == 2 else 0)
        ]
        began = time.monotonic()
        guests = []
        for rank in range(options.guests):
            guests.append(Guest(options, rank, kernel, cables, f"{folder}/guest{rank}", scratch))
            stack.callback(guests[-1].stop)
        wait(guests, began + options.timeout + HANGS_AFTER_S)
        statuses = [end(guest, options.verbose) for guest in guests]
        if options.verbose:
            print(f"guest: {options.engine}, {time.monotonic() - began:.1f} s", file=sys.stderr)
        return next(filter(None, statuses), 0)


def wait(guests: list[Guest], deadline: float) -> None:
    """Waits until all guests have ended, or one hangs."""
    started = len(guests) == 1
    # A list, so that all of them are pumped.
    while any([guest.pump() for guest in guests]) and time.monotonic() < deadline:
        if not started and all(guest.read("ready") is not None for guest in guests):
            started = True
            for guest in guests:
                guest.write("go", "")
        time.sleep(0.02)


def end(guest: Guest, verbose: bool) -> int:
    """Ends a guest; returns the exit status of its command."""
    guest.stop()
    guest.pump()
    status = int(guest.read("status") or FAILED)
    if verbose or status == FAILED:
        print(guest.read("console"), file=sys.stderr)
    return status


def main() -> int:
    """Runs the command line; returns the exit status."""
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        kernel = prepare(options.engine, options.suite)
        return 0 if options.prepare else run(options, kernel)
    except GuestError as error:
        print(f"guest: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
