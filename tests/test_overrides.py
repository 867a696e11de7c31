"""Config files, typed flags, type checks, JSON and help, on a small config tree with every kind of field."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar import overrides
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.overrides import apply_overrides, describe, load_config
from jaxpar.serialize import difference, flatten, from_json, to_json, type_check, word


class Remat(enum.Enum):
    NONE = 0
    FULL_BLOCK = 1


@dataclass(frozen=True)
class AdamWConfig:
    learning_rate: float = 1e-3  # peak, after warm-up
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first
    and second moment."""
    schedule: Literal["cosine", "linear", "warmup-stable"] = "cosine"
    warmup: int | float = field(
        default=100,
    )  # steps, or a fraction of them


@dataclass(frozen=True)
class SGDConfig:
    learning_rate: float = 0.1
    momentum: float | None = None
    nesterov: bool = False


@dataclass(frozen=True)
class TextSource:
    path: Path
    weight: float = 1.0


@dataclass(frozen=True)
class SyntheticSource:
    vocab: int = 256


@dataclass(frozen=True)
class EMAConfig:
    decay: float = 0.999


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 2
    tie_embeddings: bool = True
    no_bias: bool = True
    remat: Remat = Remat.NONE
    window: int | Literal["full"] | None = None
    built: list[ModelConfig] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self):
        BUILT.append(self)
        if self.layers < 1:
            raise ConfigError("model.layers", self.layers, "is not positive", "1, 2, ...")


BUILT: list[ModelConfig] = []  # every ModelConfig that ran __post_init__


@dataclass(frozen=True)
class DataConfig:
    sources: tuple[TextSource | SyntheticSource, ...] = (SyntheticSource(),)
    shape: tuple[int, ...] = ()
    axes: str | tuple[str, ...] | None = None
    names: tuple[str, ...] = ("a", "b")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: AdamWConfig | SGDConfig = field(default_factory=AdamWConfig)
    data: DataConfig = field(default_factory=DataConfig)
    ema: EMAConfig | None = None
    name: str = "run"
    seed: int = 0
    verbose: bool = False


def with_flags(*arguments: str, config: Config | None = None) -> Config:
    return apply_overrides(config or Config(), list(arguments))


def refusal(function, *arguments) -> str:
    """The message of the ConfigError, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Flags


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ("--optim.learning_rate 1e-4", "optim.learning_rate", 1e-4),
        ("--optim.learning_rate=3", "optim.learning_rate", 3.0),
        ("--optim.learning-rate -1", "optim.learning_rate", -1.0),
        ("--optim.learning_rate inf", "optim.learning_rate", math.inf),
        ("--optim.warmup 5", "optim.warmup", 5),
        ("--optim.warmup 0.1", "optim.warmup", 0.1),
        ("--seed 1_000", "seed", 1000),
        ("--seed 1e6", "seed", 1_000_000),
        ("--seed -3", "seed", -3),
        ("--name=", "name", ""),
        ("--name=a=b", "name", "a=b"),
        ("--name=--x", "name", "--x"),
        ("--verbose", "verbose", True),
        ("--verbose TRUE", "verbose", True),
        ("--model.tie_embeddings false", "model.tie_embeddings", False),
        ("--model.no-tie-embeddings", "model.tie_embeddings", False),
        ("--no-model.tie_embeddings", "model.tie_embeddings", False),
        ("--model.no_bias false", "model.no_bias", False),
        ("--model.no-bias", "model.no_bias", True),
        ("--model.no-no-bias", "model.no_bias", False),
        ("--model.remat full-block", "model.remat", Remat.FULL_BLOCK),
        ("--model.window 128", "model.window", 128),
        ("--model.window full", "model.window", "full"),
        ("--optim.schedule warmup_stable", "optim.schedule", "warmup-stable"),
        ("--optim.betas.1 0.99", "optim.betas.1", 0.99),
        ("--data.shape 1,2,3", "data.shape.2", 3),
        ("--data.shape 4", "data.shape.0", 4),
        ("--data.shape=", "data.shape", ()),
        ("--data.names.1 x,y", "data.names.1", "x,y"),
        ("--data.axes data", "data.axes", "data"),
        ("--data.axes data,fsdp", "data.axes.1", "fsdp"),
        ("--data.axes data,", "data.axes.0", "data"),
        ("--data.names c,d --data.names.0 e", "data.names.0", "e"),
        ("--data.names.0 e --data.names c,d", "data.names.0", "e"),
        ("--optim sgd", "optim", "SGD"),
        ("--optim SGDConfig", "optim", "SGD"),
        ("--optim.momentum 0.9 --optim sgd", "optim.momentum", 0.9),
        ("--optim sgd --optim.nesterov", "optim.nesterov", True),
        ("--optim sgd --optim.momentum none", "optim.momentum", None),
        ("--ema ema --ema.decay 0.5", "ema.decay", 0.5),
        ("--data.sources.0.vocab 7", "data.sources.0.vocab", 7),
        ("--data.sources.0 text_source --data.sources.0.path x/y", "data.sources.0.path", Path("x/y")),
        ("--data.sources TextSource,SyntheticSource --data.sources.0.path x", "data.sources.1.vocab", 256),
    ],
)
def test_flag(arguments, path, value):
    config = with_flags(*arguments.split(" "))
    found = flatten(config)[path]
    assert found == value
    assert type(found) is type(value)
    type_check(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seed x", "seed: x is not an int"),
        ("--seed 1.5", "seed: 1.5 is not an int"),
        ("--seed 1e30", "seed: 1e30 is not an int"),
        ("--seed inf", "seed: inf is not an int"),
        ("--seed true", "seed: true is not an int"),
        ("--optim.learning_rate fast", "optim.learning_rate: fast is not a float"),
        ("--optim.learning_rate NaN", "optim.learning_rate: NaN is not a number (legal: a float or inf)"),
        (
            "--optim.learning_rate 1e999",
            "optim.learning_rate: 1e999 is too large for a float (legal: inf for no bound)",
        ),
        ("--verbose 1", "verbose: 1 is not a bool (legal: true | false)"),
        ("--seed", "seed: --seed needs a value (legal: int)"),
        ("--seed --verbose", "seed: --seed needs a value (legal: int)"),
        ("--optim", "optim: --optim needs a value (legal: AdamW | SGD)"),
        (
            "--optim.schedule cosin",
            "optim.schedule: cosin is not one of the choices. Did you mean cosine? "
            "(legal: cosine | linear | warmup-stable)",
        ),
        ("--model.remat all", "model.remat: all is not one of the choices (legal: NONE | FULL_BLOCK)"),
        (
            "--model.window x",
            "model.window: x is not an int or one of the choices or none (legal: int | full | none)",
        ),
        ("--optim rmsprop", "optim: rmsprop is not an AdamWConfig or a SGDConfig (legal: AdamW | SGD)"),
        ("--no-optim", "no_optim: --no_optim sets an unknown field of Config. Did you mean optim?"),
        ("--no-name", "no_name: --no_name sets an unknown field of Config. Did you mean name?"),
        ("--optim.betas 1", "optim.betas: 1 is not a tuple[float, float]"),
        ("--optim.betas 1,x", "optim.betas.1: x is not a float"),
        (
            "--optim.betas.2 1",
            "optim.betas.2: 1 sets an unknown field of a tuple of 2 (legal: 0, 1)",
        ),
        ("--data.names.00 x", "data.names.00: x sets an unknown field of a tuple of 2. Did you mean data.names.0?"),
        ("--data.shape.0 1", "data.shape.0: 1 sets an unknown field of a tuple of 0 (legal: --data.shape tuple[int"),
        (
            "--model 3",
            "model: 3 cannot be the value of a group of fields, set one of them (legal: --model.layers, "
            "--model.tie_embeddings, --model.no_bias, --model.remat, --model.window)",
        ),
        (
            "--learning_rate 1e-3",
            "learning_rate: 1e-3 sets an unknown field of Config. Did you mean optim.learning_rate? "
            "(legal: model, optim, data, ema, name, seed, verbose)",
        ),
        (
            "--optm.learning_rate 1",
            "optm.learning_rate: 1 sets an unknown field of Config. Did you mean optim.learning_rate?",
        ),
        ("--modle.zzzzzz 1", "modle.zzzzzz: 1 sets an unknown field of Config. Did you mean model?"),
        ("--model.layer 1", "model.layer: 1 sets an unknown field of Model. Did you mean model.layers?"),
        ("--optim.momentum 1", "optim.momentum: 1 sets an unknown field of AdamW (legal: learning_rate, betas, "),
        ("--model.built 1", "model.built: 1 sets an unknown field of Model"),
        ("--seed.x 1", "seed.x: 1 sets an unknown field of 0 (legal: --seed int)"),
        ("--ema.decay 1", "ema.decay: 1 sets an unknown field of none (legal: --ema EMA | none)"),
        ("--seed 1 --seed=2", "seed: --seed=2 is given twice"),
        (
            "--optim.learning-rate 1 --optim.learning_rate 1",
            "optim.learning_rate: --optim.learning_rate is given twice",
        ),
        ("--verbose --no-verbose", "verbose: --no_verbose is given twice"),
        ("--no-verbose --verbose", "verbose: --no_verbose is given twice"),
        ("seed=1", "arguments: seed=1 does not belong to a flag (legal: --field value or --field=value)"),
        ("--seed 1 2", "arguments: 2 does not belong to a flag"),
        ("-s 1", "arguments: -s does not belong to a flag"),
        ("--", "arguments: -- does not belong to a flag"),
        ("--=1", "arguments: --=1 does not belong to a flag"),
        ("--.seed 1", ".seed: 1 sets an unknown field of Config"),
        (
            "--data.sources.0 text_source",
            "data.sources.0.path: TextSource has no default for this field, give it a value (legal: Path)",
        ),
        ("--model.layers 0", "model.layers: 0 is not positive"),
    ],
)
def test_refused_flag(arguments, message):
    assert message in refusal(with_flags, *arguments.split(" "))


def test_same_class_keeps_its_settings_and_another_takes_its_defaults():
    config = Config(optim=AdamWConfig(learning_rate=5.0))
    assert with_flags("--optim", "adamw", config=config) == config
    assert with_flags("--optim", "sgd", config=config).optim == SGDConfig()


def test_each_changed_dataclass_is_built_once():
    config = Config()
    BUILT.clear()
    changed = with_flags("--model.layers", "3", "--model.window", "1", "--seed", "1", config=config)
    assert [changed.model] == BUILT
    assert changed.data is config.data


def test_no_flags_change_nothing():
    config = Config()
    assert with_flags(config=config) is config


# Data: check, flatten, difference, JSON


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(optim=AdamWConfig(learning_rate="x")), "optim.learning_rate: 'x' is not a float"),
        (Config(optim=AdamWConfig(learning_rate=math.nan)), "optim.learning_rate: nan is not a number"),
        (Config(optim=AdamWConfig(learning_rate=True)), "optim.learning_rate: True is not a float"),
        (Config(optim=EMAConfig()), "optim: EMAConfig(decay=0.999) is not an AdamWConfig or a SGDConfig (legal: AdamW"),
        (Config(optim=AdamWConfig(betas=(1.0,))), "optim.betas: (1.0,) is not a tuple[float, float]"),
        (Config(optim=AdamWConfig(betas=[1.0, 2.0])), "optim.betas: [1.0, 2.0] is not a tuple[float, float]"),
        (Config(optim=AdamWConfig(schedule="cos")), "optim.schedule: 'cos' is not one of the choices"),
        (Config(seed=True), "seed: True is not an int"),
        (Config(seed=1.0), "seed: 1.0 is not an int"),
        (Config(name=None), "name: None is not a str"),
        (Config(verbose=1), "verbose: 1 is not a bool (legal: true | false)"),
        (Config(model=ModelConfig(remat=1)), "model.remat: 1 is not one of the choices (legal: NONE | FULL_BLOCK)"),
        (Config(model=ModelConfig(window=1.5)), "model.window: 1.5 is not an int or one of the choices or none"),
        (Config(data=DataConfig(sources=(TextSource("x"),))), "data.sources.0.path: 'x' is not a Path"),
        (Config(data=DataConfig(axes=("a", 1))), "data.axes.1: 1 is not a str"),
        (Config(model=EMAConfig()), "model: EMAConfig(decay=0.999) is not a ModelConfig (legal: Model)"),
    ],
)
def test_type_check_refuses(config, message):
    assert message in refusal(type_check, config)
    assert refusal(to_json, config)


def test_type_check_accepts_ints_for_floats():
    type_check(Config(optim=AdamWConfig(learning_rate=1, betas=(0, 1))))


@pytest.mark.parametrize("annotation", [dict, list[int], tuple, object, dict[str, int], dict[str, int] | None])
def test_unsupported_annotation(annotation):
    made = dataclasses.make_dataclass("Made", [("table", annotation, None)], frozen=True)
    with pytest.raises(
        JaxparError, match=r"^table: .* is an annotation that a config cannot have \(legal: bool, int, "
    ):
        type_check(made())


def test_flatten_and_difference():
    config = Config(optim=SGDConfig(), data=DataConfig(sources=(TextSource(Path("x")), SyntheticSource())))
    flat = flatten(config)
    assert list(flat)[:6] == [
        "model.layers",
        "model.tie_embeddings",
        "model.no_bias",
        "model.remat",
        "model.window",
        "optim",
    ]
    assert (flat["optim"], flat["data.sources.0"], flat["data.sources.0.path"]) == ("SGD", "TextSource", Path("x"))
    assert (flat["data.shape"], flat["ema"], flat["data.names.1"]) == ((), None, "b")
    assert difference(config, config) == {}
    missing = dataclasses.MISSING
    assert difference(Config(), Config(seed=1, ema=EMAConfig(), data=DataConfig(names=("a",)))) == {
        "data.names.1": ("b", missing),
        "ema": (None, "EMA"),
        "seed": (0, 1),
        "ema.decay": (missing, 0.999),
    }
    assert difference(Config(), Config(optim=SGDConfig(learning_rate=1e-3)))["optim"] == ("AdamW", "SGD")


def test_json_form():
    data = to_json(Config(data=DataConfig(sources=(TextSource(Path("x/y")),), axes=("a",))))
    assert data["optim"] == {
        "type": "AdamW",
        "learning_rate": 1e-3,
        "betas": [0.9, 0.95],
        "schedule": "cosine",
        "warmup": 100,
    }
    assert data["data"]["sources"] == [{"type": "TextSource", "path": "x/y", "weight": 1.0}]
    assert "type" not in data["model"] and "built" not in data["model"]
    assert data["model"]["remat"] == "NONE"
    assert from_json(Config, {"seed": 3}) == Config(seed=3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sed": 1}, "sed: 1 is the value of an unknown field. Did you mean seed? (legal: model, optim, "),
        ({"model": {"layer": 1}}, "model.layer: 1 is the value of an unknown field. Did you mean layers?"),
        ({"model": {"built": []}}, "model.built: [] is the value of an unknown field"),
        ({"model": 3}, "model: 3 is not a ModelConfig (legal: Model)"),
        ({"seed": "1"}, "seed: '1' is not an int"),
        ({"optim": {"learning_rate": 1.0}}, "optim.type: None is not one of the choices (legal: AdamW, SGD)"),
        ({"optim": {"type": "Adam"}}, "optim.type: Adam is not one of the choices (legal: AdamW, SGD)"),
        ({"optim": {"type": "SGD", "betas": [1, 2]}}, "optim.betas: [1, 2] is the value of an unknown field"),
        ({"optim": {"type": "AdamW", "betas": [1]}}, "optim.betas: [1] is not a tuple[float, float]"),
        ({"optim": {"type": "AdamW", "betas": 1}}, "optim.betas: 1 is not a tuple[float, float]"),
        ({"optim": "AdamW"}, "optim: 'AdamW' is not an AdamWConfig or a SGDConfig. Did you mean AdamW?"),
        ({"model": {"remat": "none"}}, "model.remat: 'none' is not one of the choices (legal: NONE | FULL_BLOCK)"),
        ({"model": {"remat": [1]}}, "model.remat: [1] is not one of the choices"),
        ({"data": {"sources": [{"type": "TextSource"}]}}, "data.sources.0.path: TextSource has no default for this"),
        ({"data": {"axes": ["a", 1]}}, "data.axes.1: 1 is not a str"),
        ([1], "config: [1] is not a Config"),
    ],
)
def test_from_json_refuses(data, message):
    assert message in refusal(from_json, Config, data)


@dataclass(frozen=True)
class Ambiguous:
    path: Path | str = "x"


@dataclass(frozen=True)
class Typed:
    type: str = "x"


@dataclass(frozen=True)
class Reserved:
    part: Typed | None = None


def test_to_json_refuses_what_it_could_not_read_back():
    assert refusal(to_json, Ambiguous()).startswith("path: 'x' would be read back from JSON as ")
    assert to_json(Ambiguous(Path("x"))) == {"path": "x"}
    assert refusal(to_json, Reserved(Typed())).startswith("part.type: 'x' has a name that JSON keeps for the class")


words = st.text("abcdefgh_-./", min_size=1, max_size=6).filter(lambda text: not text.startswith("--"))
floats = st.floats(allow_nan=False)
optims = st.one_of(
    st.builds(
        AdamWConfig,
        learning_rate=floats,
        betas=st.tuples(floats, floats),
        schedule=st.sampled_from(["cosine", "linear", "warmup-stable"]),
        warmup=st.integers(0, 9) | st.floats(0.01, 0.99),
    ),
    st.builds(SGDConfig, learning_rate=floats, momentum=st.none() | floats, nesterov=st.booleans()),
)
configs = st.builds(
    Config,
    model=st.builds(
        ModelConfig,
        layers=st.integers(1),
        tie_embeddings=st.booleans(),
        no_bias=st.booleans(),
        remat=st.sampled_from(Remat),
        window=st.none() | st.just("full") | st.integers(),
    ),
    optim=optims,
    data=st.builds(
        DataConfig,
        sources=st.lists(
            st.builds(TextSource, path=words.map(Path), weight=floats) | st.builds(SyntheticSource, st.integers()),
            max_size=3,
        ).map(tuple),
        shape=st.lists(st.integers(), max_size=3).map(tuple),
        axes=st.none() | words | st.lists(words, min_size=2, max_size=3).map(tuple),
        names=st.lists(words, max_size=3).map(tuple),
    ),
    ema=st.none() | st.builds(EMAConfig, decay=floats),
    name=st.text('ab1 ,=-\n"\\é☃'),
    seed=st.integers(),
    verbose=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(configs)
def test_json_round_trip_is_exact(config):
    type_check(config)
    back = from_json(Config, json.loads(json.dumps(to_json(config))))
    assert back == config
    assert repr(back) == repr(config)  # 1 and 1.0, 0.0 and -0.0 are equal, and not the same


@settings(max_examples=40, deadline=None)
@given(configs)
def test_flags_written_from_a_config_make_it(config):
    """Every config can be reached from the default by flags, in any order: here, the last field first."""
    arguments = [f"--data.sources={','.join(type(source).__name__ for source in config.data.sources)}"]
    arguments += [
        f"--{path}={text}" for path, _, text, _ in describe(config) if path.count(".") != 1 or path != "data.sources"
    ]
    assert repr(apply_overrides(Config(), arguments[::-1])) == repr(config)


# Help


def test_describe():
    rows = {path: rest for path, *rest in describe(Config())}
    assert rows["optim"] == ["AdamW | SGD", "AdamW", ""]
    assert rows["optim.learning_rate"] == ["float", "0.001", "peak, after warm-up"]
    assert rows["optim.betas"] == ["tuple[float, float]", "0.9,0.95", "Decay of the first and second moment."]
    assert rows["optim.schedule"] == ["cosine | linear | warmup-stable", "cosine", ""]
    assert rows["optim.warmup"] == ["int | float", "100", "steps, or a fraction of them"]
    assert rows["model.remat"] == ["NONE | FULL_BLOCK", "NONE", ""]
    assert rows["model.window"] == ["int | full | none", "none", ""]
    assert rows["ema"] == ["EMA | none", "none", ""]
    assert rows["data.sources.0.vocab"] == ["int", "256", ""]


def test_describe_without_source():
    made = dataclasses.make_dataclass("Made", [("size", int, 3)], frozen=True)
    assert describe(made()) == [("size", "int", "3", "")]


def test_words():
    assert [word(value) for value in (None, True, 0.5, (1, 2), Remat.NONE, Path("x"))] == [
        "none",
        "true",
        "0.5",
        "1,2",
        "NONE",
        "x",
    ]


# Config files


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder of configs to stand in, apart from the repository's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(overrides, "REPOSITORY", tmp_path / "repository")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    return write


BASE = """
    from __future__ import annotations
    from dataclasses import dataclass
    from pathlib import Path

    @dataclass(frozen=True)
    class Base:
        size: int = {size}
        path: Path | None = None

    def config():
        return Base()

    def smoke():
        return Base(size=1)
"""
DERIVED = """
    import dataclasses
    from configs.base import config as base

    def config():
        return dataclasses.replace(base(), size=base().size + 1)
"""


def test_load_by_name_and_by_path(workspace):
    file = workspace("configs/base.py", BASE.format(size=8))
    workspace("experiments/one/big.py", DERIVED)
    base = load_config("base")
    assert base.size == 8
    assert load_config("configs/base.py") == load_config("./configs/base.py") == load_config(str(file)) == base
    assert load_config("base", "smoke").size == 1
    assert load_config("experiments/one/big.py").size == 9
    assert apply_overrides(base, ["--path", "x"]).path == Path("x")


def test_imported_config_is_the_same_module(workspace):
    workspace("configs/base.py", BASE.format(size=8))
    workspace("configs/derived.py", DERIVED)
    derived, base = load_config("derived"), load_config("base")
    assert derived.size == 9
    assert type(derived) is type(base)
    assert sorted(name for name in sys.modules if name.startswith("configs.")) == ["configs.base", "configs.derived"]


def test_repository_configs_are_found_from_elsewhere(workspace):
    workspace("repository/configs/base.py", BASE.format(size=8))
    workspace("configs/derived.py", DERIVED)
    workspace("x/y.py", DERIVED)
    assert load_config("base").size == 8
    assert load_config("derived").size == load_config("./x/y.py").size == 9


def test_the_nearer_configs_folder_wins(workspace):
    workspace("repository/configs/base.py", BASE.format(size=8))
    workspace("repository/configs/derived.py", DERIVED)
    workspace("configs/base.py", BASE.format(size=20))
    workspace("configs/derived.py", DERIVED)
    assert load_config("repository/configs/derived.py").size == 9
    assert load_config("derived").size == 21
    assert load_config("repository/configs/derived.py").size == 9


def test_a_config_does_not_replace_another_module(workspace):
    workspace("json.py", BASE.format(size=8))
    assert load_config("json.py").size == 8
    assert sys.modules["json"] is json


def test_missing_config(workspace):
    workspace("configs/quickstart.py", BASE)
    workspace("repository/configs/llama.py", BASE)
    workspace("repository/configs/_private.py", BASE)
    assert refusal(load_config, "quikstart") == (
        "config: quikstart is not a config file or a known name. Did you mean quickstart? "
        "(legal: llama, quickstart, a path to a .py file)"
    )
    assert "Did you mean llama?" in refusal(load_config, "configs/lama.py")
    assert "Did you mean" not in refusal(load_config, "./")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run(): return 1", "config: bad has no function config() (legal: run)"),
        ("x = 1", "config: bad has no function config()"),
        ("config = 3", "config: bad has no function config()"),
        ("def config(): return {}", "config: bad returned dict from config(), which is not a dataclass"),
        ("\nimport nothing_here", "config: bad raised ModuleNotFoundError at {file}:2: No module named 'nothing_here'"),
        ("def config(:", "config: bad raised SyntaxError at {file}:1: "),
        ("def config():\n    return int('a\\nb')", "config: bad raised ValueError at {file}:2: invalid literal for"),
        ("def config():\n    raise KeyError('a\\n b')", "config: bad raised KeyError at {file}:2: "),
        ("def config():\n    assert False", "config: bad raised AssertionError at {file}:2: no message"),
        ("def config(size): ...", "config: bad raised TypeError at {file}: config() missing 1 required positional"),
        ("from configs.worse import config", "config: bad raised ZeroDivisionError at {worse}:1: division by zero"),
    ],
)
def test_bad_config_file(workspace, text, message):
    file = workspace("configs/bad.py", text)
    worse = workspace("configs/worse.py", "1 / 0")
    assert message.format(file=file, worse=worse) in refusal(load_config, "bad")


def test_a_failed_import_can_be_repaired(workspace):
    workspace("configs/bad.py", "1 / 0")
    refusal(load_config, "bad")
    workspace("configs/bad.py", BASE.format(size=123456))
    assert load_config("bad").size == 123456


def test_a_config_error_from_a_config_passes_unchanged(workspace):
    workspace(
        "configs/bad.py",
        """
        from jaxpar.errors import ConfigError

        def config():
            raise ConfigError("model.layers", 0, "is not positive")
        """,
    )
    assert refusal(load_config, "bad") == "model.layers: 0 is not positive"


def test_import_is_light():
    code = "import sys, jaxpar.overrides; print([m for m in ('jax', 'numpy', 'flax', 'optax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
