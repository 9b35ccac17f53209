"""The policy: a causal language model and its tokenizer, loaded for a plan, with the adapter that is trained.

Models come from the hub, a folder, a GGUF file, or the built-in one. Weights are read from safetensors or GGUF only, and
no code of a model's repository is run. Adapters are kept in float32 on every base: an Adam step of a usual learning rate
is smaller than what bfloat16 can represent next to the weight, and would be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from grpo_portable import reach
from grpo_portable.combinations import head_refusal
from grpo_portable.errors import ModelError, RecipeError, brief
from grpo_portable.models.pretokenizers import as_named
from grpo_portable.recipe import Recipe
from grpo_portable.run import manifest
from grpo_portable.run.folder import usual_modes

ADAPTER_NAME, ADAPTER_FILE = "default", "adapter_model.safetensors"
EMBEDDED = "embedded"


@dataclass(frozen=True)
class Loaded:
    """`name` is what a report calls the model (`reported_name`)."""

    model: Any
    tokenizer: Any
    name: str
    dtype: str
    quantization: str | None


def load(source: str, *, dtype: str, quantization: str | None = None, device: torch.device | str = "cpu") -> Loaded:
    """The model in eval mode on `device`, and its tokenizer with a pad token. ModelError says what was tried.

    `dtype`: float32, bfloat16 or float16. `quantization`: None or nf4 (FP8 weights are the engine's copy, not the policy's).
    """
    location, gguf = _locate(source)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if gguf is None and (quantization == "nf4" or torch.device(device).type == "cuda"):
        options["device_map"] = {"": device}  # read straight onto the card
    named = {"gguf_file": gguf} if gguf else {}
    # configuration and tokenizer are files of others: parsers may raise anything
    with _model_errors(source, Exception):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config

        config = AutoConfig.from_pretrained(location, trust_remote_code=False, **named)
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False, **named)
    in_fp8 = gguf is None and _stored_in_fp8(config)
    if in_fp8:  # products of FP8 weights need a package and a card that the update can do without
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    elif gguf is None and quantization == "nf4":
        options["quantization_config"] = _nf4(dtype)
    with _model_errors(source, OSError, ValueError, ImportError, KeyError, SafetensorError):
        model: Any = AutoModelForCausalLM.from_pretrained(
            location, trust_remote_code=False, **named, **({} if gguf else {"use_safetensors": True}), **options
        )
    if gguf:
        model = dense_copy(model)
        as_named(tokenizer, _named_cut(Path(location) / gguf))
    if quantization == "nf4" and (gguf or in_fp8):
        model = _quantised_copy(model, tokenizer, dtype, device)
    _keep_plain_layout(model)
    model.config.use_cache = True
    model = model.to(device=device).eval() if quantization is None else model.eval()
    return Loaded(model, _padded(tokenizer), reported_name(source), dtype, quantization)


def load_tokenizer(source: str) -> Any:
    """The tokenizer that `load` gives, without the model. `source`: hub id or folder."""
    location, gguf = _locate(source)
    with _model_errors(source, Exception):  # as in `load`
        from transformers import AutoTokenizer

        named = {"gguf_file": gguf} if gguf else {}
        return _padded(AutoTokenizer.from_pretrained(location, trust_remote_code=False, **named))


def reported_name(source: str) -> str:
    """What a report calls a model: the hub id, or the last part of a path."""
    if source == EMBEDDED:
        return EMBEDDED
    return Path(source).name if Path(source).expanduser().exists() else source


def _padded(tokenizer: Any) -> Any:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def stored_dtype(source: str) -> str:
    """The number format a model is to be read in without loss: its own 16 bits, else float32. ModelError as in `load`."""
    location, gguf = _locate(source)
    if gguf is not None:
        return "float32"
    with _model_errors(source, Exception):  # a configuration is a file of others
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(location, trust_remote_code=False)
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "float32"


def add_adapter(model: Any, recipe: Recipe) -> Any:
    """The model with a fresh LoRA, rsLoRA or DoRA adapter that leaves its output as it was; lora_rank 0 frees all weights."""
    if recipe.lora_rank == 0:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    if refused := head_refusal(recipe.lora_targets):
        raise RecipeError(refused.fact, because=refused.because, help=refused.help)
    named = [t.strip() for t in recipe.lora_targets.split(",") if t.strip()]
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]  # peft only ever divides it
        lora_dropout=recipe.lora_dropout,
        target_modules="all-linear" if named == ["all-linear"] else named,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = get_peft_model(model, config, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise RecipeError(
            f"lora_targets `{recipe.lora_targets}` does not fit this model",
            because=next(iter(str(error).splitlines()), ""),
            help=f"use all-linear, or some of: {', '.join(linear)}",
        ) from error
    keep_float32(wrapped)
    return wrapped


def load_adapter(model: Any, folder: Path, *, trainable: bool = False) -> Any:
    """The model with the adapter saved in `folder`; ModelError when it is not an adapter of this model."""
    from peft import PeftModel

    if not (folder / ADAPTER_FILE).is_file():
        raise ModelError(f"`{folder}` holds no adapter", because=f"there is no {ADAPTER_FILE} in it")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error here, below
            wrapped = PeftModel.from_pretrained(model, str(folder), adapter_name=ADAPTER_NAME, is_trainable=trainable)
    except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
        because = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"adapter `{folder}` does not fit the model", because=because) from error
    _put_adapter(wrapped, folder)  # once more: what PEFT could not place it only warns of, or says nothing
    keep_float32(wrapped)
    return wrapped


def _put_adapter(model: Any, folder: Path) -> None:
    """Put the adapter saved in `folder` into a model that has one; ModelError unless every tensor of both finds its other."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    found: Any = set_peft_model_state_dict(model, load_file(folder / ADAPTER_FILE), adapter_name=ADAPTER_NAME)
    empty = [key for key in found.missing_keys if f".{ADAPTER_NAME}." in key]
    for left, what in (
        (found.unexpected_keys, "of its tensors have no place in the model"),
        (empty, "of the tensors that the model wants are not in it"),
    ):
        if left:
            because = f"{len(left)} {what}, the first is {left[0]}"
            raise ModelError(f"adapter `{folder}` does not fit the model", because=because)


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """Name → parameter of everything that is trained, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def keep_float32(model: Any) -> None:
    """Make an adapter's parameters float32, in place."""
    if hasattr(model, "peft_config"):
        for parameter in trainable(model).values():
            parameter.data = parameter.data.float()


@contextlib.contextmanager
def adapter_untouched(model: Any) -> Iterator[None]:
    """Inside, TRL's trainers may be made: they round the adapter of a 4-bit model to bfloat16; after it, it is as it was."""
    given = {name: p.detach().clone() for name, p in trainable(model).items()} if is_quantised(model) else {}
    yield
    for name, parameter in trainable(model).items():
        if name in given:
            parameter.data = given[name]


def is_quantised(model: Any) -> bool:
    """Whether the base's weights are packed in 4 or 8 bits."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


def counts(model: Any) -> tuple[int, int]:
    """(trainable, total) parameters; weights packed in 4 bits are counted as the weights they stand for."""
    total = sum(_elements(parameter) for parameter in model.parameters())
    return sum(parameter.numel() for parameter in trainable(model).values()), total


def weight_bytes(model: Any) -> tuple[int, int]:
    """Bytes of (frozen, trained) weights as they lie in memory; 4-bit ones with their scales."""
    trained = sum(parameter.nbytes for parameter in trainable(model).values())
    return sum(parameter.nbytes + _scale_bytes(parameter) for parameter in model.parameters()) - trained, trained


def save(model: Any, folder: Path, base: str) -> None:
    """Write what was trained into `folder` as safetensors: the adapter, or all weights when there is none. Atomic, with a
    manifest (run/saved.py).

    `base` is the base's name for the adapter's config, where peft would put a path of this machine.
    """
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if hasattr(model, "peft_config"):
        model.save_pretrained(str(part), selected_adapters=[ADAPTER_NAME], save_embedding_layers=False)
        config = part / manifest.CONFIGURATION
        config.write_text(
            json.dumps({**json.loads(config.read_text(encoding="utf-8")), "base_model_name_or_path": base}, indent=2)
            + "\n",
            encoding="utf-8",
        )
    else:
        model.save_pretrained(str(part))
    (part / "README.md").unlink(missing_ok=True)  # peft's model card template, empty of facts
    manifest.write(part, sorted({*part.glob("*.safetensors"), *part.glob(manifest.CONFIGURATION)}))
    usual_modes(part)
    _flush(part)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def restore(model: Any, folder: Path) -> None:
    """Put the weights that `save` wrote into `folder` back into the model they came from.

    ModelError unless every tensor of both finds its other.
    """
    from safetensors.torch import load_file

    if hasattr(model, "peft_config"):
        _put_adapter(model, folder)
        return
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved |= load_file(file)
    found = model.load_state_dict(saved, strict=False)
    named = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(named[name]) for name in saved if name in named}
    # tied ones are filled
    empty = [name for name in found.missing_keys if name not in named or id(named[name]) not in filled]
    if left := [*found.unexpected_keys, *empty]:
        because = f"{len(left)} of its tensors or of the model's are without the other, the first is {left[0]}"
        raise ModelError(f"the weights in `{folder}` do not fit the model", because=because)
    model.tie_weights()


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Inside, the model is its base: the adapter is off."""
    with model.disable_adapter() if hasattr(model, "peft_config") else contextlib.nullcontext():
        yield


def _elements(parameter: torch.nn.Parameter) -> int:
    packed = getattr(parameter, "quant_state", None)
    shape = getattr(packed, "shape", None)
    return int(torch.Size(shape).numel()) if shape is not None else parameter.numel()


def _scale_bytes(parameter: torch.nn.Parameter) -> int:
    """Bytes bitsandbytes keeps beside packed weights: a scale a block, and the scales of those where they are packed too."""
    state, total = getattr(parameter, "quant_state", None), 0
    while state is not None:
        total += sum(t.nbytes for t in (state.absmax, state.code) if t is not None)
        state = getattr(state, "state2", None)
    return total


def _locate(source: str) -> tuple[str, str | None]:
    """(what from_pretrained is given, GGUF file name or None)."""
    if source == EMBEDDED:
        from grpo_portable.embedded import model_folder

        return str(model_folder()), None
    return reach.located(source)


@contextlib.contextmanager
def _model_errors(source: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what the loaders raise for a model that cannot be had or read into a ModelError."""
    try:
        yield
    except kinds as error:
        because = brief(str(error)) or type(error).__name__
        if Path(source).expanduser().exists() or source == EMBEDDED:
            raise ModelError(f"model `{source}` cannot be read", because=because) from error
        raise ModelError(
            f"model `{source}` could not be loaded: it is not a local path, so the hub and its local cache were tried",
            because=because,
            help="without a network give a local one: --model FOLDER (config.json and *.safetensors) or --model FILE.gguf",
        ) from error


def _stored_in_fp8(config: Any) -> bool:
    """Whether a checkpoint keeps its weights in FP8 with a scale a block, as DeepSeek's and Qwen's do."""
    told = getattr(config, "quantization_config", None) or {}
    told = told if isinstance(told, dict) else told.to_dict()
    return str(told.get("quant_method", "")).lower() == "fp8"


def _nf4(dtype: str) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def dense_copy(model: Any) -> Any:
    """A plain model with the same weights: one read from GGUF is marked as quantised, and refused by training and saving."""
    from transformers import AutoModelForCausalLM

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dense = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    dense.load_state_dict(model.state_dict(), strict=False)
    dense.tie_weights()
    dense.generation_config = model.generation_config
    return dense


def _named_cut(file: Path) -> str | None:
    """llama.cpp's name for how the tokenizer in a GGUF file cuts text."""
    import gguf

    field = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _quantised_copy(model: Any, tokenizer: Any, dtype: str, device: torch.device | str) -> Any:
    """An NF4 model from a dense one, by way of a temporary folder: bitsandbytes quantises only while loading."""
    import tempfile

    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=True)
        return AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=_nf4(dtype),
            dtype=getattr(torch, dtype),
            device_map={"": device},
            trust_remote_code=False,
        )


def _keep_plain_layout(model: Any) -> None:
    """On CPUs with avx512_bf16 bitsandbytes repacks 4-bit weights in an eval forward; DoRA and merging then read garbage."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
