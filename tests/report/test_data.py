"""What ``jaxpar data`` says: numbers that agree with the batches, in text that a terminal can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from matplotlib.image import imread

from jaxpar.cli import main
from jaxpar.data import build_data
from jaxpar.overrides import load_config
from jaxpar.report.data import END, MASKED, describe_data, render, visible

CONFIG = """
from jaxpar.data import DataConfig, JsonLines, TextFiles
from jaxpar.experiment import Experiment, TrainConfig


def config():
    short = JsonLines("short.jsonl", weight=3.0)
    long = TextFiles("long.txt", separator="|")
    return Experiment(
        data=DataConfig(sources=(short, long), eval_fraction=0.2, packing="best_fit"),
        train=TrainConfig(steps=10, global_batch=8, seq_len=64),
    )
"""
ODD = "tab\there, a bell \x07, red \x1b[31m, café, 日本語, \u202e reversed\n"


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.py").write_text(CONFIG)
    lines = [json.dumps({"text": f"begin {number} " + ODD * (1 + number % 2)}) for number in range(60)]
    (tmp_path / "short.jsonl").write_text("\n".join([*lines, json.dumps({"text": "  "})]))
    (tmp_path / "long.txt").write_text("|".join(f"begin {number} " + "and so on and on " * 80 for number in range(30)))
    return load_config("mixed.py")


def describe(experiment, examples=0, **changes):
    from dataclasses import replace

    experiment = replace(experiment, data=replace(experiment.data, **changes))
    data = build_data(experiment.data, experiment.train.seq_len, experiment.train.seed)
    return json.loads(json.dumps(describe_data(experiment, data, examples))), data


def test_numbers(experiment):
    shown, data = describe(experiment)
    assert [source["share"] for source in shown["sources"]] == [0.75, 0.25]
    assert [source["dropped"] for source in shown["sources"]] == [{"white space alone": 1}, {}]
    for source, corpus, rows in zip(shown["sources"], data.corpora, data.train.sources, strict=True):
        assert source["train"]["documents"] + source["eval"]["documents"] == source["documents"]
        assert source["train"]["epochs"] == source["share"] * 80 / rows.rows
        assert source["bytes_per_token"] == 1.0
        quantiles = source["document_tokens"]["quantiles"]
        assert (quantiles["0.0"], quantiles["1.0"]) == (corpus.lengths_D.min(), corpus.lengths_D.max())
    assert shown["run"] == {"steps": 10, "global_batch": 8, "sequences": 80, "tokens": 5120}


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_examples_are_the_training_rows(experiment, packing, mask_documents):
    shown, data = describe(experiment, 12, packing=packing, mask_documents=mask_documents)
    batch = data.train.batch(0, 12)
    for number, example in enumerate(shown["examples"]):
        row = {name: array[number] for name, array in batch.items()}
        assert example["padding"] == (row["segments"] == 0).sum()
        masked = [column for piece in example["pieces"] for column in piece["masked_columns"]]
        assert masked == np.flatnonzero(~row["mask"] & (row["segments"] > 0)).tolist()
        tokens = 0
        for piece in example["pieces"]:
            at = slice(piece["first_column"], piece["first_column"] + piece["tokens"])
            tokens += piece["tokens"]
            assert piece["text"] == data.tokenizer.decode(row["tokens"][at])
            assert piece["positions"] == row["positions"][at][[0, -1]].tolist()
            assert piece["to_end"] == (row["tokens"][at][-1] == data.tokenizer.eos)
            assert piece["from_start"] == piece["text"].startswith("begin")
        assert tokens + example["padding"] == 64


def columns(line):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def test_text_fits_a_terminal_and_cannot_command_it(experiment):
    shown, _ = describe(experiment, 12)
    text = render(shown)
    assert all(line.isprintable() for line in text.split("\n"))
    assert max(map(columns, text.split("\n"))) <= 100
    assert "\\x07" in text and "\\x1b[31m" in text and "\\u202e" in text and "⇥" in text and "日本語" in text
    assert f"{END}{MASKED}" in text and "padding; no target counts" in text
    assert f"{END}{MASKED}" not in render(describe(experiment, 3, packing="concat", mask_documents=False)[0])


def test_a_long_piece_is_shortened(experiment):
    data = build_data(experiment.data, 2000, 0)
    lines = render(describe_data(experiment, data, 8)).split("\n")
    assert any("characters more" in line for line in lines)


def test_printable_keeps_what_can_be_read():
    assert visible("naïve 日本\n\t\r\x00\x85") == "naïve 日本↵⇥␍\\x00\\x85"


def test_the_command(experiment, capsys):
    assert main(["data", "mixed.py", "--examples", "1", "--figure", "figures/lengths.png"]) == 0
    out = capsys.readouterr().out
    assert "source     short.jsonl: read in 0.0 s" in out
    assert "sequence 0: row" in out and "sequence 1" not in out
    assert imread("figures/lengths.png").shape[:2] == (840, 1200)
    assert main(["data", "mixed.py", "--json", "--examples", "0", "--data.eval_fraction", "0"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["examples"] == [] and shown["sources"][0]["eval"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--examples", "-1"], "argument --examples: -1 is not a number of rows, 0 or more"),
        (["--examples", "100000000"], "argument --examples: 100000000 is more than the 10,000 rows that are shown"),
        (["--examples", "few"], "argument --examples: few is not a number of rows, 0 or more"),
        (["--figure", "lengths.pdf"], "--figure: lengths.pdf is no name of a PNG (legal: lengths.png)"),
        (["--data.cache", "gs://x"], "data.cache: gs://x is no folder of this machine's file systems (legal: a path"),
        (["--train.global_batch", "0"], "train.global_batch: 0 is too small (legal: 1 or more)"),
    ],
)
def test_wrong_input_is_one_line(experiment, capsys, arguments, message):
    assert main(["data", "mixed.py", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.slow
def test_no_backend_is_started(experiment):
    code = "import sys\nfrom jaxpar.cli import main\nmain(['data', 'mixed.py'])\nfrom jax._src import xla_bridge\n"
    code += "print('backends', xla_bridge.backends_are_initialized())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert out.splitlines()[-1] == "backends False"
