"""The section of the store that replicas share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator

from gateway.settings.section import Seconds, Section
from gateway.store_address import StoreAddress, parse_store_url


class RedisSettings(Section):
    """Redis, over which replicas share load, placements and sessions (`docs/guides/replicas.md`)."""

    url: SecretStr | None = Field(
        None,
        description="`redis://host:6379/0`, `rediss://` for TLS, `redis+sentinel://host:26379,host/service`, "
        "`redis+cluster://host:6379,host`; none: this replica is alone.",
    )
    prefix: str = Field(
        "kvgate",
        pattern=r"^[A-Za-z0-9:._-]{1,64}$",
        description="Begins every key and channel: replicas of one fleet have the same.",
    )
    username: str | None = Field(None, description="ACL user; none: the one of the URL, or the default user.")
    password: SecretStr | None = Field(None, description="Its password, where it is not in the URL.")
    sentinel_password: SecretStr | None = Field(None, description="Password of the Sentinels, where they have one.")
    ca: Path | None = Field(None, description="Authorities (PEM) that are believed; none: the system's.")
    cert: Path | None = Field(None, description="Client certificate (PEM) for a server that wants one.")
    key: Path | None = Field(None, description="Its private key, without a password; none: in the same file.")
    snapshot_s: Seconds = Field(
        30, ge=1, description="Seconds between two copies of the index that a process which starts begins with."
    )
    timeout_s: Seconds = Field(1, description="What the store has not done by then has failed.")

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_store_url(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _complete(self) -> RedisSettings:
        if self.cert is None and self.key is not None:
            raise ValueError("`cert` is missing")
        return self

    def address(self) -> StoreAddress | None:
        """Where the store is; None without one."""
        if self.url is None:
            return None
        address = parse_store_url(self.url.get_secret_value())
        return replace(
            address,
            username=self.username or address.username,
            password=self.password.get_secret_value() if self.password else address.password,
            sentinel_password=self.sentinel_password.get_secret_value() if self.sentinel_password else None,
            ca=self.ca,
            cert=self.cert,
            key=self.key,
            timeout_s=self.timeout_s,
        )
