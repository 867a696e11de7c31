"""A run folder: one run's config, metrics, checkpoints and figures, written by one process at a time.

::

    config.json      the run's config
    compile.json     the audit of the compiled step: memory, work, wire and time; devices, versions
    data.json        what is known of the data: the unigram entropy of the held-out text, nats per token
    metrics.jsonl    one JSON object a line, each with "step"; appended line by line
    samples.jsonl    texts that the model wrote as it was trained (``samples.every``), likewise
    checkpoints/     see ``jaxpar.runtime.checkpoints``
    time.json        where the time of all sessions went, at the start and the end of the last one
    track.json       what finds the run again in its trackers
    report.html      see ``jaxpar.report``; its figures are PNG files in figures/
    huggingface/     where the model began as theirs: config.json, tokenizer files, tensors.json (``jaxpar.weights``)
    profile/         traces of ``jax.profiler``; ``tensorboard/`` and ``wandb/`` belong to those trackers
    lock             held (flock) by the process that writes; the kernel releases it however that process ends
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError, JaxparError, RunError, cannot_write


class RunFolder:
    """Reading needs nothing else; writing starts with ``start`` and ends with ``close`` (or a ``with`` block).

    In a run of several processes, process 0 alone calls ``start``; in the others what writes does nothing.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.huggingface = self.path / "huggingface"
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.samples_file = self.path / "samples.jsonl"
        self._lock: int | None = None

    def start(self, config: Mapping[str, Any], resume: bool = False) -> None:
        """Lock the folder and write ``config.json``; with ``resume`` the folder may hold a run, which goes on.

        Raises ``ConfigError`` on the field ``run`` if the folder cannot be written, if another process writes it, or if
        it holds a run and ``resume`` is false.
        """
        self.make()
        try:
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not resume:
                self.refuse_a_run()
            self.write_config(config)
        except BlockingIOError as error:
            self.close()
            raise ConfigError("run", str(self.path), "is being written by another process") from error
        except OSError as error:
            self.close()
            raise cannot_write("run", self.path, error) from error
        except BaseException:
            self.close()
            raise

    def make(self) -> None:
        """Make the folders, of which none needs to be there. Raises ``ConfigError`` where that cannot be."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.figures.mkdir(exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise cannot_write("run", self.path, error) from error

    def refuse_a_run(self) -> None:
        """Raise ``ConfigError`` if the folder holds a run."""
        if self.config_file.exists():
            raise ConfigError("run", str(self.path), "already holds a run", "another folder, or resume")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``config.json``, atomically."""
        if self._lock is None:
            return
        try:
            replace_file(self.config_file, json.dumps(config, indent=1) + "\n")
        except OSError as error:
            raise cannot_write("run", self.path, error) from error

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_config(self) -> dict[str, Any]:
        """The content of ``config.json``; ``JaxparError`` if the folder holds no readable one."""
        return _read(self.config_file, json.loads)

    def read(self, name: str) -> dict[str, Any]:
        """The JSON object in the file ``name``, empty if there is none; ``JaxparError`` if it cannot be read."""
        return _read(self.path / name, _parse_object) if (self.path / name).exists() else {}

    def in_use(self) -> bool:
        """Whether a process on this machine holds the lock."""
        try:
            lock = os.open(self.path / "lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write the JSON file ``name``; ``RunError`` if that fails."""
        if self._lock is None:
            return
        try:
            replace_file(self.path / name, json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"{self.path / name} could not be written: {error.strerror}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``; it has left this process on return. 0-d arrays become numbers."""
        self._append(self.metrics_file, record)

    def append_sample(self, record: Mapping[str, Any]) -> None:
        """Add one line to ``samples.jsonl``."""
        self._append(self.samples_file, record)

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        if self._lock is None:
            return
        line = json.dumps(record, default=lambda value: value.item()) + "\n"
        try:
            with open(path, "a") as file:
                file.write(line)
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl`` in order, without a torn last line; empty if there is no such file."""
        return list(self.iterate_metrics())

    def iterate_metrics(self) -> Iterator[dict[str, Any]]:
        """The same one by one, for runs whose records together would fill the memory."""
        return _records(self.metrics_file)

    def truncate_after(self, step: int) -> None:
        """Drop the records later than ``step`` and torn last lines, atomically: where a resumed run goes on."""
        if self._lock is None:
            return
        for path in (self.metrics_file, self.samples_file):
            if path == self.samples_file and not path.exists():
                continue
            kept = [json.dumps(record) + "\n" for record in _records(path) if record["step"] <= step]
            try:
                replace_file(path, "".join(kept))
            except OSError as error:
                raise RunError(f"{path} could not be written: {error.strerror}") from error


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines that each have a step, without a torn last line; none without a file."""
    if not path.exists():
        return
    number = 0
    try:
        with open(path) as file:
            for line in file:
                number += 1
                if line.endswith("\n"):  # else it is torn
                    record = json.loads(line)
                    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                        raise ValueError("no record of a step")
                    yield record
    except OSError as error:
        raise JaxparError(f"{path} could not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: line {number}: {error}") from error


def _parse_object(text: str) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("no JSON object")
    return data


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text())
    except OSError as error:
        raise JaxparError(f"{path} could not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from error


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, a crash or a full disk leaves the old content or the new, never a part."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
