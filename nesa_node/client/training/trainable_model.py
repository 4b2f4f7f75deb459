"""A swarm's model with adapters as a torch module: autograd runs through the nodes.

R rows, L columns of a batch, T tokens without padding, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import GenerationConfig, PretrainedConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nesa_node.client.model.generation_options import refuse_forward_arguments
from nesa_node.client.model.head import EmbeddingAndHead
from nesa_node.client.training.data.batches import prepend_virtual_tokens, row_lengths, split_rows
from nesa_node.client.training.recorded_steps import RecordedPass
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.engine.training.text_layout import TextLayout, plain_layout

_ADVICE = {
    "past_key_values": "a batch has whole texts: leave it out",
    "use_cache": "a batch has whole texts: leave it out",
    "logits_to_keep": "slice the logits",
    "output_hidden_states": "call the distributed model, not session.model",
}

# transformers' Trainer shifts the labels that it smooths if a model's name is in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nesa_node_trainable"] = "TrainableModel"


class TrainingPasses(Protocol):
    """What runs passes and applies steps: `FinetuningSession`."""

    @property
    def applied(self) -> int: ...

    @property
    def num_backwards(self) -> int: ...

    num_virtual_tokens: int

    def embed(self, ids_RL: Tensor, layout: TextLayout) -> Tensor: ...

    def run_forward(
        self, hidden: Sequence[tuple[TextLayout, Tensor]], *, keep: bool
    ) -> tuple[list[Tensor], list[RecordedPass]]: ...

    def run_backward(
        self, passes: Sequence[RecordedPass], grads: Sequence[Tensor]
    ) -> list[Tensor]: ...

    def apply(self, learning_rate: float) -> float: ...

    def restart_step(self) -> None: ...

    def save_pretrained(self, folder: str | Path) -> None: ...


class TrainableModel(nn.Module):
    """The model of a fine-tuning session, for PyTorch loops and for transformers' Trainer.

    `session.model`, with `session.optimizer`::

        loss = session.model(input_ids=ids, labels=ids).loss
        loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()

    The adapters, their gradients and the optimizer's state are on the nodes; a shallow prompt's are
    the session's. Here `anchor` is the only parameter: an empty one, which brings autograd and the
    optimizer together. Therefore torch's clipping of gradients, and Trainer's, have nothing to clip
    and report a norm of 0. The session clips all gradients together, by
    `FinetuningOptions.max_grad_norm`.

    In train mode, where gradients are enabled, nodes draw dropout and keep what a backward needs.
    A pass that never goes backward has no part in the step. In eval mode, and under
    `torch.no_grad`, there is no dropout and no gradient. From one thread at a time.
    """

    main_input_name = "input_ids"
    loss_type = "ForCausalLM"
    """By it transformers' Trainer counts labels as the loss does."""
    accepts_loss_kwargs = True

    def __init__(
        self,
        passes: TrainingPasses,
        ends: EmbeddingAndHead,
        config: PretrainedConfig,
        generation_config: GenerationConfig,
        *,
        max_tokens: int,
    ) -> None:
        """Rows are split into micro-batches of at most `max_tokens` tokens with padding."""
        super().__init__()
        self.config = copy.deepcopy(config)
        self.generation_config = copy.deepcopy(generation_config)
        self.anchor = nn.Parameter(torch.empty(0))
        self._passes = passes
        self._ends = ends
        self._max_tokens = max_tokens

    @property
    def device(self) -> torch.device:
        """Device of embedding and head."""
        return self._ends.device

    @property
    def dtype(self) -> torch.dtype:
        return self._ends.dtype

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **refused: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits [R, L, V] and, with `labels` [R, L], the mean loss of predicted tokens.

        `attention_mask` [R, L] may hide padding at the right, whose logits are zeros.
        `position_ids` [R, L] that begin at 0 again within a row separate texts that do not see each
        other. With a shallow prompt of P virtual tokens, logits are [R, P + L, V], as PEFT's are,
        and rows have one text. Labels are not shifted, and those of -100 are ignored; with
        `num_items_in_batch` the loss is their sum divided by it. Results are on the device of
        `input_ids`.

        Raises `ConfigError` for rows that are too long, and shapes, padding or positions that do
        not fit; `UnsupportedFeatureError` and `TypeError` for other arguments of transformers'
        models; and what the session raises.
        """
        _refuse(refused)
        if input_ids is None or input_ids.ndim != 2 or not input_ids.numel():
            raise ConfigError("a batch needs input_ids with a row of tokens for each text")
        _check_shapes(input_ids, attention_mask=attention_mask, labels=labels)
        lengths = row_lengths(attention_mask, input_ids)
        texts = _find_texts(position_ids, input_ids, lengths)
        if count := self._passes.num_virtual_tokens:
            if any(len(row) > 1 for row in texts):
                raise UnsupportedFeatureError(
                    "a prompt comes before each row, and position_ids separate texts in one: give "
                    "each text a row of its own"
                )
            lengths = [count + length for length in lengths]
            texts = list(plain_layout(lengths).texts)
            wide = prepend_virtual_tokens({"input_ids": input_ids}, count)
            input_ids = wide["input_ids"]
            if labels is not None:
                labels = prepend_virtual_tokens({"labels": labels}, count)["labels"]
        batch = self._embed(input_ids, texts, lengths)
        logits_TV = self._ends.logits_with_gradients(self._run_blocks(batch))
        logits_RLV = _to_rows(logits_TV, lengths, input_ids.shape[1]).to(input_ids.device)
        loss: Any = None
        if labels is not None:
            items: Any = num_items_in_batch
            loss = ForCausalLMLoss(
                logits_RLV,
                labels.to(input_ids.device),
                vocab_size=logits_RLV.shape[-1],
                num_items_in_batch=items,
            )
        logits: Any = logits_RLV
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step under way, on the nodes too."""
        super().zero_grad(set_to_none)
        _forget_gradients(self._passes)

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Write the adapters as a folder that `peft.PeftModel.from_pretrained` loads.

        Raises as `FinetuningSession.save_pretrained` does.
        """
        self._passes.save_pretrained(save_directory)

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            "the adapters are on the nodes: save them with model.save_pretrained(folder), and give "
            'transformers\' Trainer save_strategy="no"'
        )

    def _embed(
        self, ids_RL: Tensor, texts: Sequence[tuple[int, ...]], lengths: Sequence[int]
    ) -> list[tuple[TextLayout, Tensor]]:
        """Inputs of micro-batches. Rows of several texts are micro-batches of their own."""
        ranges = split_rows(lengths, self._max_tokens)
        if any(len(row) > 1 for row in texts):
            ranges = [(row, row + 1) for row in range(len(lengths))]
        batch = []
        for start, end in ranges:
            layout = TextLayout(tuple(texts[start:end]))
            columns = max(lengths[start:end])
            hidden_RLD = self._passes.embed(ids_RL[start:end, :columns], layout)
            batch.append((layout, layout.from_rows(hidden_RLD)))
        return batch

    def _run_blocks(self, batch: Sequence[tuple[TextLayout, Tensor]]) -> Tensor:
        """Output [T, D] of all blocks."""
        if self.training and torch.is_grad_enabled():
            layouts = [layout for layout, _ in batch]
            run: Callable[..., tuple[Tensor, ...]] = _NodePasses.apply
            outputs: Sequence[Tensor] = run(
                self._passes, layouts, self.anchor, *(hidden_TD for _, hidden_TD in batch)
            )
        else:
            outputs, _ = self._passes.run_forward(batch, keep=False)
        return torch.cat(list(outputs))


class RemoteOptimizer(torch.optim.Optimizer):
    """Applies steps on the nodes, whose optimizers an `OptimizerConfig` describes.

    torch's and transformers' schedulers set its learning rate. The session's `max_grad_norm`
    clips. Further parameter groups have no effect.
    """

    _step_supports_amp_scaling = True  # asks torch's gradient scaler to say that it scales

    def __init__(
        self, passes: TrainingPasses, model: TrainableModel, *, learning_rate: float
    ) -> None:
        self.grad_norm = 0.0
        """Norm of the last step's gradients on all nodes, before clipping."""
        self._passes = passes
        super().__init__([model.anchor], {"lr": learning_rate})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the adapters by the gradients of all backwards since the last step.

        Does nothing where there was none, as torch's optimizers do.
        """
        if getattr(self, "found_inf", None) is not None:
            raise UnsupportedFeatureError(
                "a gradient scaler does not reach the nodes' gradients: train in bfloat16 or "
                "float32 (bf16=True), not with fp16=True"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._passes.num_backwards:
            self.grad_norm = self._passes.apply(float(self.param_groups[0]["lr"]))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step under way; nothing happens right after a step."""
        super().zero_grad(set_to_none)
        _forget_gradients(self._passes)


class _NodePasses(torch.autograd.Function):
    """All blocks, on micro-batches of hidden states [T, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: TrainingPasses,
        layouts: Sequence[TextLayout],
        anchor: Tensor,
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, ctx.recorded = passes.run_forward(
            list(zip(layouts, hidden, strict=True)), keep=True
        )
        ctx.passes, ctx.applied = passes, passes.applied
        ctx.anchor_grad = torch.empty_like(anchor)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step = ctx.applied + 1
        if ctx.passes.applied != ctx.applied:
            raise ConfigError(
                f"the adapters have changed since this forward pass, which belongs to step {step}: "
                "run it again before its backward"
            )
        if not all(bool(torch.isfinite(grad_TD).all()) for grad_TD in grads):
            raise ConfigError(
                f"the gradient of step {step} is not finite: use a lower learning rate, or a "
                "loss that stays finite for this batch"
            )
        input_grads = ctx.passes.run_backward(ctx.recorded, grads)
        needed = ctx.needs_input_grad[3:]
        found = (
            grad_TD if wanted else None for grad_TD, wanted in zip(input_grads, needed, strict=True)
        )
        return None, None, ctx.anchor_grad.clone(), *found


def _forget_gradients(passes: TrainingPasses) -> None:
    # A pass that has still to go backward keeps its place: the call may come after the loss.
    if passes.num_backwards:
        passes.restart_step()


def _refuse(arguments: dict[str, Any]) -> None:
    """Raise `UnsupportedFeatureError` or `TypeError` for an argument that would change a result."""
    for name, advice in _ADVICE.items():
        value = arguments.pop(name, None)
        if value is not None and value is not False:
            raise UnsupportedFeatureError(f"{name} is not supported in training: {advice}")
    refuse_forward_arguments(arguments)


def _check_shapes(ids_RL: Tensor, **others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None and value.shape != ids_RL.shape:
            raise ConfigError(
                f"{name} of shape {list(value.shape)} for input_ids of shape {list(ids_RL.shape)}"
            )


def _find_texts(
    positions_RL: Tensor | None, ids_RL: Tensor, lengths: Sequence[int]
) -> list[tuple[int, ...]]:
    """For each row the lengths of its texts: where positions begin at 0 again, a text does."""
    if positions_RL is None:
        return list(plain_layout(lengths).texts)
    if positions_RL.shape not in (ids_RL.shape, (1, ids_RL.shape[1])):
        _check_shapes(ids_RL, position_ids=positions_RL)
    texts = []
    for positions_L, length in zip(positions_RL.expand(ids_RL.shape), lengths, strict=True):
        places_L = positions_L[:length].cpu()
        starts = (places_L == 0).nonzero().flatten().tolist()
        row = tuple(end - start for start, end in pairwise([*starts, length]))
        counted = [torch.arange(size) for size in row]
        if starts[:1] != [0] or not torch.equal(places_L, torch.cat(counted)):
            raise ConfigError("position_ids of a text count its tokens: 0, 1, 2, ...")
        texts.append(row)
    return texts


def _to_rows(logits_TV: Tensor, lengths: Sequence[int], columns: int) -> Tensor:
    """Logits [R, L, V], zeros at padding."""
    shape = (len(lengths), columns, logits_TV.shape[-1])
    if sum(lengths) == shape[0] * columns:
        return logits_TV.view(shape)
    lengths_R1 = torch.tensor(lengths, device=logits_TV.device).unsqueeze(1)
    mask_RL = torch.arange(columns, device=logits_TV.device) < lengths_R1
    return logits_TV.new_zeros(shape).index_put((mask_RL,), logits_TV)
