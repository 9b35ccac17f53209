"""The decode step's small kernels and its attention, in Triton. The only file that imports triton, and none needs it.

Each kernel has a twin in plain torch (`forward.py`, `attention.py`, `sampler.py`, `booking.py`) that runs where Triton does
not, and is held to it when an engine starts (`trial.py`). One kernel does what takes torch between three and fifteen, so that a
step is a few hundred launches and its time is that of the weights' and the cache's bytes.

With `AHEAD` a kernel is launched while the one before it still runs (programmatic dependent launch, from compute capability
9.0), and waits for its results itself: nothing may be read or written before `gdc_wait` but weights, which no kernel changes.
A product may come as `PARTS` partial sums [PARTS, N, W] over its inputs; whoever reads it adds them up.
Legend: N rows, H heads, K KV heads, G heads a KV head, D head dims, W width of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_portable.rollout import fp8

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton from before it: `AHEAD` is then False
    gdc_launch_dependents = gdc_wait = None

FP8_MAX = tl.constexpr(fp8.FP8_MAX)
CAN_OVERLAP = gdc_wait is not None


@triton.jit
def add_norm_kernel(
    x, pending, row_scale, column_scale, factors, summed, normed, narrow, narrow_scale, eps,
    W: tl.constexpr, BLOCK: tl.constexpr, PENDING: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """summed = x + pending (times its scales), normed = RMS norm of that; with FP8 `narrow` and its row's scale instead."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < W
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * W + at, mask=inside, other=0.0).to(tl.float32)
    if PENDING:
        more = tl.load(pending + row * W + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more += tl.load(pending + (part * rows + row) * W + at, mask=inside, other=0.0)
        if SCALED:
            more = more * tl.load(row_scale + row) * tl.load(column_scale + at, mask=inside, other=0.0)
        value = (value + more).to(summed.dtype.element_ty)
        tl.store(summed + row * W + at, value, mask=inside)
        value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / W + eps)
    value = value * tl.load(factors + at, mask=inside, other=0.0).to(tl.float32)
    if FP8:
        scale = tl.maximum(tl.max(tl.abs(value)), 1e-12) / FP8_MAX
        tl.store(narrow + row * W + at, (value / scale).to(narrow.dtype.element_ty), mask=inside)
        tl.store(narrow_scale + row, scale)
    else:
        tl.store(normed + row * W + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def heads_kernel(
    qkv, row_scale, column_scale, bias, norm_q, norm_k, cos, sin, positions, slots, q, keys, values, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    NORMS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row: scale, norm, rotate; queries go to `q`, keys and values to their slot of the cache."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    head = tl.program_id(1) * HEADS
    at = tl.arange(0, BLOCK)[None, :]
    lane = (head + tl.arange(0, HEADS))[:, None] * D
    inside = (at < D) & (lane >= 0)
    half: tl.constexpr = ROTATED // 2
    other = tl.where(at < half, at + half, tl.where(at < ROTATED, at - half, at))
    start = row * (H + 2 * K) * D + lane
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(qkv + start + at, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(qkv + start + other, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(qkv + part * rows * (H + 2 * K) * D + start + at, mask=inside, other=0.0)
        partner += tl.load(qkv + part * rows * (H + 2 * K) * D + start + other, mask=inside, other=0.0)
    if SCALED:
        scale = tl.load(row_scale + row)
        value = value * scale * tl.load(column_scale + lane + at, mask=inside, other=0.0)
        partner = partner * scale * tl.load(column_scale + lane + other, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + lane + at, mask=inside, other=0.0).to(tl.float32)
        partner += tl.load(bias + lane + other, mask=inside, other=0.0).to(tl.float32)
    if head < H + K:
        if NORMS:
            factor = norm_q if head < H else norm_k
            spread = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
            value = value * spread * tl.load(factor + at, mask=at < D, other=0.0).to(tl.float32)
            partner = partner * spread * tl.load(factor + other, mask=at < D, other=0.0).to(tl.float32)
        position = tl.load(positions + row)
        c = tl.load(cos + position * ROTATED + at, mask=at < ROTATED, other=1.0).to(tl.float32)
        s = tl.load(sin + position * ROTATED + at, mask=at < ROTATED, other=0.0).to(tl.float32)
        value = value * c + partner * s
    slot = tl.load(slots + row)
    if head < H:
        tl.store(q + row * H * D + lane + at, value.to(q.dtype.element_ty), mask=inside)
    elif head < H + K:
        tl.store(keys + slot * K * D + lane - H * D + at, value.to(keys.dtype.element_ty), mask=inside)
    else:
        tl.store(values + slot * K * D + lane - (H + K) * D + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def joined(
    part, part_max, part_sum, pair, g, d, wanted,
    G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The splits of one KV head of one row, weighted by their sums of exponentials; other programs' are read past the cache."""
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        slot = (pair * SPLITS + split) * G + g
        best = tl.maximum(best, tl.load(part_max + slot, mask=g < G, other=0.0, cache_modifier=".cg"))
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        slot = (pair * SPLITS + split) * G + g
        weight = tl.exp(tl.load(part_max + slot, mask=g < G, other=0.0, cache_modifier=".cg") - best)
        total += weight * tl.load(part_sum + slot, mask=g < G, other=1.0, cache_modifier=".cg")
        more = tl.load(part + slot[:, None] * D + d[None, :], mask=wanted, other=0.0, cache_modifier=".cg")
        sums += weight[:, None] * more
    return sums / total[:, None]


@triton.jit
def attend_kernel(
    q, keys, values, lengths, leaders, shared, out, part, part_max, part_sum, arrived, capacity, scaling, softcap, window,
    K: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The G queries of one KV head of one row over (a split of) the row's keys.

    The first `shared[row]` positions are read from row `leaders[row]`, which holds the same prompt: the rows of a group then
    read one copy, which the card's cache serves to all but the first of them.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(lengths + row).to(tl.int32) + 1
    leader = tl.load(leaders + row).to(tl.int64)
    common = tl.load(shared + row).to(tl.int32)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK)
    wanted = (g < G)[:, None] & (d < D)[None, :]
    query = tl.load(q + ((row * K + head) * G + g)[:, None] * D + d[None, :], mask=wanted, other=0.0)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    step = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * step
    end = tl.minimum(begin + step, length)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for at in range(begin, end, BLOCK):
        position = at + n
        source = tl.where(position < common, leader, row)
        place = ((source * capacity + position) * K + head)[:, None] * D + d[None, :]
        held = (position < end)[:, None] & (d < D)[None, :]
        key = tl.load(keys + place, mask=held, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        seen = position < end
        if WINDOW:
            seen = seen & (position >= length - window)
        score = tl.where(seen[None, :], score, float("-inf"))
        high = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(high == float("-inf"), 0.0, high)
        weight = tl.exp(score - safe[:, None])
        decay = tl.exp(best - safe)
        total = total * decay + tl.sum(weight, 1)
        value = tl.load(values + place, mask=held, other=0.0)
        sums = sums * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        best = high
    if SPLITS == 1:
        made = sums / total[:, None]
        tl.store(out + ((row * K + head) * G + g)[:, None] * D + d[None, :], made.to(out.dtype.element_ty), mask=wanted)
    else:
        pair = row * K + head
        slot = (pair * SPLITS + split) * G + g
        tl.store(part + slot[:, None] * D + d[None, :], sums, mask=wanted)
        tl.store(part_max + slot, best, mask=g < G)
        tl.store(part_sum + slot, total, mask=g < G)
        tl.debug_barrier()  # all of it is written before this program counts as arrived
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + pair, 0)
            made = joined(part, part_max, part_sum, pair, g, d, wanted, G, ROWS, D, BLOCK_D, SPLITS)
            tl.store(out + (pair * G + g)[:, None] * D + d[None, :], made.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def gated_kernel(
    both, row_scale, column_scale, out, narrow, narrow_scale, W: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of one row's (chunk of) [gate, up]; with FP8 the whole row, `narrow` and its scale."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < W
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(both + row * 2 * W + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * W + W + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        gate += tl.load(both + (part * rows + row) * 2 * W + at, mask=inside, other=0.0)
        up += tl.load(both + (part * rows + row) * 2 * W + W + at, mask=inside, other=0.0)
    if SCALED:
        scale = tl.load(row_scale + row)
        gate = gate * scale * tl.load(column_scale + at, mask=inside, other=0.0)
        up = up * scale * tl.load(column_scale + W + at, mask=inside, other=0.0)
    value = activated(gate, ACTIVATION) * up
    if FP8:
        scale = tl.maximum(tl.max(tl.abs(value)), 1e-12) / FP8_MAX
        tl.store(narrow + row * W + at, (value / scale).to(narrow.dtype.element_ty), mask=inside)
        tl.store(narrow_scale + row, scale)
    else:
        tl.store(out + row * W + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def narrow_kernel(x, narrow, narrow_scale, W: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """One row in FP8, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < W
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * W + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)), 1e-12) / FP8_MAX
    tl.store(narrow + row * W + at, (value / scale).to(narrow.dtype.element_ty), mask=inside)
    tl.store(narrow_scale + row, scale)


@triton.jit
def chunk_sums_kernel(
    logits, chunk_max, chunk_sum, temperature, V: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Of one chunk of one row's logits: the maximum, and the sum of exponentials below it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    value = value / temperature
    best = tl.max(value)
    tl.store(chunk_max + row * CHUNKS + chunk, best)
    tl.store(chunk_sum + row * CHUNKS + chunk, tl.sum(tl.exp(value - best)))


@triton.jit
def pick_kernel(
    logits, chunk_max, chunk_sum, noise, tokens, logprobs, temperature,
    V: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The token at which one row's cumulative distribution passes its noise: first the chunk, then inside it."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    high = tl.load(chunk_max + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    best = tl.max(high)
    mass = tl.load(chunk_sum + row * CHUNKS + c, mask=c < CHUNKS, other=0.0) * tl.exp(high - best)
    sums = tl.cumsum(mass.to(tl.float64))
    total = tl.max(sums)
    aim = tl.load(noise + row) * total
    last = tl.sum((sums < total).to(tl.int32))
    chunk = tl.minimum(tl.sum((sums <= aim).to(tl.int32)), last)
    before = tl.max(tl.where(c < chunk, sums, 0.0))
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    weight = tl.exp(value / temperature - best).to(tl.float64)
    inner = tl.cumsum(weight)
    most = tl.max(inner)
    offset = tl.minimum(tl.sum((inner <= aim - before).to(tl.int32)), tl.sum((inner < most).to(tl.int32)))
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == offset, weight, 0.0))
    tl.store(tokens + row, (chunk * BLOCK + offset).to(tl.int64))
    tl.store(logprobs + row, tl.log((chosen / total).to(tl.float32)))


@triton.jit
def book_kernel(
    drawn, logprobs, tokens, lengths, limits, alive, stops, tick, kept_tokens, kept_logprobs, rows, held, turns,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`booking.book`, by one program."""
    row = tl.arange(0, BLOCK)
    inside = row < rows
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.load(tick)
    token = tl.load(drawn + row, mask=inside, other=0)
    tl.store(kept_tokens + at * held + row, token, mask=inside)
    tl.store(kept_logprobs + at * held + row, tl.load(logprobs + row, mask=inside, other=0.0), mask=inside)
    going = tl.load(alive + row, mask=inside, other=0) != 0
    length = tl.load(lengths + row, mask=inside, other=0) + going.to(tl.int64)
    tl.store(lengths + row, length, mask=inside)
    tl.store(tokens + row, token, mask=inside & going)
    ended = length >= tl.load(limits + row, mask=inside, other=0)
    for stop in tl.static_range(STOPS):
        ended = ended | (token == tl.load(stops + stop))
    tl.store(alive + row, going & ~ended, mask=inside)
    tl.debug_barrier()  # the others have read it
    tl.store(tick, (at + 1) % turns)


@triton.jit
def weight_tile(at, inside, left, k, EVEN: tl.constexpr):
    """[BLOCK, COLUMNS] of a weight, which is read once; but for `EVEN` what lies outside is zero."""
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=inside & (k < left)[:, None], other=0.0, eviction_policy="evict_first")


@triton.jit
def skinny_kernel(
    x, w, out, rows, width, inputs, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of x [rows, inputs] times w [width, inputs], over `share` inputs: partial sums [splits, rows, width].

    The weights are read once and by enough programs to keep the memory busy; the first tile is asked for before the states are
    there, while the kernel before this one still runs. `EVEN`: `share` is a multiple of BLOCK, and `width` of COLUMNS.
    """
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    begin = split * share
    count = tl.minimum(share, inputs - begin)
    weight = w + column.to(tl.int64)[None, :] * inputs + (begin + k)[:, None]
    state = x + row[:, None] * inputs + (begin + k)[None, :]
    present = (row < rows)[:, None]
    inside = (column < width)[None, :]
    tile = weight_tile(weight, inside, count, k, EVEN)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.dot(tl.load(state, mask=present & (k < count)[None, :], other=0.0), tile)
    for at in tl.range(BLOCK, count, BLOCK, num_stages=STAGES):
        tile = weight_tile(weight + at, inside, count - at, k, EVEN)
        if EVEN:
            states = tl.load(state + at, mask=present, other=0.0)
        else:
            states = tl.load(state + at, mask=present & (at + k < count)[None, :], other=0.0)
        sums = tl.dot(states, tile, sums)
    place = out + (split * rows + row)[:, None].to(tl.int64) * width + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=present & inside)


@triton.jit
def gated_product_kernel(
    x, w, row_scale, column_scale, out, rows, width, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, SCALED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, COLUMNS of [rows, width], where [gate, up] is x [rows, inputs] times w [2 * width, inputs].

    As `skinny_kernel` does, but that a program computes the same columns of both halves, so that neither is written down.
    `EVEN`: `inputs` is a multiple of BLOCK, and `width` of COLUMNS.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    gates = w + column.to(tl.int64)[None, :] * inputs + k[:, None]
    ups = gates + width.to(tl.int64) * inputs
    state = x + row[:, None] * inputs + k[None, :]
    present = (row < rows)[:, None]
    inside = (column < width)[None, :]
    gate_tile = weight_tile(gates, inside, inputs, k, EVEN)
    up_tile = weight_tile(ups, inside, inputs, k, EVEN)
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    states = tl.load(state, mask=present & (k < inputs)[None, :], other=0.0)
    gate = tl.dot(states, gate_tile)
    up = tl.dot(states, up_tile)
    for at in tl.range(BLOCK, inputs, BLOCK, num_stages=STAGES):
        gate_tile = weight_tile(gates + at, inside, inputs - at, k, EVEN)
        up_tile = weight_tile(ups + at, inside, inputs - at, k, EVEN)
        if EVEN:
            states = tl.load(state + at, mask=present, other=0.0)
        else:
            states = tl.load(state + at, mask=present & (at + k < inputs)[None, :], other=0.0)
        gate = tl.dot(states, gate_tile, gate)
        up = tl.dot(states, up_tile, up)
    if SCALED:
        scale = tl.load(row_scale + row, mask=row < rows, other=0.0)[:, None]
        gate = gate * scale * tl.load(column_scale + column[None, :], mask=inside, other=0.0)
        up = up * scale * tl.load(column_scale + width + column[None, :], mask=inside, other=0.0)
    value = activated(gate, ACTIVATION) * up
    place = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=present & inside)
