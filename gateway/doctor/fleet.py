"""All workers at once: asked side by side, judged alone and against each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.doctor.asking import Examination, Plan, Tools
from gateway.doctor.checks import check_hashes, check_load_addresses, judge
from gateway.records import Finding, Severity, WorkerFacts, WorkerId, WorkerSpec

_ORDER = (Severity.INFO, Severity.WARNING, Severity.ERROR)


@dataclass(slots=True)
class Checked:
    """One worker and what was found, worst first; `facts` are None when it could not be asked."""

    spec: WorkerSpec
    facts: WorkerFacts | None
    findings: list[Finding] = field(default_factory=list)

    def add(self, more: Iterable[Finding]) -> None:
        """Findings of another source, each code once."""
        codes = {found.code for found in self.findings}
        self.findings += [found for found in more if found.code not in codes]
        self.findings.sort(key=lambda found: -_ORDER.index(found.severity))


async def check_fleet(
    specs: Sequence[WorkerSpec],
    tools: Tools,
    plan: Plan,
    *,
    on_step: Callable[[WorkerId, str], None],
) -> list[Checked]:
    """Ask and judge every worker; `on_step` hears what is being done, and `done` at the end of each. Takes as long as
    the slowest worker, `plan.deadline_s` at most."""

    async def one(spec: WorkerSpec) -> Examination:
        examination = Examination(spec, tools, plan, lambda step: on_step(spec.name, step))
        await examination.run()
        on_step(spec.name, "done")
        return examination

    seen = [examination.seen for examination in await asyncio.gather(*map(one, specs))]
    checked = [Checked(each.spec, each.facts) for each in seen]
    for each, result in zip(seen, checked, strict=True):
        result.add(_once(judge(each)))
    for spec, finding in (*check_hashes(seen), *check_load_addresses(seen)):
        next(result for result in checked if result.spec is spec).add([finding])
    return checked


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity; None without findings."""
    return max((found.severity for found in findings), key=_ORDER.index, default=None)


def _once(findings: Iterable[Finding]) -> list[Finding]:
    """Without repetitions (several ranks of a worker have the same address wrong)."""
    return list(dict.fromkeys(findings))
