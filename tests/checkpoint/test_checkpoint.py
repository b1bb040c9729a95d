"""Checkpoints: exact on every mesh, whole or not there, and nothing damaged, foreign or hostile gets through."""

import copy
import json
import os
import pickle
import shutil
from dataclasses import asdict, replace
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from conftest import DEVICES, in_sample
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdist.checkpoint import checkpoints as checkpoint
from jaxdist.checkpoint import resume, trained
from jaxdist.checkpoint.checkpoints import MANIFEST, BadCheckpoint, Checkpoints, SaveFailed, locate, newest_good
from jaxdist.checkpoint.logical import (
    PARAMS,
    abstract_logical,
    fetch,
    from_logical,
    parameters_from_logical,
    to_logical,
)
from jaxdist.checkpoint.trained import find_weights
from jaxdist.config import OptimizerConfig, RunConfig, to_dict
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.parity import quick_options
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

MODEL = GPT2Config(num_layers=2, width=32, num_heads=4, ffn_width=64, seq_len=16, vocab_size=100, dropout=0.1)
FOUR = replace(MODEL, num_layers=4)
DATA = {"source": "random", "fingerprint": "0"}


def make_program(mesh="", *, model=MODEL, precision="float32", optimizer="adamw", batch_size=8, **parallel):
    config = RunConfig(
        model,
        ParallelConfig(mesh=parse_mesh(mesh), **parallel),
        OptimizerConfig(name=optimizer, lr=1e-3, warmup_steps=2),
        PrecisionConfig(dtype=precision),
        batch_size=batch_size,
        steps=8,
    )
    return build_program(config, make_mesh(config.parallel.mesh, DEVICES))


def run_steps(program, state, batches, step=None):
    losses, step = [], step or program.compile_step(quick_options(program.mesh))
    for batch in batches:
        state, metrics = step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
    return state, losses


def saved(folder, program, state, step, **keep) -> Checkpoints:
    checkpoints = Checkpoints(folder, **keep)
    checkpoints.save(step, to_logical(program, state), resume.about(program.config, DATA, resume.Progress(batch=step)))
    checkpoints.wait()
    return checkpoints


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A program, its first state and one checkpoint of it (step 3), which tests copy before they damage it."""
    program = make_program("dp=2", zero=1)
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, program, program.init(0)._replace(step=jax.numpy.int32(3)), 3)
    return program, folder


@pytest.fixture
def damaged(small, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(small[1], folder)
    return Checkpoints(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Exactness
# ---------------------------------------------------------------------------------------------------------------------

EXACT = {
    "one": {},
    "dp3-zero1-padded": dict(mesh="dp=3", zero=1, batch_size=9),
    "dp2-tp2-zero2-sp": dict(mesh="dp=2,tp=2", zero=2, sp=True),
    "dp4-zero3-bf16": dict(mesh="dp=4", zero=3, precision="bfloat16"),
    "dp2-fp16": dict(mesh="dp=2", precision="float16"),
    "pp2-dp2-1f1b": dict(mesh="pp=2,dp=2", schedule="1f1b"),
    "pp2-dp2-zb-v-zero1": dict(model=FOUR, mesh="pp=2,dp=2", schedule="zb-v", zero=1),
    "pp3-uneven": dict(model=FOUR, mesh="pp=3", stages="1,2,1", batch_size=12),
    "dp2-lion": dict(mesh="dp=2", optimizer="lion", zero=1),
    "one-adafactor": dict(optimizer="adafactor"),
    "dp2-tp2-muon-fp16": dict(mesh="dp=2,tp=2", optimizer="muon", zero=2, precision="float16"),
}


@pytest.mark.parametrize(
    "name", in_sample(EXACT, ["dp3-zero1-padded", "dp4-zero3-bf16", "dp2-fp16", "pp2-dp2-zb-v-zero1"])
)
def test_continued_run_equals_the_uninterrupted_one_bit_for_bit(name, tmp_path):
    """Saved while the next steps run and donate the state; restored into a fresh state: losses and every bit after."""
    settings = EXACT[name]
    program = make_program(**settings)
    batches, step = random_batches(program.config, 5), program.compile_step(quick_options(program.mesh))
    middle, _ = run_steps(program, program.init(0), batches[:2], step)
    checkpoints = Checkpoints(tmp_path)
    resume.save(checkpoints, program, middle, DATA, resume.Progress(batch=2))
    end, losses = run_steps(program, middle, batches[2:], step)
    checkpoints.wait()

    start = resume.restore(checkpoints, checkpoints.check(2), program, same_run=True)
    assert start.step == 2 and start.progress.batch == 2
    jax.tree.map(lambda ours, x: ours.sharding.is_equivalent_to(x.sharding, x.ndim) or pytest.fail(), start.state, end)
    again, losses_again = run_steps(program, start.state, batches[2:], step)
    assert losses_again == losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(end), jax.device_get(again))


def test_a_run_goes_on_over_four_meshes(tmp_path):
    """dp8 -> tp2 pp2 dp2 -> ZeRO-3 dp4 -> one device: the losses of a run that never moved."""
    meshes = [
        dict(mesh="dp=8"),
        dict(mesh="pp=2,dp=2,tp=2", microbatches=2),
        dict(mesh="dp=4", zero=3),
        {},
    ]
    reference = make_program("dp=8", batch_size=16)
    batches = random_batches(reference.config, 8)
    _, expected = run_steps(reference, reference.init(0), batches)
    checkpoints, found = Checkpoints(tmp_path), []
    for leg, settings in enumerate(meshes):
        program = make_program(batch_size=16, **settings)
        if leg == 0:
            state = program.init(0)
        else:
            state = resume.restore(checkpoints, checkpoints.check(2 * leg), program, same_run=True).state
        state, losses = run_steps(program, state, batches[2 * leg : 2 * leg + 2])
        saved(tmp_path, program, state, 2 * leg + 2)
        found += losses
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert checkpoints.steps() == [2, 4, 6, 8]


def test_logical_arrays_are_the_same_from_every_layout():
    expected = fetch(to_logical(make_program(), make_program().init(5)))
    for settings in (dict(mesh="dp=3", zero=3, batch_size=9), dict(mesh="pp=2,tp=2", stages="1,1")):
        program = make_program(**settings)
        found = to_logical(program, program.init(5))
        described = abstract_logical(program)
        assert {k: (x.shape, x.dtype) for k, x in found.items()} == {
            k: (x.shape, x.dtype) for k, x in described.items()
        }
        for name, x in fetch(found).items():
            np.testing.assert_array_equal(x, expected[name], err_msg=name)
        placed = {k: jax.device_put(expected[k], described[k].sharding) for k in described}
        elsewhere = {k: jax.device_put(x, jax.devices()[0]) for k, x in expected.items()}
        for arrays in (placed, expected, elsewhere):  # on this mesh, on the host, on one device
            state = from_logical(program, arrays)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(program.init(5)))
        for name, x in elsewhere.items():  # nobody's arrays are taken from them
            np.testing.assert_array_equal(x, expected[name], err_msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# Which ones are kept, and what a killed save leaves
# ---------------------------------------------------------------------------------------------------------------------


def test_the_newest_and_every_tenth_are_kept(small, tmp_path):
    program, _ = small
    state = program.init(0)
    for step in (0, 4, 10, 12, 14, 20, 22, 24):
        checkpoints = saved(tmp_path, program, state, step, keep_last=2, keep_every=10)
    assert checkpoints.steps() == [0, 10, 20, 22, 24]
    assert not list(tmp_path.glob("*.partial"))


def test_a_step_of_nine_digits_is_found(tmp_path):
    (tmp_path / "step_100000000").mkdir()
    assert Checkpoints(tmp_path).steps() == [100_000_000]


def test_a_save_that_was_killed_is_not_there(damaged, small):
    """Whatever stands in a `.partial` folder is no checkpoint. The next save replaces it or removes it."""
    partial = damaged.path(7, ".partial")
    shutil.copytree(damaged.path(3), partial)
    (partial / MANIFEST).unlink()
    shutil.copytree(partial, damaged.path(2, ".partial"))  # killed as it was removed, not as it was written
    assert damaged.steps() == [3]
    program, _ = small
    checkpoints = saved(damaged.folder, program, program.init(0), 7)
    assert checkpoints.steps() == [3, 7] and not list(damaged.folder.glob("*.partial"))
    checkpoints.check(7)


def test_a_failure_that_is_known_is_raised_before_the_next_save(damaged, small, monkeypatch):
    program, _ = small
    damaged.wait_if_failed()
    damaged.save(9, to_logical(program, program.init(0)), {})
    damaged._finishing[1].result()
    damaged.wait_if_failed()
    monkeypatch.setattr(checkpoint, "_hash_files", mock.Mock(side_effect=OSError(28, "No space left on device")))
    damaged.save(11, to_logical(program, program.init(0)), {})
    damaged._finishing[1].exception()
    with pytest.raises(SaveFailed, match="step 11"):
        damaged.wait_if_failed()
    damaged.wait_if_failed()


# ---------------------------------------------------------------------------------------------------------------------
# Damage, foreign files, hostile ones
# ---------------------------------------------------------------------------------------------------------------------


def every_file(checkpoints: Checkpoints, step: int = 3):
    return sorted(path for path in checkpoints.path(step).rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.parametrize("index", range(0, 17, 3))
@pytest.mark.parametrize("how", ["truncated", "flipped", "deleted"])
def test_a_damaged_file_is_named(damaged, how, index):
    files = every_file(damaged)
    path = files[index % len(files)]
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    else:
        if how == "truncated":
            del content[len(content) // 2 :]
        else:
            content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=path.name.replace(".", r"\.")):
        damaged.check(3)


def test_a_file_that_grew_is_refused_by_its_size_alone(damaged):
    grown = every_file(damaged)[0]
    grown.write_bytes(grown.read_bytes() + b"\0")
    with pytest.raises(BadCheckpoint, match=rf"{grown.name}.* it has .* bytes and .* were written"):
        damaged.require_files(damaged.manifest(3))


def test_another_checkpoint_of_the_same_step_is_not_the_one_that_the_first_process_chose(small):
    checkpoints = Checkpoints(small[1])
    manifest = checkpoints.manifest(3)
    assert checkpoint._same_here(checkpoints, "3", manifest.digest) == manifest
    with pytest.raises(BadCheckpoint, match="process 0"):
        checkpoint._same_here(checkpoints, "3", "0" * 64)


def reseal(path, **changed):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(checkpoint._sealed({**content, **changed})))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(pickle.dumps({"step": 3})), "not a whole JSON file"),
        (lambda path: path.write_text("[" * 100_000), "not a whole JSON file"),
        (lambda path: path.write_text(path.read_text().replace('"step": 3', '"step": 4')), "its own hash does not fit"),
        (lambda path: reseal(path, step=4), "is of step 4"),
        (lambda path: reseal(path, files={"../../etc/passwd": [1, "0"]}), "outside of the checkpoint"),
        (lambda path: reseal(path, files={}), "does not list this file"),
        (lambda path: reseal(path, arrays={"params.x": ["float32", ["1"]]}), "not a manifest of format"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_a_foreign_or_hostile_manifest_is_refused(damaged, write, message):
    write(damaged.path(3) / MANIFEST)
    with pytest.raises(BadCheckpoint, match=message):
        damaged.check(3)


def test_an_array_that_the_run_does_not_have_is_refused(small):
    program, folder = small
    manifest = Checkpoints(folder).manifest(3)
    for name in ("params.extra", "moments.9.x", "scale.x"):
        more = replace(manifest, arrays={**manifest.arrays, name: ["float32", [1]]})
        with pytest.raises(BadCheckpoint, match=name):
            resume.restore(Checkpoints(folder), more, program, same_run=True)


def test_the_newest_good_one_is_used_only_when_told(damaged, small):
    program, _ = small
    saved(damaged.folder, program, program.init(0), 7)
    victim = every_file(damaged, 7)[-1]
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=r"step_00000007.*Use fall_back=True"):
        newest_good(damaged, lambda text: None, fall_back=False)
    with pytest.raises(BadCheckpoint, match=f"Name another, as {damaged.folder}:3"):
        locate(str(damaged.folder), "restore")
    said = []
    assert newest_good(damaged, said.append, fall_back=True).step == 3
    assert len(said) == 1 and victim.name in said[0]
    assert damaged.steps() == [3] and damaged.path(7, ".damaged").is_dir()
    every_file(damaged, 3)[-1].write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="None older is there: use another folder, or fresh=True"):
        newest_good(damaged, said.append, fall_back=True)
    with pytest.raises(BadCheckpoint, match="It is the only one there"):
        locate(str(damaged.folder), "restore")


def test_arrays_of_another_shape_name_or_dtype_are_refused_before_anything_is_read(small):
    program, folder = small
    checkpoints = Checkpoints(folder)
    manifest, wanted = checkpoints.check(3), abstract_logical(program)
    tokens = wanted["params.tokens"]
    for other, message in (
        ({"params.tokens": jax.ShapeDtypeStruct((256, 32), tokens.dtype)}, r"params.tokens is float32\[128, 32\]"),
        ({"params.tokens": jax.ShapeDtypeStruct(tokens.shape, np.float64)}, "this run needs float64"),
        ({"params.gate": tokens}, "holds no array params.gate"),
    ):
        with pytest.raises(BadCheckpoint, match=message):
            checkpoints.restore(manifest, {**wanted, **other})


def test_another_run_s_roll_backs_and_recent_losses_are_not_taken_over(small):
    """All else of its progress is, the next batch among it: batches that were left out are not read again."""
    program, folder = small
    manifest = Checkpoints(folder).manifest(3)
    progress = resume.Progress(tokens=77, batch=9, num_skipped=6, roll_backs=4, first_loss=5.5, recent=[2.0])
    manifest = replace(manifest, about={**manifest.about, "progress": asdict(progress)})
    other = replace(progress, roll_backs=0, recent=[])
    for same_run, expected in ((True, progress), (False, other)):
        found = resume.restore(Checkpoints(folder), manifest, program, same_run=same_run)
        assert (found.step, found.progress) == (3, expected)
    # Batches of another size: no sample is read again, and fewer than one batch of them is left out.
    rows = program.config.batch_size
    for there, batch in ((rows, 9), (2 * rows, 18), (rows // 4, 3)):
        config = {**manifest.about["config"], "batch_size": there}
        of_other = replace(manifest, about={**manifest.about, "config": config})
        found = resume.restore(Checkpoints(folder), of_other, program, same_run=False)
        assert found.progress == replace(other, batch=batch)


@pytest.mark.parametrize("rows", [0, True, "8", None])
def test_a_manifest_without_rows_of_a_batch_is_refused(rows):
    with pytest.raises(BadCheckpoint, match="batch_size"):
        resume.require_rows("a checkpoint", rows)


def test_every_option_of_the_compiler_that_changed_is_named():
    there = {"parallel": {"sp": False, "old": 1}, "compiler_options": {"a": 1, "same": 2}, "lr": 1}
    here = {"parallel": {"sp": True, "new": 1}, "compiler_options": {"b": 3, "same": 2}, "lr": 2}
    changed = [
        "compiler_options.a was 1 and is None",
        "compiler_options.b was None and is 3",
        "sp was False and is True",
    ]
    assert resume.other_rounding(there, here) == changed


def test_what_came_with_parameters_lies_in_the_run_s_folder(tmp_path):
    assert trained.companions_of(Checkpoints(tmp_path / "checkpoints")) == tmp_path
    assert trained.companions_of(Checkpoints(tmp_path / "others")) == tmp_path / "others"


def test_a_run_goes_on_only_as_itself_in_every_setting():
    """All that a configuration has, but how it is split, where it runs and what a file is called."""
    config = RunConfig(PRESETS["moe-proof"], seed=3)
    there = to_dict(config)
    for name, value in flatten_dict(there, sep=".").items():
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "another"
        changed = unflatten_dict(flatten_dict(there, sep=".") | {name: other}, sep=".")
        if resume.is_how(name) or name == "model.source":
            resume.require_same_run("out", changed, config)
        else:
            with pytest.raises(ConfigError, match=name if name != "model.class" else "its model is"):
                resume.require_same_run("out", changed, config)
    older = "mask_documents", "optimizer.lr_schedule", "optimizer.momentum", "model.exchange_room"
    for name in older:  # which runs of before do not say
        before = {key: value for key, value in flatten_dict(there, sep=".").items() if key != name}
        resume.require_same_run("out", unflatten_dict(before, sep="."), config)


# ---- nothing is lost in silence ----


class NoMessage(Exception):
    """Its text is empty."""


@pytest.mark.parametrize("error", [NoMessage(), SystemExit(3), OSError(28, "No space left on device"), OSError()])
def test_whatever_ends_a_save_is_raised_once_and_loses_nothing(damaged, small, monkeypatch, error):
    program, _ = small
    monkeypatch.setattr(checkpoint, "_hash_files", mock.Mock(side_effect=error))
    damaged.save(9, to_logical(program, program.init(0)), {})
    said = getattr(error, "strerror", None) or f"{type(error).__name__}|3"
    with pytest.raises(SaveFailed, match=f"step 9 .*({said})"):
        damaged.wait()
    damaged.wait()  # said once
    assert damaged.steps() == [3] and not list(damaged.folder.glob("*.partial"))


def test_shards_that_lie_elsewhere_are_not_committed(tmp_path, small, monkeypatch):
    """What the first process sees when another one wrote its shards to a disk of its own."""
    program, _ = small
    checkpoints, check = Checkpoints(tmp_path), checkpoint.require_whole_arrays

    def lose_and_check(folder, arrays):
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
        lost = max(key for key in store.list().result() if key.startswith(b"moments.0.mu.positions/"))
        store.delete_range(tensorstore.KvStore.KeyRange(lost, lost + b"\0")).result()
        check(folder, arrays)

    monkeypatch.setattr(checkpoint, "require_whole_arrays", lose_and_check)
    checkpoints.save(0, to_logical(program, program.init(0)), {})
    with pytest.raises(SaveFailed, match=r"array moments\.0\.mu\.positions is not whole: 1 of its \d parts"):
        checkpoints.wait()
    assert checkpoints.steps() == []


def test_weights_alone_in_another_precision_and_layout(small):
    _, folder = small
    other = make_program("tp=2", precision="bfloat16")
    checkpoints = Checkpoints(folder)
    wanted = {name: x for name, x in abstract_logical(other).items() if name.startswith(f"{PARAMS}.")}
    params = parameters_from_logical(other, checkpoints.restore(checkpoints.check(3), wanted))
    expected = other.init(0).params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(expected))


def test_plain_orbax_reads_the_arrays(small):
    """Nothing of ours: the folder is an Orbax checkpoint of whole arrays, by name, for any devices."""
    program, folder = small
    arrays, expected = Checkpoints(folder).path(3) / "arrays", fetch(to_logical(program, program.init(0)))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    with ocp.StandardCheckpointer() as orbax:
        found = orbax.metadata(arrays).item_metadata.tree
        wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for name, x in found.items()}
        restored = orbax.restore(arrays, wanted)
    assert restored.keys() == expected.keys()
    for name in expected.keys() - {"step"}:
        assert np.asarray(restored[name]).tobytes() == np.asarray(expected[name]).tobytes(), name


def test_a_file_that_does_not_belong_is_named(damaged):
    (damaged.path(3) / "arrays" / "extra.bin").write_bytes(b"?")
    with pytest.raises(BadCheckpoint, match=r"extra\.bin.*does not list"):
        damaged.check(3)
    (damaged.path(3) / "arrays" / "extra.bin").unlink()
    os.symlink("/etc/passwd", damaged.path(3) / "arrays" / "link")
    with pytest.raises(BadCheckpoint, match=r"link.*neither a file nor a folder"):
        damaged.check(3)


def paths_in(value, path=()):
    yield path
    for name in value if isinstance(value, dict) else ():
        yield from paths_in(value[name], (*path, name))


def test_a_resealed_manifest_of_other_types_is_refused_or_means_the_same(small, monkeypatch):
    """Every entry of what a run says of itself, as a value of every other type: never an error of ours."""
    program, folder = small
    manifest = Checkpoints(folder).check(3)
    source = {"config": "{}", "index": None, "headers": {"a": "{}"}}
    about = {**manifest.about, "source": source}
    monkeypatch.setattr(Checkpoints, "restore", lambda *_, **__: fetch(to_logical(program, program.init(0))))
    monkeypatch.setattr(resume, "agreed", lambda checkpoints, choose: replace(manifest, about=changed))
    monkeypatch.setattr(trained, "locate", lambda *_: (Checkpoints(folder), replace(manifest, about=changed)))
    monkeypatch.setattr(resume, "locate", trained.locate)
    monkeypatch.setattr(resume, "from_logical", lambda *_: None)
    refused = set()
    for path in paths_in(about):
        for value in (None, "x", 7, -1, 2.5, True, [], ["x"], {}, {"x": 1}):
            changed = copy.deepcopy(about)
            holder = changed
            for name in path[:-1]:
                holder = holder[name]
            if path:
                holder[path[-1]] = value
            for call in (
                lambda: resume.find(Checkpoints(folder), program.config, DATA, False, print),
                lambda: resume.find_other(str(folder), program.config),
                lambda: resume.rate_note(trained.locate()[1], program.config),
                lambda: resume.restore(Checkpoints(folder), trained.locate()[1], program, same_run=True),
                lambda: find_weights(str(folder), "path").end_of_text(),
                lambda: find_weights(str(folder), "path", MODEL).tokenizer(),
            ):
                try:
                    call()
                except ConfigError:
                    refused.add(path)
    must = [
        ("progress", "batch"),
        ("config", "parallel", "mesh"),
        ("data",),
        ("source", "headers"),
        ("config", "model"),
    ]
    assert refused >= set(must)


def test_a_huge_manifest_is_not_read(damaged, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(BadCheckpoint, match="larger than 100 bytes"):
        damaged.check(3)


def test_another_model_is_refused_with_what_differs(small):
    program, folder = small
    config = replace(program.config, model=replace(MODEL, vocab_size=200))
    for find in (
        lambda: resume.find(Checkpoints(folder), config, DATA, False, print),
        lambda: resume.find_other(str(folder), config),
    ):
        with pytest.raises(ConfigError, match=r"model\.vocab_size is 100 there and 200 here"):
            find()


def test_other_data_or_random_numbers_are_refused(small):
    program, folder = small
    find = lambda data: resume.find(Checkpoints(folder), program.config, data, False, print)  # noqa: E731
    assert find(DATA).step == 3
    with pytest.raises(ValueError, match="this one x"):
        find({"source": "x", "fingerprint": "1"})
    others = (jax.default_prng_impl("rbg"), jax.threefry_partitionable(not jax.config.jax_threefry_partitionable))
    for other in others:
        with other, pytest.raises(ValueError, match="random numbers"):
            find(DATA)


def test_a_restore_that_fails_names_the_file_and_the_array(tmp_path, small, monkeypatch):
    program, folder = small
    checkpoints = Checkpoints(shutil.copytree(folder, tmp_path / "copy"))
    manifest = checkpoints.check(3)

    def fail(*_, **__):
        raise TypeError("params.tokens: unexpected metadata")

    monkeypatch.setattr(checkpoints._orbax, "restore", fail)
    with pytest.raises(BadCheckpoint, match=r"step_00000003/arrays: array params\.tokens cannot be read"):
        checkpoints.restore(manifest, abstract_logical(program))
    for path in (tmp_path / "copy" / "step_00000003" / "arrays").rglob("d"):
        shutil.rmtree(path)  # after it was checked, or on another machine's disk
    with pytest.raises(BadCheckpoint, match=r"step_00000003/arrays"):
        checkpoints.restore(manifest, abstract_logical(program))
    with pytest.raises(BadCheckpoint, match=r"process 0 cannot see it"):
        checkpoints.require_files(manifest)


def test_a_linked_step_and_a_folder_that_is_none_are_refused(tmp_path, small):
    _, folder = small
    (tmp_path / "step_00000003").symlink_to(folder / "step_00000003")
    with pytest.raises(BadCheckpoint, match="it is a link"):
        Checkpoints(tmp_path).check(3)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoints in .*file"):
        Checkpoints(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "step_00000003" / MANIFEST).unlink()
    os.mkfifo(copy / "step_00000003" / MANIFEST)
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        Checkpoints(copy).check(3)


def test_what_cannot_be_thinned_out_does_not_fail_the_save(tmp_path, small, monkeypatch):
    program, _ = small
    (tmp_path / "step_00000009.partial").touch()  # a stray file, not a folder
    (tmp_path / "step_00000001.partial").touch()  # in the way of the save itself
    saved(tmp_path, program, program.init(0), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]

    def refuse(path):
        if path.name == "step_00000001.partial":
            raise PermissionError(13, "Permission denied", str(path))

    warnings = []
    monkeypatch.setattr(checkpoint, "remove", refuse)
    saved(tmp_path, program, program.init(0), 2, keep_last=1, warn=warnings.append)
    assert 2 in Checkpoints(tmp_path).steps()
    assert "could not be removed" in warnings[0]
