"""Kernels of a Llama layer between its products, for tokens of any rows.

Results are rounded to the dtype where transformers rounds them. T tokens, D hidden, F inner size, Q
query heads, H key/value heads, G = Q / H, E head size, P positions, S slots of the cache's pool. D,
F and E / 2 must be multiples of the vector length.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import FLOAT, FunctionBuilder
from nesa_node.engine.kernels.native.job_builder import I64, Processor
from nesa_node.engine.kernels.native.matmul import CACHE_LINE_BYTES

PREFETCH_SLOTS = 16


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


def rope_and_store_kv(dtype: str, dim: int, processor: Processor) -> ir.Module:
    """Build RoPE: rotate queries in place, and store rotated keys, and values, in the cache.

    Fields: qkv [T, Q + 2 H, E], cosines [P, E], signed sines [P, E], keys [S, H, E], values [S, H,
    E], positions [T], slots [T] (int64); T, Q, H.
    """
    code = FunctionBuilder("rotate", dtype, processor)
    at, half = code.ir_builder, dim // 2
    qkv, cosines, sines, keys, values, positions, slots = (code.field(i) for i in range(7))
    tokens, queries, heads = (code.field(index, I64) for index in range(7, 10))
    all_heads = at.add(queries, at.mul(heads, I64(2)))

    def turn(source: ir.Value, target: ir.Value, position: ir.Value) -> None:
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
                code.store(turned, target, place)

    with code.for_each(tokens) as token:
        position = code.load_int64(positions, token)
        slot = at.mul(code.load_int64(slots, token), heads)
        first = at.mul(token, all_heads)

        def head(index: ir.Value) -> ir.Value:
            return code.address(qkv, at.mul(at.add(first, index), I64(dim)))

        def cached(side: ir.Value, index: ir.Value) -> ir.Value:
            return code.address(side, at.mul(at.add(slot, index), I64(dim)))

        with code.for_each(queries) as index:
            turn(head(index), head(index), position)
        with code.for_each(heads) as index:
            turn(head(at.add(queries, index)), cached(keys, index), position)
            source = head(at.add(at.add(queries, heads), index))
            for part in range(0, dim, code.vector_floats):
                value = code.load(source, part)
                code.store(value, cached(values, index), part)
    return code.finish()


def paged_attention(dtype: str, dim: int, group: int, processor: Processor) -> ir.Module:
    """Build attention of N of the tokens, each over a range of consecutive slots.

    Fields: qkv [T, Q + 2 H, E], keys [S, H, E], values [S, H, E], out [T, Q, E]; token indices [N],
    first slots [N], numbers of slots [N] (int64); scratch [threads, G, room] (float32); N, H, room
    (the largest number of slots, rounded up to the vector length); scale (float32).
    """
    code = FunctionBuilder("attend", dtype, processor)
    at = code.ir_builder
    which, firsts, counts, scratch = (code.field(index) for index in range(4, 8))
    chosen, heads, room = (code.field(index, I64) for index in range(8, 11))
    attention = _AttentionBuilder(code, dim, group, heads, room)
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
        self, code: FunctionBuilder, dim: int, group: int, heads: ir.Value, scratch_stride: ir.Value
    ) -> None:
        self.code, self.dim, self.group = code, dim, group
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
        base = at.mul(at.add(at.mul(first, self.heads), head), I64(self.dim))
        keys, values = (code.address(tensor, base) for tensor in (self.keys, self.values))
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
        most = self._build_scores(asked, keys, count, of_query)
        # Pad the last vector with -inf: exp of it adds nothing.
        rounded_up = at.and_(at.add(count, I64(code.vector_floats - 1)), I64(-code.vector_floats))
        for place, largest in zip(of_query, most, strict=True):
            self._build_exponentials(place, count, rounded_up, code.broadcast(largest))
        sums = self._build_weighted_sums(values, count, of_query)
        row = at.mul(token, queries)
        for index, (whole, lanes) in zip(self._query_indices(query), sums, strict=True):
            divisor = code.broadcast(whole)
            target = code.address(self.out, at.mul(at.add(row, index), I64(self.dim)))
            for part, lane in enumerate(lanes):
                code.store(at.fdiv(lane, divisor), target, part * code.vector_floats)

    def _query_indices(self, query: ir.Value) -> list[ir.Value]:
        return [self.code.ir_builder.add(query, I64(n)) for n in range(self.heads_at_once)]

    def _load_slot(self, side: ir.Value, slot: ir.Value) -> list[ir.Value]:
        """Load a head's vector of a slot; prefetch a later one, as hardware cannot."""
        code, at = self.code, self.code.ir_builder
        start = at.mul(slot, self.stride)
        later = code.address(side, at.add(start, at.mul(self.stride, I64(PREFETCH_SLOTS))))
        for line in range(0, self.dim * code.item_bytes, CACHE_LINE_BYTES):
            code.prefetch(later, line)
        return [
            code.load(side, at.add(start, I64(part)))
            for part in range(0, self.dim, code.vector_floats)
        ]

    def _build_scores(
        self,
        scaled_queries: list[list[ir.Value]],
        keys: ir.Value,
        count: ir.Value,
        scores: list[ir.Value],
    ) -> list[ir.Value]:
        """Store each query's scores of all slots; return the largest of each query."""
        code, at = self.code, self.code.ir_builder
        with code.loop(count, 1, [self.lowest] * self.heads_at_once) as loop:
            lanes = self._load_slot(keys, loop.index)
            for number, (query, place) in enumerate(zip(scaled_queries, scores, strict=True)):
                sums = at.fmul(query[0], lanes[0])
                for mine, lane in zip(query[1:], lanes[1:], strict=True):
                    sums = code.multiply_add(mine, lane, sums)
                value = code.horizontal_sum(sums)
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
        self, values: ir.Value, count: ir.Value, weights: list[ir.Value]
    ) -> list[tuple[ir.Value, list[ir.Value]]]:
        """For each query, return the sum of its weights, and the weighted sum of the values."""
        code, size = self.code, self.vectors_per_head + 1
        nothing = [FLOAT(0.0), *([code.zeros] * self.vectors_per_head)]
        with code.loop(count, 1, nothing * self.heads_at_once) as loop:
            lanes = self._load_slot(values, loop.index)
            for first, place in zip(range(0, len(loop.values), size), weights, strict=True):
                weight = code.load_float(place, loop.index)
                spread = code.broadcast(weight)
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
