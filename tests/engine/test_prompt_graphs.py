"""Which numbers of tokens are captured; what is captured is tested on GPUs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engine.cuda.prompt_graphs import padded_sizes, worth_padding_to


@given(most=st.integers(0, 9000), data=st.data())
def test_little_is_computed_in_vain(most: int, data: st.DataObject) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    assert all(0 < size <= most for size in sizes)
    assert len(sizes) <= 8 + 4 * 7
    if sizes:
        tokens = data.draw(st.integers(1, sizes[-1]))
        padded = min(size for size in sizes if size >= tokens)
        assert padded - tokens < max(16, tokens / 4 + 1)
        assert 4 * sizes[-1] >= 3 * (most - 15)


def test_a_size_that_a_larger_one_beats_is_not_used() -> None:
    measured = {320: 12.5, 384: 13.8, 448: 18.8, 512: 16.3, 640: 17.0}
    assert worth_padding_to(measured) == {320, 384, 512, 640}
    assert worth_padding_to({16: 4.41, 32: 4.4, 48: 4.42}) == {16, 32, 48}, "within what varies"
    assert worth_padding_to({}) == set()
