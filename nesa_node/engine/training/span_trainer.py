"""Training steps of one span: micro-batches, gradients, optimizer, and what survives a failure.

A step is the forwards and backwards of its micro-batches 0, 1, 2, ..., then one update of the
parameters (Nesa paper, eq. 7). Gradients are added in that order, so that a step that is run again
gives the same bits. Steps are counted: each is applied once, and in order.

Several trainers of one span, its replicas, may share a step's micro-batches. Then each hands over
its gradients (`collect`), and is given those of all (`reduce`), or of its part of the parameters
alone: its optimizer then has state for that part only (ZeRO). Where parameters are divided, too, a
trainer borrows those of a block from the rest while it runs the block (`fill`, `lend`).

R sequences, L tokens of each, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import Span
from nesa_node.engine.training.adapted_blocks import MicroBatch
from nesa_node.engine.training.adapters import OptimizerConfig
from nesa_node.engine.training.kept_micro_batches import (
    Keep,
    KeptMicroBatch,
    KeptMicroBatches,
    KeptRoom,
)
from nesa_node.engine.training.training_state import (
    ADAPTER,
    STEP,
    Partition,
    StateShapes,
    block_of,
)

MAX_NORM_EPS = 1e-6
"""Added to the norm of gradients, as torch's clipping does."""


BlockByBlock = Generator[int | None, None, Tensor]
"""A computation that pauses after each block, so that other work may run between them.

It yields None then. An index is that of a block whose parameters it needs (`SpanTrainer.fill`)."""


def finish(running: BlockByBlock) -> Tensor:
    """Run a computation of undivided parameters to its end, and return its result."""
    while True:
        try:
            next(running)
        except StopIteration as ended:
            result: Tensor = ended.value
            return result


class TrainableSpan(Protocol):
    """What is trained: `AdaptedBlocks`, or the input before them (`PromptedInput`)."""

    span: Span
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    parameters: dict[str, nn.Parameter]
    shapes: dict[str, tuple[int, ...]]
    """Of the parameters, also where they are not here."""

    @property
    def indexes(self) -> Sequence[int]:
        """What `run_block` is called with, in order."""
        ...

    def run_block(
        self, index: int, hidden_RLD: Tensor, batch: MicroBatch, *, dropout: bool = True
    ) -> Tensor: ...


class SpanTrainer:
    """Adapters of a span, their optimizer, and the step that is under way.

    Not thread-safe: one thread owns it. Methods raise `ProtocolError` for what does not
    belong to this step, and change nothing then.
    """

    def __init__(
        self,
        blocks: TrainableSpan,
        optimizer: OptimizerConfig,
        *,
        keep: Keep | KeptRoom = "inputs",
        partition: Partition | None = None,
    ) -> None:
        """`keep`: of each micro-batch between its forward and its backward, or the room for it.

        Activations are not kept where parameters are divided: they would hold the borrowed ones.
        Without a `partition` all are updated here.
        """
        self.blocks = blocks
        self.applied = 0
        """Steps that were applied, and the number of the step under way."""
        self._parameters = blocks.parameters
        self._optimizer = optimizer.make(list(self._parameters.values()))
        """None where the span has no adapters: it passes gradients on."""
        self.partition = partition or Partition()
        shapes = blocks.shapes
        self._owned = self.partition.select(shapes)
        """Parameters that are updated here."""
        self.is_divided = self.partition.divides_parameters
        """Whether other trainers have a part of the parameters."""
        self._held = self._owned if self.is_divided else frozenset(shapes)
        self.shapes = StateShapes(shapes, optimizer)
        """Of all of the span's parameters."""
        held = {name: shape for name, shape in shapes.items() if name in self._held}
        self.state_shapes = StateShapes(held, optimizer)
        """Of the state that `export` returns and `restore` takes."""
        self._release(self._parameters)
        most: Keep = "inputs" if self.is_divided else "activations"
        self._kept = KeptMicroBatches(keep, most=most)
        self._attempt = 0
        self._num_backwards = 0
        self._is_reduced = False
        """Whether the gradients are those of all replicas."""
        self._updated: tuple[str, ...] = ()
        """Parameters that the last step changed."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of hidden states that are kept for backwards, without the blocks' activations."""
        return self._kept.nbytes

    @property
    def num_backwards(self) -> int:
        """Micro-batches of this step whose gradients were added."""
        return self._num_backwards

    def begin(self, step: int) -> None:
        """Begin a step, or begin it again: forget its inputs and gradients."""
        self._require_current(step)
        self._clear()

    def forward(
        self, step: int, number: int, hidden_RLD: Tensor, batch: MicroBatch
    ) -> BlockByBlock:
        """Return the span's output for a micro-batch, and keep what its backward needs."""
        self._require_current(step)
        if number < self._num_backwards:
            raise ProtocolError("stale_step", f"micro-batch {number} has gone backward already")
        _require_finite(hidden_RLD, f"hidden states of micro-batch {number}")
        hidden_RLD = hidden_RLD.detach().to(self.blocks.device, self.blocks.dtype)
        rows, length = hidden_RLD.shape[:2]
        kept = KeptMicroBatch(batch, hidden_RLD, self._kept.choose_keep(rows * length))
        output_RLD = yield from self._run_blocks(kept, keep=kept.keep)
        self._kept[number] = kept
        return output_RLD

    def evaluate(self, hidden_RLD: Tensor, batch: MicroBatch) -> BlockByBlock:
        """Return the span's output without dropout, and keep nothing."""
        _require_finite(hidden_RLD, "hidden states")
        hidden_RLD = hidden_RLD.detach().to(self.blocks.device, self.blocks.dtype)
        for index in self.blocks.indexes:
            yield from self._borrow(index)
            with torch.no_grad():
                hidden_RLD = self.blocks.run_block(index, hidden_RLD, batch, dropout=False)
            self._return(index)
            yield None
        return hidden_RLD

    def backward(self, step: int, number: int, grad_RLD: Tensor) -> BlockByBlock:
        """Add a micro-batch's gradients, and return that of its input."""
        self._require_current(step)
        if number != self._num_backwards or number not in self._kept:
            raise ProtocolError(
                "stale_step",
                f"micro-batch {number} cannot go backward: {self._num_backwards} is the next, and "
                f"{sorted(self._kept)} went forward",
            )
        kept = self._kept[number]
        if grad_RLD.shape != kept.hidden_RLD.shape:
            raise ProtocolError(
                "bad_tensor",
                f"gradient of shape {list(grad_RLD.shape)} for hidden states of shape "
                f"{list(kept.hidden_RLD.shape)}",
            )
        _require_finite(grad_RLD, f"gradient of micro-batch {number}")
        del self._kept[number]
        if not kept.inputs:
            yield from self._run_blocks(kept, keep="inputs")
        grad_RLD = grad_RLD.to(self.blocks.device, self.blocks.dtype)
        for index in reversed(self.blocks.indexes):
            input_RLD = kept.inputs.pop().requires_grad_()
            yield from self._borrow(index)
            if kept.outputs:
                output_RLD = kept.outputs.pop()
            else:
                with torch.enable_grad():
                    output_RLD = self.blocks.run_block(index, input_RLD, kept.batch)
            torch.autograd.backward(output_RLD, grad_RLD)
            assert input_RLD.grad is not None
            grad_RLD = input_RLD.grad
            self._return(index)
            yield from self._pause()
        self._num_backwards += 1
        return grad_RLD

    def _run_blocks(self, kept: KeptMicroBatch, *, keep: Keep) -> BlockByBlock:
        hidden_RLD = kept.hidden_RLD
        for index in self.blocks.indexes:
            if keep == "activations":
                hidden_RLD = hidden_RLD.detach().requires_grad_()
            if keep != "input":
                kept.inputs.append(hidden_RLD)
            yield from self._borrow(index)
            with torch.set_grad_enabled(keep == "activations"):
                hidden_RLD = self.blocks.run_block(index, hidden_RLD, kept.batch)
            self._return(index)
            if keep == "activations":
                kept.outputs.append(hidden_RLD)
            yield from self._pause()
        return hidden_RLD.detach()

    def _names_of(self, index: int) -> list[str]:
        return [name for name in self._parameters if block_of(name) == index]

    def _borrow(self, index: int) -> Generator[int | None]:
        """Wait until a block's parameters are here."""
        if self.is_divided and not self._held.issuperset(self._names_of(index)):
            yield index

    def _return(self, index: int) -> None:
        self._release(self._names_of(index))

    def _release(self, names: Iterable[str]) -> None:
        """Free the parameters that other trainers have."""
        for name in names:
            if name not in self._held:
                value = self._parameters[name]
                value.data = value.data.new_empty(0)

    def fill(self, index: int, values: Mapping[str, Tensor]) -> None:
        """Take a block's parameters that other trainers have, by names of a state, for one run.

        Raises `ProtocolError` unless these are all.
        """
        self.shapes.check_values(values)
        names = {name.removeprefix(ADAPTER) for name in values}
        if names != set(self._names_of(index)) - self._held:
            raise ProtocolError("bad_tensor", f"other parameters than block {index} lacks")
        for name in names:
            value = self._parameters[name]
            value.data = values[f"{ADAPTER}{name}"].to(value.device, value.dtype)

    def lend(self, index: int) -> dict[str, Tensor]:
        """A block's parameters that are updated here, by names of a state, on the CPU.

        In float32. May be called from another thread while passes run.
        """
        return {
            f"{ADAPTER}{name}": self._parameters[name].detach().float().cpu()
            for name in self._names_of(index)
            if name in self._owned
        }

    def _pause(self) -> Generator[None]:
        """Let other work run. Raises `ProtocolError` if the step has begun again, or ended."""
        attempt = self._attempt
        yield
        if attempt != self._attempt:
            raise ProtocolError("stale_step", "the step has begun again meanwhile")

    def compute_squared_norm(self, step: int) -> float:
        """Sum of the squares of this step's gradients, for the global norm."""
        self._require_current(step)
        grads = [value.grad for value in self._parameters.values() if value.grad is not None]
        return float(sum(grad.square().sum(dtype=torch.float64) for grad in grads))

    def take_gradients(self) -> dict[str, Tensor]:
        """Gradients that were added so far, by names of a state, on the CPU; they are forgotten."""
        found = {}
        for name, value in self._parameters.items():
            if value.grad is not None:
                found[f"{ADAPTER}{name}"] = value.grad.float().cpu()
                value.grad = None
        return found

    def collect(self, step: int, micro_batches: int) -> dict[str, Tensor]:
        """Hand over the step's gradients, of `micro_batches` that must have gone backward."""
        self._require_current(step)
        self._require_backwards(micro_batches)
        return self.take_gradients()

    def reduce(self, step: int, grads: Mapping[str, Tensor]) -> None:
        """Take the sum of all replicas' gradients, of the parameters that are to be updated here.

        Names are those of a state. Raises `ProtocolError` for gradients that do not fit, and for
        parameters that another trainer updates.
        """
        self._require_current(step)
        self.state_shapes.check_values(grads)
        names = [name.removeprefix(ADAPTER) for name in grads]
        self._require_owned(names)
        for parameter in self._parameters.values():
            parameter.grad = None
        for name, grad in zip(names, grads.values(), strict=True):
            parameter = self._parameters[name]
            parameter.grad = grad.to(parameter.device, parameter.dtype, copy=True)
        self._is_reduced = True

    def export_updated(self, applied: int) -> dict[str, Tensor]:
        """Copies of the parameters that the last step changed, by names of a state, on the CPU."""
        self._require_current(applied)
        return {
            f"{ADAPTER}{name}": self._parameters[name].detach().float().cpu().clone()
            for name in self._updated
        }

    def set_parameters(self, applied: int, values: Mapping[str, Tensor]) -> None:
        """Take parameters that other replicas have updated, by names of a state."""
        self._require_current(applied)
        self.state_shapes.check_values(values)
        with torch.no_grad():
            for name, value in values.items():
                self._parameters[name.removeprefix(ADAPTER)].copy_(value)

    def apply(self, step: int, *, micro_batches: int, learning_rate: float, scale: float) -> None:
        """Update the parameters with the gradients times `scale`. A repeated call does nothing.

        `micro_batches` must have gone backward, unless the gradients are those of all replicas.
        """
        if step == self.applied - 1:
            return
        self._require_current(step)
        if not self._is_reduced:
            self._require_backwards(micro_batches)
        numbers = (self.compute_squared_norm(step), scale, learning_rate)
        if not all(map(math.isfinite, numbers)):
            raise ProtocolError("bad_tensor", f"the gradients of step {step} are not finite")
        for value in self._parameters.values():
            if value.grad is not None:
                value.grad.mul_(scale)
        self._updated = tuple(
            name for name, value in self._parameters.items() if value.grad is not None
        )
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self.applied += 1
        self._clear()

    def export(self) -> dict[str, Tensor]:
        """Copies of the parameters and of the optimizer's state, by unique names.

        In float32, on the CPU.
        """
        found: dict[str, Tensor] = {}
        states = {} if self._optimizer is None else self._optimizer.state
        for name, value in self._parameters.items():
            if name not in self._held:
                continue
            found[f"{ADAPTER}{name}"] = value
            for key, state in states.get(value, {}).items():
                found[f"optimizer.{key}.{name}"] = torch.as_tensor(state)
        return {name: value.detach().float().cpu().clone() for name, value in found.items()}

    def restore(self, applied: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue after `applied` steps with what `export` returned then.

        Raises `ProtocolError` for names or shapes of another span or adapter, and for values that
        the optimizer cannot continue with.
        """
        self.state_shapes.check(tensors)
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self._held}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                key, _, owner = name.removeprefix("optimizer.").partition(".")
                states[owner][key] = value
        self._require_owned([name for name, state in states.items() if state])
        with torch.no_grad():
            for name in self._held:
                self._parameters[name].copy_(tensors[f"{ADAPTER}{name}"])
        if self._optimizer is not None:
            self._optimizer.state.clear()
            for name, state in states.items():
                parameter = self._parameters[name]
                if state:
                    self._optimizer.state[parameter] = {
                        key: value.clone() if key == STEP else value.to(parameter, copy=True)
                        for key, value in state.items()
                    }
        self.applied = applied
        self._clear()

    def _require_current(self, step: int) -> None:
        if step != self.applied:
            raise ProtocolError(
                "stale_step", f"step {step} is not the next: {self.applied} steps were applied"
            )

    def _require_backwards(self, micro_batches: int) -> None:
        if self._num_backwards != micro_batches:
            raise ProtocolError(
                "stale_step",
                f"step {self.applied} has gradients of {self._num_backwards} micro-batches, not "
                f"of {micro_batches}",
            )

    def _require_owned(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._owned:
                raise ProtocolError("too_large", f"another replica updates {name}")

    def _clear(self) -> None:
        self._attempt += 1
        self._kept.clear()
        self._num_backwards = 0
        self._is_reduced = False
        for value in self._parameters.values():
            value.grad = None


def compute_clip_scale(squared_norms: list[float], max_norm: float | None) -> float:
    """Factor that bounds the norm of all nodes' gradients together, as torch's clipping does.

    `squared_norms` are those of the spans; None as `max_norm` does not bound.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (math.sqrt(sum(squared_norms)) + MAX_NORM_EPS))


def _require_finite(tensor: Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ProtocolError("bad_tensor", f"{what}: not all numbers are finite")
