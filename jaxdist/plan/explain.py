"""Sentences about a searched plan, every number in them computed: what fits, what does not and why, what would help."""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from jaxdist.mesh import AXES, STATE_AXES
from jaxdist.models.declared import num_parameters
from jaxdist.parallel.named_arrays import shorten
from jaxdist.plan.hardware import GIB, Cluster
from jaxdist.plan.parts import exchanged, work_of
from jaxdist.plan.program_memory import ITEMSIZE, PHASES
from jaxdist.plan.search import (
    Candidates,
    Scored,
    best_of_each_mesh,
    layouts_of_mesh,
    legal_meshes,
    rank,
    score,
    usable_bytes,
)
from jaxdist.plan.time_model import UNCALIBRATED, Efficiency, calibrated
from jaxdist.strategy import TP_RINGS, ParallelConfig

STATE = ("parameters", "gradients", "optimizer")
NAMES_OF_TERMS = {
    "parameters": "parameters",
    "optimizer": "optimiser state",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits",
    "working": "working buffers",
}
LINKS = {"inside": "stays inside a node", "between": "runs between nodes", "both": "crosses nodes"}


def gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1000 * value:.2g} ms" if 1e-5 <= value < 0.01 else f"{1000 * value:.0f} ms"


def billions(count: float) -> str:
    """Tokens in words."""
    return f"{count / 1e9:,.4g} billion" if count >= 1e9 else f"{count / 1e6:,.4g} million"


def memory_terms(scored: Scored, index: int) -> str:
    """The terms of a device's bytes, largest first."""
    parts = {name: float(getattr(scored.memory, name)[index]) for name in NAMES_OF_TERMS}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in ordered if value > 0.005 * sum(parts.values())]
    return ", ".join(f"{NAMES_OF_TERMS[name]} {gib(value)}" for name, value in shown)


def explain(found: Scored, order: np.ndarray, attention: str, efficiency: Efficiency) -> list[str]:
    """Why the best layout of a search that fits is what it is."""
    best, layouts = int(order[0]), found.layouts
    mesh = layouts.mesh(best)
    sentences = [
        plain_data_parallel(found, best, attention, efficiency),
        *zero_and_recompute(found, best, attention, efficiency),
        *tensor_parallel(found, best, order, attention, efficiency),
        *pipeline(found, best),
        found.time.relief(best),
        f"Memory is fullest in {PHASES[found.memory.phase[best]]}: {memory_terms(found, best)}.",
        *context_parallel(found, best, order),
        *experts(found, best, order, attention, efficiency),
        close_by(found),
        error_bar(found, best, efficiency),
    ]
    links = {axis: link for axis, link in found.cluster.links_of(**_sizes(layouts, best)).items() if link != "none"}
    if links:
        where = "; ".join(f"{axis}={mesh.size(axis)} {LINKS[link]}" for axis, link in links.items())
        sentences.append(f"Communication: {where}.")
    return [sentence for sentence in sentences if sentence]


def _sizes(layouts, index: int) -> dict[str, int]:
    """Axis sizes of the devices' mesh."""
    return dict(zip(AXES, layouts.mesh(index).sizes, strict=True))


def plain_data_parallel(found: Scored, best: int, attention: str, efficiency: Efficiency) -> str:
    """Whether every device can hold the whole model, and if not, along which axis it is too big."""
    mesh = dict.fromkeys(AXES, 1) | {"dp": found.cluster.num_devices}
    if found.base.batch_size % found.cluster.num_devices:
        return "Plain data parallel: the batch cannot be divided over all devices."
    base = found.base
    blocks = layouts_of_mesh(base.model, mesh, base.batch_size, loss_chunks=base.parallel.loss_chunks)
    layouts = Candidates.join(blocks)
    plain = score(found.base, layouts.take(layouts.zero == 0), found.cluster, attention, efficiency)
    total, limit = plain.memory.total, usable_bytes(found.cluster)
    fits = np.flatnonzero(total <= limit)
    if len(fits):
        quickest = int(fits[plain.time.total[fits].argmin()])
        here, there = float(found.time.total[best]), float(plain.time.total[quickest])
        how = f"Plain data parallel fits ({gib(total[quickest])} of {gib(limit)} usable)"
        if there <= here * 1.005:
            return f"{how} and this is not faster: the model is not too big and need not be split."
        return (
            f"{how} and takes {seconds(there)} a step, {there / here - 1:.0%} more: the model is not too big for a "
            "device, plain replicas are slower."
        )
    least = int(total.argmin())
    parts = {name: float(getattr(plain.memory, name)[least]) for name in NAMES_OF_TERMS}
    state = sum(parts[name] for name in STATE)
    alone = [NAMES_OF_TERMS[name] for name in NAMES_OF_TERMS if parts[name] > limit]
    if alone:
        listed = f"{', '.join(alone[:-1])} and {alone[-1]} each need" if alone[1:] else f"{alone[0]} alone needs"
        along = f"{listed} more than that"
    elif state > limit:
        along = f"parameters, gradients and optimiser state together take {gib(state)}, none of them alone too much"
    else:
        along = f"parameters, gradients and optimiser state fit ({gib(state)}), activations, logits and buffers do not"
    return (
        f"Plain data parallel does not fit: with recompute and the smallest micro-batch a device needs "
        f"{gib(total[least])} of {gib(limit)} usable ({memory_terms(plain, least)}). It is too big, not too slow: "
        f"{along}."
    )


def _variant(
    found: Scored, index: int, attention: str, efficiency: Efficiency, cluster: Cluster | None = None, **changes: int
) -> Scored:
    """One layout with some of its columns changed, scored."""
    one = found.layouts.take(slice(index, index + 1))
    one = replace(one, **{name: np.array([value]) for name, value in changes.items()})
    return score(found.base, one, cluster or found.cluster, attention, efficiency)


RECOMPUTED = ("every", "selective", "recompute", "repeats")  # the columns that say what is


def zero_and_recompute(found: Scored, best: int, attention: str, efficiency: Efficiency) -> list[str]:
    """What ZeRO and recomputation each buy in the best layout."""
    c, limit, sentences = found.layouts, usable_bytes(found.cluster), []
    here = found.memory.total[best]
    if c.zero[best]:
        other = _variant(found, best, attention, efficiency, zero=0, keep=0)
        shards = ", ".join(f"{a}={getattr(c, a)[best]}" for a in STATE_AXES if getattr(c, a)[best] > 1)
        needed = "it would not fit" if other.memory.total[0] > limit else "it would still fit"
        sentences.append(
            f"ZeRO-{c.zero[best]} over {shards} brings a device from {gib(other.memory.total[0])} to "
            f"{gib(here)} (without it {needed}), and the step from {seconds(other.time.total[0])} to "
            f"{seconds(found.time.total[best])}."
        )
    recomputed = {
        "the attention core": c.selective[best],
        "blocks": c.every[best],
        "chunks": c.recompute[best],
        "the arrays that --remat names": c.repeats[best],
    }
    what = next((name for name, asked in recomputed.items() if asked), None)
    if what:
        other = _variant(found, best, attention, efficiency, **dict.fromkeys(RECOMPUTED, 0))
        sentences.append(
            f"Recomputing {what} brings a device from "
            f"{gib(other.memory.total[0])} to {gib(here)} and costs "
            f"{seconds(float(found.time.total[best] - other.time.total[0]))} a step."
        )
    elif attention == "cudnn":
        sentences.append("Nothing is recomputed; flash attention never keeps the scores.")
    return sentences


def tensor_parallel(found: Scored, best: int, order: np.ndarray, attention: str, efficiency: Efficiency) -> list[str]:
    """Why tp is as large as it is, and what it would take across nodes."""
    c, limit = found.layouts, usable_bytes(found.cluster)
    tp = int(c.tp[best])
    if tp == 1:
        others = order[(c.tp[order] > 1) & (found.memory.total[order] <= limit)]
        if not len(others):
            return []
        other = int(others[0])
        return [
            f"tp=1: the fastest layout with tp>1 (tp={c.tp[other]}) takes {seconds(found.time.total[other])} a step, "
            f"{seconds(found.time.tp[other])} of it tp's all-reduces; there is no need to pay them."
        ]
    inside = found.cluster.link_of(tp, 1) == "inside"
    if not inside:
        taken = f"tp={tp} leaves the node: its collectives take {seconds(found.time.tp[best])} a step"
        return [f"{taken}. A tp that divides {found.cluster.devices_per_node} stays inside one."]
    apart = replace(found.cluster, devices_per_node=1, num_nodes=found.cluster.num_devices)
    other = _variant(found, best, attention, efficiency, cluster=apart)
    return [
        f"tp={tp}: its collectives take {seconds(found.time.tp[best])} a step inside the node; between nodes "
        f"they would take {seconds(other.time.tp[0])}."
    ]


PARTS_IN_WORDS = {
    "compute": "computation",
    "memory": "memory traffic",
    "tp": "what tp sends",
    "cp": "what cp sends",
    "ep": "what experts exchange",
    "dp": "gradients and weights",
    "pp": "messages between stages",
    "bubble": "the bubble",
}


def context_parallel(found: Scored, best: int, order: np.ndarray) -> list[str]:
    """What splitting the sequence buys against tp, sp and recomputation, where both were searched."""
    c, cp = found.layouts, int(found.layouts.cp[best])
    others = order[(c.cp[order] > 1) != (cp > 1)]
    if not len(others):
        return []
    fitting = others[found.fits[others]]
    if not len(fitting):
        least = others[np.argmin(found.memory.total[others])]
        fits = f"no layout with{'out' if cp > 1 else ''} cp fits: the smallest, {_named(found, least)}, needs"
        return [f"cp={cp}: {fits} {gib(found.memory.total[least])}."]
    other = int(fitting[0])
    spent = [{name: float(getattr(found.time, name)[i]) for name in PARTS_IN_WORDS} for i in (best, other)]
    most = max(PARTS_IN_WORDS, key=lambda name: spent[1][name] - spent[0][name])
    return [
        f"cp={cp}: the fastest layout with{'out' if cp > 1 else ''} cp that fits, {_named(found, other)}, takes "
        f"{seconds(found.time.total[other])} a step; most of the difference is {PARTS_IN_WORDS[most]}, "
        f"{seconds(spent[1][most])} for {seconds(spent[0][most])}."
    ]


def _named(found: Scored, index: int) -> str:
    """Mesh, kind of cp, sp, rings and recomputation, as one would ask for them."""
    parallel = found.layouts.parallel(int(index), found.base.parallel)
    kind = f", {parallel.cp_kind}" if parallel.mesh.cp > 1 else ""
    over_tp = ", experts over tp" * parallel.experts_over_tp
    return f"{parallel.mesh}{kind}{', sp' if parallel.sp else ''}{', rings' if parallel.ring else ''}{over_tp}" + (
        f", remat {shorten(parallel.remat)}" if parallel.remat != "none" else ""
    )


def experts(found: Scored, best: int, order: np.ndarray, attention: str, efficiency: Efficiency) -> list[str]:
    """What a token uses of a mixture's parameters, what its exchange sends, and what gathering experts would take."""
    model, c = found.base.model, found.layouts
    work, here = work_of(model), seconds(float(found.time.total[best]))
    ranks = c.parallel(best, found.base.parallel).expert_ranks
    ep, of_tp = int(c.ep[best]), ranks // int(c.ep[best])
    if work.experts == 1:
        return []
    chosen = max(p.rows for p in work.layer)  # slots of a token where capacity leaves some empty
    total, each = num_parameters(model), work.num_layers * work.expert_parameters
    active = total - each * max(1 - getattr(model, "top_k", chosen) / work.experts, 0)
    sentences = [f"A token uses {billions(active)} of {billions(total)} parameters; {billions(each)} are of experts."]
    if ranks == 1:
        others = order[(c.ep[order] > 1) & found.fits[order]]
        if len(others):
            there = seconds(float(found.time.total[others[0]]))
            sentences.append(
                "ep=1: experts are held, or gathered by ZeRO, as other parameters are. The fastest layout that sends "
                f"tokens to them, ep={c.ep[others[0]]}, takes {there} a step for {here}."
            )
        return sentences
    slots = exchanged(model, ranks)
    even = 2 * chosen * work.width / slots
    positions = c.rows[best] * model.seq_len / c.cp[best] / of_tp * c.accumulate[best] * c.microbatches[best]
    passes = (2 + (c.every[best] > 0)) * np.ceil(work.num_layers / c.pp[best])
    sent = slots * positions * passes * (ranks - 1) / ranks * ITEMSIZE[found.base.precision.dtype]
    over = f"ep={ep}" + f" x tp={of_tp}" * (of_tp > 1)
    said = f"{over} sends tokens to experts: {gib(sent)} a step and device, {seconds(float(found.time.ep[best]))}. "
    if getattr(model, "capacity", None) is None:
        said += f"Where loads are even {even:.0%} of that is of chosen tokens, and the rest is padding; "
        rounds = math.ceil(2 * even)
        said += "where one rank is sent twice its share, "
        said += f"{rounds} rounds send {rounds} times as much." if rounds > 1 else f"{2 * even:.0%}."
    else:
        said += "It is of the slots that its capacity gives every expert, chosen or not."
    if ep > 1:
        without = _variant(found, best, attention, efficiency, ep=1)
        fits = "fits too" if without.fits[0] else f"needs {gib(without.memory.total[0])}, which does not fit"
        taken = seconds(float(without.time.total[0]))
        said += f" With ep=1 the step takes {taken} for {here}, and {fits}."
    return [*sentences, said]


def pipeline(found: Scored, best: int) -> list[str]:
    c = found.layouts
    if c.pp[best] == 1:
        return []
    exposed, schedule = float(found.time.pp[best]), c.schedule_name(best, found.base.parallel)
    sends = f"{seconds(exposed)} of messages a step" if exposed >= 5e-4 else "its messages are hidden"
    return [
        f"pp={c.pp[best]} ({schedule}, {c.microbatches[best]} micro-batches a pass): {sends}, "
        f"{seconds(found.time.bubble[best])} idle ({found.time.bubble[best] / found.time.total[best]:.0%})."
    ]


def error_bar(found: Scored, index: int, efficiency: Efficiency) -> str:
    total, error = float(found.time.total[index]), float(found.time.error[index])
    hardware = found.cluster.hardware
    fitted = efficiency.stack != UNCALIBRATED.stack
    guessed = "" if fitted else ", and none of any program: its efficiencies are guesses"
    measured = hardware.measured if efficiency == calibrated(hardware) else ""
    known = measured or f"no run of this program on this hardware has been calibrated{guessed}"
    low = f"{seconds(total * (1 - error))} to" if error < 1 else "at most"
    return (
        f"Predicted, not measured: {seconds(total)} ± {error:.0%}, so {low} "
        f"{seconds(total * (1 + error))} a step; {known}."
    )


# Of pairs of published runs of one model on H100, both left out of the fit, that are predicted less than this apart,
# this part is in the published order; and from the other difference on (`python -m experiments.calibration.sources`).
CLOSE, CLOSE_IN_ORDER = 0.05, 0.85
FAR, FAR_IN_ORDER = 0.20, 0.975


def close_by(found: Scored) -> str:
    """How many other meshes a prediction cannot tell from the fastest."""
    meshes = best_of_each_mesh(found, rank(found)[: int(found.fits.sum())])
    close = int((found.time.total[meshes[1:]] < (1 + CLOSE) * found.time.total[meshes[:1]]).sum())
    if not close:
        return ""
    which = "Another mesh is" if close == 1 else f"{close} other meshes are"
    return (
        f"{which} predicted less than {CLOSE:.0%} slower than the fastest and cannot be told from it: of two published "
        f"runs on H100 the one predicted faster was so in {CLOSE_IN_ORDER:.0%} of the cases less than {CLOSE:.0%} "
        f"apart, and in {FAR_IN_ORDER:.0%} of those {FAR:.0%} apart and more."
    )


def nothing_fits(found: Scored, nearest: Callable[[], str]) -> tuple[str, str, str]:
    """(asked, required and why, what would work) for a search in which no layout fits."""
    limit, index = usable_bytes(found.cluster), int(rank(found)[0])
    total = float(found.memory.total[index])
    layouts = found.layouts
    rows = f"{layouts.rows[index]} sequences a micro-batch"
    return (
        f"{found.cluster.num_devices} × {found.cluster.hardware.name} for this model and batch",
        f"no layout fits in the {gib(limit)} of a device that are usable: the smallest (--mesh {layouts.mesh(index)} "
        f"--zero {layouts.zero[index]} --remat {layouts.remat(index)}, {rows}) needs "
        f"{gib(total)}, {gib(total - limit)} too much ({memory_terms(found, index)})",
        nearest(),
    )


# Settings of a layout that one flag, or a few that go together, change, by the columns they are.
SETTINGS = {
    "ZeRO": ("zero", "keep"),
    "recomputation": ("every", "selective", "recompute", "repeats"),
    "the cut of the batch": ("microbatches", "accumulate", "rows"),
    "the schedule": ("schedule", "chunks", "last"),
    "sp": ("sp", "ring"),
    "the kind of cp": ("kind",),
    "overlap": ("overlap",),
}


MOVED_TO = ("dp", "tp", "pp", "cp")  # axes that are made larger, in the order in which they are tried


def what_would_fit(found: Scored, attention: str, efficiency: Efficiency) -> str:
    """The two nearest layouts that fit in place of one that does not, on its mesh, or on one in which an axis, or a
    factor of it, goes to another: those with fewest settings changed, the fastest of these."""
    mesh = asdict(found.layouts.mesh(0))
    near, changed = _near(found, mesh, attention, efficiency)
    if not len(near):
        pairs = [(a, b, p) for a in MOVED_TO for b in AXES for p in sorted({2, 3, mesh[b]} - {1}) if a != b]
        moved = [dict(mesh, ep=mesh["ep"] * p) for p in (2, 4, 8)]  # which adds no devices
        moved += [dict(mesh, **{a: mesh[a] * p, b: mesh[b] // p}) for a, b, p in pairs]
        base, devices = found.base, found.cluster.num_devices
        legal = legal_meshes(base.model, devices, base.batch_size, base.optimizer.name)
        tried = (_near(found, each, attention, efficiency) for each in moved if each in legal)
        fitting = list(itertools.islice((each for each in tried if len(each[0])), 2))
        near = Scored.join([near, *(some for some, _ in fitting)])
        changed = np.concatenate([changed, *(settings for _, settings in fitting)])
    if not len(near):
        return "No layout of that mesh or one beside it does: leave --mesh out to search all."
    first, *others = map(int, np.lexsort((near.time.total, changed.sum(1))))
    mesh, layouts = near.layouts.mesh(first), near.layouts
    second = [i for i in others if (changed[i] & ~changed[first]).any() or layouts.mesh(i) != mesh][:1]
    return " ".join(
        f"{layout_flags(near, i)} would, with {gib(near.memory.total[i])} and {seconds(near.time.total[i])} a step."
        for i in (first, *second)
    )


def _near(found: Scored, mesh: dict[str, int], attention: str, efficiency: Efficiency) -> tuple[Scored, np.ndarray]:
    """Layouts of a mesh that fit and change as few settings as any that fit, or one more; which ones those are."""
    base, here, chunks = found.base, found.layouts, found.base.parallel.loss_chunks
    blocks = layouts_of_mesh(
        base.model, mesh, base.batch_size, base.optimizer.name, attention=attention, loss_chunks=chunks
    )
    layouts = Candidates.join([here.take(slice(0)), *blocks])
    columns = [
        np.logical_or.reduce([getattr(layouts, name) != getattr(here, name)[0] for name in names])
        for names in SETTINGS.values()
    ]
    changed = np.stack(columns, axis=1)
    fit, which = found.take(slice(0)), changed[:0]
    for number in range(len(SETTINGS) + 1):
        if not len(index := np.flatnonzero(changed.sum(1) == number)):
            continue
        enough, scored = len(fit) > 0, score(base, layouts.take(index), found.cluster, attention, efficiency)
        fit, which = Scored.join([fit, scored.take(scored.fits)]), np.concatenate([which, changed[index][scored.fits]])
        if enough:
            break
    return fit, which


def layout_flags(found: Scored, index: int) -> str:
    """The flags that name one layout of a search."""
    c = found.layouts
    words = [
        f"--mesh {c.mesh(index)} --zero {c.zero[index]} --remat {c.remat(index)} --accumulate {c.accumulate[index]}"
    ]
    words += [f"--cp-kind {c.cp_kind(index, found.base.parallel)}"] * int(c.cp[index] > 1 and c.kind[index] > 0)
    words += ["--sp"] * int(c.sp[index]) + [f"--tp-ring {TP_RINGS[c.ring[index]]}"] * int(c.ring[index] > 0)
    words += ["--overlap"] * int(c.overlap[index])
    words += [f"--loss-chunks {c.loss_chunks[index]}"] * int(c.loss_chunks[index] > 1)
    words += ["--no-reshard-after-forward"] * int(c.keep[index])
    words += ["--experts-over-tp"] * int(c.over_tp[index])
    if c.pp[index] > 1:
        schedule = c.schedule_name(index, found.base.parallel)
        words += [f"--schedule {schedule} --microbatches {c.microbatches[index]}"]
        words += [f"--chunks {c.chunks[index]}"] * (schedule == "interleaved")
        stages = c.stages(index, found.base.parallel)
        words += [f"--stages {stages}"] * (stages != ParallelConfig.stages)
    return " ".join(words)
