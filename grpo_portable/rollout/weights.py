"""The rollout's weights: a copy with fused products and the adapter's delta inside, or the policy's own tensors.

    kind   what a product reads                     adapter's delta                            extra memory
    copy   own tensors, q/k/v and gate/up as one    added in float32 at sync, rounded once     a copy of the weights
           (on the CPU laid out for its products, the head too: `packed.py`)
    fp8    the same in FP8, a scale an output       the same, then quantised                   half of that
    live   the policy's tensors                     added for a rollout, undone bit for bit    adapted layers, on the host

Embedding, head and norms are read from the policy, which costs no memory, unless their type differs.
Weights are refreshed in place: captured graphs go on reading the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from grpo_portable.errors import EngineUnsupported
from grpo_portable.rollout import delta
from grpo_portable.rollout.family import Block, Family, active
from grpo_portable.rollout.fp8 import FP8_MAX
from grpo_portable.rollout.packed import Packed, layout


class Dense(NamedTuple):
    """One product: weight [outputs, inputs], bias [outputs]; for an FP8 weight the float32 scale of each output, and a 1.

    Where `packed` holds the weight, a copied one is a meta tensor: sizes without memory.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None
    unit: torch.Tensor | None = None
    packed: Packed | None = None


class Layer(NamedTuple):
    norm_in: torch.Tensor
    norm_attn_out: torch.Tensor | None
    norm_mlp: torch.Tensor
    norm_mlp_out: torch.Tensor | None
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    qkv: tuple[Dense, ...]
    out: tuple[Dense, ...]
    gate_up: tuple[Dense, ...]
    down: tuple[Dense, ...]


class Weights(NamedTuple):
    embed: torch.Tensor  # [V, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Dense


PRODUCTS = ("qkv", "out", "gate_up", "down")


class Keeper:
    """Builds the Weights of a policy and refreshes them. `kind` is copy, fp8 or live."""

    def __init__(self, family: Family, kind: str, dtype: torch.dtype) -> None:
        self.family, self.kind, self.dtype = family, kind, dtype
        self.products = [(block, name) for block in family.blocks for name in PRODUCTS]
        for block, name in self.products:
            for module in _modules(block, name):
                delta.check(module)
                if kind == "live" and delta.is_quantised(module):
                    raise EngineUnsupported(
                        "quantised weights cannot be rolled out without a copy", help="free memory for a copy"
                    )
        self.device = delta.base_of(family.blocks[0].down).weight.device
        self._refuse_several_devices()
        self._snapshots: dict[int, torch.Tensor] = {}
        self._fixed: set[tuple[int, str]] = set()
        self.weights = self._build()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copy up to the policy's current weights; only what can have changed is computed again."""
        for target, source in self._borrowed:
            target.copy_(source())
        if self.kind == "live":
            return
        for index, (block, layer) in enumerate(zip(self.family.blocks, self.weights.layers, strict=True)):
            for name in PRODUCTS:
                modules = _modules(block, name)
                if (index, name) in self._fixed:
                    continue
                _fill(getattr(layer, name)[0], modules)
                if all(delta.is_fixed(module) for module in modules):
                    self._fixed.add((index, name))
        head = self.weights.head
        if head.packed is not None and not (head.packed.filled and delta.is_fixed(self.family.head)):
            head.packed.take(head.weight)

    def own_bytes(self) -> int:
        """Bytes of the products' weights and scales that are a copy; 0 where they are the policy's own."""
        if self.kind == "live":
            return 0
        copied = [product for layer in self.weights.layers for name in PRODUCTS for product in getattr(layer, name)]
        head = self.weights.head.weight.nbytes if self.weights.head.packed is not None else 0
        return head + sum(p.weight.nbytes + (0 if p.scale is None else p.scale.nbytes) for p in copied)

    @contextmanager
    def in_use(self) -> Iterator[Weights]:
        """The weights for the length of one rollout; live weights carry the adapter's delta inside and not outside."""
        adapted = (
            [m for block, name in self.products for m in _modules(block, name) if delta.adapters_of(m)]
            if self.kind == "live"
            else []
        )
        try:
            for module in adapted:
                self._add(module)
            yield self.weights
        finally:
            with torch.no_grad():
                for module in adapted:
                    base = delta.base_of(module).weight
                    if id(base) in self._snapshots:
                        base.copy_(self._snapshots[id(base)])

    @torch.no_grad()
    def _add(self, module: Any) -> None:
        base = delta.base_of(module).weight
        effective = delta.effective_weight(module)
        if base.requires_grad or id(base) not in self._snapshots:
            self._snapshots[id(base)] = base.detach().to("cpu", copy=True)
        base.copy_(effective)

    def _build(self) -> Weights:
        family = self.family
        self._borrowed: list[tuple[torch.Tensor, Callable]] = []
        layers = tuple(
            Layer(
                norm_in=self._factors(block.norm_in),
                norm_attn_out=self._norm(block.norm_attn_out),
                norm_mlp=self._factors(block.norm_mlp),
                norm_mlp_out=self._norm(block.norm_mlp_out),
                norm_q=self._norm(block.norm_q),
                norm_k=self._norm(block.norm_k),
                qkv=self._products(block, "qkv"),
                out=self._products(block, "out"),
                gate_up=self._products(block, "gate_up"),
                down=self._products(block, "down"),
            )
            for block in family.blocks
        )
        head = active(family.head)
        embed = active(family.embed)
        if any(hasattr(m, mark) for m in (head, embed) for mark in ("lora_A", "lora_embedding_A", "token_adapter")):
            raise EngineUnsupported("an adapter sits on the embedding or the head")
        return Weights(
            embed=self._borrow(lambda: active(family.embed).weight),
            layers=layers,
            norm=self._factors(family.norm),
            head=self._head(head),
        )

    def _head(self, head: Any) -> Dense:
        weight = self._borrow(lambda: active(self.family.head).weight)
        outputs, inputs = weight.shape
        packed = layout(outputs, inputs, weight.device, weight.dtype)[1] if self.kind == "copy" else None
        return Dense(weight, self._borrow_optional(head), packed=packed)

    def _borrow(self, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The policy's own tensor where its type fits, else a converted one that every refresh fills again."""
        tensor = source().detach()
        if tensor.dtype == self.dtype:
            return tensor
        own = tensor.to(self.dtype)
        self._borrowed.append((own, lambda: source().detach()))
        return own

    def _borrow_optional(self, head: Any) -> torch.Tensor | None:
        return None if getattr(head, "bias", None) is None else self._borrow(lambda: head.bias)

    def _norm(self, module: Any | None) -> torch.Tensor | None:
        return None if module is None else self._factors(module)

    def _factors(self, module: Any) -> torch.Tensor:
        """A norm's factors. Where they are stored as an offset from 1 the sum is float32: bfloat16 would round it away."""
        if not self.family.shape.norm_offset:
            return self._borrow(lambda: active(module).weight)
        own = active(module).weight.detach().float() + self.family.shape.norm_offset
        self._borrowed.append((own, lambda: active(module).weight.detach().float() + self.family.shape.norm_offset))
        return own

    def _products(self, block: Block, name: str) -> tuple[Dense, ...]:
        modules = _modules(block, name)
        if self.kind == "live":
            return tuple(Dense(delta.base_of(m).weight.detach(), self._live_bias(m)) for m in modules)
        outputs = sum(_outputs(m) for m in modules)
        inputs = _inputs(modules[0])
        has_bias = any(delta.effective_bias(m) is not None for m in modules)
        fp8 = self.kind == "fp8"
        weight, packed = layout(outputs, inputs, self.device, torch.float8_e4m3fn if fp8 else self.dtype)
        return (
            Dense(
                weight,
                torch.zeros(outputs, dtype=self.dtype, device=self.device) if has_bias else None,
                torch.empty(outputs, dtype=torch.float32, device=self.device) if fp8 else None,
                torch.ones((), device=self.device) if fp8 else None,
                packed,
            ),
        )

    def _live_bias(self, module: Any) -> torch.Tensor | None:
        bias = delta.effective_bias(module)
        if bias is None:
            return None
        own = bias.to(self.dtype)
        self._borrowed.append((own, lambda: delta.effective_bias(module)))
        return own

    def _refuse_several_devices(self) -> None:
        devices = {delta.base_of(m).weight.device for block, name in self.products for m in _modules(block, name)}
        if len(devices | {active(self.family.embed).weight.device}) > 1:
            raise EngineUnsupported("the policy is spread over several devices")


def copy_bytes(family: Family, kind: str, dtype: torch.dtype) -> int:
    """Bytes the rollout copy will take on the policy's device."""
    if kind == "live":
        return 0
    width = 1 if kind == "fp8" else dtype.itemsize
    blocks = family.blocks
    return sum(_outputs(m) * _inputs(m) * width for block in blocks for name in PRODUCTS for m in _modules(block, name))


def _modules(block: Block, name: str) -> tuple[Any, ...]:
    value = getattr(block, name)
    return value if isinstance(value, tuple) else (value,)


def _outputs(module: Any) -> int:
    return delta.base_of(module).out_features


def _inputs(module: Any) -> int:
    return delta.base_of(module).in_features


def _fill(product: Dense, modules: tuple[Any, ...]) -> None:
    if product.packed is None:
        _fill_plain(product, modules)
        return
    plain = product._replace(weight=torch.empty(product.weight.shape), packed=None)
    _fill_plain(plain, modules)
    product.packed.take(plain.weight)


def _fill_plain(product: Dense, modules: tuple[Any, ...]) -> None:
    row = 0
    for module in modules:
        rows = slice(row, row + _outputs(module))
        row = rows.stop
        base = delta.base_of(module)
        if product.scale is None and not delta.adapters_of(module) and not delta.is_quantised(module):
            product.weight[rows].copy_(base.weight)  # the same bits, without the way through float32
        else:
            weight = delta.effective_weight(module)
            if product.scale is not None:
                scale = weight.abs().amax(1).clamp_min(1e-12) / FP8_MAX
                product.scale[rows].copy_(scale)
                weight = (weight / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX)
            product.weight[rows].copy_(weight)
        bias = delta.effective_bias(module)
        if bias is not None and product.bias is not None:
            product.bias[rows].copy_(bias)
