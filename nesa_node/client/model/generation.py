"""transformers' `generate` over sessions of a swarm.

B rows, L columns, C all columns, V vocabulary.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, GenerationMixin

from nesa_node.client.model.generation_options import (
    find_stop_condition,
    refuse_forward_arguments,
    refuse_generation_options,
)
from nesa_node.client.model.head import EmbeddingAndHead
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.model.layers import HiddenStateSelection, PackedBatch, check_mask, pack
from nesa_node.client.model.reruns import run_until_right
from nesa_node.client.model.speculative_decoding import SpeculativeDecoding, may_speculate
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.core.errors import ContextLengthError, UnsupportedFeatureError


class SessionCache:
    """transformers' `past_key_values`: columns of a padded batch, padding included, that went
    through one session. Keys and values are on nodes.

    With `match_prefix` the first batch is a text from its beginning: tokens that the session
    already holds are not sent again unless their logits are wanted, and what it holds beyond the
    common prefix is rolled back.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self, session: InferenceSession | None = None, *, match_prefix: bool = False
    ) -> None:
        self.session = session
        self.prompt_BL: torch.Tensor | None = None
        self.prompt_mask_BL: torch.Tensor | None = None
        self.output_hidden_states: HiddenStateSelection = None
        """Value of `generate`'s option of that name."""
        self._match_prefix = match_prefix
        self._columns = 0
        self._mask_BC: torch.Tensor | None = None
        if session is not None and not match_prefix:
            if len(set(session.lengths)) != 1:
                raise ValueError("rows of different lengths: continue them with session.step()")
            self._columns = session.position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns so far, padding included."""
        return self._columns

    def get_max_length(self) -> int:
        return self.require_session().max_length

    def activate_past_recording(self) -> None:
        """Do nothing: `crop` is always possible."""

    def add_columns(
        self,
        ids_BL: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> PackedBatch:
        """Append new columns; return the tokens of them that the session has to run.

        `attention_mask` [B, C] covers the earlier columns as well, as in transformers, and must
        hide the same ones as before.
        """
        session = self.require_session()
        session.check_batch(ids_BL)
        columns = self._columns + ids_BL.shape[1]
        mask_BL = self._new_mask_columns(attention_mask, columns)
        batch = pack(ids_BL, mask_BL)
        if self._match_prefix:
            self._match_prefix = False
            wanted = logits_to_keep if isinstance(logits_to_keep, int) else 0
            # Columns before those with wanted logits; `[:, :-0]` is empty, as intended.
            before = pack(ids_BL[:, :-wanted], None if mask_BL is None else mask_BL[:, :-wanted])
            texts = [ids_L.tolist() for ids_L in before.row_ids]
            batch = pack(ids_BL, mask_BL, session.keep_common_prefix(texts))
        self._columns = columns
        return batch

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns, as transformers' `crop` does."""
        if tokens_to_remove > 0 or -tokens_to_remove > self._columns:
            raise ValueError(f"cannot crop {self._columns} columns by {tokens_to_remove}")
        if tokens_to_remove == 0:
            return
        session = self.require_session()
        removed = [-tokens_to_remove] * session.rows
        if self._mask_BC is not None:
            removed = self._mask_BC[:, tokens_to_remove:].ne(0).sum(1).tolist()
            self._mask_BC = self._mask_BC[:, :tokens_to_remove]
        session.rollback([held - less for held, less in zip(session.lengths, removed, strict=True)])
        self._columns += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row continue as a copy of row `beam_idx[row]`."""
        self.require_session().reorder(beam_idx.tolist())
        if self._mask_BC is not None:
            self._mask_BC = self._mask_BC[beam_idx.to(self._mask_BC.device)]

    def prompt_rows(self, mask_BL: torch.Tensor | None) -> list[list[int]] | None:
        """Token ids of each row of the first batch without padding; None if unknown."""
        if self.prompt_BL is None:
            return None
        return [ids_L.tolist() for ids_L in pack(self.prompt_BL, mask_BL).row_ids]

    def require_session(self) -> InferenceSession:
        if self.session is None:
            raise ValueError("this cache has no session yet: let generate() open it")
        return self.session

    def _new_mask_columns(self, mask_BC: torch.Tensor | None, columns: int) -> torch.Tensor | None:
        """Mask of the new columns [B, L]; None where nothing is hidden."""
        if mask_BC is None:
            if self._mask_BC is not None and not bool(self._mask_BC.all()):
                raise ValueError("earlier columns had padding: pass the whole attention_mask again")
            self._mask_BC = None
            return None
        check_mask(mask_BC, columns)
        earlier_BC = mask_BC[:, : self._columns]
        same = (
            bool(earlier_BC.all())
            if self._mask_BC is None
            else torch.equal(earlier_BC, self._mask_BC)
        )
        if not same:
            raise UnsupportedFeatureError(
                "attention_mask hides or shows tokens that were sent before: roll the session back"
            )
        self._mask_BC = mask_BC
        return mask_BC[:, self._columns :]


class DistributedGenerationMixin(GenerationMixin):
    """`generate` for a model that opens sessions; the subclass provides the first members.

    transformers recognizes generative models by a base class with a name that ends in
    `GenerationMixin`.
    """

    context_length: int
    ends: EmbeddingAndHead
    """Embedding and head, which run in this process."""
    drafting: Drafting | None = None
    """Drafts of several tokens, which one step verifies; None: each step has one token."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Logits, and hidden states if requested."""
        raise NotImplementedError

    def inference_session(
        self, max_length: int, batch_size: int = 1, *, prompt: Any = None
    ) -> InferenceSession:
        """Open the session of one `generate` call."""
        raise NotImplementedError

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *args: Any,
        session: InferenceSession | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers' `generate` does, with its arguments, in the swarm.

        Each call opens a session for the prompt and its new tokens and closes it; tokens of the
        prompt in nodes' prefix caches are not computed again. With `session` it continues that one:
        the prompt is still given whole, and only tokens that the session lacks are sent. Raises
        `ContextLengthError` before any prefill where the result could exceed the model, the route
        or the session, and `UnsupportedFeatureError` for contrastive search, static caches and
        other modes that need local layers. The result's `past_key_values` is None.

        With `output_hidden_states` and `return_dict_in_generate`, greedy search and sampling run
        the finished texts once more, as `forward` does, and split the result into steps.

        Where an audit finds a node's work to be wrong, the call runs again without that node; with
        a `streamer`, or where several nodes in a row lie, it raises `WrongActivationsError`.
        """
        if kwargs.get("past_key_values") is not None:
            raise UnsupportedFeatureError(
                "generate() takes no past_key_values: pass session=model.inference_session(...)"
            )
        if isinstance(kwargs.get("custom_generate"), str):
            raise UnsupportedFeatureError(
                "custom_generate from the hub runs foreign code: pass a function"
            )
        if kwargs.get("cache_implementation") == "paged":
            raise UnsupportedFeatureError(
                "the nodes hold the cache: leave out cache_implementation"
            )
        if session is not None and session.ends is not self.ends:
            raise ValueError("the session was opened by another model")

        def run() -> tuple[Any, SessionCache]:
            cache = SessionCache(session, match_prefix=True)
            try:
                found: Any = super(DistributedGenerationMixin, self).generate(  # type: ignore[misc]
                    inputs, *args, past_key_values=cache, **kwargs
                )
                if session is None and cache.session is not None:
                    cache.session.finish()
            finally:
                if session is None and cache.session is not None:
                    cache.session.close()
            return found, cache

        # What a streamer got cannot be taken back, nor a session that goes on.
        is_final = session is not None or kwargs.get("streamer") is not None
        result, cache = run() if is_final else run_until_right(run)
        if isinstance(result, dict):
            result["past_key_values"] = None
            if cache.output_hidden_states:
                result["hidden_states"] = self._hidden_states_per_step(result["sequences"], cache)
        return result

    def _hidden_states_per_step(
        self, ids_BL: torch.Tensor, cache: SessionCache
    ) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        """Hidden states of `forward`, split into the prompt and each token fed after it."""
        assert cache.prompt_BL is not None
        prompt, mask_BL = cache.prompt_BL.shape[1], cache.prompt_mask_BL
        fed_BL = ids_BL[:, :-1]
        if mask_BL is not None:
            mask_BL = pad(mask_BL, (0, fed_BL.shape[1] - prompt), value=1)
        states = self.forward(
            fed_BL, mask_BL, logits_to_keep=1, output_hidden_states=cache.output_hidden_states
        ).hidden_states
        steps = [slice(prompt), *(slice(at, at + 1) for at in range(prompt, fed_BL.shape[1]))]
        return tuple(
            tuple(None if state is None else state[:, columns] for state in states)
            for columns in steps
        )

    def _sample(
        self,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        columns = input_ids.shape[1]
        ending = find_stop_condition(
            generation_config, logits_processor, stopping_criteria, columns
        )
        mask_BL = model_kwargs.get("attention_mask")
        ends_with_padding = mask_BL is not None and not bool(mask_BL[:, -1].all())
        is_plain = ending is not None and len(input_ids) == 1
        speculates = self.drafting is not None and may_speculate(
            generation_config, logits_processor, stopping_criteria, len(input_ids)
        )
        if synced_gpus or ends_with_padding or not (is_plain or speculates):
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        cache: SessionCache = model_kwargs["past_key_values"]
        prompt = cache.add_columns(input_ids.to(self.ends.device), mask_BL, logits_to_keep=1)
        if speculates:
            assert self.drafting is not None
            session, mask = cache.require_session(), mask_BL
            texts = [ids_L.tolist() for ids_L in pack(input_ids, mask).row_ids]
            with self.drafting.speculate(session.session_id, texts) as speculator:
                return SpeculativeDecoding(
                    session,
                    speculator,
                    generation_config,
                    logits_processor,
                    stopping_criteria,
                    greedy_stop=ending if is_plain else None,
                    streamer=streamer,
                ).run(input_ids, prompt.row_ids)
        assert ending is not None
        tokens = []
        # Greedy tokens are chosen on the event loop, without this thread between two of them.
        with closing(
            cache.require_session().generate_greedy(prompt.row_ids[0], ending)
        ) as following:
            for token in following:
                tokens.append(token)
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        return torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=-1)

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        config, model_kwargs = super()._prepare_generation_config(  # type: ignore[misc]
            generation_config, **kwargs
        )
        refuse_generation_options(config)
        refuse_forward_arguments(
            {name: model_kwargs.get(name) for name in ("inputs_embeds", "position_ids")}
        )
        # Neither option changes a token: without a cache every step would send the whole text
        # again, and long prompts are split into chunks when they are sent.
        config.use_cache = True
        config.prefill_chunk_size = None
        # Decode steps return none: they are computed after the session has released its cache.
        cache: SessionCache = model_kwargs["past_key_values"]
        cache.output_hidden_states = config.output_hidden_states
        config.output_hidden_states = None
        model_kwargs.pop("output_hidden_states", None)
        return config, model_kwargs

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        # The mixin is untyped, as above.
        expand: Any = super()._expand_inputs_for_generation  # type: ignore[misc]
        ids_BL, model_kwargs = expand(*args, **kwargs)
        cache: SessionCache = model_kwargs["past_key_values"]
        cache.prompt_BL, cache.prompt_mask_BL = ids_BL, model_kwargs.get("attention_mask")
        return ids_BL, model_kwargs

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        cache: SessionCache = model_kwargs["past_key_values"]
        mask_BL = model_kwargs.get("attention_mask")
        padding = 0 if mask_BL is None else int((mask_BL == 0).sum(1).min())
        # The last token is never fed, but callers rely on the session having room for it.
        max_length = max_cache_length + 1 - padding
        # Candidate tokens are verified all at once, however few new tokens remain.
        candidates = generation_config.prompt_lookup_num_tokens or 0
        max_length = max(max_length, min(max_length + candidates, self.context_length))
        if cache.session is None:
            copies = (generation_config.num_return_sequences, generation_config.num_beams)
            rows = batch_size * max(count or 1 for count in copies)
            prompt = cache.prompt_rows(mask_BL)
            cache.session = self.inference_session(max_length, rows, prompt=prompt)
        elif max_length > cache.session.max_length:
            raise ContextLengthError(
                f"prompt and new tokens may need {max_length} tokens, the session was opened for "
                f"{cache.session.max_length}: raise its max_length or lower max_new_tokens"
            )
