"""The one way jaxpar says no: a single line, before anything is compiled.

Every check of a user's input raises ``ConfigError``; the command line prints its one line and exits with code 2. What
fails with nothing wrong in the input is a ``RunError``, with code 1.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class JaxparError(Exception):
    """A message for the user, one line, no traceback."""

    exit_code = 2  # of the command: its input is wrong


class ConfigError(JaxparError, ValueError):
    """A field has a value that cannot work.

    The message reads ``FIELD: VALUE RULE (legal: LEGAL)``, for example
    ``model.num_kv_heads: 2 is not divisible by mesh.tensor 4 (legal: mesh.tensor 1 or 2)``.
    """

    def __init__(self, field: str, value: object, rule: str, legal: object = None):
        self.field, self.value, self.rule, self.legal = field, value, rule, legal
        tail = "" if legal is None else f" (legal: {legal})"
        super().__init__(f"{field}: {_show(value)} {rule}{tail}")


class RunError(JaxparError):
    """It fails, and not for what was asked: a full disk, a damaged checkpoint, a lost host."""

    exit_code = 1


def is_of_the_disk(error: OSError) -> bool:
    """Whether the disk is full or broken, with nothing wrong with the path."""
    return error.errno in _OF_THE_DISK


def cannot_write(field: str, path: object, error: OSError) -> JaxparError:
    """The error to raise where what ``field`` names, ``path``, cannot be written."""
    rule = f"cannot be written: {error.strerror}"
    return RunError(f"{field}: {path} {rule}") if is_of_the_disk(error) else ConfigError(field, str(path), rule)


def _show(value: object) -> str:
    """One line of the value, shortened."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 120 else text[:117] + "..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean X?`` for the closest known word, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def divisors(number: int) -> str:
    """The first divisors of ``number`` as text, for the *legal* part of a message."""
    found = [d for d in range(1, number + 1) if number % d == 0] if number <= 1 << 20 else [1]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
