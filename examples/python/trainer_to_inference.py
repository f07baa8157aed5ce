"""Weights that move from a trainer to inference processes while these go on: a new checkpoint arrives whole, never half.

    pip install numpy, and this project        (with PyTorch installed its tensors are used, on a GPU if there is one)
    python examples/python/trainer_to_inference.py

Each inference process has room for two checkpoints. The trainer writes into the one that is not in use, all tensors as one
transfer, and the notification that follows the data says which version it is. From then on the process uses that one, and
says so; only then may the trainer write into the other.
"""

import sys
import time
from multiprocessing import get_context

import numpy as np
from uccl import p2p

try:
    import torch as xp

    DEVICE = "cuda" if xp.cuda.is_available() else "cpu"
    tensor = lambda array: xp.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
except ImportError:
    xp, DEVICE, tensor = np, "cpu", np.ascontiguousarray

SHAPES = [(64, 256), (256,), (256, 1024), (1024,), (1024, 16), (16,)]
INFERENCE, VERSIONS = 3, 12


def fresh(seed):
    random = np.random.default_rng(seed)
    return [
        tensor(random.normal(0, shape[0] ** -0.5, shape).astype(np.float32)) for shape in SHAPES
    ]


def answer(weights):
    """The model's output for a fixed input."""
    x = tensor(np.linspace(-1, 1, SHAPES[0][0], dtype=np.float32))
    for weight, bias in zip(weights[::2], weights[1::2]):
        x = xp.tanh(x @ weight + bias)
    return x.tolist()


def must(answer):
    """Returns the result of a call. Ends the program if the first element says that it failed."""
    ok, *rest = answer if isinstance(answer, tuple) else (answer,)
    if not ok:
        raise SystemExit(p2p.last_error())
    return rest[0] if rest else None


def infer(pipe):
    """An inference process. At any time it uses one whole version of the weights."""
    rooms = [fresh(0), fresh(0)]
    with p2p.Endpoint(bind="127.0.0.1") as endpoint:
        endpoint.start_passive_accept()
        descs = [endpoint.register_memory(room) for room in rooms]
        pipe.send(
            (endpoint.get_metadata(), [endpoint.get_serialized_descs(room) for room in descs])
        )
        version = 0
        said: dict[int, set[tuple[int, ...]]] = {}
        while version < VERSIONS:
            # Answers a request with the weights of one version, though another may be arriving.
            said.setdefault(version, set()).add(tuple(answer(rooms[version % 2])))
            for trainer, payload in endpoint.get_notifs():
                version = int(payload)
                must(endpoint.send_notif(trainer, payload))
        said[version] = {tuple(answer(rooms[version % 2]))}
        for room in descs:
            endpoint.deregister_memory(room)
        pipe.send(said)


def train(pipes):
    """The trainer: a step, then the weights go to all inference processes at once."""
    weights = fresh(0)
    said = {0: answer(weights)}
    with p2p.Endpoint(bind="127.0.0.1") as endpoint:
        mine = endpoint.register_memory(weights)
        peers = {}
        for pipe in pipes:
            metadata, rooms = pipe.recv()
            conn = must(endpoint.add_remote_endpoint(metadata))
            peers[conn] = [endpoint.deserialize_descs(room) for room in rooms]
        began, moved = time.perf_counter(), 0
        for version in range(1, VERSIONS + 1):
            for weight, change in zip(weights, fresh(version)):
                weight += 0.1 * change
            if DEVICE == "cuda":
                xp.cuda.synchronize()
            said[version] = answer(weights)
            transfers = [
                must(
                    endpoint.transfer(
                        conn, "write", mine, rooms[version % 2], notif=b"%d" % version
                    )
                )
                for conn, rooms in peers.items()
            ]
            # The next step changes the weights, so they must have been read by then.
            for transfer in transfers:
                if endpoint.wait(transfer) != (True, True):
                    raise SystemExit(endpoint.transfer_error(transfer))
                moved += endpoint.transfer_bytes(transfer)
            waiting = set(peers)
            while waiting:
                for conn, payload in endpoint.wait_notifs(timeout=60) or sys.exit(
                    "nobody says what it uses"
                ):
                    if int(payload) == version:
                        waiting.discard(conn)
        took = time.perf_counter() - began
        path = endpoint.connection(next(iter(peers)))["path"]
        endpoint.deregister_memory(mine)
    print(
        f"{VERSIONS} versions to {len(pipes)} processes: {moved / 1e6:.1f} MB in {took:.2f} s over {path},",
        f"on {DEVICE} with {xp.__name__}",
    )
    return said


def main():
    context = get_context("spawn")
    pipes, processes = [], []
    for _ in range(INFERENCE):
        pipe, theirs = context.Pipe()
        process = context.Process(target=infer, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        pipes.append(pipe)
        processes.append(process)
    try:
        expected = train(pipes)
        for number, pipe in enumerate(pipes):
            said = pipe.recv()
            # A mix of two versions would have given another answer.
            for version, answers in said.items():
                if answers != {tuple(expected[version])}:
                    raise SystemExit(f"process {number} had no whole version {version}")
            print(
                f"process {number} was asked between all updates and met {len(said)} versions, each whole"
            )
    except EOFError:
        raise SystemExit("a process has ended")
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
