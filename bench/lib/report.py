"""Prints a run's results: a table for each group of cases, and the bars."""

from collections import Counter

from bench.lib.bars import OURS, Verdict
from bench.lib.cases import human
from bench.lib.machine import NOISY
from bench.lib.results import Results


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value < 0:
        return "-" + number(-value)
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines with columns padded to their widest cell; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def case_lines(results: Results) -> list[str]:
    """One table a group: sizes down, peers across; median [min-max], and how far this project is ahead."""
    lines: list[str] = []
    cases = results.cases()
    for group in dict.fromkeys(case.group for case in cases):
        members = sorted(case for case in cases if case.group == group)
        peers = [
            peer for peer in results.peers() if any(results.values(peer, case) for case in members)
        ]
        rows = [["size", *peers]]
        for case in members:
            rows.append([human(case.size), *(_cell(results, peer, case) for peer in peers)])
        lines += ["", f"{group.title()}, {group.unit}", *aligned(rows)]
        in_force = _congestion(results, peers, members)
        if in_force:
            lines.append(f"congestion control in force: {in_force}")
    if lines:
        left_out, every = results.disturbed()
        lines += [
            "",
            "median [min-max] over the rounds; (N x) is how many times better uccl is than that peer",
        ]
        if left_out or any(results.noisy(peer, case) for peer in results.peers() for case in cases):
            lines.append(
                f"{left_out} of {every} values are left out: others used over {NOISY:.0%} of the machine"
                " meanwhile; ~ marks those that had to do because no round was calmer"
            )
    return lines


def _cell(results: Results, peer: str, case) -> str:
    values = results.values(peer, case)
    if not values:
        return "FAILED" if results.failures.get((peer, case)) else "-"
    median, (low, high) = results.median(peer, case), results.spread(peer, case)
    noisy = "~" if results.noisy(peer, case) else ""
    cell = f"{noisy}{number(median)} [{number(low)}-{number(high)}]"
    ours = results.median(OURS, case)
    if ours is not None and peer != OURS and median > 0 and ours > 0:
        cell += f" ({number(ours / median if case.unit == 'GB/s' else median / ours)}x)"
    return cell


def _congestion(results: Results, peers: list[str], members: list) -> str:
    words = []
    for peer in peers:
        details = [value.detail for case in members for value in results.values(peer, case)]
        seen = {str(detail["congestion"]) for detail in details if detail.get("congestion")}
        if seen:
            words.append(f"{peer} {' / '.join(sorted(seen))}")
    return ", ".join(words)


def bar_lines(verdicts: list[Verdict]) -> list[str]:
    """One row for each bar: name | bar | measured | range | ok, NOT, unclear or absent."""
    rows = [["what", "bar", "measured", "range", ""]]
    for verdict in verdicts:
        bar = verdict.bar
        if verdict.measured is None:
            measured, spread = verdict.reason, ""
        else:
            unit = bar.ours[0][1].unit
            size = f"{number(verdict.measured)}{' ' + unit if bar.minus else 'x'}"
            measured = (
                f"{size} ({number(verdict.ours)} / {number(verdict.theirs)} {unit})"
                if bar.theirs
                else f"{number(verdict.measured)} {unit}"
            )
            spread = (
                f"[{number(verdict.spread[0])}-{number(verdict.spread[1])}]"
                if verdict.spread
                else ""
            )
        rows.append(
            [
                bar.what,
                bar.limit(),
                measured,
                spread,
                verdict.state + (" ~" if verdict.noisy else ""),
            ]
        )
    counts = Counter(verdict.state for verdict in verdicts)
    unclear = f", {counts['unclear']} unclear" if counts["unclear"] else ""
    total = f"{counts['ok']} ok, {counts['NOT']} NOT{unclear}, {counts['absent']} absent"
    return ["", "bars: ratios of medians", *aligned(rows), "", total]


def failure_lines(results: Results) -> list[str]:
    """Failed cases, with the reasons."""
    lines = [
        f"{peer}: {case.title()} {human(case.size)}: {reasons[-1]}"
        for (peer, case), reasons in results.failures.items()
    ]
    return ["", "failed", *lines] if lines else []
