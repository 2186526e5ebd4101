"""Who a client is, and what its API key allows: tenant, models, requests and tokens a minute.

Rules:
1. A key is looked up by its SHA-256. Keys are long random strings, so that the time of a look-up tells nothing of use.
2. Rates are buckets that hold one minute's worth. A request may begin while something is left; what it took beyond that
   is owed. So none is too large for ever, and `retry-after` is the time until the debt is paid.
3. A request's tokens are taken as counted or estimated when it is placed, and put right by what its worker reported.
4. There are as many buckets as there are keys. A reload keeps the buckets of keys whose rates stay.

It does no I/O and reads no clock: `now` is in seconds, monotonic.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.errors import ClientError, UnknownModel
from gateway.pool import Pool
from gateway.records import Endpoint, Outcome, Result
from gateway.router import Router

_SCHEME = b"bearer "
_MAX_KEY_BYTES = 512
_NAME_SHOWN = 128
"""Characters of a client's model name an error repeats."""
_NAMES_SHOWN = 5


class InvalidKey(ClientError):
    """No API key, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class RateLimited(ClientError):
    """The key's requests or tokens of a minute are used up; `retry-after` says when there are some again."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Bucket:
    """Fills at `per_minute / 60` a second up to `per_minute`; may be overdrawn."""

    __slots__ = ("_at", "_left", "_per_s", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._per_s = per_minute / 60.0
        self._left = float(per_minute)
        self._at = -math.inf

    def left(self, now: float) -> float:
        """What is there; below 0 when more was taken than there was."""
        if now > self._at:
            self._left = min(self._left + (now - self._at) * self._per_s, float(self.per_minute))
            self._at = now
        return self._left

    def wait_s(self, now: float) -> float:
        """Seconds until something may be taken; 0: now."""
        return max(0.0, (1.0 - self.left(now)) / self._per_s)

    def take(self, amount: float, now: float) -> None:
        """Take, whatever is left; a negative amount is given back."""
        self._left = min(self.left(now) - amount, float(self.per_minute))


@dataclass(frozen=True, slots=True)
class Access:
    """What one API key allows. `models` are served names, `labels` those of workers, None: all; a rate of None is no
    limit. `least_priority`: the lowest number its requests' `priority` may be, lower being sooner; None: any."""

    tenant: str
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    labels: frozenset[str] | None = None
    least_priority: int | None = None


class Tenant:
    """The holder of one key: what it allows, and what is left of its rates."""

    __slots__ = ("access", "requests", "tokens")

    def __init__(self, access: Access, before: Tenant | None = None) -> None:
        self.access = access
        requests, tokens = (before.requests, before.tokens) if before is not None else (None, None)
        self.requests: Bucket | None = _bucket(access.requests_per_minute, requests)
        self.tokens: Bucket | None = _bucket(access.tokens_per_minute, tokens)

    def may_use(self, model: str) -> bool:
        """Whether the key is good for a served name."""
        return self.access.models is None or model in self.access.models

    def check(self, now: float) -> None:
        """Raises RateLimited when nothing is left."""
        if self.requests is not None and self.requests.left(now) < 1:
            raise _refusal(self.requests, "requests", now)
        if self.tokens is not None and self.tokens.left(now) < 1:
            raise _refusal(self.tokens, "tokens", now)

    def take(self, tokens: int, now: float) -> None:
        """One request of so many prompt tokens. Raises RateLimited, and then takes nothing."""
        self.check(now)
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is not None:
            self.tokens.take(tokens, now)


class Visit:
    """One request under a key, from its head to its end."""

    __slots__ = ("_taken", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._taken: int | None = None

    def pool(
        self, router: Router, model: str, now: float, *, asked: str | None = None, adapters: Sequence[str] = ()
    ) -> Pool:
        """The pool of a model. The client `asked` for it under a name that its key must be good for, and so must it be
        for `adapters` that the body names beside it, alone or as `model:adapter`. Raises UnknownModel also for one the
        key is not good for, and names no others; RateLimited; BadRequest for no name among several models."""
        tenant = self.tenant
        tenant.check(now)
        if tenant.access.models is None:
            return router.pool(model)
        asked = model if asked is None else asked
        if asked and not tenant.may_use(asked):
            raise self._unknown(asked)
        for adapter in adapters:
            if not tenant.may_use(adapter) and not tenant.may_use(f"{asked}:{adapter}"):
                raise self._unknown(adapter)
        try:
            pool = router.pool(model)
        except UnknownModel:
            raise self._unknown(asked) from None
        if not model and not tenant.may_use(pool.name):
            raise self._unknown(model)
        return pool

    def take(self, tokens: int, now: float) -> None:
        """The request is about to be placed. Raises RateLimited."""
        self.tenant.take(tokens, now)
        self._taken = tokens

    def settle(self, outcome: Outcome) -> None:
        """The request is over: what it used is known, or nobody worked for it."""
        taken, self._taken = self._taken, None
        if taken is None or self.tenant.tokens is None:
            return
        used = taken
        if outcome.worker is None or (outcome.completion_tokens is None and outcome.result is Result.WORKER_FAILED):
            used = 0
        elif outcome.completion_tokens is not None:
            used = outcome.prompt_tokens + outcome.completion_tokens
        if used != taken:
            self.tenant.tokens.take(used - taken, outcome.ended_at)

    def _unknown(self, model: str) -> UnknownModel:
        shown = model if len(model) <= _NAME_SHOWN else model[:_NAME_SHOWN] + "..."
        names = sorted(self.tenant.access.models or ())
        there = f"; there are {', '.join(names[:_NAMES_SHOWN])}" if names else ""
        return UnknownModel(f"model {shown!r} is not served, or not to this key{there}", param="model")


class Keys:
    """All API keys in force, by SHA-256 digest."""

    def __init__(self, entries: Mapping[bytes, Access]) -> None:
        self._tenants: dict[bytes, Tenant] = {}
        self.replace(entries)

    def __len__(self) -> int:
        return len(self._tenants)

    def replace(self, entries: Mapping[bytes, Access]) -> None:
        """From now on these; requests that have begun keep what they came with."""
        before = self._tenants
        self._tenants = {digest: Tenant(access, before.get(digest)) for digest, access in entries.items()}

    def find(self, fields: Mapping[bytes, bytes], endpoint: Endpoint | None) -> Tenant:
        """The holder of the key in a request's headers (lower-case names): `authorization: Bearer`, or `x-api-key` as
        Anthropic's clients send it, on `/v1/messages` and outside inference. Raises InvalidKey."""
        key = fields.get(b"authorization")
        if key is not None:
            key = key[len(_SCHEME) :].strip() if key[: len(_SCHEME)].lower() == _SCHEME else b""
        elif endpoint is Endpoint.MESSAGES or endpoint is None:
            key = fields.get(b"x-api-key")
        if not key:
            raise InvalidKey("no API key was given; send it as authorization: Bearer <key>")
        tenant = self._tenants.get(hashlib.sha256(key).digest()) if len(key) <= _MAX_KEY_BYTES else None
        if tenant is None:
            raise InvalidKey("the API key is not known here")
        return tenant


def _refusal(bucket: Bucket, what: str, now: float) -> RateLimited:
    wait_s = bucket.wait_s(now)
    said = f"this key may use {bucket.per_minute} {what} a minute and has none left"
    return RateLimited(f"{said}; try again in {wait_s:.1f} s", retry_after_s=wait_s)


def _bucket(per_minute: int | None, before: Bucket | None) -> Bucket | None:
    if per_minute is None:
        return None
    return before if before is not None and before.per_minute == per_minute else Bucket(per_minute)
