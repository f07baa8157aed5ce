"""Megatron-core's MoE layers in a training step: its flex token dispatcher on ``deep_ep`` beside its
all-to-all, with the same weights and tokens. Losses and norms of gradients have to be equal.

    pip install megatron-core . ./python/deep_ep
    python3 -m bench.frameworks.megatron [--tokens 4096,16384] [--ranks 2]

One process a GPU is started by the program. With ``--cpu`` the tensors are on the CPU and the group
is gloo's; Megatron asks for CUDA's streams there too, and gets empty ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

DISPATCHERS = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "flex": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
}
#: The largest relative differences: bf16 rows, summed in another order.
LOSS, GRADIENT = 2e-3, 2e-2


class Run(NamedTuple):
    """The steps with one dispatcher."""

    losses: list[float]
    #: The norm of all ranks' gradients in each step.
    norms: list[float]
    #: The fastest step but the first.
    milliseconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="4096,16384", help="numbers of tokens of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for all of it")
    parser.add_argument("--port", type=int, default=29911)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return run_ranks(options) if options.rank is None else run_rank(options)


def run_ranks(options: argparse.Namespace) -> int:
    """Starts the ranks. Rank 0 prints; the end of the others' output is shown if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{number}.log" for number in range(options.ranks)]
        ranks = [start(number, log) for number, log in enumerate(logs)]
        end = time.monotonic() + options.limit
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
                if any(rank.poll() for rank in ranks):
                    break
                time.sleep(0.1)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
        codes = [rank.returncode for rank in ranks]
        if any(codes):
            print(f"BAD: the ranks ended with {codes}")
            for log in logs:
                print("\n".join(log.read_text(errors="replace").splitlines()[-15:]))
        return int(any(codes))


def start(number: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.frameworks.megatron", *sys.argv[1:], "--rank"]
    with log.open("wb") as file:
        output = file if number else None
        return subprocess.Popen([*command, str(number)], stdout=output, stderr=file)


def run_rank(options: argparse.Namespace) -> int:
    number, ranks = str(options.rank), str(options.ranks)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    if options.cpu:
        pretend_streams()
    else:
        torch.cuda.set_device(options.rank)
        torch.set_default_device("cuda")
    dist.init_process_group("gloo" if options.cpu else "nccl")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=options.ranks)
    good = True
    for tokens in map(int, options.tokens.split(",")):
        runs = {name: train(options, name, tokens) for name in DISPATCHERS}
        if options.rank == 0:
            good &= is_equal(tokens, runs["alltoall"], runs["flex"])
    dist.barrier()
    dist.destroy_process_group()
    return int(not good)


def pretend_streams() -> None:
    """Has Megatron run on CPUs: streams that do nothing, and sizes that are no tensors."""
    exchange = dist.all_to_all_single

    def all_to_all_single(out: torch.Tensor, given: torch.Tensor, **more: Any) -> Any:
        # Megatron lists the sizes when it copies them from the GPU.
        for name in ("output_split_sizes", "input_split_sizes"):
            if more.get(name) is not None:
                more[name] = [int(size) for size in more[name]]
        return exchange(out, given, **more)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "current_stream", lambda *_: MagicMock()),
        (torch.cuda, "Stream", lambda *_, **__: MagicMock()),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (dist, "all_to_all_single", all_to_all_single),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def make_layers(options: argparse.Namespace, dispatcher: str) -> torch.nn.ModuleList:
    """MoE layers with weights that depend on the rank and a seed alone."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=8,
        num_moe_experts=options.experts,
        moe_router_topk=options.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        ffn_hidden_size=options.inner,
        moe_ffn_hidden_size=options.inner,
        expert_model_parallel_size=options.ranks,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        **DISPATCHERS[dispatcher],
    )
    if not options.cpu:
        model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    build: Any = get_moe_module_spec(use_te=False, num_experts=options.experts)
    layers = [build(config=config, layer_number=number + 1) for number in range(options.layers)]
    made = torch.nn.ModuleList(layers).to(torch.get_default_device(), torch.bfloat16)
    draw = torch.Generator(device="cpu")
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(made.named_parameters())):
            # All ranks have one router, and each its own experts.
            draw.manual_seed(1000 * number + (0 if "router" in name else options.rank))
            parameter.copy_(normal(parameter.shape, draw) * parameter.shape[-1] ** -0.5)
    return made


def normal(shape: Any, draw: torch.Generator) -> torch.Tensor:
    """Random numbers that are the same on every device."""
    return torch.randn(shape, generator=draw, device="cpu")


def train(options: argparse.Namespace, dispatcher: str, tokens: int) -> Run:
    layers = make_layers(options, dispatcher)
    draw = torch.Generator(device="cpu").manual_seed(77 + options.rank)
    device, shape = torch.get_default_device(), (tokens, 1, options.hidden)
    x, goal = (normal(shape, draw).to(device, torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.2)
    losses, norms, times = [], [], []
    for _ in range(options.steps):
        wait_for_gpu(options)
        began = time.monotonic()
        loss, square = step(layers, x, goal)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait_for_gpu(options)
        times.append(time.monotonic() - began)
        both = torch.stack([loss, square])
        dist.all_reduce(both)
        losses.append(both[0].item() / options.ranks)
        norms.append(both[1].item() ** 0.5)
    return Run(losses, norms, 1e3 * min(times[1:] or times))


def step(
    layers: torch.nn.ModuleList, x: torch.Tensor, goal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a forward and backward pass, and the square of the gradients' norm."""
    rows = x
    for layer in layers:
        rows = rows + layer(torch.nn.functional.rms_norm(rows, rows.shape[-1:]))[0]
    loss = (rows.float() - goal.float()).pow(2).mean()
    loss.backward()
    named = [(name, p.grad) for name, p in layers.named_parameters() if p.grad is not None]
    square = sum(grad.float().pow(2).sum() for _, grad in named)
    for name, grad in named:
        if "router" in name:
            dist.all_reduce(grad)
    return loss.detach().float(), square.detach().float()


def wait_for_gpu(options: argparse.Namespace) -> None:
    if not options.cpu:
        torch.cuda.synchronize()


def is_equal(tokens: int, alltoall: Run, flex: Run) -> bool:
    """Prints how far the two are from each other, and the buffer that Megatron used."""
    from megatron.core.transformer.moe import fused_a2a

    loss = farthest(alltoall.losses, flex.losses)
    gradient = farthest(alltoall.norms, flex.norms)
    good = loss < LOSS and gradient < GRADIENT
    used = type(fused_a2a._buffer).__base__
    print(f"{tokens} tokens a rank, Megatron's buffer is a {used.__module__}.{used.__qualname__}")
    for name, run in (("alltoall", alltoall), ("flex", flex)):
        told = " ".join(f"{value:.5f}" for value in run.losses)
        print(f"  {name:8} {run.milliseconds:8.1f} ms a step, losses {told}")
    verdict = "ok" if good else "BAD"
    print(f"  {verdict}: losses differ by {loss:.1e}, gradients by {gradient:.1e}", flush=True)
    return good


def farthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other))


if __name__ == "__main__":
    sys.exit(main())
