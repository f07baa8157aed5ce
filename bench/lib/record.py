"""The format of the files in bench/results: a head of five fields, then the text of the run.

```text
date: 2026-11-27
hardware: two H200 joined by NVLink, driver 580
revision: 00f32b6
question: What share of a pair's rate does each of four GPUs send when all send to all?
command: python3 -m bench.promises.exchange --gpus 4
command: ...

the program's output

values: every value as JSON, one a line
values [{"peer": "uccl", ...
```

A line that begins with two blanks goes on with the field above it. The part behind the line `values:` is there for
programs that keep every value. `values_of` gives their document back.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.paths import BENCH

RESULTS = BENCH / "results"
INDEX = RESULTS / "README.md"
#: The fields of a head, in their order. The last one may stand several times.
FIELDS = ("date", "hardware", "revision", "question", "command")
#: The line in front of the values.
VALUES = "values: every value as JSON, one a line"
_WIDTH = 120


class Malformed(Exception):
    """A file of bench/results does not have the format."""


@dataclass(frozen=True)
class Head:
    """The head of a result."""

    date: str
    hardware: str
    revision: str
    question: str
    commands: tuple[str, ...]

    def text(self) -> str:
        """The lines of the head."""
        pairs = [
            ("date", self.date),
            ("hardware", self.hardware),
            ("revision", self.revision),
            ("question", self.question),
            *(("command", command) for command in self.commands),
        ]
        return "".join(_field(name, value) for name, value in pairs)


def _field(name: str, value: str) -> str:
    """One field, its lines no wider than `_WIDTH` where words allow that."""
    lines, line = [], f"{name}:"
    for word in value.split():
        if len(line) + 1 + len(word) > _WIDTH and not line.endswith(":"):
            lines.append(line)
            line = " "
        line += f" {word}"
    return "\n".join([*lines, line]) + "\n"


def parse(name: str, text: str) -> tuple[Head, str]:
    """The head of a result, and the text behind it. Raises `Malformed`."""
    head, separator, body = text.partition("\n\n")
    fields: list[tuple[str, str]] = []
    for line in head.splitlines():
        field, colon, value = line.partition(": ")
        if line.startswith("  ") and fields:
            fields[-1] = (fields[-1][0], f"{fields[-1][1]} {line.strip()}")
        elif colon and field in FIELDS:
            fields.append((field, value.strip()))
        else:
            raise Malformed(f"{name}: no field of a head: {line!r}")
    order = list(dict.fromkeys(field for field, _ in fields))
    given = {field: value for field, value in reversed(fields)}
    if tuple(order) != FIELDS or len(fields) != len(given) + _commands(fields) - 1:
        raise Malformed(f"{name}: the head has {', '.join(order)} in place of {', '.join(FIELDS)}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", given["date"]) or not name.startswith(given["date"]):
        raise Malformed(f"{name}: the date is {given['date']!r}, and the name begins with it")
    if not separator or not body.strip() or not all(value for _, value in fields):
        raise Malformed(f"{name}: a field or the text behind the head is empty")
    commands = tuple(value for field, value in fields if field == "command")
    parsed = Head(
        date=given["date"],
        hardware=given["hardware"],
        revision=given["revision"],
        question=given["question"],
        commands=commands,
    )
    return parsed, body


def _commands(fields: list[tuple[str, str]]) -> int:
    return sum(field == "command" for field, _ in fields)


def value_lines(document: dict[str, object]) -> list[str]:
    """The values of a document: a line for each of its fields, and for each entry of a field that is a list."""
    lines = [VALUES]
    for key, value in document.items():
        if isinstance(value, list) and value:
            lines += [f"{key} [] {json.dumps(entry)}" for entry in value]
        else:
            lines.append(f"{key} {json.dumps(value)}")
    return lines


def values_of(body: str) -> dict[str, Any] | None:
    """The document that `value_lines` wrote; None where the program kept no values."""
    _, line, lines = body.partition(f"{VALUES}\n")
    if not line:
        return None
    document: dict[str, Any] = {}
    for entry in lines.splitlines():
        key, _, value = entry.partition(" ")
        if value.startswith("[] "):
            document.setdefault(key, []).append(json.loads(value[3:]))
        else:
            document[key] = json.loads(value)
    return document


def results() -> list[Path]:
    """The files that have the format."""
    return sorted(RESULTS.glob("*.txt"))


def index() -> str:
    """The text of bench/results/README.md. Raises `Malformed`."""
    rows, texts = [], []
    for file in results():
        text = file.read_text()
        head, _ = parse(file.name, text)
        texts.append(text)
        more = len(head.commands) - 1
        others = f" and {more} more" if more else ""
        cells = [head.date, f"[{file.stem[11:]}]({file.name})", head.hardware, head.question]
        cells += [f"`{head.commands[0]}`{others}", head.revision]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    pages = []
    for file in sorted(RESULTS.iterdir()):
        if file.suffix == ".md" and file != INDEX:
            title = file.read_text().partition("\n")[0].removeprefix("# ")
            pages.append(f"- [{title}]({file.name})")
        elif file.suffix == ".svg":
            if not any(file.name in text for text in texts):
                raise Malformed(f"{file.name}: no result names this picture")
            pages.append(f"- [{file.stem}]({file.name}), a picture")
        elif file.suffix not in (".txt", ".md"):
            raise Malformed(f"{file.name}: results are text, with the head of bench/lib/record.py")
    return "\n".join(
        [
            "# Results",
            "",
            "One file a run. `python3 -m bench.record index` writes this page from the heads of the files; the tests check it.",
            "`bench/lib/record.py` has the format, `python3 -m bench.record run` makes such a file.",
            "",
            "| date | file | hardware | question | command | revision |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Pages and pictures that were made from them:",
            "",
            *pages,
            "",
        ]
    )
