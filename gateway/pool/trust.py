"""How far one worker's part of the index is believed: from its event feed, and from predicted against delivered.

Two cases are told apart, as in a hidden Markov filter for a change point (Shiryaev 1963): the index is right, and
predictions are delivered but for a few; or it is wrong, and nearly none is. P is the probability of the first. Its log
odds are a sum of two that are kept apart: what the feed's state alone is worth, and the evidence of requests, each of
which adds the log of its likelihood ratio. So one miss among many hits moves little, two in a row without a sign from
the feed are enough, and hits bring it back as fast.

    log odds of P = prior of the feed's state + evidence
    factor        = P + (1 - P) * delivered share of the last few requests
             and, while tightened, at most the delivered share of the last twenty or so

Rules:
1. Distrust lowers the credit of an overlap and never blocks: the factor stays at `FLOOR` or above.
2. Only what the worker's own events had announced is held against them. Blocks that were promised by a decision, and
   blocks removed in between, say nothing about how true the events are. Credit for blocks that may be evicted before
   they are used is not lowered either: on traces that overload a fleet, that scatters prefixes and costs hits.
3. Where nobody asks any more, time heals: distrust fades towards what the feed's state deserves, so that a worker gets
   a chance to show; each relapse without a hit in between makes it fade half as fast, up to sixteen times.
4. The miss rate is over the last `WINDOW` checked predictions of the last `WINDOW_S` seconds. Above the threshold the
   worker's refresh is tightened; it relaxes below half of it, and not before `LEAST_TIGHT_S`.
5. What speaks against an index outlives any change of the feed's state; hits speak for the index as it was and count
   until the next change. An index that is still being filled may lack the removals to come: misses of that time alone
   do not contradict the whole one, but one more does.
6. A worker that never delivers what it announces, or delivers again and again what it never announced, has an identity
   problem: its blocks are not the requests'. Learning its index anew would change nothing.

No clock: `now` is an argument, in seconds. It changes nothing but itself: `remedy` says what somebody should do.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gateway.pool.evidence import LEAST_PREDICTIONS, Check, Strangers, Window
from gateway.records import Finding, TrustState

FLOOR: Final = 0.05
"""Credit that is always left: between a worker that claims a prefix and one that does not, the first is tried."""

MISS_THRESHOLD: Final = 0.05
"""Route-miss rate above which a worker's refresh is tightened, by default."""

LEAST_TIGHT_S: Final = 30.0

HEAL_S: Final = 90.0
"""Time in which evidence falls to 1/e where no more comes: a busy cache has turned over by then."""

_SLOWEST: Final = 4
"""Doublings of `HEAL_S` at most: 24 minutes."""

REMEDY_REST_S: Final = 60.0
_REMEDY_GROWTH: Final = 4.0
_REMEDY_REST_MAX_S: Final = 3840.0
"""An index is learned anew at most once in this time; the rest grows with each try that did not help. An engine keeps
some minutes of events, so what it replays may be less than what was known."""

_WRONG_DELIVERS: Final = 0.05
"""Share of predictions that are delivered although the index is wrong: a common first block, a second copy."""

_RECENT: Final = 0.6
"""Weight of the newest request in the delivered share: three requests show nearly all of it."""

_DOUBTFUL: Final = 0.5
_BELIEVED: Final = 0.8
"""P below which a worker is contradicted, and above which it no longer is."""

_AVERAGED: Final = 0.05
"""The same over twenty requests: what to expect of a worker that delivers now and then."""

_UNKNOWN_SHARE: Final = 0.5
"""Share taken to be delivered of a doubted index before any request tells."""

_FULL: Final = 0.99
"""A factor this high is 1: no decision turns on a hundredth, and the common case stays free of arithmetic."""


class _Prior(NamedTuple):
    """What a feed's state alone is worth, and what requests say while it lasts; all but `right` in log odds.

    `right` is P before any evidence, `odds` the same. A request adds `hit` for what was delivered of its prediction,
    `miss` for the rest. The evidence stays between `least` and `most`: what was learned a thousand requests ago must
    not outvote today's two.
    """

    right: float
    odds: float
    hit: float
    miss: float
    least: float
    most: float


def _log_odds(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


def _probability(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))


def _prior(right: float, *, misses: float, least: float, most: float) -> _Prior:
    """`misses` is the share of misses that is usual with a right index, `least` and `most` the bounds of P."""
    odds = _log_odds(right)
    hit = math.log((1.0 - misses) / _WRONG_DELIVERS)
    miss = math.log(misses / (1.0 - _WRONG_DELIVERS))
    return _Prior(right, odds, hit, miss, _log_odds(least) - odds, _log_odds(most) - odds)


_WHOLE: Final = 0.999
"""P of an index whose feed is whole, without evidence; no number of hits makes it more."""

_LEAST: Final = 0.001

# An index that is whole errs at most once in a hundred (a request that was told not to use the cache, a copy evicted at
# the same moment). Without whole events a miss may be a removal nobody told of, so it says less.
_PRIORS: Final = {
    TrustState.TRUSTED: _prior(_WHOLE, misses=0.01, least=_LEAST, most=_WHOLE),
    TrustState.CATCHING_UP: _prior(0.5, misses=0.05, least=0.002, most=0.99),
    TrustState.UNCERTAIN: _prior(0.7, misses=0.05, least=_LEAST, most=0.99),
    TrustState.BLIND: _prior(0.8, misses=0.2, least=_LEAST, most=0.99),
}
"""Rule 5 sets what evidence is the least while an index is being filled: P of the whole one is then two in three."""


class Remedy(NamedTuple):
    """A worker's index is to be emptied and learned anew: from what was announced since `since` (seconds), or from all
    the history its engine has when that is None."""

    since: float | None


class Trust:
    """One worker's. `factor` multiplies its overlaps, `state` is the word for it, `tightened` says that its refresh is.

    `feed` is the worst state among the worker's event feeds; TRUSTED until somebody tells.
    """

    __slots__ = (
        "_at",
        "_average",
        "_evidence",
        "_hit_since",
        "_lapses",
        "_remedied",
        "_remedy_at",
        "_remedy_rest_s",
        "_share",
        "_strangers",
        "_sure",
        "_tight_since",
        "_window",
        "contradicted",
        "doubted_since",
        "factor",
        "feed",
        "remedies",
        "threshold",
        "tightened",
    )

    def __init__(self, *, threshold: float = MISS_THRESHOLD) -> None:
        self.threshold = threshold
        self.feed = TrustState.TRUSTED
        self.factor = 1.0
        self.contradicted = False
        """What was delivered says that the index is wrong, whatever the feed says."""
        self.tightened = False
        self.doubted_since: float | None = None
        """When the first of the requests was decided that nothing was delivered to since; None after a hit."""
        self.remedies = 0
        """Times the index was to be learned anew."""
        self._evidence = 0.0
        """Of requests, in log odds."""
        self._share = _UNKNOWN_SHARE
        self._average = 1.0
        self._sure = True
        """Feed whole, P at its bound, refresh at ease: a further hit changes nothing."""
        self._at = 0.0
        self._lapses = 0
        self._hit_since = True
        self._window = Window()
        self._tight_since = 0.0
        self._strangers = Strangers()
        self._remedied = 0
        self._remedy_at = -math.inf
        self._remedy_rest_s = REMEDY_REST_S

    # ------------------------------------------------------------------ what it says

    @property
    def state(self) -> TrustState:
        """The feed's state, or `uncertain` where what was delivered contradicts the feed."""
        if self.contradicted and self.feed is not TrustState.BLIND:
            return TrustState.UNCERTAIN
        return self.feed

    @property
    def believed(self) -> float:
        """P: the probability that the index is right."""
        return _probability(_PRIORS[self.feed].odds + self._evidence)

    @property
    def predictions(self) -> int:
        """Checked predictions in the window."""
        return len(self._window)

    @property
    def misses(self) -> int:
        """Those of them that were missed."""
        return self._window.missed

    @property
    def miss_rate(self) -> float | None:
        """Share of the window's predictions that were missed; None while there are too few."""
        return self._window.missed / len(self._window) if len(self._window) >= LEAST_PREDICTIONS else None

    def identity(self, model: str) -> bool:
        """Whether the worker's blocks are not those of this model's requests (rule 6)."""
        return self._strangers.wrong(model)

    def findings(self) -> tuple[Finding, ...]:
        """The identity problems there are now, by model."""
        return self._strangers.findings()

    # ------------------------------------------------------------------ evidence

    def follow(self, feed: TrustState, now: float) -> None:
        """The worst state among the worker's feeds. A worse one is a reason to doubt, a better one lifts that doubt but
        not the one that requests gave (rule 5)."""
        if feed is self.feed:
            return
        self._pass(now)
        self.feed = feed
        self._evidence = min(0.0, self._evidence)
        self._refit(now)

    def observe(self, check: Check, now: float) -> None:
        """A request has ended. Requests with nothing to check are told too: they may have been delivered what nobody
        predicted."""
        missed = check.cause is not None
        if not missed and self._sure:
            self._confirm(check, now)
            return
        self._pass(now)
        against = missed and check.doubts and not check.relearned
        share = min(1.0, check.delivered / check.announced) if missed and check.announced else 1.0
        if check.predicted > check.block_size:
            self._window.add(now, missed=missed, against=against)
        if check.announced > check.block_size and not check.relearned and (against or not missed):
            self._weigh(check, share)
        if not check.relearned:
            whole = self.feed is TrustState.TRUSTED
            self._strangers.observe(check, now, against=against, whole=whole)
        self._refit(now)

    def tick(self, now: float) -> None:
        """About twice a second: what depends on time alone is renewed."""
        self._pass(now)
        self._refit(now)

    def remedy(self, now: float) -> Remedy | None:
        """What to do about the index now; answering counts as doing it. At most one in `REMEDY_REST_S`, then seldom.

        What a contradicted worker announced before the doubts began is wrong as a whole, and its history would only
        say the same again. Where single predictions fail, the first try is the whole history.
        """
        if self.feed in (TrustState.BLIND, TrustState.CATCHING_UP) or self._strangers:
            return None
        window = self._window
        often = len(window) >= LEAST_PREDICTIONS and window.against > self.threshold * len(window)
        doubted = self.contradicted and window.against > 0
        if not (doubted or often) or now < self._remedy_at + self._remedy_rest_s:
            return None
        if self._remedied:
            self._remedy_rest_s = min(self._remedy_rest_s * _REMEDY_GROWTH, _REMEDY_REST_MAX_S)
        self._remedied += 1
        self.remedies += 1
        self._remedy_at = now
        since = self.doubted_since if self.doubted_since is not None else window.earliest_against()
        window.absolve()
        self.doubted_since = None
        if not doubted and self._remedied == 1:
            return Remedy(None)
        self._strangers.emptied_at = now
        return Remedy(since)

    # ------------------------------------------------------------------ inside

    def _weigh(self, check: Check, share: float) -> None:
        """Bayes' rule for the delivered share of one request: a part of a hit is that part of the evidence."""
        prior, before = _PRIORS[self.feed], self._evidence
        said = before + share * prior.hit + (1.0 - share) * prior.miss
        # What weighs more than this state's least was said in another one, and stays.
        self._evidence = min(max(said, min(before, prior.least)), prior.most)
        self._share += _RECENT * (share - self._share)
        self._average += _AVERAGED * (share - self._average)
        if share > 0.5:
            self._hit_since = True
            self.doubted_since = None
        elif self.doubted_since is None:
            self.doubted_since = check.decided_at

    def _confirm(self, check: Check, now: float) -> None:
        """The usual case, without the arithmetic: nothing is doubted, and this request is no reason to."""
        self._at = now
        if check.predicted > check.block_size:
            self._window.add(now, missed=False, against=False)
            self._share += _RECENT * (1.0 - self._share)
            self._average += _AVERAGED * (1.0 - self._average)
            self._hit_since = True
            self.doubted_since = None
        if not check.relearned:
            self._strangers.observe(check, now, against=False, whole=True)

    def _pass(self, now: float) -> None:
        """Rule 3: evidence fades, so P goes to the feed's prior, and the delivered share to the unknown."""
        gone = now - self._at
        if gone <= 0.0:
            return
        self._at = now
        kept = math.exp(-gone / (HEAL_S * 2.0**self._lapses))
        self._evidence *= kept
        self._share = _UNKNOWN_SHARE + (self._share - _UNKNOWN_SHARE) * kept
        self._average = 1.0 + (self._average - 1.0) * kept
        self._window.expire(now)

    def _refit(self, now: float) -> None:
        """Brings flags and factor up to date."""
        right = self.believed
        if not self.contradicted and right < _DOUBTFUL and self.feed is not TrustState.CATCHING_UP:
            self.contradicted = True
            self._lapses = 0 if self._hit_since else min(self._lapses + 1, _SLOWEST)
            self._hit_since = False
        elif self.contradicted and right > self._enough():
            self.contradicted = False
        self._retighten(now)
        factor = right + (1.0 - right) * self._share
        if self.tightened and self.miss_rate is not None:
            factor = min(factor, self._average)
        self.factor = 1.0 if factor >= _FULL else max(FLOOR, factor)
        self._sure = self.feed is TrustState.TRUSTED and self._evidence >= 0.0 and not self.tightened

    def _enough(self) -> float:
        """P above which a contradicted worker no longer is: no more than time alone brings, but for a feed that catches
        up, whose state will not last."""
        prior = _PRIORS[self.feed].right
        return _BELIEVED if self.feed is TrustState.CATCHING_UP else min(_BELIEVED, prior - 0.05)

    def _retighten(self, now: float) -> None:
        rate = self.miss_rate
        if self.contradicted or (rate is not None and rate > self.threshold):
            if not self.tightened:
                self.tightened = True
                self._tight_since = now
        elif (
            self.tightened
            and now - self._tight_since >= LEAST_TIGHT_S
            and (rate is None or rate <= self.threshold / 2.0)
        ):
            self.tightened = False
            if now - self._remedy_at >= self._remedy_rest_s:  # what was done last has helped
                self._remedied = 0
                self._remedy_rest_s = REMEDY_REST_S
