"""Runs this project's RDMA, perftest and libfabric's own tool in turn, and holds the project's bars.

Without --devices, and outside a guest, sections that need RDMA devices run in a guest of this
machine (tests/guest).
"""

import argparse
import sys
from pathlib import Path

from bench.lib import bars, summary
from bench.lib.paths import ROOT
from bench.lib.proc import BenchError
from bench.lib.rounds import Bench, names, present, say
from bench.rdma import cases as rdma_cases
from bench.rdma import guest as rdma_guest
from bench.rdma import peers as rdma_peers
from bench.rdma.links import Rails


def arguments() -> argparse.Namespace:
    known = [peer.name for peer in rdma_peers.every()]
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--only", metavar="SECTION,...", help=f"sections: {', '.join(rdma_cases.SECTIONS)}"
    )
    made.add_argument("--peers", metavar="NAME,...", help=f"who runs: {', '.join(known)}")
    made.add_argument(
        "--devices", metavar="A-B,...", help="the two ends of one rail or two: mlx5_0-mlx5_1"
    )
    made.add_argument("--gid-index", type=int, help="perftest's GID, where --devices are given")
    made.add_argument(
        "--loss", type=float, default=1.0, help="per cent lost each way, in section loss"
    )
    made.add_argument("--rounds", type=int, default=5, help="rounds")
    made.add_argument("--seconds", type=float, default=0.5, help="seconds a value is measured")
    made.add_argument(
        "--max-minutes", type=float, default=20, help="start no more work after so long"
    )
    made.add_argument(
        "--uccl-bin", type=Path, default=ROOT / "target/release/uccl", help="the project's command"
    )
    made.add_argument("--revision", help="of the project, where git cannot tell")
    made.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    made.add_argument(
        "--check", action="store_true", help="exit 1 when a bar that was measured is not met"
    )
    options = made.parse_args()
    options.only = names(made, "--only", options.only, rdma_cases.SECTIONS)
    options.peers = names(made, "--peers", options.peers, known)
    options.uccl_bin = options.uccl_bin.resolve()
    if options.devices:
        try:
            Rails.named(options.devices, options.gid_index)
        except ValueError as error:
            made.error(f"--devices: {error}")
    return options


def devices(options: argparse.Namespace) -> Rails | None:
    """The devices of --devices, or those of the guest that this program runs in."""
    if options.devices:
        return Rails.named(options.devices, options.gid_index)
    return Rails.of_guest_here()


def sections_here(options: argparse.Namespace, rails: Rails | None) -> set[str]:
    """The sections that these devices can measure; prints the reasons for the others."""
    here, lacking = set(options.only), {}
    if rails is None or (why := rails.absent()):
        lacking = dict.fromkeys(
            rdma_cases.VERBS_SECTIONS, "no devices here" if rails is None else why
        )
    else:
        if len(rails) < 2:
            lacking["rails"] = "it needs two rails"
        if not rails.of_guest:
            lacking["loss"] = "only a guest's cables are made to lose packets"
    for name in here & lacking.keys():
        if rails is not None:
            say(f"section {name} is left out: {lacking[name]}")
    return here - lacking.keys()


def in_guest(options: argparse.Namespace) -> dict | None:
    """A guest's results of the sections that need RDMA devices."""
    wanted = [name for name in rdma_cases.VERBS_SECTIONS if name in options.only]
    peers = [name for name in options.peers if name != rdma_cases.PINGPONG]
    if not wanted or not peers:
        return None
    words = [
        "--only",
        ",".join(wanted),
        "--peers",
        ",".join(peers),
        "--uccl-bin",
        str(options.uccl_bin),
    ]
    for name in ("loss", "rounds", "seconds", "max_minutes"):
        words += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    try:
        return rdma_guest.measure(words, options.max_minutes)
    except BenchError as failed:
        say(f"the guest failed: {failed}")
        return None


def main() -> int:
    options = arguments()
    rails = devices(options)
    guest = in_guest(options) if rails is None else None
    context = rdma_peers.RdmaContext(
        seconds=options.seconds, uccl_bin=options.uccl_bin, rails=rails, loss=options.loss
    )
    running, said = present(rdma_peers.every(), options.peers, context)
    bench = Bench(options, context, running, rdma_cases.groups(sections_here(options, rails)))
    bench.run()
    if guest:
        rdma_guest.add(bench.results, guest)
        said.update({name: peer for name, peer in guest["peers"].items() if "version" in peer})
        bench.rounds_done = min(bench.rounds_done, guest["rounds_done"])
    wanted = [bar for bar in rdma_cases.bars(bench.results) if bar.section in options.only]
    return summary.finish(options, bench, said, [bars.judge(bar, bench.results) for bar in wanted])


if __name__ == "__main__":
    sys.exit(main())
