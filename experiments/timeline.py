"""Pictures of pipeline schedules: one list of shapes, written as SVG by hand and as PNG by Pillow."""

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console

from jaxdist.commands import install_text
from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.schedules import Phase, Schedule
from jaxdist.parallel.pipeline.simulate import Costs, held_chunks, simulate

COLOURS = {Phase.F: (52, 112, 196), Phase.B: (214, 104, 40), Phase.W: (62, 142, 92)}
PHASES = {Phase.F: "forward", Phase.B: "input gradient", Phase.W: "weight gradient"}
IDLE, INK, FAINT, MEMORY = (232, 232, 236), (34, 34, 40), (120, 120, 130), (146, 130, 196)
TICK_WIDTH, ROW, GAP, LEFT, RIGHT, MARGIN = 22.0, 26.0, 4.0, 70.0, 70.0, 16.0

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float
    fill: Colour


@dataclass(frozen=True)
class Text:
    """`anchor` is SVG's start, middle or end; y is the middle of the letters."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: Colour = INK
    anchor: str = "start"


@dataclass(frozen=True)
class Line:
    x: float
    y: float
    end_x: float
    end_y: float
    fill: Colour


@dataclass
class Picture:
    """Shapes in pixels, painted in order on white."""

    width: float
    height: float
    shapes: list[Rectangle | Text | Line] = field(default_factory=list)


def timeline(schedule: Schedule, costs: Costs, subtitle: str) -> Picture:
    """Every action of a schedule over simulated time (lock-step, free links), and under it what each stage holds.

    Chunks are shades, from dark to light; a grey cell is idle. Memory is in activations of a whole stage's layers for
    one micro-batch, all stages to one scale.
    """
    result = simulate(schedule, costs)
    scale = TICK_WIDTH * schedule.num_ticks / result.makespan
    right = LEFT + result.makespan * scale
    memory_top = 86 + schedule.num_stages * (ROW + GAP) + 34
    picture = Picture(max(right + RIGHT, 820), memory_top + schedule.num_stages * (ROW + GAP) + MARGIN + 18)
    add = picture.shapes.append

    title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    add(Text(MARGIN, 22, title + ", messages travel during a tick" * (schedule.send_latency == 2), 17))
    add(Text(MARGIN, 44, subtitle, 12, FAINT))
    x = MARGIN
    for phase, chunk, name in legend(schedule):
        fill = IDLE if phase is None else shade(COLOURS[phase], chunk, schedule.num_chunks)
        add(Rectangle(x, 58, 16, 14, fill))
        add(Text(x + 21, 65, name, 11))
        x += 34 + 6.0 * len(name)

    held = held_chunks(schedule)
    peak = max(max(row) for row in held)
    for stage in range(schedule.num_stages):
        y = 86 + stage * (ROW + GAP)
        add(Text(LEFT - 8, y + ROW / 2, f"stage {stage}", 12, INK, "end"))
        add(Rectangle(LEFT, y, right - LEFT, ROW, IDLE))
        memory_y = memory_top + stage * (ROW + GAP)
        add(Text(LEFT - 8, memory_y + ROW / 2, f"stage {stage}", 12, INK, "end"))
        add(Rectangle(LEFT, memory_y, right - LEFT, ROW, (246, 246, 248)))
        for tick, row in enumerate(schedule.table):
            left = LEFT + result.start[tick, stage] * scale
            until = result.start[tick + 1, stage] if tick + 1 < schedule.num_ticks else result.makespan
            height = (ROW - 2) * held[tick][stage] / peak
            add(Rectangle(left, memory_y + ROW - height, LEFT + until * scale - left, height, MEMORY))
            if (action := row[stage]) is not None:
                fill = shade(COLOURS[action.phase], action.chunk, schedule.num_chunks)
                width = (result.end[tick, stage] - result.start[tick, stage]) * scale
                add(Rectangle(left + 0.5, y, max(width - 1, 0), ROW, fill))
                size = 11 if action.microbatch < 100 else 9
                if width > size * 0.62 * len(str(action.microbatch)):
                    ink = INK if sum(fill) > 480 else (255, 255, 255)
                    add(Text(left + width / 2, y + ROW / 2, str(action.microbatch), size, ink, "middle"))
        highest = max(row[stage] for row in held) / schedule.num_chunks
        add(Text(right + 8, memory_y + ROW / 2, f"peak {highest:g}", 12))
    add(Text(LEFT, memory_top - 12, "activations in flight (of a stage's layers for one micro-batch)", 12, FAINT))
    axis = memory_top + schedule.num_stages * (ROW + GAP) + 6
    add(Text(LEFT, axis, "0", 11, FAINT))
    add(Text(right, axis, f"{result.makespan:g}", 11, FAINT, "end"))
    add(Text((LEFT + right) / 2, axis, "time, in the unit of the costs", 11, FAINT, "middle"))
    return picture


def legend(schedule: Schedule) -> list[tuple[Phase | None, int, str]]:
    """(phase or None for idle, chunk, words)."""
    entries: list[tuple[Phase | None, int, str]] = []
    for phase, name in PHASES.items():
        for chunk in range(schedule.num_chunks):
            entries.append(
                (phase, chunk, f"{phase.name} {name}" + (f", chunk {chunk}" if schedule.num_chunks > 1 else ""))
            )
    return [*entries, (None, 0, "idle")]


def shade(colour: Colour, chunk: int, num_chunks: int) -> Colour:
    """Later chunks are lighter."""
    towards_white = 0.62 * chunk / max(num_chunks - 1, 1)
    return tuple(round(part + (255 - part) * towards_white) for part in colour)


def write_both(picture: Picture, stem: Path, console: Console) -> None:
    """STEM.svg, and STEM.png where Pillow is installed. Raises: ConfigError where they cannot be written."""
    svg, png = (stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png"))
    try:
        write_svg(picture, svg)
        console.print(f"wrote {svg}", markup=False)
        write_png(picture, png)
        console.print(f"wrote {png}", markup=False)
    except ImportError:
        console.print(f"no {png}: PNG needs Pillow ({install_text('draw')})", markup=False)
    except OSError as error:
        raise ConfigError(
            f"--draw {str(stem.parent)!r}", f"cannot write {svg} ({error.strerror})", "Name another"
        ) from error


def write_svg(picture: Picture, path: Path) -> None:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width:g} {picture.height:g}"'
        f' width="{picture.width:g}" height="{picture.height:g}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for shape in picture.shapes:
        fill = "#{:02x}{:02x}{:02x}".format(*shape.fill)
        if isinstance(shape, Rectangle):
            lines.append(
                f'<rect x="{shape.x:.5g}" y="{shape.y:.5g}" width="{shape.width:.5g}" height="{shape.height:.5g}"'
                f' fill="{fill}"/>'
            )
        elif isinstance(shape, Line):
            lines.append(
                f'<line x1="{shape.x:.5g}" y1="{shape.y:.5g}" x2="{shape.end_x:.5g}" y2="{shape.end_y:.5g}"'
                f' stroke="{fill}"/>'
            )
        else:
            lines.append(
                f'<text x="{shape.x:.5g}" y="{shape.y:.5g}" font-size="{shape.size:g}" fill="{fill}"'
                f' text-anchor="{shape.anchor}" dominant-baseline="central">{escape(shape.text)}</text>'
            )
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


def write_png(picture: Picture, path: Path, zoom: float = 1.5) -> None:
    """Raises: ImportError without Pillow."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (round(picture.width * zoom), round(picture.height * zoom)), (255, 255, 255))
    pencil = ImageDraw.Draw(image)
    fonts = {
        shape.size: ImageFont.load_default(shape.size * zoom) for shape in picture.shapes if isinstance(shape, Text)
    }
    for shape in picture.shapes:
        if isinstance(shape, Text):
            anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.anchor]
            at = (shape.x * zoom, shape.y * zoom)
            pencil.text(at, shape.text, fill=shape.fill, font=fonts[shape.size], anchor=anchor)
        elif isinstance(shape, Line):
            ends = (shape.x * zoom, shape.y * zoom, shape.end_x * zoom, shape.end_y * zoom)
            pencil.line(ends, fill=shape.fill, width=round(zoom))
        else:
            left, top = round(shape.x * zoom), round(shape.y * zoom)
            # Pillow paints the last row and column of a box too.
            right, bottom = round((shape.x + shape.width) * zoom) - 1, round((shape.y + shape.height) * zoom) - 1
            if right >= left and bottom >= top:
                pencil.rectangle((left, top, right, bottom), fill=shape.fill)
    image.quantize(64).save(path, optimize=True)
