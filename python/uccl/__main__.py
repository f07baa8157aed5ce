"""The part of the command ``uccl`` that comes with the wheel.

``bench``, ``topo`` and ``doctor`` are a program of their own: it is called if it is on the path. Without it ``doctor``
shows its part about frameworks.
"""

from __future__ import annotations

import os
import sys

_HELP = """\
usage: uccl nixl-dir [--nixl-plugins DIR] [--instead-of-ucx]
       uccl doctor

nixl-dir   prints a folder for NIXL_PLUGIN_DIR that holds NIXL's own plugins and UCCL's
doctor     says what each installed framework would use of this project, and why

bench, topo and the rest of doctor belong to the whole command, which this one calls if it is on the path.
From the sources: cargo install --path crates/uccl-cli
"""


def main() -> int:
    """Runs a subcommand; returns the exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["nixl-dir"]:
        from uccl.nixl.__main__ import main as nixl_dir

        return nixl_dir(arguments[1:], prog="uccl nixl-dir")
    whole = _whole_command()
    if whole:
        os.execv(whole, [whole, *arguments])
    if arguments == ["doctor"]:
        from uccl.frameworks import findings, text

        print(text(findings()))
        return 0
    asked_for_help = arguments in (["--help"], ["-h"], ["help"])
    print(_HELP, end="", file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


def _whole_command() -> str | None:
    for folder in os.get_exec_path():
        path = os.path.join(folder, "uccl")
        try:
            with open(path, "rb") as file:
                # Not this script, nor that of another environment.
                if file.read(4) == b"\x7fELF" and os.access(path, os.X_OK):
                    return path
        except OSError:
            continue
    return None


if __name__ == "__main__":
    sys.exit(main())
