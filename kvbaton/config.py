"""Settings are dataclasses; argument parsers are made from their fields, and they from arguments.

A field made by `flag` is a flag of the command line; a field that is itself a dataclass adds its
flags. The help shows the flags of a class under its ``GROUP``.

``--config FILE`` reads options of a command from YAML, as vLLM does. A key is any name of an option
without the dashes in front; its words are joined by dashes or underscores. Options on the command
line win.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from kvbaton.errors import ConfigError

T = TypeVar("T")
LogLevel = Literal["debug", "info", "warning", "error"]
VLLM_NAMES = {
    "--num-blocks": ("--num-gpu-blocks-override",),
    "--tensor-parallel-size": ("-tp",),
    "--quantization": ("-q",),
    "--workers": ("--api-server-count", "-asc"),
}
"""By flag: further names, which vLLM has."""
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
    "--enable-ssl-refresh": _ON,
    "--uvicorn-log-level": "there is --log-level",
    "--base-url": "there is --url",
    "--num-prompts": "there is --requests",
    "--request-rate": "there is --rate",
    "--max-concurrency": "there is --concurrency",
    "--random-input-len": "there is --input-len",
    "--random-output-len": "there is --output-len",
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
"""By flag of vLLM or SGLang that kvbaton does not have: what to do instead."""
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# --- values ---


def human_int(text: str) -> int:
    """Parse a whole number with an optional unit: 4k is 4000, 4K is 4096."""
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
    """Parse a number, which may be infinite.

    NaN is refused: it compares false with everything, so no later check would find it.
    """
    with suppress(ValueError):
        if (value := float(text)) == value:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number (like 0.5)")


def utf8(text: str) -> str:
    """Parse a text that can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8") from None
    return text


def human_bytes(number: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def count(text: str) -> int:
    """Parse a whole number of 0 or more."""
    value = human_int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def port_number(text: str) -> int:
    """Parse a TCP port."""
    value = human_int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port (0 to 65535)")
    return value


def seconds(text: str) -> float:
    """Parse a finite number of seconds, 0 or more."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to wait, in seconds")
    return value


def host_name(text: str) -> str:
    """Parse a host, in lower case; an IPv6 address may have the brackets of a URL."""
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
    """Make a dataclass field that is also a flag.

    Args:
        default: Default of field and flag; without one the flag is required.
        text: Help text; the default is appended, unless the text ends with a parenthesis.
        name: Name of the flag, if it is not made from the field's.
        variable: Environment variable that gives the flag's default.
        secret: Whether ``repr`` hides the field.
        more: Arguments of ``add_argument``; `group` is the title under which the help shows it.
    """
    told = {"text": text, "name": name, "variable": variable, "more": more}
    return field(default=default, repr=not secret, metadata={"flag": told})


def secret_flag(text: str, variable: str, default: Any = None, **more: Any) -> Any:
    """Make a `flag` that an environment variable may give, and that ``repr`` hides."""
    return flag(default, f"{text} (${variable})", variable=variable, secret=True, **more)


@dataclass(frozen=True)
class Flag:
    """A flag of the command line.

    Attributes:
        name: Name, as written on the command line.
        default: Default of the field; `MISSING` if it has none.
        kind: Type of the field.
        group: Title of its group in the help; None for no group.
        text: Help text.
        variable: Environment variable with its default; empty for none.
        more: Arguments of ``add_argument``.
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
        """Name of its attribute in the namespace that a parser returns."""
        return self.name[2:].replace("-", "_")

    def add(self, parser: argparse._ActionsContainer, default: Any) -> None:
        """Add it to a parser."""
        words = os.environ.get(self.variable) if self.variable else None
        if words:
            # Blanks alone are kept, not taken as an empty list: the setting's check refuses them.
            several = isinstance(default, list)
            default = (words.split() or [words]) if several else words.strip() or words
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
        """Arguments that set it to a value."""
        if isinstance(value, bool):
            return [self.name if value else f"--no-{self.name[2:]}"]
        return [self.name, *value] if isinstance(value, tuple) else [f"{self.name}={value}"]


def _argument(kind: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a field's type."""
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
    """Yield the flags of a dataclass, including those of fields that are dataclasses.

    In a class with ``EVERY_FIELD`` each field is a flag, and its documentation the help text.
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
    """``GROUP`` of the class that defines a field: this one, or one that it inherits from."""
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
        parser: Parser to add them to.
        config: The dataclass.
        order: Order of groups in the help; groups that are not named come last.
        skip: Names of fields that get no flag.
        defaults: Defaults by field that replace the fields' own.
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
    """Make a dataclass from parsed flags; fields whose flag the command lacks keep their default.

    Raises:
        ConfigError: Values that do not fit together.
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
    """Arguments that give a dataclass its values; defaults are left out.

    Args:
        config: An instance; fields that are dataclasses are left out.
        only: Names of fields to include; None includes all.
    """
    words: list[str] = []
    own = dataclasses.fields(config)
    for item, its in flags_of(type(config)):
        if item in own and (only is None or item.name in only):
            value = getattr(config, item.name)
            words += its.words(value) if value != item.default else []
    return words


def attribute_docs(config: type) -> dict[str, str]:
    """Texts under ``Attributes:`` in a class's docstring, by field name, without markup."""
    section = (inspect.getdoc(config) or "").partition("Attributes:")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text.replace("`", "")) for name, text in found}


def flag_of(name: str) -> str:
    """Name of a field's flag."""
    return "--" + name.replace("_", "-")


def check_positive(name: str, value: float | None) -> None:
    """Raise `ConfigError` if the value of a flag is 0 or less; None is allowed."""
    if value is not None and value <= 0:
        raise ConfigError(name, f"{value} is not positive")


MOST_WORKERS = 256
"""Most worker processes behind a port: each takes some 100 MB and up to one core."""


def check_workers(workers: int) -> None:
    """Raise `ConfigError` for fewer than 1 or more than `MOST_WORKERS` processes behind a port."""
    if not 0 < workers <= MOST_WORKERS:
        raise ConfigError("--workers", f"{workers} is not between 1 and {MOST_WORKERS}")


CONFIG = "--config"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` to a command."""
    text = "YAML file with options of this command; those on the command line win"
    parser.add_argument(CONFIG, metavar="FILE", help=text)


LIKENESS = 0.73
"""Least similarity (0 to 1) of a flag that is proposed for an unknown one: less is another flag."""


def instead_of(name: str, known: Iterable[str] = ()) -> str:
    """What to use instead of an unknown flag, as the end of an error message.

    Args:
        name: The flag.
        known: Flags that there are.

    Returns:
        Text of `INSTEAD`, or a flag like it; empty if there is neither.
    """
    if found := INSTEAD.get(name):
        return f"; {found}"
    if not name.startswith("--"):
        return ""
    like = difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS)
    return f"; did you mean {like[0]}?" if like else ""


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Append the options of the ``--config`` file to a command line.

    They come last, so that a list on the command line does not take one of them as its value.

    Args:
        parser: Parser of the command, with all of its options.
        words: Arguments of the command line.

    Raises:
        ConfigError: The file can't be read, or a key is not an option or has an unfit value.
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
    """The value of ``--config`` on the command line; None without one."""
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
        """Refuses repeated keys, which YAML forbids; its loader would take the last value."""

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
    """Arguments that set an option to a value of the file."""
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
    """A value as an argument; lists and mappings as JSON."""
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    if value is None or isinstance(value, bool):
        raise ConfigError(CONFIG, f"{where} must have a value, not {json.dumps(value)}")
    return str(value)
