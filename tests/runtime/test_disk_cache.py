"""What a plan found out is there for the next process, and is never somebody else's."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import jaxdist.plan.disk_cache as disk_cache
import jaxdist.plan.program_memory as program_memory
import jaxdist.plan.schedule_facts as schedule_facts
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.lora import LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.plan.disk_cache import cached_arrays
from jaxdist.plan.parts import OneRank
from jaxdist.plan.program_memory import _of_loss, loss_memory, rank_memory
from jaxdist.strategy import PrecisionConfig

RANK = OneRank(PRESETS["proof"], 2, 7, PrecisionConfig("float32"), sp=True)


class Arrays(NamedTuple):
    one: np.ndarray
    two: np.ndarray


class Made:
    """Makes arrays, and counts how often."""

    def __init__(self):
        self.number = 0

    def __call__(self, *_) -> Arrays:
        self.number += 1
        return Arrays(np.arange(3.0), np.array([[1.5, self.number]]))


class Mine(GPT2Config):
    """A model whose code is not the package's."""


def new_process():
    for function in (disk_cache._folder, rank_memory, schedule_facts._known, schedule_facts.schedule_facts):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    new_process()
    yield tmp_path / "cache" / "plans"
    new_process()


def files_of(folder) -> list:
    return sorted(folder.rglob("*.npz"))


def test_what_was_made_once_is_read(folder):
    made = Made()
    first, again = (cached_arrays("a", Arrays, made) for _ in range(2))
    assert made.number == 1 and all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    cached_arrays("b", Arrays, made)
    assert made.number == 2 and [path.stem for path in files_of(folder)] == ["a", "b"]


def test_another_source_or_version_finds_nothing(folder, monkeypatch):
    made = Made()
    others = [("source_digest", "0" * 64), ("versions", {"jax": "0.11.0"}), ("versions", {"jax": "0.12.0"})]
    for name, said in ((None, None), *others):
        if name:
            monkeypatch.setattr(disk_cache, name, lambda said=said: said)
        disk_cache._folder.cache_clear()
        cached_arrays("a", Arrays, made)
    assert made.number == 4 and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY", b"x" * 3000])
def test_a_damaged_file_is_made_again_and_mended(folder, content):
    made = Made()
    cached_arrays("a", Arrays, made)
    [path] = files_of(folder)
    whole = path.read_bytes()
    for damaged in (content, whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        cached_arrays("a", Arrays, made)
    assert made.number == 3
    cached_arrays("a", Arrays, made)
    assert made.number == 3


def test_a_rank_is_traced_for_whatever_its_trace_follows_from(folder, monkeypatch):
    """An equal rank is read, every other traced. Of a model of one's own nothing is kept, adapters around it or not."""
    traced = Made()
    monkeypatch.setattr(program_memory, "_traced", lambda rank: program_memory.RankMemory(*traced(), *traced()))
    for _ in range(2):
        rank_memory(replace(RANK))
        new_process()
    assert traced.number == 2 and len(files_of(folder)) == 1
    others = {"tp": 4}, {"model": replace(RANK.model, width=128)}, {"rows": 11}, {"attention": "blocked"}
    for other in (*others, {"model": LoRA(RANK.model, rank=4, alpha=8)}):
        rank_memory(replace(RANK, **other))
    assert traced.number == 12 and len(files_of(folder)) == 6
    own = Mine(**vars(RANK.model))
    for model in (own, LoRA(own, rank=4, alpha=8)):
        rank_memory(replace(RANK, model=model))
        new_process()
        rank_memory(replace(RANK, model=model))
    assert traced.number == 20 and len(files_of(folder)) == 6


def test_what_is_read_back_is_what_a_trace_finds(folder):
    before = rank_memory(RANK)
    new_process()
    for found in (before, rank_memory(RANK)):
        for one, two in zip(found, program_memory._traced(RANK), strict=True):
            np.testing.assert_array_equal(one, two)


def test_schedules_are_run_once(folder, monkeypatch):
    asked = [("1f1b", 4, 9, 1), ("interleaved", 2, 4, 3, 2), ("zb-h1", 3, 40, 1, 1, True)]
    before = [schedule_facts.schedule_facts(*sizes) for sizes in asked]
    schedule_facts.keep_facts()
    assert len(files_of(folder)) == 1
    new_process()
    run = []
    monkeypatch.setattr(schedule_facts, "ticks_of", lambda *sizes: run.append(sizes))
    assert [schedule_facts.schedule_facts(*sizes) for sizes in asked] == before and not run
    monkeypatch.setattr(schedule_facts, "write_arrays", None)  # nothing is new
    schedule_facts.keep_facts()


def test_a_full_disk_is_no_error(folder, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache, "write_whole", full)
    made = Made()
    for _ in range(2):
        assert cached_arrays("a", Arrays, made).two[0, 0] == 1.5
    assert made.number == 2


@pytest.mark.parametrize(
    "change",
    [{"selective": True}, {"ep": 2}, {"ep": 2, "sp": True, "experts_over_tp": True}, {"attention": "blocked"}],
    ids=lambda change: "-".join(change),
)
def test_a_loss_does_not_depend_on_what_layers_do(change):
    model = PRESETS["proof"] if "ep" not in change else replace(PRESETS["llama-10m"], num_experts=4, top_k=2)
    rank = OneRank(model, 2, 7, PrecisionConfig("float32"), **change)
    own, shared = (np.max([fixed + each * 5 for fixed, each in loss_memory(found)]) for found in (rank, _of_loss(rank)))
    assert own == shared
