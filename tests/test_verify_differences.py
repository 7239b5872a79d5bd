"""The figure of a difference: no large token and no large channel hides a fault in the others."""

from __future__ import annotations

import numpy as np
import pytest

from mnnsmith.verify.measure.differences import compare, merged


def values(seed: int = 0, n: int = 40, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def test_equal_values_have_no_difference() -> None:
    x = values()
    found = compare(x, x)
    assert found.error == found.max_abs == 0.0 and found.snr_db == 300
    assert found.cosine == pytest.approx(1.0, abs=1e-12)
    assert found.reference_rms == pytest.approx(1.0, abs=0.05)


def test_a_known_error_is_told() -> None:
    x = values()
    found = compare(x * np.float32(1.01), x)
    assert found.error == pytest.approx(0.01, rel=1e-4)
    assert found.snr_db == pytest.approx(40, abs=0.01)
    assert found.cosine == pytest.approx(1.0, abs=1e-10)
    assert found.token_errors == pytest.approx(np.full(40, 0.01), rel=1e-3)
    assert found.channel_errors == pytest.approx(np.full(64, 0.01), rel=1e-3)


def test_one_wrong_token_counts_by_its_part() -> None:
    x = values()
    y = x.copy()
    y[7] = -y[7]
    found = compare(y, x)
    assert found.error == pytest.approx(2 / np.sqrt(40), rel=1e-5)
    assert found.cosine == pytest.approx(-1, abs=1e-6)
    assert np.flatnonzero(found.token_errors > 1e-3).tolist() == [7]


@pytest.mark.parametrize("where", ["token", "channel"])
def test_what_is_huge_hides_nothing(where: str) -> None:
    x = values()
    if where == "token":
        x[0] *= 1e4
    else:
        x[:, 5] *= 1e4
    y = x.copy()
    y[1:, [20, 21]] = x[1:, [21, 20]]
    plain = np.linalg.norm(y - x) / np.linalg.norm(x)
    assert plain < 1e-3
    assert compare(y, x).error > 0.1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_the_largest_error(value: float) -> None:
    x = values()
    y = x.copy()
    y[3, 9] = value
    found = compare(y, x)
    assert found.error > 1e6 and np.isfinite(found.error) and found.cosine == -1
    assert np.flatnonzero(found.token_errors).tolist() == [3]
    assert np.flatnonzero(found.channel_errors).tolist() == [9]


def test_zeros_are_compared_too() -> None:
    zero, x = np.zeros((4, 8), np.float32), values(n=4, width=8)
    assert compare(zero, zero).error == 0
    assert compare(zero, zero).cosine == 1
    assert compare(x, zero).error > 1e6
    x[2] = 0
    assert compare(x, x).error == 0
    # A token that cancels but for rounding does not count as all wrong.
    y = x.copy()
    y[2] += 1e-7
    assert compare(y, x).error < 1e-4


def test_texts_are_put_together_token_by_token() -> None:
    x, y = values(1, 10), values(2, 30)
    whole = merged([compare(x * np.float32(1.1), x), compare(y, y)])
    assert whole.error == pytest.approx(0.1 * np.sqrt(10 / 40), rel=1e-3)
    assert whole.token_errors.size == 40
    assert whole.max_abs == pytest.approx(0.1 * np.abs(x).max(), rel=1e-3)
