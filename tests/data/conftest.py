"""Small corpora whose every token is its own name, and sources of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from source_helpers import RECORD_SOURCES, SOURCES, write_all

import jaxpar.data.sources
from jaxpar.data import Source
from jaxpar.data.packing import PackedRows, pack


def number_documents(
    lengths: Sequence[int], seq_len: int, packing: str = "concat", mask_documents: bool = True
) -> PackedRows:
    """Documents of the given lengths, packed; their tokens are 1, 2, 3, ..."""
    lengths_D = np.array(lengths, np.int64)
    tokens_N = np.arange(1, lengths_D.sum() + 1, dtype=np.uint16)
    return pack(tokens_N, np.cumsum(lengths_D) - lengths_D, lengths_D, seq_len, packing, mask_documents)


@pytest.fixture(scope="session")
def numbered() -> Callable[..., PackedRows]:
    """``number_documents`` as a fixture."""
    return number_documents


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A folder that ``write_all`` wrote."""
    folder = tmp_path_factory.mktemp("formats")
    write_all(folder)
    return folder


@pytest.fixture(params=RECORD_SOURCES)
def records(request, written) -> Callable[..., Any]:
    """Makes a source of ``RECORDS``, each that there is in turn; takes its fields."""
    return lambda **fields: RECORD_SOURCES[request.param](written, **fields)


@pytest.fixture(params=SOURCES)
def source(request, written, monkeypatch) -> Source:
    """Each source in turn, all with the documents ``TEXTS``; the standard library is a folder of twelve modules."""
    library = SimpleNamespace(get_paths=lambda: {"stdlib": str(written / "library")})
    monkeypatch.setattr(jaxpar.data.sources, "sysconfig", library)
    return SOURCES[request.param](written)
