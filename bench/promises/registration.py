"""The cost of registering memory and of deregistering it.

Registers 4 KiB of host memory repeatedly, each time memory that is registered nowhere else, and
measures `reg` and `dereg` in Python. With --cuda the driver is loaded first. The wheel must be
installed:

    python -m bench.promises.registration [--cuda]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time

import numpy as np
from uccl import p2p

ROUNDS = 9


def load_cuda() -> None:
    """Makes a GPU's context in this process, as programs that use GPUs do."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
        ("cuCtxSetCurrent", (context,)),
    )
    for name, arguments in calls:
        if code := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} returns {code}")


def registered_us(ep: p2p.Endpoint, base: int, size: int, count: int) -> tuple[float, float]:
    """Microseconds of one registration, and of one deregistration."""
    began = time.perf_counter()
    made = [ep.reg(base + at * size, size) for at in range(count)]
    middle = time.perf_counter()
    for _, mr in made:
        ep.dereg(mr)
    ended = time.perf_counter()
    if not all(ok for ok, _ in made):
        raise RuntimeError(ep.last_error())
    return (middle - began) * 1e6 / count, (ended - middle) * 1e6 / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="load CUDA's driver first")
    parser.add_argument("--size", type=int, default=4096, help="bytes of a registration")
    parser.add_argument("--count", type=int, default=2000, help="how many are there at a time")
    args = parser.parse_args()
    if args.cuda:
        load_cuda()
    ep = p2p.Endpoint(bind="127.0.0.1", port=0)
    memory = np.ones(args.size * args.count, np.uint8)
    took = [registered_us(ep, memory.ctypes.data, args.size, args.count) for _ in range(ROUNDS)]
    reg, dereg = (round(float(np.median(times)), 2) for times in zip(*took))
    ep.close()
    print(json.dumps({"cuda": args.cuda, "size": args.size, "reg_us": reg, "dereg_us": dereg}))


if __name__ == "__main__":
    main()
