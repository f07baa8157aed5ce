"""The same mixtures with all experts on this rank. They round where rows would travel and sum in
the same order, so that any difference is a mistake."""

import torch


def rounded(x):
    """Rounds ``x`` to bf16, as rows travel, and returns f32. The gradient is rounded too."""
    return x.bfloat16().float()


def nearest_of_24_bits(x):
    """Rounds f32 ``x`` to the nearest value of 24 bits, as low latency mode rounds partial sums."""
    power = (x.view(torch.int32) & ~0x7FFFFF).view(torch.float)
    return ((x + power * 2**-16).view(torch.int32) & ~0xFF).view(torch.float)


class ManyTokens:
    """Computes as if the experts were on ``ranks`` ranks of ``nodes`` nodes. Each rank sums the
    outputs of its experts for a token, each node sums those of its ranks, and the nodes' sums are
    added."""

    def __init__(self, ranks, nodes):
        self.ranks, self.nodes = ranks, nodes

    def __call__(self, x, choices, weights, experts):
        count = len(experts.up)
        firsts = torch.arange(0, count, count // self.ranks).view(self.nodes, -1)
        sent, weights, total = rounded(x), weights.float(), 0
        for firsts_of_node in firsts.tolist():
            passed_on, of_node = rounded(sent), 0
            for first in firsts_of_node:
                is_there = (choices >= first) & (choices < first + count // self.ranks)
                counts = torch.bincount(choices[is_there], minlength=count).tolist()
                rows = rounded(passed_on).to(x.dtype)
                of_node = of_node + rounded(
                    experts(rows, choices.where(is_there, -1), weights, counts)
                )
            total = total + rounded(of_node)
        return rounded(total).to(x.dtype)


class FewTokens:
    """Computes as if the experts were on ``ranks`` ranks. The outputs of experts are rounded, and
    so is their sum. Fused multiply-adds of f32 add the rows of each rank, in the order of choices.
    The ranks' sums are rounded to 24 bits and added in the order of the ranks' first choices."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, x, choices, weights, experts):
        count = len(experts.up)
        made = rounded(experts.of_each(rounded(x).to(x.dtype).expand(count, -1, -1)))
        tokens, total = (
            torch.arange(len(x), device=x.device),
            torch.zeros_like(x, dtype=torch.float),
        )
        ranks, weights = (choices // (count // self.ranks)).T, weights.float().double().T
        for first, rank in enumerate(ranks):
            part, is_first = torch.zeros_like(total), (ranks[:first] != rank).all(0)
            for choice, weight, other in list(zip(choices.T, weights, ranks))[first:]:
                more = (weight[:, None] * made[choice, tokens].double() + part.double()).float()
                part = torch.where((other == rank)[:, None], more, part)
            total = torch.where(is_first[:, None], total + nearest_of_24_bits(part), total)
        return rounded(total).to(x.dtype)
