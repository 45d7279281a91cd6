"""Prints what checkpoints on disk contain, without a model and without GPUs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from ..._foreign import printable
from ...checkpoint import WITHOUT_SUM, Checkpoints, checkpoints_in
from ...hlo import columns, quantity


def list_steps(args: argparse.Namespace) -> int:
    checkpoints = _open(args.directory)
    rows = []
    for step in checkpoints.steps():
        try:
            manifest = checkpoints.manifest(step)
        except ValueError:
            rows.append([str(step), "", "", "", "", "", "damaged: see `gtp-jax checkpoint verify`"])
            continue
        leaves = manifest["leaves"].values()
        loss = "" if manifest["loss"] is None else f"{manifest['loss']:.4f}"
        rows.append(
            [
                str(step),
                str(len(leaves)),
                quantity(sum(map(_bytes, leaves)), "B"),
                loss,
                _recipe(manifest),
                manifest["gtp_jax"],
                "",
            ]
        )
    header = ("step", "arrays", "in memory", "loss", "recipe", "gtp_jax", "")
    print(columns(header, rows, right=(0, 1, 2, 3)) if rows else f"no complete step in {args.directory}")
    return 0


def show(args: argparse.Namespace) -> int:
    manifest = _open(args.directory).manifest(args.step)
    if args.json:
        print(json.dumps(manifest, indent=1))
        return 0
    version = printable(manifest["gtp_jax"])
    print(f"step {manifest['step']}, written by gtp_jax {version}, format {manifest['format']}")
    if recipe := manifest.get("recipe"):
        settings = ", ".join(f"{printable(key)} {json.dumps(value)}" for key, value in recipe.items() if key != "name")
        print(f"trained with recipe {printable(recipe['name'])}" + (f" ({settings})" if settings else ""))
    if manifest["extra"]:
        print(f"saved with the arrays: {json.dumps(manifest['extra'])}")
    if files := manifest.get("files"):
        print("files: " + ", ".join(f"{name} ({quantity(size, 'B')})" for name, (size, _) in files.items()))
    rows = [
        (name, leaf["dtype"], _shape(leaf), quantity(_bytes(leaf), "B"), leaf["digest"])
        for name, leaf in manifest["leaves"].items()
    ]
    print("\n" + columns(("array", "dtype", "shape", "in memory", "digest"), rows, right=(3,)))
    return 0


def verify(args: argparse.Namespace) -> int:
    checkpoints = _open(args.directory)
    steps = checkpoints.steps() if args.step is None else [args.step]
    if not steps:
        raise ValueError(f"no complete step in {args.directory}. Give the directory of a run that has saved one.")
    broken = {}
    for step in tqdm(steps, desc="verify", unit="step", disable=None):
        try:
            lines = checkpoints.verify(step)
        except OSError as error:
            if step not in checkpoints.steps():
                raise
            lines = [f"cannot be read: {error}"]
        if lines:
            broken[step] = lines
    for step in steps:
        lines = broken.get(step, [])
        print(f"step {step}: " + (f"{len(lines)} file(s) damaged" if lines else "whole"))
        for line in lines:
            print(f"  {printable(line)}")
    print(
        f"Every file was read. Files without a checksum ({', '.join(WITHOUT_SUM)}), which orbax writes after the "
        "checksums are computed, were only checked for existence and form: a change in them may go unnoticed, but "
        "nothing is read from them."
    )
    return 1 if broken else 0


def diff(args: argparse.Namespace) -> int:
    left, right = (_manifest_of(name)["leaves"] for name in (args.left, args.right))
    rows = []
    for name in {**left, **right}:
        a, b = left.get(name), right.get(name)
        if a != b:
            alike = a and b and (a["shape"], a["dtype"]) == (b["shape"], b["dtype"])
            rows.append([name, *("no such array" if x is None else x["digest"] if alike else _kind(x) for x in (a, b))])
    if rows:
        print(columns(("array", args.left, args.right), rows) + "\n")
    print(f"{len({**left, **right}) - len(rows)} arrays are equal, {len(rows)} differ")
    print("Compared the digests in the manifests without reading arrays: see `gtp-jax checkpoint verify`.")
    return 1 if rows else 0


def _open(directory: Path) -> Checkpoints:
    return Checkpoints(checkpoints_in(directory), read_only=True)


def _manifest_of(name: str) -> dict[str, Any]:
    directory, at, step = name.rpartition("@")
    if at and not Path(name).exists():
        if step.isdecimal():
            return _open(Path(directory)).manifest(int(step))
        if Path(directory).is_dir():
            raise ValueError(
                f"the step of {name!r} is {step!r}; it must be a whole number. `gtp-jax checkpoint list` lists the "
                "steps."
            )
    return _open(Path(name)).manifest()


def _recipe(manifest: dict[str, Any]) -> str:
    return (manifest.get("recipe") or {}).get("name", "")


def _bytes(leaf: dict[str, Any]) -> int:
    kind = leaf["dtype"]
    # The dtype of a typed key names its generator, and jnp.dtype does not know it.
    return math.prod(leaf["shape"]) * (0 if kind.startswith("key<") else jnp.dtype(kind).itemsize)


def _shape(leaf: dict[str, Any]) -> str:
    return "x".join(map(str, leaf["shape"])) or "scalar"


def _kind(leaf: dict[str, Any]) -> str:
    return f"{leaf['dtype']} {_shape(leaf)}"
