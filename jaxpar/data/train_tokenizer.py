"""Training a tokenizer on a config's text: byte-pair encoding (Sennrich et al. 2016), of bytes as in GPT-2."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxpar.data.build import DataConfig
from jaxpar.data.corpus import held_out, text_hash
from jaxpar.data.files import look, refuse_change
from jaxpar.data.progress import Bar
from jaxpar.data.sources import Source
from jaxpar.data.tokenizers import load_tokenizer
from jaxpar.errors import ConfigError, cannot_write

END = "<|endoftext|>"
LEAST = 258  # the bytes, the end of a document, and one pair
_MOST = 1 << 24  # tokens; the library makes room for all of them before it reads
_PIECE = 1 << 16  # characters of a document given to the library at a time: it takes many times their memory
_PIECES = 64


@dataclass(frozen=True)
class TokenizerReport:
    """A trained tokenizer and what it does to text it was not trained on; sizes are bytes of UTF-8."""

    path: Path
    vocab_size: int
    documents: int
    size: int
    held_out_documents: int
    held_out_size: int
    held_out_tokens: int  # without ends of documents

    def render(self) -> str:
        """What it is, how well it compresses, and what to type to use it."""
        held_out = "nothing: data.eval_fraction is 0"
        if self.held_out_tokens:
            ratio = self.held_out_size / self.held_out_tokens
            held_out = f"{ratio:.2f} bytes per token (the bytes tokenizer: 1.00), measured on "
            held_out += f"{self.held_out_size:,} bytes in {self.held_out_documents:,} documents"
        return (
            f"tokenizer  {self.path}: {self.vocab_size:,} tokens, {END} ends a document\n"
            f"trained on {self.size:,} bytes in {self.documents:,} documents\n"
            f"held out   {held_out}\n"
            f"use it     --data.tokenizer {self.path} --model.vocab_size {self.vocab_size}, or in a config\n"
            f'           DataConfig(tokenizer="{self.path}") and DecoderConfig(vocab_size={self.vocab_size})'
        )


def train_tokenizer(config: DataConfig, vocab_size: int, output: Path, quiet: bool = False) -> TokenizerReport:
    """Train on the training part of the sources of ``config``, all of it, whatever their weights; write ``output``.

    The file is a Hugging Face ``tokenizer.json``: any text comes back exactly, and the same text and ``vocab_size``
    give the same file. ``<|endoftext|>`` has an id that no text encodes to, not even its own name. Documents of more
    than 65,536 characters are cut there, for training and measuring alone. Text is read three times, never held.

    Raise ``ConfigError`` for a ``vocab_size`` that is too small, or too large for the text, for text that changes
    meanwhile, and, before any is read, for an ``output`` that is there or cannot be written.
    """
    config.validate()
    if vocab_size < LEAST:
        rule = "is too small: 256 bytes, the end of a document, and at least one pair"
        raise ConfigError("--vocab-size", vocab_size, rule, f"{LEAST} or more")
    if vocab_size > _MOST:
        raise ConfigError("--vocab-size", vocab_size, "is too large", f"{_MOST} at most")
    if os.path.lexists(output):
        raise ConfigError("--output", str(output), "is there already", "a new file")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError("--output", str(output), f"cannot be written: {output.parent} is no folder to write to")
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    with _writing(output):
        partial.touch()
    try:
        return _train_into(partial, config, vocab_size, output, quiet)
    finally:
        partial.unlink(missing_ok=True)


def _train_into(partial: Path, config: DataConfig, vocab_size: int, output: Path, quiet: bool) -> TokenizerReport:
    """As ``train_tokenizer``; the file is ``partial`` until it is whole."""
    before = [look(source.inputs(f"data.sources.{k}"))[1] for k, source in enumerate(config.sources)]
    sizes, splits = _split_documents(config, quiet)
    size, held_out_size = sizes
    held_documents = sum(int(held_D.sum()) for held_D in splits)

    with _bar("counting words", size, quiet) as bar:
        content = _train(_pieces(_side(config, splits, False), bar, "merging pairs"), vocab_size, size)
    for k, source in enumerate(config.sources):
        refuse_change(before[k], source.inputs(f"data.sources.{k}"), source.name, f"data.sources.{k}")
    with _writing(output):
        partial.write_text(content, encoding="utf-8")
        if os.path.lexists(output):  # another process was first
            raise ConfigError("--output", str(output), "is there already", "a new file")
        os.replace(partial, output)

    tokenizer = load_tokenizer(str(output))
    with _bar("measuring", held_out_size, quiet) as bar:
        tokens = sum(
            len(ids) for pieces in _pieces(_side(config, splits, True), bar) for ids in tokenizer.encode(pieces)
        )
    documents = sum(map(len, splits)) - held_documents
    return TokenizerReport(output, tokenizer.vocab_size, documents, size, held_documents, held_out_size, tokens)


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write("--output", output, error) from None


def _train(pieces: Iterator[list[str]], vocab_size: int, size: int) -> str:
    """The content of a ``tokenizer.json`` trained on ``pieces``, ``size`` bytes in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once is no rule
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(pieces, trainer)
    if (found := backend.get_vocab_size()) < vocab_size:
        rule = f"is more than there are in {size:,} bytes of text, where {found:,} tokens exhaust what occurs twice"
        legal = f"{LEAST} to {found}, or more text" if found >= LEAST else "more text"
        raise ConfigError("--vocab-size", vocab_size, rule, legal)
    tokenizer = json.loads(backend.to_str())
    tokenizer["added_tokens"] = []  # the end stays in the vocabulary, and is no longer looked for in texts
    return json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n"


def _split_documents(config: DataConfig, quiet: bool) -> tuple[tuple[int, int], list[np.ndarray]]:
    """Bytes of the training part and of the held-out one, and for each source which documents are held out."""
    hashes, lengths = [], []
    with _bar("reading", None, quiet) as bar:
        for k, source in enumerate(config.sources):
            hashes.append(array("Q"))
            lengths.append(array("Q"))
            for text in _documents(source, k):
                hashes[k].append(text_hash(text))
                lengths[k].append(len(text.encode("utf-8")))
                bar.update(lengths[k][-1])
    splits = _splits(config, [np.array(found, np.uint64) for found in hashes])
    held_D, lengths_D = np.concatenate(splits), np.concatenate(lengths)
    return (int(lengths_D[~held_D].sum()), int(lengths_D[held_D].sum())), splits


def _splits(config: DataConfig, hashes: list[np.ndarray]) -> list[np.ndarray]:
    """Which documents of each source are held out: as in training, but sources of one text alone count as one."""
    groups = [[k] for k, hashes_D in enumerate(hashes) if len(np.unique(hashes_D)) > 1]
    if alone := sorted(set(range(len(hashes))).difference(*groups)):
        groups.append(alone)
    splits = list(hashes)
    for group in groups:
        together = np.concatenate([hashes[k] for k in group])
        held_D = held_out(together, config.eval_fraction, f"data.sources.{group[0]}", config.sources[group[0]].name)
        for k, part_D in zip(group, np.split(held_D, np.cumsum([len(hashes[k]) for k in group])[:-1]), strict=True):
            splits[k] = part_D
    return splits


def _documents(source: Source, k: int) -> Iterator[str]:
    """The documents that training sees: those that are more than white space."""
    return (text for text in source.documents(f"data.sources.{k}") if text.strip())


def _side(config: DataConfig, splits: list[np.ndarray], held: bool) -> Iterator[str]:
    for k, (source, held_D) in enumerate(zip(config.sources, splits, strict=True)):
        # not strict: of files that grow or shrink meanwhile, the line is that they changed
        for text, is_held in zip(_documents(source, k), held_D, strict=False):
            if is_held == held:
                yield text


def _pieces(texts: Iterator[str], bar: tqdm, afterwards: str = "") -> Iterator[list[str]]:
    """Yield ``texts`` cut into pieces, several at a time; ``bar`` shows how far, and what comes afterwards."""
    pieces = (text[begin : begin + _PIECE] for text in texts for begin in range(0, len(text), _PIECE))
    while some := list(islice(pieces, _PIECES)):
        bar.update(sum(len(piece.encode("utf-8")) for piece in some))
        yield some
    bar.set_description(afterwards)


def _bar(what: str, total: int | None, quiet: bool) -> tqdm:
    return Bar(desc=what, total=total, unit="B", unit_scale=True, leave=False, disable=quiet, delay=1.0)
