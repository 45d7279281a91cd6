"""The command line's settings of a run under a supervisor."""

from __future__ import annotations

import dataclasses

from ..flags import check_knobs, knob

GROUP = "a run that goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """How a supervised run takes snapshots and what it puts up with.

    Raises:
        ValueError: if a value is out of range.
    """

    elastic: bool = knob(False, GROUP, "start a process a device under a supervisor", kind=bool)
    snapshot_interval: int | None = knob(
        None,
        GROUP,
        "steps that a failure may cost at most (default: so many that snapshots take 2 %% of the time)",
        metavar="N",
    )
    snapshot_dir: str = knob(
        "/dev/shm", GROUP, "directory in memory, with room for two snapshots", kind=str, metavar="DIR"
    )
    retries: int = knob(
        5, GROUP, "restarts without a new snapshot or checkpoint between them, before the run gives up", metavar="N"
    )
    probe_timeout: float = knob(60.0, GROUP, "seconds in which a device must compute", kind=float, above=0, metavar="S")
    rehearse: bool | None = knob(
        None,
        GROUP,
        "compile the step for one device less beforehand, while the run goes on (default: on GPUs)",
        kind=bool,
    )

    def __post_init__(self) -> None:
        check_knobs(self)
