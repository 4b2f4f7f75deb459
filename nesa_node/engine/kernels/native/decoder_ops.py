"""Kernels of a Llama layer between its products, for tokens of any rows.

Results are rounded to the dtype where transformers rounds them. T tokens, D hidden, F inner size, Q
query heads, H key/value heads, G = Q / H, E head size, P positions, S slots of the cache's pool. D,
F and E / 2 must be multiples of the vector length.

The cache has the dtype, or is "int8": codes and a bfloat16 scale of each head, as
`engine/cache/cache_side.py` makes them, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import FLOAT, FunctionBuilder
from nesa_node.engine.kernels.native.job_builder import I64, Processor
from nesa_node.engine.kernels.native.matmul import CACHE_LINE_BYTES

PREFETCH_SLOTS = 16
SCALE_BYTES = 2
"""Of a head's scale in an int8 cache, bfloat16."""


def add_rms_norm(dtype: str, processor: Processor) -> ir.Module:
    """Build x [T, D] += added [T, D] in place, and out [T, D] = RMS norm of x.

    Fields: x, added, weight [D], out; T, D; epsilon (float32).
    """
    code = FunctionBuilder("add_and_norm", dtype, processor)
    at = code.ir_builder
    x, added, weight, out = (code.field(index) for index in range(4))
    tokens, size, epsilon = code.field(4, I64), code.field(5, I64), code.field(6, FLOAT)
    with code.for_each(tokens) as token:
        start = at.mul(token, size)
        with code.loop(size, code.vector_floats, [code.zeros]) as loop:
            place = at.add(start, loop.index)
            where = code.address(x, place)
            value = at.fadd(code.load(where), code.load(added, place))
            value = code.store_rounded(value, where)
            loop.values = [code.multiply_add(value, value, loop.values[0])]
        mean = at.fdiv(code.horizontal_sum(loop.values[0]), at.sitofp(size, FLOAT))
        root = code.call_intrinsic("llvm.sqrt.f32", FLOAT, at.fadd(mean, epsilon))
        scale = code.broadcast(at.fdiv(at.extract_element(code.constants["one"], I64(0)), root))
        with code.for_each(size, code.vector_floats) as index:
            place = at.add(start, index)
            value = code.round_to_dtype(at.fmul(code.load(x, place), scale))
            code.store(at.fmul(value, code.load(weight, index)), out, place)
    return code.finish()


def rope_and_store_kv(dtype: str, dim: int, cache: str, processor: Processor) -> ir.Module:
    """Build RoPE: rotate queries in place, and store rotated keys, and values, in the cache.

    Fields: qkv [T, Q + 2 H, E], cosines [P, E], signed sines [P, E], keys [S, H, E], values [S, H,
    E], positions [T], slots [T] (int64); T, Q, H; the scales [S, H] of keys and of values (int8).
    """
    code = FunctionBuilder("rotate", dtype, processor)
    at, half = code.ir_builder, dim // 2
    qkv, cosines, sines, keys, values, positions, slots = (code.field(i) for i in range(7))
    tokens, queries, heads = (code.field(index, I64) for index in range(7, 10))
    all_heads = at.add(queries, at.mul(heads, I64(2)))

    def turn(source: ir.Value, position: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Yield vectors of a rotated head, not rounded, with their places in it."""
        for part in range(0, half, code.vector_floats):
            places = [I64(part), I64(part + half)]
            before = [code.load(source, place) for place in places]
            for place, value, other in zip(places, before, reversed(before), strict=True):
                angle = at.add(at.mul(position, I64(dim)), place)
                cosine, sine = code.load(cosines, angle), code.load(sines, angle)
                turned = at.fadd(
                    code.round_to_dtype(at.fmul(value, cosine)),
                    code.round_to_dtype(at.fmul(other, sine)),
                )
                yield turned, place

    with code.for_each(tokens) as token:
        position = code.load_int64(positions, token)
        slot = at.mul(code.load_int64(slots, token), heads)
        first = at.mul(token, all_heads)

        def head(index: ir.Value) -> ir.Value:
            return code.address(qkv, at.mul(at.add(first, index), I64(dim)))

        def store(vectors: Iterable[tuple[ir.Value, ir.Value]], side: int, index: ir.Value) -> None:
            cached = at.add(slot, index)
            if cache == "int8":
                rounded = [(code.round_to_dtype(value), place) for value, place in vectors]
                codes = code.address((keys, values)[side], at.mul(cached, I64(dim)), 1)
                scale = code.address(code.field(10 + side), cached, SCALE_BYTES)
                _store_quantized(code, rounded, codes, scale)
                return
            target = code.address((keys, values)[side], at.mul(cached, I64(dim)))
            for value, place in vectors:
                code.store(value, target, place)

        with code.for_each(queries) as index:
            for value, place in turn(head(index), position):
                code.store(value, head(index), place)
        with code.for_each(heads) as index:
            store(turn(head(at.add(queries, index)), position), 0, index)
            source = head(at.add(at.add(queries, heads), index))
            places = [I64(part) for part in range(0, dim, code.vector_floats)]
            store([(code.load(source, place), place) for place in places], 1, index)
    return code.finish()


def _store_quantized(
    code: FunctionBuilder,
    vectors: Sequence[tuple[ir.Value, ir.Value]],
    codes: ir.Value,
    scale_address: ir.Value,
) -> None:
    """Store a head's vectors as codes, and its scale, as `quantize_heads` does."""
    at, constants = code.ir_builder, code.constants
    largest, guard = code.zeros, code.zeros
    for value, _ in vectors:
        for each in (value, at.fsub(code.zeros, value)):
            largest = at.select(at.fcmp_ordered(">", each, largest), each, largest)
        # NaN where a value is not finite, which comparisons do not tell.
        guard = at.fadd(guard, at.fmul(value, code.zeros))
    most = at.fadd(code.horizontal_max(largest), code.horizontal_sum(guard))
    scale = code.store_bfloat16(
        at.fdiv(most, at.extract_element(constants["largest code"], I64(0))),
        scale_address,
        at.extract_element(constants["least scale"], I64(0)),
    )
    divisor = code.broadcast(scale)
    is_zero = at.fcmp_ordered("==", divisor, code.zeros)
    most_code = constants["largest code"]
    least_code = at.fsub(code.zeros, most_code)
    for value, place in vectors:
        quotient = at.select(is_zero, code.zeros, at.fdiv(value, divisor))
        quotient = at.select(at.fcmp_ordered("<", quotient, least_code), least_code, quotient)
        quotient = at.select(at.fcmp_ordered(">", quotient, most_code), most_code, quotient)
        code.store_int8(quotient, codes, place)


def paged_attention(
    dtype: str, dim: int, group: int, cache: str, processor: Processor
) -> ir.Module:
    """Build attention of N of the tokens, each over a range of consecutive slots.

    Fields: qkv [T, Q + 2 H, E], keys [S, H, E], values [S, H, E], out [T, Q, E]; token indices [N],
    first slots [N], numbers of slots [N] (int64); scratch [threads, G, room] (float32); N, H, room
    (the largest number of slots, rounded up to the vector length); scale (float32); the scales [S,
    H] of keys and of values (int8).
    """
    code = FunctionBuilder("attend", dtype, processor)
    at = code.ir_builder
    which, firsts, counts, scratch = (code.field(index) for index in range(4, 8))
    chosen, heads, room = (code.field(index, I64) for index in range(8, 11))
    attention = _AttentionBuilder(code, dim, group, heads, room, is_int8=cache == "int8")
    blocks = at.mul(heads, I64(group // attention.heads_at_once))
    start, end, thread = code.thread_range(at.mul(chosen, blocks))
    scores = code.address(scratch, at.mul(at.mul(thread, I64(group)), room), 4)
    with code.for_each(end, first=start) as item:
        number, block = at.sdiv(item, blocks), at.srem(item, blocks)
        token = code.load_int64(which, number)
        first, count = (code.load_int64(numbers, number) for numbers in (firsts, counts))
        attention.build(token, block, first, count, scores)
    return code.finish()


class _AttentionBuilder:
    """Attention of one token for the query heads of a key/value head that fit into registers."""

    def __init__(
        self,
        code: FunctionBuilder,
        dim: int,
        group: int,
        heads: ir.Value,
        scratch_stride: ir.Value,
        *,
        is_int8: bool,
    ) -> None:
        self.code, self.dim, self.group = code, dim, group
        self.is_int8 = is_int8
        self.cached_bytes = 1 if is_int8 else code.item_bytes
        self.scales = [code.field(index) for index in (12, 13)]
        """Of keys and values; meaningless unless in int8."""
        self.heads, self.scratch_stride = heads, scratch_stride
        self.vectors_per_head = dim // code.vector_floats
        at_once = max(code.processor.num_vector_registers // (2 * self.vectors_per_head), 1)
        self.heads_at_once = max(n for n in range(1, group + 1) if group % n == 0 and n <= at_once)
        self.qkv, self.keys, self.values, self.out = (code.field(i) for i in range(4))
        self.scale = code.broadcast(code.field(11, FLOAT))
        self.stride = code.ir_builder.mul(heads, I64(dim))
        self.lowest = code.ir_builder.extract_element(code.constants["lowest"], I64(0))

    def build(
        self, token: ir.Value, block: ir.Value, first: ir.Value, count: ir.Value, scores: ir.Value
    ) -> None:
        code, at = self.code, self.code.ir_builder
        queries = at.mul(self.heads, I64(self.group))
        query = at.mul(block, I64(self.heads_at_once))
        head = at.sdiv(query, I64(self.group))
        slot = at.add(at.mul(first, self.heads), head)
        base = at.mul(slot, I64(self.dim))
        sides = [
            (
                code.address(tensor, base, self.cached_bytes),
                code.address(scales, slot, SCALE_BYTES) if self.is_int8 else None,
            )
            for tensor, scales in zip((self.keys, self.values), self.scales, strict=True)
        ]
        of_query = [
            code.address(scores, at.mul(I64(number), self.scratch_stride), 4)
            for number in range(self.heads_at_once)
        ]
        row = at.mul(token, at.add(queries, at.mul(self.heads, I64(2))))
        asked = []
        for index in self._query_indices(query):
            start = code.address(self.qkv, at.mul(at.add(row, index), I64(self.dim)))
            lanes = [code.load(start, part) for part in range(0, self.dim, code.vector_floats)]
            asked.append([at.fmul(lane, self.scale) for lane in lanes])
        most = self._build_scores(asked, sides[0], count, of_query)
        # Pad the last vector with -inf: exp of it adds nothing.
        rounded_up = at.and_(at.add(count, I64(code.vector_floats - 1)), I64(-code.vector_floats))
        for place, largest in zip(of_query, most, strict=True):
            self._build_exponentials(place, count, rounded_up, code.broadcast(largest))
        sums = self._build_weighted_sums(sides[1], count, of_query)
        row = at.mul(token, queries)
        for index, (whole, lanes) in zip(self._query_indices(query), sums, strict=True):
            divisor = code.broadcast(whole)
            target = code.address(self.out, at.mul(at.add(row, index), I64(self.dim)))
            for part, lane in enumerate(lanes):
                code.store(at.fdiv(lane, divisor), target, part * code.vector_floats)

    def _query_indices(self, query: ir.Value) -> list[ir.Value]:
        return [self.code.ir_builder.add(query, I64(n)) for n in range(self.heads_at_once)]

    def _load_slot(self, side: ir.Value, slot: ir.Value) -> list[ir.Value]:
        """Load a head's vector of a slot, or its codes; prefetch a later one: hardware cannot."""
        code, at = self.code, self.code.ir_builder
        start = at.mul(slot, self.stride)
        ahead = at.add(start, at.mul(self.stride, I64(PREFETCH_SLOTS)))
        later = code.address(side, ahead, self.cached_bytes)
        for line in range(0, self.dim * self.cached_bytes, CACHE_LINE_BYTES):
            code.prefetch(later, line)
        load = code.load_int8 if self.is_int8 else code.load
        return [
            load(side, at.add(start, I64(part))) for part in range(0, self.dim, code.vector_floats)
        ]

    def _scaled(self, value: ir.Value, scales: ir.Value | None, slot: ir.Value) -> ir.Value:
        """A slot's score, or its weight, times the scale of its codes."""
        if scales is None:
            return value
        at = self.code.ir_builder
        return at.fmul(value, self.code.load_bfloat16(scales, at.mul(slot, self.heads)))

    def _build_scores(
        self,
        scaled_queries: list[list[ir.Value]],
        keys: tuple[ir.Value, ir.Value | None],
        count: ir.Value,
        scores: list[ir.Value],
    ) -> list[ir.Value]:
        """Store each query's scores of all slots; return the largest of each query."""
        code, at = self.code, self.code.ir_builder
        with code.loop(count, 1, [self.lowest] * self.heads_at_once) as loop:
            lanes = self._load_slot(keys[0], loop.index)
            for number, (query, place) in enumerate(zip(scaled_queries, scores, strict=True)):
                sums = at.fmul(query[0], lanes[0])
                for mine, lane in zip(query[1:], lanes[1:], strict=True):
                    sums = code.multiply_add(mine, lane, sums)
                value = self._scaled(code.horizontal_sum(sums), keys[1], loop.index)
                code.store_float32(value, code.address(place, loop.index, 4))
                is_larger = at.fcmp_ordered(">", value, loop.values[number])
                loop.values[number] = at.select(is_larger, value, loop.values[number])
        return loop.values

    def _build_exponentials(
        self, scores: ir.Value, count: ir.Value, rounded_up: ir.Value, most: ir.Value
    ) -> None:
        code = self.code
        with code.for_each(rounded_up, first=count) as slot:
            code.store_float32(self.lowest, code.address(scores, slot, 4))
        with code.for_each(rounded_up, code.vector_floats) as slot:
            where = code.address(scores, slot, 4)
            shifted = code.ir_builder.fsub(code.load_float32(where), most)
            code.store_float32(code.exp(shifted), where)

    def _build_weighted_sums(
        self,
        values: tuple[ir.Value, ir.Value | None],
        count: ir.Value,
        weights: list[ir.Value],
    ) -> list[tuple[ir.Value, list[ir.Value]]]:
        """For each query, return the sum of its weights, and the weighted sum of the values."""
        code, size = self.code, self.vectors_per_head + 1
        nothing = [FLOAT(0.0), *([code.zeros] * self.vectors_per_head)]
        with code.loop(count, 1, nothing * self.heads_at_once) as loop:
            lanes = self._load_slot(values[0], loop.index)
            for first, place in zip(range(0, len(loop.values), size), weights, strict=True):
                weight = code.load_float(place, loop.index)
                spread = code.broadcast(self._scaled(weight, values[1], loop.index))
                loop.values[first] = code.ir_builder.fadd(loop.values[first], weight)
                for each, lane in enumerate(lanes, first + 1):
                    loop.values[each] = code.multiply_add(spread, lane, loop.values[each])
        sums = loop.values
        return [(sums[at], sums[at + 1 : at + size]) for at in range(0, len(sums), size)]


def silu_and_mul(dtype: str, processor: Processor) -> ir.Module:
    """Build out [T, F] = silu(gate) x up; silu(x) is x e^-88 below -88, where exp is clamped.

    Fields: gate and up [T, 2 F], out; T, F.
    """
    code = FunctionBuilder("activate", dtype, processor)
    at = code.ir_builder
    gate_up, out = code.field(0), code.field(1)
    tokens, size = code.field(2, I64), code.field(3, I64)
    one = code.constants["one"]
    with code.for_each(tokens) as token:
        start = at.mul(token, size)
        with code.for_each(size, code.vector_floats) as index:
            place = at.add(at.mul(start, I64(2)), index)
            gate = code.load(gate_up, place)
            up = code.load(gate_up, at.add(place, size))
            silu = at.fdiv(gate, at.fadd(one, code.exp(at.fsub(code.zeros, gate))))
            value = at.fmul(code.round_to_dtype(silu), up)
            code.store(value, out, at.add(start, index))
    return code.finish()
