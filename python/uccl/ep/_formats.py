"""Output tensors of low latency mode, and the quantisation of rows on the way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from uccl.ep._group import CPU, address, align, check
from uccl.ep._host.memory import Memory

#: Channels that share a scale in FP8.
GROUP = 128
#: Rows of a tile of scales.
TILE = 128


@dataclass(frozen=True)
class Format:
    """The format of quantised rows: a name that the engine knows, and NVFP4's global scale."""

    kind: str = "bytes"
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

    def arriving(self, memory: Memory, runtime: Any, shape: tuple[int, int, int]) -> Arriving:
        """Output tensors for ``(local experts, rows, hidden)``."""
        local, rows, hidden = shape
        if self.kind == "nvfp4":
            tile_rows = align(rows, TILE) // TILE
            packed = memory.empty((local, rows, hidden // 2), torch.uint8)
            scales = memory.empty((local, tile_rows, hidden // 64, 32, 4, 4), torch.float8_e4m3fn)
            returned = packed.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)
            return Arriving(packed, returned, {"tiles": (address(scales), tile_rows)})
        if self.kind == "bytes":
            values = memory.shared(runtime, shape, torch.bfloat16)
            return Arriving(values, values, {})
        values = memory.shared(runtime, shape, torch.float8_e4m3fn)
        is_packed = self.kind == "exponent"
        words = hidden // (4 * GROUP if is_packed else GROUP)
        scales = memory.empty((local, words, rows), torch.int32 if is_packed else torch.float32)
        strides = address(scales), 1, (words - 1) * rows, rows
        return Arriving(values, (values, scales.mT), {"scales": strides})


#: The formats without a global scale, by kind, made once.
UNSCALED = {kind: Format(kind) for kind in ("bytes", "exact", "power", "exponent")}


@dataclass
class Arriving:
    """Output tensors of a dispatch."""

    values: torch.Tensor
    """The rows, expert by expert."""
    returned: Any
    """The tensors that callers get."""
    scales: dict[str, Any]
    """The layout of scales, as arguments of the engine."""
