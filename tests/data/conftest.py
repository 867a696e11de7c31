"""Small corpora whose every token is its own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

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
