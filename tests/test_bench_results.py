"""The results of the benchmarks: one format, one index, links that hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from bench.lib import record  # noqa: E402

HEAD = "date: 2026-11-27\nhardware: one\n  host\nrevision: 0\nquestion: why?\ncommand: a\ncommand: b c\n"


def recorded(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bench.record", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_index_is_as_the_results_say() -> None:
    done = recorded("index", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_head_is_read_as_it_was_written() -> None:
    head, body = record.parse("2026-11-27-a.txt", f"{HEAD}\n1 us\n\nmore\n")
    assert head == record.Head("2026-11-27", "one host", "0", "why?", ("a", "b c"))
    assert body == "1 us\n\nmore\n"
    long = record.Head("2026-11-27", "word " * 60 + "end", "0", "why?", ("a",))
    assert max(map(len, long.text().splitlines())) <= 120
    assert record.parse("2026-11-27-a.txt", f"{long.text()}\n1 us\n")[0] == long


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("2026-11-27-a.txt", "1 us\n\n2 us\n"),
        ("2026-11-27-a.txt", f"{HEAD}\n\n"),
        ("2026-11-26-a.txt", f"{HEAD}\n1 us\n"),
        ("2026-11-27-a.txt", f"{HEAD}question: twice?\n\n1 us\n"),
        ("2026-11-27-a.txt", f"{HEAD.replace('revision: 0', 'revision:  ')}\n1 us\n"),
        ("2026-11-27-a.txt", f"{HEAD.replace('hardware', 'machine')}\n1 us\n"),
    ],
)
def test_another_head_is_refused(name: str, text: str) -> None:
    with pytest.raises(record.Malformed):
        record.parse(name, text)


def test_values_are_read_as_they_were_written() -> None:
    document = {"schema": 1, "peers": {"a": None}, "values": [{"median": 0.1}, 2], "failures": []}
    body = "\n".join(["1 us", "", *record.value_lines(document), ""])
    assert record.values_of(body) == document and record.values_of("1 us\n") is None


def test_a_run_is_kept_with_its_head_and_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import record as program

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "INDEX", tmp_path / "README.md")
    code = "import sys; print('1 us'); open(sys.argv[1], 'w').write('{\"values\": [1, 2]}')"
    words = ["run", "a", "--question", "why?", "--", sys.executable, "-c", code, "{values}"]
    monkeypatch.setattr(sys, "argv", ["record", *words])
    assert program.main() == 0
    (file,) = tmp_path.glob("*.txt")
    head, body = record.parse(file.name, file.read_text())
    assert head.question == "why?" and head.commands[0].endswith("{values}'")
    assert body.startswith("1 us\n") and record.values_of(body) == {"values": [1, 2]}
    assert file.name in (tmp_path / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["record", *words[:5], sys.executable, "-c", "exit(3)"])
    assert program.main() == 3 and len(list(tmp_path.glob("*.txt"))) == 1


def test_the_documents_link_to_results_that_exist() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]*results/[^)#\s]*)", page.read_text())
    ]
    assert links
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []
