"""The token cache: whatever happens to it, the batches are those of a first start."""

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar.data import DataConfig, JsonLines, TextFiles, build_data, corpus
from jaxpar.data.cache import KEEP_DAYS, cache_folder
from jaxpar.data.corpus import CannotWrite
from jaxpar.data.mapped import TemporaryFolder
from jaxpar.errors import ConfigError, RunError

DOCUMENTS = [f"document {number} " * (1 + number % 9) for number in range(300)]
LONG_AGO = (KEEP_DAYS + 1) * 24 * 3600
OPENED: list[str] | None = None


def note_open(event, arguments):
    if event == "open" and OPENED is not None:
        OPENED.append(str(arguments[0]))


sys.addaudithook(note_open)


@contextlib.contextmanager
def opened_files():
    """The paths of all files opened meanwhile, by whatever means."""
    global OPENED
    OPENED = found = []
    try:
        yield found
    finally:
        OPENED = None


def write_lines(path, documents):
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Two sources in the current folder, and a cache in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "lines").mkdir()
    write_lines(tmp_path / "lines" / "a.jsonl", DOCUMENTS[:200])
    write_lines(tmp_path / "lines" / "b.jsonl", DOCUMENTS[200:])
    (tmp_path / "text.txt").write_text("|".join(f"the other kind, number {number}" for number in range(90)))
    sources = (JsonLines("lines/*.jsonl"), TextFiles("text.txt", separator="|", weight=0.5))
    return DataConfig(sources, eval_fraction=0.2, cache=str(tmp_path / "cache"))


def build(config, seed=0):
    """The data, and the lines that were said about it: what happened, and where each source came from."""
    said = []
    data = build_data(config, 16, seed, say=said.append)
    return data, said + [corpus.origin for corpus in data.corpora]


def same(one, other):
    """Whether two Data give the same batches, all of two epochs of training and all of the evaluation."""
    rows = 2 * sum(packed.rows for packed in one.train.sources)
    pairs = [(one.train.batch(0, rows), other.train.batch(0, rows))]
    pairs.append((one.evaluation.batch(0, one.evaluation.rows), other.evaluation.batch(0, other.evaluation.rows)))
    return (
        one.fingerprint == other.fingerprint
        and summary(one) == summary(other)
        and all(a[key].tobytes() == b[key].tobytes() for a, b in pairs for key in a)
    )


def summary(data):
    """Without what tells a start from another."""
    found = data.summary()
    for source in found["sources"]:
        del source["origin"]
    return found


@pytest.fixture
def want(config):
    """The data of the same config without a cache."""
    return build(replace(config, cache=None))[0]


def entries(config):
    return sorted(path.parent for path in Path(config.cache).rglob(corpus.ENTRY))


def leftovers(config):
    return [path for path in Path(config.cache).rglob("new-*") if path.is_dir()]


def start_process(config, then):
    """``build_data`` in another process, which calls ``then(documents)`` as it reads; its lines come on stdout."""
    code = f"""
import os, sys, time
from pathlib import Path
from jaxpar.data import *
{then}
data = build_data({config!r}, 16, 0, lambda _, documents, *__: then(documents), lambda line: print(line, flush=True))
print(*(corpus.origin for corpus in data.corpora), data.fingerprint, sep="\\n", flush=True)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)


# -- hits and misses ---------------------------------------------------------------------------------------------


def test_a_second_start_reads_no_input(config, want):
    first, said = build(config)
    assert ["read in" in line for line in said] == [True, True]
    with opened_files() as opened:
        second, said = build(config)
    assert said == ["from the cache", "from the cache"]
    assert opened and not [path for path in opened if path.endswith((".jsonl", ".txt"))]
    assert same(first, want) and same(second, want)


def test_what_the_cache_does_not_depend_on(config, want):
    build(config)
    sources = (replace(config.sources[0], weight=9.0), config.sources[1])
    other = replace(config, sources=sources, packing="best_fit", eval_fraction=0.5, mask_documents=False, workers=1)
    got, said = build(other, seed=1)
    assert all("from the cache" in line for line in said)
    assert same(got, build(replace(other, cache=None), seed=1)[0])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda: write_lines(Path("lines/b.jsonl"), DOCUMENTS[210:]), "b.jsonl changed"),
        (lambda: os.utime("lines/a.jsonl", (1, 1)), "a.jsonl changed"),
        (lambda: write_lines(Path("lines/c.jsonl"), ["one more"]), "c.jsonl is new"),
        (lambda: os.remove("lines/a.jsonl"), "a.jsonl is gone"),
        (
            lambda: [write_lines(Path(f"lines/{name}.jsonl"), [f"only {name}", "x"]) for name in "abcde"],
            "a.jsonl and 1 more changed, c.jsonl and 2 more is new",
        ),
    ],
)
def test_a_changed_input_is_noticed_and_said(config, change, line):
    build(config)
    before = entries(config)
    change()
    got, said = build(config)
    assert said[0] == f"data.sources.0: {line}; reading lines/*.jsonl again"
    assert "read in" in said[1] and "from the cache" in said[2]
    assert same(got, build(replace(config, cache=None))[0])
    assert len(entries(config)) == 2 and entries(config) != before  # what it replaces has gone
    assert all("from the cache" in line for line in build(config)[1])


def test_the_same_name_in_another_folder_is_another_source(config, tmp_path, monkeypatch):
    build(config)
    (tmp_path / "elsewhere" / "lines").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_lines(Path("lines/a.jsonl"), ["quite", "another"])
    Path("text.txt").write_text("and|another")
    got, said = build(config)
    assert all("read in" in line for line in said)
    assert [len(found.hashes_D) for found in got.corpora] == [2, 2]
    assert len(entries(config)) == 4


def test_another_way_of_reading_is_another_source(config):
    build(config)
    got, said = build(replace(config, sources=(TextFiles("text.txt", separator="number"),)))
    assert "read in" in said[0] and len(got.corpora[0].hashes_D) == 91


# -- what can go wrong with an entry -----------------------------------------------------------------------------


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FILES = ("tokens", "offsets", "hashes", "counts", corpus.ENTRY)
DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"01234567"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip_last_byte,
    "gone": os.remove,
}
CASES = [(name, kind, damage) for name in FILES for kind, damage in DAMAGE.items()]
CASES += [
    (corpus.ENTRY, "no object", lambda path: path.write_text("[]")),
    (
        corpus.ENTRY,
        "other digest",
        lambda path: path.write_text(path.read_text().replace('"digest": "', '"digest": "0')),
    ),
]


@pytest.mark.parametrize(("name", "kind", "damage"), CASES, ids=[f"{name} {kind}" for name, kind, _ in CASES])
def test_a_damaged_entry_is_read_again(config, want, name, kind, damage):
    build(config)
    for entry in entries(config):
        damage(entry / name)
    got, said = build(config)
    assert same(got, want)
    assert sum("read in" in line for line in said) == 2
    if (name, kind) != (corpus.ENTRY, "gone"):  # without a description it is no entry
        assert sum("is damaged" in line for line in said) == 2
    assert all("from the cache" in line for line in build(config)[1])
    assert not leftovers(config)


def test_killed_while_writing(config, want):
    with start_process(config, "def then(documents): print('reading', flush=True); time.sleep(60)") as process:
        assert process.stdout.readline() == "reading\n"
        process.kill()
    assert not entries(config) and len(leftovers(config)) == 1
    got, said = build(config)
    assert same(got, want) and all("read in" in line for line in said)
    assert len(entries(config)) == 2 and not leftovers(config)


def test_two_processes_at_once(config, want):
    """The second one waits for what the first one writes, and says so."""
    wait = "def then(documents):\n    while not Path('go').exists(): time.sleep(0.01)"
    with start_process(config, wait) as first:
        while not leftovers(config):
            assert first.poll() is None
            time.sleep(0.01)
        with start_process(config, "def then(documents): sys.exit('read it too')") as second:
            waiting = second.stdout.readline()
            assert waiting.startswith(f"data.sources.0: lines/*.jsonl is being read by process {first.pid} on ")
            Path("go").touch()
            first_said, second_said = (process.communicate(timeout=30)[0].splitlines() for process in (first, second))
    assert ["read in" in line for line in first_said] == [True, True, False]
    assert second_said == ["from the cache", "from the cache", want.fingerprint]
    assert first_said[-1] == want.fingerprint
    assert len(entries(config)) == 2


def test_without_locks_the_first_to_finish_counts(config, want, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    others = []

    def build_too(*_):
        if not others:
            others.append(None)
            others.append(build(config)[0])

    got = build_data(config, 16, 0, build_too)
    assert same(got, want) and same(others[1], want)
    assert len(entries(config)) == 2 and not leftovers(config)


def test_a_source_that_cannot_be_read_leaves_nothing(config):
    with Path("lines/b.jsonl").open("a") as file:
        file.write("\nno json")
    with pytest.raises(ConfigError, match=r"lines/b.jsonl:101"):
        build(config)
    assert not entries(config) and not leftovers(config)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("changes", [("lines/a.jsonl", "changed"), ("lines/c.jsonl", "is new")])
def test_files_that_change_while_they_are_read(config, cached, changes):
    """Half of the old and half of the new would be trained on, and kept under the name of the old."""
    name, what = changes

    def progress(*_):
        with Path(name).open("a") as file:
            file.write('{"text": "added meanwhile"}\n')

    with pytest.raises(ConfigError, match=rf"^data.sources.0.path: .* changed while it was read: .*jsonl {what}"):
        build_data(config if cached else replace(config, cache=None), 16, 0, progress)
    assert not entries(config) and not leftovers(config)


# -- no cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["text.txt/cache", "/proc/no/such"])
def test_a_cache_that_cannot_be_written(config, want, place):
    got, said = build(replace(config, cache=place))
    assert said[0].startswith(f"data.cache: {place}: ") and said[0].endswith("; going on without a cache")
    assert "read in" in said[1]
    assert same(got, want)


def test_a_cache_on_a_full_disk(config, want, monkeypatch):
    write = corpus._Output.write
    calls = []

    def fill_up(self, array):
        calls.append(None)
        if Path(config.cache) in self._path.parents and len(calls) > 5:
            raise CannotWrite("No space left on device")
        write(self, array)

    monkeypatch.setattr(corpus._Output, "write", fill_up)
    got, said = build(config)
    assert f"data.cache: {config.cache}: No space left on device; going on without a cache" in said
    assert same(got, want)
    assert not leftovers(config)


def test_no_disk_takes_it(config):
    """Python ignores SIGXFSZ: a file beyond the limit is an error like that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RunError, match=r"^data.sources.0: the tokens do not go into .*: File too large; set "):
            build(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gc.collect()
    assert not leftovers(config) and not os.listdir(tempfile.gettempdir())


def test_temporary_files_go_with_the_data(config, want):
    data, _ = build(replace(config, cache=None))
    train = data.train
    batch = train.batch(0, 9)
    del data
    gc.collect()
    assert pickle.loads(pickle.dumps(train)).batch(0, 9)["tokens"].tobytes() == batch["tokens"].tobytes()
    kept = len(os.listdir(tempfile.gettempdir()))
    del train
    gc.collect()
    assert len(os.listdir(tempfile.gettempdir())) == kept - 2  # one for each source
    assert not Path(config.cache).exists()


def test_temporary_files_of_a_killed_process_go_with_the_next(config):
    place = tempfile.gettempdir()
    then = f"import tempfile; tempfile.tempdir = {place!r}\ndef then(documents): print('x', flush=True); time.sleep(60)"
    with start_process(replace(config, cache=None), then) as process:
        process.stdout.readline()
        used = TemporaryFolder()
        assert len(os.listdir(place)) == 2  # that of a process which lives stays
        process.kill()
        process.wait()
    more = TemporaryFolder()
    assert {used.path.name, more.path.name} == set(os.listdir(place))


# -- what goes, and what stays -----------------------------------------------------------------------------------


def make_old(folder):
    for path in [folder, *folder.iterdir()]:
        os.utime(path, (time.time() - LONG_AGO,) * 2)


def test_what_was_not_used_for_long_goes(config, tmp_path):
    build(config)
    for entry in entries(config):
        make_old(entry)
        make_old(entry.parent)
    abandoned, foreign = (Path(config.cache) / name for name in (f"{0:024x}/new-{0:024x}", "my/things"))
    for folder in (abandoned, foreign):
        folder.mkdir(parents=True)
        make_old(folder)
    write_lines(tmp_path / "new.jsonl", DOCUMENTS[:50])
    build(replace(config, sources=(JsonLines("new.jsonl"),)))
    assert len(entries(config)) == 1 and not leftovers(config)
    assert len(list(Path(config.cache).glob("*/lock"))) == 1
    assert foreign.exists()  # a cache in a folder that holds other things


def test_what_is_used_stays(config, tmp_path, want):
    held, _ = build(config)
    for entry in entries(config):
        make_old(entry)
    os.utime("lines/a.jsonl", (1, 1))
    got, said = build(config)  # reads one source again, and would remove what was there
    assert "read in" in said[1] and "from the cache" in said[2]
    assert len(entries(config)) == 3
    assert same(pickle.loads(pickle.dumps(held)), want) and same(got, want)
    del held
    gc.collect()
    os.utime("lines/a.jsonl", (2, 2))
    build(config)
    assert len(entries(config)) == 3  # `got` holds its own; the oldest has gone


def test_a_start_is_a_use(config):
    build(config)
    for entry in entries(config):
        make_old(entry)
    build(config)
    assert all(time.time() - (entry / corpus.ENTRY).stat().st_mtime < 3600 for entry in entries(config))


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "jaxpar" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder("auto") == Path.home() / ".cache" / "jaxpar" / "tokens"
    assert cache_folder(None) is None
    assert cache_folder("~/here") == Path.home() / "here"
    assert cache_folder("~no such user/here") is None
    for bad in ("", "gs://bucket/tokens"):
        with pytest.raises(ConfigError, match=r"^data.cache: .*is no folder of this machine's file systems"):
            DataConfig(cache=bad).validate()


# -- workers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_worker_gets_paths(config, cached, packing):
    """300 documents or 300,000: what a worker is sent is as small."""
    config = replace(config, packing=packing, workers=1, cache=config.cache if cached else None)
    data, _ = build(config)
    sent = pickle.dumps(data.train)
    assert len(sent) < 5000
    assert same(data, build(replace(config, workers=0))[0])
    there = pickle.loads(sent)
    assert there.batch(5, 40)["tokens"].tobytes() == data.train.batch(5, 40)["tokens"].tobytes()


@pytest.mark.parametrize("cached", [True, False])
def test_restored_with_workers(config, want, cached):
    with want.loader(4) as loader:
        whole = [next(loader) for _ in range(9)]
    build(config)
    data, _ = build(replace(config, workers=1, cache=config.cache if cached else None))
    k = 5
    with data.loader(4, first=4 * k) as loader:
        got = [next(loader) for _ in range(9 - k)]
    assert all(a[key].tobytes() == b[key].tobytes() for a, b in zip(got, whole[k:], strict=True) for key in a)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(config, tmp_path):
    """80 MB of text are 160 MB of tokens, twice that where they are joined in memory; mapped pages count too."""
    text = " ".join(DOCUMENTS)
    with open("large.jsonl", "w") as file:
        for number in range(80_000_000 // len(text)):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    config = replace(config, sources=(JsonLines("large.jsonl"),))
    then = """
def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000
import jaxpar.data.cache, numpy
before = peak()
def then(documents): pass
import atexit
def use():
    data.unigram_entropy()
    for step in range(1000):
        data.train.batch(64 * step, 64)
    print(peak() - before, flush=True)
atexit.register(use)
"""
    with start_process(config, then) as process:
        said = process.communicate(timeout=120)[0].splitlines()
    assert "read in" in said[0]
    assert float(said[-1]) < 130  # 96, whatever the size
    shutil.rmtree(config.cache)


def test_a_worker_that_is_killed_is_one_line(config):
    """As the kernel does for want of memory: not a traceback of the library's."""
    data, _ = build(replace(config, workers=1))
    with data.loader(2) as loader:
        next(loader)
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises(RunError, match=r"^data.workers: a process that loads data was killed"):
            for _ in range(100):
                next(loader)
