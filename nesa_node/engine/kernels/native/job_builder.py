"""Builder of a function `void name(int64_t *job)` in LLVM IR: its fields, loops and threads.

A job's fields have 8 bytes each, of any type. The first three are OpenMP's functions
`omp_get_thread_num` and `omp_get_num_threads` (0 on a single thread), and the address of constants
(`function_builder.py`).
"""

from __future__ import annotations

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
POINTER, VOID = ir.PointerType(), ir.VoidType()
NUM_HEADER_FIELDS = 3
THREAD_NUM_FIELD, NUM_THREADS_FIELD, CONSTANTS_FIELD = range(-NUM_HEADER_FIELDS, 0)
PREFETCH_L2_LOCALITY, DATA_CACHE = 2, 1


@dataclass
class CountedLoop:
    """Index and loop-carried values of a loop under construction."""

    index: ir.Value
    values: list[ir.Value]


class JobBuilder:
    """Builder of one function, whose tensors have items of `item_bytes`."""

    def __init__(self, name: str, item_bytes: int, processor: Processor) -> None:
        self.name, self.item_bytes, self.processor = name, item_bytes, processor
        self.vector_floats = processor.vector_floats
        self.module = ir.Module(name)
        kind = ir.FunctionType(VOID, [POINTER])
        self.function = ir.Function(self.module, kind, name=name)
        self.ir_builder = ir.IRBuilder(self.function.append_basic_block("entry"))

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
        """Return the address of item `index` of `size` bytes (default: those of an item)."""
        at = self.ir_builder
        number = I64(index) if isinstance(index, int) else index
        return at.gep(base, [at.mul(number, I64(size or self.item_bytes))], source_etype=BYTE)

    def load_int64(self, base: ir.Value, index: ir.Value) -> ir.Value:
        return self.ir_builder.load(self.address(base, index, 8), align=8, typ=I64)

    def prefetch(self, base: ir.Value, offset_bytes: ir.Value | int) -> None:
        """Prefetch into the second-level cache."""
        hints = I32(0), I32(PREFETCH_L2_LOCALITY), I32(DATA_CACHE)
        self.call_intrinsic("llvm.prefetch.p0", VOID, self.address(base, offset_bytes, 1), *hints)

    def broadcast(self, value: ir.Value) -> ir.Value:
        """Return a vector filled with a scalar."""
        at = self.ir_builder
        undefined = ir.Constant(self._vector_of(value.type), ir.Undefined)
        one = at.insert_element(undefined, value, I32(0))
        return at.shuffle_vector(one, undefined, self._fill(self._vector_of(I32), 0))

    def _vector_of(self, kind: ir.Type) -> ir.VectorType:
        return ir.VectorType(kind, self.vector_floats)

    def _fill(self, kind: ir.Type, number: float) -> ir.Value:
        """Return a constant of a scalar type, or a vector filled with it."""
        many = isinstance(kind, ir.VectorType)
        return ir.Constant(kind, [number] * self.vector_floats if many else number)

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
