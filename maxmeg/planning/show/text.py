"""A plan with all its parts, as text for a terminal and as JSON."""

import dataclasses
import itertools
import json
import pathlib
import textwrap
from collections.abc import Sequence

from maxmeg.config import values
from maxmeg.config.parallel import LaneOrder
from maxmeg.config.schema import Config
from maxmeg.config.stages import is_balanced, units_of_chunks
from maxmeg.config.validate import axis_sizes, validate
from maxmeg.models.mixers import unit_costs
from maxmeg.pages.table import aligned
from maxmeg.pipeline.schedule import SCHEDULES, Table, bubble, live
from maxmeg.planning.report import MARGIN, Analytic, Compiled
from maxmeg.planning.show import tables
from maxmeg.planning.show.tables import GIB, Choice, gib

VERSION = 1  # of the JSON: raised when a field changes its meaning or goes away
MEMORY_TITLE = "memory per device, estimated"
SCHEDULE_TITLES = {
    "one_f_one_b": "1F1B",
    "zero_bubble": "Zero bubble",
    "forward_only": "Forward only",
}


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
    parallel, table = config.parallel, None
    if pipe > 1:
        together = parallel.lanes is LaneOrder.together
        schedule = SCHEDULES[parallel.schedule.name]
        table = schedule(microbatches, pipe, parallel.chunks, together)
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
    shared = model.moe.shared_ffn_size
    words += f", a shared expert of width {shared}" if shared else ""
    words += f", width {model.expert_ffn}, {model.moe.num_experts // devices} per GPU"
    if sizes["tensor"] > 1:
        is_whole = parallel.expert_tensor == 1
        words += ", each on one GPU" if is_whole else f", each over tensor {sizes['tensor']}"
    if devices > 1:
        kind = parallel.expert_exchange.name.replace("_", "-").replace("auto", "all-to-all")
        words += f"; {kind}"
        in_rounds = kind != "gather" and not model.moe.pad_to_capacity
        words += f", buffer {parallel.expert_buffer:g}" if in_rounds else ""
        nodes = parallel.nodes_of_experts(model.moe.num_groups)
        words += f", once to each of {nodes} nodes" if nodes > 1 else ""
    if model.moe.capacity_factor:
        limit = "padded to" if model.moe.pad_to_capacity else "dropped beyond"
        words += f"; {limit} {model.moe.capacity_factor:g} times the mean load"
    return words


def plan_text(plan: Plan) -> str:
    """All parts of the plan, separated by empty lines."""
    parts = [heading(plan)]
    parts += [choices_text(plan.choices)] if plan.choices else []
    parts += [analytic_text(plan.analytic)] if plan.analytic else []
    parts += ["pipeline\n" + textwrap.indent(schedule_text(plan.table), "  ")] if plan.table else []
    parts += [compiled_text(plan.compiled)] if plan.compiled else []
    return "\n\n".join(parts)


def heading(plan: Plan) -> str:
    title = f"{plan.name} on {plan.hardware}" if plan.hardware else plan.name
    return "\n".join(
        [title, *aligned([[f"  {name}", text] for name, text in plan.settings.items()])]
    )


def analytic_text(report: Analytic) -> str:
    """Parameters, and estimates of memory, time and communication."""
    step = tables.step_time(report)
    speeds = {"FLOPs": f"{report.flops:.3e}", **tables.speeds(report)}
    step = dataclasses.replace(step, rows=[*step.rows, *([*row, ""] for row in speeds.items())])
    host = report.host_memory
    blocks = [
        tables.parameters(report).lines("parameters"),
        [
            *memory_table(report.memory, "memory per GPU, estimated"),
            f"  {verdict(report)}",
            *(["", *memory_table(host, "pinned host memory per GPU, estimated")] if host else ()),
            *remedies_text(report),
        ],
        tables.activations(report).lines("activations by recompute mode"),
        step.lines("step time, estimated"),
    ]
    if report.traffic:
        blocks.append(tables.traffic(report).lines("communication per step"))
    return "\n\n".join("\n".join(block) for block in blocks)


def compiled_text(report: Compiled) -> str:
    """The compiler's report on the step."""
    blocks = [
        [
            *memory_table(tables.compiled_memory(report), "compiled: memory per GPU"),
            f"  {verdict(report)}",
            *([f"  and {gib(report.host)} GiB of pinned host memory"] if report.host else ()),
        ],
        [
            f"lowered in {report.lower_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s; "
            f"{report.flops:.3e} FLOPs in matrix products per GPU and step"
        ],
    ]
    if report.collectives:
        blocks.append(tables.collectives(report).lines("collectives"))
    if report.kernels:
        blocks.append(tables.kernels(report).lines("custom kernels"))
    return "\n\n".join("\n".join(block) for block in blocks)


def schedule_title(table: Table) -> str:
    """ "Interleaved 1F1B: 4 stages x 2 chunks, 16 microbatches"."""
    name = SCHEDULE_TITLES.get(table.name, table.name)
    name = f"Interleaved {name}" if table.name == "one_f_one_b" and table.chunks > 1 else name
    chunks = f" x {table.chunks} chunks" if table.chunks > 1 else ""
    return f"{name}: {table.stages} stages{chunks}, {table.microbatches} microbatches"


def schedule_facts(table: Table) -> list[tuple[str, str]]:
    """(name, text) of the schedule: ticks, bubble, live activations."""
    idle, in_flight = bubble(table), live(table)
    counts = ", ".join(f"{count} {name}" for name, count in idle.ticks.items())
    terms = [f"{part:.4g} {name}" for part, name in zip(idle.lost, "FBW", strict=True) if part]
    lost = " + ".join(terms) or "nothing"
    over = f"{idle.fraction:.1%} over the ideal where F = B = W; idle per stage: {lost}"
    facts = [
        ("schedule", f"{schedule_title(table)}, {table.ticks} ticks: {counts}"),
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


def choices_text(choices: Sequence[Choice]) -> str:
    """The ranked layouts, with the compiler's memory if known."""
    lines = tables.choices(choices).lines("layouts, best first")
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
    table = tables.remedies(report)
    return [f"  {line}" for line in table.lines(table.header[0])]


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


def memory_table(parts: dict[str, int], title: str = MEMORY_TITLE) -> list[str]:
    """Lines of a table of bytes by purpose, in GiB, and their sum."""
    return tables.memory(parts, 0).lines(title)


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
