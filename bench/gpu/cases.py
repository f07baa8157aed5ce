"""Cases and bars of GPU memory."""

from bench.lib.bars import OURS, Bar, Ref
from bench.lib.cases import KIB, MIB, Case, human

#: The same project, called from Python.
PYTHON = "uccl-py"
#: The driver's own copies: by the referee and by this project's command, one after the other and each waited for.
RAW, RAW_WAIT = "copy", "copy+wait"
LIMITS, LIMITS_WAIT = "limits", "limits+wait"
#: NIXL, made to take TCP.
NIXL_TCP = "nixl-tcp"

SECTIONS = ("gpu", "vector", "pinned", "tcp")
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
PINNED_SIZES = (MIB, 256 * MIB)
#: Pieces and their length; they are never adjacent.
VECTORS = ((64, 4 * KIB), (64, 64 * KIB), (4096, 4 * KIB), (298, 1_179_648))
TCP_SIZE = 64 * MIB
LARGE, MIDDLE, SMALL = 256 * MIB, 16 * MIB, 4 * KIB


def unit(total_bytes: int) -> str:
    """Short transfers have a time, long ones a rate."""
    return "us" if total_bytes <= 256 * KIB else "GB/s"


def transfer(op: str, size: int, iovs: int = 1, memory: str = "gpu", link: str = "gpu") -> Case:
    return Case(link, op, size, iovs, memory, unit=unit(size * iovs))


def plan(only: set[str]) -> list[Case]:
    """The cases of a run, in the order they are measured."""
    sections = {"gpu": _gpu, "vector": _vector, "pinned": _pinned, "tcp": _tcp}
    cases = [case for name in SECTIONS if name in only for case in sections[name]()]
    return list(dict.fromkeys(cases))


def _gpu() -> list[Case]:
    return [transfer(op, size) for op in ("write", "read") for size in SIZES]


def _vector() -> list[Case]:
    # Bars compare vectors with these cases, so that `--only vector` stands alone.
    alone = [transfer("write", size) for size in (SMALL, LARGE)]
    return alone + [transfer("write", size, iovs) for iovs, size in VECTORS]


def _pinned() -> list[Case]:
    return [
        transfer(op, size, memory="pinned") for op in ("write", "read") for size in PINNED_SIZES
    ]


def _tcp() -> list[Case]:
    return [transfer("write", TCP_SIZE, memory=memory, link="tcp") for memory in ("host", "gpu")]


def bars() -> list[Bar]:
    """Every bar, in the order it is printed."""
    return [*_gpu_bars(), *_vector_bars(), *_pinned_bars(), *_tcp_bars(), *_python_bars()]


def _ours(case: Case) -> tuple[Ref, ...]:
    return ((OURS, case),)


def _copy(case: Case) -> tuple[Ref, ...]:
    """The driver's copy of the same bytes the same way, one after the other."""
    return ((RAW, case), (LIMITS, case))


def _copy_and_wait(case: Case) -> tuple[Ref, ...]:
    return ((RAW_WAIT, case), (LIMITS_WAIT, case))


def _gpu_bars() -> list[Bar]:
    bars = []
    for op in ("write", "read"):
        for size, raw, words, limit in (
            (LARGE, _copy, "raw peer copy", {"at_least": 0.97}),
            (MIDDLE, _copy_and_wait, "raw peer copy and synchronise", {"at_least": 0.95}),
            (SMALL, _copy_and_wait, "raw peer copy and synchronise", {"at_most": 1.5}),
        ):
            case = transfer(op, size)
            bars.append(
                Bar(
                    "gpu",
                    f"GPU to GPU {op} {human(size)} / {words}",
                    _ours(case),
                    raw(case),
                    **limit,  # type: ignore[arg-type]
                )
            )
    return bars


def _vector_bars() -> list[Bar]:
    few, _, many, large = (transfer("write", size, iovs) for iovs, size in VECTORS)
    alone, raw = _ours(transfer("write", SMALL)), _copy(transfer("write", LARGE))
    return [
        Bar("vector", f"{_words(few)} / one of 4 KiB", _ours(few), alone, at_most=2.5),
        Bar("vector", f"{_words(many)} / raw peer copy 256 MiB", _ours(many), raw, at_least=0.5),
        Bar("vector", f"{_words(large)} / raw peer copy 256 MiB", _ours(large), raw, at_least=0.93),
    ]


def _words(case: Case) -> str:
    return f"GPU to GPU {case.op} {case.iovs} x {human(case.size)}"


def _pinned_bars() -> list[Bar]:
    bars = []
    for op, way in (("write", "GPU to pinned"), ("read", "pinned to GPU")):
        case = transfer(op, LARGE, memory="pinned")
        bars.append(
            Bar(
                "pinned",
                f"{way} {human(LARGE)} / raw pinned copy",
                _ours(case),
                _copy(case),
                at_least=0.95,
            )
        )
    return bars


def _tcp_bars() -> list[Bar]:
    gpu, host = (
        transfer("write", TCP_SIZE, memory=memory, link="tcp") for memory in ("gpu", "host")
    )
    name = f"GPU to GPU by loopback TCP {human(TCP_SIZE)}"
    return [
        Bar("tcp", f"{name} / between host buffers", _ours(gpu), _ours(host), at_least=0.8),
        Bar("tcp", f"{name} / NIXL, UCX over TCP", _ours(gpu), ((NIXL_TCP, gpu),), at_least=5.0),
    ]


def _python_bars() -> list[Bar]:
    return [
        Bar(
            "gpu",
            f"{op} {human(SMALL)} from Python - without it",
            ((PYTHON, transfer(op, SMALL)),),
            _ours(transfer(op, SMALL)),
            at_most=1.0,
            minus=True,
        )
        for op in ("write", "read")
    ]
