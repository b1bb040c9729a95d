"""Where the bytes are: 7 billion parameters are 112 GB before the first activation, and then which term is the peak."""

import dataclasses

from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.plan.formulas import RECIPES
from jaxdist.plan.program_memory import TERMS

from . import drawing
from .lab import Findings, Guesses, Picture, equal, lab, table
from .tools import compiled_levels, planned_bytes, small_run

BILLION = 7e9
# Adam in mixed precision, one array at a time: (name, bytes of each parameter).
STEPS = (
    ("weights that compute, bf16", 2),
    ("gradients, bf16", 2),
    ("master weights, fp32", 4),
    ("Adam's first moment, fp32", 4),
    ("Adam's second moment, fp32", 4),
)
SMALL = dataclasses.replace(
    PRESETS["proof"], num_layers=8, width=256, ffn_width=1024, num_heads=4, seq_len=128, vocab_size=250
)
WIDE_VOCABULARY = dataclasses.replace(SMALL, vocab_size=16_000)
# What is compiled and held against the plan: (name, model, settings).
CASES = (
    ("batch 1, AdamW", SMALL, {"batch_size": 1}),
    ("batch 8, AdamW", SMALL, {"batch_size": 8}),
    ("batch 8, recomputing layers", SMALL, {"batch_size": 8, "remat": "block"}),
    ("batch 8, 16,000 tokens in the vocabulary", WIDE_VOCABULARY, {"batch_size": 8}),
    ("the same, loss in 8 chunks", WIDE_VOCABULARY, {"batch_size": 8, "loss_chunks": 8}),
    ("the same, Adafactor", WIDE_VOCABULARY, {"batch_size": 8, "loss_chunks": 8, "optimizer": "adafactor"}),
)
# Real sizes, planned, not compiled: (name, preset, settings).
REAL = (
    ("124M, batch 16", "gpt2-124m", {"batch_size": 16}),
    ("1.5B, batch 4", "gpt2-1.5b", {"batch_size": 4}),
    ("7B, batch 1, tp=8", "7b", {"batch_size": 1, "mesh": "tp=8"}),
    ("7B, batch 8, tp=8", "7b", {"batch_size": 8, "mesh": "tp=8"}),
    ("8B, batch 8, tp=8, recomputing", "llama3-8b", {"batch_size": 8, "mesh": "tp=8", "remat": "block"}),
)


@lab(
    title="Where the bytes are",
    question="Why do 7 billion parameters take 112 GB to train, and which term is the peak after that?",
    breaks={
        "masters": {"7B in mixed precision, GB", "bytes a parameter kept*"},
        "logits": {"planned peak, batch 8, 16,000 tokens*"},
    },
)
def run(broken: str | None) -> Findings:
    kept = {name: size for name, size in STEPS if not (broken == "masters" and "master" in name)}
    stored = compiled_levels(small_run(model=SMALL, dtype="bfloat16")).state / num_parameters(SMALL)  # no gradients
    between = sum(size for name, size in kept.items() if "gradient" not in name)
    yield equal("7B in mixed precision, GB", sum(kept.values()) * BILLION / 1e9, 112, unit="GB")
    yield equal("bytes a parameter kept between steps, counted and in the program", between, stored, within=0.01)
    peaks = []
    for name, model, settings in CASES:
        config = small_run(model=model, **settings)
        terms = planned_bytes(config) | ({"logits": 0.0} if broken == "logits" else {})
        cells = [each / 2**20 for each in (*terms.values(), sum(terms.values()), compiled_levels(config).compiled.peak)]
        yield equal(f"planned peak, {name}", cells[-2], cells[-1], within=0.1, unit="MiB")
        peaks.append([name, *cells])
    if broken:
        return

    real = {
        name: planned_bytes(small_run(model=PRESETS[preset], dtype="bfloat16", **settings))
        for name, preset, settings in REAL
    }
    gigabytes = [[n, *[x / 1e9 for x in t.values()], sum(t.values()) / 1e9, max(t, key=t.get)] for n, t in real.items()]
    arrays = [
        [name, size, size * BILLION / 1e9, sum(each for _, each in STEPS[: n + 1]) * BILLION / 1e9]
        for n, (name, size) in enumerate(STEPS)
    ]
    recipes = [
        [name, each.parameter, each.gradient, each.optimizer, each.total, each.total * BILLION / 1e9]
        for name, each in RECIPES.items()
    ]
    mib, gb = (
        " | ".join(f"{term} {{:,.1f}}" for term in (*TERMS, *more)) for more in (("planned", "compiled"), ("total",))
    )
    kinds = "parameters {:g} | gradients {:g} | optimiser {:g} | bytes a parameter {:g} | GB for 7B {:,.1f}"
    stacked = {term: [t[term] / 1e9 for t in real.values()] for term in TERMS}
    yield table("steps", "array | bytes a parameter | GB for 7B {:,.1f} | so far {:,.1f}", arrays)
    yield table("recipes", f"recipe | {kinds}", recipes)
    yield table("peaks", f"run | {mib}", peaks)
    yield table("real", f"run, bf16, GB a device | {gb} | largest", gigabytes)
    title = "Memory of a device by term (planned)"
    yield Picture("terms", lambda: drawing.stacks(title, "GB", list(real), stacked))
    logits = 8 * 2048 * 128_256 * 4 / 1e9
    yield Guesses(seven=112, share=75, lion=RECIPES["mixed-lion"].total, logits=logits)
