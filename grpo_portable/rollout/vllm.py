"""vLLM as a rollout engine in the trainer's process. The only file that imports vllm.

The engine has its own copy of the weights, in 16 bit or FP8; the policy's adapter is handed over as a LoRA at every sync,
under a name that no cached prefix was made with. Sleep mode and LoRA have failed silently in some releases (vllm#53888,
vllm#36651): the engine sleeps only where the card needs it, and the trainer stops when sampler and policy part.
Written against vLLM 0.24.

Legend: B prompts, G completions a prompt, T completion tokens.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from doctor.shape_files import shape_from_config
from grpo_portable.errors import EngineError, EngineUnsupported
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import finished, vllm_adapter, vllm_settings
from grpo_portable.rollout.contained import engine_errors, undisturbed
from grpo_portable.rollout.protocol import Completion, Sampling, TokenIds, silent
from grpo_portable.rollout.requests import check, prompt_seed, seeded
from grpo_portable.rollout.scratch import Scratch
from grpo_portable.rollout.stops import StopStrings

ENVIRONMENT = {  # settings the user made are kept
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives here: its errors are raised here, its weights reached here
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles for minutes where no cubin is installed
    "VLLM_NO_USAGE_STATS": "1",  # nothing about the machine is sent to anyone
    "VLLM_HOST_IP": "127.0.0.1",  # the process talks to itself only; a host name that does not resolve would hang it
}
_PARKED: list[Any] = []  # engines asleep or at work when closed: freeing unmapped memory or a running graph would crash


def make(
    policy: Any,
    tokenizer: Any,
    recipe: Recipe,
    *,
    rows: int,
    copy: str,
    dtype: str,
    graphs: str = "full",
    sleep: bool | None = None,
) -> VllmRollout:
    """Start vLLM on the policy's weights. EngineUnsupported for a policy it cannot serve, EngineError when it fails.

    `copy`: fp8, or anything else for the checkpoint's own format. A GGUF file is written out for vLLM first. `graphs`: full
    (a CUDA graph of each decode step, nothing compiled), compiled (vLLM's default, minutes slower to start) or eager.
    """
    fp8 = copy == "fp8"
    reason = vllm_adapter.refusal(policy, fp8=fp8)
    if reason is not None:
        raise EngineUnsupported(f"vLLM cannot make the rollouts of this policy: {reason}")
    with _location(recipe.model, policy, tokenizer, dtype) as model:
        _, ready = stored(model)
        shape = shape_from_config(vllm_adapter.base_of(policy).config.to_dict(), recipe.model)
        odd = (
            vllm_settings.block_refusal(shape) if shape and fp8 and not ready and recipe.fp8_scales == "block" else None
        )
        if odd:
            raise EngineUnsupported(f"vLLM cannot make this model's FP8 weights: {odd}", help="--set fp8_scales=row")
        memory = _memory(policy, recipe, rows, "fp8" if fp8 or ready == "fp8" else "none", dtype, sleep)
        arguments = vllm_settings.llm_arguments(
            model=model,
            dtype=dtype,
            quantization=vllm_settings.quantization(ready, fp8=fp8, scales=recipe.fp8_scales),
            rows=rows,
            context=min(recipe.max_prompt_tokens + recipe.max_completion_tokens, vllm_adapter.context(policy)),
            memory=memory,
            layout=vllm_adapter.layout(policy),
            graphs=graphs,
            seed=recipe.seed,
            several=int(os.environ.get("WORLD_SIZE", 1)) > 1,
        )
        engine = VllmRollout(arguments, memory, tokenizer, vocabulary=vllm_adapter.vocabulary(policy), dtype=dtype)
    engine.precision = vllm_settings.precision(ready, fp8=fp8, scales=recipe.fp8_scales, dtype=dtype)
    engine.rest()
    return engine


class VllmRollout:
    """An engine with weights of its own. `generate` wakes it if need be, `rest` lets it sleep while the update runs."""

    name = "vllm"
    precision = ""

    def __init__(
        self,
        arguments: dict[str, Any],
        memory: vllm_settings.Memory,
        tokenizer: Any,
        *,
        vocabulary: int,
        dtype: str,
        llm: Any = None,
    ) -> None:
        """Starts vllm.LLM with `arguments`, or takes over `llm`, which was started with them."""
        self.arguments, self.memory, self.tokenizer, self.vocabulary = arguments, memory, tokenizer, vocabulary
        self.context, self.dtype = arguments["max_model_len"], getattr(torch, dtype)
        self.tick = silent
        self._request: Any = None
        self._folder: Scratch | None = None
        self._numbers = itertools.count(2)  # vLLM's own warm-up calls its adapter 1
        self._asleep = False
        self._weights_gib: float | None = None
        began = time.perf_counter()
        with engine_errors("vLLM could not start", "`grpo-doctor --prove` tries vLLM by itself"), undisturbed():
            self._llm: Any = _vllm().LLM(**arguments) if llm is None else llm
        self.start_s = time.perf_counter() - began
        config = getattr(getattr(self._llm, "llm_engine", None), "vllm_config", None)
        self._seeds_by_request = bool(getattr(config, "use_v2_model_runner", False))

    def describe(self) -> dict[str, Any]:
        """What run.json says of the engine."""
        return {
            "weights": self.precision,
            "start_s": round(self.start_s, 1),
            "sleeps": self.memory.sleeps,
            "because": self.memory.reason,
            "gpu_memory_utilization": self.memory.share,
            "memory_gib": {name: round(gib, 3) for name, gib in self.memory.gib.items()},
            "lora_rank": self.arguments.get("max_lora_rank"),
        }

    def holds(self) -> dict[str, float | None]:
        """GiB of its weights, counted in the engine while it is awake, and of the KV cache it was given."""
        if self._weights_gib is None and self._llm is not None and not self._asleep:
            with contextlib.suppress(Exception):  # a figure for the report is not worth a run
                (count,) = self._llm.apply_model(_weight_bytes)
                self._weights_gib = count / 2**30
        given = self.arguments["kv_cache_memory_bytes"]
        return {"weights": self._weights_gib, "kv_cache": None if given is None else given / 2**30}

    def sync(self, policy: Any) -> None:
        """Take over the policy's adapter, or all its weights when all are trained; a frozen policy changes nothing."""
        llm = self._awake()
        if vllm_adapter.layout(policy) is not None:
            self._hand_over(llm, vllm_adapter.adapter(policy, self.dtype))
        elif any(p.requires_grad for p in policy.parameters()):
            with engine_errors("vLLM could not take over the policy's weights"):
                named = list(vllm_adapter.weights(policy))
                llm.apply_model(lambda model: model.load_weights(iter(named)))
                llm.reset_prefix_cache()

    def generate(self, prompts: Sequence[TokenIds], n: int, sampling: Sampling) -> list[list[Completion]]:
        """`n` completions of each prompt; greedy ones are made once and repeated."""
        check(prompts, n, sampling, self.context, self.vocabulary)
        if not prompts:
            return []
        sampling = seeded(sampling)  # before torch's generator is put back
        llm, drawn = self._awake(), n if sampling.temperature > 0 else 1
        wanted = [{"prompt_token_ids": list(map(int, ids))} for ids in prompts]
        by_request = self._seeds_by_request or bool(sampling.seeds)  # else one generator for all, which is faster
        seeds = [prompt_seed(sampling, index) if by_request else None for index in range(len(prompts))]
        whole = None if by_request else sampling.seed
        try:
            with engine_errors("vLLM failed in a rollout"), undisturbed(whole), _heard(llm.llm_engine, self.tick):
                parameters = [self._parameters(sampling, drawn, seed) for seed in seeds]
                outputs = llm.generate(wanted, parameters, lora_request=self._request, use_tqdm=False)
        except KeyboardInterrupt:  # the rows it was writing are still in its queue: it is of no more use
            _PARKED.append(llm)
            self._llm = None
            raise
        if len(outputs) != len(prompts):
            raise EngineError(f"vLLM answered {len(outputs)} of {len(prompts)} prompts")
        strings = StopStrings(sampling.stop_strings, self.tokenizer) if sampling.stop_strings else None

        def completion(row: Any) -> Completion:
            tokens = [int(token) for token in row.token_ids]
            return finished.completion(tokens, _chosen(row.logprobs), row.finish_reason, strings)

        return [[completion(row) for row in output.outputs] * (n // drawn) for output in outputs]

    def rest(self) -> None:
        """Give weights and KV cache back until the next rollout, if the card needs them for the update."""
        if self.memory.sleeps and not self._asleep and self._llm is not None:
            with engine_errors("vLLM could not go to sleep"):
                self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """Shut the engine down. Never raises: it is called when something else has failed already."""
        llm, self._llm, self._request = self._llm, None, None
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if llm is None:
            return
        if self._asleep:
            _PARKED.append(llm)
            return
        with contextlib.suppress(Exception):  # whatever vLLM raises while it is taken down, the run's own result stands
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        _forget_graph_pool()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _awake(self) -> Any:
        if self._llm is None:
            raise EngineError("this engine was closed")
        if self._asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what the update let go of must be free before the engine takes it
            with engine_errors("vLLM could not wake up"):
                self._llm.wake_up()
            self._asleep = False
        return self._llm

    def _hand_over(self, llm: Any, given: vllm_adapter.Adapter) -> None:
        number = next(self._numbers)
        folder = Scratch(given.nbytes)
        try:
            path = vllm_adapter.write(given, folder.path / f"policy-{number}")
            with engine_errors("vLLM could not take over the adapter"):
                from vllm.lora.request import LoRARequest

                request = LoRARequest(f"policy-{number}", number, str(path))
                if not llm.llm_engine.add_lora(request):
                    raise EngineError("vLLM did not take over the adapter")
        except BaseException:
            folder.close()
            raise
        if self._folder is not None:
            self._folder.close()
        self._request, self._folder = request, folder

    def _parameters(self, sampling: Sampling, drawn: int, seed: int | None) -> Any:
        """vLLM's sampling parameters of one prompt. Only our stop ids end a row: the model's own are among them or unwanted."""
        return _vllm().SamplingParams(
            n=drawn,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed,  # vLLM adds the completion's number to it
            stop_token_ids=list(sampling.stop_ids),
            stop=list(sampling.stop_strings),
            ignore_eos=True,
            logprobs=0,  # of the drawn token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )


@contextlib.contextmanager
def _heard(engine: Any, tick: Callable[[], None]) -> Iterator[None]:
    """Inside, `tick` is called at each step of vLLM's engine: it makes a token of every row at work, in seconds at most."""
    step = engine.step

    def told() -> Any:
        tick()
        return step()

    engine.step = told
    try:
        yield
    finally:
        engine.step = step


def _chosen(logprobs: Any) -> list[float]:
    """The drawn tokens' log-probabilities; vLLM puts the drawn token first at each position."""
    if hasattr(logprobs, "start_indices"):
        return [float(logprobs.logprobs[start]) for start in logprobs.start_indices]
    return [float(next(iter(position.values())).logprob) for position in logprobs or ()]


def _vllm() -> Any:
    """The vllm package, imported with our settings where the user made none."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm

    return vllm


def _forget_graph_pool() -> None:
    """vLLM keeps one pool of CUDA graphs a process, which dies with the last graph: the next engine must ask for a new one."""
    with contextlib.suppress(Exception):  # another release may keep it elsewhere
        from vllm.platforms import current_platform

        type(current_platform)._global_graph_pool = None


@contextlib.contextmanager
def _location(source: str, policy: Any, tokenizer: Any, dtype: str) -> Iterator[str]:
    """What vLLM loads: the source itself, or for a GGUF file the policy's base, written out while it is being loaded."""
    path = Path(source).expanduser()
    if source == "embedded":
        from grpo_portable.embedded import model_folder

        yield str(model_folder())
    elif path.is_file():
        with Scratch(2 * _parameters(policy)) as scratch:
            yield str(vllm_adapter.export(policy, tokenizer, scratch.path / "model", getattr(torch, dtype)))
    else:
        yield str(path) if path.is_dir() else source


def stored(model: str) -> tuple[Any, str | None]:
    """A checkpoint's configuration, and how it stores its weights (`vllm_settings.ready_format`)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return config, vllm_settings.ready_format(getattr(config, "quantization_config", None))


def _memory(policy: Any, recipe: Recipe, rows: int, copy: str, dtype: str, sleep: bool | None) -> vllm_settings.Memory:
    free, total = _card()
    return vllm_settings.plan_memory(
        shape_from_config(vllm_adapter.base_of(policy).config.to_dict(), recipe.model),
        vllm_settings.setting_of(recipe, rows, base="fp16" if dtype == "float16" else "bf16", copy=copy),
        group=recipe.group_size,
        trains=any(p.requires_grad for p in policy.parameters()),
        free_gib=free,
        total_gib=total,
        sleep=sleep,
    )


def _weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _parameters(policy: Any) -> int:
    return sum(p.numel() for name, p in vllm_adapter.base_of(policy).named_parameters() if ".lora_" not in name)


def _card() -> tuple[float, float]:
    """(free, all) GiB of the current card, after what torch holds in reserve was given back."""
    if not torch.cuda.is_available():
        raise EngineUnsupported("vLLM runs on a GPU here", because="torch sees none")
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return free / 2**30, total / 2**30


def bench_vllm(
    config: Any,
    prompts: list[list[int]],
    n: int,
    new_tokens: int,
    *,
    rows: int,
    repeats: int,
    meet: Callable[[], None] = lambda: None,
    several: bool = False,
) -> dict[str, Any]:
    """Seconds to be ready, to a first token and for each of `repeats` rollouts, with dummy weights of the shape in `config`.

    `several`: of a group of processes this is one, with a vLLM of its own; `meet` is called before each measured rollout.
    """
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(map(len, prompts)) + new_tokens + 16,
            max_num_seqs=rows,
            gpu_memory_utilization=0.8,
            **({"distributed_executor_backend": "external_launcher"} if several else {}),
        )
    ready = time.perf_counter() - start

    def once(tokens: int) -> float:
        wanted = SamplingParams(n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        meet()
        begin = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False)
        made = sum(len(one.token_ids) for request in outputs for one in request.outputs)
        if made != len(prompts) * n * tokens:
            raise RuntimeError(f"vLLM gave {made} tokens, not {len(prompts) * n * tokens}")
        return time.perf_counter() - begin

    once(8)
    first = once(1)
    return {"ready_s": ready, "first_token_s": first, "seconds": [once(new_tokens) for _ in range(repeats)]}
