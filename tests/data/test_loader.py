"""Resuming, hosts and workers (checks G6, G7, G9), and ending without hanging."""

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from source_helpers import RECORD_SOURCES

from jaxpar.data import DataConfig, build_data
from jaxpar.data.loader import Loader
from jaxpar.data.stream import Stream

STEPS = 15


class CountingStream(Stream):
    """Remembers every sequence that was read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read: list[int] = []

    def batch(self, first, count, rows=None):
        self.read += range(first, first + count)
        return super().batch(first, count, rows)


@pytest.fixture(scope="module")
def stream(numbered):
    """Ten rows, so that five steps of two are an epoch."""
    return CountingStream([numbered([8] * 10, 8)], [1.0], 3)


@pytest.fixture(scope="module")
def mixed(numbered):
    return Stream([numbered([8] * 10, 8), numbered([3, 20, 9], 8, "best_fit")], [3.0, 1.0], 3)


def take(loader, steps):
    with loader:
        return [next(loader) for _ in range(steps)]


def same(one, other):
    return len(one) == len(other) and all(
        (a[key] == b[key]).all() and a[key].dtype == b[key].dtype and type(a[key]) is type(b[key])
        for a, b in zip(one, other, strict=True)
        for key in a
    )


def first_tokens(batches):
    return np.concatenate([batch["tokens"][:, 0] for batch in batches]).tolist()


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("k", range(STEPS))
def test_resuming_at_every_step(mixed, prefetch, k):
    whole = take(Loader(mixed, 2, prefetch=prefetch), STEPS)
    assert same(take(Loader(mixed, 2, first=2 * k, prefetch=prefetch), STEPS - k), whole[k:])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(mixed, workers):
    whole = take(Loader(mixed, 2, prefetch=0), STEPS)
    assert same(take(Loader(mixed, 2, first=8, workers=workers), STEPS - 4), whole[4:])


def part(count, host, hosts):
    """The rows of one of several hosts."""
    return np.arange(count).reshape(hosts, -1)[host]


def test_workers_change_nothing_for_one_host_of_many(mixed):
    whole = take(Loader(mixed, 4, first=28, rows=part(4, 1, 2), prefetch=0), 6)
    assert same(take(Loader(mixed, 4, first=28, rows=part(4, 1, 2), workers=2, prefetch=1), 6), whole)


def resumed_at_every_step(sources):
    """Whether a loader from files read anew, at every k, on one host of 1, 2 and 4, gives what the first one did.

    The steps are a little more than two epochs of all rows. Returns the data.
    """
    config = DataConfig(tuple(sources), eval_fraction=0.1, prefetch=0)
    data = build_data(config, seq_len=16, seed=3)
    batch = 4 * len(config.sources)
    steps = 2 * sum(packed.rows for packed in data.train.sources) // batch + 2
    whole = take(data.loader(batch), steps)
    again = build_data(config, seq_len=16, seed=3)
    assert again.fingerprint == data.fingerprint
    for k in range(steps):
        for hosts in (1, 2, 4):
            rows_of_hosts = np.split(np.arange(batch), hosts)
            parts = [take(again.loader(batch, batch * k, rows), steps - k) for rows in rows_of_hosts]
            together = [
                {key: np.concatenate([part[key] for part in step]) for key in step[0]}
                for step in zip(*parts, strict=True)
            ]
            assert same(together, whole[k:]), (k, hosts)
    return data


def test_every_source_resumes_at_every_step(source):
    """Check G6, from the files on: a source whose documents come in another order the second time fails here."""
    data = resumed_at_every_step([source])
    rows = data.train.sources[0].rows
    seen = [data.train.order(first, rows)[1].tolist() for first in (0, rows)]
    assert [sorted(epoch) for epoch in seen] == [list(range(rows))] * 2  # no row skipped or repeated (G7)


def test_a_mixture_of_sources_resumes_at_every_step(written):
    kinds = zip(("jsonl.gz", "parquet", "saved", "array_record"), (1.0, 2.0, 0.5, 1.5), strict=True)
    resumed_at_every_step(RECORD_SOURCES[kind](written, weight=weight) for kind, weight in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("parquet",), ("array_record", "jsonl.zst")])
def test_a_worker_changes_nothing_for_sources(written, kinds):
    """A worker process resumes in one epoch of the files and goes on into the next."""
    config = DataConfig(tuple(RECORD_SOURCES[kind](written) for kind in kinds), eval_fraction=0.1)
    data = build_data(config, seq_len=16, seed=3)
    epoch = sum(packed.rows for packed in data.train.sources) // 4 + 1
    whole = take(data.loader(4, 4 * (epoch - 2)), 4)
    worker = build_data(replace(config, workers=1), seq_len=16, seed=3)
    assert same(take(worker.loader(4, 4 * (epoch - 2)), 4), whole)


def test_an_interrupted_run_sees_every_row_once_per_epoch(stream):
    """Ten rows, batch 2, three epochs, interrupted after step 7: the skip is not applied again at the next epoch."""
    before = take(Loader(stream, 2), 7)
    after = take(Loader(stream, 2, first=7 * 2), 8)
    tokens = first_tokens(before + after)
    assert Counter(tokens) == {1 + 8 * row: 3 for row in range(10)}
    assert tokens == first_tokens(take(Loader(stream, 2), STEPS))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resuming_reads_nothing_earlier(stream, prefetch):
    stream.read.clear()
    take(Loader(stream, 2, first=2 * 10**9, prefetch=prefetch), 3)
    assert min(stream.read) == 2 * 10**9
    assert len(stream.read) <= 2 * (3 + prefetch)


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 3])
def test_hosts_share_each_batch(stream, hosts, start):
    alone = take(Loader(stream, 20, start), 3)
    parts = [take(Loader(stream, 20, start, part(20, host, hosts)), 3) for host in range(hosts)]
    together = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]} for step in zip(*parts, strict=True)
    ]
    assert same(together, alone)


@pytest.mark.parametrize("rows", [[0, 1, 4, 5], [7], [3, 2, 2]], ids=str)
def test_any_rows_of_a_batch(mixed, rows):
    """The rows of a host are not contiguous when a step is cut into microbatches."""
    alone = take(Loader(mixed, 8, 4), 3)
    some = [{key: array[rows] for key, array in batch.items()} for batch in alone]
    assert same(take(Loader(mixed, 8, 4, np.array(rows)), 3), some)


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_hosts_cover_an_epoch_without_overlap(stream, hosts):
    """Five steps of 10 rows in all; each host reads its own part and no more."""
    epochs = [first_tokens(take(Loader(stream, 10, 0, part(10, h, hosts), prefetch=0), 1)) for h in range(hosts)]
    assert sorted(chain(*epochs)) == [1 + 8 * row for row in range(10)]


def test_more_hosts_than_rows(numbered):
    tiny = Stream([numbered([8, 8], 8)], [1.0], 0)
    parts = [first_tokens(take(Loader(tiny, 4, 0, part(4, host, 4), prefetch=0), 3)) for host in range(4)]
    assert Counter(chain(*parts)) == {1: 6, 9: 6}


def test_a_failing_read_is_raised(numbered):
    class Broken(Stream):
        def batch(self, first, count, rows=None):
            if first >= 4:
                raise OSError("disk is gone")
            return super().batch(first, count, rows)

    with Loader(Broken([numbered([8] * 10, 8)], [1.0], 0), 2) as loader:
        next(loader)
        next(loader)
        with pytest.raises(OSError, match="disk is gone"):
            next(loader)


SCRIPT = """
import sys, time
from jaxpar.data import DataConfig, TextFiles, build_data

def main():
    config = DataConfig((TextFiles(sys.argv[1]),), eval_fraction=0.0, workers=int(sys.argv[2]))
    loader = build_data(config, seq_len=8, seed=0).loader(2)
    next(loader)
    print("ready", flush=True)
    while sys.argv[3] == "wait":
        next(loader)

if __name__ == "__main__":
    main()
"""


def run_script(folder, workers, then):
    """Start ``SCRIPT`` in a process group of its own; return it once it has its first batch."""
    text, script = folder / "text.txt", folder / "script.py"
    text.write_text("to be or not to be, that is the question")
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(text), workers, then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def wait_for_all(process):
    """Wait for the script and its workers, which hold its output open, and return what it wrote to stderr."""
    try:
        return process.communicate(timeout=20)[1].decode()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("workers", ["0", "2"])
def test_leaving_without_close(tmp_path, workers):
    process = run_script(tmp_path, workers, "exit")
    assert wait_for_all(process) == ""
    assert process.returncode == 0


@pytest.mark.parametrize("workers", ["0", "2"])
def test_interrupting_the_process_group(tmp_path, workers):
    process = run_script(tmp_path, workers, "wait")
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in wait_for_all(process)
    assert process.returncode == -signal.SIGINT


def test_workers_end_with_a_killed_parent(tmp_path):
    process = run_script(tmp_path, "2", "wait")
    process.kill()
    wait_for_all(process)
    assert process.returncode == -signal.SIGKILL
