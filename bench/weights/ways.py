"""Ways of weights from trainers to servers. Each has the same calls, in each rank's process."""

from __future__ import annotations

import os
import time
from typing import Any

from bench.weights.model import Arrays, Part


class Way:
    """One rank's end."""

    def __init__(
        self, role: str, rank: int, arrays: Arrays, memory: dict[str, Any], parts: list[Part]
    ) -> None:
        self.role, self.rank, self.arrays, self.memory, self.parts = (
            role,
            rank,
            arrays,
            memory,
            parts,
        )

    def describe(self) -> Any:
        """Bytes for the other ranks."""

    def join(self, trainers: list[Any], servers: list[Any]) -> None:
        """Plans and connects."""

    def begin(self) -> None:
        """A trainer is about to change its weights."""

    def publish(self, version: int) -> None:
        """A trainer has changed its weights."""

    def run(self, version: int) -> int:
        """Moves the weights; the bytes that came. All ranks call it at the same time."""
        return 0


class Uccl(Way):
    """``uccl.weights``."""

    def describe(self) -> Any:
        from uccl import p2p, weights

        kind: Any = weights.Publisher if self.role == "trainer" else weights.Reader
        gpu = 0 if self.arrays.device == "cpu" else int(self.arrays.device.partition(":")[2])
        transport: Any = os.environ.get("WEIGHTS_TRANSPORT", "auto")
        self.endpoint = p2p.Endpoint(local_gpu_idx=gpu, port=0, transport=transport)
        self.end: Any = kind(
            self.endpoint,
            {
                part.name: weights.Shard(
                    self.memory[part.name], shape=part.shape, offsets=part.offsets
                )
                for part in self.parts
            },
        )
        return self.end.manifest()

    def join(self, trainers: list[Any], servers: list[Any]) -> None:
        self.end.join(trainers, servers, self.rank)

    def begin(self) -> None:
        self.end.begin()

    def publish(self, version: int) -> None:
        self.end.publish(version)

    def run(self, version: int) -> int:
        if self.role == "trainer":
            return 0
        fetched = self.end.fetch(version, timeout=300)
        assert fetched.version == version
        bytes_read: int = fetched.bytes
        return bytes_read


class Nixl(Uccl):
    """NIXL with UCX, the reads of the same plan, prepared once."""

    def describe(self) -> Any:
        from nixl._api import nixl_agent, nixl_agent_config

        manifest = super().describe()
        backend = os.environ.get("WEIGHTS_BACKEND", "UCX")
        self.kind = "DRAM" if self.arrays.device == "cpu" else "VRAM"
        self.gpu = 0 if self.kind == "DRAM" else int(self.arrays.device.partition(":")[2])
        self.agent = nixl_agent(f"{self.role}{self.rank}", nixl_agent_config(backends=[backend]))
        self.where = []
        for part in self.parts:
            array = self.memory[part.name]
            size = part.sizes[0] * part.sizes[1] * 2
            self.where.append((self.arrays.address(array), size, self.gpu, ""))
        self.agent.register_memory(self.where, mem_type=self.kind)
        return manifest, self.agent.get_agent_metadata(), [one[:3] for one in self.where]

    def join(self, trainers: list[Any], servers: list[Any]) -> None:
        from uccl import weights

        if self.role == "trainer":
            return
        plan = weights.plan([one[0] for one in trainers], [one[0] for one in servers])
        self.handles, self.bytes = [], 0
        for step in plan[self.rank]:
            for is_source, rank, pieces in step:
                assert is_source, "no tree here"
                _, metadata, where = trainers[rank]
                name = self.agent.add_remote_agent(metadata)
                here, there = [], []
                for to_buffer, to, from_buffer, start, size in pieces:
                    here.append((self.where[to_buffer][0] + to, size, self.gpu))
                    there.append((where[from_buffer][0] + start, size, where[from_buffer][2]))
                    self.bytes += size
                local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, mem_type=self.kind)
                remote = self.agent.prep_xfer_dlist(name, there, mem_type=self.kind)
                every = list(range(len(pieces)))
                self.handles.append(
                    self.agent.make_prepped_xfer("READ", local, every, remote, every)
                )

    def run(self, version: int) -> int:
        if self.role == "trainer":
            return 0
        pending = list(self.handles)
        for handle in pending:
            assert self.agent.transfer(handle) != "ERR"
        while pending:
            states = [(handle, self.agent.check_xfer_state(handle)) for handle in pending]
            assert all(state != "ERR" for _, state in states)
            pending = [handle for handle, state in states if state != "DONE"]
            time.sleep(0)
        return self.bytes


class Nccl(Way):
    """NCCL's broadcast: each trainer broadcasts its rows of each tensor to all servers, which keep the columns and rows
    that they need. Trainers gather nothing."""

    def join(self, trainers: list[Any], servers: list[Any]) -> None:
        import torch
        import torch.distributed as dist

        ranks = len(trainers) + len(servers)
        me = self.rank + (len(trainers) if self.role == "server" else 0)
        backend = "nccl" if self.arrays.device != "cpu" else "gloo"
        dist.init_process_group(
            backend, init_method=os.environ["WEIGHTS_RENDEZVOUS"], rank=me, world_size=ranks
        )
        self.trainers = len(trainers)
        # One group for each trainer: itself and all servers.
        inference = list(range(self.trainers, ranks))
        self.groups = [dist.new_group([one, *inference]) for one in range(self.trainers)]
        if self.arrays.device == "cpu":
            self.memory = {name: torch.from_numpy(one) for name, one in self.memory.items()}
        rows = self.parts[0].shape[0] // self.trainers
        shape = (rows, self.parts[0].shape[1])
        self.room = torch.empty(shape, dtype=torch.int16, device=self.arrays.device)

    def run(self, version: int) -> int:
        for part in self.parts:
            for trainer in range(self.trainers):
                if self.role == "trainer":
                    if trainer == self.rank:
                        self._broadcast(self.memory[part.name], trainer)
                    continue
                self._broadcast(self.room, trainer)
                self._keep(part, trainer * self.room.shape[0])
        self.arrays.synchronize()
        if self.role == "trainer":
            return 0
        return sum(part.sizes[0] * part.sizes[1] * 2 for part in self.parts)

    def _broadcast(self, tensor: Any, trainer: int) -> None:
        import torch
        import torch.distributed as dist

        # As bytes: neither NCCL nor gloo has integers of 16 bits.
        dist.broadcast(tensor.view(torch.uint8), trainer, self.groups[trainer])

    def _keep(self, part: Part, first: int) -> None:
        start = max(part.offsets[0], first)
        end = min(part.offsets[0] + part.sizes[0], first + self.room.shape[0])
        if start < end:
            column = part.offsets[1]
            self.memory[part.name][start - part.offsets[0] : end - part.offsets[0]].copy_(
                self.room[start - first : end - first, column : column + part.sizes[1]]
            )


WAYS: dict[str, type[Way]] = {"uccl": Uccl, "nixl": Nixl, "nccl": Nccl}
