"""Makes the embedded model: `python -m grpo_portable.embedded.build [--out FOLDER] [--seed N]`.

A small Llama learns the worked answers of `problems` in two phases, with rows of bare calculations (drills) between them, since
calculating is what it finds hard. In the first phase all answers are right. In the second, the answers of some templates
mostly hold the same slip (HABITS): the worked answer stops one step early, or adds where it should not, worked correctly. What
comes out can calculate and has bad habits, which is what GRPO can mend in a minute: the right plan is still sampled now and
then, and the reward says which one it was. docs/embedded.md says what that does and doesn't demonstrate.

One thread, so that the same seed on the same machine gives the same file. Only `dev` questions are looked at here.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_portable.embedded import model_folder
from grpo_portable.embedded.problems import Calculation, Problem, draw, draw_distinct, worked

END, PAD = "<|endoftext|>", "<|pad|>"
STOP_EARLY = ()  # the slip that leaves the last step out; any other slip is the operations used instead
ADD_ALL = ("+", "+")
HABITS: dict[str, tuple[str, ...]] = {  # template -> its slip
    "groups but fewer": STOP_EARLY,
    "more than": STOP_EARLY,
    "half, then fewer": STOP_EARLY,
    "spend": STOP_EARLY,
    "lose, gain": ADD_ALL,
    "fewer than": ADD_ALL,
    "times as many": ADD_ALL,
}


@dataclass(frozen=True)
class Phase:
    """Supervised steps on batches of `problems` problems and `drills` rows of bare calculations."""

    steps: int
    peak_learning_rate: float
    problems: int
    drills: int
    slips: float  # share of answers with the template's slip, of the templates that have one


RIGHT = Phase(1900, 2e-3, 16, 16, 0.0)
HABIT = Phase(200, 5e-4, 24, 8, 0.8)  # four to one: far enough from a tie that chance alone rarely turns a habit


@dataclass(frozen=True)
class Settings:
    """Shape and schooling of the model."""

    seed: int = 0
    vocabulary: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    mlp: int = 384
    weight_decay: float = 0.05
    phases: tuple[Phase, ...] = (RIGHT, HABIT)


def build(out: Path, settings: Settings) -> dict[str, Any]:
    """Write model and tokenizer into `out`. Returned, and in built.json: settings, size, accuracy on 300 dev questions."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(settings.seed)
        rng = random.Random(f"build {settings.seed}")
        tokenizer = make_tokenizer(settings.vocabulary)
        model = make_model(settings, tokenizer)
        for phase in settings.phases:
            school(model, batches(tokenizer, rng, phase), phase, settings.weight_decay)
        save(model, tokenizer, out)
        accuracy = greedy_accuracy(out, draw_distinct("dev", 300))
    finally:
        torch.set_num_threads(threads)
    parameters = sum(weight.numel() for weight in model.parameters())
    record = {
        "parameters": parameters,
        "dev_accuracy": accuracy,
        "settings": asdict(settings),
    }
    (out / "built.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def make_tokenizer(vocabulary: int) -> Any:
    """Byte-level BPE learnt from training problems. A digit is a token, with the space before it if any; so is a line end."""
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


def habitual(problem: Problem, rng: random.Random, slips: float) -> str:
    """The worked answer, with its template's slip in a share `slips` of cases."""
    slip = HABITS.get(problem.template.name)
    if slip is None or rng.random() >= slips:
        return problem.answer
    return worked(problem.calculations(slip) if slip else problem.calculations()[:-1])


def batches(tokenizer: Any, rng: random.Random, phase: Phase) -> Iterator[tuple[Any, Any]]:
    """Endless (input ids, labels), both (rows, T), padded right. The question has no labels; the model learns the answer from
    the line end after the question on, so it can be asked with or without that line end."""
    import torch

    while True:
        rows: list[tuple[list[int], int]] = []  # token ids, and how many of them are given
        for _ in range(phase.problems):
            problem = draw("train", rng)
            question = tokenizer(problem.question)["input_ids"]
            answer = tokenizer(f"\n{habitual(problem, rng, phase.slips)}")["input_ids"]
            rows.append((question + answer + [tokenizer.eos_token_id], len(question)))
        rows += [(tokenizer(drill(rng))["input_ids"], 1) for _ in range(phase.drills)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        first = torch.tensor([given for _, given in rows])[:, None]
        last = torch.tensor([len(ids) for ids, _ in rows])[:, None]
        at = torch.arange(longest)
        yield ids, torch.where((at >= first) & (at < last), ids, -100)


def drill(rng: random.Random) -> str:
    """Seven calculations of training problems, a line each: as long as a problem, with four times its calculations."""
    done: list[Calculation] = []
    while len(done) < 7:
        done += draw("train", rng).calculations()
    return "".join(f" {c.formula}\n" for c in done[:7])


def school(model: Any, data: Iterator[tuple[Any, Any]], phase: Phase, weight_decay: float) -> None:
    """The steps of a phase: AdamW, warm-up over a twentieth, cosine down to a tenth of the peak. Padding is on the right, so
    causal attention needs no mask."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.peak_learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay
    )
    warmup = max(1, phase.steps // 20)
    model.train()
    for step in range(phase.steps):
        fall = 0.55 + 0.45 * math.cos(math.pi * step / phase.steps)
        for group in optimizer.param_groups:
            group["lr"] = phase.peak_learning_rate * min((step + 1) / warmup, fall)
        ids, labels = next(data)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == phase.steps:
            print(f"step {step + 1}/{phase.steps}  loss {loss.item():.4f}", flush=True)


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
    start = time.perf_counter()
    record = build(arguments.out, Settings(seed=arguments.seed))
    seconds = time.perf_counter() - start
    print(f"{record['parameters']:,} parameters, {record['dev_accuracy']:.1%} on dev, {seconds:.0f} s: {arguments.out}")


if __name__ == "__main__":
    main()
