"""Make a tiny model with random weights and a small tokenizer: make_model.py KIND FOLDER.

KIND is "llama" (full attention) or "gemma3" (layers with a sliding window of 64 tokens between
layers with full attention). The Python of vLLM's environment runs this file: it has torch,
tokenizers and transformers.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 8_000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> int:
    """Train a byte-level BPE on random words; return the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(4_000)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(
        (" ".join(rng.choices(words, k=40)) for _ in range(3_000)),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_model(kind: str, folder: Path, vocabulary: int) -> None:
    """Write the weights and the configuration."""
    import torch
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": -(-vocabulary // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 4_096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    elif kind == "gemma3":
        layers = ["sliding_attention", "full_attention"] * 2
        shape |= {"num_hidden_layers": len(layers), "layer_types": layers}
        config = transformers.Gemma3TextConfig(**shape, sliding_window=64, query_pre_attn_scalar=32)
        model = transformers.Gemma3ForCausalLM(config)
    else:
        raise SystemExit(f"no such kind of model: {kind}")
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    save_model(sys.argv[1], place, save_tokenizer(place))
