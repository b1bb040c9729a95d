"""Published step times of experts and of fine-tuning beside predictions by constants that were fitted to none of them.

`python -m experiments.calibration.traced` prints a line a run, worst first. The model is ours of that shape, traced as
a plan traces it, and the layout is their program's.
"""

import tomllib
from pathlib import Path
from typing import cast

import numpy as np

from jaxdist.models.base import Model
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.lora import LoRA
from jaxdist.plan.parts import work_of
from jaxdist.plan.time_model import Layout, Repeated, efficiency_of, kind_of, step_time

from .runs import cluster_of, mean_and_max
from .sources import MEGATRON_CORE, LeftOut, bar, table

SIZES = ("gpus", "tp", "pp", "cp", "ep", "etp", "rows", "batch")


def runs() -> list[tuple[str, Model, dict]]:
    """(group, model, what is printed) of every run of traced.toml."""
    table, found = tomllib.loads(Path(__file__).with_name("traced.toml").read_text(encoding="utf-8")), []
    shapes, common = table.pop("shapes"), table.pop("defaults")
    for name, group in table.items():
        for run in group["runs"]:
            facts = common | group["defaults"] | dict(zip(group["columns"], run, strict=True))
            sizes = shapes[facts["shape"]] | {key: facts[key] for key in ("num_layers", "seq_len") if key in facts}
            model: Model = DecoderConfig(**sizes)
            if "lora" in facts:
                model = LoRA(model, rank=16, alpha=32, targets=tuple(facts["lora"]))
            found.append((name, model, facts))
    return found


def sizes_of(model: Model) -> DecoderConfig:
    """A model's, or those of the one that adapters are around."""
    return cast(DecoderConfig, model.base if isinstance(model, LoRA) else model)


def layout_of(model: Model, facts: dict) -> Layout:
    """FSDP's, or Megatron Core's: every rank of tp sends its own part of a sequence to its experts, each position
    `top_k` times, and back; where tp has parts of an expert it gathers and scatters what came, beside no product."""
    sizes = sizes_of(model)
    tp, top_k = facts["tp"], sizes.top_k if sizes.num_experts else 0
    dp = facts["gpus"] // (tp * facts["pp"] * facts["cp"])
    whole = top_k and facts["etp"] == 1
    work = work_of(model)
    if facts["fsdp"]:
        words = {name: facts[name] for name in ("tp", "ep", "rows", "remat", "sp")}
        times = {"dp": dp, "microbatches": facts["batch"] // (dp * facts["rows"])}
        return Layout(**words, **times, exchanged=2 * top_k * sizes.width, zero=3, flash=True, gradient_bytes=2)
    mixtures = 0 if whole else work.mixture_sums
    # Of a gather, or a scatter, in tp chunks all but one has a matmul beside it.
    sent = (work.layer_sums - work.mixture_sums) / tp + mixtures * top_k
    return Layout(
        **{axis: facts[axis] for axis in ("tp", "pp", "cp", "rows", "chunks")},
        dp=dp,
        ep=facts["ep"] // tp if whole and tp > 1 else facts["ep"],  # of dp's and cp's ranks
        experts_over_tp=bool(whole and tp > 1),
        exchanged=2 * top_k * sizes.width / tp,
        microbatches=facts["batch"] // (dp * facts["rows"]),
        sp=tp > 1,
        **MEGATRON_CORE,
        overlap_tp=1 - sent / (work.layer_sums - work.mixture_sums + mixtures),
        gradient_bytes=2,
        repeated=Repeated(num_bytes=_casts(model, tp, facts["etp"]) if facts["dtype"] == "float8" else 0.0),
    )


def _casts(model: Model, tp: int, etp: int) -> float:
    """As `sources._casts`; every chosen expert reads a position, and writes one. Where matrices are frozen nothing is
    multiplied transposed."""
    sizes, frozen = sizes_of(model), isinstance(model, LoRA)
    h, f, chosen = sizes.width, sizes.ffn_width / tp, 1.0
    if sizes.num_experts:
        f, chosen = sizes.width_of_expert / etp, sizes.top_k / (1 if etp == tp else tp)
    heads = sizes.num_heads * sizes.head_dim / tp
    inputs = h + heads + chosen * (h + f)
    results = h + heads + 2 * sizes.num_kv_heads * sizes.head_dim / tp + chosen * (h + 2 * f)
    return (2 + 1 + (not frozen)) * (inputs + results)


def predicted() -> list[LeftOut]:
    """Every run, by the constants of a plan."""
    found = []
    for name, model, facts in runs():
        card = facts["card"]
        cluster = cluster_of(card, facts["gpus"])
        time = step_time(work_of(model), layout_of(model, facts), cluster, efficiency_of(card), facts["dtype"])
        total = float(np.max(time.total))
        sizes = ", ".join(f"{key} {facts[key]}" for key in SIZES)
        found.append(
            LeftOut(
                source=name,
                name=f"{model.num_layers} layers, {sizes}, {facts['dtype']}",
                published=facts["seconds"],
                predicted=total,
                exposed=float(np.max(time.communication)) / total,
                model=(card, model, facts["dtype"]),
                a_token=facts["gpus"] / (facts["batch"] * model.seq_len),
            )
        )
    return found


def summary(rows: list[LeftOut]) -> str:
    """Markdown: a line for each group and dtype, and one of all."""
    lines = ["| runs | dtype | rows | mean | 90 % within | signed |", "|---|---|--:|--:|--:|--:|"]
    kinds = dict.fromkeys((row.source, row.model[2]) for row in rows)
    for source, dtype in (*kinds, ("**all**", "")):
        errors = [row.error for row in rows if dtype == "" or (row.source, row.model[2]) == (source, dtype)]
        within = np.quantile(np.abs(errors), 0.9)
        mean, _ = mean_and_max(errors)
        lines.append(f"| {source} | {dtype} | {len(errors)} | {mean:.1%} | {within:.1%} | {np.mean(errors):+.1%} |")
    return "\n".join(lines)


def bars(rows: list[LeftOut]) -> str:
    """What bar nine tenths of each kind need, every group with the same weight."""
    kinds: dict[str, list[LeftOut]] = {}
    for row in rows:
        kinds.setdefault(kind_of(work_of(row.model[1])), []).append(row)
    return "Nine tenths: " + ", ".join(f"{kind} ±{bar(some):.0%} of {len(some)}" for kind, some in kinds.items())


def main() -> None:
    rows = predicted()
    print(summary(rows), bars(rows), table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
