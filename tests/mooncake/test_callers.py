"""The sequences of frameworks that import ``mooncake.engine``, replayed between processes. Each test
names the framework's version, file and lines."""

from __future__ import annotations

from collections.abc import Iterator

import callers
import pytest
from callers import Engine

KIB = 1024


@pytest.fixture(params=["one host", "tcp"])
def processes(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    """Three processes, on each kind of path."""
    env = {"MC_FORCE_TCP": "1"} if request.param == "tcp" else {}
    made = [callers.start(env=env) for _ in range(3)]
    yield made
    for engine in made:
        engine.close()


def test_sglang_sends_pages_of_layers(processes: list[Engine]) -> None:
    """SGLang 0.5.23: prefill and decode. srt/distributed/device_communicators/
    mooncake_transfer_engine.py 128-144, 169, 212-219, 255, 281;
    srt/disaggregation/mooncake/conn.py 428, 816-824, 1172-1203, 3147-3152."""
    prefill, decode, other = processes
    layers, page, pages = 4, 2 * KIB, 16
    _, here = prefill.call("sglang_init", layers, page * pages)
    session, there = decode.call("sglang_init", layers, page * pages)
    for layer in range(2 * layers):
        for at in range(pages):
            prefill.call("put", f"kv{layer}", at * page, bytes([16 * layer + at + 1]) * page)
    prefill.call("put", "aux", 0, b"first token")
    wanted = [(0, 9), (1, 3), (7, 4), (12, 15)]
    assert prefill.call("sglang_send", session, here, there, wanted, page) == 0
    for layer in range(2 * layers):
        got, sent = decode.call("bytes_of", f"kv{layer}"), prefill.call("bytes_of", f"kv{layer}")
        for src, dst in wanted:
            assert got[dst * page : (dst + 1) * page] == sent[src * page : (src + 1) * page]
        assert got[: 3 * page] == bytes(3 * page), "other pages"
    assert decode.call("bytes_of", "aux").startswith(b"first token")
    # The decode process dies. Its successor has another session.
    decode.kill()
    decode.process.wait()
    assert prefill.call("sglang_send", session, here, there, wanted, page) == -1
    assert prefill.call("do", "send_probe", session) != 0
    second, there = other.call("sglang_init", layers, page * pages)
    assert second != session
    assert prefill.call("do", "send_probe", second) == 0
    assert prefill.call("sglang_send", second, here, there, wanted, page) == 0
    assert other.call("bytes_of", "aux").startswith(b"first token")


def test_sglang_reads_weights_of_an_instance(processes: list[Engine]) -> None:
    """SGLang 0.5.23: weights of a remote instance, and experts of a backup.
    srt/model_executor/model_runner_components/remote_instance_weight_transporter.py 48-57;
    srt/model_loader/remote_instance_weight_loader_utils.py 118-130; srt/model_loader/loader.py
    3344-3352; srt/elastic_ep/expert_backup_manager.py 159; expert_backup_client.py 95, 160."""
    seed, client, _ = processes
    sizes = [4 * KIB, 100, 8 * KIB, 1]
    for engine in (seed, client):
        assert engine.call("initialize", callers.HOST, "P2PHANDSHAKE", "rdma", "") == 0
    there = [seed.call("registered", f"w{i}", size, i + 1) for i, size in enumerate(sizes)]
    here = [client.call("registered", f"w{i}", size) for i, size in enumerate(sizes)]
    session = seed.call("session")
    assert client.call("do", "batch_transfer_sync_read", session, here, there, sizes) >= 0
    for i, size in enumerate(sizes):
        assert client.call("bytes_of", f"w{i}") == bytes([i + 1]) * size


def test_vllm_sends_blocks_and_sleeps(processes: list[Engine]) -> None:
    """vLLM 0.33.0: MooncakeConnector. vllm/distributed/kv_transfer/kv_connector/v1/mooncake/
    mooncake_connector.py 1244-1273, 2031-2060 (ten threads), 2264, 2303-2319 (sleep mode ends the
    registrations, and makes them again at the same addresses)."""
    producer, consumer, _ = processes
    regions, block, blocks = 3, KIB, 32
    _, here = producer.call("vllm_init", regions, block * blocks)
    session, there = consumer.call("vllm_init", regions, block * blocks)

    def requests(moved: int) -> list[tuple[list[int], list[int], list[int]]]:
        """A request for each block: that block of all regions, to the place ``moved`` from it."""
        return [
            (
                [base + at * block for base in here],
                [base + (at + moved) % blocks * block for base in there],
                [block] * regions,
            )
            for at in range(blocks)
        ]

    for at in range(regions):
        consumer.call("fill", f"kv{at}", 0)
    assert producer.call("vllm_send", session, requests(5)) == {0}
    for at in range(regions):
        assert consumer.call("bytes_of", f"kv{at}") == bytes([at + 1]) * (block * blocks)
    sizes = [block * blocks] * regions
    assert consumer.call("do", "batch_unregister_memory", there) == 0
    for at in range(regions):
        consumer.call("fill", f"kv{at}", 0)
    assert producer.call("vllm_send", session, requests(1)) == {-1}
    for at in range(regions):
        assert consumer.call("bytes_of", f"kv{at}") == bytes(block * blocks), "it is asleep"
    assert consumer.call("do", "batch_register_memory", there, sizes) == 0
    assert producer.call("vllm_send", session, requests(1)) == {0}
    for at in range(regions):
        assert consumer.call("bytes_of", f"kv{at}") == bytes([at + 1]) * (block * blocks)


def test_vllm_pushes_encodings(processes: list[Engine]) -> None:
    """vLLM 0.33.0: the encoder cache's connector, which registers each source for its push, and each
    destination for its request. vllm/distributed/ec_transfer/ec_connector/mooncake/transfer.py
    58-98, 114-171, 176-193."""
    encoder, server, _ = processes
    size = 16 * KIB
    for engine in (encoder, server):
        assert engine.call("initialize", callers.HOST, "P2PHANDSHAKE", "rdma", "") == 0
    session = server.call("session")
    encoder.call("memory", "source", size)
    address = server.call("memory", "destination", size)
    for round_ in range(1, 21):
        encoder.call("fill", "source", round_)
        assert server.call("do", "batch_register_memory", [address], [size]) == 0
        encoder.call("encoder_push", session, address, size)
        assert server.call("do", "unregister_memory", address) == 0
        assert server.call("bytes_of", "destination") == bytes([round_]) * size


def test_verl_passes_buckets_on(processes: list[Engine]) -> None:
    """verl 0.9.1: weights go from rank to rank, and four bytes back.
    verl/checkpoint_engine/mooncake_checkpoint_engine.py 69-94, 154-160, 268-310."""
    bucket = 64 * KIB
    infos = [engine.call("verl_init", bucket) for engine in processes]
    first, middle, last = processes
    for half in range(4):
        ptr = infos[0]["ptr"] + half % 2 * bucket
        first.call("put", "buffer", half % 2 * bucket, bytes([half + 1]) * bucket)
        middle.call("verl_receive", infos[0], ptr, bucket)
        last.call("verl_receive", infos[1], infos[1]["ptr"], bucket)
        first.call("verl_wait")
        middle.call("verl_wait")
        assert last.call("bytes_of", "buffer")[:bucket] == bytes([half + 1]) * bucket


def test_checkpoint_engine_reads_named_tensors(processes: list[Engine]) -> None:
    """checkpoint-engine 0.4.2: checkpoint_engine/p2p_store.py 20-41, 50-65, 73-78;
    checkpoint_engine/ps.py 685."""
    owner, reader, _ = processes
    address = owner.call("store_init")
    reader.call("store_init")
    names = [f"shard{i}" for i in range(24)]
    sizes = [4 * KIB + i for i in range(len(names))]
    there = [
        owner.call("memory", name, size, i + 1) for i, (name, size) in enumerate(zip(names, sizes))
    ]
    assert owner.call("do", "batch_register_memory", there, sizes) == 0
    here = reader.call("memory", "bucket", sum(sizes))
    assert reader.call("do", "batch_register_memory", [here], [sum(sizes)]) == 0
    places = [here + sum(sizes[:i]) for i in range(len(sizes))]
    assert reader.call("do", "batch_transfer_sync_read", address, places, there, sizes) == 0
    wanted = b"".join(bytes([i + 1]) * size for i, size in enumerate(sizes))
    assert reader.call("bytes_of", "bucket") == wanted
    assert reader.call("do", "batch_unregister_memory", [here]) == 0
    assert owner.call("do", "batch_unregister_memory", there) == 0


def test_lmcache_asks_for_the_state_of_reads(processes: list[Engine]) -> None:
    """LMCache 0.5.6: lmcache/v1/distributed/transfer_channel/impl/mooncake_te_impl.py 127-148,
    168-199, 326-343, 509."""
    here, there, _ = processes
    size = 64 * KIB
    for engine in (here, there):
        assert engine.call("initialize", callers.HOST, "P2PHANDSHAKE", "tcp", "") == 0
    mine, theirs = here.call("registered", "l1", size), there.call("registered", "l1", size, 7)
    session = there.call("session")
    pages = [at * 4 * KIB for at in range(0, 16, 2)]
    read = (
        "lmcache_read",
        session,
        [mine + at for at in pages],
        [theirs + at for at in pages],
        [4 * KIB] * len(pages),
    )
    assert here.call(*read) == 1
    assert here.call("bytes_of", "l1") == (b"\x07" * 4 * KIB + bytes(4 * KIB)) * 8
    outside = [mine], [theirs + size - 8], [16]
    assert here.call("lmcache_read", session, *outside) == -1
    assert there.call("do", "unregister_memory", theirs) == 0
    assert here.call(*read) == -1
    there.kill()
    there.process.wait()
    assert here.call(*read) == 2**64 - 1
    assert here.call("do", "unregister_memory", mine) == 0
