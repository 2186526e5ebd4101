"""Predicted against delivered: what a prediction rests on is kept while its request runs, and judged when it has ended.

Rules:
1. Every request that was predicted a hit, or delivered one that nobody predicted, is evidence for or against the index
   of its worker (`pool.trust`).
2. The cause of a miss is looked for only when there is one; a hit costs a few comparisons.
3. Text is keyed by what was sent, not by events: a hit or a miss of it says nothing about them. Nor does a hit beyond
   the token ids that an engine has told.
4. Of several prompts in one request engines report the cached tokens of one: nothing can be held against those.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway import findings
from gateway.kv import KvIndex, Mark, Speculation
from gateway.pool import Worker
from gateway.pool.evidence import Check
from gateway.pool.misses import Forgone, Later, Prediction, Verdict, forgone, judge, missed
from gateway.records import Decision, MissCause, PrefixBlocks, PrefixMode, TrustState

_OTHER_BLOCKS = frozenset(
    kind.code for kind in (findings.BLOCK_SIZE_WRONG, findings.TOKENIZER_DIFFERS, findings.TEMPLATE_DIFFERS)
)
"""Findings which say that a worker's blocks are not those of the requests."""

_TEXT_ALLOWED = 0.25
"""Share of a prediction in estimated tokens that may be missing: the estimate is off by a fifth at times."""


class Basis(NamedTuple):
    """What one lease's prediction rests on, as it was found; made for every request, looked at for few.

    `mark` is None when nothing was predicted. `promised` are the blocks of the request that only decisions had promised
    by then, `slow` the predicted tokens in slower tiers. `events`: the prediction is the events', not learned from
    routing. `text`: it rests on keys of the prompt's text, of which no event can tell; it may reach beyond the keys of
    the token ids that are known. `first` is the first choice's decision, for a request that was moved from there.
    """

    worker: Worker
    decision: Decision
    blocks: PrefixBlocks
    mark: Mark | None
    promised: int
    slow: int
    events: bool
    text: bool
    first: Decision | None

    @property
    def announced(self) -> int:
        """The part of the prediction that the worker's events had told of, in tokens."""
        if self.mark is None:
            return 0
        told = len(self.blocks.chains[0].keys) - self.promised
        return min(self.decision.predicted_tokens, told * self.blocks.block_size + self.slow)

    @property
    def only_promised(self) -> int:
        """The other part: what was sent to the worker a moment ago, in tokens. None where keys of text tell."""
        return 0 if self.mark is None else self.decision.predicted_tokens - self.announced


class Checks:
    """Holds what was delivered against what the index had said."""

    __slots__ = ("_index",)

    def __init__(self, index: KvIndex) -> None:
        self._index = index

    def basis(
        self,
        worker: Worker,
        decision: Decision,
        blocks: PrefixBlocks,
        speculation: Speculation | None,
        *,
        slow: int,
        text: bool,
        instead_of: Basis | None,
    ) -> Basis:
        """To be called when the decision has been made and its blocks are promised. `slow` is the part of the
        prediction that lies in slower tiers, in tokens; `text` says that it rests on keys of the prompt's text."""
        mark, promised, events = None, 0, False
        if decision.predicted_tokens and not text and len(blocks.chains) == 1:
            slot = worker.slot
            mark = self._index.mark(slot)
            promised = speculation.blocks if speculation is not None else 0
            events = worker.belief.feed is not TrustState.BLIND and (
                self._index.announces(slot) or not self._index.learned(slot)
            )
        first = None if instead_of is None else instead_of.first or instead_of.decision
        return Basis(worker, decision, blocks, mark, promised, slow, events, text, first)

    def settle(
        self, basis: Basis, delivered: int | None, prompt_tokens: int, now: float
    ) -> tuple[int, MissCause | None]:
        """The request has ended, and its worker reported `delivered` cached tokens (None: it did not say) of
        `prompt_tokens`. The worker is believed accordingly. Returns the tokens that were missed, and why.

        A prediction in tokens estimated from text is held against what the prompt turned out to be, and a fourth of it
        is allowed.
        """
        decision = basis.decision
        if delivered is None or not basis.blocks.chains:
            return 0, None
        if not basis.text:
            # Where an engine tells the tokens, those of new text are not known yet.
            allowed = _TEXT_ALLOWED if decision.mode is PrefixMode.ENGINE else 0.1
            short = missed(decision.predicted_tokens, delivered, decision.block_size, allowed=allowed)
            verdict = self._judge(basis, basis.mark, delivered) if short and basis.mark is not None else None
            self._weigh(basis, delivered, verdict, now)
            return (short, verdict.cause) if verdict is not None else _passed_up(basis, delivered)
        predicted = decision.predicted_tokens * prompt_tokens // max(1, decision.prompt_tokens)
        short = missed(predicted, delivered, decision.block_size, allowed=_TEXT_ALLOWED)
        return (short, MissCause.UNKNOWN) if short else (0, None)

    def _weigh(self, basis: Basis, delivered: int, verdict: Verdict | None, now: float) -> None:
        """Tell the worker's trust what this request says of its index."""
        decision, worker = basis.decision, basis.worker
        size, predicted = decision.block_size, decision.predicted_tokens
        if decision.mode is PrefixMode.ENGINE:
            delivered = min(delivered, predicted)  # more was cached than is known of its tokens: nothing strange
        if predicted <= size and delivered <= predicted + size:
            return
        missed_for = verdict.cause if verdict is not None else None
        doubts, relearned = False, False
        if verdict is not None and basis.mark is not None:
            doubts = verdict.doubts
            relearned = self._index.mark(worker.slot).epoch != basis.mark.epoch
        worker.check(
            Check(
                decision.model,
                predicted,
                basis.announced,
                delivered,
                size,
                decision.decided_at,
                missed_for,
                doubts,
                relearned,
            ),
            now,
        )

    def _judge(self, basis: Basis, mark: Mark, delivered: int) -> Verdict:
        worker, blocks = basis.worker, basis.blocks
        made = Prediction(basis.decision.predicted_tokens, basis.announced, basis.slow, basis.events, *mark)
        lost = blocks.chains[0].keys[delivered // blocks.block_size]
        later = Later(
            self._index.announced(worker.slot, lost),
            *self._index.mark(worker.slot),
            identity=worker.belief.identity(basis.decision.model)
            or any(finding.code in _OTHER_BLOCKS for finding in worker.facts.findings),
        )
        return judge(made, delivered, blocks.block_size, later)


def _passed_up(basis: Basis, delivered: int) -> tuple[int, MissCause | None]:
    """What the request missed although its worker delivered what was predicted of it: the first choice's hit, or the
    one that the session's credit outbid."""
    decision = basis.decision
    size = decision.block_size
    if basis.first is not None:
        short = missed(basis.first.predicted_tokens, delivered, size)
        if short:
            return short, MissCause.RETRY
    if decision.affinity == "kept" and decision.available_tokens > decision.predicted_tokens:
        short = missed(decision.available_tokens, delivered, size)
        if short and forgone(decision) is Forgone.AFFINITY:
            return short, MissCause.AFFINITY
    return 0, None
