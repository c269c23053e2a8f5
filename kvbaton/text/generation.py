"""What a model's ``generation_config.json`` recommends for requests that do not say it themselves.

Its end-of-text ids are read by the engine (`engine.model_config`); this is the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvbaton.errors import ConfigError

GenerationConfigMode = Literal["auto", "none"]
"""``auto`` takes the model's recommendations as defaults, ``none`` the API's own defaults."""


class Recommended(Struct, omit_defaults=True):
    """The fields that become defaults; bounds are those of a request."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    do_sample: bool | None = None


def sampling_defaults(folder: str | Path, mode: GenerationConfigMode = "auto") -> dict[str, Any]:
    """Defaults of a request by their name in the API (`max_tokens` for ``max_new_tokens``).

    Args:
        folder: of the model; without the file there are none.
        mode: see `GenerationConfigMode`.

    Returns:
        Empty if the file says ``"do_sample": false``: what it says of sampling is then not meant.

    Raises:
        ConfigError: the file can't be read, or recommends a value that no request may have.
    """
    path = Path(folder, "generation_config.json")
    if mode == "none" or not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Recommended, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(str(path), f"{error}; or start with --generation-config=none") from error
    named = msgspec.to_builtins(found)
    if named.pop("do_sample", None) is False:
        return {}
    return {("max_tokens" if k == "max_new_tokens" else k): v for k, v in named.items()}
