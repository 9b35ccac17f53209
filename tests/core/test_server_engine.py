"""A vLLM server elsewhere as the engine: what it is asked, what it is handed, what its failures and a wrong one become.

No vLLM here: the server of `standin_server` gives vLLM's answers over real HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import standin_server
import standin_vllm
import tiny
import torch
import training

from grpo_portable.combinations import on_path
from grpo_portable.errors import EngineError, EngineUnsupported, RecipeError, ServerError
from grpo_portable.models import policy
from grpo_portable.recipe import Recipe, override
from grpo_portable.rollout import available, server, server_client, server_request
from grpo_portable.rollout import served as served_room
from grpo_portable.rollout.protocol import Resting, Sampling, Ticking
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.rollout.server_client import Client, Refused

WIDE = {"initializer_range": 0.3}  # logits far enough apart that an adapter changes greedy tokens
GREEDY = Sampling(max_tokens=12, temperature=0.0)
PROMPTS = [[10, 20, 30], [40], [7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source"), **WIDE)


@pytest.fixture
def served(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[standin_server.Server]:
    standin_vllm.install(monkeypatch)
    for name in ("WORLD_SIZE", "RANK", server_client.KEY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_client, "PAUSE_S", 0.01)
    monkeypatch.setattr(served_room, "PROBE_TOKENS", 16)  # there are enough of them to tell these models apart
    made = standin_server.Server(source, context=256)
    with standin_server.serving(made) as url:
        made.url = url  # type: ignore[attr-defined]
        yield made


def adapted(size: float = 0.2, seed: int = 3, **changes: Any) -> Any:
    recipe = replace(training.RECIPE, **changes)
    made = policy.add_adapter(tiny.model(**WIDE), recipe)
    disturb(made, size, seed)
    return made.eval()


def disturb(model: Any, size: float, seed: int = 3) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * size)


def recipe_for(url: str, **changes: Any) -> Recipe:
    made = replace(training.RECIPE, vllm_server=url, backend="server", max_prompt_tokens=32)
    return replace(made, **{"max_completion_tokens": 16, **changes})


def opened(model: Any, served: Any, **changes: Any) -> server.ServerRollout:
    return server.make(model, tiny.tokenizer(), recipe_for(served.url, **changes), dtype="float32")


def log_probabilities(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


# --- rollouts


def test_greedy_rows_are_those_of_the_policy_with_its_adapter(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    made = engine.generate(PROMPTS, 2, GREEDY)
    wanted = ReferenceRollout(model, tiny.tokenizer(), rows=1).generate(PROMPTS, 1, GREEDY)
    base = ReferenceRollout(tiny.model(**WIDE), tiny.tokenizer(), rows=1).generate(PROMPTS, 1, GREEDY)
    assert [g[0].token_ids for g in wanted] != [g[0].token_ids for g in base]  # the adapter shows
    assert [[c.token_ids for c in g] for g in made] == [[g[0].token_ids] * 2 for g in wanted]
    assert made[0][0].logprobs == pytest.approx(wanted[0][0].logprobs, abs=1e-4)
    engine.close()


def test_log_probabilities_are_of_the_distribution_drawn_from(served: Any) -> None:
    model = adapted()
    engine = opened(model, served, temperature=0.7)
    engine.sync(model)
    groups = engine.generate(PROMPTS, 3, Sampling(max_tokens=9, temperature=0.7, seed=5))
    assert len({c.token_ids for c in groups[0]}) > 1
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for row in group:
            assert row.logprobs == pytest.approx(log_probabilities(model, prompt, row.token_ids, 0.7), abs=1e-3)


def test_every_value_of_a_request_is_given_and_each_prompt_has_a_seed_of_its_own(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    served.asked.clear()
    sampling = Sampling(8, 0.9, 0.8, 5, 0.05, 1.1, (1, 3), ("ab",), 77)
    engine.generate(PROMPTS, 4, sampling)
    bodies = {tuple(body["prompt"]): body for body in served.bodies("/v1/completions")}
    assert bodies[(10, 20, 30)] == {
        "model": engine._loaded,
        "prompt": [10, 20, 30],
        "n": 4,
        "max_tokens": 8,
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "stop_token_ids": [1, 3],
        "stop": ["ab"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": random.Random("77 0").getrandbits(62),
    }
    seeds = [bodies[tuple(prompt)]["seed"] for prompt in PROMPTS]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_same_seed_gives_the_same_rows_and_another_one_others(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    sampling = Sampling(max_tokens=12, seed=5)
    first, again = (engine.generate(PROMPTS, 2, sampling) for _ in range(2))
    assert first == again and first != engine.generate(PROMPTS, 2, replace(sampling, seed=6))


def test_an_answer_ends_where_the_servers_context_does(served: Any) -> None:
    engine = opened(adapted(), served)
    (group,) = engine.generate([[5] * 250], 1, Sampling(max_tokens=12, temperature=0.0))
    assert len(group[0].token_ids) == 6 and group[0].finish_reason == "length"


def test_a_row_is_cut_after_the_token_that_completes_a_stop_string(served: Any) -> None:
    engine = opened(adapted(), served)
    (group,) = engine.generate([PROMPTS[0]], 1, GREEDY)
    text = tiny.tokenizer().decode(group[0].token_ids[2:4])
    (cut,) = engine.generate([PROMPTS[0]], 1, replace(GREEDY, stop_strings=(text,)))
    assert text in tiny.tokenizer().decode(cut[0].token_ids) and len(cut[0].token_ids) <= 4
    assert cut[0].finish_reason == "stop" and len(cut[0].logprobs) == len(cut[0].token_ids)


def test_the_engine_keeps_the_protocol_and_tells_what_it_is(served: Any) -> None:
    engine = opened(adapted(), served)
    assert isinstance(engine, Resting) and isinstance(engine, Ticking)
    ticks: list[None] = []
    engine.tick = lambda: ticks.append(None)
    engine.generate(PROMPTS, 2, Sampling(max_tokens=12, seed=1))
    assert ticks
    told = engine.describe()
    assert told["url"] == served.url and told["served_model"] == served.folder.name and told["context_tokens"] == 256
    assert abs(told["apart_at_start"]) < 1e-3


# --- the adapter


def test_every_update_is_handed_over_under_a_new_name_and_the_old_one_taken_away(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    first, folder = engine._loaded, engine._scratch.path
    before = engine.generate(PROMPTS, 1, GREEDY)
    disturb(model, 0.3, seed=9)
    engine.sync(model)
    assert engine._loaded != first and list(served.adapters) == [engine._loaded] and not folder.exists()
    after = engine.generate(PROMPTS, 1, GREEDY)
    assert after != before
    wanted = ReferenceRollout(model, tiny.tokenizer(), rows=1).generate(PROMPTS, 1, GREEDY)
    assert [g[0].token_ids for g in after] == [g[0].token_ids for g in wanted]
    engine.close()
    assert not served.adapters and engine._scratch is None


def test_with_the_adapter_off_the_servers_base_answers(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    with policy.without_adapter(model):
        engine.sync(model)
        made = engine.generate(PROMPTS, 1, GREEDY)
        wanted = ReferenceRollout(model, tiny.tokenizer(), rows=1).generate(PROMPTS, 1, GREEDY)
    assert [g[0].token_ids for g in made] == [g[0].token_ids for g in wanted]
    assert served.bodies("/v1/completions")[-1]["model"] == standin_server.NAME


def test_adapters_go_through_the_folder_that_both_see(served: Any, tmp_path: Path) -> None:
    model = adapted()
    engine = opened(model, served, vllm_adapters=str(tmp_path))
    engine.sync(model)
    handed = Path(served.bodies("/v1/load_lora_adapter")[0]["lora_path"])
    assert handed.is_relative_to(tmp_path) and (handed / "adapter_model.safetensors").is_file()
    assert handed.parent.stat().st_mode & 0o055 == 0o055  # the server may be another user's
    assert len({file.stat().st_mode for file in handed.iterdir()}) == 1
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_of_several_processes_hands_over(served: Any) -> None:
    model = adapted()
    first = opened(model, served)
    first.sync(model)
    second = opened(model, served)

    class Second:
        is_main, rank, count = False, 1, 2

        def as_main_says(self, value: Any) -> Any:
            return first._loaded, None

    second.processes = Second()  # type: ignore[assignment]
    loads = len(served.bodies("/v1/load_lora_adapter"))
    second.sync(model)
    assert len(served.bodies("/v1/load_lora_adapter")) == loads
    assert second.generate(PROMPTS, 1, GREEDY) == first.generate(PROMPTS, 1, GREEDY)
    second.close()
    assert list(served.adapters) == [first._loaded]  # it is not its to take away


@pytest.mark.parametrize("changes", [{"lora_rank": 0}, {"dora": True}], ids=str)
def test_a_policy_no_server_can_be_handed_is_refused(served: Any, changes: dict) -> None:
    with pytest.raises(EngineUnsupported):
        opened(adapted(**changes), served)


# --- a server that is not set up for this run


def another_model(served: Any) -> None:
    with torch.no_grad():
        for parameter in served.llm.model.parameters():
            parameter.mul_(1.5)


def cuts_otherwise(served: Any) -> None:
    served.faults["/tokenize"] = standin_server.edited(lambda told: told["tokens"].pop())


def without_lists(served: Any) -> None:
    served.faults["/v1/models"] = standin_server.edited(lambda told: told.update(data=[]))


def no_json(served: Any) -> None:
    served.faults["/v1/models"] = standin_server.times(9, lambda handler: handler.say(200, "<html>hello</html>"))


def gone(path: str) -> Callable[[Any], None]:
    def put_in(served: Any) -> None:
        served.faults[path] = standin_server.times(9, lambda handler: handler.say(404, {"detail": "Not Found"}))

    return put_in


def changed(change: Callable[[dict], Any]) -> Callable[[Any], None]:
    def put_in(served: Any) -> None:
        served.faults["/v1/completions"] = standin_server.edited(lambda told: [change(c) for c in told["choices"]])

    return put_in


@pytest.mark.parametrize(
    ("put_in", "changes", "said"),
    [
        (another_model, {}, "nats a token less likely"),
        (cuts_otherwise, {}, "its tokenizer cuts 'A'"),
        (without_lists, {}, "is no vLLM server"),
        (no_json, {}, "is no vLLM server"),
        (gone("/health"), {}, "is no vLLM server"),
        (gone("/v1/completions"), {}, "cannot make rollouts"),
        (lambda served: setattr(served, "processed", False), {"temperature": 0.7}, "before temperature and truncation"),
        (lambda served: setattr(served, "context", 47), {}, "context is 47 tokens, and prompt and answer may take 48"),
        (lambda served: setattr(served, "key", "secret-key"), {}, "wants a key"),
        (changed(lambda choice: choice.pop("logprobs")), {}, "log-probabilities that are missing"),
        (changed(lambda choice: choice.pop("token_ids")), {}, "no token ids"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_server_that_is_set_up_otherwise_is_the_users_to_correct(
    served: Any, put_in: Any, changes: dict, said: str
) -> None:
    put_in(served)
    with pytest.raises(ServerError) as caught:
        opened(adapted(), served, **changes)
    assert said in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("logprob", [0.0, -1e-4, -0.6931, -1.0986, -2.7726])
def test_equal_logits_share_the_only_place(logprob: float) -> None:
    assert served_room.is_share(logprob)  # the logarithms of 1, 1/2, 1/3 and 1/16


@pytest.mark.parametrize("logprob", [-0.01, -0.5, -0.9, -2.8332, -8.0, float("-inf")])
def test_other_probabilities_are_no_shares(logprob: float) -> None:
    assert not served_room.is_share(logprob)


def test_raw_log_probabilities_are_as_good_where_nothing_is_tempered_or_cut(served: Any) -> None:
    served.processed = False
    opened(adapted(), served, temperature=1.0)


def test_a_server_without_tokenize_is_judged_by_its_probabilities(served: Any) -> None:
    gone("/tokenize")(served)
    assert abs(opened(adapted(), served).describe()["apart_at_start"]) < 1e-3


@pytest.mark.parametrize(
    ("put_in", "said", "helped"),
    [
        (lambda served: setattr(served, "runtime_adapters", False), "Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (lambda served: served.llm.arguments.update(max_lora_rank=2), "max_lora_rank", "--max-lora-rank 4"),
        (lambda served: setattr(served, "_load", elsewhere(served)), "it sees no such folder", "vllm_adapters"),
    ],
    ids=["runtime loading off", "rank", "another host"],
)
def test_a_server_that_takes_no_adapter_is_told_with_what_helps(
    served: Any, put_in: Any, said: str, helped: str
) -> None:
    put_in(served)
    model = adapted()
    engine = opened(model, served)
    with pytest.raises(ServerError) as caught:
        engine.sync(model)
    assert said in str(caught.value) and helped in str(caught.value.help)


def elsewhere(served: Any) -> Callable[[str, str], Any]:
    return lambda name, path: served._error(404, f"Loading lora {name} failed: No adapter found for {path}")


def test_nobody_there_is_told_after_the_limit() -> None:
    client = Client("http://127.0.0.1:9")
    client.attempts = 1
    ticks: list[None] = []
    began = time.monotonic()
    with pytest.raises(ServerError, match="no vLLM server answers at http"):
        served_room.ready(client, lambda: ticks.append(None), limit_s=0.5)
    assert 0.4 < time.monotonic() - began < 20 and len(ticks) > 2


def test_a_server_that_is_still_starting_is_waited_for(served: Any) -> None:
    served.faults["/health"] = standin_server.times(5, lambda handler: handler.say(503, ""))
    opened(adapted(), served)
    assert len(served.bodies("/health")) == 6


def test_the_key_is_sent_and_stands_nowhere_else(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served.key = "secret-key"
    monkeypatch.setenv(server_client.KEY, "secret-key")
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    assert "secret-key" not in json.dumps(engine.describe())
    echo = {"error": {"message": "bad key secret-key"}}
    served.faults["/v1/completions"] = standin_server.times(9, lambda handler: handler.say(400, echo))
    with pytest.raises(EngineError) as caught:
        engine.generate(PROMPTS, 1, GREEDY)
    assert "secret-key" not in " ".join(caught.value.lines()) and "bad key ..." in str(caught.value)


# --- a server that fails


@pytest.mark.parametrize(
    "do",
    [lambda handler: handler.cut(), lambda handler: handler.say(503, {"error": {"message": "overloaded"}})],
    ids=["cut", "overloaded"],
)
def test_a_request_that_was_cut_off_is_sent_again_a_few_times(served: Any, do: Any) -> None:
    engine = opened(adapted(), served)
    engine.client.pause_s = 0.01
    wanted = engine.generate(PROMPTS[:1], 1, GREEDY)
    served.faults["/v1/completions"] = standin_server.times(3, do)
    assert engine.generate(PROMPTS[:1], 1, GREEDY) == wanted
    served.asked.clear()
    served.faults["/v1/completions"] = standin_server.times(99, do)
    with pytest.raises(EngineError):
        engine.generate(PROMPTS[:1], 1, GREEDY)
    assert len(served.bodies("/v1/completions")) == server_client.ATTEMPTS


def test_what_changes_the_server_is_sent_once(served: Any) -> None:
    served.faults["/v1/load_lora_adapter"] = standin_server.times(9, lambda handler: handler.cut())
    with pytest.raises(EngineError, match="cannot be reached"):
        Client(served.url).change("/v1/load_lora_adapter", {}, limit_s=5)
    assert len(served.bodies("/v1/load_lora_adapter")) == 1


def test_an_adapter_that_is_refused_later_is_the_engines_error(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    served.faults["/v1/load_lora_adapter"] = standin_server.times(1, lambda h: h.say(*served._error(500, "no memory")))
    with pytest.raises(EngineError, match="no memory"):
        engine.sync(model)
    engine.sync(model)  # the one before was not lost, and the next is taken
    assert list(served.adapters) == [engine._loaded]


def test_a_server_that_hangs_is_given_up_at_the_limit(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(adapted(), served)
    engine.answer_limit_s = 0.5
    monkeypatch.setattr(server, "SLOWEST_TOKENS_S", 1e9)
    served.faults["/v1/completions"] = standin_server.times(9, lambda handler: handler.hang())
    began = time.monotonic()
    with pytest.raises(EngineError, match="did not answer in time"):
        engine.generate(PROMPTS, 1, GREEDY)
    assert time.monotonic() - began < 20


def test_a_server_that_writes_for_long_is_asked_whether_it_is_well(served: Any) -> None:
    engine = opened(adapted(), served)
    wanted = engine.generate(PROMPTS[:1], 1, GREEDY)
    engine.ask_every_s = 0.2

    def slow(handler: Any) -> bool:
        time.sleep(2.5)
        return False

    served.faults["/v1/completions"] = slow
    served.asked.clear()
    assert engine.generate(PROMPTS[:1], 1, GREEDY) == wanted and len(served.bodies("/health")) >= 1
    served.faults["/health"] = standin_server.times(9, lambda handler: handler.say(503, ""))
    with pytest.raises(EngineError, match=r"refused /health \(503\)"):
        engine.generate(PROMPTS[:1], 1, GREEDY)


@pytest.mark.parametrize("stands_still", [True, False])
def test_a_server_that_answers_and_makes_no_token_is_given_up(served: Any, stands_still: bool) -> None:
    engine, made = opened(adapted(), served), iter(range(1000))
    wanted = engine.generate(PROMPTS[:1], 1, GREEDY)
    engine.ask_every_s, engine.stall_limit_s = 0.1, 1.5

    def slow(handler: Any) -> bool:
        time.sleep(6.0)
        return False

    served.faults["/v1/completions"] = slow
    counted = 'vllm:prompt_tokens_total{{engine="0"}} 9.0\nvllm:generation_tokens_total{{engine="0"}} {}\n'
    served.faults["/metrics"] = standin_server.times(
        99, lambda handler: handler.say(200, counted.format(7.0 if stands_still else next(made)))
    )
    with pytest.raises(EngineError, match="hangs") if stands_still else contextlib.nullcontext():
        assert engine.generate(PROMPTS[:1], 1, GREEDY) == wanted


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ('# HELP x\nvllm:generation_tokens_total{engine="0",model_name="a b"} 1.5e+06\n', 1.5e6),
        ('vllm:generation_tokens_total{engine="0"} 1\nvllm:generation_tokens_total{engine="1"} 2\n', 3.0),
        ("vllm:prompt_tokens_total 4", 4.0),
        ("vllm:generation_tokens_created 1e9\nvllm:request_generation_tokens_sum 3\n", None),
        ("<html>", None),
    ],
)
def test_what_a_server_counts_is_read(told: str, tokens: float | None) -> None:
    assert server_request.tokens_counted(told) == tokens


def test_a_server_that_trickles_is_given_up_at_the_limit(served: Any) -> None:
    def trickle(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    served.faults["/v1/models"] = standin_server.times(1, trickle)
    began = time.monotonic()
    with pytest.raises(EngineError, match="did not answer in time"):
        Client(served.url).get("/v1/models", limit_s=0.4)
    assert time.monotonic() - began < 20


def test_an_answer_without_end_is_not_read_to_its_end(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(adapted(), served)
    monkeypatch.setattr(server_client, "LEAST_BYTES", 1000)
    monkeypatch.setattr(server_request, "BYTES_PER_TOKEN", 1)
    served.faults["/v1/completions"] = standin_server.times(1, lambda handler: handler.say(200, "x" * 10**6))
    with pytest.raises(EngineError, match="sent more than"):
        engine.generate(PROMPTS[:1], 1, GREEDY)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["token_ids"].__setitem__(0, 10**6), "outside the policy's vocabulary"),
        (lambda c: c["token_ids"].__setitem__(0, "a"), "no token ids"),
        (lambda c: c["token_ids"].pop(), "missing or not numbers"),
        (lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, None), "missing or not numbers"),
        (lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, -9999.0), "missing or not numbers"),
        (lambda c: c.update(finish_reason="abort"), "for another reason: abort"),
    ],
)
def test_rows_that_are_not_what_was_asked_for_are_refused(served: Any, change: Any, said: str) -> None:
    engine = opened(adapted(), served)
    changed(change)(served)
    with pytest.raises(EngineError, match=said):
        engine.generate(PROMPTS[:1], 1, GREEDY)


def test_too_few_completions_are_refused(served: Any) -> None:
    engine = opened(adapted(), served)
    served.faults["/v1/completions"] = standin_server.edited(lambda told: told["choices"].pop())
    with pytest.raises(EngineError, match="gave 1 completions of a prompt where 2 were asked for"):
        engine.generate(PROMPTS[:1], 2, Sampling(max_tokens=4, seed=1))


def test_an_interrupted_rollout_ends_the_servers_work_and_the_engine_goes_on(served: Any) -> None:
    engine = opened(adapted(), served)
    wanted = engine.generate(PROMPTS, 1, GREEDY)
    arrived, killed = threading.Semaphore(0), []
    served.faults["/v1/completions"] = lambda handler: arrived.release() or handler.hang() or True

    def interrupt() -> None:  # once every request hangs
        assert all(arrived.acquire(timeout=30) for _ in PROMPTS)
        killed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 1, GREEDY)
    assert time.monotonic() - killed[0] < 20
    ends = time.monotonic() + 20
    while served.left < len(PROMPTS) and time.monotonic() < ends:
        time.sleep(0.02)
    assert served.left == len(PROMPTS)
    served.faults.clear()
    assert engine.generate(PROMPTS, 1, GREEDY) == wanted


def test_close_never_raises(served: Any) -> None:
    model = adapted()
    engine = opened(model, served)
    engine.sync(model)
    served.faults["/v1/unload_lora_adapter"] = standin_server.times(9, lambda handler: handler.cut())
    engine.close()


# --- in a recipe


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["vllm_server=localhost:8000"], "no http:// or https:// address"),
        (["vllm_server=http://me:secret@host:8000"], "holds no name, password or query"),
        (["vllm_server=http://host:8000/?key=secret"], "holds no name, password or query"),
        (["vllm_server=http://host:99999"], "no http:// or https:// address"),
        (["backend=server"], "there is nobody to ask"),
        (["vllm_server=http://host:8000", "path=bf16-vllm"], "starts a vLLM of its own"),
        (["vllm_server=http://host:8000", "lora_rank=0"], "a vLLM server with lora_rank 0"),
        (["vllm_server=http://host:8000", "dora=true"], "a vLLM server with `dora: true`"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_server_is_told_before_anything_loads(settings: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        override(Recipe(), settings)
    assert said in str(caught.value) and "secret" not in " ".join(caught.value.lines())


def test_a_server_needs_no_vllm_here_and_passes_over_the_paths_that_start_one() -> None:
    recipe = recipe_for("http://host:8000")
    assert available.unavailable(recipe) == {}
    assert "come from the vLLM server at http://host:8000" in on_path(recipe, "bf16-vllm").because
    assert on_path(recipe, "bf16-hf") is None and on_path(recipe, "cpu") is None
    plain = recipe_for("http://host:8000", backend="plain")
    assert on_path(plain, "bf16-vllm") is None  # the address is kept, and not used


def test_a_refusal_is_told_in_the_servers_words(served: Any) -> None:
    with pytest.raises(Refused, match=r"refused /v1/nowhere \(404\): Not Found"):
        Client(served.url).get("/v1/nowhere", limit_s=5)


# --- a training run


def test_training_through_a_server_is_training_on_the_policy(served: Any, tmp_path: Path) -> None:
    from grpo_portable.run.folder import read_lines

    made = training.make(tmp_path, model=tiny.model(**WIDE), temperature=0.8)
    made.correct_sampler = True
    engine = opened(made.model, served, temperature=0.8)
    made.engine = engine
    made.train()
    lines = list(read_lines(made.run.metrics_file))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(abs(line["sampler_kl"]) < 0.02 for line in lines), [line["sampler_kl"] for line in lines]
    assert len(served.bodies("/v1/load_lora_adapter")) == 4 and len(served.adapters) == 1
