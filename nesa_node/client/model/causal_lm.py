"""Causal language model with transformers' interface and its blocks in a swarm.

B rows, L columns, K kept columns, V vocabulary.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nesa_node.client.model.generation import DistributedGenerationMixin, SessionCache
from nesa_node.client.model.generation_options import (
    HIDDEN_STATES_NEED_WHOLE_TEXTS,
    refuse_forward_arguments,
)
from nesa_node.client.model.head import EmbeddingAndHead
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.model.layers import (
    HiddenStateSelection,
    check_mask,
    open_layers,
    pack,
    run_block_outputs,
    selected_indices,
)
from nesa_node.client.model.loop_thread import HeldContext, Interrupt, LoopThread
from nesa_node.client.model.reruns import run_until_right
from nesa_node.client.session.base import (
    Connect,
    RowSlice,
    SessionPrefix,
    SwarmConnection,
    derive_scope_salt,
)
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.core.errors import ContextLengthError, UnsupportedFeatureError, require_training
from nesa_node.core.ids import Span
from nesa_node.core.metrics import MetricSample
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from nesa_node.client.training.finetuning_session import FinetuningOptions, FinetuningSession
    from nesa_node.engine.training.adapters import OptimizerConfig
    from nesa_node.engine.training.training_spec import AdapterConfig

_FIXED_ENDS_MESSAGE = (
    "a distributed model's embedding and head stay as its nodes' blocks know them: load the model "
    "locally to change them"
)

# transformers' pipelines warn at length about models that are not in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nesa_node_distributed"] = "DistributedModelForCausalLM"


class DistributedModelForCausalLM(  # type: ignore[no-untyped-call]
    PreTrainedModel, DistributedGenerationMixin
):
    """Causal language model in a swarm, made by `AutoDistributedModelForCausalLM.from_pretrained`.

    `generate` is transformers' own. `layers` are consecutive spans with the connection that runs
    each; None stands for the swarm, which `connect` joins with the first session. Several threads
    may use a model at once, each with sessions of its own. Must be closed: `close`, or a `with`
    block.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(
        self,
        config: PretrainedConfig,
        generation_config: GenerationConfig,
        ends: EmbeddingAndHead,
        connect: Connect,
        layers: tuple[tuple[SwarmConnection | None, Span], ...],
        *,
        checkpoint: Checkpoint,
        prefix_salt: bytes | None = None,
        adapter: str | None = None,
        drafting: Drafting | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`prefix_salt=None` disables the prefix cache; without `drafting` nothing is drafted."""
        super().__init__(copy.deepcopy(config))
        self.generation_config = generation_config
        self.name_or_path = checkpoint.name
        self.context_length = checkpoint.context_length
        """Upper bound of a row's tokens by the model's config; a route may allow fewer."""
        self.training = False
        self.ends = ends
        self._connect = connect
        self._layers = layers
        self._checkpoint = checkpoint
        self._prefix_salt = prefix_salt
        self._adapter = adapter
        self.drafting = drafting
        self._loop = LoopThread("nesa-client")
        self._connection: HeldContext[SwarmConnection] | None = None
        self._sessions: weakref.WeakSet[InferenceSession] = weakref.WeakSet()
        self._connection_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._loop, on_close)

    def __repr__(self) -> str:
        """Spans, devices, open sessions and whether the swarm is joined. Sends nothing."""
        spans = [
            f"{span} {'in the swarm' if connection is None else 'here'}"
            for connection, span in self._layers
            if len(span)
        ]
        joined = self._live_connection() is not None
        if not self._finalizer.alive:
            state = "closed"
        else:
            state = "" if joined else "the swarm is joined with the first session"
        quant_type = self.ends.quant_type
        held = "" if quant_type == "none" else f" held in {quant_type}"
        lines = (
            f"{self.name_or_path}, {self.num_blocks} blocks: {', '.join(spans)}",
            f"ends: embedding and head here, {str(self.dtype).removeprefix('torch.')}{held} on "
            f"{self.device}",
            *(_describe_session(session) for session in list(self._sessions) if not session.closed),
            state,
        )
        told = "".join(f"\n  {line}" for line in lines if line)
        return f"{type(self).__name__}({told}\n)"

    def get_input_embeddings(self) -> torch.nn.Module:
        """Embedding module in this process. Read-only."""
        return self.ends.embedder.token_embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """Matrix of the head in this process. Read-only."""
        return self.ends.lm_head

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters of embedding and head, the only ones in this process. Read-only."""
        ends = torch.nn.ModuleDict(
            {"embed_tokens": self.get_input_embeddings(), "lm_head": self.get_output_embeddings()}
        )
        return ends.named_parameters(prefix, recurse, remove_duplicate)

    def set_input_embeddings(self, value: torch.nn.Module) -> NoReturn:
        raise UnsupportedFeatureError(_FIXED_ENDS_MESSAGE)

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> NoReturn:
        raise UnsupportedFeatureError(_FIXED_ENDS_MESSAGE)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedFeatureError(_FIXED_ENDS_MESSAGE)

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """One entry, so that transformers' pipelines do not move the model."""
        return {"": self.device}

    @property
    def device(self) -> torch.device:
        """Device of embedding, head and results."""
        return self.ends.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ends.dtype

    @property
    def num_blocks(self) -> int:
        return self._layers[-1][1].end

    def samples(self) -> Iterator[MetricSample]:
        """Prometheus samples of the connection; empty before the first session."""
        connection = self._connection
        if connection is not None:
            yield from connection.value.samples()
        if self.drafting is not None:
            yield from self.drafting.samples()

    def join(self) -> None:
        """Join the swarm now instead of with the first session. Raises what `connect` raises."""
        if any(connection is None and len(span) for connection, span in self._layers):
            self._ensure_connection()

    def inference_session(
        self,
        max_length: int,
        batch_size: int = 1,
        *,
        prompt: torch.Tensor | Sequence[Sequence[int]] | None = None,
        prefix_scope: str = "",
        adapter: str | None = None,
        interrupt: Interrupt | None = None,
    ) -> InferenceSession:
        """Open a session for up to `max_length` tokens in each of `batch_size` rows.

        `prompt` (ids [B, L], or each row's ids without padding) lets nodes reuse their prefix
        caches: `session.lengths` then says how many tokens of each row are held, always fewer than
        the prompt has. The caller sends the rest. Prefixes are shared only between sessions of the
        same `prefix_scope`: give each user one of their own where users must not detect each
        other's prompts.

        `adapter` names a published adapter (`name`, `author/name` or a digest) that the nodes use
        beside the model; None: that of `from_pretrained`, if any.

        `interrupt` lets other threads end the session, also while it waits for nodes.

        Raises `ContextLengthError` where the model or the route cannot hold that many tokens,
        `MissingBlocksError` where blocks have no node, `AdapterError` for an adapter that is not
        published, `RefusedError` where nodes do not serve it, `ValueError` for sizes below 1.
        """
        if max_length < 1 or batch_size < 1:
            raise ValueError("max_length and batch_size must be at least 1")
        self._check_length(max_length)
        layers = self._connected_layers()
        prefix = self._session_prefix(prompt, batch_size, prefix_scope)
        context = open_layers(
            layers,
            rows=batch_size,
            max_tokens=max_length,
            prefix=prefix,
            adapter=self._find_adapter(self._adapter if adapter is None else adapter),
        )
        held = self._loop.hold(context, interrupt=interrupt)
        session = InferenceSession(self.ends, self._loop, held, prefix, interrupt)
        self._sessions.add(session)
        return session

    def finetuning_session(
        self,
        config: AdapterConfig | str | Path,
        *,
        optimizer: OptimizerConfig | None = None,
        seed: int = 0,
        options: FinetuningOptions | None = None,
    ) -> FinetuningSession:
        """Open a session that trains adapters on the nodes of the swarm.

        `config` is PEFT's (`peft.LoraConfig`, `peft.IA3Config`, `peft.PromptTuningConfig`), a
        `BottleneckConfig`, a `DeepPromptConfig`, or a `FullConfig`, which trains the weights of the
        blocks. Adapters have the initial values that PEFT gives them in one process after
        `torch.manual_seed(seed)`. Or it is the folder of an adapter, of PEFT's or of
        `save_pretrained`, whose training goes on. Blocks that the client keeps
        (`client_blocks`), and the prompt of a `PromptTuningConfig`, are trained here. Raises
        `ConfigError` for adapters that nodes do not train and for a checkpoint of another session,
        `MissingBlocksError` and `RefusedError` where nodes do not.
        """
        require_training()
        from nesa_node.client.training.finetuning_session import (
            FinetuningOptions,
            FinetuningSession,
        )
        from nesa_node.client.training.opening import TrainingOpener
        from nesa_node.engine.training.adapters import OptimizerConfig

        opener = TrainingOpener(
            self._checkpoint,
            self.ends.embedder,
            self._layers,
            self._ensure_connection,
            config,
            optimizer or OptimizerConfig(),
            seed,
        )
        return FinetuningSession(
            self.ends,
            self._loop,
            opener.open,
            opener.spec,
            opener.config,
            options or FinetuningOptions(),
            prompt=opener.prompt,
            initial_state=opener.initial_state,
            model_id=opener.model_id,
            save=opener.save,
            model_config=self.config,
            generation_config=self.generation_config,
        )

    def find_served_modules(self) -> list[str] | None:
        """Names of a mixture's layers that nodes serve LoRA adapters of.

        None for other models: they serve those of all linear layers.
        """
        require_training()
        from nesa_node.engine.training.adapted_blocks import find_served_modules

        return find_served_modules(self._checkpoint)

    def _find_adapter(self, name: str | None) -> bytes:
        """Digest of a published adapter; empty without a name."""
        if not name:
            return b""
        connection: Any = self._ensure_connection()
        found = self._loop.run(connection.find_adapter(name))
        return bytes.fromhex(found.digest)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: SessionCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        output_hidden_states: HiddenStateSelection = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits [B, K, V] of `input_ids` [B, L]; K is L unless `logits_to_keep` selects.

        `attention_mask` [B, columns] hides padding on any side: padding is not sent and not counted
        in positions, and its logits are zeros. Without `past_key_values` (a `SessionCache`) the
        call opens a session and closes it. No gradients.

        With `output_hidden_states` the result's `hidden_states` are those of transformers' models:
        num_blocks + 1 tensors [B, L, D], the first block's input, then each block's output, the
        last one after the final norm; zeros at padding. If indices are given, the remaining entries
        are None. Each part between two wanted states is a session of its own, one after another: up
        to num_blocks round trips. Not available with `past_key_values`.
        """
        refuse_forward_arguments(kwargs)
        if output_hidden_states is None and past_key_values is None:
            output_hidden_states = self.config.output_hidden_states
        wanted = selected_indices(output_hidden_states, self.num_blocks)
        hidden_states: tuple[torch.Tensor | None, ...] | None = None
        if input_ids is None:
            raise ValueError("a distributed model needs input_ids")
        if past_key_values is not None and wanted:
            raise UnsupportedFeatureError(HIDDEN_STATES_NEED_WHOLE_TEXTS)
        if past_key_values is not None:
            logits = self._session_logits(
                past_key_values, input_ids, attention_mask, logits_to_keep
            )
        elif use_cache:
            raise UnsupportedFeatureError(
                "a cache needs a session in the swarm: open one with model.inference_session(...) "
                "and use session.step(), or pass past_key_values=SessionCache(session)"
            )
        elif wanted:
            logits, hidden_states = run_until_right(
                lambda: self._forward_with_hidden_states(
                    input_ids, attention_mask, logits_to_keep, wanted
                )
            )
        else:
            logits = run_until_right(
                lambda: self._forward_without_cache(input_ids, attention_mask, logits_to_keep)
            )
        cache: Any = past_key_values
        states: Any = hidden_states
        output = CausalLMOutputWithPast(logits=logits, past_key_values=cache, hidden_states=states)
        return output.to_tuple() if return_dict is False else output

    def close(self) -> None:
        """Close all sessions, leave the swarm and end the background thread. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            "a distributed model holds only its ends: download the checkpoint itself instead"
        )

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            "continuous batching happens on the nodes: call generate() from several threads"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `to`, `cuda`, `half` and the like end up here.
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if moved.dtype != self.dtype or moved.device != self.device:
            raise UnsupportedFeatureError(
                "a distributed model stays as it is: pass device= and dtype= to from_pretrained"
            )
        return self

    def _session_logits(
        self,
        cache: SessionCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
    ) -> torch.Tensor:
        if not isinstance(cache, SessionCache):
            raise UnsupportedFeatureError(
                f"a {type(cache).__name__} holds no keys of the swarm's: pass SessionCache(session)"
            )
        session = cache.require_session()
        batch = cache.add_columns(input_ids.to(self.device), attention_mask, logits_to_keep)
        want = batch.choose_want(logits_to_keep)
        hidden_TD = session.feed(batch.row_ids, want)
        return batch.logits(hidden_TD, want, logits_to_keep, self.ends.head)

    def _forward_without_cache(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
    ) -> torch.Tensor:
        rows, columns = input_ids.shape
        with self.inference_session(columns, rows) as session:
            cache = SessionCache(session)
            return self._session_logits(cache, input_ids, attention_mask, logits_to_keep)

    def _forward_with_hidden_states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        wanted: Collection[int],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Logits, and hidden states by index with None for those not in `wanted`."""
        ends, last = self.ends, self.num_blocks
        rows, columns = input_ids.shape
        if not input_ids.numel():
            raise ValueError(f"input_ids of shape {rows, columns} hold no tokens")
        self._check_length(columns)
        check_mask(attention_mask, columns)
        batch = pack(input_ids.to(self.device), attention_mask)
        hidden_TD = ends.embed(batch.row_ids, [0] * rows)
        slices = [RowSlice(row, 0, len(ids)) for row, ids in enumerate(batch.row_ids) if len(ids)]
        states = dict.fromkeys((*wanted, last), hidden_TD)
        if slices:
            layers = self._connected_layers()
            states = self._loop.run(run_block_outputs(layers, hidden_TD, slices, wanted))

        def unpacked(index: int) -> torch.Tensor | None:
            if index not in wanted:
                return None
            norm = ends.final_norm if index == last else lambda hidden: hidden
            return batch.logits(states[index].to(self.device), "all", 0, norm)

        output_TD = states[last].to(self.device)
        logits = batch.logits(output_TD, "all", logits_to_keep, ends.head)
        return logits, tuple(map(unpacked, range(last + 1)))

    def _connected_layers(self) -> list[tuple[SwarmConnection, Span]]:
        return [
            (self._ensure_connection() if connection is None else connection, span)
            for connection, span in self._layers
            if len(span)
        ]

    def _session_prefix(
        self, prompt: torch.Tensor | Sequence[Sequence[int]] | None, rows: int, scope: str
    ) -> SessionPrefix | None:
        """Prompt tokens and salt for the prefix cache; None if the cache is disabled."""
        if prompt is None:
            tokens: Sequence[Sequence[int]] = [()] * rows
        elif isinstance(prompt, torch.Tensor):
            tokens = (prompt[None] if prompt.ndim == 1 else prompt).tolist()
        else:
            tokens = prompt
        if len(tokens) != rows:
            raise ValueError(f"the session has {rows} rows, the prompt has {len(tokens)}")
        if self._prefix_salt is None:
            return None
        ends = self.ends

        async def inputs(slices: Sequence[RowSlice]) -> torch.Tensor:
            ids = [tokens[part.row][part.position :][: part.count] for part in slices]
            return ends.embed(
                [torch.tensor(row, device=ends.device) for row in ids],
                [part.position for part in slices],
            )

        salt = derive_scope_salt(self._prefix_salt, scope)
        return SessionPrefix(salt=salt, tokens=tokens, compute_inputs=inputs)

    def _check_length(self, length: int) -> None:
        if length > self.context_length:
            raise ContextLengthError(
                f"{length} tokens are more than the {self.context_length} that {self.name_or_path} "
                "holds: shorten the prompt or ask for fewer new tokens"
            )

    def _ensure_connection(self) -> SwarmConnection:
        with self._connection_lock:
            if (joined := self._live_connection()) is not None:
                return joined
            if self._connection is not None:
                # A lost connection is closed first: it may be using the same identity.
                self._connection.release()
            # In an empty context: tasks of the connection belong to no request.
            with track_wait("the swarm's initial peers to answer"):
                hold = partial(self._loop.hold, release_last=True)
                self._connection = Context().run(hold, self._connect(self.ends.head.compute))
            return self._connection.value

    def _live_connection(self) -> SwarmConnection | None:
        held = self._connection
        return held.value if held is not None and held.is_alive and not held.value.is_lost else None


def _describe_session(session: InferenceSession) -> str:
    hops = " → ".join(f"…{hop.peer_id[-6:]} {hop.span}" for hop in session.hops)
    return f"open session of {session.max_length} tokens: {hops}"


def _close(loop: LoopThread, on_close: Callable[[], None]) -> None:
    loop.close()
    on_close()
