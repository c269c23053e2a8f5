"""What a GPU test switches on is off after it, also where it fails; with a scripted torch."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.engine.sync_debug import waiting_is_an_error


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modes that were set; as torch's, the first call warns when the mode is already on."""
    said: list[str] = []

    def set_mode(mode: str) -> None:
        said.append(mode)
        if len(said) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return said


def test_the_mode_is_on_within_and_off_after(modes: list[str]) -> None:
    with waiting_is_an_error():
        assert modes == ["error"]
    assert modes == ["error", "default"]


def test_a_failing_test_leaves_it_off(modes: list[str]) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", "default"]
