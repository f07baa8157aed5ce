"""Debian's packages: those that a guest needs here, and those that contain its kernel."""

from __future__ import annotations

import glob
import os
import shutil
import sys

from shell import GuestError, Lacking, call

HOST = "host"
"""The suite that the host's own sources name."""


def install(needs: dict[str, str]) -> None:
    """Installs missing packages: `needs` maps a path of each package to its name."""
    missing = sorted({package for path, package in needs.items() if not glob.glob(path)})
    if not missing:
        return
    remedy = f"as root on Debian or Ubuntu: apt-get install {' '.join(missing)}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Lacking(f"lacks {', '.join(missing)} ({remedy})")
    print("guest: installing", *missing, file=sys.stderr, flush=True)
    try:
        call("apt-get", "update")
        call("apt-get", "install", "-y", "--no-install-recommends", *missing)
    except GuestError as error:
        raise Lacking(f"lacks {', '.join(missing)}: {error}") from error


def unpack(meta: str, suite: str, work: str) -> str:
    """Unpacks the package that `meta` depends on in a suite into `work`; returns its name."""
    if not shutil.which("apt-get"):
        raise Lacking(
            "lacks Debian's apt-get, which fetches the guest's kernel; that can be copied here "
            "from the folder ~/.cache/rdma-vm of a machine that has it"
        )
    try:
        return _unpack(meta, suite, work)
    except GuestError as error:
        raise Lacking(f"lacks {meta} of {suite}: {error}") from error


def _unpack(meta: str, suite: str, work: str) -> str:
    apt = ["-o", "APT::Sandbox::User=root"]
    if suite != HOST:
        apt += _sources_of(suite, work)
    call("apt-get", *apt, "update")
    shown = call("apt-cache", *apt, "show", "--no-all-versions", meta)
    package = next(
        (line.split()[1] for line in shown.splitlines() if line.startswith("Depends:")), None
    )
    if package is None:
        raise GuestError(f"{meta} depends on no package")
    call("apt-get", *apt, "download", package, folder=work)
    call("dpkg", "-x", *glob.glob(work + "/*.deb"), work)
    return package


def _sources_of(suite: str, work: str) -> list[str]:
    """Options that give apt lists of its own: the host's sources do not change."""
    os.makedirs(work + "/lists/partial")
    sites = call(
        "apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"
    )
    words = [line.split() for line in sites.splitlines() if line]
    mirror = next((w[0] for w in words if "security" not in w[1]), None)
    if mirror is None:
        raise GuestError("apt knows no mirror of Debian")
    with open(work + "/sources.list", "w") as f:
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        f.write(f"deb [signed-by={keys}] {mirror} {suite} main\n")
    return [
        "-o",
        f"Dir::Etc::SourceList={work}/sources.list",
        "-o",
        "Dir::Etc::SourceParts=-",
        "-o",
        f"Dir::State::Lists={work}/lists",
        "-o",
        f"Dir::Cache={work}",
    ]
