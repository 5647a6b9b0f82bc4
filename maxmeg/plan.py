"""Plan memory, communication and time of a run, for GPUs that this machine need not have.

    maxmeg plan --config=llama3-8b --hardware=h100x64 [--search] [--compile]
    maxmeg plan --config=gpt --parallel.pipe=4 --timeline=pipe.svg

The report comes from formulas; with --compile also from the real train step, compiled for those
GPUs. Without --hardware it shows the pipeline's timeline alone.
"""

if __name__ == "__main__":  # before the imports: a mistake needs no JAX
    from maxmeg.__main__ import run_module

    run_module("plan")

import dataclasses
import pathlib
import shlex
import sys

from maxmeg.config.options import Plan as Options
from maxmeg.config.schema import Config
from maxmeg.config.validate import resolve
from maxmeg.data.tokenizers.load import load_tokenizer
from maxmeg.planning.absent import check_plugins
from maxmeg.planning.analytic import analyze
from maxmeg.planning.automatic import choose, settings_on
from maxmeg.planning.compile import compile_report
from maxmeg.planning.hardware import Cluster, parse_cluster
from maxmeg.planning.remedies import remedies, train_command
from maxmeg.planning.search import check_count, search
from maxmeg.planning.show.page import plan_html
from maxmeg.planning.show.tables import Choice
from maxmeg.planning.show.text import Plan, plan_json, plan_of, plan_text
from maxmeg.planning.show.timeline import timeline_svg
from maxmeg.runtime.platform import choose_platform

BEST_COMPILED = 3
SHOWN = 10  # number of layouts of a search in the report


def main(config: Config, options: Options) -> None:
    check_options(options)
    choose_platform()
    vocabulary = config.model.vocab_size
    resolve(config, vocabulary or load_tokenizer(config.data.tokenizer).vocab_size)
    if options.hardware:
        plan = plan_for(config, parse_cluster(options.hardware), options, sys.argv[1:])
    else:
        plan = plan_of(config, config.parallel.devices)
    if plan.table is None and options.timeline:
        raise ValueError(
            f"--timeline={options.timeline}: parallel.pipe=1 has none; set --parallel.pipe=4"
        )
    if plan.table is None and not options.hardware:
        raise ValueError(
            "nothing to plan: give --hardware=NAMExCOUNT, as h100x64, or stages of a pipeline, "
            "--parallel.pipe=4"
        )
    plan = dataclasses.replace(plan, command=f"maxmeg plan {shlex.join(sys.argv[1:])}")
    print(plan_text(plan))
    write(options.json, plan_json(plan))
    write(options.html, plan_html(plan))
    write(options.timeline, timeline_svg(plan.table) if plan.table else "")


def check_options(options: Options) -> None:
    """ValueError for options that cannot work, before anything takes time."""
    for name in ("search", "compile"):
        if getattr(options, name) and not options.hardware:
            raise ValueError(f"--{name} needs GPUs: give --hardware=NAMExCOUNT, as h100x64")
    for name in ("timeline", "json", "html"):
        path = pathlib.Path(getattr(options, name))
        if not path.parent.is_dir():
            raise ValueError(f"--{name}={path}: there is no folder {path.parent}")
        if getattr(options, name) and path.is_dir():
            raise ValueError(f"--{name}={path} is a folder: name a file in it")
    if options.compile:
        check_plugins()


def plan_for(
    config: Config, cluster: Cluster, options: Options, arguments: list[str] | None = None
) -> Plan:
    """The plan for a cluster, with the layout of the config or, with --search, the best one.

    arguments: the command line of `maxmeg plan`, to show the `maxmeg train` command of the layout.
    """
    chosen, choices, changed = [config], [], {}
    if options.search:
        candidates = search(config, cluster)[:SHOWN]
        chosen = [candidate.config for candidate in candidates]
        choices = [Choice(candidate.settings, candidate.analytic) for candidate in candidates]
        changed = candidates[0].changed(config)
    else:
        check_count(config, cluster)
        choose(config, cluster)
    plan = plan_of(chosen[0], cluster.count)
    plan.settings.update(settings_on(chosen[0], cluster))
    analytic, compiled = analyze(chosen[0], cluster), []
    if not analytic.fits:
        analytic = dataclasses.replace(analytic, remedies=remedies(chosen[0], cluster))
    elif arguments:
        plan.settings["command"] = train_command(arguments, Options, changed)
    for layout in chosen[: BEST_COMPILED * options.compile]:
        print(f"compiling for {cluster.count} {cluster.name} ...", file=sys.stderr, flush=True)
        compiled.append(compile_report(layout, cluster.name, cluster.count))
    for index, report in enumerate(compiled[: len(choices)]):
        choices[index] = dataclasses.replace(choices[index], compiled=report)
    return dataclasses.replace(
        plan,
        hardware=f"{cluster.count} x {cluster.name}",
        analytic=analytic,
        compiled=compiled[0] if compiled else None,
        choices=tuple(choices),
    )


def write(path: str, text: str) -> None:
    if path:
        pathlib.Path(path).write_text(text, encoding="utf-8")
