"""Checkpoints of a run: asynchronous, atomic, strict, and free of the mesh they were saved on.

On disk::

    checkpoints/step_1200/           complete when checkpoint.json is there and every file it lists has its size
        checkpoint.json              the marker: metadata, leaves (dtype and shape), files (size and CRC-32)
        state/...                    the arrays, written by orbax, one key per leaf: params.layers.attention.q.kernel
    checkpoints/.saving-step_1300/   a save under way, or what a killed process left of one
    checkpoints/.removing-step_900/  a checkpoint that retention is deleting

A directory gets its ``step_N`` name by one rename, after everything in it is on disk. orbax checks neither sizes nor
checksums of array data (a flipped bit loads as another number), which is why the marker carries both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, JaxparError, RunError

MARKER = "checkpoint.json"


class Checkpoints:
    """The checkpoints in ``folder``: the newest ``keep`` stay, and every multiple of ``keep_every``.

    At most one save is in flight. In a run of several processes every process makes the same calls; process 0 alone
    commits and deletes. Only the run that owns the folder may call ``save``; any process may read. Call ``wait`` before
    the program ends.
    """

    def __init__(self, folder: Path, keep: int = 3, keep_every: int | None = None, asynchronous: bool = True):
        if keep < 1:
            raise ConfigError("checkpoints.keep", keep, "must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise ConfigError("checkpoints.keep_every", keep_every, "must be at least 1, or None")
        self.folder = Path(folder).absolute()
        self.keep, self.keep_every, self.asynchronous = keep, keep_every, asynchronous
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._current: int | None = None  # the step last saved or restored here: saving it again changes nothing

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Start saving ``state`` (a pytree of ``jax.Array``) and ``metadata`` (JSON) as the checkpoint of ``step``.

        The arrays are on the host when this returns, so the caller may donate them at once; the writing goes on in the
        background. A checkpoint of the same step is replaced, unless this object itself saved or restored it last.

        Raises ``RunError`` if this save cannot start, or if the one before failed.
        """
        self.wait()
        if step == self._current:
            return
        leaves = _named_leaves(state)
        marker = {
            "metadata": json.loads(json.dumps(metadata)),
            "leaves": {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves.items()},
        }
        try:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._sweep()
            with _orbax() as ocp:
                response = ocp.save_async(self._saving(step), leaves)
        except Exception as error:
            raise self._could_not_write(step, error) from error
        self._current = step
        self._pending = self._worker.submit(self._finish, step, response, marker)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any; raise ``RunError`` if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except RunError:
                self._current = None
                raise

    def check(self) -> None:
        """Raise ``RunError`` if the save in flight has failed; wait for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending. Markers and file sizes are checked, contents are not."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JaxparError(f"checkpoints cannot be listed in {self.folder}: {_reason(error)}") from error
        found = sorted(int(name[5:]) for name in names if re.fullmatch(r"step_(0|[1-9]\d*)", name))
        return [step for step in found if _is_complete(self._directory(step))]

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def choose(self, step: int | None) -> int:
        """``step``, or the newest for None. Raises ``ConfigError`` unless that is a complete checkpoint."""
        steps = self.steps()
        if not steps:
            raise ConfigError(
                "run", str(self.folder.parent), "holds no complete checkpoint", "a run that has saved one"
            )
        if step is not None and step not in steps:
            rule = "is not a complete checkpoint of the run"
            raise ConfigError("--step", step, rule, ", ".join(map(str, steps)))
        return steps[-1] if step is None else step

    def metadata(self, step: int) -> dict[str, Any]:
        """What was passed to ``save`` as ``metadata``."""
        return self._marker(step)["metadata"]

    def structure(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Dotted leaf name -> shape and dtype. Reads no arrays and needs none of the devices of the saving run."""
        leaves = self._marker(step)["leaves"]
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (dtype, shape) in leaves.items()}

    def restore(self, step: int, abstract_state: Any, only: str | None = None) -> Any:
        """The saved state, bitwise, as a pytree like ``abstract_state``.

        ``abstract_state`` holds a ``jax.ShapeDtypeStruct`` with a sharding for each leaf, over any mesh. ``only``: one
        key of the saved state, such as ``"params"``, whose subtree ``abstract_state`` is; the rest is not read.

        Raises ``JaxparError`` before any array is read if a leaf is missing, unexpected or of another shape or dtype,
        and if there is no complete checkpoint; ``RunError`` if it is damaged.
        """
        self.wait()
        directory, marker = self._directory(step), self._marker(step)
        wanted = self._wanted(step, abstract_state, only)
        for name, leaf in wanted.items():
            if leaf.sharding is None:
                raise ValueError(f"{name}: no sharding to restore to")
        try:
            _check_contents(directory, marker["files"])
            with _orbax(partial=only is not None) as ocp:
                leaves = ocp.load(directory, wanted)
        except RunError as error:
            raise RunError(f"{error}{self._others(step)}") from error
        except Exception as error:
            raise RunError(f"{directory} cannot be read: {_reason(error)}{self._others(step)}") from error
        self._current = step if only is None else self._current
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [leaves[name] for name in wanted])

    def check_fit(self, step: int, abstract_state: Any, only: str | None = None) -> None:
        """Raise what ``restore`` would raise without reading an array."""
        self._wanted(step, abstract_state, only)

    def _wanted(self, step: int, abstract_state: Any, only: str | None) -> dict[str, Any]:
        """The leaves of ``abstract_state`` by their saved names, compared with the marker of ``step``."""
        saved = {name: _describe(*leaf) for name, leaf in self._marker(step)["leaves"].items()}
        wanted = _named_leaves(abstract_state if only is None else {only: abstract_state})
        if only is not None:
            saved = {name: leaf for name, leaf in saved.items() if name.startswith(f"{only}.")}
        _check_fit(self._directory(step), saved, wanted)
        return wanted

    def _directory(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def _saving(self, step: int) -> Path:
        return self.folder / f".saving-step_{step}"

    def _marker(self, step: int) -> dict[str, Any]:
        try:
            return _read_marker(self._directory(step))
        except JaxparError as error:
            raise type(error)(f"{error}{self._others(step)}") from error

    def _others(self, step: int) -> str:
        """The end of a message: which checkpoints could be used in place of this one."""
        others = [str(other) for other in self.steps() if other != step]
        return f" (complete steps: {', '.join(others)})" if others else " (no other checkpoint is there)"

    def _could_not_write(self, step: int, error: Exception) -> RunError:
        return RunError(f"checkpoint at step {step} could not be written to {self.folder}: {_reason(error)}")

    def _finish(self, step: int, response: Any, marker: dict[str, Any]) -> None:
        """In the background: wait for the arrays, then commit and delete what retention no longer wants."""
        try:
            response.result()
            if jax.process_index() == 0:
                self._commit(step, marker)
                self._retire(step)
        except Exception as error:
            raise self._could_not_write(step, error) from error
        finally:
            if jax.process_index() == 0:
                self._sweep()

    def _commit(self, step: int, marker: dict[str, Any]) -> None:
        saving, final = self._saving(step), self._directory(step)
        files = sorted(path for path in saving.rglob("*") if path.is_file())
        marker["files"] = {str(path.relative_to(saving)): [path.stat().st_size, _crc32(path)] for path in files}
        with open(saving / MARKER, "w") as file:
            json.dump({"checkpoint": marker, "crc32": _crc32_of_json(marker)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            self._put_aside(final)
        saving.rename(final)

    def _retire(self, saved: int) -> None:
        """Put aside the complete checkpoints beyond ``keep``; damaged ones are left for the user to look at."""
        complete = self.steps()
        for step in set(complete) - set(complete[-self.keep :]) - {saved}:
            if self.keep_every is None or step % self.keep_every:
                self._put_aside(self._directory(step))

    def _put_aside(self, directory: Path) -> None:
        directory.rename(directory.with_name(f".removing-{directory.name}"))

    def _sweep(self) -> None:
        """Delete unfinished saves and retired checkpoints. No save is in flight when this runs."""
        for pattern in (".saving-step_*", ".removing-step_*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _orbax(partial: bool = False) -> Iterator[Any]:
    """The orbax v1 module under this file's settings; imported here because it is slow to import."""
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_not_from_orbax)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _not_from_tensorstore
    context = ocp.Context()
    context.asynchronous.create_directories_asynchronously = False  # a folder that cannot be made fails at once
    context.pytree.loading.partial_load = partial
    with context:
        yield ocp


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """A filter: orbax logs each failure with several tracebacks, and raises it too, which is enough."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _not_from_tensorstore(unraisable: Any) -> None:
    """A hook: after a write has failed, the others report to an event loop that orbax has closed by then."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, the same for dicts, NamedTuples and sequences: ``opt_state.0.mu.layers.kernel``."""
    paths = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(named) < len(paths):
        raise ValueError("two leaves of the state have the same dotted path")
    return named


def _describe(dtype: Any, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _check_fit(directory: Path, saved: dict[str, str], wanted: dict[str, Any]) -> None:
    """Compare ``saved`` leaf descriptions with the ``wanted`` leaves; the error names the first leaf that differs."""
    config = {name: _describe(leaf.dtype, leaf.shape) for name, leaf in wanted.items()}
    wrong = [
        f"{n}: saved {saved[n]}, the config wants {config[n]}" for n in config if n in saved and saved[n] != config[n]
    ]
    wrong += [f"{name}: not saved, the config wants {config[name]}" for name in config if name not in saved]
    wrong += [f"{name}: saved {saved[name]}, the config has no such leaf" for name in saved if name not in config]
    if wrong:
        more = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise JaxparError(f"{wrong[0]}{more} (checkpoint {directory})")


def _is_complete(directory: Path) -> bool:
    try:
        _read_marker(directory)
    except JaxparError:
        return False
    return True


def _read_marker(directory: Path) -> dict[str, Any]:
    """The marker of a complete checkpoint; ``JaxparError`` if there is none.

    ``RunError`` names the file that is damaged: missing, or of a wrong size.
    """
    path = directory / MARKER
    try:
        content = json.loads(path.read_text())
        marker = content["checkpoint"]
        intact = content["crc32"] == _crc32_of_json(marker)
    except OSError as error:
        raise JaxparError(f"{directory} is not a complete checkpoint: {MARKER}: {_reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged") from error
    if not intact:
        raise RunError(f"{path} is damaged")
    for name, (size, _) in marker["files"].items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise RunError(f"{directory / name}: {_reason(error)}") from error
        if found != size:
            raise RunError(f"{directory / name} is damaged: it has {found} bytes of {size}")
    return marker


def _check_contents(directory: Path, files: dict[str, list[int]]) -> None:
    """Compare every file with its checksum; the processes of a run share the files between them."""
    for name in sorted(files)[jax.process_index() :: jax.process_count()]:
        if _crc32(directory / name) != files[name][1]:
            raise RunError(f"{directory / name} is damaged: its contents are not what was written")


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _crc32_of_json(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _reason(error: Exception) -> str:
    """One line of why; the operating system's own words where it said no, also when tensorstore passed them on."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return (str(error).splitlines() or [type(error).__name__])[0]
