"""Reference outputs by transformers, without any of kvbaton's caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """A transformers model that gives the expected outputs of a served one."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of the token after these, [vocab]."""
        logits: Tensor = self._model(torch.tensor([list(token_ids)])).logits[0, -1]
        return logits

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """The next tokens, greedily; a correct guess of them needs only one forward pass."""
        known = list(token_ids)
        if len(guess) == count > 0:
            logits = self._model(torch.tensor([[*known, *guess[:-1]]])).logits[0, len(known) - 1 :]
            if (likeliest := logits.argmax(-1).tolist()) == list(guess):
                return list(likeliest)
        for _ in range(count):
            known.append(int(self.logits(known).argmax()))
        return known[len(token_ids) :]

    def logprobs(self, token_ids: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Log probabilities of a continuation's tokens."""
        known, found = list(token_ids), []
        for token in continuation:
            found.append(float(self.logits(known).log_softmax(-1)[token]))
            known.append(token)
        return found

    def warped(
        self, token_ids: Sequence[int], *, temperature: float, top_k: int, top_p: float
    ) -> Tensor:
        """Probabilities of the next token by transformers' warpers, [vocab]."""
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers = LogitsProcessorList(
            [
                TemperatureLogitsWarper(temperature),
                TopKLogitsWarper(top_k),
                TopPLogitsWarper(top_p),
            ]
        )
        none_yet = torch.LongTensor(1, 0)
        return warpers(none_yet, self.logits(token_ids)[None])[0].softmax(-1)
