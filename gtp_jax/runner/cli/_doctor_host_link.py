"""Measures the link between a GPU and the memory of its host, over which a step copies a state that is kept there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...hlo import quantity
from ...train import available_bytes
from ._finding import Finding, first_line

_NAME = "host link"
_BYTES, _LEAST_BYTES = 1 << 30, 1 << 20
_SHARE = 8  # of the memory that is free, at most
_TIMES = 3


def check_host_link(device: Any) -> Finding:
    """Copies an array between a device and pinned memory of its host, alone and each way at once.

    Args:
        device: the device.
    """
    if device.platform == "cpu":
        return Finding(_NAME, "optional", "no GPU: nothing to measure")
    return measured(device)


def measured(device: Any) -> Finding:
    """Returns the rates of copies between a device and its host."""
    try:
        size = _size(device)
        to_device, to_host, both = _rates(device, size)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return Finding(_NAME, "optional", f"not measured: {first_line(error)}", "free memory of the host or the device")
    cost = 4e9 / to_device + 12e9 / both
    return Finding(
        _NAME,
        "ok",
        f"{quantity(to_device, 'B/s')} to the device, {quantity(to_host, 'B/s')} from it, {quantity(both, 'B/s')} each "
        f"way at once ({quantity(size, 'B')}); --offload masters takes {cost:.2f} s of a step per billion parameters "
        "of a GPU",
    )


def _size(device: Any) -> int:
    """Returns the bytes to copy: less than usual where little memory is free.

    Raises:
        ValueError: if there is too little to measure anything.
    """
    stats, host = device.memory_stats() or {}, available_bytes()
    free = [stats["bytes_limit"] - stats["bytes_in_use"]] if "bytes_limit" in stats else []
    size = min([_BYTES, *(each // _SHARE for each in (*free, *([] if host is None else [host])))])
    if size < _LEAST_BYTES:
        raise ValueError(f"a copy of 1/{_SHARE} of the memory that is free would have {quantity(size, 'B')}")
    return size


def _rates(device: Any, size: int) -> tuple[float, float, float]:
    """Returns the rates to the device, from it, and each way at once, in bytes per second."""
    near, far = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    here = jax.device_put(jnp.zeros(size // 4, jnp.float32), near)
    there = jax.device_put(here, far)
    seconds = [
        _fastest(lambda: jax.device_put(there, near)),
        _fastest(lambda: jax.device_put(here, far)),
        _fastest(lambda: (jax.device_put(there, near), jax.device_put(here, far))),
    ]
    return tuple(size / took for took in seconds)  # pyright: ignore[reportReturnType]


def _fastest(copy: Callable[[], Any]) -> float:
    """Returns the seconds of the fastest of a few copies, after one that does not count."""
    found = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        jax.block_until_ready(copy())
        found.append(time.perf_counter() - began)
    return min(found[1:])
