"""The commands. What a command needs is imported when it runs.

Flags of the engine are made from `EngineConfig`: its fields, defaults and docstring.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import socket
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from kvbaton import __version__
from kvbaton.bench.flags import add_benches, add_connector_bench
from kvbaton.engine.config import ENCODER_SETTINGS, EngineConfig
from kvbaton.errors import ConfigError, StoreError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK = "127.0.0.1"
CLUSTER_KEY_VARIABLE = "KVBATON_CLUSTER_KEY"
API_KEY_VARIABLE = "KVBATON_API_KEY"
NODE_API_KEY_VARIABLE = "KVBATON_NODE_API_KEY"
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for a wrong setting, 1 for a store that fails."""
    try:
        args = make_parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except ConfigError as error:
        print(f"kvbaton: error: {error}", file=sys.stderr)
        return 2
    except StoreError as error:
        print(f"kvbaton: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# --- commands ---


def run_prefill(args: argparse.Namespace) -> int:
    """``kvbaton prefill``."""
    config = node_config(args, "prefill")
    from kvbaton.prefill.node import main as run

    return run(config)


def run_decode(args: argparse.Namespace) -> int:
    """``kvbaton decode``."""
    config = node_config(args, "decode")
    from kvbaton.decode.node import main as run

    return run(config)


def run_encode(args: argparse.Namespace) -> int:
    """``kvbaton encode``."""
    config = node_config(args, "encode")
    from kvbaton.encode.node import main as run

    return run(config)


def run_router(args: argparse.Namespace) -> int:
    """``kvbaton router``."""
    from kvbaton.router.app import main as run
    from kvbaton.router.config import RouterConfig
    from kvbaton.router.dispatch import DispatchConfig

    return run(
        RouterConfig(
            model=args.model,
            served_model_name=args.served_model_name,
            host=args.host,
            port=args.port,
            fd=args.fd,
            prefill=tuple(args.prefill),
            decode=tuple(args.decode),
            encode=tuple(args.encode),
            api_keys=tuple(args.api_key),
            node_api_key=args.node_api_key,
            chat_template=args.chat_template,
            generation_config=args.generation_config,
            media=media_config(args),
            cluster_key=args.cluster_key,
            log_level=args.log_level,
            dispatch=DispatchConfig(
                min_handover_tokens=args.min_handover_tokens,
                min_encode_rows=args.min_encode_rows,
            ),
        )
    )


def run_up(args: argparse.Namespace) -> int:
    """``kvbaton up``."""
    from kvbaton.cluster.config import ClusterConfig
    from kvbaton.cluster.launcher import run

    check_model(args.model)
    return run(
        ClusterConfig(
            engine=engine_config(args),
            engine_flags=engine_flags(args),
            num_prefill=args.prefill,
            num_decode=args.decode,
            num_encode=args.encode,
            host=args.host,
            port=args.port,
            served_model_name=args.served_model_name,
            api_keys=tuple(args.api_key),
            chat_template=args.chat_template,
            generation_config=args.generation_config,
            media=media_config(args),
            cluster_key=args.cluster_key,
            transport=args.transport,
            min_handover_tokens=args.min_handover_tokens,
            min_encode_rows=args.min_encode_rows,
            log_level=args.log_level,
            start_timeout_s=args.start_timeout,
            prompt=args.prompt,
            max_tokens=args.max_tokens,
        )
    )


def run_doctor(args: argparse.Namespace) -> int:
    """``kvbaton doctor``."""
    from kvbaton.doctor.main import run

    return run(args.transport, args.store, as_json=args.json)


def run_connectors_list(args: argparse.Namespace) -> int:
    """``kvbaton connectors list``."""
    from kvbaton.doctor.installed import run

    return run(args.specs, as_json=args.json, as_markdown=args.markdown)


def run_connectors_check(args: argparse.Namespace) -> int:
    """``kvbaton connectors check``."""
    from kvbaton.testing.check import main as run

    return run(
        args.spec,
        kind=args.kind,
        level=args.level,
        back_door=args.back_door,
        depth=args.depth,
        seed=args.seed,
        json_path=args.json,
        junit_path=args.junit,
    )


def run_version(args: argparse.Namespace) -> int:
    """``kvbaton version``."""
    print(__version__)
    return 0


# --- parsers ---


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag as the commands report any other wrong setting: in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        text = f"{flag}: {rest}" if message.startswith("argument ") else message
        self.exit(2, f"kvbaton: error: {text}\n")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="kvbaton",
        allow_abbrev=False,
        description="Serve large language models with prefill and decode on separate nodes.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        sub: Parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    _add_up(command("up", run_up, "Start a whole cluster on this machine."))
    text = "Start a node that computes prompts."
    _add_max_transfers(_add_node(command("prefill", run_prefill, text), 8100))
    decode = _add_node(command("decode", run_decode, "Start a node that generates."), 8200)
    text = "Start a node that encodes images for others."
    _add_max_transfers(_add_node(command("encode", run_encode, text), 8300, encoder_only=True))
    text = "blocks reserved or in quarantine for one prefill node (no limit)"
    decode.add_argument("--max-blocks-per-peer", type=human_int, metavar="N", help=text)
    _add_router(command("router", run_router, "Start the endpoint in front of all nodes."))
    text = "Measure transports and endpoints."
    bench = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    add_benches(bench, human_int)
    text = "List, check and measure transports and stores."
    connectors = commands.add_parser("connectors", help=text, description=text, allow_abbrev=False)
    _add_connectors(connectors)
    _add_doctor(command("doctor", run_doctor, "Try transports and stores on this machine."))
    command("version", run_version, "Print the version.")
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--prefill", type=count, default=1, metavar="N", help="prefill nodes (1)")
    group.add_argument("--decode", type=count, default=1, metavar="N", help="decode nodes (1)")
    group.add_argument("--encode", type=count, default=0, metavar="N", help="encoder nodes (0)")
    group.add_argument(
        "--prompt", metavar="TEXT", help="answer this one prompt when all is ready, and exit"
    )
    group.add_argument(
        "--max-tokens", type=human_int, default=64, metavar="N", help="of that answer (64)"
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give up when not all is ready after so many seconds (600)",
    )
    _add_common(parser, port=8000, log_level="warning")
    _add_handover(parser)
    _add_transport(parser)
    add_engine_flags(parser)


def _add_node(
    parser: argparse.ArgumentParser, port: int, *, encoder_only: bool = False
) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("node")
    group.add_argument("--router", metavar="URL", help="register with this router")
    if not encoder_only:  # which dials nobody
        group.add_argument(
            "--peer",
            action="append",
            default=[],
            metavar="tcp://HOST:PORT",
            help="control address that may be dialled; may be given more than once",
        )
    group.add_argument("--control-port", type=port_number, default=0, metavar="PORT")
    text = "where routers connect to the engine, if there is a cluster key (0: a free one)"
    group.add_argument("--engine-port", type=port_number, default=0, metavar="PORT", help=text)
    group.add_argument("--node-id", metavar="NAME", help="stable name of this node")
    _add_transport(parser)
    _add_common(parser, port=port, log_level="info", text=not encoder_only)
    add_engine_flags(parser, encoder_only=encoder_only)
    return group


def _add_max_transfers(group: argparse._ArgumentGroup) -> None:
    text = "hand-overs alive at once; those beyond are put off (%(default)s)"
    group.add_argument("--max-transfers", type=human_int, default=65_536, metavar="N", help=text)


def _add_router(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("nodes")
    for role in ("prefill", "decode", "encode"):
        group.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="URL",
            help=f"{role} node that does not register itself; may be given more than once",
        )
    parser.add_argument("--model", metavar="DIR", help="folder of the model, for its tokenizer")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--node-api-key",
        default=os.environ.get(NODE_API_KEY_VARIABLE) or None,
        metavar="KEY",
        help=f"presented to nodes (the first --api-key; ${NODE_API_KEY_VARIABLE})",
    )
    _add_handover(parser)
    _add_common(parser, port=8000, log_level="info")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME[:JSON]",
        help="only this one; may be given more than once (memory, tcp, nixl)",
    )
    parser.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="NAME[:JSON]",
        help="this one, too; may be given more than once",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_connectors(parser: argparse.ArgumentParser) -> None:
    jobs = parser.add_subparsers(title="what to do", required=True, metavar="WHAT")
    listing = jobs.add_parser("list", help="which are installed, and what they can do")
    listing.set_defaults(run=run_connectors_list)
    listing.add_argument("specs", nargs="*", metavar="SPEC", help="only these, with their options")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument("--markdown", action="store_true", help="print their options as Markdown")
    check = jobs.add_parser("check", help="run the conformance kit over one")
    check.set_defaults(run=run_connectors_check)
    _add_spec(check)
    check.add_argument("--level", type=human_int, default=5, metavar="0-5", help="highest (5)")
    check.add_argument("--depth", type=human_int, default=1, metavar="N", help="times as long (1)")
    check.add_argument("--seed", type=human_int, default=0, metavar="N")
    check.add_argument(
        "--back-door", metavar="MODULE:CLASS", help="reaches a store's bytes without the store"
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    check.add_argument("--junit", type=Path, metavar="FILE", help="write it as JUnit XML")
    bench = jobs.add_parser("bench", help="measure one beside the machine's own figures")
    _add_spec(bench)
    add_connector_bench(bench, human_int)


def _add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec",
        metavar="SPEC",
        help="NAME[:JSON] or package.module:Class[:JSON]; {tmp} in it becomes an empty folder",
    )
    parser.add_argument("--kind", choices=("store", "transport"), help="if a name is that of both")


def _add_handover(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--min-handover-tokens",
        type=human_int,
        default=0,
        metavar="N",
        help="serve shorter prompts on one node (0: hand over always)",
    )
    parser.add_argument(
        "--min-encode-rows",
        type=human_int,
        metavar="N",
        help="let encoder nodes encode images of at least so many tokens, and no others "
        "(0: all; not given: each image where that is estimated to be faster)",
    )


def _add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport", default="nixl", metavar="NAME[:JSON]", help="moves the KV cache (nixl)"
    )


def _add_common(
    parser: argparse.ArgumentParser, *, port: int, log_level: str, text: bool = True
) -> None:
    group = parser.add_argument_group("endpoint")
    group.add_argument("--host", default=LOOPBACK, help=f"address to listen on ({LOOPBACK})")
    group.add_argument(
        "--port", type=port_number, default=port, help=f"0 takes a free one ({port})"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="as clients name the model")
    if text:
        group.add_argument(
            "--chat-template", metavar="FILE", help="jinja template to use instead of the model's"
        )
        group.add_argument(
            "--generation-config",
            choices=("auto", "none"),
            default="auto",
            help="whether the model's generation_config.json gives sampling defaults (auto)",
        )
        group.add_argument(
            "--allowed-media-domains",
            nargs="+",
            default=[],
            metavar="HOST",
            help="hosts that images are fetched from, those below them too; * for all (none)",
        )
        group.add_argument(
            "--allow-private-media",
            action="store_true",
            help="fetch images from private networks and this machine, too",
        )
        group.add_argument(
            "--limit-images", type=count, default=64, metavar="N", help="of one request (64)"
        )
    api_key = os.environ.get(API_KEY_VARIABLE)
    group.add_argument(
        "--api-key",
        nargs="+",
        default=api_key.split() if api_key else [],
        metavar="KEY",
        help=f"asked of clients (${API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--cluster-key",
        default=os.environ.get(CLUSTER_KEY_VARIABLE) or None,
        metavar="SECRET",
        help=f"shared by all nodes and the router (${CLUSTER_KEY_VARIABLE})",
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, default=log_level)


# --- values ---


def human_int(text: str) -> int:
    """A number, perhaps with a unit: 4k is 4000, 4K is 4096."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number (like 4096, 4k or 2G)")
    value = float(match[1]) * UNITS.get(match[2], 1)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(match[1]) if match[1].lstrip("-").isdigit() and not match[2] else int(value)


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


def check_model(model: str) -> str:
    """A model's folder.

    Raises:
        ConfigError: it is none.
    """
    if not Path(model, "config.json").is_file():
        raise ConfigError("--model", f"{model!r} is no model folder: it has no config.json")
    return model


# --- engine flags ---


def add_engine_flags(parser: argparse.ArgumentParser, *, encoder_only: bool = False) -> None:
    """One flag per field of `EngineConfig`; debugging ones do not appear in the help.

    Args:
        parser: gets them.
        encoder_only: leave out what only engines with a language model heed.
    """
    parser.set_defaults(encoder_only=encoder_only)
    group = parser.add_argument_group("engine")
    texts = attribute_docs(EngineConfig)
    types_of = typing.get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        if field.name == "encoder_only" or (encoder_only and field.name not in ENCODER_SETTINGS):
            continue
        hidden = field.name.startswith("debug_")
        group.add_argument(
            flag_of(field.name),
            **_kind(types_of[field.name]),
            required=field.default is MISSING,
            default=None if field.default is MISSING else field.default,
            help=argparse.SUPPRESS if hidden else _help(field, texts.get(field.name, "")),
        )


def _kind(annotation: Any) -> dict[str, Any]:
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(annotation) is Literal:
        return {"choices": typing.get_args(annotation)}
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else ()
    kind = next((m for m in members if m is not types.NoneType), annotation)
    return {"type": human_int if kind is int else kind, "metavar": kind.__name__.upper()}


def _help(field: Field[Any], text: str) -> str:
    default = field.default
    shown = "" if default is MISSING or default is None else f" ({default})"
    return (text.rstrip(".") + shown).replace("%", "%%")


def attribute_docs(cls: type) -> dict[str, str]:
    """The texts under ``Attributes:`` in a class's docstring, by name, without markup."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text.replace("`", "")) for name, text in found}


def flag_of(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's part of the flags."""
    given = vars(args)
    return EngineConfig(**{f.name: given[f.name] for f in fields(EngineConfig) if f.name in given})


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The engine's part of the flags as a child's command line; defaults are left out."""
    words = []
    for field in fields(EngineConfig):
        value = getattr(args, field.name, field.default)
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag_of(field.name) if value else "--no-" + flag_of(field.name)[2:])
        else:
            words.append(f"{flag_of(field.name)}={value}")
    return words


def media_config(args: argparse.Namespace) -> Any:
    """What images clients may bring (`MediaConfig`); an encoder node has no such flags."""
    from kvbaton.server.media import MediaConfig

    return MediaConfig(
        allowed_media_domains=tuple(getattr(args, "allowed_media_domains", ())),
        allow_private_media=getattr(args, "allow_private_media", False),
        max_images=getattr(args, "limit_images", 0),
    )


def node_config(args: argparse.Namespace, role: Literal["prefill", "decode", "encode"]) -> Any:
    """A node's settings (`NodeConfig`).

    Raises:
        ConfigError: values that do not fit together, or a model that is not there.
    """
    from kvbaton.server.node_config import NodeConfig

    check_model(args.model)
    # With a fixed port, a restart takes the place of the life before it.
    unique = args.port or os.getpid()
    some = ("max_transfers", "max_blocks_per_peer", "chat_template", "generation_config")
    of_role = {name: value for name, value in vars(args).items() if name in some}
    return NodeConfig(
        engine=engine_config(args),
        role=role,
        node_id=f"{role}-{socket.gethostname()}-{unique}" if args.node_id is None else args.node_id,
        host=args.host,
        port=args.port,
        served_model_name=args.served_model_name,
        api_keys=tuple(args.api_key),
        router=args.router,
        peers=tuple(getattr(args, "peer", ())),
        cluster_key=args.cluster_key,
        transport=args.transport,
        control_port=args.control_port,
        engine_port=args.engine_port,
        log_level=args.log_level,
        media=media_config(args),
        **of_role,
    )
