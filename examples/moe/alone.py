"""The same mixtures with all experts here. They round where rows would travel and sum in the same order, so that only mistakes differ."""

import torch


def rounded(x):
    """What is left of ``x`` after a journey, in f32. Its gradient is rounded on its way back."""
    return x.bfloat16().float()


def nearest_of_24_bits(x):
    """f32 ``x`` with as many of its bits, as parts of low latency sums have them: the nearest."""
    power = (x.view(torch.int32) & ~0x7FFFFF).view(torch.float)
    return ((x + power * 2**-16).view(torch.int32) & ~0xFF).view(torch.float)


class ManyTokens:
    """As if the experts were on so many ranks of so many nodes. What the experts of a rank make of a token is summed there, then come the
    sums of nodes, then that of all."""

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
                of_node = of_node + rounded(experts(rows, choices.where(is_there, -1), weights, counts))
            total = total + rounded(of_node)
        return rounded(total).to(x.dtype)


class FewTokens:
    """As if the experts were on so many ranks. Rows of experts are rounded, then their sum. Of each rank rows are added by fused
    multiply-adds of f32, in the order of choices, and then what that makes, rounded to 24 bits, in the order of ranks' first choices."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, x, choices, weights, experts):
        count = len(experts.up)
        made = rounded(experts.of_each(rounded(x).to(x.dtype).expand(count, -1, -1)))
        tokens, total = torch.arange(len(x), device=x.device), torch.zeros_like(x, dtype=torch.float)
        ranks, weights = (choices // (count // self.ranks)).T, weights.float().double().T
        for first, rank in enumerate(ranks):
            part, is_first = torch.zeros_like(total), (ranks[:first] != rank).all(0)
            for choice, weight, other in list(zip(choices.T, weights, ranks))[first:]:
                more = (weight[:, None] * made[choice, tokens].double() + part.double()).float()
                part = torch.where((other == rank)[:, None], more, part)
            total = torch.where(is_first[:, None], total + nearest_of_24_bits(part), total)
        return rounded(total).to(x.dtype)
