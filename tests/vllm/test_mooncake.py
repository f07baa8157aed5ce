"""vLLM's MooncakeConnector on CPUs, on this project's ``mooncake.engine``: stock vLLM, real calls.

The prefill engine writes its blocks into the memory of the decode engine, which asks it to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import engine
import pytest
from engine import Engine, Refused
from pairs import PLACES, PairSetup
from tiny_model import TOKEN_BYTES, prompts

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("vllm")]

DISTRIBUTION = Path(__file__).parents[2] / "python" / "mooncake"
PROMPTS, ANSWER = 20, 16
PORT, BOOTSTRAP = 18200, 18290
#: The connector asks torch for the number of its GPU, which torch refuses on a machine without one.
PLUGIN = """
import torch

def number_of_no_gpu():
    torch.accelerator.current_device_index = lambda: 0
"""


def plugin(folder: Path) -> Path:
    """Makes a distribution whose entry point vLLM calls in each of its processes."""
    (folder / "no_gpu.py").write_text(PLUGIN)
    told = folder / "no_gpu-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: no-gpu\nVersion: 0\n")
    points = "[vllm.general_plugins]\nno_gpu = no_gpu:number_of_no_gpu\n"
    (told / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture(scope="module", params=PLACES)
def pair(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine and a decode engine."""
    logs, folder = (tmp_path_factory.mktemp(name) for name in ("logs", "plugin"))
    environment = {
        "PYTHONPATH": f"{DISTRIBUTION}:{plugin(folder)}",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(BOOTSTRAP),
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    connector = {"kv_connector": "MooncakeConnector"}
    setup = PairSetup(model, logs, PORT, environment, connector, name_key="engine_id")
    with setup.started(request.param) as engines:
        yield engines


def prefill_of(prefill: Engine, prompt: list[int], name: str) -> dict[str, Any]:
    """Computes a prompt; returns what vLLM's router gives to a decode engine."""
    prefill.prefill(prompt, do_remote_prefill=False, transfer_id=name)
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": name,
        "remote_engine_id": prefill.name,
        "remote_bootstrap_addr": f"http://{prefill.place.ip}:{BOOTSTRAP}",
    }


def test_answers_equal_those_of_one_engine(
    pair: tuple[Engine, Engine], record_property: Callable[[str, object], None]
) -> None:
    prefill, decode = pair
    asked = prompts(1, PROMPTS)
    for prompt in asked:
        prefill.answer(prompt, 1)
    expected = [prefill.answer(prompt, ANSWER) for prompt in asked]
    assert len({tuple(answer) for answer in expected}) > PROMPTS / 2, "answers do not differ"

    alone = [
        decode.begin(prompt, ANSWER, prefill_of(prefill, prompt, f"a{number}")).result()[0]
        for number, prompt in enumerate(asked)
    ]
    assert alone == expected
    # The connector has no counter; each transfer's end is in the log.
    told = prefill.log.read_text(errors="replace")
    assert len(re.findall(r"Sending to \S+ done", told)) >= PROMPTS
    assert not re.search(r"Sending to \S+ failed", told)
    moved = sum(len(prompt) - 1 for prompt in asked) * TOKEN_BYTES
    record_property("seen", f"mooncake: {moved / 1e6:.1f} MB of blocks")


def test_a_decode_engine_answers_behind_a_prefill_engine_that_was_killed(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    lost, next_ones = prompts(2, 12, blocks=24), prompts(3, 3)
    expected = [prefill.answer(prompt, ANSWER) for prompt in next_ones]
    given = [prefill_of(prefill, prompt, f"b{number}") for number, prompt in enumerate(lost)]
    under_way = [decode.begin(prompt, ANSWER, each) for prompt, each in zip(lost, given)]
    time.sleep(0.03)
    prefill.kill()
    assert [decode.answer(prompt, ANSWER) for prompt in next_ones] == expected
    under_way_ends(under_way)


def under_way_ends(requests: list[Future[Any]]) -> None:
    """Each request ends, with its answer or with an error."""
    late = wait(requests, timeout=engine.ANSWER_S).not_done
    assert not late, f"{len(late)} of {len(requests)} requests do not end"
    for each in requests:
        assert each.exception() is None or isinstance(each.exception(), (Refused, OSError))
