"""A Qwen2 with random weights: a config file alone, vLLM fills in the weights (load_format "dummy")."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from esgrpo.errors import EsgrpoError

HEAD = 64  # width of an attention head
HEADS_PER_KV_HEAD = 4
MLP_RATIO = 4
WIDTH_PER_LAYER = 57  # 18 layers at a width of 1024, near Qwen2's own proportions
SHAPE_WEIGHT = 0.1  # a deviation from those proportions by a factor of e against one from the size by 10 %
WIDEST = 8192
VOCABULARY = 32_000
UNIT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def shape(parameters: int) -> dict[str, int]:
    """Width, layers and heads of a Qwen2 with about so many parameters, embeddings included."""
    def candidate(width: int) -> dict[str, int]:
        heads = width // HEAD
        kv_heads = max(1, heads // HEADS_PER_KV_HEAD)
        layer = 2 * width * width + 2 * width * kv_heads * HEAD + 3 * width * MLP_RATIO * width
        layers = max(2, round((parameters - VOCABULARY * width) / layer))
        return {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads,
                "parameters": layers * layer + VOCABULARY * width}

    def misfit(found: dict[str, int]) -> float:
        return (abs(found["parameters"] / parameters - 1)
                + SHAPE_WEIGHT * abs(math.log(found["width"] / found["layers"] / WIDTH_PER_LAYER)))

    step = HEAD * HEADS_PER_KV_HEAD
    return min((candidate(width) for width in (HEAD, 2 * HEAD, *range(step, WIDEST + 1, step))), key=misfit)


def config(parameters: int, longest: int) -> dict:
    """The config.json of a Qwen2 of about so many parameters for contexts up to `longest` tokens."""
    found = shape(parameters)
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": found["width"],
            "intermediate_size": MLP_RATIO * found["width"], "num_attention_heads": found["heads"],
            "num_key_value_heads": found["kv_heads"], "num_hidden_layers": found["layers"], "vocab_size": VOCABULARY,
            "max_position_embeddings": longest, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}


def prepare(name: str, longest: int, folder: Path) -> tuple[str, str, int]:
    """(model directory, vLLM's load_format, tokens that prompts are drawn from) of `DIR` or `random:273M`."""
    random = re.fullmatch(r"random:(\d+(?:\.\d+)?)([KMB]?)", name)
    if random is not None:
        folder.mkdir(parents=True, exist_ok=True)
        parameters = int(float(random[1]) * UNIT[random[2]])
        (folder / "config.json").write_text(json.dumps(config(parameters, longest)))
        return str(folder), "dummy", VOCABULARY
    file = Path(name) / "config.json"
    if not file.exists():
        raise EsgrpoError("--model", name, "a model directory or random:<parameters>, like random:273M",
                          "nothing was started", "give a directory with a config.json")
    return name, "auto", json.loads(file.read_text())["vocab_size"]
