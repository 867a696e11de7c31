"""An Experiment bound to devices: initial state, one step, one evaluation, and where everything lies.

The loss and its gradients run in one ``shard_map`` over all six axes (``parallel/``). The optimizer runs outside it, on
whole arrays with Explicit shardings, so any optax transformation works on any layout. Nothing here needs the devices to
exist: ``abstract_state`` and ``abstract_batch`` are enough to lower and compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.experiment import Experiment
from jaxpar.logical import LogicalAxes, of_one_layer
from jaxpar.mesh.axes import make_mesh, torus_stages
from jaxpar.mesh.rules import BATCH_AXES, SEQ_AXES, ZERO_AXIS, LeafLayout, place, spec
from jaxpar.models.layout import is_variable
from jaxpar.optim.routing import Group, group_of
from jaxpar.parallel.attention import choose_kernel
from jaxpar.parallel.collectives import Lent, ZeroCollectives
from jaxpar.parallel.gradients import Reducer
from jaxpar.parallel.layout import MeshLayout

State = dict[str, Any]  # params, opt, step (int32, steps taken), skipped (int32, non-finite ones among them)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What is known of one parameter before it exists."""

    name: str  # dotted path
    axes: LogicalAxes
    shape: tuple[int, ...]
    layout: LeafLayout
    group: Group


class Program:
    """``experiment`` on ``devices``. Raises ConfigError, before anything is compiled, where the two do not fit."""

    def __init__(self, experiment: Experiment, devices: list[Any]):
        experiment.validate()
        self.experiment = experiment
        self.sizes = experiment.mesh.resolve(len(devices))
        experiment.validate_on(self.sizes)
        self.mesh = make_mesh(self.sizes, devices)
        self.platform = "gpu" if devices[0].platform in ("gpu", "cuda") else devices[0].platform
        self.dtype = experiment.compute_dtype(self.platform)
        self.kernel, self.kernel_reason = choose_kernel(
            self.platform,
            seq_len=experiment.train.seq_len,
            head_dim=experiment.model.width_of_head,
            dtype=self.dtype,
            documents_masked=experiment.data.mask_documents,
            softcap=experiment.model.attention_softcap,
            context=self.sizes["context"],
        )
        self._describe_parameters()
        self._stored = self.tree([p.layout.stored for p in self.parameters])
        self._updated = self.tree([p.layout.updated for p in self.parameters])
        self._zero = ZeroCollectives(torus_stages(self.mesh, ZERO_AXIS), jnp.dtype(experiment.train.reduce_dtype))
        self._reducer = Reducer(self._layouts, self.sizes, self._zero)
        self._layout = MeshLayout(
            sizes=self.sizes,
            rules=experiment.rules,
            zero_dims=self.zero_dims,
            zero=self._zero,
            dtype=self.dtype,
            platform=self.platform,
            kernel=self.kernel,
            remat_policy=experiment.train.remat,
        )

    def _describe_parameters(self) -> None:
        """The abstract model: its structure, and for every parameter axes, layout and optimizer group."""
        experiment = self.experiment
        model = nnx.eval_shape(lambda: experiment.task.init(experiment.model, jax.random.key(0)))
        self._graph, self._template = nnx.split(model)
        shapes = nnx.to_pure_dict(self._template)
        variables = jax.tree.leaves(self._template, is_leaf=is_variable)
        paths = [".".join(str(k.key) for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
        self.parameters: list[Parameter] = []
        for name, variable in zip(paths, variables, strict=True):
            axes, shape = variable.get_metadata("logical_axes"), variable.get_value().shape
            axes = ("layers", *axes) if len(axes) < len(shape) else axes
            layout = place(name, axes, shape, self.sizes, experiment.rules)
            self.parameters.append(Parameter(name, axes, shape, layout, group_of(axes)))
        self._structure = jax.tree.structure(shapes)
        self._layouts = self.tree([p.layout for p in self.parameters])
        self._groups = self.tree([p.group for p in self.parameters])

    def tree(self, leaves: list[Any]) -> Any:
        """``leaves``, one for each of ``parameters``, as a tree like the parameters."""
        return jax.tree.unflatten(self._structure, leaves)

    @functools.cached_property
    def zero_dims(self) -> dict[LogicalAxes, int | None]:
        """Logical axes of one layer's slice -> the dimension of the slice that ZeRO 2 or 3 cuts."""
        dims: dict[LogicalAxes, int | None] = {}
        for p in self.parameters:
            axes, dim = of_one_layer(p.axes), p.layout.zero_dim if p.layout.stage > 1 else None
            dim = None if dim is None else dim - (len(p.axes) - len(axes))
            assert dims.setdefault(axes, dim) == dim, f"two leaves with axes {axes} are cut differently"
        return dims

    # -- state ---------------------------------------------------------------------------------------------------

    def _new_state(self, seed: jax.Array) -> State:
        model = self.experiment.task.init(self.experiment.model, jax.random.key(seed))
        params = nnx.to_pure_dict(nnx.split(model)[1])
        opt = self._transform(self.experiment.scalars()).init(params)
        return {"params": params, "opt": opt, "step": jnp.int32(0), "skipped": jnp.int32(0)}

    def _transform(self, scalars: dict[str, Any]) -> optax.GradientTransformation:
        return self.experiment.optim.transform(scalars, self._groups)

    @functools.cached_property
    def _state_specs(self) -> State:
        """PartitionSpecs of the state: parameters as stored, optimizer leaves as they are updated.

        Not for use under ``jax.set_mesh``: optax finds the parameter-like leaves by running an init eagerly.
        """
        shapes = jax.eval_shape(self._new_state, jax.ShapeDtypeStruct((), jnp.int32))
        opt = optax.tree.map_params(
            self._transform(self.experiment.scalars()),
            lambda _, spec: spec,
            shapes["opt"],
            self._updated,
            transform_non_params=lambda _: PartitionSpec(),
        )
        return {"params": self._stored, "opt": opt, "step": PartitionSpec(), "skipped": PartitionSpec()}

    @functools.cached_property
    def abstract_params(self) -> Any:
        """Shapes, dtypes and shardings of the parameters."""
        return self.tree(
            [
                jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=NamedSharding(self.mesh, p.layout.stored))
                for p in self.parameters
            ]
        )

    @functools.cached_property
    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(self._new_state, jax.ShapeDtypeStruct((), jnp.int32))

        def struct(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(struct, shapes, self._state_specs)

    def init(self, seed: int | None = None) -> State:
        """The state at step 0, made in place on its shards; bit for bit the same on every mesh."""
        seed = self.experiment.train.seed if seed is None else seed
        specs = self._state_specs
        with jax.set_mesh(self.mesh):
            make = jax.sharding.auto_axes(self._new_state, out_sharding=specs)
            return jax.jit(make)(np.int32(seed))

    # -- batches -------------------------------------------------------------------------------------------------

    @property
    def batch_spec(self) -> PartitionSpec:
        """Of a training batch [A, B / A, S]."""
        return PartitionSpec(None, *spec(self.sizes, BATCH_AXES, SEQ_AXES))

    @functools.cached_property
    def batch_keys(self) -> tuple[str, ...]:
        """The arrays of a batch that the step reads."""
        keys = ("tokens", "targets", "mask", "positions")
        return (*keys, "segments") if self.experiment.data.mask_documents else keys

    @functools.cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a training batch."""
        train = self.experiment.train
        shape = (train.microbatches, train.global_batch // train.microbatches, train.seq_len)
        sharding = NamedSharding(self.mesh, self.batch_spec)
        kinds = {k: jnp.bool_ if k == "mask" else jnp.int32 for k in self.batch_keys}
        return {k: jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for k, kind in kinds.items()}

    @functools.cached_property
    def _piece_rows(self) -> np.ndarray:
        """The rows of a piece [B / A, S] of a batch that this host's devices hold, in order."""
        piece = self.abstract_batch["tokens"].shape[1:]
        sharding = NamedSharding(self.mesh, PartitionSpec(*self.batch_spec[1:]))
        held: Any = sharding.addressable_devices_indices_map(piece)
        return np.unique([np.arange(piece[0])[rows] for rows, _ in held.values()])

    def host_rows(self, microbatches: int | None = None) -> np.ndarray:
        """Which rows of a batch ``put`` wants on this host, in order; hosts that share a batch shard share rows."""
        pieces = self.experiment.train.microbatches if microbatches is None else max(microbatches, 1)
        piece = self.abstract_batch["tokens"].shape[1]
        return (piece * np.arange(pieces)[:, None] + self._piece_rows).reshape(-1)

    def put(self, batch: dict[str, np.ndarray], microbatches: int | None = None) -> dict[str, jax.Array]:
        """The ``host_rows`` [rows, S] of a batch, laid on the mesh as [A, B / A, S]; ``microbatches`` 0: [B / A, S]."""
        pieces = self.experiment.train.microbatches if microbatches is None else microbatches
        partition = self.batch_spec if pieces else PartitionSpec(*self.batch_spec[1:])
        sharding = NamedSharding(self.mesh, partition)
        whole = self.abstract_batch["tokens"].shape[0 if pieces else 1 :]

        def lay(key: str) -> jax.Array:
            local = np.asarray(batch[key], bool if key == "mask" else np.int32)
            local = local.reshape(*whole[:-2], -1, whole[-1])

            def shard(index: Any) -> np.ndarray:
                begin, end, _ = index[-2].indices(whole[-2])
                rows = slice(*np.searchsorted(self._piece_rows, (begin, end)))
                return local[(*index[:-2], rows, index[-1])]

            return jax.make_array_from_callback(whole, sharding, shard)

        return {key: lay(key) for key in self.batch_keys}

    # -- step ----------------------------------------------------------------------------------------------------

    def _in_mesh(self, function: Any, batch_spec: PartitionSpec, out_specs: Any) -> Any:
        """``function(params, batch, scalars)`` inside a ``shard_map`` over all axes."""
        return jax.shard_map(
            function,
            in_specs=(self._stored, batch_spec, PartitionSpec()),
            out_specs=out_specs,
            check_vma=self.kernel == "chunked",  # the other kernels carry no varying-axes types
        )

    def model(self, params: Any) -> Any:
        """The task's module with these parameters, for tracing."""
        variables = jax.tree.leaves(self._template, is_leaf=is_variable)
        values = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Lent))
        filled = [v.replace(x) for v, x in zip(variables, values, strict=True)]
        structure = jax.tree.structure(self._template, is_leaf=is_variable)
        return nnx.merge(self._graph, jax.tree.unflatten(structure, filled))

    def _objective(self, scalars: dict[str, jax.Array]) -> Any:
        def objective(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return self.experiment.task.objective(self.model(params), batch, scalars, self._layout)

        return objective

    def gradients(self, params: Any, batch: Any, scalars: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """Mean-loss gradients over a batch [A, B / A, S] and the metrics ``loss`` and ``tokens``, for tracing."""

        def local(params: Any, batch: Any, scalars: Any) -> Any:
            return self._reducer.gradients(self._objective(scalars), params, batch)

        grad_specs = self._updated
        return self._in_mesh(local, self.batch_spec, (grad_specs, PartitionSpec()))(params, batch, scalars)

    def update(
        self, state: State, grads: Any, metrics: dict[str, jax.Array], scalars: dict[str, jax.Array]
    ) -> tuple[State, dict[str, jax.Array]]:
        """Clip, step the optimizer; skip the whole step where loss, gradient or update is not finite; for tracing."""
        norm = optax.tree.norm(grads)
        rate = scalars["learning_rate"] * self.experiment.optim.schedule.factor(state["step"], scalars)
        clip = jnp.minimum(1.0, scalars["max_grad_norm"] / jnp.maximum(norm, 1e-16))
        grads = jax.tree.map(lambda g: g * clip, grads)
        params = jax.tree.map(jax.reshard, state["params"], self._updated)
        updates, opt = self._transform(scalars).update(grads, state["opt"], params)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"]) & jnp.isfinite(rate * optax.tree.norm(updates))

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        params = jax.tree.map(lambda p, u: keep(p - rate * u, p), params, updates)
        new_state = {
            "params": self._store(params),
            "opt": jax.tree.map(keep, opt, state["opt"]),
            "step": state["step"] + 1,
            "skipped": state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32),
        }
        metrics = {**metrics, "grad_norm": norm, "learning_rate": rate, "skipped": new_state["skipped"]}
        return new_state, metrics

    def _store(self, params: Any) -> Any:
        """Updated parameters as they are kept: at ZeRO 1 and 2, and for vectors, all-gathered over the ZeRO axis."""

        def gather(shard: jax.Array, layout: LeafLayout) -> jax.Array:
            if layout.stored == layout.updated or layout.zero_dim is None:
                return shard
            return self._zero.all_gather(shard, layout.zero_dim)

        return jax.shard_map(
            lambda params: jax.tree.map(gather, params, self._layouts),
            in_specs=(self._updated,),
            out_specs=self._stored,
            check_vma=False,  # a gathered array is typed as varying
        )(params)

    def _step(self, state: State, batch: Any, scalars: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        grads, metrics = self.gradients(state["params"], batch, scalars)
        return self.update(state, grads, metrics, scalars)

    def _evaluate(self, params: Any, batch: Any, scalars: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def local(params: Any, batch: Any, scalars: Any) -> Any:
            return self._reducer.evaluate(self._objective(scalars), params, batch)

        out = (PartitionSpec(), PartitionSpec())
        return self._in_mesh(local, PartitionSpec(*self.batch_spec[1:]), out)(params, batch, scalars)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """The context to trace in: this mesh, and fp32 products in full where fp32 was asked for."""
        with jax.set_mesh(self.mesh), jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else None):
            yield

    def scalars(self) -> dict[str, np.float32]:
        """The experiment's traced numbers, as the step takes them."""
        return {name: np.float32(value) for name, value in self.experiment.scalars().items()}

    def lower_step(self) -> jax.stages.Lowered:
        """The step ``(state, batch, scalars) -> (state, metrics)``, lowered; the state is donated."""
        state, batch = self.abstract_state, self.abstract_batch
        with self.tracing():
            return jax.jit(self._step, donate_argnums=0).lower(state, batch, self.scalars())

    @functools.cached_property
    def step(self) -> Any:
        """The compiled step ``(state, batch, scalars) -> (state, metrics)``; donates the state."""
        return self.lower_step().compile(self.compiler_options or None)

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """Of XLA, for the step; those that are named after another platform mean nothing on this one."""
        others = tuple(f"xla_{platform}_" for platform in ("cpu", "gpu", "tpu") if platform != self.platform)
        return {k: v for k, v in self.experiment.train.options().items() if not k.startswith(others)}

    @functools.cached_property
    def evaluate(self) -> Any:
        """Compiled: (params, batch [B, S], scalars) -> (loss summed over valid tokens in nats, valid tokens)."""
        spec = PartitionSpec(*self.batch_spec[1:])
        batch = {
            k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=NamedSharding(self.mesh, spec))
            for k, x in self.abstract_batch.items()
        }
        with self.tracing():
            return jax.jit(self._evaluate).lower(self.abstract_params, batch, self.scalars()).compile()

    @functools.cached_property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(int(np.prod(p.shape)) for p in self.parameters)
