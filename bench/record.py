"""Keeps results in bench/results, in one format with one index.

    python3 -m bench.record run 2026-11-28-tcp --question "..." -- python3 -m bench.host.run --only tcp --json {values}
    python3 -m bench.record index           # writes bench/results/README.md
    python3 -m bench.record index --check   # exits with 1 where that page is not as the files say
    python3 -m bench.record kept REVISION   # exits with 1 where a number of a result of that revision is missing

`{values}` in a command stands for a file to which the program writes all its values as JSON.
"""

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.lib import machine, record, summary
from bench.lib.paths import ROOT
from bench.lib.rounds import revision

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="action", required=True)
    run = commands.add_parser("run", help="run the program behind -- and keep its output")
    run.add_argument("name", help="of the result, without its date")
    run.add_argument("--question", required=True, help="the question that the run answers")
    run.add_argument("--hardware", help="the machine, in words (default: its CPU and GPUs)")
    run.add_argument("--revision", help="of this tree, where git cannot tell")
    index = commands.add_parser("index", help="write bench/results/README.md")
    index.add_argument("--check", action="store_true", help="compare it only")
    kept = commands.add_parser("kept", help="compare the numbers of all results with a revision's")
    kept.add_argument("revision")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.command = words[end + 1 :]
    return options


def hardware() -> str:
    """This machine's CPU and GPUs in words."""
    facts = machine.facts()
    words = [f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['memory_gib']} GiB"]
    names = [line.split(", ") for line in summary.gpu_facts() if line[:1].isdigit()]
    for (name, driver), count in Counter((line[1], line[2]) for line in names).items():
        words.append(f"{count} x {name} (driver {driver})")
    return "; ".join(words)


def run(options: argparse.Namespace) -> int:
    """Runs a program, shows its output, and keeps it if the program has succeeded."""
    command = options.command
    if not command:
        sys.exit("bench.record run: no program behind --")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory() as folder:
        values = Path(folder) / "values.json"
        words = [word.replace("{values}", str(values)) for word in command]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
            lines = []
            for line in program.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
        if program.returncode:
            print(f"bench.record: not kept, as the program ended with {program.returncode}")
            return program.returncode
        if values.exists():
            lines += ["", *record.value_lines(json.loads(values.read_text()))]
    head = record.Head(
        date=today,
        hardware=options.hardware or hardware(),
        revision=options.revision or revision(),
        question=options.question,
        commands=(shlex.join(command),),
    )
    text = "\n".join([head.text(), *lines, ""])
    name = f"{today}-{options.name.removeprefix(today + '-')}.txt"
    record.parse(name, text)
    (record.RESULTS / name).write_text(text)
    record.INDEX.write_text(record.index())
    return 0


def index(options: argparse.Namespace) -> int:
    """Writes the index, or compares it."""
    text = record.index()
    if not options.check:
        record.INDEX.write_text(text)
        return 0
    if record.INDEX.read_text() == text:
        return 0
    print("bench/results/README.md is not as the results say: python3 -m bench.record index")
    return 1


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout


def kept(options: argparse.Namespace) -> int:
    """Compares the numbers of each result of a revision with those of the file of the same name now."""
    listed = git("ls-tree", "--name-only", options.revision, "bench/results/").split()
    lost = 0
    for path in listed:
        was = Path(path)
        if was.name == record.INDEX.name:
            continue
        now = [file for file in record.RESULTS.iterdir() if file.stem == was.stem]
        text = git("show", f"{options.revision}:{path}")
        texts = [file.read_text() for file in now]
        numbers = Counter(_NUMBER.findall(text))
        missing = numbers - Counter(_NUMBER.findall("".join(texts)))
        if was.suffix == ".json" and json.loads(text) not in map(record.values_of, texts):
            missing = numbers
        names = ", ".join(file.name for file in now) or "no file"
        print(f"{was.name} -> {names}: {numbers.total()} numbers, {missing.total()} missing")
        for number, count in missing.items():
            print(f"  {number}, {count} times")
        lost += missing.total()
    return 1 if lost else 0


def main() -> int:
    options = arguments()
    return {"run": run, "index": index, "kept": kept}[options.action](options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except record.Malformed as error:
        sys.exit(f"bench.record: {error}")
