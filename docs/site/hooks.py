"""What MkDocs does not do by itself: pages from outside docs/, a page for each module, links that leave docs/.

Pages are written so that their links work in a view of the repository (`../cluster/train.sbatch`, `docs/plan.md`). On
the site such a link leads to a page: of the API for a module of the package, of the source for any other file.

A lab's page gets a link to itself as a notebook, which is made here, and to the one that CI puts in a branch of the
repository, from where Colab opens it.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.labs import COURSE  # noqa: E402
from experiments.labs.notebooks import SOURCE, notebook  # noqa: E402

PACKAGE = "jaxdist"
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COLAB = f"{SOURCE.replace('github.com', 'colab.research.google.com/github')}/blob/notebooks"
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash"}

FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(\))")


def modules() -> list[str]:
    """Repository paths of the public modules of the package, parents before children."""
    paths = [path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py")]
    public = [path for path in paths if path.name == "__init__.py" or not path.name.startswith("_")]
    return sorted(path.as_posix() for path in public)


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def page_of(path: str) -> str:
    """The site's page for a file of the repository."""
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in MODULES:
        return f"reference/{dotted(path)}.md"
    return f"source/{path}.md"


def path_of(page: str) -> str:
    """The file of the repository that a page was written in."""
    return next((path for path, name in FROM_ROOT.items() if name == page), f"docs/{page}")


def target(page: str, link: str) -> str:
    """The file of the repository that a link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path_of(page)), link))


def nested(names: list[str], package: str = PACKAGE) -> list:
    """Navigation below a package: its own page, its modules, then a section for each package inside."""
    modules: list = [{package.rpartition(".")[2]: f"reference/{package}.md"}]
    packages: list = []
    for name in names:
        if name.rpartition(".")[0] == package:
            if any(other.startswith(f"{name}.") for other in names):
                packages.append({name: nested(names, name)})
            else:
                modules.append({name.rpartition(".")[2]: f"reference/{name}.md"})
    return modules + packages


MODULES = modules()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for entry in config.nav or []:
        if "Reference" in entry:
            entry["Reference"] = [*entry["Reference"], {"API": nested([dotted(path) for path in MODULES])}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    def add(page: str, content: str, **options) -> None:
        files.append(File.generated(config, page, content=content, **options))

    for path, page in FROM_ROOT.items():
        if (ROOT / path).exists():
            add(page, (ROOT / path).read_text(encoding="utf-8"))
    for path in MODULES:
        name = dotted(path)
        add(page_of(path), f"---\ntitle: {name}\n---\n\n::: {name}\n")
    for name in COURSE:
        add(f"labs/{name}.ipynb", notebook(ROOT / f"docs/labs/{name}.md"))

    linked = set()
    for file in files.documentation_pages():
        for part in FENCE.split(file.content_string)[::2]:
            linked |= {target(file.src_uri, found[2]) for found in LINK.finditer(part)}
    for path in sorted(linked):
        source = ROOT / path
        if page_of(path).startswith("source/") and source.is_file():
            language = LANGUAGES.get(source.suffix, "text")
            text = f"# `{path}`\n\n````{language}\n{source.read_text(encoding='utf-8')}\n````\n"
            add(page_of(path), text, inclusion=InclusionLevel.NOT_IN_NAV)
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    here = page.file.src_uri
    folder, name = posixpath.split(here.removesuffix(".md"))
    if folder == "labs" and name in COURSE:
        title, _, rest = markdown.partition("\n")
        as_notebook = f"As a notebook: [download]({name}.ipynb), [open in Colab]({COLAB}/{name}.ipynb)."
        markdown = f"{title}\n\n{as_notebook}\n{rest}"

    def relative(found: re.Match) -> str:
        path = target(here, found[2])
        if path.startswith("docs/") and here not in FROM_ROOT.values():
            return found[0]
        to = posixpath.relpath(page_of(path), posixpath.dirname(here) or ".")
        return f"{found[1]}{to}{found[3] or ''}{found[4]}"

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(relative, part) for part in parts[::2]]
    return "".join(parts)
