"""Accelerators, links, prices and clusters: the datasheets' numbers, a user's own, and which link an axis lands on."""

import numpy as np
import pytest

from jaxdist.mesh import AXES
from jaxdist.plan.collective_cost import collective_cost
from jaxdist.plan.hardware import Cluster, find_hardware, strides


def test_memory_is_in_units_of_1024():
    assert find_hardware("h200").memory_bytes == pytest.approx(151397597184, rel=1e-4)  # what its driver reports


# ----------------------------------------------------------------------------------------------------------- cluster

EIGHT = Cluster(find_hardware("h100"), num_nodes=8)


@pytest.mark.parametrize(
    ("mesh", "links"),
    [
        ({"tp": 8, "dp": 8}, {"tp": "inside", "dp": "between"}),
        ({"tp": 2, "dp": 4}, {"tp": "inside", "dp": "inside"}),
        ({"tp": 4, "dp": 16}, {"tp": "inside", "dp": "both"}),
        ({"tp": 16, "dp": 4}, {"tp": "both", "dp": "between"}),
        ({"dp": 64}, {"dp": "both", "tp": "none"}),
        ({"pp": 2, "dp": 4}, {"pp": "inside", "dp": "inside"}),
        ({"pp": 2, "dp": 4, "tp": 8}, {"pp": "between", "dp": "between", "tp": "inside"}),
        ({"replica": 4, "dp": 8, "tp": 2}, {"replica": "between", "dp": "both", "tp": "inside"}),
        ({}, dict.fromkeys(AXES, "none")),
    ],
)
def test_which_link_an_axis_lands_on(mesh, links):
    found = EIGHT.links_of(**mesh)
    assert {axis: found[axis] for axis in links} == links


def test_split_axis_by_hand_and_in_columns():
    sizes, apart = np.array([8, 16, 64, 4, 1]), np.array([1, 4, 1, 16, 8])
    inside, across = EIGHT.split_axis(sizes, apart)
    assert inside.tolist() == [8, 2, 8, 1, 1] and across.tolist() == [1, 8, 8, 4, 1]
    assert EIGHT.link_of(sizes, apart).tolist() == ["inside", "both", "both", "between", "none"]
    # Six ranks, three apart: eight devices hold two of them at most, so the axis leaves its node in groups of two.
    assert [int(part) for part in EIGHT.split_axis(6, 3)] == [2, 3]


def test_every_rank_of_an_axis_is_counted_once():
    for tp in (1, 2, 4, 8, 16):
        for dp in (1, 2, 3, 6, 8, 32):
            inside, across = EIGHT.split_axis(dp, strides({"tp": tp})["dp"])
            assert inside * across == dp and (inside - 1) * tp < 8


def test_seconds_of_a_collective_on_its_links():
    gigabyte, nvlink, infiniband = 1e9, EIGHT.inside, EIGHT.between
    ring = collective_cost("ring_all_reduce", 8, gigabyte)
    assert EIGHT.collective_seconds("ring_all_reduce", 8, 1, gigabyte) == pytest.approx(
        ring.seconds(nvlink.latency_s, nvlink.bytes_per_s)
    )
    assert EIGHT.collective_seconds("ring_all_reduce", 8, 8, gigabyte) == pytest.approx(
        ring.seconds(infiniband.latency_s, infiniband.bytes_per_s)
    )
    both = EIGHT.collective_seconds("ring_all_reduce", 64, 1, gigabyte)
    across = collective_cost("ring_all_reduce", 8, gigabyte / 8)
    assert both == pytest.approx(
        ring.seconds(nvlink.latency_s, nvlink.bytes_per_s)
        + across.seconds(infiniband.latency_s, infiniband.bytes_per_s)
    )
    assert EIGHT.collective_seconds("ring_all_reduce", 1, 1, gigabyte) == 0
    slower = EIGHT.collective_seconds("ring_all_reduce", 8, 1, gigabyte, inside_efficiency=0.5)
    assert slower == pytest.approx(14 * nvlink.latency_s + ring.bytes_sent / (nvlink.bytes_per_s / 2))


def test_a_sum_over_many_nodes_takes_a_tree_where_that_is_faster():
    """Of 64 nodes: 12 steps up and down instead of 126 around, and 2S instead of 2S * 63/64 on the links between."""
    slow, nodes, shared = EIGHT.between, 64, 1 / 8
    for num_bytes in (1e3, 1e6, 1e12):
        inside = collective_cost("ring_all_reduce", 8, num_bytes).seconds(
            EIGHT.inside.latency_s, EIGHT.inside.bytes_per_s
        )
        tree = 12 * slow.latency_s + 2 * num_bytes * shared / slow.bytes_per_s
        ring = 126 * slow.latency_s + 2 * 63 / nodes * num_bytes * shared / slow.bytes_per_s
        assert EIGHT.collective_seconds("all_reduce", 8 * nodes, 1, num_bytes) == pytest.approx(
            inside + (tree if num_bytes < 1e9 else ring)
        )
    columns = EIGHT.collective_seconds("all_reduce", np.array([1, 8, 64]), 1, 1e6)
    assert columns.tolist() == [EIGHT.collective_seconds("all_reduce", size, 1, 1e6) for size in (1, 8, 64)]


def test_latencies_are_so_many_times_as_large():
    twice = EIGHT.with_latency(2)
    assert twice.inside.latency_s == 2 * EIGHT.inside.latency_s and twice.inside.bytes_per_s == EIGHT.inside.bytes_per_s
    added = twice.collective_seconds("ring_all_gather", 64, 1, 1e9) - EIGHT.collective_seconds(
        "ring_all_gather", 64, 1, 1e9
    )
    assert added == pytest.approx(7 * EIGHT.inside.latency_s + 7 * EIGHT.between.latency_s)
