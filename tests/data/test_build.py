"""The whole way from files to batches, the split, the fingerprint, the summary, and bad configs."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from jaxpar.data import DataConfig, JsonLines, StandardLibrary, TextFiles, build_data
from jaxpar.errors import ConfigError

TEXTS = [f"{word} and {number}" * (1 + number % 7) for number in range(60) for word in ("one", "two")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a hundred and twenty documents and a few files that cannot work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "other.txt").write_text("|".join(f"document {number} of the other kind" for number in range(30)))
    (tmp_path / "alone.txt").write_text("a document alone")
    (tmp_path / "twins.txt").write_text("same|same|same")
    (tmp_path / "blank.txt").write_text(" \n |\n")
    (tmp_path / "nothing").mkdir()
    return tmp_path


MANY = DataConfig(sources=(JsonLines("many.jsonl"),), eval_fraction=0.2)
MIXED = replace(MANY, sources=(JsonLines("many.jsonl"), TextFiles("other.txt", separator="|", weight=0.25)))


def held_out_rows(data):
    assert data.evaluation is not None
    return data.evaluation.sources


def texts_of(data, sources):
    """The documents of a split, put together again from its rows."""
    found = []
    for packed in sources:
        pieces = packed.pieces(np.arange(packed.rows))
        by_place = sorted(zip(pieces.starts_P.tolist(), pieces.lengths_P.tolist(), strict=True))
        ids = np.concatenate([packed.tokens_N[start : start + length] for start, length in by_place])
        ends = np.flatnonzero(ids == data.tokenizer.eos)
        found += [data.tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]]
    return found


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_all_documents_arrive_on_one_side_or_the_other(folder, packing):
    data = build_data(replace(MANY, packing=packing), seq_len=16, seed=0)
    train, held_out = texts_of(data, data.train.sources), texts_of(data, held_out_rows(data))
    assert sorted(train + held_out) == sorted(TEXTS)
    assert not set(train) & set(held_out)
    assert 0.1 < len(held_out) / len(TEXTS) < 0.3


def test_the_split_ignores_seed_and_length(folder):
    splits = [
        texts_of(data, held_out_rows(data))
        for data in (build_data(MANY, 16, 0), build_data(MANY, 16, 1), build_data(MANY, 64, 2))
    ]
    assert splits[0] == splits[1] == splits[2]


def test_the_split_ignores_other_documents(folder):
    before = set(texts_of(data := build_data(MANY, 16, 0), held_out_rows(data)))
    more = TEXTS[::-1] + [f"new {number}" for number in range(50)]
    (folder / "many.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in more))
    after = set(texts_of(data := build_data(MANY, 16, 0), held_out_rows(data)))
    assert before == {text for text in after if not text.startswith("new")}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("documents", [["a", "b"], ["a", "a", "b", "a"], ["x", "y", "z"]])
def test_neither_side_is_ever_empty(folder, fraction, documents):
    (folder / "few.txt").write_text("|".join(documents))
    config = DataConfig((TextFiles("few.txt", separator="|"),), eval_fraction=fraction)
    data = build_data(config, 4, 0)
    train, held_out = texts_of(data, data.train.sources), texts_of(data, held_out_rows(data))
    assert train and held_out and not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(documents)


def test_without_evaluation(folder):
    data = build_data(replace(MANY, eval_fraction=0.0), 16, 0)
    assert data.evaluation is None
    assert sorted(texts_of(data, data.train.sources)) == sorted(TEXTS)
    assert data.summary()["unigram_entropy"] is None
    assert data.summary()["sources"][0]["eval"] is None


def test_a_batch_reads_like_the_text(folder):
    data = build_data(MANY, 32, 0)
    with data.loader(4, first=12) as loader:
        batch = next(loader)
    assert {key: array.shape for key, array in batch.items()} == dict.fromkeys(batch, (4, 32))
    joined = "\0".join(TEXTS)
    for row in range(4):
        for segment in range(1, batch["segments"][row].max() + 1):
            at = batch["segments"][row] == segment
            assert data.tokenizer.decode(batch["tokens"][row, at]) in joined
            assert (batch["positions"][row, at] == np.arange(at.sum())).all()


def test_weights_are_shares_of_sequences(folder):
    data = build_data(MIXED, 16, 0)
    source_B, _ = data.train.order(0, 1000)
    assert np.bincount(source_B).tolist() == [800, 200]


def test_summary(folder):
    data = build_data(MIXED, 16, 0)
    summary = json.loads(json.dumps(data.summary()))
    assert [source["documents"] for source in summary["sources"]] == [120, 30]
    assert [source["share"] for source in summary["sources"]] == [0.8, 0.2]
    for source in summary["sources"]:
        assert source["tokens"] == source["train"]["tokens"] + source["eval"]["tokens"]
        for split in (source["train"], source["eval"]):
            assert split["tokens"] + split["padding"] == split["rows"] * 16
            assert split["packing_efficiency"] == split["tokens"] / (split["rows"] * 16)


def test_unigram_entropy(folder):
    data = build_data(MIXED, 16, 0)
    counts_V = np.ones(257)
    for text in texts_of(data, data.train.sources):
        np.add.at(counts_V, [*text.encode(), 256], 1)
    targets = [id for text in texts_of(data, held_out_rows(data)) for id in [*text.encode(), 256][1:]]
    expected = -np.mean(np.log(counts_V / counts_V.sum())[targets])
    assert data.summary()["unigram_entropy"] == pytest.approx(expected, rel=1e-12)


def test_fingerprint_names_the_batches(folder):
    first = build_data(MIXED, 16, 0).fingerprint
    heavier = replace(MIXED.sources[1], weight=0.5)
    others = [
        build_data(MIXED, 17, 0),
        build_data(MIXED, 16, 1),
        build_data(replace(MIXED, packing="best_fit"), 16, 0),
        build_data(replace(MIXED, mask_documents=False), 16, 0),
        build_data(replace(MIXED, eval_fraction=0.3), 16, 0),
        build_data(replace(MIXED, sources=(MIXED.sources[0], heavier)), 16, 0),
        build_data(replace(MIXED, sources=MIXED.sources[::-1]), 16, 0),
    ]
    (folder / "other.txt").write_text((folder / "other.txt").read_text().replace("9", "8"))
    others.append(build_data(MIXED, 16, 0))
    fingerprints = {first, *(data.fingerprint for data in others)}
    assert len(fingerprints) == len(others) + 1
    assert all(len(fingerprint) == 16 for fingerprint in fingerprints)


def test_fingerprint_ignores_what_changes_nothing(folder):
    first = build_data(MANY, 16, 0).fingerprint
    os.rename("many.jsonl", "moved.jsonl")
    moved = replace(MANY, sources=(JsonLines("moved.jsonl", weight=7.0),), workers=2, prefetch=9)
    assert build_data(moved, 16, 0).fingerprint == first


def test_progress(folder):
    calls = []
    data = build_data(MANY, 16, 0, progress=lambda *call: calls.append(call))
    assert [call[:3] for call in calls] == [("many.jsonl", 120, len(data.corpora[0].tokens_N))]
    assert 0.5 < calls[0][3] <= 1.0


def test_tokens_are_kept_small(folder):
    assert build_data(MANY, 16, 0).corpora[0].tokens_N.dtype == np.uint16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(()), "data.sources: () is no tuple of sources (legal: at least one source)"),
        (
            DataConfig((StandardLibrary(), "many.jsonl")),  # type: ignore[arg-type]
            "data.sources.1: many.jsonl is no source "
            "(legal: StandardLibrary, TextFiles, JsonLines, Parquet, SavedDataset, ArrayRecord)",
        ),
        (
            DataConfig((StandardLibrary(weight=0.0),)),
            "data.sources.0.weight: 0.0 cannot be a share of the mixture (legal: a finite number above 0)",
        ),
        (
            DataConfig((StandardLibrary(), TextFiles("alone.txt", weight=float("nan")))),
            "data.sources.1.weight: nan cannot be a share of the mixture (legal: a finite number above 0)",
        ),
        (DataConfig((TextFiles("gone.txt"),)), "data.sources.0.path: gone.txt does not exist and matches no file"),
        (DataConfig((TextFiles("nothing"),)), "data.sources.0.path: nothing names no file"),
        (
            DataConfig((JsonLines("*.json"),)),
            "data.sources.0.path: *.json does not exist and matches no file "
            "(legal: a file, a pattern, or a folder that holds *.jsonl or *.jsonl.gz or *.jsonl.zst)",
        ),
        (
            DataConfig((JsonLines("nothing"),)),
            "data.sources.0.path: nothing names no file "
            "(legal: a file, a pattern, or a folder that holds *.jsonl or *.jsonl.gz or *.jsonl.zst)",
        ),
        (DataConfig((TextFiles("blank.txt", separator="|"),)), "data.sources.0.path: blank.txt holds no text"),
        (
            DataConfig((TextFiles("alone.txt", separator=""),)),
            "data.sources.0.separator:  is empty (legal: None, or at least one character)",
        ),
        (
            DataConfig((TextFiles("alone.txt"),)),
            "data.eval_fraction: 0.05 needs two different documents in every source; data.sources.0 (alone.txt) has 1 "
            "(legal: 0, more documents, or a separator in TextFiles)",
        ),
        (
            DataConfig((JsonLines("many.jsonl"), TextFiles("twins.txt", separator="|"))),
            "data.eval_fraction: 0.05 needs two different documents in every source; data.sources.1 (twins.txt) has 3 "
            "(legal: 0, more documents, or a separator in TextFiles)",
        ),
        (
            replace(MANY, packing="first_fit"),
            "data.packing: first_fit is no way of packing. Did you mean best_fit? (legal: concat, best_fit)",
        ),
        (
            replace(MANY, eval_fraction=1.0),
            "data.eval_fraction: 1.0 is out of range (legal: 0 or more, below 1)",
        ),
        (
            replace(MANY, eval_fraction=float("nan")),
            "data.eval_fraction: nan is out of range (legal: 0 or more, below 1)",
        ),
        (replace(MANY, workers=-1), "data.workers: -1 is negative (legal: 0 or more)"),
        (replace(MANY, prefetch=-1), "data.prefetch: -1 is negative (legal: 0 or more)"),
    ],
)
def test_a_config_that_cannot_work_is_one_line(folder, config, message):
    with pytest.raises(ConfigError) as error:
        build_data(config, 16, 0)
    assert str(error.value) == message


def test_a_length_that_cannot_work(folder):
    with pytest.raises(ConfigError, match=r"^seq_len: 0 is no length \(legal: 1 or more\)"):
        build_data(MANY, 0, 0)


def test_importing_the_room_imports_nothing_heavy():
    code = "import sys, jaxpar.data; print(sorted({'jax', 'grain', 'tokenizers'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "[]\n"
