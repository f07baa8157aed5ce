"""The peers that measure RDMA: this project, perftest, and libfabric's `fi_pingpong`."""

import math
import os
import shutil
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from bench.lib.bars import OURS
from bench.lib.cases import MIB, Case, Sample
from bench.lib.proc import BenchError, Process, free_port, run, wait_listening
from bench.peers import Context, Peer
from bench.peers.uccl import rows, value, version, why_no_binary
from bench.rdma.cases import KV_SIZE, LIBFABRIC, LOSSY_RC, LOSSY_UC, ONE, PERFTEST, PINGPONG, TWO
from bench.rdma.links import Rails

#: Transfers in flight while a rate is measured, by all peers that can.
IN_FLIGHT = 4
PROVIDER = "tcp;ofi_rxm"
#: perftest's MB, in 1e9 bytes.
_GB_PER_MB = MIB / 1e9


@dataclass
class RdmaContext(Context):
    """The context of a measurement of RDMA."""

    #: None where there are no devices.
    rails: Rails | None = None
    #: Per cent of packets that a lossy rail loses.
    loss: float = 1.0


class Uccl(Peer):
    """This project: `uccl bench --listen` with one end's devices and `--connect` with the other's.

    Every byte is looked at in a last, untimed round. Latency is measured in two ways: as
    `ib_write_lat` does (pingpong), and as the caller's wait until a write is acknowledged.
    """

    name = OURS

    def available(self, context: RdmaContext) -> str | None:
        return why_no_binary(context.uccl_bin)

    def version(self, context: RdmaContext) -> str:
        return version(context.uccl_bin)

    def covers(self, case: Case) -> bool:
        return True

    def measure(self, cases: list[Case], context: RdmaContext) -> list[Sample]:
        case = cases[0]
        lossy = case.link in (LOSSY_RC, LOSSY_UC)
        with context.rails.losing(context.loss) if lossy else nullcontext():
            before = context.rails.sent() if case.link == TWO else None
            samples = self._samples(cases, context)
            if before:
                sent = [now - then for now, then in zip(context.rails.sent(), before, strict=True)]
                samples = [_with_share(sample, sent) for sample in samples]
        return samples

    def _samples(self, cases: list[Case], context: RdmaContext) -> list[Sample]:
        case = cases[0]
        # As perftest's read and fi_pingpong: one buffer, which stays in the caches.
        inflight = IN_FLIGHT if case.unit == "GB/s" and case.link != LIBFABRIC else 1
        plan = [
            "--op",
            case.op,
            "--size",
            str(case.size),
            "--inflight",
            str(inflight),
            "--buffers",
            "1",
        ]
        if case.size == KV_SIZE:
            plan = ["--preset", "kv-sweep", "--iovs", ",".join(str(case.iovs) for case in cases)]
        plan += ["--duration", f"{round(context.seconds * 1000)}ms"]
        found = self._run(case, plan, context)
        samples = []
        for case in cases:
            # The share of a rail is found elsewhere, in the same run.
            row = next(
                (r for r in found if (r["size_bytes"], r["iovs"]) == (case.size, case.iovs)), None
            )
            if row is None or row.get("verified") == "no":
                raise BenchError(
                    f"{case.size} bytes: {'wrong ones arrived' if row else 'uccl bench has no row'}"
                )
            detail = {
                key: row.get(key) for key in ("inflight", "path", "verified", "count", "note")
            }
            detail["command"] = "uccl bench " + " ".join(plan)
            number = 0.0 if case.unit == "share" else value(row, case.unit)
            samples.append(Sample(case, number, detail))
        return samples

    def _run(self, case: Case, plan: list[str], context: RdmaContext) -> list[dict]:
        address = f"127.0.0.1:{free_port()}"
        ours, theirs = (_environment(case, context.rails, end) for end in ("ours", "theirs"))
        limit_s = 60 + 40 * context.seconds
        with Process([context.uccl_bin, "bench", "--listen", address, "--once"], theirs) as server:
            wait_listening(int(address.rsplit(":", 1)[1]), server)
            command = ["bench", "--connect", address, "--json", "-", *plan]
            return rows(context.uccl_bin, command, limit_s=limit_s, env=ours)


def _environment(case: Case, rails: Rails | None, end: str) -> dict[str, str]:
    """The settings of one end."""
    if case.link == LIBFABRIC:
        return {"UCCL_P2P_TRANSPORT": "libfabric", "UCCL_LIBFABRIC_PROVIDER": PROVIDER}
    devices = getattr(rails, end)[: 2 if case.link == TWO else 1]
    mode = {"UCCL_RCMODE": "0" if case.link == LOSSY_UC else "1"}
    return {"UCCL_P2P_TRANSPORT": "verbs", "UCCL_P2P_RDMA_DEV": ",".join(devices), **mode}


def _with_share(sample: Sample, sent: list[int]) -> Sample:
    sample.detail["sent"] = sent
    if sample.case.unit == "share":
        sample.value = min(sent) / max(1, sum(sent))
    return sample


class Perftest(Peer):
    """`ib_write_bw`, `ib_read_bw` and `ib_write_lat`; of two rails, one program each at the same time, summed.

    `ib_write_lat` is half of a ping-pong in which both sides watch their memory.
    """

    name = PERFTEST
    #: It sometimes calibrates its clock wrongly and prints nothing or infinity: then it is run again.
    TRIES = 8

    def available(self, context: RdmaContext) -> str | None:
        if context.rails is None:
            return "there are no RDMA devices here"
        found = shutil.which("ib_write_bw")
        return None if found else "perftest is not installed (Debian's package perftest)"

    def version(self, context: RdmaContext) -> str:
        # It exits with 1 after printing its version.
        with Process(["ib_write_bw", "--version"]) as asked:
            return "perftest " + asked.wait(limit_s=10).out.split()[-1]

    def covers(self, case: Case) -> bool:
        timed = case.unit != "us" or case.op == "pingpong"
        return case.link in (ONE, TWO) and case.size != KV_SIZE and case.unit != "share" and timed

    def measure(self, cases: list[Case], context: RdmaContext) -> list[Sample]:
        return [self._one(case, context) for case in cases]

    def _one(self, case: Case, context: RdmaContext) -> Sample:
        rails = range(2 if case.link == TWO else 1)
        if case.unit == "us":
            program, options = "ib_write_lat", ["-n", "1000"]
        else:
            program = f"ib_{case.op}_bw"
            count = context.iterations((self.name, case), case, guess_gb_s=0.08 / len(rails))
            options = ["-t", str(IN_FLIGHT), "-n", str(count)]
        command = [program, "-F", "-s", str(case.size), *options, *_pci_ordering()]
        for _ in range(self.TRIES):
            found = self._run(command, rails, context)
            if all(math.isfinite(number) and number > 0 for number in found):
                break
        else:
            raise BenchError(f"{program} printed no usable number in {self.TRIES} runs")
        total = found[0] if case.unit == "us" else sum(found) * _GB_PER_MB
        if case.unit == "GB/s":
            context.rates[(self.name, case)] = found[0] * MIB / case.bytes
        in_flight = 1 if case.unit == "us" else IN_FLIGHT
        return Sample(case, total, {"in_flight": in_flight, "command": " ".join(command)})

    def _run(self, command: list[str], rails: range, context: RdmaContext) -> list[float]:
        """The results of the programs of all rails, which run at once."""
        limit_s = 60 + 20 * context.seconds
        gid = [] if context.rails.gid_index is None else ["-x", str(context.rails.gid_index)]
        with ExitStack() as stack:
            ports = []
            for rail in rails:
                ports.append(free_port())
                end = [*command, *gid, "-p", str(ports[-1]), "-d", context.rails.theirs[rail]]
                server = stack.enter_context(Process(end))
                wait_listening(ports[-1], server)
            clients = []
            for rail, port in zip(rails, ports, strict=True):
                end = [*command, *gid, "-p", str(port), "-d", context.rails.ours[rail], "127.0.0.1"]
                clients.append(stack.enter_context(Process(end)))
            return [_number(command, client.wait(limit_s)) for client in clients]


def _pci_ordering() -> list[str]:
    """perftest's option for the order on the PCI bus: both let devices reorder their writes unless
    this project's setting forbids it."""
    is_strict = os.environ.get("UCCL_IB_PCI_RELAXED_ORDERING") == "0"
    return ["--disable_pcie_relaxed"] if is_strict else []


def _number(command: list[str], ended) -> float:
    """The row that begins with the size: its average rate in MB/s, or its typical latency in us."""
    size = command[command.index("-s") + 1]
    column = 4 if command[0].endswith("lat") else 3
    for line in ended.out.splitlines():
        words = line.split()
        if words[:1] == [size] and len(words) > column:
            return float(words[column])
    said = ended.err.strip() or ended.out.strip() or "nothing"
    raise BenchError(f"{command[0]} ended with {ended.code}: {said.splitlines()[-1]}")


class Pingpong(Peer):
    """`fi_pingpong`: messages go back and forth, one at a time, and its rate counts both directions.

    It sends and receives where this project writes; the other side acknowledges this project's
    transfer, and the returning message completes fi_pingpong's.
    """

    name = PINGPONG

    def available(self, context: RdmaContext) -> str | None:
        found = shutil.which("fi_pingpong")
        return None if found else "it is not installed (Debian's package libfabric-bin)"

    def version(self, context: RdmaContext) -> str:
        said = run(["fi_info", "--version"], limit_s=10).out.splitlines()
        library = next((line.split()[-1] for line in said if line.startswith("libfabric:")), "?")
        how = "messages there and back, one at a time (uccl: writes, one at a time)"
        return f"of libfabric {library}: {how}"

    def covers(self, case: Case) -> bool:
        return case.link == LIBFABRIC

    def measure(self, cases: list[Case], context: RdmaContext) -> list[Sample]:
        return [self._one(case, context) for case in cases]

    def _one(self, case: Case, context: RdmaContext) -> Sample:
        # Each iteration is two messages.
        count = max(5, context.iterations((self.name, case), case, guess_gb_s=0.5) // 2)
        port = str(free_port())
        options = ["-e", "rdm", "-p", PROVIDER, "-S", str(case.size), "-I", str(count)]
        limit_s = 60 + 20 * context.seconds
        with Process(["fi_pingpong", *options, "-B", port]) as server:
            wait_listening(int(port), server)
            ended = run(["fi_pingpong", *options, "-P", port, "127.0.0.1"], limit_s=limit_s)
        try:
            words = ended.out.splitlines()[1].split()
            found = float(words[5]) / 1000
        except (IndexError, ValueError) as error:
            raise BenchError(f"its answer could not be read: {ended.out!r}") from error
        context.rates[(self.name, case)] = found * 1e9 / case.bytes
        return Sample(case, found, {"in_flight": 1, "command": "fi_pingpong " + " ".join(options)})


def every() -> list[Peer]:
    """All, this project first."""
    return [Uccl(), Perftest(), Pingpong()]
