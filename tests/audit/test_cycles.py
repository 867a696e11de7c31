"""The TPU compiler's estimates: of the operations that run, as often as they run."""

from hlo_modules import loop, module

from jaxpar.audit.cycles import estimated_cycles

CYCLES = ', backend_config={{"window_config":{{"estimated_cycles":"{0}"}}}}'
FUSED = """
%inside (a: f32[8]) -> f32[8,8] {
  %a = f32[8] parameter(0)
  ROOT %d = f32[8,8] dot(%a, %a), lhs_contracting_dims={}, rhs_contracting_dims={}
}
"""


def test_cycles_by_class():
    """Five steps of a fusion with a product and of an addition; *wrong*: each once."""
    fusion = "  %f = f32[8,8] fusion(%w.x), kind=kOutput, calls=%inside" + CYCLES.format(100)
    add = "\n  %p = f32[8] add(%w.x, %w.x)" + CYCLES.format(7)
    computations, lines = loop("w", fusion + add)
    program = module(FUSED + computations, lines)
    assert estimated_cycles(program) == {"matmul": 500, "other": 35}


def test_no_estimates():
    """Other backends give none."""
    assert estimated_cycles(module(*loop("w", ""))) == {}
