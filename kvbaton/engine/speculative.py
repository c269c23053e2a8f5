"""Speculative decoding by prompt lookup: drafts are what followed the latest tokens before.

A draft is verified in one step that computes its tokens and samples after each of them. A draft's
token is accepted if it is what was sampled there, so tokens are those of a run without drafts. That
is rejection sampling as of Leviathan et al. (arXiv 2211.17192) for a draft that is certain of its
token x: x is accepted with probability p(x), and else the token is one drawn from p without x.

Prompt lookup is by Saxena (github.com/apoorvumang/prompt-lookup-decoding); vLLM calls it ``ngram``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class NgramProposer:
    """Finds the longest run of a sequence's latest tokens that it has had before.

    Args:
        least: tokens that must be found.
        most: tokens that are looked for.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def propose(self, tokens: npt.NDArray[np.int32], count: int) -> tuple[int, ...]:
        """At most `count` tokens that followed; none if nothing was found.

        Of equally long runs the latest counts after which there are `count` tokens, else the first.

        Args:
            tokens: [tokens], all that are known.
            count: most tokens to propose, at least 1.
        """
        length = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        found = ends[:0]
        for n in range(1, min(self._most, length - 1) + 1):
            if n > 1:
                ends = ends[ends >= n]
                ends = ends[tokens[ends - n] == tokens[length - n]]
            if not len(ends):
                break
            if n >= self._least:
                found = ends
        if not len(found):
            return ()
        followed = int(np.searchsorted(found, length - count, side="right"))
        end = int(found[max(0, followed - 1)])
        return tuple(tokens[end : end + count].tolist())
