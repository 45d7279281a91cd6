"""What is read from the text of a compiled module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from messages import naming

from gtp_jax import hlo
from gtp_jax.hlo._hlo import shapes

# A loop whose trip count XLA did not print, and a conditional, as they stand in a module's text.
UNPRINTED = """HloModule m, is_scheduled=true, num_partitions=4

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %c = s32[] constant(6)
  ROOT %f = pred[] fusion(%i, %c), kind=kLoop, calls=%less
}

%body (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %q = (s32[], f32[8]{0}) parameter(0)
}

%left (l: f32[8]) -> f32[8] {
  ROOT %l = f32[8]{0} parameter(0)
}

%right (r: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} negate(%l), metadata={op_name="a \\"quoted\\" name"}
}

ENTRY %main (x: (s32[], f32[8])) -> f32[8] {
  %x = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %w = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body
  %g = f32[8]{0} get-tuple-element(%w), index=1
  ROOT %k = f32[8]{0} conditional(%x, %g, %g), branch_computations={%left, %right}
}
"""


def test_shape_bytes_are_packed_and_layouts_ignored():
    found = shapes("(bf16[3,5]{1,0:T(8,128)}, /*index=1*/f4e2m1fn[7]{0}, pred[], token[], s8[2,<=4]{1,0})")
    assert [str(s) for s in found] == ["bf16[3,5]", "f4e2m1fn[7]", "pred[]", "token[]", "s8[2,4]"]
    assert [s.bytes for s in found] == [30, 4, 1, 0, 8]


def test_walk_multiplies_the_trip_counts_of_nested_loops():
    def nested(x):
        inner = lambda y, _: (jnp.sin(y @ y), None)  # noqa: E731
        return lax.scan(lambda y, _: (lax.scan(inner, y, length=5)[0] + 1, None), x, length=3)[0]

    module = hlo.parse(str(jax.jit(nested).lower(jnp.ones((64, 64))).compile().as_text()))
    dots = [(v.times, v.exact, v.depth) for v in module.walk() if _runs_a_matmul(module, v.instruction)]
    assert dots == [(15, True, 2)]


def _runs_a_matmul(module, instruction):
    if instruction.opcode == "fusion":
        return any(v.instruction.opcode == "dot" for v in module.inside(instruction))
    return instruction.opcode == "dot"


def test_trip_count_that_is_not_printed_is_the_constant_of_the_condition():
    module = hlo.parse(UNPRINTED)
    assert module.trip_count(module.computations["main"]["w"]) == (6, False)
    bodies = [v for v in module.walk() if v.instruction.name == "q"]
    assert [(v.times, v.exact) for v in bodies] == [(6, False)]


def test_loop_that_data_ends_counts_once_and_says_so():
    ended = jax.jit(lambda x: lax.while_loop(lambda y: jnp.sum(y) > 0.5, lambda y: y / 2, x))
    module = hlo.parse(str(ended.lower(jnp.ones(4)).compile().as_text()))
    loops = [v.instruction for v in module.walk() if v.instruction.opcode == "while"]
    assert [module.trip_count(loop) for loop in loops] == [(1, False)]


def test_walk_enters_every_branch_of_a_conditional():
    assert {"l", "r"} <= {v.instruction.name for v in hlo.parse(UNPRINTED).walk()}


def test_operands_and_attributes_are_read_from_the_line():
    module = hlo.parse(UNPRINTED)
    k, r = module.computations["main"]["k"], module.computations["right"]["r"]
    assert k.operands == ("x", "g", "g") and k.called == ("left", "right") and k.root
    assert r.op_name == r"a \"quoted\" name" and r.opcode == "negate"
    assert module.devices == 4 and module.scheduled


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match=naming("`ENTRY` compile().as_text()")):
        hlo.parse("module @jit_f { }")
