"""A group of many ranks, in threads: calls of both interfaces with sums that are exact, on the CPU
and on the emulated GPU."""

from __future__ import annotations

from typing import Any

import torch
from thread_ranks import Rank

TOKENS, HIDDEN, TOP_K = 2, 128, 4
#: Seconds that a call waits: many ranks share few processors.
LIMIT = 100


class Many:
    """One rank's inputs. Each rank returns rows unchanged, and every rank draws the inputs of all."""

    def __init__(self, rank: Rank, device: str) -> None:
        self.rank, self.device, self.ranks = rank, device, rank.size()
        self.all_choices = [
            torch.rand((TOKENS, self.ranks), generator=torch.Generator().manual_seed(number)).topk(
                TOP_K
            )[1]
            for number in range(self.ranks)
        ]
        generator = torch.Generator().manual_seed(1000 + rank.rank())
        self.x = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=generator).bfloat16()
        self.chosen = self.all_choices[rank.rank()]
        #: Tensors that an emulated GPU may still use.
        self.kept: list[torch.Tensor] = []

    def there(self, buffer: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the buffer's device."""
        self.kept.append(tensor.to(buffer.device).clone())
        return self.kept[-1]

    def settle(self, buffer: Any) -> None:
        """Waits for this rank's calls."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()
            buffer.check()

    def arrived(self) -> int:
        """The number of tokens that come to this rank, which has one expert."""
        me = self.rank.rank()
        return sum(int((choices == me).any(1).sum()) for choices in self.all_choices)

    def same(self, out: torch.Tensor, copies: torch.Tensor) -> None:
        """Raises unless each sum has so many copies of its token."""
        assert torch.equal(out.cpu().float(), self.x.float() * copies), f"rank {self.rank.rank()}"


def first_interface(rank: Rank, device: str) -> None:
    """Both modes of one buffer, of which the last rank is then left out."""
    from uccl.ep import Buffer

    many = Many(rank, device)
    room = 2 * Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, many.ranks, many.ranks)
    buffer = Buffer(None, 0, room, low_latency_mode=True, comm=rank, device=device, timeout=LIMIT)
    lost = many.ranks - 1
    for is_left_out in (False, True):
        if is_left_out:
            rank.allgather(b"")
            if rank.rank() == lost:
                break
            buffer.low_latency_update_mask_buffer(lost, True)
        there = many.chosen != lost if is_left_out else torch.ones(TOKENS, TOP_K, dtype=torch.bool)
        copies = there.sum(1, keepdim=True).float()
        x, chosen = many.there(buffer, many.x), many.there(buffer, many.chosen)
        ones = many.there(buffer, torch.ones(TOKENS, TOP_K))
        rows, count, handle, *_ = buffer.low_latency_dispatch(
            x, chosen, TOKENS, many.ranks, use_fp8=False
        )
        out, _, _ = buffer.low_latency_combine(rows, chosen, ones, handle)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, many.ranks)
        got, *_, counts, made, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=chosen,
            topk_weights=ones,
        )
        normal, _, _ = buffer.combine(got, made)
        many.settle(buffer)
        if not is_left_out:
            assert count.tolist() == counts == [many.arrived()]
        many.same(out, copies)
        many.same(normal, copies)
    if rank.rank() != lost:
        status = torch.zeros(many.ranks, dtype=torch.int32, device=buffer.device)
        buffer.low_latency_query_mask_buffer(status)
        many.settle(buffer)
        assert status.tolist() == [0] * lost + [1]
    rank.allgather(b"")
    buffer.destroy()


def second_interface(rank: Rank, device: str) -> None:
    """Dispatches by token and by expert, and combines."""
    from uccl.ep import ElasticBuffer

    many = Many(rank, device)
    buffer = ElasticBuffer(
        None,
        1 << 20,
        num_max_tokens_per_rank=TOKENS,
        comm=rank,
        device=device,
        num_cpu_timeout_secs=LIMIT,
        num_gpu_timeout_secs=LIMIT,
    )
    for expand in (False, True):
        x, chosen = many.there(buffer, many.x), many.there(buffer, many.chosen)
        ones = many.there(buffer, torch.ones(TOKENS, TOP_K))
        rows, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=chosen, topk_weights=ones, num_experts=many.ranks, do_expand=expand
        )
        assert len(rows) == many.arrived()
        out, *_ = buffer.combine(rows, handle)
        many.settle(buffer)
        many.same(out, torch.full((TOKENS, 1), float(TOP_K)))
    rank.allgather(b"")
    buffer.destroy()
