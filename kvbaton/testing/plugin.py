"""The kit as a pytest plugin: ``pytest --kvbaton-store my_package:MyStore``.

Each case becomes a test named ``store SPEC::L1.sizes``; ``-k "L0 or L1"`` selects levels. These
tests run beside those that pytest collects. pytest loads this plugin wherever kvbaton is installed,
so it imports nothing until one of its options is used.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvbaton.testing.check import Subject
    from kvbaton.testing.kit import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("kvbaton", "conformance of kvbaton's connectors")
    for kind in ("store", "transport"):
        text = f"check the {kind} that SPEC names (may be given again)"
        group.addoption(f"--kvbaton-{kind}", action="append", default=[], metavar="SPEC", help=text)
    text = "MODULE:CLASS of the stores' back door"
    group.addoption("--kvbaton-back-door", metavar="PATH", help=text)
    text = "multiplies examples, repetitions and seconds (1)"
    group.addoption("--kvbaton-depth", type=int, default=1, metavar="N", help=text)
    text = "seconds after which a case has failed (120; more on a busy machine)"
    group.addoption("--kvbaton-limit", type=float, metavar="S", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``slow``, which `StoreTests` gives to some cases."""
    config.addinivalue_line("markers", "slow: takes many seconds with any connector")


class CaseItem(pytest.Item):
    """One case over one connector."""

    def __init__(self, *, subject: Subject, case: Case[Any], **rest: Any) -> None:
        super().__init__(**rest)
        self.subject = subject
        self.case = case

    def runtest(self) -> None:
        """Run the case; its outcome is the test's outcome."""
        from kvbaton.testing.suite import tell_pytest

        tell_pytest(self.subject.run(self.case, self.config.getoption("--kvbaton-limit")))

    def reportinfo(self) -> tuple[os.PathLike[str], int | None, str]:
        """Location of the test in pytest's report."""
        return self.path, None, self.name


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the cases of each connector named by the options."""
    for kind in ("store", "transport"):
        for spec in config.getoption(f"--kvbaton-{kind}"):
            from kvbaton.errors import ConfigError
            from kvbaton.testing.check import make_subject

            door = config.getoption("--kvbaton-back-door")
            try:
                depth = config.getoption("--kvbaton-depth")
                subject = make_subject(spec, kind, back_door=door, depth=depth)
                subject.probe()
            except ConfigError as error:
                raise pytest.UsageError(str(error)) from error
            for case in subject.cases():
                name = f"{kind} {spec}::{case.id}"
                items.append(CaseItem.from_parent(session, name=name, subject=subject, case=case))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit at once if a case hangs, as the interpreter would wait for its thread for ever."""
    from kvbaton.testing.kit import THREAD

    hanging = any(thread.name.startswith(THREAD) for thread in threading.enumerate())
    if hanging and not hasattr(config, "workerinput"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(pytest.ExitCode.TESTS_FAILED))
