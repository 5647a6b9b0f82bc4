"""Exposed seconds of collectives in a program that is written here."""

import dataclasses
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


@pytest.mark.parametrize(
    ("opcode", "groups", "members", "nodes", "rate"),
    [
        ("all-gather", "replica_groups={{0,1},{8,9}}", 2, 1, 360),
        ("all-gather", "replica_groups={{0,1,8,9},{2,3,10,11}}", 4, 2, 2 * 40),
        ("all-to-all", "replica_groups={{0,1,8,9},{2,3,10,11}}", 4, 2, 3 / 2 * 40),
        ("collective-permute", "source_target_pairs={{0,4},{4,8}}", 2, 2, 40),
        ("collective-permute", "source_target_pairs={{0,4},{8,12}}", 2, 1, 360),
    ],
)
def test_rates_are_those_of_a_group(opcode, groups, members, nodes, rate):
    """GB/s; of an exchange among four devices on two nodes two of three parts leave the node."""
    instruction = hlo.Instruction("c", "f32[8]", opcode, f"%x), {groups}")
    assert absent_exposed.span(instruction, opcode, 16) == (members, nodes)
    assert absent_exposed.seconds(opcode, 1e9, members, nodes) == pytest.approx(1 / rate)


def test_grouped_products_multiply_the_mean_load():
    call = (
        "%c = bf16[96,20]{1,0} custom-call(%x, %w, %s), "
        'custom_call_target="mosaic_gpu_v2", operand_layout_constraints={bf16[96,10]{1,0}, '
        "bf16[4,10,20]{2,1,0}, s32[98,4]{1,0}}, api_version=API_VERSION_TYPED_FFI"
    )
    text = f"HloModule step\n\nENTRY %main () -> bf16[96,20] {{\n  {call}\n}}\n"
    program = hlo.parse(text)
    flops = absent_exposed.grouped_products(program, buffer=1.5)
    assert flops == {"c": 2 * 64 * 10 * 20}
    assert hlo.matrix_flops(program) == 0
    assert hlo.matrix_flops(dataclasses.replace(program, kernel_flops=flops)) == flops["c"]


def test_exposed_seconds_are_what_products_leave():
    program = hlo.parse(LINES.format(groups="replica_groups={{0,1,2,3,4,5,6,7}}"))
    totals, _ = absent_exposed.exposure(program, {"fsdp": 8, "tensor": 1})
    scatter, gather = (totals[("fsdp",), kind] for kind in ("reduce-scatter", "all-gather"))
    sent = WHOLE * 7 / 8
    assert scatter.sent == gather.sent == sent
    assert (scatter.beside, gather.beside) == (2 * SIZE**3, 0)
    nvlink = absent_exposed.CLUSTER.link_rate(1, 8)
    assert gather.exposed == pytest.approx(sent / nvlink)
    hidden = 2 * SIZE**3 / absent_exposed.PRODUCTS
    assert scatter.exposed == pytest.approx(gather.exposed - hidden)


def test_products_hide_one_collective_of_a_link_at_a_time():
    """Two gathers within the node are in flight beside the same product: the second waits."""
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    gathered = f"(bf16[{SIZE // 8},{SIZE}], bf16[{SIZE},{SIZE}])"
    lines = [
        f"%a = bf16[{SIZE // 8},{SIZE}] parameter(0)",
        *(f"%s{i} = {gathered} all-gather-start(%a), {groups}" for i in (0, 1)),
        f"%p = bf16[{SIZE},{SIZE}] parameter(1)",
        f"%d = bf16[{SIZE},{SIZE}] dot(%p, %p), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}",
        *(f"%e{i} = bf16[{SIZE},{SIZE}] all-gather-done(%s{i})" for i in (0, 1)),
        f"ROOT %t = (bf16[{SIZE},{SIZE}], bf16[{SIZE},{SIZE}]) tuple(%e0, %e1)",
    ]
    body = "\n".join(f"  {line}" for line in lines)
    program = hlo.parse(f"HloModule m\n\nENTRY %main () -> bf16[8] {{\n{body}\n}}\n")
    _, single = absent_exposed.exposure(program, {"fsdp": 8, "tensor": 1})
    first, second = (row.exposed for _, row in sorted(single.items()))
    one = 2 * SIZE**2 * 7 / 8 / absent_exposed.CLUSTER.link_rate(1, 8)  # bfloat16
    product = 2 * SIZE**3 / absent_exposed.PRODUCTS
    assert first == pytest.approx(one - product)
    assert second == pytest.approx(one)
