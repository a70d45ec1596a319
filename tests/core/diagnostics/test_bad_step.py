"""The copies of numpy batches that `catch` of both frameworks keeps."""

from __future__ import annotations

import numpy as np
import pytest

from polymp.diagnostics.bad_step import BatchCopies


@pytest.mark.parametrize("fill", [1.0, np.nan])
def test_an_array_that_is_given_again_as_it_was_has_one_copy(fill: float) -> None:
    copies, data = BatchCopies(), np.full((600, 3), fill)
    first = copies.of(0, data)
    assert first is not data
    assert copies.of(0, data) is first
    assert copies.of(1, data) is not first
    np.testing.assert_array_equal(copies.of(0, data.copy()), data)


@pytest.mark.parametrize("shape", [(), (0,), (2,), (50, 40)])
def test_a_buffer_that_is_filled_again_is_copied_again(shape: tuple[int, ...]) -> None:
    copies, buffer = BatchCopies(), np.zeros(shape)
    kept = []
    for number in range(3):
        buffer[...] = number
        kept.append(copies.of(0, buffer))
    for number, copy in enumerate(kept):
        assert copy.shape == shape
        assert (copy == number).all()
