"""What is under test: a spec, its kind, and how hard to press."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbaton.connectors.registry import STORES, TRANSPORTS, list_connectors, split_spec
from kvbaton.errors import ConfigError, StoreError, TransportError
from kvbaton.testing.kit import Case, Outcome, run_case

if TYPE_CHECKING:
    from kvbaton.testing.store_rig import BackDoor


@dataclass(frozen=True)
class Subject:
    """A connector to check.

    Attributes:
        spec: as ``--store`` or ``--transport`` takes it; ``{tmp}`` in it becomes an empty folder,
            another one for each case.
        kind: ``"store"`` or ``"transport"``.
        back_door: makes a store's back door of the opened store; None if it has none.
        depth: multiplies examples, repetitions and seconds.
        seed: of everything random but the keys.
        patience: seconds for which any one answer is waited for.
        naming: names the objects of a `naming.Owner`; None for kvbaton's own way.
    """

    spec: str
    kind: str
    back_door: Callable[[Any], BackDoor] | None = None
    depth: int = 1
    seed: int = 0
    patience: float = 20.0
    naming: Callable[[Any], list[bytes]] | None = None

    def cases(self, level: int) -> list[Case[Any]]:
        """The cases of this kind, up to a level."""
        if self.kind == "store":
            from kvbaton.testing.store_cases import STORE_KIT

            return list(STORE_KIT.cases(level))
        from kvbaton.testing.transport_cases import TRANSPORT_KIT

        return list(TRANSPORT_KIT.cases(level))

    def rig(self) -> AbstractContextManager[Any]:
        """A fresh rig, opened when it is entered."""
        if self.kind == "store":
            from kvbaton.testing.store_rig import StoreRig

            return StoreRig(self)
        from kvbaton.testing.pairs import pair_of

        return pair_of(self)

    def run(self, case: Case[Any], limit: float = 120.0) -> Outcome:
        """Run one case over a fresh rig."""
        return run_case(case, self.rig, limit)

    def probe(self) -> None:
        """See that it can be built and opened at all.

        Raises:
            ConfigError: it can't.
        """
        try:
            with self.rig():
                pass
        except (StoreError, TransportError) as error:
            raise ConfigError(f"--{self.kind}", f"{self.spec} can't be opened: {error}") from error


def make_subject(
    spec: str,
    kind: str | None = None,
    *,
    back_door: str | None = None,
    depth: int = 1,
    seed: int = 0,
) -> Subject:
    """A subject as a command line names it.

    Args:
        spec: see `Subject`.
        kind: ``"store"``, ``"transport"``, or None to find out.
        back_door: ``package.module:Class`` or nothing.
        depth: see `Subject`.
        seed: see `Subject`.

    Raises:
        ConfigError: it can't be told which kind is meant; the back door can't be imported.
    """
    door = _imported("--back-door", back_door) if back_door else None
    return Subject(spec, kind or _kind_of(spec), door, max(1, depth), seed)


def _kind_of(spec: str) -> str:
    target, _ = split_spec(spec, STORES)
    if ":" in target:
        factory = _imported("SPEC", target)
        return "store" if hasattr(factory, "lookup") else "transport"
    kinds = [kind.noun for kind in (STORES, TRANSPORTS) if target in list_connectors(kind)]
    if len(kinds) != 1:
        which = "is both a store and a transport" if kinds else "is no connector that is installed"
        raise ConfigError("--kind", f"{target!r} {which}: say which kind, or ask for a known name")
    return kinds[0]


def _imported(flag: str, path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(flag, f"can't load {path}: {error}") from error
