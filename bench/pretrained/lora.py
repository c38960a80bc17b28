"""Low-rank differences to a model: all linear layers but the output, in one safetensors file in bfloat16."""

from __future__ import annotations

import hashlib
from pathlib import Path

from esgrpo.errors import EsgrpoError

FORMAT = "esgrpo-lora-1"
SCALE = 2.0  # alpha / rank


def attached(model, rank: int):
    """The model with fresh trainable differences of this rank, everything else frozen; the difference is 0 at first."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def save(model, rank: int, path: Path, about: dict[str, str]) -> int:
    """Write the differences of an attached model; returns the size in bytes."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
               for name, tensor in get_peft_model_state_dict(model).items()}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {**about, "format": FORMAT, "rank": str(rank)})
    partial.replace(path)
    return path.stat().st_size


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError) as reason:
        raise EsgrpoError("pretrained", f"{path}: {reason}", "a low-rank difference", "nothing was made",
                          "make it with python -m bench.pretrained.supervise, or give --raw") from None
    if about.get("format") != FORMAT:
        raise EsgrpoError("pretrained", f"{path} says format {about.get('format')!r}", repr(FORMAT),
                          "nothing was made", "make it with python -m bench.pretrained.supervise, or give --raw")
    return about


def described(path: Path) -> dict[str, str]:
    """What a file says of itself, and its sha256."""
    return {**_metadata(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def merged(model, path: Path):
    """The model (float32) with the differences of a file added to its weights."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    adapted = attached(model, int(_metadata(path)["rank"]))
    loaded = set_peft_model_state_dict(adapted, load_file(path))
    missing, other = [name for name in loaded.missing_keys if "lora_" in name], loaded.unexpected_keys
    if missing or other:
        raise EsgrpoError("pretrained", f"{path} lacks {len(missing)} tensors and has {len(other)} others",
                          "those of this model's linear layers", "nothing was made", "make it for this model")
    return adapted.merge_and_unload()
