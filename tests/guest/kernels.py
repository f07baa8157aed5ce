"""The guest's kernel: made once, and kept in ~/.cache/rdma-vm (or RDMA_VM_CACHE)."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
import tempfile
import zlib

import debian
import stock
import user_mode
from shell import Lacking

CACHE = os.environ.get("RDMA_VM_CACHE") or os.path.expanduser("~/.cache/rdma-vm")

USERLAND = {
    "/bin/busybox": "busybox-static",
    "/sbin/tc": "iproute2",
    "/usr/bin/ibv_devinfo": "ibverbs-utils",
    "/usr/lib/*/libibverbs/librxe-*.so": "ibverbs-providers",
    "/usr/bin/pgrep": "procps",
}
"""The host's programs that the guest runs: a path of each package, and the package."""


def prepare(engine: str, suite: str | None) -> str:
    """Installs the packages of a guest and makes its kernel, unless there is one; returns the
    kernel's folder."""
    if platform.machine() != "x86_64":
        raise Lacking(f"lacks guests for {platform.machine()}: they exist for x86_64")
    kind = user_mode if engine == "uml" else stock
    suite = suite or kind.SUITE
    # The key depends on the recipe alone: other changes of these modules rebuild no kernel.
    key = zlib.crc32(repr(kind.RECIPE).encode())
    kernel = f"{CACHE}/{'uml' if engine == 'uml' else 'qemu'}-{suite}-{key:08x}"
    os.makedirs(CACHE, exist_ok=True)
    with open(CACHE + "/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = os.path.exists(kernel)
        # An existing user-mode kernel needs no compiler.
        debian.install(USERLAND if made and engine == "uml" else {**USERLAND, **kind.NEEDS})
        if not made:
            print(f"guest: making the kernel, {kernel}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                package = debian.unpack(kind.PACKAGE, suite, work)
                os.mkdir(work + "/made")
                kind.make(work, package, work + "/made")
                os.rename(work + "/made", kernel)
    return kernel
