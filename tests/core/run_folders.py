"""Run folders like real ones, made by code: questions, completions, metrics and events of one run, from a seed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import RunFolder, append_line, create

NAMES = ("Mina", "Tom", "Ada", "Ravi", "Lena", "Omar")
THINGS = ("apples", "pencils", "stamps", "marbles", "cups")


def asleep(*words: object) -> subprocess.Popen[str]:
    """A process with these words in its command line, which sleeps; it is there, its command line too, when this returns."""
    script = "import time; print('here', flush=True); time.sleep(60)"
    made = subprocess.Popen([sys.executable, "-c", script, *map(str, words)], stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None and made.stdout.readline() == "here\n"
    return made


def question(i: int) -> tuple[str, int, str]:
    """A question, its gold and the worked answer."""
    rng = random.Random(1000 + i)
    a, b, c = rng.randint(3, 19), rng.randint(2, 9), rng.randint(1, 9)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    text = f"{name} has {b} boxes with {a} {thing} each and gives {c} {thing} away. How many {thing} are left?"
    return text, a * b - c, f"{name} has {b} * {a} = {a * b} {thing}.\n{a * b} - {c} = {a * b - c}."


def completion(i: int, kind: str) -> str:
    """A completion of question i: right, wrong, plain (right, but without the marker), cut, or empty."""
    _, gold, work = question(i)
    if kind == "right":
        return f"{work}\n#### {gold}"
    if kind == "wrong":
        return f"{work.splitlines()[0]}\nSo the answer is {gold + 10}.\n#### {gold + 10}"
    if kind == "plain":
        return f"{work}\nThe answer is {gold}."
    if kind == "cut":
        return f"{work.splitlines()[0]} We count the boxes" + " again" * 40
    return ""


def record(i: int, kind: str) -> dict:
    text, gold, _ = question(i)
    words = completion(i, kind)
    return {
        "id": i,
        "question": text,
        "gold": str(gold),
        "completion": words,
        "extracted": None,
        "correct": kind == "right",
        "lenient_extracted": None,
        "lenient": kind in ("right", "plain"),
        "tokens": 4 + len(words.split()),
        "finish_reason": "length" if kind == "cut" else "stop",
        "marker": kind in ("right", "wrong"),
    }


def kinds(n: int, shares: dict[str, float], seed: int, before: list[str] | None = None, kept: float = 0.0) -> list[str]:
    """A kind for each of n questions; with `before`, a question right before stays right with probability `kept`."""
    rng = random.Random(seed)
    drawn = rng.choices(list(shares), list(shares.values()), k=n)
    if before is not None:
        drawn = [
            "right" if was == "right" and rng.random() < kept else now for was, now in zip(before, drawn, strict=True)
        ]
    return drawn


def write_answers(run: RunFolder, stage: str, found: list[str]) -> None:
    for i, kind in enumerate(found):
        append_line(run.generations(stage), record(i, kind))


def write_samples(run: RunFolder, stage: str, share_right: float, n: int, k: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(n):
        level = min(1.0, max(0.0, rng.gauss(share_right, 0.3)))
        for sample in range(k):
            kind = "right" if rng.random() < level else "wrong"
            append_line(run.generations(f"{stage}-sampled"), {**record(i, kind), "sample": sample})


def metrics(steps: int, seed: int = 5, start: float = 0.46, end: float = 0.78) -> list[dict]:
    rng = random.Random(seed)
    records = []
    for step in range(1, steps + 1):
        done = 1 - 2.718 ** (-3 * step / steps)
        right = min(1.0, max(0.0, start + (end - start) * done + rng.gauss(0, 0.05)))
        form = min(1.0, 0.9 + 0.1 * done + rng.gauss(0, 0.02))
        records.append(
            {
                "step": step,
                "seconds": 1.6 * step,
                "step_s": 1.6 + rng.gauss(0, 0.05),
                "rollout_s": 0.9,
                "update_s": 0.7,
                "loss": rng.gauss(0.002, 0.01),
                "reward": right + 0.25 * form,
                "reward_std": 0.4,
                "rewards": {"correctness": right, "marker_format": 0.25 * form},
                "zero_spread": min(1.0, max(0.0, 0.2 + 0.3 * done + rng.gauss(0, 0.06))),
                "completion_tokens": 30 + 6 * done + rng.gauss(0, 0.6),
                "truncated": max(0.0, 0.06 * (1 - done) + rng.gauss(0, 0.01)),
                "entropy": 0.62 - 0.3 * done + rng.gauss(0, 0.02),
                "grad_norm": 0.4 + abs(rng.gauss(0, 0.1)),
                "learning_rate": 5e-6,
                "kl": None,
                "tokens_per_s": 4200.0,
                "memory_gib": 1.1 + 0.05 * done,
                "skipped": False,
            }
        )
    return records


FACTS = {
    "schema": 1,
    "host": {"platform": "linux", "arch": "x86_64", "os": "Ubuntu 22.04", "python": "3.12", "ram_gib": 64.0},
    "gpus": [{"index": 0, "vendor": "nvidia", "name": "NVIDIA GeForce RTX 5090", "total_gib": 31.8}],
    "driver": {"version": "570.86", "cuda": "12.8"},
    "packages": {"torch": "2.10.0+cu128", "vllm": "absent"},
}
PLAN = {
    "schema": 1,
    "plan": {"path": "bf16-hf", "reasons": ["bf16-hf is the fastest open path"]},
    "settled": ["bf16-hf is the fastest open path", "fp8-hf is passed over: no engine here reads FP8 weights."],
    "passed": {"fp8-hf": "no engine here reads FP8 weights."},
    "walls": [
        {
            "code": "NO_VLLM",
            "closes": ["fp8-vllm", "bf16-vllm", "fp16-vllm"],
            "fact": "vllm is not installed.",
            "because": ["the only wheel for this card needs torch 2.11, and 2.10.0+cu128 is installed"],
            "help": [],
        },
        {
            "code": "OLD_NVCC",
            "closes": ["fp8-vllm"],
            "fact": "nvcc is 12.8",
            "because": ["FP8 kernels need 12.9"],
            "help": [],
        },
        {"code": "SLOW_DISK", "closes": [], "fact": "a warning that closes nothing", "because": [], "help": []},
    ],
    "paths": {p: {"open": p in ("fp8-hf", "bf16-hf", "cpu"), "fits": True} for p in ("fp8-hf", "bf16-hf", "cpu")},
}


def make_run(
    path: Path,
    *,
    n: int = 300,
    steps: int = 40,
    stages: tuple[str, ...] = ("base", "tuned"),
    samples: int = 0,
    seed: int = 3407,
    right: tuple[float, float] = (0.52, 0.68),
    **recipe: object,
) -> RunFolder:
    """A finished run; `right` is the share of right answers before and after, of those not kept."""
    choices = {
        "model": "Qwen/Qwen3-0.6B",
        "data": "openai/gsm8k",
        "eval_data": "openai/gsm8k",
        "path": "bf16-hf",
        "steps": steps or 1,
    }
    run = create(path, Recipe(**{**choices, "seed": seed, **recipe}), "made for a test")  # type: ignore[arg-type]
    rest = 1 - right[0]
    before = kinds(
        n, {"right": right[0], "wrong": 0.6 * rest, "plain": 0.2 * rest, "cut": 0.17 * rest, "": 0.03 * rest}, seed
    )
    after = kinds(
        n, {"right": right[1], "wrong": 0.8 * (1 - right[1]), "cut": 0.2 * (1 - right[1])}, seed + 1, before, 0.8
    )
    if "bootstrap" in stages:
        raw = kinds(n, {"right": 0.05, "wrong": 0.35, "plain": 0.4, "cut": 0.2}, seed + 2)
        write_answers(run, "base", raw)
        write_answers(run, "bootstrap", before)
    elif "base" in stages:
        write_answers(run, "base", before)
    if "tuned" in stages:
        write_answers(run, "tuned", after)
    for i, stage in enumerate(stages if samples else ()):
        write_samples(run, stage, 0.48 + 0.22 * i, n, samples, seed + i)
    for line in metrics(steps, seed):
        append_line(run.metrics_file, line)
    run.write_json("facts.json", FACTS)
    if not steps:
        run.write_json("task.json", {"only": "evaluate", "adapter": None})
    run.write_json("plan.json", PLAN)
    run.write_json(
        "run.json",
        {
            "model": "Qwen/Qwen3-0.6B",
            "base_model": "Qwen/Qwen3-0.6B",
            "path": "bf16-hf",
            "engine": "portable",
            "backend": "cuda-graph",
            "dtype": "bfloat16",
            "quantization": None,
            "trainable_parameters": 20_185_088,
            "total_parameters": 596_049_920 + 20_185_088,
            "data": {
                "train": {"used": 7470, "total": 7473, "skipped": 3},
                "eval": {"used": n, "total": 1319, "skipped": 0},
            },
            "versions": {"torch": "2.10.0+cu128", "transformers": "5.24.0", "trl": "1.16.0", "peft": "0.21.2"},
            "seed": seed,
            "prompt": {
                "chat_template": True,
                "few_shot": 0,
                "stop": ["<|im_end|>"],
                "example": f"<|im_start|>user\n{question(0)[0]}<|im_end|>\n<|im_start|>assistant\n",
                "example_tokens": 41,
            },
            "stages": {"base": {"seconds": 31.2}, "train": {"seconds": 1.6 * steps}, "tuned": {"seconds": 29.8}},
            "peak_memory_gib": 9.31,
            "command": "grpo-portable train gsm8k-small --out again",
        },
    )
    if steps:
        run.event(
            "oom",
            "out of memory while training: micro-batch 8 → 4, groups stay whole",
            step=6,
            error="CUDA out of memory",
        )
        run.event(
            "fallback",
            "fp8-hf failed (rollout of step 18): no FP8 kernel for sm_120",
            step=17,
            error="no FP8 kernel for sm_120",
            **{"from": "fp8-hf", "to": "bf16-hf"},
        )
        run.event("saved", "checkpoint", step=20)
    return run


def rewrite(run: RunFolder, stage: str, change) -> None:
    """Pass every record of a stage through `change`; records for which it gives None are dropped."""
    file = run.generations(stage)
    records = [change(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps(r) + "\n" for r in records if r is not None), encoding="utf-8")
