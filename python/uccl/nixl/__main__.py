"""``python -m uccl.nixl``: prints the folder for ``NIXL_PLUGIN_DIR``."""

from __future__ import annotations

import argparse
import sys

from uccl.nixl import plugin_dir


def main(arguments: list[str] | None = None, prog: str = "python -m uccl.nixl") -> int:
    """Prints the folder, or why there is none; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Prints a folder for NIXL_PLUGIN_DIR that holds NIXL's own plugins and UCCL's.",
    )
    parser.add_argument(
        "--nixl-plugins", metavar="DIR", help="where NIXL's own plugins are [default: found]"
    )
    parser.add_argument(
        "--instead-of-ucx",
        action="store_true",
        help="UCCL's under UCX's name too, for programs that ask NIXL for UCX alone",
    )
    options = parser.parse_args(arguments)
    try:
        print(plugin_dir(options.nixl_plugins, instead_of_ucx=options.instead_of_ucx))
    except (ImportError, OSError) as error:
        print(f"uccl: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
