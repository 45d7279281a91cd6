"""The command-line options of a supervised run."""

from __future__ import annotations

import dataclasses

from ..flags import check_knobs, knob

GROUP = "elastic training"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """Options for how a supervised run takes snapshots and which failures it tolerates.

    Raises:
        ValueError: if a value is out of range.
    """

    elastic: bool = knob(False, GROUP, "run one process per device under a supervisor", kind=bool)
    snapshot_interval: int | None = knob(
        None,
        GROUP,
        "most steps that a failure may cost (default: chosen so that snapshots take 2 %% of the time)",
        metavar="N",
    )
    snapshot_dir: str = knob(
        "/dev/shm", GROUP, "in-memory directory with room for two snapshots", kind=str, metavar="DIR"
    )
    retries: int = knob(
        5, GROUP, "restarts in a row without a new snapshot or checkpoint before the run gives up", metavar="N"
    )
    probe_timeout: float = knob(60.0, GROUP, "seconds a device has to pass a probe", kind=float, above=0, metavar="S")
    rehearse: bool | None = knob(
        None,
        GROUP,
        "compile the step for one device fewer in the background, in advance (default: on GPUs)",
        kind=bool,
    )

    def __post_init__(self) -> None:
        check_knobs(self)
