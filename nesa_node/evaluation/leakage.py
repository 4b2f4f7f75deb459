"""What nodes of a live swarm can recover of a text, mode by mode, from what they received.

The attacker has the public model and a text of its own, on which it trains; what it attacks are
hidden states (or ciphertexts) of another text that the evaluator's own nodes recorded in a swarm.

T tokens, L tokens of a window, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.core.settings.noise_spec import NoiseSpec
from nesa_node.evaluation.leakage_claims import AttackName
from nesa_node.evaluation.leakage_rows import LeakageRow, Recovered
from nesa_node.evaluation.recording_node import RecordingNode, recording_swarm
from nesa_node.privacy.attacks.folded_weights import (
    FoldingKey,
    Matrix,
    recover_key_from_text,
    recover_key_from_weights,
)
from nesa_node.privacy.attacks.likelihood_probe import LikelihoodProbe
from nesa_node.privacy.attacks.logit_lens import read_next_tokens
from nesa_node.privacy.attacks.public_model import PublicModel
from nesa_node.privacy.attacks.ridge_probe import RidgeProbe, whiten
from nesa_node.privacy.attacks.traffic import read_lengths
from nesa_node.privacy.attacks.vocabulary_search import (
    Signature,
    inner_products,
    search_tokens,
    sorted_values,
    states_as_they_are,
)
from nesa_node.privacy.masked_product import MASK_BITS, masked_bytes, unpack_masked
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.noise.gaussian_mechanism import compose_epsilon, find_epsilon
from nesa_node.privacy.packing import unpack_residues
from nesa_node.privacy.parameters import RingParameters
from nesa_node.swarm.protocol.private_messages import EncryptedInput, MaskedInput

CLIP_NORMS = 4.0
"""A clip costs perplexity, too: a lower one cuts states of frequent tokens, and not only those of
first positions, which are many times as large.
"""
DEPTHS, NOISE_BLOCK = (1, 2, 4, 8, 16), 4
"""Blocks after which nodes begin, and those that the client computes before noise."""
MIN_BLOCKS = 4
SEARCHED_BLOCKS = 2
"""Blocks after which the vocabulary is searched."""
TEMPLATE_INPUTS = 8
"""First positions that a chat template makes known."""


@dataclass(frozen=True, slots=True)
class LeakageSetup:
    """Texts and sizes. The attacker trains on the first text, the second one is attacked."""

    training_ids: Tensor
    """[windows, L] of the attacker's text."""
    secret_ids: Tensor
    """[windows, L] of the text that goes through the swarm."""
    depths: tuple[int, ...] = DEPTHS
    noise_deviations: tuple[float, ...] = (0.5, 1.0, 2.0)
    noise_block: int = NOISE_BLOCK
    delta: float = 1e-5
    searched_tokens: int = 24
    new_tokens: int = 16
    encrypted_tokens: int = 128
    known_inputs: int = 600
    """Positions of the text that one attack on folded weights knows; the rest is attacked."""
    seed: int = 0


def cut_windows(ids: Sequence[int], length: int) -> Tensor:
    """[windows, length], without the rest."""
    count = len(ids) // length
    return torch.tensor(ids[: count * length]).view(count, length)


class LeakageMeasurement:
    """Runs a model's swarm, mode by mode, and attacks what its nodes received."""

    def __init__(self, model: Path, setup: LeakageSetup) -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        self._folder = model
        self._setup = setup
        self._public = auto.from_pretrained(
            model, dtype=torch.float32, trust_remote_code=False
        ).eval()
        self._num_blocks = int(self._public.config.num_hidden_layers)
        depths = [*setup.depths, setup.noise_block, SEARCHED_BLOCKS]
        if not 0 < max(depths) < self._num_blocks:
            raise ConfigError(f"depths must be below the model's {self._num_blocks} blocks")
        self._table_VD = self._public.get_input_embeddings().weight.detach().float()
        self._white_VD = whiten(self._table_VD)
        self._training: dict[int, Tensor] = {}

    @property
    def chance_percent(self) -> float:
        """Share of the secret text that is the most frequent token of the attacker's."""
        return self._chance(self._setup.secret_ids)

    def _chance(self, tokens: Tensor) -> float:
        frequent = int(self._setup.training_ids.flatten().bincount().argmax())
        return 100 * float((tokens == frequent).float().mean())

    def rows(self) -> Iterator[LeakageRow]:
        """Measure all modes. Raises what swarms and sessions raise."""
        yield from self.plain_rows()
        yield self.split_row()
        yield from self.noise_rows()
        yield self.folded_row()
        yield self.private_row("ckks")
        yield self.private_row("masks")

    def plain_rows(self) -> Iterator[LeakageRow]:
        """Mode "none": one row for each depth at which a node of a chain begins."""
        depths = sorted({*self._setup.depths, SEARCHED_BLOCKS})
        with self._swarm(depths) as nodes:
            with self._client(nodes) as model:
                perplexity = self._send_text(model)
                chat_ids = self._send_chat(model)
                speed, mb_per_token, lengths = self._generate(model, nodes)
            states = {node.span.start: self._recorded(node) for node in nodes}
            searched = next(node for node in nodes if node.span.start == SEARCHED_BLOCKS)
            chat_LD = _states_of_length(searched, len(chat_ids))[-1]
        found = self._search(chat_ids, chat_LD)
        for depth in depths:
            attacks = self._probe(self._training_states(depth), states[depth], depth)
            attacks += found if depth == SEARCHED_BLOCKS else []
            if depth == max(depths):
                attacks.append(self._read_ahead(states[depth]))
            if depth == depths[0]:
                attacks.append(lengths)
            yield LeakageRow(
                "none",
                f"node after {depth} block{'s' * (depth > 1)}",
                tuple(attacks),
                self.chance_percent,
                perplexity=perplexity,
                tokens_per_s=speed,
                mb_per_token=mb_per_token,
            )

    def split_row(self) -> LeakageRow:
        """Mode "client-blocks", in a star."""
        block = self._setup.noise_block
        with (
            self._swarm([block]) as nodes,
            self._client(nodes, client_blocks=(block, 1), routing="star") as model,
        ):
            perplexity = self._send_text(model)
            speed, mb_per_token, lengths = self._generate(model, nodes)
            states_TD = self._recorded(nodes[-1])
        return LeakageRow(
            "client-blocks",
            f"{block},1 and --route star",
            (*self._probe(self._training_states(block), states_TD, block), lengths),
            self.chance_percent,
            perplexity=perplexity,
            tokens_per_s=speed,
            mb_per_token=mb_per_token,
        )

    def noise_rows(self) -> Iterator[LeakageRow]:
        """Mode "noise", after some blocks of the client's, for each standard deviation.

        The unit is the mean standard deviation of a channel, without first positions, whose states
        are many times as large. The clip is `CLIP_NORMS` times the median norm.
        """
        block, delta = self._setup.noise_block, self._setup.delta
        plain_TD = self._training_states(block)
        usual_TD = plain_TD[self._usual(self._setup.training_ids)]
        unit = float(usual_TD.std(0).mean())
        clip = CLIP_NORMS * float(usual_TD.norm(dim=1).median())
        with self._swarm([block]) as nodes:
            for deviations in self._setup.noise_deviations:
                sigma = deviations * unit
                epsilon = find_epsilon(delta, 2 * clip / sigma)
                noise = NoiseSpec(float(f"{epsilon:.4g}"), delta, float(f"{clip:.4g}"))
                nodes[-1].received.clear()
                private = str(noise)
                with self._client(nodes, client_blocks=(block, 0), private=private) as model:
                    perplexity = self._send_text(model)
                    speed, mb_per_token, lengths = self._generate(model, nodes)
                    states_TD = self._recorded(nodes[-1])
                generator = torch.Generator().manual_seed(self._setup.seed)
                clipped_TD = plain_TD * (clip / plain_TD.norm(dim=1, keepdim=True)).clamp_max(1)
                # The attacker knows the setting, and trains with such noise.
                own_TD = clipped_TD + sigma * torch.randn(plain_TD.shape, generator=generator)
                yield LeakageRow(
                    "noise",
                    f"{noise}: {deviations:g} standard deviations after {block} blocks",
                    (*self._probe(own_TD, states_TD, block), lengths),
                    self.chance_percent,
                    perplexity=perplexity,
                    epsilon_token=noise.epsilon,
                    epsilon_text=compose_epsilon(noise.epsilon, delta, len(states_TD)),
                    tokens_per_s=speed,
                    mb_per_token=mb_per_token,
                )

    def folded_row(self) -> LeakageRow:
        """Mode "sve": the input of a block's gate and up, which get the same one.

        Computed from the public model; no swarm, since no node serves such weights.
        """
        block = self._setup.noise_block
        layer = self._public.base_model.layers[block]
        weights = [_weight(layer.mlp.gate_proj), _weight(layer.mlp.up_proj)]
        rng = np.random.default_rng(self._setup.seed)
        key = FoldingKey.random(len(weights[0]), [each.shape[1] for each in weights], rng)
        # Nodes hold weights and get inputs in float32.
        folded = [_as_float32(each) for each in key.fold(weights)]
        own_TD, secret_TD = (
            self._mlp_inputs(ids, block)
            for ids in (self._setup.training_ids, self._setup.secret_ids)
        )
        seen_TD = _as_float32(key.hide(secret_TD))
        template = secret_TD[:TEMPLATE_INPUTS], seen_TD[:TEMPLATE_INPUTS]
        # Of a short text at least half a window is left to attack.
        known = min(self._setup.known_inputs, len(secret_TD) - self._setup.secret_ids.shape[1] // 2)
        found: dict[AttackName, tuple[Matrix, int]] = {
            "public weights": (
                recover_key_from_weights(weights, folded, template),
                TEMPLATE_INPUTS,
            ),
            "known plaintext": (recover_key_from_text(secret_TD[:known], seen_TD[:known]), known),
        }
        targets_TD = self._table_VD[self._setup.training_ids.flatten()]
        probe = LikelihoodProbe.fit(torch.from_numpy(own_TD), targets_TD)
        return LeakageRow(
            "sve",
            f"inputs of gate and up of block {block}",
            tuple(
                self._recovered_by_key(probe, name, each, key.input_DD, seen_TD, given)
                for name, (each, given) in found.items()
            ),
            self.chance_percent,
        )

    def private_row(self, scheme: PrivateScheme) -> LeakageRow:
        """Mode `scheme`: the first block's products with tokens of both texts, in sessions of each.

        The probe is given as many residues of each ciphertext, or masked numbers, as a hidden state
        has values.
        """
        tokens, hidden = self._setup.encrypted_tokens, self._table_VD.shape[1]
        texts = [
            ids.flatten()[:tokens] for ids in (self._setup.training_ids, self._setup.secret_ids)
        ]
        seen: list[Tensor] = []
        speed = 0.0
        with self._swarm([], private=scheme, num_spans=1) as nodes:
            last = self._num_blocks - 1
            with self._client(nodes, client_blocks=(0, last), private=scheme, stock=0) as model:
                for ids_L in texts:
                    nodes[0].received.clear()
                    started = time.perf_counter()
                    with model.inference_session(max_length=len(ids_L)) as session:
                        session.step(ids_L[None])
                    speed = tokens / (time.perf_counter() - started)
                    seen.append(_first_numbers(nodes[0], scheme, hidden))
                sent = sum(len(payload) for _, payload in nodes[0].private_inputs())
        # How many ciphertexts a token has is known from the attacker's own session.
        chunks = len(seen[0]) // tokens
        counted = len(seen[1]) // chunks
        seen = [rows.view(-1, chunks * rows.shape[1]) for rows in seen]
        found = self._recover(seen[0], texts[0], seen[1])
        return LeakageRow(
            scheme,
            "one block on nodes; tokens/s and MB scaled from one block",
            (
                *(
                    Recovered(name, int((each == texts[1]).sum()), tokens)
                    for name, each in found.items()
                ),
                Recovered("traffic", int(counted == tokens), 1, f"{counted} tokens counted"),
            ),
            100 * float((texts[1] == int(texts[0].bincount().argmax())).float().mean()),
            tokens_per_s=speed / self._num_blocks,
            mb_per_token=self._num_blocks * sent / tokens / 1e6,
        )

    @contextmanager
    def _swarm(
        self, cuts: Sequence[int], *, num_spans: int | None = None, **options: Any
    ) -> Iterator[list[RecordingNode]]:
        """Recording nodes whose spans begin at 0 and at each cut, or one with the first block."""
        bounds = [0, *cuts, self._num_blocks]
        spans = [Span(a, b) for a, b in pairwise(bounds)] if num_spans is None else [Span(0, 1)]
        with (
            tempfile.TemporaryDirectory(prefix="nesa-leakage-") as folder,
            recording_swarm(self._folder, spans, Path(folder), **options) as nodes,
        ):
            yield nodes

    def _client(
        self, nodes: Sequence[RecordingNode], **options: Any
    ) -> DistributedModelForCausalLM:
        return AutoDistributedModelForCausalLM.from_pretrained(
            self._folder,
            initial_peers=nodes[0].addresses,
            dtype=torch.float32,
            audit=0,
            # Nodes are to receive all of a text, each time.
            reuse_prefix=False,
            **options,
        )

    def _send_text(self, model: DistributedModelForCausalLM) -> float:
        """Send the secret text, a session for each window. Returns its perplexity."""
        total, count = 0.0, 0
        for ids_L in self._setup.secret_ids:
            with model.inference_session(max_length=len(ids_L)) as session:
                logits_LV = session.step(ids_L[None])[0].float()
            losses = torch.nn.functional.cross_entropy(logits_LV[:-1], ids_L[1:], reduction="sum")
            total, count = total + float(losses), count + len(ids_L) - 1
        return math.exp(total / count)

    def _send_chat(self, model: DistributedModelForCausalLM) -> Tensor:
        """Send the start of the secret text as a prompt of its own, and return it."""
        # Another length than that of windows, by which its session is found.
        ids_L = self._setup.secret_ids.flatten()[: self._setup.searched_tokens]
        with model.inference_session(max_length=len(ids_L)) as session:
            session.step(ids_L[None])
        return ids_L

    def _generate(
        self, model: DistributedModelForCausalLM, nodes: Sequence[RecordingNode]
    ) -> tuple[float, float, Recovered]:
        """Tokens/s, megabytes that nodes received for each token, and what sizes tell."""
        prompt = self._setup.secret_ids[0, : self._setup.secret_ids.shape[1] // 2 + 1]
        before = [len(node.received) for node in nodes]
        count = self._setup.new_tokens
        with model.inference_session(max_length=len(prompt) + count) as session:
            logits_LV = session.step(prompt[None])[0]
            started = time.perf_counter()
            for _ in range(count):
                logits_LV = session.step(logits_LV[-1:].argmax(-1)[None])[0]
            seconds = time.perf_counter() - started
        decoded = 0
        entry: list[int] = []
        for node, start in zip(nodes, before, strict=True):
            sizes = node.step_sizes(start)
            decoded += sum(sizes[-count:])
            entry = entry or sizes
        found = read_lengths(entry)
        right = (found.prompt_tokens, found.new_tokens) == (len(prompt), count)
        told = f"prompt of {found.prompt_tokens} tokens, {found.new_tokens} more"
        return count / seconds, decoded / count / 1e6, Recovered("traffic", int(right), 1, told)

    def _recorded(self, node: RecordingNode) -> Tensor:
        """States [T, D] of the secret text that a node received, window after window."""
        windows, length = self._setup.secret_ids.shape
        found = _states_of_length(node, length)[-windows:]
        if len(found) != windows:
            raise ConfigError(f"node {node.span} received {len(found)} of {windows} windows")
        return torch.cat(found)

    def _training_states(self, depth: int) -> Tensor:
        """States [T, D] of the attacker's text after `depth` blocks."""
        if depth not in self._training:
            public = PublicModel(self._public, depth)
            windows = [public.text_states(ids_L) for ids_L in self._setup.training_ids]
            self._training[depth] = torch.cat(windows).clone()
        return self._training[depth]

    def _usual(self, ids: Tensor) -> Tensor:
        """Mask [T] of all but the windows' first positions."""
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        return mask.flatten()

    def _probe(self, own_TD: Tensor, seen_TD: Tensor, depth: int) -> list[Recovered]:
        """Both linear attacks, trained on the attacker's states."""
        secret_T, detail = self._setup.secret_ids.flatten(), f"after {depth}"
        found = self._recover(own_TD, self._setup.training_ids.flatten(), seen_TD)
        return [
            Recovered(name, int((tokens_T == secret_T).sum()), len(secret_T), detail)
            for name, tokens_T in found.items()
        ]

    def _recover(self, own_TD: Tensor, own_T: Tensor, seen_TD: Tensor) -> dict[AttackName, Tensor]:
        """Tokens [T] that both linear attacks name for what was seen, by what is the attacker's."""
        ridge = RidgeProbe.fit(own_TD, self._white_VD[own_T])
        likelihood = LikelihoodProbe.fit(own_TD, self._table_VD[own_T])
        return {
            "ridge probe": ridge.recover(seen_TD, self._white_VD),
            "likelihood probe": likelihood.recover(seen_TD, self._table_VD),
        }

    def _search(self, ids_L: Tensor, states_LD: Tensor) -> list[Recovered]:
        """The vocabulary search on states as they are, secretly rotated, and secretly permuted."""
        public = PublicModel(self._public, SEARCHED_BLOCKS)
        generator = torch.Generator().manual_seed(self._setup.seed)
        hidden = states_LD.shape[1]
        turn_DD = torch.linalg.qr(
            torch.randn(hidden, hidden, generator=generator, dtype=torch.float64)
        ).Q
        order_D = torch.randperm(hidden, generator=generator)
        attacks: list[tuple[AttackName, Tensor, Signature]] = [
            ("vocabulary", states_LD, states_as_they_are),
            ("Gram matrix", (states_LD.double() @ turn_DD).float(), inner_products),
            ("sorted values", states_LD[:, order_D], sorted_values),
        ]
        known, rest = ids_L[:1].tolist(), ids_L[1:].tolist()
        rows = []
        for name, hidden_LD, signature in attacks:
            matches = list(search_tokens(hidden_LD, public, signature, known=known))
            hits = sum(match.token == token for match, token in zip(matches, rest, strict=True))
            tried = sum(match.tried for match in matches) // len(matches)
            rows.append(Recovered(name, hits, len(rest), f"{tried} candidates a token"))
        return rows

    def _read_ahead(self, states_TD: Tensor) -> Recovered:
        """The logit lens: how many of the model's own next tokens the states name already.

        A guess is the most frequent one of these, although the attacker would have to know it.
        """

        def head(part_TD: Tensor) -> Tensor:
            logits: Tensor = self._public.lm_head(self._public.base_model.norm(part_TD))
            return logits

        found_T = read_next_tokens(states_TD, head)
        with torch.inference_mode():
            next_T = torch.cat(
                [self._public(ids_L[None]).logits[0].argmax(-1) for ids_L in self._setup.secret_ids]
            )
        hits, most = int((found_T == next_T).sum()), int(next_T.bincount().max())
        return Recovered("logit lens", hits, len(next_T), "next tokens", 100 * most / len(next_T))

    def _mlp_inputs(self, ids: Tensor, block: int) -> Matrix:
        """What a block's gate and up take, [T, D]."""
        found: list[Tensor] = []
        layer = self._public.base_model.layers[block]
        hook = layer.post_attention_layernorm.register_forward_hook(
            lambda *given: found.append(given[2].squeeze(0).double())
        )
        public = PublicModel(self._public, block + 1)
        with hook:
            for ids_L in ids:
                public.text_states(ids_L)
        return np.asarray(torch.cat(found).numpy(), np.float64)

    def _recovered_by_key(
        self,
        probe: LikelihoodProbe,
        name: AttackName,
        found_DD: Matrix,
        key_DD: Matrix,
        seen_TD: Matrix,
        given: int,
    ) -> Recovered:
        """What follows the first `given` positions, which the attacker knew."""
        inputs_TD = torch.from_numpy(seen_TD[given:] @ np.linalg.inv(found_DD))
        secret_T = self._setup.secret_ids.flatten()[given:]
        hits = int((probe.recover(inputs_TD, self._table_VD) == secret_T).sum())
        error = float(np.abs(found_DD - key_DD).max() / np.abs(key_DD).max())
        told = f"key within {error:.0e}"
        return Recovered(name, hits, len(secret_T), told, self._chance(secret_T))


def _weight(linear: Any) -> Matrix:
    """W [D, O], for y = x W."""
    return np.asarray(linear.weight.detach().double().numpy().T, np.float64)


def _as_float32(values: Matrix) -> Matrix:
    return values.astype(np.float32).astype(np.float64)


def _states_of_length(node: RecordingNode, tokens: int) -> list[Tensor]:
    """States [tokens, D] of each of a node's sessions that had so many, in order."""
    found = (node.states(session) for session in node.sessions())
    return [states_TD for states_TD in found if len(states_TD) == tokens]


def _first_numbers(node: RecordingNode, scheme: PrivateScheme, count: int) -> Tensor:
    """Numbers [., count] from -0.5 to 0.5 that hide the first layer's inputs: residues of each
    ciphertext, or masked numbers.
    """
    kind = EncryptedInput if scheme == "ckks" else MaskedInput
    inputs = [each for each in node.private_inputs() if isinstance(each[0], kind)]
    first, ring, rows = inputs[0][0].path, make_ring(RingParameters()), []
    for message, payload in inputs:
        if message.path != first:
            continue
        if isinstance(message, MaskedInput):
            size = len(payload) // masked_bytes(message.tokens)
            numbers = unpack_masked(payload, (message.tokens, size)) / 2.0**MASK_BITS
        else:
            shape = (len(message.seeds),)
            residues = unpack_residues(ring, payload, shape, len(ring.primes) - 1)
            numbers = residues[:, 0] / ring.primes[0]
        rows.append(torch.from_numpy(numbers[:, :count].astype(np.float32) - np.float32(0.5)))
    return torch.cat(rows)
