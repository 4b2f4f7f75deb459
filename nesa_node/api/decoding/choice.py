"""Decoding state of one choice of a job.

V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from nesa_node.api.decoding.adjustments import CommonAdjustments
from nesa_node.api.decoding.grammar import Follower
from nesa_node.api.decoding.job import Chosen, Delta, FinishReason, Job
from nesa_node.api.decoding.sampler import Sampler
from nesa_node.api.decoding.stops import Stops
from nesa_node.api.decoding.text_stream import REPLACEMENT, TextStream
from nesa_node.api.decoding.vocabulary import Vocabulary


class Choice:
    """Samples the tokens of one choice and turns them into deltas, until it is `done`."""

    def __init__(
        self,
        job: Job,
        index: int,
        vocabulary: Vocabulary,
        follower: Follower | None,
        common: CommonAdjustments,
    ) -> None:
        self.index = index
        self.done = False
        self.last = -1
        """Last generated token, the next input of the model."""
        self._most_tokens = job.max_tokens
        self._count = 0
        self._ends = frozenset[int]() if job.ignore_eos else vocabulary.eos_ids
        self._sampler = Sampler(common, index)
        self._text = TextStream(vocabulary.text_rules)
        self._stops = Stops(job.stop)
        self._follower = follower

    @property
    def takes_best(self) -> bool:
        """Whether each token is the argmax of the logits, without adjustments or grammar."""
        return self._follower is None and self._sampler.takes_best

    def choose(self, logits_V: Tensor) -> int:
        """Sample the next token from float32 logits, which are not modified; `take` must follow."""
        allowed_V = None
        if self._follower is not None:
            allowed_V = self._follower.allowed(len(logits_V), logits_V.device)
        return self._sampler.choose(logits_V, allowed_V)

    def take(self, chosen: Chosen) -> Delta:
        """Append a token to the choice; return its delta."""
        self.last = chosen.token_id
        self._count += 1
        reason, text = self._reason(), ""
        if self.last not in self._ends:
            text = self._stops.push(self._text.push(self.last))
        if reason is not None and not self._stops.found:
            rest = self._text.finish()
            # The limit may have cut a character: its replacement is not sent.
            text += self._stops.push(rest.rstrip(REPLACEMENT) if reason == "length" else rest)
        if self._stops.found:
            reason = "stop"
        elif reason is not None:
            text += self._stops.finish()
        self.done = reason is not None
        return Delta(index=self.index, text=text, tokens=(chosen,), finish_reason=reason)

    def _reason(self) -> FinishReason | None:
        """Finish reason by the last token alone, without stop texts; None if the choice goes on."""
        is_complete = self._follower is not None and self._follower.take(self.last)
        if self.last in self._ends or is_complete:
            return "stop"
        return "length" if self._count == self._most_tokens else None
