"""The section `discovery`: where workers come from beside the list `workers`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gateway.settings.fleet import WorkerTraits, worker_url
from gateway.settings.section import Port, Seconds, Section


class DnsSettings(WorkerTraits):
    """Workers behind a DNS name. The keys of `workers`, but `url` and `name`, are for all of them."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9.])?$",
        max_length=253,
        description="The name to look up, such as vllm.default.svc.cluster.local.",
    )
    type: Literal["a", "srv"] = Field(
        "a", description="`a`: address records (IPv6 where there are no others); `srv`: SRV records, with ports."
    )
    port: Port | None = Field(None, ge=1, description="Port of the workers; none: 8000, or as the SRV record says.")
    scheme: Literal["http", "https"] = Field("http", description="How workers are talked to.")
    refresh_s: Seconds = Field(10, ge=0.1, description="Seconds between two lookups.")
    grace_s: Seconds = Field(
        30, description="How long the name must have had no addresses at all before its workers leave."
    )
    server: str | None = Field(
        None, description="Address of the name server, `10.0.0.10` or `10.0.0.10:53`; none: the system's."
    )

    @field_validator("server")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            name_server(value)
        return value


class KubernetesSettings(WorkerTraits):
    """Workers in a namespace of Kubernetes. The keys of `workers`, but `url` and `name`, are for all of them; what its
    annotations say of a worker wins."""

    selector: str = Field(
        min_length=1,
        description="Labels of the pods, or of the Service's EndpointSlices: `app=vllm`, "
        "`kubernetes.io/service-name=vllm`.",
    )
    namespace: str | None = Field(
        None,
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="Their namespace; none: inside a cluster the gateway's own.",
    )
    kind: Literal["pods", "endpointslices"] = Field(
        "pods", description="What is looked at: `pods`, or the `endpointslices` of a Service."
    )
    port: Annotated[int, Field(ge=1, le=65_535)] | str | None = Field(
        None, description="Number or name of the workers' port; none: the one named http, else the first, else 8000."
    )
    scheme: Literal["http", "https"] = Field("http", description="How workers are talked to.")
    resync_s: Seconds = Field(
        300, ge=1, description="Seconds after which everything is listed anew; changes are watched in between."
    )
    api_server: str | None = Field(
        None,
        description="URL of the API server, such as https://10.0.0.1:6443; none: inside a cluster the cluster's, with "
        "the service account's `token_file` and `ca_file`.",
    )
    token_file: Path | None = Field(None, description="File with a bearer token, read again for each request.")
    ca_file: Path | None = Field(None, description="Authorities (PEM) of the API server; none: the system's.")

    @field_validator("api_server")
    @classmethod
    def _base_url(cls, value: str | None) -> str | None:
        return None if value is None else worker_url(value)


class RegistrySettings(Section):
    """Workers that announce themselves in the store (`kvgate register`); `{}` switches it on."""

    refresh_s: Seconds = Field(1, ge=0.1, description="Seconds between two looks.")


class DiscoverySettings(Section):
    """Workers that are found beside those of `workers`."""

    dns: tuple[DnsSettings, ...] = Field((), description="Names whose addresses are workers.")
    kubernetes: KubernetesSettings | None = Field(None, description="Pods or Services whose endpoints are workers.")
    registry: RegistrySettings | None = Field(None, description="Workers that announce themselves; needs `redis.url`.")

    @model_validator(mode="after")
    def _each_once(self) -> DiscoverySettings:
        asked = [(entry.name, entry.port) for entry in self.dns]
        for name, port in {one for one in asked if asked.count(one) > 1}:
            raise ValueError(f"dns: {name} is given twice" + (f" with port {port}" if port else ""))
        return self


def name_server(value: str) -> tuple[str, int]:
    """Address and port. Raises ValueError for what is no address."""
    host, port = value, "53"
    if value.startswith("["):
        host, _, rest = value[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif value.count(":") == 1:
        host, _, port = value.partition(":")
    try:
        number = int(port)
        if not 0 < number < 65_536:
            raise ValueError(port)
        return str(ipaddress.ip_address(host)), number
    except ValueError as error:
        raise ValueError(f"{value!r} is no address of a name server; expected one like 10.0.0.10:53") from error
