"""One suite for every implementation of the operations."""

import jax
import pytest

from gtp_jax import native

OPERATIONS = ("multi_amax", "hadamard_amax", "quantize", "dequantize", "pack", "pack_apart", "unpack")
TARGETS = tuple(f"gtp_{operation}" for operation in OPERATIONS)


def missing_kernels() -> str | None:
    """Why the native kernels cannot run here, or `None` if they can."""
    platform = "cpu" if jax.default_backend() == "cpu" else "CUDA"
    absent = [target for target in TARGETS if not native.has(target, platform)]
    return f"no {', '.join(absent)} for {platform}: {native.describe()}" if absent else None


@pytest.fixture(params=["reference", "native"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn; the native one is skipped where it was not built."""
    if request.param == "native" and (reason := missing_kernels()):
        pytest.skip(reason)
    return request.param
