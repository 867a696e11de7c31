"""The same few documents in every format there is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxpar.data import ArrayRecord, JsonLines, Parquet, SavedDataset, StandardLibrary, TextFiles

TEXTS = [f"{number} {'naïve ünder 🙂' if number % 3 else 'plain'}\r\nline {number * 7}\n" for number in range(12)]
RECORDS: list[dict[str, Any]] = [
    {
        "text": text,
        "meta": {"lang": "de" if number % 3 else "en"},
        "score": None if number == 5 else number / 10,
        "good": number % 2 == 0,
        "tags": ["a", "b"] if number > 8 else ["a"],
    }
    for number, text in enumerate(TEXTS)
]


def write_array_record(path: Path, contents: Iterable[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:2")
    for content in contents:
        writer.write(content)
    writer.close()


def write_all(folder: Path) -> None:
    """Write ``RECORDS`` in every format."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    for name in ("library", "texts", "tables"):
        (folder / name).mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number:02}.txt").write_bytes(text.encode())
        (folder / "library" / f"m{number:02}.py").write_bytes(text.encode())
    (folder / "joined.txt.gz").write_bytes(gzip.compress("<|>".join(TEXTS).encode()))

    lines = [json.dumps(record).encode() + b"\n" for record in RECORDS]
    cut = b"".join(lines[:5]), b"".join(lines[5:])
    (folder / "a.jsonl").write_bytes(b"".join(cut))
    (folder / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, cut)))  # two members
    (folder / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, cut)))  # two frames
    for number in (0, 1):
        table = pa.Table.from_pylist(RECORDS[6 * number : 6 * number + 6])
        pq.write_table(table, folder / "tables" / f"{number}.parquet", row_group_size=4)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(RECORDS)
    dataset.save_to_disk(folder / "saved", num_shards=2)
    datasets.DatasetDict(train=dataset, rest=dataset.select([0])).save_to_disk(folder / "splits")
    write_array_record(folder / "json.array_record-00000-of-00001", lines)
    write_array_record(folder / "text.array_record", [text.encode() for text in TEXTS])


RECORD_SOURCES: dict[str, Callable[..., Any]] = {
    "jsonl": lambda at, **more: JsonLines(f"{at}/a.jsonl", **more),
    "jsonl.gz": lambda at, **more: JsonLines(f"{at}/a.jsonl.gz", **more),
    "jsonl.zst": lambda at, **more: JsonLines(f"{at}/a.jsonl.zst", **more),
    "parquet": lambda at, **more: Parquet(f"{at}/tables", **more),
    "saved": lambda at, **more: SavedDataset(f"{at}/saved", **more),
    "split": lambda at, **more: SavedDataset(f"{at}/splits", split="train", **more),
    "array_record": lambda at, **more: ArrayRecord(f"{at}/json*", **{"column": "text", **more}),
}
SOURCES: dict[str, Callable[..., Any]] = RECORD_SOURCES | {
    "library": lambda at: StandardLibrary(),
    "texts": lambda at: TextFiles(f"{at}/texts"),
    "joined": lambda at: TextFiles(f"{at}/joined.txt.gz", separator="<|>"),
    "plain array_record": lambda at: ArrayRecord(f"{at}/text.array_record"),
}
