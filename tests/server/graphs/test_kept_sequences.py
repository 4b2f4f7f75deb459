"""Further tokens of a decoder from what a node kept: the same values, of less work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nesa_node.core.errors import ProtocolError, UnsupportedFeatureError
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.graphs.decoder_cache import capture_with_cache
from nesa_node.engine.graphs.model_graph import RequestSizes, capture_model
from nesa_node.engine.graphs.network import Network
from nesa_node.engine.graphs.piece_weights import PieceWeights, ResidentWeights, StreamedWeights
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.families import read_network_config
from nesa_node.server.graphs.kept_sequences import KeptSequences, SequenceUse
from nesa_node.server.graphs.served_pieces import ServedPieces

HF: Any = transformers
CPU = torch.device("cpu")
PIECES = 3
CLIENT, STRANGER = PeerId("client"), PeerId("stranger")
KEY = b"k" * 16
SEQ: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
T5 = HF.T5Config(
    vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=1.0
)
CONFIGS = {
    "T5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": HF.BartConfig(**SEQ, max_position_embeddings=64),
    "WhisperForConditionalGeneration": HF.WhisperConfig(
        **SEQ, num_mel_bins=8, max_source_positions=50, max_target_positions=64
    ),
    "VisionEncoderDecoderModel": HF.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        HF.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        ),
        HF.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=2
        ),
    ),
}


class Decoder:
    """A network in pieces, asked as clients ask, and the whole model."""

    def __init__(
        self, name: str, folder: Path, *, is_streamed: bool = False, pieces: int = PIECES
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = getattr(HF, name)(CONFIGS[name]).eval()
        self.model.save_pretrained(folder)
        self.folder = folder
        network = Network(
            open_folder(folder, read_network_config), torch.float32, RequestSizes(tokens=8)
        )
        self.network = network
        self.plan = network.make_plan(pieces)
        every = Span(0, pieces)
        operations = self.plan.operations(every)
        weights: PieceWeights
        if is_streamed:
            total = network.count_weight_bytes(operations)
            weights = StreamedWeights(network, self.plan, every, CPU, int(total * 0.6))
        else:
            program = network.build_piece(operations, CPU)
            weights = ResidentWeights(network, network.load_weights(program, CPU), CPU)
        self.pieces = ServedPieces(network, self.plan, every, weights, CPU, 1 << 30)

    def encoder_inputs(self, rows: Sequence[int]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        config = self.model.config
        match self.model.main_input_name:
            case "pixel_values":
                given = torch.randn(4, 3, 32, 32)
            case "input_features":
                given = torch.randn(4, config.num_mel_bins, 2 * config.max_source_positions)
            case _:
                given = torch.randint(5, 50, (4, 7))
        made = {self.model.main_input_name: given[list(rows)]}
        if "attention_mask" in self.network.input_names:
            shape = (4, given.shape[-1])
            mask = torch.ones(shape, dtype=torch.long)
            mask[1, 5:] = 0
            made["attention_mask"] = mask[list(rows)]
        return made

    def compute(
        self,
        rows: Sequence[int],
        tokens_BT: Tensor,
        position: int,
        use: SequenceUse | None,
    ) -> Tensor:
        """Logits [B, T - position, V] of the tokens from `position` on."""
        given = {**self.encoder_inputs(rows), "decoder_input_ids": tokens_BT[:, position:]}
        values, sizes = self.network.bind(given, position=position)
        for piece in range(len(self.plan.pieces)):
            span = Span(piece, piece + 1)
            operations = self.plan.operations(span)
            if position:
                if not self.network.split(operations)[1]:
                    continue  # only of the encoder
                received = self.network.find_step_interface(operations).received
            else:
                received = self.network.find_interface(operations).received
            sent = {index: values[index] for index in received}
            values |= self.pieces.run(span, sizes, sent, use)
        logits: Tensor = self.network.make_output(values).logits
        return logits


@pytest.fixture(params=list(CONFIGS))
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    return Decoder(request.param, tmp_path)


@pytest.fixture
def bart(tmp_path: Path) -> Decoder:
    return Decoder("BartForConditionalGeneration", tmp_path)


@torch.no_grad()
def check_steps(decoder: Decoder) -> None:
    torch.manual_seed(2)
    tokens_BT = torch.randint(5, 50, (2, 9))
    whole: Any = decoder.model(**decoder.encoder_inputs([0, 1]), decoder_input_ids=tokens_BT)
    found = [
        decoder.compute([0, 1], tokens_BT[:, :end], start, SequenceUse(CLIENT, KEY))
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 9))
    ]
    assert [each.shape[1] for each in found] == [4, 1, 1, 3]
    assert torch.allclose(torch.cat(found, 1), whole.logits, atol=1e-5)
    # Rows that go on from one another, as beams do.
    use = SequenceUse(CLIENT, b"m" * 16)
    decoder.compute([1, 1], tokens_BT, 0, use)
    other_BT = torch.cat([tokens_BT[[1, 1]], torch.randint(5, 50, (2, 2))], 1)
    moved = SequenceUse(CLIENT, b"m" * 16, (1, 1))
    expected = decoder.model(**decoder.encoder_inputs([1, 1]), decoder_input_ids=other_BT)
    again = decoder.compute([1, 1], other_BT, 9, moved)
    assert torch.allclose(again, expected.logits[:, 9:], atol=1e-5)


def test_further_tokens_are_those_of_the_whole_model(decoder: Decoder) -> None:
    check_steps(decoder)


def test_further_tokens_in_many_pieces(tmp_path: Path) -> None:
    """Of which some use tokens, and have nothing to keep."""
    decoder = Decoder("BartForConditionalGeneration", tmp_path, pieces=40)
    check_steps(decoder)
    works = [work for (_, is_step), work in decoder.pieces._works.items() if is_step]
    assert any(not work.states and not work.fixed for work in works)


def test_further_tokens_of_weights_that_are_read_for_each(tmp_path: Path) -> None:
    check_steps(Decoder("T5ForConditionalGeneration", tmp_path, is_streamed=True))


@torch.no_grad()
def test_without_a_sequence_all_tokens_are_computed(bart: Decoder) -> None:
    tokens_BT = torch.randint(5, 50, (2, 5))
    expected = bart.model(**bart.encoder_inputs([0, 1]), decoder_input_ids=tokens_BT).logits
    found = bart.compute([0, 1], tokens_BT, 0, None)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not bart.pieces._sequences._kept
    with pytest.raises(ProtocolError) as refused:
        bart.compute([0, 1], tokens_BT, 4, None)
    assert refused.value.code == "unknown_sequence"


def test_a_step_computes_nothing_of_the_encoder(decoder: Decoder) -> None:
    network = decoder.network
    graph = network.captured.graph
    fixed, changing = network.split(range(len(graph)))
    assert sorted(fixed + changing) == list(range(len(graph)))
    assert len(network.position_sizes) == 1, "however many layers, a request names one length"
    program = network.build_piece(changing, CPU)
    names = set(program.weights.values())
    assert not [each for each in names if "encoder." in each and "decoder." not in each]
    received = {network.captured.values[index] for index in program.interface.received}
    assert len([each for each in received if "past" in each]) == 4, "keys and values of two layers"


@torch.no_grad()
def test_sequences_that_a_node_does_not_know(bart: Decoder) -> None:
    tokens_BT = torch.randint(5, 50, (1, 6))
    bart.compute([0], tokens_BT[:, :3], 0, SequenceUse(CLIENT, KEY))
    for use, position in (
        (SequenceUse(CLIENT, b"o" * 16), 3),
        (SequenceUse(STRANGER, KEY), 3),
        (SequenceUse(CLIENT, KEY), 2),
        (SequenceUse(CLIENT, KEY), 4),
        (SequenceUse(CLIENT, KEY, (0, 0)), 3),
        (SequenceUse(CLIENT, KEY, (7,)), 3),
        (SequenceUse(CLIENT, KEY, (0,) * 512), 3),
    ):
        with pytest.raises(ProtocolError) as refused:
            bart.compute([0], tokens_BT, position, use)
        assert refused.value.code == "unknown_sequence"
    # All of these have left it as it was.
    expected = bart.model(**bart.encoder_inputs([0]), decoder_input_ids=tokens_BT).logits
    found = bart.compute([0], tokens_BT, 3, SequenceUse(CLIENT, KEY))
    assert torch.allclose(found, expected[:, 3:], atol=1e-5)
    bart.pieces.forget_sequences(CLIENT)
    with pytest.raises(ProtocolError, match="nothing is kept"):
        bart.compute([0], tokens_BT, 3, SequenceUse(CLIENT, KEY))


def test_sizes_of_nothing_are_refused(bart: Decoder) -> None:
    values, sizes = bart.network.bind(
        {**bart.encoder_inputs([0]), "decoder_input_ids": torch.ones(1, 3, dtype=torch.long)}
    )
    received = bart.network.find_interface(bart.plan.operations(Span(0, 1))).received
    given = {index: values[index] for index in received}
    for at in set(range(len(sizes))) - bart.network.position_sizes:
        wrong = (*sizes[:at], 0, *sizes[at + 1 :])
        with pytest.raises(ProtocolError, match="sizes must be"):
            bart.pieces.run(Span(0, 1), wrong, given)


def test_the_least_recently_used_make_room() -> None:
    kept = KeptSequences(1000)

    def use(owner: str, number: int) -> SequenceUse:
        return SequenceUse(PeerId(owner), bytes([number]) * 16)

    def keep(owner: str, number: int, nbytes: int, piece: int = 0) -> None:
        kept.keep(use(owner, number), {piece: torch.zeros(nbytes, dtype=torch.uint8)})

    def known(owner: str) -> list[int]:
        return [number for number in range(9) if kept.find(use(owner, number)) is not None]

    for number in range(4):
        keep("client", number, 200)
    assert known("client") == [2, 3], "a peer may have a half"
    keep("client", 2, 150)
    keep("client", 4, 160)
    assert known("client") == [2, 4], "the fourth was used before the third"
    keep("client", 2, 30, piece=1)
    found = kept.find(use("client", 2))
    assert found is not None
    assert [found[piece].nbytes for piece in (0, 1)] == [150, 30]
    keep("client", 5, 501)
    assert known("client") == [2, 4], "one that is too large does not make the others go"
    keep("client", 4, 501)
    assert known("client") == [2]
    for peer in "abc":
        keep(peer, 0, 400)
    assert [peer for peer in ("client", *"abc") if known(peer)] == ["b", "c"]
    kept.keep(use("a", 1), {})
    assert known("a") == [], "of pieces that keep nothing there is nothing to know"
    kept.forget(PeerId("b"))
    assert (known("b"), known("c")) == ([], [0])


def test_what_a_request_takes_is_counted_as_it_runs(decoder: Decoder) -> None:
    """What does not depend on tokens is computed first, and is there to the end."""
    network = decoder.network
    every = range(len(network.captured.graph))
    fixed, changing = network.split(every)
    between = network.fixed_values.intersection(network.find_interface(changing).received)
    shapes = [network.find_shape(index, network.example_sizes) for index in between]
    work = decoder.pieces._find_work(Span(0, PIECES), is_step=False)
    assert work.operations == fixed + changing
    decoder.pieces._check_memory(work, network.example_sizes)
    (needed,) = decoder.pieces._peaks.values()
    assert needed > sum(shape.nbytes for shape in shapes)
    assert needed > network.count_peak_bytes(work.operations, network.example_sizes, ())


def test_memory_is_counted_for_a_few_lengths(bart: Decoder) -> None:
    network, pieces = bart.network, bart.pieces
    work = pieces._find_work(Span(0, PIECES), is_step=True)
    (at,) = network.position_sizes

    def sizes(position: int) -> tuple[int, ...]:
        usual = network.example_sizes
        return (*usual[:at], position, *usual[at + 1 :])

    for position in range(17, 33):
        pieces._check_memory(work, sizes(position))
    assert list(pieces._peaks) == [(work.span, sizes(32))]
    # Where the longer one does not fit, the length itself is looked at.
    exactly = pieces._count_bytes(work, sizes(20))
    pieces.max_bytes = exactly
    pieces._check_memory(work, sizes(20))
    with pytest.raises(ProtocolError, match="smaller batch"):
        pieces._check_memory(work, sizes(21))


def test_the_graph_that_is_planned_is_the_one_that_is_served(bart: Decoder) -> None:
    planned = capture_model(
        bart.folder,
        name="bart",
        dtype=torch.float32,
        sizes=RequestSizes(tokens=8),
        without_memory=False,
    )
    assert planned.digest == bart.network.captured.digest
    assert planned.states == bart.network.states


def test_models_that_would_see_the_future() -> None:
    model = HF.FSMTForConditionalGeneration(
        HF.FSMTConfig(
            langs=["en", "de"],
            src_vocab_size=40,
            tgt_vocab_size=40,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        )
    )
    with pytest.raises(UnsupportedFeatureError, match="one further token alone"):
        capture_with_cache(model, {})
