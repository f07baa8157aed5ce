"""UCX: its own `ucx_perftest`, out of the libucx wheel."""

import os

from bench.lib.cases import Case, Sample
from bench.lib.congestion import Pin
from bench.lib.paths import site_packages
from bench.lib.proc import BenchError, Process, free_port, run, wait_listening

from . import Context, Peer


class Ucx(Peer):
    """`ucx_perftest`: many transfers in flight (its default window), except for latencies.

    Its mapped-memory runs take the buffers from UCX's own shared memory (`UCX_TLS=posix`), as memory from
    this project's alloc is; its plain-memory runs let UCX choose between its staging and `process_vm_*`
    (`posix,cma`).
    """

    name = "ucx"
    distribution = "libucx-cu13"

    def available(self, context: Context) -> str | None:
        home = self._home()
        if home is None or not (home / "bin" / "ucx_perftest").exists():
            return "libucx-cu13 is not installed (run with --install)"
        (home / "bin" / "ucx_perftest").chmod(0o755)
        (home / "bin" / "ucx_info").chmod(0o755)
        return None

    def version(self, context: Context) -> str:
        out = run([self._home() / "bin" / "ucx_info", "-v"], limit_s=10, env=self._env("")).out
        return next(
            (
                line.split(":", 1)[1].strip()
                for line in out.splitlines()
                if "Library version" in line
            ),
            "unknown",
        )

    def covers(self, case: Case) -> bool:
        if case.iovs > 1:
            return False  # UCP's put and get take one contiguous buffer.
        return case.op in ("write", "read") or (case.op == "send" and case.link == "local")

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        return [self._one(case, context) for case in cases]

    def _one(self, case: Case, context: Context) -> Sample:
        test, guess = self._test(case)
        count = context.iterations((self.name, case), case, guess)
        with Pin(case.congestion) as pin:
            env = {**self._env(self._transports(case)), **pin.env}
            port = free_port()
            binary = self._home() / "bin" / "ucx_perftest"
            arguments: list[str | int] = [
                "-t",
                test,
                "-s",
                case.size,
                "-n",
                count,
                "-w",
                max(2, min(count // 10, 10000)),
                "-f",
            ]
            with Process([binary, "-p", port], env) as server:
                wait_listening(port, server)
                client = run(
                    [binary, "127.0.0.1", "-p", port, *arguments],
                    limit_s=context.limit_s([case]),
                    env=env,
                )
                in_force = pin.in_force
        typical_us, overall_us = self._parse(client.out)
        context.rates[(self.name, case)] = 1e6 / overall_us
        if case.unit == "GB/s":
            value = case.bytes / overall_us / 1e3
        else:
            # perftest halves its ping-pong. An acknowledged write is there and back again.
            value = typical_us if case.op == "send" else 2 * typical_us
        return Sample(
            case,
            value,
            {
                "in_flight": "1" if test.endswith("_lat") else "many",
                "congestion": in_force,
                "command": f"UCX_TLS={env['UCX_TLS']} ucx_perftest "
                + " ".join(map(str, arguments)),
            },
        )

    @staticmethod
    def _test(case: Case) -> tuple[str, float]:
        """The perftest test, and a guess of its GB/s for the first round."""
        if case.op == "send":
            return "tag_lat", 4.0
        if case.unit == "us":
            # A ping-pong of puts, each side polling its memory: half a round trip is reported.
            return "ucp_put_lat", (0.2 if case.link == "tcp" else 4.0)
        if case.op == "read":
            return "ucp_get", (1.0 if case.link == "tcp" else 5.0)
        return "ucp_put_bw", (2.0 if case.link == "tcp" else 5.0)

    @staticmethod
    def _transports(case: Case) -> str:
        if case.link == "tcp":
            return "tcp"
        return "posix" if case.memory == "alloc" else "posix,cma"

    @staticmethod
    def _parse(out: str) -> tuple[float, float]:
        """Median and overall microseconds of a transfer, from the final line of `-f`."""
        for line in reversed(out.splitlines()):
            words = line.split()
            if len(words) >= 4 and words[0].isdigit():
                return float(words[1]), float(words[3])
        raise BenchError("ucx_perftest printed no result")

    @staticmethod
    def _home():
        packages = site_packages()
        return packages / "libucx" if packages else None

    def _env(self, transports: str) -> dict[str, str]:
        env = {
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(self._home() / "lib"), os.environ.get("LD_LIBRARY_PATH")])
            ),
            "UCX_WARN_UNUSED_ENV_VARS": "n",
        }
        if transports:
            env["UCX_TLS"] = transports
        if transports == "tcp":
            env["UCX_NET_DEVICES"] = "lo"
        return env
