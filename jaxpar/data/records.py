"""What all sources of records share: the column that holds the text, filters on the others, and where an error is."""

from __future__ import annotations

import json
import operator
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from jaxpar.errors import ConfigError
from jaxpar.serialize import suggest, word

_OPERATORS: dict[str, Any] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda found, values: found in values,
    "contains": operator.contains,
}
_MOST_NAMES = 20


@dataclass(frozen=True)
class Filter:
    """Keeps the records whose ``column`` stands in the relation ``op`` to ``value``: ``Filter("lang", "==", "en")``.

    ``in`` takes a tuple of values; ``contains`` asks for a part of a text or an element of a list. As in SQL, null (and
    nan) stands in no relation to anything, not even ``!=``. A column of another type than the value is an error.
    """

    column: str
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "contains"]
    value: bool | int | float | str | tuple[int | float | str, ...]

    def __str__(self) -> str:
        return f"{self.column} {self.op} {word(self.value)}"

    def validate(self, field: str) -> None:
        """Raise ``ConfigError`` naming ``field`` for a relation that there cannot be."""
        if self.op not in _OPERATORS:
            raise ConfigError(f"{field}.op", self.op, "is no relation", ", ".join(_OPERATORS))
        if isinstance(self.value, tuple) != (self.op == "in"):
            legal = "a tuple of values" if self.op == "in" else "one value, or op in"
            raise ConfigError(f"{field}.value", self.value, f"does not go with op {self.op}", legal)
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        if len({kind(value) for value in values}) != 1:
            raise ConfigError(f"{field}.value", self.value, "is not of one type", "numbers alone, or texts alone")
        if any(value != value for value in values):
            raise ConfigError(f"{field}.value", self.value, "stands in no relation to anything", "a number")
        if isinstance(self.value, bool) and self.op not in ("==", "!="):
            raise ConfigError(f"{field}.value", self.value, f"does not go with op {self.op}", "op == or !=")

    def accepts(self, found: Any) -> bool:
        """Whether a record stays in whose column holds ``found``; TypeError if the two cannot be compared."""
        if found is None or found != found:
            return False
        wanted = kind(self.value[0] if isinstance(self.value, tuple) else self.value)
        if self.op == "contains" and isinstance(found, list):
            fits = all(kind(item) == wanted for item in found if item is not None)
        else:
            fits = kind(found) == wanted and (self.op != "contains" or isinstance(found, str))
        if not fits:
            raise TypeError
        return _OPERATORS[self.op](found, self.value)


@dataclass(frozen=True)
class Records:
    """A source of records: each is a document, and ``column`` names the part of it that is the text.

    Filters come first, so a record without text need not be an error: ``Filter("text", "!=", "")`` leaves out empty and
    null texts.
    """

    path: str
    column: str | None = None  # that holds the text; a.b is b inside a, also in filters
    where: tuple[Filter, ...] = ()  # only records that all of these accept
    min_chars: int = 0  # only documents of at least so many characters
    max_chars: int | None = None  # and of at most so many
    weight: float = 1.0  # share of the training sequences, relative to the other sources

    @property
    def name(self) -> str:
        """What summaries call this source."""
        return self.path

    def validate(self, field: str = "data.sources.0") -> None:
        """Raise ``ConfigError`` naming ``field`` (such as ``data.sources.0``) for an illegal value; reads no file."""
        check_weight(self.weight, field)
        for k, wanted in enumerate(self.where):
            wanted.validate(f"{field}.where.{k}")
        if self.min_chars < 0:
            raise ConfigError(f"{field}.min_chars", self.min_chars, "is negative", "0 or more")
        if self.max_chars is not None and self.max_chars < max(self.min_chars, 1):
            rule = "leaves no document" if self.max_chars < 1 else f"is below min_chars {self.min_chars}"
            raise ConfigError(f"{field}.max_chars", self.max_chars, rule, f"{max(self.min_chars, 1)} or more, or none")

    def documents(self, field: str = "data.sources.0", dropped: Counter[str] | None = None) -> Iterator[str]:
        """Yield the text of each record that is wanted, in the order of the files and of the records in them.

        ``dropped`` counts the others by what left them out, such as ``lang == en`` or ``min_chars 200``: the first that
        did. Raise ``ConfigError`` naming ``field`` and the place (file and record) of whatever is not as it should be.
        """
        dropped = Counter() if dropped is None else dropped
        for place, record in self._records(field):
            refusal = next((str(f) for k, f in enumerate(self.where) if not self._accepts(k, record, place, field)), "")
            text = "" if refusal else self._text(record, place, field)
            if not refusal and len(text) < self.min_chars:
                refusal = f"min_chars {self.min_chars}"
            if self.max_chars is not None and len(text) > self.max_chars:
                refusal = f"max_chars {self.max_chars}"
            if refusal:
                dropped[refusal] += 1
            else:
                yield text

    def _records(self, field: str) -> Iterator[tuple[str, Any]]:
        """Yield the place of each record, in words, and the record: a dict, or its text if ``column`` is None."""
        raise NotImplementedError

    def _accepts(self, k: int, record: Any, place: str, field: str) -> bool:
        wanted = self.where[k]
        found = look_up(record, wanted.column, place, f"{field}.where.{k}.column")
        try:
            return wanted.accepts(found)
        except TypeError:
            rule = f"cannot be compared ({wanted.op}) with {wanted.column}, {kind(found)}, in {place}"
            raise ConfigError(f"{field}.where.{k}.value", wanted.value, rule) from None

    def _text(self, record: Any, place: str, field: str) -> str:
        text = record if self.column is None else look_up(record, self.column, place, f"{field}.column")
        if not isinstance(text, str):
            raise ConfigError(f"{field}.column", self.column, f"is {kind(text)}, not a text, in {place}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            rule = f"holds half a surrogate pair, which is not text: {place}"
            raise ConfigError(f"{field}.path", self.path, rule) from None
        return text


def parse_json(content: bytes, pattern: str, place: str, field: str) -> dict[str, Any]:
    """The JSON object in ``content``."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 alike
        raise ConfigError(f"{field}.path", pattern, f"holds what is not JSON: {place}: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{field}.path", pattern, f"holds {kind(record)} where a JSON object belongs: {place}")
    return record


def look_up(record: dict[str, Any], column: str, place: str, field: str) -> Any:
    """What ``record`` holds in ``column``; inside a null everything is null."""
    if column in record:
        return record[column]
    found: Any = record
    for name in str(column).split("."):
        if found is None:
            break
        if not isinstance(found, dict) or name not in found:
            raise missing(column, list(_names(record)), place, field)
        found = found[name]
    return found


def missing(column: str, names: Sequence[str], place: str, field: str) -> ConfigError:
    """The error for a column that is not there, or not once; it lists those there are."""
    if column in names:
        return ConfigError(field, column, f"is the name of several columns in {place}", "the name of one")
    legal = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return ConfigError(field, column, suggest(f"is missing in {place}", str(column), names), legal or "none")


def _names(record: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in islice(record.items(), _MOST_NAMES + 1):
        if isinstance(value, dict) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def kind(value: object) -> str:
    """The type of a value in words: only values of one kind are compared."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"


def check_weight(weight: float, field: str) -> None:
    """Raise ``ConfigError`` for a weight that is no share of a mixture."""
    if not (isinstance(weight, (int, float)) and 0 < weight <= sys.float_info.max):
        raise ConfigError(f"{field}.weight", weight, "cannot be a share of the mixture", "a finite number above 0")
