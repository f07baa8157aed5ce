"""Dispatch and combine of expert parallelism between processes of this machine, beside gloo's all_to_all of the same bytes.

    python3 -m bench.ep.host --ranks 2 --num-tokens 128 --hidden 7168 --num-topk 8 --num-experts 288

It needs torch and the wheel. Times are from entry to usable output, the slowest rank's, medians of
all rounds. Two figures of bytes are printed: all rows that experts read or write, by which rates
are computed (a token counts once for each of its experts, also of its own rank), and the rows among
them that belong to other ranks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def arguments(measured: str) -> argparse.ArgumentParser:
    """Options for the shape of the calls, shared by the benches."""
    parser = argparse.ArgumentParser(description=measured)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=288)
    parser.add_argument("--rounds", type=int, default=30)
    return parser


def timed(group: Any, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, and this rank's result of the call."""
    dist.barrier(group)
    started = time.perf_counter()
    result = call()
    took = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(took, dist.ReduceOp.MAX, group)
    return took.item(), result


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    from uccl.ep import Buffer, ElasticBuffer

    group = dist.group.WORLD
    tokens, hidden, experts, top_k = args.num_tokens, args.hidden, args.num_experts, args.num_topk
    torch.manual_seed(rank)
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.rand(tokens, experts).topk(top_k).indices
    weights = torch.rand(tokens, top_k)
    size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, args.ranks, experts)
    buffer = Buffer(group, 0, size, low_latency_mode=True)
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=top_k)
    rows = torch.randn(tokens * top_k // args.ranks * args.ranks, hidden).bfloat16()
    other, copied = torch.empty_like(rows), torch.empty_like(rows)
    times: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        took, result = timed(group, call)
        times.setdefault(name, []).append(took)
        return result

    for _ in range(args.rounds + 3):
        for fp8 in (True, False):
            name = f"low latency dispatch, {'fp8' if fp8 else 'bf16'}"
            dispatch = partial(buffer.low_latency_dispatch, use_fp8=fp8)
            got, _, handle, _, _ = measure(name, partial(dispatch, x, ids, tokens, experts))
        measure(
            "low latency combine", lambda: buffer.low_latency_combine(got, ids, weights, handle)
        )
        # The memory of the rows goes before the next call makes its own.
        got = handle = None
        got, _, _, handle, _ = measure(
            "elastic dispatch, expanded",
            lambda: elastic.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_experts=experts, do_expand=True
            ),
        )
        measure("elastic combine, expanded", lambda: elastic.combine(got, handle))
        got = handle = None
        measure("gloo all_to_all, bf16", lambda: dist.all_to_all_single(other, rows))
        measure("copy in this process, bf16", lambda: copied.copy_(rows))
    if rank == 0:
        report(args, ids, times)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, ids: torch.Tensor, times: dict[str, list[float]]) -> None:
    owners = ids // (args.num_experts // args.ranks)
    selections, foreign = ids.numel(), int((owners != 0).sum())
    gloo = statistics.median(times["gloo all_to_all, bf16"][3:])
    print(
        f"{args.ranks} ranks, {args.num_tokens} tokens each, hidden {args.hidden}, top-{args.num_topk}, {args.num_experts} experts"
    )
    print(
        f"{selections} rows of a rank, {foreign} of them for other ranks; medians of {args.rounds} rounds\n"
    )
    print(f"{'':30} {'us':>9} {'MB':>8} {'foreign':>8} {'GB/s':>7} {'gloo/it':>8}")
    for name, all_times in times.items():
        took = statistics.median(all_times[3:])
        row = args.hidden + args.hidden // 32 if "fp8" in name else 2 * args.hidden
        sizes = [count * row / 1e6 for count in (selections, foreign)]
        rate = sizes[0] / 1e3 / took
        print(
            f"{name:30} {took * 1e6:9.0f} {sizes[0]:8.2f} {sizes[1]:8.2f} {rate:7.2f} {gloo / took:8.2f}"
        )


if __name__ == "__main__":
    parsed = arguments("dispatch and combine beside gloo's all_to_all").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (parsed, folder), nprocs=parsed.ranks)
