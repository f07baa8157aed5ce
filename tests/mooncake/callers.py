"""The calls that frameworks make of ``mooncake.engine``, in their order, as the sides of a process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engines import HERE, HOST, Engine, EngineSide
from peer import main

MAGIC = bytes([0xAB, 0xDC, 0xEF, 0x88])
"""The bytes with which verl says that a bucket has been read."""


class CallerSide(EngineSide):
    """An engine that is used as frameworks use it."""

    def sglang_init(self, layers: int, size: int) -> tuple[str, list[int]]:
        """SGLang: the engine, and one buffer a layer for keys and one for values."""
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "") == 0
        pointers = [self.memory(f"kv{layer}", size) for layer in range(2 * layers)]
        assert self.engine.batch_register_memory(pointers, [size] * len(pointers)) == 0
        aux = self.memory("aux", 64)
        assert self.engine.batch_register_memory([aux], [64]) == 0
        return f"{HOST}:{self.engine.get_rpc_port()}", [*pointers, aux]

    def sglang_send(
        self,
        session: str,
        here: Sequence[int],
        there: Sequence[int],
        pages: Sequence[tuple[int, int]],
        page: int,
    ) -> int:
        """SGLang's prefill: each layer's pages by a thread of its own, the request's data last.
        The answer is the first one that is not 0."""

        def layer(src: int, dst: int) -> int:
            blocks = [(src + s * page, dst + d * page, page) for s, d in pages]
            sources, targets, lengths = map(list, zip(*blocks))
            return self.engine.batch_transfer_sync_write(session, sources, targets, lengths)

        with ThreadPoolExecutor(4) as pool:
            codes = list(pool.map(layer, here[:-1], there[:-1]))
        codes.append(self.engine.batch_transfer_sync_write(session, [here[-1]], [there[-1]], [64]))
        return next((code for code in codes if code != 0), 0)

    def vllm_init(self, regions: int, size: int) -> tuple[str, list[int]]:
        """vLLM's connector: one region for each storage of the KV cache."""
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "") == 0
        bases = [self.memory(f"kv{at}", size, at + 1) for at in range(regions)]
        assert self.engine.batch_register_memory(bases, [size] * regions) == 0
        return f"{HOST}:{self.engine.get_rpc_port()}", bases

    def vllm_send(
        self, session: str, requests: list[tuple[list[int], list[int], list[int]]]
    ) -> set[int]:
        """vLLM's sender: requests of a pool of ten threads."""
        with ThreadPoolExecutor(10) as pool:
            send = self.engine.batch_transfer_sync_write
            ended = [pool.submit(send, session, *request) for request in requests]
            return {one.result() for one in ended}

    def encoder_push(self, session: str, address: int, size: int) -> None:
        """vLLM's encoder cache: a source is registered for one push."""
        source = self.arrays["source"].ctypes.data
        assert self.engine.batch_register_memory([source], [size]) == 0
        assert self.engine.batch_transfer_sync_write(session, [source], [address], [size]) == 0
        assert self.engine.batch_unregister_memory([source]) == 0

    def verl_init(self, bucket: int) -> dict[str, Any]:
        """verl: two buckets, the magic bytes, and a place for those of the next rank."""
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "") == 0
        buffer, magic = self.memory("buffer", 2 * bucket), self.memory("magic", 4096)
        receive = self.memory("receive", 8)
        addresses, sizes = [buffer, magic, receive], [2 * bucket, 4096, 8]
        assert self.engine.batch_register_memory(addresses, sizes) == 0
        return {"session_id": self.session(), "ptr": buffer, "magic_ptr": receive}

    def verl_receive(self, previous: dict[str, Any], ptr: int, length: int) -> None:
        """verl's rank: reads the bucket of the one before, and tells it so."""
        session = previous["session_id"]
        buffer = self.arrays["buffer"].ctypes.data
        assert self.engine.transfer_sync_read(session, buffer, ptr, length) == 0
        self.put("magic", 0, MAGIC)
        magic = self.arrays["magic"].ctypes.data
        assert self.engine.transfer_sync_write(session, magic, previous["magic_ptr"], 4) == 0

    def verl_wait(self) -> None:
        """verl waits for the magic bytes by looking at them."""
        while self.arrays["receive"][:4].tobytes() != MAGIC:
            time.sleep(0)
        self.arrays["receive"][:4] = 0

    def store_init(self) -> str:
        """checkpoint-engine tries to start eight times."""
        for _ in range(8):
            if self.engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "") == 0:
                return f"{HOST}:{self.engine.get_rpc_port()}"
        raise AssertionError("the store does not start")

    def lmcache_read(
        self, session: str, locals_: list[int], remotes: list[int], sizes: list[int]
    ) -> int:
        """LMCache: a read that is asked about until it has ended."""
        batch = self.engine.batch_transfer_async_read(session, locals_, remotes, sizes)
        if batch in (0, 2**64 - 1):
            return batch
        assert 0 < batch < 2**63
        return self.finish(batch)


def start(**settings: Any) -> Engine:
    return Engine(script=HERE / "callers.py", **settings)


if __name__ == "__main__":
    main(CallerSide())
