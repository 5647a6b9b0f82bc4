"""The picture of a schedule holds every unit once, in its place and as wide as it takes."""

import collections
import dataclasses
import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from maxmeg.pipeline.schedule import Table, forward_only, one_f_one_b, zero_bubble
from maxmeg.planning.show.text import schedule_text, schedule_title
from maxmeg.planning.show.timeline import COLOURS, LEFT, shade, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")
TABLES = [
    one_f_one_b(16, 4),
    one_f_one_b(16, 4, 2),
    zero_bubble(16, 4),
    forward_only(8, 4, 2),
    one_f_one_b(2, 1),
]
EVERY = pytest.mark.parametrize("table", TABLES, ids=schedule_title)


def boxes(table: Table) -> dict[str, list[tuple[float, ...]]]:
    """(left, top, width, height) of every cell, by colour."""
    root = ElementTree.fromstring(timeline_svg(table))
    found = collections.defaultdict(list)
    for path in root.iter(f"{SVG}path"):
        if (colour := path.get("fill", "none")) != "none":
            found[colour] += [tuple(map(float, box)) for box in BOX.findall(path.attrib["d"])]
    return found


@EVERY
def test_every_unit_is_one_cell_of_its_colour(table: Table):
    cells, units = boxes(table), table.microbatches * table.stages
    expected = {
        shade(lane, chunk, table.chunks): units
        for lane in table.lanes()
        for chunk in range(table.chunks)
    }
    assert {colour: len(found) for colour, found in cells.items()} == expected


@EVERY
def test_cells_of_a_stage_do_not_overlap_and_lie_inside(table: Table):
    root = ElementTree.fromstring(timeline_svg(table))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    of_row = collections.defaultdict(list)
    for found in boxes(table).values():
        for left, top, wide, high in found:
            assert left >= LEFT - 0.01 and left + wide <= width
            assert top + high <= height
            of_row[top].append((left, left + wide))
    assert len(of_row) == table.stages
    for row in of_row.values():
        row.sort()
        assert all(before[1] <= after[0] + 0.02 for before, after in itertools.pairwise(row))


def test_widths_are_times():
    """Backward takes as long as forward and weight gradients together, unless these are apart."""
    plain, apart = boxes(one_f_one_b(4, 4)), boxes(zero_bubble(4, 4))
    widths = {
        name: (plain[colours[0]][:1] or apart[colours[0]])[0][2]
        for name, colours in COLOURS.items()
    }
    assert widths["backward"] + 1 == 2 * (widths["forward"] + 1)  # a gap of one pixel
    assert apart[COLOURS["backward"][0]][0][2] == widths["forward"] == widths["weight"]


def test_numbers_are_those_of_microbatches():
    root = ElementTree.fromstring(timeline_svg(zero_bubble(16, 4)))
    numbers = [text.text for group in root.iter(f"{SVG}g") if group.get("fill") for text in group]
    assert collections.Counter(numbers) == {str(m): 12 for m in range(16)}  # 4 stages x 3 lanes


def test_ticks_that_cannot_be_seen_are_left_out_and_counted():
    table = one_f_one_b(512, 32)
    picture = timeline_svg(table)
    (hidden,) = re.findall(r"(\d+) ticks more", picture)
    with_backward = {left for left, *_ in boxes(table)[COLOURS["backward"][0]]}
    assert int(hidden) == table.ticks - 31 - len(with_backward)  # the first 31 have none
    assert len(picture) < 1_000_000
    assert "ticks more" not in timeline_svg(one_f_one_b(128, 16))


def test_names_are_escaped():
    table = dataclasses.replace(one_f_one_b(2, 2), name='<b>&"')
    picture = timeline_svg(table)
    root = ElementTree.fromstring(picture)
    assert root.find(f"{SVG}title").text.startswith('<b>&"')  # type: ignore


def test_text_has_bubble_and_live_activations():
    text = schedule_text(one_f_one_b(16, 4))
    assert "1F1B: 4 stages, 16 microbatches, 22 ticks: 19 forward, 19 backward" in text
    assert "18.8% over the ideal" in text and "idle per stage: 3 F + 3 B + 3 W" in text
    assert "at most 7 5 3 1 microbatches" in text
    text = schedule_text(one_f_one_b(16, 4, 2))
    assert "Interleaved 1F1B: 4 stages x 2 chunks" in text
    assert "idle per stage: 1.5 F + 1.5 B + 1.5 W" in text and "11 9 7 5 chunks" in text
    text = schedule_text(zero_bubble(16, 4))
    assert "idle per stage: 3 F + 3 B" in text and "at most 4 weight-gradient passes" in text
    assert "in flight" not in schedule_text(forward_only(8, 4))
    assert "idle per stage: nothing" in schedule_text(one_f_one_b(8, 1))
    assert all(len(line) <= 100 for line in schedule_text(one_f_one_b(64, 64)).splitlines())
