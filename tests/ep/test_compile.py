"""Calls within torch.compile: it leaves them as they are, and compiles what is around them."""

from __future__ import annotations

from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

TOKENS, TOP_K, EXPERTS, HIDDEN = 8, 2, 4, 256


def alone() -> dict[str, Any]:
    """A buffer's ends for a rank that is alone."""
    return {"store": torch.distributed.HashStore(), "rank": 0, "num_ranks": 1, "device": "cpu"}


def few_tokens() -> Callable[..., Any]:
    from uccl.ep import Buffer

    buffer = Buffer(None, 0, 1 << 24, low_latency_mode=True, **alone())

    def layer(x: Any, choices: Any, weights: Any) -> Any:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x * 2, choices, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        hook()
        out, event, _ = buffer.low_latency_combine(
            rows + 1, choices, weights, handle, async_finish=True
        )
        event.current_stream_wait()
        return out + 1

    return layer


def many_tokens() -> Callable[..., Any]:
    from uccl.ep import Buffer

    buffer = Buffer(None, 1 << 22, **alone())

    def layer(x: Any, choices: Any, weights: Any) -> Any:
        _, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(choices, EXPERTS)
        rows, _, _, _, handle, event = buffer.dispatch(
            x * 2,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
            async_finish=True,
        )
        event.current_stream_wait()
        out, _, _ = buffer.combine(rows + 1, handle)
        return out + 1

    return layer


def elastic() -> Callable[..., Any]:
    from uccl.ep import ElasticBuffer

    buffer = ElasticBuffer(None, 1 << 22, num_max_tokens_per_rank=TOKENS, **alone())

    def layer(x: Any, choices: Any, weights: Any) -> Any:
        rows, _, _, handle, _ = buffer.dispatch(x * 2, choices, weights, num_experts=EXPERTS)
        out, _, _ = buffer.combine(rows + 1, handle)
        return out + 1

    return layer


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="lacks a torch that leaves marked functions as they are",
)
@pytest.mark.parametrize("in_inference", [False, True])
@pytest.mark.parametrize("made", [few_tokens, many_tokens, elastic])
def test_the_compiler_sees_no_code_of_a_call(
    made: Callable[[], Callable[..., Any]], in_inference: bool
) -> None:
    import uccl.ep
    from torch._dynamo.convert_frame import input_codes

    layer, draw = made(), torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=draw).bfloat16()
    choices = torch.rand((TOKENS, EXPERTS), generator=draw).topk(TOP_K).indices
    weights = torch.rand((TOKENS, TOP_K), generator=draw)
    with torch.inference_mode(in_inference):
        wanted = layer(x, choices, weights)
        torch._dynamo.reset()
        input_codes.clear()
        compiled = torch.compile(layer, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x, choices, weights), wanted)
    files = {code().co_filename for code in input_codes.seen}
    assert __file__ in files and not any(uccl.ep.__path__[0] in file for file in files), files
