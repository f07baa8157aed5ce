"""Tensors of a rank with a buffer on the CPU or on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from cases import Draw

NAN = float("nan")


def inputs_of(seed: int) -> Draw:
    """The generator of a case's inputs. Its seed is not the one that gave the number of ranks, or
    one would follow from the other."""
    return Draw(seed + 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(kinds[tensor.element_size()])


class OnDevice:
    """Moves tensors to where calls take them, and back."""

    buffer: Any

    def __init__(self, **keywords: Any) -> None:
        """``keywords`` are those of the buffer."""
        self.device = keywords.get("device", "cpu")
        self.is_on_gpu = self.device != "cpu"
        # Whether ranks are threads of one process.
        self.shares_context = "comm" in keywords

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the buffer's device."""
        self.settle()
        return tensor.to(self.buffer.device)

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that a call returned, on the CPU."""
        self.settle()
        return tensor.cpu()

    def reserve_on_comm(self, group: Any) -> None:
        """Has torch allocate memory for the communication stream, where ranks share a GPU's context:
        the driver allocates none while a kernel waits for another rank."""
        if not (self.shares_context and self.buffer.device.type == "cuda"):
            return
        with torch.cuda.stream(self.buffer.get_comm_stream()):
            sizes = [1 << 28, *[1 << 19] * 64]
            kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
            del kept
        group.allgather(b"")

    def settle(self) -> None:
        """Waits for this rank's calls, where ranks share a GPU's context: a copy behind a waiting
        kernel delays the copies of all threads, and with them the rank that the kernel waits
        for."""
        if self.shares_context:
            torch.cuda.current_stream().synchronize()
            # The error of a failed call says more than its results.
            self.buffer.check()

    def end(self, group: Any) -> None:
        """Destroys the buffer. On a GPU all calls of all ranks have succeeded then, and none is in
        flight."""
        if self.is_on_gpu:
            torch.cuda.current_stream().synchronize()
            self.buffer.check()
            if self.shares_context:
                group.allgather(b"")
            else:
                torch.distributed.barrier(group)
        self.buffer.destroy()
