"""Makes the embedded model: `python -m grpo_portable.embedded.build [--out FOLDER] [--seed N]`.

A small Llama learns the worked answers of `problems` in two phases. In the first all answers are right. In the second, the
answers of some templates mostly hold the same slip each time (HABITS): the worked answer stops one step early, or a step
uses another operation, worked correctly. What comes out knows its arithmetic and has bad habits, which is what GRPO can mend
in a minute: the right plan is still sampled now and then, and the reward says which one it was. docs/embedded.md says what
that does and doesn't demonstrate.

One thread, so that the same seed on the same machine gives the same file. Only `dev` questions are looked at here.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.embedded import model_folder
from grpo_portable.embedded.problems import Problem, draw, draw_distinct, solve, worked

END, PAD = "<|endoftext|>", "<|pad|>"
STOP_EARLY = ()  # the slip that leaves the last step out; any other slip is the operations it uses instead

# template -> (slip, how often the answers of the second phase hold it). A slip that cannot be worked becomes a stop.
HABITS: dict[str, tuple[tuple[str, ...], float]] = {
    "groups but fewer": (STOP_EARLY, 0.8),
    "more than": (STOP_EARLY, 0.8),
    "half, then fewer": (STOP_EARLY, 0.8),
    "spend": (STOP_EARLY, 0.8),
    "lose, gain": (("-", "-"), 0.8),
    "fewer than": (("+", "+"), 0.8),
    "times as many": (("+", "+"), 0.8),
}


@dataclass(frozen=True)
class Settings:
    """Shape and schooling of the model. Batches are of `batch` problems; learning rates fall by a cosine to a tenth."""

    seed: int = 0
    vocabulary: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    mlp: int = 384
    batch: int = 64
    right_steps: int = 900
    right_learning_rate: float = 2e-3
    habit_steps: int = 200
    habit_learning_rate: float = 5e-4
    weight_decay: float = 0.05


def build(out: Path, settings: Settings) -> dict[str, Any]:
    """Write model and tokenizer into `out`; what was done and the accuracy on 300 dev questions is returned, and in built.json."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.time()
    try:
        torch.manual_seed(settings.seed)
        rng = random.Random(f"build {settings.seed}")
        tokenizer = make_tokenizer(settings.vocabulary)
        model = make_model(settings, tokenizer)
        for steps, peak, habits in (
            (settings.right_steps, settings.right_learning_rate, False),
            (settings.habit_steps, settings.habit_learning_rate, True),
        ):
            school(model, batches(tokenizer, rng, settings.batch, habits), steps, peak, settings.weight_decay)
        seconds = time.time() - start
        save(model, tokenizer, out)
        accuracy = greedy_accuracy(out, draw_distinct("dev", 300))
    finally:
        torch.set_num_threads(threads)
    parameters = sum(weight.numel() for weight in model.parameters())
    record = {"parameters": parameters, "seconds": round(seconds), "dev_accuracy": accuracy, "settings": vars(settings)}
    (out / "built.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def make_tokenizer(vocabulary: int) -> Any:
    """Byte-level BPE learnt from training problems; every digit is a token (with the space before it, if any), a line end too."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(Regex(" ?[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text(problem, problem.answer) for problem in draw_distinct("train", 6000))
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, padding_side="left", clean_up_tokenization_spaces=False
    )


def make_model(settings: Settings, tokenizer: Any) -> Any:
    """A Llama with fresh weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def text(problem: Problem, answer: str) -> str:
    return f"{problem.question}\n{answer}"


def habitual(problem: Problem, rng: random.Random) -> str:
    """The worked answer, with its template's slip as often as HABITS says."""
    slip, often = HABITS.get(problem.template.name, (STOP_EARLY, 0.0))
    if rng.random() >= often:
        return problem.answer
    if slip != STOP_EARLY and solve(problem.template, problem.numbers, slip):
        return worked(problem.calculations(slip))
    return worked(problem.calculations()[:-1])


def batches(tokenizer: Any, rng: random.Random, size: int, habits: bool) -> Iterator[tuple[Any, Any]]:
    """Endless (input ids, labels), both (size, T), padded right. Labels of the question are left out; the model is to learn
    the answer from the line end after the question on, so it can be asked with or without that line end."""
    import torch

    while True:
        problems = [draw("train", rng) for _ in range(size)]
        answers = [habitual(p, rng) if habits else p.answer for p in problems]
        questions = tokenizer([p.question for p in problems])["input_ids"]
        answer_ids = tokenizer([f"\n{a}" for a in answers])["input_ids"]
        rows = [q + a + [tokenizer.eos_token_id] for q, a in zip(questions, answer_ids, strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        at = torch.arange(longest)
        first = torch.tensor([len(q) for q in questions])[:, None]
        last = torch.tensor([len(row) for row in rows])[:, None]
        yield ids, torch.where((at >= first) & (at < last), ids, -100)


def school(model: Any, data: Iterator[tuple[Any, Any]], steps: int, peak: float, weight_decay: float) -> None:
    """Supervised steps: AdamW, warm-up over a twentieth, cosine down to a tenth of the peak. Padding is on the right, so
    causal attention needs no mask."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=weight_decay)
    warmup = max(1, steps // 20)
    model.train()
    for step in range(steps):
        fall = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / warmup, fall)
        ids, labels = next(data)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Float16 on disk, half the size; config.json says float32, so that is what the weights are loaded as."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.half().save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(
        json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    tokenizer.save_pretrained(out)


def greedy_accuracy(folder: Path, problems: list[Problem]) -> float:
    """Share of problems whose greedy completion ends in the right `#### n`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer([f"{p.question}\n" for p in problems], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    written = model.generate(**inputs, max_new_tokens=64, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    completions = tokenizer.batch_decode(written, skip_special_tokens=True)
    right = [c.split("\n")[-1] == p.answer.split("\n")[-1] for c, p in zip(completions, problems, strict=True)]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the embedded model.")
    parser.add_argument("--out", type=Path, default=model_folder())
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    record = build(arguments.out, Settings(seed=arguments.seed))
    print(
        f"{record['parameters']:,} parameters in {record['seconds']} s, {record['dev_accuracy']:.1%} on dev: {arguments.out}"
    )


if __name__ == "__main__":
    main()
