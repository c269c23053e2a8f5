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


def propose(tokens: npt.NDArray[np.int32], count: int, *, least: int, most: int) -> tuple[int, ...]:
    """Tokens that followed the longest run of a sequence's latest ones that it has had before.

    Of equally long runs the latest counts after which there are `count` tokens, else the first.

    Args:
        tokens: [tokens], all that are known.
        count: most tokens to propose, at least 1; there are none if no run was found.
        least: tokens that must be found.
        most: tokens that are looked for.
    """
    length = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    found = ends[:0]
    for n in range(1, min(most, length - 1) + 1):
        if n > 1:
            ends = ends[ends >= n]
            ends = ends[tokens[ends - n] == tokens[length - n]]
        if not len(ends):
            break
        if n >= least:
            found = ends
    if not len(found):
        return ()
    followed = int(np.searchsorted(found, length - count, side="right"))
    end = int(found[max(0, followed - 1)])
    return tuple(tokens[end : end + count].tolist())
