"""``jaxpar parity`` is green where layouts agree, and says which leaf does not where one is wrong."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jaxpar.errors import ConfigError
from jaxpar.experiment import DecoderConfig, Experiment, TrainConfig
from jaxpar.mesh.axes import MESH_AXES
from jaxpar.program import Program
from jaxpar.runtime import parity
from jaxpar.runtime.parity import layouts, ragged_batch, run_parity

TINY = Experiment(
    model=DecoderConfig(vocab_size=264, num_layers=1, embed=16, num_heads=4, num_kv_heads=4, mlp_width=32),
    train=TrainConfig(global_batch=16, seq_len=16),
)


def wrong_where(monkeypatch, name, factor, applies):
    """Multiply the gradient of one leaf where the Program ``applies``."""
    right = Program.gradients

    def gradients(self, params, batch, scalars):
        grads, metrics = right(self, params, batch, scalars)
        if applies(self):
            at = [p.name for p in self.parameters].index(name)
            leaves, structure = jax.tree.flatten(grads)
            leaves[at] = leaves[at] * factor
            grads = jax.tree.unflatten(structure, leaves)
        return grads, metrics

    monkeypatch.setattr(Program, "gradients", gradients)


def test_layouts_that_agree(capsys):
    assert run_parity(TINY, jax.devices(), "data 2 x fsdp 4, ZeRO 2", as_json=False) == 0
    header, reference, row, verdict = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["layout", "loss", "gradient", "update"]
    assert reference.startswith("one device ") and reference.endswith("reference")
    assert row.startswith("data 2 x fsdp 4, ZeRO 2, 2 microbatches ") and row.endswith("  same")
    assert verdict.startswith("all 1 layouts agree")


def test_json_and_the_bytes_of_zero(capsys):
    assert run_parity(TINY, jax.devices(), "fsdp 8, ZeRO 3", as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["layouts"]
    assert row["layout"] == "fsdp 8, ZeRO 3" and row["result"] == "same" and row["same_initial_weights"]
    assert max(row["loss"], row["gradient"], row["update"]) <= 1e-5
    assert report["reference"]["loss"] == pytest.approx(np.log(264), abs=1)
    assert row["bytes"] == pytest.approx(report["reference"]["bytes"] / 8, rel=0.05)  # *wrong*: all of it


def test_one_wrong_leaf_is_named(capsys, monkeypatch):
    """Its gradient is twice what it should be; the loss is right."""
    wrong_where(monkeypatch, "layers.mlp.up", 2.0, lambda program: program.experiment.train.microbatches > 1)
    assert run_parity(TINY, jax.devices(), "one device", as_json=False) == 1
    *_, row, verdict = capsys.readouterr().out.splitlines()
    assert row.startswith("one device, 2 microbatches") and row.endswith("DIFFERS (layers.mlp.up)")
    assert verdict.startswith("1 of 1 layouts differ")


@pytest.fixture
def measured(monkeypatch):
    """``measured(change)``: nothing runs; 2 microbatches give what ``change`` makes of the reference."""

    def use(change):
        def one_step(experiment, devices, batch):
            leaf = {"a": np.ones(3), "b": np.full(2, -2.0)}
            result = {"loss": 5.0, "grads": leaf, "updates": dict(leaf), "initial": dict(leaf), "bytes": 80}
            return change(result) if experiment.train.microbatches > 1 else result

        monkeypatch.setattr(parity, "_one_step", one_step)

    return use


@pytest.mark.parametrize(
    ("part", "value", "worst"),
    [
        ("loss", 5.0001, None),
        ("grads", {"a": np.ones(3), "b": np.array([-2, -2.00004])}, "b"),
        ("grads", {"a": np.array([1, 1, np.nan]), "b": np.full(2, -2.0)}, "a"),
        ("updates", {"a": np.zeros(3), "b": np.full(2, -2.0)}, None),
        ("initial", {"a": np.full(3, 1 + 1e-15), "b": np.full(2, -2.0)}, None),
    ],
)
def test_each_kind_of_difference_fails(capsys, measured, part, value, worst):
    measured(lambda result: {**result, part: value})
    assert run_parity(TINY, jax.devices(), "one device", as_json=True) == 1
    (row,) = json.loads(capsys.readouterr().out)["layouts"]
    assert row["result"] == "DIFFERS" and worst in (None, row["worst_leaf"])
    assert row["same_initial_weights"] == (part != "initial")


def test_a_difference_within_the_tolerance_passes(capsys, measured):
    measured(lambda result: {**result, "loss": 5.00001, "grads": {"a": np.full(3, 1.000001), "b": np.full(2, -2.0)}})
    assert run_parity(TINY, jax.devices(), "one device", as_json=False) == 0
    assert "  same\n" in capsys.readouterr().out


def test_a_layout_that_does_not_apply_says_why_and_alone_is_no_success(capsys, measured):
    def refuse(result):
        raise ConfigError("model.num_heads", 2, "is not divisible by mesh.tensor 4", "1 or 2")

    measured(refuse)
    assert run_parity(TINY, jax.devices(), "one device", as_json=False) == 1
    row = capsys.readouterr().out.splitlines()[2]
    assert row.endswith("does not apply: model.num_heads: 2 is not divisible by mesh.tensor 4 (legal: 1 or 2)")


def test_what_cannot_be_compared():
    with pytest.raises(ConfigError, match=r"^--only: nonsense is in no layout's name"):
        run_parity(TINY, jax.devices(), "nonsense", as_json=False)
    with pytest.raises(ConfigError, match=r"^--devices: 4 is too few"):
        run_parity(TINY, jax.devices()[:4], None, as_json=False)


def test_every_axis_pair_and_stage_is_in_the_list():
    every = list(layouts())
    assert len({layout.name for layout in every}) == len(every)
    axes = {frozenset(a for a in MESH_AXES if getattr(layout.mesh, a) > 1) for layout in every}
    alive = [a for a in MESH_AXES if a != "pipe"]
    assert all(any(axis in used for used in axes) for axis in alive)
    for zero in range(4):
        assert any(layout.zero == zero and layout.mesh.fsdp > 1 for layout in every)
        assert any(layout.zero == zero and layout.mesh.fsdp > 1 and layout.mesh.tensor > 1 for layout in every)
    assert any(layout.microbatches > 1 for layout in every)


def test_the_batch_is_ragged():
    """Equal rows would hide a mean of means; the first has no valid target at all."""
    batch = ragged_batch(TINY)
    valid_B = batch["mask"].sum(axis=1)
    assert valid_B[0] == 0 and len(set(valid_B)) > 4
    assert (batch["segments"].max(axis=1) > 1).any()
    starts = np.diff(batch["segments"], axis=1) > 0
    assert (batch["positions"][:, 1:][starts] == 0).all()
