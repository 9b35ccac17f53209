"""For tests only: a random Llama of 26 thousand weights, a tokenizer of single characters, and questions it can be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(chat_template: str | None = None) -> Any:
    """One token a character; `<eos>` ends, `<end>` ends a turn of the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", "<end>", *CHARACTERS]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<end>"],
    )
    made.chat_template = chat_template
    return made


def model(seed: int = 0, **changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(CHARACTERS) + 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def save(folder: Path, chat_template: str | None = None, **changes: Any) -> Path:
    """The model and its tokenizer as a folder."""
    model(**changes).save_pretrained(folder)
    tokenizer(chat_template).save_pretrained(folder)
    return folder


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    """Sums in GSM8K's form, calculator marks included."""
    pairs = [(i % 9 + 1, i // 9 + 1 + start) for i in range(count)]
    return [
        {"question": f"{a} plus {b}?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"} for a, b in pairs
    ]


def questions_folder(folder: Path, train: int = 24, test: int = 8) -> Path:
    """A data folder with train.jsonl and test.jsonl that share no question."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, content in (("train", rows(train)), ("test", rows(test, start=50))):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return folder


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward with spread: how many of the completion's characters are digits."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def nothing(completions: list[str], **_: Any) -> list[None]:
    """A reward that can score no completion."""
    return [None] * len(completions)
