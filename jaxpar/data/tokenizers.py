"""From text to token ids and back: plain bytes, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.errors import ConfigError

# End-of-document tokens of widely used tokenizers, the most telling first.
_USUAL_EOS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|endofsequence|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<end_of_turn>",
    "[EOS]",
)


class Tokenizer(Protocol):
    """What the room asks of a tokenizer; ``identity`` is a text that changes whenever the ids could."""

    vocab_size: int
    eos: int
    identity: str

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, without an end token; with what the tokenizer itself adds, if asked to."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``, end tokens left out."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document."""

    vocab_size = 257
    eos = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        """Return the bytes of each text; there are no special tokens to add."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if i != self.eos).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` run by the ``tokenizers`` library, without its special tokens, padding or truncation.

    ``vocab_size`` is the largest id plus one, which is what an embedding table needs; a vocabulary may have holes.
    """

    def __init__(self, path: str, eos_token: str | None = None):
        from tokenizers import Tokenizer as Backend

        content = _read(path)
        try:
            self._backend: Any = Backend.from_buffer(content)
        except BaseException as error:
            raise _refused(error, path, "is not a tokenizer") from None
        self._path = path
        self._backend.no_padding()
        self._backend.no_truncation()
        self.identity = hashlib.blake2b(content, digest_size=16).hexdigest()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        candidates = (eos_token,) if eos_token is not None else _USUAL_EOS
        found = [vocabulary[token] for token in candidates if token in vocabulary]
        if not found:
            rule = f"names no end-of-document token of {path}"
            legal = "a token of its vocabulary" if eos_token is not None else "a token of its vocabulary, set by name"
            raise ConfigError("data.eos_token", eos_token, rule, legal)
        self.eos: int = found[0]

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, or, with ``special_tokens``, of the library's template around it (BOS).

        The library spreads a long list over the cores.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        except BaseException as error:
            raise _refused(error, self._path, "cannot encode this text") from None
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``."""
        return self._backend.decode([int(i) for i in ids if i != self.eos], skip_special_tokens=False)


def load_tokenizer(tokenizer: str, eos_token: str | None = None) -> Tokenizer:
    """Return the byte tokenizer for ``"bytes"``, else the one in the file ``tokenizer``.

    Raise ``ConfigError`` for ``data.tokenizer`` or ``data.eos_token``.
    """
    if tokenizer != "bytes":
        return HuggingFaceTokenizer(tokenizer, eos_token)
    if eos_token is not None:
        raise ConfigError("data.eos_token", eos_token, "has no meaning for data.tokenizer bytes", "None")
    return ByteTokenizer()


def _refused(error: BaseException, path: str, rule: str) -> BaseException:
    """What the library raises (a bare Exception, or a panic that is none) as ours; an interrupt as it is."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        return error
    return ConfigError("data.tokenizer", path, f"{rule}: {error}", "a tokenizer.json that fits the text")


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # the latter two: a path or a home that cannot be
        rule = f"cannot be read: {getattr(error, 'strerror', error)}"
        raise ConfigError("data.tokenizer", path, rule, "bytes, or the path of a tokenizer.json") from None
