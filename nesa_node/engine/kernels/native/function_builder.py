"""Builder of a function `void name(int64_t *job)` in LLVM IR.

A job's fields have 8 bytes each, of any type. The first three are OpenMP's functions
`omp_get_thread_num` and `omp_get_num_threads` (0 on a single thread), and the address of
`CONSTANTS`, since position-independent code has no data of its own. Everything is computed in
float32. Tensors are float32 or bfloat16; stores to bfloat16 round to nearest, ties to even, and
keep NaN.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir


@dataclass(frozen=True)
class Processor:
    """LLVM's name and features of a processor, and its vector registers."""

    name: str
    features: str
    num_vector_registers: int
    vector_floats: int
    """Floats per register."""

    @classmethod
    def of_host(cls) -> Processor:
        features = llvm.get_host_cpu_features()
        registers, floats = 16, 4
        if features.get("avx512f"):
            registers, floats = 32, 16
        elif features.get("avx2"):
            floats = 8
        elif features.get("neon"):
            registers = 32
        return cls(llvm.get_host_cpu_name(), features.flatten(), registers, floats)


BYTE, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ZERO = I64(0)
FLOAT, POINTER, VOID = ir.FloatType(), ir.PointerType(), ir.VoidType()
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
NUM_HEADER_FIELDS = 3
THREAD_NUM_FIELD, NUM_THREADS_FIELD, CONSTANTS_FIELD = range(-NUM_HEADER_FIELDS, 0)
PREFETCH_L2_LOCALITY, DATA_CACHE = 2, 1

# exp(x) = 2^n exp(r) with r = x - n ln 2; the polynomial is that of Cephes' expf, within 2 ulp.
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
CONSTANTS = {
    "one": 1.0,
    "lowest": float("-inf"),
    "least": -87.0,
    "most": 88.0,
    "log2(e)": 1.44269504088896341,
    "ln(2), above": -0.693359375,
    "ln(2), below": 2.12194440e-4,
    **{f"exp {power}": factor for power, factor in enumerate(_EXP)},
}
"""Constants in float32, in memory order."""
INT_CONSTANTS = {
    "half": 0x7FFF,
    "rounds up": 0x8000,
    "odd": 1,
    "nan": 0x7FC00000,
    "upper half": -0x10000,
}
"""Constants in int32, stored after `CONSTANTS`."""
NUM_TILES, TILE_ROWS, TILE_ROW_BYTES = 8, 16, 64
TILE_SHAPES = struct.pack(
    "<B15x16H16B", 1, *[TILE_ROW_BYTES] * NUM_TILES, *[0] * 8, *[TILE_ROWS] * NUM_TILES, *[0] * 8
)
"""AMX tile configuration (`ldtilecfg`) with tiles of maximum size, stored after `INT_CONSTANTS`."""


def encode_constants() -> bytes:
    """Return the constants' memory, to which the third field points."""
    numbers = struct.pack(
        f"<{len(CONSTANTS)}f{len(INT_CONSTANTS)}i", *CONSTANTS.values(), *INT_CONSTANTS.values()
    )
    return numbers + TILE_SHAPES


@dataclass
class CountedLoop:
    """Index and loop-carried values of a loop under construction."""

    index: ir.Value
    values: list[ir.Value]


class FunctionBuilder:
    """Builder of one function for one dtype."""

    def __init__(self, name: str, dtype: str, processor: Processor) -> None:
        self.name, self.dtype, self.processor = name, dtype, processor
        self.item_bytes = ITEM_BYTES[dtype]
        self.vector_floats = processor.vector_floats
        self.vector = ir.VectorType(FLOAT, self.vector_floats)
        self.module = ir.Module(name)
        kind = ir.FunctionType(VOID, [POINTER])
        self.function = ir.Function(self.module, kind, name=name)
        self.ir_builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.constants = self._load_constants()
        """Vectors filled with a constant."""

    def field(self, index: int, kind: ir.Type = POINTER) -> ir.Value:
        """Load field `index`; those of the header have negative numbers."""
        offset = I64(8 * (NUM_HEADER_FIELDS + index))
        place = self.ir_builder.gep(self.function.args[0], [offset], source_etype=BYTE)
        return self.ir_builder.load(place, typ=kind)

    @contextmanager
    def loop(
        self, end: ir.Value, step: int, values: Sequence[ir.Value], *, first: ir.Value = ZERO
    ) -> Iterator[CountedLoop]:
        """Loop from `first` (default 0) to `end`; the `with` block builds the body.

        Loop-carried values start as `values`; the body replaces those of the yielded object, which
        has the final ones behind the block.
        """
        at = self.ir_builder
        before = at.block
        inside, after = (self.function.append_basic_block(name) for name in ("loop", "after"))
        at.cbranch(at.icmp_signed("<", first, end), inside, after)
        at.position_at_end(inside)
        index = at.phi(I64)
        carried = [at.phi(value.type) for value in values]
        loop = CountedLoop(index, list(carried))
        yield loop
        following = at.add(index, I64(step))
        last = at.block
        at.cbranch(at.icmp_signed("<", following, end), inside, after)
        at.position_at_end(after)
        outcomes = [at.phi(value.type) for value in values]
        for phi, initial, result in zip(
            (index, *carried, *outcomes),
            (first, *values, *values),
            (following, *loop.values, *loop.values),
            strict=True,
        ):
            phi.add_incoming(initial, before)
            phi.add_incoming(result, last)
        loop.values = outcomes

    @contextmanager
    def for_each(
        self, end: ir.Value, step: int = 1, *, first: ir.Value = ZERO
    ) -> Iterator[ir.Value]:
        """Loop as `loop` does, without loop-carried values; yields the index."""
        with self.loop(end, step, (), first=first) as loop:
            yield loop.index

    @contextmanager
    def for_each_of_thread(self, count: ir.Value) -> Iterator[ir.Value]:
        """Loop over this thread's range of `count` items."""
        first, end, _ = self.thread_range(count)
        with self.for_each(end, first=first) as index:
            yield index

    @contextmanager
    def for_each_block(self, count: ir.Value, size: int) -> Iterator[ir.Value]:
        """Loop over the starts of this thread's blocks of `size` items.

        The last block starts early enough to be a whole one, and recomputes items.
        """
        at = self.ir_builder
        first, end, _ = self.thread_range(count, size)
        latest = at.sub(count, I64(size))
        with self.for_each(end, size, first=first) as start:
            yield at.select(at.icmp_signed("<", start, latest), start, latest)

    def thread_range(self, count: ir.Value, unit: int = 1) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return this thread's range of `count` items, as first, end and thread number.

        Both ends are multiples of `unit`, but for the last end.
        """
        at = self.ir_builder
        alone = at.block
        among, shared = (self.function.append_basic_block(name) for name in ("among", "shared"))
        asks = ir.FunctionType(I32, []).as_pointer()
        which = self.field(THREAD_NUM_FIELD, asks)
        of_how_many = self.field(NUM_THREADS_FIELD, asks)
        at.cbranch(at.icmp_unsigned("==", at.ptrtoint(which, I64), ZERO), shared, among)
        at.position_at_end(among)
        index, threads = (at.sext(at.call(asked, []), I64) for asked in (which, of_how_many))
        at.branch(shared)
        at.position_at_end(shared)
        mine, all_ = at.phi(I64), at.phi(I64)
        for phi, one, many in ((mine, I64(0), index), (all_, I64(1), threads)):
            phi.add_incoming(one, alone)
            phi.add_incoming(many, among)
        units = self._ceil_div(count, I64(unit))
        size = at.mul(self._ceil_div(units, all_), I64(unit))
        first = at.mul(mine, size)
        end = at.add(first, size)
        return first, at.select(at.icmp_signed("<", end, count), end, count), mine

    def finish(self) -> ir.Module:
        self.ir_builder.ret_void()
        return self.module

    def address(self, base: ir.Value, index: ir.Value | int, size: int = 0) -> ir.Value:
        """Return the address of item `index` of `size` bytes (default: those of the dtype)."""
        at = self.ir_builder
        number = I64(index) if isinstance(index, int) else index
        return at.gep(base, [at.mul(number, I64(size or self.item_bytes))], source_etype=BYTE)

    def load(self, base: ir.Value, index: ir.Value | int | None = None) -> ir.Value:
        """Load a vector of the dtype as float32, from item `index` of `base` on, or from `base`."""
        at = self.ir_builder
        address = base if index is None else self.address(base, index)
        if self.dtype == "float32":
            return self.load_float32(address)
        halves = at.load(address, align=2, typ=self._vector_of(I16))
        bits = at.zext(halves, self._vector_of(I32))
        return at.bitcast(at.shl(bits, self._fill(bits.type, 16)), self.vector)

    def load_float32(self, base: ir.Value, index: ir.Value | None = None) -> ir.Value:
        """Load a vector of float32, from item `index` of `base` on, or from `base`."""
        address = base if index is None else self.address(base, index, 4)
        return self.ir_builder.load(address, align=4, typ=self.vector)

    def load_int8(self, base: ir.Value, index: ir.Value) -> ir.Value:
        """Load a vector of int8 as float32."""
        at = self.ir_builder
        values = at.load(self.address(base, index, 1), align=1, typ=self._vector_of(BYTE))
        return at.sitofp(at.sext(values, self._vector_of(I32)), self.vector)

    def load_float(self, base: ir.Value, index: ir.Value) -> ir.Value:
        return self.ir_builder.load(self.address(base, index, 4), align=4, typ=FLOAT)

    def load_int64(self, base: ir.Value, index: ir.Value) -> ir.Value:
        return self.ir_builder.load(self.address(base, index, 8), align=8, typ=I64)

    def store(self, value: ir.Value, base: ir.Value, index: ir.Value | int) -> None:
        """Store a vector or scalar of float32 in the dtype."""
        address = self.address(base, index)
        if self.dtype == "bfloat16":
            value = self._upper_half(self._rounded_bits(value))
        self.ir_builder.store(value, address, align=self.item_bytes)

    def store_rounded(self, value: ir.Value, address: ir.Value) -> ir.Value:
        """Store a vector in the dtype; return its rounded value."""
        if self.dtype == "float32":
            self.store_float32(value, address)
            return value
        bits = self._rounded_bits(value)
        self.ir_builder.store(self._upper_half(bits), address, align=2)
        return self._keep_upper_half(bits)

    def store_float32(self, value: ir.Value, address: ir.Value) -> None:
        self.ir_builder.store(value, address, align=4)

    def store_half_away_from_zero(self, value: ir.Value, base: ir.Value, index: ir.Value) -> None:
        """Store a vector of finite numbers, ties away from zero: half the work of `store`."""
        address = self.address(base, index)
        if self.dtype == "bfloat16":
            bits = self.ir_builder.bitcast(value, self._vector_of(I32))
            value = self._upper_half(self.ir_builder.add(bits, self.constants["rounds up"]))
        self.ir_builder.store(value, address, align=self.item_bytes)

    def prefetch(self, base: ir.Value, offset_bytes: ir.Value | int) -> None:
        """Prefetch into the second-level cache."""
        hints = I32(0), I32(PREFETCH_L2_LOCALITY), I32(DATA_CACHE)
        self.call_intrinsic("llvm.prefetch.p0", VOID, self.address(base, offset_bytes, 1), *hints)

    @property
    def zeros(self) -> ir.Value:
        return self._fill(self.vector, 0.0)

    def broadcast(self, value: ir.Value) -> ir.Value:
        """Return a vector filled with a scalar."""
        at = self.ir_builder
        undefined = ir.Constant(self._vector_of(value.type), ir.Undefined)
        one = at.insert_element(undefined, value, I32(0))
        return at.shuffle_vector(one, undefined, self._fill(self._vector_of(I32), 0))

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call_intrinsic(f"llvm.fma.v{self.vector_floats}f32", self.vector, a, b, c)

    def horizontal_sum(self, lanes: ir.Value) -> ir.Value:
        name = f"llvm.vector.reduce.fadd.v{self.vector_floats}f32"
        return self.call_intrinsic(name, FLOAT, FLOAT(-0.0), lanes, fastmath=("reassoc",))

    def round_to_dtype(self, value: ir.Value) -> ir.Value:
        """Return a vector rounded to the dtype, as float32."""
        if self.dtype == "float32":
            return value
        return self._keep_upper_half(self._rounded_bits(value))

    def exp(self, x: ir.Value) -> ir.Value:
        """Return exp of a vector, within 2 ulp in [-87, 88]; inputs are clamped to that range."""
        at, constants = self.ir_builder, self.constants
        least, most = constants["least"], constants["most"]
        x = at.select(at.fcmp_ordered("<", x, least), least, x)
        x = at.select(at.fcmp_ordered(">", x, most), most, x)
        scaled = at.fmul(x, constants["log2(e)"])
        power = self.call_intrinsic(f"llvm.rint.v{self.vector_floats}f32", self.vector, scaled)
        rest = self.multiply_add(power, constants["ln(2), above"], x)
        rest = self.multiply_add(power, constants["ln(2), below"], rest)
        sum_ = constants["exp 0"]
        for index in range(1, len(_EXP)):
            sum_ = self.multiply_add(sum_, rest, constants[f"exp {index}"])
        sum_ = self.multiply_add(at.fmul(sum_, rest), rest, at.fadd(rest, constants["one"]))
        wide = self._vector_of(I32)
        exponent = at.shl(at.fptosi(power, wide), self._fill(wide, 23))
        return at.bitcast(at.add(at.bitcast(sum_, wide), exponent), self.vector)

    def configure_tiles(self) -> None:
        base = self.field(CONSTANTS_FIELD)
        shapes = self.address(base, len(CONSTANTS) + len(INT_CONSTANTS), 4)
        self.call_tile_instruction("ldtilecfg", shapes)

    def call_tile_instruction(self, name: str, *arguments: int | ir.Value) -> None:
        """Emit one tile instruction; Python integers are tile numbers."""
        values = [BYTE(each) if isinstance(each, int) else each for each in arguments]
        self.call_intrinsic(f"llvm.x86.{name}", VOID, *values)

    def _rounded_bits(self, value: ir.Value) -> ir.Value:
        """Return bits of float32, rounded to bfloat16 in the upper half (nearest, ties to even)."""
        at = self.ir_builder
        many = isinstance(value.type, ir.VectorType)
        half, one, nan = (
            self.constants[name] if many else I32(INT_CONSTANTS[name])
            for name in ("half", "odd", "nan")
        )
        bits = at.bitcast(value, half.type)
        odd = at.and_(at.lshr(bits, self._fill(half.type, 16)), one)
        nearest = at.add(at.add(bits, half), odd)
        return at.select(at.fcmp_unordered("uno", value, value), nan, nearest)

    def _upper_half(self, bits: ir.Value) -> ir.Value:
        halves = self._vector_of(I16) if isinstance(bits.type, ir.VectorType) else I16
        return self.ir_builder.trunc(self.ir_builder.lshr(bits, self._fill(bits.type, 16)), halves)

    def _keep_upper_half(self, bits: ir.Value) -> ir.Value:
        """Return float32 bits with a cleared lower half, as a vector of float32."""
        upper = self.ir_builder.and_(bits, self.constants["upper half"])
        return self.ir_builder.bitcast(upper, self.vector)

    def _vector_of(self, kind: ir.Type) -> ir.VectorType:
        return ir.VectorType(kind, self.vector_floats)

    def _fill(self, kind: ir.Type, number: float) -> ir.Value:
        """Return a constant of a scalar type, or a vector filled with it."""
        many = isinstance(kind, ir.VectorType)
        return ir.Constant(kind, [number] * self.vector_floats if many else number)

    def _load_constants(self) -> dict[str, ir.Value]:
        base, vectors = self.field(CONSTANTS_FIELD), {}
        kinds = {**dict.fromkeys(CONSTANTS, FLOAT), **dict.fromkeys(INT_CONSTANTS, I32)}
        for index, (name, kind) in enumerate(kinds.items()):
            place = self.address(base, index, 4)
            vectors[name] = self.broadcast(self.ir_builder.load(place, align=4, typ=kind))
        return vectors

    def _ceil_div(self, value: ir.Value, by: ir.Value) -> ir.Value:
        return self.ir_builder.sdiv(self.ir_builder.sub(self.ir_builder.add(value, by), I64(1)), by)

    def call_intrinsic(
        self, name: str, returns: ir.Type, *values: ir.Value, fastmath: Sequence[str] = ()
    ) -> ir.Value:
        """Call an LLVM intrinsic."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(returns, [value.type for value in values])
            function = ir.Function(self.module, kind, name=name)
        return self.ir_builder.call(function, values, fastmath=fastmath)
