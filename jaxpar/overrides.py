"""A config from the user: the file that makes it, the flags that change it, and the help that explains it.

    config = apply_overrides(load_config("quickstart"), ["--optim", "sgd", "--optim.learning_rate=1e-2"])

Standard library only, and generic over the nested dataclasses that ``jaxpar.serialize`` describes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import math
import re
import sys
import textwrap
import tokenize
import traceback
import types
import typing
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from jaxpar.errors import ConfigError, JaxparError
from jaxpar.serialize import (
    Hint,
    alternatives,
    choices,
    class_word,
    element_hints,
    elements_of,
    is_dataclass,
    join,
    refuse_missing,
    settable,
    suggest,
    type_hints,
    type_text,
    walk,
    word,
    wrong_text,
)

T = TypeVar("T")
Settings = dict[tuple[str, ...], str | None]  # the text of each flag by its path, None for a flag without a value
REPOSITORY = Path(__file__).resolve().parent.parent


# Config files


def load_config(name_or_path: str, variant: str = "config") -> object:
    """Runs the function ``variant`` of a config file and returns its dataclass.

    A bare name means ``configs/NAME.py`` here or in the repository. A file inside a ``configs`` folder is imported as
    ``configs.NAME``, so it is one module with what ``from configs.NAME import config`` gives to another config.

    Raises:
        ConfigError: in one line, if there is no such file or function, if the file fails (with file, line, exception
            and message), or if what it returns is not a dataclass. A JaxparError from the file passes unchanged.
    """
    path = _find(name_or_path)
    try:
        module = _import(path)
        function = getattr(module, variant, None)
        if not callable(function):
            found = [name for name, item in vars(module).items() if inspect.isfunction(item) and name[0] != "_"]
            raise ConfigError("config", name_or_path, f"has no function {variant}()", ", ".join(found) or None)
        config = function()
    except JaxparError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()) or "no message"
        rule = f"raised {type(error).__name__} at {_place(error, path)}: {message}"
        raise ConfigError("config", name_or_path, rule) from error
    if not is_dataclass(config) or isinstance(config, type):
        rule = f"returned {type(config).__name__} from {variant}(), which is not a dataclass"
        raise ConfigError("config", name_or_path, rule)
    return config


def _find(name: str) -> Path:
    folders = [Path("configs"), REPOSITORY / "configs"]
    candidates = [Path(name)] if name.endswith(".py") else [folder / f"{name}.py" for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    known = sorted({file.stem for folder in folders for file in folder.glob("[!_]*.py")})
    rule = suggest("is not a config file or a known name", Path(name).stem, known)
    raise ConfigError("config", name, rule, ", ".join([*known, "a path to a .py file"]))


def _import(path: Path) -> types.ModuleType:
    """The module of a config file, named by its path from the folder that holds ``configs``."""
    root = next((folder for folder in path.parents if (folder / "configs").is_dir()), path.parent)
    sys.path[:] = [str(root), *(entry for entry in sys.path if entry != str(root))]
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    for name, module in list(sys.modules.items()):  # `configs.base` is the one beside this file, not an earlier one
        if name.startswith("configs.") and not Path(module.__file__ or "").is_relative_to(root / "configs"):
            del sys.modules[name]

    name = ".".join(path.relative_to(root).with_suffix("").parts)
    loaded: Any = sys.modules.get(name)
    if getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:  # a module of another kind, which keeps its name
        name = f"{name}@{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(error: BaseException, path: Path) -> str:
    """``FILE:LINE`` of the innermost config file that an exception passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path) or Path(frame.filename).parent.name == "configs"
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(path)


# Flags


def apply_overrides(config: T, arguments: list[str]) -> T:
    """The config with typed flags applied; the order of the flags does not matter.

    ``--a.b VALUE`` or ``--a.b=VALUE``, ``--flag``, ``--no-flag``; ``none`` for None, ``1,2,3`` for a tuple,
    ``--a.0.b VALUE`` inside one. In a union of dataclasses ``--optim sgd`` takes the defaults of ``SGDConfig`` (a class
    that is already there keeps its settings), then ``--optim.momentum 0.9`` applies to it. Every changed dataclass is
    built once, innermost first.

    Raises:
        ConfigError: for an unknown field, a value of another type, a missing value, a flag given twice, or an argument
            that belongs to no flag.
    """
    return _rebuild(config, type(config), _read(config, arguments), "", config)


def _read(config: Any, arguments: list[str]) -> Settings:
    settings: Settings = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError("arguments", argument, "does not belong to a flag", "--field value or --field=value")
        text: str | None = value
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else None
        keys = name.replace("-", "_").split(".")
        first = keys[0].removeprefix("no_")
        if text is None and keys[0] not in settable(config) and first in settable(config):
            keys = [first, *keys[1:]]  # --no-model.bias is --model.no-bias
            keys[-1] = f"no_{keys[-1]}"
        if tuple(keys) in settings:
            raise ConfigError(".".join(keys), argument, "is given twice")
        settings[tuple(keys)] = text
    return settings


def _rebuild(value: Any, hint: Hint, settings: Settings, path: str, root: Any) -> Any:
    """A value with the settings at and below its path; a class stands for an instance with its defaults."""
    if () in settings:
        chosen = _parse(settings[()], hint, path)
        value = value if type(value) is chosen else chosen
        settings = {keys: text for keys, text in settings.items() if keys}
    if isinstance(value, tuple):
        known = [str(index) for index in range(len(value))]
        _refuse_unknown(settings, known, f"a tuple of {len(value)}", hint, path, root)
        parts = zip(known, value, elements_of(value, hint), strict=True)
        return tuple(_rebuild(item, at, _below(settings, key), join(path, key), root) for key, item, at in parts)
    if not is_dataclass(value):
        _refuse_unknown(settings, [], word(value), hint, path, root)
        return value
    if not settings and not isinstance(value, type):
        return value

    fresh = isinstance(value, type)
    cls: Any = value if fresh else type(value)
    fields = settable(cls)
    settings = _positive(settings, cls, path)
    _refuse_unknown(settings, list(fields), class_word(cls), hint, path, root)
    changes = {}
    for name in dict.fromkeys(keys[0] for keys in settings):
        before = _default(fields[name]) if fresh else getattr(value, name)
        changes[name] = _rebuild(before, type_hints(cls)[name], _below(settings, name), join(path, name), root)
    if not fresh:
        return dataclasses.replace(value, **changes)
    refuse_missing(cls, changes, path)
    return cls(**changes)


def _below(settings: Settings, name: str) -> Settings:
    return {keys[1:]: text for keys, text in settings.items() if keys[:1] == (name,)}


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _positive(settings: Settings, cls: Any, path: str) -> Settings:
    """The settings with ``no_flag`` written as ``flag`` false, where ``flag`` is a bool field of the class."""
    result = dict(settings)
    for keys, text in settings.items():
        name = keys[0].removeprefix("no_")
        is_negative = len(keys) == 1 and text is None and keys[0] not in settable(cls) and name in settable(cls)
        if is_negative and bool in alternatives(type_hints(cls)[name]):
            if (name,) in settings:
                raise ConfigError(join(path, name), f"--{join(path, keys[0])}", "is given twice")
            del result[keys]
            result[(name,)] = "false"
    return result


def _refuse_unknown(settings: Settings, known: list[str], owner: str, hint: Hint, path: str, root: Any) -> None:
    """Raises ConfigError for the first setting that is at or below none of the known names."""
    for keys, text in settings.items():
        if keys[0] in known:
            continue
        paths = {leaf.path.rpartition(".")[2]: leaf.path for leaf in reversed(list(walk(root, indexed=False)))}
        paths |= {name: join(path, name) for name in known}
        paths = {name: full for name, full in paths.items() if full != join(path, ".".join(keys))}
        close = get_close_matches(keys[-1], paths, n=1)
        rule = f"sets an unknown field of {owner}"
        if known:
            rule = suggest(rule, paths[close[0]], paths.values()) if close else suggest(rule, keys[0], known)
        field = join(path, ".".join(keys))
        legal = ", ".join(known) or f"--{path} {type_text(hint)}"
        raise ConfigError(field, f"--{field}" if text is None else text, rule, legal)


def _parse(text: str | None, hint: Hint, path: str) -> Any:
    """The value of a text, or the class that it names among dataclasses."""
    options = alternatives(hint)
    if text is None:
        if bool in options:
            return True
        raise ConfigError(path, f"--{path}", "needs a value", type_text(hint))
    if len(options) == 1:
        if is_dataclass(hint):
            legal = ", ".join(f"--{join(path, name)}" for name in settable(hint))
            raise ConfigError(path, text, "cannot be the value of a group of fields, set one of them", legal)
        return _parse_as(text, hint, path)

    def order(option: Hint) -> int:  # what reads fewest texts comes first; a tuple needs a comma to come before str
        if typing.get_origin(option) is tuple:
            return 0 if "," in text else 3
        return 2 if option is str else 1

    for option in sorted(options, key=order):
        with contextlib.suppress(ConfigError):
            return _parse_as(text, option, path)
    raise wrong_text(path, text, hint)


def _parse_as(text: str, hint: Hint, path: str) -> Any:
    """The value of a text for an annotation that is not a union."""
    wrong = wrong_text(path, text, hint)
    if hint is str:
        return text
    if hint is Path:
        return Path(text)
    if hint is int:
        return _integer(text, wrong)
    if hint is float:
        return _float(text, wrong)
    if typing.get_origin(hint) is tuple:
        pieces = [piece.strip() for piece in text.removesuffix(",").split(",")] if text else []
        elements = element_hints(hint, len(pieces))
        if elements is None or any(typing.get_origin(element) is tuple for element in elements):
            raise wrong  # in the second case commas could separate either level
        parts = enumerate(zip(pieces, elements, strict=True))
        return tuple(_parse(piece, element, join(path, index)) for index, (piece, element) in parts)
    listed = choices(hint)
    folded = {_fold(name): value for name, value in reversed(listed.items())}
    if text in listed:
        return listed[text]
    if _fold(text) in folded:
        return folded[_fold(text)]
    raise wrong


def _fold(name: str) -> str:
    """What stays of a name without case, hyphens, underscores and the suffix ``Config``."""
    return re.sub(r"(?<=[a-z])[-_](?=[a-z])", "", name.lower()).removesuffix("config")


def _integer(text: str, wrong: ConfigError) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        number = float(text)
        if number.is_integer() and abs(number) <= 2**53:  # beyond, a float is not exact
            return int(number)
    raise wrong


def _float(text: str, wrong: ConfigError) -> float:
    try:
        number = float(text)
    except ValueError:
        raise wrong from None
    if math.isnan(number):
        raise ConfigError(wrong.field, text, "is not a number", "a float or inf")
    if math.isinf(number) and "inf" not in text.lower():
        raise ConfigError(wrong.field, text, "is too large for a float", "inf for no bound")
    return number


# Help


def describe(config: Any) -> list[tuple[str, str, str, str]]:
    """One row per flag: its path, its type and its value in words, and the help written beside the field.

    The help of a field is the string literal under it, or the comment at the end of its line.
    """
    return [
        (leaf.path, type_text(leaf.hint), word(leaf.value), _help(leaf.owner).get(leaf.name, ""))
        for leaf in walk(config, indexed=False)
    ]


@functools.cache
def _help(cls: type) -> dict[str, str]:
    """The help of each field, inherited ones included; nothing where the source cannot be read."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            found |= _help_in(textwrap.dedent(inspect.getsource(owner))) if is_dataclass(owner) else {}
    return found


def _help_in(source: str) -> dict[str, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef), source
    found = {}
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = comments.get(statement.end_lineno or 0, "")
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                text = after.value.value
            if text:
                found[statement.target.id] = " ".join(text.split())
    return found
