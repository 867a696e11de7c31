"""A tokenizer trained on a config's text: exact, reproducible, and honest about text it has not seen."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar.data.train_tokenizer as train_tokenizer_module
from jaxpar.cli import main
from jaxpar.data import DataConfig, JsonLines, TextFiles, build_data
from jaxpar.data.corpus import text_hash
from jaxpar.data.progress import Bar
from jaxpar.data.tokenizers import load_tokenizer
from jaxpar.data.train_tokenizer import END, train_tokenizer
from jaxpar.errors import ConfigError

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "naïvely", "🙂", "looked", "\n\treturn", "12345", "barks"]
TEXTS = [" ".join(WORDS[(number * step) % len(WORDS)] for step in range(30)) for number in range(80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*TEXTS[:60], " \n"]))
    (folder / "b.txt").write_text("|".join(TEXTS[60:]))
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return DataConfig((JsonLines(f"{folder}/a.jsonl"), TextFiles(f"{folder}/b.txt", "|", 0.1)), eval_fraction=0.2)


@pytest.fixture(scope="module")
def trained(folder, config):
    return train_tokenizer(config, 300, folder / "tokenizer.json", quiet=True)


@pytest.fixture(scope="module")
def tokenizer(trained):
    return load_tokenizer(str(trained.path))


def test_it_works_as_the_config_says(trained, config, tokenizer):
    """No flag but ``data.tokenizer``; the report's numbers are those of the run's split."""
    data = build_data(replace(config, tokenizer=str(trained.path)), seq_len=16, seed=0)
    assert data.tokenizer.vocab_size == trained.vocab_size == 300
    held = [corpus.held_out_D(0.2, "") for corpus in data.corpora]
    assert trained.held_out_documents == sum(map(np.count_nonzero, held)) > 0
    assert trained.documents == len(TEXTS) - trained.held_out_documents
    tokens = sum((corpus.lengths_D[held_D] - 1).sum() for corpus, held_D in zip(data.corpora, held, strict=True))
    assert trained.held_out_tokens == tokens
    assert trained.size + trained.held_out_size == sum(len(text.encode()) for text in TEXTS)
    ratio = trained.held_out_size / tokens
    assert ratio > 1.5
    assert f"{ratio:.2f} bytes per token" in trained.render()
    assert f"--data.tokenizer {trained.path} --model.vocab_size 300" in trained.render()


def test_only_the_training_part_is_seen(tmp_path):
    """A word of held-out documents alone is in no token, until they are trained on."""
    marked = [text for number in range(200) if text_hash(text := f"{number} ZZZZ ZZZZ") < 0.3 * 2**64]
    assert marked
    (tmp_path / "a.txt").write_text("|".join([*marked, *TEXTS]))
    config = DataConfig((TextFiles(f"{tmp_path}/a.txt", "|"),), eval_fraction=0.3)
    for fraction, name in ((0.3, "t.json"), (0.0, "u.json")):
        train_tokenizer(replace(config, eval_fraction=fraction), 290, tmp_path / name, quiet=True)
        assert ('"ZZ"' in (tmp_path / name).read_text()) == (fraction == 0)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.text(f"{END} ab\x00\r\n\ufeff\u0301Ġ", max_size=60))
def test_any_text_comes_back(tokenizer, text):
    """Controls, unassigned and combining characters, and the name of the end token, which is text like any other."""
    for one in (text, f"{text}{END}{text}"):
        (ids,) = tokenizer.encode([one])
        assert tokenizer.decode([*ids, tokenizer.eos]) == one
        assert tokenizer.eos not in ids


def test_the_same_text_gives_the_same_file(trained, config, tmp_path):
    """In other processes, with other hash seeds and numbers of threads; also from a source with other file formats."""
    code = """
import sys
from pathlib import Path
from jaxpar.data import DataConfig, JsonLines, TextFiles
from jaxpar.data.train_tokenizer import train_tokenizer
a, b, out = sys.argv[1:]
train_tokenizer(DataConfig((JsonLines(a), TextFiles(b, "|"),), eval_fraction=0.2), 300, Path(out))
"""
    for threads in ("1", "2", "5"):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONPATH": ":".join(sys.path)}
        paths = [source.path for source in config.sources]
        subprocess.run([sys.executable, "-c", code, *paths, str(tmp_path / threads)], env=env, check=True)
        assert (tmp_path / threads).read_bytes() == trained.path.read_bytes()


def test_the_library_alone_reads_the_file(trained, tokenizer):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(trained.path))
    assert backend.get_vocab_size() == 300 and backend.token_to_id(END) == tokenizer.eos
    assert backend.encode(TEXTS[0]).ids == tokenizer.encode([TEXTS[0]])[0].tolist()


def test_long_documents_are_read_whole(tmp_path, monkeypatch):
    """Cut into pieces for the library: every byte counts, and almost no token is cut."""
    monkeypatch.setattr("jaxpar.data.train_tokenizer._PIECE", 100)
    text = " ".join(TEXTS)
    (tmp_path / "a.txt").write_text(f"{text}|{text[::-1]}")
    config = DataConfig((TextFiles(f"{tmp_path}/a.txt", "|"),), eval_fraction=0.5)
    report = train_tokenizer(config, 280, tmp_path / "t.json", quiet=True)
    assert (report.documents, report.held_out_documents) == (1, 1)
    assert report.size == report.held_out_size == len(text.encode())


def test_many_files_of_one_text(tmp_path):
    """As a shell expands ``--input *.txt``: one document a source, and still some held out."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02}.txt").write_text(text)
    config = DataConfig(tuple(TextFiles(f"{tmp_path}/{number:02}.txt") for number in range(80)), eval_fraction=0.2)
    report = train_tokenizer(config, 300, tmp_path / "t.json", quiet=True)
    one = DataConfig((TextFiles(f"{tmp_path}/*.txt"),), eval_fraction=0.2)
    assert report.held_out_documents == build_data(one, 16, 0).corpora[0].held_out_D(0.2, "").sum()


@pytest.mark.parametrize(
    ("change", "vocab_size", "output", "message"),
    [
        (
            {},
            257,
            "new.json",
            "--vocab-size: 257 is too small: 256 bytes, the end of a document, and at least one pair",
        ),
        ({}, 2**24 + 1, "new.json", "--vocab-size: 16777217 is too large (legal: 16777216 at most)"),
        ({}, 2**70, "new.json", "--vocab-size: 1180591620717411303424 is too large"),
        ({}, 2**24, "new.json", "--vocab-size: 16777216 is more than there are in "),
        ({}, 100_000, "new.json", "--vocab-size: 100000 is more than there are in "),
        ({}, 300, "a.jsonl", "--output: HERE/a.jsonl is there already (legal: a new file)"),
        (
            {},
            300,
            "none/new.json",
            "--output: HERE/none/new.json cannot be written: HERE/none is no folder to write to",
        ),
        ({"sources": ()}, 300, "new.json", "data.sources: () is no tuple of sources"),
        ({"sources": (TextFiles("none"),)}, 300, "new.json", "data.sources.0.path: none does not exist"),
        ({"sources": (TextFiles("HERE/b.txt"),)}, 300, "new.json", "data.eval_fraction: 0.2 needs two different docu"),
    ],
)
def test_what_cannot_work_is_one_line(folder, config, trained, change, vocab_size, output, message):
    if source := change.get("sources"):
        change = {"sources": tuple(replace(one, path=one.path.replace("HERE", str(folder))) for one in source)}
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError) as error:
        train_tokenizer(replace(config, **change), vocab_size, folder / output, quiet=True)
    assert str(error.value).startswith(message.replace("HERE", str(folder)))
    assert "\n" not in str(error.value)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("output", ["n" * 250, "/proc/new.json"])
def test_an_output_that_cannot_be_written_is_refused_first(config, tmp_path, monkeypatch, output):
    """Not after the training, which may have taken hours."""
    monkeypatch.setattr(JsonLines, "documents", None)
    with pytest.raises(ConfigError, match=r"^--output: .* cannot be written: "):
        train_tokenizer(config, 300, tmp_path / output, quiet=True)


@pytest.mark.parametrize("grows", [True, False])
def test_text_that_changes_meanwhile(tmp_path, monkeypatch, grows):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    split = train_tokenizer_module._split_documents

    def change(*arguments):
        done = split(*arguments)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines * 2 if grows else lines[:40]))
        return done

    monkeypatch.setattr(train_tokenizer_module, "_split_documents", change)
    with pytest.raises(ConfigError, match=r"^data.sources.0.path: .* changed while it was read: a.jsonl changed"):
        train_tokenizer(DataConfig((JsonLines(str(path)),)), 280, tmp_path / "t.json", quiet=True)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_two_at_once_do_not_overwrite(config, tmp_path, monkeypatch):
    output = tmp_path / "t.json"
    train = train_tokenizer_module._train

    def another(*arguments):
        output.write_text("another's")
        return train(*arguments)

    monkeypatch.setattr(train_tokenizer_module, "_train", another)
    with pytest.raises(ConfigError, match="is there already"):
        train_tokenizer(config, 300, output, quiet=True)
    assert output.read_text() == "another's" and os.listdir(tmp_path) == ["t.json"]


def test_a_bar_leaves_nothing():
    """One that was shown before its delay was over: the line that follows would be on the same line."""
    screen = io.StringIO()
    with Bar(total=5, leave=False, delay=10, file=screen) as bar:
        bar.set_description("merging pairs")
    assert "merging" in screen.getvalue() and not screen.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip()
    assert screen.getvalue().endswith("\r")


def test_the_largest_vocabulary_is_the_one_that_is_named(folder, config, tmp_path):
    with pytest.raises(ConfigError) as error:
        train_tokenizer(config, 100_000, tmp_path / "t.json", quiet=True)
    most = int(str(error.value.legal).split()[2].rstrip(","))
    assert train_tokenizer(config, most, tmp_path / "t.json", quiet=True).vocab_size == most


def test_the_command(folder, tmp_path, capsys):
    arguments = ["tokenizer", "train", "--input", f"{folder}/a.jsonl", f"{folder}/b.txt", "--vocab-size", "280"]
    assert main([*arguments, "--output", f"{tmp_path}/t.json", "--data.sources.1.separator", "|"]) == 0
    assert f"use it     --data.tokenizer {tmp_path}/t.json --model.vocab_size 280" in capsys.readouterr().out
    assert load_tokenizer(f"{tmp_path}/t.json").vocab_size == 280
    assert main([*arguments, "--output", f"{tmp_path}/t.json"]) == 2
    assert capsys.readouterr().err == f"jaxpar: --output: {tmp_path}/t.json is there already (legal: a new file)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "tokenizer: NAME must come first: train"),
        ("tain x", "tokenizer: tain is nothing it can do. Did you mean train? (legal: train)"),
        ("train --vocab-size 300 --output t", "tokenizer train: the text is that of either CONFIG ("),
        ("train quickstart --input a --vocab-size 300 --output t", "tokenizer train: the text is that of either"),
        ("train --input a --smoke --vocab-size 300 --output t", "--smoke: true does not go with --input"),
        ("train quickstart --output t", "tokenizer train: --vocab-size is missing"),
        ("train quickstart --vocab-size 300", "tokenizer train: --output is missing"),
        (
            "train quickstart --vocab-size 3e3 --output t",
            "tokenizer train [CONFIG]: argument --vocab-size: invalid int",
        ),
        ("train --input none/* --vocab-size 300 --output t", "--input: none/* does not exist and matches no file"),
        ("train quickstart --vocab-size 300 --output t --data.tokeniser x", "data.tokeniser: x sets an unknown field"),
    ],
)
def test_a_wrong_command_is_one_line(capsys, arguments, message):
    assert main(["tokenizer", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"jaxpar: {message}") and err.count("\n") == 1
