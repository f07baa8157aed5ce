"""The picture of README's table "How fast", as SVG: ``python bench/speed_picture.py`` writes docs/speed.svg."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/speed.svg"
WIDTH, LEFT, VALUE, BAR, GAP, TOP = 960, 270, 110, 18, 26, 44
OWN, PEER = "#1b6ca8", "#b9c4cc"


class Bar(NamedTuple):
    """One program's figure."""

    name: str
    figure: float


class Group(NamedTuple):
    """A row of the table: this project's bar, then those of its peers."""

    title: str
    unit: str
    bars: list[Bar]

    def shares(self) -> list[float]:
        """The speed of each bar as a part of the fastest one's. Of times the shortest is the fastest."""
        figures = [bar.figure for bar in self.bars]
        if self.unit == "us":
            return [min(figures) / figure for figure in figures]
        return [figure / max(figures) for figure in figures]


def groups(readme: str) -> list[Group]:
    """The rows of the table with the header "| | here | beside it |".

    Raises ``ValueError`` if there is none, or if a row has figures that cannot be read.
    """
    rows = readme.split("| | here | beside it |\n| --- | --- | --- |\n", 1)
    if len(rows) != 2:
        raise ValueError("README.md has no table with the header | | here | beside it |")
    lines = rows[1].split("\n\n", 1)[0].splitlines()
    return [group_of([cell.strip() for cell in line.strip("| ").split(" | ")]) for line in lines]


def group_of(cells: list[str]) -> Group:
    """A row. Where a cell has several figures, the first counts."""
    title, own, peers = cells
    found = re.match(r"([\d.]+)(?:, [\d.]+)* (GB/s|us)", own)
    pairs = [re.fullmatch(r"(.+?) ([\d.]+)", peer) for peer in peers.split(", ")]
    if not found or not all(pairs):
        raise ValueError(f"no figures in the row: {title}")
    bars = [
        Bar("uccl-rs", float(found[1])),
        *(Bar(pair[1], float(pair[2])) for pair in pairs if pair),
    ]
    return Group(title, found[2], bars)


def picture(all_groups: list[Group]) -> str:
    """The text of the SVG file."""
    parts, height = [text(LEFT, 22, "speed, as a part of the fastest of each row", 13)], TOP
    for group in all_groups:
        parts.append(text(8, height + 13, group.title, 13, "bold"))
        height += GAP
        for nth, (bar, share) in enumerate(zip(group.bars, group.shares())):
            length = max(share * (WIDTH - LEFT - VALUE), 1.0)
            parts.append(text(24, height + 13, bar.name, 12))
            colour = PEER if nth else OWN
            parts.append(
                f'<rect x="{LEFT}" y="{height}" width="{length:.1f}" height="{BAR - 3}" fill="{colour}"/>'
            )
            parts.append(text(LEFT + length + 6, height + 12, f"{bar.figure:g} {group.unit}", 12))
            height += BAR
        height += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return (
        "\n".join(
            [head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]
        )
        + "\n"
    )


def text(left: float, top: float, content: str, size: int, weight: str = "normal") -> str:
    """A line of text."""
    return f'<text x="{left:.1f}" y="{top}" font-size="{size}" font-weight="{weight}">{escape(content)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail if docs/speed.svg is not that of README's table"
    )
    check = parser.parse_args().check
    wanted = picture(groups((ROOT / "README.md").read_text(encoding="utf-8")))
    if check:
        if PICTURE.read_text(encoding="utf-8") != wanted:
            print(
                "docs/speed.svg is not README's table: python bench/speed_picture.py",
                file=sys.stderr,
            )
            return 1
        return 0
    PICTURE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
