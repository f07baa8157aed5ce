"""Trains a language model of characters and writes with it, with its experts spread over ranks.

    pip install torch, and this project
    python examples/moe/train.py --ranks 2          (or torchrun --nproc-per-node 2 examples/moe/train.py)

Each rank trains on its own part of a batch. Attention, embeddings and router are on all ranks, which average their gradients; each
expert is on one rank, and gets the tokens of all. Beside it the same model is trained with all experts on all ranks, from the same
seed, on the same text. The losses of each step, and the logits with which the trained models write, may differ by TOLERANCE, else the
program fails.

Rows travel in bf16, and both models round them. All else is f64, because the two models sum
gradients of experts in different orders: in f64 the difference is far below the precision of a row,
so that both go the same way. In f32 both would learn as well, but part soon.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import alone
import parallel
import torch
import torch.distributed as dist
from decode import Decoder
from model import CONTEXT, EXPERTS, HIDDEN, Model
from torch.nn import functional as F
from uccl.ep import get_physical_domain_size

#: Losses were equal in all runs, of up to 100 steps. Longer runs may part, once a value is on the
#: edge between two bf16 values or, among weights, which travel in f32, between two f32 values.
TOLERANCE = 1e-6
SEQUENCES, RATE = 8, 3e-3
PROMPTS, GIVEN = 2, 8
TEXT = " ".join((Path(__file__).parents[2] / "LICENSE").read_text().split())
CHARACTERS = sorted(set(TEXT))


class Trainer:
    """A model and its optimizer, on all ranks of a group."""

    def __init__(self, group, device, mixture, is_spread):
        self.group, self.mixture = group, mixture
        self.model = Model(len(CHARACTERS), seed=0)
        if is_spread:
            self.model.keep_experts_of(group.rank(), group.size())
        self.model.to(device, torch.float64)
        # Gradients of spread experts come from the tokens of all ranks, and are on this rank alone.
        self.unshared = set(self.model.experts()) if is_spread else set()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def step(self, tokens):
        """Trains on tokens and returns the loss, a mean over ranks."""
        self.optimizer.zero_grad()
        logits = self.model(tokens[:, :-1], self.mixture)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        shared = [
            parameter.grad
            for parameter in self.model.parameters()
            if parameter not in self.unshared
        ]
        for sum_is_there in [
            dist.all_reduce(gradient, group=self.group, async_op=True) for gradient in shared
        ]:
            sum_is_there.wait()
        for parameter in self.model.parameters():
            parameter.grad /= self.group.size()
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=self.group)
        return total.item() / self.group.size()


@dataclass
class Outcome:
    """The results of a rank."""

    losses: list
    """Of each step: with spread experts, and with all experts on each rank."""
    prompt: str
    written: str
    """The characters after the prompt."""
    is_same: bool
    """Whether the model with all experts on each rank finds the same characters the likeliest."""
    off: float
    """The largest difference between the logits of the two models."""


def run(group, steps, length=CONTEXT, say=lambda line: None):
    """Trains both models. One of them writes texts of ``length`` characters, and the other checks
    them."""
    if EXPERTS % group.size():
        raise SystemExit(f"{EXPERTS} experts cannot be spread over {group.size()} ranks")
    nodes, _ = get_physical_domain_size(group)
    # Rows reach GPUs of other nodes through proxies; this example was never run that way.
    device = gpu_of_this_rank() if nodes == 1 else torch.device("cpu")
    many = parallel.ManyTokens(group, HIDDEN, EXPERTS, device)
    spread = Trainer(group, device, many, is_spread=True)
    whole = Trainer(group, device, alone.ManyTokens(group.size(), nodes), is_spread=False)
    losses = []
    for step in range(steps):
        tokens = batch(step, group.rank()).to(device)
        losses.append((spread.step(tokens), whole.step(tokens)))
        with_ep, without = losses[-1]
        off = abs(with_ep - without)
        say(
            f"step {step + 1:3}: loss {with_ep:.6f}, without expert parallelism {without:.6f}, off by {off:.1e}"
        )
    few = parallel.FewTokens(group, HIDDEN, EXPERTS, device, PROMPTS)
    prompts = batch(steps, group.rank())[:PROMPTS, :GIVEN]
    tokens, logits = Decoder(spread.model, few, PROMPTS, device).run(prompts, length)
    few.buffer.check()
    # Other ranks may still be in the last call.
    dist.barrier(group)
    with torch.no_grad():
        expected = whole.model(tokens[:, :-1].to(device), alone.FewTokens(group.size())).cpu()
    likeliest = expected.argmax(-1)[:, GIVEN - 1 :]
    return Outcome(
        losses,
        text_of(prompts[0]),
        text_of(tokens[0, GIVEN:]),
        torch.equal(tokens[:, GIVEN:], likeliest),
        float((logits - expected).abs().max()),
    )


def gpu_of_this_rank():
    """A GPU if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def batch(step, rank):
    """``[SEQUENCES, CONTEXT + 1]`` characters, as numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    numbers = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    starts = torch.randint(len(numbers) - CONTEXT, (SEQUENCES, 1), generator=generator)
    return numbers[starts + torch.arange(CONTEXT + 1)]


def text_of(numbers):
    return "".join(CHARACTERS[number] for number in numbers)


def work(steps):
    """The work of each rank."""
    rank = dist.get_rank()
    say = (lambda line: print(line, flush=True)) if rank == 0 else lambda line: None
    outcome = run(dist.group.WORLD, steps, say=say)
    off = max((abs(with_ep - without) for with_ep, without in outcome.losses), default=0)
    say(
        f"{outcome.prompt!r} goes on {outcome.written!r}; logits are off by {outcome.off:.1e} at most"
    )
    dist.destroy_process_group()
    if max(off, outcome.off) > TOLERANCE or not outcome.is_same:
        sys.exit(
            f"losses of rank {rank} are off by {off}, and logits by {outcome.off}: {TOLERANCE} is allowed"
        )


def work_in_process(rank, arguments, folder):
    torch.set_num_threads(max(1, torch.get_num_threads() // arguments.ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks
    )
    work(arguments.steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start; torchrun starts its own"
    )
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        work(arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work_in_process, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
