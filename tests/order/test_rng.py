"""Random bits are a function of a key and an index."""

import numpy as np

from wdstrain.order.rng import below, key, uniform


def test_key_words_of_different_types_are_different_keys() -> None:
    assert len({key(1), key("1"), key("1", 2), key("12"), key(1, 2), key(12)}) == 6


def test_values_are_uniform() -> None:
    values = uniform(np.arange(20_000), 5, "u")
    assert values.shape == (20_000, 5)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.03
    counts = np.bincount(below(10, np.arange(50_000), "b"), minlength=10)
    assert len(counts) == 10
    assert abs(counts - 5000).max() < 350  # five standard deviations
