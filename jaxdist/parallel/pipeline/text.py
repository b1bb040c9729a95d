"""Pipeline schedules as text: draw a table, and read one that was drawn or written by hand; no JAX."""

import re
from pathlib import Path

from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule
from jaxdist.parallel.pipeline.simulate import validate


def draw(schedule: Schedule) -> str:
    """The table as text that `parse` reads: a header, then one line per stage with one cell per tick.

    F3 is F of micro-batch 3 in chunk 0, f3 the same in chunk 1, F3:2 in chunk 2; a point is an idle tick.
    """
    cells = [[_cell(row[stage]) for row in schedule.table] for stage in range(schedule.num_stages)]
    width = max((len(cell) for line in cells for cell in line), default=1)
    labels = [f"{stage}:" for stage in range(schedule.num_stages)]
    margin = max(map(len, labels))
    ruler = "#"
    for tick in range(0, schedule.num_ticks, 10):
        ruler = ruler.ljust(margin + 1 + tick * (width + 1)) + str(tick)
    header = (
        f"name={'-'.join(schedule.name.split())} placement={schedule.placement} stages={schedule.num_stages}"
        f" chunks={schedule.num_chunks} microbatches={schedule.num_microbatches}"
        f" fused={'yes' if schedule.fused_backward else 'no'}"
        + f" hop={schedule.send_latency}"
        * (schedule.send_latency > 1)
    )
    lines = [
        f"{label.ljust(margin)} {' '.join(cell.ljust(width) for cell in line)}"
        for label, line in zip(labels, cells, strict=True)
    ]
    return "\n".join(line.rstrip() for line in [header, ruler, *lines]) + "\n"


def _cell(action: Action | None) -> str:
    if action is None:
        return "."
    phase, microbatch, chunk = action.phase.name, action.microbatch, action.chunk
    return f"{phase.lower() if chunk == 1 else phase}{microbatch}" + f":{chunk}" * (chunk > 1)


_HEADER_KEYS = ("name", "placement", "stages", "chunks", "microbatches", "fused", "hop")


def parse(text: str, source: str = "table") -> Schedule:
    """The schedule written in `text`, checked. `source` is its name in error messages, and if `text` gives none.

    One line per stage, with cells as `draw` writes them, separated by blanks (F3:0 and F3:1 are read too); a stage with
    a shorter line idles at the end; one R makes a table that recomputes. A line may begin with its stage's number and a
    colon; # starts a comment. Words such as placement=v on lines of their own set what the cells do not show; by
    default placement=loop, fused=no, hop=1 (`send_latency`), and as many chunks and micro-batches as the cells name.

    Raises: ConfigError naming the line and cell that cannot be read, and as `validate`.
    """
    header: dict[str, str] = {}
    lines: list[list[Action | None]] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        words = line.split("#")[0].split()
        if not words:
            continue
        if "=" in words[0]:
            header |= _parse_header(words, where)
            continue
        if words[0].endswith(":"):
            label = words.pop(0)
            if label != f"{len(lines)}:":
                raise ConfigError(f"{where}: {label!r}", f"must be '{len(lines)}:'", "Write the stages in order")
        lines.append([parse_cell(word, f"{where}, tick {tick}, stage {len(lines)}") for tick, word in enumerate(words)])
    actions = [action for line in lines for action in line if action is not None]
    if not actions:
        raise ConfigError(source, "must have actions", "Write one line a stage, as in `F0 F1 B0 W0 B1 W1`")
    num_stages = _header_size(header, "stages", len(lines), source)
    if num_stages != len(lines):
        raise ConfigError(
            f"{source} with stages={num_stages}", f"must have as many lines, not {len(lines)}", "Write one line a stage"
        )
    num_ticks = max(map(len, lines))
    schedule = Schedule(
        name=header.get("name", source),
        num_stages=num_stages,
        num_microbatches=_header_size(header, "microbatches", 1 + max(a.microbatch for a in actions), source),
        num_chunks=_header_size(header, "chunks", 1 + max(a.chunk for a in actions), source),
        placement=header.get("placement", "loop"),
        table=tuple(zip(*(line + [None] * (num_ticks - len(line)) for line in lines), strict=True)),
        fused_backward=header.get("fused", "no") == "yes",
        send_latency=_header_size(header, "hop", 1, source),
        recompute=any(action.phase == Phase.R for action in actions),
    )
    validate(schedule)
    return schedule


def load(path: str | Path) -> Schedule:
    """`parse` of a file. Raises: ConfigError, also where it cannot be read."""
    return parse(read_text_file("schedule file", path), source=Path(path).name)


def _parse_header(words: list[str], where: str) -> dict[str, str]:
    header = {}
    for word in words:
        key, equals, value = word.partition("=")
        known = equals and key in _HEADER_KEYS and re.fullmatch(r"[\w.-]+", value, re.ASCII)
        if not known or (key == "fused" and value not in ("yes", "no")):
            raise ConfigError(
                f"{where}: {word!r}",
                f"a header must hold {', '.join(_HEADER_KEYS)}, each a word of letters, digits, points and dashes",
                "Write them as in placement=v fused=no",
            )
        header[key] = value
    return header


def _header_size(header: dict[str, str], key: str, seen: int, source: str) -> int:
    value = header.get(key, str(seen))
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ConfigError(f"{source}: {key}={value}", "must be a count", f"Write {key}={seen}")
    return int(value)


def parse_cell(word: str, where: str) -> Action | None:
    if word == ".":
        return None
    match = re.fullmatch(r"([FBWR])(\d{1,9})(?::(\d{1,9}))?|([fbwr])(\d{1,9})", word, re.ASCII)
    if match is None:
        raise ConfigError(
            f"{where}: {word!r}",
            "a cell must be F, B, W or R with a micro-batch (small for chunk 1), or a point where the stage idles",
            "Write F3, f3, F3:2 or .",
        )
    phase, microbatch, chunk, small, small_microbatch = match.groups()
    if small:
        return Action(Phase[small.upper()], int(small_microbatch), 1)
    return Action(Phase[phase], int(microbatch), int(chunk or 0))
