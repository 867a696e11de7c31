"""How often a computation runs: trip counts told or inferred, nested loops, branches, several callers."""

import pytest
from hlo_modules import loop, module

from jaxpar.audit import hlo
from jaxpar.audit.executions import executions
from jaxpar.audit.loops import constant, trip_count, unknown_trip_counts


@pytest.mark.parametrize(
    ("settings", "trips"),
    [
        ({"trips": 7}, 7),  # told: the condition is not looked at
        ({"bound": 5}, 5),
        ({"bound": 5, "first": 2}, 3),
        ({"bound": 9, "step": 4}, 3),  # 0, 4, 8
        ({"bound": 8, "step": 4, "direction": "LE"}, 3),
        ({"bound": 0, "first": 6, "step": -2, "direction": "GT"}, 3),  # 6, 4, 2
        ({"bound": 0, "first": 6, "step": -2, "direction": "GE"}, 4),
        ({"bound": 6, "step": 2, "direction": "NE"}, 3),
        ({"bound": 5, "step": 2, "direction": "NE"}, None),  # steps over it
        ({"bound": 3, "first": 4}, 0),
        ({"bound": 5, "step": 0}, None),
        ({"bound": 5, "step": -1}, None),
    ],
)
def test_trip_counts(settings, trips):
    """Compiled TPU text has no known_trip_count: comparison, step and first value give it, or nothing does."""
    program = module(*loop("w", "", **settings))
    assert trip_count(program, program.entry.by_name["w"]) == trips
    assert unknown_trip_counts(program) == ([] if trips is not None else ["w"])
    assert executions(program)["w.body"] == (1 if trips is None else trips)


def test_the_constant_on_the_left_and_a_fused_comparison():
    """``5 > i`` inside a fusion, as XLA:CPU and GPU print a condition."""
    computations, lines = loop("w", "")
    fused = """
%fused (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %five = s32[] constant(5)
  ROOT %gt = pred[] compare(%five, %a), direction=GT
}
"""
    computations = computations.replace(
        "ROOT %w.lt = pred[] compare(%w.i, %w.bound), direction=LT",
        "ROOT %w.lt = pred[] fusion(%w.i), kind=kLoop, calls=%fused",
    )
    program = module(fused + computations, lines)
    assert trip_count(program, program.entry.by_name["w"]) == 5


def test_a_bound_that_is_carried():
    """The bound may be an element of the loop's own tuple, where the body hands it on unchanged."""
    text = """HloModule m

%cond (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%one, %j)
  ROOT %out = (s32[], s32[]) tuple(%next, CARRIED)
}

ENTRY %main () -> s32[] {
  %zero = s32[] constant(0)
  %six = s32[] constant(6)
  %start = (s32[], s32[]) tuple(%zero, %six)
  %w = (s32[], s32[]) while(%start), condition=%cond, body=%body
  ROOT %r = s32[] get-tuple-element(%w), index=1
}
"""
    program = hlo.parse(text.replace("CARRIED", "%m"))
    assert trip_count(program, program.entry.by_name["w"]) == 6 == constant(program, program.entry.root)
    program = hlo.parse(text.replace("CARRIED", "%next"))  # now it grows with the index
    assert trip_count(program, program.entry.by_name["w"]) is None and constant(program, program.entry.root) is None


def test_nested_loops_multiply_and_callers_add_up():
    """An inner loop of 3 in an outer one of 4; a computation called by both and by the entry."""
    shared = "\n%shared (a: f32[8]) -> f32[8] {\n  ROOT %a = f32[8] parameter(0)\n}\n"
    inner, inside = loop("inner", "  %c1 = f32[8] call(%inner.x), to_apply=%shared", bound=3, carried="%outer.x")
    outer, lines = loop("outer", inside + "  %c2 = f32[8] call(%outer.x), to_apply=%shared", trips=4)
    program = module(shared + inner + outer, lines + "  %c3 = f32[8] call(%x), to_apply=%shared")
    counts = executions(program)
    assert counts["outer.body"] == 4 and counts["outer.cond"] == 5
    assert counts["inner.body"] == 12 and counts["inner.cond"] == 16
    assert counts["shared"] == 12 + 4 + 1


def branches(form):
    return (
        """
%small (a: f32[8]) -> f32[8] {
  %s = f32[8] parameter(0)
  ROOT %cheap = f32[8] negate(%s)
}

%large (a: f32[8]) -> f32[8] {
  %l = f32[8] parameter(0)
  %dear = f32[8] sine(%l)
  ROOT %dearer = f32[8] sine(%dear)
}
""",
        f"  %p = pred[] constant(true)\n  %c = f32[8] conditional(%p, %x, %x), {form}\n",
    )


@pytest.mark.parametrize(
    "form", ["branch_computations={%small, %large}", "true_computation=%large, false_computation=%small"]
)
def test_of_a_conditional_the_dearest_branch_counts(form):
    """By whatever is counted; *wrong*: both branches, or the first."""
    program = module(*branches(form))
    counts = executions(program, lambda i: float(i.opcode == "sine"))
    assert (counts["small"], counts["large"]) == (0, 1)
    counts = executions(program, lambda i: float(i.opcode == "negate"))
    assert (counts["small"], counts["large"]) == (1, 0)


def test_functions_of_elements_do_not_run():
    """A reduction applies its function to elements: it is no call. Asynchronous calls run once for start and done."""
    text = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%work (a: f32[8]) -> f32[8] {
  %w = f32[8] parameter(0)
  ROOT %n = f32[8] negate(%w)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %zero = f32[] constant(0)
  %total = f32[] reduce(%x, %zero), dimensions={0}, to_apply=%add
  %start = ((f32[8]), f32[8], s32[]) async-start(%x), calls=%work
  %update = ((f32[8]), f32[8], s32[]) async-update(%start), calls=%work
  ROOT %done = f32[8] async-done(%update), calls=%work
}
"""
    counts = executions(hlo.parse(text))
    assert counts == {"add": 0, "work": 1, "main": 1}
