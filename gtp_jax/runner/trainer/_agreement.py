"""Checks that all processes of a run were started with the same settings, except for those that are per process."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ...mesh import has_gpu
from ._directory import RunDirectory
from ._peers import Peers, several
from ._versions import installed

Description = dict[str, Any]

# JAX settings that may differ between processes: devices, addresses, logging, and the paths of output files.
_OWN_JAX_SETTINGS = (
    "jax_num_cpu_devices",
    "jax_default_device",
    "jax_logging_level",
    "jax_pprint_use_color",
    "jax_cross_host_transfer_socket_address",
    "jax_cross_host_transport_addresses",
)
_OWN_JAX_SUFFIXES = ("_visible_devices", "_dir", "_file", "_dump_ir_to", "_debug_log_modules", "_log_compiles")
_OWN_XLA_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count=")

_SHARED_WITHIN_S = 10.0
_LONGEST_SHOWN = 48


def differences(descriptions: Sequence[Description]) -> list[str]:
    """Returns a line for each field that differs between processes: its values, and the processes that have each."""
    names = dict.fromkeys(name for description in descriptions for name in description)
    lines = []
    for name in names:
        values: dict[str, list[int]] = collections.defaultdict(list)
        for process, description in enumerate(descriptions):
            values[_shown(description.get(name))].append(process)
        if len(values) > 1:
            said = "; ".join(f"{value} in {several('process', who)}" for value, who in values.items())
            lines.append(f"  {name}: {said}")
    return lines


def check_agreement(peers: Peers, description: Description) -> None:
    """Checks that all processes have the same description. Every process must call this, before any collective.

    Raises:
        ValueError: if descriptions differ; the message lists each field that differs, with its values.
    """
    lines = peers.ask(description, differences)
    if lines:
        raise ValueError(
            "the processes of this run do not agree:\n" + "\n".join(lines) + "\nGive all of them the same flags, "
            "files, environment and versions. The default text is that of the standard library, which differs "
            "between versions of Python."
        )


def check_shared(peers: Peers, directory: RunDirectory) -> None:
    """Checks that all processes have the same directory: process 0 writes a file with a random name there, and the
    others look for it.

    Raises:
        ValueError: if process 0 cannot write there, or other processes have another directory; the message names them.
    """
    root = directory.root
    name = f".shared-{os.urandom(16).hex()}"

    def write(names: list[str]) -> dict[str, str]:
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / names[0]).touch(exist_ok=False)
        except OSError as error:
            return {"error": f"process 0 cannot write to `out` {root}: {error}"}
        return {"name": names[0]}

    written = peers.ask(name, write)
    if "error" in written:
        raise ValueError(written["error"])
    try:
        found = peers.ask(_appears(root / written["name"]), list)
    finally:
        if written["name"] == name:
            (root / name).unlink(missing_ok=True)
    others = [process for process, seen in enumerate(found) if not seen]
    if others:
        raise ValueError(
            f"`out` {root} is not shared: a file that process 0 wrote there did not appear within "
            f"{_SHARED_WITHIN_S:.0f} s for {several('process', others)}. Give all processes an --out on a shared "
            "file system."
        )


def check_devices(*, equally_many: bool = True) -> None:
    """Checks that all processes have devices of the same kind. Starts JAX's backend, and waits for all processes.

    Args:
        equally_many: whether all processes must have the same number of devices; false after devices have failed.

    Raises:
        ValueError: if their devices differ; the message lists the devices of each process.
    """
    each: dict[int, list[str]] = collections.defaultdict(list)
    for device in jax.devices():
        each[device.process_index].append(device.device_kind)
    counts = [collections.Counter(each[process]) for process in range(jax.process_count())]
    if equally_many:
        lines = differences(
            [{"devices": " + ".join(f"{n} x {kind}" for kind, n in sorted(count.items()))} for count in counts]
        )
        remedy = (
            "the same number of devices of the same kind, with CUDA_VISIBLE_DEVICES or --local-devices. If devices "
            "have failed, list their slots in the mesh with --failed-devices; the numbers may then differ."
        )
    else:
        lines = differences([{"kinds of devices": " + ".join(sorted(count))} for count in counts])
        remedy = "devices of the same kind."
    if lines:
        raise ValueError(
            "the processes of this run have different devices:\n" + "\n".join(lines) + f"\nGive all of them {remedy}"
        )


def _appears(path: Path) -> bool:
    """Waits for a file, because a shared file system may take a while to show it; returns whether it appeared."""
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def software() -> Description:
    """Returns the software versions, digests of code and settings that determine what is computed."""
    package = Path(__file__).parents[2]  # gtp_jax
    flags = os.environ.get("XLA_FLAGS", "").split()
    settings = {
        name: repr(value)
        for name, value in jax.config.values.items()  # pyright: ignore[reportAttributeAccessIssue]
        if name not in _OWN_JAX_SETTINGS and not name.endswith(_OWN_JAX_SUFFIXES)
    }
    return {
        "code of gtp_jax": digest(*sorted(package.rglob("*.py")), root=package),
        "kernels of gtp_jax": digest(*sorted(package.glob("native/*.so")), root=package),
        "Python": platform.python_version(),
        **{f"version of {name}": version for name, version in installed().items()},
        "a GPU": has_gpu(),
        "XLA_FLAGS": sorted(flag for flag in flags if not flag.startswith(_OWN_XLA_FLAGS)),
        **settings,
    }


def digest(*files: Path, root: Path | None = None) -> str:
    """Returns a digest of the contents of files and, if a root is given, of their paths below it and their sizes."""
    digest = hashlib.sha256()
    for file in files:
        if root is not None:
            digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _shown(value: Any) -> str:
    """Returns a value as a message shows it. Long values are shortened, but remain distinguishable."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    if len(text) in (32, 64) and not set(text) - set("0123456789abcdef"):
        return f"{text[:12]}..."
    return f"{text[:24]} ... {text[-12:]} (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"
