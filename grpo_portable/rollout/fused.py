"""A decode layer in eight or nine kernels, through Triton: chosen when it works on this machine and gives what torch gives.

Products of few rows are Triton's too where that is faster here (`skinny.py`): then a step's kernels can overlap. `trial.py`
says whether it works here.
Products whose scales are still to be multiplied in are carried as `Scaled`, so that the kernel that reads them does it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from grpo_portable.rollout import attention, booking, fp8, sampler, skinny
from grpo_portable.rollout.family import Shape
from grpo_portable.rollout.forward import Plain, Rows, Tables, product
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.weights import Dense, Layer

CHUNK = 1024  # logits one program of the sampler reads
KEYS_A_SPLIT = 128  # at least, where several programs share a row's keys: fewer are not worth the join
KEYS = 32  # keys one turn of the attention's loop reads: small turns, four of them in flight, were fastest on an H200


class Scaled(NamedTuple):
    """A product [N, W], or `parts` partial sums of it [parts, N, W] in float32.

    Its true value is value * rows * columns + bias, where `rows` [N], `columns` [W] and `bias` [W] are given.
    """

    value: torch.Tensor
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    parts: int = 1


class Narrow(NamedTuple):
    """States in FP8 [N, W] and the scale of each row [N]."""

    value: torch.Tensor
    scale: torch.Tensor


class Fused(Plain):
    name = "fused"
    multiple = 16  # so that no FP8 product needs padding of its own
    joins = True

    def __init__(
        self, shape: Shape, device: torch.device, reason: str = "", skinny_rows: int = 0, processors: int | None = None
    ) -> None:
        super().__init__(shape, reason)
        from grpo_portable.rollout import kernels

        self.kernels = kernels
        self.skinny_rows = skinny_rows  # products of at most as many rows are Triton's
        on_card = device.type == "cuda"
        there = torch.cuda.get_device_properties(device).multi_processor_count if on_card else 1
        self.processors = processors or there  # what the work is cut for
        self.ahead_rows = skinny_rows if on_card else 0
        # programs that are done with their keys, of each row and KV head that several share: by `splits` no more than these
        self.arrived = torch.zeros(self.processors, dtype=torch.int32, device=device)

    def ready(self, tables: Tables, cache: Cache, rows: Rows) -> Any:
        slots = torch.arange(rows.lengths.shape[0], device=rows.lengths.device) * cache.capacity + rows.lengths
        return tables, cache, rows, slots

    def ready_for_prompts(self, tables: Tables, cache: Cache, rows: torch.Tensor, length: int) -> Any:
        device, batch = cache.all.device, rows.shape[0]
        positions = torch.arange(length, device=device).repeat(batch)
        starts = rows * cache.capacity
        slots = positions + starts.repeat_interleave(length)
        ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
        begins = F.pad(starts, (0, 1)).to(torch.int32)
        used = torch.full((batch,), length, device=device, dtype=torch.int32)
        return tables, cache, positions, slots, (ends, begins, used), length

    def prompt(
        self, x: torch.Tensor, pending: Any, layer: Layer, index: int, ready: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tables, cache, positions, slots, packed, length = ready
        if cache.kind != "flash":
            rows = slots[::length] // cache.capacity
            turns = {name: (cos[positions], sin[positions]) for name, (cos, sin) in tables.items()}
            return super().prompt(x, pending, layer, index, (cache, rows, turns))
        x, q = self._heads(x, pending, layer, index, tables, cache, positions, slots)
        return x, None if index + 1 == self.shape.layers else self._among_prompts(q, index, cache, packed, length)

    def _among_prompts(self, q: torch.Tensor, index: int, cache: Cache, packed: Any, length: int) -> torch.Tensor:
        """Causal attention of prompts whose keys and values lie in the cache."""
        keys, values = cache.keys[index], cache.values[index]
        if cache.kind == "flash":
            return attention.flash_prompts(q, keys, values, packed, length, self.shape, index).view(q.shape[0], -1)
        rows = packed[1][:-1].long() // cache.capacity
        q = q.view(rows.shape[0], length, *q.shape[1:])
        k, v = (t[rows, :length] for t in (keys, values))
        return attention.prefill(q, k, v, self.shape, self.shape.windows[index]).reshape(rows.shape[0] * length, -1)

    def ready_for_both(
        self, tables: Tables, cache: Cache, held: Rows, prompts: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> Any:
        """What every layer of `forward.step_with_prompts` needs."""
        length = prompts.shape[1]
        *_, own = self.ready(tables, cache, held)
        _, _, at, slots, packed, _ = self.ready_for_prompts(tables, cache, rows, length)
        pads = at >= counts.repeat_interleave(length, output_size=at.shape[0])
        last = (rows * cache.capacity + cache.capacity - 1).repeat_interleave(length, output_size=at.shape[0])
        slots = torch.where(pads, last, slots)
        return (tables, cache, held, own), torch.cat((held.lengths, at)), torch.cat((own, slots)), packed, length

    def both(
        self, x: torch.Tensor, pending: Any, layer: Layer, index: int, ready: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and the attention of rows and, behind them, of prompts [N + B * P, H * D]."""
        (tables, cache, held, own), positions, slots, packed, length = ready
        x, q = self._heads(x, pending, layer, index, tables, cache, positions, slots)
        count = own.shape[0]
        mine = self.attend(q[:count], index, (tables, cache, held, own))
        return x, torch.cat((mine, self._among_prompts(q[count:], index, cache, packed, length)))

    def first(self, pending: Any, count: int) -> Any:
        """What is pending for the first `count` tokens; it is no sum of parts, since a step with prompts has too many rows."""
        if not isinstance(pending, Scaled):
            return pending[:count]
        assert pending.parts == 1
        return pending._replace(
            value=pending.value[:count], rows=None if pending.rows is None else pending.rows[:count]
        )

    def normed(self, x: torch.Tensor, pending: Any, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, h = self._normed(x, pending, factors, narrow=False)
        assert isinstance(h, torch.Tensor)
        return x, h

    def before(
        self, x: torch.Tensor, pending: Any, layer: Layer, index: int, ready: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables, cache, rows, slots = ready
        return self._heads(x, pending, layer, index, tables, cache, rows.lengths, slots)

    def attend(self, q: torch.Tensor, index: int, ready: Any) -> torch.Tensor:
        _, cache, rows, _ = ready
        shape, count, window = self.shape, q.shape[0], self.shape.windows[index]
        splits = self.splits(count, cache.capacity)
        out = torch.empty(count, shape.heads * shape.head_dim, dtype=q.dtype, device=q.device)
        pairs = count * shape.kv_heads * splits * shape.group if splits > 1 else 0
        part, high, total = (
            torch.empty(pairs, width, dtype=torch.float32, device=q.device) for width in (shape.head_dim, 1, 1)
        )
        sizes = {
            "G": shape.group,
            "ROWS": max(16, _power(shape.group)),
            "D": shape.head_dim,
            "BLOCK_D": _power(shape.head_dim),
        }
        self.kernels.attend_kernel[(count, shape.kv_heads, splits)](
            q, cache.keys[index], cache.values[index], rows.lengths, rows.leaders, rows.shared, out, part, high, total,
            self.arrived, cache.capacity, shape.scaling, shape.attn_softcap or 1.0, window or 0, K=shape.kv_heads, **sizes,
            BLOCK=KEYS, SPLITS=splits, SOFTCAP=bool(shape.attn_softcap), WINDOW=window is not None, num_warps=2, num_stages=4,
            **self._launch(count),
        )  # fmt: skip
        return out

    def after(self, x: torch.Tensor, out: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, Any]:
        if layer.norm_attn_out is not None:
            return super().after(x, out, layer)
        y = self._product(self._narrowed(out) if layer.out[0].scale is not None else out, layer.out)
        x, h = self._normed(x, y, layer.norm_mlp, narrow=layer.gate_up[0].scale is not None)
        narrow = layer.down[0].scale is not None
        if self._is_skinny(x, layer.gate_up):
            inner = self._gated_product(h, layer.gate_up[0])
            return x, self._product(self._narrowed(inner) if narrow else inner, layer.down)
        y = self._product(h, layer.gate_up)
        return x, self._product(self._gated(y, x, narrow=narrow), layer.down)

    def draw(
        self, logits: torch.Tensor, noise: torch.Tensor, drawing: sampler.Drawing, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if drawing.greedy or drawing.truncates or seen is not None:
            return super().draw(logits, noise, drawing, seen)
        rows, vocab = logits.shape
        chunks = -(-vocab // CHUNK)
        high, mass = (torch.empty(rows, chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
        tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
        logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
        sizes = {"V": vocab, "CHUNKS": chunks, "BLOCK": CHUNK}
        self.kernels.chunk_sums_kernel[(rows, chunks)](
            logits, high, mass, drawing.temperature, **sizes, num_warps=4, **self._launch(rows)
        )
        self.kernels.pick_kernel[(rows,)](
            logits,
            high,
            mass,
            noise,
            tokens,
            logprobs,
            drawing.temperature,
            BLOCK_C=_power(chunks),
            **sizes,
            num_warps=4,
            **self._launch(rows),
        )
        return tokens, logprobs

    def book(self, state: booking.State, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        rows, (steps, held) = tokens.shape[0], state.drawn.shape
        self.kernels.book_kernel[(1,)](
            tokens, logprobs, *state, rows, held, steps, STOPS=state.stops.shape[0], BLOCK=_power(rows), num_warps=4,
            **self._launch(rows),
        )  # fmt: skip

    def _launch(self, rows: int) -> dict[str, Any]:
        """A step's kernels are launched ahead where its products are Triton's: around the library's it gains nothing."""
        return {"AHEAD": True, "launch_pdl": True} if rows <= self.ahead_rows else {"AHEAD": False}

    def splits(self, rows: int, capacity: int) -> int:
        """Programs that share one row's keys: enough to fill the card twice, each with at least KEYS_A_SPLIT keys."""
        wanted = 2 * self.processors // (rows * self.shape.kv_heads)
        return max(1, min(8, 1 << max(0, wanted.bit_length() - 1), capacity // KEYS_A_SPLIT))

    def _heads(
        self,
        x: torch.Tensor,
        pending: Any,
        layer: Layer,
        index: int,
        tables: Tables,
        cache: Cache,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and the queries [N, H, D] of tokens at `positions`; keys and values go to `slots` of the cache."""
        shape, count = self.shape, x.shape[0]
        x, h = self._normed(x, pending, layer.norm_in, narrow=layer.qkv[0].scale is not None)
        qkv = self._product(h, layer.qkv, biased=True)
        cos, sin = tables[shape.rotary[index]]
        q = torch.empty(count, shape.heads, shape.head_dim, dtype=x.dtype, device=x.device)
        together = math.gcd(shape.heads, shape.kv_heads, 8)
        self.kernels.heads_kernel[(count, (shape.heads + 2 * shape.kv_heads) // together)](
            qkv.value, qkv.rows, qkv.columns, qkv.bias, layer.norm_q, layer.norm_k, cos, sin, positions, slots,
            q, cache.keys[index], cache.values[index], shape.eps,
            H=shape.heads, K=shape.kv_heads, D=shape.head_dim, HEADS=together, BLOCK=_power(shape.head_dim),
            ROTATED=cos.shape[-1], NORMS=layer.norm_q is not None, SCALED=qkv.rows is not None, BIAS=qkv.bias is not None,
            PARTS=qkv.parts, num_warps=4 if together == 8 else 1, **self._launch(count),
        )  # fmt: skip
        return x, q

    def _normed(
        self, x: torch.Tensor, pending: Any, factors: torch.Tensor, *, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor | Narrow]:
        rows, width = x.shape
        more = pending if isinstance(pending, Scaled) else Scaled(pending)
        summed = x if pending is None else torch.empty_like(x)
        normed = x if narrow else torch.empty_like(x)
        small = self._empty_narrow(rows, width, x.device) if narrow else Narrow(x, factors)
        self.kernels.add_norm_kernel[(rows,)](
            x, more.value, more.rows, more.columns, factors, summed, normed, small.value, small.scale, self.shape.eps,
            W=width, BLOCK=_power(width), PENDING=pending is not None, SCALED=more.rows is not None, FP8=narrow,
            PARTS=more.parts, num_warps=8 if width > 2048 else 4, **self._launch(rows),
        )  # fmt: skip
        return summed, small if narrow else normed

    def _gated(self, both: Scaled, like: torch.Tensor, *, narrow: bool) -> torch.Tensor | Narrow:
        rows, width = both.value.shape[-2], both.value.shape[-1] // 2
        out = both.value if narrow else both.value.new_empty(rows, width, dtype=like.dtype)
        small = self._empty_narrow(rows, width, out.device) if narrow else Narrow(out, out)
        block = _power(width) if narrow else min(1024, _power(width))
        self.kernels.gated_kernel[(rows, -(-width // block))](
            both.value, both.rows, both.columns, out, small.value, small.scale, W=width, BLOCK=block,
            ACTIVATION=self.shape.activation, SCALED=both.rows is not None, FP8=narrow, PARTS=both.parts,
            num_warps=16 if block > 8192 else 4, **self._launch(rows),
        )  # fmt: skip
        return small if narrow else out

    def _narrowed(self, x: torch.Tensor) -> Narrow:
        small = self._empty_narrow(x.shape[0], x.shape[1], x.device)
        self.kernels.narrow_kernel[(x.shape[0],)](
            x,
            *small,
            W=x.shape[1],
            BLOCK=_power(x.shape[1]),
            num_warps=16 if x.shape[1] > 8192 else 8,
            **self._launch(x.shape[0]),
        )
        return small

    def _product(self, h: torch.Tensor | Narrow, parts: tuple[Dense, ...], *, biased: bool = False) -> Scaled:
        """`biased`: the kernel that reads the product adds its bias."""
        x, part = h if isinstance(h, torch.Tensor) else h.value, parts[0]
        if self._is_skinny(x, parts, biased=biased):
            return self._skinny(h, part)
        if isinstance(h, torch.Tensor):
            return Scaled(product(h, parts))
        assert part.unit is not None
        return Scaled(fp8.matmul(x, part.weight, part.unit, torch.bfloat16), h.scale, part.scale, part.bias)

    def _is_skinny(self, x: torch.Tensor, parts: tuple[Dense, ...], *, biased: bool = False) -> bool:
        """Whether a product of these states is Triton's; `biased`: its reader adds the bias, if there is one."""
        return x.shape[0] <= self.skinny_rows and len(parts) == 1 and (biased or parts[0].bias is None)

    def _gated_product(self, h: torch.Tensor | Narrow, part: Dense) -> torch.Tensor:
        """activation(gate) * up [N, W] of a weight whose first half of 2 W outputs are the gates."""
        x, scale = (h, None) if isinstance(h, torch.Tensor) else h
        (rows, inputs), width = x.shape, part.weight.shape[0] // 2
        cut = skinny.tiling(rows, 2 * width, inputs, self.processors, x.element_size(), most_splits=1)
        columns = cut.columns // 2  # of each half
        out = torch.empty(rows, width, device=x.device, dtype=torch.bfloat16 if x.element_size() == 1 else x.dtype)
        self.kernels.gated_product_kernel[(-(-width // columns),)](
            x, part.weight, scale, part.scale, out, rows, width, inputs, ROWS=cut.rows, COLUMNS=columns, BLOCK=cut.block,
            STAGES=cut.stages, EVEN=inputs % cut.block == 0 and width % columns == 0,
            ACTIVATION=self.shape.activation, SCALED=part.scale is not None, num_warps=4, **self._launch(rows),
        )  # fmt: skip
        return out

    def _skinny(self, h: torch.Tensor | Narrow, part: Dense) -> Scaled:
        x = h if isinstance(h, torch.Tensor) else h.value
        (rows, inputs), width = x.shape, part.weight.shape[0]
        cut = skinny.tiling(rows, width, inputs, self.processors, x.element_size())
        wide = torch.bfloat16 if x.element_size() == 1 else x.dtype
        out = torch.empty(cut.splits, rows, width, device=x.device, dtype=torch.float32 if cut.splits > 1 else wide)
        self.kernels.skinny_kernel[(-(-width // cut.columns), cut.splits)](
            x, part.weight, out, rows, width, inputs, cut.share, ROWS=cut.rows, COLUMNS=cut.columns, BLOCK=cut.block,
            STAGES=cut.stages, EVEN=cut.even, num_warps=4, **self._launch(rows),
        )  # fmt: skip
        scale = None if isinstance(h, torch.Tensor) else h.scale
        return Scaled(out if cut.splits > 1 else out[0], scale, part.scale, part.bias, cut.splits)

    @staticmethod
    def _empty_narrow(rows: int, width: int, device: torch.device) -> Narrow:
        return Narrow(
            torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
