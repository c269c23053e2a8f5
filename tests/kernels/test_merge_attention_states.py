from typing import Any

import pytest
import torch

from kvbaton.kernels.merge_attention_states import (
    merge_attention_states,
    merge_attention_states_reference,
)


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 64), (5, 7, 80), (33, 8, 128)])
def test_matches_fp64(place: Any, tokens: int, heads: int, head_dim: int) -> None:
    states = []
    for empty in (0, 2):
        lse = torch.randn(heads, tokens, device=place.device) * 5
        lse[:, empty % tokens] = -torch.inf
        out = place.randn(tokens, heads, head_dim)
        out[empty % tokens] = torch.nan
        states += [out, lse.T]
    wide = [state.cpu().double() for state in states]
    expected, expected_lse = merge_attention_states_reference(*wide)
    out1, lse1, out2, lse2 = states
    for given in (None, out1.contiguous()):  # the latter in place
        out, lse = merge_attention_states(out1, lse1, out2, lse2, given)
        assert given is None or out is given
        place.close(out, expected)
        assert torch.allclose(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_is_attention_over_the_union() -> None:
    logits, values = torch.randn(3, 2, 10).double(), torch.randn(10, 16).double()

    def state(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = logits[..., part]
        return some.softmax(-1) @ values[part], some.logsumexp(-1)

    out, lse = merge_attention_states_reference(*state(slice(0, 4)), *state(slice(4, 10)))
    whole, whole_lse = state(slice(0, 10))
    assert torch.allclose(out, whole)
    assert torch.allclose(lse, whole_lse)
