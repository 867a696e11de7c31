"""The data room: from text on disk to batches of numpy arrays, in an order that only (seed, step) decides.

Text -> ``sources`` -> ``tokenizers`` -> ``corpus`` (flat tokens in files, train and evaluation split; ``cache`` keeps
them) -> ``packing`` (rows of ``seq_len``) -> ``mixture`` (which row is sequence n, in closed form) -> ``stream`` ->
``loader`` (ahead of time, by host). No JAX here, and grain, tokenizers and what reads a file format are imported only
when used.

Tokens are mapped, never held. What grows with the data in memory is 16 bytes per training document with ``concat``
packing and about 32 per piece with ``best_fit``; three times that for a moment at the start.

Read ``build.py`` first (the config and the one entry point), then ``packing.py`` (what a batch holds) and
``stream.py`` (the order).

    data = build_data(DataConfig(), seq_len=256, seed=0)
    with data.loader(global_batch=32, first=32_000) as loader:
        batch = next(loader)  # tokens, targets, segments, positions, mask: [32, 256]

Shape suffixes: N tokens of a corpus, D documents, P pieces, R rows, T tokens of a batch, B sequences of a batch,
K sources, S positions of a row, V vocabulary.
"""

from jaxpar.data.build import HOW_LOADED, Data, DataConfig, build_data
from jaxpar.data.loader import Loader
from jaxpar.data.packing import Batch
from jaxpar.data.records import Filter
from jaxpar.data.sources import ArrayRecord, JsonLines, Parquet, SavedDataset, Source, StandardLibrary, TextFiles
from jaxpar.data.stream import Evaluation, Stream
from jaxpar.data.tokenizers import Tokenizer

__all__ = [
    "HOW_LOADED",
    "ArrayRecord",
    "Batch",
    "Data",
    "DataConfig",
    "Evaluation",
    "Filter",
    "JsonLines",
    "Loader",
    "Parquet",
    "SavedDataset",
    "Source",
    "StandardLibrary",
    "Stream",
    "TextFiles",
    "Tokenizer",
    "build_data",
]
