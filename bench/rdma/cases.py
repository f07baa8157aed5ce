"""Cases of RDMA, and this project's bars beside perftest and libfabric's own tool."""

from bench.lib.bars import OURS, Bar
from bench.lib.cases import KIB, MIB, Case
from bench.lib.results import Results

PERFTEST, PINGPONG = "perftest", "fi_pingpong"
#: Sections that need RDMA devices, and the one that needs none.
VERBS_SECTIONS = ("verbs", "latency", "rails", "kv", "loss")
SECTIONS = (*VERBS_SECTIONS, "libfabric")

#: Links: one rail, two rails, one that loses packets under each kind of queue pair, and libfabric over TCP.
ONE, TWO, LOSSY_RC, LOSSY_UC, LIBFABRIC = "verbs", "verbs x2", "lossy RC", "lossy UC", "libfabric"

#: A transfer of a KV cache, as in `uccl bench --preset kv-sweep`.
KV_SIZE, KV_IOVS = 1_179_648, (1, 128)
#: The speedup by a second rail where the machine's processors can drive it.
SECOND_RAIL = 1.5

_ONE_WRITE, _TWO_WRITE = Case(ONE, "write", MIB), Case(TWO, "write", MIB)
#: The smaller rail's share of the traffic.
_SHARE = Case(TWO, "share", MIB, unit="share")
#: Half of a round of writes, both sides watching their memory; and a write until its acknowledgement.
_LATENCY, _ACKNOWLEDGED = (Case(ONE, op, 8, unit="us") for op in ("pingpong", "write"))
_LIBFABRIC = Case(LIBFABRIC, "write", MIB)


def groups(only: set[str]) -> list[list[Case]]:
    """The cases of a run, in groups that one pair of processes measures."""
    kinds = {
        "verbs": [[Case(ONE, op, size)] for op in ("write", "read") for size in (64 * KIB, MIB)],
        "latency": [[_LATENCY], [_ACKNOWLEDGED]],
        # One rail again, so that `--only rails` stands alone.
        "rails": [[_ONE_WRITE], [_TWO_WRITE, _SHARE]],
        "kv": [[_kv(iovs) for iovs in KV_IOVS]],
        "loss": [[Case(link, "write", MIB)] for link in (LOSSY_RC, LOSSY_UC)],
        "libfabric": [[_LIBFABRIC]],
    }
    every = [group for name in SECTIONS if name in only for group in kinds[name]]
    return [list(group) for group in dict.fromkeys(map(tuple, every))]


def bars(results: Results) -> list[Bar]:
    """Every bar, in the order it is printed; the bar of a second rail depends on perftest's
    speedup."""
    few, many = (((OURS, _kv(iovs)),) for iovs in KV_IOVS)
    rc, uc = (((OURS, Case(link, "write", MIB)),) for link in (LOSSY_RC, LOSSY_UC))
    return [
        _beside("verbs", "RC write 1 MiB / ib_write_bw", _ONE_WRITE, PERFTEST, at_least=0.9),
        _beside(
            "latency",
            "RC writes of 8 B back and forth / ib_write_lat",
            _LATENCY,
            PERFTEST,
            at_most=1.3,
        ),
        _second_rail(results),
        Bar("kv", "128 iovs of 1179648 B / 1, a byte", many, few, at_least=1.0),
        Bar("loss", "UC / RC, under the same loss", uc, rc, at_least=2.0),
        _beside(
            "libfabric", "tcp;ofi_rxm write 1 MiB / fi_pingpong", _LIBFABRIC, PINGPONG, at_least=0.9
        ),
    ]


def _kv(iovs: int) -> Case:
    return Case(ONE, "write", KV_SIZE, iovs)


def _beside(section: str, words: str, case: Case, peer: str, **limit: float) -> Bar:
    return Bar(section, words, ((OURS, case),), ((peer, case),), **limit)  # type: ignore[arg-type]


def _second_rail(results: Results) -> Bar:
    """The speedup by a second rail; where perftest gets less than `SECOND_RAIL`, the smaller rail's
    share."""
    one, two = (results.median(PERFTEST, case) for case in (_ONE_WRITE, _TWO_WRITE))
    if one and two and two < SECOND_RAIL * one:
        words = (
            f"the smaller of two rails' shares (perftest gets {two / one:.2f}x from two at once)"
        )
        return Bar("rails", words, ((OURS, _SHARE),), at_least=0.4)
    return Bar(
        "rails",
        "two rails / one",
        ((OURS, _TWO_WRITE),),
        ((OURS, _ONE_WRITE),),
        at_least=SECOND_RAIL,
    )
