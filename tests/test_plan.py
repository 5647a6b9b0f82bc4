"""The plan command: what it prints and writes, and what it refuses."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from maxmeg import plan
from maxmeg.config.flags import run_command
from maxmeg.config.schema import Config
from maxmeg.planning.remedies import train_command
from maxmeg.planning.report import Collective, Compiled
from maxmeg.planning.show.tables import GIB
from maxmeg.planning.show.text import VERSION

BALANCED = "11, 11, 11, 19 layers, balanced by cost: the most expensive has 1.49 of the mean"
PIPELINE = ["--parallel.pipe=8", "--parallel.tensor=8"]


def run(size: str, *arguments: str) -> None:
    run_command(plan.main, plan.Options, argv=["plan", f"--config={size or 'gpt'}", *arguments])


def test_a_layout_is_planned(capsys, tmp_path: Path):
    svg, page, data = tmp_path / "a.svg", tmp_path / "a.html", tmp_path / "a.json"
    files = [f"--timeline={svg}", f"--html={page}", f"--json={data}"]
    run("175b", "--hardware=h100x64", *PIPELINE, *files)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "175b on 64 x h100"
    assert "96 layers, hidden size 12288, 96 heads, vocabulary 50257" in lines[1]
    for part in ("pipe 8 x tensor 8", "lanes=together (apart: +", "fits: ", "1F1B: 8 stages, 512"):
        assert any(part in line for line in lines), part
    for block in out.split("\n\n"):
        if block.startswith(("parameters", "activations", "communication")):
            assert len({len(line) for line in block.splitlines()[1:]}) == 1, block
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "<h1>175b on 64 x h100</h1>" in page.read_text()
    found = json.loads(data.read_text())
    assert found["version"] == VERSION
    assert found["hardware"] == "64 x h100"
    assert found["compiled"] is None and found["layouts"] == []
    report = found["analytic"]
    assert report["total"] == sum(report["memory"].values())
    assert report["fits"] and 174e9 < sum(report["parameters"].values()) < 175e9
    assert {"axis", "purpose", "kind", "runs", "volume", "seconds"} == set(report["traffic"][0])
    assert found["pipeline"]["live_activations"] == [16, 14, 12, 10, 8, 6, 4, 2]
    assert found["pipeline"]["activation_slots"] == 16
    assert found["pipeline"]["lost"] == dict.fromkeys(found["pipeline"]["lost"], 7.0)


def test_timeline_alone_needs_no_hardware(capsys, tmp_path: Path):
    run("175b", "--parallel.pipe=4", "--parallel.fsdp=2", f"--timeline={tmp_path}/a")
    out = capsys.readouterr().out
    assert out.startswith("175b\n")
    assert "1F1B: 4 stages, 256 microbatches" in out and "at most 7 5 3 1" in out
    assert "memory" not in out
    assert (tmp_path / "a").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("name", "flags", "shown", "missing"),
    [
        ("175b", "pipe=4 schedule=zero_bubble", "Zero bubble: 4 stages", "balanced"),
        ("175b", "pipe=4 chunks=3", "Interleaved 1F1B: 4 stages x 3 chunks", "balanced"),
        ("nemotron-h-8b", "pipe=4 fsdp=2", BALANCED, "memory"),
        ("nemotron-h-8b", "pipe=4 chunk_layers=2,2,2,2", "4 stages", "balanced"),
    ],
)
def test_schedules_and_stages_are_shown(capsys, name, flags, shown, missing):
    run(name, *(f"--parallel.{flag}" for flag in flags.split()))
    out = capsys.readouterr().out
    assert shown in out and missing not in out


def test_vocabulary_of_the_tokenizer(capsys):
    run("", "--hardware=h100x2")
    out = capsys.readouterr().out
    assert "vocabulary 257" in out and "8 samples of 128 tokens in 1 microbatch\n" in out
    assert "pipeline" not in out


COMPILED = Compiled(
    arguments=10 * GIB,
    temporaries=70 * GIB,
    outputs_not_aliased=0,
    capacity=72 * GIB,
    collectives=(Collective("all-gather", ("tensor",), 4, 400, GIB, True),),
    kernels={"__cudnn$fmhaSoftmax": 4096},
    flops=1e15,
    lower_seconds=1.0,
    compile_seconds=2.0,
)


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[Config, str, int]]:
    """Calls of the compiler, which answers COMPILED."""
    calls = []

    def compile_report(config: Config, name: str, count: int) -> Compiled:
        calls.append((config, name, count))
        return COMPILED

    monkeypatch.setattr(plan, "compile_report", compile_report)
    monkeypatch.setattr(plan, "check_plugins", lambda: None)
    return calls


def test_the_compiled_section_is_reported(capsys, compiled):
    run("175b", "--hardware=h100x64", *PIPELINE, "--compile")
    out = capsys.readouterr().out
    assert [(name, count) for _, name, count in compiled] == [("h100", 64)]
    assert compiled[0][0].parallel.pipe == 8
    assert "does not fit by 8.0 GiB: 80.0 of 72.0 GiB" in out
    assert "__cudnn$fmhaSoftmax  4,096" in out and "async" in out


@pytest.mark.slow
def test_search_ranks_and_compiles_the_best_three(capsys, tmp_path: Path, compiled):
    run("175b", "--hardware=h100x64", "--search", "--compile", f"--json={tmp_path}/a")
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "a").read_text())
    layouts = found["layouts"]
    assert 3 < len(layouts) <= plan.SHOWN
    seconds = [layout["analytic"]["step_seconds"] for layout in layouts]
    assert seconds == sorted(seconds)
    assert [layout["compiled"] is not None for layout in layouts[:4]] == [True] * 3 + [False]
    sizes = [config.parallel.tensor for config, *_ in compiled]
    assert sizes == [layout["settings"]["parallel.tensor"] for layout in layouts[:3]]
    assert "80.00!" in out and "! does not fit, according to the compiler" in out
    assert found["analytic"] == layouts[0]["analytic"]
    assert found["compiled"]["total"] == 80 * GIB


@pytest.mark.slow
def test_flags_of_the_best_layout_give_the_same_plan(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["maxmeg plan", "--config=llama3-8b"])
    run("llama3-8b", "--hardware=h100x16", "--search", f"--json={tmp_path}/a")
    best = json.loads((tmp_path / "a").read_text())
    *command, flags = best["settings"].pop("command").split(maxsplit=3)
    assert command == ["maxmeg", "train", "--config=llama3-8b"]
    run("llama3-8b", "--hardware=h100x16", *flags.split(), f"--json={tmp_path}/b")
    again = json.loads((tmp_path / "b").read_text())
    assert again["settings"].pop("command") == " ".join(command)
    assert again == best | {"layouts": []}


def test_flags_that_make_a_plan_fit(capsys, tmp_path: Path):
    base = ["--hardware=h100x64", *PIPELINE, "--train.micro_batch_size=4", "--parallel.lanes=apart"]
    run("175b", *base, f"--json={tmp_path}/a", f"--html={tmp_path}/a.html")
    out = capsys.readouterr().out
    before = json.loads((tmp_path / "a").read_text())["analytic"]
    missing = before["total"] / GIB - 72.8
    assert f"does not fit by {missing:.1f} GiB" in out and "any one of these makes it fit" in out
    assert len(before["remedies"]) == 2
    for remedy in before["remedies"]:
        assert remedy["flags"] in out and remedy["flags"] in (tmp_path / "a.html").read_text()
        run("175b", *base, *remedy["flags"].split(), f"--json={tmp_path}/b")
        after = json.loads((tmp_path / "b").read_text())["analytic"]
        assert after["fits"] and after["total"] == remedy["total"] and after["remedies"] == []
        slowdown = after["step_seconds"] / before["step_seconds"]
        assert slowdown == pytest.approx(remedy["slowdown"])
    capsys.readouterr()
    run("175b", "--hardware=h100x8", "--parallel.tensor=8")
    assert "--search tries all layouts" in capsys.readouterr().out


BAD = [
    (["--compile"], ["--compile needs GPUs"]),
    ([], ["nothing to plan", "--hardware", "--parallel.pipe=4"]),
    (["--hardware=h100x64", "--timeline=a.svg"], ["--timeline=a.svg", "parallel.pipe=1 has none"]),
    (["--hardware=h100x64", "--json=/no/such/a.json"], ["--json=", "no folder /no/such"]),
    (["--hardware=h100x64", "--html=/"], ["--html=/ is a folder"]),
    (["--hardware=h100x64", "--parallel.pipe=3"], ["3 devices or a multiple, there are 64"]),
    (["--parallel.pipe=5"], ["num_layers=96", "pipe=5", "pad_layers"]),
    (
        ["--parallel.pipe=4", "--parallel.schedule=zero_bubble", "--parallel.chunks=2"],
        ["schedule=zero_bubble does not support parallel.chunks=2", "one_f_one_b"],
    ),
    (["--hardware=h100x64", "--search", "--optim.min_lr=1"], ["optim.min_lr=1.0 must lie"]),
    (["--hardware=h100x8", "--search"], ["does not fit 8 h100 under any layout", "GPUs would be"]),
]


@pytest.mark.parametrize(("arguments", "parts"), BAD)
def test_invalid_options_are_refused(capsys, arguments: list[str], parts: list[str]):
    with pytest.raises(SystemExit) as refused:
        run("175b", *arguments)
    assert refused.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    for part in parts:
        assert part in captured.err, captured.err


def test_a_missing_plugin_is_said_before_anything_else(capsys, monkeypatch):
    def missing():
        raise ValueError("pip install 'maxmeg[plan]'")

    monkeypatch.setattr(plan, "check_plugins", missing)
    with pytest.raises(SystemExit) as refused:
        run("175b", "--hardware=h100x64", "--search", "--compile")
    assert refused.value.code == 2
    assert capsys.readouterr() == ("", "error: pip install 'maxmeg[plan]'\n")


def test_the_command_of_a_plan_trains_with_its_settings():
    given = ["--config=gpt", "--hardware", "h100x8", "--search", "--nocompile", "--json=search"]
    given += ["--run_dir", "json", "--model.layers=*(attention mlp)"]
    expected = "maxmeg train --config=gpt --run_dir json '--model.layers=*(attention mlp)'"
    assert train_command(given, plan.Options, {}) == expected
    assert train_command(given, plan.Options, {"parallel.tensor": 2}).removeprefix(expected) == (
        " --parallel.tensor=2"
    )


@pytest.mark.parametrize("fits", [True, False])
def test_a_layout_that_fits_has_a_command(capsys, monkeypatch, fits: bool):
    arguments = ["--config=175b", "--hardware=h100x64", *PIPELINE[: 2 if fits else 1]]
    monkeypatch.setattr("sys.argv", ["maxmeg plan", *arguments])
    run_command(plan.main, plan.Options)
    command = f"  command    maxmeg train --config=175b {' '.join(PIPELINE)}\n"
    assert (command in capsys.readouterr().out) == fits
