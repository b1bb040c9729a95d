"""Tables that fit the terminal: they leave columns out, or put them on a second line, before they shorten a cell."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # blanks between columns
MARKS = {"met": "green", "missed": "bold red"}  # of a target


def print_columns(
    console: Console,
    columns: dict[str, Sequence[str]],
    left: Collection[str] = (),
    drop: Sequence[str] = (),
    under: Collection[str] = (),
    styles: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print columns of cells under their titles; those in which no row says anything are left out.

    The first column names the rows. Where the terminal is too narrow, columns of `drop` are left out in that order,
    and said. Where that is not enough, each row gets a second line with what it says in the columns of `under` and
    `drop`; at last in all columns but the first. left: columns of words. styles: of words in cells.
    """
    said = {title: cells for title, cells in columns.items() if any(cells)}
    shown = dict(said)
    for title in drop:
        if _width(shown) <= console.width:
            break
        shown.pop(title, None)
    beneath: dict[str, Sequence[str]] = {}
    for moved in ({*under, *drop}, {*list(said)[1:]}):
        if _width(shown) > console.width:
            beneath = {title: cells for title, cells in said.items() if title in moved}
            shown = {title: cells for title, cells in said.items() if title not in moved}
    widths = [max(map(cell_len, (title, *cells))) for title, cells in shown.items()]

    def line(cells: Iterable[str]) -> str:
        padded = zip(shown, cells, widths, strict=True)
        return (
            (" " * GAP)
            .join(
                cell + " " * (width - cell_len(cell)) if title in left else " " * (width - cell_len(cell)) + cell
                for title, cell, width in padded
            )
            .rstrip()
        )

    console.print(Text(line(shown), "bold"), soft_wrap=True)
    for row in range(len(next(iter(said.values())))):
        details = _details({title: cells[row] for title, cells in beneath.items()}, console.width)
        text = Text("\n".join([line(cells[row] for cells in shown.values()), *details]))
        for word, style in styles.items():
            text.highlight_regex(rf"\b{word}\b", style)
        console.print(text, soft_wrap=True)
    if not beneath and len(shown) < len(said):
        console.print(f"(no room for: {', '.join(said.keys() - shown.keys())})", style="dim", markup=False)


class Rows:
    """A table that is filled row by row and printed by `print_columns`; a row may end early."""

    def __init__(self, *titles: str):
        self.titles, self.rows = titles, []

    def add_row(self, *cells: str) -> None:
        self.rows.append((*cells, *[""] * (len(self.titles) - len(cells))))

    def print(self, console: Console, left: Collection[str] = (), **how) -> None:
        """left: titles of words, beside the first; the rest as for `print_columns`."""
        if self.rows:
            columns = dict(zip(self.titles, zip(*self.rows, strict=True), strict=True))
            print_columns(console, columns, left={self.titles[0], *left}, **how)


def print_bullet(console: Console, text: str, style: str = "") -> None:
    """One sentence of a list: indented as a whole in a terminal, one line elsewhere."""
    if not console.is_terminal:
        console.print(Text(f"  • {text}", style), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("  •", Text(text, style))
    console.print(grid)


def _width(columns: dict[str, Sequence[str]]) -> int:
    return sum(max(map(cell_len, (title, *cells))) + GAP for title, cells in columns.items()) - GAP


def _details(cells: dict[str, str], width: int) -> list[str]:
    """Lines of "title cell", indented, broken between pairs alone."""
    pairs = [title if cell == "yes" else f"{title} {cell}" for title, cell in cells.items() if cell]
    lines: list[str] = []
    for number, pair in enumerate(pairs, 1):
        pair += "," * (number < len(pairs))
        if lines and cell_len(lines[-1]) + 1 + cell_len(pair) <= width:
            lines[-1] += " " + pair
        else:
            lines.append("    " + pair)
    return lines
