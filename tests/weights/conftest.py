"""Runs and the lines they print."""

from __future__ import annotations

import jax
import pytest

from jaxpar.overrides import apply_overrides
from jaxpar.weights.convert import export_run, import_folder


@pytest.fixture
def one_device():
    return jax.devices()[:1]


@pytest.fixture
def imported(one_device):
    """``imported(source, run, *flags, devices=..., check=...)``: did the check pass, and the lines said."""

    def run(source, folder, *flags, devices=None, check=False):
        lines = []
        adjust = lambda experiment: apply_overrides(experiment, list(flags))  # noqa: E731
        same = import_folder(source, folder, devices or one_device, lines.append, adjust, check)
        return same, lines

    return run


@pytest.fixture
def exported():
    """``exported(run, folder, dtype, most, step, check)``: did the check pass, and the lines said."""

    def run(folder, target, dtype=None, most=10**9, step=None, check=False):
        lines = []
        return export_run(folder, target, lines.append, dtype, most, step, check), lines

    return run
