"""The closed form of what a step sends equals the traced program: each message's kind, axes and bytes, and how many."""

import random
from collections import Counter

import pytest
from conftest import in_sample
from support.messages import assert_equals_trace, by_size, layout_of, traced

from experiments.strategies import PIPELINES, STRATEGIES
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.builders import NAMES
from jaxdist.plan.proof.trace import total_sent
from jaxdist.plan.traffic import predicted, table
from jaxdist.strategy import ParallelConfig, PrecisionConfig

# Messages of one kind, axes and size are equal in number, so bytes and numbers a (kind, axes) are: they are sums.

TRACED = [each for each in STRATEGIES if each.sample][::3] + random.Random(0).sample(PIPELINES, 3)


@pytest.mark.parametrize("strategy", in_sample([*STRATEGIES, *PIPELINES], TRACED), ids=lambda each: each.name)
def test_every_strategy_sends_what_is_predicted(strategy):
    assert_equals_trace(strategy.run_config())


def random_config(seed: int) -> RunConfig:
    """A tiny model of odd sizes with settings drawn freely, on up to 16 ranks; what is refused is drawn again."""
    pick = random.Random(seed)
    while True:
        heads = pick.choice((1, 2, 3, 4, 6, 8))
        shape = GPT2Config(
            num_layers=pick.randint(1, 9),
            width=heads * pick.choice((1, 3, 5, 8)),
            num_heads=heads,
            ffn_width=heads * pick.randint(1, 12),
            seq_len=pick.choice((1, 2, 3, 6, 8, 12)),
            vocab_size=pick.randint(1, 700),
            dropout=pick.choice((0.0, 0.0, 0.1)),
        )
        mesh = MeshShape(
            pp=pick.choice((1, 1, 2, 3, 4)),
            replica=pick.choice((1, 1, 2)),
            dp=pick.choice((1, 2, 3, 4, 5, 7, 8)),
            tp=pick.choice((1, 1, 2, 3, 4)),
        )
        if mesh.num_devices > 16:
            continue
        try:
            parallel = ParallelConfig(
                mesh=mesh,
                zero=pick.choice((0, 1, 2, 3, 3)),
                sp=pick.random() < 0.5,
                tp_ring=pick.choice(("none", "none", "one-way", "two-way")),
                grad_sync=pick.choice(("per-parameter", "flat", "bucketed")),
                bucket_mb=pick.choice((25, 0.01, 0.001)),
                accumulate=pick.choice((1, 1, 2, 3)),
                remat=pick.choice(("none", "selective", "block", "every-2", "every-3")),
                reshard_after_forward=pick.random() < 0.6,
                schedule=pick.choice(NAMES),
                microbatches=pick.choice((None, 1, 2, 3, 5)),
                stages=pick.choice(("even", "balanced")),
            )
            return RunConfig(
                shape,
                parallel,
                OptimizerConfig(name=pick.choice(("adamw", "sgd", "lion", "adafactor", "muon"))),
                PrecisionConfig(
                    dtype=pick.choice(("float32", "bfloat16", "float16", "float64")),
                    reduce_dtype=pick.choice((None, None, "bfloat16", "float32")),
                ),
                batch_size=mesh.dp
                * mesh.replica
                * parallel.accumulate
                * parallel.num_microbatches
                * pick.randint(1, 2),
            )
        except ConfigError:
            continue


@pytest.mark.parametrize("seed", in_sample(range(200), range(6)))
def test_random_runs_send_what_is_predicted(seed):
    assert_equals_trace(random_config(seed))


@pytest.mark.parametrize(("tokens", "sp", "remat"), [(1, False, "block"), (4, False, "none"), (2, True, "every-2")])
def test_of_few_tokens_w_gathers_the_block_itself(tokens, sp, remat):
    """B hands the norms' scale and bias over where they are no larger than the activation."""
    model = GPT2Config(num_layers=4, width=6, num_heads=2, ffn_width=8, seq_len=tokens, vocab_size=179)
    mesh = parse_mesh("pp=2,dp=2,tp=2" if sp else "pp=2,dp=2")
    parallel = ParallelConfig(mesh, 3, sp=sp, grad_sync="flat", remat=remat, schedule="zb-h1", microbatches=2)
    assert_equals_trace(RunConfig(model, parallel, batch_size=4))


def large(preset: str, mesh: str, **parallel) -> RunConfig:
    """Two sequences a micro-batch, in bf16."""
    strategy = ParallelConfig(mesh=parse_mesh(mesh), **parallel)
    ranks = strategy.mesh.dp * strategy.mesh.replica
    return RunConfig(
        PRESETS[preset],
        strategy,
        precision=PrecisionConfig(dtype="bfloat16"),
        batch_size=2 * ranks * strategy.accumulate * strategy.num_microbatches,
    )


LARGE = {
    "7b on 256 ranks": large("7b", "pp=4,dp=8,tp=8", zero=1, sp=True, microbatches=16),
    "7b on 16,384 ranks": large("7b", "pp=16,dp=128,tp=8", zero=1, sp=True),
    "175b on 4,096 ranks": large(
        "175b", "pp=8,dp=64,tp=8", zero=1, sp=True, microbatches=64, remat="block", stages="balanced"
    ),
    "175b on 4,096 ranks, ZeRO-3": large("175b", "replica=2,dp=256,tp=8", zero=3, sp=True, remat="block", accumulate=2),
}


@pytest.mark.parametrize("name", in_sample(LARGE, ["7b on 16,384 ranks"]))
def test_large_runs_send_what_is_predicted(name):
    config = LARGE[name]
    assert_equals_trace(config)
    sent = total_sent(predicted(config, layout_of(config)), config.parallel.mesh)
    assert sent == total_sent(traced(config), config.parallel.mesh)


def test_one_device_sends_nothing():
    config = RunConfig(PRESETS["proof"])
    assert predicted(config, layout_of(config)) == []


def test_a_layout_of_another_strategy_is_refused():
    config = LARGE["7b on 256 ranks"]
    other = large("7b", "pp=4,dp=8,tp=8", zero=3, sp=True, microbatches=16)
    with pytest.raises(ConfigError, match=r"a layout of another strategy, on pp=4,dp=8,tp=8"):
        predicted(config, layout_of(other))


def test_bytes_do_not_depend_on_grouping():
    """Numbers of messages do. Bytes do only where ZeRO-3's backward gathers a matrix's whole group."""
    sent = {}
    for zero in (0, 1, 2, 3):
        for sync in ("per-parameter", "flat", "bucketed"):
            config = large("gpt2-124m", "dp=8", zero=zero, grad_sync=sync)
            messages = predicted(config, layout_of(config))
            sent[zero, sync] = Counter()
            for message in messages:
                sent[zero, sync][message.purpose] += message.count * message.full_bytes
    for zero in (0, 1, 2):
        assert sent[zero, "flat"] == sent[zero, "per-parameter"] == sent[zero, "bucketed"]
    assert not sent[3, "per-parameter"] - sent[3, "flat"]
    more = sent[3, "flat"] - sent[3, "per-parameter"]
    width, layers, itemsize = PRESETS["gpt2-124m"].width, PRESETS["gpt2-124m"].num_layers, 2
    assert more == {
        "weights of a layer, backward": layers
        * itemsize
        * (4 + 2 + 3 + 4)
        * width,  # two norms; biases out, down; qkv; up
    }


def test_table_adds_up():
    config = LARGE["7b on 256 ranks"]
    mesh = config.parallel.mesh
    messages = predicted(config, layout_of(config))
    rows = table(messages, mesh)
    assert sum(row.sent_bytes for row in rows) >= total_sent(messages, mesh)  # no stage sends most of everything
    for row in rows:
        alike = [m for m in messages if (m.purpose, m.kind, ", ".join(m.axes)) == row[:3]]
        assert row.sent_bytes == total_sent(alike, mesh)
        on_stage = Counter()
        for (*_, stage), count in by_size(alike, mesh).items():
            on_stage[stage] += count
        assert row.count == max(on_stage.values())
    assert len({row[:3] for row in rows}) == len(rows)
    [update] = [row for row in rows if row.purpose == "parameters after the update"]
    assert (update.kind, update.axes) == ("all_gather", "dp")
