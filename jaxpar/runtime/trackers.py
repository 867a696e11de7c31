"""Mirrors of ``metrics.jsonl`` for people who look at runs elsewhere: TensorBoard, Weights & Biases, trackio.

The run folder stays the source of truth: a tracker that fails is switched off with one line, and the run goes on.
``track.json`` in the run folder keeps what a resumed run needs to go on in the same place.
"""

from __future__ import annotations

import contextlib
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

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
FINISH_SECONDS = 60.0  # to send what is left at the end; W&B keeps the rest in the run folder, for `wandb sync`
Hyperparameters = dict[str, bool | int | float | str]


def check_trackers(config: TrackConfig) -> None:
    """Raise ConfigError for a tracker that is not installed, or that nobody has logged in to."""
    for name in config.to:
        package = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError("track.to", name, f"needs a package that is not there: pip install {package}")
    if "wandb" in config.to:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("track.to", "wandb", "needs a login", "`wandb login`, or WANDB_MODE=offline")


class Tracker(Protocol):
    """One place where a run is mirrored."""

    where: str  # how to look at it
    key: dict[str, str]  # what finds the run again
    ahead: bool  # whether it still has what a resumed run will do again

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

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        self._reached = 0  # the step up to which trackers that do not forget are ahead of the run
        self._reached_tags: set[str] = set()  # what they have of that step

    def start(
        self, experiment: Experiment, folder: RunFolder, first: int, earlier: Sequence[Mapping[str, Any]]
    ) -> None:
        """Start those of ``experiment.track``, or go on where they were.

        ``first`` is the step that the run goes on from, ``earlier`` all its records, those after ``first`` included.
        """
        config = experiment.track
        if not config.to or jax.process_index() > 0:
            return
        leaves = flatten(experiment).items()
        hyperparameters = {k: v if isinstance(v, bool | int | float | str) else word(v) for k, v in leaves}
        known = folder.read("track.json")
        self._reached = max([first, *(record["step"] for record in earlier)])
        self._reached_tags = {tag for record in earlier if record["step"] == self._reached for tag in tags(record)}
        if known.get("reached", 0) > self._reached:  # by a session before the last, whose records are gone
            self._reached, self._reached_tags = known["reached"] + 1, set()
        for name in config.to:
            key = known.get(name) if known.get(name, {}).get("project") == config.project else None
            with self._off_if_it_fails(name):
                tracker = self._trackers[name] = _START[name](config, folder.path, hyperparameters, first, key)
                self._say(f"track    {name}: {tracker.where}")
        keys = {name: tracker.key for name, tracker in self._trackers.items()}
        folder.write("track.json", {**known, **keys, "reached": max(known.get("reached", 0), self._reached)})

    def log(self, record: Mapping[str, Any]) -> None:
        """Mirror a record of metrics.jsonl."""
        step, values = record["step"], tags(record)
        have = values.keys() if step < self._reached else self._reached_tags if step == self._reached else ()
        new = {tag: value for tag, value in values.items() if tag not in have}
        for name, tracker in list(self._trackers.items()):
            wanted = new if tracker.ahead else values
            if wanted:
                with self._off_if_it_fails(name):
                    tracker.log(step, wanted)

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

    ahead = False  # it forgets what came after the checkpoint

    def __init__(
        self, config: TrackConfig, folder: Path, hyperparameters: Hyperparameters, first: int, key: dict | None
    ):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import hparams

        self._event, self._summary, self._crc = Event, Summary, masked_crc32c
        place = folder / "tensorboard"
        place.mkdir(exist_ok=True)
        # Readers go through the files of a folder in the order of their names.
        self._file = io.FileIO(place / f"events.out.tfevents.{time.time_ns():020}", "x")
        self._write(file_version="brain.Event:2")
        self._write(step=first + 1, session_log=SessionLog(status=SessionLog.START))  # forget this step and later ones
        definition, start, self._end = hparams(hyperparameters, {"train/loss": 0, "eval/loss": 0})
        self._write(summary=definition)
        self._write(summary=start)
        self.where = f"tensorboard --logdir {place}"
        self.key = {"project": config.project}

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

    What was sent cannot be taken back: steps that a resumed run takes again are not sent again.
    """

    def __init__(
        self, config: TrackConfig, folder: Path, hyperparameters: Hyperparameters, first: int, key: dict | None
    ):
        import wandb

        self._run = wandb.init(
            project=config.project,
            name=config.name or folder.name,
            id=key["id"] if key else None,
            resume="allow" if key else None,
            dir=folder,
            config=hyperparameters,
            allow_val_change=True,  # a resumed run may have another learning rate
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, finish_timeout=FINISH_SECONDS),
        )
        self.ahead = key is not None
        self._run.define_metric("*", step_metric="step")
        here = f"wandb sync {Path(self._run.dir).parent}"
        self.where = here if self._run.offline else self._run.url or here
        self.key = {"project": config.project, "id": self._run.id}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """A run in trackio's own folder, where its dashboard compares runs (``TRACKIO_DIR`` and its kin are heeded).

    What was sent cannot be taken back: steps that a resumed run takes again are not sent again.
    """

    def __init__(
        self, config: TrackConfig, folder: Path, hyperparameters: Hyperparameters, first: int, key: dict | None
    ):
        import trackio

        # trackio finds a run by its name: another run folder may have the same
        name = key["name"] if key else f"{config.name or folder.name}-{secrets.token_hex(2)}"
        resume = "allow" if key else "never"
        with _quiet():
            self._run = trackio.init(config.project, name, config=hyperparameters, resume=resume, embed=False)
        self.ahead = key is not None
        self.where = f"trackio show --project {config.project}  (run {name})"
        self.key = {"project": config.project, "name": name}

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
