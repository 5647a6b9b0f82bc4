"""A plan with all its parts, as text for a terminal and as JSON."""

import dataclasses
import itertools
import json
import pathlib
import textwrap
from collections.abc import Sequence

from maxmeg.config import values
from maxmeg.config.schema import Config
from maxmeg.config.stages import is_balanced, units_of_chunks
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.models.mixers import unit_costs
from maxmeg.pipeline.schedule import SCHEDULES, Table, bubble, live
from maxmeg.planning.report import MARGIN, Analytic, Collective, Compiled, Traffic
from maxmeg.runtime.metrics.progress import quantity

VERSION = 1  # of the JSON: raised when a field changes its meaning or goes away
GIB = 2**30
MEMORY_TITLE = "memory per device, estimated"
HOST_TITLE = "pinned host memory per GPU, estimated"
SHORT = 0.1  # seconds; shorter steps are shown in milliseconds
TRAFFIC_HEADER = ["purpose", "kind", "runs", "GiB sent", "ms"]
CHOICE_HEADER = ["step", "tokens/s/GPU", "MFU, estimate", "bubble", "GiB"]
DAY = 86_400  # seconds
SCHEDULE_TITLES = {
    "one_f_one_b": "1F1B",
    "zero_bubble": "Zero bubble",
    "forward_only": "Forward only",
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout of a search. settings: values by flag name."""

    settings: dict[str, int | str | bool]
    analytic: Analytic
    compiled: Compiled | None = None

    @property
    def layout(self) -> str:
        """ "tensor 8, pipe 4, recompute full", without sizes of 1."""
        single_stage = self.settings.get("parallel.pipe") == 1
        words = [
            f"{path.rpartition('.')[2].replace('_', ' ')} {value}"
            for path, value in self.settings.items()
            if value not in (0, 1) and not (single_stage and path == "parallel.schedule")
        ]
        return ", ".join(words + ["offload"] * bool(self.settings.get("optim.offload")))


@dataclasses.dataclass(frozen=True)
class Plan:
    """All parts of a plan; None or empty if not requested or unknown.

    settings: descriptions of the run, by name. table: the pipeline schedule. choices: layouts of a
    search, best first. command: the command line that made the plan.
    """

    name: str
    hardware: str
    settings: dict[str, str]
    table: Table | None = None
    analytic: Analytic | None = None
    compiled: Compiled | None = None
    choices: tuple[Choice, ...] = ()
    command: str = ""

    def __str__(self) -> str:
        return plan_text(self)


def plan_of(config: Config, count: int) -> Plan:
    """The plan of a config on `count` devices, without hardware; ValueError if it is not valid."""
    validate(config, count)
    sizes, train, model = axis_sizes(config.parallel, count), config.train, config.model
    samples = sizes["data"] * sizes["fsdp"] * sizes["expert"] * train.micro_batch_size
    microbatches = train.global_batch_size // samples if samples else 1
    words = {
        "model": f"{model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{model.attention.num_heads} heads, vocabulary {model.vocab_size}",
        "batch": f"{train.global_batch_size} samples of {config.data.sequence_length} tokens in "
        f"{microbatches} microbatch{'es' * (microbatches > 1)}",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1),
        "stages": stages_words(config),
        "recompute": model.recompute,
        "precision": ", ".join([model.dtype.name, *changed(train.quantization)]),
        "optimizer": ", ".join(
            [config.optim.optimizer.name, *changed(config.optim, "moments", "masters", "offload")]
            + [f"ema {words}" for words in changed(config.optim.ema, "decay")]
        ),
        "experts": experts_words(config, sizes),
    }
    name, pipe = pathlib.Path(config.run_dir).name, sizes["pipe"]
    schedule = SCHEDULES[config.parallel.schedule.name]
    table = schedule(microbatches, pipe, config.parallel.chunks) if pipe > 1 else None
    return Plan(name, "", {key: text for key, text in words.items() if text}, table)


def changed(section, *names: str) -> list[str]:
    """The settings that differ from their defaults, as "moments float8" or "offload". names: the
    fields to look at; none: all."""
    pairs = [(field, getattr(section, field.name)) for field in dataclasses.fields(section)]
    return [
        f"{field.name} {values.text(value)}".removesuffix(" true")
        for field, value in pairs
        if value != field.default and (not names or field.name in names)
    ]


def stages_words(config: Config) -> str:
    """Layers of each chunk of the pipeline where they are balanced by cost; else empty."""
    model, costs = config.model, unit_costs(config.model)
    if not is_balanced(model, config.parallel):
        return ""
    sizes = [size for unit, repeats in model.groups for size in [len(unit)] * repeats]
    work = [c for c, (_, repeats) in zip(costs, model.groups, strict=True) for c in [c] * repeats]
    counts = units_of_chunks(model, config.parallel, costs)
    chunks = [
        slice(end - n, end) for n, end in zip(counts, itertools.accumulate(counts), strict=True)
    ]
    layers, work = [sum(sizes[chunk]) for chunk in chunks], [sum(work[chunk]) for chunk in chunks]
    return (
        f"{', '.join(map(str, layers))} layers, balanced by cost: the most expensive has "
        f"{max(work) * len(work) / sum(work):.2f} of the mean"
    )


def experts_words(config: Config, sizes: dict[str, int]) -> str:
    """Number of experts, top k, width and placement; empty without experts."""
    model, parallel = config.model, config.parallel
    if not model.has("moe"):
        return ""
    layers = sum("moe" in model.mixers(i) for i in range(model.num_layers))
    devices = sizes["expert"] * sizes["context"] * parallel.fold
    words = f"{model.moe.num_experts} in {layers} layers, top-{model.moe.top_k} routing"
    words += (
        f", a shared expert of width {model.moe.shared_ffn_size}"
        if model.moe.shared_ffn_size
        else ""
    )
    words += f", width {model.expert_ffn}, {model.moe.num_experts // devices} per GPU"
    if sizes["tensor"] > 1:
        whole = parallel.expert_tensor == 1
        words += ", each on one GPU" if whole else f", each over tensor {sizes['tensor']}"
    if devices > 1:
        kind = parallel.expert_exchange.name.replace("_", "-").replace("auto", "all-to-all")
        words += f"; {kind}"
        in_rounds = kind != "gather" and not model.moe.pad_to_capacity
        words += f", buffer {parallel.expert_buffer:g}" if in_rounds else ""
        nodes = parallel.nodes_of_experts(model.moe.num_groups)
        words += f", once to each of {nodes} nodes" if nodes > 1 else ""
    if model.moe.capacity_factor:
        kept = "padded to" if model.moe.pad_to_capacity else "dropped beyond"
        words += f"; {kept} {model.moe.capacity_factor:g} times the mean load"
    return words


def plan_text(plan: Plan) -> str:
    """All parts of the plan, separated by empty lines."""
    parts = [heading(plan)]
    parts += [choices_text(plan.choices)] if plan.choices else []
    parts += [analytic_text(plan.analytic)] if plan.analytic else []
    parts += ["pipeline\n" + _indented(schedule_text(plan.table))] if plan.table else []
    parts += [compiled_text(plan.compiled)] if plan.compiled else []
    return "\n\n".join(parts)


def heading(plan: Plan) -> str:
    title = f"{plan.name} on {plan.hardware}" if plan.hardware else plan.name
    return "\n".join(
        [title, *aligned([[f"  {name}", text] for name, text in plan.settings.items()])]
    )


def analytic_text(report: Analytic) -> str:
    """Parameters, and estimates of memory, time and communication."""
    count = sum(report.parameters.values())
    parameters = [[f"  {name}", f"{number:,}"] for name, number in report.parameters.items()]
    modes = [[f"  {mode}", gib(size)] for mode, size in report.activations.items()]
    seconds = [
        *([f"  {name}", time] for name, time in times(report).items()),
        ["  FLOPs", f"{report.flops:.3e}"],
        *([f"  {name}", speed] for name, speed in speeds(report).items()),
    ]
    blocks = [
        aligned([["parameters", ""], *parameters, ["  total", f"{count:,}"]], right=1),
        [
            *memory_table(report.memory, "memory per GPU, estimated"),
            f"  {verdict(report)}",
            *(["", *memory_table(report.host_memory, HOST_TITLE)] if report.host_memory else ()),
            *remedies_text(report),
        ],
        aligned([["activations by recompute mode", "GiB"], *modes], right=1),
        aligned([["step time, estimated", ""], *seconds], right=1),
    ]
    if report.traffic:
        header = ["communication per step", *TRAFFIC_HEADER]
        rows = [[f"  {row.axis}", *traffic_cells(row)] for row in report.traffic]
        blocks.append(aligned([header, *rows], right=4))
    return "\n\n".join("\n".join(block) for block in blocks)


def compiled_text(report: Compiled) -> str:
    """The compiler's report on the step."""
    blocks = [
        [
            *memory_table(compiled_memory(report), "compiled: memory per GPU"),
            f"  {verdict(report)}",
            *([f"  and {gib(report.host)} GiB of pinned host memory"] if report.host else ()),
        ],
        [
            f"lowered in {report.lower_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s; "
            f"{report.flops:.3e} FLOPs in matrix products per GPU and step"
        ],
    ]
    if report.collectives:
        header = ["collectives", "kind", "", "instructions", "runs", "exposed", "GiB"]
        rows = [
            [
                f"  {'+'.join(c.axes) or '-'}",
                c.kind,
                ("async" if c.asynchronous else "sync") + ", if needed" * c.unbounded,
                *collective_cells(c),
            ]
            for c in merged(report.collectives)
        ]
        blocks.append(aligned([header, *rows], right=4))
    if report.kernels:
        rows = [[f"  {name}", f"{runs:,}"] for name, runs in report.kernels.items()]
        blocks.append(aligned([["custom kernels", "runs"], *rows], right=1))
    return "\n\n".join("\n".join(block) for block in blocks)


def speeds(report: Analytic) -> dict[str, str]:
    """Return the estimated speed in the units in which speeds are published."""
    days = 1e12 / report.tokens_per_second / DAY
    return {
        "tokens per second": quantity(report.tokens_per_second),
        "tokens/s per GPU": f"{report.tokens_per_second / report.devices:,.0f}",
        "TFLOP/s per GPU": f"{report.flops / report.step_seconds / report.devices / 1e12:.0f}",
        "MFU, estimate": f"{report.mfu:.1%}",
        "days for 1T tokens": f"{days:,.1f}",
    }


def schedule_title(table: Table) -> str:
    """ "Interleaved 1F1B: 4 stages x 2 chunks, 16 microbatches"."""
    name = SCHEDULE_TITLES.get(table.name, table.name)
    name = f"Interleaved {name}" if table.name == "one_f_one_b" and table.chunks > 1 else name
    chunks = f" x {table.chunks} chunks" if table.chunks > 1 else ""
    return f"{name}: {table.stages} stages{chunks}, {table.microbatches} microbatches"


def schedule_facts(table: Table) -> list[tuple[str, str]]:
    """(name, text) of the schedule: ticks, bubble, live activations."""
    idle, in_flight = bubble(table), live(table)
    on = ", ".join(f"{count} {name}" for name, count in idle.ticks.items())
    terms = [f"{part:.4g} {name}" for part, name in zip(idle.lost, "FBW", strict=True) if part]
    lost = " + ".join(terms) or "nothing"
    over = f"{idle.fraction:.1%} over the ideal where F = B = W; idle per stage: {lost}"
    facts = [
        ("schedule", f"{schedule_title(table)}, {table.ticks} ticks: {on}"),
        ("bubble", over),
    ]
    if any(in_flight):
        each = " ".join(str(count) for count in in_flight)
        unit = "microbatches" if table.chunks == 1 else "chunks of microbatches"
        facts.append(("in flight", f"at most {each} {unit} on stages 0 to {table.stages - 1}"))
    if table.deferred:
        facts.append(
            ("deferred", f"at most {table.deferred} weight-gradient passes wait per stage")
        )
    return facts


def schedule_text(table: Table) -> str:
    """The facts for a terminal."""
    facts = schedule_facts(table)
    width = max(len(name) for name, _ in facts) + 2
    lines = (f"{name:{width}}{text}" for name, text in facts)
    return "\n".join(textwrap.fill(line, 96, subsequent_indent=" " * width) for line in lines)


def traffic_cells(row: Traffic) -> list[str]:
    """Cells below TRAFFIC_HEADER."""
    milliseconds = f"{row.seconds * 1e3:.1f}"
    return [row.purpose, row.kind, f"{row.runs:,}", gib(row.volume), milliseconds]


def collective_cells(row: Collective) -> list[str]:
    """Instructions, runs, exposed runs and GiB of a row of `merged`."""
    return [f"{row.instructions:,}", f"{row.runs:,}", f"{row.exposed:,}", gib(row.volume)]


def choice_cells(report: Analytic) -> list[str]:
    """Cells below CHOICE_HEADER."""
    return [
        times(report)["step"],
        f"{report.tokens_per_second / report.devices:,.0f}",
        f"{report.mfu:.1%}",
        f"{report.bubble_fraction:.1%}",
        gib(report.total),
    ]


def merged(collectives: Sequence[Collective]) -> list[Collective]:
    """One row per kind, axes, asynchrony and boundedness, whatever the number of runs."""
    rows: dict[tuple, Collective] = {}
    for new in collectives:
        key = (new.axes, new.kind, new.asynchronous, new.unbounded)
        counts = ("instructions", "runs", "volume", "exposed")
        old = rows.get(key, dataclasses.replace(new, **dict.fromkeys(counts, 0)))
        sums = {name: getattr(old, name) + getattr(new, name) for name in counts}
        rows[key] = dataclasses.replace(new, **sums)
    return list(rows.values())


def choices_text(choices: Sequence[Choice]) -> str:
    """The ranked layouts, with the compiler's memory if known."""
    compiled = any(choice.compiled for choice in choices)
    rows = [["layouts, best first", *CHOICE_HEADER] + ["compiled GiB"] * compiled]
    for rank, choice in enumerate(choices, 1):
        row = [f"  {rank:2}  {choice.layout}", *choice_cells(choice.analytic)]
        shown = choice.compiled and gib(choice.compiled.total) + "!" * (not choice.compiled.fits)
        rows.append(row + [shown or ""] * compiled)
    lines = aligned(rows, right=5 + compiled)
    if any(choice.compiled and not choice.compiled.fits for choice in choices):
        lines.append("  ! does not fit, according to the compiler")
    return "\n".join(lines)


def verdict(report: Analytic | Compiled) -> str:
    """ "fits: 30.1 of 74.5 GiB, 44.4 GiB free", or how much memory is missing, or that only the
    compiler can tell."""
    total, capacity = report.total / GIB, report.capacity / GIB
    if isinstance(report, Analytic) and report.tight:
        return (
            f"tight: {total:.1f} of {capacity:.1f} GiB, within {MARGIN:.0%} of the limit; "
            "check with --compile"
        )
    if report.fits:
        return f"fits: {total:.1f} of {capacity:.1f} GiB, {capacity - total:.1f} GiB free"
    return f"does not fit by {total - capacity:.1f} GiB: {total:.1f} of {capacity:.1f} GiB"


def remedies_text(report: Analytic) -> list[str]:
    """Lines with the flags that would make a config fit; none for a config that fits."""
    if report.fits:
        return []
    if not report.remedies:
        return [
            "  no change of recomputation, microbatches and mesh fits: --search tries all layouts"
        ]
    rows = [[f"    {r.flags}", gib(r.total), f"x {r.slowdown:.2f}"] for r in report.remedies]
    return aligned([["  any one of these makes it fit", "GiB", "step"], *rows], right=2)


def parts_of_step(report: Analytic) -> dict[str, float]:
    """Seconds of a step: compute, bubble, exposed communication and transfers to host memory."""
    busy = report.compute_seconds + report.communication_seconds + report.offload_seconds
    parts = {
        "compute": report.compute_seconds,
        "bubble": max(report.step_seconds - busy, 0.0),
        "communication, exposed": report.communication_seconds,
    }
    host = {"host memory, exposed": report.offload_seconds} if report.host_memory else {}
    return parts | host


def times(report: Analytic) -> dict[str, str]:
    """The parts of a step and their sum, all in seconds or all in milliseconds."""
    parts = parts_of_step(report) | {"step": report.step_seconds}
    scale, unit = (1, "s") if report.step_seconds >= SHORT else (1000, "ms")
    return {name: f"{scale * seconds:,.3f} {unit}" for name, seconds in parts.items()}


def compiled_memory(report: Compiled) -> dict[str, int]:
    """Bytes per device by the compiler's count."""
    parts = {
        "state and batch": report.arguments,
        "temporaries": report.temporaries,
        "other outputs": report.outputs_not_aliased,
    }
    return {name: size for name, size in parts.items() if size}


def plan_json(plan: Plan) -> str:
    """The plan as a JSON object with a `version`; missing parts are null."""
    return json.dumps(
        {
            "version": VERSION,
            "name": plan.name,
            "hardware": plan.hardware,
            "command": plan.command,
            "settings": plan.settings,
            "analytic": _report(plan.analytic),
            "pipeline": _pipeline(plan.table),
            "compiled": _report(plan.compiled),
            "layouts": [
                {
                    "settings": choice.settings,
                    "analytic": _report(choice.analytic),
                    "compiled": _report(choice.compiled),
                }
                for choice in plan.choices
            ],
        },
        indent=2,
    )


def gib(size: float) -> str:
    """Bytes as GiB with two decimals."""
    amount = size / GIB
    return "<0.01" if 0 < amount < 0.005 else f"{amount:,.2f}"


def aligned(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Rows with the same number of cells as lines, the last `right` columns flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    left = len(widths) - right
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def memory_table(memory: dict[str, int], title: str = MEMORY_TITLE) -> list[str]:
    """Lines of a table of bytes by purpose, in GiB, and their sum."""
    rows = [[f"  {name}", gib(size)] for name, size in memory.items() if size]
    return aligned([[title, "GiB"], *rows, ["  total", gib(sum(memory.values()))]], right=1)


def _report(report: Analytic | Compiled | None) -> dict | None:
    if report is None:
        return None
    return dataclasses.asdict(report) | {"total": report.total, "fits": report.fits}


def _pipeline(table: Table | None) -> dict | None:
    if table is None:
        return None
    idle = bubble(table)
    names = ("forward", "input_gradients", "weight_gradients")
    return {
        "schedule": table.name,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "chunks": table.chunks,
        "ticks": idle.ticks,
        "lost": dict(zip(names, idle.lost, strict=True)),
        "ideal": dict(zip(names, idle.ideal, strict=True)),
        "bubble_fraction": idle.fraction,
        "live_activations": live(table),
        "activation_slots": table.slots,
        "deferred_slots": table.deferred,
    }


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
