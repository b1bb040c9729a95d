"""Published step times of mixtures of experts beside predictions by constants that were fitted to none of them.

`python -m experiments.calibration.mixtures` prints a line a run, worst first. All are of Megatron Core's; the model is
ours of that shape, as a plan has it, and the layout is their program's.
"""

import tomllib
from pathlib import Path

import numpy as np

from jaxdist.models.decoder import DecoderConfig
from jaxdist.plan.parts import work_of
from jaxdist.plan.time_model import Layout, Repeated, efficiency_of, step_time

from .runs import cluster_of, mean_and_max
from .sources import MEGATRON_CORE, LeftOut, bar, table


def runs() -> list[tuple[str, DecoderConfig, dict]]:
    """(group, model, what is printed) of every run of mixtures.toml."""
    table, found = tomllib.loads(Path(__file__).with_name("mixtures.toml").read_text(encoding="utf-8")), []
    shapes = table.pop("shapes")
    for name, group in table.items():
        for run in group["runs"]:
            facts = group["defaults"] | dict(zip(group["columns"], run, strict=True))
            sizes = shapes[group["shape"]]
            sizes |= {key: facts[key] for key in ("num_layers", "seq_len") if key in facts}
            found.append((name, DecoderConfig(**sizes), facts))
    return found


def layout_of(model: DecoderConfig, facts: dict) -> Layout:
    """Megatron Core's: every rank of tp sends its own part of a sequence to its experts, each position `top_k` times,
    and back; where tp has parts of an expert it gathers and scatters what came, beside no product."""
    tp, top_k = facts["tp"], model.top_k
    dp = facts["gpus"] // (tp * facts["pp"] * facts["cp"])
    whole = facts["etp"] == 1
    work = work_of(model)
    mixtures = 0 if whole else work.mixture_sums
    # Of a gather, or a scatter, in tp chunks all but one has a matmul beside it.
    sent = (work.layer_sums - work.mixture_sums) / tp + mixtures * top_k
    return Layout(
        **{axis: facts[axis] for axis in ("tp", "pp", "cp", "rows", "chunks")},
        dp=dp,
        ep=facts["ep"] // tp if whole and tp > 1 else facts["ep"],  # of dp's and cp's ranks
        experts_over_tp=whole and tp > 1,
        exchanged=2 * top_k * model.width / tp,
        microbatches=facts["batch"] // (dp * facts["rows"]),
        sp=tp > 1,
        **MEGATRON_CORE,
        overlap_tp=1 - sent / (work.layer_sums - work.mixture_sums + mixtures),
        gradient_bytes=2,
        repeated=Repeated(num_bytes=_casts(model, tp, facts["etp"]) if facts["dtype"] == "float8" else 0.0),
    )


def _casts(model: DecoderConfig, tp: int, etp: int) -> float:
    """As `sources._casts`; every chosen expert reads a position, and writes one."""
    h, f, chosen = model.width, model.width_of_expert, model.top_k / (1 if etp == tp else tp)
    heads = model.num_heads * model.head_dim / tp
    inputs = h + heads + chosen * (h + f / etp)
    results = h + heads + 2 * model.num_kv_heads * model.head_dim / tp + chosen * (h + 2 * f / etp)
    return (2 + 1 + 1) * (inputs + results)


def predicted() -> list[LeftOut]:
    """Every run, by the constants of a plan."""
    found = []
    for name, model, facts in runs():
        card = facts.get("card", "h100")
        cluster = cluster_of(card, facts["gpus"])
        time = step_time(work_of(model), layout_of(model, facts), cluster, efficiency_of(card), facts["dtype"])
        total = float(np.max(time.total))
        sizes = ", ".join(f"{key} {facts[key]}" for key in ("gpus", "tp", "pp", "cp", "ep", "etp", "rows", "batch"))
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


def main() -> None:
    rows = predicted()
    print(summary(rows), f"Nine tenths, every model with the same weight: ±{bar(rows):.0%}", table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
