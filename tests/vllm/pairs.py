"""Two engines of vLLM, of which one computes prompts and the other one goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine import NIXL, Engine, Place
from peer import can_make_namespaces
from test_two_hosts import Hosts

#: Where the engines are: parameters of a fixture.
ONE_HOST, TWO_HOSTS = PLACES = ["one host", "two hosts over TCP"]


@dataclass
class PairSetup:
    """A prefill engine and a decode engine that are to be started."""

    model: Path
    logs: Path
    #: The port of the first one; the second one's is ten above.
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The configuration of KV transfer, to which an engine's name is added as this key.
    connector: Mapping[str, Any] = field(default_factory=lambda: NIXL)
    name_key: str | None = None

    @contextlib.contextmanager
    def started(self, where: str) -> Iterator[tuple[Engine, Engine]]:
        """The engines, which answer, on one host or on two."""
        environment = dict(self.environment)
        with contextlib.ExitStack() as stack:
            places = [Place(), Place()]
            if where == TWO_HOSTS:
                if lacking := can_make_namespaces():
                    pytest.skip(f"lacks {lacking}")
                hosts = Hosts("ipv4")
                stack.callback(hosts.close)
                places = [Place(*names) for names in zip(hosts.ips, hosts.names)]
                # Two namespaces share their machine's memory, which two hosts do not.
                environment["UCCL_P2P_TRANSPORT"] = "tcp"
            engines = []
            for at, (name, role) in enumerate(
                [("prefill", "kv_producer"), ("decode", "kv_consumer")]
            ):
                named = {self.name_key: name} if self.name_key else {}
                engine = Engine(
                    name,
                    self.model,
                    self.port + 10 * at,
                    role,
                    self.logs / f"{name}.log",
                    places[at],
                    environment,
                    {**self.connector, **named},
                )
                stack.callback(engine.close)
                engines.append(engine)
            for engine in engines:
                engine.wait()
            yield engines[0], engines[1]
