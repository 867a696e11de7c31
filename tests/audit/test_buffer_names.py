"""Names of buffers as people read them, and whether a step fits."""

import pytest

from jaxpar.audit.memory import readable_name, verdict

BODY = "jit(_step)/shard_map/transpose(jvp())/while/body"
NAMES = {  # as compiled for CPUs, TPUs and GPUs by both versions of JAX
    "state['params']['layers']['mlp']['up']": "parameter layers.mlp.up",
    r"state[\'params\'][\'embedding\'][\'table\']": "parameter embedding.table",
    "state['opt'][0].mu['layers']['attention']['k']": "optimizer mu of layers.attention.k",
    "state['opt'][0].nu['head']['kernel']": "optimizer nu of head.kernel",
    "state['opt'][0].count": "optimizer count",
    "state['step']": "step of the state",
    "batch['targets']": "batch targets",
    "scalars['b2']": "scalars b2",
    "jit(_step)/shard_map/jvp(embedding)/jit(_where)/select_n": "forward: embedding.where (select_n)",
    "jit(_step)/shard_map/jvp()/jit(_where)/select_n": "forward: where (select_n)",
    f"{BODY}/eval_jaxpr/checkpoint/layers/mlp/gate/jvp(jit(silu))/exp": "backward: layers.mlp.gate.silu (exp)",
    f"{BODY}/closed_call/checkpoint/rematted_computation/layers/attention/jit(_roll_static)/concatenate": (
        "recomputed: layers.attention.roll_static (concatenate)"
    ),
    "jit(_step)/shard_map/jvp()/while/body/eval_jaxpr/layers/attention/o/bshk,hkd->bsd/dot_general": (
        "forward: layers.attention.o (bshk,hkd->bsd dot_general)"
    ),
    "transpose(jvp(table))/reduce_scatter": "backward: table (reduce_scatter)",
    f"{BODY}/closed_call/checkpoint/layers/attention.q/reduce_scatter": "backward: layers.attention.q (reduce_scatter)",
    "jit(_step)/shard_map/jvp()/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice": (
        "forward: stacked over a loop (dynamic_update_slice)"
    ),
    "jit(_step)/shard_map/jvp()/while/body/dynamic_update_slice": "forward: stacked over a loop (dynamic_update_slice)",
    f"{BODY}/eval_jaxpr/checkpoint/layers/attention/attend/vmap(static_sparsity_splash)/jit(_splash_attention)/mul": (
        "backward: layers.attention.attend.static_sparsity_splash.splash_attention (mul)"
    ),
    "jit(_step)/jit(tree_bias_correction)/sub": "update: tree_bias_correction (sub)",
    "jit(_step)/reshard": "update: reshard",
    "jit(_step)/shard_map/broadcast.199": "broadcast",
    "jit(_step)/shard_map/transpose(jvp())/while": "",
    "psum": "psum",
    "": "",
    f"{BODY}/closed_call/layers/(mlp.up/reduce_scatter:mlp.gate/reduce_scatter:attention.o/reduce_scatter)": (
        "backward: layers.mlp.up (reduce_scatter) and 2 more"
    ),
    "jit(_step)/shard_map/(jvp(table)/all_gather:jvp(kernel)/all_gather)": "forward: table (all_gather) and 1 more",
}  # fmt: skip


@pytest.mark.parametrize(("name", "said"), NAMES.items())
def test_readable_names(name, said):
    assert readable_name(name) == said


@pytest.mark.parametrize(
    ("peak", "limit", "said"),
    [
        (4e9, 16e9, "4 GB of 16 GB on each device: fits"),
        (16e9, 16e9, "16 GB of 16 GB on each device: fits"),
        (20e9, 16e9, "20 GB of 16 GB on each device: does not fit by 4 GB"),
        (4e9, 0, "4 GB on each device, of an amount that is not known"),
    ],
)
def test_verdict(peak, limit, said):
    assert verdict({"hbm_limit": limit, "hbm_bytes": {"peak": peak}, "fits": not limit or peak <= limit}) == said
