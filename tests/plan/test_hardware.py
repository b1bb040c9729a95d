"""Accelerators, links, prices and clusters: the datasheets' numbers, a user's own, and which link an axis lands on."""

import datetime

import numpy as np
import pytest

from jaxdist.errors import divisors
from jaxdist.mesh import AXES
from jaxdist.plan import hardware as h
from jaxdist.plan.collective_cost import collective_cost
from jaxdist.plan.hardware import Cluster, find_hardware, load_hardware, load_prices, price, strides
from jaxdist.plan.time_model import efficiency_of


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
    # Six ranks, three apart: 6 and 9 are neighbours in two nodes of eight, so no node has a pair in every group.
    assert [int(part) for part in EIGHT.split_axis(6, 3)] == [1, 6]


def test_an_axis_is_inside_a_node_where_all_of_its_groups_are():
    for nodes, per_node in ((1, 6), (1, 8), (2, 6), (3, 8), (5, 8), (6, 4)):
        cluster = Cluster(find_hardware("h100"), nodes, per_node)
        devices = cluster.num_devices
        for stride in divisors(devices):
            for size in divisors(devices // stride):
                inside, across = cluster.split_axis(size, stride)
                groups = np.arange(devices).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size) // per_node
                neighbours = groups.reshape(-1, across, inside)
                assert (neighbours == neighbours[..., :1]).all()
                assert (across == 1) == (groups == groups[:, :1]).all()
                message = cluster.permute_seconds(size, stride, 1e9)
                assert (message > 0.01) == (across > 1)  # 1 GB takes 2 ms inside a node and 20 ms between two


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
    """For 64 nodes: 12 steps up and down instead of 126 around, and 2S instead of 2S * 63/64 on the links between."""
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


ACCELERATORS = {  # name: bf16 TFLOP/s, memory GB, HBM TB/s, NVLink GB/s in all (None: not NVLink), between GB/s
    "a100-40": (312, 40, 1.56, 600, 25),
    "a100-80": (312, 80, 2.0, 600, 25),
    "h100": (989, 80, 3.35, 900, 50),
    "h200": (989, 141, 4.8, 900, 50),
    "b200": (2250, 180, 8.0, 1800, 50),
    "b300": (2250, 270, 8.0, 1800, 100),
    "gb200": (2500, 186, 8.0, 1800, 50),
    "gb300": (2500, 279, 8.0, 1800, 100),
}


@pytest.mark.parametrize("name", ACCELERATORS)
def test_links_and_peaks(name):
    tflops, gigabytes, terabytes_per_s, total, between = ACCELERATORS[name]
    device = find_hardware(name)
    assert device.peak("bfloat16") == tflops * 1e12
    assert device.memory_gb == gigabytes
    assert device.memory_bytes_per_s == terabytes_per_s * 1e12
    assert device.inside.quoted_bytes_per_s == total * 1e9 == 2 * device.inside.bytes_per_s, "one direction is half"
    assert "total" in device.inside.quoted
    assert (f"{total} GB/s" if total < 1000 else f"{total / 1000} TB/s") in device.inside.quoted
    assert device.between.bytes_per_s == between * 1e9


def test_every_entry_has_its_source_and_date():
    table = load_hardware()
    assert {*ACCELERATORS, "mi300x", "v5e", "v5p", "v6e"} == table.keys()
    calibrated = {name for name, device in table.items() if device.calibrated}
    assert calibrated == {"a100-40", "a100-80", "h100", "h200", "b200", "gb200"}
    assert {name: efficiency_of(name).stack for name in ("h200", "b200", "b300", "mine")} == {
        "h200": "h100-published",
        "b200": "gb200-published",
        "b300": "uncalibrated",
        "mine": "uncalibrated",
    }
    for device in table.values():
        assert device.source and isinstance(device.date, datetime.date), device.name
        assert device.peak("bfloat16") > 1e14
        for link in (device.inside, device.between):
            assert link.source and link.quoted and isinstance(link.date, datetime.date), link.name
            assert link.bytes_per_s <= link.quoted_bytes_per_s and link.latency_s > 0
        assert device.inside.bytes_per_s > device.between.bytes_per_s


@pytest.fixture
def own(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_a_users_file_is_merged_over_the_shipped_one(own):
    path = own(
        """
        [accelerators.h100]
        memory_gb = 94
        peak_flops.bfloat16 = 835e12
        [links.nvlink4]
        latency_s = 0
        [accelerators.b400]
        title = "B400"
        peak_flops = { bfloat16 = 2500e12 }
        memory_gb = 288
        memory_bytes_per_s = 8e12
        inside = "nvlink5"
        between = "ib400"
        devices_per_node = 8
        source = "mine"
        date = 2026-01-31
        """
    )
    device = find_hardware("h100", path)
    assert (device.memory_gb, device.peak("bfloat16"), device.inside.latency_s) == (94, 835e12, 0)
    assert device.peak("float8") == 1979e12 and device.memory_bytes_per_s == 3.35e12, "the rest is as shipped"
    assert find_hardware("b400", path).inside.name == "nvlink5"
    assert find_hardware("h100").memory_gb == 80


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[accelerators.x]\ntitle = 'X'", r"\[accelerators.x\] in .*mine.toml: peak_flops .*\. Give title, "),
        ("[accelerators.h100]\nflops = 1", r"\[accelerators.h100\] flops in .*: there is no such key\. Use title, "),
        ("[accelerators.h100]\nmemory_gb = '80'", r"memory_gb='80' in "),
        ("[accelerators.h100]\nmemory_gb = -80", r"memory_gb=-80 in .*positive finite"),
        ("[accelerators.h100]\nmemory_gb = nan", r"memory_gb=nan in .*positive finite"),
        ("[accelerators.h100]\ninside = 'nvlink'", r"link 'nvlink': .*Did you mean nvlink"),
        ("[accelerator.h100]\nmemory_gb = 80", r"\[accelerator\] in .*Write \[links.NAME\]"),
        ("[accelerators.h100]\nmemory_gb = true", r"memory_gb=true in "),
        ("[accelerators.h100]\npeak_flops.bfloat16 = true", r"peak_flops=true in .*positive finite"),
        ("[accelerators.h100]\nmemory_gb = 1" + "0" * 400, r"memory_gb=1000.*positive finite"),
        ("[accelerators.h100]\ndate = 2026-01-31T10:00:00", r"date=2026-01-31 10:00:00 in "),
        ("[accelerators.h100]\ninside = [1]", r"link '\[1\]': there is no link"),
        ("[accelerators.h100]\ntitle = '\\u001b[31m'".replace("'", '"'), r"that a terminal obeys"),
        ("a = " + "[" * 100_000, r"nested too deep"),
        ("[accelerators.h100", r"cannot be read as TOML .*Name a TOML file"),
    ],
)
def test_a_bad_file_is_named_with_its_key(own, text, message):
    with pytest.raises(ValueError, match=message):
        load_hardware(own(text))


def test_prices_are_dated_and_warn_when_old():
    listed = load_prices()["aws"]["date"]
    fresh = price("h100", "aws", today=listed + datetime.timedelta(days=90))
    assert fresh.dollars_per_hour > 0 and fresh.warning == ""
    old = price("h100", "aws", today=listed + datetime.timedelta(days=91))
    assert old.dollars_per_hour == fresh.dollars_per_hour
    assert old.warning.startswith(f"The price of h100 at aws is of {listed}, 91 days old (recalled list price")


def test_seconds_of_a_message():
    assert EIGHT.permute_seconds(1, 8, 1e9) == 0
    assert EIGHT.permute_seconds(2, 4, 1e9) == pytest.approx(3.4e-6 + 1 / 450)
    assert EIGHT.permute_seconds(2, 32, 1e9) == pytest.approx(14e-6 + 1 / 50)


def test_tables_are_in_the_package():
    import tomllib

    root = h.HERE.parent.parent
    shipped = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert shipped["jaxdist.plan"] == ["*.toml"]
    assert {path.name for path in h.HERE.rglob("*.toml")} == {"hardware.toml", "prices.toml"}
