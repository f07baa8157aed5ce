"""The calls that frameworks make of ``nixl_ep``, in their order and with their keywords, and the
fields that they read of the results: vLLM 0.33.0, SGLang 0.5.23, and NIXL EP's own elastic test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import nixl_ep_ranks  # noqa: E402
from nixl_ep_ranks import HIDDEN, LOCAL, ROOM, TOKENS, Here, Inputs, dies, moved  # noqa: E402
from test_nixl_ep import ALL, folder, world  # noqa: E402, F401

pytestmark = [pytest.mark.xdist_group("nixl_ep"), pytest.mark.timeout(300)]


class Vllm:
    """vLLM's manager: ``distributed/device_communicators/all2all.py`` of 0.33.0, and what calls it
    there."""

    def __init__(self, here: Here, size: int, store: Any) -> None:
        """``_init_buffer``, all2all.py:449-491."""
        from nixl_ep import Buffer

        self.here, self.size = here, size
        num_rdma_bytes = Buffer.get_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=TOKENS,
            hidden=HIDDEN,
            num_ranks=ROOM,
            num_experts=ROOM * LOCAL,
        )
        self.buffer = Buffer(rank=here.rank, tcp_store_group=store)
        self.buffer.update_memory_buffers(
            num_ranks=ROOM, num_experts_per_rank=LOCAL, num_rdma_bytes=num_rdma_bytes
        )
        here.buffer = self.buffer
        self.buffer.connect_ranks(list(range(size)))
        self.connected = self.active = size
        self.mask = torch.zeros(ROOM, device=here.device, dtype=torch.int32)
        self.last_mask: Any = None

    def stage(self, size: int, store: Any) -> None:
        """``stage_ep_size``, all2all.py:493-504, 531-543, for elastic_execute.py:294."""
        if size > self.connected:
            self.buffer.set_tcp_store_group(store)
            self.buffer.connect_ranks(list(range(self.connected, size)), activate=False)
            self.connected = size

    def commit(self, size: int, store: Any) -> None:
        """``commit_ep_size``, all2all.py:506-529, 545-557, for elastic_execute.py:552."""
        self.buffer.set_tcp_store_group(store)
        if size < self.connected:
            self.buffer.disconnect_ranks(list(range(size, self.connected)))
            self.connected, self.active = size, min(self.active, size)
        for rank in range(self.active, size):
            self.buffer.update_mask_buffer(rank, mask=False)
        self.active = self.size = size

    def warm_up(self) -> None:
        """``mask_remote_ranks``, all2all.py:559-572, around the calls of elastic_execute.py:717-730:
        a new worker's, while all others go on."""
        peers = [rank for rank in range(self.size) if rank != self.here.rank]
        for rank in peers:
            self.buffer.update_mask_buffer(rank, mask=True)
        for seed in range(3):
            self.layer(seed, [self.here.rank])
        for rank in peers:
            self.buffer.update_mask_buffer(rank, mask=False)

    def has_fault(self) -> bool:
        """``query_fault``, all2all.py:618-635."""
        self.buffer.query_mask_buffer(self.mask)
        self.here.settle()
        current = self.mask[: self.active]
        if self.last_mask is None or self.last_mask.shape != current.shape:
            self.last_mask = torch.zeros_like(current)
        return bool((current != self.last_mask).any())

    def clean(self) -> None:
        """``clean_buffers``, all2all.py:637-647."""
        self.buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        self.buffer.clean_mask_buffer()
        self.here.settle()
        self.last_mask = None

    def layer(self, seed: int, there: list[int], use_fp8: bool = False) -> None:
        """A layer of experts: prepare_finalize/nixl_ep.py:251-262 and 347-356, with
        all2all_utils.py:451-454's capacity. Each expert returns its rows."""
        given = Inputs(seed, there)
        x, ids, weights = (
            moved(self.here, each[self.here.rank])
            for each in (given.xs, given.choices, given.weights)
        )
        expert_x, expert_num_tokens, handle, _, hook = self.buffer.dispatch(
            x,
            ids,
            TOKENS,
            LOCAL * ROOM,
            use_fp8=use_fp8,
            round_scale=False,
            use_ue8m0=False,
            async_finish=False,
            return_recv_hook=True,
        )
        hook()
        self.here.settle()
        if use_fp8:
            payload, scales = expert_x
            assert payload.is_contiguous()
            # prepare_finalize/nixl_ep.py:32-43.
            scales = scales.contiguous().view(LOCAL, -1, 1)
            rows = payload.to(torch.float32).view(LOCAL, -1, 128) * scales
            expert_x = rows.view(payload.size()).bfloat16()
        num_experts, max_tokens, hidden = expert_x.size()
        assert (num_experts, max_tokens, hidden) == (LOCAL, ROOM * TOKENS, HIDDEN)
        expert_x = expert_x.view((-1, hidden)).view((num_experts, -1, hidden))
        output = moved(self.here, torch.empty_like(x))
        _, _, hook = self.buffer.combine(
            moved(self.here, expert_x),
            ids,
            weights,
            handle,
            async_finish=False,
            zero_copy=False,
            return_recv_hook=True,
            out=output,
        )
        hook()
        self.here.settle()
        is_there = (ids >= 0) & torch.isin(ids // LOCAL, torch.tensor(there, device=ids.device))
        wanted = x.float() * (weights * is_there).sum(1, keepdim=True)
        torch.testing.assert_close(output.float(), wanted, rtol=0.1, atol=0.1)
        assert expert_num_tokens.dtype == torch.int32


def vllm_starts(here: Here, size: int) -> None:
    here.state = Vllm(here, size, here.store)


def vllm_layers(here: Here, there: list[int]) -> None:
    for seed in range(4):
        here.state.layer(seed, there, use_fp8=bool(seed % 2))
    assert not here.state.has_fault()


def vllm_stages_beside_its_calls(here: Here, size: int, there: list[int]) -> None:
    """elastic_execute.py:208-223: the connection is made on a thread of its own."""
    failures: list[BaseException] = []

    def stage() -> None:
        try:
            here.state.stage(size, torch.distributed.PrefixStore("standby", here.store))
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=stage)
    thread.start()
    # All ranks make as many calls, however long the connection takes.
    vllm_layers(here, there)
    thread.join(60)
    assert not thread.is_alive() and not failures, failures
    vllm_layers(here, there)


def vllm_new_worker(here: Here, size: int) -> None:
    """A new worker makes its buffer, and warms up while the others go on (elastic_execute.py:696)."""
    here.state = Vllm(here, size, torch.distributed.PrefixStore("standby", here.store))
    here.state.warm_up()


def vllm_commits(here: Here, size: int) -> None:
    here.state.commit(size, torch.distributed.PrefixStore("active", here.store))


def vllm_ends(here: Here) -> None:
    """``destroy``, all2all.py:607-612: the buffer itself stays."""
    here.state.buffer.set_tcp_store_group(None)


def test_vllm_scales_up_and_down(world):  # noqa: F811
    group = world()
    group.start(0, 1)
    group.run([0, 1], vllm_starts, 2)
    group.run([0, 1], vllm_layers, [0, 1])
    group.start(2, 3)
    stages = {rank: (vllm_stages_beside_its_calls, 4, [0, 1]) for rank in (0, 1)}
    group.together(stages | {rank: (vllm_new_worker, 4) for rank in (2, 3)})
    # The new workers are ready; only the old ones commit (elastic_execute.py:597-612).
    group.run([0, 1], vllm_commits, 4)
    group.run(ALL, vllm_layers, ALL)
    group.run([0, 1], vllm_ends)
    # Down again: those that stay disconnect the others, which end.
    group.run([0, 1, 2], vllm_commits, 3)
    group.leave(3)
    group.run([0, 1, 2], vllm_layers, [0, 1, 2])


def vllm_survives(here: Here, there: list[int]) -> None:
    """The masks tell that a rank was lost. Buffers are cleaned, and the next call finds it again."""
    for seed in range(3):
        nixl_ep_ranks.calls(here, seed, there)
    assert here.state.has_fault()
    here.state.clean()
    for seed in range(2):
        nixl_ep_ranks.calls(here, seed, there)
    assert here.state.has_fault()


def test_vllm_notices_a_lost_rank(world):  # noqa: F811
    group = world()
    group.start(0, 1, 2)
    group.run([0, 1, 2], vllm_starts, 3)
    group.tell(1, dies, "before", [0, 1, 2])
    for rank in (0, 2):
        group.tell(rank, vllm_survives, [0, 1, 2])
    group.lose(1)
    for rank in (0, 2):
        group.heard(rank)
    group.run([0, 2], nixl_ep_ranks.steps, [5], [0, 2])


class Sglang:
    """SGLang's buffer and dispatcher: ``srt/layers/moe/token_dispatcher/nixl.py`` of 0.5.23."""

    def __init__(self, here: Here, size: int, return_recv_hook: bool) -> None:
        """``get_nixl_buffer``, nixl.py:134-193."""
        from nixl_ep import Buffer, topk_idx_t

        assert isinstance(topk_idx_t, torch.dtype)
        self.here, self.size, self.hook = here, size, return_recv_hook
        num_rdma_bytes = Buffer.get_rdma_size_hint(TOKENS, HIDDEN, ROOM, ROOM * LOCAL)
        self.buffer = Buffer(rank=here.rank, tcp_store_group=here.store)
        self.buffer.update_memory_buffers(
            num_ranks=ROOM, num_experts_per_rank=LOCAL, num_rdma_bytes=num_rdma_bytes
        )
        here.buffer = self.buffer
        self.buffer.set_tcp_store_group(here.store)
        self.buffer.connect_ranks(list(range(size)))
        assert self.buffer.group_size == ROOM
        self.connected = size
        self.mask = torch.zeros(ROOM, dtype=torch.int32, device=here.device)

    def layer(self, seed: int, there: list[int], use_fp8: bool) -> list[int]:
        """``_dispatch_core``, ``dispatch_b``, ``_combine_core`` and ``combine_b``, nixl.py:359-404
        and 406-429. Returns the active ranks, as the dispatcher notes them."""
        # ``_update_connections``, nixl.py:109-112: ranks are connected in the next dispatch.
        if self.size > self.connected:
            self.buffer.set_tcp_store_group(self.here.store)
            self.buffer.connect_ranks(list(range(self.connected, self.size)))
            self.connected = self.size
        given = Inputs(seed, there)
        x, ids, weights = (
            moved(self.here, each[self.here.rank])
            for each in (given.xs, given.choices, given.weights)
        )
        hidden_states, masked_m, handle, event, hook = self.buffer.dispatch(
            x,
            ids,
            TOKENS,
            LOCAL * self.size,
            use_fp8=use_fp8,
            async_finish=not self.hook,
            return_recv_hook=self.hook,
            round_scale=False,
            use_ue8m0=False,
        )
        hook() if self.hook else event.current_stream_wait()
        self.here.settle()
        if isinstance(hidden_states, tuple):
            payload, scales = hidden_states
            assert scales.shape == (LOCAL, self.size * TOKENS, HIDDEN // 128)
            hidden_states = (payload.float() * scales.repeat_interleave(128, -1)).bfloat16()
        assert hidden_states.shape == (LOCAL, self.size * TOKENS, HIDDEN)
        assert hidden_states.is_contiguous() and masked_m.shape == (LOCAL,)
        out, event, hook = self.buffer.combine(
            x=moved(self.here, hidden_states),
            topk_idx=ids,
            topk_weights=weights,
            handle=handle,
            async_finish=not self.hook,
            return_recv_hook=self.hook,
        )
        # nixl.py:422-426, before the sums are there.
        self.buffer.query_mask_buffer(self.mask)
        hook() if self.hook else event.current_stream_wait()
        self.here.settle()
        is_there = (ids >= 0) & torch.isin(ids // LOCAL, torch.tensor(there, device=ids.device))
        wanted = x.float() * (weights * is_there).sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), wanted, rtol=0.1, atol=0.1)
        return (1 - self.mask[: self.size]).tolist()


def sglang_starts(here: Here, size: int, return_recv_hook: bool) -> None:
    here.state = Sglang(here, size, return_recv_hook)


def sglang_layers(here: Here, size: int, there: list[int]) -> list[int]:
    """``on_scale``, nixl.py:82-86, and layers after it."""
    here.state.size = size
    for seed in range(3):
        here.state.layer(seed, there, use_fp8=False)
    active = here.state.layer(3, there, use_fp8=True)
    # nixl.py:195-202.
    here.state.buffer.clean_buffer(TOKENS, HIDDEN, ROOM * LOCAL)
    return active


def sglang_joins(here: Here, size: int, there: list[int], hook: bool) -> list[int]:
    """A joiner connects to all ranks in its first dispatch."""
    sglang_starts(here, size, hook)
    return sglang_layers(here, size, there)


@pytest.mark.parametrize("hook", [False, True])
def test_sglang_scales_up(world, hook):  # noqa: F811
    group = world()
    group.start(0, 1)
    group.run([0, 1], sglang_starts, 2, hook)
    assert group.run([0, 1], sglang_layers, 2, [0, 1]) == [[1, 1]] * 2
    group.start(2)
    there = [0, 1, 2]
    tasks: dict[int, Any] = {rank: (sglang_layers, 3, there) for rank in (0, 1)}
    assert group.together(tasks | {2: (sglang_joins, 3, there, hook)}) == [[1, 1, 1]] * 3


def nixl_plan(here: Here, plan: list[list[int]], killed: int | None) -> list[int]:
    """A rank of ``examples/device/ep/tests/elastic/elastic.py`` of NIXL, 8770b655a: in each phase it
    connects new ranks, disconnects removed ones, makes calls, and looks for failed ones."""
    remote: set[int] = set()
    if here.buffer is None:
        nixl_ep_ranks.made(here)
    failed: list[int] = []
    for phase, there in enumerate(plan):
        if here.rank not in there:
            if remote:
                break
            continue
        known = set(plan[phase - 1]) if phase and here.rank in plan[phase - 1] else set()
        added, removed = sorted(set(there) - known), sorted(known - set(there))
        if added:
            here.buffer.connect_ranks(added)
            remote |= set(added)
        if removed:
            here.buffer.disconnect_ranks(removed)
            remote -= set(removed)
        if killed in there and phase == len(plan) - 1:
            if here.rank == killed:
                os.kill(os.getpid(), 9)
            for seed in range(3):
                nixl_ep_ranks.calls(here, seed, there)
        else:
            for form in range(4):
                bound = LOCAL * (max(there) + 1)
                nixl_ep_ranks.step(here, form, there, form, num_experts=bound)
        status = nixl_ep_ranks.masks(here)
        failed = [rank for rank in there if status[rank] and rank in remote]
        if failed:
            here.buffer.disconnect_ranks(failed)
            nixl_ep_ranks.steps(here, [9], [rank for rank in there if rank not in failed])
    here.buffer.destroy()
    return failed


def test_a_plan_of_nixl_eps(world):  # noqa: F811
    """``expansion_contraction.json``, with half as many ranks."""
    group, plan = world(), [[0, 1], [0, 1, 2, 3], [0, 1, 2]]
    group.start(*ALL)
    assert group.run(ALL, nixl_plan, plan, None) == [[]] * ROOM


def test_a_plan_with_a_fault(world):  # noqa: F811
    """``expansion_fault_contraction.json``, with fewer ranks: rank 1 is killed in the last phase."""
    group, plan = world(), [[0, 2], [0, 1, 2, 3]]
    group.start(*ALL)
    for rank in ALL:
        group.tell(rank, nixl_plan, plan, 1)
    group.lose(1)
    assert [group.heard(rank) for rank in (0, 2, 3)] == [[1]] * 3


#: Expressions that programs write after ``import nixl_ep`` alone.
WRITTEN = [
    "nixl_ep.Buffer is nixl_ep.buffer.Buffer",
    "nixl_ep.EventOverlap is nixl_ep.utils.EventOverlap is nixl_ep.buffer.EventOverlap",
    "nixl_ep.buffer.DEFAULT_TIMEOUT_MS == 30000",
    "nixl_ep.Config(24, 8, 512, 16, 128).num_sms == 24",
    "str(nixl_ep.topk_idx_t) == 'torch.int64'",
    "'activate' in __import__('inspect').signature(nixl_ep.Buffer.connect_ranks).parameters",
    "nixl_ep.Buffer.get_rdma_size_hint(8, 512, 4, 8) % 128 == 0",
    "nixl_ep.Buffer.get_low_latency_buffer_size_hint(8, 512, 4, 8) > 0",
]


def test_modules_of_nixl_eps_are_there_when_it_is_imported():
    here = Path(__file__).parents[2] / "python" / "nixl_ep"
    program = f"import sys; sys.path.append({str(here)!r}); import nixl_ep\n"
    program += "".join(f"assert {line}, {line!r}\n" for line in WRITTEN)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
