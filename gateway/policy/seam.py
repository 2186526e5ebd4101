"""The seam between the router and its policies: what a policy is asked, what it sees of a worker, what it answers.

Rules:
1. A policy gives every candidate one number, its cost; the lowest wins. Who wins a near-tie is decided outside
   (`pick.py`), the same way for all policies, except that each says what near is.
2. Scoring changes nothing, so that explaining a decision and making it are the same computation.
3. A policy has no clock, no I/O and no chance of its own: `now` and a `random.Random` are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, overload

from gateway.records import Candidate, Slot, Standing, Terms, WorkerId

Row = tuple[float, float, float, float, float, float, float, float, float, float, float, float]
"""The numbers of `Terms`, in its order, as a plain tuple."""


def row(cost: float) -> Row:
    """A row of a policy that does not price in seconds."""
    return (cost, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Scores(Sequence[Row]):
    """The costs of one decision's candidates, and the rows they are the first numbers of, made when somebody looks:
    a decision needs two of them, and they are most of what it would keep."""

    __slots__ = ("_explain", "costs")

    def __init__(self, costs: list[float], explain: Callable[[int], Row] | None = None) -> None:
        """`explain` gives the row of a position, at any time as it was now; without it there are only costs."""
        self.costs = costs
        self._explain = explain

    def __len__(self) -> int:
        return len(self.costs)

    def of(self, at: int) -> Row:
        """`self[at]` of a candidate."""
        return row(self.costs[at]) if self._explain is None else self._explain(at)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        return self.of(range(len(self))[at])


class Ask(NamedTuple):
    """One request, as a policy needs it. Tokens are prompt tokens; `overhead_s`, `token_s` and `pair_s` are the pool's
    learned prefill speeds.

    `output_tokens` is the expected answer. `home` is the worker that served the session last. `leading` names the
    leading blocks (None when the tokens are unknown). `computing` is how many workers compute the first `new_prefix`
    tokens of the prompt at this moment, that nobody holds yet. `waited_s` is what requests of this model have waited so
    far, and `settled_s` how much of that has been made good.
    """

    tokens: int
    output_tokens: int
    block_size: int
    overhead_s: float
    token_s: float
    pair_s: float
    home: WorkerId | None = None
    leading: int | None = None
    computing: int = 0
    new_prefix: int = 0
    waited_s: float = 0.0
    settled_s: float = 0.0

    def beside(self, computing: int, new_prefix: int) -> Ask:
        """The same while others compute these tokens (`_replace` takes four times as long)."""
        return Ask(*self[:8], computing, new_prefix, *self[10:])


class Load(Protocol):
    """One worker, as a policy sees it: plain numbers, brought up to date when they change.

    `pending_s` are the estimated prefill seconds of requests sent and not yet prefilled, `head_s` those of the first,
    which is being computed since `head_since`; what other replicas have sent beside it is in them. `slowdown`
    multiplies the pool's prefill speeds. `foreign_s` is what other clients, and other replicas alone, have queued there
    at `foreign_since`, in seconds; `foreign_requests` are all requests that are not this replica's. KV figures are in
    tokens: `kv_tokens` in use by running and sent requests, `kv_capacity` (0 = unknown), `unindexed_tokens` those that
    will take room and are not in the index yet. `evict_discount` (0..1) is the worth left in the next block to be
    evicted. `picked` numbers the last decision for this worker. `idle_since_s` is what requests of its model had waited
    when it last had one, `regret_s` what was lost by leaving prefixes on it while it is slow. `standing` has those that
    a decision in seconds reads.
    """

    @property
    def id(self) -> WorkerId: ...
    @property
    def slot(self) -> Slot: ...
    @property
    def weight(self) -> float: ...
    @property
    def picked(self) -> int: ...
    @property
    def inflight_requests(self) -> int: ...
    @property
    def inflight_tokens(self) -> int: ...
    @property
    def pending_s(self) -> float: ...
    @property
    def head_s(self) -> float: ...
    @property
    def head_since(self) -> float: ...
    @property
    def slowdown(self) -> float: ...
    @property
    def foreign_s(self) -> float: ...
    @property
    def foreign_since(self) -> float: ...
    @property
    def foreign_requests(self) -> float: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def kv_capacity(self) -> int: ...
    @property
    def unindexed_tokens(self) -> int: ...
    @property
    def evict_discount(self) -> float: ...
    @property
    def idle_since_s(self) -> float: ...
    @property
    def regret_s(self) -> float: ...
    @property
    def standing(self) -> Standing: ...


class View(NamedTuple):
    """The candidates of one decision, position by position: the worker, its overlap in tokens weighted by trust, and
    the tokens its GPU cache holds. `read_s` are seconds to read the slow-tier part of the overlap, None when no
    candidate has any; `absent` is how many of the request's adapters it would have to load, None for requests without.
    `home` is the position of the session's worker, None when it is no candidate.
    """

    workers: Sequence[Load]
    hits: Sequence[int]
    resident: Sequence[int]
    read_s: Sequence[float] | None = None
    absent: Sequence[int] | None = None
    home: int | None = None


class Candidates(Sequence[Candidate]):
    """The candidates of a decision as records, made when somebody looks: mostly nobody does."""

    __slots__ = ("_hits", "_rows", "_trusts", "_workers")

    def __init__(
        self, workers: Sequence[WorkerId], hits: Sequence[int], trusts: Sequence[float], rows: Sequence[Row]
    ) -> None:
        self._workers = workers
        self._hits = hits
        self._trusts = trusts
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(at, slice):
            return Candidates(self._workers[at], self._hits[at], self._trusts[at], self._rows[at])
        return Candidate(self._workers[at], self._hits[at], self._trusts[at], Terms(*self._rows[at]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Policy(Protocol):
    """Gives every candidate a cost."""

    @property
    def name(self) -> str: ...

    @property
    def wait_weight(self) -> float:
        """What a second until the prefill could start adds to the cost; 0 where costs are no seconds. Then a request
        is held back only for want of room, never because its worker is busy for a while."""
        ...

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        """The cost of every candidate, in the order of `view`."""
        ...

    def near(self, own_s: float, *, cold: bool) -> float:
        """How much above the best cost still counts as a tie. `cold` when the best candidate has no overlap; `own_s`,
        its prefill, matters only then."""
        ...
