"""The page of a plan: well formed, alone, complete, and without the parts that are not there."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from maxmeg.pipeline.schedule import one_f_one_b
from maxmeg.planning.report import MARGIN, Analytic, Collective, Compiled, Traffic
from maxmeg.planning.show.page import plan_html
from maxmeg.planning.show.tables import GIB, Choice
from maxmeg.planning.show.text import Plan, verdict

ANALYTIC = Analytic(
    parameters={"embedding": 1_000, "mlp": 3_000},
    memory={"master weights": 30 * GIB, "activations": 20 * GIB},
    activations={"minimal": 80 * GIB, "selective": 20 * GIB, "full": 5 * GIB},
    capacity=70 * GIB,
    flops=1e18,
    traffic=(
        Traffic("tensor", "gathered <sequences>", "all-gather", 12_288, 91 * GIB, 0.41),
        Traffic("pipe", "hidden states", "collective-permute", 19, 3 * GIB, 0.0816),
    ),
    compute_seconds=18.2,
    bubble_fraction=0.0588,
    communication_seconds=0.7,
    step_seconds=20.0,
    tokens_per_second=52_000,
    devices=64,
    mfu=0.443,
)
COMPILED = Compiled(
    arguments=26 * GIB,
    temporaries=51 * GIB,
    outputs_not_aliased=0,
    capacity=72 * GIB,
    collectives=(
        Collective("all-gather", ("tensor",), 14, 12_288, 182 * GIB, True),
        Collective("all-reduce", ("pipe", "data"), 3, 3, 20_480, False),
    ),
    kernels={"__cudnn$fmhaSoftmax": 4_096},
    flops=1.9e16,
    lower_seconds=3.1,
    compile_seconds=7.4,
)
CHOICES = (
    Choice({"parallel.pipe": 8, "parallel.tensor": 8}, ANALYTIC, COMPILED),
    Choice({"parallel.pipe": 1, "parallel.tensor": 8}, ANALYTIC),
)
PLAN = Plan(
    "175b & more",
    "64 x h100",
    {"mesh": "pipe 8 x tensor 8"},
    one_f_one_b(64, 8),
    ANALYTIC,
    COMPILED,
    CHOICES,
    "maxmeg plan --config=175b",
)
VOID = {"meta", "link", "br", "img", "input", "hr"}
REFERENCES = {"src", "href", "srcset", "data", "action"}


class Page(HTMLParser):
    """Headings and text; every element closed where it should be; nothing fetched."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag != "script" and tag != "link"
        assert not REFERENCES & {name for name, _ in attrs}, attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert not REFERENCES & {name for name, _ in attrs}, attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_page_has_every_part():
    page = Page(plan_html(PLAN))
    assert page.headings == [
        "175b & more on 64 x h100",
        "Memory per GPU, estimated",
        "Parameters",
        "Step time, estimated",
        "Layouts, best first",
        "Pipeline",
        "Communication per step, estimated",
        "Compiled for these GPUs",
    ]
    text = "\n".join(page.texts)
    for part in (
        "fits: 50.0 of 70.0 GiB, 20.0 GiB free",
        "does not fit by 5.0 GiB: 77.0 of 72.0 GiB",
        "gathered <sequences>",
        "12,288",
        "1F1B: 8 stages, 64 microbatches",
        "__cudnn$fmhaSoftmax",
        "pipe + data",
        "pipe 8, tensor 8",
        "44.3%",
        "maxmeg plan --config=175b",
    ):
        assert part in text, part


def test_page_fetches_nothing():
    """Elements that fetch are refused in Page."""
    html = plan_html(PLAN)
    assert re.findall(r"https?://[^\"' <]+", html) == ["http://www.w3.org/2000/svg"]
    assert "@import" not in html and "url(" not in html
    assert html.count('name="viewport"') == 1
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize(
    ("missing", "heading"),
    [
        ({"compiled": None}, "Compiled for these GPUs"),
        ({"table": None}, "Pipeline"),
        ({"choices": ()}, "Layouts, best first"),
        ({"analytic": None}, "Parameters"),
        ({"analytic": dataclasses.replace(ANALYTIC, traffic=())}, "Communication of a step"),
    ],
)
def test_page_without_a_part(missing: dict, heading: str):
    page = Page(plan_html(dataclasses.replace(PLAN, **missing)))
    assert not any(found.startswith(heading) for found in page.headings)
    assert len(page.headings) >= 4


def test_memory_bar_is_as_long_as_capacity_or_need():
    html = plan_html(dataclasses.replace(PLAN, table=None, choices=()))
    bars = re.findall(r'<div class="bar" role="img".*?</div>', html, re.DOTALL)
    fits, too_large = (
        ([float(width) for width in re.findall(r'<i style="width:([\d.]+)%', bar)], bar)
        for bar in bars
    )
    assert sum(fits[0]) == pytest.approx(100 * 50 / 70, abs=0.01)
    assert "<u" not in fits[1]
    assert sum(too_large[0]) == pytest.approx(100, abs=0.01)
    (limit,) = re.findall(r'<u style="left:([\d.]+)%', too_large[1])
    assert float(limit) == pytest.approx(100 * 72 / 77, abs=0.01)


def test_verdict_at_the_limit():
    """The formulas may be too low: near the limit only the compiler can tell."""

    def words(report, capacity: float) -> str:
        return verdict(dataclasses.replace(report, capacity=int(capacity * GIB)))

    assert words(ANALYTIC, 50 / (1 - MARGIN) + 0.1) == "fits: 50.0 of 52.7 GiB, 2.7 GiB free"
    tight = "tight: 50.0 of 52.0 GiB, within 5% of the limit; check with --compile"
    assert words(ANALYTIC, 52) == tight
    assert words(ANALYTIC, 50).startswith("tight: 50.0 of 50.0 GiB")
    assert words(ANALYTIC, 49).startswith("does not fit by 1.0")
    assert words(COMPILED, 77) == "fits: 77.0 of 77.0 GiB, 0.0 GiB free"
