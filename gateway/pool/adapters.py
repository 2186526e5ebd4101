"""Which adapters a worker has on its GPU, as far as can be known from outside.

Engines keep a fixed number of adapters there and let the one unused for the longest time go (vLLM `--max-loras`, SGLang
`--max-loras-per-batch`). vLLM names those its requests use at this moment and says how many fit
(`vllm:lora_requests_info`); SGLang only says how many fit (`sglang:lora_pool_slots_total`). So the last ones used here,
by our requests or by what the worker names, are taken to be there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gateway.records import LoadSample

SLOTS = 8
"""Assumed while the worker does not say: SGLang's default. vLLM says."""

MOST_SLOTS = 1024


class Adapters:
    """Of one worker, by name; the one used last stands last."""

    __slots__ = ("_loaded", "_slots", "_started")

    def __init__(self) -> None:
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._slots = SLOTS
        self._started: float | None = None

    @property
    def loaded(self) -> tuple[str, ...]:
        """Those that are taken to be there, the one used last first."""
        return tuple(reversed(self._loaded))

    def absent(self, names: Iterable[str]) -> int:
        """How many of them would have to be loaded."""
        return sum(name not in self._loaded for name in names)

    def use(self, names: Iterable[str]) -> None:
        """A request with them is sent, or the worker says that one is there."""
        for name in names:
            self._loaded[name] = None
            self._loaded.move_to_end(name)
        while len(self._loaded) > self._slots:
            self._loaded.popitem(last=False)

    def fit(self, slots: int) -> None:
        """The worker says how many it can hold."""
        self._slots = max(1, min(slots, MOST_SLOTS))
        self.use(())

    def observe(self, sample: LoadSample) -> None:
        """What the worker says; one that has started anew has none."""
        started = sample.start_time_unix
        if started is not None:
            if self._started is not None and started != self._started:
                self._loaded.clear()
            self._started = started
        if sample.adapter_slots is not None:
            self.fit(sample.adapter_slots)
        if sample.adapters:
            self.use(sample.adapters)
