"""safetensors files: looked at whole, read a slice at a time, written a shard at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpar.errors import ConfigError, RunError
from jaxpar.weights.names import EMBEDDING, HEAD, Index, Leaf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_CODES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old files hold what follows from config.json; nobody reads it


class Tensor(NamedTuple):
    """What a file says of a tensor."""

    file: str
    dtype: str  # a safetensors code, such as BF16
    shape: tuple[int, ...]


class Folder:
    """The tensors of a Hugging Face folder, none of them read yet.

    Raises ConfigError naming the file that is missing, cut short or damaged, and the tensor that its index puts
    elsewhere or that two files hold.
    """

    def __init__(self, path: Path):
        self.path = path
        indexed = None if (path / SINGLE).exists() else self._index()
        files = [SINGLE] if indexed is None else sorted(set(indexed.values()))
        self._open = {file: self._opened(file) for file in files}
        self.tensors: dict[str, Tensor] = {}
        for file, content in self._open.items():
            for name in content.keys():  # noqa: SIM118 (no mapping)
                if name in self.tensors:
                    raise ConfigError(name, file, f"holds a tensor that {self.tensors[name].file} holds too")
                found = content.get_slice(name)
                self.tensors[name] = Tensor(file, found.get_dtype(), tuple(found.get_shape()))
        for name, file in (indexed or {}).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ConfigError(name, file, f"does not hold the tensor that {INDEX} puts there")

    def _index(self) -> dict[str, str]:
        """Tensor -> file."""
        if not (self.path / INDEX).exists():
            held = ", ".join(sorted(p.name for p in self.path.glob("*.*") if p.suffix in (".bin", ".safetensors")))
            rule = f"holds no {SINGLE} and no {INDEX}" + (f", but {held[:80]}" if held else "")
            raise ConfigError("HF_FOLDER", str(self.path), rule, "what save_pretrained writes")
        try:
            indexed = json.loads((self.path / INDEX).read_text())["weight_map"]
            assert indexed and all(isinstance(x, str) for item in indexed.items() for x in item)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise ConfigError("HF_FOLDER", str(self.path / INDEX), 'has no "weight_map" of tensors to files') from None
        for file in sorted(set(indexed.values())):
            if Path(file).name != file or not (self.path / file).is_file():
                raise ConfigError(INDEX, file, f"is not in {self.path}", "all the files that it names")
        return indexed

    def _opened(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.path / file, framework="numpy").__enter__()
        except SafetensorError as error:
            rule = f"is cut short or damaged: {error}"
            raise ConfigError("HF_FOLDER", str(self.path / file), rule, "the whole file") from None
        except OSError as error:
            raise ConfigError(
                "HF_FOLDER", str(self.path / file), f"cannot be read: {error.strerror or error}"
            ) from None

    def close(self) -> None:
        """Close the files."""
        for content in self._open.values():
            content.__exit__(None, None, None)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str, index: Index) -> np.ndarray:
        """``tensor[index]``, in its own dtype."""
        return self._open[self.tensors[name].file].get_slice(name)[index]

    def dtypes(self) -> dict[str, str]:
        """Tensor -> dtype by its name, of those that are weights."""
        return {name: _CODES[t.dtype] for name, t in self.tensors.items() if not _COMPUTED.fullmatch(name)}

    def check(self, leaves: list[Leaf]) -> None:
        """Raise ConfigError for the first tensor that is missing, unexpected or of another shape or dtype.

        A head beside tied embeddings may be there, if it is the same matrix.
        """
        wanted = {name: leaf for leaf in leaves for name in leaf.tensors()}
        tied = next(leaf for leaf in leaves if leaf.theirs == EMBEDDING)
        if HEAD not in wanted and HEAD in self.tensors:
            wanted[HEAD] = tied
        for name, leaf in wanted.items():
            found = self.tensors.get(name)
            if found is None:
                raise ConfigError(name, "missing", f"in {self.path}, {leaf.name} is made of it")
            if found.shape != leaf.tensor_shape:
                rule = f"in {found.file} is not the shape that config.json gives {leaf.name}"
                raise ConfigError(name, list(found.shape), rule, list(leaf.tensor_shape))
            if found.dtype not in _CODES:
                raise ConfigError(name, found.dtype, f"in {found.file} is not supported", ", ".join(_CODES))
        for name in self.tensors:
            if name not in wanted and not _COMPUTED.fullmatch(name):
                file = self.tensors[name].file
                raise ConfigError(name, list(self.tensors[name].shape), f"in {file}: config.json has no such weight")
        if wanted.get(HEAD) is tied and not self._same(EMBEDDING, HEAD):
            rule = f"differs from {EMBEDDING}, but config.json says tie_word_embeddings"
            raise ConfigError(HEAD, list(tied.tensor_shape), rule, "the same matrix, or tie_word_embeddings false")

    def _same(self, one: str, other: str, rows: int = 4096) -> bool:
        count, width = self.tensors[one].shape
        pieces = [(slice(i, min(i + rows, count)), slice(0, width)) for i in range(0, count, rows)]
        return all(np.array_equal(self.read(one, at), self.read(other, at), equal_nan=True) for at in pieces)


class Planned(NamedTuple):
    """A tensor to be written, made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(folder: Path, tensors: Iterable[Planned], max_shard_bytes: int) -> list[str]:
    """Write ``tensors`` in order to files of at most ``max_shard_bytes`` (or one tensor), one in memory at a time.

    One file is ``model.safetensors``; several have an index. Returns their names.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    shards: list[list[Planned]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    try:
        for file, shard in zip(files, shards, strict=True):
            save_file({t.name: t.make() for t in shard}, folder / file, {"format": "pt"})
            (folder / file).chmod(0o644)  # safetensors makes files for their owner alone
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{folder / file} could not be written: {reason}") from error
    if count > 1:
        total = sum(t.bytes for shard in shards for t in shard)
        where = {t.name: file for file, shard in zip(files, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``500 MB``, ``2GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if size < 1:
        raise ConfigError("--max-shard-size", text, "is not a size", "such as 5GB, 500MB, 2GiB")
    return size
