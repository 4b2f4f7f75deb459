"""Speech recognition over nodes that hold pieces gives what transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from scipy.signal import resample_poly
from tokenizers.pre_tokenizers import ByteLevel

from nesa_node import SwarmPipeline
from nesa_node.client.graphs import audio
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import split_evenly
from tests.first_is_fast import first_is_fast
from tests.swarms import in_process_swarm

HF: Any = transformers
TASK = "automatic-speech-recognition"
RATE = 16_000


def save_whisper(folder: Path) -> None:
    letters = sorted(ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>"]
    special += ["<|notimestamps|>"]
    vocab = {word: at for at, word in enumerate([*letters, *special])}
    HF.WhisperTokenizer(
        vocab=vocab, merges=[], additional_special_tokens=special[1:]
    ).save_pretrained(folder)
    HF.WhisperFeatureExtractor().save_pretrained(folder)
    config = HF.WhisperConfig(
        vocab_size=len(vocab),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        init_std=0.3,
        eos_token_id=256,
        bos_token_id=256,
        pad_token_id=256,
        decoder_start_token_id=257,
    )
    torch.manual_seed(3)
    model = HF.WhisperForConditionalGeneration(config)
    model.generation_config = HF.GenerationConfig(
        eos_token_id=256,
        pad_token_id=256,
        bos_token_id=256,
        decoder_start_token_id=257,
        suppress_tokens=list(range(257, 261)),
        no_timestamps_token_id=260,
        max_length=30,
    )
    model.save_pretrained(folder)


def save_wav2vec2(folder: Path) -> None:
    folder.mkdir(parents=True)
    vocab = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefg"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    HF.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    HF.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    torch.manual_seed(0)
    config = HF.Wav2Vec2Config(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_kernel=(10, 8),
        conv_stride=(40, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        initializer_range=0.5,
    )
    HF.Wav2Vec2ForCTC(config).save_pretrained(folder)


def speech(seconds: float, rate: int) -> np.ndarray[Any, Any]:
    """Two channels of tones and noise."""
    time_T = np.arange(int(seconds * rate)) / rate
    tones = np.sin(2 * np.pi * np.stack([220 * time_T, 330 * time_T * time_T]))
    noise = np.random.default_rng(0).normal(size=tones.shape)
    return (0.2 * tones + 0.05 * noise).T.astype(np.float32)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("save", first_is_fast(save_whisper, save_wav2vec2))
def test_texts_are_those_of_transformers(save: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder)
    file = tmp_path / "speech.wav"
    soundfile.write(file, speech(1.5, 44_100), 44_100, subtype="FLOAT")
    mono = resample_poly(speech(1.5, 44_100).mean(axis=1), 160, 441).astype(np.float32)
    alone = HF.pipeline(TASK, model=str(folder))
    expected = alone(mono.copy())
    assert expected["text"].strip()
    with in_process_swarm(folder, split_evenly(5, 2), tmp_path, pieces=5) as addresses:
        with SwarmPipeline(TASK, folder, initial_peers=addresses) as remote:
            assert remote(str(file)) == expected
            assert remote(file.read_bytes()) == expected
            assert remote({"raw": speech(1.5, 44_100).mean(1), "sampling_rate": 44_100}) == expected
            soundfile.write(tmp_path / "second.flac", mono[:20_000], RATE, subtype="PCM_24")
            both = remote([str(file), str(tmp_path / "second.flac")])
            assert both[0] == expected
            assert both[1] == alone(soundfile.read(tmp_path / "second.flac", dtype="float32")[0])
            if save is save_whisper:
                long = speech(35, RATE).mean(1)
                chunked = alone(long.copy(), chunk_length_s=30)
                assert remote({"raw": long, "sampling_rate": RATE}) == chunked
            for content, reason in (
                (b"no audio", "cannot be read as WAV"),
                (b"", "cannot be read"),
            ):
                with pytest.raises(ConfigError, match=reason):
                    remote(content)
            with pytest.raises(ConfigError, match=r"none\.wav cannot be read"):
                remote(str(tmp_path / "none.wav"))
            soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
            with pytest.raises(ConfigError, match="holds no samples"):
                remote(str(tmp_path / "empty.wav"))
        command = ["task", TASK, str(file), "--model", str(folder), "--json"]
        run = subprocess.run(
            [sys.executable, "-m", "nesa_node", *command, "--initial-peers", addresses[0]],
            capture_output=True,
            check=True,
        )
        assert json.loads(run.stdout) == [{"input": str(file), "answer": expected}]


def test_long_audio_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence takes next to nothing in a file."""
    soundfile.write(tmp_path / "bomb.flac", np.zeros(RATE * 600, np.int16), RATE)
    assert (tmp_path / "bomb.flac").stat().st_size < 100_000
    monkeypatch.setattr(audio, "MAX_VALUES", RATE * 500)
    with pytest.raises(ConfigError, match="has 10 minutes of audio in 1 channels: cut it"):
        audio.read_audio(tmp_path / "bomb.flac", RATE)
    monkeypatch.setattr(audio, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"pip install 'nesa-node\[audio\]'"):
        audio.read_audio(tmp_path / "bomb.flac", RATE)
