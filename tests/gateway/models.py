"""A model's folder, made here: a small tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

TEMPLATE = """\
{%- if tools %}
<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def tokenizer(*, prefix_space: bool = False) -> Any:
    """Train a tokenizer on the README; one that adds a space depends on where a text begins."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = byte_level
    if prefix_space:
        first = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([(ROOT / "README.md").read_text("utf-8")], trainer)
    made.add_special_tokens(
        [AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>", "<|im_end|>x")]
    )
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return made


def folder(path: Path, *, template: str = TEMPLATE, **options: Any) -> Path:
    """Write a model's folder."""
    tokenizer(**options).save(str(path / "tokenizer.json"))
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
