"""The documentation site builds without a warning, has a page for each module, and loads nothing from the network."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers.python")


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if not all(map(installed, NEEDED)):
        pytest.skip("the site's tools are not installed: pip install -e '.[docs]'")
    if not (ROOT / "mkdocs.yml").exists():
        pytest.skip("a copy of the tree without mkdocs.yml")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run([*command, "--site-dir", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder
    shutil.rmtree(folder)


def test_every_module_and_every_page_is_in_the_navigation(site):
    navigation = (site / "index.html").read_text(encoding="utf-8").split("<main", 1)[1]
    for path in (ROOT / "jaxdist").rglob("*.py"):
        if path.name.startswith("_") and path.name != "__init__.py":
            continue
        name = path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert f'href="reference/{name}.html"' in navigation, name
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert f'href="{page}"' in navigation, page


def test_docstrings_are_on_the_pages_of_their_modules(site):
    page = (site / "reference/jaxdist.config.html").read_text(encoding="utf-8")
    assert "class" in page and "RunConfig" in page and "Source code in" in page


def test_no_page_loads_anything_from_the_network(site):
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*?src=\"?https?:|<link(?![^>]*canonical)[^>]*?href=\"?https?:")
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), page.relative_to(site)


def test_links_to_files_outside_docs_lead_to_their_text(site):
    assert (site / "source/cluster/train.sbatch.html").exists()
    assert 'href="source/cluster/train.sbatch.html"' in (site / "cluster.html").read_text(encoding="utf-8")
