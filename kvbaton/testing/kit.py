"""Conformance cases, and how they are run; independent of stores and transports.

A *case* checks one law of a contract over a fresh *rig*: the connector under test and everything
needed to drive it. Cases have levels; a case relies only on what lower levels check.

======  ==========================================
``L0``  API: names, types, signatures, bad arguments
``L1``  data: every byte where it belongs
``L2``  concurrency and cancellation
``L3``  crashes, torn writes, death of the far side
``L4``  identity: what must not be shared is not
``L5``  soak: random schedules, and nothing leaks
======  ==========================================

A case has one of four outcomes: it *passed*; it *failed*, as the connector broke the law; it was
*skipped*, as the connector lacks a capability, which is named; or the kit *broke*, which says
nothing about the connector.
"""

from __future__ import annotations

import ctypes
import enum
import inspect
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, Generic, Protocol, Self, TypeVar
from xml.etree import ElementTree

from kvbaton.connectors.registry import as_written
from kvbaton.connectors.thread_stack import stack_of

LEVELS = ("API", "data", "concurrency", "crash", "identity", "soak")
"""Subject of each level."""

HERE = Path(__file__).parent
SLOWER = 10.0
"""Factor over a connector's previous pace up to which it counts as slow, not as hung."""
THREAD = "kvbaton-case"
"""Prefix of the names of threads that run cases; one that outlives its case hangs."""
QUICK_S = 0.02
"""Maximum seconds of a call that must not wait for I/O."""
OWN_S = 300.0
"""Maximum seconds that the kit itself may take in a case, on an idle machine."""


class CaseFailure(AssertionError):
    """The connector broke the law of the case; the text says how."""


class KitBroke(Exception):
    """The kit could not do its own part."""


class Rig(Protocol):
    """The argument of a case."""

    def lacks(self, need: str) -> str | None:
        """Why the connector or this machine lacks what a case needs; None if it has it."""


T = TypeVar("T")
AnyRig = TypeVar("AnyRig", bound=Rig)
Check = Callable[[AnyRig], None]


@dataclass(frozen=True)
class Case(Generic[AnyRig]):
    """The check of one law.

    Attributes:
        level: Index into `LEVELS`.
        id: Name of the case, for example ``L2.cancel-leaves-targets``.
        law: What must hold, in one sentence.
        needs: Needs of the case, for `Rig.lacks`; it is skipped if one of them is lacking.
        check: Checks the law; raises `CaseFailure`.
        slow: The case takes many seconds; certificates include it nevertheless.
    """

    level: int
    id: str
    law: str
    needs: tuple[str, ...]
    check: Check[AnyRig]
    slow: bool = False


class Kit(Generic[AnyRig]):
    """The cases of one kind of connector, lowest level first."""

    def __init__(self) -> None:
        self._cases: list[Case[AnyRig]] = []

    def case(
        self, level: int, *needs: str, slow: bool = False
    ) -> Callable[[Check[AnyRig]], Check[AnyRig]]:
        """Decorator that adds a function as a case: its name is the id, its docstring the law."""

        def add(check: Check[AnyRig]) -> Check[AnyRig]:
            law = " ".join((inspect.getdoc(check) or "").split())
            name = check.__name__.replace("_", "-")
            self._cases.append(Case(level, f"L{level}.{name}", law, needs, check, slow))
            return check

        return add

    def cases(self, highest: int = len(LEVELS) - 1) -> list[Case[AnyRig]]:
        """All cases up to a level, lowest level first."""
        chosen = [case for case in self._cases if case.level <= highest]
        return sorted(chosen, key=lambda case: case.level)


class CaseVerdict(enum.Enum):
    """Outcome of a case."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    BROKE = "kit broke"


@dataclass(frozen=True)
class Outcome:
    """The result of a case that was run.

    Attributes:
        case: Id of the case.
        law: The law that it checks.
        verdict: How it ended.
        text: What went wrong, or what is lacking; empty if it passed.
        seconds: How long it took.
        hung: The case exceeded its time limit, and its thread may still run.
    """

    case: str
    law: str
    verdict: CaseVerdict
    text: str = ""
    seconds: float = 0.0
    hung: bool = False


def require(holds: bool, otherwise: str) -> None:
    """Raise `CaseFailure` with the text `otherwise` unless `holds`."""
    if not holds:
        raise CaseFailure(otherwise)


Answers = Mapping[str, tuple[str, Callable[..., bool]]]
"""Per method, the expected result in words, and a check of a result (and the call's arguments)."""


def checked(connector: T, answers: Answers) -> T:
    """Make a connector check the results of its methods; returns it.

    So a result of a wrong type is a failure of the connector that names the method. Otherwise an
    error in the case's code would look like one of the kit. A connector whose class can't be
    subclassed stays unchecked.
    """
    own: type[Any] = type(connector)
    methods = {n: _checked(getattr(own, n), n, *answers[n]) for n in answers if hasattr(own, n)}
    with suppress(TypeError):
        names = {"__slots__": (), "__module__": own.__module__}
        connector.__class__ = type(own.__name__, (own,), names | methods)
    return connector


def _checked(method: Any, name: str, what: str, is_right: Callable[..., bool]) -> Any:
    @wraps(method)
    def call(self: Any, *words: Any, **options: Any) -> Any:
        try:
            answer = method(self, *words, **options)
        except TypeError as error:
            taken = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            require(taken, f"{name} does not take what it is given: {error}")
            raise
        return require_answer(name, answer, what, is_right(answer, *words))

    return call


def require_answer(name: str, answer: T, what: str, is_right: bool) -> T:
    """Return a method's result; raise `CaseFailure` unless it is as expected."""
    require(is_right, f"{name} answered {answer!r:.100}, which is not {what}")
    return answer


def kind(*types: Any) -> Callable[..., bool]:
    """A check whether a result has one of these types."""
    return lambda answer, *_: isinstance(answer, types)


def require_quick(what: str, call: Callable[[], object], *, calls: int) -> None:
    """Raise `CaseFailure` if the median of `calls` calls takes `QUICK_S` or more."""
    taken = []
    for _ in range(calls):
        began = time.monotonic()
        call()
        taken.append(time.monotonic() - began)
    middle = median(taken)
    require(middle < QUICK_S, f"{what}: {middle:.3f} s, the median of {calls} calls")


def run_case(
    case: Case[AnyRig], make_rig: Callable[[], AbstractContextManager[AnyRig]], limit: float
) -> Outcome:
    """Run a case over a fresh rig, in a thread of its own, for at most `limit` seconds.

    Time within `kits_own_time` does not count.
    """
    answers: list[tuple[CaseVerdict, str]] = []

    def work() -> None:
        with _stray_errors.collect() as strays:
            verdict, text = _attempt(case, make_rig)
        if strays and verdict is not CaseVerdict.SKIPPED:
            told = f"an error in a thread that nobody sees: {strays[0]}"
            text = f"{text}\n{told}" if text else told
            verdict = CaseVerdict.FAILED if verdict is CaseVerdict.PASSED else verdict
        answers.append((verdict, text))

    start = time.monotonic()
    thread = _CaseThread(target=work, name=f"{THREAD} {case.id}", daemon=True)
    thread.start()
    own_limit = OWN_S * tasks_per_core()
    while (left := limit + min(thread.own_s(), own_limit) + start - time.monotonic()) > 0:
        thread.join(left)
        if not thread.is_alive():
            break
    hung = thread.is_alive()
    if hung:
        own = thread.own_s() >= own_limit
        told = f"not over within {limit + own_limit * own:g} s; it hangs in\n{hangs_in(thread)}"
        told = "\n".join([*thread.failed, told])
        answers = [(CaseVerdict.BROKE if own else CaseVerdict.FAILED, told)]
    verdict, text = answers[0]
    return Outcome(case.id, case.law, verdict, as_written(text), time.monotonic() - start, hung)


class _CaseThread(threading.Thread):
    """Runs a case, and measures the time that is the kit's own."""

    _finished_s, _own_since = 0.0, math.inf

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.failed: list[str] = []
        """Failure that the case found, in case the clean-up after it hangs."""

    def own_s(self) -> float:
        """Seconds of the kit's own time so far, including a block that has not ended."""
        return self._finished_s + max(0.0, time.monotonic() - self._own_since)

    @contextmanager
    def busy_with_itself(self) -> Iterator[None]:
        """See `kits_own_time`."""
        self._own_since = time.monotonic()
        try:
            yield
        finally:
            self._finished_s, self._own_since = self.own_s(), math.inf


def hangs_in(thread: threading.Thread) -> str:
    """The innermost stack frames of a thread, as text."""
    return "".join(stack_of(thread)[-4:]) or "(it just ended)"


def kits_own_time() -> AbstractContextManager[None]:
    """Context for work of the kit itself, whose time does not count against the connector."""
    thread = threading.current_thread()
    return thread.busy_with_itself() if isinstance(thread, _CaseThread) else nullcontext()


def _attempt(
    case: Case[AnyRig], make_rig: Callable[[], AbstractContextManager[AnyRig]]
) -> tuple[CaseVerdict, str]:
    try:
        with make_rig() as rig:
            for need in case.needs:
                if (reason := rig.lacks(need)) is not None:
                    return CaseVerdict.SKIPPED, reason
            try:
                case.check(rig)
            except CaseFailure as failure:
                thread = threading.current_thread()
                if isinstance(thread, _CaseThread):
                    thread.failed.append(str(failure))
                raise
    except CaseFailure as failure:
        text = "\n".join([str(failure), *getattr(failure, "__notes__", ())])
        return CaseVerdict.FAILED, text
    except BaseException as error:
        # The kit broke only if its own code raised, not code that it called.
        frames = traceback.extract_tb(error.__traceback__)
        ours = isinstance(error, KitBroke) or Path(frames[-1].filename).parent == HERE
        return CaseVerdict.BROKE if ours else CaseVerdict.FAILED, traceback.format_exc()
    return CaseVerdict.PASSED, ""


class _StrayErrors(logging.Handler):
    """Collects errors of threads and of futures' callbacks, which otherwise would only be logged.

    A case that exceeded its limit may end while the next one runs, and must not stop the
    collection for that one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changing = threading.Lock()
        self._collecting: list[list[str]] = []
        self._before = threading.excepthook

    def emit(self, record: logging.LogRecord) -> None:
        """Collect an error that ``concurrent.futures`` logs."""
        self._note(self.format(record))

    def _note(self, text: str) -> None:
        for strays in tuple(self._collecting):
            strays.append(text)

    @contextmanager
    def collect(self) -> Iterator[list[str]]:
        """Context that collects errors into the list that it returns."""
        strays: list[str] = []
        with self._changing:
            if not self._collecting:
                self._before = threading.excepthook
                threading.excepthook = lambda args: self._note(
                    "".join(traceback.format_exception(args.exc_value))
                )
                logging.getLogger("concurrent.futures").addHandler(self)
            self._collecting.append(strays)
        try:
            yield strays
        finally:
            with self._changing:
                self._collecting = [other for other in self._collecting if other is not strays]
                if not self._collecting:
                    threading.excepthook = self._before
                    logging.getLogger("concurrent.futures").removeHandler(self)


_stray_errors = _StrayErrors()


# --- leaks ---


@dataclass(frozen=True)
class Accounts:
    """Resources that this process holds at one moment.

    Attributes:
        file_descriptors: Number of open file descriptors.
        threads: Ids of the operating system's threads, including those unknown to Python.
        children: Number of child processes that were not waited for.
    """

    file_descriptors: int
    threads: frozenset[str]
    children: int

    @classmethod
    def now(cls) -> Self:
        """Count the resources now."""
        tasks, children = list(Path("/proc/self/task").iterdir()), 0
        for task in tasks:
            with suppress(OSError):  # the thread has just ended, or the kernel lacks this file
                children += len((task / "children").read_text().split())
        threads = frozenset(task.name for task in tasks)
        return cls(len(os.listdir("/proc/self/fd")), threads, children)

    def above(self, before: Accounts, rounds: int) -> str:
        """Resources that grew by at least one per round; empty if none did.

        So pools that libraries fill only once do not count as leaks.
        """
        grown = {
            "file_descriptors": self.file_descriptors - before.file_descriptors,
            "threads": len(self.threads - before.threads),  # unrelated threads may have ended
            "children": self.children - before.children,
        }
        more = [f"{count} more {name}" for name, count in grown.items() if count >= rounds]
        return ", ".join(more).replace("_", " ")


def require_no_growth(
    what: str, act: Callable[[], object], *, rounds: int, before: int, patience: float
) -> None:
    """Raise `CaseFailure` if each call of `act` leaves more resources in this process.

    Args:
        what: What the calls do, for the message.
        act: The function to call.
        rounds: Number of calls.
        before: Number of calls before the first count, in which libraries fill their pools.
        patience: Seconds to wait for resources that are freed with a delay.
    """
    for _ in range(before):
        act()
    usual = Accounts.now()
    for _ in range(rounds):
        act()
    limit = time.monotonic() + patience
    while (grown := Accounts.now().above(usual, rounds)) and time.monotonic() < limit:
        time.sleep(0.01)
    require(not grown, f"after {rounds} {what} there are {grown}")


def allocated_bytes() -> int | None:
    """Bytes allocated by ``malloc`` and not freed; None if the C library can't tell."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return None
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, file)
    libc.fclose(file)
    told = ElementTree.fromstring(text.value or b"<malloc/>")
    libc.free(text)
    sizes = {part.get("type"): int(part.get("size", 0)) for part in told.findall("total")}
    (taken,) = (part for part in told.findall("system") if part.get("type") == "current")
    return int(taken.get("size", 0)) - sizes["fast"] - sizes["rest"] + sizes["mmap"]


def tasks_per_core() -> float:
    """Number of runnable tasks per usable core in the last minute, at least 1.0.

    On a busy machine a connector takes longer by this factor, so time limits are multiplied by it.
    """
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
