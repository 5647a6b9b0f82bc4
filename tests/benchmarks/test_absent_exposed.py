"""Exposed seconds of collectives in a program that is written here."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import absent_exposed

from maxmeg.planning import hlo

SIZE = 1024
WHOLE = 8 * SIZE * SIZE * 4  # bytes that eight devices scatter
LINES = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[8192,1024]) -> f32[1024,1024] {{
  %x = f32[8192,1024]{{1,0}} parameter(0)
  %w = f32[1024,1024]{{1,0}} parameter(1)
  %s = (f32[8192,1024]{{1,0}}, f32[1024,1024]{{1,0}}) reduce-scatter-start(%x), {groups}
  %p = f32[1024,1024]{{1,0}} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %d = f32[1024,1024]{{1,0}} reduce-scatter-done(%s)
  ROOT %g = f32[8192,1024]{{1,0}} all-gather(%d), {groups}
}}
"""


def test_exposed_seconds_are_what_products_leave():
    program = hlo.parse(LINES.format(groups="replica_groups={{0,1,2,3,4,5,6,7}}"))
    totals, _ = absent_exposed.exposure(program, {"fsdp": 8, "tensor": 1})
    scatter, gather = (totals[("fsdp",), kind] for kind in ("reduce-scatter", "all-gather"))
    sent = WHOLE * 7 / 8
    assert scatter.sent == gather.sent == sent
    assert (scatter.beside, gather.beside) == (2 * SIZE**3, 0)
    assert gather.exposed == pytest.approx(sent / absent_exposed.OTHERS)
    hidden = 2 * SIZE**3 / absent_exposed.PRODUCTS
    assert scatter.exposed == pytest.approx(gather.exposed - hidden)
