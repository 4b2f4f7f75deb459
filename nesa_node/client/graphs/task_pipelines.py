"""Pipelines of tasks that transformers 5 has none of: answers to questions, texts of texts and
pictures. They are called, and answer, as those of transformers 4 did.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nesa_node.core.errors import ConfigError


class QuestionAnsweringPipeline:
    """Finds the answer to a question in a text.

    Called with `question` and `context`: two texts, or two lists of texts. The answer is a dict of
    `score`, `start`, `end` (characters of the text) and `answer`; a list of them for `top_k` above
    one and for lists.
    """

    _load_tokenizer = True
    _load_image_processor = _load_feature_extractor = _pipeline_calls_generate = False

    def __init__(self, model: Any, tokenizer: Any, **_: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def __call__(
        self,
        question: str | Sequence[str] | dict[str, Any],
        context: str | Sequence[str] | None = None,
        *,
        top_k: int = 1,
        max_answer_len: int = 15,
        max_seq_len: int = 384,
        doc_stride: int = 128,
        handle_impossible_answer: bool = False,
    ) -> Any:
        """Answer questions. `max_answer_len`, `max_seq_len`, `doc_stride`: tokens.

        A text of more than `max_seq_len` is read in parts that share `doc_stride`. With
        `handle_impossible_answer` an empty answer may be the best. Raises `ConfigError`.
        """
        if isinstance(question, dict):
            pair: Any = question
            question, context = pair["question"], pair.get("context")
        if context is None:
            raise ConfigError("question answering needs a context: the text with the answer")
        if top_k < 1 or max_answer_len < 1:
            raise ConfigError("top_k and max_answer_len are at least 1")
        is_single = isinstance(question, str) and isinstance(context, str)
        questions = [question] if isinstance(question, str) else list(question)
        contexts = [context] if isinstance(context, str) else list(context)
        if len(questions) == 1:
            questions *= len(contexts)
        if len(contexts) == 1:
            contexts *= len(questions)
        if len(questions) != len(contexts):
            raise ConfigError(f"{len(questions)} questions and {len(contexts)} contexts")
        answers = []
        for one, text in zip(questions, contexts, strict=True):
            if not one.strip() or not text.strip():
                raise ConfigError("the question or its context is empty")
            found = self._find_answers(
                one, text, max_answer_len, max_seq_len, doc_stride, handle_impossible_answer
            )
            best = sorted(found, key=lambda each: -each["score"])[:top_k]
            answers.append(best[0] if top_k == 1 else best)
        return answers[0] if is_single else answers

    @torch.no_grad()
    def _find_answers(
        self,
        question: str,
        context: str,
        max_answer_len: int,
        max_seq_len: int,
        doc_stride: int,
        handle_impossible_answer: bool,
    ) -> list[dict[str, Any]]:
        most = min(self._tokenizer.model_max_length, max_seq_len)
        num_asked = len(self._tokenizer(question)["input_ids"])
        if num_asked + 2 > most:
            raise ConfigError(f"the question has {num_asked} tokens; at most {most - 2} are taken")
        parts = self._tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=most,
            stride=min(doc_stride, (most - num_asked) // 2),
            padding=True,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets, _ = parts.pop("offset_mapping"), parts.pop("overflow_to_sample_mapping", None)
        output = self._model(**parts)
        found: dict[tuple[int, int], float] = {}
        impossible = 1.0
        for index in range(len(offsets)):
            in_context = [each == 1 for each in parts.sequence_ids(index)]
            is_start = parts["input_ids"][index] == self._tokenizer.cls_token_id
            allowed = torch.tensor(in_context) | is_start
            start, end = (
                logits[index].float().masked_fill(~allowed, -torch.inf).softmax(dim=-1)
                for logits in (output.start_logits, output.end_logits)
            )
            impossible = min(impossible, float((start * end)[is_start].sum()))
            start, end = (each.masked_fill(is_start, 0) for each in (start, end))
            scores = torch.outer(start, end).triu().tril(max_answer_len - 1)
            count = min(20, int((scores > 0).sum()))
            places = offsets[index]
            for place in scores.flatten().topk(count).indices.tolist():
                first, last = divmod(place, len(start))
                span = _widen_to_words(context, int(places[first][0]), int(places[last][1]))
                found[span] = max(found.get(span, 0.0), float(scores[first, last]))
        answers = [
            {"score": score, "start": start, "end": end, "answer": context[start:end]}
            for (start, end), score in found.items()
        ]
        if handle_impossible_answer:
            answers.append({"score": impossible, "start": 0, "end": 0, "answer": ""})
        return answers


def _widen_to_words(context: str, start: int, end: int) -> tuple[int, int]:
    while start > 0 and context[start - 1].isalnum():
        start -= 1
    while end < len(context) and context[end].isalnum():
        end += 1
    return start, end


class TextToTextPipeline:
    """Writes a text for a text, with an encoder-decoder: a translation or a summary.

    Called with a text or a list of texts, and options of `generate`; the answer is a list of dicts
    of one text, `translation_text` or `summary_text`.
    """

    _load_tokenizer = _pipeline_calls_generate = True
    _load_image_processor = _load_feature_extractor = False

    def __init__(self, model: Any, tokenizer: Any, task: str, **_: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._key = "summary_text" if task == "summarization" else "translation_text"
        specific = getattr(model.config, "task_specific_params", None) or {}
        self._options: dict[str, Any] = dict(specific.get(task, {}))
        self._prefix = str(self._options.pop("prefix", getattr(model.config, "prefix", None) or ""))

    @torch.no_grad()
    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **options: Any,
    ) -> list[dict[str, str]]:
        """Write texts. `src_lang` and `tgt_lang` are for tokenizers of several languages.

        Raises `ConfigError` for an empty text, and languages that the tokenizer does not know.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        if not given or not all(text.strip() for text in given):
            raise ConfigError("a text is empty")
        tokenizer = self._tokenizer
        if src_lang is not None or tgt_lang is not None:
            options = {**self._choose_languages(src_lang, tgt_lang), **options}
        tokens = tokenizer(
            [self._prefix + text for text in given],
            padding=True,
            truncation=True,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        made = self._model.generate(**tokens, **{**self._options, **options})
        return [
            {self._key: text} for text in tokenizer.batch_decode(made, skip_special_tokens=True)
        ]

    def _choose_languages(self, source: str | None, target: str | None) -> dict[str, Any]:
        tokenizer = self._tokenizer
        known = getattr(tokenizer, "lang_code_to_id", None) or {
            token: tokenizer.convert_tokens_to_ids(token)
            for token in getattr(tokenizer, "additional_special_tokens", ())
        }
        for language in filter(None, (source, target)):
            if language not in known:
                shown = ", ".join(sorted(known)[:12]) or "none"
                raise ConfigError(f"the tokenizer knows no language {language!r}; it has {shown}")
        if source is not None:
            tokenizer.src_lang = source
        return {} if target is None else {"forced_bos_token_id": known[target]}


class ImageToTextPipeline:
    """Writes a caption for a picture.

    Called with a picture (a path, or Pillow's) or a list of them; each answer is a list of one
    dict of `generated_text`.
    """

    _load_tokenizer = _load_image_processor = _pipeline_calls_generate = True
    _load_feature_extractor = False

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any, **_: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._processor = image_processor

    @torch.no_grad()
    def __call__(self, images: Any, **options: Any) -> Any:
        """Write captions; `options` are those of `generate`."""
        from PIL import Image

        given = list(images) if isinstance(images, list | tuple) else [images]
        answers = []
        for each in given:
            if isinstance(each, str | Path):
                with Image.open(each) as opened:
                    image = opened.convert("RGB")
            else:
                image = each.convert("RGB")
            pixels = self._processor(images=image, return_tensors="pt")["pixel_values"]
            made = self._model.generate(pixel_values=pixels, **options)
            texts = self._tokenizer.batch_decode(made, skip_special_tokens=True)
            answers.append([{"generated_text": text.strip()} for text in texts])
        return answers if isinstance(images, list | tuple) else answers[0]
