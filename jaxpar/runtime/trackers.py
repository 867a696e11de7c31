"""Mirrors of ``metrics.jsonl`` for people who look at runs elsewhere: TensorBoard, Weights & Biases, trackio.

The run folder stays the source of truth: a tracker that fails is switched off with one line, and the run goes on.
``track.json`` in the run folder keeps what a resumed run needs to go on in the same place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import math
import secrets
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxpar.errors import ConfigError, JaxparError
from jaxpar.experiment import Experiment, TrackConfig
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import flatten, word
from jaxpar.words import Say

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
FINISH_SECONDS = 60.0  # to send what is left at the end; W&B keeps the rest in the run folder, for `wandb sync`
Hyperparameters = dict[str, bool | int | float | str]


def check_trackers(config: TrackConfig) -> None:
    """Raise ConfigError for a tracker that is not installed, or that nobody has logged in to."""
    for name in config.to:
        package = PACKAGES[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder wandb/ of earlier runs looks like a package without a file
            raise ConfigError("track.to", name, f"needs a package that is not there: pip install {package}")
    if "wandb" in config.to:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("track.to", "wandb", "needs a login", "`wandb login`, or WANDB_MODE=offline")


@dataclasses.dataclass(frozen=True)
class Start:
    """What a tracker begins or goes on with."""

    folder: Path  # of the run
    project: str
    name: str
    hyperparameters: Hyperparameters
    first: int  # the step that the run goes on from
    latest: int  # the last step that was written down, which a run that crashed takes again
    key: dict[str, Any] | None  # what ``Tracker.key`` was in the session before; none: it was not there


class Tracker(Protocol):
    """One place where a run is mirrored."""

    where: str  # how to look at it
    key: dict[str, Any]  # what finds the run again; "project" among it
    has: int  # the last step it has and keeps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step; steps never decrease."""
        ...

    def finish(self, failed: bool) -> None:
        """Write and send what is left."""
        ...


class Trackers:
    """The trackers of a run; use it in a ``with``, which finishes them however the run ends.

    A tracker that cannot start, or fails later, is switched off with one line. Of several processes, process 0 tracks.
    """

    def __init__(self, say: Say):
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        self._has: dict[str, tuple[int, set[str]]] = {}  # a tracker has all before this step, and these tags of it

    def start(
        self, experiment: Experiment, folder: RunFolder, first: int, earlier: Sequence[Mapping[str, Any]]
    ) -> None:
        """Start those of ``experiment.track``, or go on where they were, and send what they lack.

        ``first`` is the step that the run goes on from, ``earlier`` all its records, those after ``first`` included.
        """
        config = experiment.track
        if not config.to or jax.process_index() > 0:
            return
        leaves = flatten(experiment).items()
        hyperparameters = {k: v if isinstance(v, bool | int | float | str) else word(v) for k, v in leaves}
        latest = max([first, *(record["step"] for record in earlier)])
        start = Start(
            folder.path, config.project, config.name or folder.path.name, hyperparameters, first, latest, None
        )
        known = folder.read("track.json")
        for name in config.to:
            key = known.get(name)
            with self._off_if_it_fails(name):
                same = key is not None and key["project"] == config.project
                tracker = self._trackers[name] = _START[name](dataclasses.replace(start, key=key if same else None))
                self._say(f"track    {name}: {tracker.where}")
                last = {tag for record in earlier if record["step"] == tracker.has for tag in tags(record)}
                self._has[name] = (tracker.has, last) if tracker.has <= latest else (tracker.has + 1, set())
                for record in earlier:
                    if record["step"] <= first:
                        self._send(name, record)
        folder.write("track.json", {**known, **{name: tracker.key for name, tracker in self._trackers.items()}})

    def log(self, record: Mapping[str, Any]) -> None:
        """Mirror a record of metrics.jsonl."""
        for name in list(self._trackers):
            with self._off_if_it_fails(name):
                self._send(name, record)

    def _send(self, name: str, record: Mapping[str, Any]) -> None:
        step, (has, last) = record["step"], self._has[name]
        values = {tag: value for tag, value in tags(record).items() if step > has or (step == has and tag not in last)}
        if values:
            self._trackers[name].log(step, values)

    @contextlib.contextmanager
    def _off_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is not worth a run
            self._trackers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._say(f"track    {name} is off, the run goes on without: {reason}")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._off_if_it_fails(name):
                tracker.finish(failed=kind is not None)


def tags(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record under the names that trackers group by: ``train/loss``, ``eval/loss``."""
    evaluation = "eval_loss" in record
    found = {}
    for name, value in record.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or name == "step":
            continue
        if evaluation:
            if name.startswith("eval_"):  # the others are those of the training record
                found[f"eval/{name.removeprefix('eval_')}"] = value
        else:
            group = "time" if name.startswith("seconds") or name == "goodput" else "train"
            found[f"{'memory' if name.endswith('_bytes') else group}/{name}"] = value
    return found


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run folder, with the messages and check sums of tensorboardX.

    Not by its SummaryWriter, whose thread dies of a full disk without a word, after which a full queue stops the run;
    nor by its file writer, which waits for the disk at every flush.
    """

    def __init__(self, start: Start):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import hparams

        self._event, self._summary, self._crc = Event, Summary, masked_crc32c
        place = start.folder / "tensorboard"
        place.mkdir(exist_ok=True)
        # Readers go through the files of a folder in the order of their names.
        self._file = io.FileIO(place / f"events.out.tfevents.{time.time_ns():020}", "x")
        self._write(file_version="brain.Event:2")
        self.has = start.first if start.key else 0
        self._write(
            step=self.has + 1, session_log=SessionLog(status=SessionLog.START)
        )  # readers forget what came later
        definition, session, self._end = hparams(start.hyperparameters, {"train/loss": 0, "eval/loss": 0})
        self._write(summary=definition)
        self._write(summary=session)
        self.where = f"tensorboard --logdir {place}"
        self.key = {"project": start.project}

    def _write(self, **content: Any) -> None:
        """Append an event as a TFRecord: length, its check sum, the message, its check sum."""
        message = self._event(wall_time=time.time(), **content).SerializeToString()
        length = struct.pack("<Q", len(message))
        sums = [struct.pack("<I", self._crc(part)) for part in (length, message)]
        self._file.write(length + sums[0] + message + sums[1])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def finish(self, failed: bool) -> None:
        if not failed:
            self._write(summary=self._end)
        self._file.close()


class _WandB:
    """A run of Weights & Biases, with its local files in ``wandb/`` of the run folder.

    What was sent cannot be taken back: steps that a resumed run takes again are not sent again. Each session that runs
    offline is one part of the run for `wandb sync`; what a killed one had not written to its file is missing.
    """

    def __init__(self, start: Start):
        import wandb

        key = start.key
        self._run = wandb.init(
            project=start.project,
            name=start.name,
            id=key["id"] if key else None,
            resume="allow" if key else None,
            dir=start.folder,
            config=start.hyperparameters,
            allow_val_change=True,  # a resumed run may have another learning rate
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS),
        )
        self._run.define_metric("*", step_metric="step")
        reached = max(start.latest, key["reached"]) if key else 0  # further than `latest` after two crashes
        self.has = reached if self._run.offline or not key else int(self._run.summary.get("step", 0))
        self.key = {"project": start.project, "id": self._run.id, "reached": max(reached, self.has)}
        here = f"wandb sync {Path(self._run.dir).parent}"
        self.where = here if self._run.offline else self._run.url or here

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """A run in trackio's own folder, where its dashboard compares runs (``TRACKIO_DIR`` and its kin are heeded).

    What was sent cannot be taken back: steps that a resumed run takes again are not sent again.
    """

    def __init__(self, start: Start):
        import trackio

        # trackio finds a run by its name: another run folder may have the same
        name = start.key["name"] if start.key else f"{start.name}-{secrets.token_hex(2)}"
        resume = "allow" if start.key else "never"
        with _quiet():
            self._run = trackio.init(start.project, name, config=start.hyperparameters, resume=resume, embed=False)
        self.has = max(0, self._run._next_step - 1)
        self.where = f"trackio show --project {start.project}  (run {name})"
        self.key = {"project": start.project, "name": name}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with _quiet():
            self._run.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        import trackio

        with _quiet():
            trackio.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep trackio's remarks out of the output; raise its warnings, which say that it failed."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True, category=UserWarning) as said:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in said or ():
        raise JaxparError(str(warning.message))


_START: dict[str, Callable[..., Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}
