"""A Hugging Face folder into a run folder, and a run's parameters out to one."""

from __future__ import annotations

import dataclasses
import filecmp
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.data.tokenizers import load_tokenizer
from jaxpar.errors import ConfigError, JaxparError, cannot_write
from jaxpar.experiment import AdamWConfig, DataConfig, Experiment, MeshConfig, TrainConfig
from jaxpar.optim.schedules import ScheduleConfig
from jaxpar.program import Program
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import from_json, to_json
from jaxpar.weights.files import DTYPES, Folder, Planned, write
from jaxpar.weights.names import EMBEDDING, HEAD, Leaf, leaves
from jaxpar.weights.translate import architecture_of, canonical, from_huggingface, to_huggingface
from jaxpar.weights.verify import host_device, require_transformers, verify
from jaxpar.words import Say

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json",
)  # fmt: skip
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_folder(
    source: Path,
    run: Path,
    devices: list[Any],
    say: Say,
    adjust: Callable[[Experiment], Experiment] = lambda experiment: experiment,
    check: bool = False,
) -> bool:
    """Make the run folder ``run`` of the Hugging Face folder ``source``; False where ``check`` found other logits.

    The parameters are read slice by slice onto their shards on ``devices``, and saved as the checkpoint of step 0.
    ``adjust`` may change the config that the run folder gets. Raises ConfigError, before weights are read, for an
    architecture, a key, a tensor or a file that does not fit.
    """
    if check:
        require_transformers()
    raw = _read_json(source / "config.json")
    model, notes = from_huggingface(raw)
    folder = RunFolder(run)
    folder.refuse_a_run()
    with Folder(source) as files:
        experiment = adjust(_fine_tuning(model, source, folder, raw))
        program = Program(experiment, devices)
        parts = leaves(program.parameters, model.post_norms)
        files.check(parts)
        used, copy = experiment.data.tokenizer, str(folder.huggingface / "tokenizer.json")  # which is not there yet
        load_tokenizer(str(source / "tokenizer.json") if used == copy else used, experiment.data.eos_token)
        folder.make()
        params, not_finite = _read(files, parts, program)
        dtypes = files.dtypes()
    checkpoints = Checkpoints(folder.checkpoints, asynchronous=False)
    checkpoints.save(0, {"params": params}, {"imported": str(source.absolute())})
    folder.huggingface.mkdir(exist_ok=True)
    _copy(source, folder.huggingface, ("config.json", *TOKENIZER_FILES))
    (folder.huggingface / "tensors.json").write_text(json.dumps(dtypes, indent=1) + "\n")
    with folder:
        folder.start(to_json(experiment))  # last: a folder without a config is no run
    train = experiment.train
    say(f"run      {folder.path}")
    say(f"model    {architecture_of(raw).name}, {program.num_parameters:,} parameters, {_summary(dtypes)}")
    say(
        f"config   for fine-tuning: {train.steps:,} steps of {train.global_batch} sequences x {train.seq_len} tokens, "
        f"learning rate {experiment.optim.learning_rate:g}; tokenizer {experiment.data.tokenizer}"
    )
    if experiment.data.tokenizer == "bytes":
        notes.append("no tokenizer.json is there: data.tokenizer is bytes, which is not what the model has learnt")
    notes += [f"{name} holds NaN or infinity" for name in not_finite]
    for note in notes:
        say(f"note     {note}")
    return not check or verify(source, experiment.model, params, say)


def export_run(
    run: Path,
    target: Path,
    say: Say,
    dtype: str | None,
    max_shard_bytes: int,
    step: int | None = None,
    check: bool = False,
) -> bool:
    """Write a run's parameters to the folder ``target``; False where ``check`` found other logits than the run's.

    ``dtype``: of every tensor; None: what they were when the model was imported, else float32. ``max_shard_bytes``:
    of a file. ``step``: of the checkpoint; None: the newest. Raises ConfigError where there is no such checkpoint, the
    folder is in use, or no architecture of ``transformers`` is this model.
    """
    if check:
        require_transformers()
    folder = RunFolder(run)
    experiment = dataclasses.replace(from_json(Experiment, folder.read_config()), mesh=MeshConfig())
    checkpoints = Checkpoints(folder.checkpoints)
    step = checkpoints.choose(step)
    raw = _config_json(experiment, folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("HF_FOLDER", str(target), "is not an empty folder", "a new one")
    program = Program(experiment, [host_device()])
    parts = leaves(program.parameters, experiment.model.post_norms)
    abstract = program.abstract_params
    restored = checkpoints.restore(step, abstract, only="params")
    values = dict(zip([p.name for p in program.parameters], map(np.asarray, jax.tree.leaves(restored)), strict=True))

    dtypes = _dtypes(parts, folder, dtype)
    _refuse_overflow(parts, values, dtypes)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write("HF_FOLDER", target, error) from error
    files = write(target, _planned(parts, values, dtypes), max_shard_bytes)
    note = _write_tokenizer(experiment, folder, target)
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    key = "dtype" if "dtype" in raw else "torch_dtype"
    (target / "config.json").write_text(json.dumps({**raw, key: usual}, indent=2) + "\n")
    say(f"run      {folder.path}, step {step:,}")
    say(f"model    {raw['architectures'][0]}, {program.num_parameters:,} parameters, {_summary(dtypes)}")
    say(f"written  {target}: {len(files)} safetensors file{'s' * (len(files) > 1)}")
    if note:
        say(f"note     {note}")
    if not check:
        return True
    rounded = [_rounded(leaf, values[leaf.name], dtypes) for leaf in parts]
    params = jax.tree.unflatten(jax.tree.structure(abstract), rounded)
    return verify(target, experiment.model, params, say)


# -- in ----------------------------------------------------------------------------------------------------------


def _fine_tuning(model: Any, source: Path, run: RunFolder, raw: dict[str, Any]) -> Experiment:
    """What the run folder of an imported model has for a config: gentle, and beginning with these weights."""
    data = DataConfig()
    if (source / "tokenizer.json").exists():
        eos = _eos_token(source)
        load_tokenizer(str(source / "tokenizer.json"), eos)
        data = dataclasses.replace(data, tokenizer=str(run.huggingface / "tokenizer.json"), eos_token=eos)
    positions = raw.get("max_position_embeddings") or architecture_of(raw).keys["max_position_embeddings"]
    return Experiment(
        model=model,
        data=data,
        optim=AdamWConfig(learning_rate=2e-5, weight_decay=0.0, schedule=ScheduleConfig(warmup_steps=30)),
        train=TrainConfig(seq_len=min(1024, positions), init_from=str(run.path)),
    )


def _eos_token(source: Path) -> str | None:
    """What tokenizer_config.json says ends a text, as text; None: it does not say."""
    path = source / "tokenizer_config.json"
    eos = _read_json(path).get("eos_token") if path.exists() else None
    return eos.get("content") if isinstance(eos, dict) else eos


def _read(files: Folder, parts: list[Leaf], program: Program) -> tuple[Any, list[str]]:
    """The parameters on their shards, each read when its turn comes; and the leaves that are not finite."""
    abstract = program.abstract_params
    not_finite: list[str] = []

    def array(leaf: Leaf, at: Any) -> jax.Array:
        made: dict[str, np.ndarray] = {}  # a shard that several devices hold is read once

        def shard(index: Any) -> np.ndarray:
            if str(index) not in made:
                made[str(index)] = leaf.read(index, files.read)
                if not np.isfinite(made[str(index)]).all() and leaf.name not in not_finite:
                    not_finite.append(leaf.name)
            return made[str(index)]

        return jax.make_array_from_callback(at.shape, at.sharding, shard)

    arrays = [array(leaf, at) for leaf, at in zip(parts, jax.tree.leaves(abstract), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays), not_finite


# -- out ---------------------------------------------------------------------------------------------------------


def _config_json(experiment: Experiment, folder: RunFolder) -> dict[str, Any]:
    """The config.json that the model came with, where it is that model still; else a new one."""
    before = folder.read("huggingface/config.json")
    if before and from_huggingface(before)[0] == canonical(experiment.model):
        raw = {"architectures": [architecture_of(before).name], **before}
    else:
        rope = experiment.model.rope
        scaled = round(rope.factor * rope.original_length) if rope.scaling in ("llama3", "yarn") else 0
        positions = max(experiment.train.seq_len, scaled)
        raw = to_huggingface(experiment.model, positions, architecture_of(before) if before else None)
    if before and not _has_own_tokenizer(experiment, folder):
        return {**raw, **{key: before[key] for key in TOKEN_KEYS if key in before}}
    try:
        eos = load_tokenizer(experiment.data.tokenizer, experiment.data.eos_token).eos
    except ConfigError:  # the tokenizer has gone, which ``_write_tokenizer`` says
        eos = experiment.model.vocab_size
    return {**raw, **dict.fromkeys(TOKEN_KEYS), "eos_token_id": eos if eos < experiment.model.vocab_size else None}


def _has_own_tokenizer(experiment: Experiment, folder: RunFolder) -> bool:
    """Whether ``data.tokenizer`` is a file, and not the one that was imported."""
    before, used = folder.huggingface / "tokenizer.json", Path(experiment.data.tokenizer).expanduser()
    return used.is_file() and not (before.exists() and filecmp.cmp(used, before, shallow=False))


def _dtypes(parts: list[Leaf], folder: RunFolder, dtype: str | None) -> dict[str, str]:
    """Tensor -> the dtype to write, of all that are to be written, in their order."""
    before: dict[str, str] = folder.read("huggingface/tensors.json")
    usual = Counter(before.values()).most_common(1)[0][0] if before else "float32"
    names = [leaf.tensor(layer) for leaf, layer in _in_order(parts)]
    if HEAD in before and HEAD not in names:  # tied, and in the file nevertheless
        names.append(HEAD)
    return {name: dtype or before.get(name, usual) for name in names}


def _in_order(parts: list[Leaf]) -> Iterator[tuple[Leaf, int]]:
    """Embedding, layer after layer, what follows them; each with the layer's number."""
    single = [leaf for leaf in parts if leaf.layers is None]
    stacked = [leaf for leaf in parts if leaf.layers is not None]
    yield from ((leaf, 0) for leaf in single if leaf.theirs == EMBEDDING)
    yield from ((leaf, i) for i in range(stacked[0].layers or 0) for leaf in stacked)
    yield from ((leaf, 0) for leaf in single if leaf.theirs != EMBEDDING)


def _planned(parts: list[Leaf], values: dict[str, np.ndarray], dtypes: dict[str, str]) -> Iterator[Planned]:
    """The tensors to write, none of them made yet."""
    by_name = {leaf.tensor(layer): (leaf, layer) for leaf, layer in _in_order(parts)}
    for name, dtype in dtypes.items():
        leaf, layer = by_name.get(name) or by_name[EMBEDDING]

        def make(leaf: Leaf = leaf, layer: int = layer, dtype: str = dtype) -> np.ndarray:
            tensor = leaf.to_tensor(leaf.of_layer(values[leaf.name], layer))
            return np.ascontiguousarray(tensor.astype(DTYPES[dtype]))

        yield Planned(name, leaf.tensor_shape, DTYPES[dtype], make)


def _refuse_overflow(parts: list[Leaf], values: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
    """What rounds beyond 65504, where float16 ends, would become infinity."""
    for leaf, layer in _in_order(parts):
        if dtypes[leaf.tensor(layer)] == "float16":
            value = leaf.of_layer(values[leaf.name], layer)
            if np.any(np.isfinite(value) & (np.abs(value) >= 65520)):
                raise JaxparError(f"{leaf.tensor(layer)} has values too large for float16; use --dtype bfloat16")


def _rounded(leaf: Leaf, value: np.ndarray, dtypes: dict[str, str]) -> np.ndarray:
    """The leaf as what is written will be read."""
    kinds = [DTYPES[dtypes[name]] for name in leaf.tensors()]
    if all(kind == np.float32 for kind in kinds):
        return value
    layers = [value] if leaf.layers is None else list(value)
    rounded = [v.astype(kind).astype(np.float32) for v, kind in zip(layers, kinds, strict=True)]
    return rounded[0] if leaf.layers is None else np.stack(rounded)


def _write_tokenizer(experiment: Experiment, folder: RunFolder, target: Path) -> str | None:
    """The tokenizer of ``data.tokenizer``, and all that came with it; a line where there is none to write."""
    used = Path(experiment.data.tokenizer).expanduser()
    if not _has_own_tokenizer(experiment, folder):
        _copy(folder.huggingface, target, TOKENIZER_FILES)
        if used.is_file():
            return None
        why = "is bytes" if experiment.data.tokenizer == "bytes" else f"{used} is not there"
        imported = (folder.huggingface / "tokenizer.json").exists()
        return f"data.tokenizer {why}: " + ("that of the import is written" if imported else "none is written")
    from tokenizers import Tokenizer

    eos = load_tokenizer(str(used), experiment.data.eos_token).eos
    token = Tokenizer.from_file(str(used)).id_to_token(eos)
    shutil.copyfile(used, target / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return None


# -- both --------------------------------------------------------------------------------------------------------


def _summary(dtypes: dict[str, str]) -> str:
    """``bfloat16``, or how many tensors are of which."""
    counts = Counter(dtypes.values())
    return ", ".join(name if len(counts) == 1 else f"{n} tensors {name}" for name, n in counts.items())


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("HF_FOLDER", str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("HF_FOLDER", str(path), f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("HF_FOLDER", str(path), "is not a JSON object")
    return content
