"""Low-rank adapters, and what is frozen: no gradient, no moments, no traffic, on any mesh; and never changed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from support.programs import run

from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.checkpoint.weights import open_weights
from jaxdist.config import OptimizerConfig, RunConfig, to_dict
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.base import Model
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.huggingface import read_model
from jaxdist.models.lora import LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.models.registry import ModelFlags
from jaxdist.parallel.low_rank import LowRank, merged
from jaxdist.parallel.pipeline.split_backward import all_equations
from jaxdist.parity import Observed, compare, observe, one_device, random_parameters, worst
from jaxdist.placement import make_layout
from jaxdist.plan.parts import work_of
from jaxdist.plan.program_memory import program_bytes
from jaxdist.plan.proof.trace import step_collectives, total_sent
from jaxdist.plan.search import Candidates, pipelines
from jaxdist.plan.traffic import predicted
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

DECODER = DecoderConfig(
    num_layers=4,
    width=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    ffn_width=24,
    seq_len=8,
    vocab_size=61,
    qk_norm=True,
    attention_bias=True,
)
GPT = GPT2Config(num_layers=4, width=16, num_heads=4, ffn_width=32, seq_len=8, vocab_size=61)
RANK, ALPHA = 2, 6.0
F64 = PrecisionConfig("float64")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def config_of(model: Model, mesh: str = "tp=1", precision: PrecisionConfig = F64, **parallel) -> RunConfig:
    optimizer = OptimizerConfig(lr=1e-4, warmup_steps=0, eps=1e-6)
    parallel = ParallelConfig(parse_mesh(mesh), **parallel)
    return RunConfig(model, parallel, optimizer, precision, batch_size=8, steps=2)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_adapters_are_added_to_the_matrix_of_their_own_layer(stacked):
    shapes = ((3, 5, 4), (3, 5, 2), (3, 2, 4))
    w, a, b = (np.random.default_rng(0).normal(size=shape[not stacked :]).astype(np.float32) for shape in shapes)
    np.testing.assert_allclose(merged(w, a, b, 0.5, stacked=stacked), w + 0.5 * a @ b, rtol=1e-6)


@pytest.mark.parametrize(
    "base", [DECODER, GPT, dataclasses.replace(DECODER, tied=True)], ids=["decoder", "gpt2", "tied"]
)
def test_the_gradients_of_adapters_follow_from_those_of_the_merged_matrices(x64, base):
    """dL/da = scale dL/dw b^T and dL/db = scale a^T dL/dw, with dL/dw of the model that has w + scale a b."""
    config = config_of(LoRA(base, RANK, ALPHA))
    batches = random_batches(config, 1)
    values = random_parameters(config, make_layout(config.model, config.parallel))
    merged = {name: x.astype(np.float64) for name, x in values.items() if ".lora." not in name}
    adapters = {name.removesuffix(".a") for name in values if name.endswith(".a")}
    for adapter in adapters:
        a, b = values[f"{adapter}.a"].astype(np.float64), values[f"{adapter}.b"].astype(np.float64)
        product = a.reshape(len(a), -1, RANK) @ b.reshape(len(b), RANK, -1)
        name = adapter.replace("blocks.lora.", "blocks.")
        merged[name] = merged[name] + ALPHA / RANK * product.reshape(merged[name].shape)
    whole = observe(config_of(base), DEVICES, batches, merged)
    ours = observe(config, DEVICES, batches, values)
    assert ours.losses[0] == pytest.approx(whole.losses[0], rel=1e-13) and len(adapters) == (
        7 if base is not GPT else 4
    )
    found = ours.gradients[0]
    assert {name.rpartition("[")[0] for name in found} == {f"{each}.{part}" for each in adapters for part in "ab"}
    for adapter in adapters:
        for layer in range(4):
            dw = whole.gradients[0][f"{adapter.replace('blocks.lora.', 'blocks.')}[{layer}]"]
            a, b = (values[f"{adapter}.{part}"][layer].astype(np.float64) for part in "ab")
            flat = dw.reshape(a.size // RANK, b.size // RANK)
            wanted = {"a": flat @ b.reshape(RANK, -1).T, "b": a.reshape(-1, RANK).T @ flat}
            for part, gradient in wanted.items():
                ours_here = found[f"{adapter}.{part}[{layer}]"]
                gap = np.abs(ours_here.reshape(gradient.shape) - ALPHA / RANK * gradient).max()
                assert gap < 1e-12 * max(np.abs(gradient).max(), 1e-3), (adapter, part, layer)


LAYOUTS = {
    "tp4-sp": ("tp=4", dict(sp=True)),
    "tp8": ("tp=8", {}),
    "dp2-tp2-zero1": ("dp=2,tp=2", dict(zero=1)),
    "dp2-zero2-accumulate": ("dp=2", dict(zero=2, accumulate=2)),
    "dp2-tp4-zero3": ("dp=2,tp=4", dict(zero=3, sp=True, accumulate=2, grad_sync="per-parameter")),
    "pp2-zero3-zb-h1": ("pp=2,dp=2", dict(zero=3, schedule="zb-h1", microbatches=4)),
    "pp2-tp2-1f1b": ("pp=2,tp=2", dict(schedule="1f1b", microbatches=4)),
    "overlap-zero1": ("dp=2", dict(zero=1, overlap=True)),
    "overlap-zero3-remat": ("dp=2", dict(zero=3, remat="block", overlap=True, accumulate=2)),
    "ring": ("dp=2,tp=2", dict(sp=True, tp_ring="one-way", remat="selective")),
    "loss-chunks": ("tp=2", dict(sp=True, loss_chunks=4)),
    "replica-keep": ("replica=2,dp=2", dict(zero=3, reshard_after_forward=False, remat="every-2")),
}


@pytest.fixture(scope="module")
def references():
    return {}


def same_as_one_device(config: RunConfig, references: dict) -> Observed:
    """Two steps, equal to those of one device, which sent what was predicted. references: of one device, by model."""
    batches = random_batches(config, 2)
    if config.model not in references:
        references[config.model] = observe(one_device(config), DEVICES, batches)
    found = observe(config, DEVICES, batches)
    differences = compare(config, found, references[config.model])
    assert all(each.ok for each in differences), worst(differences)
    messages = predicted(config, make_layout(config.model, config.parallel, config.part_layers))
    assert found.sent_bytes == total_sent(messages, config.parallel.mesh)
    return found


@pytest.mark.parametrize(
    "layout", in_sample(LAYOUTS, ["tp4-sp", "dp2-zero2-accumulate", "pp2-zero3-zb-h1", "overlap-zero3-remat"])
)
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(dataclasses.replace(DECODER, tied=True), id="decoder"),
        pytest.param(dataclasses.replace(GPT, num_heads=8, dropout=0.1), id="gpt2", marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_train_alike_on_every_mesh_and_send_what_was_predicted(x64, references, base, layout):
    mesh, parallel = LAYOUTS[layout]
    model = LoRA(base, RANK, ALPHA)
    config = config_of(model, mesh, **parallel)
    found = same_as_one_device(config, references)
    assert all(".lora." in name for name in found.gradients[0]) and len(found.moments) == 2 * len(found.gradients[0])
    messages = predicted(config, make_layout(model, config.parallel, config.part_layers))
    assert {c.kind for c in found.collectives} <= {m.kind for m in messages}


def test_a_frozen_parameter_that_changes_is_a_difference(x64):
    config = config_of(LoRA(DECODER, RANK, ALPHA))
    found = observe(config, DEVICES, random_batches(config, 2))
    assert not found.changed
    moved = dataclasses.replace(found, changed=("tokens",))
    assert [(each.kind, each.name) for each in compare(config, moved, found) if not each.ok] == [("frozen", "tokens")]


@dataclasses.dataclass(frozen=True)
class FrozenTable(GPT2Config):
    """A model of the user's own that trains all but its tokens and its first norms."""

    def outer(self):
        return {**super().outer(), "tokens": dataclasses.replace(super().outer()["tokens"], frozen=True)}

    def block(self, kind):
        block = super().block(kind)
        norm = {name: dataclasses.replace(param, frozen=True) for name, param in block["ln_attention"].items()}
        return {**block, "ln_attention": norm}


@pytest.mark.parametrize("layout", ["pp2-zero3-zb-h1", "loss-chunks"])
def test_a_model_may_freeze_any_of_its_parameters(x64, references, layout):
    mesh, parallel = LAYOUTS[layout]
    model = FrozenTable(**vars(GPT))
    found = same_as_one_device(config_of(model, mesh, **parallel), references)
    assert "positions" in found.gradients[0] and "tokens" not in found.gradients[0]


def test_a_step_of_a_model_that_is_frozen_is_refused():
    class Frozen(FrozenTable):
        def outer(self):
            return jax.tree.map(lambda p: dataclasses.replace(p, frozen=True), GPT2Config.outer(self))

        def block(self, kind):
            tree = GPT2Config.block(self, kind)
            return jax.tree.map(lambda p: dataclasses.replace(p, frozen=True), tree)

    config = config_of(Frozen(**vars(GPT)), "dp=2", PrecisionConfig())
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    with pytest.raises(ConfigError, match="must train a parameter"):
        program.step.trace(program.abstract_state(), program.abstract_batch())


def test_in_16_bits_a_frozen_parameter_is_kept_in_them_and_has_no_master():
    config = config_of(LoRA(DECODER, RANK, ALPHA), "dp=2,tp=2", PrecisionConfig("bfloat16"), zero=3)
    batches = random_batches(config, 2)
    found, reference = (observe(each, DEVICES, batches) for each in (config, one_device(config)))
    differences = compare(config, found, reference)
    assert all(each.ok for each in differences), worst(differences)
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES[:4]))
    state = program.abstract_state()
    layout = make_layout(config.model, config.parallel)
    sizes = {
        frozen: sum(np.prod(x.storage_local) for x in jax.tree.leaves(layout.leaves) if x.param.frozen == frozen)
        for frozen in (False, True)
    }
    assert local_bytes(state.master) == 4 * sizes[False] and local_bytes(state.params) == 2 * (
        sizes[True] + sizes[False]
    )
    assert local_bytes(state.moments) == 8 * sizes[False] + 4  # and a counter


# ---------------------------------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------------------------------


def test_of_frozen_weights_backward_is_one_product_for_each_of_forward():
    for base in (DECODER, GPT):
        whole, ours = work_of(base), work_of(LoRA(base, RANK, ALPHA))
        assert (whole.layer_backward, whole.head_backward) == (2, 2) and (whole.trained_layer, whole.trained_table) == (
            1,
            1,
        )
        assert ours.head_backward == 1 and ours.trained_table == 0
        adapters = sum(p.flops for p in ours.layer) - sum(p.flops for p in whole.layer)
        frozen = sum(p.flops for p in whole.layer if not p.batched)
        assert ours.layer_backward == pytest.approx((frozen + 2 * adapters) / (frozen + adapters))


STATES = [
    ("dp=2,tp=2", dict(zero=1)),
    ("dp=4", dict(zero=3)),
    ("tp=4", {}),
    ("pp=2,dp=2", dict(zero=2, schedule="1f1b", microbatches=2)),
]


@pytest.mark.parametrize(("mesh", "parallel"), STATES)
def test_a_plan_counts_state_and_gradients_of_what_is_trained(mesh, parallel):
    config = config_of(LoRA(PRESETS["llama-proof"], 4, 8.0), mesh, PrecisionConfig("bfloat16"), **parallel)
    layout = Candidates.of(config)
    found = program_bytes(config, layout, pipelines(config, layout), "xla")
    state = build_program(config, make_abstract_mesh(config.parallel.mesh)).abstract_state()
    assert abs(float(found.parameters[0] + found.optimizer[0]) - local_bytes(state)) <= 64  # counters
    # The head is fullest, and nothing that it holds is a gradient of the table.
    base = config_of(config.model.base, mesh, PrecisionConfig("bfloat16"), **parallel)
    whole = program_bytes(base, layout, pipelines(base, layout), "xla")
    assert found.total[0] < whole.total[0] and found.gradients[0] < 0.2 * whole.gradients[0]


def test_backward_of_frozen_weights_computes_no_gradient_of_them():
    """Nor scatters one: ZeRO-3 sends what the adapters make, and no more. (A product too many would be dead code to a
    compiler, and memory to whoever reads the trace.)"""
    sent, products = {}, {}
    for name, model in (("whole", DECODER), ("adapters", LoRA(DECODER, 1, ALPHA, ("w_q",)))):
        config = config_of(model, "dp=2", PrecisionConfig(), zero=3)
        program = build_program(config, make_abstract_mesh(config.parallel.mesh))
        step = program.step.trace(program.abstract_state(), program.abstract_batch())
        scattered = [c for c in step_collectives(program, step) if c.kind == "reduce_scatter"]
        sent[name] = sum(c.count * c.full_bytes for c in scattered)
        products[name] = sum(eqn.primitive.name == "dot_general" for eqn in all_equations(step.jaxpr))
    assert 0 < sent["adapters"] < 0.05 * sent["whole"]
    # Without the gradients of seven matrices (the head's is there, and nobody reads it); with x a b two more forward,
    # and two for each of these in backward.
    assert products["whole"] - products["adapters"] == 7 - 6


def test_adapters_begin_at_their_base():
    base, seed = PRESETS["llama-proof"], 3
    values, alone = LoRA(base, 4, 8.0).initial_values(seed), base.initial_values(seed)
    adapters = values["blocks"].pop("lora")
    jax.tree.map(np.testing.assert_array_equal, values, alone)
    for path, x in jax.tree.leaves_with_path(adapters):
        if path[-1].key == "b":
            assert not x.any()
        else:
            assert np.std(x) == pytest.approx((3 * np.prod(x.shape[1:-1])) ** -0.5, rel=0.1)


# ---------------------------------------------------------------------------------------------------------------------
# The weight itself
# ---------------------------------------------------------------------------------------------------------------------


def test_a_low_rank_weight_is_its_sum_wherever_an_array_is_asked_for(x64):
    rng = np.random.default_rng(0)
    w, a, b = (jnp.asarray(rng.normal(size=shape), jnp.float64) for shape in ((6, 4, 2), (6, 3), (3, 4, 2)))
    weight = LowRank(w, a, b, 0.5)
    total = w + 0.5 * jnp.einsum("ir,rjk->ijk", a, b)
    x = jnp.asarray(rng.normal(size=(5, 6)), jnp.float64)
    np.testing.assert_allclose(jnp.einsum("bi,ijk->bjk", x, weight), jnp.einsum("bi,ijk->bjk", x, total), rtol=1e-12)
    flat = weight.reshape(6, -1)
    assert isinstance(flat, LowRank) and flat.shape == (6, 8)
    np.testing.assert_allclose(flat.product(x), x @ total.reshape(6, 8), rtol=1e-12)
    np.testing.assert_allclose(x @ flat, x @ total.reshape(6, 8), rtol=1e-12)
    for found, whole in ((2 * weight, 2 * total), (weight.T, total.T), (-weight, -total), (weight.astype("f4"), total)):
        np.testing.assert_allclose(found, whole, rtol=1e-6)
    for found, whole in ((np.ones((6, 4, 2)) - weight, 1 - total), (weight.mean(0), total.mean(0)), (weight == 0, 0)):
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(found, whole, rtol=1e-12)
    assert [x.shape for x in weight] == len(weight) * [(4, 2)]  # and ends
    np.testing.assert_allclose(weight.reshape(12, 4), total.reshape(12, 4), rtol=1e-12)
    np.testing.assert_allclose(weight.slice_in_dim(1, 2, 1).total(), total[:, 1:3], rtol=1e-12)
    np.testing.assert_allclose(weight.slice_in_dim(1, 2, 0).total(), total[1:3], rtol=1e-12)
    with pytest.raises(ValueError, match="do not make"):
        LowRank(w, a, b[:2], 0.5)


# ---------------------------------------------------------------------------------------------------------------------
# Flags and programs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base that was trained a little, its config.json beside it, and adapters that were trained on it."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text.txt").write_text("some words to learn from. " * 200)
    common = ["--data", folder / "text.txt", "--batch-size", "4", "--eval-windows", "8", "--model", "llama-proof"]
    layout = "--lora 4 --mesh dp=2,tp=2 --zero 3 --checkpoint-every 2"
    adapters = ["--weights", folder / "base", *layout.split()]
    for words in (
        ["--out", folder / "base", "--steps", "2", "--mesh", "dp=2"],
        ["--out", folder / "whole", "--steps", "4", *adapters, "--lr", "0.01"],
        ["--out", folder / "resumed", "--steps", "4", *adapters, "--lr", "0.01", "--stop-after", "2"],
    ):
        if "--stop-after" in words:
            words = [*words[:-2], "--drill", "term:step=2"]
        assert run(None, "train", *common, *words)[0] == 0 or "--drill" in words
    return folder


def summary_of(path) -> dict:
    return json.loads((path / "summary.json").read_text())


def test_adapters_resume_on_another_mesh_and_merge_into_the_weights_that_are_exported(folder, capfd):
    common = ["--data", folder / "text.txt", "--batch-size", "4", "--eval-windows", "8", "--model", "llama-proof"]
    words = ["--weights", folder / "base", "--lora", "4", "--lr", "0.01", "--steps", "4", "--mesh", "tp=4", "--sp"]
    code, out, err = run(capfd, "train", *common, *words, "--out", folder / "resumed", "--checkpoint-every", "2")
    assert code == 0 and "resumed after" in out and "of them trained" in out, err
    whole, resumed = (summary_of(folder / name) for name in ("whole", "resumed"))
    assert resumed["held_out_loss"] == pytest.approx(whole["held_out_loss"], rel=1e-5)

    evaluated = []
    for path, mesh in ((folder / "whole", "tp=2"), (folder / "whole", "dp=2")):
        words = [path, "--mesh", mesh, "--data", folder / "text.txt", "--batch-size", 4, "--windows", 8]
        code, out, err = run(capfd, "evaluate", *words)
        assert code == 0 and "adapters merged" in out, err
        evaluated.append(float(out.partition("perplexity ")[2].partition(":")[0]))
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    assert np.log(evaluated[0]) == pytest.approx(whole["held_out_loss"], rel=1e-4)

    code, out, err = run(capfd, "convert", "ours", folder / "whole", "--out", folder / "hf", "--mesh", "tp=2")
    assert code == 0 and "adapters merged" in out, err
    words = [folder / "hf", "--data", folder / "text.txt", "--batch-size", "4", "--windows", "8", "--split", "held-out"]
    code, out, err = run(capfd, "evaluate", *words)
    assert float(out.partition("perplexity ")[2].partition(":")[0]) == pytest.approx(evaluated[0], rel=1e-6)


def test_an_export_in_32_bits_of_matrices_in_16_has_their_corrections_in_32(tmp_path, capfd):
    config = RunConfig(LoRA(dataclasses.replace(DECODER, out_bias=True), RANK, ALPHA), batch_size=1)
    drawn = random_parameters(config, make_layout(config.model, ParallelConfig()))
    kept = {f"params.{n}": jnp.asarray(x, "float32" if ".lora." in n else "bfloat16") for n, x in drawn.items()}
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(0, kept, {"config": {"model": to_dict(config)["model"]}})
    checkpoints.finish()
    code, _, err = run(
        capfd, "convert", "ours", tmp_path / "run", "--out", tmp_path / "hf", "--dtype", "float32", "--mesh", "tp=2"
    )
    assert code == 0, err
    found = {name: x.map() for name, x in open_weights(tmp_path / "hf", read_model(tmp_path / "hf"))[1].items()}
    names = ("mlp.w_up", "lora.mlp.w_up.a", "lora.mlp.w_up.b")
    w, a, b = (np.asarray(kept[f"params.blocks.{name}"][3], "float64") for name in names)
    expected = (w + ALPHA / RANK * a @ b).T
    np.testing.assert_allclose(found["model.layers.3.mlp.up_proj.weight"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (dict(lora=4, lora_targets="w_q,w_nowhere"), "w_down"),
        (dict(lora=-1), "lora"),
        (dict(lora_alpha=4.0), "there are none"),
        (dict(lora_targets="w_q"), "there are none"),
        (dict(lora=4, lora_alpha=0.0), "lora_alpha="),
        (dict(lora=4, lora_alpha=float("nan")), "lora_alpha="),
    ],
)
def test_adapters_that_cannot_be_are_refused(flags, match):
    with pytest.raises(ConfigError, match=match):
        ModelFlags(model="llama-proof", **flags).model_config()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--lora", "8", "--lr", "0.01", "--weights", "whole"], "rank: 4; the model has 8"),
        (["--lora", "4", "--lora-alpha", "1", "--lr", "0.01", "--weights", "whole"], "alpha: 8.0; the model has 1.0"),
        (["--lora", "4", "--width", "32", "--lr", "0.01", "--weights", "base"], "width: 64; the model has 32"),
        (["--out", "base", "--lora", "4"], "same settings"),
    ],
)
def test_weights_that_adapters_do_not_fit_are_refused(folder, capfd, monkeypatch, words, match):
    monkeypatch.chdir(folder)
    common = ["--data", "text.txt", "--batch-size", "4", "--steps", "2", "--model", "llama-proof"]
    code, _, err = run(capfd, "train", *common, *words)
    assert code == 2 and match in err, err


def test_a_model_without_adapters_takes_them_merged(folder, capfd):
    sizes = "--batch-size 4 --eval-windows 8 --steps 1 --model llama-proof"
    common = ["--data", folder / "text.txt", *sizes.split()]
    code, out, err = run(capfd, "train", *common, "--weights", folder / "whole", "--mesh", "dp=2", "--lr", "0.01")
    whole = summary_of(folder / "whole")["held_out_loss"]
    assert code == 0 and f"held-out loss {whole:.3f}"[:-1] in out, (out, err)
