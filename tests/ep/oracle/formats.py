"""Numbers of few bits: E4M3, powers of two, E2M1, LogFMT-10, and sums that are rounded once."""

from __future__ import annotations

import torch

#: The largest magnitude of E4M3.
MOST_E4M3 = 448.0
#: Channels that have one scale in FP8 and one decision in LogFMT.
BLOCK = 128
#: The least amax of a block: a block of smaller magnitudes is quantised with this one.
LEAST_AMAX = 1e-4
#: Values that have one scale in NVFP4.
NARROW_BLOCK = 16
#: The magnitudes of E2M1, by code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_magnitudes() -> list[float]:
    """The finite magnitudes of E4M3 by code: four bits of exponent (bias 7), three of fraction; 127
    is NaN."""
    magnitudes = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        if exponent == 0:
            magnitudes.append(fraction / 8 * 2.0**-6)
        else:
            magnitudes.append((1 + fraction / 8) * 2.0 ** (exponent - 7))
    return magnitudes


def nearest_code(magnitudes: torch.Tensor, table: list[float]) -> torch.Tensor:
    """The code of the nearest magnitude in an ascending table; of two as near, the even one; at
    most the last.

    Differences of such magnitudes are exact in f64.
    """
    values = torch.tensor(table, dtype=torch.float64)
    wanted = magnitudes.double().clamp(max=table[-1])
    above = torch.bucketize(wanted, values).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - wanted, wanted - values[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(to_above < to_below, above, below)
    return torch.where(to_above == to_below, even, code)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """f32 of any shape as bytes of E4M3: to nearest, ties to even, saturating."""
    code = nearest_code(values.abs(), e4m3_magnitudes())
    return torch.where(torch.signbit(values), code + 128, code).to(torch.uint8)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of E4M3 as f32."""
    table = torch.tensor([*e4m3_magnitudes(), float("nan")])
    magnitudes = table[(codes & 127).long()]
    return torch.where(codes >= 128, -magnitudes, magnitudes)


def blocks_of(x: torch.Tensor, size: int) -> torch.Tensor:
    """``[n, H]`` as ``[n, H/size, size]``; n may be 0."""
    return x.view(x.shape[0], x.shape[1] // size, size)


def amax_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """``[n, H]`` to ``[n, H/128]`` f32: the largest magnitude of each block, at least 1e-4."""
    blocks = blocks_of(x.float(), BLOCK)
    return blocks.abs().amax(dim=2).clamp(min=torch.tensor(LEAST_AMAX))


def next_power_of_two(values: torch.Tensor) -> torch.Tensor:
    """Positive normal f32 to the exponent of the least power of two that is not below each, i32."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) - 127
    return torch.where((bits & 0x7FFFFF) != 0, exponent + 1, exponent)


def quantise(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, H]`` bf16 to ``[n, H]`` bytes of E4M3, and ``[n, H/128]`` f32 factors that decode them.

    Values are multiplied by 448 / amax. With ``round_scale`` both factors are powers of two.
    """
    amax = amax_of_blocks(x)
    if round_scale:
        exponent = next_power_of_two(amax / torch.full_like(amax, MOST_E4M3))
        inverse = torch.ldexp(torch.ones_like(amax), exponent)
        scale = torch.ldexp(torch.ones_like(amax), -exponent)
    else:
        # Both operands are tensors: torch divides a number by a tensor as number * (1 / tensor),
        # which rounds twice.
        inverse = amax / torch.full_like(amax, MOST_E4M3)
        scale = torch.full_like(amax, MOST_E4M3) / amax
    blocks = blocks_of(x.float(), BLOCK)
    return to_e4m3(blocks * scale[:, :, None]).view(x.shape), inverse


def to_ue8m0(powers: torch.Tensor) -> torch.Tensor:
    """``[n, S]`` f32 powers of two to ``[n, S/4]`` i32: four exponents in a word, the first
    lowest."""
    exponents = blocks_of(powers.view(torch.int32) >> 23, 4).long()
    words = torch.zeros(exponents.shape[:2], dtype=torch.int64)
    for place in range(4):
        words |= exponents[:, :, place] << (8 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def to_nvfp4(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, H]`` bf16 to ``[n, H/2]`` bytes of two E2M1 codes, the first low, and ``[n, H/16]``
    bytes of E4M3 scales.

    A scale is ``amax / 6 * global_scale`` of its sixteen values.
    """
    blocks = blocks_of(x.float(), NARROW_BLOCK)
    factor = torch.tensor(global_scale, dtype=torch.float32)
    scales = to_e4m3(blocks.abs().amax(dim=2) / E2M1[-1] * factor)
    decoded = from_e4m3(scales)
    inverse = torch.where(decoded == 0, torch.zeros_like(decoded), factor / decoded)
    scaled = blocks * inverse[:, :, None]
    code = nearest_code(scaled.abs(), list(E2M1))
    code = blocks_of(torch.where(torch.signbit(scaled), code + 8, code).view(x.shape), 2)
    return (code[:, :, 0] | code[:, :, 1] << 4).to(torch.uint8), scales


def through_logfmt(row: torch.Tensor) -> torch.Tensor:
    """``[H]`` bf16, packed as LogFMT-10 and unpacked, bf16.

    A block of 128 is sent unpacked if a magnitude is 1 or more, or if all are the same. Otherwise a
    magnitude becomes the nearest of 511, by logarithm; of two that are equally near (to a millionth
    of a step) the larger. The 511 have evenly spaced logarithms, from the smallest of the block, or
    32 below the largest, to the largest. A zero stays zero.
    """
    blocks = row.view(-1, BLOCK).double()
    logarithms = blocks.abs().log2()
    top, least = logarithms.amax(1, keepdim=True), logarithms.amin(1, keepdim=True)
    bottom = torch.maximum(least, top - 32)
    step = (top - bottom) / 510
    # Logarithms are rounded, so the middle of two magnitudes may be found a little below it.
    code = torch.floor((logarithms - bottom) / step + 0.5 + 2.0**-20).clamp(min=0)
    near = torch.copysign(torch.exp2(bottom + code * step), blocks)
    is_packed = (top < 0) & (least < top)
    out = torch.where(is_packed & (blocks != 0), near, blocks)
    return out.float().bfloat16().view(row.shape)


def nearest_of_24_bits(x: torch.Tensor) -> torch.Tensor:
    """f32 rounded to its upper 24 bits, ties away from zero; subnormal numbers are truncated."""
    exact = x.double()
    # ``frexp`` has a number below 1; of the 24 bits 16 are of the significand.
    spacing = torch.ldexp(torch.ones_like(exact), torch.frexp(exact.abs()).exponent - 16)
    tiny = 2.0**-141
    cut = (exact / tiny).trunc() * tiny
    nearest = ((exact.abs() / spacing + 0.5).floor() * spacing).copysign(exact)
    return torch.where(
        exact.isfinite(), torch.where(exact.abs() < 2.0**-126, cut, nearest), exact
    ).float()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of f32, rounded once.

    The product of two f32 is exact in f64. The sum is rounded to odd there, so that rounding it
    once more to f32 gives the rounding of the exact sum.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # The exact error of the sum (Knuth).
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    bits = total.view(torch.int64)
    # Towards the exact sum: a larger magnitude has a larger word, for either sign.
    outward = (error > 0) == (total > 0)
    towards = torch.where(outward, bits + 1, bits - 1)
    inexact_even = torch.isfinite(total) & (error != 0) & (bits % 2 == 0)
    return torch.where(inexact_even, towards, bits).view(torch.float64).float()
