"""The two ends of each rail, their counters of sent traffic, and packet loss between them."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.lib.proc import BenchError, run

_SYSFS = Path("/sys/class/infiniband")
#: Counters of a device's sent traffic, of its driver or of its port. Only compared with each other.
_SENT = ("ports/1/hw_counters/sent_pkts", "ports/1/counters/port_xmit_data")


@dataclass(frozen=True)
class Rails:
    """Pairs of devices that reach each other: `ours[i]` and `theirs[i]`."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    gid_index: int | None = None
    #: Whether the devices are a guest's: this program may make the guest's cables lose packets.
    of_guest: bool = False

    @classmethod
    def of_guest_here(cls) -> "Rails | None":
        """The devices of the guest that this program runs in, if it runs in one."""
        ours, theirs = (os.environ.get(name) for name in ("RDMA_VM_DEVS", "RDMA_VM_PEER_DEVS"))
        if not ours or not theirs:
            return None
        gid = int(os.environ.get("RDMA_VM_GID_INDEX", "1"))
        return cls(tuple(ours.split(",")), tuple(theirs.split(",")), gid, of_guest=True)

    @classmethod
    def named(cls, text: str, gid_index: int | None) -> "Rails":
        """From `mlx5_0-mlx5_1`, or `a-b,c-d` for two rails."""
        pairs = [re.fullmatch(r"([\w.]+)-([\w.]+)", pair) for pair in text.split(",")]
        if None in pairs:
            raise ValueError(
                f"{text!r}: write the two ends of each rail, as in mlx5_0-mlx5_1,mlx5_2-mlx5_3"
            )
        return cls(tuple(p[1] for p in pairs), tuple(p[2] for p in pairs), gid_index)

    def __len__(self) -> int:
        return len(self.ours)

    def absent(self) -> str | None:
        """The reason for which the devices cannot be used, if there is one."""
        missing = [name for name in (*self.ours, *self.theirs) if not (_SYSFS / name).exists()]
        return f"no such RDMA device: {', '.join(missing)}" if missing else None

    def sent(self) -> list[int]:
        """Counters of the traffic that each of our devices has sent."""
        return [_sent(name) for name in self.ours]

    @contextlib.contextmanager
    def losing(self, percent: float) -> Iterator[None]:
        """Has the first rail lose packets, each way."""
        ends = ["rail0a", "rail0b"]
        netem = ["netem", "limit", "100000", "loss", f"{percent:g}%"]
        try:
            for end in ends:
                run(["tc", "qdisc", "replace", "dev", end, "root", *netem], limit_s=10)
            yield
        finally:
            for end in ends:
                with contextlib.suppress(BenchError):
                    run(["tc", "qdisc", "del", "dev", end, "root"], limit_s=10)


def _sent(device: str) -> int:
    for name in _SENT:
        with contextlib.suppress(OSError, ValueError):
            return int((_SYSFS / device / name).read_text())
    raise BenchError(f"{device} does not count what it sends")
