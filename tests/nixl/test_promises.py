"""Promises of the backend beyond moving bytes: errors, repeated and late calls, many agents, no
leaks."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Callable

import pytest
from agents import BACKEND, Agent, Pair
from peer import PeerError, pattern

MIB = 1 << 20
ours = pytest.mark.skipif(BACKEND != "UCCL", reason="lacks the backend that promises this: UCCL")


class TestTransfers:
    def test_a_repost_has_its_own_notification(self, any_pair: Pair) -> None:
        mine, theirs = any_pair.bufs(4096, seed_a=1)
        a, b = any_pair.a, any_pair.b
        key = a.prepare("WRITE", mine, theirs)
        for message in (b"first", b"second"):
            assert a.call("run_transfer", key, 30, message) == "DONE"
            assert b.notifs() == {"a": [message]}
        other = a.prepare("WRITE", mine, theirs)
        assert a.run(other) == "DONE"
        a.notify(b, b"end")
        assert b.notifs() == {"a": [b"end"]}, "the last post had none"

    def test_a_transfer_that_was_not_posted_has_no_state(self, any_pair: Pair) -> None:
        mine, theirs = any_pair.bufs(64)
        key = any_pair.a.prepare("WRITE", mine, theirs)
        with pytest.raises(PeerError, match="nixlNotPosted"):
            any_pair.a.state(key)
        assert any_pair.a.run(key) == "DONE"

    @ours
    def test_no_post_while_under_way(self, connect: Callable[..., Pair]) -> None:
        pair = connect(link="tcp")
        mine, theirs = pair.bufs(64 * MIB, seed_a=1)
        key = pair.a.prepare("WRITE", mine, theirs)
        pair.b.kill(signal.SIGSTOP)
        try:
            assert pair.a.post(key) == "PROC"
            with pytest.raises(PeerError, match="nixlRepostActive"):
                pair.a.post(key)
        finally:
            pair.b.kill(signal.SIGCONT)

    def test_several_regions_in_one_list(self, any_pair: Pair) -> None:
        a, b = any_pair.a, any_pair.b
        mine = [a.buf(5000, seed=seed) for seed in (1, 2, 3)]
        theirs = [b.buf(5000) for _ in range(3)]
        any_pair.meet()
        order = [2, 0, 1]
        local, remote = mine[0].piece(0, 0), theirs[0].piece(0, 0)
        local.descs = [(mine[i].address + 8, 4000, 0) for i in order]
        remote.descs = [(theirs[i].address + 16, 4000, 0) for i in range(3)]
        assert a.write(local, remote) == "DONE"
        for i, buffer in zip(order, theirs):
            assert buffer.get(16, 4016) == pattern(5000, i + 1).tobytes()[8:4008]
            assert buffer.get(0, 16) == bytes(16) and buffer.get(4016) == bytes(984)

    def test_more_pieces_than_one_operation_takes(self, any_pair: Pair) -> None:
        count, stride = 70_001, 8
        mine, theirs = any_pair.bufs(count * stride, seed_a=1)
        local, remote = (buffer.pieces(count, 4, stride=stride) for buffer in (mine, theirs))
        assert any_pair.a.write(local, remote, notif=b"all") == "DONE"
        assert any_pair.b.notifs() == {"a": [b"all"]}
        wanted = pattern(count * stride, 1).reshape(count, stride)
        wanted[:, 4:] = 0
        assert theirs.get() == wanted.tobytes()

    def test_transfers_from_several_threads(self, any_pair: Pair) -> None:
        """An agent with a lock (sync_mode) calls the backend from any number of threads."""
        mine, theirs = any_pair.bufs(16 * 65_536, seed_a=1)
        states = any_pair.a.call(
            "write_from_threads", mine.address, theirs.address, any_pair.b.name, 16, 65_536
        )
        assert states == ["DONE"] * 16
        assert theirs.get() == pattern(16 * 65_536, 1).tobytes()

    @pytest.mark.slow
    def test_more_than_4_gib(self, connect: Callable[..., Pair]) -> None:
        size = (4 << 30) + MIB
        pair = connect(link="local")
        mine, theirs = pair.bufs(size)
        mine.fill(7)
        assert pair.a.write(mine, theirs, seconds=120) == "DONE"
        assert theirs.get(size - MIB) == bytes([7]) * MIB
        assert theirs.guarded()


class TestMemory:
    def test_memory_that_was_registered_later_is_loaded_later(self, any_pair: Pair) -> None:
        a, b = any_pair.a, any_pair.b
        any_pair.meet()
        a.notify(b, b"connected")
        assert b.notifs() == {"a": [b"connected"]}
        for round in range(3):
            mine, theirs = any_pair.bufs(MIB, seed_a=round)
            assert a.write(mine, theirs) == "DONE"
            assert theirs.get() == pattern(MIB, round).tobytes()

    def test_memory_that_was_not_loaded_is_refused(self, any_pair: Pair) -> None:
        mine, _ = any_pair.bufs(4096)
        unknown = any_pair.b.buf(4096)
        with pytest.raises(PeerError, match="nixlNotFound"):
            any_pair.a.write(mine, unknown)

    @pytest.mark.parametrize("side", ["local", "remote"])
    def test_outside_of_a_region(self, any_pair: Pair, side: str) -> None:
        mine, theirs = any_pair.bufs(4096)
        local, remote = mine.piece(0, 4096), theirs.piece(0, 4096)
        wrong = local if side == "local" else remote
        [(address, size, device)] = wrong.descs
        wrong.descs = [(address + 1, size, device)]
        with pytest.raises(PeerError, match="nixl(NotFound|InvalidParam)"):
            any_pair.a.write(local, remote)
        assert theirs.guarded() and theirs.get() == bytes(4096)

    @ours
    def test_the_owner_refuses_memory_that_it_has_deregistered(self, any_pair: Pair) -> None:
        """The owner also refuses access to its first region, of which other agents still have the
        metadata."""
        mine, theirs = any_pair.bufs(4096, seed_a=1)
        assert any_pair.a.write(mine, theirs) == "DONE"
        theirs.deregister()
        theirs.fill(9)
        with pytest.raises(PeerError, match="nixlNotAllowed"):
            any_pair.a.write(mine, theirs)
        assert theirs.get() == bytes([9]) * 4096

    @ours
    @pytest.mark.parametrize("side", ["local", "remote"])
    @pytest.mark.parametrize("count", [1, 300])
    def test_memory_that_was_deregistered_after_a_transfer_was_made(
        self, any_pair: Pair, count: int, side: str
    ) -> None:
        """A transfer that was made and posted before is refused, also where the same memory has
        been registered anew."""
        mine, theirs = any_pair.bufs(300 * 128, seed_a=1)
        pieces = mine.pieces(count, 64), theirs.pieces(count, 64)
        key = any_pair.a.prepare("WRITE", *pieces)
        assert [any_pair.a.run(key), any_pair.a.run(key)] == ["DONE", "DONE"]
        gone = mine if side == "local" else theirs
        gone.deregister()
        gone.owner.call("register_again", gone.name, gone.size)
        theirs.fill(9)
        with pytest.raises(PeerError, match="nixlNot(Found|Allowed)"):
            any_pair.a.run(key)
        assert theirs.get() == bytes([9]) * theirs.size
        any_pair.a.release(key)

    def test_registered_twice_at_one_address(self, any_pair: Pair) -> None:
        """Each registration has its own length and its own end."""
        mine, theirs = any_pair.bufs(8192, seed_a=1)
        first = any_pair.b.call("register_again", theirs.name, 4096)
        theirs.deregister()
        again = any_pair.b.call("register_again", theirs.name, 8192)
        any_pair.b.call("deregister", first)
        any_pair.a.call("forget", any_pair.b.name)
        any_pair.meet()
        assert any_pair.a.write(mine, theirs) == "DONE"
        assert theirs.get() == pattern(8192, 1).tobytes()
        any_pair.b.call("deregister", again)

    @pytest.mark.parametrize("calls", ["one call", "two calls"])
    def test_the_same_memory_registered_twice(self, any_pair: Pair, calls: str) -> None:
        """Other agents can load the metadata, and the memory stays registered until both
        registrations end."""
        b = any_pair.b
        mine, theirs = any_pair.a.buf(4096, seed=1), b.buf(4096)
        again = b.call("register_again", theirs.name, 4096, 2 if calls == "one call" else 1)
        any_pair.meet()
        assert any_pair.a.write(mine, theirs) == "DONE"
        theirs.deregister()
        theirs.fill(9)
        assert any_pair.a.write(mine, theirs) == "DONE", "one registration is left"
        assert theirs.get() == pattern(4096, 1).tobytes()
        b.call("deregister", again)
        theirs.fill(9)
        with suppress(PeerError):
            assert any_pair.a.write(mine, theirs) == "ERR"
        assert theirs.get() == bytes([9]) * 4096

    def test_an_empty_tensor_in_a_list(self, any_pair: Pair) -> None:
        """An empty tensor is registered, transferred and deregistered like the others of its
        list."""
        a, b = any_pair.a, any_pair.b
        mine, theirs = a.buf(4096, seed=1), b.buf(4096)
        empty = [
            agent.call("register_again", buf.name, 0) for agent, buf in ((a, mine), (b, theirs))
        ]
        any_pair.meet()
        local, remote = mine.piece(0, 0), theirs.piece(0, 0)
        local.descs = [(mine.address, 0, 0), (mine.address, 4096, 0)]
        remote.descs = [(theirs.address, 0, 0), (theirs.address, 4096, 0)]
        assert a.write(local, remote) == "DONE"
        assert theirs.get() == pattern(4096, 1).tobytes()
        local.descs, remote.descs = local.descs[:1], remote.descs[:1]
        assert a.write(local, remote) == "DONE", "nothing but an empty tensor"
        for agent, name in zip((a, b), empty):
            agent.call("deregister", name)

    @ours
    @pytest.mark.parametrize("level", ["WARN", "FATAL"])
    def test_a_failure_is_logged_once(
        self, connect: Callable[..., Pair], capfd: pytest.CaptureFixture[str], level: str
    ) -> None:
        """NIXL asks often, but each kind of failure and connection logs one line, and none if NIXL
        is to be silent."""
        pair = connect(link="tcp", env={"NIXL_LOG_LEVEL": level})
        mine, theirs = pair.bufs(4096)
        pair.meet()
        theirs.deregister()
        for _ in range(10):
            with suppress(PeerError):
                pair.a.write(mine, theirs)
        said = [
            line
            for line in capfd.readouterr().err.splitlines()
            if "revoked" in line or "no region" in line
        ]
        lines = [line for line in said if "Xfer: " in line]
        assert len(lines) == (1 if level == "WARN" else 0), said

    @ours
    def test_deregistration_under_a_transfer(self, connect: Callable[..., Pair]) -> None:
        pair = connect(link="tcp", timeout_ms="2000")
        mine, theirs = pair.bufs(64 * MIB)
        key = pair.a.prepare("READ", mine, theirs)
        pair.b.kill(signal.SIGSTOP)
        try:
            assert pair.a.post(key) == "PROC"
            mine.deregister()
        finally:
            pair.b.kill(signal.SIGCONT)
        with pytest.raises(PeerError, match="nixl(Cancel|RemoteDisconnect)"):
            pair.a.state(key)

    @ours
    def test_query_memory_knows_the_kind_of_registered_memory(self, pair: Pair) -> None:
        mine = pair.a.buf(4096)
        asked = [(mine.address, 4096, 0, ""), (mine.address + 1, 4096, 0, ""), (1, 1, 0, "")]
        known, *unknown = pair.a.nixl("query_memory", asked, "UCCL", "DRAM")
        assert known["kind"] == "host" and unknown == [None, None]

    @ours
    def test_host_memory_is_not_a_gpus(self, pair: Pair) -> None:
        mine = pair.a.buf(4096)
        with pytest.raises(PeerError, match="nixlBackend|nixlInvalidParam"):
            pair.a.nixl("register_memory", [(mine.address, 4096, 0, "")], "VRAM")


class TestFaults:
    @ours
    @pytest.mark.parametrize("op", ["WRITE", "READ"])
    def test_killed_in_the_middle(self, connect: Callable[..., Pair], link: str, op: str) -> None:
        pair = connect(link=link, timeout_ms="2000")
        mine, theirs = pair.bufs(MIB, seed_a=1)
        assert pair.a.transfer(op, mine, theirs) == "DONE"
        key = pair.a.prepare(op, mine, theirs)
        pair.b.kill()
        with pytest.raises(PeerError, match="nixlRemoteDisconnect"):
            # The first transfer may end before the backend notices the peer's death.
            for _ in range(1000):
                pair.a.run(key)
        # NIXL 1.0 forgets the agent by itself.
        with pytest.raises(PeerError, match="nixl(RemoteDisconnect|NotFound)"):
            pair.a.write(mine, theirs)
        with pytest.raises(PeerError, match="nixl(RemoteDisconnect|NotFound)"):
            # A notification is sent without a wait, so a later one reports the loss.
            for _ in range(1000):
                pair.a.notify(pair.b, b"anybody there?")

    @ours
    def test_an_agent_of_the_same_name_comes_back(
        self, connect: Callable[..., Pair], agent: Callable[..., Agent], link: str
    ) -> None:
        pair = connect(link=link, timeout_ms="2000")
        mine, theirs = pair.bufs(MIB, seed_a=1)
        assert pair.a.write(mine, theirs) == "DONE"
        pair.b.kill()
        again = Pair(pair.a, agent("b", link=link))
        theirs = again.b.buf(MIB)
        pair.a.call("forget", "b")
        again.meet()
        assert again.a.write(mine, theirs, notif=b"welcome") == "DONE"
        assert theirs.get() == pattern(MIB, 1).tobytes()
        assert again.b.notifs() == {"a": [b"welcome"]}

    @ours
    def test_a_stopped_peer_is_given_up_in_time(self, connect: Callable[..., Pair]) -> None:
        pair = connect(link="tcp", timeout_ms="1000")
        mine, theirs = pair.bufs(64 * MIB)
        key = pair.a.prepare("READ", mine, theirs)
        pair.b.kill(signal.SIGSTOP)
        try:
            with pytest.raises(PeerError, match="nixlRemoteDisconnect"):
                pair.a.run(key, seconds=60)
        finally:
            pair.b.kill(signal.SIGCONT)

    @ours
    def test_release_ends_a_transfer_that_is_under_way(self, connect: Callable[..., Pair]) -> None:
        pair = connect(link="tcp", timeout_ms="4000")
        mine, theirs = pair.bufs(64 * MIB, seed_a=1)
        key = pair.a.prepare("WRITE", mine, theirs)
        assert pair.a.post(key) == "PROC"
        pair.a.release(key)
        # No byte lands any more.
        theirs.fill(0)
        time.sleep(0.2)
        assert not any(theirs.get())
        assert pair.a.write(mine.piece(0, MIB), theirs.piece(0, MIB)) == "DONE"

    def test_metadata_of_an_agent_that_is_gone(
        self, agent: Callable[..., Agent], link: str
    ) -> None:
        """Loading the metadata does not wait for the agent, and other agents continue."""
        a, gone, here = (agent(name, link=link) for name in ("a", "gone", "here"))
        metadata = gone.nixl("get_agent_metadata")
        mine, theirs = a.buf(4096, seed=1), here.buf(4096)
        gone.kill()
        time.sleep(0.1)
        with pytest.raises(PeerError, match="nixl(RemoteDisconnect|Backend|NotFound)"):
            a.nixl("add_remote_agent", metadata)
            a.notify(gone, b"anybody there?")
        a.meet(here)
        assert a.write(mine, theirs) == "DONE"

    @ours
    @pytest.mark.parametrize(
        "broken", [b"", b"uccl/1", b"uccl/1 nowhere 1", b"10.0.0.1:80?0000:00:00.0"]
    )
    def test_connection_info_of_others_is_refused(self, pair: Pair, broken: bytes) -> None:
        metadata = pair.b.nixl("get_agent_metadata")
        start = metadata.index(b"uccl/1 ")
        end = start + metadata[start:].index(b" ", 8) + 17
        length = len(broken).to_bytes(8, "little")
        damaged = metadata[: start - 8] + length + broken + metadata[end:]
        with pytest.raises(PeerError, match="nixl"):
            pair.a.nixl("add_remote_agent", damaged)


class TestAgents:
    def test_several_in_one_process_hear_only_their_own(self, start: Callable[..., object]) -> None:
        peer = start()
        agents = [Agent(peer, name).opened() for name in "abcd"]
        for one in agents:
            for other in agents:
                if one is not other:
                    one.meet(other)
        for one in agents:
            for other in agents:
                if one is not other:
                    one.notify(other, f"{one.name} to {other.name}".encode())
        for one in agents:
            wanted = {o.name: [f"{o.name} to {one.name}".encode()] for o in agents if o is not one}
            assert one.notifs(3) == wanted

    def test_an_agent_and_itself(self, agent: Callable[..., Agent], link: str) -> None:
        a = agent("a", link=link)
        source, target = a.buf(MIB, seed=1), a.buf(MIB)
        assert a.write(source, target, notif=b"to myself") == "DONE"
        assert target.get() == pattern(MIB, 1).tobytes()
        assert a.notifs() == {"a": [b"to myself"]}

    def test_many_agents_of_one_host(self, agent: Callable[..., Agent], link: str) -> None:
        target = agent("target", link=link)
        memory = target.buf(8 * 4096)
        others = [agent(f"other {i}", link=link) for i in range(4)]
        buffers = [other.buf(4096, seed=i) for i, other in enumerate(others)]
        for i, (other, mine) in enumerate(zip(others, buffers)):
            other.meet(target)
            assert other.write(mine, memory.piece(i * 8192, 4096), notif=b"done") == "DONE"
        assert target.notifs(4) == {other.name: [b"done"] for other in others}
        for i in range(4):
            assert memory.get(i * 8192, i * 8192 + 4096) == pattern(4096, i).tobytes()

    def test_connections_are_made_when_asked(self, pair: Pair) -> None:
        """An agent may connect to others in addition to the connection to itself."""
        mine, theirs = pair.bufs(4096, seed_a=1)
        own = pair.a.buf(4096)
        pair.a.nixl("make_connection", "b")
        assert pair.a.write(mine, own) == "DONE"
        assert pair.a.write(mine, theirs) == "DONE"

    @ours
    def test_ipv6(self, connect: Callable[..., Pair]) -> None:
        pair = connect(link="tcp", bind="::1")
        assert b"[::1]:" in pair.a.nixl("get_agent_metadata")
        mine, theirs = pair.bufs(MIB, seed_a=1)
        assert pair.a.write(mine, theirs, notif=b"6") == "DONE"
        assert theirs.get() == pattern(MIB, 1).tobytes() and pair.b.notifs() == {"a": [b"6"]}

    @ours
    def test_parameters(self, agent: Callable[..., Agent]) -> None:
        a = agent("a")
        offered = a.nixl("get_plugin_params", "UCCL")
        assert {"transport", "timeout_ms", "bind", "num_cpus", "port"} <= offered.keys()
        assert set(a.nixl("get_plugin_mem_types", "UCCL")) == {"DRAM_SEG", "VRAM_SEG"}
        agent("every", **offered)
        for wrong in ({"transport": "carrier pigeon"}, {"transprot": "tcp"}, {"port": "-1"}):
            with pytest.raises(PeerError, match="nixlBackend"):
                agent("wrong", **wrong)

    @ours
    def test_an_estimate(self, pair: Pair) -> None:
        mine, theirs = pair.bufs(16 * MIB)
        small = pair.a.prepare("WRITE", mine.piece(0, 4096), theirs.piece(0, 4096))
        large = pair.a.prepare("WRITE", mine, theirs)
        for _ in range(10):
            assert pair.a.run(small) == pair.a.run(large) == "DONE"
        cost = [pair.a.call("estimate", key) for key in (small, large)]
        assert 0 <= cost[0][0] < cost[1][0]

    @ours
    def test_telemetry_of_a_transfer(self, connect: Callable[..., Pair]) -> None:
        pair = connect(env={"NIXL_TELEMETRY_ENABLE": "y"})
        mine, theirs = pair.bufs(MIB)
        pieces = mine.pieces(7, 4096), theirs.pieces(7, 4096)
        key = pair.a.prepare("WRITE", *pieces)
        assert pair.a.run(key) == "DONE"
        assert pair.a.call("telemetry", key) == (7 * 4096, 7)


class TestNothingIsLeft:
    def test_connections_that_come_and_go(self, pair: Pair) -> None:
        mine, theirs = pair.bufs(MIB, seed_a=1)

        def rounds(count: int) -> None:
            for _ in range(count):
                pair.meet()
                assert pair.a.write(mine, theirs, notif=b"x") == "DONE"
                assert pair.b.notifs() == {"a": [b"x"]}
                pair.a.call("forget", "b")
                pair.b.call("forget", "a")

        pair.a.call("forget", "b")
        pair.b.call("forget", "a")
        rounds(5)
        before = [agent.peer.call("usage") for agent in (pair.a, pair.b)]
        rounds(20)
        for agent, usage in zip((pair.a, pair.b), before):
            no_growth(agent, usage)

    @ours
    def test_agents_that_come_and_go(self, agent: Callable[..., Agent], link: str) -> None:
        b = agent("b", link=link)
        theirs = b.buf(MIB)
        made = agent("maker", link=link)

        def rounds(count: int) -> None:
            for _ in range(count):
                a = Agent(made.peer, "a").opened()
                mine = a.buf(MIB, seed=1)
                a.meet(b)
                assert a.write(mine, theirs) == "DONE"
                a.call("close_agent")

        rounds(5)
        before = [one.peer.call("usage") for one in (made, b)]
        rounds(100)
        for one, usage in zip((made, b), before):
            no_growth(one, usage)

    @ours
    def test_peers_that_are_killed(self, agent: Callable[..., Agent], link: str) -> None:
        a = agent("a", link=link, timeout_ms="2000")
        mine = a.buf(MIB, seed=1)

        def rounds(count: int) -> None:
            for _ in range(count):
                b = agent("b", link=link)
                theirs = b.buf(MIB)
                a.meet(b)
                key = a.prepare("WRITE", mine, theirs)
                assert a.run(key) == "DONE"
                b.kill()
                with pytest.raises(PeerError, match="nixlRemoteDisconnect"):
                    for _ in range(1000):
                        a.run(key)
                a.release(key)
                # NIXL 1.0 forgets the agent by itself.
                with suppress(PeerError):
                    a.call("forget", "b")

        rounds(3)
        before = a.peer.call("usage")
        rounds(12)
        no_growth(a, before)

    @ours
    def test_refused_transfers_leave_nothing(self, pair: Pair) -> None:
        mine, theirs = pair.bufs(MIB)
        gone = pair.b.buf(4096)
        pair.meet()
        refused = pair.a.call("refuse", mine.descs * 1000, theirs.descs * 999 + gone.descs, "b", 20)
        before = pair.a.peer.call("usage")
        refused += pair.a.call(
            "refuse", mine.descs * 1000, theirs.descs * 999 + gone.descs, "b", 300
        )
        assert refused == 320
        no_growth(pair.a, before)

    def test_an_agent_that_did_nothing_ends(self, agent: Callable[..., Agent], link: str) -> None:
        """The teardown waits for no other agent: the call has a time limit."""
        agent("a", link=link).call("close_agent", within=10)


def no_growth(agent: Agent, before: dict[str, int]) -> None:
    """Waits for resources that are being freed, and fails if a process uses more than before."""
    deadline = time.monotonic() + 10
    while True:
        usage = agent.peer.call("usage")
        settled = usage["fds"] <= before["fds"] + 2 and usage["threads"] <= before["threads"]
        if settled or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert settled, (before, usage)
    assert usage["rss"] <= before["rss"] + 64 * MIB, (before, usage)
