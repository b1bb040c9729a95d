"""The labs' pages as Jupyter notebooks, made by jupytext (the extra `notebooks`)."""

import re
from base64 import b64encode
from pathlib import Path

from jaxdist.files import write_whole

from .pages import BLOCK

SOURCE = "https://github.com/jaxdist/jaxdist"
REPOSITORY = f"{SOURCE}/blob/main/"
INSTALL = f"""```python
import importlib.util

if importlib.util.find_spec("jaxdist") is None:
    %pip install -q "jaxdist @ git+{SOURCE}"
```

"""
# Without it jupytext takes the language of most cells, the shell, for the notebook's.
HEADER = """---
jupyter:
  kernelspec:
    display_name: Python 3
    language: python
    name: python3
---

"""


def write_notebooks(pages: Path, folder: Path, names: list[str]) -> list[Path]:
    """NAME.ipynb of each page. Raises: OSError."""
    written = []
    for name in names:
        path = folder / f"{name}.ipynb"
        write_whole(path, notebook(pages / f"{name}.md").encode())
        written.append(path)
    return written


def notebook(page: Path) -> str:
    """A page as the text of an .ipynb file: its commands are cells, started as an installed package starts them. The
    first cell installs it where it is not.

    Tables that a command prints are left out, so that the reader makes them; pictures are inside, so that the file can
    be opened anywhere; links lead to the repository. Raises: OSError.
    """
    import jupytext

    def inside(picture: re.Match) -> str:
        drawn = b64encode((page.parent / picture[1]).read_bytes()).decode()
        return f"](data:image/svg+xml;base64,{drawn})"

    text = page.read_text(encoding="utf-8")
    text = BLOCK.sub(lambda found: "" if found[2] in ("table", "break") else found[0], text)
    text = re.sub(r"\]\(([^)]*\.svg)\)", inside, text)
    text = re.sub(r"\n*<!-- (lab: [^>]*|end) -->\n*", "\n\n", text)
    text = text.replace("python -m experiments.", "jaxdist ")
    text = re.sub(r"\]\(\.\./\.\./([^)]*)\)", rf"]({REPOSITORY}\1)", text)
    text = re.sub(r"\]\(\.\./([^)]*)\)", rf"]({REPOSITORY}docs/\1)", text)
    text = re.sub(r"\]\((?!https?:|#)([\w-]+)\.md", r"](\1.ipynb", text)
    made = jupytext.reads(HEADER + INSTALL + text, fmt="md")
    made.cells = [cell for cell in made.cells if cell.source.strip()]
    return jupytext.writes(made, fmt="ipynb")
