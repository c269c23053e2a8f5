"""Speculative decoding by prompt lookup: a draft is what followed the latest tokens earlier.

A draft is verified in one step, which computes its tokens and samples after each of them. A draft
token is accepted if it equals the token sampled in its place, so the output is that of a run
without drafts. That is rejection sampling (Leviathan et al., arXiv 2211.17192) for a draft model
that is certain of its token x: x is accepted with probability p(x), and else replaced by a sample
from p without x.

Prompt lookup is by Saxena (github.com/apoorvumang/prompt-lookup-decoding); vLLM calls it ``ngram``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def propose(tokens: npt.NDArray[np.int32], count: int, *, least: int, most: int) -> tuple[int, ...]:
    """Propose the tokens that followed an earlier occurrence of a sequence's longest known n-gram.

    The n-gram is the sequence's end. Of several occurrences, the latest with `count` tokens after
    it is taken, else the first.

    Args:
        tokens: [tokens], all known tokens.
        count: Maximum number of tokens to propose, at least 1; none if there is no occurrence.
        least: Length of the shortest n-gram.
        most: Length of the longest n-gram.
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
