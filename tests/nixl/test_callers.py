"""The calls that vLLM and SGLang make of NIXL, in their order and with their arguments.

Files and lines are those of vLLM 0.33.0 (in ``vllm/distributed/kv_transfer/kv_connector/v1/nixl``)
and of SGLang 0.5.23 (in ``sglang/srt/disaggregation/nixl``).
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Any, Callable

import pytest
from agents import BACKEND, Agent, Pair, gpus, release
from peer import Peer, PeerError, pattern

MIB = 1 << 20
ours = pytest.mark.skipif(BACKEND != "UCCL", reason="lacks the backend that promises this: UCCL")
#: vLLM refuses older releases, which have no strided lists.
STRIDED = (1, 5)
strided = pytest.mark.skipif(release() < STRIDED, reason="lacks strided lists: NIXL 1.5")


class Caller(Agent):
    """An agent that a framework has opened."""

    def __init__(self, peer: Peer, name: str, framework: str, **params: str) -> None:
        self.peer, self.name, self.backend, self._made = peer, name, BACKEND, 0
        peer.begin("run", __name__, "open_there", name, framework, params)

    def ask(self, function: str, *args: Any, within: float = 60) -> Any:
        """Runs a function of this module for the agent, in its process."""
        return self.peer.call("run", __name__, function, self.name, *args, within=within)

    def begin_ask(self, function: str, *args: Any) -> None:
        """Starts what ``ask`` does; ``result`` waits for it."""
        self.peer.begin("run", __name__, function, self.name, *args)

    def cache(self, kinds: list[str], blocks: int, size: int, stride: int, seed: int) -> None:
        """Registers regions of blocks, as an engine does for the layers of its KV cache."""
        self.ask("cache_there", kinds, blocks, size, stride, seed)

    def blocks(self) -> list[bytes]:
        """The bytes of each region."""
        return self.ask("blocks_there")


@pytest.fixture
def callers(start: Callable[..., Peer]) -> Callable[..., Pair]:
    """Opens the agents of two engines of a framework, in two processes."""

    def make(framework: str, link: str, **params: str) -> Pair:
        both = [Caller(start(link=link), name, framework, **params) for name in "ab"]
        return Pair(*(one.opened() for one in both))

    return make


def moved(source: bytes, target: bytes, from_to: list[tuple[int, int]], case: Blocks) -> bytes:
    """The target's bytes after blocks of the source were moved to blocks of the target."""
    after = bytearray(target)
    for at, to in from_to:
        start, end = at * case.stride, to * case.stride
        after[end : end + case.size] = source[start : start + case.size]
    return bytes(after)


class Blocks:
    """The shape of a KV cache: regions of blocks with gaps between them."""

    def __init__(self, regions: int, count: int, size: int, stride: int) -> None:
        self.regions, self.count, self.size, self.stride = regions, count, size, stride

    def make(self, caller: Agent, seed: int, kinds: list[str] | None = None) -> None:
        assert isinstance(caller, Caller)
        kinds = kinds or ["DRAM"] * self.regions
        caller.cache(kinds, self.count, self.size, self.stride, seed)

    def content(self, seed: int, region: int) -> bytes:
        return pattern(self.count * self.stride, seed + region).tobytes()


MANY = Blocks(regions=2000, count=4, size=256, stride=320)
#: Blocks of the initiator, and the blocks of the other side that belong to them.
MINE, THEIRS = [3, 0, 2], [1, 2, 3]


@strided
def test_vllm_pulls_blocks_by_strided_lists(callers: Callable[..., Pair], link: str) -> None:
    """Each side prepares one list of rows: address, length, device, stride and count of a region's
    blocks (base_worker.py:2242, :2333). A request picks blocks by number (pull_worker.py:554)."""
    pair = callers("vllm", link)
    MANY.make(pair.a, 1)
    MANY.make(pair.b, 50_000)
    pair.a.meet(pair.b)
    assert pair.a.ask("pull_there", "b", pair.b.ask("regions_there"), MINE, THEIRS, True) == "DONE"
    assert pair.b.notifs() == {"a": [b"request:1"]}
    for region, content in enumerate(pair.a.blocks()):
        source, target = MANY.content(50_000, region), MANY.content(1, region)
        assert content == moved(source, target, list(zip(THEIRS, MINE)), MANY), region


def test_sglang_pushes_blocks_of_all_layers(callers: Callable[..., Pair], link: str) -> None:
    """The lists are strided, or have a row for each block where this NIXL has no strided ones
    (conn.py:1151). Each chunk is a transfer, and all are awaited together (conn.py:1098)."""
    pair = callers("sglang", link)
    MANY.make(pair.a, 1)
    MANY.make(pair.b, 50_000)
    pair.a.meet(pair.b)
    used = pair.a.ask("push_there", "b", pair.b.ask("regions_there"), MINE, THEIRS)
    assert used == ("strided" if release() >= STRIDED else "expanded")
    for region, content in enumerate(pair.b.blocks()):
        source, target = MANY.content(1, region), MANY.content(50_000, region)
        assert content == moved(source, target, list(zip(MINE, THEIRS)), MANY), region


@pytest.mark.parametrize(
    "kind",
    [
        "DRAM",
        pytest.param("VRAM", marks=pytest.mark.skipif(gpus() == 0, reason="lacks torch and a GPU")),
    ],
)
def test_vllm_splits_a_read_over_two_kinds_of_memory(
    callers: Callable[..., Pair], link: str, kind: str
) -> None:
    """A read into host memory and into a GPU's is two transfers from one remote list, without
    notifications. The notification is sent when both have ended (pull_worker.py:586
    ``_read_blocks_mixed``, base_worker.py:3501)."""
    case = Blocks(regions=6, count=40, size=4096, stride=4096 + 512)
    pair = callers("vllm", link)
    case.make(pair.a, 1, [kind, "DRAM"] * 3)
    case.make(pair.b, 100)
    pair.a.meet(pair.b)
    mine, theirs = list(range(0, 40, 2)), list(range(39, 19, -1))
    pair.a.ask("pull_mixed_there", "b", pair.b.ask("regions_there"), mine, theirs)
    assert pair.b.notifs() == {"a": [b"request:1"]}
    for region, content in enumerate(pair.a.blocks()):
        source, target = case.content(100, region), case.content(1, region)
        assert content == moved(source, target, list(zip(theirs, mine)), case), region


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_one_handle_is_posted_again_and_again(
    callers: Callable[..., Pair], link: str, op: str
) -> None:
    """Each post moves the bytes of that time. It has the notification that it is given, or else
    that of the post before, which is NIXL's rule."""
    case = Blocks(regions=3, count=400, size=512, stride=576)
    pair = callers("vllm", link)
    case.make(pair.a, 1)
    case.make(pair.b, 100)
    pair.a.meet(pair.b)
    blocks = list(range(case.count))
    pair.a.ask("prepare_there", "b", pair.b.ask("regions_there"), op, blocks, blocks)
    source, target = (pair.a, pair.b) if op == "WRITE" else (pair.b, pair.a)
    wanted: list[bytes] = []
    for round in range(30):
        source.ask("overwrite_there", round + 1)
        message = [b"", b"done", b"x" * (round * 97)][round % 3]
        assert pair.a.ask("post_there", message) == "DONE", round
        assert all(
            content[at * case.stride] == round + 1
            for content in target.blocks()
            for at in (0, 199, 399)
        ), round
        wanted += [message] if message else wanted[-1:]
    assert pair.b.notifs(len(wanted)) == {"a": wanted}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [4096, MIB])
def test_heartbeats_between_transfers(callers: Callable[..., Pair], link: str, size: int) -> None:
    """Heartbeats name the requests that wait, however many (base_worker.py:3540). Each transfer
    brings the notification of its own request. All arrive once, and heartbeats in order."""
    case = Blocks(regions=1, count=8, size=size, stride=size + 64)
    pair = callers("vllm", link)
    case.make(pair.a, 1)
    case.make(pair.b, 100)
    pair.a.meet(pair.b)
    beats, every = 2000, 10
    pair.a.begin_ask("heartbeats_there", "b", pair.b.ask("regions_there"), beats, every)
    seen: list[bytes] = []
    end = time.monotonic() + 90
    while len(seen) < beats + beats // every and time.monotonic() < end:
        seen += pair.b.notifs(1, seconds=1).get("a", [])
    pair.a.result()
    heard = [message for message in seen if message.startswith(b"HB:")]
    assert heard == [heartbeat(number) for number in range(beats)]
    ended = [message for message in seen if not message.startswith(b"HB:")]
    assert sorted(ended) == sorted(b"request:%d" % number for number in range(beats // every))


def heartbeat(number: int) -> bytes:
    """Of one request, of some, or of hundreds, each with a name of 36 bytes."""
    waiting = [1, 7, 300][number % 3]
    return ("HB:" + ",".join(f"{number:08}-{i:027}" for i in range(waiting))).encode()


class TestRelease:
    """A framework frees the blocks of a transfer as soon as its handle is released without an
    error (base_worker.py:3449 ``_try_release_xfer_handle``)."""

    CASE = Blocks(regions=2, count=64, size=MIB // 2, stride=MIB // 2 + 64)

    def started(self, callers: Callable[..., Pair], link: str, op: str, **params: str) -> Pair:
        pair = callers("vllm", link, **params)
        self.CASE.make(pair.a, 1)
        self.CASE.make(pair.b, 100)
        pair.a.meet(pair.b)
        every = list(range(self.CASE.count))
        pair.a.ask("prepare_there", "b", pair.b.ask("regions_there"), op, every, every)
        return pair

    @ours
    @pytest.mark.parametrize("op", ["WRITE", "READ"])
    def test_blocks_are_free_after_a_release_in_the_middle(
        self, callers: Callable[..., Pair], link: str, op: str
    ) -> None:
        pair = self.started(callers, link, op)
        target = pair.b if op == "WRITE" else pair.a
        # It may have ended already: within a host mostly, over TCP where this process had no turn.
        for _ in range(20 if link == "tcp" else 1):
            state = pair.a.ask("post_only_there")
            if state != "DONE":
                break
        assert state in (["PROC"] if link == "tcp" else ["PROC", "DONE"])
        pair.a.ask("release_there")
        target.ask("overwrite_there", 9)
        time.sleep(0.3)
        assert all(content.strip(b"\x09") == b"" for content in target.blocks())
        self.goes_on(pair)

    @ours
    def test_blocks_are_free_while_the_other_side_stands_still(
        self, callers: Callable[..., Pair]
    ) -> None:
        """The peer stops in the middle of a read and goes on later: what it sends then lands
        nowhere."""
        pair = self.started(callers, "tcp", "READ", timeout_ms="3000")
        pair.b.kill(signal.SIGSTOP)
        try:
            assert pair.a.ask("post_only_there") == "PROC"
            pair.a.ask("release_there")
            pair.a.ask("overwrite_there", 9)
        finally:
            pair.b.kill(signal.SIGCONT)
        time.sleep(0.5)
        assert all(content.strip(b"\x09") == b"" for content in pair.a.blocks())
        self.goes_on(pair)

    @ours
    def test_a_release_waits_for_a_slow_owner(self, callers: Callable[..., Pair]) -> None:
        """The owner of the blocks stands still for a moment while a write to them is released."""
        pair = self.started(callers, "tcp", "WRITE", timeout_ms="10000")
        pair.b.kill(signal.SIGSTOP)
        try:
            assert pair.a.ask("post_only_there") == "PROC"
            pair.a.begin_ask("release_there")
            time.sleep(0.5)
        finally:
            pair.b.kill(signal.SIGCONT)
        pair.a.result()
        pair.b.ask("overwrite_there", 9)
        time.sleep(0.3)
        assert all(content.strip(b"\x09") == b"" for content in pair.b.blocks())
        self.goes_on(pair)

    def goes_on(self, pair: Pair) -> None:
        """The next request has the same blocks."""
        pair.a.ask("overwrite_there", 5)
        every = list(range(self.CASE.count))
        pair.a.ask("prepare_there", "b", pair.b.ask("regions_there"), "WRITE", every, every)
        assert pair.a.ask("post_there", b"next") == "DONE"
        assert pair.b.notifs() == {"a": [b"next"]}
        at = [i * self.CASE.stride for i in every]
        assert all(content[i] == 5 for content in pair.b.blocks() for i in at)


@ours
@pytest.mark.parametrize("port", ["the same", "another"])
def test_an_engine_that_was_restarted_has_the_old_name(
    start: Callable[..., Peer], link: str, port: str, base_port: int
) -> None:
    """Transfers that were prepared for the earlier engine fail, and touch nothing of the new one.
    vLLM then releases its lists, removes the agent and loads the metadata of the new one
    (base_worker.py:4015 ``_cleanup_remote_engine``, :2542)."""
    case = Blocks(regions=4, count=16, size=4096, stride=4096 + 64)
    a = Caller(start(link=link), "a", "vllm", timeout_ms="2000").opened()
    case.make(a, 1)
    ports = [base_port, base_port if port == "the same" else 0, base_port]
    every = list(range(case.count))
    for round, at in enumerate(ports):
        b = Caller(start(link=link), "b", "vllm", port=str(at)).opened()
        case.make(b, 100)
        if round:
            # A handle of the earlier engine, and lists to make another handle of.
            for ended in (refused(a, "post_there", b""), refused(a, "prepare_again_there")):
                assert ended
            assert b.blocks() == [case.content(100, region) for region in range(case.regions)]
            a.ask("clean_up_there", "b")
        a.meet(b)
        a.ask("prepare_there", "b", b.ask("regions_there"), "WRITE", every, every)
        assert a.ask("post_there", b"round %d" % round) == "DONE"
        assert b.notifs() == {"a": [b"round %d" % round]}
        assert a.nixl("check_remote_metadata", "b")
        b.kill()
        b.peer.process.wait()


def refused(caller: Caller, function: str, *args: Any) -> bool:
    """Whether a transfer fails, with an exception or with a state."""
    try:
        return caller.ask(function, *args) == "ERR"
    except PeerError as error:
        return "nixl" in str(error)


@ours
@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_parameters_of_the_frameworks(start: Callable[..., Peer], framework: str) -> None:
    """vLLM lets NIXL make the backend (base_worker.py:738). SGLang makes it itself, with a number
    of threads (conn.py:597 to :615)."""
    caller = Caller(start(), "a", framework).opened()
    assert caller.call("backends") == ["UCCL"]


@ours
@pytest.mark.parametrize("name", ["num_threads", "num_workers", "num_cpus"])
def test_a_number_of_threads_is_taken_under_every_name(
    start: Callable[..., Peer], name: str
) -> None:
    caller = Caller(start(), "a", "sglang", **{name: "3"}).opened()
    assert caller.call("backends") == ["UCCL"]


# Functions of the helper processes.


def open_there(side: Any, name: str, framework: str, params: dict[str, str]) -> None:
    from nixl import _api

    if framework == "vllm" and not params:
        config = _api.nixl_agent_config(backends=[BACKEND], capture_telemetry=True)
        side.agents[name] = _api.nixl_agent(name, config)
        return
    if framework == "vllm":
        side.agents[name] = _api.nixl_agent(
            name, _api.nixl_agent_config(backends=[], capture_telemetry=True)
        )
        side.agents[name].create_backend(BACKEND, params)
        return
    config = _api.nixl_agent_config(
        backends=[],
        num_threads=8,
        **(
            {"sync_mode": _api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT}
            if hasattr(_api, "nixl_thread_sync_t")
            else {}
        ),
    )
    side.agents[name] = _api.nixl_agent(name, config)
    if BACKEND == "UCCL" and not set(params) & {"num_threads", "num_workers"}:
        params = {"num_cpus": "8", **params}
    side.agents[name].create_backend(BACKEND, params)


def cache_there(
    side: Any, name: str, kinds: list[str], blocks: int, size: int, stride: int, seed: int
) -> None:
    """Registers all regions of one kind of memory in one call (base_worker.py:1870)."""
    agent, regions = side.agents[name], []
    for index, kind in enumerate(kinds):
        array: Any = pattern(blocks * stride, seed + index)
        address, device = array.ctypes.data, 0
        if kind == "VRAM":
            import torch

            array = torch.from_numpy(array).to("cuda:0")
            torch.cuda.synchronize()
            address = array.data_ptr()
        regions.append((array, kind, (address, size, device, stride, blocks)))
    for kind in dict.fromkeys(kinds):
        ranges = [
            (row[0], row[3] * row[4], row[2], "") for _, other, row in regions if other == kind
        ]
        agent.register_memory(agent.get_reg_descs(ranges, kind), backends=[BACKEND])
    side.arrays[name] = regions


def regions_there(side: Any, name: str) -> list[tuple[int, ...]]:
    return [row for _, _, row in side.arrays[name]]


def blocks_there(side: Any, name: str) -> list[bytes]:
    def content(array: Any) -> bytes:
        return bytes((array.cpu().numpy() if hasattr(array, "cpu") else array).tobytes())

    return [content(array) for array, _, _ in side.arrays[name]]


def overwrite_there(side: Any, name: str, byte: int) -> None:
    for array, _, _ in side.arrays[name]:
        array[:] = byte


def rows(regions: list[tuple[int, ...]]) -> Any:
    import numpy as np

    return np.array(regions, dtype=np.uint64).reshape(-1, 5)


def prepared(side: Any, name: str, owner: str, regions: list[tuple[int, ...]], kind: str) -> Any:
    """A list of rows, or of a row a block where NIXL has no strided ones."""
    import numpy as np

    agent = side.agents[name]
    if release() >= STRIDED:
        return agent.prep_xfer_dlist(owner, rows(regions), mem_type=kind)
    with suppress(TypeError):
        raise AssertionError(agent.prep_xfer_dlist(owner, rows(regions), kind))
    flat = [
        (address + i * stride, size, device)
        for address, size, device, stride, count in regions
        for i in range(count)
    ]
    descs = agent.get_xfer_descs(np.array(flat, dtype=np.uint64), kind)
    return agent.prep_xfer_dlist(owner, descs, kind)


def numbers(regions: int, count: int, blocks: list[int]) -> Any:
    """The numbers of these blocks of every region in the list of all blocks."""
    import numpy as np

    at = np.arange(regions)[:, None] * count + np.asarray(blocks)[None, :]
    return at.reshape(-1).astype(np.int32)


def settled(agent: Any, handles: list[Any], seconds: float = 40) -> str:
    """The state of a request: DONE once all its transfers are."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = {agent.check_xfer_state(handle) for handle in handles}
        if states <= {"DONE"}:
            return "DONE"
        if "ERR" in states:
            return "ERR"
    return "PROC"


def pull_there(
    side: Any,
    name: str,
    owner: str,
    regions: list[tuple[int, ...]],
    mine: list[int],
    theirs: list[int],
    telemetry: bool,
) -> str:
    agent, own = side.agents[name], regions_there(side, name)
    here = prepared(side, name, "NIXL_INIT_AGENT", own, "DRAM")
    there = prepared(side, name, owner, regions, "DRAM")
    count = own[0][4]
    handle = agent.make_prepped_xfer(
        "READ",
        here,
        numbers(len(own), count, mine),
        there,
        numbers(len(own), count, theirs),
        notif_msg=b"request:1",
    )
    agent.transfer(handle)
    state = settled(agent, [handle])
    if telemetry:
        seen = agent.get_xfer_telemetry(handle)
        assert seen.totalBytes == len(own) * len(mine) * own[0][1], seen.totalBytes
    agent.release_xfer_handle(handle)
    for made in (here, there):
        agent.release_dlist_handle(made)
    return state


def push_there(
    side: Any,
    name: str,
    owner: str,
    regions: list[tuple[int, ...]],
    mine: list[int],
    theirs: list[int],
) -> str:
    agent, own = side.agents[name], regions_there(side, name)
    here, there = (
        prepared(side, name, "", own, "DRAM"),
        prepared(side, name, owner, regions, "DRAM"),
    )
    handles = []
    for at, to in zip(mine, theirs):
        both = (numbers(len(own), own[0][4], [block]) for block in (at, to))
        handle = agent.make_prepped_xfer("WRITE", here, next(both), there, next(both))
        assert handle and agent.transfer(handle) != "ERR"
        handles.append(handle)
    assert settled(agent, handles) == "DONE"
    for handle in handles:
        agent.release_xfer_handle(handle)
    return "strided" if release() >= STRIDED else "expanded"


def pull_mixed_there(
    side: Any,
    name: str,
    owner: str,
    regions: list[tuple[int, ...]],
    mine: list[int],
    theirs: list[int],
) -> None:
    import numpy as np

    agent, cache = side.agents[name], side.arrays[name]
    # Every other region is in the first list, and the rest in the second: of another kind on GPUs.
    lists = [(cache[first][1], [row for _, _, row in cache[first::2]]) for first in (0, 1)]
    handles = [prepared(side, name, "NIXL_INIT_AGENT", part, kind) for kind, part in lists]
    there, count = prepared(side, name, owner, regions, "DRAM"), regions[0][4]
    local_ids = numbers(len(cache), count, mine)
    remote_ids = numbers(len(cache), count, theirs)
    is_second = (local_ids // count) % 2 == 1
    position = (local_ids // count // 2) * count + local_ids % count
    transfers = []
    for mask, here in ((is_second, handles[1]), (~is_second, handles[0])):
        made = agent.make_prepped_xfer(
            "READ", here, np.asarray(position[mask]), there, remote_ids[mask]
        )
        transfers.append(made)
    for transfer in transfers:
        agent.transfer(transfer)
    assert settled(agent, transfers) == "DONE"
    for transfer in transfers:
        agent.release_xfer_handle(transfer)
    agent.send_notif(owner, notif_msg=b"request:1")


def prepare_there(
    side: Any,
    name: str,
    owner: str,
    regions: list[tuple[int, ...]],
    op: str,
    mine: list[int],
    theirs: list[int],
) -> None:
    own = regions_there(side, name)
    lists = [
        prepared(side, name, "NIXL_INIT_AGENT", own, "DRAM"),
        prepared(side, name, owner, regions, "DRAM"),
    ]
    picked = [numbers(len(own), own[0][4], blocks) for blocks in (mine, theirs)]
    side.lists[name] = (op, lists, picked)
    prepare_again_there(side, name)


def prepare_again_there(side: Any, name: str) -> str:
    """Makes a transfer of lists that were prepared before, and runs it if there is one already."""
    agent = side.agents[name]
    op, (here, there), (mine, theirs) = side.lists[name]
    handle = agent.make_prepped_xfer(op, here, mine, there, theirs)
    if side.transfers.get(name) is None:
        side.transfers[name] = handle
        return "made"
    try:
        agent.transfer(handle)
        return settled(agent, [handle])
    finally:
        agent.release_xfer_handle(handle)


def post_only_there(side: Any, name: str) -> str:
    return str(side.agents[name].transfer(side.transfers[name]))


def post_there(side: Any, name: str, message: bytes) -> str:
    agent, handle = side.agents[name], side.transfers[name]
    state = agent.transfer(handle, message)
    return settled(agent, [handle]) if state == "PROC" else str(state)


def release_there(side: Any, name: str) -> None:
    side.agents[name].release_xfer_handle(side.transfers.pop(name))


def clean_up_there(side: Any, name: str, other: str) -> None:
    agent = side.agents[name]
    agent.release_xfer_handle(side.transfers.pop(name))
    for prepared_list in side.lists.pop(name)[1]:
        agent.release_dlist_handle(prepared_list)
    # Some releases of NIXL forget the agent by themselves.
    with suppress(Exception):
        agent.remove_remote_agent(other)


def heartbeats_there(
    side: Any, name: str, owner: str, regions: list[tuple[int, ...]], beats: int, every: int
) -> None:
    agent, own = side.agents[name], regions_there(side, name)
    here = prepared(side, name, "NIXL_INIT_AGENT", own, "DRAM")
    there, picked = prepared(side, name, owner, regions, "DRAM"), numbers(1, 8, list(range(8)))
    under_way: list[Any] = []
    for number in range(beats):
        agent.send_notif(owner, notif_msg=heartbeat(number))
        if number % every == 0:
            notif = b"request:%d" % (number // every)
            handle = agent.make_prepped_xfer("READ", here, picked, there, picked, notif_msg=notif)
            agent.transfer(handle)
            under_way.append(handle)
        for handle in [one for one in under_way if agent.check_xfer_state(one) == "DONE"]:
            under_way.remove(handle)
            agent.release_xfer_handle(handle)
    assert settled(agent, under_way) == "DONE"
    for handle in under_way:
        agent.release_xfer_handle(handle)
