"""Debian's own kernel for QEMU, with an initramfs of the drivers that it needs here."""

from __future__ import annotations

import glob
import lzma
import os
import shutil

from shell import call

PACKAGE = "linux-image-amd64"
SUITE = "host"

NEEDS = {"/usr/bin/qemu-system-x86_64": "qemu-system-x86", "/sbin/modprobe": "kmod"}
"""Packages that make and run the kernel: a path of each, and the package."""

MODULES = """virtio_pci 9pnet_virtio 9p overlay virtio_net veth dummy ib_uverbs rdma_ucm
 crc32_generic rdma_rxe sch_netem sch_tbf sch_prio""".split()

with open(os.path.join(os.path.dirname(__file__), "boot/qemu.sh")) as _f:
    INIT = _f.read()

RECIPE = (MODULES, INIT)
"""All ingredients of the kernel, beside its package."""


def make(work: str, package: str, to: str) -> None:
    """Copies vmlinuz from the unpacked package, and makes an initramfs."""
    version = package.removeprefix("linux-image-")
    call("/sbin/depmod", "-b", work, version)
    order: dict[str, str] = {}  # module files, dependencies first
    for module in MODULES:
        deps = call("/sbin/modprobe", "-d", work, "-S", version, "--show-depends", module)
        for words in map(str.split, deps.splitlines()):
            if words[0] == "insmod":
                order[words[1]] = os.path.basename(words[1]).removesuffix(".xz")
    files = [(d, 0o40755, b"") for d in ("bin", "proc", "dev", "modules", "lower", "rw", "new")]
    files.append(("bin/busybox", 0o100755, _contents("/bin/busybox")))
    files += [(f"modules/{name}", 0o100755, _contents(path)) for path, name in order.items()]
    files.append(("modules/order", 0o100644, "\n".join([*order.values(), ""]).encode()))
    files.append(("init", 0o100755, INIT.encode()))
    shutil.copy(glob.glob(work + "/boot/vmlinuz-*")[0], to + "/vmlinuz")
    with open(to + "/initrd", "wb") as f:
        f.write(_cpio(files))


def _contents(path: str) -> bytes:
    with (lzma.open if path.endswith(".xz") else open)(path, "rb") as f:
        return f.read()


def _cpio(files: list[tuple[str, int, bytes]]) -> bytes:
    """A newc archive of names, modes and contents."""
    out = bytearray()
    for inode, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        name_bytes = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name_bytes), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name_bytes
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(data) % 4)
    return bytes(out)
