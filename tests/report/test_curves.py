"""Curves keep what matters of any number of points, and their axes can be read."""

import numpy as np
import pytest
from run_factory import experiment, records, write_run

from jaxpar.report.canvas import styles
from jaxpar.report.curves import MOST_POINTS, draw_curves, envelope, mean_and_range, smooth, thin
from jaxpar.report.runs import group_seeds, read_runs


def drawn(*paths):
    """The figures of these runs by name."""
    return {drawing.name: drawing for drawing in draw_curves(group_seeds(read_runs(paths)))}


def lines(drawing, group):
    return [line for line in drawing.canvas.axes.lines if (line.get_gid() or "").split()[:1] == [group]]


def test_thinning_keeps_the_spikes_and_the_ends():
    rows = np.stack([np.arange(50_000.0), np.ones(50_000)], axis=1)
    rows[31_234, 1] = 99.0
    kept = envelope(rows, MOST_POINTS)
    assert len(kept) == MOST_POINTS and [31_234.0, 99.0] in kept.tolist()
    assert (np.diff(kept[:, 0]) >= 0).all()
    few = thin(rows, MOST_POINTS)
    assert len(few) == MOST_POINTS and few[0, 0] == 0 and few[-1, 0] == 49_999
    assert len(thin(rows[:0], MOST_POINTS)) == 0


def test_smoothing_is_centred():
    """A trailing mean would lag: a straight line must come back unchanged, up to both ends."""
    line = np.stack([np.arange(1000.0), 3 - np.arange(1000.0) / 500], axis=1)
    np.testing.assert_allclose(smooth(line), line, atol=1e-9)
    bump = line * 0
    bump[500, 1] = 21.0
    assert smooth(bump)[[489, 490, 510, 511], 1].tolist() == pytest.approx([0, 1, 1, 0], abs=1e-9)


def test_the_end_of_a_smoothed_curve_is_no_single_value():
    """The last point is read off as the result: narrowing the window there would make it one noisy step."""
    noise = np.stack([np.arange(10_000.0), np.random.default_rng(0).normal(2, 1, 10_000)], axis=1)
    assert np.abs(smooth(noise)[-100:, 1] - 2).max() < 0.35


def test_mean_and_range_end_where_the_shortest_ends():
    """Averaging whatever is there would jump where one run of three ends."""
    x = np.arange(1.0, 101)
    members = [np.stack([x, 1 * x], 1), np.stack([x, 3 * x], 1), np.stack([x, 5 * x], 1)[:40]]
    rows = mean_and_range(members, 1000)
    assert rows[:, 0].tolist() == x[:40].tolist()
    np.testing.assert_allclose(rows[:, 1:], np.stack([3 * x, x, 5 * x], 1)[:40])
    apart = [members[0][:10], members[1][50:]]
    assert len(mean_and_range(apart, 1000)) == 0


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_run_of_any_length_is_drawn(tmp_path, steps):
    figures = drawn(write_run(tmp_path / "run", experiment(steps)))
    assert list(figures) == [
        "loss", "loss-tokens", "loss-time", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "host_bytes",
    ]  # fmt: skip
    (line,) = lines(figures["loss"], "s0")
    assert len(line.get_xdata()) == steps and (line.get_marker() == "o") == (steps == 1)  # one point is no line
    assert lines(figures["loss"], "s1")[0].get_marker() == "o"  # evaluations of a single run are in its loss figure


def test_a_long_run_is_thinned_and_keeps_its_spike(tmp_path):
    metrics = [{"step": n + 1, "loss": 2.0 + n % 7 / 10, "grad_norm": 1.0} for n in range(20_000)]
    metrics[12_345]["loss"] = 2.9
    raw, mean = lines(drawn(write_run(tmp_path / "run", experiment(20_000), metrics))["loss"], "s0")
    assert len(raw.get_xdata()) <= MOST_POINTS and max(raw.get_ydata()) == 2.9
    assert len(mean.get_xdata()) <= MOST_POINTS and mean.get_xdata()[-1] == 20_000


def test_values_that_are_not_finite_are_left_out_and_skipped_steps_marked(tmp_path):
    metrics = records(40)
    for record in metrics:
        if record["step"] in (20, 21) and "loss" in record:
            record |= {"loss": None, "grad_norm": None}
        if record["step"] >= 20:
            record["skipped"] = min(record["step"] - 19, 2)
    figures = drawn(write_run(tmp_path / "run", experiment(40), metrics))
    assert len(lines(figures["loss"], "s0")[0].get_xdata()) == 38
    crosses = [line for line in lines(figures["grad_norm"], "s0") if line.get_marker() == "x"]
    assert [line.get_xdata().tolist() for line in crosses] == [[20, 21]]
    assert "skipped" in figures["grad_norm"].caption
    figures = drawn(write_run(tmp_path / "none", experiment(40), [r | {"loss": None} for r in metrics if "loss" in r]))
    assert not {"loss", "eval_loss"} & set(figures)


def test_a_diverged_run_does_not_flatten_the_others(tmp_path):
    worse = records(1000)
    for record in worse[500:]:
        record |= {name: 1e4 for name in ("loss", "eval_loss") if name in record}
    paths = [write_run(tmp_path / "good"), write_run(tmp_path / "bad", experiment(1000, learning_rate=9.0), worse)]
    figure = drawn(*paths)["loss"]
    assert 2 < figure.canvas.axes.get_ylim()[1] < 12
    assert "Values above" in figure.caption


def test_runs_that_differ_in_the_seed_are_a_band(tmp_path):
    paths = [write_run(tmp_path / f"s{seed}", experiment(200, seed)) for seed in range(3)]
    other = write_run(tmp_path / "other", experiment(200, learning_rate=3e-3))
    figures = drawn(*paths, other)
    axes = figures["loss"].canvas.axes
    assert len(axes.collections) == 1 and len(lines(figures["loss"], "s0")) == 4  # each of three, and their mean
    mean = lines(figures["loss"], "s0")[-1]
    x = np.arange(1, 201)
    members = [line.get_ydata() for line in lines(figures["loss"], "s0")[:3]]
    np.testing.assert_allclose(np.interp(x, *mean.get_data()), np.mean(members, axis=0))
    assert "eval_loss" in figures
    assert {line.get_color() for line in lines(figures["mfu"], "s1")} == {
        line.get_color() for line in lines(figures["loss"], "s1")
    }


def test_time_goes_on_where_a_resumed_run_counted_from_zero(tmp_path):
    """Sessions of 10 and 5 seconds are 15 seconds; drawn over each other they would be a loop back to the start."""
    metrics = [{"step": n, "loss": 3.0, "seconds": float(n if n <= 10 else n - 10)} for n in range(1, 16)]
    metrics.insert(12, {"step": 12, "eval_loss": 2.5})
    (run,) = read_runs([write_run(tmp_path / "run", experiment(15), metrics)])
    assert run.training["seconds"].tolist() == list(range(1, 16))
    assert run.evaluation["seconds"].tolist() == [12.0]


def test_twelve_styles_differ():
    assert len(set(styles(12))) == 12
