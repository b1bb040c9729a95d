"""The named strategies every parity property runs over. Adding a strategy is adding a row.

Each runs the `proof` preset (4 layers, width 64, 8 heads, vocabulary 250 padded to 256) on up to 8 simulated devices.
`PIPELINES` is every schedule at every size, with the other strategies mixed in.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, product

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.builders import NAMES, SCHEDULES
from jaxdist.parity import PROOF_EPS, PROOF_LR
from jaxdist.strategy import ParallelConfig, PrecisionConfig

BATCH_SIZE = 48  # divides by every dp x accumulate below, 3 among them


@dataclass(frozen=True)
class Strategy:
    """A mesh and what is done on it; `parallel` overrides ParallelConfig, `optimizer` OptimizerConfig, `model` the
    preset's fields."""

    name: str
    mesh: str
    parallel: dict = field(default_factory=dict)
    dropout: float = 0.0
    dtype: str = "float32"
    reduce_dtype: str | None = None
    optimizer: dict = field(default_factory=dict)
    num_layers: int = PRESETS["proof"].num_layers
    batch_size: int = BATCH_SIZE
    mask_documents: bool = False
    preset: str = "proof"
    model: dict = field(default_factory=dict)
    sample: bool = False
    """Every run of the tests takes it; the others, whose parts are each in such a row too, only the whole matrix."""

    @property
    def fields(self) -> dict:
        return ({"dropout": self.dropout} if self.dropout else {}) | self.model

    def run_config(self, dtype: str | None = None, steps: int = 2, seed: int = 0) -> RunConfig:
        return RunConfig(
            model=dataclasses.replace(PRESETS[self.preset], num_layers=self.num_layers, **self.fields),
            parallel=ParallelConfig(mesh=parse_mesh(self.mesh), **self.parallel),
            optimizer=OptimizerConfig(lr=PROOF_LR, warmup_steps=0, eps=PROOF_EPS, **self.optimizer),
            precision=PrecisionConfig(dtype=dtype or self.dtype, reduce_dtype=self.reduce_dtype),
            batch_size=self.batch_size,
            steps=steps,
            seed=seed,
            mask_documents=self.mask_documents,
        )


STRATEGIES = [
    # One at a time.
    Strategy("dp2", "dp=2"),
    Strategy("dp8", "dp=8"),
    Strategy("dp8-per-parameter", "dp=8", {"grad_sync": "per-parameter"}),
    Strategy("dp8-flat", "dp=8", {"grad_sync": "flat"}, sample=True),
    Strategy("dp8-buckets", "dp=8", {"bucket_mb": 0.05}),
    Strategy("dp4-accumulate", "dp=4", {"accumulate": 4}),
    Strategy("replica2-dp4", "replica=2,dp=4"),
    Strategy("tp2", "tp=2"),
    Strategy("tp8", "tp=8"),
    Strategy("tp4-sp", "tp=4", {"sp": True}, sample=True),
    Strategy("dp8-zero1", "dp=8", {"zero": 1}),
    Strategy("dp8-zero2", "dp=8", {"zero": 2}),
    Strategy("dp8-zero3", "dp=8", {"zero": 3}),
    Strategy("remat-selective", "", {"remat": "selective"}),
    Strategy("remat-block", "", {"remat": "block"}, sample=True),
    Strategy("remat-every-2", "", {"remat": "every-2"}),
    Strategy("remat-arrays", "", {"remat": "repeat:dot_general:32rx64-64x256+dot_general:rx32x8x8-rx32x8x8"}),
    Strategy("accumulate", "", {"accumulate": 6}),
    # ZeRO in its variants: sizes that do not divide, hybrid sharding, grouping, accumulation, keeping weights.
    Strategy("dp3-zero1-padded", "dp=3", {"zero": 1}),
    Strategy("dp3-zero2-padded", "dp=3", {"zero": 2}),
    Strategy("dp3-zero3-padded", "dp=3", {"zero": 3}, sample=True),
    Strategy("dp3-zero3-padded-per-parameter", "dp=3", {"zero": 3, "grad_sync": "per-parameter"}),
    Strategy("replica2-dp4-zero1", "replica=2,dp=4", {"zero": 1}),
    Strategy("replica2-dp4-zero2", "replica=2,dp=4", {"zero": 2}),
    Strategy("replica2-dp4-zero3", "replica=2,dp=4", {"zero": 3}),
    Strategy("dp8-zero1-flat", "dp=8", {"zero": 1, "grad_sync": "flat"}),
    Strategy("dp8-zero1-per-parameter", "dp=8", {"zero": 1, "grad_sync": "per-parameter"}),
    Strategy("dp8-zero2-flat", "dp=8", {"zero": 2, "grad_sync": "flat"}),
    Strategy("dp8-zero3-per-parameter", "dp=8", {"zero": 3, "grad_sync": "per-parameter"}),
    Strategy("dp4-zero1-accumulate", "dp=4", {"zero": 1, "accumulate": 3}),
    Strategy("dp4-zero2-accumulate", "dp=4", {"zero": 2, "accumulate": 3}),
    Strategy("dp4-zero3-accumulate", "dp=4", {"zero": 3, "accumulate": 3}),
    Strategy("dp4-zero3-keep", "dp=4", {"zero": 3, "reshard_after_forward": False}, sample=True),
    Strategy("dp4-zero3-remat-block", "dp=4", {"zero": 3, "remat": "block"}),
    Strategy("dp4-zero3-remat-every-2", "dp=4", {"zero": 3, "remat": "every-2"}),
    # Overlap: reductions and gathers one layer away from what they belong to.
    Strategy("dp8-overlap", "dp=8", {"overlap": True}, sample=True),
    Strategy("dp8-zero1-overlap", "dp=8", {"overlap": True, "zero": 1}),
    Strategy("dp8-zero2-overlap", "dp=8", {"overlap": True, "zero": 2}),
    Strategy("dp8-zero3-overlap", "dp=8", {"overlap": True, "zero": 3}),
    Strategy("dp4-overlap-accumulate", "dp=4", {"overlap": True, "accumulate": 2}),
    Strategy("dp4-zero1-overlap-accumulate", "dp=4", {"overlap": True, "zero": 1, "accumulate": 3}),
    Strategy("dp4-zero2-overlap-accumulate", "dp=4", {"overlap": True, "zero": 2, "accumulate": 2}),
    Strategy("dp3-zero3-overlap-padded-accumulate", "dp=3", {"overlap": True, "zero": 3, "accumulate": 2}, sample=True),
    Strategy("dp4-overlap-remat-block", "dp=4", {"overlap": True, "remat": "block"}),
    Strategy("dp4-zero3-overlap-remat-block", "dp=4", {"overlap": True, "zero": 3, "remat": "block"}),
    Strategy("dp4-zero1-overlap-buckets", "dp=4", {"overlap": True, "zero": 1, "bucket_mb": 0.05}),
    Strategy("dp4-zero3-overlap-per-parameter", "dp=4", {"overlap": True, "zero": 3, "grad_sync": "per-parameter"}),
    Strategy("dp4-tp2-sp-overlap", "dp=4,tp=2", {"overlap": True, "sp": True}),
    Strategy(
        "replica2-dp2-tp2-sp-zero3-overlap-accumulate-remat",
        "replica=2,dp=2,tp=2",
        {"overlap": True, "sp": True, "zero": 3, "accumulate": 2, "remat": "selective"},
        sample=True,
    ),
    Strategy("replica2-dp2-tp2-sp-zero2-overlap", "replica=2,dp=2,tp=2", {"overlap": True, "sp": True, "zero": 2}),
    Strategy("replica2-dp4-overlap-accumulate", "replica=2,dp=4", {"overlap": True, "accumulate": 2}),
    Strategy("replica2-dp4-zero1-overlap", "replica=2,dp=4", {"overlap": True, "zero": 1}),
    Strategy("dp2-tp2-zero3-overlap-1-layer", "dp=2,tp=2", {"overlap": True, "zero": 3}, num_layers=1),
    Strategy("dp4-zero3-overlap-2-layers", "dp=4", {"overlap": True, "zero": 3}, num_layers=2),
    Strategy("dp4-tp2-zero3-overlap-dropout-remat", "dp=4,tp=2", {"overlap": True, "zero": 3, "remat": "block"}, 0.2),
    Strategy("dp2-tp4-sp-zero1-overlap-dropout", "dp=2,tp=4", {"overlap": True, "sp": True, "zero": 1}, 0.2),
    Strategy("dp4-tp2-zero3-overlap-bf16", "dp=4,tp=2", {"overlap": True, "zero": 3}, dtype="bfloat16", sample=True),
    Strategy("dp4-overlap-fp16", "dp=4", {"overlap": True}, dtype="float16"),
    Strategy(
        "replica2-dp2-tp2-sp-zero3-overlap-fp64",
        "replica=2,dp=2,tp=2",
        {"overlap": True, "sp": True, "zero": 3, "accumulate": 2},
        dtype="float64",
    ),
    # Documents told apart: where each begins goes with the batch to every rank and stage.
    Strategy("dp2-tp2-sp-documents", "dp=2,tp=2", {"sp": True}, 0.1, mask_documents=True),
    Strategy(
        "dp4-zero3-overlap-accumulate-documents",
        "dp=4",
        {"zero": 3, "overlap": True, "accumulate": 2},
        mask_documents=True,
    ),
    Strategy("pp2-dp2-zb-v-documents", "pp=2,dp=2", {"schedule": "zb-v"}, mask_documents=True, sample=True),
    # Pairs and triples on 8 devices.
    Strategy("dp2-tp2", "dp=2,tp=2"),
    Strategy("dp2-tp4", "dp=2,tp=4"),
    Strategy("dp4-tp2-sp", "dp=4,tp=2", {"sp": True}),
    Strategy("dp4-tp2-zero1", "dp=4,tp=2", {"zero": 1}),
    Strategy("dp2-tp4-sp-zero1-flat", "dp=2,tp=4", {"sp": True, "zero": 1, "grad_sync": "flat"}),
    Strategy("dp4-tp2-sp-zero2", "dp=4,tp=2", {"sp": True, "zero": 2}),
    Strategy("dp4-tp2-zero3", "dp=4,tp=2", {"zero": 3}),
    Strategy("dp4-tp2-sp-zero3", "dp=4,tp=2", {"sp": True, "zero": 3}),
    Strategy("dp3-tp2-sp-zero3-padded", "dp=3,tp=2", {"sp": True, "zero": 3}),
    Strategy("replica2-dp2-tp2-sp-zero2", "replica=2,dp=2,tp=2", {"sp": True, "zero": 2}),
    Strategy("replica2-dp2-tp2-sp-zero3", "replica=2,dp=2,tp=2", {"sp": True, "zero": 3}),
    Strategy(
        "replica2-dp2-tp2-sp-zero3-accumulate-remat",
        "replica=2,dp=2,tp=2",
        {"sp": True, "zero": 3, "accumulate": 2, "remat": "selective"},
    ),
    # Collective matmuls: tp's gathers and scatters as rings.
    Strategy("tp2-sp-ring", "tp=2", {"sp": True, "tp_ring": "one-way"}),
    Strategy("tp8-sp-ring", "tp=8", {"sp": True, "tp_ring": "one-way"}),
    Strategy("tp8-sp-ring-two-way", "tp=8", {"sp": True, "tp_ring": "two-way"}),
    Strategy(
        "dp2-tp4-sp-ring-zero1-remat-dropout",
        "dp=2,tp=4",
        {"sp": True, "tp_ring": "one-way", "zero": 1, "remat": "block"},
        dropout=0.2,
    ),
    Strategy(
        "dp2-tp4-sp-ring-two-way-zero3-accumulate",
        "dp=2,tp=4",
        {"sp": True, "tp_ring": "two-way", "zero": 3, "accumulate": 2},
        sample=True,
    ),
    Strategy(
        "replica2-tp4-sp-ring-two-way-remat-every-2",
        "replica=2,tp=4",
        {"sp": True, "tp_ring": "two-way", "remat": "every-2"},
    ),
    Strategy("dp2-tp4-sp-ring-bf16", "dp=2,tp=4", {"sp": True, "tp_ring": "one-way"}, dtype="bfloat16"),
    Strategy("dp2-tp4-sp-ring-two-way-fp64", "dp=2,tp=4", {"sp": True, "tp_ring": "two-way"}, dtype="float64"),
    # Attention in blocks of scores.
    Strategy(
        "pp2-tp2-sp-zb-v-blocked", "pp=2,tp=2", {"sp": True, "attention": "blocked", "schedule": "zb-v"}, sample=True
    ),
    # The sequence split over cp: every way in which attention reaches all of it.
    Strategy("cp2", "cp=2"),
    Strategy("cp8", "cp=8"),
    Strategy("cp8-all-gather-zero3", "cp=8", {"cp_kind": "all-gather", "zero": 3}, sample=True),
    Strategy("cp8-ulysses", "cp=8", {"cp_kind": "ulysses"}),
    Strategy("cp8-usp-2", "cp=8", {"cp_kind": "usp-2"}, sample=True),
    Strategy("dp2-cp2-tp2-sp-documents", "dp=2,cp=2,tp=2", {"sp": True}, mask_documents=True, sample=True),
    Strategy("dp2-cp4-zero3-overlap", "dp=2,cp=4", {"zero": 3, "overlap": True}),
    Strategy(
        "replica2-cp2-tp2-sp-ring-ulysses-dropout",
        "replica=2,cp=2,tp=2",
        {"sp": True, "tp_ring": "one-way", "cp_kind": "ulysses"},
        dropout=0.2,
        sample=True,
    ),
    Strategy(
        "dp2-cp4-usp-2-zero2-accumulate-remat",
        "dp=2,cp=4",
        {"zero": 2, "cp_kind": "usp-2", "accumulate": 2, "remat": "every-2"},
    ),
    Strategy("pp2-cp4-zb-h1-zero1-remat", "pp=2,cp=4", {"schedule": "zb-h1", "zero": 1, "remat": "block"}, sample=True),
    Strategy("pp2-cp4-all-gather-zb-v", "pp=2,cp=4", {"cp_kind": "all-gather", "schedule": "zb-v"}),
    Strategy(
        "pp2-dp2-cp2-ulysses-zero3-loss-chunks",
        "pp=2,dp=2,cp=2",
        {"cp_kind": "ulysses", "zero": 3, "loss_chunks": 4, "overlap": True},
    ),
    Strategy("cp4-tp2-sp-bf16", "cp=4,tp=2", {"sp": True, "remat": "block"}, dtype="bfloat16"),
    Strategy("dp2-cp4-zero1-fp64", "dp=2,cp=4", {"zero": 1, "remat": "block"}, dtype="float64"),
    # Arrays of a layer, repeated by name: gathers and scatters of sp, gathered keys, what experts are sent and give.
    Strategy(
        "dp2-tp2-sp-zero3-remat-arrays",
        "dp=2,tp=2",
        {
            "sp": True,
            "zero": 3,
            "remat": "repeat:all_gather:rx16x64+dot_general:32rx64-64x128+reduce_scatter:2xrx16x64",
        },
        sample=True,
    ),
    Strategy(
        "cp2-tp2-sp-accumulate-remat-arrays",
        "cp=2,tp=2",
        {"sp": True, "accumulate": 2, "remat": "repeat:all_gather:rx8x64+name:rx16x4x8+dot_general:16rx64-64x96"},
    ),
    Strategy(
        "dp2-cp2-unrolled-remat-arrays-fp64",
        "dp=2,cp=2",
        {"unroll_layers": "yes", "cp_kind": "ulysses", "remat": "repeat:dot_general:16rx64-64x256"},
        dtype="float64",
    ),
    # The loss in chunks: gradients made while a chunk's logits are there, and its sums over tp in a loop.
    Strategy("loss-chunks-4", "", {"loss_chunks": 4}),
    Strategy("unrolled", "", {"unroll_layers": "yes"}),
    Strategy("cp4-unrolled", "cp=4", {"unroll_layers": "yes"}),
    Strategy(
        "dp2-tp2-sp-zero3-every2-unrolled",
        "dp=2,tp=2",
        {"zero": 3, "sp": True, "remat": "every-2", "unroll_layers": "yes"},
        sample=True,
    ),
    Strategy("dp4-tp2-sp-zero3-loss-chunks", "dp=4,tp=2", {"sp": True, "zero": 3, "loss_chunks": 2}),
    Strategy(
        "replica2-dp2-tp2-zero2-overlap-loss-chunks",
        "replica=2,dp=2,tp=2",
        {"zero": 2, "overlap": True, "loss_chunks": 8},
    ),
    Strategy("pp2-tp2-dp2-zero1-loss-chunks", "pp=2,tp=2,dp=2", {"zero": 1, "loss_chunks": 4}),
    Strategy(
        "dp2-zero1-loss-chunks-accumulate-bf16",
        "dp=2",
        {"zero": 1, "accumulate": 2, "loss_chunks": 4},
        dtype="bfloat16",
        sample=True,
    ),
    Strategy("dp2-tp2-loss-chunks-fp16", "dp=2,tp=2", {"loss_chunks": 4}, dtype="float16"),
    Strategy("dp2-tp4-sp-loss-chunks-fp64", "dp=2,tp=4", {"sp": True, "loss_chunks": 4}, dtype="float64"),
    # What the program itself has otherwise where a GPU's compiler makes elementwise work part of products.
    # Pipelines: every schedule once, and each thing that a pipeline could get wrong. All schedules: `PIPELINES` below.
    Strategy("pp2-gpipe", "pp=2", {"schedule": "gpipe", "microbatches": 6}),
    Strategy("pp4-1f1b", "pp=4", {"microbatches": 12}),
    Strategy("pp2-interleaved", "pp=2", {"schedule": "interleaved", "microbatches": 6}),
    Strategy("pp4-zb-h1", "pp=4", {"schedule": "zb-h1", "microbatches": 8}),
    Strategy("pp2-zb-v", "pp=2", {"schedule": "zb-v"}),
    Strategy("pp2-v-half-8-layers", "pp=2", {"schedule": "v-half", "microbatches": 8}, num_layers=8),
    Strategy("pp2-v-min-5-layers", "pp=2", {"schedule": "v-min"}, num_layers=5),
    Strategy("pp8-fewer-microbatches", "pp=8", {"microbatches": 3}, num_layers=8, sample=True),
    Strategy("pp4-uneven", "pp=4", {"stages": "1,3,3,1"}, num_layers=8, sample=True),
    Strategy("pp4-balanced", "pp=4", {"stages": "balanced"}, num_layers=13),
    Strategy("pp2-remat-block", "pp=2", {"remat": "block"}, num_layers=6, sample=True),
    Strategy("pp2-tp2-sp-remat-block", "pp=2,tp=2", {"sp": True, "remat": "block"}),
    Strategy("pp2-remat-every-2-of-3", "pp=2", {"remat": "every-2", "schedule": "zb-h1"}, num_layers=6, sample=True),
    Strategy("pp2-remat-chunk", "pp=2", {"remat": "chunk"}, num_layers=6),
    Strategy("pp2-cp2-remat-chunk-accumulate", "pp=2,cp=2", {"remat": "chunk", "accumulate": 2, "zero": 1}),
    Strategy(
        "pp2-dp2-tp2-sp-zero3-zb-v-remat-chunk",
        "pp=2,dp=2,tp=2",
        {"sp": True, "zero": 3, "schedule": "zb-v", "remat": "chunk"},
        dropout=0.2,
    ),
    Strategy(
        "pp4-zb-h1-overlap-remat-chunk-fp64",
        "pp=4,dp=2",
        {"schedule": "zb-h1", "stages": "1,2,1,1", "overlap": True, "remat": "chunk"},
        dtype="float64",
        num_layers=5,
        sample=True,
    ),
    Strategy("pp2-remat-selective-accumulate", "pp=2", {"remat": "selective", "accumulate": 3}),
    Strategy("pp2-dp2-tp2-sp-zero1", "pp=2,dp=2,tp=2", {"sp": True, "zero": 1}),
    Strategy("pp2-dp2-tp2-zero2-zb-v", "pp=2,dp=2,tp=2", {"zero": 2, "schedule": "zb-v"}),
    Strategy("pp2-dp2-tp2-sp-zero3", "pp=2,dp=2,tp=2", {"sp": True, "zero": 3}),
    Strategy(
        "pp2-dp2-zero3-keep-accumulate",
        "pp=2,dp=2",
        {"zero": 3, "reshard_after_forward": False, "accumulate": 2},
        sample=True,
    ),
    Strategy(
        "pp2-replica2-dp2-zero3-dropout", "pp=2,replica=2,dp=2", {"zero": 3, "remat": "block"}, dropout=0.2, sample=True
    ),
    Strategy("pp2-dp3-zero2-padded", "pp=2,dp=3", {"zero": 2, "schedule": "zb-h1"}),
    Strategy("pp2-tp4-sp-dropout", "pp=2,tp=4", {"sp": True, "schedule": "interleaved"}, dropout=0.2),
    Strategy("pp2-tp2-clipped-sgd", "pp=2,tp=2", {}, optimizer={"name": "sgd", "clip_norm": 0.1}),
    Strategy("pp2-dp2-tp2-zero1-bf16", "pp=2,dp=2,tp=2", {"zero": 1}, dtype="bfloat16"),
    Strategy("pp2-dp2-zero3-bf16", "pp=2,dp=2", {"zero": 3, "schedule": "zb-h1"}, dtype="bfloat16"),
    Strategy("pp2-dp2-tp2-fp16", "pp=2,dp=2,tp=2", {"schedule": "zb-v"}, dtype="float16"),
    Strategy("pp2-dp2-tp2-sp-zero3-fp64", "pp=2,dp=2,tp=2", {"sp": True, "zero": 3}, dtype="float64"),
    Strategy("pp4-zb-v-dropout-fp64", "pp=4,dp=2", {"schedule": "zb-v"}, dropout=0.2, dtype="float64", num_layers=8),
    # Messages between stages that travel while stages compute.
    Strategy("pp4-1f1b-overlap", "pp=4", {"microbatches": 12, "overlap": True}),
    Strategy(
        "pp2-dp2-tp2-sp-zero3-zb-v-overlap-remat",
        "pp=2,dp=2,tp=2",
        {"sp": True, "zero": 3, "schedule": "zb-v", "overlap": True, "remat": "block"},
        dropout=0.2,
        sample=True,
    ),
    Strategy(
        "pp4-zb-h1-overlap-uneven-fp64",
        "pp=4,dp=2",
        {"schedule": "zb-h1", "stages": "1,2,1,1", "overlap": True},
        dtype="float64",
        num_layers=5,
    ),
    Strategy(
        "pp2-tp2-interleaved-overlap-bf16",
        "pp=2,tp=2",
        {"schedule": "interleaved", "overlap": True},
        dtype="bfloat16",
        sample=True,
    ),
    # Dropout: the mask belongs to the token, not to the device.
    Strategy("dp2-tp2-dropout", "dp=2,tp=2", dropout=0.2),
    Strategy("dp2-tp4-sp-zero1-dropout", "dp=2,tp=4", {"sp": True, "zero": 1}, dropout=0.2),
    Strategy("dp4-tp2-zero3-dropout-remat", "dp=4,tp=2", {"zero": 3, "remat": "block"}, dropout=0.2),
    Strategy("dp2-tp2-dropout-accumulate", "dp=2,tp=2", {"accumulate": 4}, dropout=0.2),
    # Other update rules.
    Strategy("dp2-tp2-zero1-sgd", "dp=2,tp=2", {"zero": 1}, optimizer={"name": "sgd"}),
    Strategy("dp2-tp2-zero3-lion", "dp=2,tp=2", {"zero": 3}, optimizer={"name": "lion"}, sample=True),
    Strategy("dp4-adafactor", "dp=4", optimizer={"name": "adafactor"}, sample=True),
    Strategy("dp2-tp2-zero2-clipped", "dp=2,tp=2", {"zero": 2}, optimizer={"clip_norm": 0.1}, sample=True),
    # 16 bits, with tolerances of their own.
    Strategy("dp2-tp2-zero1-bf16", "dp=2,tp=2", {"zero": 1}, dtype="bfloat16"),
    Strategy("dp4-tp2-sp-zero3-bf16", "dp=4,tp=2", {"sp": True, "zero": 3}, dtype="bfloat16"),
    Strategy("dp4-zero2-bf16-reduced", "dp=4", {"zero": 2}, dtype="bfloat16", reduce_dtype="bfloat16", sample=True),
    Strategy("dp2-tp2-fp16", "dp=2,tp=2", dtype="float16"),
    Strategy("dp4-tp2-zero2-fp16", "dp=4,tp=2", {"zero": 2}, dtype="float16", sample=True),
    Strategy(
        "dp2-tp2-zero3-lion-bf16",
        "dp=2,tp=2",
        {"zero": 3},
        dtype="bfloat16",
        optimizer={"name": "lion"},
        num_layers=2,
        batch_size=8,
        sample=True,
    ),
    # 64 bits: rounding shrinks by nine orders of magnitude, a wrong reduction does not.
    Strategy("dp2-tp2-fp64", "dp=2,tp=2", dtype="float64"),
    Strategy("replica2-dp2-tp2-sp-zero3-fp64", "replica=2,dp=2,tp=2", {"sp": True, "zero": 3}, dtype="float64"),
    Strategy("dp3-zero2-padded-2-layers-fp64", "dp=3", {"zero": 2}, dtype="float64", num_layers=2, sample=True),
    Strategy("dp3-tp2-zero1-dropout-fp64", "dp=3,tp=2", {"zero": 1}, dropout=0.2, dtype="float64", sample=True),
]

# Mixtures of experts: the `moe-proof` preset, whose layers have 8 experts, auxiliary losses and counts.
CAPACITY = {"capacity": 1.0}
ROUNDS = {"exchange_room": 0.5}  # of which an exchange takes up to four
SHARED = {"router_score": "sigmoid", "routed_scale": 2.5, "shared_width": 64, "balance_rate": 0.01}
EXPERTS = [
    Strategy("moe-tp2-sp", "tp=2", {"sp": True}, preset="moe-proof"),
    Strategy("moe-ep2", "dp=2,ep=2", preset="moe-proof"),
    Strategy("moe-ep8-zero1", "dp=8,ep=8", {"zero": 1}, preset="moe-proof", model=CAPACITY),
    Strategy(
        "moe-dp4-ep2-zero2-accumulate", "dp=4,ep=2", {"zero": 2, "accumulate": 2}, preset="moe-proof", model=ROUNDS
    ),
    Strategy("moe-dp4-ep2-zero3", "dp=4,ep=2", {"zero": 3}, preset="moe-proof", model=SHARED),
    Strategy("moe-replica2-dp4-ep2-zero3", "replica=2,dp=4,ep=2", {"zero": 3}, preset="moe-proof", model=CAPACITY),
    Strategy("moe-dp4-ep4-tp2-sp", "dp=4,ep=4,tp=2", {"sp": True}, preset="moe-proof", model=CAPACITY | SHARED),
    Strategy("moe-tp4-experts-over-tp", "tp=4", {"sp": True, "experts_over_tp": True}, preset="moe-proof"),
    Strategy(
        "moe-dp2-ep2-tp2-zero3-experts-over-tp",
        "dp=2,ep=2,tp=2",
        {"sp": True, "zero": 3, "experts_over_tp": True},
        preset="moe-proof",
        model=CAPACITY | SHARED,
    ),
    Strategy(
        "moe-dp4-ep2-zero2-remat-arrays",
        "dp=4,ep=2",
        {"zero": 2, "remat": "repeat:custom_vjp_call:128rx64-4x64x64-4+name:128rx64+dot_general:32rx64-64x16"},
        preset="moe-proof",
    ),
    Strategy(
        "moe-dp2-ep2-zero3-bf16",
        "dp=2,ep=2",
        {"zero": 3},
        dtype="bfloat16",
        num_layers=2,
        batch_size=8,
        preset="moe-proof",
        model=CAPACITY | SHARED,
        sample=True,
    ),
    Strategy("moe-pp2-dp2-ep2-fp16", "pp=2,dp=2,ep=2", dtype="float16", preset="moe-proof", num_layers=2),
    Strategy("moe-dp2-cp2-ep4-zero3", "dp=2,cp=2,ep=4", {"zero": 3}, preset="moe-proof", model=CAPACITY),
    Strategy("moe-cp4-ep2-ulysses", "dp=2,cp=4,ep=2", {"cp_kind": "usp-2"}, preset="moe-proof"),
    Strategy("moe-dp4-ep2-zero3-overlap", "dp=4,ep=2", {"zero": 3, "overlap": True}, preset="moe-proof"),
    Strategy("moe-pp2-dp2-ep2-remat-chunk", "pp=2,dp=2,ep=2", {"zero": 2, "remat": "chunk"}, preset="moe-proof"),
    Strategy(
        "moe-pp2-dp2-ep2-zb-v", "pp=2,dp=2,ep=2", {"zero": 1, "schedule": "zb-v"}, preset="moe-proof", model=ROUNDS
    ),
    Strategy(
        "moe-pp2-dp2-ep2-tp2-every-other",
        "pp=2,dp=2,ep=2,tp=2",
        {"zero": 3, "sp": True, "remat": "block", "schedule": "zb-h1"},
        preset="moe-proof",
        model={"kinds": ("dense", "full")},
    ),
]


def pipeline_matrix() -> Iterator[Strategy]:
    """Every schedule x stages {2, 4, 8} x micro-batches {1, 2, S-1, S, 2S, a prime}.

    The rest of the eight devices, recomputation, dropout, layers that do not divide and overlap take turns over the
    rows. One sequence is a micro-batch on each data rank.
    """
    others = {
        2: [
            ("dp=2,tp=2", {"zero": 1, "sp": True}),
            ("dp=4", {"zero": 2}),
            ("dp=2,tp=2", {"zero": 3, "sp": True}),
            ("tp=4", {"sp": True}),
            ("replica=2,dp=2", {"zero": 3}),
            ("dp=2,tp=2", {"zero": 2}),
            ("tp=2", {}),
        ],
        4: [("dp=2", {"zero": 3}), ("tp=2", {"sp": True}), ("dp=2", {"zero": 1}), ("tp=2", {}), ("dp=2", {"zero": 2})],
        8: [("", {})],
    }
    remats, dropouts = ("none", "block", "selective", "every-2", "chunk"), (0.0, 0.0, 0.2)
    turn = count()
    for stages, schedule in product((2, 4, 8), NAMES):
        for micro in sorted({1, 2, stages - 1, stages, 2 * stages, {2: 7, 4: 5, 8: 11}[stages]}):
            index = next(turn)
            mesh, parallel = others[stages][index % len(others[stages])]
            mesh = ",".join(filter(None, [f"pp={stages}", mesh]))
            parts = stages * SCHEDULES[schedule].chunks
            parallel = {
                **parallel,
                "remat": remats[(index + index // 5) % 5],
                "schedule": schedule,
                "microbatches": micro,
            }
            parallel["overlap"] = index % 5 == 3
            shape = parse_mesh(mesh)
            yield Strategy(
                f"{schedule}-{mesh}-m{micro}" + "-overlap" * parallel["overlap"],
                mesh,
                parallel,
                dropout=dropouts[index % 3],
                num_layers=parts + (0, 1, parts)[index % 3],
                batch_size=micro * shape.dp * shape.replica,
            )


PIPELINES = list(pipeline_matrix())

BY_NAME = {strategy.name: strategy for strategy in (*STRATEGIES, *PIPELINES)}
