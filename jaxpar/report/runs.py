"""Run folders as the report reads them: columns of numbers, a name each, how each run ended, and which are repeats."""

from __future__ import annotations

import array
import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import ConfigError, JaxparError, RunError
from jaxpar.experiment import Experiment
from jaxpar.runtime import metrics
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import from_json

Columns = Mapping[str, np.ndarray]  # field -> float64 [records], NaN where a record has no value

PHASES = {f"seconds_{name}": words for name, words in metrics.PHASES.items()}  # of a training record, cumulative
TRAINING = (
    "step", "tokens", "loss", "grad_norm", "learning_rate", "skipped", "tokens_per_second", "mfu", "seconds",
    "goodput", "memory_bytes", "host_bytes", *PHASES,
)  # fmt: skip
EVALUATION = ("step", "tokens", "eval_loss")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder. ``training`` has the columns ``TRAINING``, ``evaluation`` those of ``EVALUATION`` and seconds."""

    name: str  # unlike that of every other run of the report
    path: Path
    config: Experiment
    status: str
    training: Columns
    evaluation: Columns
    compiled: Mapping[str, Any]  # compile.json; empty if there is none
    unigram_entropy: float | None  # nats per token

    def last(self, field: str) -> float | None:
        """The last finite value of a training field."""
        values = self.training[field][np.isfinite(self.training[field])]
        return float(values[-1]) if len(values) else None


@dataclasses.dataclass(frozen=True)
class Series:
    """What is drawn as one line: a run, or several that differ in nothing but ``train.seed``."""

    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """The names of the runs, the first alone where they are long."""
        names = ", ".join(run.name for run in self.runs)
        if len(self.runs) == 1 or len(names) <= 40:
            return names
        return f"{self.runs[0].name} and {len(self.runs) - 1} more seeds"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders, in this order.

    Raises:
        ConfigError: for a folder that is given twice or holds no run.
        RunError: for one with a file that is damaged.
    """
    folders = [Path(os.path.abspath(path)) for path in paths]
    for number, folder in enumerate(folders):
        if not (folder / "config.json").exists():
            what = (
                "has no config.json" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
            )
            raise ConfigError("report", str(paths[number]), what, "a run folder")
        if folder.resolve() in [other.resolve() for other in folders[:number]]:
            raise ConfigError("report", str(paths[number]), "is given twice", "each run once")
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def read_metrics(folder: RunFolder) -> tuple[Columns, Columns]:
    """The training and the evaluation records of a run as columns.

    "seconds" is made to grow over the whole run where each session counted from zero, and given to evaluations too.
    """
    training = {field: array.array("d") for field in TRAINING}
    evaluation = {field: array.array("d") for field in EVALUATION}
    for record in folder.iterate_metrics():
        columns = evaluation if "eval_loss" in record else training if "loss" in record else {}
        for field, column in columns.items():
            value = record.get(field)
            if not isinstance(value, int | float | None):
                raise RunError(f"{folder.metrics_file} is damaged: {field} of step {record['step']} is {value!r}")
            try:
                column.append(float("nan") if value is None else value)
            except OverflowError:  # an integer above all floats
                raise RunError(f"{folder.metrics_file} is damaged: {field} is larger than any float") from None
    trained, evaluated = ({field: np.array(column) for field, column in c.items()} for c in (training, evaluation))
    trained["seconds"] = _growing(trained["seconds"])
    for field in ("tokens", "seconds"):
        known = np.isfinite(trained[field])
        if known.any():
            evaluated[field] = np.interp(evaluated["step"], trained["step"][known], trained[field][known])
        else:
            evaluated.setdefault(field, np.full(len(evaluated["step"]), np.nan))
    return trained, evaluated


def group_seeds(runs: Iterable[Run]) -> list[Series]:
    """The runs in their order, those that differ in ``train.seed`` alone as one series.

    Two runs with equal configs, the seed included, are no repeats: code or data must differ, and each is a series.
    """
    groups: dict[Experiment, list[Run]] = {}
    for run in runs:
        train = dataclasses.replace(run.config.train, seed=0)
        groups.setdefault(dataclasses.replace(run.config, train=train), []).append(run)
    series = []
    for group in groups.values():
        repeats = len({run.config.train.seed for run in group}) == len(group)
        series += [Series(tuple(group))] if repeats else [Series((run,)) for run in group]
    return series


def _read(path: Path, name: str) -> Run:
    folder = RunFolder(path)
    try:
        config = from_json(Experiment, folder.read_config())
    except ConfigError as error:
        raise JaxparError(f"{folder.config_file}: {error}") from error
    training, evaluation = read_metrics(folder)
    compiled = folder.read("compile.json")
    if not isinstance(parameters := compiled.get("parameters"), int | None):
        raise RunError(f"{path / 'compile.json'} is damaged: parameters is {parameters!r}")
    for field, kind in (("hbm_bytes", int | float), ("mesh", int), ("versions", str)):
        values = compiled.get(field, {})
        if not isinstance(values, dict) or not all(isinstance(value, kind) for value in values.values()):
            raise RunError(f"{path / 'compile.json'} is damaged: {field} is {values!r}")
    entropy = folder.read("data.json").get("unigram_entropy")
    if not isinstance(entropy, float | None):
        raise RunError(f"{path / 'data.json'} is damaged: unigram_entropy is {entropy!r}")
    return Run(name, path, config, _status(folder, config, training), training, evaluation, compiled, entropy)


def _status(folder: RunFolder, config: Experiment, training: Columns) -> str:
    """How a run stands, in a word or two."""
    done = training["step"][-1] if len(training["step"]) else 0
    if folder.in_use():
        return "running"
    if done >= config.train.steps:
        return "finished"
    if done and not np.isfinite(training["loss"][-1]):
        return "failed: not finite"
    if done and (Checkpoints(folder.checkpoints).latest() or 0) >= done:
        return "stopped"  # at its own word: the last step is saved
    return "broken off" if done else "no steps"


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, and as many parts before it as tell it from the others."""
    parts = dict.fromkeys(folders, 1)
    while True:
        names = {folder: "/".join(folder.parts[-count:]) for folder, count in parts.items()}
        counts = Counter(names.values())
        if max(counts.values()) == 1:
            return [printable(name) for name in names.values()]
        for folder, name in names.items():
            parts[folder] += counts[name] > 1


def printable(name: object) -> str:
    """The text of a name or path, one line that can be encoded."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))


def _growing(seconds: np.ndarray) -> np.ndarray:
    """Session after session, each counted from zero, as one count."""
    restarts = np.append(False, np.diff(seconds) < 0)
    return seconds + np.cumsum(np.where(restarts, np.roll(seconds, 1), 0.0)) if restarts.any() else seconds
