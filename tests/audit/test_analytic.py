"""The formula of a step's FLOPs against the count in the HLO, for what a decoder and a layout can be."""

import dataclasses

import jax
import oracle
import pytest

from jaxpar.audit import flops, hlo
from jaxpar.audit.analytic import executed_flops
from jaxpar.compat import hlo_text
from jaxpar.experiment import DecoderConfig, Experiment, MeshConfig, TrainConfig
from jaxpar.mesh.rules import ShardingRules
from jaxpar.program import Program

# Nothing is run, and products are no fusions: this halves the time on the JAX that has the option.
FAST = oracle.FAST_COMPILE | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {})
MODEL = DecoderConfig(vocab_size=96, num_layers=2, embed=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=80)


def counted(model=None, rules=None, mesh=None, rows=8, **train):
    """(in the HLO, by the formula) of the gradients of one step: an optimizer has no products."""
    mesh = {"fsdp": 1, **(mesh or {})}
    experiment = Experiment(
        model=dataclasses.replace(MODEL, **(model or {})),
        train=TrainConfig(global_batch=rows, **{"seq_len": 32, **train}),
        mesh=MeshConfig(**mesh),
        rules=rules or ShardingRules(),
    )
    count = 1
    for size in mesh.values():
        count *= size
    program = Program(experiment, jax.devices()[:count])
    with program.tracing():
        lowered = jax.jit(program.gradients).lower(
            program.abstract_state["params"], program.abstract_batch, program.scalars()
        )
    found = flops.count(hlo.parse(hlo_text(lowered.compile(FAST))))
    assert found.unknown == found.unknown_loops == []
    return found.total, executed_flops(program)


LONG = dict(seq_len=1100, rows=1)  # more than one block of 512, and not a whole number of them

CASES = {
    **{f"remat {policy}": dict(remat=policy) for policy in ("none", "dots", "qkv", "attention", "full", "offload")},
    **{f"blocks, remat {policy}": dict(LONG, remat=policy) for policy in ("none", "dots", "qkv", "attention", "full")},
    "one key head": dict(model=dict(num_kv_heads=1), remat="full"),
    "plain MLP": dict(model=dict(mlp="gelu"), remat="full"),
    "tied": dict(model=dict(tie_embeddings=True, qk_norm=True, qkv_bias=True)),
    "sliding window": dict(LONG, model=dict(sliding_window=100), remat="full"),
    "local and global": dict(LONG, model=dict(num_layers=3, sliding_window=520, global_every=2)),
    "wide window": dict(LONG, model=dict(sliding_window=600)),
    "microbatches": dict(microbatches=2, remat="qkv"),
    "fsdp": dict(mesh=dict(fsdp=4), remat="full"),
    "zero 1": dict(mesh=dict(fsdp=4), rules=ShardingRules(zero=1)),
    "tensor": dict(mesh=dict(tensor=2, fsdp=2), remat="full"),
    "tensor, heads whole": dict(mesh=dict(tensor=2), rules=ShardingRules(heads=()), remat="full"),
    "tensor, vocab whole": dict(mesh=dict(tensor=2), rules=ShardingRules(vocab=())),
    "tensor, mlp whole": dict(mesh=dict(tensor=2), rules=ShardingRules(mlp=()), remat="full"),
    "context": dict(mesh=dict(context=2, fsdp=2), remat="full"),
    "context in blocks": dict(LONG, mesh=dict(context=2), seq_len=1200, remat="full"),
    "unrolled": dict(model=dict(scan_unroll=2), remat="full"),
}


ON_BOTH = (
    *("remat none", "remat dots", "remat attention", "remat full", "blocks, remat full", "local and global"),
    *("tensor", "tensor, heads whole", "context"),
)


@pytest.mark.parametrize(
    "case", [case if case in ON_BOTH else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_formula_is_what_is_compiled(case):
    """To a thousandth; a product too many or too few of a layer is 2 to 10 %."""
    found, formula = counted(**CASES[case])
    assert found == pytest.approx(formula, rel=1e-3)
