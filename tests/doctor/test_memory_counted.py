"""The ledger's activations beside what real blocks keep: storages alive after a forward pass, and at a backward pass's peak.

Counted on a CPU, in shapes other than any the formula names. A card keeps the same tensors but for two things, which stand in
here: its fused norm (`card_norm.py`), and PEFT's question whether CUDA's autocast is on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

import card_norm  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from doctor.memory import GIB, Setting, ledger, saved_bytes_per_token  # noqa: E402
from doctor.shapes import Shape  # noqa: E402
from grpo_portable.models import policy  # noqa: E402
from grpo_portable.recipe import Recipe  # noqa: E402
from grpo_portable.updates import few_kernels  # noqa: E402

COLUMNS = 80  # tokens a row
FEW = Setting("bf16", lora_rank=4, fused_norms=True)
PLAIN = replace(FEW, spread=2)  # in parts on two cards: updates are made by the models' own code
CASES = {
    "16 bit": ("qwen3", FEW),
    "16 bit, Llama": ("llama", FEW),
    "16 bit, Qwen2": ("qwen2", FEW),
    "16 bit, one product for qkv and gate-up": ("phi3", FEW),
    "16 bit, norms not fused": ("qwen3", replace(FEW, fused_norms=False)),
    "16 bit, Gemma's norms": ("gemma3_text", FEW),
    "16 bit, no few kernels": ("qwen3", PLAIN),
    "16 bit, keys repeated for each head": ("qwen3", replace(FEW, repeats_keys=True)),
    "16 bit, no few kernels, keys repeated": ("qwen3", replace(PLAIN, repeats_keys=True)),
    "4 bit, keys repeated": ("qwen3", replace(FEW, base="nf4", repeats_keys=True)),
    "4 bit": ("qwen3", replace(FEW, base="nf4")),
    "4 bit, norms not fused": ("qwen3", replace(FEW, base="nf4", fused_norms=False)),
    "DoRA": ("qwen3", replace(FEW, dora=True)),
    "all weights": ("qwen3", replace(FEW, lora_rank=0)),
    "float32": ("qwen3", Setting("fp32", lora_rank=4, device="cpu")),
    "float32, Llama": ("llama", Setting("fp32", lora_rank=4, device="cpu")),
    "float32, all weights": ("qwen3", Setting("fp32", lora_rank=0, device="cpu")),
}


class Alive(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages made inside that are alive, and the most there were."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def shape_like(kind: str, layers: int) -> Shape:
    square = kind in ("llama", "qwen2", "phi3")  # their heads fill the hidden width
    hidden, vocab, wide, heads, kv_heads, head_dim = 256 if square else 224, 64, 736, 8, 2, 32
    query, key = heads * head_dim, kv_heads * head_dim
    params = vocab * hidden + layers * (2 * hidden * (query + key) + 3 * hidden * wide)
    shape = Shape(kind, hidden, layers, heads, kv_heads, head_dim, wide, vocab, True, params)
    own = {"qwen3": {"qk_norm": True}, "gemma3_text": {"qk_norm": True, "norms": 4}, "phi3": {"fused": True}}
    return replace(shape, **own.get(kind, {}))  # type: ignore[arg-type]


def model_of(kind: str, layers: int, setting: Setting) -> Any:
    shape = shape_like(kind, layers)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=shape.hidden, num_hidden_layers=layers, num_attention_heads=shape.heads, pad_token_id=0,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        vocab_size=shape.vocab, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    wide = setting.base == "fp32" or not setting.lora_rank
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32 if wide else torch.bfloat16)
    if setting.base == "nf4":
        in_4_bit(model)
    model = policy.add_adapter(model, replace(Recipe(), lora_rank=setting.lora_rank, dora=setting.dora)).train()
    if setting.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in policy.trainable(model).values():
        parameter.grad = torch.zeros_like(parameter)  # the ledger's `gradients`
    return model


def in_4_bit(model: Any) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                packed = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                packed.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", module=packed
                )
                setattr(module, name, packed.to("cpu"))
    model.is_loaded_in_4bit = True


@contextlib.contextmanager
def as_trained(model: Any, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few kernels, where the trainer makes updates in them, and its attention; PEFT sees CUDA's autocast."""
    on_card = setting.device == "cuda"
    if setting.fused_norms:
        monkeypatch.setattr(few_kernels, "fused_norm", card_norm.card_norm)
    kernels = few_kernels.few_kernels(model) if on_card and setting.spread == 1 else contextlib.nullcontext()
    with kernels, few_kernels.repeated_keys() if setting.repeats_keys else contextlib.nullcontext():
        torch.set_autocast_enabled("cuda", on_card)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)


def count(kind: str, layers: int, rows: int, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes alive after the forward pass of all blocks, and the most until the end of the backward pass."""
    model = model_of(kind, layers, setting)
    states = (getattr(getattr(module, "weight", None), "quant_state", None) for module in model.modules())
    scales = [t for state in states if state for t in vars(state).values() if isinstance(t, torch.Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    inner = model.get_base_model().model if setting.lora_rank else model.model
    ids = torch.randint(1, 64, (rows, COLUMNS))
    known = [*model.parameters(), *model.buffers(), *gradients, *scales]
    with as_trained(model, setting, monkeypatch), Alive(known) as alive:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.device == "cuda"):
            out = inner(input_ids=ids, use_cache=False).last_hidden_state
        held = alive.now
        out.backward(torch.randn_like(out))
    return held, alive.peak


@pytest.mark.parametrize("case", CASES)
def test_what_a_block_keeps_of_a_token(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, setting = CASES[case]
    setting = replace(setting, checkpointing=False)
    held = {(n, rows): count(kind, n, rows, setting, monkeypatch)[0] for n in (1, 3) for rows in (1, 2)}
    blocks = {rows: held[3, rows] - held[1, rows] for rows in (1, 2)}  # of two blocks, their 16-bit weights included
    counted = (blocks[2] - blocks[1]) / (2 * COLUMNS)
    assert saved_bytes_per_token(shape_like(kind, 1), setting) == pytest.approx(counted, rel=0.001)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_backward_pass(case: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never above the ledger (but for tables of positions), and not far below it."""
    kind, setting = CASES[case]
    setting = replace(
        setting, checkpointing=checkpointing, micro_batch=4, prompt_tokens=30, completion_tokens=COLUMNS - 30
    )
    _, peak = count(kind, 4, setting.micro_batch, setting, monkeypatch)
    planned = ledger(shape_like(kind, 4), setting)["activations"] * GIB
    assert 0.8 * planned < peak < 1.01 * planned
