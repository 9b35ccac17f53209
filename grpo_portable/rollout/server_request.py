"""What a vLLM server is asked for and what it answers: pure, torch-free. Written against vLLM 0.24's OpenAI-compatible server
(vllm/entrypoints/openai/completion/protocol.py).

Legend: G completions of a prompt, T completion tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_portable.errors import EngineError
from grpo_portable.rollout import finished
from grpo_portable.rollout.protocol import Completion, Sampling
from grpo_portable.rollout.requests import prompt_seed
from grpo_portable.rollout.stops import StopStrings

BYTES_PER_TOKEN = 1024  # of an answer at the most: an id, its text, its log-probability and the text offset
ABSENT = -9999.0  # vLLM writes minus infinity, which JSON has no word for, so


def body(model: str, prompt: Sequence[int], count: int, sampling: Sampling, *, room: int, index: int) -> dict[str, Any]:
    """The request for `count` completions of one prompt's token ids, with at most `room` tokens each.

    Every value is given, so that nothing of the server's or the model's own defaults is taken. `index` is the prompt's place
    in the rollout: each has a seed of its own, and vLLM adds the completion's number to it.
    """
    asked = {
        "model": model,
        "prompt": [int(token) for token in prompt],
        "n": count,
        "max_tokens": min(sampling.max_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # only our stop ids end a row: the model's own are among them or unwanted
        "skip_special_tokens": False,
        "logprobs": 0,  # of the drawn token alone
        "return_token_ids": True,
    }
    if sampling.temperature > 0:
        asked["seed"] = prompt_seed(sampling, index)
    return asked


def most_bytes(asked: Mapping[str, Any]) -> int:
    """The largest answer to a request that is taken, in bytes."""
    return BYTES_PER_TOKEN * (len(asked["prompt"]) + asked["n"] * asked["max_tokens"])


def completions(
    answer: Any, count: int, *, vocabulary: int, strings: StopStrings | None = None
) -> tuple[Completion, ...]:
    """The G completions of an answer; EngineError for one that holds something else than was asked for."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != count:
        found = len(choices) if isinstance(choices, list) else "no"
        raise EngineError(f"the vLLM server gave {found} completions of a prompt where {count} were asked for")
    return tuple(_completion(choice, vocabulary, strings) for choice in choices)


def _completion(choice: Any, vocabulary: int, strings: StopStrings | None) -> Completion:
    told = choice if isinstance(choice, dict) else {}
    tokens = told.get("token_ids")
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
        raise EngineError(
            "the vLLM server gave no token ids, or ids outside the policy's vocabulary",
            help="a vLLM that knows `return_token_ids` is needed; this was written against 0.24",
        )
    values = (told.get("logprobs") or {}).get("token_logprobs")
    given = values if isinstance(values, list) else []
    if len(given) != len(tokens) or not all(isinstance(v, (int, float)) and v > ABSENT for v in given):
        raise EngineError(
            "the vLLM server gave log-probabilities that are missing or not numbers",
            because="the loss needs the sampler's log-probability of every token",
            help="a diverged policy does this, and a server that is not vLLM's own",
        )
    return finished.completion(tokens, [float(v) for v in given], told.get("finish_reason"), strings)


def adapter_body(name: str, folder: str) -> dict[str, Any]:
    """The request to load the adapter in `folder`, as the server sees it, under a new name."""
    return {"lora_name": name, "lora_path": folder, "load_inplace": False}


def command(model: str, *, rank: int | None, context: int) -> str:
    """How to start a server for a run; `context`: longest prompt and answer together, in tokens."""
    lora = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True " if rank else ""
    slots = f" --enable-lora --max-lora-rank {rank}" if rank else ""
    return f"{lora}vllm serve {model}{slots} --logprobs-mode processed_logprobs --max-model-len {context}"


def tokens_counted(metrics: str) -> float | None:
    """Tokens that went in and out so far, by what vLLM tells Prometheus at each of its steps; None where it does not tell."""
    found = re.findall(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^\n]*\})? ([\d.eE+]+)", metrics, re.M)
    return sum(map(float, found)) if found else None
