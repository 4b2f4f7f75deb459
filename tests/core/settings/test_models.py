"""Where a value comes from, and what is said when it is wrong."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import (
    ALL_CONFIGS,
    ClientConfig,
    NodeConfig,
    PeerConfig,
    SharedConfig,
)
from nesa_node.core.settings.sources import load_config

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def node(
    *,
    cli: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    toml: Path | None = None,
) -> NodeConfig:
    return load_config(NodeConfig, {"model": "m"} | (cli or {}), env or {}, toml)


def write(folder: Path, text: str) -> Path:
    path = folder / "nesa.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_beats_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    toml = write(tmp_path, 'threads = 1\ndevice = "cuda"\nlog_level = "debug"\n')
    env = {"NESA_THREADS": "2", "NESA_DEVICE": "cuda:1"}
    config = node(cli={"threads": 3, "device": None}, env=env, toml=toml)
    assert config.threads == 3
    assert config.device == "cuda:1"
    assert config.log_level == "debug"
    assert config.idle_timeout_s == 600


def test_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    toml = write(tmp_path, 'public_name = "attic"')
    assert node(env={"NESA_CONFIG": str(toml)}).public_name == "attic"


def test_environment_lists_are_split_at_commas_and_spaces() -> None:
    config = node(env={"NESA_INITIAL_PEERS": f"{PEER}, {PEER}"})
    assert config.initial_peers == (PEER, PEER)


def test_trusted_peers_come_from_anywhere(tmp_path: Path) -> None:
    assert node().trusted_peers == ()
    assert node(env={"NESA_TRUSTED_PEERS": "a b"}).trusted_peers == ("a", "b")
    toml = write(tmp_path, 'trusted_peers = ["c"]')
    assert node(toml=toml).trusted_peers == ("c",)
    assert node(cli={"trusted_peers": ("d",)}, toml=toml).trusted_peers == ("d",)


def test_block_indices_become_a_span(tmp_path: Path) -> None:
    assert node(cli={"block_indices": "3:7"}).block_indices == Span(3, 7)
    assert node(toml=write(tmp_path, 'block_indices = "0:2"')).block_indices == Span(0, 2)


def test_paths_know_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    config = node(env={"NESA_READY_FILE": "~/ready.json"})
    assert config.ready_file == Path("/home/somebody/ready.json")
    assert config.cache_dir == Path("/home/somebody/.cache/nesa-node")
    assert config.identity_path == Path("/home/somebody/.config/nesa-node/identity.key")


def test_typo_in_a_file_names_file_key_and_the_nearest_key(tmp_path: Path) -> None:
    toml = write(tmp_path, "num_block = 3")
    with pytest.raises(ConfigError) as caught:
        node(toml=toml)
    assert str(caught.value) == f"{toml}: unknown key 'num_block'; did you mean 'num_blocks'?"


def test_typo_in_a_variable_names_it_and_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"NESA_NUM_BLOCK; did you mean 'NESA_NUM_BLOCKS'\?"):
        node(env={"NESA_NUM_BLOCK": "3"})


def test_other_programs_variables_are_left_alone() -> None:
    node(env={"PATH": "/bin", "NESARA": "1", "MY_NESA_THREADS": "x"})


def test_keys_of_other_commands_are_accepted_and_ignored(tmp_path: Path) -> None:
    toml = write(tmp_path, 'num_blocks = 3\nroute = "star"\n')
    assert load_config(ClientConfig, {}, {}, toml).route == "star"
    assert load_config(PeerConfig, {}, {"NESA_MODEL": "m"}, toml).log_level == "info"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('num_blocks = "many"', 'a whole number of at least 1, or "auto"'),
        ("num_blocks = 0", 'a whole number of at least 1, or "auto"'),
        ("num_blocks = true", 'a whole number of at least 1, or "auto"'),
        ('initial_peers = ["192.0.2.7:many"]', "addresses like /ip4/192.0.2.7/tcp/4001/p2p/"),
        ('initial_peers = ["/ip4/192.0.2.7/p2p/Qm1"]', "addresses like"),
        ("initial_peers = 3", "addresses like"),
        ('host_maddrs = ["0.0.0.0"]', "addresses like /ip4/0.0.0.0/tcp/4001"),
        ('torch_dtype = "int8"', "'auto', 'float32', 'bfloat16' or 'float16'"),
        ('quant_type = "fp4"', "'none', 'int8', 'nf4' or 'llm_int8'"),
        ('device = "gpu"', "auto, cpu, cuda"),
        ('block_indices = "3:3"', 'a half-open range like "0:10"'),
        ("cache_dir = 3", "a path"),
        ("threads = true", "a number is needed, not true or false"),
        ("threads = 1.5", "integer"),
        ("idle_timeout_s = -1", "equal to 0.01"),
        ("idle_timeout_s = inf", "equal to 1000000000"),
    ],
)
def test_wrong_value_names_key_value_source_and_what_is_expected(
    tmp_path: Path, line: str, expected: str
) -> None:
    toml = write(tmp_path, line)
    with pytest.raises(ConfigError) as caught:
        node(toml=toml)
    message = str(caught.value)
    assert message.startswith(line.partition(" ")[0])
    assert f"(from {toml})" in message
    assert expected in message
    assert "\n" not in message


def test_unreadable_and_invalid_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*absent\.toml"):
        node(toml=tmp_path / "absent.toml")
    toml = write(tmp_path, "threads = [")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        node(toml=toml)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"threads = {'9' * 5000}", "is not valid TOML"),
        (f"threads = {'[' * 3000}", "nested too deep"),
        (f"# {'x' * 2**20}", "has more than 1048576 characters"),
    ],
    ids=["a long number", "deep lists", "a long file"],
)
def test_a_file_that_no_settings_can_fill_is_named(text: str, words: str, tmp_path: Path) -> None:
    toml = write(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        node(toml=toml)
    assert str(caught.value).startswith(str(toml))


@pytest.mark.parametrize(
    "env",
    [
        {"NESA_IDENTITY_PATH": "~no-such-user/x"},
        {"NESA_CACHE_DIR": "~no-such-user"},
        {"NESA_SWARM_KEY": "@~no-such-user/key"},
        {"NESA_CONFIG": "~no-such-user/nesa.toml"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_the_home_of_an_unknown_user_is_an_error_that_says_so(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no home folder is known for ~no-such-user"):
        node(env=env)


@pytest.mark.parametrize(
    ("name", "value"), [("block_indices", "0:3"), ("num_blocks", "2"), ("api", "127.0.0.1:8000")]
)
def test_what_is_for_a_node_of_one_model_needs_a_model(name: str, value: str) -> None:
    assert load_config(NodeConfig, {}, {}).model is None
    with pytest.raises(ConfigError, match=f"{name} is for a node of one model: give MODEL, too"):
        load_config(NodeConfig, {name: value}, {})


@pytest.mark.parametrize("text", ["20-8", "0-24"])
def test_hours_of_a_pool_are_two_numbers(text: str) -> None:
    assert load_config(NodeConfig, {"pool_hours": text}, {}).pool_hours == tuple(
        map(int, text.split("-"))
    )


@pytest.mark.parametrize("text", ["20", "20-25", "a-b", "1-2-3"])
def test_other_hours_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='two hours of the day like "20-8"'):
        load_config(NodeConfig, {"pool_hours": text}, {})


@pytest.mark.parametrize(
    "given", ["llama,qwen2", "llama qwen2", ("llama", "qwen2"), ("llama,qwen2",)]
)
def test_families_are_separated_by_commas_or_flags(given: object) -> None:
    config = load_config(NodeConfig, {"pool_families": given}, {})
    assert config.pool_families == ("llama", "qwen2")
    assert load_config(NodeConfig, {"quant_type": "llm-int8"}, {}).quant_type == "llm_int8"
    assert load_config(NodeConfig, {"pool_quant_types": ("none,int8",)}, {}).pool_quant_types == (
        "none",
        "int8",
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pool_families", "Llama", "families like llama,qwen2"),
        ("pool_families", ",".join(f"f{n}" for n in range(17)), "at most 16 families"),
        ("pool_max_download_gib", "0", "pool_max_download_gib"),
        ("pool_max_download_gib", "ten", "pool_max_download_gib"),
        ("pool_gpu_share", "1.5", "a number from 0 to 1"),
        ("pool_gpu_share", "0", "a number from 0 to 1"),
        ("pool_gpu_share", "half", "a number from 0 to 1"),
    ],
)
def test_other_terms_of_a_pool_are_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(NodeConfig, {name: value}, {})


def test_only_one_way_to_choose_a_span_may_be_given() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        node(cli={"num_blocks": "auto", "block_indices": "0:3"})


def test_only_one_way_to_choose_a_clients_blocks_may_be_given() -> None:
    given = {"private": "ckks", "private_blocks": "1:3"}
    assert load_config(ClientConfig, given, {}).private_blocks == Span(1, 3)
    with pytest.raises(ConfigError, match="say the same: give one of them"):
        load_config(ClientConfig, given | {"client_blocks": "1,1"}, {})


def test_secrets_never_show_in_text_or_errors(tmp_path: Path) -> None:
    config = node(env={"HF_TOKEN": "hf_abc", "NESA_SWARM_KEY": "sesame"})
    assert config.token is not None
    assert config.token.get_secret_value() == "hf_abc"
    for text in (repr(config), str(config), config.model_dump_json()):
        assert "hf_abc" not in text
        assert "sesame" not in text
    toml = write(tmp_path, "swarm_key = 1234567")
    with pytest.raises(ConfigError) as caught:
        node(toml=toml)
    assert "1234567" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_own_token_variable_beats_hf_token() -> None:
    config = node(env={"HF_TOKEN": "a", "NESA_TOKEN": "b"})
    assert config.token is not None
    assert config.token.get_secret_value() == "b"


def test_a_secret_may_be_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sesame\n", encoding="utf-8")
    config = node(cli={"swarm_key": f"@{path}"})
    assert config.swarm_key is not None
    assert config.swarm_key.get_secret_value() == "sesame"
    with pytest.raises(ConfigError, match="cannot read"):
        node(cli={"swarm_key": f"@{path}.absent"})


def test_a_secret_ends_before_the_line_that_a_file_leaves_in_a_variable() -> None:
    """Kubernetes keeps the newline of the file that a secret was made from."""
    config = node(env={"NESA_SWARM_KEY": "sesame\n"})
    assert config.swarm_key is not None
    assert config.swarm_key.get_secret_value() == "sesame"
    for nothing in ("", "\n"):
        with pytest.raises(ConfigError, match="it is empty"):
            node(env={"NESA_SWARM_KEY": nothing})


def test_a_config_is_frozen() -> None:
    config = node()
    with pytest.raises(ValidationError):
        config.threads = 3


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_no_environment_raises_anything_but_a_config_error(values: dict[str, str]) -> None:
    env = {"NESA_" + name.upper(): value for name, value in values.items()}
    env.pop("NESA_CONFIG", None)
    with suppress(ConfigError):
        node(env=env)


@pytest.mark.parametrize("value", ["3600", "0.5", "0", "-1", "nan", "1e9"])
def test_a_record_lives_between_a_second_and_ten_minutes(value: str) -> None:
    """The directory refuses more, with a traceback where the config lets it pass."""
    with pytest.raises(
        ConfigError, match=r"record_ttl_s.*600|record_ttl_s.*1|record_ttl_s.*finite"
    ):
        node(cli={"record_ttl_s": value})
    assert node(cli={"record_ttl_s": "600"}).record_ttl_s == 600


def _parts(annotation: Any) -> set[Any]:
    return {annotation}.union(*map(_parts, get_args(annotation)))


_NUMBERS = sorted(
    {
        (kind, name)
        for kind in ALL_CONFIGS
        for name, field in kind.model_fields.items()
        if {int, float} & _parts(field.annotation) and "tuple" not in str(field.annotation)
    },
    key=str,
)


_MAY_BE_ZERO = (
    "max_moves_per_hour",
    "adapter_store_gib",
    "adapter_memory_gib",
    "training_gib",
    "stock",
    "audit",
)


@pytest.mark.parametrize(("kind", "name"), _NUMBERS)
def test_no_number_is_taken_that_is_none_or_makes_a_loop_without_rest(
    kind: type[SharedConfig], name: str
) -> None:
    given = {"model": "m"} if "model" in kind.model_fields else {}
    refused = ["-1", "nan", "inf", "1e-9"]
    if name not in _MAY_BE_ZERO:
        refused.append("0")
    if name.endswith("_s"):
        refused.append("1e10")
    if name.endswith("_gib") or name == "audit":
        refused.remove("1e-9")
    for value in refused:
        with pytest.raises(ConfigError, match=name):
            load_config(kind, {**given, name: value}, {}, None)


@pytest.mark.parametrize(
    ("name", "value"), [("threads", "100000"), ("replicas", "1000000"), ("max_viewers", "100000")]
)
def test_a_count_that_no_machine_has_is_refused_at_once(name: str, value: str) -> None:
    kind = next(kind for kind in ALL_CONFIGS if name in kind.model_fields)
    with pytest.raises(ConfigError, match=name):
        load_config(kind, {"model": "m", name: value}, {}, None)
