"""Certificates: the result of a run of the kit over one connector as JSON, JUnit XML and HTML."""

from __future__ import annotations

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2

import kvbaton
from kvbaton.connectors.registry import (
    FIRST_CONTRACT,
    as_written,
    class_of,
    declared,
    split_spec,
)
from kvbaton.errors import INTERRUPTED, StoreError, TransportError
from kvbaton.testing.check import Subject, check_all
from kvbaton.testing.kit import LEVELS, CaseVerdict, Outcome

SCHEMA = 1
"""Version of the JSON certificate."""
_SECRET = re.compile(r"secret|passw|token|credential|api_?key|access_?key|private", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
HIDDEN = "***"

Speed = Callable[[Subject], Sequence[Mapping[str, Any]]]
"""Measures a connector's speed beside plain copies: rows of a table, all with the same columns."""


@dataclass(frozen=True)
class Certificate:
    """A run over one connector, and everything that its result depends on.

    Attributes:
        verdict: ``certified``, ``passed, not certified`` or ``not passed``, with reasons.
        plugin: Name, class, package and version of the connector.
        contract: The contract version that it was written to, and kvbaton's.
        capabilities: Declared capabilities.
        options: Options of the spec, with secrets hidden.
        door: Path of the back door; None without one.
        capacity: Capacity of the store in bytes; None without a limit, and for transports.
        exclusions: Reasons by excluded case.
        machine: Description of the machine.
        date: Time of the run, UTC.
        pressure: Seed and depth of the run.
        speed: Speed beside plain copies.
        cases: Outcome of each case.
    """

    verdict: str
    plugin: Mapping[str, str | None]
    contract: Mapping[str, str]
    capabilities: Mapping[str, Any]
    options: Mapping[str, Any]
    door: str | None
    capacity: int | None
    exclusions: Mapping[str, str]
    machine: Mapping[str, str]
    date: str
    pressure: Mapping[str, int]
    speed: Sequence[Mapping[str, Any]]
    cases: Sequence[Outcome]


def certify(subject: Subject, speed: Speed) -> tuple[Certificate, int]:
    """Run all cases and measure; returns the certificate, and the exit status of `check_all`.

    Args:
        subject: The connector to check.
        speed: See `Speed`.

    Raises:
        ConfigError: The connector can't be built or opened.
        KeyboardInterrupt: The run was interrupted.
    """
    outcomes, status, verdict = check_all(subject, subject.cases())
    if status == INTERRUPTED:  # keep an earlier certificate
        raise KeyboardInterrupt
    target, options = split_spec(subject.spec, subject.registry)
    found = class_of(subject.registry, subject.spec)
    able: Mapping[str, Any] = {}
    capacity: int | None = None
    with suppress(Exception), subject.rig() as rig:  # the cases have reported what fails here
        connector = rig.store if subject.kind == "store" else rig.source
        able = declared(connector.capabilities)
        capacity = connector.usage().capacity if subject.kind == "store" else None
    door = subject.back_door
    processors = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", processors, re.MULTILINE)
    certificate = Certificate(
        verdict=verdict,
        plugin=_plugin(target, found),
        contract={
            "plugin": getattr(found, "contract", FIRST_CONTRACT),
            "kvbaton": str(subject.registry.contract),
        },
        capabilities=able,
        options=hide_secrets(options),
        door=None if door is None else f"{door.__module__}:{getattr(door, '__qualname__', door)}",
        capacity=capacity,
        exclusions=subject.exclusions,
        machine={
            "system": platform.platform(),
            "processor": model[1] if model else platform.machine(),
            "cores": str(len(os.sched_getaffinity(0))),
            "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB",
            "python": platform.python_version(),
            "kvbaton": kvbaton.__version__,
        },
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        pressure={"seed": subject.seed, "depth": subject.depth},
        speed=_measured(subject, speed) if status in (0, 4) else (),
        cases=outcomes,
    )
    return certificate, status


def _measured(subject: Subject, speed: Speed) -> Sequence[Mapping[str, Any]]:
    try:
        return speed(subject)
    except (StoreError, TransportError) as error:  # keep the results of the cases
        return [{"not measured": as_written(str(error))}]


def hide_secrets(options: Any) -> Any:
    """Options with secrets replaced: those named like passwords, tokens or keys, and in URLs."""
    match options:
        case dict():
            return {
                name: HIDDEN if _SECRET.search(name) and value is not None else hide_secrets(value)
                for name, value in options.items()
            }
        case list():
            return [hide_secrets(value) for value in options]
        case str():
            name, nested, rest = options.partition(":{")
            with suppress(ValueError, RecursionError):  # it is no spec of a store within this one
                given = json.loads("{" + rest) if nested else {}
                if (shown := hide_secrets(given)) != given:
                    return f"{name}:{json.dumps(shown)}"
            return _USER_INFO.sub(HIDDEN, options)
    return options


def write(certificate: Certificate, folder: Path) -> list[Path]:
    """Write ``NAME.json``, ``NAME.xml`` and ``NAME.html`` into a folder, by the plug-in's name."""
    name = re.sub(r"\W+", "-", str(certificate.plugin["name"]))
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "json": json.dumps(
            {"schema": SCHEMA} | asdict(certificate), indent=1, default=lambda item: item.value
        ),
        "xml": junit(certificate),
        "html": page(certificate),
    }
    paths = [folder / f"{name}.{ending}" for ending in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text + "\n")
    return paths


def junit(certificate: Certificate) -> str:
    """The certificate as JUnit XML, for CI systems."""
    outcomes = certificate.cases
    counts = Counter(outcome.verdict for outcome in outcomes)
    suite = ElementTree.Element(
        "testsuite",
        name=f"kvbaton {certificate.plugin['name']}",
        tests=str(len(outcomes)),
        failures=str(counts[CaseVerdict.FAILED]),
        errors=str(counts[CaseVerdict.BROKE]),
        skipped=str(counts[CaseVerdict.SKIPPED]),
        time=f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    )
    tags = {"failed": "failure", "skipped": "skipped", "kit broke": "error"}
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"kvbaton.{outcome.case.partition('.')[0]}",
            name=outcome.case,
            time=f"{outcome.seconds:.3f}",
        )
        if (tag := tags.get(outcome.verdict.value)) is not None:
            ended = ElementTree.SubElement(case, tag, message=outcome.law)
            ended.text = outcome.text
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__, "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def page(certificate: Certificate) -> str:
    """The certificate as one self-contained HTML page."""
    levels = [
        (f"L{level} {subject}", [o for o in certificate.cases if o.case.startswith(f"L{level}.")])
        for level, subject in enumerate(LEVELS)
    ]
    return _TEMPLATES.get_template("certificate.html").render(
        told=certificate, options=json.dumps(certificate.options), levels=levels
    )


def _plugin(target: str, found: Any) -> dict[str, str | None]:
    package = found.__module__.partition(".")[0]
    told: str | None
    names = packages_distributions().get(package, [])
    if package == "kvbaton":
        told = f"kvbaton {kvbaton.__version__}"
    else:
        told = f"{names[0]} {version(names[0])}" if names else None
    return {
        "name": target,
        "class": f"{found.__module__}:{found.__qualname__}",
        "package": told or "not installed as a package: it has no version",
    }
