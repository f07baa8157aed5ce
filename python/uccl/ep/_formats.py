"""Output tensors of low latency mode, and the quantisation of rows on the way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from uccl.ep._checks import CPU, check
from uccl.ep._tensors import RowScales, ScaleTiles, address, align

#: Channels that share a scale in FP8.
GROUP = 128
#: Rows of a tile of scales.
TILE = 128


class Allocator(Protocol):
    """The memory of a backend's output tensors."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``."""

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, for rows that a combine may send back without a copy."""


@dataclass(frozen=True)
class Format:
    """The format of rows on the way to their experts: the engine's name, and NVFP4's global
    scale."""

    name: str = "bytes"
    global_scale: torch.Tensor | float | None = None

    @staticmethod
    def of(
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        use_nvfp4: bool,
        x_global_scale: torch.Tensor | float | None,
    ) -> Format:
        """The format that callers' arguments ask for. NVFP4 takes precedence, as FP8 is the
        callers' default."""
        if use_ue8m0 and not round_scale:
            raise ValueError("use_ue8m0 needs round_scale")
        if use_nvfp4:
            return Format("nvfp4", x_global_scale)
        if x_global_scale is not None:
            raise ValueError("x_global_scale needs use_nvfp4")
        if not use_fp8:
            return UNSCALED["bytes"]
        return UNSCALED["exponent" if use_ue8m0 else "power" if round_scale else "exact"]

    def global_scale_on(self, device: torch.device) -> tuple[float, int]:
        """NVFP4's global scale for calls on a device, 1 if there is none: a number, or an address
        if it is in a GPU's memory."""
        scale = self.global_scale
        if scale is None:
            return 1.0, 0
        if not isinstance(scale, torch.Tensor):
            return float(scale), 0
        if scale.numel() != 1:
            raise ValueError(
                f"x_global_scale has the shape {tuple(scale.shape)}, and should have one element"
            )
        if scale.device == CPU:
            return float(scale.item()), 0
        check("x_global_scale", scale.view(1), (1,), torch.float32, device=device)
        return 1.0, scale.data_ptr()

    def row_len(self, hidden: int) -> int:
        """The length of a row for the engine: its bytes, or its values if they are quantised."""
        return 2 * hidden if self.name == "bytes" else hidden

    def recv_tensors(self, allocator: Allocator, shape: tuple[int, int, int]) -> RecvTensors:
        """Output tensors for ``(local experts, rows, hidden)``."""
        local, rows, hidden = shape
        if self.name == "nvfp4":
            tile_rows = align(rows, TILE) // TILE
            packed = allocator.empty((local, rows, hidden // 2), torch.uint8)
            tiles = (local, tile_rows, hidden // 64, 32, 4, 4)
            scales = allocator.empty(tiles, torch.float8_e4m3fn)
            returned = packed.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)
            return RecvTensors(packed, returned, {"tiles": ScaleTiles(address(scales), tile_rows)})
        if self.name == "bytes":
            values = allocator.shared(shape, torch.bfloat16)
            return RecvTensors(values, values, {})
        values = allocator.shared(shape, torch.float8_e4m3fn)
        is_packed = self.name == "exponent"
        words = hidden // (4 * GROUP if is_packed else GROUP)
        scales = allocator.empty((local, words, rows), torch.int32 if is_packed else torch.float32)
        strides = RowScales(address(scales), 1, rows, expert_stride=(words - 1) * rows)
        return RecvTensors(values, (values, scales.mT), {"scales": strides})


#: The formats without a global scale, by name, made once.
UNSCALED = {name: Format(name) for name in ("bytes", "exact", "power", "exponent")}


@dataclass
class RecvTensors:
    """Output tensors of a dispatch in low latency mode."""

    rows: torch.Tensor
    """The rows, expert by expert."""
    returned: Any
    """The tensors that callers get."""
    scale_args: dict[str, Any]
    """The layout of scales, as arguments of the engine."""
