"""The kernel of user-mode Linux: a program that boots in a second, built from Debian's source."""

from __future__ import annotations

import os

from shell import call

PACKAGE = "linux-source"
SUITE = "trixie-backports"

NEEDS = {
    "/usr/bin/gcc": "gcc",
    "/usr/bin/make": "make",
    "/usr/bin/flex": "flex",
    "/usr/bin/bison": "bison",
    "/usr/bin/bc": "bc",
    "/usr/bin/xz": "xz-utils",
}
"""Packages that build the kernel: a path of each, and the package."""

OPTIONS = """
 64BIT SMP HIGH_RES_TIMERS NO_HZ_IDLE PRINTK BUG MULTIUSER FUTEX EPOLL SIGNALFD TIMERFD EVENTFD
 SHMEM AIO IO_URING ADVISE_SYSCALLS MEMBARRIER POSIX_TIMERS POSIX_MQUEUE SYSVIPC
 CROSS_MEMORY_ATTACH FHANDLE FILE_LOCKING NAMESPACES NET_NS UTS_NS IPC_NS PID_NS USER_NS
 BINFMT_ELF BINFMT_SCRIPT BLOCK TTY UNIX98_PTYS NULL_CHAN HOSTFS PROC_FS PROC_SYSCTL SYSFS TMPFS
 DEVTMPFS OVERLAY_FS KALLSYMS PCI UML_PCI_OVER_VIRTIO VIRTIO_UML NET INET IPV6 UNIX PACKET
 NETDEVICES NET_CORE UML_NET_VECTOR VETH DUMMY NET_SCHED NET_SCH_NETEM NET_SCH_TBF NET_SCH_PRIO
 INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_ADDR_TRANS INFINIBAND_ON_DEMAND_PAGING RDMA_RXE
""".split()
"""Options that are on; all others are off."""

VALUES = """CONFIG_UML_PCI_OVER_VIRTIO_DEVICE_ID=1234
CONFIG_CON_ZERO_CHAN="null,fd:1"
CONFIG_CON_CHAN="null"
CONFIG_SSL_CHAN="null"
CONFIG_NR_CPUS=8
"""

EDITS = {
    # Tasks that poll share the processor: a higher tick rate lets them take turns more often.
    "arch/um/Kconfig": "/^config HZ$/,/default/s/default 100$/default 1000/",
    # After a packet lost inside a message, rxe's UC responder would drop every later message of
    # several packets; by the InfiniBand specification it drops that one message.
    "drivers/infiniband/sw/rxe/rxe_resp.c": (
        r"/do_class_d1e_error(struct/,/^}/s/^\t\treturn RESPST_CLEANUP;/"
        r"\t\tqp->resp.opcode = -1;\n\t\treturn RESPST_CHK_OP_SEQ;/"
    ),
}
"""sed's commands for files of the kernel's source."""

RECIPE = (OPTIONS, VALUES, EDITS)
"""All ingredients of the kernel, beside its source."""


def make(work: str, package: str, to: str) -> None:
    """Builds the kernel from the unpacked package."""
    call("tar", "xf", f"{work}/usr/src/{package}.tar.xz", "-C", work)
    tree = f"{work}/{package}"
    for file, edit in EDITS.items():
        call("sed", "-i", edit, f"{tree}/{file}")
    with open(tree + "/rdma.config", "w") as f:
        f.writelines(f"CONFIG_{name}=y\n" for name in OPTIONS)
        f.write(VALUES)
    call("make", "ARCH=um", "KCONFIG_ALLCONFIG=rdma.config", "allnoconfig", folder=tree)
    call("make", "ARCH=um", f"-j{os.cpu_count()}", "linux", folder=tree)
    call("strip", "-g", "-o", to + "/linux", tree + "/linux")
