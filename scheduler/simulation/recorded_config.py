"""The scheduler's configuration of a recorded schedule, as the flags that give it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from ...common.flags import flag_name
from ..recording.recording import read_recording
from ..scheduler_config import SchedulerConfig
from .trace_file import is_recording

NOT_RECORDED = ("tp_size", "max_total_tokens")  # flags that SchedulerConfig does not have by their name
WITH_PRIORITY = ("fcfs", "lof")


class RecordedConfig(NamedTuple):
    """A recording's configuration: the flags that it stands for, and those that the command line gives otherwise."""

    config: SchedulerConfig
    flags: dict[str, Any]
    overridden: list[str]

    def __str__(self) -> str:
        config = self.config
        told = (
            f"{config.schedule_policy}, {config.num_kv_tokens:,} KV tokens in pages of {config.page_size}, "
            f"at most {config.max_running_requests} running"
        )
        names = ", ".join(map(flag_name, self.overridden))
        return f"the recorded configuration is used ({told}){f', but for {names}' if names else ''}"


def read_recorded_config(
    trace: str | None, names: Collection[str], given: Collection[str], policies: list[str] | None
) -> RecordedConfig | None:
    """The configuration of a trace that is a recording, None for another one; RecordingError or TraceError.

    `names` are the flags to set and `given` those of the command line. Priorities, which some policies do not know, are
    given up where `policies` has one of them.
    """
    if trace is None or not is_recording(Path(trace)):
        return None
    config = read_recording(Path(trace)).header.config
    values = {name: getattr(config, name) for name in names if name not in NOT_RECORDED}
    values["max_total_tokens"] = config.num_kv_tokens
    overridden = [name for name in values if name in given]
    if policies is not None and policies != [config.schedule_policy]:
        overridden.append("policies")
    if config.enable_priority_scheduling and not set(policies or ()) <= set(WITH_PRIORITY):
        values["enable_priority_scheduling"] = False
        overridden.append("enable_priority_scheduling")
    return RecordedConfig(config, values, overridden)
