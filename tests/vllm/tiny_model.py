"""A tiny language model with random weights, in a folder that vLLM loads.

The weights depend on nothing but the seed, so all engines of a test compute the same. Its answers
depend on the whole prompt: the norms of queries and keys are larger than 1, so each head looks at
few tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
#: The most tokens of a prompt and its answer.
LONGEST = 1024
HIDDEN, INNER, LAYERS = 256, 512, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
#: The factor of the norms of queries and keys: the larger, the fewer tokens a head looks at.
SHARPNESS = 2.5
#: Bytes of keys and values of a token, in all layers.
TOKEN_BYTES = 2 * 4 * LAYERS * KV_HEADS * HEAD_DIM
#: The tokens of a block of the KV cache, as the engines of the tests have it.
BLOCK = 32
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": LONGEST,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}


def make(folder: Path) -> None:
    """Writes the weights, the configuration and a tokenizer of the words ``t0``, ``t1``, ..."""
    folder.mkdir()
    save_file(weights(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Metaspace(replacement=" ", prepend_scheme="never")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1")
    fast.save_pretrained(folder)


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * (gain / columns**0.5)

    made = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=draw),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 4.0),
    }
    for number in range(LAYERS):
        layer = {
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM, 2.0),
            "self_attn.q_norm": torch.full((HEAD_DIM,), SHARPNESS**0.5),
            "self_attn.k_norm": torch.full((HEAD_DIM,), SHARPNESS**0.5),
            "mlp.gate_proj": matrix(INNER, HIDDEN),
            "mlp.up_proj": matrix(INNER, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INNER, 2.0),
        }
        for name, tensor in layer.items():
            made[f"model.layers.{number}.{name}.weight"] = tensor
    return made


def prompts(seed: int, count: int, blocks: int | None = None) -> list[list[int]]:
    """Random prompts of whole blocks and one token."""
    draw = random.Random(seed)
    lengths = (BLOCK * (blocks or draw.randint(1, 16)) + 1 for _ in range(count))
    return [[draw.randrange(2, VOCABULARY) for _ in range(n)] for n in lengths]
