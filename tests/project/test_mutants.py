"""Mechanical mutants: what is made of a source, which tests they meet, and that each is still Python."""

import ast
import json
import textwrap

from tests import mutants
from tests.mutants import Coverage, all_mutants, equivalents, mutants_of

SOURCE = textwrap.dedent(
    '''
    """A module."""
    import jax
    LIMIT = 2

    @cached(size=3)
    def total(x: "float32", rows=1):
        """A docstring of 4 words."""
        assert rows > 5
        if rows <= LIMIT and x:
            raise ValueError(f"{rows + 6} is over 7")
        x = x.astype("float32")
        return jax.lax.psum(x * 2.0, "dp", tiled=True) if -rows else sum(zip(x, x, strict=True))
    '''
)


def test_what_is_mutated_and_what_is_not():
    found = {(m.line, m.old, m.new) for m in mutants_of("a.py", SOURCE)}
    psum, plain = 'jax.lax.psum(x * 2.0, "dp", tiled=True)', "sum(zip(x, x, strict=True))"
    assert found == {
        (4, "2", "3"),
        (7, "1", "2"),
        (10, "rows <= LIMIT and x", "(rows <= LIMIT or x)"),
        (10, "rows <= LIMIT", "(rows < LIMIT)"),
        (12, 'x = x.astype("float32")', "pass"),
        (12, 'x.astype("float32")', "('float32')"),
        (12, '"float32"', "'bfloat16'"),
        (13, f"{psum} if -rows else {plain}", "(jax.lax.psum(x * 2.0, 'dp', tiled=True))"),
        (13, f"{psum} if -rows else {plain}", f"({plain})"),
        (13, psum, "jax.lax.psum(x * 2.0, 'dp')"),
        (13, "x * 2.0", "(x + 2.0)"),
        (13, "2.0", "5.0"),
        (13, '"dp"', "'tp'"),
        (13, "True", "False"),
        (13, "-rows", "(rows)"),
    }


def test_a_mutant_is_the_source_with_one_place_changed():
    found = {m.new: m for m in mutants_of("a.py", "x = 'ü' + 1\n")}
    assert found["2"].planted("x = 'ü' + 1\n".encode()).decode() == "x = 'ü' + 2\n"  # columns are bytes
    for path in ("jaxdist/parallel/collectives.py", "jaxdist/train/optimizer.py"):
        source = (mutants.ROOT / path).read_bytes()
        for mutant in all_mutants((path,)):
            changed = mutant.planted(source)
            assert changed != source
            ast.parse(changed)


def test_a_mutant_meets_the_tests_of_its_statement_the_fastest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    record = tmp_path / "record.jsonl"
    rows = [("slow", 9.0, [10, 12]), ("fast", 1.0, [12]), ("other", 0.5, [13]), ("reads", 0.1, [])]
    for name, *_ in rows:
        (tmp_path / name).write_text("from a import LIMIT\n" * (name == "reads"))
    record.write_text(
        "".join(json.dumps({"test": t, "seconds": s, "lines": {"a.py": lines}}) + "\n" for t, s, lines in rows)
    )
    tests = Coverage([record])
    by_line = {m.line: m for m in mutants_of("a.py", SOURCE)}
    assert tests.of(by_line[12], seconds=100) == ["fast", "slow"]
    assert tests.of(by_line[12], seconds=5) == ["fast"]
    assert tests.of(by_line[10], seconds=5) == ["slow"]  # one at least
    assert tests.of(by_line[4], seconds=100) == ["reads", "other", "fast", "slow"]  # at import: any of the file


def test_every_equivalent_mutant_still_fits_the_source():
    there = {m.key for m in all_mutants(mutants.TARGETS)}
    assert set(equivalents()) <= there
    assert all(len(reason) > 10 for reason in equivalents().values())
