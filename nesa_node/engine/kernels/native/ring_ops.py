"""Arithmetic of polynomials modulo X^N + 1 and primes p below 2^28 (`privacy/ring.py`).

Residues are uint32, rows of N. What is multiplied by a constant w comes with
w' = floor(2^32 w / p): x w - floor(x w' / 2^32) p is below 2 p for any x (Shoup; Harvey 2014,
section 3). Each prime has a row of constants, its table: `TABLE_HEADER` numbers, then N times w and
N times w' of the transform, and as many of its inverse.

P primes, N degree, D digits, B rotations from step to step, T numbers of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from nesa_node.engine.kernels.native.job_builder import (
    I32,
    I64,
    POINTER,
    JobBuilder,
    Processor,
)

TABLE_HEADER = 16
ONE_QUOTIENT, DEGREE_INVERSE, WORD, NEGATIVE_INVERSE = 1, 2, 4, 6
"""Places in the header, which begins with p: w' of w = 1; w and w' of 1 / N, then of 2^32; -1 / p
modulo 2^32."""
TILE = 64
"""Numbers of each diagonal that lie side by side, so that memory is read in order."""
PREFETCH_BYTES = 4096


def ring_values(degree: int, processor: Processor) -> ir.Module:
    """Build the transform of rows [K, P, N] from coefficients to values, in place.

    Fields: rows; K P; P; tables.
    """
    code = _RingBuilder("ring_values", degree, processor)
    lanes = code.vector_floats
    with code.for_each_row() as row:
        table = row.table
        size = degree // 2
        while size > lanes:
            code.combine(row, size, code.forward)
            size //= 2
        with code.for_each(I64(degree // (2 * lanes))) as chunk:
            pair = code.load_pair(row.start, chunk)
            size = lanes
            while size:
                pair = pair.arrange(size)
                factor = code.factors_of_chunk(table, chunk, size)
                pair = pair.replace(*code.forward(*pair.values, factor, table))
                size //= 2
            pair = pair.arrange(lanes)
            for half, value in enumerate(pair.values):
                reduced = code.below(code.below(value, table.twice), table.prime)
                code.store_half(reduced, row.start, chunk, half)
    return code.finish()


def ring_coefficients(degree: int, processor: Processor) -> ir.Module:
    """Build the transform of rows [K, P, N] from values to coefficients, in place.

    Fields: rows; K P; P; tables.
    """
    code = _RingBuilder("ring_coefficients", degree, processor)
    lanes = code.vector_floats
    with code.for_each_row(inverse=True) as row:
        table = row.table
        with code.for_each(I64(degree // (2 * lanes))) as chunk:
            pair = code.load_pair(row.start, chunk)
            size = 1
            while size <= lanes:
                pair = pair.arrange(size)
                factor = code.factors_of_chunk(table, chunk, size)
                pair = pair.replace(*code.backward(*pair.values, factor, table))
                size *= 2
            for half, value in enumerate(pair.values):
                code.store_half(value, row.start, chunk, half)
        while size < degree:
            code.combine(row, size, code.backward)
            size *= 2
        scale = table.constant(DEGREE_INVERSE)
        with code.for_each(I64(degree), lanes) as place:
            value = code.multiply(code.load(row.start, place), scale, table)
            code.store(code.below(value, table.prime), row.start, place)
    return code.finish()


def ring_lift(degree: int, processor: Processor) -> ir.Module:
    """Build out [D, P, N]: residues modulo all primes of the centered integers [D, N] that are
    given modulo the first D primes.

    Fields: given; D; out; P; tables.
    """
    code = _RingBuilder("ring_lift", degree, processor)
    at, lanes = code.ir_builder, code.vector_floats
    given, digits, out = code.field(0), code.field(1, I64), code.field(2)
    primes, tables = code.field(3, I64), code.field(4)
    with code.for_each_of_thread(at.mul(digits, primes)) as index:
        digit, prime = at.sdiv(index, primes), at.srem(index, primes)
        source, target = code.table(tables, digit), code.table(tables, prime)
        lift = code.lifting(source, target)
        row, to = (
            code.address(*each)
            for each in ((given, at.mul(digit, I64(degree))), (out, at.mul(index, I64(degree))))
        )
        with code.for_each(I64(degree), lanes) as place:
            code.store(lift(code.load(row, place)), to, place)
    return code.finish()


def ring_divide(degree: int, processor: Processor) -> ir.Module:
    """Build out [K, P - 1, N], the nearest integers to [K, P, N] by the last prime.

    Fields: given; K; out; P; tables; w and w' [P - 1, 2] of the last prime's inverse.
    """
    code = _RingBuilder("ring_divide", degree, processor)
    at, lanes = code.ir_builder, code.vector_floats
    given, count, out = code.field(0), code.field(1, I64), code.field(2)
    primes, tables, inverses = code.field(3, I64), code.field(4), code.field(5)
    fewer = at.sub(primes, I64(1))
    with code.for_each_of_thread(at.mul(count, fewer)) as index:
        which, prime = at.sdiv(index, fewer), at.srem(index, fewer)
        table = code.table(tables, prime)
        lift = code.lifting(code.table(tables, fewer), table)
        first = at.mul(which, primes)
        row = code.address(given, at.mul(at.add(first, prime), I64(degree)))
        last = code.address(given, at.mul(at.add(first, fewer), I64(degree)))
        to = code.address(out, at.mul(index, I64(degree)))
        inverse = code.load_factor(inverses, at.mul(prime, I64(2)), 1)
        with code.for_each(I64(degree), lanes) as place:
            rest = lift(code.load(last, place))
            difference = at.sub(at.add(code.load(row, place), table.prime), rest)
            value = code.multiply(difference, inverse, table)
            code.store(code.below(value, table.prime), to, place)
    return code.finish()


def ring_rotate(degree: int, accumulates: int, processor: Processor) -> ir.Module:
    """Build out [2, P, N] = sum of digits [D, P, N], in another order of values, times keys
    [D, 2, P, N]; to the first polynomial `added` [P, N] is added in that order, too.

    Fields: digits; D; order [N] (int32); keys; added; out; bytes from one polynomial of `out` to
    the next; bytes from one tile of `out` to the next; P; tables. Adds to `out` if `accumulates`.
    """
    code = _RingBuilder("ring_rotate", degree, processor)
    at, lanes = code.ir_builder, code.vector_floats
    digits, count, order, keys, added, out = (
        code.field(index, I64 if index == 1 else POINTER) for index in range(6)
    )
    polynomial_bytes, tile_bytes, primes = (code.field(index, I64) for index in (6, 7, 8))
    tables = code.field(9)
    with code.for_each_of_thread(at.mul(primes, I64(degree // TILE))) as tile:
        first = at.mul(tile, I64(TILE))
        prime = at.sdiv(first, I64(degree))
        table, in_row = code.table(tables, prime), at.srem(first, I64(degree))
        row_start = at.mul(prime, I64(degree))
        polynomial = at.mul(primes, I64(degree))
        base = code.address(out, at.mul(tile, tile_bytes), 1)
        for offset in range(0, TILE, lanes):
            places = code.load(order, at.add(in_row, I64(offset)))
            here = at.add(first, I64(offset))
            with code.loop(count, 1, [code.wide_zeros] * 4) as loop:
                source = at.add(at.mul(loop.index, polynomial), row_start)
                values = code.gather(code.address(digits, source), places)
                key = at.add(at.mul(at.mul(loop.index, I64(2)), polynomial), here)
                for part in range(2):
                    factor = code.load(keys, at.add(key, at.mul(polynomial, I64(part))))
                    sums = loop.values[2 * part : 2 * part + 2]
                    loop.values[2 * part : 2 * part + 2] = code.multiply_wide(values, factor, sums)
            for part in range(2):
                value = code.reduce_wide(loop.values[2 * part : 2 * part + 2], table)
                if not part:
                    moved = code.gather(code.address(added, row_start), places)
                    value = code.below(at.add(value, moved), table.prime)
                to = code.address(base, at.mul(polynomial_bytes, I64(part)), 1)
                if accumulates:
                    value = code.below(at.add(value, code.load(to, I64(offset))), table.prime)
                code.store(value, to, I64(offset))
    return code.finish()


def ring_multiply_sum(degree: int, processor: Processor) -> ir.Module:
    """Build out [G, 2, P, N] += sums of up to B diagonals times B vectors of two polynomials.

    Diagonal g B + b is multiplied with vector b. Fields: diagonals [tiles, count, T]; count;
    vectors [tiles, B, 2, T]; B; out; P; tables.
    """
    code = _RingBuilder("ring_multiply_sum", degree, processor)
    at, lanes = code.ir_builder, code.vector_floats
    diagonals, count, vectors, steps, out = (
        code.field(index, I64 if index in (1, 3) else POINTER) for index in range(5)
    )
    primes, tables = code.field(5, I64), code.field(6)
    together = (4 if code.processor.num_vector_registers >= 32 else 2) * lanes
    together = min(together, TILE)
    polynomial = at.mul(primes, I64(degree))
    with code.for_each_of_thread(at.mul(primes, I64(degree // TILE))) as tile:
        table = code.table(tables, at.sdiv(at.mul(tile, I64(TILE)), I64(degree)))
        weights = code.address(diagonals, at.mul(at.mul(tile, count), I64(TILE)))
        given = code.address(vectors, at.mul(at.mul(tile, steps), I64(2 * TILE)))
        target = code.address(out, at.mul(tile, I64(TILE)))
        with code.for_each_range(count, steps) as (number, first, end):
            start = code.address(weights, at.mul(first, I64(TILE)))
            result = code.address(target, at.mul(at.mul(number, I64(2)), polynomial))
            for offset in range(0, TILE, together):
                places = range(offset, offset + together, lanes)
                sums = [code.wide_zeros] * (4 * len(places))
                with code.loop(at.sub(end, first), 1, sums) as loop:
                    line = code.address(start, at.mul(loop.index, I64(TILE)))
                    pair = code.address(given, at.mul(loop.index, I64(2 * TILE)))
                    code.prefetch(line, PREFETCH_BYTES + 4 * offset)
                    for index, place in enumerate(places):
                        weight = code.load(line, I64(place))
                        for part in range(2):
                            value = code.load(pair, I64(part * TILE + place))
                            mine = slice(4 * index + 2 * part, 4 * index + 2 * part + 2)
                            loop.values[mine] = code.multiply_wide(value, weight, loop.values[mine])
                for index, place in enumerate(places):
                    for part in range(2):
                        first_sum = 4 * index + 2 * part
                        value = code.reduce_wide(loop.values[first_sum : first_sum + 2], table)
                        to = code.address(result, at.mul(polynomial, I64(part)))
                        value = code.below(at.add(value, code.load(to, I64(place))), table.prime)
                        code.store(value, to, I64(place))
    return code.finish()


@dataclass(frozen=True)
class _Factor:
    """w and w' in all lanes, or those of each lane."""

    value: ir.Value
    quotient: ir.Value


@dataclass(frozen=True)
class _PrimeTable:
    """Constants of a prime, in all lanes, and where its factors lie."""

    code: _RingBuilder
    start: ir.Value
    factors: ir.Value
    prime: ir.Value
    twice: ir.Value
    scalar: ir.Value
    """p as a number of 64 bits."""

    def constant(self, place: int) -> _Factor:
        return self.code.load_factor(self.start, I64(place), 1)

    def factor(self, index: ir.Value) -> _Factor:
        """That of the transform with this index, in all lanes."""
        return self.code.load_factor(self.factors, index, self.code.degree)

    @property
    def one_quotient(self) -> ir.Value:
        return self.code.load_all_lanes(self.start, I64(ONE_QUOTIENT))

    @property
    def negative_inverse(self) -> ir.Value:
        return self.code.load_all_lanes(self.start, I64(NEGATIVE_INVERSE))


_Butterfly = Callable[[ir.Value, ir.Value, _Factor, _PrimeTable], tuple[ir.Value, ir.Value]]
"""Makes two numbers of two, by a factor and its prime."""


@dataclass(frozen=True)
class _Row:
    start: ir.Value
    table: _PrimeTable


@dataclass(frozen=True)
class _Pair:
    """Two vectors of 2 V neighbouring numbers; lane `index` has the number at `places[index]`."""

    code: _RingBuilder
    values: tuple[ir.Value, ir.Value]
    places: tuple[int, ...]

    def arrange(self, size: int) -> _Pair:
        """With numbers that are `size` apart in the same lane, the lower one in the first."""
        lanes = len(self.places) // 2
        lower = [lane // size * 2 * size + lane % size for lane in range(lanes)]
        wanted = (*lower, *(place + size for place in lower))
        if wanted == self.places:
            return self
        at = self.code.ir_builder
        halves = []
        for half in (wanted[:lanes], wanted[lanes:]):
            mask = ir.Constant(self.code.vector, [self.places.index(place) for place in half])
            halves.append(at.shuffle_vector(*self.values, mask))
        return _Pair(self.code, (halves[0], halves[1]), wanted)

    def replace(self, first: ir.Value, second: ir.Value) -> _Pair:
        return _Pair(self.code, (first, second), self.places)


class _RingBuilder(JobBuilder):
    """Builder of a function over rows of `degree` residues."""

    def __init__(self, name: str, degree: int, processor: Processor) -> None:
        super().__init__(name, 4, processor)
        self.degree = degree
        self.vector = self._vector_of(I32)
        self.wide = ir.VectorType(I64, self.vector_floats // 2)

    @contextmanager
    def for_each_row(self, *, inverse: bool = False) -> Iterator[_Row]:
        """Loop over this thread's rows of those that the first four fields tell."""
        at = self.ir_builder
        rows, count, primes, tables = (
            self.field(index, POINTER if index in (0, 3) else I64) for index in range(4)
        )
        with self.for_each_of_thread(count) as index:
            table = self.table(tables, at.srem(index, primes), inverse=inverse)
            yield _Row(self.address(rows, at.mul(index, I64(self.degree))), table)

    @contextmanager
    def for_each_range(
        self, count: ir.Value, size: ir.Value
    ) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
        """Loop over ranges of `size` of `count`; yields number, first and end of each."""
        at = self.ir_builder
        with self.for_each(self._ceil_div(count, size)) as number:
            first = at.mul(number, size)
            end = at.add(first, size)
            yield number, first, at.select(at.icmp_signed("<", end, count), end, count)

    def table(self, tables: ir.Value, prime: ir.Value, *, inverse: bool = False) -> _PrimeTable:
        at = self.ir_builder
        start = self.address(tables, at.mul(prime, I64(TABLE_HEADER + 4 * self.degree)))
        factors = self.address(start, TABLE_HEADER + (2 * self.degree if inverse else 0))
        number = at.load(start, align=4, typ=I32)
        all_lanes = self.broadcast(number)
        return _PrimeTable(
            self, start, factors, all_lanes, at.add(all_lanes, all_lanes), at.zext(number, I64)
        )

    def load(self, base: ir.Value, index: ir.Value) -> ir.Value:
        return self.ir_builder.load(self.address(base, index), align=4, typ=self.vector)

    def store(self, value: ir.Value, base: ir.Value, index: ir.Value) -> None:
        self.ir_builder.store(value, self.address(base, index), align=4)

    def load_pair(self, row: ir.Value, chunk: ir.Value) -> _Pair:
        at, lanes = self.ir_builder, self.vector_floats
        first = at.mul(chunk, I64(2 * lanes))
        values = self.load(row, first), self.load(row, at.add(first, I64(lanes)))
        return _Pair(self, values, tuple(range(2 * lanes)))

    def store_half(self, value: ir.Value, row: ir.Value, chunk: ir.Value, half: int) -> None:
        at, lanes = self.ir_builder, self.vector_floats
        place = at.add(at.mul(chunk, I64(2 * lanes)), I64(half * lanes))
        self.store(value, row, place)

    def load_all_lanes(self, base: ir.Value, index: ir.Value) -> ir.Value:
        at = self.ir_builder
        return self.broadcast(at.load(self.address(base, index), align=4, typ=I32))

    def load_factor(self, base: ir.Value, index: ir.Value, apart: int) -> _Factor:
        """A factor in all lanes; w' lies `apart` numbers behind w."""
        after = self.ir_builder.add(index, I64(apart))
        return _Factor(self.load_all_lanes(base, index), self.load_all_lanes(base, after))

    def factors_of_chunk(self, table: _PrimeTable, chunk: ir.Value, size: int) -> _Factor:
        """Those of a chunk's pairs that are `size` apart, as `_Pair.arrange` puts them in lanes."""
        at, lanes = self.ir_builder, self.vector_floats
        count = lanes // size
        first = at.add(at.mul(chunk, I64(count)), I64(self.degree // (2 * size)))
        if count == 1:
            return table.factor(first)
        kind = ir.VectorType(I32, count)
        mask = ir.Constant(self.vector, [lane // size for lane in range(lanes)])

        def spread(place: ir.Value) -> ir.Value:
            few = at.load(self.address(table.factors, place), align=4, typ=kind)
            return at.shuffle_vector(few, few, mask)

        return _Factor(spread(first), spread(at.add(first, I64(self.degree))))

    def combine(self, row: _Row, size: int, butterfly: _Butterfly) -> None:
        """Combine all numbers of a row that are `size` apart, at least a vector."""
        at, groups = self.ir_builder, self.degree // (2 * size)
        with self.for_each(I64(groups)) as group:
            factor = row.table.factor(at.add(group, I64(groups)))
            first = at.mul(group, I64(2 * size))
            with self.for_each(I64(size), self.vector_floats) as step:
                places = [at.add(at.add(first, step), I64(offset)) for offset in (0, size)]
                upper, lower = (self.load(row.start, place) for place in places)
                combined = butterfly(upper, lower, factor, row.table)
                for place, value in zip(places, combined, strict=True):
                    self.store(value, row.start, place)

    def below(self, value: ir.Value, bound: ir.Value) -> ir.Value:
        """A number below twice `bound`, or what is left of it behind `bound`."""
        at = self.ir_builder
        less = at.sub(value, bound)
        return at.select(at.icmp_unsigned("<", less, value), less, value)

    def forward(
        self, upper: ir.Value, lower: ir.Value, factor: _Factor, table: _PrimeTable
    ) -> tuple[ir.Value, ir.Value]:
        """Butterfly of Cooley and Tukey, of numbers below 4 p, and into such."""
        at = self.ir_builder
        upper = self.below(upper, table.twice)
        product = self.multiply(lower, factor, table)
        return at.add(upper, product), at.add(at.sub(upper, product), table.twice)

    def backward(
        self, upper: ir.Value, lower: ir.Value, factor: _Factor, table: _PrimeTable
    ) -> tuple[ir.Value, ir.Value]:
        """Butterfly of Gentleman and Sande, of numbers below 2 p, and into such."""
        at = self.ir_builder
        difference = at.add(at.sub(upper, lower), table.twice)
        total = self.below(at.add(upper, lower), table.twice)
        return total, self.multiply(difference, factor, table)

    def multiply(self, value: ir.Value, factor: _Factor, table: _PrimeTable) -> ir.Value:
        """Product modulo p, below 2 p."""
        at = self.ir_builder
        quotient = self._multiply_high(value, factor.quotient)
        return at.sub(at.mul(value, factor.value), at.mul(quotient, table.prime))

    def lifting(self, source: _PrimeTable, target: _PrimeTable) -> Callable[[ir.Value], ir.Value]:
        """Conversion of residues modulo one prime, as centered integers, to another prime."""
        at = self.ir_builder
        half = at.lshr(source.prime, self._fill(self.vector, 1))
        above = at.mul(self._ceil_div(source.scalar, target.scalar), target.scalar)
        shift = self.broadcast(at.trunc(at.sub(above, source.scalar), I32))
        one = target.one_quotient

        def lift(value: ir.Value) -> ir.Value:
            is_negative = at.icmp_unsigned(">", value, half)
            moved = at.select(is_negative, at.add(value, shift), value)
            quotient = self._multiply_high(moved, one)
            return self.below(at.sub(moved, at.mul(quotient, target.prime)), target.prime)

        return lift

    @property
    def wide_zeros(self) -> ir.Value:
        return ir.Constant(self.wide, [0] * (self.vector_floats // 2))

    def multiply_wide(
        self, first: ir.Value, second: ir.Value, sums: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Add products of 64 bits to the sums of even and of odd lanes."""
        at = self.ir_builder
        pairs = zip(self._even_odd(first), self._even_odd(second), sums, strict=True)
        return [at.add(total, at.mul(a, b)) for a, b, total in pairs]

    def reduce_wide(self, sums: Sequence[ir.Value], table: _PrimeTable) -> ir.Value:
        """Sums of even and odd lanes, below 2^63, modulo p (Montgomery 1985)."""
        at = self.ir_builder
        inverse, _ = self._even_odd(table.negative_inverse)
        prime, _ = self._even_odd(table.prime)
        halves = []
        for total in sums:
            factor = self._low(at.mul(self._low(total), inverse))
            halves.append(at.lshr(at.add(total, at.mul(factor, prime)), self._shift))
        joined = at.or_(halves[0], at.shl(halves[1], self._shift))
        value = self.multiply(at.bitcast(joined, self.vector), table.constant(WORD), table)
        return self.below(value, table.prime)

    def gather(self, base: ir.Value, places: ir.Value) -> ir.Value:
        """Numbers at `places` behind `base`."""
        at, lanes = self.ir_builder, self.vector_floats
        many = ir.VectorType(I64, lanes)
        offsets = at.shl(at.zext(places, many), ir.Constant(many, [2] * lanes))
        start = ir.Constant(many, ir.Undefined)
        start = at.insert_element(start, at.ptrtoint(base, I64), I32(0))
        start = at.shuffle_vector(start, start, ir.Constant(self.vector, [0] * lanes))
        addresses = at.inttoptr(at.add(start, offsets), ir.VectorType(POINTER, lanes))
        kind = ir.VectorType(ir.IntType(1), lanes)
        return self.call_intrinsic(
            f"llvm.masked.gather.v{lanes}i32.v{lanes}p0",
            self.vector,
            addresses,
            I32(4),
            ir.Constant(kind, [1] * lanes),
            ir.Constant(self.vector, [0] * lanes),
        )

    def _multiply_high(self, first: ir.Value, second: ir.Value) -> ir.Value:
        at = self.ir_builder
        even, odd = (
            at.mul(a, b) for a, b in zip(self._even_odd(first), self._even_odd(second), strict=True)
        )
        upper = ir.Constant(self.wide, [0xFFFFFFFF00000000] * (self.vector_floats // 2))
        return at.bitcast(at.or_(at.lshr(even, self._shift), at.and_(odd, upper)), self.vector)

    def _even_odd(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Even and odd lanes, as numbers of 64 bits."""
        at = self.ir_builder
        wide = at.bitcast(value, self.wide)
        return self._low(wide), at.lshr(wide, self._shift)

    def _low(self, wide: ir.Value) -> ir.Value:
        lower = ir.Constant(self.wide, [0xFFFFFFFF] * (self.vector_floats // 2))
        return self.ir_builder.and_(wide, lower)

    @property
    def _shift(self) -> ir.Value:
        return ir.Constant(self.wide, [32] * (self.vector_floats // 2))
