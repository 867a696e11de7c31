"""config.json of ``transformers`` <-> ``DecoderConfig``; what has no counterpart is refused by the name of its key."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.models.decoder import DecoderConfig
from jaxpar.models.rope import RopeConfig
from jaxpar.serialize import difference
from jaxpar.weights.architectures import ACTIVATIONS, ARCHITECTURES, REFUSED, REQUIRED, UNREAD, Architecture

LOCAL, GLOBAL = "sliding_attention", "full_attention"
Raw = dict[str, Any]  # the content of a config.json

_ROPE_FIELDS = {  # of RopeConfig, beside theta, by scaling: our name -> theirs
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    },
}
_ROPE_CONDITIONS = {"partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim", "truncate"}


def architecture_of(raw: Raw) -> Architecture:
    """The architecture that a config.json names. Raises ConfigError for all others."""
    by_type = {a.model_type: a for a in ARCHITECTURES}
    classes = {a.name: a for a in ARCHITECTURES}
    named = raw.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise _refused("architectures", named, "is not supported", "a list of names")
    if "model_type" not in raw and len(named) == 1 and named[0] in classes:
        return classes[named[0]]
    found = by_type.get(str(raw.get("model_type")))
    if found is None:
        raise _refused("model_type", raw.get("model_type"), "is not supported", ", ".join(by_type))
    if named and found.name not in named:
        raise _refused("architectures", named, f"of model_type {found.model_type} is not supported", found.name)
    return found


def from_huggingface(raw: Raw) -> tuple[DecoderConfig, list[str]]:
    """The decoder that a config.json describes, and a line for each key that is not known here.

    Raises ConfigError, ``config.json KEY: ...``, for a value that changes the result and has no counterpart.
    """
    architecture = architecture_of(raw)
    keys = _Keys(raw, architecture)
    notes = keys.refuse_and_note()
    layers, heads, width = (
        keys.size("num_hidden_layers"), keys.size("num_attention_heads"), keys.size("hidden_size"),
    )  # fmt: skip
    if architecture.heads_divide and width % heads:
        raise _refused("num_attention_heads", heads, f"does not divide hidden_size {width}", "a divisor")
    head_dim = keys.size("head_dim", width // heads)
    bias = {"none": False, "qkv": True, "attention_bias": keys.flag("attention_bias")}[architecture.biases]
    window, every = keys.windows(layers)
    keys.size("max_position_embeddings", architecture.keys["max_position_embeddings"])
    scalar = keys.number("query_pre_attn_scalar", none=head_dim)
    full, local = keys.ropes()
    config = DecoderConfig(
        vocab_size=keys.size("vocab_size"),
        num_layers=layers,
        embed=width,
        num_heads=heads,
        num_kv_heads=keys.size("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_width=keys.size("intermediate_size"),
        mlp=keys.activation(),
        qkv_bias=bias,
        out_bias=bias and architecture.biases != "qkv",
        sliding_window=window,
        global_every=every,
        attention_scale=scalar**-0.5,
        attention_softcap=keys.number("attn_logit_softcapping"),
        logit_softcap=keys.number("final_logit_softcapping"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        norm_eps=keys.number("rms_norm_eps"),
        rope=full,
        local_rope=local,
        **architecture.always,
    )
    return canonical(config), notes


def to_huggingface(config: DecoderConfig, positions: int, first: Architecture | None = None) -> Raw:
    """A config.json of the first architecture that ``config`` can be (``first`` is tried before the others).

    In the layout of transformers 4, which 5 reads too. ``positions`` becomes max_position_embeddings. What is written
    has been read back and compared. Raises ConfigError naming the field that no architecture has.
    """
    closest: tuple[int, str, Any] | None = None
    for architecture in [first, *ARCHITECTURES] if first else ARCHITECTURES:
        raw = _describe(config, architecture, positions)
        try:
            back, _ = from_huggingface(raw)
            config.validate()
        except ConfigError:
            continue
        wrong = difference(canonical(config), back)
        if not wrong:
            return raw
        if closest is None or len(wrong) < closest[0]:
            closest = (len(wrong), architecture.name, next(iter(wrong.items())))
    if closest is None:
        raise ConfigError("model", "this shape", "is one that no architecture of transformers here has")
    field, (ours, theirs) = closest[2]
    rule = f"is not what {closest[1]} has, the closest of the architectures that can be exported"
    raise ConfigError(f"model.{field}", ours, rule, "null" if theirs is None else theirs)


def canonical(config: DecoderConfig) -> DecoderConfig:
    """The same function of tokens and parameters, written in one way."""
    width, every = config.width_of_head, config.global_every
    every = None if every is not None and every > config.num_layers else every
    rope = _canonical_rope(config.rope, width)
    local = rope if config.local_rope is None else _canonical_rope(config.local_rope, width)
    if config.sliding_window is not None and every is None:  # no layer has the other
        rope = local
    return dataclasses.replace(
        config,
        head_dim=None if width * config.num_heads == config.embed else width,
        global_every=every,
        attention_scale=None if config.attention_scale == width**-0.5 else config.attention_scale,
        rope=rope,
        local_rope=None if local == rope else local,
        scan_unroll=1,
    )


def _canonical_rope(rope: RopeConfig, head_dim: int) -> RopeConfig:
    if rope.scaling == "ntk":  # a scaled base
        return RopeConfig(theta=rope.theta * rope.factor ** (head_dim / (head_dim - 2)))
    read = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.scaling]}
    return RopeConfig(theta=rope.theta, scaling=rope.scaling, **read)


def _refused(key: str, value: object, rule: str, legal: object = None) -> ConfigError:
    return ConfigError(f"config.json {key}", value, rule, legal)


class _Keys:
    """The keys of a config.json that its architecture reads, checked as they are taken."""

    def __init__(self, raw: Raw, architecture: Architecture):
        self.raw, self.architecture = raw, architecture
        self.values = {**architecture.keys, **{key: raw[key] for key in raw if key in (*architecture.keys, *REQUIRED)}}

    def refuse_and_note(self) -> list[str]:
        """Refuse what another kind of model has; a line for every key that is neither read nor known not to matter."""
        for key, value in self.raw.items():
            if key in REFUSED and key not in self.architecture.keys and value:
                raise _refused(key, value, "is not supported", REFUSED[key])
        for key, legal in (("mlp_bias", False), ("use_bidirectional_attention", False)):
            if self.values.get(key):
                raise _refused(key, self.values[key], "is not supported", legal)
        read = {*self.values, *UNREAD, *REFUSED}
        notes = [f"config.json {key}: not known here, not read" for key in self.raw if key not in read]
        if self.raw.get("attention_dropout"):
            notes.append(f"config.json attention_dropout: {self.raw['attention_dropout']}: there is no dropout here")
        return notes

    def size(self, key: str, none: int | None = None) -> int:
        """A positive whole number; ``none`` where it is null or absent."""
        value = self.values.get(key)
        value = none if value is None else value
        if value is None:
            raise _refused(key, "missing", "and there is no default", "a positive whole number")
        if type(value) is not int or value < 1:
            raise _refused(key, value, "is not a size", "a positive whole number")
        return value

    def number(self, key: str, none: float | None = None) -> Any:
        """A positive number; ``none`` where it is null or absent."""
        value = self.values.get(key)
        if value is None:
            return none
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _refused(key, value, "is not supported", "a positive number")
        return value if key == "query_pre_attn_scalar" else float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if type(value) is not bool:
            raise _refused(key, value, "is not supported", "true, false")
        return value

    def activation(self) -> Any:
        key, legal = self.architecture.activation, dict(ACTIVATIONS)
        if self.architecture.model_type == "gemma":
            legal["gelu"] = "geglu"
            if self.values["hidden_activation"] not in (None, "gelu_pytorch_tanh"):
                value = self.values["hidden_activation"]
                raise _refused("hidden_activation", value, "is not supported", "null, gelu_pytorch_tanh")
        if self.values[key] not in list(legal):
            raise _refused(key, self.values[key], "is not supported", ", ".join(legal))
        return legal[self.values[key]]

    def windows(self, layers: int) -> tuple[int | None, int | None]:
        """The sliding window, and every how many-th layer has none (None: all have it)."""
        if "sliding_window" not in self.values or self.values["sliding_window"] is None:
            window = None
        else:
            window = self.size("sliding_window")
        if "use_sliding_window" in self.values and not self.flag("use_sliding_window"):
            window = None
        types = self.values.get("layer_types")
        if types is None:
            return self._pattern(window, layers)
        if not isinstance(types, list) or len(types) != layers or any(t not in (LOCAL, GLOBAL) for t in types):
            raise _refused("layer_types", types, "is not supported", f"{layers} times {LOCAL} or {GLOBAL}")
        whole = [i for i, kind in enumerate(types, start=1) if kind == GLOBAL]
        if len(whole) == layers:
            return None, None
        if window is None:
            raise _refused("layer_types", types, f"has {LOCAL}, but there is no sliding_window", GLOBAL)
        if not whole:
            return window, None
        if whole[0] == 1 or whole != list(range(whole[0], layers + 1, whole[0])):
            raise _refused("layer_types", types, "has no period", f"every n-th layer {GLOBAL}, the others {LOCAL}")
        return window, whole[0]

    def _pattern(self, window: int | None, layers: int) -> tuple[int | None, int | None]:
        """The same where the layers are not listed one by one."""
        if window is None:
            return None, None
        if "max_window_layers" in self.values:  # the first ones have no window
            most = self.values["max_window_layers"]
            if type(most) is int and most >= layers:
                return None, None
            if most != 0:
                raise _refused("max_window_layers", most, "is not supported", f"0, or {layers} layers and more")
            return window, None
        if "sliding_window_pattern" in self.values:
            every = self.size("sliding_window_pattern")
            return (None, None) if every == 1 else (window, every)
        return window, self.architecture.period

    def ropes(self) -> tuple[RopeConfig, RopeConfig | None]:
        """Rotary positions of layers without a window (or of all), and of those with one."""
        if self.values["partial_rotary_factor"] not in (None, 1, 1.0):
            value = self.values["partial_rotary_factor"]
            raise _refused("partial_rotary_factor", value, "is not supported", "1")
        key = "rope_scaling" if self.values["rope_scaling"] else "rope_parameters"
        given = self.values[key] or {}
        theta = self.number("rope_theta", none=self.architecture.keys["rope_theta"])
        if "rope_local_base_freq" not in self.architecture.keys:
            return self._rope(given, key, theta), None
        base = self.number("rope_local_base_freq", none=self.architecture.keys["rope_local_base_freq"])
        nested = isinstance(given, dict) and {GLOBAL, LOCAL} & given.keys()
        full, local = (given.get(GLOBAL) or {}, given.get(LOCAL) or {}) if nested else (given, {})
        windowless = self.windows(self.size("num_hidden_layers"))[0] is None
        local_rope = self._rope(local, f"{key} {LOCAL}", base)
        return self._rope(full, f"{key} {GLOBAL}" if nested else key, theta), None if windowless else local_rope

    def _rope(self, given: Raw, key: str, theta: float) -> RopeConfig:
        if not isinstance(given, dict):
            raise _refused(key, given, "is not supported", "an object or null")
        named = given.get("rope_type", given.get("type", "default"))
        scaling = "none" if named == "default" else named
        if scaling not in list(_ROPE_FIELDS):
            raise _refused(f"{key} rope_type", named, "is not supported", "default, linear, llama3, yarn")
        if given.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise _refused(f"{key} partial_rotary_factor", given["partial_rotary_factor"], "is not supported", "1")
        fields = _ROPE_FIELDS[scaling]
        known = {*fields.values(), *_ROPE_CONDITIONS, "rope_type", "type", "rope_theta"}
        if named != "default" and (unknown := sorted(given.keys() - known)):
            raise _refused(f"{key} {unknown[0]}", given[unknown[0]], f"is not supported with rope_type {named}")
        usual = {"original_max_position_embeddings": self.values["max_position_embeddings"]}
        usual |= {"beta_fast": 32.0, "beta_slow": 1.0} if scaling == "yarn" else {}
        read = {"rope_theta": given.get("rope_theta") or theta}
        read |= {name: given.get(name) or usual.get(name) for name in fields.values()}
        for name, value in read.items():
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise _refused(f"{key} {name}", value, "is not supported", "a positive number")
        if scaling == "yarn":
            self._refuse_other_yarn(given, key, read["factor"])
        values = {ours: float(read[theirs]) for ours, theirs in fields.items()}
        if "original_length" in values:
            values["original_length"] = int(values["original_length"])
        return RopeConfig(theta=float(read["rope_theta"]), scaling=scaling, **values)  # type: ignore[arg-type]

    def _refuse_other_yarn(self, given: Raw, key: str, factor: float) -> None:
        """Ours has the paper's attention factor, and whole dimensions at the ends of the ramp."""
        attention = 0.1 * math.log(max(factor, 1.0)) + 1.0
        if given.get("attention_factor") is None and given.get("mscale") and given.get("mscale_all_dim"):
            raise _refused(f"{key} mscale", given["mscale"], "with mscale_all_dim is not supported", "null")
        if not math.isclose(given.get("attention_factor") or attention, attention, rel_tol=1e-6):
            legal = f"null, or 0.1 ln(factor) + 1 = {attention:.6g}"
            raise _refused(f"{key} attention_factor", given["attention_factor"], "is not supported", legal)
        if not given.get("truncate", True):
            raise _refused(f"{key} truncate", given["truncate"], "is not supported", "true")


def _describe(config: DecoderConfig, architecture: Architecture, positions: int) -> Raw:
    """``config`` in the keys of ``architecture``, as far as those can say it."""
    windowed = [mask.window is not None for mask, _ in config.kinds()]
    types = [LOCAL if windowed[i % len(windowed)] else GLOBAL for i in range(config.num_layers)]
    scalar = config.width_of_head if config.attention_scale is None else config.attention_scale**-2
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    values: Raw = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.width_of_head,
        architecture.activation: activations.get(config.mlp, "silu"),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "sliding_window": config.sliding_window,
        "use_sliding_window": LOCAL in types,
        "max_window_layers": 0 if LOCAL in types else config.num_layers,
        "layer_types": types,
        "sliding_window_pattern": types.index(GLOBAL) + 1 if GLOBAL in types else config.num_layers + 1,
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "max_position_embeddings": positions,
        **_describe_rope(canonical(config)),
    }
    described = {key: values.get(key, default) for key, default in architecture.keys.items()}
    read = {key: value for key, value in described.items() if value is not None or architecture.keys[key] is not None}
    named = {"architectures": [architecture.name], "model_type": architecture.model_type}
    return {**named, **{key: values[key] for key in REQUIRED}, **read}


def _describe_rope(config: DecoderConfig) -> Raw:
    rope = config.rope
    scaling = {theirs: getattr(rope, ours) for ours, theirs in _ROPE_FIELDS[rope.scaling].items()}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope.scaling, **scaling} if scaling else None,
        "rope_local_base_freq": (config.local_rope or rope).theta,
    }
