"""Builder of functions that compute in float32.

The third field of a job is the address of `CONSTANTS`. Tensors are float32 or bfloat16; stores to
bfloat16 round to nearest, ties to even, and keep NaN.
"""

from __future__ import annotations

import struct

from llvmlite import ir

from nesa_node.engine.kernels.native.job_builder import (
    BYTE,
    CONSTANTS_FIELD,
    I16,
    I32,
    VOID,
    JobBuilder,
    Processor,
)

FLOAT = ir.FloatType()
ITEM_BYTES = {"float32": 4, "bfloat16": 2}

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
    "largest code": 127.0,
    "least scale": 2.0**-100,
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


class FunctionBuilder(JobBuilder):
    """Builder of one function for one dtype."""

    def __init__(self, name: str, dtype: str, processor: Processor) -> None:
        super().__init__(name, ITEM_BYTES[dtype], processor)
        self.dtype = dtype
        self.vector = ir.VectorType(FLOAT, self.vector_floats)
        self.constants = self._load_constants()
        """Vectors filled with a constant."""

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

    def load_bfloat16(self, base: ir.Value, index: ir.Value) -> ir.Value:
        """Load one bfloat16 as float32, whatever the dtype."""
        at = self.ir_builder
        half = at.load(self.address(base, index, 2), align=2, typ=I16)
        return at.bitcast(at.shl(at.zext(half, I32), I32(16)), FLOAT)

    def load_float(self, base: ir.Value, index: ir.Value) -> ir.Value:
        return self.ir_builder.load(self.address(base, index, 4), align=4, typ=FLOAT)

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

    def store_bfloat16(self, value: ir.Value, address: ir.Value, least: ir.Value) -> ir.Value:
        """Store one float32 as bfloat16, as zero below `least`; return the stored value."""
        at = self.ir_builder
        bits = self._rounded_bits(value)
        upper = at.and_(bits, I32(INT_CONSTANTS["upper half"]))
        is_zero = at.fcmp_ordered("<", at.bitcast(upper, FLOAT), least)
        upper = at.select(is_zero, I32(0), upper)
        at.store(at.trunc(at.lshr(upper, I32(16)), I16), address, align=2)
        return at.bitcast(upper, FLOAT)

    def store_int8(self, value: ir.Value, base: ir.Value, index: ir.Value) -> None:
        """Store a vector, rounded to nearest, ties to even; NaN becomes any number."""
        at = self.ir_builder
        name = f"llvm.rint.v{self.vector_floats}f32"
        whole = at.fptosi(self.call_intrinsic(name, self.vector, value), self._vector_of(I32))
        address = self.address(base, index, 1)
        at.store(at.trunc(whole, self._vector_of(BYTE)), address, align=1)

    @property
    def zeros(self) -> ir.Value:
        return self._fill(self.vector, 0.0)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call_intrinsic(f"llvm.fma.v{self.vector_floats}f32", self.vector, a, b, c)

    def horizontal_sum(self, lanes: ir.Value) -> ir.Value:
        name = f"llvm.vector.reduce.fadd.v{self.vector_floats}f32"
        return self.call_intrinsic(name, FLOAT, FLOAT(-0.0), lanes, fastmath=("reassoc",))

    def horizontal_max(self, lanes: ir.Value) -> ir.Value:
        """Return the largest lane, without those that are NaN."""
        return self.call_intrinsic(
            f"llvm.vector.reduce.fmax.v{self.vector_floats}f32", FLOAT, lanes
        )

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

    def _load_constants(self) -> dict[str, ir.Value]:
        base, vectors = self.field(CONSTANTS_FIELD), {}
        kinds = {**dict.fromkeys(CONSTANTS, FLOAT), **dict.fromkeys(INT_CONSTANTS, I32)}
        for index, (name, kind) in enumerate(kinds.items()):
            place = self.address(base, index, 4)
            vectors[name] = self.broadcast(self.ir_builder.load(place, align=4, typ=kind))
        return vectors
