"""The command lines of ``kvbaton bench``; what a benchmark needs is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvbaton.config import add_flags, from_args


def add_benches(parser: argparse.ArgumentParser) -> None:
    """Add ``transfer`` and ``serve`` to ``kvbaton bench``."""
    from kvbaton.bench.serve import ServeLoad
    from kvbaton.bench.transfer import TransferLoad

    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="WHAT")
    transfer = benches.add_parser("transfer", help="move blocks between two processes")
    transfer.set_defaults(run=run_transfer)
    add_flags(transfer, TransferLoad)
    serve = benches.add_parser("serve", help="load on any OpenAI endpoint")
    serve.set_defaults(run=run_serve)
    add_flags(serve, ServeLoad)
    for bench in (transfer, serve):
        _add_out(bench)


def add_connector_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``kvbaton connectors bench SPEC``."""
    from kvbaton.bench.store import StoreLoad

    parser.set_defaults(run=run_connector)
    add_flags(parser, StoreLoad)
    _add_out(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a store's result as PNG")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")


def run_connector(args: argparse.Namespace) -> int:
    """``kvbaton connectors bench``."""
    from kvbaton.testing.check import make_subject

    if make_subject(args.spec, args.kind).kind == "transport":
        from kvbaton.bench.transfer import TransferLoad
        from kvbaton.bench.transfer import run as run_transport

        blocks = tuple(args.object_bytes)
        load = TransferLoad(transports=(args.spec,), block_bytes=blocks, num_bytes=args.bytes)
        return run_transport(load, args.out)
    from kvbaton.bench.store import StoreLoad, run

    return run(from_args(StoreLoad, args), args.out, args.plot)


def run_transfer(args: argparse.Namespace) -> int:
    """``kvbaton bench transfer``."""
    from kvbaton.bench.transfer import TransferLoad, run

    return run(from_args(TransferLoad, args), args.out)


def run_serve(args: argparse.Namespace) -> int:
    """``kvbaton bench serve``."""
    from kvbaton.bench.serve import ServeLoad, run

    return run(from_args(ServeLoad, args), args.out)
