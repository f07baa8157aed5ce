"""iperf3: one TCP stream, no transfer semantics at all."""

import json
import shutil

from bench.lib.cases import Case, Sample
from bench.lib.congestion import Pin
from bench.lib.proc import BenchError, Process, free_port, run, wait_listening

from . import Context, Peer


class Iperf3(Peer):
    """One stream, written in pieces of the case's size (at most 1 MiB: iperf3's own bound). A raw ceiling."""

    name = "iperf3"

    def available(self, context: Context) -> str | None:
        return None if shutil.which("iperf3") else "iperf3 is not installed (run --install as root)"

    def version(self, context: Context) -> str:
        return run(["iperf3", "--version"], limit_s=10).out.split("\n", 1)[0]

    def covers(self, case: Case) -> bool:
        return case.link == "tcp" and case.op == "write" and case.unit == "GB/s" and case.iovs == 1

    def measure(self, cases: list[Case], context: Context) -> list[Sample]:
        # A stream has no transfer size: one run answers for all of them.
        piece = min(max(case.size for case in cases), 1 << 20)
        with Pin(cases[0].congestion) as pin:
            port = str(free_port())
            arguments = ["-t", str(max(1, round(context.seconds))), "-l", str(piece), "-J"]
            with Process(["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port], pin.env) as server:
                wait_listening(int(port), server)
                ended = run(
                    ["iperf3", "-c", "127.0.0.1", "-p", port, *arguments],
                    limit_s=context.limit_s(cases),
                    env=pin.env,
                )
            in_force = pin.in_force
        try:
            value = json.loads(ended.out)["end"]["sum_received"]["bits_per_second"] / 8e9
        except (ValueError, KeyError) as error:
            raise BenchError(f"iperf3's answer could not be read: {error!r}") from error
        detail = {
            "in_flight": "stream",
            "congestion": in_force,
            "command": "iperf3 -c 127.0.0.1 " + " ".join(arguments),
        }
        return [Sample(case, value, detail) for case in cases]
