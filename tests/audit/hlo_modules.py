"""Small HLO modules made by hand."""

from jaxpar.audit import hlo


def loop(name, body, *, trips=None, bound=5, first=0, step=1, direction="LT", carried=""):
    """A while of (index, x): its computations, and the lines of its caller. ``body`` may read %{name}.x."""
    config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
    shape = "(s32[], f32[8])"
    computations = f"""
%{name}.cond (p: {shape}) -> pred[] {{
  %{name}.p = {shape} parameter(0)
  %{name}.bound = s32[] constant({bound})
  %{name}.i = s32[] get-tuple-element(%{name}.p), index=0
  ROOT %{name}.lt = pred[] compare(%{name}.i, %{name}.bound), direction={direction}
}}

%{name}.body (p: {shape}) -> {shape} {{
  %{name}.q = {shape} parameter(0)
  %{name}.j = s32[] get-tuple-element(%{name}.q), index=0
  %{name}.step = s32[] constant({step})
  %{name}.next = s32[] add(%{name}.j, %{name}.step)
  %{name}.x = f32[8] get-tuple-element(%{name}.q), index=1
{body}
  ROOT %{name}.out = {shape} tuple(%{name}.next, %{name}.x)
}}
"""
    lines = f"""
  %{name}.first = s32[] constant({first})
  %{name}.copy = s32[] copy(%{name}.first)
  %{name}.start = {shape} tuple(%{name}.copy, {carried or "%x"})
  %{name} = {shape} while(%{name}.start), condition=%{name}.cond, body=%{name}.body{config}
"""
    return computations, lines


def module(computations, lines):
    entry = (
        f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{lines}\n  ROOT %r = f32[8] copy(%x)\n}}"
    )
    return hlo.parse(f"HloModule m\n\n{computations}\n{entry}\n")
