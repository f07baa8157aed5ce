"""Runs other programs, and reports the reason why there is no guest."""

from __future__ import annotations

import os
import shlex
import subprocess

FAILED = 125
"""Exit status when the guest failed, or a part of it could not be made."""
LACKING = 77
"""Exit status when this machine lacks a part of the guest that could not be installed."""


class GuestError(Exception):
    """Ends this program with a message."""

    status = FAILED


class Lacking(GuestError):
    """This machine cannot have a guest; the message names the missing part."""

    status = LACKING


def call(*words: str, folder: str | None = None) -> str:
    """The output of a command that has to succeed; a failure shows it."""
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C")
    ended = subprocess.run(
        words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ended.returncode:
        raise GuestError(f"{shlex.join(words)} failed:\n{ended.stdout[-5000:]}")
    return ended.stdout
