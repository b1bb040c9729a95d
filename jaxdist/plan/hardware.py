"""Accelerators, links, prices and clusters: what the plan knows of the machine, and how to tell it more.

No JAX here. The tables are `hardware.toml` and `prices.toml` beside this file; a user's TOML is merged over them.
Bandwidths are bytes/s that one device sends in one direction; latencies are seconds a step of a collective.
"""

import datetime
import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file
from jaxdist.plan.collective_cost import two_level

HERE = Path(__file__).parent
GIB = 2**30
STALE_DAYS = 90
MOST_NUMBER = 1e30  # in a hardware file
MOST_DOLLARS = 10_000  # an hour, of one accelerator
AXES = ("pp", "replica", "dp", "ep", "cp", "tp")  # outermost first; `jaxdist.mesh` has them too, but imports JAX
Number = Any  # a Python number, or a numpy array of them


@dataclass(frozen=True)
class Link:
    """One kind of wire. `bytes_per_s`: one device, one direction. `quoted`: how the datasheet says it."""

    name: str
    bytes_per_s: float
    latency_s: float
    quoted: str
    quoted_bytes_per_s: float
    source: str
    date: datetime.date


@dataclass(frozen=True)
class Accelerator:
    """One device: dense `peak_flops` in FLOP/s by dtype, memory in vendors' GB (2**30 bytes) and bytes/s, its links.

    calibrated: constants of `jaxdist.plan.time_model.EFFICIENCIES`; "" where no runs on it were fitted.
    measured: what steps of this program on it took, in words; "" where none was measured.
    """

    name: str
    title: str
    peak_flops: dict[str, float]
    memory_gb: float
    memory_bytes_per_s: float
    inside: Link
    between: Link
    devices_per_node: int
    source: str
    date: datetime.date
    calibrated: str = ""
    measured: str = ""

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * GIB

    def peak(self, dtype: str = "bfloat16") -> float:
        """Dense matmul FLOP/s. Raises: ConfigError for a dtype it has no figure for."""
        if dtype not in self.peak_flops:
            raise ConfigError(
                f"the peak of {self.name} in {dtype}",
                "the hardware table has no figure for it",
                f"Use {', '.join(self.peak_flops)}, or add it in your own hardware file",
            )
        return self.peak_flops[dtype]


# ------------------------------------------------------------------------------------------------------------- files


def load_hardware(path: str | Path | None = None) -> dict[str, Accelerator]:
    """Every accelerator by name; a user's TOML at `path` is merged over the shipped one, key by key.

    Raises: ConfigError for a file that cannot be read, an entry without one of its keys, a value that is not of its
        kind, or a link that is not there.
    """
    source = "hardware.toml" if path is None else str(path)
    table = _merged("hardware.toml", path)
    _require_tables(source, table, ("links", "accelerators"))
    links = {
        name: _make(Link, source, f"links.{name}", {"name": name, **entry}) for name, entry in table["links"].items()
    }
    found = {}
    for name, entry in table["accelerators"].items():
        where = f"accelerators.{name}"
        ends = {
            end: nearest(entry[end], links, "link", f"Use one of those in {source}, or add [links.{entry[end]}]")
            for end in ("inside", "between")
            if end in entry
        }
        found[name] = _make(Accelerator, source, where, {"name": name, **entry, **ends})
    return found


def find_hardware(name: str, path: str | Path | None = None) -> Accelerator:
    """One accelerator. Raises: ConfigError with the nearest names where there is none, and as `load_hardware`."""
    return nearest(name, load_hardware(path), "accelerator", "Add it in your own hardware file")


def nearest(name: str, known: dict, what: str, otherwise: str):
    """known[name], in capitals or not; where it is not there, a ConfigError with the names nearest to it."""
    name = str(name)
    if name in known:
        return known[name]
    same = [other for other in known if other.lower() == name.lower()]
    if len(same) == 1:
        return known[same[0]]
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.4)
    raise ConfigError(
        f"{what} {_shown(name)}",
        f"there is no {what} of that name among {', '.join(known)}",
        f"Did you mean {' or '.join(close)}? {otherwise}" if close else otherwise,
    )


def read_toml(path: Path) -> dict:
    text = read_text_file("file", path)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(f"file {str(path)!r}", f"it cannot be read as TOML ({why})", "Name a TOML file") from error


def _merged(shipped: str, path: str | Path | None) -> dict:
    table = read_toml(HERE / shipped)
    if path is None:
        return table
    own = read_toml(Path(path))
    _require_printable(path, own)
    return _merge(table, own)


def _require_printable(path: str | Path, value) -> None:
    """Refuse text that would be an order to a terminal: all of it is printed sooner or later."""
    if isinstance(value, dict | list):
        for part in (*value, *(value.values() if isinstance(value, dict) else ())):
            _require_printable(path, part)
    elif isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{_shown(value)} in {path}", "must have nothing that a terminal obeys", "Use plain text")


def _merge(below: dict, above: dict) -> dict:
    both = dict(below)
    for key, value in above.items():
        inner = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = _merge(both[key], value) if inner else value
    return both


def _require_tables(source: str, table: dict, known: Iterable[str]) -> None:
    for name, entries in table.items():
        if name not in known or not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
            raise ConfigError(
                f"[{name}] in {source}",
                "a hardware file must have tables of links and of accelerators",
                "Write [links.NAME] or [accelerators.NAME]",
            )


def _make(kind, source: str, where: str, entry: dict):
    names = [field.name for field in fields(kind)]
    for wrong in entry.keys() - set(names):
        raise ConfigError(f"[{where}] {wrong} in {source}", "there is no such key", f"Use {', '.join(names[1:])}")
    for missing in [field.name for field in fields(kind) if field.default is MISSING and field.name not in entry]:
        raise ConfigError(f"[{where}] in {source}", f"{missing} must be given", f"Give {', '.join(names[1:])}")
    for field in fields(kind):
        value = entry.get(field.name, field.default)
        wanted = {float: (int, float), int: int, dict[str, float]: dict}.get(field.type, field.type)
        if not isinstance(value, wanted) or isinstance(value, (bool, datetime.datetime)):
            raise ConfigError(
                f"[{where}] {field.name}={_shown(value)} in {source}",
                "must be of the right kind",
                "See hardware.toml",
            )
        numbers = value.values() if isinstance(value, dict) else [value] if field.type in (int, float) else []
        for number in numbers:
            good = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= MOST_NUMBER
            if not good or (number == 0 and field.name != "latency_s"):
                raise ConfigError(
                    f"[{where}] {field.name}={_shown(number)} in {source}",
                    "must be a positive finite number",
                    "Write bytes (not bits) and FLOP (not TFLOP) a second, as in 25e9",
                )
    return kind(**entry)


# ------------------------------------------------------------------------------------------------------------ prices


@dataclass(frozen=True)
class Price:
    """Dollars an hour of one accelerator; `warning` is a sentence where the price is old, else empty."""

    dollars_per_hour: float
    hardware: str
    vendor: str
    date: datetime.date
    source: str
    warning: str = ""


def load_prices(path: str | Path | None = None) -> dict[str, dict]:
    """Vendor -> prices, with "source" and "date"; a user's TOML at `path` is merged over the shipped one.

    Raises: ConfigError for a file that cannot be read, or what is not a table of prices.
    """
    table = _merged("prices.toml", path)
    for vendor, entry in table.items():
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{vendor} = {_shown(entry)} in {path}",
                "a price file must have a table for each vendor",
                f"Write [{vendor}] and under it h100 = 2.99 and date = 2026-01-31",
            )
    return table


def price(hardware: str, vendor: str, today: datetime.date | None = None, path: str | Path | None = None) -> Price:
    """What a vendor asks for one accelerator an hour, on demand.

    `today` None is `date.today()`; a price older than 90 days by then carries a warning.
    Raises: ConfigError with the nearest names for an unknown vendor or an accelerator it does not list.
    """
    entry = nearest(vendor, load_prices(path), "vendor", "Add it in your own price file")
    listed = {name: value for name, value in entry.items() if name not in ("source", "date")}
    dollars = nearest(hardware, listed, f"accelerator in the prices of {vendor},", "Add it in your own price file")
    date, source = entry.get("date"), entry.get("source", "no source given")
    is_number = isinstance(dollars, (int, float)) and not isinstance(dollars, bool)
    is_day = isinstance(date, datetime.date) and not isinstance(date, datetime.datetime)
    if not (is_number and 0 < dollars <= MOST_DOLLARS and is_day):
        raise ConfigError(
            f"the price of {hardware} at {vendor}",
            f"must have dollars above 0 and at most {MOST_DOLLARS:,}, and the day they were read, "
            f"not {_shown(dollars)} and {_shown(date)}",
            f"Write {hardware} = 2.99 and date = 2026-01-31 under [{vendor}]",
        )
    age = ((today or datetime.date.today()) - date).days
    warning = ""
    if age > STALE_DAYS:
        warning = (
            f"The price of {hardware} at {vendor} is of {date}, {age} days old ({source}): check it before you pay."
        )
    return Price(float(dollars), hardware, vendor, date, source, warning)


def _shown(value) -> str:
    """About as it is written in TOML, shortened."""
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:60] + "..."


# ----------------------------------------------------------------------------------------------------------- cluster


def strides(sizes: dict[str, Number]) -> dict[str, Number]:
    """How far apart two neighbours on each axis are, in devices: the product of the axes inside it.

    Devices are laid out with tp innermost and pp outermost, as `jaxdist.mesh` does. Axes not given have size 1.
    """
    found, stride = {}, 1
    for axis in reversed(AXES):
        found[axis] = stride
        stride = stride * np.asarray(sizes.get(axis, 1))
    return found


@dataclass(frozen=True)
class Cluster:
    """num_nodes × devices_per_node accelerators; `inside` and `between` may replace the accelerator's own links."""

    hardware: Accelerator
    num_nodes: int = 1
    devices_per_node: int = None  # this, and the links, are the accelerator's unless given
    inside: Link = None
    between: Link = None

    def __post_init__(self):
        defaults = {
            "devices_per_node": self.hardware.devices_per_node,
            "inside": self.hardware.inside,
            "between": self.hardware.between,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("num_nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}", "a cluster must have at least one", f"Use {name}=1")

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def with_latency(self, factor: float) -> "Cluster":
        """The same, with links whose latencies are so many times as large."""
        inside, between = (replace(link, latency_s=link.latency_s * factor) for link in (self.inside, self.between))
        return replace(self, inside=inside, between=between)

    def split_axis(self, size: Number, stride: Number) -> tuple[Number, Number]:
        """(inside, across): ranks of one axis that share a node, and how many nodes its group touches.

        An axis is inside a node where stride·size divides devices_per_node, or there is but one node; elsewhere some of
        its groups leave theirs, as six neighbours do of nodes of 8: two are in one and four in the next. An axis that
        leaves its node has `inside` neighbours in each of `across` nodes, one where the stride divides no node.
        Columns allowed.
        """
        size, stride = np.asarray(size), np.asarray(stride)
        whole, over = np.divmod(self.devices_per_node, stride)
        alone = (self.num_nodes == 1) & (stride * size <= self.devices_per_node)
        inside = np.where(alone, size, np.gcd(size, np.where(over == 0, whole, 1)))
        return inside[()], (size // inside)[()]

    def link_of(self, size: Number, stride: Number) -> np.ndarray | str:
        """Which link a mesh axis lands on: "none" (one rank), "inside", "between", or "both" where it straddles."""
        inside, across = self.split_axis(size, stride)
        names = np.where(
            np.asarray(across) == 1,
            np.where(np.asarray(inside) == 1, "none", "inside"),
            np.where(np.asarray(inside) == 1, "between", "both"),
        )
        return str(names) if names.ndim == 0 else names

    def links_of(self, **sizes: int) -> dict[str, str]:
        """`link_of` for every axis of a mesh given as pp=2, dp=4, tp=8."""
        for axis in sizes.keys() - set(AXES):
            raise ConfigError(f"mesh axis {axis!r}", "there is no axis of that name", f"Use {', '.join(AXES)}")
        apart = strides(sizes)
        return {axis: str(self.link_of(sizes.get(axis, 1), apart[axis])) for axis in AXES}

    def collective_seconds(
        self,
        algorithm: str,
        size: Number,
        stride: Number,
        num_bytes: Number,
        inside_efficiency: float = 1.0,
        between_efficiency: float = 1.0,
    ) -> Number:
        """Predicted seconds of a collective on an axis, on the link or two links it lands on. Columns allowed.

        algorithm: of `two_level`; "all_reduce" is the faster one of a ring and a tree between nodes, as NCCL chooses.
        """
        inside, across = self.split_axis(size, stride)

        def seconds(name: str) -> Number:
            within, beyond = two_level(name, inside, across, num_bytes)
            return within.seconds(self.inside.latency_s, self.inside.bytes_per_s * inside_efficiency) + beyond.seconds(
                self.between.latency_s, self.between.bytes_per_s * between_efficiency
            )

        if algorithm == "all_reduce":
            return np.minimum(seconds("ring_all_reduce"), seconds("pipelined_tree_all_reduce"))[()]
        return seconds(algorithm)

    def permute_seconds(
        self,
        size: Number,
        stride: Number,
        num_bytes: Number,
        inside_efficiency: float = 1.0,
        between_efficiency: float = 1.0,
    ) -> Number:
        """Predicted seconds of one message to the next rank of an axis; 0 on one rank. Columns allowed.

        The slowest pair decides: an axis that leaves the node anywhere sends at the speed between nodes.
        """
        size, (_, across) = np.asarray(size), self.split_axis(size, stride)
        inside = self.inside.latency_s + num_bytes / (self.inside.bytes_per_s * inside_efficiency)
        between = self.between.latency_s + num_bytes / (self.between.bytes_per_s * between_efficiency)
        return np.where(size == 1, 0.0, np.where(across > 1, between, inside))[()]
