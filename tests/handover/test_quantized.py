"""A quantised model is handed over as any other, and answers what its floats answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine_pair import Pair
from tests.support.prompts import prompt_of
from tests.support.quantized_files import quantized_folders


@pytest.mark.parametrize("kind", ["fp8-block", "awq"])
def test_tokens_are_those_of_the_floats(
    checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    folders = quantized_folders(checkpoint(), tmp_path, kind)
    prompt, answers = prompt_of(50), []
    for folder in folders:
        pair = Pair(folder)
        try:
            _, at_d = pair.hand_over(prompt, max_tokens=12)
            answers.append(at_d.result())
            assert pair.d.counters()['kvbaton_prompt_tokens_total{source="transferred"}'] == 50
            pair.settle()
        finally:
            pair.close()
    assert answers[0] == answers[1]
