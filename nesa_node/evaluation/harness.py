"""Adapter of lm-evaluation-harness to distributed models.

The harness is optional (`pip install 'nesa-node[eval]'`); this module imports it at the top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.evaluation.scoring import (
    encode_pair,
    encode_text,
    prefix_token,
    rolling_queries,
    score_queries,
)

try:
    from lm_eval.api.model import LM
except ImportError as missing:
    raise UnsupportedFeatureError(
        "lm-evaluation-harness is not installed: pip install 'nesa-node[eval]'"
    ) from missing

DEFAULT_NEW_TOKENS = 256
"""Most new tokens of an answer if the task sets no limit."""


class HarnessModel(LM):
    """A distributed model as an `LM` of the harness. Requests are computed in order.

    Texts are tokenized as in the harness's `HFLM`, and truncated on the left to `max_length` (by
    default the model's context).
    """

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._tokenizer: Any = tokenizer
        self.max_length = min(max_length or model.context_length, model.context_length)

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood of each `(context, continuation)`, and whether it is the greedy one."""
        queries = [
            encode_pair(self._tokenizer, *request.args, max_tokens=self.max_length)
            for request in requests
        ]
        answers = [(one.total, one.is_greedy) for one in score_queries(self._model, queries)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood of each whole text, in windows of `max_length` tokens."""
        texts = [
            rolling_queries(
                encode_text(self._tokenizer, request.args[0]),
                prefix_token=prefix_token(self._tokenizer),
                context=self.max_length,
            )
            for request in requests
        ]
        scores = score_queries(self._model, [query for queries in texts for query in queries])
        totals = [sum(next(scores).total for _ in queries) for queries in texts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continuation of each `(context, options)`, up to the first of `options["until"]`."""
        answers = []
        for request in requests:
            context, options = request.args
            answers.append(self._generate(context, options))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def decode(self, ids_L: torch.Tensor) -> str:
        return str(self._tokenizer.decode(ids_L, skip_special_tokens=True))

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        given = dict(options)
        until = given.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(given.pop("max_gen_toks", DEFAULT_NEW_TOKENS))
        if most >= self.max_length:
            raise ConfigError(f"{most} new tokens leave no room in {self.max_length} tokens")
        if not given.get("temperature"):
            given |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        prompt = encode_text(self._tokenizer, context) or [prefix_token(self._tokenizer)]
        ids_1L = torch.tensor([prompt[-(self.max_length - most) :]])
        new_ids = self._model.generate(
            ids_1L,
            attention_mask=torch.ones_like(ids_1L),
            max_new_tokens=most,
            stopping_criteria=StoppingCriteriaList([_StopAtText(self, ids_1L.shape[1], stops)]),
            pad_token_id=prefix_token(self._tokenizer),
            **given,
        )[0, ids_1L.shape[1] :]
        text = self.decode(new_ids)
        for stop in stops:
            text = text.partition(stop)[0]
        return text


class _StopAtText(StoppingCriteria):
    """Stops when the decoded text contains a stop text.

    The stop criterion of transformers needs the characters of each token, which some tokenizers do
    not provide.
    """

    def __init__(self, model: HarnessModel, prompt: int, stops: Sequence[str]) -> None:
        self._model = model
        self._prompt = prompt
        self._stops = stops

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        text = self._model.decode(input_ids[0, self._prompt :])
        stopped = any(stop in text for stop in self._stops)
        return torch.tensor([stopped], device=input_ids.device)
