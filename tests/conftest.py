"""Eight virtual CPU devices for every test, set before jax starts; GTP_TEST_PLATFORM=gpu takes the machine's GPUs."""

import gc
import os
import sys
import tempfile
import zlib
from pathlib import Path

ON_GPU = os.environ.get("GTP_TEST_PLATFORM") == "gpu"
# Tests compile far more than they compute: LLVM's expensive passes would double their time.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if ON_GPU:
    # Tests start processes of their own on the same GPUs.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Commands keep compiled programs there.
    os.environ.setdefault("XDG_CACHE_HOME", str(Path(tempfile.gettempdir(), f"gtp-jax-tests-{os.getuid()}")))
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{QUICK_COMPILE} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import parts  # noqa: E402
import pytest  # noqa: E402

# Packages whose annotated types and shapes are checked at every call.
CHECKED = ("gtp_jax.ops", "gtp_jax.collectives", "gtp_jax.weights", "gtp_jax.chain", "gtp_jax.experts._tokens")

# Folders of tests to run after a change of the core: the life of a weight, and parity with plain models.
QUICK = ("mesh", "formats", "layout", "collectives", "weights", "chain", "recipes", "parity", "structure")

if ON_GPU:
    from gtp_jax.train import all_reduce_with_nccl

    all_reduce_with_nccl()  # as the command line does
else:
    # before anything imports them; shapes are the same on GPUs, whose machines may lack beartype
    jaxtyping.install_import_hook(CHECKED, "annotations.checked")
    jax.config.update("jax_num_cpu_devices", 8)


# For `benchmarks` and `tests`; last, so that an installed gtp_jax, or the one of PYTHONPATH, is the one that is tested.
sys.path.append(str(Path(__file__).parents[1]))
from tests.structure.programs_compiled import PLUGIN, ProgramCount  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parts.add_option(parser)


# Tracing makes many objects that live long: collecting as often as Python does by default takes a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 50, 50)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(parts)
    if not ON_GPU:
        config.pluginmanager.register(ProgramCount(config), PLUGIN)


@pytest.fixture(autouse=True)
def annotations(request: pytest.FixtureRequest):
    """Leaves annotations unchecked where a test gives what they forbid."""
    jaxtyping.config.update("jaxtyping_disable", request.node.get_closest_marker("bad_input") is not None)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> jax.Array:
    """A random key of the test's own."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def x64():
    """float64 for the length of a test."""
    with jax.enable_x64(True):
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the quick tests, and skips GPU tests where there is no GPU."""
    for item in items:
        if item.path.parent.name in QUICK and not {"slow", "full", "gpu"} & set(item.keywords):
            item.add_marker(pytest.mark.quick)
    if ON_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU; run with GTP_TEST_PLATFORM=gpu on a machine that has one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
