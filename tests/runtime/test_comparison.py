"""The page that compares runs, and its charts."""

import json
import math

import pytest

from maxmeg import plot
from maxmeg.pages.chart import WIDTH, Chart, Curve, legend, tick_texts, ticks


@pytest.mark.parametrize("low", [-1.0, 0.0, 1e-9, 3.14, 1e6])
@pytest.mark.parametrize("span", [1e-12, 3e-4, 0.7, 1.0, 12.0, 5e11])
def test_ticks_are_few_round_and_inside(low, span):
    if span < 1e-9 * abs(low):
        return
    found = ticks(low, low + span)
    assert 3 <= len(found) <= 8
    step = found[1] - found[0]
    assert all(low - step / 100 <= tick <= low + span + step / 100 for tick in found)
    mantissa = step / 10 ** math.floor(math.log10(step * 1.001))
    assert any(mantissa == pytest.approx(m, rel=1e-3) for m in (1, 2, 5))
    texts = tick_texts(found)
    assert len(set(texts)) == len(texts), texts


def test_tick_texts_have_one_unit():
    assert tick_texts([0, 5e-5, 1e-4]) == ["0", "0.5e-4", "1.0e-4"]
    assert tick_texts([996e3, 998e3, 1e6]) == ["0.996M", "0.998M", "1.000M"]
    assert tick_texts([0, 0.5, 1]) == ["0", "0.5", "1.0"]
    assert tick_texts([-500, 0, 500, 1000]) == ["-500", "0", "500", "1,000"]


def test_points_lie_in_the_chart_and_lines_are_thinned():
    curves = [Curve("a", "#123456", range(10_000), [1 / (n + 1) for n in range(10_000)])]
    chart = Chart("Loss", "step", curves, top=0.01)
    ((_, points),) = chart.lines
    assert 100 < len(points) < 1100
    assert all(chart.left <= x <= chart.right and 0 <= y <= chart.bottom for x, y, _ in points)
    assert not Chart("Loss", "step", [Curve("empty", "#123456", [], [])]).lines


def test_a_legend_has_as_many_rows_as_it_needs():
    curves = [Curve(f"run {n} " + 10 * "long", "#123456", [1], [n]) for n in range(3)]
    chart = Chart("Loss", "step", curves)
    rows = [y for *_, y in chart.legend]
    assert len(set(rows)) == 3 and max(rows) < chart.height
    assert len({y for *_, y in legend([("a", []), ("b", [])], 0, WIDTH, 0)}) == 1
    assert not Chart("Loss", "step", curves[:1]).legend
    ((name, *_),) = legend([("/" + 60 * "x" + "/run", [])], 0, WIDTH, 0)
    assert len(name) == 50 and name.startswith("…") and name.endswith("x/run")


def write_run(folder, losses, **more):
    folder.mkdir(parents=True)
    rows = [
        {"step": n, "loss": loss, "consumed_tokens": 256 * n, "step_seconds": 0.5, **more}
        for n, loss in enumerate(losses, 1)
    ]
    rows[-1]["validation_loss"] = 1.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("axis", ["step", "tokens", "seconds"])
def test_the_page_shows_every_run_and_needs_nothing_else(tmp_path, axis, capsys):
    runs = [
        write_run(tmp_path / "a<b", [3.0, None, 2.0], learning_rate=0.0),
        write_run(tmp_path / "c", [4.0] * 90, mfu=41.0, tokens_per_second=512.0),
    ]
    page = tmp_path / "page.html"
    assert plot.main([*runs, f"--x={axis}", f"--output={page}"]) == 0
    text = page.read_text()
    assert "a&lt;b" in text and "a<b" not in text and "<script" not in text and "http" not in text
    for part in ("Training loss", "Validation loss", "Learning rate", "MFU", "1.2500", ">512<"):
        assert part in text
    assert "Peak memory" not in text and "nan" not in text.lower()
    assert f"wrote {page}" in capsys.readouterr().out


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="no run: name folders"):
        plot.main([])
    with pytest.raises(ValueError, match=r"not the folder of a run: it has no metrics\.jsonl"):
        plot.main([str(tmp_path)])
    folder = write_run(tmp_path / "run", [1.0])
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="has no consumed_tokens: choose another --x than tokens"):
        plot.main([folder, "--x=tokens"])
