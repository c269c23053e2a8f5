"""Settings as dataclasses whose fields are flags: parsers are made from them, and they from flags.

A field that `flag` made is on the command line, as are the flags of a field that is a dataclass.
The help shows those of a class under its ``GROUP``.

``--config FILE`` has options of a command in YAML, as vLLM reads them: a key is an option without
its dashes in front, with dashes or underscores between its words, and under any of its names. What
the command line says wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from kvbaton.errors import ConfigError

T = TypeVar("T")
LogLevel = Literal["debug", "info", "warning", "error"]
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
VLLM_NAMES = {
    "--num-blocks": ("--num-gpu-blocks-override",),
    "--tensor-parallel-size": ("-tp",),
    "--quantization": ("-q",),
    "--workers": ("--api-server-count", "-asc"),
}
"""By flag: names that vLLM has beside or instead of ours."""
_NODES = "start more nodes, as kvbaton up --any 2 does"
_RANKS = "there is --tensor-parallel-size, and more nodes"
_ON = "leave it out: that is on"
_LORA = "merge adapters into the weights"
_TEXT = "leave it out: models generate text"
INSTEAD = {
    "--kv-transfer-config": "there are --transport, --store and --role",
    "--data-parallel-size": _NODES,
    "-dp": _NODES,
    "--dp-size": _NODES,
    "--pipeline-parallel-size": _RANKS,
    "-pp": _RANKS,
    "--pp-size": _RANKS,
    "--enable-auto-tool-choice": _ON,
    "--enable-chunked-prefill": _ON,
    "--trust-remote-code": "code of checkpoints is never run",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--tokenizer": "the model's folder has it",
    "--revision": "fetch that one into a folder of its own",
    "--task": _TEXT,
    "--runner": _TEXT,
    "--disaggregation-mode": "there is --role",
    "--disaggregation-transfer-backend": "there is --transport",
    "--model-path": "there is --model",
    "--tp-size": "there is --tensor-parallel-size",
    "--context-length": "there is --max-model-len",
    "--mem-fraction-static": "there is --gpu-memory-utilization",
    "--max-running-requests": "there is --max-num-seqs",
    "--chunked-prefill-size": "there is --max-num-batched-tokens",
}
"""What to do in place of flags of vLLM and SGLang that are not there."""
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# --- values ---


def human_int(text: str) -> int:
    """A number, perhaps with a unit: 4k is 4000, 4K is 4096."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number (like 4096, 4k or 2G)")
    value = float(match[1]) * UNITS.get(match[2], 1)
    if value in (float("inf"), -float("inf")):
        raise argparse.ArgumentTypeError(f"{text[:20]}... is a number beyond all bounds")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(match[1]) if match[1].lstrip("-").isdigit() and not match[2] else int(value)


def number(text: str) -> float:
    """A number, perhaps infinite.

    Nothing is less or more than NaN, so that no check would find it.
    """
    with suppress(ValueError):
        if (value := float(text)) == value:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number (like 0.5)")


def utf8(text: str) -> str:
    """A text that can be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8") from None
    return text


def human_bytes(number: float) -> str:
    """A number of bytes with a decimal unit, for people."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def count(text: str) -> int:
    """How many nodes, or images."""
    value = human_int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def port_number(text: str) -> int:
    """A TCP port."""
    value = human_int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port (0 to 65535)")
    return value


def seconds(text: str) -> float:
    """A time to wait."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to wait, in seconds")
    return value


def host_name(text: str) -> str:
    """A host to listen on, in lower case; an IPv6 address may have the brackets of a URL."""
    text = utf8(text).lower()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


Count = Annotated[int, count]
Seconds = Annotated[float, seconds]
Port = Annotated[int, port_number]
Host = Annotated[str, host_name]


# --- fields ---


def flag(
    default: Any = MISSING,
    text: str = "",
    *,
    name: str = "",
    variable: str = "",
    secret: bool = False,
    **more: Any,
) -> Any:
    """A field of a dataclass that is a flag.

    Args:
        default: of both; without one the flag is required.
        text: for the help; the default is put behind it, unless it ends with a parenthesis.
        name: of the flag, if not the field's.
        variable: of the environment, with the flag's default.
        secret: not shown by ``repr``.
        more: for ``add_argument``; `group` is the title under which the help shows it.
    """
    told = {"text": text, "name": name, "variable": variable, "more": more}
    return field(default=default, repr=not secret, metadata={"flag": told})


def secret_flag(text: str, variable: str, default: Any = None, **more: Any) -> Any:
    """A `flag` that the environment may give, and that ``repr`` does not show."""
    return flag(default, f"{text} (${variable})", variable=variable, secret=True, **more)


@dataclass(frozen=True)
class Flag:
    """A flag and its place.

    Attributes:
        name: as written on the command line.
        default: of the field; `MISSING` if it has none.
        kind: type of the field.
        group: title in the help; None is no group.
        text: for the help.
        variable: of the environment, or empty.
        more: for ``add_argument``.
    """

    name: str
    default: Any
    kind: Any
    group: str | None
    text: str
    variable: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dest(self) -> str:
        """Its attribute in what a parser returns."""
        return self.name[2:].replace("-", "_")

    def add(self, parser: argparse._ActionsContainer, default: Any) -> None:
        """Put it into a parser."""
        words = os.environ.get(self.variable) if self.variable else None
        if words:
            # Blanks are not a list without keys: who reads them is to refuse them.
            default = (words.split() or [words]) if isinstance(default, list) else words
        required = default is MISSING
        text: str | None = self.text
        if not text or text == argparse.SUPPRESS:
            text = text or None
        else:
            told = required or default is None or isinstance(default, list)
            told = told or text.endswith(")") or "action" in self.more
            text = (text.rstrip(".") + ("" if told else f" ({default})")).replace("%", "%%")
        parser.add_argument(
            self.name,
            *VLLM_NAMES.get(self.name, ()),
            **{
                **_argument(self.kind, self.more),
                "required": required,
                "default": None if required else default,
                "dest": self.dest,
                "help": text,
            },
        )

    def words(self, value: Any) -> list[str]:
        """The command line that sets it."""
        if isinstance(value, bool):
            return [self.name if value else f"--no-{self.name[2:]}"]
        return [self.name, *value] if isinstance(value, tuple) else [f"{self.name}={value}"]


def _argument(kind: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """What ``add_argument`` is to know of a type."""
    if "action" in more and more["action"] != "append":
        return dict(more)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, **more}
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(member for member in typing.get_args(kind) if member is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind), **more}
    if typing.get_origin(kind) is Annotated:
        base, reads = typing.get_args(kind)
        return {"type": reads, "metavar": base.__name__.upper(), **more}
    reads = {int: human_int, float: number, str: utf8}.get(kind, kind)
    return {"type": reads, "metavar": kind.__name__.upper(), **more}


def flags_of(config: type) -> Iterator[tuple[Field[Any], Flag]]:
    """Flags of a dataclass, those of dataclasses in it behind them.

    A class with ``EVERY_FIELD`` has one per field, with the field's documentation as its text.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    texts = attribute_docs(config) if getattr(config, "EVERY_FIELD", False) else {}
    for item in dataclasses.fields(config):
        kind = hints[item.name]
        told = item.metadata.get("flag")
        if told is not None:
            more = dict(told["more"])
            group = more.pop("group", _group(config, item))
            name = told["name"] or flag_of(item.name)
            yield item, Flag(name, item.default, kind, group, told["text"], told["variable"], more)
        elif dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from flags_of(kind)
        elif item.name in texts:
            hidden = item.name.startswith("debug_")
            text = argparse.SUPPRESS if hidden else texts[item.name]
            yield item, Flag(flag_of(item.name), item.default, kind, _group(config, item), text)


def _group(config: type, item: Field[Any]) -> str | None:
    """Where the help shows a field of this class, or of one that it inherits from."""
    owners = (c for c in config.__mro__ if item.name in vars(c).get("__annotations__", ()))
    return getattr(next(owners), "GROUP", None)


def add_flags(
    parser: argparse.ArgumentParser,
    config: type,
    *,
    order: Sequence[str | None] = (),
    skip: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add the flags of a dataclass.

    Args:
        parser: gets them.
        config: the class.
        order: of groups; those that are not named come last.
        skip: names of fields that get none.
        defaults: other than the fields' own.
    """
    flags = [(item, its) for item, its in flags_of(config) if item.name not in skip]
    place = {group: number for number, group in enumerate(order)}
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for item, its in sorted(flags, key=lambda pair: place.get(pair[1].group, len(place))):
        if its.group not in groups:
            groups[its.group] = parser.add_argument_group(its.group)
        default = defaults.get(item.name, its.default)
        its.add(groups[its.group], list(default) if isinstance(default, tuple) else default)


def from_args(config: type[T], args: argparse.Namespace, **given: Any) -> T:
    """Make a dataclass of parsed flags; a flag that the command does not have keeps its default.

    Raises:
        ConfigError: values that do not fit together.
    """
    assert dataclasses.is_dataclass(config)
    names = {item: its.dest for item, its in flags_of(config)}
    hints = typing.get_type_hints(config)
    values = dict(given)
    for item in dataclasses.fields(config):
        dest = names.get(item, item.name)
        if item.name in given:
            continue
        if dataclasses.is_dataclass(hints[item.name]):
            values[item.name] = from_args(hints[item.name], args)
        elif hasattr(args, dest):
            value = getattr(args, dest)
            values[item.name] = tuple(value) if isinstance(value, list) else value
    return config(**values)


def words_of(config: Any, only: Collection[str] | None = None) -> list[str]:
    """The command line that gives a dataclass its values; defaults are left out.

    Args:
        config: an instance; dataclasses in it are left out.
        only: names of fields; None takes all.
    """
    words: list[str] = []
    own = dataclasses.fields(config)
    for item, its in flags_of(type(config)):
        if item in own and (only is None or item.name in only):
            value = getattr(config, item.name)
            words += its.words(value) if value != item.default else []
    return words


def attribute_docs(config: type) -> dict[str, str]:
    """The texts under ``Attributes:`` in a class's docstring, by name, without markup."""
    section = (inspect.getdoc(config) or "").partition("Attributes:")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text.replace("`", "")) for name, text in found}


def flag_of(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def check_positive(name: str, value: float | None) -> None:
    """Raise `ConfigError` for a flag's number that is not above 0."""
    if value is not None and value <= 0:
        raise ConfigError(name, f"{value} is not positive")


MOST_WORKERS = 256
"""Of one port: each is a process of some 100 MB, and serves with one core."""


def check_workers(workers: int) -> None:
    """Raise `ConfigError` for processes behind a port that can't be, or would end the machine."""
    if not 0 < workers <= MOST_WORKERS:
        raise ConfigError("--workers", f"{workers} is not between 1 and {MOST_WORKERS}")


CONFIG = "--config"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command read a file."""
    text = "YAML with options of this command; those of the command line win"
    parser.add_argument(CONFIG, metavar="FILE", help=text)


def instead_of(name: str) -> str:
    """What stands here for a flag of vLLM or SGLang, as the end of a sentence; empty for others."""
    found = INSTEAD.get(name)
    return f"; {found}" if found else ""


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """A command line with what its ``--config`` says behind: no list there ends in a word of ours.

    Args:
        parser: of the command, with all of its options.
        words: of the command line.

    Raises:
        ConfigError: the file can't be read, or a key of it is no option, or has no fitting value.
    """
    path = _path_in(words)
    if path is None:
        return list(words)
    said = {word.partition("=")[0] for word in words if word.startswith("-")}
    found: list[str] = []
    seen: dict[argparse.Action, str] = {}
    options = {
        name.lstrip("-").replace("-", "_"): action
        for action in parser._actions  # argparse has no other way to ask which options there are
        for name in action.option_strings
        if action.dest not in ("help", "config") and not name.startswith("--no-")
    }
    for key, value in _read(path).items():
        action = options.get(str(key).replace("-", "_"))
        if action is None:
            known = difflib.get_close_matches(str(key).replace("-", "_"), options, n=1)
            meant = f"; did you mean {known[0].replace('_', '-')!r}?" if known else ""
            hint = instead_of(f"--{key}".replace("_", "-")) or meant
            raise ConfigError(CONFIG, f"{path}: {parser.prog} has no option {key!r}{hint}")
        if action in seen:
            raise ConfigError(CONFIG, f"{path}: {seen[action]!r} and {key!r} are the same option")
        seen[action] = key
        if not said & set(action.option_strings):
            found += _words(action, value, f"{path}: {key!r}")
    return [*words, *found]


def _path_in(words: Sequence[str]) -> str | None:
    """What the command line itself says of ``--config``."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    only.add_argument(CONFIG)
    try:
        path: str | None = only.parse_known_args(words)[0].config
    except argparse.ArgumentError:  # it has no value: the command's own parser says so
        return None
    return path


def _read(path: str) -> dict[Any, Any]:
    import yaml

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]  # it is not typed
        """Refuses what YAML forbids and its loader does not mind: the last value would count."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            assert node is not None, "the parser has seen one begin"
            lines: dict[Any, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value in lines:
                    where = f"in lines {lines[key.value]} and {line}"
                    raise ConfigError(CONFIG, f"{path}: {key.value!r} is there twice, {where}")
                lines[key.value if isinstance(key, yaml.ScalarNode) else id(key)] = line
            return node

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.load(file, UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(CONFIG, f"{path} can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(CONFIG, f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(CONFIG, f"{path} must hold options, as in 'port: 8000'")
    return found


def _words(action: argparse.Action, value: Any, where: str) -> list[str]:
    """The command line that says the same."""
    name = action.option_strings[0]
    if isinstance(value, bool) and (action.nargs == 0 or action.nargs == "?"):
        negative = [f"--no-{name[2:]}"] if f"--no-{name[2:]}" in action.option_strings else []
        return [name] if value else negative
    if action.nargs == 0:
        raise ConfigError(CONFIG, f"{where} must be true or false, not {value!r}")
    several = action.nargs in ("+", "*")
    appends = isinstance(action, argparse._AppendAction)
    values = value if isinstance(value, list) and (several or appends) else [value]
    texts = [_text(one, where) for one in values]
    if not texts:
        raise ConfigError(CONFIG, f"{where} is an empty list")
    return [name, *texts] if several else [f"{name}={text}" for text in texts]


def _text(value: Any, where: str) -> str:
    """A value as the command line has it; what has parts is JSON there."""
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    if value is None or isinstance(value, bool):
        raise ConfigError(CONFIG, f"{where} must have a value, not {json.dumps(value)}")
    return str(value)
