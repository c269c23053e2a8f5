"""Processes on this machine, and what they say."""

from __future__ import annotations

import io
import os
import sys

import pytest
from typing_extensions import override

from kvbaton.cluster.placement import Child


class Gone(io.StringIO):
    """The standard error of one whom nobody reads any more."""

    @override
    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


class Stuck(Child):
    """Nobody takes in what is said about it."""

    @override
    async def heard(self, line: str) -> None:
        await super().heard(line)
        if line.startswith("did not stop"):
            assert self.killed, "told of it before it was killed"

    killed = False

    @override
    def kill(self) -> None:
        self.killed = True
        super().kill()


async def test_a_node_is_listened_to_though_nobody_reads_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    child = await Child.start("any-0", ["--help"], env=os.environ)
    assert await child.exited == "ended with status 0"
    assert len(child.tail) > 3


async def test_one_that_does_not_stop_is_killed_before_it_is_told() -> None:
    child = await Stuck.start("any-0", ["doctor"], env=os.environ)
    await child.stop(0.0)
    assert child.killed
