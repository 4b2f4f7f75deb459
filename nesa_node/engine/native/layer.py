"""What a Llama layer computes between its products, for tokens of any rows.

Each result is rounded to the dtype where transformers rounds it. T tokens, D hidden, F inner size,
Q query heads, H key/value heads, G = Q / H, E head size, P positions, S slots of a cache's pool.
D, F and E / 2 must be multiples of a vector's lanes.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.native.code import FLOAT, I64, Code
from nesa_node.engine.native.processor import Processor


def add_and_norm(dtype: str, processor: Processor) -> ir.Module:
    """x [T, D] += added [T, D], in place; out [T, D] is its root mean square norm.

    Fields: x, added, weight [D], out; T, D; epsilon (float32).
    """
    code = Code("add_and_norm", dtype, processor)
    at = code.at
    x, added, weight, out = (code.pointer(index) for index in range(4))
    tokens, size, epsilon = code.number(4), code.number(5), code.real(6)

    def of_token(token: ir.Value) -> None:
        start = at.mul(token, size)

        def add(index: ir.Value, squares: list[ir.Value]) -> list[ir.Value]:
            place = at.add(start, index)
            where = code.address(x, place)
            value = at.fadd(code.load(where), code.load(code.address(added, place)))
            value = code.store_rounded(value, where)
            return [code.multiply_add(value, value, squares[0])]

        [squares] = code.loop(I64(0), size, code.floats, [code.zeros], add)
        mean = at.fdiv(code.total(squares), at.sitofp(size, FLOAT))
        root = code.square_root(at.fadd(mean, epsilon))
        scale = code.spread(at.fdiv(at.extract_element(code.constant("one"), I64(0)), root))

        def scaled(index: ir.Value) -> None:
            place = at.add(start, index)
            value = code.rounded(at.fmul(code.load(code.address(x, place)), scale))
            value = at.fmul(value, code.load(code.address(weight, index)))
            code.store(value, code.address(out, place))

        code.each(I64(0), size, code.floats, scaled)

    code.each(I64(0), tokens, 1, of_token)
    return code.return_()


def rotate(dtype: str, dim: int, processor: Processor) -> ir.Module:
    """Turn queries in place; put turned keys, and values, where they belong in the cache.

    Fields: qkv [T, Q + 2 H, E], cosines [P, E], signed sines [P, E], keys [S, H, E],
    values [S, H, E], positions [T], slots [T] (int64); T, Q, H.
    """
    code = Code("rotate", dtype, processor)
    at, half = code.at, dim // 2
    qkv, cosines, sines, keys, values, positions, slots = (code.pointer(i) for i in range(7))
    tokens, queries, heads = (code.number(index) for index in range(7, 10))
    all_heads = at.add(queries, at.mul(heads, I64(2)))

    def turn(source: ir.Value, target: ir.Value, position: ir.Value) -> None:
        for part in range(0, half, code.floats):
            places = [I64(part), I64(part + half)]
            before = [code.load(code.address(source, place)) for place in places]
            for place, value, other in zip(places, before, reversed(before), strict=True):
                angle = at.add(at.mul(position, I64(dim)), place)
                cosine = code.load(code.address(cosines, angle))
                sine = code.load(code.address(sines, angle))
                turned = at.fadd(
                    code.rounded(at.fmul(value, cosine)), code.rounded(at.fmul(other, sine))
                )
                code.store(turned, code.address(target, place))

    def of_token(token: ir.Value) -> None:
        position = code.load_number(positions, token)
        slot = at.mul(code.load_number(slots, token), heads)
        first = at.mul(token, all_heads)

        def head(index: ir.Value) -> ir.Value:
            return code.address(qkv, at.mul(at.add(first, index), I64(dim)))

        def cached(side: ir.Value, index: ir.Value) -> ir.Value:
            return code.address(side, at.mul(at.add(slot, index), I64(dim)))

        code.each(I64(0), queries, 1, lambda index: turn(head(index), head(index), position))

        def put(index: ir.Value) -> None:
            turn(head(at.add(queries, index)), cached(keys, index), position)
            source = head(at.add(at.add(queries, heads), index))
            for part in range(0, dim, code.floats):
                value = code.load(code.address(source, I64(part)))
                code.store(value, code.address(cached(values, index), I64(part)))

        code.each(I64(0), heads, 1, put)

    code.each(I64(0), tokens, 1, of_token)
    return code.return_()


def attend(dtype: str, dim: int, group: int, processor: Processor) -> ir.Module:
    """Attention of each token over slots that follow one another.

    Fields: qkv [T, Q + 2 H, E], keys [S, H, E], values [S, H, E], out [T, Q, E], first slots [T],
    counts of slots [T] (int64), scratch [threads, room] (float32); T, H, room (the largest count
    rounded up to a vector's lanes); scale (float32).
    """
    code = Code("attend", dtype, processor)
    at, parts = code.at, dim // code.floats
    qkv, keys, values, out, firsts, counts, scratch = (code.pointer(index) for index in range(7))
    tokens, heads, room = (code.number(index) for index in range(7, 10))
    scale = code.spread(code.real(10))
    queries = at.mul(heads, I64(group))
    start, end, thread = code.share(at.mul(tokens, queries))
    scores = code.address(scratch, at.mul(thread, room), 4)
    lowest = at.extract_element(code.constant("lowest"), I64(0))

    def of_query(item: ir.Value) -> None:
        token, query = at.sdiv(item, queries), at.srem(item, queries)
        head, all_heads = at.sdiv(query, I64(group)), at.add(queries, at.mul(heads, I64(2)))
        count = code.load_number(counts, token)
        base = at.add(at.mul(code.load_number(firsts, token), heads), head)
        stride = at.mul(heads, I64(dim))
        source = code.address(qkv, at.mul(at.add(at.mul(token, all_heads), query), I64(dim)))
        asked = [
            at.fmul(code.load(code.address(source, I64(part * code.floats))), scale)
            for part in range(parts)
        ]

        def side(tensor: ir.Value, slot: ir.Value, part: int) -> ir.Value:
            place = at.add(at.mul(base, I64(dim)), at.mul(slot, stride))
            return code.load(code.address(tensor, at.add(place, I64(part * code.floats))))

        def score(slot: ir.Value, most: list[ir.Value]) -> list[ir.Value]:
            sums = code.zeros
            for part in range(parts):
                sums = code.multiply_add(asked[part], side(keys, slot, part), sums)
            value = code.total(sums)
            code.store_wide(value, code.address(scores, slot, 4))
            return [code.largest(value, most[0])]

        [most] = code.loop(I64(0), count, 1, [lowest], score)
        spread_most = code.spread(most)
        # The last vector is filled up with what counts nothing.
        rounded_up = at.and_(at.add(count, I64(code.floats - 1)), I64(-code.floats))
        code.each(
            count,
            rounded_up,
            1,
            lambda slot: code.store_wide(lowest, code.address(scores, slot, 4)),
        )

        def exponential(slot: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            where = code.address(scores, slot, 4)
            value = code.exp(at.fsub(code.load_wide(where), spread_most))
            code.store_wide(value, where)
            return []

        code.loop(I64(0), rounded_up, code.floats, [], exponential)

        def weigh(slot: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            weight = code.load_float(code.address(scores, slot, 4))
            lanes = code.spread(weight)
            weighed = [
                code.multiply_add(lanes, side(values, slot, part), sums[part])
                for part in range(parts)
            ]
            return [*weighed, at.fadd(sums[parts], weight)]

        *sums, whole = code.loop(I64(0), count, 1, [*([code.zeros] * parts), FLOAT(0.0)], weigh)
        divisor = code.spread(whole)
        target = code.address(out, at.mul(item, I64(dim)))
        for part, value in enumerate(sums):
            code.store(at.fdiv(value, divisor), code.address(target, I64(part * code.floats)))

    code.each(start, end, 1, of_query)
    return code.return_()


def activate(dtype: str, processor: Processor) -> ir.Module:
    """out [T, F] = silu(gate) x up. Below -88, where exp ends, silu(x) is x e^-88.

    Fields: gate and up [T, 2 F], out; T, F.
    """
    code = Code("activate", dtype, processor)
    at = code.at
    gate_up, out = code.pointer(0), code.pointer(1)
    tokens, size = code.number(2), code.number(3)
    one = code.constant("one")

    def of_token(token: ir.Value) -> None:
        start = at.mul(token, size)

        def gated(index: ir.Value) -> None:
            place = at.add(at.mul(start, I64(2)), index)
            gate = code.load(code.address(gate_up, place))
            up = code.load(code.address(gate_up, at.add(place, size)))
            silu = at.fdiv(gate, at.fadd(one, code.exp(at.fsub(code.zeros, gate))))
            value = at.fmul(code.rounded(silu), up)
            code.store(value, code.address(out, at.add(start, index)))

        code.each(I64(0), size, code.floats, gated)

    code.each(I64(0), tokens, 1, of_token)
    return code.return_()
