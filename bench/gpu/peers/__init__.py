"""The peers that move GPU memory between two processes of this host."""

from dataclasses import dataclass
from pathlib import Path

from bench.lib.cases import Case
from bench.peers import Context, Peer


@dataclass
class GpuContext(Context):
    """The context of a measurement of GPU memory."""

    #: The GPUs of the side that measures and of the other.
    gpus: tuple[int, int] = (0, 1)
    #: The Python that runs the workers; it has torch.
    python: str = "python3"
    #: Folders of wheels that were unpacked, by peer; a peer without one is looked for in that Python itself.
    folders: dict[str, Path] | None = None

    def limit_s(self, cases: list[Case]) -> float:
        """The time limit of a measurement of `cases`, its processes' start included."""
        return 30 + len(cases) * (4 * self.seconds + 4)


def every() -> list[Peer]:
    """All of them, this project first."""
    from bench.gpu.peers.command import Command, Limits, LimitsWait
    from bench.gpu.peers.pairs import Mooncake, Nccl, Nixl, NixlTcp, Python, Upstream
    from bench.gpu.peers.raw import Raw, RawWait

    raw, limits = Raw(), Limits()
    copies = [raw, RawWait(raw), limits, LimitsWait(limits)]
    return [Command(), Python(), *copies, Upstream(), Nixl(), NixlTcp(), Nccl(), Mooncake()]


__all__ = ["GpuContext", "every"]
