"""vLLM's disaggregated prefill on CPUs: stock vLLM, stock NIXL, and this project's backend.

One engine computes the prompts, another one reads their blocks and goes on. Prompts end one token
behind a block, so the decode engine computes what one engine computes that has the prompt's blocks
in its cache: the answers must be equal to the last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import engine
import pytest
from engine import Engine, Refused
from pairs import PLACES, PairSetup
from tiny_model import TOKEN_BYTES, prompts

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("vllm")]

PROMPTS, ANSWER = 20, 16
PORT = 18100


@pytest.fixture(scope="module", params=PLACES)
def pair(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine and a decode engine."""
    setup = PairSetup(model, tmp_path_factory.mktemp("logs"), PORT)
    with setup.started(request.param) as engines:
        yield engines


def test_answers_equal_those_of_one_engine(
    pair: tuple[Engine, Engine], record_property: Callable[[str, object], None]
) -> None:
    prefill, decode = pair
    asked = prompts(1, PROMPTS)
    for prompt in asked:
        prefill.answer(prompt, 1)
    expected = [prefill.answer(prompt, ANSWER) for prompt in asked]
    assert len({tuple(answer) for answer in expected}) > PROMPTS / 2, "answers do not differ"

    alone = [read_and_go_on(prefill, decode, prompt) for prompt in asked]
    assert alone == expected
    # Blocks that came from the other engine, and none computed anew.
    moved = decode.counted("vllm:nixl_bytes_transferred_sum")
    assert moved >= sum(len(prompt) - 1 for prompt in asked) * TOKEN_BYTES
    assert not decode.counted("vllm:nixl_num_failed_transfers_total")
    spent = decode.counted("vllm:nixl_xfer_time_seconds_sum")
    record_property("seen", f"vllm: {moved / 1e6:.1f} MB of blocks in {spent * 1e3:.1f} ms")


def test_a_decode_engine_answers_behind_a_prefill_engine_that_was_killed(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    lost, next_ones = prompts(2, 12, blocks=24), prompts(3, 3)
    expected = [prefill.answer(prompt, ANSWER) for prompt in next_ones]
    given = [prefill.prefill(prompt) for prompt in lost]
    under_way = [decode.begin(prompt, ANSWER, each) for prompt, each in zip(lost, given)]
    time.sleep(0.03)
    prefill.kill()
    # Each request ends, with its answer or with an error.
    late = wait(under_way, timeout=engine.ANSWER_S).not_done
    assert not late, f"{len(late)} of {len(lost)} requests do not end"
    for each in under_way:
        assert each.exception() is None or isinstance(each.exception(), Refused)
    assert [decode.answer(prompt, ANSWER) for prompt in next_ones] == expected


def read_and_go_on(prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
    return decode.begin(prompt, ANSWER, prefill.prefill(prompt)).result()[0]
