"""Settings of the watchdog."""

import dataclasses

from maxmeg.config.setting import setting


@dataclasses.dataclass
class WatchdogConfig:
    """Limits after which a run that hangs or has lost a process ends, with exit code 75."""

    step: float = setting(
        60.0,
        "seconds without a finished step, or 10 times the median step if that is longer: then the "
        "stacks of all threads are written to RUN_DIR/hangs and the run ends; 0: no limit",
    )
    silence: float = setting(
        60.0,
        "seconds without a heartbeat after which a process counts as dead, >= 2; 0: no limit",
        "--distributed-timeout-minutes",
    )
    start: float = setting(
        7200.0, "seconds to open the data and to restore, before the first step; 0: no limit"
    )
    compile: float = setting(
        3600.0, "seconds for the first step of every batch size, which compiles; 0: no limit"
    )
    validate: float = setting(3600.0, "seconds for a validation; 0: no limit")
    save: float = setting(3600.0, "seconds in which saving may hold up the next step; 0: no limit")
    shutdown: float = setting(
        3600.0, "seconds after the last step, last save included; 0: no limit"
    )
    straggler: float = setting(
        1.2,
        "every log.every steps, name the process whose work outside of the compiled step takes "
        "longest if it is more than this times the median of the others, >= 1; 0: off",
        "--log-straggler",
    )


def watchdog_problems(limits: WatchdogConfig):
    """Broken rules of the section, one line each."""
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        lowest = {"silence": 2.0, "straggler": 1.0}.get(field.name, 0.0)
        if value != 0 and not value >= lowest:  # nan too
            yield f"watchdog.{field.name}={value} must be 0 (off) or at least {lowest:g}"
