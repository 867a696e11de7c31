"""A config as plain data: checked, flattened, compared, written to JSON and read back equal.

A config is a tree of frozen dataclasses. A field is annotated with bool, int, float, str, Path, an enum, Literal, None,
a tuple of these, another dataclass, or a union. ``type_check`` refuses every other annotation, and values of another
type, so what passes can always be set by a flag (``jaxpar.overrides``) and read back from JSON.

In a union the class of a dataclass is data too. It goes by ``class_word``: ``AdamW`` for ``AdamWConfig``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from jaxpar.errors import ConfigError, JaxparError, did_you_mean

T = TypeVar("T")
Hint = Any  # an annotation, as `typing.get_type_hints` resolves it
SUPPORTED = "bool, int, float, str, Path, enum, Literal, None, tuple[...], a dataclass, or a union of these"


# Annotations


@functools.cache
def type_hints(cls: type) -> dict[str, Hint]:
    """The resolved annotations of a dataclass."""
    return typing.get_type_hints(cls)


def settable(config: Any) -> dict[str, dataclasses.Field]:
    """The fields of a dataclass (or of its instance) that its constructor takes, by name."""
    return {field.name: field for field in dataclasses.fields(config) if field.init}


def alternatives(hint: Hint) -> tuple[Hint, ...]:
    """The members of a union, or the annotation itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def element_hints(hint: Hint, length: int) -> list[Hint] | None:
    """One annotation per element of a tuple of that length, or None if the annotation allows no such tuple."""
    if typing.get_origin(hint) is not tuple:
        return None
    match typing.get_args(hint):
        case (element, types.EllipsisType()):
            return [element] * length
        case elements:
            return list(elements) if len(elements) == length else None


def is_dataclass(item: Any) -> bool:
    """Whether it is a dataclass or an instance of one; unlike the standard function, it narrows no static type."""
    return dataclasses.is_dataclass(item)


def is_enum(hint: Hint) -> bool:
    """Whether the annotation is an enum class."""
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def join(path: str, name: object) -> str:
    """The dotted path of a field or an element."""
    return f"{path}.{name}" if path else str(name)


# Words: how types and values are written for the user


def class_word(cls: type) -> str:
    """``AdamW`` for ``AdamWConfig``."""
    return cls.__name__.removesuffix("Config") or cls.__name__


def word(value: object) -> str:
    """A value as it is typed on the command line."""
    match value:
        case None | True | False:
            return str(value).lower()
        case enum.Enum():
            return value.name
        case tuple():
            return ",".join(map(word, value))
    return str(value)


def choices(hint: Hint) -> dict[str, Any]:
    """The values an annotation lists one by one (for a dataclass, the class), by word; empty for a type such as int."""
    if hint is bool:
        return {"true": True, "false": False}
    if hint is types.NoneType:
        return {"none": None}
    if typing.get_origin(hint) is Literal:
        return {word(choice): choice for choice in typing.get_args(hint)}
    if is_enum(hint):
        return {member.name: member for member in hint}
    if is_dataclass(hint):
        return {class_word(hint): hint}
    options = alternatives(hint)
    return {name: value for option in options for name, value in choices(option).items()} if len(options) > 1 else {}


def type_text(hint: Hint) -> str:
    """An annotation in words: ``int``, ``AdamW | SGD``, ``tuple[int, ...]``, ``float | none``."""
    options = alternatives(hint)
    if len(options) > 1:
        return " | ".join(map(type_text, options))
    if typing.get_origin(hint) is tuple:
        elements = ("..." if element is ... else type_text(element) for element in typing.get_args(hint))
        return f"tuple[{', '.join(elements)}]"
    return " | ".join(choices(hint)) or (hint.__name__ if isinstance(hint, type) else str(hint))


def is_not(hint: Hint) -> str:
    """The rule of a wrong value: ``is not an int``, ``is not one of the choices or a tuple[int, ...]``."""

    def noun(option: Hint) -> str:
        if option is types.NoneType:
            return "none"
        if typing.get_origin(option) is Literal or is_enum(option):
            return "one of the choices"
        name = option.__name__ if isinstance(option, type) else type_text(option)
        return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"

    return "is not " + " or ".join(dict.fromkeys(map(noun, alternatives(hint))))


def suggest(rule: str, name: str, known: Iterable[str]) -> str:
    """The rule, and the closest known name as a second sentence."""
    suggestion = did_you_mean(name, known)
    return f"{rule}.{suggestion}" if suggestion else rule


def wrong_value(path: str, value: object, hint: Hint) -> ConfigError:
    """The error for a value of another type; the legal part is left out where the rule already says it."""
    return wrong_text(path, repr(value), hint)


def wrong_text(path: str, shown: str, hint: Hint) -> ConfigError:
    """The same for a value that is still text."""
    rule, legal = is_not(hint), type_text(hint)
    says_all = rule.endswith(f" {legal}")
    return ConfigError(path or "config", shown, suggest(rule, shown, choices(hint)), None if says_all else legal)


# Checking


def type_check(config: Any) -> None:
    """Checks every value against its annotation.

    An int passes for a float, a bool does not pass for an int, nan passes for nothing. A dataclass must be exactly of
    the annotated class: a subclass has to be named in a union.

    Raises:
        ConfigError: for the first value that does not match, such as ``optim.learning_rate: 'x' is not a float``.
        JaxparError: for an annotation that no config can have.
    """
    _check(config, type(config), "")


def _check(value: Any, hint: Hint, path: str) -> None:
    options = alternatives(hint)
    if len(options) > 1:
        _first_that_fits(value, hint, path, _check)
    elif is_dataclass(hint):
        annotations = type_hints(hint)
        if type(value) is not hint:
            raise wrong_value(path, value, hint)
        for name in settable(hint):
            _check(getattr(value, name), annotations[name], join(path, name))
    elif typing.get_origin(hint) is tuple:
        elements = element_hints(hint, len(value)) if isinstance(value, tuple) else None
        if elements is None:
            raise wrong_value(path, value, hint)
        for index, (item, element) in enumerate(zip(value, elements, strict=True)):
            _check(item, element, join(path, index))
    elif not _is_plain(value, hint, path):
        raise wrong_value(path, value, hint)


def _is_plain(value: Any, hint: Hint, path: str) -> bool:
    """Whether a value that holds no other values is of its type."""
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if hint is float:
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(path, "nan", "is not a number", "a float or inf")
        return type(value) is int or isinstance(value, float)
    if hint is Path or is_enum(hint):
        return isinstance(value, hint)
    if hint in (bool, int, str, types.NoneType):
        return type(value) is hint
    # not a ConfigError: in a union the next member must not be tried
    raise JaxparError(f"{path}: {type_text(hint)} is an annotation that a config cannot have (legal: {SUPPORTED})")


def _first_that_fits(value: Any, union: Hint, path: str, convert: Callable[[Any, Hint, str], T]) -> T:
    """The conversion for the first member of a union that succeeds.

    Where none does, and one member alone fails further inside the value, its error says more than "none fits".
    """
    inside = []
    for option in alternatives(union):
        try:
            return convert(value, option, path)
        except ConfigError as error:
            if error.field != path:
                inside.append(error)
    raise inside[0] if len(inside) == 1 else wrong_value(path, value, union)


def member(value: object, hint: Hint) -> Hint:
    """The member of a union that a value belongs to, or the annotation itself."""
    for option in alternatives(hint):
        with contextlib.suppress(ConfigError):
            _check(value, option, "")
            return option
    return hint


def elements_of(value: tuple, hint: Hint) -> list[Hint]:
    """One annotation per element, whatever the annotation; ``object`` where it does not fit the tuple."""
    return element_hints(member(value, hint), len(value)) or [object] * len(value)


# Flattening


class Leaf(NamedTuple):
    """A value at the end of a dotted path, with the dataclass and the field it belongs to."""

    path: str
    hint: Hint
    value: object
    owner: Any
    name: str


def walk(config: Any, indexed: bool = True) -> Iterator[Leaf]:
    """Every leaf of a config, in the order of the fields.

    A dataclass in a union is preceded by a leaf for its class, whose path is that of the union and whose value is the
    class word. A tuple is one leaf per element; with ``indexed=False`` only a tuple that holds dataclasses is.
    """
    return _walk(Leaf("", type(config), config, type(config), ""), indexed)


def _walk(at: Leaf, indexed: bool) -> Iterator[Leaf]:
    value = at.value
    if is_dataclass(value):
        cls: Any = type(value)
        if len(alternatives(at.hint)) > 1:
            yield at._replace(value=class_word(cls))
        for name in settable(value):
            yield from _walk(Leaf(join(at.path, name), type_hints(cls)[name], getattr(value, name), cls, name), indexed)
    elif isinstance(value, tuple) and value and (indexed or any(map(is_dataclass, value))):
        for index, (item, element) in enumerate(zip(value, elements_of(value, at.hint), strict=True)):
            yield from _walk(at._replace(path=join(at.path, index), hint=element, value=item), indexed)
    else:
        yield at


def flatten(config: Any) -> dict[str, object]:
    """``{"optim": "AdamW", "optim.learning_rate": 0.001, "data.sources.0.path": ...}``: see `walk`.

    The paths are those of the command-line flags. An empty tuple is a leaf.
    """
    return {leaf.path: leaf.value for leaf in walk(config)}


def difference(a: Any, b: Any) -> dict[str, tuple[object, object]]:
    """The leaves that differ, with both values; ``dataclasses.MISSING`` stands for a leaf that one side lacks."""
    left, right = flatten(a), flatten(b)
    pairs = {path: (left.get(path, dataclasses.MISSING), right.get(path, dataclasses.MISSING)) for path in left | right}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


# JSON


def to_json(config: Any) -> dict[str, Any]:
    """A config as nested dicts and lists that ``from_json`` reads back equal.

    A dataclass in a union carries ``"type"``, its class word. A path is its text, an enum member its name, and an
    infinite float stays a float, which ``json`` writes as ``Infinity``.

    Raises:
        ConfigError: for a value that ``type_check`` refuses, or that would not be read back the same, because two
            members of a union share one JSON form.
    """
    type_check(config)
    data = _encode(config, type(config), "")
    for path, (value, back) in difference(config, from_json(type(config), data)).items():
        raise ConfigError(path, repr(value), f"would be read back from JSON as {back!r}")
    return data


def _encode(value: Any, hint: Hint, path: str) -> Any:
    if is_dataclass(value):
        cls: Any = type(value)
        tag = {"type": class_word(cls)} if len(alternatives(hint)) > 1 else {}
        names = settable(value)
        if tag and "type" in names:
            raise ConfigError(
                join(path, "type"), repr(value.type), "has a name that JSON keeps for the class in a union"
            )
        return tag | {name: _encode(getattr(value, name), type_hints(cls)[name], join(path, name)) for name in names}
    if isinstance(value, tuple):
        parts = enumerate(zip(value, elements_of(value, hint), strict=True))
        return [_encode(item, element, join(path, index)) for index, (item, element) in parts]
    if isinstance(value, enum.Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value


def from_json(cls: type[T], data: dict[str, Any]) -> T:
    """The config that ``to_json`` wrote. A key that is absent takes the default of its field.

    Raises:
        ConfigError: for an unknown key, a missing one without a default, or a value of another type.
    """
    return _decode(data, cls, "")


def _decode(data: Any, hint: Hint, path: str) -> Any:
    options = alternatives(hint)
    if len(options) > 1:
        if not isinstance(data, dict):
            return _first_that_fits(data, hint, path, _decode)
        classes = {class_word(option): option for option in options if is_dataclass(option)}
        name = str(data.get("type"))
        if name not in classes:
            raise ConfigError(join(path, "type"), name, "is not one of the choices", ", ".join(classes))
        return _decode({key: item for key, item in data.items() if key != "type"}, classes[name], path)
    if is_dataclass(hint):
        if not isinstance(data, dict):
            raise wrong_value(path, data, hint)
        return _decode_fields(data, hint, path)
    if typing.get_origin(hint) is tuple:
        elements = element_hints(hint, len(data)) if isinstance(data, list) else None
        if elements is None:
            raise wrong_value(path, data, hint)
        return tuple(_decode(item, at, join(path, i)) for i, (item, at) in enumerate(zip(data, elements, strict=True)))
    if hint is Path and isinstance(data, str):
        return Path(data)
    if is_enum(hint) and isinstance(data, str) and data in hint.__members__:
        return hint[data]
    _check(data, hint, path)
    return data


def _decode_fields(data: dict[str, Any], cls: Any, path: str) -> Any:
    names = settable(cls)
    for key in data:
        if key not in names:
            rule = suggest("is the value of an unknown field", key, names)
            raise ConfigError(join(path, key), repr(data[key]), rule, ", ".join(names))
    refuse_missing(cls, data, path)
    return cls(**{name: _decode(item, type_hints(cls)[name], join(path, name)) for name, item in data.items()})


def refuse_missing(cls: Any, given: Collection[str], path: str) -> None:
    """Raises ConfigError for a field that is neither given nor has a default."""
    for name, field in settable(cls).items():
        if name not in given and field.default is field.default_factory is dataclasses.MISSING:
            rule = "has no default for this field, give it a value"
            raise ConfigError(join(path, name), class_word(cls), rule, type_text(type_hints(cls)[name]))
