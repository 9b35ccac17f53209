"""Values of a recipe that are fine alone and wrong together: each pair has one sentence why, told before a model loads.

TRL and vLLM would refuse some of these minutes later, at the first step, and let others run to a useless end. What keeps a
recipe from a path is one function, `on_path`, asked when a recipe names its path and when a path is chosen for it. What vLLM
cannot serve is asked once more of the policy itself: `vllm_refusal`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from doctor.diagnosis import FP8_PATHS, FP16_PATHS, SPREAD_PATHS, VLLM_PATHS
from doctor.walls_model import overflows_in_float16
from grpo_portable.errors import RecipeError

if TYPE_CHECKING:
    from grpo_portable.recipe import Recipe

UNSLOTH_PATHS = ("fp8-vllm", "bf16-vllm")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py: MaxLoRARanks
_TAG_REWARD = re.compile(r"tags_[bc]_")


class Refusal(NamedTuple):
    fact: str
    because: str
    help: str


def check(recipe: Recipe, origin: str) -> None:
    """Raise RecipeError for the first pair of values that do not combine."""
    for fact, because, help in _refusals(recipe):
        raise RecipeError(f"{origin}: {fact}", because=because, help=help)


def on_path(recipe: Recipe, path: str) -> Refusal | None:
    """Why a path cannot run this recipe on any machine, None when nothing in the recipe is against it."""
    if path in VLLM_PATHS and samples_elsewhere(recipe):
        return Refusal(
            f"path {path} with a vLLM server",
            f"the rollouts come from the vLLM server at {recipe.vllm_server}, and that path starts a vLLM of its own",
            "choose a path that ends in -hf, qlora-hf or cpu: it says how the policy that learns is held",
        )
    if path in VLLM_PATHS:
        unserved = vllm_refusal(recipe.lora_rank, dora=recipe.dora, fp8=path in FP8_PATHS)
        if unserved is not None:
            return unserved._replace(fact=f"path {path} with {unserved.fact}")
    if path == "qlora-hf" and recipe.lora_rank == 0:
        return Refusal(
            f"path {path} with lora_rank 0",
            "4-bit weights take no gradient, so they cannot be trained without an adapter",
            "set lora_rank to 8 or more",
        )
    if recipe.fsdp is True and path not in ("cpu", *SPREAD_PATHS):
        return Refusal(
            f"`fsdp: true` on path {path}",
            "only 16-bit weights are kept in parts",
            f"choose {' or '.join(SPREAD_PATHS)}, or set fsdp to false",
        )
    if path in FP16_PATHS and (because := float16_refusal(recipe.model)):
        return Refusal(f"path {path} for {recipe.model}", because, "choose a path with bfloat16, or the CPU")
    return None


def vllm_refusal(rank: int, *, dora: bool, fp8: bool) -> Refusal | None:
    """Why vLLM cannot sample from a policy with an adapter of this rank (0: all weights are trained), None when it can."""
    if rank == 0 and fp8:
        return Refusal(
            "lora_rank 0",
            "all weights are trained, and an FP8 copy of them would have to be quantised anew at every step",
            "set lora_rank to 8 or more, or choose bf16-vllm",
        )
    if rank and dora:
        return Refusal(
            "`dora: true`",
            "vLLM serves LoRA and rsLoRA adapters, not DoRA",
            "set dora to false, or choose a path that ends in -hf",
        )
    if rank > RANKS[-1]:
        return Refusal(
            f"lora_rank {rank}",
            f"vLLM serves adapters up to rank {RANKS[-1]}, not {rank}",
            f"set lora_rank to {RANKS[-1]} or less, or choose a path that ends in -hf",
        )
    return None


def head_refusal(lora_targets: str) -> Refusal | None:
    """Why there can be no adapter on the head, None when none is asked for."""
    if "lm_head" not in [target.strip() for target in lora_targets.split(",")]:
        return None
    return Refusal(
        "lora_targets names lm_head",
        "log-probabilities are read from its weight, so an adapter there is not seen",
        "leave lm_head out, or use all-linear",
    )


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
    if recipe.path != "auto" and (refused := on_path(recipe, recipe.path)):
        yield refused
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
        if recipe.beta > 0:
            yield (
                f"beta {recipe.beta:g} with lora_rank 0",
                "the KL term is against the model with its adapter off; without one a second model would be needed",
                "set lora_rank to 8 or more, or beta to 0",
            )
        return
    if refused := head_refusal(recipe.lora_targets):
        yield refused


def _server(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.vllm_server and (because := address_refusal(recipe.vllm_server)):
        yield "`vllm_server` cannot be used", because, "write http://host:port; a key goes into VLLM_API_KEY"
    if recipe.backend == "server" and not recipe.vllm_server:
        yield "backend server without `vllm_server`", "there is nobody to ask", "set vllm_server to http://host:port"
    unserved = vllm_refusal(recipe.lora_rank, dora=recipe.dora, fp8=True)
    if samples_elsewhere(recipe) and unserved is not None:
        yield (
            f"a vLLM server with {unserved.fact}",
            f"a server is handed LoRA and rsLoRA adapters of rank 1 to {RANKS[-1]}, and nothing else",
            "set lora_rank and dora so, or leave vllm_server out",
        )


def _fsdp(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    if recipe.fsdp is True and not samples_elsewhere(recipe):
        yield (
            "`fsdp: true` without a vLLM server",
            "no engine of the process that trains can read weights that lie in parts on several GPUs",
            "start `vllm serve` on other GPUs and set vllm_server to http://host:port",
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
    if recipe.path not in ("auto", *UNSLOTH_PATHS):
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
