"""What the sources yield, and the one line they say when they cannot."""

import pytest

from jaxpar.data import JsonLines, StandardLibrary, TextFiles
from jaxpar.errors import ConfigError


def test_standard_library_is_there_and_its_own():
    texts = list(StandardLibrary().documents())
    assert len(texts) > 300
    assert sum(map(len, texts)) > 5_000_000
    assert any("class JSONDecoder" in text for text in texts)
    assert not any("build_time_vars = {" in text for text in texts)  # generated, with the machine's paths
    assert texts == list(StandardLibrary().documents())


def test_text_files(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"zwei\r\n")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.md").write_text("drei")
    (tmp_path / ".hidden").write_text("nothing")
    assert list(TextFiles(str(tmp_path)).documents()) == ["eins", "zwei\r\n", "drei"]
    assert list(TextFiles(str(tmp_path / "*.txt")).documents()) == ["eins", "zwei\r\n"]
    assert list(TextFiles(str(tmp_path / "**" / "*.md")).documents()) == ["drei"]
    assert list(TextFiles(str(tmp_path / "a.txt")).documents()) == ["eins"]


def test_a_name_with_pattern_characters(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    assert list(TextFiles(str(tmp_path / "a[1].txt")).documents()) == ["one"]


def test_separator(tmp_path):
    (tmp_path / "a.txt").write_text("one<|>two<|>three")
    assert list(TextFiles(str(tmp_path / "a.txt"), separator="<|>").documents()) == ["one", "two", "three"]


def test_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\\ntwo"}\n\n{"text": "drei é", "id": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "", "body": "four"}')
    assert list(JsonLines(str(tmp_path / "a.jsonl")).documents()) == ["one\ntwo", "drei é"]
    assert list(JsonLines(str(tmp_path / "*.jsonl")).documents()) == ["one\ntwo", "drei é", ""]
    assert list(JsonLines(str(tmp_path / "b.jsonl"), column="body").documents()) == ["four"]


def test_json_lines_are_read_one_by_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnot json\n')
    documents = JsonLines(str(tmp_path / "a.jsonl")).documents()
    assert next(documents) == "one"
    with pytest.raises(ConfigError, match=r"a\.jsonl:2"):
        next(documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", "data.sources.0.path: {path} holds what is not JSON: {path}:2: "),
        (b'{"text": "\xff"}', "data.sources.0.path: {path} holds what is not JSON: {path}:2: "),
        (b'{"body": "x"}', "data.sources.0.column: text is missing in {path}:2 (legal: body)"),
        (b'{"texts": "x"}', "data.sources.0.column: text is missing in {path}:2. Did you mean texts? (legal: texts)"),
        (b'{"text": 5}', "data.sources.0.column: text is a number, not a text, in {path}:2"),
        (b'{"text": null}', "data.sources.0.column: text is null, not a text, in {path}:2"),
        (b"[1]", "data.sources.0.path: {path} holds a list where a JSON object belongs: {path}:2"),
        (
            b'{"text": "\\ud800"}',
            "data.sources.0.path: {path} holds half a surrogate pair, which is not text: {path}:2",
        ),
    ],
)
def test_bad_lines_name_their_place(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError) as error:
        list(JsonLines("a.jsonl").documents())
    assert str(error.value).startswith(message.format(path="a.jsonl"))
    assert "\n" not in str(error.value)


def test_text_that_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError) as error:
        list(TextFiles("a.txt").documents())
    assert str(error.value) == "data.sources.0.path: a.txt holds a file that is not UTF-8 text: a.txt (byte 2)"
