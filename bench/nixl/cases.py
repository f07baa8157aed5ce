"""Cases of NIXL's backends, and this project's bars beside UCX."""

from bench.lib.bars import OURS, Bar
from bench.lib.cases import KIB, MIB, Case, human

UCX = "ucx"
SECTIONS = ("dram", "tcp", "post", "again", "blocks", "vram", "vram_again")
OPS = ("write", "read")
#: Host memory: (pieces, length of each). Pieces are never adjacent, so that no backend can merge
#: them.
PLAIN = ((1, 64 * KIB), (1, MIB), (1, 16 * MIB), (1, 64 * MIB), (298, 64 * KIB), (298, 256 * KIB))
#: GPU memory: (pieces, length of each, how many times better than UCX).
DEVICE = ((298, 1_179_648, 4.0), (64, 4 * KIB, 20.0), (1, 256 * MIB, 2.0))
#: The caller's time for a transfer of many short pieces, however long these then take:
#: "post" makes it from lists of descriptors and starts it, "post_prepped" from lists that NIXL has prepared, "repost"
#: starts one that is made already.
POSTS = ("post", "post_prepped", "repost")
POST_IOVS, POST_SIZE = 1000, 64
POST_LINKS = ("local", "tcp")
#: How many pieces a transfer has that is posted again, and the most microseconds that the call may
#: take; None: as many as UCX takes.
AGAIN = ((4096, 20.0), (1, None))
#: Reads of as many blocks as a request of vLLM has, with a notification each. The caller looks once
#: a millisecond, as an engine does between its steps, and the other side as seldom. By name: how
#: many at once, and whether they go to memory that nobody has touched.
BLOCKS = {
    "one": (1, False),
    "one_fresh": (1, True),
    "thirty": (30, False),
    "thirty_fresh": (30, True),
}
BLOCK_IOVS, BLOCK_SIZE = 3571, 32 * KIB


def plan(only: set[str]) -> list[Case]:
    """The cases of a run, in the order they are measured."""
    sections = {
        "dram": lambda: _plain("local"),
        "tcp": lambda: _plain("tcp"),
        "post": _posts,
        "again": _again,
        "blocks": _blocks,
        "vram": _device,
        "vram_again": _device_again,
    }
    return [case for name in SECTIONS if name in only for case in sections[name]()]


def _plain(link: str) -> list[Case]:
    return [Case(link, op, size, iovs) for op in OPS for iovs, size in PLAIN]


def _posts() -> list[Case]:
    return [
        Case(link, post, POST_SIZE, POST_IOVS, unit="ns") for link in POST_LINKS for post in POSTS
    ]


def _again() -> list[Case]:
    return [Case("local", "repost", POST_SIZE, iovs, unit="us") for iovs, _ in AGAIN]


def _blocks() -> list[Case]:
    return [Case("local", name, BLOCK_SIZE, BLOCK_IOVS) for name in BLOCKS]


def _device() -> list[Case]:
    return [Case("gpu", op, size, iovs, "gpu") for op in OPS for iovs, size, _ in DEVICE]


def _device_again() -> list[Case]:
    iovs, _ = AGAIN[0]
    return [Case("gpu", "repost", POST_SIZE, iovs, "gpu", unit="us")]


def bars() -> list[Bar]:
    """Every bar, in the order it is printed."""
    dram = [_beside_ucx("dram", case, 1.0) for case in _plain("local")]
    tcp = [_beside_ucx("tcp", case, 2.0) for case in _plain("tcp")]
    post = [
        Bar("post", f"{_words(case)}, each", ((OURS, case),), at_most=200.0) for case in _posts()
    ]
    again = [
        Bar("again", _words(case), ((OURS, case),), at_most=most)
        if most
        else Bar("again", f"{_words(case)} / UCX", ((OURS, case),), ((UCX, case),), at_most=1.0)
        for case, (_, most) in zip(_again(), AGAIN)
    ]
    blocks = [_beside_ucx("blocks", case, 1.0) for case in _blocks()]
    limits = {(iovs, size): times for iovs, size, times in DEVICE}
    vram = [_beside_ucx("vram", case, limits[case.iovs, case.size]) for case in _device()]
    vram_again = [
        Bar("vram_again", _words(case), ((OURS, case),), at_most=AGAIN[0][1])
        for case in _device_again()
    ]
    return [*dram, *tcp, *post, *again, *blocks, *vram, *vram_again]


def _beside_ucx(section: str, case: Case, times: float) -> Bar:
    return Bar(section, f"{_words(case)} / UCX", ((OURS, case),), ((UCX, case),), at_least=times)


def _words(case: Case) -> str:
    where = {"local": "same host", "tcp": "TCP", "gpu": "GPU to GPU"}[case.link]
    pieces = f"{case.iovs} x " if case.iovs > 1 else ""
    return f"{where} {case.op} {pieces}{human(case.size)}"
