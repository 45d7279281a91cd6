"""What the given degrees leave over is said in one place, and every command and `make_mesh` take it from there."""

from __future__ import annotations

import jax
import pytest
from messages import naming

import gtp_jax as gtp
from benchmarks import StepOptions
from gtp_jax.mesh import Roles, check_degrees, degrees, fill_degrees
from gtp_jax.runner.flags import Parallelism
from gtp_jax.runner.trainer import TrainConfig


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 12])
@pytest.mark.parametrize("open_axis", ["dp", "gtp", "tp"])
def test_the_open_degree_fills_the_devices_where_it_can(devices, open_axis):
    given = {"dp": 1, "gtp": 2, "tp": 1, open_axis: None}
    filled = fill_degrees(given, devices)
    others = filled["dp"] * filled["gtp"] * filled["tp"] // filled[open_axis]
    assert filled == {**given, open_axis: max(1, devices // others)}


def test_a_product_that_is_not_the_number_of_devices_is_refused_with_both():
    for call in (
        lambda: check_degrees({"dp": 1, "gtp": 3, "tp": 2}, 8),
        lambda: gtp.make_mesh(dp=1, gtp=3, tp=2),
        lambda: gtp.make_mesh(gtp=3, tp=2),  # names no `dp`, which was not given
    ):
        with pytest.raises(ValueError, match=naming("gtp 3 tp 2 6 8 Choose")):
            call()
    with pytest.raises(ValueError, match=naming("gtp 4 2 devices divide")):
        gtp.make_mesh(gtp=4, devices=jax.devices()[:2])


@pytest.mark.parametrize("degree", [0, -1, 1.5, "2"])
def test_degrees_are_whole_numbers_wherever_they_are_given(degree):
    for call in (lambda: fill_degrees({"dp": 1, "gtp": degree}, 8), lambda: gtp.make_mesh(gtp=degree)):
        with pytest.raises(ValueError, match=naming(f"`gtp` {degree!r} whole 1")):
            call()
    with pytest.raises(ValueError, match=naming(f"`gtp` {degree!r} whole 1")):
        Parallelism(gtp=degree)


def test_a_mesh_keeps_the_order_of_devices():
    given = jax.devices()[::-1]
    mesh = gtp.make_mesh(gtp=2, tp=2, devices=given)
    assert list(mesh.devices.flat) == given and dict(mesh.shape) == {"dp": 2, "gtp": 2, "tp": 2}
    with jax.set_mesh(mesh):
        assert degrees(("dp", "gtp")) == 4


def test_all_users_agree():
    count = jax.device_count()
    parallelism = Parallelism(tp=2)
    assert parallelism.degrees(count) == {"dp": 1, "gtp": count // 2, "tp": 2}
    assert TrainConfig(parallelism=parallelism).degrees(count, virtual=True) == parallelism.degrees(count)
    work = StepOptions(parallelism=parallelism).workload("cpu", count, steps=1)
    assert (work.gtp, work.tp) == (count // 2, 2)
    assert dict(gtp.make_mesh(tp=2).shape) == {"dp": count // 2, "gtp": 1, "tp": 2}  # here dp is open


def test_virtual_devices_are_the_usual_number_or_what_the_degrees_need():
    assert Parallelism().virtual_devices(8) == 8
    assert Parallelism(tp=3).virtual_devices(8) == 6
    assert Parallelism(dp=3, gtp=4).virtual_devices(8) == 12
    assert Parallelism(dp=16).virtual_devices(8) == 16


def test_the_flag_for_replicas_is_a_role_of_no_axes():
    assert Parallelism(dp=2).roles == Roles() and Roles().over_optimizer == ("dp",)
    assert Parallelism(dp=2, shard_optimizer=False).roles.over_optimizer == ()
    roles = Parallelism(gtp=2, ep=2).roles
    assert roles.weights == ("gtp", "ep") and set(roles.batch) == {"dp", "gtp", "ep"} and roles.tensor == "tp"
    assert Roles(batch=("pod", "shard"), weights=("shard",)).over_optimizer == ("pod",)


def test_another_librarys_word_for_a_degree_is_refused_with_ours():
    for given, ours in ((dict(fsdp=8), "`gtp=8`"), (dict(data=2), "`dp=2`"), (dict(model=2), "`tp=2`")):
        with pytest.raises(
            TypeError, match=naming(f"`{next(iter(given))}` `dp` `gtp` `ep` `tp` {ours} gtp_jax.mesh.Roles")
        ):
            gtp.make_mesh(**given)
    with pytest.raises(TypeError, match=naming("`rows` `gtp` gtp_jax.mesh.Roles")):
        gtp.make_mesh(rows=2)
