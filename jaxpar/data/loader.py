"""Batches ahead of time, by grain: one background thread, or worker processes.

The stream answers for any batch by number, so the loader's whole state is the number of the next step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from typing import Any, Protocol

import numpy as np

from jaxpar.data.packing import Batch
from jaxpar.errors import RunError

_NO_LAST_STEP = 2**62


class Sequences(Protocol):
    """What a loader reads from: a ``Stream``, or anything that gives sequences by number."""

    def batch(self, first: int, count: int, rows: np.ndarray | None) -> Batch:
        """Of the sequences ``first .. first + count - 1`` all, or those numbered ``rows`` (0 is ``first``)."""
        ...


class Loader:
    """Iterates over this host's batches from global sequence ``first`` on, without end.

    Step ``t`` is the global sequences ``[t * global_batch, (t + 1) * global_batch)``; of these a host reads its
    ``rows`` (numbers within the batch; None: all), which ``Program.host_rows`` knows. To resume, make a loader at
    the first sequence of the next step: nothing earlier is read.

    With ``workers`` 0 one thread prepares ``prefetch`` batches ahead (the caller does, if ``prefetch`` is 0); otherwise
    each of that many processes does, with the arrays of the stream mapped where they are files (``MappedArray``) and
    copied where not. The batches are the same either way. Worker processes are spawned: a script that uses them needs
    the usual ``if __name__ == "__main__"``.

    Close it, or use it in a ``with``: that ends the thread or the processes.
    """

    def __init__(
        self,
        stream: Sequences,
        global_batch: int,
        first: int = 0,
        rows: np.ndarray | None = None,
        workers: int = 0,
        prefetch: int = 2,
    ):
        import grain
        from absl import flags

        batches = _HostBatches(stream, first, global_batch, rows)
        ahead = grain.ReadOptions(
            num_threads=1 if prefetch and not workers else 0, prefetch_buffer_size=0 if workers else prefetch
        )
        dataset = grain.MapDataset.source(batches).to_iter_dataset(ahead)
        if workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags, which only an absl main parses
            # Batches come through a pipe: grain's shared-memory arrays can swallow a Ctrl-C in their __del__.
            through_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, through_pipe)
            options = grain.multiprocessing.MultiprocessingOptions(workers, per_worker_buffer_size=max(prefetch, 1))
            dataset = dataset.mp_prefetch(options, worker_init_fn=_follow_parent)
        self._iterator: Any = iter(dataset)
        self._end = weakref.finalize(self, self._iterator.close)  # at the latest when the interpreter exits

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._iterator)
        except RuntimeError as error:  # grain's word for a process that was killed, such as for want of memory
            if "terminated unexpectedly" not in str(error):
                raise
            raise RunError(f"data.workers: a process that loads data was killed: {error}") from error

    def close(self) -> None:
        """End the background work; the loader gives no more batches."""
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HostBatches:
    """Grain's view: element ``i`` is one host's batch of step ``first + i * global_batch``."""

    def __init__(self, stream: Sequences, first: int, global_batch: int, rows: np.ndarray | None):
        self._stream, self._first, self._global_batch, self._rows = stream, first, global_batch, rows

    def __len__(self) -> int:
        return _NO_LAST_STEP

    def __getitem__(self, index: int) -> Batch:
        return self._stream.batch(self._first + index * self._global_batch, self._global_batch, self._rows)


def _follow_parent(worker: int, workers: int) -> None:
    """In a worker process: leave Ctrl-C to the parent, and end when it ends, even when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
