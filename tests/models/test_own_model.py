"""Models and steps that are not ours: the examples of docs/own-model.md, a Llama-like toy, and what is refused."""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alternating import Alternating
from conftest import DEVICES, in_sample
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from llama import Llama

import jaxdist
from experiments.calibration.work import PaperWork
from jaxdist.config import RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_abstract_mesh, parse_mesh
from jaxdist.models.base import Model, declare
from jaxdist.models.declared import abstract_values, check_split
from jaxdist.models.flax import LanguageModel, ShardedParam, stack_layers
from jaxdist.models.flax_model import FlaxModel
from jaxdist.models.lora import LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.models.traced import head_in_layers, parts_using
from jaxdist.parallel import collectives as comm
from jaxdist.params import Param, named_params
from jaxdist.parity import array_difference, compare, forward_logits, in_float64, observe, random_parameters
from jaxdist.placement import make_layout
from jaxdist.plan.formulas import ModelShape
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.proof.levels import levels
from jaxdist.plan.time_model import Efficiency, Layout, step_time
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program
from jaxdist.verification import proof_config

PAGE = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def page(*numbers: int) -> dict:
    """The names that blocks of the page define."""
    names: dict = {"__name__": "page"}
    for number in numbers:
        exec(BLOCKS[number], names)
    return names


def test_the_optimizer_of_the_page_updates_shards():
    program = page(3, 4)["program_with_lion"]()
    state, metrics = program.step(program.init(0), program.put(random_batches(program.config, 1)[0]))
    assert int(state.step) == 1 and np.isfinite(metrics["loss"])


def test_muon_of_the_page_updates_shards_as_whole_arrays():
    names = page(3, 5)
    split = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")}
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    grads, _ = names["example"]()
    found = jax.shard_map(names["direction"], mesh=mesh, in_specs=(split,), out_specs=split)(grads)
    for name, whole in names["direction"](grads).items():
        np.testing.assert_allclose(found[name], whole, rtol=0, atol=1e-5)


def test_the_model_of_the_page_equals_one_device_on_its_layouts(capsys):
    page(0, 1)["test_every_layout_computes_what_one_device_computes"]()
    assert capsys.readouterr().out.count("values are equal") == 3


def test_the_step_of_the_page_equals_its_reference(capsys):
    page(3)["test_my_step"]()
    out = capsys.readouterr().out
    # Sums over "model" of 6 x 4 products, forward; over "data" of two gradients of 8 x 8 and 8 x 4: 2 (n-1)/n = 1.
    assert "all 2 values are equal" in out and f"{6 * 4 * 4 + (8 * 8 + 8 * 4) * 4:,} bytes sent" in out


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('all_reduce(jax.grad(sharded_loss)(owed, *batch), "data")', "jax.grad(sharded_loss)(owed, *batch)", "repl"),
        ('all_reduce(jnp.tanh(varying(x, "model")', 'all_reduce(0.5 * jnp.tanh(varying(x, "model")', "value up"),
        ("*batch), \"data\")\n", "*batch), \"data\")\n    grads = all_reduce(grads, \"data\")\n", "already equal"),
        ("w - 0.01 * g, params, grads)\n\n\ndef make", "w - 0.005 * g, params, grads)\n\n\ndef make", "value down"),
    ],
)  # fmt: skip
def test_a_wrong_step_is_found(old, new, match):
    assert BLOCKS[3].count(old) == 1
    names: dict = {}
    exec(BLOCKS[3].replace(old, new), names)
    with pytest.raises((AssertionError, ValueError), match=match):
        names["test_my_step"]()


def test_parts_of_complex_numbers_and_leaves_of_one_name_are_compared():
    x = jnp.arange(1.0, 5.0)
    masked = jnp.where(x > 2, x, -jnp.inf)
    jaxdist.verify(lambda x: 2 * x, lambda x: x + x, (masked,)).require()
    with pytest.raises(AssertionError):
        jaxdist.verify(lambda x: 2 * x, lambda x: abs(x), (masked,)).require()
    wrong = jaxdist.verify(lambda x: x * (1 + 2j), lambda x: x * (1 - 5j), (x,))
    assert [each.ok for each in wrong.differences] == [False]
    jaxdist.verify(lambda x: x * (1 + 2j), lambda x: x * (1 + 2j), (x,)).require()
    wrong = jaxdist.verify(lambda x: {"a": {"b": 2 * x}, "a.b": x}, lambda x: {"a": {"b": 3 * x}, "a.b": x}, (x,))
    assert sorted(each.ok for each in wrong.differences) == [False, True]


LAYOUTS = [
    ("dp=2,tp=2", {"zero": 3}),
    ("tp=2", {"sp": True}),
    ("pp=2", {"schedule": "zb-h1"}),
    ("pp=2,dp=2,tp=2", {"schedule": "zb-v", "zero": 2, "sp": True}),
    ("replica=2,dp=2", {"zero": 3, "overlap": True, "accumulate": 2}),
    ("dp=2,tp=2", {"zero": 3, "remat": "selective", "loss_chunks": 4}),
    ("tp=4", {"sp": True, "remat": "every-2"}),
]


@pytest.mark.parametrize(("mesh", "parallel"), in_sample(LAYOUTS, LAYOUTS[:1]))
def test_a_llama_equals_one_device(mesh, parallel):
    jaxdist.verify(Llama(), mesh=mesh, **parallel).require()


@pytest.mark.parametrize(
    "model", in_sample([Llama(num_layers=2), Alternating(num_layers=4)], [Alternating(num_layers=4)])
)
def test_one_device_equals_plain_jnp(model):
    """In float64, every leaf random: the loss and its gradients, from the formulas of the papers."""
    with jax.enable_x64(True):
        config = proof_config(model, "", batch_size=4, steps=1, dtype="float64")
        [batch] = random_batches(config, 1, 1)
        run = observe(config, DEVICES[:1], [batch])
        params = random_parameters(config, make_layout(model, ParallelConfig()))
        params = {name: jnp.asarray(x, jnp.float64) for name, x in params.items()}

        def minimised(params):
            loss, auxiliary = plain_losses(params, model, batch["inputs"], batch["targets"])
            return loss + auxiliary, loss

        grads, loss = jax.grad(minimised, has_aux=True)(params)
        np.testing.assert_allclose(run.losses[0], loss, rtol=1e-12)
        for name, theirs in grads.items():
            rows = theirs if name.startswith("blocks.") else theirs[None]
            for layer, expected in enumerate(rows):
                ours = run.gradients[0][f"{name}[{layer}]" if name.startswith("blocks.") else name]
                np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12 * float(jnp.abs(expected).max()))


def plain_losses(params, model, tokens, targets):
    """(mean cross-entropy, auxiliary loss) of the models' layers from their papers, token by token where that is
    plainest; shares no code with `llama` and `alternating`."""
    x, count = params["tokens"][tokens], (targets >= 0).sum()
    auxiliary = getattr(model, "z_loss", 0) * (x**2).sum() / targets.size
    for layer in range(model.num_layers):
        block, place = divmod(layer, len(model.kinds))
        prefix = "blocks." if len(model.kinds) == 1 else f"blocks.{place}_{model.kinds[place]}."
        p = {name.removeprefix(prefix): w[block] for name, w in params.items() if name.startswith(prefix)}
        if model.kinds[place] == "weighed":
            a = plain_norm(x, p["norm"])
            router = jnp.exp(a @ p["w_router"])
            auxiliary += model.z_loss * (jnp.log(router.sum(-1)) ** 2).sum() / targets.size
            ups = [a @ p["w_up"][i] for i in range(2)]
            both = [(up / (1 + jnp.exp(-up))) @ p["w_down"][i] for i, up in enumerate(ups)]
            x = x + sum(router[..., i, None] / router.sum(-1, keepdims=True) * both[i] for i in range(2))
        else:
            x = plain_decoder(p, model, x)
    logits = plain_norm(x, params["norm"]) @ params["head"].T
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, losses, 0).sum() / count, auxiliary


def plain_norm(x, scale):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def plain_decoder(p, model, x):
    """A layer of arXiv 2302.13971 with grouped heads."""
    heads, groups, size = model.num_heads, model.num_kv_heads, model.width // model.num_heads

    def rotary(x):
        pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
        frequency = 10_000.0 ** (-2 * np.arange(size // 2) / size)
        turned = pairs * np.exp(1j * np.outer(np.arange(x.shape[1]), frequency))[None, :, None]
        return jnp.concatenate([turned.real, turned.imag], -1)

    a = plain_norm(x, p["attention_norm"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", a, p[name]) for name in ("w_q", "w_k", "w_v"))
    q, k = rotary(q), rotary(k)
    outs = []
    for head in range(heads):
        kv = head // (heads // groups)
        scores = q[:, :, head] @ k[:, :, kv].swapaxes(1, 2) / np.sqrt(size)
        scores = jnp.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -jnp.inf)
        outs.append(jax.nn.softmax(scores) @ v[:, :, kv] @ p["w_o"][head])
    x = x + sum(outs)
    m = plain_norm(x, p["mlp_norm"])
    gate = m @ p["w_gate"]
    return x + (gate / (1 + jnp.exp(-gate)) * (m @ p["w_up"])) @ p["w_down"]


@pytest.mark.parametrize(("mesh", "parallel"), in_sample(LAYOUTS, LAYOUTS[:1]))
def test_kinds_of_layers_with_an_auxiliary_loss_equal_one_device(mesh, parallel):
    jaxdist.verify(Alternating(num_layers=8), mesh=mesh, **parallel).require()


@pytest.mark.parametrize(("mesh", "parallel"), [*LAYOUTS[:3], ("dp=2", {"zero": 3, "overlap": True})])
def test_the_trace_of_several_kinds_sends_what_the_compiler_emits(mesh, parallel):
    model = Alternating(num_layers=8, width=128, ffn_width=256, seq_len=64, vocab_size=1024)
    found = levels(RunConfig(model, ParallelConfig(parse_mesh(mesh), **parallel), batch_size=8), "cpu")
    assert found.compiled_sent_bytes == found.sent_bytes


def test_an_auxiliary_loss_moves_the_weights_and_not_the_reported_loss():
    with_it, without = (
        observe(config, DEVICES[:1], random_batches(config, 1, 1))
        for config in (proof_config(Alternating(z_loss=z), "", batch_size=4, steps=1) for z in (0.1, 0.0))
    )
    name = "blocks.1_weighed.w_router[0]"
    assert with_it.losses[0] == without.losses[0]
    assert np.abs(with_it.gradients[0][name] - without.gradients[0][name]).max() > 1e-3


REPEATED = {  # of a layer's products and of its sums over tp, without sp and with it: all but the last product
    "gpt2-124m": (8 / 12, 0.5, 0.75),
    "llama3-8b": (1 - 14336 / (4096 + 4096 + 2 * 1024 + 3 * 14336), 0.5, 0.75),
    "mixtral-8x7b": (1.0, 0.5, 0.75),  # whose router's gradient needs what experts give
}


@pytest.mark.parametrize("preset", REPEATED)
def test_a_layer_that_runs_again_repeats_no_product_that_nobody_needs(preset):
    work = work_of(PRESETS[preset])
    found = work.matrices_again, work.sums_again, work.sp_sums_again
    assert found == pytest.approx(REPEATED[preset])
    cluster = Cluster(find_hardware("h100"))

    def seconds(**layout):
        return step_time(work, Layout(flash=True, **layout), cluster)

    block, many, none = seconds(remat="block"), seconds(remat="every-2"), seconds()
    last = 1 - found[0]
    products = work.num_layers * work.matrices(
        lambda n, k, m=work.seq_len, part=1: _matmul(work, n, k, m, part), 1, 1, False
    )
    assert many.compute - block.compute == pytest.approx(last * products)
    for sp, part in ((False, found[1]), (True, found[2])):
        block, many, none = (seconds(tp=8, sp=sp, remat=remat).tp for remat in ("block", "every-2", "none"))
        assert (block - none) / (many - none) == pytest.approx(part)


def _matmul(work, n, k, m, part):
    smallest = min(m * part, n, k)
    return 2 * work.seq_len * n * k / (0.7 * 989e12 * smallest / (smallest + 60))


@pytest.mark.parametrize("preset", ["gpt2-124m", "7b"])
def test_the_work_that_a_trace_finds_is_what_the_papers_count(preset):
    """Where scores are written, less those that blocks leave out; elementwise traffic is a rule either way."""
    model = PRESETS[preset]
    traced, papers = work_of(model), PaperWork(ModelShape.of(model))
    assert (traced.layer_parameters, traced.layer_sums) == (papers.layer_parameters, papers.layer_sums)
    assert traced.table_parameters == papers.table_parameters and traced.width == papers.width
    assert 0.94 < traced.flops_per_token / papers.flops_per_token < 1
    cluster = Cluster(find_hardware("h100"), num_nodes=2, devices_per_node=8)
    for layout in ({}, {"tp": 4}, {"tp": 8, "sp": True}, {"pp": 4, "tp": 2}):

        def timed(flash, attention=0.5, columns=layout):
            columns = Layout(dp=2, microbatches=16, rows=4, flash=flash, **columns)
            return (step_time(work, columns, cluster, Efficiency(attention=attention)) for work in (traced, papers))

        for flash in (False, True):
            ours, theirs = timed(flash)
            assert 0.9 < ours.total[0] / theirs.total[0] < 1.02
        half, whole = ([each.compute[0] for each in timed(True, attention)] for attention in (0.5, 1.0))
        assert half[0] == pytest.approx(half[1])
        products = 2 * whole[0] - half[0]  # without attention, of which they say how long it takes
        written, all_written = (each.compute[0] - products for each in timed(False))
        kept, every = (work.core(lambda n, k, m: n * k, layout.get("tp", 1)) for work in (traced, papers))
        assert written / all_written == pytest.approx(kept / every)


def test_users_of_outer_parameters_are_found_by_tracing():
    used = parts_using(Llama())
    assert used == {"tokens": {"embed"}, "head": {"loss"}, "norm": {"loss"}}


@dataclass(frozen=True)
class Gained(Llama):
    """Single numbers as parameters; the gradient of the last layer's cancels, since a norm follows it."""

    def outer(self):
        return {**super().outer(), "gain": Param((), mean=1.0)}

    def block(self, kind):
        return {**super().block(kind), "gain": Param((), mean=1.0)}

    def layer(self, ctx, kind, p, x, index):
        return super().layer(ctx, kind, p, x, index) * p["gain"]

    def loss(self, ctx, outer, x, batch):
        return super().loss(ctx, outer, x + jnp.tanh(outer["gain"]) * x.mean(-1, keepdims=True), batch)


@pytest.mark.parametrize(("mesh", "parallel"), [("pp=2,dp=2", {"zero": 2})])
def test_a_single_number_is_a_parameter_and_its_cancelled_gradient_equal(mesh, parallel):
    report = jaxdist.verify(Gained(num_layers=2), mesh=mesh, batch_size=8, steps=2, **parallel).require()
    assert {"gain", "blocks.gain[1]"} <= {each.name for each in report.differences if each.kind == "gradient"}


def test_declared_parameters_begin_with_their_mean_and_spread():
    model = Alternating(num_layers=4)
    values, others = model.initial_values(3), model.initial_values(4)
    for name, param in named_params(declare(model)):
        x, other = (np.asarray(reduce(dict.__getitem__, name.split("."), tree)) for tree in (values, others))
        few = 4 * (param.std or 1) / math.sqrt(x.size)
        assert x.shape == param.shape and abs(x.mean() - param.mean) < few, name
        assert abs(x.std() - param.std) < few and (not param.std or (x != other).all()), name


def listed_model():
    """The page's model with two of its layers in a list, as one."""
    names = page(0)
    gated, language_model = names["Gated"], names["ConvLM"]

    class Pair(nnx.Module):
        def __init__(self, config, rngs):
            self.parts = nnx.List([gated(config, rngs), gated(config, rngs)])

        def __call__(self, x, ctx):
            for part in self.parts:
                x = part(x, ctx)
            return x

    class Listed(language_model):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.blocks = stack_layers(config, lambda rngs, kind: Pair(config, rngs), rngs)

    @dataclass(frozen=True)
    class ListedConfig(names["ConvConfig"]):
        def module(self, rngs):
            return Listed(self, rngs)

    return ListedConfig(num_layers=1, seq_len=8, vocab_size=32, width=8, hidden=8)


def test_adapters_of_a_model_with_lists_are_added_to_each_of_its_matrices():
    """Also to a filter, which the layer takes apart by itself."""
    base = listed_model()
    model, rng = LoRA(base, 2, 4.0), np.random.default_rng(0)
    names = [name for name, _ in named_params(declare(model))]
    assert {"blocks.parts.1.filter", "blocks.lora.parts.0.filter.a"} <= {*names}
    assert [leaf.name for leaf in jax.tree.leaves(make_layout(model, ParallelConfig()).leaves)] == names
    values = jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), abstract_values(model, "float32"))
    whole = values | {"blocks": {"parts": {}}}
    for i, part in values["blocks"]["parts"].items():
        pairs = values["blocks"]["lora"]["parts"][i]
        add = {name: part[name] + model.scale * np.tensordot(ab["a"][0], ab["b"][0], 1) for name, ab in pairs.items()}
        assert add.keys() == {"filter", "w_in", "w_out"}
        whole["blocks"]["parts"][i] = part | add
    tokens = rng.integers(0, 32, (2, 8))
    found, expected = (forward_logits(each, w, tokens, DEVICES[0]) for each, w in ((model, values), (base, whole)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_adapters_name_what_jax_does_not_compute_with():
    class Dotted(Llama):
        def layer(self, ctx, kind, p, x, index):
            return x + jnp.dot(jnp.dot(x, p["w_up"]), p["w_down"])

    model = LoRA(Dotted(1), 2, 4.0)
    with pytest.raises(ConfigError, match=r"adapters of Dotted: .*jnp\.asarray\(w\)"):
        forward_logits(model, model.initial_values(0), np.zeros((1, 8), int), DEVICES[0])


@pytest.mark.parametrize("how", [{"mesh": "pp=2"}, {"mesh": "dp=2", "overlap": True}])
def test_layers_without_parameters_are_refused_where_they_are_divided(how):
    @dataclass(frozen=True)
    class Bare(Llama):
        def block(self, kind):
            return {}

    with pytest.raises(ConfigError, match="Bare: its layers must have parameters"):
        proof_config(Bare(), **how)


def test_names_that_dots_make_one_are_refused():
    @dataclass(frozen=True)
    class Dotted(Llama):
        def outer(self):
            return {**super().outer(), "a.b": Param((2,)), "a": {"b": Param((2,))}}

    with pytest.raises(ConfigError, match=r"two parameters called 'a\.b'"):
        declare(Dotted())


def test_kinds_repeat_a_whole_number_of_times():
    with pytest.raises(ConfigError, match=r"num_layers=3 with kinds=\('decoder', 'weighed'\)"):
        jaxdist.verify(Alternating(num_layers=3), mesh="dp=2")
    with pytest.raises(ConfigError, match=r"num_layers=4 in 2 blocks over 4 stages .* Use num_layers=8 or more"):
        jaxdist.verify(Alternating(num_layers=4), mesh="pp=4")
    first_dense = dataclasses.replace(PRESETS["moe-proof"], num_layers=3, kinds=("dense", "full", "full"))
    with pytest.raises(ConfigError, match="Use pp=1"):
        jaxdist.verify(first_dense, mesh="pp=3", batch_size=12)


def test_two_dims_of_a_layer_s_parameter_are_a_matrix():
    found = named_params(declare(Llama()))
    said = {name: param.matrix for name, param in found}
    assert said["blocks.w_up"] == (None, "in", "out") and {m for n, m in said.items() if "norm" in n} <= {(), None}


def test_the_work_of_a_llama():
    """Products with weights: 2 FLOPs a parameter; grouped heads do not make scores cheaper."""
    model = Llama()
    work, size = work_of(model), model.width // model.num_heads
    matrices = sum(p.flops for p in work.layer if not p.batched)
    assert matrices == 2 * (work.layer_parameters - 2 * model.width)
    assert sum(p.flops for p in work.layer if p.batched) == 2 * 2 * model.seq_len * model.num_heads * size
    assert head_in_layers(model) == work.loss[0].flops / sum(p.flops for p in work.layer)
    experts = work_of(PRESETS["moe-10m"])
    assert head_in_layers(PRESETS["moe-10m"]) == experts.loss[0].flops / sum(p.flops for p in experts.layer)
    config = RunConfig(Llama(8), ParallelConfig(MeshShape(pp=2), stages="balanced"), batch_size=16)
    assert config.part_layers == (4, 4) and dataclasses.replace(
        config, model=Llama(8, vocab_size=1024)
    ).part_layers == (5, 3)
    assert [(p.n, p.k, p.splits_n, p.splits_k) for p in work.loss] == [(model.vocab_size, model.width, True, False)]


class CheckedLlama(Llama):
    def check(self, parallel):
        """Nothing of its own: what holds for every model is asked all the same."""


@pytest.mark.parametrize(
    ("mesh", "parallel", "match"),
    [
        ("tp=8", {}, "heads=4 of parameter blocks.w_k over tp=8"),
        ("tp=2", {"tp_ring": "one-way"}, "ring"),
        ("cp=2", {}, "Llama with cp=2: .* part of the sequence"),
        ("dp=2", {"attention": "cudnn"}, "attention=cudnn: .*Llama"),
    ],
)
def test_what_a_model_cannot_do_is_refused(mesh, parallel, match):
    with pytest.raises(ConfigError, match=match):
        jaxdist.verify(CheckedLlama(), mesh=mesh, **parallel)


@dataclass(frozen=True)
class Wrong(Llama):
    """One of its functions returns what `change` makes of the right result."""

    name: str = "loss"
    change: Callable = lambda found: found

    def embed(self, ctx, outer, batch):
        return self.changed("embed", super().embed(ctx, outer, batch))

    def layer(self, ctx, kind, p, x, index):
        return self.changed("layer", super().layer(ctx, kind, p, x, index))

    def head(self, ctx, outer, x):
        return self.changed("head", (x, outer["head"]))

    def loss(self, ctx, outer, x, batch):
        return self.changed("loss", super().loss(ctx, outer, x, batch))

    def changed(self, name, found):
        return self.change(found) if name == self.name else found


class WrongHead(Wrong):
    loss = Model.loss


WRONG = [
    ("loss", lambda found: found[None], r"float32\[1\]: must return one floating-point number"),
    ("loss", lambda found: None, "None"),
    ("loss", lambda found: (found, found), r"\(float32\[\], float32\[\]\)"),
    ("loss", lambda found: found.astype(jnp.int32), r"int32\[\]"),
    ("embed", lambda found: (found, None), r"\(float32\[1,32,64\], None\)"),
    ("layer", lambda found: found[..., :1], r"float32\[1,32,1\]: must return x as it takes it, float32\[1,32,64\]"),
    ("layer", lambda found: found.astype(jnp.bfloat16), "bfloat16"),
    ("layer", lambda found: (found, None), r"\(float32\[1,32,64\], None\)"),
    ("head", lambda found: found[0], r"float32\[1,32,64\]: must return two"),
    ("head", lambda found: (found[0], found[1].T), r"\(float32\[1,32,64\], float32\[64,256\]\)"),
]


@pytest.mark.parametrize(("name", "change", "match"), WRONG)
def test_what_a_model_s_function_must_not_return_is_refused_by_name(name, change, match):
    kind = WrongHead if name == "head" else Wrong
    with pytest.raises(ConfigError, match=f"`{name}` of {kind.__name__} returns {match}"):
        make_layout(kind(num_layers=2, name=name, change=change), ParallelConfig())


ON_A_RANK = [
    ("bfloat16", "dp=2", lambda found: found * np.float32(1), r"float32\[8,32,64\]: must .*, bfloat16\[8,32,64\]"),
    ("float32", "tp=2", lambda found: comm.varying(found, "tp"), ": must be equal on all ranks of tp"),
    ("float32", "pp=2,tp=2", lambda found: found[:, : 32 // lax.axis_size("tp")], r"float32\[16,16,64\]"),
]


@pytest.mark.parametrize(("dtype", "mesh", "change", "match"), ON_A_RANK)
def test_results_that_are_wrong_on_a_rank_of_the_mesh_alone_are_refused(dtype, mesh, change, match):
    model = LoRA(Wrong(num_layers=2, name="layer", change=change), 2, 4.0)
    config = RunConfig(model, ParallelConfig(parse_mesh(mesh)), precision=PrecisionConfig(dtype))
    with pytest.raises(ConfigError, match=f"`layer` of Wrong returns.*{match}"):
        build_program(config, make_abstract_mesh(config.parallel.mesh))


def test_a_leaf_that_is_wrong_is_not_taken_for_rounding():
    """By a thousandth, against what one device in float32 is off from float64."""
    config = proof_config(Llama(num_layers=1), "", batch_size=4, steps=1)
    batches = random_batches(config, 1, 1)
    right = observe(config, DEVICES[:1], batches)
    name = "blocks.w_up[0]"
    wrong = dataclasses.replace(right, gradients=[right.gradients[0] | {name: 1.001 * right.gradients[0][name]}])
    found = [
        each for each in compare(config, wrong, right, lambda: in_float64(config, DEVICES[:1], batches)) if not each.ok
    ]
    assert [(each.kind, each.name) for each in found] == [("gradient", name)]


@dataclass(frozen=True)
class Still(Llama):
    def loss(self, ctx, outer, x, batch):
        return 0 * super().loss(ctx, outer, x, batch)


def test_what_moves_nothing_tests_nothing():
    assert not jaxdist.verify(Still(num_layers=1), mesh="dp=2", batch_size=8, steps=1).ok

    def step(rate):
        return lambda params, x: jax.tree.map(lambda w: w - rate * x.sum(), params)

    args = {"w": jnp.ones(3)}, jnp.ones(4)
    for rate, tested in ((0.0, False), (0.1, True)):
        report = jaxdist.verify(step(rate), step(rate), args)
        assert report.tested == tested and ("nothing was tested" in str(report)) != tested


@dataclass(frozen=True)
class Remembers(FlaxModel):
    num_layers: int = 2
    seq_len: int = 8
    vocab_size: int = 16
    in_layers: bool = False
    array: Callable | None = None

    def module(self, rngs):
        return Remembering(self, rngs)


class Remembering(LanguageModel):
    def __init__(self, config, rngs):
        self.config = config
        self.scale = nnx.Param(jnp.ones(4))
        self.norm = nnx.LayerNorm(4, rngs=rngs) if config.in_layers else nnx.BatchNorm(4, rngs=rngs)
        layer = nnx.Dropout if config.in_layers else nnx.Linear
        sizes = (0.1,) if config.in_layers else (4, 6)
        self.blocks = stack_layers(config, lambda rngs, kind: layer(*sizes, rngs=rngs), rngs)
        if config.array is not None:
            self.blocks, self.norm = stack_layers(config, lambda *_: Offset(config.array(4)), rngs), None


class Offset(nnx.Module):
    def __init__(self, offset):
        self.gain, self.offset = ShardedParam(1.0), offset


def test_a_module_that_keeps_more_than_parameters_is_refused_by_name():
    for in_layers, said in ((False, "BatchStat norm.mean"), (True, "blocks.rngs")):
        for declared in (Remembers.outer, lambda model: model.block("layer")):
            with pytest.raises(ConfigError, match=said):
                declared(Remembers(in_layers=in_layers))
    for array in (np.arange, jnp.arange):
        with pytest.raises(ConfigError, match=r"the array blocks\.offset"):
            Remembers(array=array).outer()


@dataclass(frozen=True)
class Built(Remembers):
    build: Callable = lambda config, rngs: None

    def module(self, rngs):
        return self.build(self, rngs)


class Holding(nnx.Module):
    def __init__(self, held):
        self.held = held


def sharing(config, rngs):
    shared = ShardedParam(jnp.ones(4))
    return stack_layers(config, lambda *_: Holding(shared), rngs)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (sharing, "a layer of Built that holds a module or a parameter from outside"),
        (lambda config, rngs: None, "`module` of Built: must give .* NoneType without"),
        (lambda config, rngs: Holding(ShardedParam(1.0)), "`module` of Built: must give .* Holding without"),
    ],
)
def test_a_module_that_is_built_wrong_is_told_how_to_be(build, match):
    with pytest.raises(ConfigError, match=match):
        Built(build=build).outer()


@dataclass(frozen=True)
class Counting(Remembers):
    frozen: bool = False

    def module(self, rngs):
        return Counted(self, rngs)


class Counted(LanguageModel):
    def __init__(self, config, rngs):
        self.config = config
        self.table, self.scale = nnx.Param(jnp.ones((16, 4))), ShardedParam(jnp.arange(4), frozen=config.frozen)
        self.blocks = stack_layers(config, lambda *_: Scaled(), rngs)

    def embed(self, tokens, ctx):
        return self.table[...][tokens]

    def unembed(self, x, ctx):
        return x * self.scale[...], self.table[...]


class Scaled(nnx.Module):
    def __init__(self):
        self.gain = ShardedParam(1.0)

    def __call__(self, x, ctx):
        return x * self.gain[...]


def test_integers_are_no_parameters_that_are_trained():
    with pytest.raises(ConfigError, match="parameter scale of int32: must begin as floating-point"):
        build_program(RunConfig(Counting()), make_abstract_mesh(MeshShape()))
    build_program(RunConfig(Counting(frozen=True)), make_abstract_mesh(MeshShape()))


@dataclass(frozen=True)
class Valued(Llama):
    """Its initial values are what `change` makes of them."""

    change: Callable = dict

    def initial_values(self, seed):
        return self.change(super().initial_values(seed))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda values: values | {"extra": values["head"]}, "`initial_values` of Valued with extra: must give"),
        (lambda values: {name: x for name, x in values.items() if name != "head"}, "without head: must give"),
        (lambda values: values | {"head": values["head"][:5]}, r"head of \[5, 64\] .* must be .* \[256, 64\]"),
    ],
)
def test_initial_values_of_other_parameters_are_refused(change, match):
    model = Valued(num_layers=2, change=change)
    with pytest.raises(ConfigError, match=match):
        build_program(RunConfig(model), make_abstract_mesh(MeshShape()))


@pytest.mark.parametrize("dims", [("heads", "ffn"), ("layers", None)])
def test_a_parameter_that_an_axis_would_split_twice_is_refused(dims):
    with pytest.raises(ConfigError, match=r"parameter blocks\.both with dims .* over (tp|pp)=2: .* one of them"):
        check_split(Twice(dims=dims), ParallelConfig(MeshShape(pp=2, tp=2)))


@dataclass(frozen=True)
class Twice(Llama):
    dims: tuple = ()

    def block(self, kind):
        return {**super().block(kind), "both": Param((8, 8), self.dims)}


def test_results_of_other_structures_are_refused():
    with pytest.raises(ConfigError, match="'b'"):
        jaxdist.verify(lambda x: {"a": x}, lambda x: {"a": x, "b": x}, (np.ones(3),))
    report = jaxdist.verify(lambda x: (x + 1, x > 0), lambda x: (x + 1, x > 1), (np.ones(3),))
    assert not report.ok and "1 of 2 values differ" in str(report)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_numbers_whose_squares_are_none_are_compared(size):
    x = np.full(3, size)
    assert array_difference("value", "x", x, x, 1e-10, True).error == 0
    assert array_difference("value", "x", 2 * x, x, 1e-10, False).error == 1


def test_a_reference_in_float64_is_an_oracle_and_another_dtype_is_said():
    x = np.float32([1, 2, 3])
    third = jaxdist.verify(lambda x: x / 3, lambda x: x.astype(np.float64) / 3, (x,)).require()
    assert "result is float32; the reference's is float64" in str(third) and third.sent_bytes == 0
    assert not jaxdist.verify(lambda x: x / 3 + 1e-3, lambda x: x.astype(np.float64) / 3, (x,)).ok
    with jax.enable_x64(True):
        assert not jaxdist.verify(lambda x: (x / 3).astype("float32"), lambda x: x / 3, (x.astype(np.float64),)).ok
    assert not jaxdist.verify(lambda x: (x / 3).astype("bfloat16"), lambda x: x.astype(np.float64) / 3, (x,)).ok
    narrow = jaxdist.verify(lambda x: (x / 3).astype("bfloat16"), lambda x: x / 3, (x,))
    assert not narrow.ok and "result is bfloat16; the reference's is float32" in str(narrow)
    with pytest.raises(ConfigError, match="without any leaf"):
        jaxdist.verify(lambda x: {}, lambda x: {}, (x,))
