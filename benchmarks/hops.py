"""Count the function calls on three paths through a cluster, and print them with their goals.

``kvbaton up`` serves a tiny model on a prefill node, a decode node and a router. Every call of a
kvbaton function is recorded in all processes (`sys.setprofile`, started by a ``sitecustomize``
module on their path). Requests come one at a time, so each call belongs to one of them:

- **prompt**: from the request to the prefill node's first forward pass: calls in the router and the
  prefill node's core, except in threads that move KV.
- **block**: from the end of that pass to the decode node's first one: calls in both engine cores
  that handle KV: of connectors and roles, in threads that move KV, and in the decode node's loop.
- **token**: from the decode node's sampler to the server-sent event: calls in its core's loop until
  the token is encoded for another process, and all calls in the router until the next token is
  sampled. Frames are the different coroutines that the router resumes for it.

Calls that depend on the machine's load are left out. Requests start after the nodes have reported
their step costs, so that all are priced. The request with the fewest calls counts, and the median
of several tokens, so that heartbeats do not matter. Calls that a thread also makes while idle, or
repeats at once, are polling and count once. Periodic work (`PERIODIC`) belongs to no request, and
falls into one or another depending on the machine's speed. Of concurrent work, only what the
forward pass waits for counts: not the router after it has asked the prefill node, nor a core's loop
that waits for that pass, nor the prefill node after all KV has arrived at the decode node or while
it samples a second token meanwhile, nor the decode node before the block is sent.

Forms of the token ids are the different (holder, container) pairs in which functions on the
prompt's path get them, as arguments or as fields of arguments.
"""

from __future__ import annotations

import argparse
import http.client
import inspect
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = f"{ROOT / 'kvbaton'}{os.sep}"
COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
ENTERED_AGAIN = COROUTINE | inspect.CO_GENERATOR
START_S, REQUEST_S, STOP_S = 300.0, 60.0, 30.0
REQUESTS, MAX_TOKENS, WARM_UPS = 13, 12, 300
IDLE_S = 2.0
"""Idle seconds, to record the calls made then; heartbeats come every second."""
LONGEST_TURN = 60
"""Most calls in one turn of a loop."""
NO_CALLS = {"<module>", "<listcomp>", "<dictcomp>", "<setcomp>"}
"""Names not counted: since Python 3.12 comprehensions are not calls (PEP 709)."""
PERIODIC = "TransferWorker._look_around"
"""Function that a thread runs periodically; it and all its calls are left out."""
IDS = tuple(range(300, 337))
"""A prompt that no other sequence of numbers is equal to."""


# --- in every process of the cluster ---


def record(folder: Path) -> None:
    """Record calls of kvbaton's functions from now on, in all threads of this process."""
    out = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(out, f"{os.getppid()}\t{' '.join(sys.orig_argv)}\n".encode())

    def note(kind: str, frame: FrameType, more: str = "") -> None:
        code = frame.f_code
        thread = threading.current_thread().name
        name = f"{code.co_filename[len(PACKAGE) :]}\t{code.co_qualname}"
        os.write(out, f"{time.monotonic_ns()}\t{thread}\t{kind}\t{name}\t{more}\n".encode())

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in NO_CALLS:
            return
        if event == "call":
            if code.co_flags & ENTERED_AGAIN and frame.f_lasti > 0:
                if code.co_flags & COROUTINE:
                    note("resume", frame)
            else:
                note("call", frame, " ".join(forms(frame)))
        elif event == "return" and code.co_qualname == PERIODIC:
            note("return", frame)
        elif event == "c_call" and arg.__name__ == "encode" and "msgspec" in repr(arg):
            note("encode", frame)

    threading.setprofile(profile)
    # The main thread starts later: recording its imports would take long.
    signal.signal(signal.SIGUSR1, lambda *_: sys.setprofile(profile))


def forms(frame: FrameType) -> set[str]:
    """Forms in which a function's arguments hold `IDS`."""
    code, found = frame.f_code, set[str]()
    count = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        if holds_ids(value):
            found.add(type(value).__name__)
        names = getattr(value, "__struct_fields__", None) or getattr(value, "__dict__", None)
        for attribute in names or ():
            inner = getattr(value, attribute, None)
            if holds_ids(inner):
                found.add(f"{type(value).__name__}.{attribute}:{type(inner).__name__}")
    return found


def holds_ids(value: Any) -> bool:
    """Whether a value equals `IDS`, as any sequence of numbers."""
    kind = type(value).__name__
    if kind not in ("tuple", "list", "array", "ndarray", "Tensor") or len(value) != len(IDS):
        return False
    first = value[:3].tolist() if hasattr(value, "tolist") else list(value[:3])
    return bool(first == list(IDS[:3]))


# --- the recorded events ---


@dataclass(frozen=True)
class Event:
    """A call, or another recorded event."""

    process: str
    at: int
    thread: str
    kind: str
    file: str
    name: str
    more: str


@dataclass
class Process:
    """A process of the cluster.

    Attributes:
        kind: ``router``; ``prefill`` or ``decode`` for a node's first process; ``prefill core`` or
            ``decode core`` for its engine.
        events: Events in order of time.
    """

    kind: str
    events: list[Event] = field(repr=False)

    def between(self, start: int, end: int, kind: str = "call") -> list[Event]:
        """Events of one kind between two times."""
        return [e for e in self.events if start <= e.at < end and e.kind == kind]

    def first(self, start: int, what: str, wanted: Callable[[Event], bool]) -> int:
        """Time of the first wanted event from `start` on.

        Raises:
            LookupError: There is none.
        """
        for event in self.events:
            if event.at >= start and wanted(event):
                return event.at
        raise LookupError(f"no {what} in {self.kind} from {start} on: did a name change?")


def read(folder: Path) -> dict[str, Process]:
    """Read all processes, by kind."""
    found: dict[int, tuple[int, str, list[Event]]] = {}
    for path in folder.iterdir():
        if not path.name.isdigit():
            continue
        head, *lines = path.read_text().splitlines()
        parent, words = head.split("\t")
        parts = (line.split("\t") for line in lines)
        every = [Event(path.name, int(at), *rest) for at, *rest in parts if len(rest) == 5]
        events = [event for own in by_thread(every) for event in without_periods(own)]
        found[int(path.name)] = (int(parent), words, sorted(events, key=lambda e: e.at))

    def kind_of(pid: int) -> str:
        parent, words, events = found[pid]
        command = re.search(r"-m kvbaton (\w+)", words)
        if command:
            return command[1]
        is_core = any(is_forward(event) for event in events)
        return f"{kind_of(parent)} core" if is_core and parent in found else words

    kinds = {pid: kind_of(pid) for pid in found}
    return {
        kind: Process(kind, [replace(event, process=kind) for event in found[pid][2]])
        for pid, kind in kinds.items()
    }


def is_forward(event: Event) -> bool:
    """Whether an event begins a forward pass of the model."""
    return event.kind == "call" and bool(re.match(r"engine/models/.*\bforward$", on(event)))


def is_at(place: str) -> Callable[[Event], bool]:
    """Predicate: whether an event is a call of a given function."""
    return lambda event: event.kind == "call" and on(event).endswith(place)


def is_sampler(event: Event) -> bool:
    """Whether an event is a call of the sampler."""
    return event.kind == "call" and event.file.endswith("sampler.py")


def on(event: Event) -> str:
    """File and function of an event."""
    return f"{event.file}:{event.name}"


# --- the paths ---


@dataclass
class Way:
    """Calls on one path, of several requests or tokens.

    Attributes:
        middle: Function that selects the number that counts (least or median).
    """

    middle: Callable[[Iterator[int]], float] = min
    events: list[list[Event]] = field(default_factory=list)

    def calls(self) -> int:
        """Number of calls that counts."""
        return round(self.middle(len(events) for events in self.events))

    def typical(self) -> list[Event]:
        """Calls of a request or token that has the number that counts."""
        return min(self.events, key=lambda events: abs(len(events) - self.calls()))

    def names(self) -> Iterator[str]:
        """Typical calls by process and function."""
        for (process, name), count in Counter((e.process, on(e)) for e in self.typical()).items():
            yield f"{count:6,}  {process:14} {name}"

    def each(self) -> Iterator[str]:
        """Typical calls in order of time, with the microseconds since the first."""
        calls = sorted(self.typical(), key=lambda event: event.at)
        for e in calls:
            yield f"{(e.at - calls[0].at) // 1000:8,}  {e.process:14} {e.thread:20} {on(e)}"

    def files(self) -> int:
        """Number of different files: the median."""
        return round(statistics.median(len({e.file for e in events}) for events in self.events))


def without_loops(events: Sequence[Event]) -> list[Event]:
    """Events of one thread, without repeated turns of loops."""
    kept: list[Event] = []
    names: list[str] = []
    for event in events:
        kept.append(event)
        names.append(on(event))
        for length in range(1, LONGEST_TURN + 1):
            if names[-length:] == names[-2 * length : -length]:
                del kept[-length:], names[-length:]
                break
    return kept


def without_periods(events: Sequence[Event]) -> Iterator[Event]:
    """Events of one thread, without calls of `PERIODIC` and all within them."""
    is_inside = False
    for event in events:
        is_inside = (is_inside or event.name == PERIODIC) and event.kind != "return"
        if not is_inside and event.kind != "return":
            yield event


def by_thread(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Events of each thread."""
    threads: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        threads.setdefault((event.process, event.thread), []).append(event)
    yield from threads.values()


def without_polling(events: Sequence[Event], polling: Set[tuple[str, str]]) -> list[Event]:
    """Events without polling: of calls also made while idle, only each thread's first is kept."""
    kept: list[Event] = []
    for own in by_thread(events):
        seen: set[str] = set()
        for event in own:
            if (event.process, on(event)) not in polling or on(event) not in seen:
                kept.append(event)
            seen.add(on(event))
    return kept


def until_forward(core: Process, start: int, at: int) -> list[Event]:
    """Calls in a core until a forward pass begins, except its loop's while waiting for the pass."""
    launched = core.first(start, "launch", is_at("engine/executor.py:Executor.launch"))
    begins = is_at("engine/core.py:EngineCore._expect"), is_at("engine/core.py:EngineCore.update")
    waits = core.first(launched, "wait for a step", lambda e: any(is_it(e) for is_it in begins))
    return [e for e in core.between(start, at) if e.at < waits or e.thread != "MainThread"]


def moves_kv(event: Event) -> bool:
    """Whether an event is a call of a connector or a role, or in a thread that moves KV."""
    rooms = ("connectors/", "prefill/", "decode/")
    return bool(re.match("kvbaton|tcp|digest", event.thread)) or event.file.startswith(rooms)


def figures(
    processes: dict[str, Process],
    idle: int,
    starts: Sequence[int],
    told: Callable[[Way], Iterator[str]] | None,
) -> list[tuple[str, int, int]]:
    """Name, value and goal of each measure.

    Args:
        processes: Recorded processes.
        idle: Time from which no request was sent until the first of `starts`.
        starts: Times at which requests were sent; the last one's prompt is `IDS`.
        told: Lines to print for each path, too.

    Raises:
        LookupError: A point on a path was not found.
    """
    prompt, block, token = Way(), Way(), Way(statistics.median)
    frames: list[int] = []
    router, p_core, d_core = (processes[k] for k in ("router", "prefill core", "decode core"))
    everybody = processes.values()
    polling = {(e.process, on(e)) for p in everybody for e in p.between(idle, starts[0])}
    for start, end in zip(starts, [*starts[1:], 1 << 62], strict=True):
        at_p = p_core.first(start, "forward pass", is_forward)
        at_d = d_core.first(at_p, "forward pass", is_forward)
        asked = router.first(start, "request", is_at("dispatch.py:Dispatcher.submit"))
        sent = router.first(asked, "message", is_at("client.py:EngineClient._send_all"))
        calls = router.between(start, sent + 1) + until_forward(p_core, start, at_p)
        prompt.events.append(without_polling([e for e in calls if not moves_kv(e)], polling))
        computed = p_core.first(at_p, "sampler", is_sampler)
        sent = p_core.first(computed, "write", is_at("source_worker.py:SourceWorker._post"))
        landed = d_core.first(sent, "block", is_at("target_worker.py:TargetWorker._landed"))
        complete = d_core.first(computed, "its end", is_at("target.py:Target._complete"))
        arrived = max(landed, complete)
        again = [e.at for e in p_core.between(computed, arrived) if is_forward(e)][:1]
        calls = p_core.between(computed, min([arrived, *again]))
        for at in again:  # an idle node samples a second token while the blocks cross
            calls += p_core.between(p_core.first(at, "second token", is_sampler), arrived)
        calls = [e for e in calls if moves_kv(e)]
        calls += [e for e in until_forward(d_core, sent, at_d) if "rank" not in e.thread]
        kept = by_thread(without_polling(calls, polling))
        block.events.append([e for own in kept for e in without_loops(own)])
        for this, after in steps(d_core, at_d, end):
            sent = d_core.first(
                this, "encoding", lambda e: e.kind == "encode" and e.thread == "MainThread"
            )
            calls = d_core.between(this, sent) + router.between(this, after)
            token.events.append(without_polling(calls, polling))
            frames.append(len({on(e) for e in router.between(this, after, "resume")}))
    for title, way in (("prompt", prompt), ("block", block), ("token", token)):
        if told is not None:
            print(f"{title}:", *told(way), sep="\n")
    ids = {form for e in prompt.events[-1] for form in e.more.split()}
    return [
        ("prompt → forward, calls", prompt.calls(), 220),
        ("prompt → forward, files", prompt.files(), 0),
        ("prompt → forward, forms of the ids", len(ids), 0),
        ("block P → D, calls", block.calls(), 250),
        ("block P → D, files", block.files(), 0),
        ("token → SSE, calls", token.calls(), 70),
        ("token → SSE, files", token.files(), 0),
        ("token → SSE, router frames", round(statistics.median(frames)), 6),
    ]


def steps(core: Process, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Sampling times of each token but the first and last ones, and of its successor."""
    passes = [e.at for e in core.events if start <= e.at < end and is_forward(e)]
    sampled: list[int] = []
    for at in passes:
        time_of = core.first(at, "sampler", is_sampler)
        if time_of not in sampled:
            sampled.append(time_of)
    yield from itertools.pairwise(sampled[2:-1])


# --- the cluster ---


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a cluster whose calls are recorded in a folder; yields its router's host and port."""
    from tests.support.checkpoints import make_checkpoint

    model = make_checkpoint(folder / "model")
    (folder / "sitecustomize.py").write_text(
        "import pathlib, runpy\n"
        f"runpy.run_path({__file__!r})['record'](pathlib.Path({str(folder)!r}))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    words = ["up", f"--model={model}", "--port=0", "--transport=tcp", "--num-blocks=256"]
    words += ["--prefill=1", "--decode=1", "--device=cpu", "--max-model-len=256"]
    words.append("--policy=least-loaded")  # always hands over
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbaton", *words],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if ready := re.match(r"ready: http://(.+):(\d+)/v1", line):
                break
        else:
            raise SystemExit(f"the cluster does not come up:\n{''.join(said)}")
        timer.cancel()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        for path in folder.iterdir():
            if path.name.isdigit():
                os.kill(int(path.name), signal.SIGUSR1)
        yield ready[1], int(ready[2])
    finally:
        timer.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def warm_up(host: str, port: int, model: str) -> None:
    """Send requests until all connections are open, and the router knows the step costs."""
    for number in itertools.count():
        complete(host, port, model, f"{number} is for warming up")
        connection = http.client.HTTPConnection(host, port, timeout=REQUEST_S)
        connection.request("GET", "/debug/routes")
        newest, *_ = json.load(connection.getresponse())["routes"]
        connection.close()
        if newest.get("ttft_s") is not None:
            return
        if number == WARM_UPS:
            raise SystemExit(f"after {number} requests the router can't tell what one takes")
        time.sleep(0.1)  # for a heartbeat


def complete(host: str, port: int, model: str, prompt: str | list[int]) -> int:
    """Stream a completion to its end; returns its start in ns of the monotonic clock."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    connection = http.client.HTTPConnection(host, port, timeout=REQUEST_S)
    start = time.monotonic_ns()
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body | {"stream": True, "ignore_eos": True}),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    said = response.read().decode()
    connection.close()
    if response.status != 200 or "data: [DONE]" not in said:
        raise SystemExit(f"{response.status}: {said[-1000:]}")
    return start


def main() -> int:
    """Record, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    told = parser.add_mutually_exclusive_group()
    for option, lines, what in (
        ("--names", Way.names, "by function"),
        ("--calls", Way.each, "one by one, in the order of time"),
    ):
        told.add_argument(
            option, dest="told", action="store_const", const=lines, help=f"print calls {what}, too"
        )
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cluster(folder) as (host, port):
            model = str(folder / "model")
            warm_up(host, port, model)
            complete(host, port, model, list(IDS[-5:]))  # a token's bytes are looked up only once
            idle = time.monotonic_ns()
            time.sleep(IDLE_S)
            starts = []
            for number in range(REQUESTS):
                prompt = f"{number} relay races, and in each of them a baton is handed over"
                starts.append(complete(host, port, model, prompt))
            starts.append(complete(host, port, model, list(IDS)))
        try:
            table = figures(read(folder), idle, starts, args.told)
        except (LookupError, KeyError) as error:
            print(f"hops.py: can't follow the way: {error}", file=sys.stderr)
            return 1
    print(f"{'measure':36} {'now':>7} {'goal':>7}")
    for measure, value, goal in table:
        print(f"{measure:36} {value:7,} {goal or '':>7}")
    print(f"in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
