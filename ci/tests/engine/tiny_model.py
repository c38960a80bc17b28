"""A random Qwen2 of 0.3 M parameters with a byte tokenizer: `python tiny_model.py FOLDER`."""

from __future__ import annotations

import sys


def build(folder: str, seed: int = 0) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                  "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    # Untied and with a large range: with the defaults a random model repeats its last token for ever.
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.1, **ends)).float()
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)


if __name__ == "__main__":
    build(sys.argv[1])
