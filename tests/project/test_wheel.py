"""The command `jaxdist`, the names that `import jaxdist` offers, and the wheel: its content, and that it runs alone."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jaxdist
from jaxdist import console, versions

ROOT = Path(__file__).parents[2]
NO_JAX = "assert not {'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules), sorted(sys.modules)"


def python(*words: str, cwd: Path = ROOT, path: Path = ROOT) -> subprocess.CompletedProcess:
    """A fresh interpreter that finds the package at `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "80"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


# ---- the names ----


@pytest.mark.parametrize("name", jaxdist.__all__)
def test_every_public_name_is_there(name):
    assert getattr(jaxdist, name) is not None and name in dir(jaxdist)


def test_type_checkers_see_the_names_that_are_imported_on_use():
    tree = ast.parse((ROOT / "jaxdist/__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {line.module.removeprefix("jaxdist."): tuple(name.name for name in line.names) for line in block.body}
    assert seen == jaxdist._HOMES
    assert {name for names in seen.values() for name in names} | {"__version__"} == set(jaxdist.__all__)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'jaxdist' has no attribute 'Modell'"):
        _ = jaxdist.Modell


def test_importing_the_package_imports_no_jax():
    done = python("-c", f"import sys, jaxdist; dir(jaxdist); {NO_JAX}")
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_docstring_runs():
    lines = [line[4:] for line in jaxdist.__doc__.splitlines() if line.startswith("    ")]
    done = python("-c", "\n".join(["from jaxdist import *", *lines, "print(float(metrics['loss']))"]))
    assert done.returncode == 0 and 5 < float(done.stdout) < 6, done.stderr


# ---- the command ----


def run_console(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["jaxdist", *words])
    return console.main(), *capsys.readouterr()


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_command_lists_every_program(monkeypatch, capsys, words):
    code, out, err = run_console(monkeypatch, capsys, *words)
    assert code == 0 and not err and max(map(len, out.splitlines())) <= 80
    for name in ("bench", "plan", "report", "train", "verify"):
        assert f"\n  {name} " in out
    assert "\n  cli " not in out and "\n  warden " not in out and "Train a GPT on any mesh" in out


def test_the_command_tells_its_version(monkeypatch, capsys):
    assert run_console(monkeypatch, capsys, "--version") == (0, f"jaxdist {versions.__version__}\n", "")


@pytest.mark.parametrize("word", ["trian", "cli", "--nope", "", "..", "\x1b[31m"])
def test_an_unknown_program_is_one_line(monkeypatch, capsys, word):
    code, out, err = run_console(monkeypatch, capsys, word)
    assert code == 2 and not out and err.count("\n") == 1 and "\x1b" not in err
    assert all(name in err for name in console.find_programs())


def test_the_list_of_programs_imports_no_jax():
    done = python("-c", f"import sys; from jaxdist.console import main; main(); {NO_JAX}")
    assert done.returncode == 0 and "train" in done.stdout, done.stderr


def test_a_program_is_called_as_it_was_started():
    by_command, by_module = python("-m", "jaxdist", "launch", "--help"), python("-m", "experiments.launch", "--help")
    assert by_command.stdout.startswith("usage: jaxdist launch ")
    assert by_module.stdout.startswith("usage: python -m experiments.launch ")
    assert by_command.returncode == by_module.returncode == 0


# ---- the wheel ----


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since a build leaves files beside what it builds from."""
    pytest.importorskip("pip", reason="pip is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("jaxdist", "experiments"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """The folder that the wheel was installed to; nothing else finds it."""
    pip("install", "--no-deps", "--no-compile", "--target", str(wheel.parent / "installed"), str(wheel))
    return wheel.parent / "installed"


def pip(*words: str) -> None:
    done = python("-m", "pip", "--disable-pip-version-check", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"jaxdist", f"jaxdist-{versions.__version__}.dist-info"}
    wanted = {path.relative_to(ROOT) for path in (ROOT / "jaxdist").rglob("*.*") if path.suffix in (".py", ".toml")}
    programs = {path.relative_to(ROOT / "experiments") for path in (ROOT / "experiments").rglob("*.py")}
    programs = {path for path in programs if path.parts[0] != "calibration"}  # evidence, of no use to a user
    wanted |= {Path("jaxdist/programs") / path for path in programs} | {Path("jaxdist/py.typed")}
    assert {Path(name) for name in names if name.startswith("jaxdist/")} == wanted


def test_the_wheel_says_what_it_is(wheel):
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
    metadata = files.read(name).decode()
    for line in ("Author: The jaxdist authors", "License-Expression: Apache-2.0", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in metadata
    assert "\nProject-URL: Source, https://" in metadata


def test_an_installed_wheel_is_the_same_source_as_the_clone(installed, tmp_path):
    code = "from jaxdist.versions import __file__, source_digest; print(__file__, source_digest())"
    done = python("-c", code, cwd=tmp_path, path=installed)
    assert done.stdout.split() == [str(installed / "jaxdist/versions.py"), versions.source_digest()], done.stderr


def test_an_installed_wheel_lists_its_programs(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, installed / "bin/jaxdist"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.rstrip("\n"), done.stderr) == (0, console.overview(), "")


def test_an_installed_wheel_names_commands_that_it_has(installed, tmp_path):
    done = python("-m", "jaxdist", "budget", "show", cwd=tmp_path, path=installed)
    assert done.returncode == 2 and "`jaxdist budget init --budget 3.00" in done.stderr


def test_an_installed_wheel_runs(installed, tmp_path):
    done = python("-m", "jaxdist", "plan", "schedules", "--schedule", "zb-h1", cwd=tmp_path, path=installed)
    assert done.returncode == 0 and "zb-h1" in done.stdout, done.stderr
    flags = "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 4 --mesh dp=2 --steps 1"
    done = python("-m", "jaxdist", "verify", *flags.split(), cwd=tmp_path, path=installed)
    assert done.returncode == 0 and "equal" in done.stdout, done.stdout + done.stderr
