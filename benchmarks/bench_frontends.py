"""CPU time per token of the path from an engine core to a frontend, without model, HTTP and text.

A core without a model, in a process of its own, gives each of `--sequences` requests a token per
step; a frontend here reads them with a task per request. Reported are CPU time per token of both
ends, and outputs per token: 1 if readers keep up, fewer if outputs are merged. The first row is
paced, so that readers keep up; the second runs as fast as the core can. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path

from kvbaton.bench.report import publish
from kvbaton.engine.client import EngineClient
from kvbaton.engine.frontends import EngineEndpoints, FrontendServer
from kvbaton.messages.engine import AddRequest, Output, Outputs, Ready, SamplingParams
from kvbaton.types import NodeId


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=300, help="output tokens per sequence")
    parser.add_argument("--pace", type=float, default=20.0, help="ms per step of the first row")
    parser.add_argument("--cluster-key", help="encrypt with this key")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [asyncio.run(measure(args, pace_s)) for pace_s in (args.pace / 1000, 0.0)]
    publish("frontends", vars(args), rows, args.out)


async def measure(args: argparse.Namespace, pace_s: float) -> dict[str, object]:
    """Measure one row, with a core that makes a step every `pace_s`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    words = (args.sequences, args.tokens, pace_s, args.cluster_key, theirs)
    core = context.Process(target=run_core, args=words, daemon=True)
    core.start()
    client = await EngineClient.connect(ours.recv(), cluster_key=args.cluster_key)
    outputs = 0

    async def read(number: int) -> None:
        nonlocal outputs
        params = SamplingParams(max_tokens=args.tokens)
        request = AddRequest(
            request_id=f"cmpl-{number:032x}", token_ids=array("I", (1, 2)), params=params
        )
        async for _ in client.generate(request):
            outputs += 1

    before = time.process_time()
    await asyncio.gather(*(read(number) for number in range(args.sequences)))
    total = args.sequences * args.tokens
    row = {
        "pace_ms": 1000 * pace_s,
        "frontend_us_per_token": round((time.process_time() - before) / total * 1e6, 2),
        "core_us_per_token": round(ours.recv() / total * 1e6, 2),
        "outputs_per_token": round(outputs / total, 3),
    }
    await client.close()
    core.join()
    return row


def run_core(
    sequences: int, tokens: int, pace_s: float, cluster_key: str | None, parent: Connection
) -> None:
    """Run in a child process: report the core's address, then its CPU seconds of sending."""
    with tempfile.TemporaryDirectory() as folder:
        server = FrontendServer(
            EngineEndpoints(
                local=f"ipc://{folder}/engine", host="127.0.0.1", cluster_key=cluster_key
            )
        )
        server.send(
            Ready(
                node=NodeId("bench", bytes(16)),
                control_address=None,
                num_blocks=1,
                block_size=16,
                max_model_len=1 << 20,
                eos_token_ids=(),
            )
        )
        parent.send(server.address)
        wake, _ = os.pipe()
        live: list[str] = []
        while len(live) < sequences:
            messages = server.receive(0.1, wake)
            live += [m.request_id for m in messages if isinstance(m, AddRequest)]
        spent = 0.0
        for index in range(tokens):
            began, end = time.monotonic(), "length" if index == tokens - 1 else None
            outputs = tuple(
                Output(request_id=name, index=index, token_ids=(index,), finish_reason=end)
                for name in live
            )
            before = time.thread_time()
            server.send(Outputs(outputs=outputs))
            for _ in server.receive(0.0, wake):
                pass
            spent += time.thread_time() - before
            time.sleep(max(0.0, pace_s - (time.monotonic() - began)))
        parent.send(spent)
        server.close()


if __name__ == "__main__":
    main()
