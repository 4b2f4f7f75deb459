from __future__ import annotations

import pytest

from nesa_node.compression.codecs import (
    FLOORS,
    allows_codec,
    candidate_codecs,
    check_quality,
    codec_names,
)
from nesa_node.core.errors import ConfigError


@pytest.mark.parametrize("quality", [*FLOORS, "none", *codec_names()])
def test_whatever_a_sender_may_choose_is_allowed(quality: str) -> None:
    quality = check_quality(quality)
    chosen = candidate_codecs(quality, codec_names())
    assert chosen
    assert all(allows_codec(quality, codec) for codec in chosen)


def test_exact_sessions_are_never_compressed_but_may_be_sent_what_is_lossless() -> None:
    assert candidate_codecs("exact", codec_names()) == ("none",)
    assert allows_codec("exact", "lossless")
    assert not allows_codec("exact", "bfloat16")


def test_a_lower_floor_allows_all_that_a_higher_one_does() -> None:
    names = ("none", *codec_names())
    allowed = [{name for name in names if allows_codec(floor, name)} for floor in FLOORS]
    assert allowed[0] < allowed[1] < allowed[2]


def test_a_codec_by_name_allows_no_other_lossy_one() -> None:
    assert candidate_codecs("int8@2:16:8", codec_names()) == ("int8@2:16:8",)
    assert not allows_codec("int8@2:16:8", "bfloat16")
    assert not allows_codec("int8@2:16:8", "int8@2:32:8")


def test_what_the_receiver_does_not_decode_is_not_chosen() -> None:
    assert candidate_codecs("int8@2:16:8", ()) == ("none",)
    assert candidate_codecs("balanced", ("none", "lossless")) == ("none", "lossless")


@pytest.mark.parametrize("quality", ["", "best", "int8:7", "NONE", "none "])
def test_unknown_quality_is_refused_with_what_there_is(quality: str) -> None:
    with pytest.raises(ConfigError, match="balanced"):
        check_quality(quality)
