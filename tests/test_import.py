"""What is imported when: the command answers at once, and a run loads only what it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

ROOT = Path(jaxpar.__file__).parents[1]
HEAVY = ("jax", "flax", "optax", "orbax", "grain", "tokenizers", "matplotlib", "numpy", "tqdm")


def loaded_by(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after ``code``."""
    code += f"; import sys, json; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code",
    ["import jaxpar", "import jaxpar; dir(jaxpar); jaxpar.__version__", "import jaxpar.cli", "import jaxpar.errors"],
)
def test_nothing_heavy(code):
    assert loaded_by(code) == set()


def test_a_wrong_command_loads_nothing_heavy():
    assert loaded_by("from jaxpar.cli import main; main(['trian']); main(['train'])") == set()


def test_the_loop_waits_with_what_only_some_runs_need():
    assert loaded_by("from jaxpar.runtime import loop") & {"orbax", "grain", "tokenizers", "matplotlib"} == set()


def test_the_names_of_the_package():
    from jaxpar.experiment import Experiment
    from jaxpar.program import Program
    from jaxpar.runtime.generate import generate
    from jaxpar.runtime.loop import train

    assert (jaxpar.Experiment, jaxpar.Program, jaxpar.train, jaxpar.generate) == (Experiment, Program, train, generate)
    assert {"Experiment", "Program", "train", "generate"} <= set(dir(jaxpar))
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        jaxpar.trian  # noqa: B018
