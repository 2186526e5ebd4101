"""Secrets and certificates as they are configured: API keys of clients, files for TLS.

Rules:
1. Keys and hashes are `SecretStr`: printing the tree masks them. No message about a wrong entry repeats one.
2. A file of keys holds hashes, never keys: whoever reads it cannot use it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

MIN_KEY_CHARS = 20
"""Shorter keys could be found by trying; `kvgate key` makes them of 256 random bits."""

MAX_KEYS = 100_000

_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")

Rate = Annotated[int, Field(ge=1, le=1 << 40)]


class KeySettings(BaseModel):
    """One API key: its SHA-256 or, outside the keys file, itself; who holds it and what it allows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hash: SecretStr | None = Field(None, description="SHA-256 of the key in hex, as `kvgate key` prints it.")
    key: SecretStr | None = Field(None, description="Instead: the key itself, from the environment of the process.")
    tenant: str = Field(
        pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Who holds the key; several keys may be of one tenant."
    )
    models: tuple[str, ...] | None = Field(None, description="Served names it is good for; none: all.")
    pools: tuple[str, ...] | None = Field(
        None, description="Labels (`workers[].pool`) of the workers it may use; none: all."
    )
    requests_per_minute: Rate | None = Field(None, description="Requests a minute; none: no limit.")
    tokens_per_minute: Rate | None = Field(None, description="Prompt and answer tokens a minute; none: no limit.")

    best_class: Literal["high", "normal", "low"] = Field(
        "normal",
        description="Best priority class of its requests (docs/concepts/queue.md): one that asks for a better is "
        "treated as of this one, so that no client passes the others by writing `priority: -1`.",
    )

    @field_validator("hash")
    @classmethod
    def _is_sha256(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not _HASH.fullmatch(value.get_secret_value()):
            raise ValueError("expected the SHA-256 of a key, 64 hex digits; `kvgate key` prints one")
        return value

    @field_validator("key")
    @classmethod
    def _is_key(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value is not None else ""
        if value is not None and not (len(text) >= MIN_KEY_CHARS and text.isascii() and text.isprintable()):
            raise ValueError(f"expected {MIN_KEY_CHARS} or more ASCII characters; `kvgate key` makes one")
        return value

    @model_validator(mode="after")
    def _one_secret(self) -> KeySettings:
        if (self.key is None) == (self.hash is None):
            raise ValueError("give `hash`, or `key`, and not both")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key, 32 bytes."""
        if self.key is not None:
            return bytes.fromhex(key_hash(self.key.get_secret_value()))
        assert self.hash is not None
        return bytes.fromhex(self.hash.get_secret_value().removeprefix("sha256:"))


class ServerTls(BaseModel):
    """TLS on one of the ports."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cert: Path | None = Field(
        None, description="Certificate chain (PEM): the port speaks https. Read again when it changes."
    )
    key: Path | None = Field(None, description="Its private key, without a password; none: in the same file.")
    client_ca: Path | None = Field(
        None, description="Authorities (PEM) one of which must have signed a client's certificate; none: no check."
    )

    @model_validator(mode="after")
    def _complete(self) -> ServerTls:
        if self.cert is None and (self.key is not None or self.client_ca is not None):
            raise ValueError("`cert` is missing")
        return self


class WorkerTls(BaseModel):
    """How workers with an `https://` URL are reached; their name must be in their certificate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: Path | None = Field(None, description="Authorities (PEM) that are believed; none: the system's.")
    cert: Path | None = Field(None, description="Client certificate (PEM) for workers that want one.")
    key: Path | None = Field(None, description="Its private key, without a password; none: in the same file.")

    @model_validator(mode="after")
    def _complete(self) -> WorkerTls:
        if self.cert is None and self.key is not None:
            raise ValueError("`cert` is missing")
        return self


def make_key() -> str:
    """A new API key: 256 random bits."""
    return f"kvg-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()
