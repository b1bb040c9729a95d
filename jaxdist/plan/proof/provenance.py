"""Which collective stood last before a value, read from the traced program.

Every variable is marked with the last collective, in program order, of those that it was computed from. Loops are
walked again with what their first iteration carried. Every branch of a `cond` counts as if it ran.
"""

from dataclasses import dataclass, field

from jax.extend.core import Literal

from jaxdist.compat import callback_of, scan_counts, source_of
from jaxdist.mesh import MeshShape
from jaxdist.parallel.pipeline.split_backward import inner_programs
from jaxdist.plan.proof.trace import KINDS, axes_of
from jaxdist.probes import Site

NONE = (-1, "")  # computed from no collective
# Passed over where the line is sought that sends: wrappers, and where equations of other lines are run again.
SKIPPED = (
    *("collectives.py", "exchange.py", "probes.py", "_groups"),
    *("parallel/tensor.py", "parallel/vocabulary.py", "parallel/chunked_loss.py"),
)
REPLAYED = ("evaluate (split_backward.py", "run (executor.py")


@dataclass
class Provenance:
    """last: of each probe, by its site: "all_reduce over tp in leave (tensor.py:40)", "" for none. outputs: the same of
    each result of the program."""

    mesh: MeshShape
    last: dict[Site, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    _count: int = 0
    _first: dict[Site, int] = field(default_factory=dict)

    @classmethod
    def of(cls, closed, mesh: MeshShape) -> "Provenance":
        """The provenance of a closed jaxpr."""
        found = cls(mesh)
        found.outputs = [text for _, text in found._walk(closed, [NONE] * len(closed.jaxpr.invars))]
        return found

    def _walk(self, program, marks: list) -> list:
        """Marks of a program's results, from those of its arguments."""
        jaxpr = getattr(program, "jaxpr", program)
        known = dict.fromkeys(jaxpr.constvars, NONE) | dict(zip(jaxpr.invars, marks, strict=True))

        def read(atoms) -> list:
            return [NONE if isinstance(atom, Literal) else known[atom] for atom in atoms]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._equation(eqn, read(eqn.invars)), strict=True))
        return read(jaxpr.outvars)

    def _equation(self, eqn, marks: list) -> list:
        name, inner = eqn.primitive.name, list(inner_programs(eqn))
        axes = [axis for axis in axes_of(eqn) if self.mesh.size(axis) > 1] if name in KINDS else []
        if axes:
            self._count += 1
            return [(self._count, self._describe(eqn, axes))] * len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, marks)
        if name == "while":
            return self._while(eqn, marks)
        if name == "cond":
            results = [self._walk(branch, marks[1:]) for branch in inner]
            return [max(each) for each in zip(*results, strict=True)]
        if inner and len(getattr(inner[0], "jaxpr", inner[0]).invars) == len(marks):
            return self._walk(inner[0], marks)
        self._see_probe(eqn, marks)
        return [max(marks, default=NONE)] * len(eqn.outvars)

    def _see_probe(self, eqn, marks: list) -> None:
        site = next(iter(getattr(callback_of(eqn), "args", ())), None)
        # Where recomputation runs a probe again, its place in forward counts.
        if isinstance(site, Site) and self._first.setdefault(site, id(eqn)) == id(eqn):
            _, _, _, *chunks = marks  # after rank, layer and rows
            self.last[site] = max(chunks)[1]

    def _scan(self, eqn, marks: list) -> list:
        num_consts, num_carry = scan_counts(eqn)
        consts, carry, rows = marks[:num_consts], marks[num_consts : num_consts + num_carry], marks[num_consts:]
        rows = rows[num_carry:]
        return self._loop(lambda carry: self._walk(eqn.params["jaxpr"], [*consts, *carry, *rows]), carry)

    def _while(self, eqn, marks: list) -> list:
        num_condition, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, carry = marks[num_condition : num_condition + num_body], marks[num_condition + num_body :]
        results = self._loop(lambda carry: self._walk(eqn.params["body_jaxpr"], [*consts, *carry]), carry)
        return list(map(max, carry, results))  # it may not run at all

    def _loop(self, body, carry: list) -> list:
        """A loop's results: those of a first iteration, and of another if the first changed what is carried."""
        results = body(carry)
        after = list(map(max, carry, results[: len(carry)]))
        return results if after == carry else body(after)

    def _describe(self, eqn, axes: list[str]) -> str:
        text = f"{KINDS[eqn.primitive.name]} over {', '.join(axes)}"
        source = source_of(eqn, SKIPPED)
        return f"{text} in {source}" if source and not source.startswith(REPLAYED) else text
