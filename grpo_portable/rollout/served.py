"""Is a vLLM server set up for this run? Asked once, before anything is made with it: a wrong answer is a user's mistake.

Names tell little (a server has aliases, a model has copies), so what is compared is what counts: the tokenizer by how it cuts
a text, the model by the probability it gives to what the server wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch

from grpo_portable.errors import EngineError, ServerError
from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import server_request
from grpo_portable.rollout.protocol import APART, Completion, Sampling
from grpo_portable.rollout.server_client import KEY, OVERLOADED, Client, Refused

READY_LIMIT_S = 60.0  # from the first question until a server that is just starting answers
ASK_LIMIT_S = 30.0
PROBE_LIMIT_S = 120.0  # the first tokens of a fresh server may wait for kernels to be compiled
PROBE = (
    "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
    "The sum of two numbers is 31 and their difference is 5. The larger one is",
    "def area(width, height):\n    return",
    "In 1969, three people flew to the moon, and",
)
PROBE_TOKENS = 64  # of each answer: 256 together, from which a mean is trusted (correction.ENOUGH)
CERTAIN, MOST_TIED = 1e-3, 16  # rounding of a log-probability; candidates that may share the first place


@dataclass(frozen=True)
class Served:
    """`name`: what requests call the base. `shown`: the last part of where its weights lie. `context` in tokens."""

    name: str
    shown: str
    context: int | None


def ready(client: Client, tick: Callable[[], None], limit_s: float = READY_LIMIT_S) -> None:
    """Wait until the server says it is well. ServerError when nobody answers within the limit, or something else does."""
    ends = time.monotonic() + limit_s
    while True:
        tick()
        try:
            client.get("/health", limit_s=ASK_LIMIT_S)
            return
        except Refused as refused:
            if refused.status not in OVERLOADED:
                raise _not_vllm(client, refused) from refused
            last: EngineError = refused
        except EngineError as error:
            if error.__cause__ is None or not isinstance(error.__cause__, ConnectionError):
                raise _absent(client, error) from error
            last = error
        if time.monotonic() > ends:
            raise _absent(client, last)
        time.sleep(min(1.0, limit_s / 10))


def base(client: Client) -> Served:
    """The model the server was started with. ServerError when it does not say, or wants a key."""
    try:
        listed = client.get("/v1/models", limit_s=ASK_LIMIT_S)
    except Refused as refused:
        if refused.status in (401, 403):
            raise ServerError(
                f"the vLLM server at {client.url} wants a key",
                because=refused.fact,
                help=f"set the environment variable {KEY}; it is sent to that server and written nowhere",
            ) from refused
        raise _not_vllm(client, refused) from refused
    except EngineError as error:
        raise _not_vllm(client, error) from error
    cards = listed.get("data") if isinstance(listed, dict) else None
    own = [c for c in cards or () if isinstance(c, dict) and isinstance(c.get("id"), str) and not c.get("parent")]
    if not own:
        raise ServerError(f"what answers at {client.url} is no vLLM server", because="it lists no model")
    card = own[0]
    context = card.get("max_model_len")
    shown = PurePosixPath(str(card.get("root") or card["id"])).name or card["id"]
    return Served(card["id"], shown, context if type(context) is int else None)


def require_room(served: Served, wanted: int, command: str) -> None:
    """ServerError when the server's context is shorter than `wanted` tokens."""
    if served.context is not None and served.context < wanted:
        raise ServerError(
            f"the vLLM server's context is {served.context} tokens, and prompt and answer may take {wanted}",
            help=f"start it with: {command}",
        )


def require_tokenizer(client: Client, served: Served, tokenizer: Any) -> bool:
    """ServerError when the server cuts a text otherwise than the policy's tokenizer; False when it does not tell."""
    try:
        for text in PROBE:
            asked = {"model": served.name, "prompt": text, "add_special_tokens": False}
            answer = client.ask("/tokenize", asked, limit_s=ASK_LIMIT_S)
            theirs = answer.get("tokens") if isinstance(answer, dict) else None
            if theirs is None:
                return False
            ours = tokenizer(text, add_special_tokens=False)["input_ids"]
            if list(theirs) != list(ours):
                raise _other_model(served, f"its tokenizer cuts {text.split()[0]!r}... into {len(theirs)} other tokens")
    except Refused:
        return False  # started without a tokenizer, or another version: the probabilities are compared all the same
    return True


def require_same_model(client: Client, served: Served, model: Any, tokenizer: Any, vocabulary: int) -> float:
    """Nats a token between the server's base and the policy's, over answers the server wrote; ServerError above the limit."""
    difference, tokens = 0.0, 0
    for index, text in enumerate(PROBE):
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = _ask(client, served, prompt, Sampling(PROBE_TOKENS, seed=0), vocabulary, index)
        own = _log_probabilities(model, prompt, answer.token_ids)
        difference += sum(answer.logprobs) - own
        tokens += len(answer.token_ids)
    apart = difference / max(1, tokens)
    if apart > APART:
        raise _other_model(served, f"what it wrote is {apart:.2f} nats a token less likely to the policy's base")
    return apart


def is_share(logprob: float) -> bool:
    """Whether it is the logarithm of 1/m for a small whole m."""
    m = round(math.exp(-max(logprob, -math.log(MOST_TIED))))
    return abs(logprob + math.log(m)) < CERTAIN


def require_processed(client: Client, served: Served, recipe: Recipe, tokenizer: Any, vocabulary: int) -> None:
    """ServerError when the server's log-probabilities are not of the distribution drawn from, and the recipe needs these.

    With one candidate left (`top_k` 1), that distribution gives the drawn token probability 1, or 1/m where m logits are equal,
    as in 16 bit they may be: vLLM keeps them all.
    """
    plain = (recipe.temperature, recipe.top_p, recipe.top_k, recipe.min_p, recipe.repetition_penalty)
    if plain == (1, 1, 0, 0, 1):
        return
    prompt = tokenizer(PROBE[0], add_special_tokens=False)["input_ids"]
    answer = _ask(client, served, prompt, Sampling(16, top_k=1, seed=0), vocabulary, 0)
    odd = [value for value in answer.logprobs if not is_share(value)]
    if odd:
        raise ServerError(
            "the vLLM server gives log-probabilities from before temperature and truncation"
            f" ({min(odd):.2f} for a token that was the only candidate)",
            because="the loss weighs each token by the probability it was drawn with",
            help="start it with --logprobs-mode processed_logprobs, or sample with temperature 1 and nothing cut off",
        )


def _ask(
    client: Client, served: Served, prompt: Sequence[int], sampling: Sampling, vocabulary: int, index: int
) -> Completion:
    room = (served.context or 1 << 30) - len(prompt)
    asked = server_request.body(served.name, prompt, 1, sampling, room=room, index=index)
    try:
        told = client.ask("/v1/completions", asked, limit_s=PROBE_LIMIT_S, most_bytes=server_request.most_bytes(asked))
        return server_request.completions(told, 1, vocabulary=vocabulary)[0]
    except EngineError as error:
        raise ServerError(
            f"the vLLM server at {client.url} cannot make rollouts", because=str(error), help=error.help
        ) from error


@torch.no_grad()
def _log_probabilities(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """The sum of the tokens' log-probabilities after `prompt` under the policy with its adapter off."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    with policy.without_adapter(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    drawn = torch.tensor(list(tokens), device=device)
    return float(logits.log_softmax(-1).gather(1, drawn[:, None]).sum())


def _absent(client: Client, error: EngineError) -> ServerError:
    return ServerError(
        f"no vLLM server answers at {client.url}",
        because=error.because or error.fact,
        help="start it, correct vllm_server, or leave vllm_server out to sample on this machine",
    )


def _not_vllm(client: Client, error: EngineError) -> ServerError:
    return ServerError(f"what answers at {client.url} is no vLLM server", because=error.because or error.fact)


def _other_model(served: Served, because: str) -> ServerError:
    return ServerError(
        f"the vLLM server's model, {served.shown}, is not the one this run trains",
        because=because,
        help="serve the recipe's model, or name the served one with --model",
    )
