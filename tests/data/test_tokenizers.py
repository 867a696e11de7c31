"""Bytes and tokenizer.json files behind one interface."""

import numpy as np
import pytest

from jaxpar.data.tokenizers import load_tokenizer
from jaxpar.errors import ConfigError


def save_bpe(path, special_tokens):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    backend.enable_truncation(3)
    backend.enable_padding(length=7)
    backend.save(str(path))
    return str(path)


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)
    ids, empty = tokenizer.encode(["né", ""])
    assert ids.tolist() == [110, 0xC3, 0xA9]
    assert empty.tolist() == []
    assert tokenizer.decode([*ids, 256]) == "né"
    assert tokenizer.decode(ids[:2]) == "n\ufffd"


@pytest.mark.parametrize("eos", ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>"])
def test_usual_end_tokens_are_found(tmp_path, eos):
    tokenizer = load_tokenizer(save_bpe(tmp_path / "tokenizer.json", ["<pad>", eos]))
    assert tokenizer.eos == 1


def test_a_tokenizer_file_cuts_and_pads_nothing(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path / "tokenizer.json", ["</s>"]))
    texts = ["the cat sat on the mat, naïvely 🙂", "a"]
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert len(encoded[1]) == 1
    assert tokenizer.eos not in np.concatenate(encoded)
    assert max(map(max, encoded)) < tokenizer.vocab_size


def test_the_end_token_by_name(tmp_path):
    path = save_bpe(tmp_path / "tokenizer.json", ["</s>", "<stop>"])
    assert load_tokenizer(path, "<stop>").eos == 1
    with pytest.raises(ConfigError, match=r"^data\.eos_token: <halt> names no end-of-document token of"):
        load_tokenizer(path, "<halt>")


def test_no_usual_end_token(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.eos_token: None names no end-of-document token"):
        load_tokenizer(save_bpe(tmp_path / "tokenizer.json", ["<stop>"]))


def test_identity_follows_the_file(tmp_path):
    one = load_tokenizer(save_bpe(tmp_path / "one.json", ["</s>"]))
    same = load_tokenizer(save_bpe(tmp_path / "same.json", ["</s>"]))
    other = load_tokenizer(save_bpe(tmp_path / "other.json", ["</s>", "<stop>"]))
    assert one.identity == same.identity != other.identity


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", b'{"model": {}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: \S+ is not a tokenizer: ") as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^data\.tokenizer: byte cannot be read: No such file or directory \(legal: "
    ):
        load_tokenizer("byte")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load_tokenizer(str(tmp_path))


def test_an_end_token_for_bytes():
    with pytest.raises(ConfigError, match=r"^data\.eos_token: </s> has no meaning for data\.tokenizer bytes"):
        load_tokenizer("bytes", "</s>")
