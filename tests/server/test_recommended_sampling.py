import json
from pathlib import Path
from typing import Any

import pytest

from kvbaton.errors import ConfigError
from kvbaton.server.frontend import sampling_defaults

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def write(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_recommendations_under_their_names_in_the_api(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN | {"max_new_tokens": 2048, "repetition_penalty": 1})
    assert sampling_defaults(folder) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_tokens": 2048,
        "repetition_penalty": 1,
    }


def test_none_where_they_are_not_wanted_or_not_meant(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(write(tmp_path, QWEN), "none") == {}
    assert sampling_defaults(write(tmp_path, QWEN | {"do_sample": False})) == {}
    assert sampling_defaults(write(tmp_path, {"temperature": None})) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": "x"},
        {"top_k": -7},
        {"repetition_penalty": 0},
        {"max_new_tokens": 1 << 31},
        [],
    ],
)
def test_what_no_request_may_have_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="--generation-config=none") as raised:
        sampling_defaults(write(tmp_path, wrong))
    assert raised.value.field.endswith("generation_config.json")


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ConfigError, match="--generation-config=none"):
        sampling_defaults(tmp_path)
