"""Records of every format: columns, filters, and files that are not what they should be."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from source_helpers import TEXTS, write_array_record

from jaxpar.data import ArrayRecord, DataConfig, Filter, JsonLines, Parquet, SavedDataset, TextFiles, build_data
from jaxpar.data.sources import source_of
from jaxpar.errors import ConfigError
from jaxpar.experiment import Experiment
from jaxpar.overrides import apply_overrides
from jaxpar.serialize import from_json, to_json, type_check

FIELD = "data.sources.0"


def refusal(source, field=FIELD):
    """The one line that a source says when it cannot go on."""
    with pytest.raises(ConfigError) as error:
        source.validate(field)
        list(source.documents(field))
    assert "\n" not in str(error.value)
    return str(error.value)


# What every source gives


def test_every_source_has_the_same_documents(source):
    assert list(source.documents(FIELD)) == TEXTS


def test_inputs_are_the_files_that_are_read(source, monkeypatch):
    """In that order; and listing opens none of them."""
    opened: list[Path] = []
    path_open = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **more: opened.append(path) or path_open(path, *args, **more))
    files = source.inputs(FIELD)
    assert files == source.inputs(FIELD) and all(file.is_file() for file in files)
    assert not set(opened) & set(files)
    list(source.documents(FIELD))
    assert [file for file in dict.fromkeys(opened) if file in files] == files


def test_a_source_is_found_by_the_names_of_its_files(written):
    guessed = ["a.jsonl.zst", "tables", "saved", "splits", "json*", "texts", "joined.txt.gz"]
    kinds = [type(source_of(f"{written}/{name}", "--input")) for name in guessed]
    assert kinds == [JsonLines, Parquet, SavedDataset, SavedDataset, ArrayRecord, TextFiles, TextFiles]
    with pytest.raises(ConfigError, match=r"^--input: .* names files of different kinds: JsonLines, TextFiles"):
        source_of(f"{written}/*.[jt]*[zst]", "--input")


# Columns and filters


@pytest.mark.parametrize(
    ("relation", "kept"),
    [
        (Filter("meta.lang", "==", "en"), {0, 3, 6, 9}),
        (Filter("meta.lang", "!=", "en"), {1, 2, 4, 5, 7, 8, 10, 11}),
        (Filter("score", "<", 0.2), {0, 1}),
        (Filter("score", "<=", 0.2), {0, 1, 2}),
        (Filter("score", ">", 1), {11}),
        (Filter("score", ">=", 1), {10, 11}),
        (Filter("score", "!=", 0.1), set(range(12)) - {1, 5}),  # 5 is null, which is not even unequal
        (Filter("score", "in", (0, 1, 0.5)), {0, 10}),
        (Filter("good", "==", True), {0, 2, 4, 6, 8, 10}),
        (Filter("tags", "contains", "b"), {9, 10, 11}),
        (Filter("text", "contains", "plain"), {0, 3, 6, 9}),
    ],
    ids=str,
)
def test_filters(records, relation, kept):
    dropped: Counter[str] = Counter()
    source = records(where=(relation,))
    source.validate()
    assert list(source.documents(FIELD, dropped)) == [text for k, text in enumerate(TEXTS) if k in kept]
    assert dropped == {str(relation): 12 - len(kept)}


def test_what_is_dropped_is_counted_once(records):
    """By the first filter that refuses, then by the length in characters (not bytes)."""
    dropped: Counter[str] = Counter()
    source = records(
        where=(Filter("good", "==", True), Filter("meta.lang", "in", ("de", "fr"))), max_chars=len(TEXTS[2])
    )
    kept = [TEXTS[k] for k in (2, 4, 8, 10) if len(TEXTS[k]) <= len(TEXTS[2])]
    assert list(source.documents(FIELD, dropped)) == kept
    assert dropped == {
        "good == true": 6,
        "meta.lang in de,fr": 2,
        f"max_chars {len(TEXTS[2])}": 4 - len(kept),
    }
    assert sum(dropped.values()) + len(kept) == 12
    longest = max(map(len, TEXTS))
    assert list(records(min_chars=longest).documents()) == [text for text in TEXTS if len(text) == longest]


def test_columns_that_are_not_there(records):
    names = "text, meta.lang, score, good, tags"
    text = refusal(records(column="txt"))
    assert text.startswith(f"{FIELD}.column: txt is missing in /") and text.endswith(
        f"Did you mean text? (legal: {names})"
    )
    inner = refusal(records(where=(Filter("good", "==", True), Filter("meta.language", "==", "en"))))
    assert inner.startswith(f"{FIELD}.where.1.column: meta.language is missing in /") and inner.endswith(f"{names})")
    assert "meta.x is missing" in refusal(records(column="meta.x"))
    assert "text.x is missing" in refusal(records(column="text.x"))


def test_columns_of_another_type(records):
    assert f"{FIELD}.column: score is " in (text := refusal(records(column="score"))) and "text, in /" in text
    assert "meta is " in refusal(records(column="meta"))
    line = refusal(records(where=(Filter("score", "==", "0.1"),)))
    assert line.startswith(f"{FIELD}.where.0.value: 0.1 cannot be compared (==) with score, a number, in /")
    assert "with good, true or false, in /" in refusal(records(where=(Filter("good", "==", 1),)))
    assert "with score, a number, in /" in refusal(records(where=(Filter("score", "contains", 1),)))
    assert "with tags, a list, in /" in refusal(records(where=(Filter("tags", "contains", 1),)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"where": (Filter("n", "=", 1),)}, "where.0.op: = is no relation (legal: ==, !="),
        ({"where": (Filter("n", "in", 1),)}, "where.0.value: 1 does not go with op in (legal: a tuple of values)"),
        ({"where": (Filter("n", "==", (1,)),)}, "where.0.value: (1,) does not go with op == (legal: one value, or"),
        ({"where": (Filter("n", "in", ()),)}, "where.0.value: () is not of one type (legal: numbers alone, or"),
        ({"where": (Filter("n", "in", (1, "a")),)}, "where.0.value: (1, 'a') is not of one type"),
        ({"where": (Filter("n", "<", True),)}, "where.0.value: True does not go with op < (legal: op == or !=)"),
        ({"min_chars": -1}, "min_chars: -1 is negative (legal: 0 or more)"),
        ({"min_chars": 5, "max_chars": 4}, "max_chars: 4 is below min_chars 5 (legal: 5 or more, or none)"),
        ({"max_chars": 0}, "max_chars: 0 leaves no document (legal: 1 or more, or none)"),
        ({"weight": 0.0}, "weight: 0.0 cannot be a share of the mixture"),
        ({"weight": 10**400}, "weight: 1000"),
        ({"where": (Filter("n", "<", float("nan")),)}, "where.0.value: nan stands in no relation to anything"),
    ],
)
def test_fields_that_cannot_work(records, fields, message):
    assert refusal(records(**fields)).startswith(f"{FIELD}.{message}")


def test_filters_of_plain_text():
    source = ArrayRecord("text.array_record", where=(Filter("lang", "==", "en"),))
    assert refusal(source) == (
        f"{FIELD}.where: lang == en has no columns to look at: without a column the records are plain text "
        "(legal: a column as well, for JSON)"
    )


def test_filters_are_data_and_flags(records):
    """What a filter compares with comes back from JSON and from a flag as the same type."""
    values = [True, 3, 0.5, "en", ("en", "de"), (1, 2.5)]
    where = tuple(Filter("meta.lang", "in" if isinstance(value, tuple) else "==", value) for value in values)
    config = Experiment(data=DataConfig((records(where=where, max_chars=9),)))
    assert from_json(Experiment, json.loads(json.dumps(to_json(config)))) == config
    flags = [f"--{FIELD}.where.{k}.value={text}" for k, text in enumerate(("false", "4", "1e-3", "4x", "1,2", "a,b"))]
    changed = apply_overrides(config, flags).data.sources[0].where
    assert [relation.value for relation in changed] == [False, 4, 1e-3, "4x", (1, 2), ("a", "b")]
    type_check(config)


def test_nulls(tmp_path):
    """A null text is an error until a filter leaves it out; inside a null all is null."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "meta": null}\n{"text": null, "meta": {"n": 1}}\n')
    pq.write_table(pa.table({"text": ["a", None], "meta": [None, {"n": 1}]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.nulls(2), "meta": [{"n": 1}, {"n": 1}]}), tmp_path / "n.parquet")
    lines, table, nulls = JsonLines, Parquet, str(tmp_path / "n.parquet")
    assert refusal(lines(f"{tmp_path}/a.jsonl")) == f"{FIELD}.column: text is null, not a text, in {tmp_path}/a.jsonl:2"
    assert refusal(table(f"{tmp_path}/*a.parquet")).endswith(f"null, not a text, in {tmp_path}/a.parquet row 1")
    assert refusal(table(nulls)).endswith("row 0")
    for kind, name in ((lines, "a.jsonl"), (table, "a.parquet")):
        kept = kind(f"{tmp_path}/{name}", where=(Filter("text", "!=", ""),))
        assert list(kept.documents()) == ["a"]
        assert (
            list(kind(f"{tmp_path}/{name}", where=(Filter("meta.n", "!=", 5), Filter("text", "!=", ""))).documents())
            == []
        )


def test_a_name_with_a_dot(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a.b": "one", "a": {"b": "two"}}\n')
    pq.write_table(pa.table({"a.b": ["one"]}), tmp_path / "a.parquet")
    for source in (JsonLines(f"{tmp_path}/a.jsonl", "a.b"), Parquet(f"{tmp_path}/a.parquet", "a.b")):
        assert list(source.documents()) == ["one"]


def test_only_what_is_asked_for_is_read_from_parquet(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a"], "n": [1], "big": ["x"]}), tmp_path / "a.parquet")
    asked = []
    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, rows, columns, **more: asked.extend(columns) or iter_batches(self, rows, columns=columns, **more),
    )
    list(Parquet(f"{tmp_path}/a.parquet", where=(Filter("n", "==", 1),)).documents())
    assert asked == ["text", "n"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b"], pa.large_string()),
        pa.array(["a", "b"], pa.string_view()),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.chunked_array([["a"], ["b"]]),
    ],
    ids=lambda column: str(column.type),
)
def test_every_kind_of_text_column(tmp_path, column):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert list(Parquet(f"{tmp_path}/a.parquet").documents()) == ["a", "b"]


# Files that are not as they should be


def write_dataset(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / "data.arrow").write_bytes(content)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def arrow(texts: list[str]) -> bytes:
    table = pa.table({"text": pa.array(texts, pa.string())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def test_no_rows(tmp_path):
    """No document is no error of a source; that nothing at all is left is said once, by the corpus."""
    (tmp_path / "a.jsonl").write_bytes(b"\n\r\n")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b""))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    write_dataset(tmp_path / "saved", arrow([]))
    write_array_record(tmp_path / "a.array_record", [])
    (tmp_path / "a.txt").write_bytes(b"")
    for source in (
        JsonLines(f"{tmp_path}/a.jsonl"),
        JsonLines(f"{tmp_path}/a.jsonl.zst"),
        Parquet(f"{tmp_path}/a.parquet"),
        SavedDataset(f"{tmp_path}/saved"),
        ArrayRecord(f"{tmp_path}/a.array_record"),
        TextFiles(f"{tmp_path}/a.txt"),
    ):
        assert not any(source.documents())
        with pytest.raises(ConfigError, match=f"^{FIELD}.path: .* holds no text$"):
            build_data(DataConfig((source,)), 16, 0)


def test_byte_order_marks_and_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\r\n\ufeffb".encode())
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + b'{"text": "a\\r\\n"}\r\n\r\n{"text": "b"}\r\n')
    assert list(TextFiles(f"{tmp_path}/a.txt").documents()) == ["a\r\n\ufeffb"]
    assert list(JsonLines(f"{tmp_path}/a.jsonl").documents()) == ["a\r\n", "b"]


def test_half_a_surrogate_pair_in_array_record(tmp_path):
    write_array_record(tmp_path / "a", [b'{"text": "ok"}', b'{"text": "\\udfff"}'])
    assert refusal(ArrayRecord(f"{tmp_path}/a", "text")).endswith(f"is not text: {tmp_path}/a record 1")


def test_records_of_another_kind(tmp_path):
    write_array_record(tmp_path / "a", [b"one", b"\x0a\x0b\xff"])  # such as a serialized tf.train.Example
    assert refusal(ArrayRecord(f"{tmp_path}/a")).endswith(f"is not UTF-8 text: {tmp_path}/a record 1 (byte 2)")
    assert f"holds what is not JSON: {tmp_path}/a record 0: " in refusal(ArrayRecord(f"{tmp_path}/a", "text"))


DAMAGED = {
    "cut.jsonl.gz": lambda: gzip.compress(b'{"text": "a"}\n' * 999)[:-9],
    "wrong.jsonl.gz": lambda: b"hello",
    "cut.jsonl.zst": lambda: zstandard.compress(b'{"text": "a"}\n')[:-3],
    "cut at its second.jsonl.zst": lambda: zstandard.compress(b'{"text": "a"}\n') + zstandard.compress(b"{}")[:6],
    "wrong.jsonl.zst": lambda: b"hello",
    "cut.txt.gz": lambda: gzip.compress(b"a")[:-1],
    "empty.parquet": lambda: b"",
    "wrong.parquet": lambda: b"PAR1" + b"hello" * 9 + b"PAR1",
    "wrong.array_record": lambda: b"hello" * 99,
    "empty.array_record": lambda: b"",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(tmp_path, name):
    """Some libraries take a file that is cut off for a short one, or for one without records."""
    (path := tmp_path / name).write_bytes(DAMAGED[name]())
    source = source_of(str(path), FIELD)
    assert refusal(source).startswith(f"{FIELD}.path: {path} holds a file that cannot be read: {path}: ")


@pytest.mark.parametrize("kind", ["a.parquet", "a.array_record", "saved"])
def test_a_file_cut_anywhere_is_never_a_shorter_one(tmp_path, kind):
    """Also between two batches of an Arrow stream, where pyarrow stops as if that were the end."""
    texts = [f"document {number}" for number in range(7)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=2)
    write_array_record(tmp_path / "a.array_record", [text.encode() for text in texts])
    write_dataset(tmp_path / "saved", arrow(texts))
    path = tmp_path / "saved" / "data.arrow" if kind == "saved" else tmp_path / kind
    source = source_of(str(tmp_path / kind), FIELD)
    content = path.read_bytes()
    assert list(source.documents()) == texts
    for size in range(0, len(content), max(len(content) // 200, 1)):
        path.write_bytes(content[:size])
        assert "holds a file that cannot be read" in refusal(source), size


def test_files_that_cannot_be_opened(records, tmp_path, written, monkeypatch):
    """Here because they go away between listing and reading; without permission it is the same error."""
    source = records()
    files = source.inputs()
    monkeypatch.setattr(type(source), "inputs", lambda self, field=FIELD: [path.with_name("gone") for path in files])
    assert refusal(source).endswith(f"cannot be read: {files[0].with_name('gone')}: No such file or directory")


def test_splits(written):
    splits = f"{written}/splits"
    assert refusal(SavedDataset(splits)) == f"{FIELD}.split: None is not one of its splits (legal: train, rest)"
    assert refusal(SavedDataset(splits, split="trian")).endswith("Did you mean train? (legal: train, rest)")
    assert list(SavedDataset(splits, split="rest").documents()) == TEXTS[:1]
    assert list(SavedDataset(f"{splits}/train").documents()) == TEXTS
    assert SavedDataset(splits, split="rest").name == f"{splits} (rest)"
    assert "saved has no splits (legal: none)" in refusal(SavedDataset(f"{written}/saved", split="train"))


FOREIGN = [f'{{"KEY": {value}}}' for value in ("[]", "5", "null", '"train"', "[5]", '[{"filename": 5}]', "[{}]")]


def test_folders_that_hold_no_dataset(written, tmp_path):
    assert "holds no saved dataset" in refusal(SavedDataset(f"{written}/texts"))
    assert "holds no saved dataset" in refusal(SavedDataset(f"{written}/none"))
    shutil.copytree(written / "saved", tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    assert f"{tmp_path}/saved is not whole: " in refusal(SavedDataset(f"{tmp_path}/saved"))


@pytest.mark.parametrize("content", ["{}", "[]", "5", "{", "[" * 10**5, *FOREIGN])
def test_indexes_that_are_none(tmp_path, content):
    """A folder of another library may have files of these names; no traceback, and no split named t."""
    for name, key in (("state.json", "_data_files"), ("dataset_dict.json", "splits")):
        (tmp_path / name).write_text(content.replace("KEY", key))
        line = refusal(SavedDataset(str(tmp_path)))
        assert f"{tmp_path}/{name}: " in line and "\n" not in line


@pytest.mark.parametrize("kind", [JsonLines, Parquet, ArrayRecord])
def test_patterns_that_match_nothing(tmp_path, kind):
    (tmp_path / "notes.txt").write_text("no records")
    line = refusal(kind(f"{tmp_path}/*.none"))
    assert line.startswith(f"{FIELD}.path: {tmp_path}/*.none does not exist and matches no file (legal: a file, a")
    assert refusal(kind(str(tmp_path))).startswith(f"{FIELD}.path: {tmp_path} names no file (legal: ")


def test_filters_that_leave_nothing(tmp_path):
    """The file is not empty: the line must name the filter, or the user looks in the wrong place."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    source = JsonLines(f"{tmp_path}/a.jsonl", where=(Filter("text", "==", "three"),))
    with pytest.raises(ConfigError, match=r"holds no text that is not left out \(text == three: 2\)"):
        build_data(DataConfig((source,), cache=None), 8, 0)


@pytest.mark.parametrize("kind", [TextFiles, JsonLines, SavedDataset])
def test_an_empty_path(kind):
    """Not the folder at hand and all that is in it."""
    assert refusal(kind("")) == f"{FIELD}.path:  is empty (legal: a file, a pattern, or a folder; . is this one)"


def test_links(tmp_path):
    """Linked folders are read, once around a circle; a link to nothing would be a document less without a word."""
    for name in ("here/a.txt", "there/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    (tmp_path / "here" / "link").symlink_to("../there")
    (tmp_path / "there" / "back").symlink_to("../here")
    texts = TextFiles(f"{tmp_path}/here")
    assert list(texts.documents()) == ["here/a.txt", "there/b.txt"]
    (tmp_path / "there" / "gone.txt").symlink_to("nowhere")
    assert refusal(texts).endswith(f"cannot be looked into: {tmp_path}/here/link/gone.txt: No such file or directory")
    assert "gone.txt: No such file" in refusal(TextFiles(f"{tmp_path}/there/*.txt"))
    assert refusal(JsonLines(f"{tmp_path}/here")).startswith(f"{FIELD}.path: {tmp_path}/here names no file")


def test_folders_that_cannot_be_looked_into(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    assert refusal(TextFiles("x" * 5000)).endswith("File name too long")

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", closed)
    assert refusal(TextFiles(str(tmp_path))).endswith(f"cannot be looked into: {tmp_path}: Permission denied")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_empty_file_is_no_compressed_text(tmp_path, name):
    """What a broken download leaves; beside whole files it would be missing without a word."""
    (tmp_path / name).write_bytes(b"")
    kind = JsonLines if "jsonl" in name else TextFiles
    assert f"cannot be read: {tmp_path}/{name}: it is empty" in refusal(kind(f"{tmp_path}/{name}"))


def test_two_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "column: text is the name of several columns in " in refusal(Parquet(f"{tmp_path}/a.parquet"))


def test_the_same_file_twice(tmp_path):
    """Copies are read as often as they are there; equal texts are then on one side of the split."""
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / f"{name}.parquet")
    assert list(Parquet(str(tmp_path)).documents()) == ["one", "two", "one", "two"]


def test_files_come_in_the_order_of_their_paths(tmp_path):
    for name in ("b/1", "a/2", "a/1", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    for pattern in (tmp_path, f"{tmp_path}/**/*.jsonl"):
        assert list(JsonLines(str(pattern)).documents()) == ["a/1", "a/2", "b/1", "c"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("separator", ["-", "--", "a-a", "🙂"])
def test_separators_across_chunks(tmp_path, monkeypatch, chunk, separator):
    """As ``str.split`` of the whole text, wherever the chunks end; characters of several bytes too."""
    monkeypatch.setattr("jaxpar.data.sources._CHUNK", chunk)
    text = "ä---b----a-a-a-🙂🙂x🙂-a-"
    (tmp_path / "a.txt").write_text(text)
    assert list(TextFiles(f"{tmp_path}/a.txt", separator).documents()) == text.split(separator)
    (tmp_path / "b.txt").write_bytes("ab🙂".encode() + b"\xf0\x9f")
    assert refusal(TextFiles(f"{tmp_path}/b.txt", separator)).endswith("(byte 6)")


def test_memory_does_not_grow_with_the_file(tmp_path):
    """24 MB of text in files that are compressed a hundred times: a reader that holds one whole takes 24 MB or more."""
    document = "a document of some length, " * 90
    lines = (json.dumps({"text": document}).encode() + b"\n") * 100
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines) * 100)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines) * 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(f"{document}\0".encode() * 100) * 100)
    pq.write_table(pa.table({"text": [document] * 10_000}), tmp_path / "a.parquet", use_dictionary=False)
    for source in (
        JsonLines(f"{tmp_path}/a.jsonl.gz"),
        JsonLines(f"{tmp_path}/a.jsonl.zst"),
        TextFiles(f"{tmp_path}/a.txt.gz", separator="\0"),
        Parquet(f"{tmp_path}/a.parquet"),
    ):
        before = pa.total_allocated_bytes()
        tracemalloc.start()
        arrow_memory = [pa.total_allocated_bytes() - before for text in source.documents() if text]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(arrow_memory) == 10_000
        assert peak + max(arrow_memory) < 12e6, source


def test_a_missing_library_is_one_line(written):
    """Each source imports its own library when it reads, and none before."""
    code = """
import sys
from jaxpar.data import ArrayRecord, JsonLines, Parquet, SavedDataset
for name in ("pyarrow", "zstandard", "array_record"):
    assert name not in sys.modules
    sys.modules[name] = None
at = sys.argv[1]
for source in (Parquet(f"{at}/tables"), SavedDataset(f"{at}/saved"), JsonLines(f"{at}/a.jsonl.zst"), ArrayRecord(at)):
    try:
        list(source.documents())
    except Exception as error:
        print(type(error).__name__, error)
"""
    lines = subprocess.check_output([sys.executable, "-c", code, str(written)], text=True).splitlines()
    packages = ("pyarrow", "pyarrow", "zstandard", "array_record")
    for line, package in zip(lines, packages, strict=True):
        assert line.startswith(f"ConfigError {FIELD}.path: {written}")
        assert f" needs {package}, which cannot be imported: " in line
        assert line.endswith('(legal: after pip install -e ".[data]")')
