"""A Program that writes: prompts in, tokens out, with a cache of keys and values, on any mesh.

A prompt is read in one pass (*prefill*) that fills the cache; then each new token is one pass over one position, the
first of them over the prompt's last token once more, for its logits. Rows are padded on the right, so slot t of the
cache is position t in every row, and a row's padding is what no query sees.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.errors import ConfigError
from jaxpar.mesh.devices import device_memory
from jaxpar.mesh.rules import live, spec
from jaxpar.models.attention import Mask, attend_cached
from jaxpar.models.layout import parameter_dtype
from jaxpar.models.sampling import SamplingConfig, sample
from jaxpar.parallel.attention import choose_kernel
from jaxpar.parallel.collectives import ZeroCollectives
from jaxpar.parallel.decode import ROW_AXES, DecodeLayout
from jaxpar.program import Program

LEAST_LENGTH = 32  # of a compiled prefill or cache; longer ones are powers of two, so that few are compiled
CHUNK = 16  # tokens between two looks of the host at what has been written

Watch = Callable[[list[np.ndarray]], Sequence[bool]]
"""Called with what each row has so far; answers which rows are finished."""


class Generator:
    """What writes with the model of ``program``; its compiled functions serve any parameters."""

    def __init__(self, program: Program):
        self.program, self.sizes = program, program.sizes
        self._ways = math.prod(self.sizes[a] for a in ROW_AXES)
        self._used = program.tree([p.layout.used for p in program.parameters])
        self._rows = spec(self.sizes, ROW_AXES)
        heads = program.experiment.rules.mesh_axes("kv_heads")
        self._cache = spec(self.sizes, (), ROW_AXES, (), heads)  # of keys and of values, [L, B, T, G, K]
        self._prefill = functools.cache(self._compile_prefill)
        self._decode = functools.cache(self._compile_decode)

    @functools.cached_property
    def ready(self) -> Any:
        """Compiled: parameters as stored -> as they are used.

        Whole over data, fsdp, expert and context (one all-gather over fsdp here, none later), split over tensor,
        matrices in the compute dtype.
        """
        program = self.program
        dtypes = program.tree([parameter_dtype(p.axes, program.dtype) for p in program.parameters])

        def ready(params: Any) -> Any:
            return jax.tree.map(lambda w, dtype, used: jax.reshard(w.astype(dtype), used), params, dtypes, self._used)

        return self._traced(jax.jit(ready))

    def generate(
        self,
        weights: Any,
        prompts: Sequence[Sequence[int] | np.ndarray],
        tokens: int,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 (frozen)
        seed: int = 0,
        stop: Sequence[int] = (),
        vocab_size: int | None = None,
        watch: Watch | None = None,
    ) -> list[np.ndarray]:
        """Up to ``tokens`` new tokens after each prompt, int32; a row ends with the first token of ``stop``.

        ``weights`` come from ``ready``. ``watch`` is shown what has been written now and then, and can end rows.
        What a row gets depends on its prompt, its number in ``prompts`` and ``seed`` alone, whatever the other rows,
        the mesh or the padding (up to rounding). Only tokens below ``vocab_size`` are written. Every process of a run
        must call this with the same arguments. Raises ConfigError for an empty prompt or one that is no text of the
        model's vocabulary, or for a cache that the memory cannot hold.
        """
        sampling.validate("sampling")
        self.check(prompts, tokens)
        config = self.program.experiment.model
        rows = self._rows_of(prompts)
        lengths = np.array([len(p) for p in prompts] + [1] * (rows - len(prompts)), np.int32)
        read = _rounded(int(lengths.max()))
        grid = np.zeros((rows, read), np.int32)
        for row, prompt in zip(grid, prompts, strict=False):
            row[: len(prompt)] = prompt
        slots = self._slots_of(prompts, tokens)

        put = functools.partial(self._put, self._rows)
        cache = self._prefill(read, slots)(weights, put(grid))
        state = {
            "token": put(grid[np.arange(rows), lengths - 1]),
            "at": put(lengths - 1),
            "row": put(np.arange(rows, dtype=np.int32)),
            "done": put(np.arange(rows) >= len(prompts)),
            "written": put(np.full((rows, _rounded(tokens)), -1, np.int32)),
        }
        scalars = {k: np.float32(v) for k, v in sampling.scalars(vocab_size or config.vocab_size).items()}
        stop_ids = np.full(_rounded(len(stop)), -1, np.int32)
        stop_ids[: len(stop)] = stop
        decode = self._decode(slots, state["written"].shape[1], len(stop_ids))
        count, written, done = 0, [np.zeros(0, np.int32)] * len(prompts), np.zeros(len(prompts), bool)
        while count < tokens and not done.all():
            until = min(count + CHUNK, tokens) if watch else tokens
            cache, state, count = decode(
                weights, cache, state, np.int32(count), np.int32(until), np.int32(seed), stop_ids, scalars
            )
            count = int(count)
            block, done = (_whole(state[name])[: len(prompts)] for name in ("written", "done"))
            written = [row[:count][row[:count] >= 0] for row in block]
            if watch is not None:
                finished = np.zeros(rows, bool)
                finished[: len(prompts)] = done | np.asarray(watch(written), bool)
                finished[len(prompts) :] = True
                state["done"], done = put(finished), finished[: len(prompts)]
        return written

    def check(self, prompts: Sequence[Sequence[int] | np.ndarray], tokens: int) -> None:
        """Raise ConfigError for what ``generate`` cannot do, before anything is compiled."""
        vocab = self.program.experiment.model.vocab_size
        if not prompts:
            raise ConfigError("prompts", "()", "holds no prompt", "one or more")
        if tokens < 1:
            raise ConfigError("tokens", tokens, "is too small", "1 or more")
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise ConfigError(f"prompts.{number}", "", "has no token", "one token or more")
            wrong = [int(t) for t in prompt if not 0 <= t < vocab]
            if wrong:
                raise ConfigError(f"prompts.{number}", wrong[0], "is no token of the model", f"0 to {vocab - 1}")
        config, rows, slots = self.program.experiment.model, self._rows_of(prompts), self._slots_of(prompts, tokens)
        shape = (config.num_layers, rows, slots, config.num_kv_heads, config.width_of_head)
        shard = NamedSharding(self.program.mesh, self._cache).shard_shape(shape)
        needed = 2 * math.prod(shard) * np.dtype(self.program.dtype).itemsize
        if (limit := device_memory(self.program.mesh.devices.flat)) and needed > limit:
            rule = f"needs {needed / 1e9:.3g} GB for keys and values of {rows} texts up to {slots} tokens long"
            raise ConfigError(
                "tokens", tokens, f"{rule}, on devices of {limit / 1e9:.3g} GB each", "fewer, or fewer texts"
            )

    def _rows_of(self, prompts: Sequence[Any]) -> int:
        return -(-len(prompts) // self._ways) * self._ways

    @staticmethod
    def _slots_of(prompts: Sequence[Any], tokens: int) -> int:
        return _rounded(max(map(len, prompts)) + tokens)

    def _put(self, partition: PartitionSpec, rows: np.ndarray) -> jax.Array:
        """Every process has all rows; each device takes its own."""
        sharding = NamedSharding(self.program.mesh, partition)
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    def _layout(self, read: int) -> DecodeLayout:
        program, experiment = self.program, self.program.experiment
        kernel, _ = choose_kernel(
            program.platform,
            seq_len=read,
            head_dim=experiment.model.width_of_head,
            dtype=program.dtype,
            documents_masked=False,
            softcap=experiment.model.attention_softcap,
        )
        return DecodeLayout(
            sizes=self.sizes,
            rules=dataclasses.replace(experiment.rules, zero=0),
            zero_dims=dict.fromkeys(program.zero_dims),
            zero=ZeroCollectives((1,)),
            dtype=program.dtype,
            kernel=kernel,
            remat_policy="none",
        )

    def _jit(self, function: Any, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
        """``function`` inside a ``shard_map`` over all axes, compiled at its first call."""

        def call(*arguments: Any) -> Any:
            # Not type-checked: nothing is differentiated, and tensor's devices compute the same tokens by construction.
            return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)

        call.__name__ = function.__name__
        return self._traced(jax.jit(call, donate_argnums=donate))

    def _traced(self, jitted: Any) -> Any:
        """``jitted``, called in the program's tracing context."""

        def run(*arguments: Any) -> Any:
            with self.program.tracing():
                return jitted(*arguments)

        return run

    def _compile_prefill(self, read: int, slots: int) -> Any:
        """(params, tokens [B, read]) -> the cache of ``slots`` positions."""
        layout = self._layout(read)

        def prefill(params: Any, tokens_BS: jax.Array) -> Any:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, _: Any) -> tuple[jax.Array, Any]:
                room = ((0, 0), (0, slots - read), (0, 0), (0, 0))
                return layout.attention(q, k, v, None, mask), (jnp.pad(k, room), jnp.pad(v, room))

            positions_BS = jnp.broadcast_to(jnp.arange(read, dtype=jnp.int32), tokens_BS.shape)
            return self.program.model(params).run(tokens_BS, positions_BS, attend, None, layout)[2]

        return self._jit(prefill, (self._used, self._rows), (self._cache, self._cache))

    def _compile_decode(self, slots: int, room: int, stops: int) -> Any:
        """(params, cache, state, count, until, seed, stop ids, scalars) -> (cache, state, count).

        Writes the tokens ``count`` .. ``until`` - 1 of every row, or fewer where all rows are done before.
        """
        layout = self._layout(1)
        axes = live(ROW_AXES, self.sizes)

        def any_row(flags_B: jax.Array) -> jax.Array:
            here = jnp.any(flags_B).astype(jnp.int32)
            return (jax.lax.psum(here, axes) if axes else here) > 0

        def decode(params, cache, state, count, until, seed, stop_ids, scalars):
            model = self.program.model(params)

            def one(carry: Any) -> Any:
                cache, state, count, _ = carry
                at_B = state["at"]

                def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, cache: Any) -> tuple[jax.Array, Any]:
                    new, (cached_k, cached_v) = (k[:, 0], v[:, 0]), cache
                    return attend_cached(q[:, 0], *new, cached_k, cached_v, at_B, mask)[:, None], new

                x_B1D, head_DV, new = model.run(state["token"][:, None], at_B[:, None], attend, cache, layout)
                logits_BV = layout.logits(x_B1D[:, 0], head_DV, model.config.logit_softcap)
                keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), count))
                token_B = sample(logits_BV, keys_B(state["row"]), scalars)
                done_B = state["done"]
                rows = jnp.arange(at_B.shape[0])
                return (
                    jax.tree.map(lambda c, n: c.at[:, rows, at_B].set(n), cache, new),
                    {
                        "token": token_B,
                        "at": jnp.where(done_B, at_B, at_B + 1),
                        "row": state["row"],
                        "done": (done := done_B | jnp.isin(token_B, stop_ids)),
                        "written": state["written"].at[:, count].set(jnp.where(done_B, -1, token_B)),
                    },
                    count + 1,
                    any_row(~done),
                )

            def going(carry: Any) -> jax.Array:
                return (carry[2] < until) & carry[3]

            return jax.lax.while_loop(going, one, (cache, state, count, any_row(~state["done"])))[:3]

        names = ("token", "at", "row", "done", "written")
        state = dict.fromkeys(names, self._rows)
        nothing = PartitionSpec()
        return self._jit(
            decode,
            (self._used, (self._cache, self._cache), state, nothing, nothing, nothing, nothing, nothing),
            ((self._cache, self._cache), state, nothing),
            donate=(1, 2),
        )


def _rounded(length: int) -> int:
    """The next power of two, ``LEAST_LENGTH`` at least."""
    return max(LEAST_LENGTH, 1 << (length - 1).bit_length()) if length > 0 else LEAST_LENGTH


def _whole(array: jax.Array) -> np.ndarray:
    """The array on every process; an all-gather between hosts where there are several."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
