"""A small transformer over characters. Its feed-forward is a mixture of experts. A *mixture* brings
tokens to experts: it is a function of the tokens, their choices, the choices' weights, and the
experts on this rank."""

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN = 128  # low latency mode takes multiples of 128
HEADS, BLOCKS, CONTEXT = 4, 2, 64
EXPERTS, TOP_K, INNER = 8, 2, 256


class Experts(nn.Module):
    """Feed-forward networks, all or those of one rank."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * INNER**-0.5)

    def keep(self, first, count):
        """Keeps ``count`` experts from ``first`` on and drops the others."""
        self.up, self.down = (
            nn.Parameter(weights.detach()[first : first + count].clone())
            for weights in (self.up, self.down)
        )

    def forward(self, rows, choices, weights, counts):
        """Sends each of ``rows`` ``[m, H]`` through its chosen experts of these (``choices``
        ``[m, K]``, -1 for none), and sums the weighted outputs. ``counts`` has the number of rows
        of each expert."""
        row, choice = (choices >= 0).nonzero(as_tuple=True)
        order = choices[row, choice].argsort(stable=True)
        row, choice = row[order], choice[order]
        grouped = rows.index_select(0, row).split(counts)
        made = [F.silu(group @ up) @ down for group, up, down in zip(grouped, self.up, self.down)]
        return torch.zeros_like(rows).index_add(
            0, row, torch.cat(made) * weights[row, choice, None]
        )

    def of_each(self, rows):
        """``[E, m, H]``: ``m`` rows for each expert."""
        return torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        """Sequences ``[B, T, H]``."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )

    def step(self, x, position, cache):
        """One token of each sequence, ``[B, H]``. ``cache`` has the keys and values of those before, and gets this one's."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, 1, -1)).chunk(3, dim=1)
        keys, values = cache
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        known = torch.arange(CONTEXT, device=x.device) <= position
        return self.out(
            F.scaled_dot_product_attention(q, keys, values, attn_mask=known[None, :]).flatten(1)
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.attention, self.experts = Attention(), Experts()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def feed(self, x, mixture):
        """Tokens ``[n, H]`` through the experts that the router chooses."""
        normed = self.norms[1](x)
        weights, choices = self.router(normed).softmax(-1).topk(TOP_K)
        return x + mixture(normed, choices, weights / weights.sum(-1, keepdim=True), self.experts)

    def forward(self, x, mixture):
        x = x + self.attention(self.norms[0](x))
        return self.feed(x.flatten(0, 1), mixture).view_as(x)

    def step(self, x, position, cache, mixture):
        return self.feed(x + self.attention.step(self.norms[0](x), position, cache), mixture)


class Model(nn.Module):
    def __init__(self, characters, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.tokens = nn.Embedding(characters, HIDDEN)
        self.positions = nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.out = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, characters, bias=False)

    def keep_experts_of(self, rank, ranks):
        """Drops the experts of all other ranks."""
        for block in self.blocks:
            block.experts.keep(rank * (EXPERTS // ranks), EXPERTS // ranks)

    def experts(self):
        """The parameters of all experts on this rank."""
        return [parameter for block in self.blocks for parameter in block.experts.parameters()]

    def forward(self, tokens, mixture):
        """Maps tokens ``[B, T]`` to the next characters' logits, ``[B, T, characters]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mixture)
        return self.out(self.norm(x))

    def caches(self, sequences):
        """For :meth:`step`: keys and values of each block."""
        shape = (2, sequences, HEADS, CONTEXT, HIDDEN // HEADS)
        return [self.out.weight.new_zeros(shape) for _ in self.blocks]

    def step(self, tokens, position, caches, mixture):
        """Maps a token of each sequence, ``[B]``, at ``position`` ``[1]``, to the next logits."""
        x = self.tokens(tokens) + self.positions(position)
        for block, cache in zip(self.blocks, caches):
            x = block.step(x, position, cache, mixture)
        return self.out(self.norm(x))
