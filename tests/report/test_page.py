"""The report: one safe, self-contained page from whatever run folders hold."""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser

import jax.numpy as jnp
import pytest
from run_factory import experiment, records, write_run

from jaxpar.cli import main
from jaxpar.errors import ConfigError, JaxparError, RunError
from jaxpar.report.bars import memory_classes
from jaxpar.report.canvas import Canvas
from jaxpar.report.page import unlike, write_report
from jaxpar.report.runs import group_seeds, read_runs
from jaxpar.runtime.checkpoints import Checkpoints

ODD = ["<b>bold<i> & \"quoted\" 'x'", "_hidden", "$x_1$", "ünï-实验-🚀", "a" * 120]


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def no_pictures(monkeypatch):
    """PNG files take most of the time."""
    monkeypatch.setattr(Canvas, "png", lambda *_: None)


def test_one_run(tmp_path, capfd):
    run = write_run(tmp_path / "first")
    assert main(["report", str(run)]) == 0
    assert capfd.readouterr() == (f"report   {run}/report.html\n", "")
    page = Page(run / "report.html")
    for fact in (
        "finished",
        "204,800",
        "124,439,808",
        "8 NVIDIA H100 80GB HBM3: fsdp 4 × tensor 2",
        "0.10.2",
        "85.0 %",
    ):
        assert fact in page.text
    assert "train.steps = 100" in page.text
    pictures = {path.name for path in (run / "figures").iterdir()}
    assert {"loss.png", "loss-time.png", "grad_norm.png", "memory.png", "time.png"} <= pictures
    assert "matplotlib.pyplot" not in sys.modules


def test_the_page_stands_alone_and_its_ids_are_unique(tmp_path):
    paths = [write_run(tmp_path / f"r{n}", experiment(learning_rate=1e-3 * (n + 1))) for n in range(3)]
    page = write_report(paths, tmp_path / "out" / "all.html")
    assert (tmp_path / "out" / "all-figures" / "eval_loss.png").exists()
    tags = Page(page).tags
    for _, attributes in tags:
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", page.read_text())
    ids = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert max(ids.values()) == 1
    used = {a["xlink:href"][1:] for _, a in tags if "xlink:href" in a}
    assert used <= set(ids)


def test_odd_names_are_text(tmp_path, no_pictures):
    paths = [write_run(tmp_path / n, experiment(3, learning_rate=0.1 * k + 0.1)) for k, n in enumerate(ODD)]
    page = Page(write_report(paths, tmp_path / "report.html"))
    assert not [tag for tag, _ in page.tags if tag in ("b", "i")]
    for name in ODD:
        assert page.text.count(name) >= 3  # table, differences, legend, config
    one = write_run(tmp_path / "x" / "na\nme\udcff", experiment(1))
    assert "na�me�" in Page(write_report([one])).text


def test_every_run_has_its_row_and_repeats_their_mean(tmp_path, no_pictures):
    paths = [write_run(tmp_path / f"s{seed}", experiment(100, seed)) for seed in range(3)]
    paths.append(write_run(tmp_path / "other", experiment(100, 0, 3e-3)))
    page = Page(write_report(paths, tmp_path / "report.html"))
    assert page.text.count("mean ± s.d. of 3") == 1
    classes = [attributes.get("class", "") for tag, attributes in page.tags if tag == "g"]
    assert "s0 read" in classes and "s1 read" in classes and "s2 read" not in classes


def test_same_seed_twice_is_no_repeat(tmp_path):
    """The mean of a run and the same run after a change of the code would hide what was changed."""
    runs = read_runs([write_run(tmp_path / name, experiment(5, seed)) for name, seed in (("a", 0), ("b", 1), ("c", 1))])
    assert [len(series.runs) for series in group_seeds(runs)] == [1, 1, 1]
    assert [len(series.runs) for series in group_seeds(runs[:2])] == [2]


def test_only_what_differs_is_listed(tmp_path, no_pictures):
    one, two = experiment(5, 0, 1e-3), experiment(8, 0, 2e-3)
    runs = read_runs([write_run(tmp_path / "a", one), write_run(tmp_path / "b", two), write_run(tmp_path / "c", one)])
    assert unlike(runs) == [
        ("optim.learning_rate", ["0.001", "0.002", "0.001"]), ("train.steps", ["5", "8", "5"]),
    ]  # fmt: skip
    assert "the configs are equal" in Page(write_report([tmp_path / "a", tmp_path / "c"], tmp_path / "r.html")).text


def test_names_are_as_long_as_tells_them_apart(tmp_path):
    paths = [write_run(tmp_path / a / b, experiment(1)) for a, b in (("x", "run"), ("y", "run"), ("y", "other"))]
    assert [run.name for run in read_runs(paths)] == ["x/run", "y/run", "other"]


def test_folders_without_newer_fields(tmp_path, no_pictures):
    """A folder that an older version left: no compile.json, no data.json, fewer fields."""
    metrics = records(20, timed=False)
    run = write_run(tmp_path / "old", experiment(20), metrics, compiled=False, entropy=None)
    config = json.loads((run / "config.json").read_text())
    del config["train"]["max_skipped"]
    (run / "config.json").write_text(json.dumps(config))
    page = Page(write_report([run]))
    assert "goodput" not in page.text and "Memory" not in page.text and "unigram" not in page.text
    new = write_run(tmp_path / "new", experiment(20))
    text = Page(write_report([run, new], tmp_path / "r.html")).text
    assert "goodput" in text and text.count("not recorded") == 2


def test_how_a_run_ended(tmp_path):
    def status(name, steps=10, metrics=None, checkpoint=None, lock=False):
        run = write_run(tmp_path / name, experiment(10), records(steps) if metrics is None else metrics)
        if checkpoint:
            Checkpoints(run / "checkpoints", asynchronous=False).save(checkpoint, {"x": jnp.zeros(1)}, {})
        descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
        if lock:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            return read_runs([run])[0].status
        finally:
            os.close(descriptor)

    nan = records(5)
    nan[-2]["loss"] = None
    assert status("finished") == "finished"
    assert status("running", 5, lock=True) == "running"
    assert status("stopped", 5, checkpoint=5) == "stopped"
    assert status("killed", 5, checkpoint=3) == "broken off"
    assert status("failed", metrics=nan) == "failed: not finite"
    assert status("empty", metrics=[]) == "no steps"


def test_a_run_without_steps_and_one_that_is_being_written(tmp_path, no_pictures):
    empty = write_run(tmp_path / "empty", experiment(10), [], compiled=False)
    assert "No step has been recorded" in Page(write_report([empty])).text
    run = write_run(tmp_path / "going", experiment(10), records(4))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert "4 of 10" in Page(write_report([run])).text


def test_classes_of_memory(tmp_path, no_pictures):
    """All that the audit knows, and no total among them: bars of twice the length."""
    path = write_run(tmp_path / "run", experiment(1))
    (run,) = read_runs([path])
    assert sum(memory_classes(run).values()) == run.compiled["hbm_bytes"]["total"]
    text = Page(write_report([path])).text
    assert "optimizer state" in text and "gradients" in text and "3.01 GB" in text and "0.10.2" in text


def damage(run, name, text):
    (run / name).write_text(text)
    return run


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', "metrics.jsonl is damaged: line 2: "),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n', "metrics.jsonl is damaged: loss of step 1 is 'low'"),
        ("metrics.jsonl", f'{{"step": {10**400}, "loss": 1.0}}\n', "metrics.jsonl is damaged: step is larger than any"),
        (
            "metrics.jsonl",
            '{"step": 1, "loss": ' + "[" * 10**5 + "\n",
            "metrics.jsonl is damaged: line 1: maximum recur",
        ),
        ("config.json", "[" * 10**5, "config.json is damaged: maximum recursion depth"),
        ("compile.json", '{"parameters": "many"}', "compile.json is damaged: parameters is 'many'"),
        ("compile.json", "[1, 2]", "compile.json is damaged: no JSON object"),
        ("compile.json", '{"hbm_bytes": {"activations": "many"}}', "compile.json is damaged: hbm_bytes"),
        ("compile.json", '{"versions": {"jax": 1}}', "compile.json is damaged: versions"),
        ("data.json", '{"unigram_entropy": "low"}', "data.json is damaged: unigram_entropy"),
        ("config.json", '{"train": {"stepps": 3}}', "config.json: train.stepps: 3 is the value of an unknown field"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, file, text, message):
    run = damage(write_run(tmp_path / "run", experiment(3)), file, text)
    with pytest.raises(JaxparError) as error:
        write_report([run])
    assert str(error.value).startswith(f"{run}/{message}") and "\n" not in str(error.value)
    assert isinstance(error.value, RunError) == ("damaged" in message)
    assert not (run / "report.html").exists()


def test_time_below_zero_is_drawn(tmp_path, no_pictures):
    """A clock that was set back, in an old run: a page, and no traceback."""
    run = write_run(tmp_path / "run", experiment(3))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    damage(run, "metrics.jsonl", "".join(json.dumps({**line, "seconds": -5.0}) + "\n" for line in lines))
    assert write_report([run]).exists()


def test_a_full_disk_keeps_the_page_that_was_there(tmp_path, no_pictures, monkeypatch):
    run = write_run(tmp_path / "run", experiment(3))
    page = write_report([run])
    before = page.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"^--output: .*report.html cannot be written: No space left on device"):
        write_report([run])
    assert page.read_text() == before and not list(run.glob("*.new"))


def test_wrong_arguments_are_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", experiment(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "dir.html").mkdir()
    (tmp_path / "link").symlink_to("run")
    for arguments, message in (
        ([], "report: the following arguments are required: RUN"),
        (["nowhere"], "report: nowhere does not exist (legal: a run folder)"),
        (["folder"], "report: folder has no config.json (legal: a run folder)"),
        (["run/config.json"], "report: run/config.json is not a folder (legal: a run folder)"),
        (["run", "link"], "report: link is given twice (legal: each run once)"),
        (["run", "--output", "folder"], "--output: folder is no name of an HTML page (legal: folder.html)"),
        (["run", "--output", "run/config.json"], "--output: run/config.json is no name of an HTML page (legal: config"),
        (["run", "--output", "dir.html"], "--output: dir.html cannot be written: Is a directory"),
        (["run", "--json"], "report: unrecognized arguments: --json"),
    ):
        assert main(["report", *arguments]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(f"jaxpar: {message}") and err.count("\n") == 1


@pytest.mark.slow
def test_no_device_is_started(tmp_path):
    """A report must not wait for, or take, an accelerator."""
    run = write_run(tmp_path / "run", experiment(1))
    code = (
        f"from jaxpar.cli import main; assert main(['report', {str(run)!r}]) == 0\n"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_page_that_cannot_be_written_names_the_file(tmp_path):
    run = write_run(tmp_path / "run", experiment(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--output: .*file.* cannot be written: "):
        write_report([run], tmp_path / "file" / "report.html")
