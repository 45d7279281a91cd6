"""Options for the degrees of the mesh axes where a command may choose them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ._knobs import check_knobs, knob
from ._parallelism import Parallelism


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeDegrees:
    """The degrees of the mesh axes. Those that are not given are free.

    Raises:
        ValueError: if a degree is not a whole number of at least 1.
    """

    dp: int | None = knob(None, "mesh", "number of replicas (default: any)", metavar="N")
    gtp: int | None = knob(None, "mesh", "number of shards per weight (default: any)", metavar="N")
    cp: int | None = knob(None, "mesh", "number of ranks that divide each sequence (default: any)", metavar="N")
    ep: int | None = knob(None, "mesh", "number of ranks that divide the experts (default: any)", metavar="N")
    tp: int | None = knob(None, "mesh", "tensor-parallel degree (default: any within a host)", metavar="N")
    shard_optimizer: bool = knob(
        True, "mesh", "also shard master weights and optimizer state over dp (ZeRO)", kind=bool
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def given(self) -> dict[str, int]:
        """The degrees that are given, by axis."""
        degrees = {"dp": self.dp, "gtp": self.gtp, "cp": self.cp, "ep": self.ep, "tp": self.tp}
        return {axis: degree for axis, degree in degrees.items() if degree is not None}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.given.items())

    def choices(self, devices: int) -> Iterator[Parallelism]:
        """Yields all degrees that use all devices and have the given values."""
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        free = [[self.given[axis]] if axis in self.given else divisors for axis in ("dp", "cp", "ep", "tp")]
        for dp, cp, ep, tp in itertools.product(*free):
            gtp, rest = divmod(devices, math.prod((dp, cp, ep, tp)))
            if gtp and not rest and self.gtp in (None, gtp):
                yield Parallelism(dp=dp, gtp=gtp, cp=cp, ep=ep, tp=tp, shard_optimizer=self.shard_optimizer)
