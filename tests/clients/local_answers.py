"""What the demo model answers where transformers runs it alone.

L tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Message = dict[str, str]


class LocalAnswers:
    """The model in this process, in float32."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model: Any = model
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, with the opening of the answer."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def greedy(self, ids: Sequence[int], new_tokens: int) -> list[int]:
        """The ids that follow, the end of the answer left out."""
        prompt_BL = torch.tensor([list(ids)])
        out_BL: Tensor = self._model.generate(
            prompt_BL,
            attention_mask=torch.ones_like(prompt_BL),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        new: list[int] = out_BL[0, len(ids) :].tolist()
        return new[:-1] if new and new[-1] == self.tokenizer.eos_token_id else new

    def text(self, ids: Sequence[int]) -> str:
        words: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return words

    def greedy_chat(self, messages: Sequence[Message], new_tokens: int) -> str:
        return self.text(self.greedy(self.prompt(messages), new_tokens))

    @torch.inference_mode()
    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """[L, V]: of whatever follows each of the tokens."""
        logits_LV: Tensor = self._model(torch.tensor([list(ids)])).logits[0]
        return torch.log_softmax(logits_LV.double(), dim=-1)

    @torch.inference_mode()
    def embedding(self, text: str) -> Tensor:
        """[D]: the mean of the last hidden states, of length 1."""
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        hidden_LD: Tensor = self._model.model(ids).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden_LD.double().mean(0), dim=0)
