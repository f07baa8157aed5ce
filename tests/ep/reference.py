"""What dispatch and combine must give, slowly and plainly, from the inputs of all ranks.

``experts[r]`` is rank ``r``'s ``[n, K]`` of choices, ``x[r]`` its ``[n, H]``. Ranks have equal shares of experts, in order.
"""

from __future__ import annotations

import torch

GROUP = 128


def owner(expert: int, num_experts: int, ranks: int) -> int:
    """The rank of an expert."""
    return expert // (num_experts // ranks)


def quantise(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, H]`` bf16 to e4m3 and inverse scales ``[n, H/128]`` f32 (``exact``, ``power``) or ``[n, H/512]`` i32 (``exponent``)."""
    groups = x.float().view(len(x), -1, GROUP)
    ratio = groups.abs().amax(-1).clamp(min=1e-4)
    if kind == "exact":
        # A number over a tensor would be its reciprocal times the number, with two roundings.
        scale, inverse = torch.full_like(ratio, 448.0) / ratio, ratio / 448.0
    else:
        mantissa, exponent = torch.frexp(ratio / 448.0)
        exponent = exponent - (mantissa == 0.5).int()
        inverse = torch.ldexp(torch.ones_like(ratio), exponent)
        scale = torch.ldexp(torch.ones_like(ratio), -exponent)
    scaled = (groups * scale.unsqueeze(-1)).clamp(-448, 448)
    quantised = scaled.to(torch.float8_e4m3fn).view(x.shape)
    if kind != "exponent":
        return quantised, inverse
    exponents = (exponent + 127).view(len(x), -1, 4).to(torch.int64)
    packed = (exponents << torch.tensor([0, 8, 16, 24])).sum(-1)
    return quantised, packed.to(torch.int32)


def log_format(x: torch.Tensor) -> torch.Tensor:
    """Rows of bf16 after a way as ten bits a value."""
    groups = x.view(len(x), -1, GROUP)
    magnitude = groups.double().abs()
    high = magnitude.amax(-1, keepdim=True).log2()
    low = torch.maximum(magnitude.amin(-1, keepdim=True).log2(), high - 32)
    step = (high - low) / 510
    code = ((magnitude.log2() - low) / step + 0.5).floor().clamp(0, 510)
    value = torch.exp2(low + code * step) * groups.double().sign()
    value = torch.where(magnitude == 0, torch.zeros_like(value), value).float().bfloat16()
    is_packed = (high < 0) & (magnitude.amin(-1, keepdim=True) < magnitude.amax(-1, keepdim=True))
    return torch.where(is_packed, value, groups).view(x.shape)


def sent(experts: list[torch.Tensor], num_experts: int, me: int) -> list[tuple[int, int]]:
    """What arrives at a rank: (rank, token), in order."""
    ranks = len(experts)
    return [
        (rank, token)
        for rank in range(ranks)
        for token, row in enumerate(experts[rank].tolist())
        if any(e >= 0 and owner(e, num_experts, ranks) == me for e in row)
    ]


def by_expert(
    experts: list[torch.Tensor], num_experts: int, me: int
) -> list[list[tuple[int, int, int]]]:
    """For each expert of a rank: (rank, token, choice), in order of rank and token."""
    local = num_experts // len(experts)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(local)]
    for rank, choices in enumerate(experts):
        for token, row in enumerate(choices.tolist()):
            for k, expert in enumerate(row):
                if expert >= 0 and expert // local == me:
                    rows[expert - me * local].append((rank, token, k))
    return rows


def fused(total: torch.Tensor, weight: float, row: torch.Tensor) -> torch.Tensor:
    """``total + weight * row`` in f32 with one rounding: the product is exact in f64."""
    return (row.double() * float(weight) + total.double()).float()


def combine_weighted(
    rows: dict[tuple[int, int], torch.Tensor], choices: torch.Tensor, weights: torch.Tensor, hidden: int
) -> torch.Tensor:
    """Choice by choice. ``rows[token, k]`` is what the expert of this choice made of the token."""
    out = torch.zeros(len(choices), hidden)
    for token, row in enumerate(choices.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                out[token] = fused(out[token], weights[token, k], rows[token, k])
    return out.bfloat16()


def in_order(terms: list[torch.Tensor], bias: list[torch.Tensor], hidden: int) -> torch.Tensor:
    """The sum of a token's terms in f32, one after the other, from its biases on; rounded once."""
    total = torch.zeros(hidden)
    for term in [*bias, *terms]:
        total = total + term.float()
    return total.bfloat16()


def at_nodes(
    terms: list[tuple[int, torch.Tensor]], nodes: tuple[int, int], hidden: int
) -> list[torch.Tensor]:
    """A token's terms, which are of ranks, after relays: the sum of each node's, rounded, in the order of their last terms.
    There are relays where there are several nodes of several ranks."""
    count, ranks = nodes
    if count == 1 or ranks == 1:
        return [term for _, term in terms]
    of: dict[int, list[torch.Tensor]] = {}
    for rank, term in terms:
        # The node moves behind those whose last term comes before.
        of[rank // ranks] = [*of.pop(rank // ranks, []), term]
    return [in_order(rows, [], hidden) for rows in of.values()]
