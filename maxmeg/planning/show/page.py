"""A plan as one self-contained HTML page."""

from maxmeg.pages.templates import render
from maxmeg.planning.report import Analytic
from maxmeg.planning.show import tables
from maxmeg.planning.show.tables import gib
from maxmeg.planning.show.text import Plan, schedule_facts, verdict
from maxmeg.planning.show.timeline import Timeline
from maxmeg.runtime.metrics.progress import quantity


def plan_html(plan: Plan) -> str:
    """The page; it has only the parts that the plan has."""
    return render(
        "plan.html",
        title=f"{plan.name} on {plan.hardware}" if plan.hardware else plan.name,
        command=plan.command,
        plan=plan,
        tables=tables,
        verdict=verdict,
        facts=_facts(plan.analytic) if plan.analytic else [],
        schedule=schedule_facts(plan.table) if plan.table else [],
        timeline=Timeline(plan.table) if plan.table else None,
        standalone=False,
    )


def _facts(report: Analytic) -> list[tuple[str, str]]:
    """(name, number) of the cards."""
    return [
        ("parameters", quantity(sum(report.parameters.values()))),
        ("memory per GPU", f"{gib(report.total)} GiB"),
        ("step", tables.times(report)["step"]),
        *list(tables.speeds(report).items())[1:],
        ("bubble over ideal", f"{report.bubble_fraction:.1%}"),
    ]
