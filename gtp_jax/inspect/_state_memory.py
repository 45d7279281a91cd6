"""Says where a training state is between steps, and how long a step takes to copy what the host keeps of it."""

from __future__ import annotations

import dataclasses

from ..hlo import bytes_on_host, bytes_per_device, columns, fact, quantity
from ..train import TrainState

# The facts of a chip that bound copies from the host alone, and copies each way at once.
_ALONE, _BOTH = "host_link_ceiling", "host_link_both_ceiling"


@dataclasses.dataclass(frozen=True)
class StateMemory:
    """The memory of a training state between steps, in bytes per device.

    Attributes:
        device_bytes: what is in the memory of the device.
        host_bytes: what the host keeps. A step copies it to the device and back, in blocks, when it updates it.
        copied_bytes: the parameters among these. A step also copies them to the device before it computes.
    """

    device_bytes: int
    host_bytes: int = 0
    copied_bytes: int = 0

    def copying_s(self, chip: str) -> float:
        """Returns the seconds of a step that its copies take, which nothing hides. The GPUs of a host are taken to copy
        as fast as one alone.

        Args:
            chip: the chip of `hlo.CHIPS` that sets the rates.
        """
        return self.copied_bytes / fact(chip, _ALONE).value + self.host_bytes / fact(chip, _BOTH).value

    def table(self, chip: str | None) -> str:
        """Returns tables of the bytes and of the copies of a step.

        Args:
            chip: the chip that sets the rates; `None` if they are unknown.
        """
        rows = [("device", quantity(self.device_bytes, "B")), ("host", quantity(self.host_bytes, "B"))]
        held = columns(("state in the memory of the", "per device"), rows, right=(1,))
        if not self.host_bytes:
            return f"{held}\n\nno array is large enough to be kept on the host"
        if chip is None:
            return f"{held}\n\n--target says how long a step takes to copy it"
        copies = []
        for what, size, name in (
            ("parameters, before forward", self.copied_bytes, _ALONE),
            ("all of it, each way at once, after backward", self.host_bytes, _BOTH),
        ):
            rate = fact(chip, name)
            took = quantity(size / rate.value, "s")
            copies.append((what, quantity(size, "B"), took, f"{quantity(rate.value, rate.unit)}: {rate.source}"))
        table = columns(("copied in a step", "per device", "takes", "at"), copies, right=(1, 2))
        return (
            f"{held}\n\n{table}\n\nnothing hides these copies: they make a step {quantity(self.copying_s(chip), 's')} "
            "longer than what is modelled below"
        )


def state_memory(state: TrainState) -> StateMemory:
    """Returns where a state is, which may be abstract."""
    arrays = state.params, state.opt_state, state.frozen
    host = bytes_on_host(arrays)
    return StateMemory(bytes_per_device(arrays) - host, host, bytes_on_host(state.params))
