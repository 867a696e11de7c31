"""The loss figure can be drawn from whatever a run has written so far."""

import math
import sys

import numpy as np
import pytest

from jaxpar.report.curves import MOST_POINTS, _envelope, _short, _smooth, _thin, draw_loss


def make_records(count, every=1):
    noise = np.random.default_rng(0).normal(0, 0.08, count)
    records = []
    for i in range(count):
        step = (i + 1) * every
        loss = 3.0 + 7.8 * math.exp(-6 * i / count) + noise[i]
        rate = 1e-3 * min(1, 20 * i / count) * (1 + math.cos(math.pi * i / count)) / 2
        records.append({"step": step, "tokens": step * 2048, "loss": loss, "learning_rate": rate, "mfu": None})
        if i % max(1, count // 12) == 0:
            records.append({"step": step, "tokens": step * 2048, "eval_loss": loss + 0.05})
    return records


def read_png(path):
    from matplotlib.image import imread

    image = imread(path)
    assert image.shape[0] > 600 and image.shape[1] > 1000
    return image[..., :3]


@pytest.mark.parametrize("count", [0, 1, 2, 30, 800, 100_000])
def test_any_number_of_points(tmp_path, count):
    path = tmp_path / "figures" / "loss.png"
    draw_loss(make_records(count), path, f"{count} points", {"unigram entropy": 5.2})
    assert read_png(path).std() > 0.02  # something is drawn
    assert "matplotlib.pyplot" not in sys.modules


def test_values_that_are_not_finite_are_left_out(tmp_path):
    records = make_records(100)
    draw_loss(records, tmp_path / "a.png", "t", None)
    for value in (math.nan, math.inf):
        records.insert(40, {"step": 20, "tokens": 40960, "loss": value, "learning_rate": 0.0})
        records[40].pop("learning_rate")
    draw_loss(records, tmp_path / "b.png", "t", None)
    assert np.array_equal(read_png(tmp_path / "a.png"), read_png(tmp_path / "b.png"))


def test_thinning_keeps_the_spikes_and_the_ends():
    series = np.stack([np.arange(50_000.0), np.ones(50_000)], axis=1)
    series[31_234, 1] = 99.0
    envelope = _envelope(series)
    assert len(envelope) == 2 * MOST_POINTS and [31_234.0, 99.0] in envelope.tolist()
    assert (np.diff(envelope[:, 0]) >= 0).all()
    thin = _thin(series)
    assert len(thin) == MOST_POINTS and thin[0, 0] == 0 and thin[-1, 0] == 49_999
    assert len(_thin(series[:0])) == 0


def test_smoothing_is_centred():
    """A trailing mean would lag: a straight line must come back unchanged."""
    line = np.stack([np.arange(1000.0), 3 - np.arange(1000.0) / 500], axis=1)
    np.testing.assert_allclose(_smooth(line), line, atol=1e-9)
    bump = line * 0
    bump[500, 1] = 21.0
    assert _smooth(bump)[[489, 490, 510, 511], 1].tolist() == pytest.approx([0, 1, 1, 0], abs=1e-9)


def test_short_numbers():
    assert [_short(n) for n in (0, 512, 20_480, 1.5e6, 2e9, 1e12)] == ["0", "512", "20.48k", "1.5M", "2B", "1T"]
