"""The picture of `gtp-jax bench growth` can be read: labels are in full and apart."""

import itertools

import pytest

from benchmarks._growth_picture import picture
from benchmarks._growth_run import Cost

VALUES = {"depth": (8, 16, 32, 64), "sequence": (2048, 4096, 8192, 16384, 32768)}


def costs(axes):
    return [
        Cost(axis=axis, value=value, contender=name, devices=8, tokens=8192, flops=value, step_s=value, compile_s=1.0)
        for axis in axes
        for value in VALUES[axis]
        for name in ("gtp_jax bf16 regather", "gtp_jax bf16 scan regather")
    ]


@pytest.mark.parametrize("axes", [("depth",), ("depth", "sequence")])
def test_no_two_labels_overlap_and_the_legend_is_within_the_picture(axes):
    figure = picture(costs(axes), "a step", modelled=True)
    figure.draw_without_rendering()
    for axis in figure.axes[-len(axes) :]:
        boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
        assert len(boxes) > 2 and all(one.x1 + 5 < other.x0 for one, other in itertools.pairwise(boxes))
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 and legend.x1 <= figure.bbox.x1
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "proportional to the FLOPs per device"
