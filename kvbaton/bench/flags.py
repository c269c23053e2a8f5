"""The command lines of ``kvbaton bench``; what a benchmark needs is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

TRANSPORTS = ("nixl", "tcp")
OBJECT_SIZES = (64 << 10, 512 << 10, 2 << 20)
BLOCK_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


def add_benches(parser: argparse.ArgumentParser, size: Any) -> None:
    """Add ``transfer`` and ``serve``.

    Args:
        parser: of ``kvbaton bench``.
        size: reads a number that may have a unit.
    """
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="WHAT")
    transfer = benches.add_parser("transfer", help="move blocks between two processes")
    transfer.set_defaults(run=run_transfer)
    transfer.add_argument("--transports", nargs="+", default=list(TRANSPORTS), metavar="NAME")
    transfer.add_argument(
        "--block-bytes", nargs="+", type=size, default=list(BLOCK_SIZES), metavar="N"
    )
    transfer.add_argument(
        "--bytes", type=size, default=64 << 20, metavar="N", help="of one write (64M)"
    )
    transfer.add_argument("--repeats", type=size, default=7, metavar="N")
    serve = benches.add_parser("serve", help="load on any OpenAI endpoint")
    serve.set_defaults(run=run_serve)
    serve.add_argument("--url", required=True, help="of the endpoint, without /v1")
    serve.add_argument("--model", metavar="NAME", help="as the endpoint names it (asks it)")
    serve.add_argument("--api-key", metavar="KEY")
    serve.add_argument("--requests", type=size, default=64, metavar="N", help="in all (64)")
    serve.add_argument("--input-len", type=size, default=256, metavar="N", help="tokens (256)")
    serve.add_argument("--output-len", type=size, default=32, metavar="N", help="tokens (32)")
    serve.add_argument("--concurrency", type=size, default=8, metavar="N", help="at a time (8)")
    serve.add_argument(
        "--rate", type=float, metavar="R", help="requests per second, open loop (closed loop)"
    )
    serve.add_argument("--vocab-size", type=size, default=256, metavar="N", help="of prompts (256)")
    serve.add_argument("--seed", type=size, default=0, metavar="N")
    for bench in (transfer, serve):
        bench.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")


def add_connector_bench(parser: argparse.ArgumentParser, size: Any) -> None:
    """Add the flags of ``kvbaton connectors bench SPEC``.

    Args:
        parser: of that command.
        size: reads a number that may have a unit.
    """
    parser.set_defaults(run=run_connector)
    parser.add_argument(
        "--object-bytes",
        nargs="+",
        type=size,
        default=list(OBJECT_SIZES),
        metavar="N",
        help="sizes of a store's objects or of the blocks of a transport's writes",
    )
    parser.add_argument(
        "--concurrency", nargs="+", type=size, default=[1, 4, 16], metavar="N", help="(1 4 16)"
    )
    parser.add_argument(
        "--bytes", type=size, default=64 << 20, metavar="N", help="of each size (64M)"
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="where the store keeps its files: measures its disk, and cold loads",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a store's result as PNG")


def run_connector(args: argparse.Namespace) -> int:
    """``kvbaton connectors bench``."""
    from kvbaton.testing.subject import make_subject

    if make_subject(args.spec, args.kind).kind == "transport":
        from kvbaton.bench.transfer import TransferLoad
        from kvbaton.bench.transfer import run as run_transport

        blocks = tuple(args.object_bytes)
        load = TransferLoad(transports=(args.spec,), block_bytes=blocks, num_bytes=args.bytes)
        return run_transport(load, args.out)
    from kvbaton.bench.store import StoreLoad, run

    return run(
        StoreLoad(
            spec=args.spec,
            object_bytes=tuple(args.object_bytes),
            concurrency=tuple(args.concurrency),
            num_bytes=args.bytes,
            folder=args.folder,
        ),
        args.out,
        args.plot,
    )


def run_transfer(args: argparse.Namespace) -> int:
    """``kvbaton bench transfer``."""
    from kvbaton.bench.transfer import TransferLoad, run

    load = TransferLoad(
        transports=tuple(args.transports),
        block_bytes=tuple(args.block_bytes),
        num_bytes=args.bytes,
        repeats=args.repeats,
    )
    return run(load, args.out)


def run_serve(args: argparse.Namespace) -> int:
    """``kvbaton bench serve``."""
    from kvbaton.bench.serve import ServeLoad, run

    load = ServeLoad(
        url=args.url.rstrip("/").removesuffix("/v1"),
        model=args.model,
        api_key=args.api_key,
        requests=args.requests,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=args.concurrency,
        rate=args.rate,
        vocab_size=args.vocab_size,
        seed=args.seed,
    )
    return run(load, args.out)
