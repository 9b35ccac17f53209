"""Values of a recipe that are fine alone and wrong together: each pair has one sentence why, told before a model loads.

TRL and vLLM would refuse some of these minutes later, at the first step, and let others run to a useless end. What depends
on the machine (float16 for a model that overflows in it) is asked again when a path is chosen: `float16_refusal`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from doctor.diagnosis import SPREAD_PATHS, VLLM_PATHS
from doctor.walls_model import overflows_in_float16
from grpo_portable.errors import RecipeError

if TYPE_CHECKING:
    from grpo_portable.recipe import Recipe

FLOAT16_PATHS = ("fp16-vllm", "fp16-hf")
_TAG_REWARD = re.compile(r"tags_[bc]_")


def check(recipe: Recipe, origin: str) -> None:
    """Raise RecipeError for the first pair of values that do not combine."""
    for fact, because, help in _refusals(recipe):
        raise RecipeError(f"{origin}: {fact}", because=because, help=help)


def float16_refusal(model: str) -> str | None:
    """Why a model must not be computed in float16, None when nothing is known against it."""
    if overflows_in_float16(model):
        name = model.rstrip("/").rsplit("/", 1)[-1]
        return f"{name} overflows in float16: its activations exceed 65,504, the largest number of the format"
    return None


def address_refusal(url: str) -> str | None:
    """Why a text is no address of a server, None when it is one. The text itself is not repeated: it may hold a password."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        return "it is no http:// or https:// address"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "a recipe is kept with the run, so an address holds no name, password or query"
    return None


def samples_elsewhere(recipe: Recipe) -> bool:
    """Whether the rollouts come from a vLLM server."""
    return recipe.backend == "server" or (recipe.backend == "auto" and bool(recipe.vllm_server))


def _refusals(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """(fact, because, help) of every pair that does not combine."""
    yield from _adapter(recipe)
    yield from _server(recipe)
    yield from _unsloth(recipe)
    yield from _fsdp(recipe)
    yield from _loss(recipe)
    yield from _rewards(recipe)
    if recipe.path in FLOAT16_PATHS and (because := float16_refusal(recipe.model)):
        yield f"path {recipe.path} for {recipe.model}", because, "choose a path with bfloat16, or the CPU"
    if recipe.bootstrap_probe and recipe.bootstrap_epochs == 0:
        yield (
            "`bootstrap_probe` without a bootstrap",
            "bootstrap_epochs is 0, so nothing would be probed",
            "set bootstrap_epochs to 1 or more, or bootstrap_probe to 0",
        )
    if recipe.context_tokens and recipe.prompt_percentile == 100 and recipe.context_tokens <= recipe.max_prompt_tokens:
        yield (
            f"context_tokens {recipe.context_tokens} with max_prompt_tokens {recipe.max_prompt_tokens}",
            "the longest prompt could leave no room for an answer",
            "raise context_tokens, lower max_prompt_tokens, or set prompt_percentile below 100",
        )


def _adapter(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.lora_rank == 0:
        for name in ("dora", "rslora"):
            if getattr(recipe, name):
                yield f"`{name}: true` needs an adapter", "lora_rank is 0", "set lora_rank to 8 or more"
        if recipe.path == "qlora-hf":
            yield (
                "4-bit weights cannot be trained without an adapter",
                "lora_rank is 0 and packed weights take no gradient",
                "set lora_rank to 8 or more",
            )
        if recipe.path == "fp8-vllm":
            yield (
                "path fp8-vllm with lora_rank 0",
                "all weights are trained, and their FP8 copy would have to be quantised anew at every step",
                "set lora_rank to 8 or more, or choose bf16-vllm",
            )
        if recipe.beta > 0:
            yield (
                f"beta {recipe.beta:g} with lora_rank 0",
                "the KL term is against the model with its adapter off; without one a second model would be needed",
                "set lora_rank to 8 or more, or beta to 0",
            )
        return
    if recipe.dora and recipe.path in VLLM_PATHS:
        yield (
            f"`dora: true` on path {recipe.path}",
            "vLLM serves LoRA and rsLoRA adapters, not DoRA",
            "set dora to false, or choose a path that ends in -hf",
        )
    targets = [target.strip() for target in recipe.lora_targets.split(",")]
    if "lm_head" in targets:
        yield (
            "lora_targets names lm_head",
            "log-probabilities are read from its weight, so an adapter there is not seen",
            "leave lm_head out, or use all-linear",
        )


def _server(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.vllm_server and (because := address_refusal(recipe.vllm_server)):
        yield "`vllm_server` cannot be used", because, "write http://host:port; a key goes into VLLM_API_KEY"
    if recipe.backend == "server" and not recipe.vllm_server:
        yield "backend server without `vllm_server`", "there is nobody to ask", "set vllm_server to http://host:port"
    if not samples_elsewhere(recipe):
        return
    if recipe.path in VLLM_PATHS:
        yield (
            f"path {recipe.path} with a vLLM server",
            "that path starts a vLLM of its own beside the policy",
            "choose a path that ends in -hf, qlora-hf or cpu: it says how the policy that learns is held",
        )
    if recipe.lora_rank == 0 or recipe.dora or recipe.lora_rank > 512:
        what = "all weights are trained" if recipe.lora_rank == 0 else "DoRA" if recipe.dora else "rank above 512"
        yield (
            f"a vLLM server with {what}",
            "a server is handed LoRA and rsLoRA adapters of rank 1 to 512, and nothing else",
            "set lora_rank and dora so, or leave vllm_server out",
        )


def _fsdp(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.fsdp is not True:
        return
    if not samples_elsewhere(recipe):
        yield (
            "`fsdp: true` without a vLLM server",
            "no engine of the process that trains can read weights that lie in parts on several GPUs",
            "start `vllm serve` on other GPUs and set vllm_server to http://host:port",
        )
    if recipe.path not in ("auto", "cpu", *SPREAD_PATHS):
        yield (
            f"`fsdp: true` on path {recipe.path}",
            "only 16-bit weights are kept in parts",
            f"choose {' or '.join(SPREAD_PATHS)}, or set fsdp to false",
        )


def _unsloth(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.backend != "unsloth":
        return
    if recipe.vllm_server:
        yield (
            "backend unsloth with a vLLM server",
            "Unsloth shares the weights of a vLLM in its own process",
            "leave vllm_server out, or set backend to server",
        )
    if recipe.lora_rank == 0 or recipe.dora:
        what = "lora_rank 0" if recipe.lora_rank == 0 else "`dora: true`"
        yield (
            f"backend unsloth with {what}",
            "the shared weights are frozen, and vLLM serves LoRA and rsLoRA adapters",
            "set lora_rank to 8 or more and dora to false, or backend to plain",
        )
    if recipe.model == "embedded" or recipe.model.lower().endswith(".gguf"):
        yield (
            f"backend unsloth with model {recipe.model}",
            "Unsloth reads models of the hub and folders",
            "set backend to plain",
        )
    if recipe.fp8_scales == "tensor":
        yield (
            "backend unsloth with fp8_scales tensor",
            "Unsloth learns on FP8 weights with a scale a row or a 128x128 block",
            "set fp8_scales to row or block",
        )
    if recipe.path not in ("auto", "fp8-vllm", "bf16-vllm"):
        yield (
            f"backend unsloth on path {recipe.path}",
            "it shares the weights of a vLLM in 16 bit or FP8",
            "choose path fp8-vllm or bf16-vllm, or set backend to plain",
        )


def _loss(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.loss == "cispo" and recipe.epsilon_high is not None and recipe.epsilon_high < 1:
        yield (
            f"loss cispo with epsilon_high {recipe.epsilon_high:g}",
            "cispo caps the ratio at epsilon_high itself, not at 1 + epsilon_high: every gradient would shrink to that share",
            "set epsilon_high to 2 or more, or leave it null for 5",
        )
    if recipe.loss != "cispo" and recipe.epsilon >= 1:
        yield (
            f"epsilon {recipe.epsilon:g}",
            "the lower clip is 1 - epsilon, and a ratio is never below 0",
            "set epsilon below 1; 0.2 is usual",
        )
    if recipe.mask_truncated and "overlong_penalty" in recipe.rewards:
        yield (
            "`mask_truncated: true` with the reward overlong_penalty",
            "what hits the limit is left out of the loss, so the penalty never reaches the answers it is for",
            "choose one of the two",
        )


def _rewards(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    tagged = [name for name in recipe.rewards if _TAG_REWARD.match(name)]
    if tagged and recipe.answer_style != "tagged":
        yield (
            f"reward {tagged[0]} with answer_style {recipe.answer_style}",
            "it reads <SOLUTION> tags, while the evaluation would look elsewhere",
            "set answer_style to tagged",
        )
    sets = {name[5] for name in tagged}
    if len(sets) > 1:
        yield (
            "rewards of both sets, tags_b and tags_c",
            "they pay the same tags twice, with different values",
            "choose one of the two",
        )
    twice = [name for name in recipe.rewards if recipe.rewards.count(name) > 1]
    if twice:
        yield f"reward {twice[0]} is named twice", "its metrics would be one column", "weigh it with reward_weights"
