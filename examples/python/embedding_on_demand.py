"""An embedding table, or the weights of experts, that is too big for every process: rows are read when they are needed.

    pip install numpy, and this project        (with PyTorch installed the rows read become its tensors, on a GPU if there is one)
    python examples/python/embedding_on_demand.py

One process has the table and does nothing more. Another reads the rows that it lacks, all of a batch with one call, and keeps
the rows that it used last. The table is advertised once; each piece of a read names its own row.
"""

import sys
from collections import OrderedDict
from multiprocessing import get_context

import numpy as np
from uccl import p2p

try:
    import torch as xp

    DEVICE = "cuda" if xp.cuda.is_available() else "cpu"
    zeros = lambda *shape: xp.zeros(shape, dtype=xp.float32, device=DEVICE)
except ImportError:
    xp, DEVICE = np, "cpu"
    zeros = lambda *shape: np.zeros(shape, np.float32)

ROWS, WIDTH = 200_000, 64
KEPT, BATCH, BATCHES = 4096, 512, 40
ROW_BYTES = WIDTH * 4

# The advert that lets a peer read the table. Address and size come first, and may be narrowed to a
# part.
ADVERT = np.dtype([("addr", "<u8"), ("size", "<u4"), ("rest", "V52")])


def must(answer):
    """Returns the result of a call. Ends the program if the first element says that it failed."""
    ok, *rest = answer if isinstance(answer, tuple) else (answer,)
    if not ok:
        raise SystemExit(p2p.last_error())
    return rest[0] if rest else None


def row(number):
    """The content of a row, by which a reader can check it."""
    return np.float32(number) + np.arange(WIDTH, dtype=np.float32) / WIDTH


def own(pipe):
    """The process that has the table."""
    table = np.arange(ROWS, dtype=np.float32)[:, None] + np.arange(WIDTH, dtype=np.float32) / WIDTH
    table = np.ascontiguousarray(table, np.float32)
    with p2p.Endpoint(bind="127.0.0.1") as endpoint:
        endpoint.start_passive_accept()
        mr = must(endpoint.reg(table))
        pipe.send((endpoint.get_metadata(), must(endpoint.advertise(mr, table))))
        pipe.recv()


class Rows:
    """A cache of the rows that were used last. It reads the others from the table."""

    def __init__(self, endpoint, metadata, advert):
        self.endpoint = endpoint
        self.conn = must(endpoint.add_remote_endpoint(metadata))
        self.table = np.frombuffer(advert, ADVERT)
        self.kept = zeros(KEPT, WIDTH)
        self.mr = must(endpoint.reg(self.kept))
        self.start = (
            self.kept.data_ptr() if hasattr(self.kept, "data_ptr") else self.kept.ctypes.data
        )
        self.place = OrderedDict()
        self.free = list(range(KEPT))
        self.read = self.found = 0

    def get(self, numbers):
        """These rows, as one array."""
        wanted = list(dict.fromkeys(numbers))
        missing = [number for number in wanted if number not in self.place]
        self.found += len(wanted) - len(missing)
        for number in wanted:
            if number in self.place:
                self.place.move_to_end(number)
        for number in missing:
            place = self.free.pop() if self.free else self.place.popitem(last=False)[1]
            self.place[number] = place
        if missing:
            self.fetch(
                np.array(missing, np.uint64),
                np.array([self.place[number] for number in missing], np.uint64),
            )
        return self.kept[[self.place[number] for number in numbers]]

    def fetch(self, rows, places):
        """Reads any number of rows of the table into places of the cache, with one call."""
        count = len(rows)
        adverts = np.repeat(self.table, count)
        adverts["addr"] += rows * ROW_BYTES
        adverts["size"] = ROW_BYTES
        mrs = np.full(count, self.mr, np.uint64)
        sizes = np.full(count, ROW_BYTES, np.uint64)
        must(
            self.endpoint.readv(
                self.conn, mrs, self.start + places * ROW_BYTES, sizes, adverts.view(np.uint8)
            )
        )
        self.read += count


def main():
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    theirs.close()
    random = np.random.default_rng(5)
    try:
        metadata, advert = pipe.recv()
    except EOFError:
        raise SystemExit("the process that has the table has ended")
    with p2p.Endpoint(bind="127.0.0.1") as endpoint:
        rows = Rows(endpoint, metadata, advert)
        for _ in range(BATCHES):
            # A few rows are asked for often, and most hardly ever, as words are.
            numbers = [int(number) for number in random.zipf(1.2, BATCH) % ROWS]
            got = rows.get(numbers)
            if got.tolist() != [row(number).tolist() for number in numbers]:
                raise SystemExit("a row is not what it should be")
        print(
            f"{BATCHES} batches of {BATCH} rows: {rows.read} read over {endpoint.connection(rows.conn)['path']},",
            f"{rows.found} were here, on {DEVICE} with {xp.__name__}",
        )
    pipe.send(None)
    owner.join()
    sys.exit(owner.exitcode)


if __name__ == "__main__":
    main()
