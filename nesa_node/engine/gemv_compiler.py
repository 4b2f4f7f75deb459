"""Run as a program: compile the products of `gemv.py` for this processor and the dtype named.

They are printed as JSON: machine code in base64, for one token, for two, and so on. It is a program
of its own because LLVM takes 75 MB and is needed for a fraction of a second, and it imports nothing
of ours, so that it starts at once.

One product is y = W x + b for T columns of x at a time, T up to 8. At that size only the reading of
W costs, and it is read in its own order, row by row, with a prefetch far ahead of what is computed.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir

MOST_TOKENS = 8
LINE = 64
"""Bytes of a cache line: so much of each row is read in one round."""
AHEAD = 8192
"""Bytes from what is computed to what is prefetched. Measured: 4 to 16 KiB are alike, less is
slower, and without any it is 0.7 x as fast."""
TO_SECOND_LEVEL, DATA = 2, 1

BYTE, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, POINTER, NOTHING = ir.FloatType(), ir.PointerType(), ir.VoidType()
ITEM = {"float32": FLOAT, "bfloat16": I16}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}

JOB = ir.LiteralStructType([POINTER] * 4 + [I64] * 2 + [POINTER] * 2)
"""Weight [O, I], input [T, I] in float32, bias [O] in float32, output [T, O]; I and O; OpenMP's
`omp_get_thread_num` and `omp_get_num_threads`, or null for all rows in the calling thread.
`gemv.Job` is the same."""
WEIGHT, INPUT, BIAS, OUTPUT, INPUTS, OUTPUTS, THREAD, THREADS = range(8)


@dataclass(frozen=True)
class Processor:
    """What is compiled for: LLVM's names, and the vector registers."""

    name: str
    features: str
    registers: int
    floats: int
    """That many in a register."""

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


class Product:
    """Writes one product as a function `void name(Job *)`."""

    def __init__(self, dtype: str, tokens: int, processor: Processor) -> None:
        self.name = f"{dtype}_{tokens}"
        self.module = ir.Module(self.name)
        self.dtype, self.tokens = dtype, tokens
        self.rows = 2 if 2 * tokens + 3 <= processor.registers else 1
        self.vector = ir.VectorType(FLOAT, processor.floats)
        self.function = ir.Function(
            self.module, ir.FunctionType(NOTHING, [POINTER]), name=self.name
        )
        self.at = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._build()

    def _build(self) -> None:
        """The loop over rows."""
        at = self.at
        self.inputs, self.outputs = self._field(INPUTS, I64), self._field(OUTPUTS, I64)
        first, last = self._share()
        start = at.block
        loop, done = (self.function.append_basic_block(name) for name in ("rows", "done"))
        at.cbranch(at.icmp_signed("<", first, last), loop, done)

        at.position_at_end(loop)
        row = at.phi(I64)
        row.add_incoming(first, start)
        # The last round begins early enough to be whole.
        latest = at.sub(self.outputs, I64(self.rows))
        begin = at.select(at.icmp_signed("<", row, latest), row, latest)
        self._write(begin, self._sums(begin))
        following = at.add(row, I64(self.rows))
        row.add_incoming(following, at.block)
        at.cbranch(at.icmp_signed("<", following, last), loop, done)

        at.position_at_end(done)
        at.ret_void()

    def _share(self) -> tuple[ir.Value, ir.Value]:
        """From which row to which this thread computes."""
        at = self.at
        alone = at.block
        among, shared = (self.function.append_basic_block(name) for name in ("among", "shared"))
        asks = ir.FunctionType(I32, []).as_pointer()
        which, of_how_many = self._field(THREAD, asks), self._field(THREADS, asks)
        at.cbranch(at.icmp_unsigned("==", at.ptrtoint(which, I64), I64(0)), shared, among)
        at.position_at_end(among)
        index, count = (at.sext(at.call(asked, []), I64) for asked in (which, of_how_many))
        at.branch(shared)
        at.position_at_end(shared)
        mine, all_ = at.phi(I64), at.phi(I64)
        for phi, one, many in ((mine, I64(0), index), (all_, I64(1), count)):
            phi.add_incoming(one, alone)
            phi.add_incoming(many, among)
        rounds = self._divided_up(self.outputs, I64(self.rows))
        size = at.mul(self._divided_up(rounds, all_), I64(self.rows))
        first = at.mul(mine, size)
        end = at.add(first, size)
        return first, at.select(at.icmp_signed("<", end, self.outputs), end, self.outputs)

    def _sums(self, begin: ir.Value) -> list[list[ir.Value]]:
        """The loop over inputs: of each row and token as many sums as a vector has lanes."""
        at = self.at
        size, floats = ITEM_BYTES[self.dtype], self.vector.count
        step = LINE // size
        weights = [
            self._address(self._field(WEIGHT, POINTER), self._row(begin, row), size)
            for row in range(self.rows)
        ]
        inputs = [
            self._address(self._field(INPUT, POINTER), at.mul(I64(token), self.inputs), 4)
            for token in range(self.tokens)
        ]
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        add = self._intrinsic(f"llvm.fma.v{floats}f32", kind)
        before = at.block
        loop, after = (self.function.append_basic_block(name) for name in ("inputs", "after"))
        at.branch(loop)

        at.position_at_end(loop)
        index = at.phi(I64)
        index.add_incoming(I64(0), before)
        sums = [[at.phi(self.vector) for _ in inputs] for _ in weights]
        zeros = ir.Constant(self.vector, [0.0] * floats)
        results: list[list[ir.Value]] = [list(of_row) for of_row in sums]
        # These rows lie one after another: what comes after them is read in its own order, too.
        ahead = at.mul(index, I64(self.rows * size))
        for row in range(self.rows):
            offset = at.add(ahead, I64(AHEAD + LINE * row))
            self._prefetch(self._address(weights[0], offset, 1))
        for part in range(0, step, floats):
            place = at.add(index, I64(part))
            lanes = [self._widened(self._address(weight, place, size)) for weight in weights]
            for token, values in enumerate(inputs):
                lane = at.load(self._address(values, place, 4), align=4, typ=self.vector)
                for row, weight in enumerate(lanes):
                    results[row][token] = at.call(add, [weight, lane, results[row][token]])
        following = at.add(index, I64(step))
        index.add_incoming(following, at.block)
        for phis, values in zip(sums, results, strict=True):
            for phi, value in zip(phis, values, strict=True):
                phi.add_incoming(zeros, before)
                phi.add_incoming(value, at.block)
        at.cbranch(at.icmp_signed("<", following, self.inputs), loop, after)
        at.position_at_end(after)
        return results

    def _write(self, begin: ir.Value, sums: list[list[ir.Value]]) -> None:
        at = self.at
        kind = ir.FunctionType(FLOAT, [FLOAT, self.vector])
        add = self._intrinsic(f"llvm.vector.reduce.fadd.v{self.vector.count}f32", kind)
        for row, of_row in enumerate(sums):
            place = at.add(begin, I64(row))
            bias = at.load(self._address(self._field(BIAS, POINTER), place, 4), align=4, typ=FLOAT)
            for token, lanes in enumerate(of_row):
                total = at.call(add, [FLOAT(-0.0), lanes], fastmath=("reassoc",))
                value = self._narrowed(at.fadd(total, bias))
                size = ITEM_BYTES[self.dtype]
                where = at.add(at.mul(I64(token), self.outputs), place)
                at.store(
                    value, self._address(self._field(OUTPUT, POINTER), where, size), align=size
                )

    def _widened(self, address: ir.Value) -> ir.Value:
        """A vector of weights as float32."""
        at, floats = self.at, self.vector.count
        if self.dtype == "float32":
            return at.load(address, align=4, typ=self.vector)
        halves = at.load(address, align=2, typ=ir.VectorType(I16, floats))
        wide = ir.VectorType(I32, floats)
        bits = at.shl(at.zext(halves, wide), ir.Constant(wide, [16] * floats))
        return at.bitcast(bits, self.vector)

    def _narrowed(self, value: ir.Value) -> ir.Value:
        """A float32 in the weights' dtype, to the nearest and to even; NaN stays what it is."""
        if self.dtype == "float32":
            return value
        at = self.at
        bits = at.bitcast(value, I32)
        odd = at.and_(at.lshr(bits, I32(16)), I32(1))
        rounded = at.lshr(at.add(at.add(bits, I32(0x7FFF)), odd), I32(16))
        number = at.select(at.fcmp_unordered("uno", value, value), I32(0x7FC0), rounded)
        return at.trunc(number, I16)

    def _field(self, index: int, kind: ir.Type) -> ir.Value:
        place = self.at.gep(self.function.args[0], [I32(0), I32(index)], source_etype=JOB)
        return self.at.load(place, typ=kind)

    def _row(self, begin: ir.Value, row: int) -> ir.Value:
        return self.at.mul(self.at.add(begin, I64(row)), self.inputs)

    def _address(self, base: ir.Value, index: ir.Value, size: int) -> ir.Value:
        return self.at.gep(base, [self.at.mul(index, I64(size))], source_etype=BYTE)

    def _divided_up(self, value: ir.Value, by: ir.Value) -> ir.Value:
        return self.at.sdiv(self.at.sub(self.at.add(value, by), I64(1)), by)

    def _prefetch(self, address: ir.Value) -> None:
        kind = ir.FunctionType(NOTHING, [POINTER, I32, I32, I32])
        prefetch = self._intrinsic("llvm.prefetch.p0", kind)
        self.at.call(prefetch, [address, I32(0), I32(TO_SECOND_LEVEL), I32(DATA)])

    def _intrinsic(self, name: str, kind: ir.FunctionType) -> ir.Function:
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, kind, name=name)


def compiled(dtype: str, processor: Processor) -> list[bytes]:
    """The machine code of the products for one token, for two, and so on.

    It runs wherever it is put. Raises `RuntimeError` if it would need something beside it.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # ELF on every system.
    architecture, *_ = llvm.get_process_triple().split("-")
    target = llvm.Target.from_triple(f"{architecture}-unknown-linux-gnu")
    machine = target.create_target_machine(
        cpu=processor.name,
        features=processor.features,
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    return [
        _machine_code(Product(dtype, tokens, processor), machine)
        for tokens in range(1, MOST_TOKENS + 1)
    ]


def _machine_code(product: Product, machine: llvm.TargetMachine) -> bytes:
    module = llvm.parse_assembly(str(product.module))
    module.verify()
    file = llvm.ObjectFileRef.from_data(machine.emit_object(module))
    sections = {section.name() or b"": section.data() for section in file.sections()}
    if {b".rela.text", b".rel.text"} & sections.keys():
        raise RuntimeError(f"{product.name} refers to what is outside its code")
    code: bytes = sections[b".text"]
    return code


if __name__ == "__main__":
    codes = compiled(sys.argv[1], Processor.of_host())
    print(json.dumps([base64.b64encode(code).decode() for code in codes]))
