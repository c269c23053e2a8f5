"""The commands. A command's modules are imported when it runs, or when its flags are needed.

Flags are made from the fields of settings (`kvbaton.config`).
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from kvbaton import __version__
from kvbaton.config import (
    add_config_flag,
    add_flags,
    from_args,
    human_int,
    instead_of,
    with_config,
)
from kvbaton.errors import (
    INTERRUPTED,
    ConfigError,
    EngineDeadError,
    StoreError,
    TransportError,
    writing,
)

if TYPE_CHECKING:
    from kvbaton.server.config import NodeConfig
    from kvbaton.testing.check import Subject

FillParser = Callable[[argparse.ArgumentParser], None]
RunCommand = Callable[[argparse.Namespace], int]

SIMULATION = "kvbaton.simulate.main:SimulateConfig"
FILES = {"out": "write the result as JSON", "plot": "draw the result as PNG"}
"""By option: help text for the file that a tool writes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    The status is 2 for a wrong setting, and 1 for an engine that does not start or a connector that
    fails.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of answers
        with suppress(OSError):  # it was opened as a file, and its descriptor is now a pipe
            sys.stdout.reconfigure(errors="replace")
    try:
        args = make_parser().parse_args(argv)
        run: RunCommand = args.run
        status = run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except OSError as error:
        if _takes_output():
            raise  # the error is not of standard output
        print(f"kvbaton: error: standard output: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what is still buffered
        return 1
    except (ConfigError, EngineDeadError, StoreError, TransportError) as error:
        from kvbaton.connectors.registry import as_written

        print(f"kvbaton: error: {as_written(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _takes_output() -> bool:
    """Whether a line can be written to standard output, or there is none."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


class Parser(argparse.ArgumentParser):
    """A parser that adds its flags when it is used, and reports wrong flags like wrong settings."""

    fill: FillParser | None = None
    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the flags and the options of ``--config``, then parse."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        if self._subparsers is None:
            add_config_flag(self)
            args = with_config(self, sys.argv[1:] if args is None else args)
        self._given = [str(word) for word in args or ()]
        found, rest = super().parse_known_args(args, namespace)
        if hint := self._hint(rest):
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest

    def _hint(self, words: Iterable[str]) -> str:
        """What to use instead of the first unknown flag for which that is known."""
        names, options = (word.partition("=")[0] for word in words), self._option_string_actions
        unknown = (name for name in names if name.startswith("-") and name not in options)
        return next(filter(None, (instead_of(name, options) for name in unknown)), "")

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        text = f"{flag}: {rest}" if message.startswith("argument ") else message
        if self._subparsers is not None and "are required: " in text:
            (jobs,) = self._subparsers._group_actions  # argparse has no other way to ask for them
            text += f", one of {', '.join(jobs.choices or ())}"
        elif "are required: " in text:
            text += self._hint(self._given)
        self.exit(2, f"kvbaton: error: {text}\n")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = Parser(
        prog="kvbaton",
        allow_abbrev=False,
        description="Serve large language models with prefill and decode on separate nodes.",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, fill, run, text in (
        (
            "up",
            _flags_of(
                "kvbaton.cluster.config:ClusterConfig",
                takes_model=True,
                order=("cluster", "endpoint", None),
                skip={"encoder_only"},
                model=None,
                port=8000,
                log_level="warning",
            ),
            run_up,
            "Start a router and its nodes on this machine, or on those of a Ray cluster.",
        ),
        ("serve", _serve_flags, run_node, "Start a node that prefills and decodes."),
        (
            "prefill",
            _node_flags(8100, "max_blocks_per_peer", role="prefill"),
            run_node,
            "Start a node that prefills for others.",
        ),
        (
            "decode",
            _node_flags(8200, "max_transfers", role="decode"),
            run_node,
            "Start a node that generates from what others prefilled.",
        ),
        ("encode", _encode_flags, run_node, "Start a node that encodes images for others."),
        (
            "router",
            _flags_of("kvbaton.router.config:RouterConfig", order=("nodes", None), port=8000),
            run_router,
            "Start a router, the endpoint in front of all nodes.",
        ),
        (
            "chat",
            _flags_of("kvbaton.cluster.chat:ChatConfig", url_of="a router or node"),
            _runs("kvbaton.cluster.chat:run", "kvbaton.cluster.chat:ChatConfig"),
            "Talk to a model in the terminal.",
        ),
        (
            "drain",
            _flags_of("kvbaton.cluster.drain:DrainConfig", url_of="a node or router"),
            _runs("kvbaton.cluster.drain:run", "kvbaton.cluster.drain:DrainConfig"),
            "Let a node or router finish its requests, and accept no new ones.",
        ),
        (
            "simulate",
            _flags_of(SIMULATION, "out", "plot"),
            _runs("kvbaton.simulate.main:run", SIMULATION, "out", "plot"),
            "Serve a trace on a virtual clock, to compare layouts and policies.",
        ),
        (
            "advise",
            _flags_of(SIMULATION, "out", skip={"policies", "min_handover_tokens"}, nodes="4"),
            _runs("kvbaton.simulate.main:run_advise", SIMULATION, "out"),
            "Find the layout of a number of nodes that serves a trace best, in virtual time.",
        ),
        ("bench", _bench_flags, None, "Measure transports and endpoints."),
        ("connectors", _connector_flags, None, "List, check and measure transports and stores."),
        ("doctor", _doctor_flags, run_doctor, "Test transports and stores on this machine."),
        ("version", None, run_version, "Print the version."),
    ):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.fill = fill
        sub.set_defaults(run=run)
    return parser


# --- nodes, router, cluster ---


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role",
        choices=("any", "prefill", "decode"),
        default="any",
        help="prefill for others, decode what others prefilled, or both (any)",
    )
    _node_flags(8100)(parser)


def _encode_flags(parser: argparse.ArgumentParser) -> None:
    from kvbaton.engine.config import ENCODER_SETTINGS, EngineConfig
    from kvbaton.server.config import MediaConfig

    text = {"chat_template", "tool_call_parser", "reasoning_parser", "generation_config"}
    text |= {item.name for item in fields(MediaConfig)}
    other = {item.name for item in fields(EngineConfig)} - set(ENCODER_SETTINGS)
    parser.set_defaults(encoder_only=True, limit_images=0)
    _node_flags(8300, "max_blocks_per_peer", "peers", *text, *other, role="encode")(parser)


def _node_flags(port: int, *skip: str, role: str | None = None) -> FillParser:
    fill = _flags_of(
        "kvbaton.server.config:NodeConfig",
        takes_model=True,
        order=("node", None, "endpoint"),
        skip={"encoder_only", *skip},
        model=None,
        port=port,
        node_id=None,
    )

    def fill_for_role(parser: argparse.ArgumentParser) -> None:
        if role is not None:
            parser.set_defaults(role=role)
        fill(parser)

    return fill_for_role


def _flags_of(
    path: str, *files: str, takes_model: bool = False, url_of: str = "", **settings: Any
) -> FillParser:
    """Return a function that adds the flags of a configuration, which it imports.

    Args:
        path: Dotted path of the configuration class.
        files: Keys of `FILES`: the files that the command writes.
        takes_model: Whether the model may be given without a flag, as in vLLM; see `find_model`.
        url_of: Whose URL is an argument without a flag; empty if none is.
        settings: Arguments of `add_flags`.
    """

    def fill(parser: argparse.ArgumentParser) -> None:
        config = resolve_name(path)
        if takes_model:
            help_text = "the model, instead of --model"
            parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=help_text)
        if url_of:
            text = f"URL of {url_of} ({config.url})"
            parser.add_argument("url", nargs="?", default=config.url, metavar="URL", help=text)
        add_flags(parser, config, **settings)
        for name in files:
            parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=FILES[name])

    return fill


def _runs(path: str, config: str, *more: str) -> RunCommand:
    """Return a command that calls a function with a configuration and further arguments.

    Args:
        path: Dotted path of the function; it returns the exit status.
        config: Dotted path of the configuration class, which is made from flags.
        more: Names of the further arguments to pass.
    """

    def run(args: argparse.Namespace) -> int:
        given = (getattr(args, name) for name in more)
        status: int = resolve_name(path)(from_args(resolve_name(config), args), *given)
        return status

    return run


def run_node(args: argparse.Namespace) -> int:
    """``kvbaton serve``, ``prefill``, ``decode``, ``encode``."""
    config = node_config(args)
    from kvbaton.roles import main as run

    return run(config)


def run_router(args: argparse.Namespace) -> int:
    """``kvbaton router``."""
    from kvbaton.router.app import main as run
    from kvbaton.router.config import RouterConfig

    if args.model is not None and args.model.endswith(".gguf"):
        find_model(args)
    return run(from_args(RouterConfig, args))


def run_up(args: argparse.Namespace) -> int:
    """``kvbaton up``."""
    from kvbaton.cluster.config import ClusterConfig
    from kvbaton.cluster.launcher import run

    model = args.model_tag or args.model
    find_model(args)
    if args.ray is not None:  # other machines need the path itself, and read a GGUF file themselves
        args.model = os.path.abspath(model)
    return run(from_args(ClusterConfig, args))


def node_config(args: argparse.Namespace) -> NodeConfig:
    """Make a node's settings from its flags.

    Raises:
        ConfigError: Values that do not fit together, or a model that is not there.
    """
    from kvbaton.server.config import NodeConfig

    find_model(args)
    if args.node_id is None:
        # With a fixed port a restarted node gets the same id, and so replaces its earlier life.
        args.node_id = f"{args.role}-{socket.gethostname()}-{args.port or os.getpid()}"
    return from_args(NodeConfig, args, role=args.role)


def find_model(args: argparse.Namespace) -> None:
    """Set ``args.model`` to the model's folder, and the served name to the model as given.

    Raises:
        ConfigError: No model is given, or it is not one.
    """
    from kvbaton.engine.config import check_model_folder

    args.model = vars(args).pop("model_tag", None) or args.model  # a --config file may name another
    names = args.served_model_name
    if args.model is None and len(names) > 1 and os.path.exists(names[-1]):
        args.model = names.pop()  # --served-model-name NAME MODEL: the flag took both words
    if args.model is None:
        raise ConfigError("--model", "is missing: the folder of the model, or a GGUF file")
    args.served_model_name = names or [args.model]
    if args.model.endswith(".gguf"):
        from kvbaton.engine.gguf import model_folder

        args.model = model_folder(args.model)
    check_model_folder(args.model)


# --- tools ---


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="WHAT")
    for name, load, text in (
        ("transfer", "TransferLoad", "move blocks between two processes"),
        ("serve", "ServeLoad", "send requests to any OpenAI endpoint"),
    ):
        bench, config = benches.add_parser(name, help=text), f"kvbaton.bench.{name}:{load}"
        bench.set_defaults(run=_runs(f"kvbaton.bench.{name}:run", config, "out"))
        _flags_of(config, "out")(bench)


def _doctor_flags(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("--transport", "test only this transport; may be given again (memory, tcp, nixl)"),
        ("--store", "also test this store; may be given again"),
    ):
        parser.add_argument(flag, action="append", default=[], metavar="NAME[:JSON]", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _connector_flags(parser: argparse.ArgumentParser) -> None:
    jobs = parser.add_subparsers(title="what to do", required=True, metavar="WHAT")
    listing = jobs.add_parser("list", help="installed connectors and their capabilities")
    listing.set_defaults(run=run_connectors_list)
    listing.add_argument("specs", nargs="*", metavar="SPEC", help="only these, with their options")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument("--markdown", action="store_true", help="print their options as Markdown")
    check = jobs.add_parser("check", help="run the conformance kit on a connector")
    check.set_defaults(run=run_connectors_check)
    _add_spec(check)
    check.add_argument(
        "--level", type=human_int, default=5, choices=range(6), metavar="0-5",
        help="highest level of cases (5)",
    )  # fmt: skip
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    certify = jobs.add_parser("certify", help="run the whole kit, measure, write certificates")
    certify.set_defaults(run=run_connectors_certify)
    _add_spec(certify)
    for of_kit in (check, certify):
        of_kit.add_argument(
            "--depth", type=human_int, default=1, metavar="N", help="run N times as long (1)"
        )
        of_kit.add_argument(
            "--seed", type=human_int, default=0, metavar="N", help="seed of random choices (0)"
        )
        of_kit.add_argument(
            "--back-door", metavar="MODULE:CLASS", help="reaches a store's bytes without the store"
        )
        of_kit.add_argument(
            "--exclude", action="append", default=[], metavar="CASE=REASON",
            help="do not run this case, and record why; may be given again",
        )  # fmt: skip
    certify.add_argument(
        "--out", type=Path, default=Path("certificates"), metavar="DIR",
        help="where NAME.json, NAME.xml (JUnit) and NAME.html are written (certificates)",
    )  # fmt: skip
    check.add_argument(
        "--case", action="append", default=[], metavar="TEXT",
        help="only cases whose name contains it; may be given again",
    )  # fmt: skip
    check.add_argument("--quick", action="store_true", help="leave out cases that take long")
    check.add_argument("-x", action="store_true", help="stop at the first failure")
    namespaces = jobs.add_parser("namespaces", help="list what a store holds, by namespace")
    namespaces.add_argument("spec", metavar="SPEC", help="the store, as for --store")
    namespaces.add_argument("--clear", metavar="NAME", help="delete what is in this namespace")
    namespaces.set_defaults(run=run_connectors_namespaces)
    bench = jobs.add_parser("bench", help="measure a connector, and what the machine itself can do")
    _add_spec(bench)
    bench.set_defaults(run=run_connectors_bench)
    _flags_of("kvbaton.bench.store:StoreLoad", "out", "plot")(bench)


def _add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec",
        metavar="SPEC",
        help="NAME[:JSON] or package.module:Class[:JSON]; {tmp} in it becomes an empty folder",
    )
    parser.add_argument("--kind", choices=("store", "transport"), help="if both have this name")


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
        _subject(args),
        level=args.level,
        json_path=args.json,
        only=args.case,
        stop_at_failure=args.x,
        quick=args.quick,
    )


def _subject(args: argparse.Namespace) -> Subject:
    """The connector that the kit is to check.

    Raises:
        ConfigError: See `make_subject`.
    """
    from kvbaton.testing.check import make_subject

    names = ("back_door", "depth", "seed", "exclude")
    return make_subject(args.spec, args.kind, **{name: getattr(args, name) for name in names})


def run_connectors_certify(args: argparse.Namespace) -> int:
    """``kvbaton connectors certify``."""
    from kvbaton.bench.store import speed
    from kvbaton.testing.certificate import certify, write
    from kvbaton.testing.check import end

    subject = _subject(args)
    with writing("--out"):  # an error here comes before the minutes that the kit takes
        args.out.mkdir(parents=True, exist_ok=True)
    certificate, status = certify(subject, speed)
    with writing("--out"):
        paths = write(certificate, args.out)
    print(*paths, sep="\n")
    end(certificate.cases, status)
    return status


def run_connectors_namespaces(args: argparse.Namespace) -> int:
    """``kvbaton connectors namespaces``."""
    from kvbaton.doctor.installed import run_namespaces

    return run_namespaces(args.spec, args.clear)


def run_connectors_bench(args: argparse.Namespace) -> int:
    """``kvbaton connectors bench``."""
    from kvbaton.testing.check import make_subject

    if make_subject(args.spec, args.kind).kind == "transport":
        from kvbaton.bench.transfer import TransferLoad
        from kvbaton.bench.transfer import run as run_transport

        for name in ("plot", "folder"):
            if getattr(args, name) is not None:
                problem = f"is for stores, and {args.spec} is a transport"
                raise ConfigError(f"--{name}", problem)
        blocks = tuple(args.object_bytes)
        try:
            load = TransferLoad(transports=(args.spec,), block_bytes=blocks, num_bytes=args.bytes)
        except ConfigError as error:  # which names the flags of `bench transfer`
            field = error.field.replace("--block-bytes", "--object-bytes")
            raise ConfigError(field, error.reason) from error
        return run_transport(load, args.out)
    from kvbaton.bench.store import StoreLoad, run

    return run(from_args(StoreLoad, args), args.out, args.plot)


def run_version(args: argparse.Namespace) -> int:
    """``kvbaton version``."""
    print(__version__)
    return 0
