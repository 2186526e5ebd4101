"""How fast workers are, learned from what the gateway sees.

Owns the two speed models of a pool and the slowdown of each worker against them.

    prefill seconds = overhead + token * new + pair * new * (cached + new / 2)        [x slowdown of the worker]
    inter-token seconds = floor + each * batch

(`new * (cached + new / 2)` counts the token pairs attention looks at: every new token sees all cached tokens and, on
average, half of the new ones.)

Rules:
1. Everything starts from a prior and stays inside bounds around it: no observation, and no number of them, makes a
   speed zero, negative or infinite.
2. Errors are relative. An observation far off the prediction has a weight that falls with the square of its distance,
   so one stalled request moves nothing, and a hundred that agree move everything.
3. Workers of one pool share the shape of the model; a worker adds one number, its slowdown, which is 1 until seen
   otherwise and drifts back to 1 as its evidence gets old.

It does not decide what a clean observation is: `worker.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

OUTPUT_PRIOR_TOKENS = 200.0
"""Mean answer length until some are seen."""

BYTES_A_TOKEN_PRIOR = 4.0
"""Bytes of English text a token stands for, until usage reports show what they are."""
_TEXT_PRIOR_TOKENS = 100.0
"""What the prior weighs: a short prompt, which is mostly template, moves it little, a long one decides."""
_TEXT_BOUNDS = (1.0, 16.0)

_WARM_UP = 5
"""Observations whose median sets the scale of the prior: enough to outvote two outliers."""
_MEMORY = 200
"""Observations after which an old one counts 1/e: minutes on a busy pool, so a new engine version is learned soon."""
_DOUBT = 2.0
"""Standard deviation of a parameter around its (scaled) prior, relative: a factor of three is no surprise."""
_BOUND = 50.0
"""A parameter stays within this factor of its scaled prior."""
_LEAST = 1.0 / _BOUND
_SCALE_BOUND = 1000.0
"""The scale of the prior itself stays within this factor: from a 10 us to a 0.2 s token."""
_MOST_SAMPLES = 1e15
_MOST_EVIDENCE = 1e6
"""Of what another process has learned: more than any sum comes to here, each summand of which is at most `_BOUND`
squared."""
_LONGEST, _MOST_TEXT = 1e7, 1e12
"""The same for means of lengths, in tokens, and for sums of texts."""
_SWEEPS = 3
"""Coordinate-descent sweeps per observation; the start is the last solution, which is nearly right."""


class Regression:
    """Exponentially forgetting ridge regression in relative error, with bounds.

    Minimises over theta >= 0, with s_k = max(y_k, predicted y_k at the time):

        sum_k decay^(n-k) * ((y_k - theta.x_k) / s_k)^2  +  sum_i ((theta_i / prior_i - scale) / (doubt * scale))^2

    `scale` is the median of observed / prior prediction over the first five observations. Solved by projected
    coordinate descent on the normal equations (Hastie, Tibshirani and Friedman, The Elements of Statistical Learning,
    3.8.6, with box bounds instead of the lasso's). About 6 us an observation.
    """

    __slots__ = ("_first", "_keep", "_matrix", "_prior", "_size", "_vector", "samples", "values")

    def __init__(self, prior: Sequence[float], *, memory: int = _MEMORY) -> None:
        self._prior = tuple(prior)
        self._size = len(self._prior)
        self._keep = 1.0 - 1.0 / memory
        self._matrix = [[0.0] * self._size for _ in range(self._size)]
        self._vector = [0.0] * self._size
        self._first: list[tuple[tuple[float, ...], float]] = []
        self.values = self._prior
        self.samples = 0

    @property
    def warm(self) -> bool:
        """True once the scale of the prior is known."""
        return self.samples >= _WARM_UP

    def predict(self, x: Sequence[float]) -> float:
        """The model's value at `x`, one number a parameter."""
        return sum([value * part for value, part in zip(self.values, x, strict=True)])

    def learn(self, x: Sequence[float], y: float) -> None:
        """One observation; one that is not positive is ignored."""
        if not (y > 0.0 and math.isfinite(y)) or self.predict(x) <= 0.0:
            return
        self.samples += 1
        if self.samples < _WARM_UP:
            self._first.append((tuple(x), y))
        elif self.samples == _WARM_UP:
            self._first.append((tuple(x), y))
            scale = median(seen / self.predict(at) for at, seen in self._first)
            scale = min(max(scale, 1.0 / _SCALE_BOUND), _SCALE_BOUND)
            self._prior = self.values = tuple(value * scale for value in self._prior)
            for at, seen in self._first:
                self._add(at, seen)
            self._first.clear()
            self._solve()
        else:
            self._add(x, y)
            self._solve()

    def learned(self) -> list[float]:
        """What it knows, for `take_over`: samples, prior, values, vector and matrix. Empty until it is warm."""
        if not self.warm:
            return []
        matrix = [number for row in self._matrix for number in row]
        return [float(self.samples), *self._prior, *self.values, *self._vector, *matrix]

    def take_over(self, learned: Sequence[float]) -> None:
        """Go on from what another one knew; what is none of it, or outside the bounds (rule 1), is ignored."""
        size = self._size
        if len(learned) != 1 + 3 * size + size * size or not _WARM_UP <= learned[0] <= _MOST_SAMPLES:
            return
        prior, values, vector = (tuple(learned[1 + at * size : 1 + (at + 1) * size]) for at in range(3))
        rest = learned[1 + 3 * size :]
        if not (
            all(_within(new, own, _SCALE_BOUND) for new, own in zip(prior, self._prior, strict=True))
            and all(_within(value, scaled, _BOUND) for value, scaled in zip(values, prior, strict=True))
            and all(0.0 <= number <= _MOST_EVIDENCE for number in (*vector, *rest))
        ):
            return
        self.samples = int(learned[0])
        self._prior, self.values, self._vector = prior, values, list(vector)
        self._matrix = [list(rest[row * size : (row + 1) * size]) for row in range(size)]
        self._first.clear()

    def _add(self, x: Sequence[float], y: float) -> None:
        spread = max(y, self.predict(x))
        z = [part * prior / spread for part, prior in zip(x, self._prior, strict=True)]
        target = y / spread
        keep = self._keep
        self._vector = [old * keep + zi * target for old, zi in zip(self._vector, z, strict=True)]
        self._matrix = [
            [old * keep + zi * zj for old, zj in zip(row, z, strict=True)]
            for row, zi in zip(self._matrix, z, strict=True)
        ]

    def _solve(self) -> None:
        pull = 1.0 / (_DOUBT * _DOUBT)
        ratios = [value / prior for value, prior in zip(self.values, self._prior, strict=True)]
        # Plain loops over what does not change: an answer that ends waits for this.
        steps = [
            (i, self._vector[i] + pull, [(row[j], j) for j in range(self._size) if j != i], row[i] + pull)
            for i, row in enumerate(self._matrix)
        ]
        for _ in range(_SWEEPS):
            for i, seen, others, own in steps:
                rest = 0.0
                for weight, j in others:
                    rest += weight * ratios[j]
                best = (seen - rest) / own
                ratios[i] = _LEAST if best < _LEAST else _BOUND if best > _BOUND else best
        self.values = tuple([ratio * prior for ratio, prior in zip(ratios, self._prior, strict=True)])


def _within(number: float, middle: float, factor: float) -> bool:
    """Within this factor of a number, but for rounding."""
    factor *= 1.0 + 1e-9
    return middle / factor <= number <= middle * factor


class PrefillRates(NamedTuple):
    """Seconds: fixed per request, per new token, per pair of tokens attention looks at."""

    overhead_s: float
    token_s: float
    pair_s: float


class InterTokenRates(NamedTuple):
    """Seconds between two tokens of one stream: alone, and more for each running request."""

    floor_s: float
    each_s: float


PREFILL_PRIOR = PrefillRates(0.01, 2e-4, 2e-9)
"""5,000 prefill tokens a second, between a 7B model on a small card and a 70B model on a large node; the scale is
taken from the first observations anyway."""

INTER_TOKEN_PRIOR = InterTokenRates(0.02, 2e-4)
"""50 tokens a second alone, 1 % slower with each further running request."""


class PoolRates:
    """What the workers of one base model have in common. `prefill` and `inter_token` are replaced when they move."""

    __slots__ = (
        "_inter_token", "_prefill", "_text_bytes", "_text_tokens", "bytes_a_token", "inter_token", "output_tokens",
        "prefill", "prompt_tokens", "regretted", "settled_s", "waited_s",
    )  # fmt: skip

    def __init__(self, prefill: PrefillRates = PREFILL_PRIOR, inter_token: InterTokenRates = INTER_TOKEN_PRIOR) -> None:
        self._prefill = Regression(prefill)
        self._inter_token = Regression(inter_token)
        self.prefill = PrefillRates(*self._prefill.values)
        self.inter_token = InterTokenRates(*self._inter_token.values)
        self.output_tokens = OUTPUT_PRIOR_TOKENS
        """Running mean of answer lengths."""
        self.prompt_tokens = 0.0
        """Running mean of prompt lengths; 0 until one is seen."""
        self.bytes_a_token = BYTES_A_TOKEN_PRIOR
        """Bytes of a prompt's text (UTF-8) for each of its tokens, where the tokens are not known here."""
        self.waited_s = 0.0
        """What requests have waited for a worker so far, by the estimates they were placed with."""
        self.settled_s = 0.0
        """How much of that has been made good by work for an idle worker, or is forgotten."""
        self.regretted = False
        """Some worker's account of regret is not empty; renewed with every tick."""
        self._text_bytes = BYTES_A_TOKEN_PRIOR * _TEXT_PRIOR_TOKENS
        self._text_tokens = _TEXT_PRIOR_TOKENS

    @property
    def warm(self) -> bool:
        """Enough has been seen to wait for what they say: until then they are a guess about unknown hardware."""
        return self._prefill.warm

    @property
    def samples(self) -> int:
        """Prefill observations so far."""
        return self._prefill.samples

    def learned(self) -> list[float]:
        """What was learned, for `take_over`: four means, then both models behind their lengths."""
        prefill, inter_token = self._prefill.learned(), self._inter_token.learned()
        means = [self.output_tokens, self.prompt_tokens, self._text_bytes, self._text_tokens]
        return [*means, float(len(prefill)), *prefill, float(len(inter_token)), *inter_token]

    def take_over(self, learned: Sequence[float]) -> None:
        """Go on from what another process learned; what is none of it is ignored."""
        most = (_LONGEST, _LONGEST, _MOST_TEXT, _MOST_TEXT, len(learned))
        if len(learned) < 6 or not all(0.0 <= number <= top for number, top in zip(learned, most, strict=False)):
            return
        end = 5 + int(learned[4])
        self._prefill.take_over(learned[5:end])
        self._inter_token.take_over(learned[end + 1 :])
        self.prefill = PrefillRates(*self._prefill.values)
        self.inter_token = InterTokenRates(*self._inter_token.values)
        self.output_tokens, self.prompt_tokens = learned[0], learned[1]
        if learned[2] > 0.0 and learned[3] > 0.0:
            self._text_bytes, self._text_tokens = learned[2], learned[3]
            self.bytes_a_token = min(max(learned[2] / learned[3], _TEXT_BOUNDS[0]), _TEXT_BOUNDS[1])

    def prefill_s(self, new: int, cached: int) -> float:
        """Seconds to prefill `new` tokens behind `cached` ones on a worker of slowdown 1."""
        overhead, token, pair = self.prefill
        return overhead + new * (token + pair * (cached + new / 2))

    def work_s(self, x: tuple[float, float, float]) -> float:
        """Seconds for so much work, as in `learn_prefill`, on a worker of slowdown 1."""
        overhead, token, pair = self.prefill
        return x[0] * overhead + x[1] * token + x[2] * pair

    def forget_waits(self, share: float) -> None:
        """Waits are credited for some seconds: a burst of long ago moves nobody."""
        self.settled_s += share * (self.waited_s - self.settled_s)

    def learn_prefill(self, x: tuple[float, float, float], seconds: float, slowdown: Slowdown) -> None:
        """`seconds` of prefill work on one worker; `x` = requests, new tokens, token pairs in it.

        Prefills that end in one instant leave no time between them: that says nothing and is ignored.
        """
        if not (seconds > 0.0 and math.isfinite(seconds)):
            return
        model = self._prefill
        if model.warm:
            expected = model.predict(x)
            # The fixed overhead says nothing about speed: a period of tiny prompts weighs little.
            slowdown.learn(seconds / expected, 1.0 - min(1.0, x[0] * model.values[0] / expected))
        model.learn(x, seconds / slowdown.value)
        self.prefill = PrefillRates(*model.values)

    def learn_late(self, new: int, cached: int, seconds: float, slowdown: Slowdown) -> None:
        """A prefill alone on its worker was given up after `seconds`. Where that is more than was expected, the worker
        is at least so slow; of the pool's model it says nothing."""
        expected = self.prefill_s(new, cached)
        if self.warm and seconds > slowdown.value * expected:
            slowdown.learn(seconds / expected, 1.0 - min(1.0, self.prefill.overhead_s / expected))

    def learn_inter_token(self, batch: float, seconds: float) -> None:
        """Mean seconds between tokens of one stream while about `batch` requests were running."""
        self._inter_token.learn((1.0, batch), seconds)
        self.inter_token = InterTokenRates(*self._inter_token.values)

    def learn_prompt(self, tokens: int) -> None:
        """A prompt of `tokens` was placed."""
        mean = self.prompt_tokens
        self.prompt_tokens = mean + 0.02 * (tokens - mean) if mean else float(tokens)

    def learn_text(self, text_bytes: int, tokens: int) -> None:
        """A prompt of `text_bytes` bytes was `tokens` tokens in the worker's own count; 0 bytes say nothing."""
        if text_bytes <= 0 or tokens <= 0:
            return
        keep = 1.0 - 1.0 / _MEMORY
        self._text_bytes = self._text_bytes * keep + text_bytes
        self._text_tokens = self._text_tokens * keep + tokens
        self.bytes_a_token = min(max(self._text_bytes / self._text_tokens, _TEXT_BOUNDS[0]), _TEXT_BOUNDS[1])

    def learn_output(self, tokens: float) -> None:
        """An answer of `tokens` ended by itself."""
        self.output_tokens += 0.02 * (tokens - self.output_tokens)


class Slowdown:
    """How much longer one worker takes than its pool's model says: `value`, 1 = as fast, 2 = twice as long.

    The weighted mean of ln(observed / predicted) over about the last 32 observations, drawn to 0 by a prior worth two
    more, less two standard errors of that mean towards 0 (soft threshold): a difference that may be chance is none.
    Without it, noise would make one of several equal workers look fastest and draw every cold request. One observation
    that is far from their mean counts at most a factor of three away from the value before it.

    Three observations in a row that are all slower (or all faster) than their mean so far by more than a factor of two
    say that the worker has changed: they are all that is known from then on. A worker that became ten times slower is
    known to be slow after three prefills, not after a hundred. That it is slow is forgotten when nothing has shown it
    for ten seconds, within about a minute: who gets nothing because it was slow is tried again.
    """

    __slots__ = ("_quiet", "_run", "_squares", "_sum", "_weight", "samples", "value")

    _MEMORY = 32.0
    _PRIOR_WEIGHT = 2.0
    _PRIOR_VARIANCE = 0.04
    """Of the logarithm: first-byte times of one worker scatter by 20 % at least."""
    _ERRORS = 2.0
    _STEP = math.log(3.0)
    _BOUND = math.log(100.0)
    _FAR = math.log(2.0)
    _RUN = 3
    _TELLING = 0.5
    """Weight of an observation that may say so: most of its time was work whose speed is in question."""
    _QUIET_TICKS = 20
    _FADE = 1.0 / 30
    """A tick of half a second."""

    def __init__(self) -> None:
        self._run: list[tuple[float, float]] = []
        self._quiet = 0
        self._sum = 0.0
        self._squares = 0.0
        self._weight = 0.0
        self.samples = 0
        self.value = 1.0

    def learn(self, ratio: float, weight: float = 1.0) -> None:
        """`ratio` = observed / predicted seconds at slowdown 1, positive; `weight` (0..1) = what share of it is work
        whose speed is in question."""
        now, seen = math.log(self.value), math.log(ratio)
        self.samples += 1
        self._quiet = 0
        known = self._sum / self._weight if self._weight > 0.0 else now
        if abs(seen - known) >= self._FAR:
            if self._changed(seen, known, weight):
                return
            seen = min(max(seen, now - self._STEP), now + self._STEP)
        elif weight >= self._TELLING:
            self._run.clear()
        keep = 1.0 - 1.0 / self._MEMORY
        self._sum = self._sum * keep + weight * seen
        self._squares = self._squares * keep + weight * seen * seen
        self._weight = self._weight * keep + weight
        self._settle()

    def _changed(self, seen: float, known: float, weight: float) -> bool:
        """Whether this observation, far from what is known, and those before it are of another speed: then they are all
        that is known."""
        run = self._run
        if weight < self._TELLING:
            return False
        if run and (run[-1][0] > known) != (seen > known):
            run.clear()
        run.append((min(max(seen, -self._BOUND), self._BOUND), weight))
        if len(run) < self._RUN:
            return False
        self._sum = sum(part * at for at, part in run)
        self._squares = sum(part * at * at for at, part in run)
        self._weight = sum(part for _, part in run)
        run.clear()
        self._settle()
        return True

    def tick(self) -> None:
        """About twice a second: that it is slow is forgotten when nothing has shown it for a while."""
        if self.value > 1.0:
            self._quiet += 1
            if self._quiet > self._QUIET_TICKS:
                self._sum, self._squares, self._weight = (
                    (1.0 - self._FADE) * number for number in (self._sum, self._squares, self._weight)
                )
                self._settle()

    def learned(self) -> list[float]:
        """What it knows, for `take_over`."""
        return [float(self.samples), self._sum, self._squares, self._weight]

    def take_over(self, learned: Sequence[float]) -> None:
        """Go on from what another one knew; what is none of it is ignored."""
        if len(learned) != 4 or not (1 <= learned[0] <= _MOST_SAMPLES and 0.0 <= learned[3] <= self._MEMORY):
            return
        _, total, squares, weight = learned
        far = 2.0 * self._BOUND  # further from 0 than any observation counts
        if not (abs(total) <= far * weight and 0.0 <= squares <= far * far * weight):
            return
        self.samples = int(learned[0])
        self._sum, self._squares, self._weight = total, squares, weight
        self._settle()

    def _settle(self) -> None:
        total = self._weight + self._PRIOR_WEIGHT
        mean = self._sum / total
        scatter = self._squares - self._weight * (self._sum / self._weight) ** 2 if self._weight > 0.0 else 0.0
        variance = (max(0.0, scatter) + self._PRIOR_WEIGHT * self._PRIOR_VARIANCE) / total
        doubt = self._ERRORS * math.sqrt(variance / total)
        size = min(max(0.0, abs(mean) - doubt), self._BOUND)
        self.value = math.exp(math.copysign(size, mean))
