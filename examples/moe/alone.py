"""The same mixtures with all experts here. They round where rows would travel and sum in the same order, so that only mistakes differ."""

import torch


def rounded(x):
    """What is left of ``x`` after a journey, in f32. Its gradient is rounded on its way back."""
    return x.bfloat16().float()


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


def few_tokens(x, choices, weights, experts):
    """Rows of experts are rounded, then their sum, to which each is added by a fused multiply-add of f32."""
    made = rounded(experts.of_each(rounded(x).to(x.dtype).expand(len(experts.up), -1, -1)))
    tokens, total = torch.arange(len(x), device=x.device), torch.zeros_like(x, dtype=torch.float)
    for choice, weight in zip(choices.T, weights.float().T):
        total = (weight.double()[:, None] * made[choice, tokens].double() + total.double()).float()
    return rounded(total).to(x.dtype)
