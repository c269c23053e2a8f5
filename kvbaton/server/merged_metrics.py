"""Metrics of several processes as one: Prometheus' text format, added up sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class MergedMetrics:
    """Adds up what workers count, also those that have ended."""

    def __init__(self) -> None:
        self._latest: dict[int, str] = {}
        self._retired = ""

    def update(self, worker: int, text: str) -> None:
        """A worker counts this by now."""
        self._latest[worker] = text

    def retire(self, worker: int) -> None:
        """A worker has ended. What it counted stays in the sums, its gauges do not."""
        text = self._latest.pop(worker, None)
        if text is not None:
            self._retired = merged([self._retired, text], gauges=False)

    def text(self, own: str) -> str:
        """All of it, and `own`."""
        return merged([own, merged([self._retired], gauges=False), *self._latest.values()])


def merged(texts: Iterable[str], *, gauges: bool = True) -> str:
    """Sum samples of equal name and labels; of times of creation (``_created``) take the earliest.

    Args:
        texts: in Prometheus' text format 0.0.4, as `prometheus_client` writes it.
        gauges: whether gauges are kept.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        for family, line in _lines(text):
            if line.startswith("#"):
                head = heads.setdefault(family, [])
                if len(head) < 2:  # HELP and TYPE
                    head.append(line)
                continue
            key, _, value = line.rpartition(" ")
            known = samples.setdefault(family, {})
            number = float(value)
            if key not in known:
                known[key] = number
            elif family.endswith("_created"):
                known[key] = min(known[key], number)
            else:
                known[key] += number
    lines: list[str] = []
    for family, found in samples.items():
        head = heads.get(family, [])
        is_gauge = any(line.startswith(f"# TYPE {family} gauge") for line in head)
        if gauges or not is_gauge or family.endswith("_created"):
            lines += [*head, *(f"{key} {_shown(value)}" for key, value in found.items())]
    return "".join(f"{line}\n" for line in lines)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Lines that are not empty, each with its family's name."""
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
        if line:
            yield family, line


def _shown(value: float) -> str:
    return repr(value).replace("inf", "+Inf").replace("-+", "-").replace("nan", "NaN")
