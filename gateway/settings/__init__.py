"""The configuration as one frozen tree of sections, one file a group of sections; nothing here reads anything.

Rules:
1. A key exists only when it does something; it has a default, a description and its unit in its name.
2. Unknown keys and wrong values are refused here; `gateway/config.py` reads the sources and says what is wrong.
3. Secrets are `SecretStr`: printing the tree masks them.
"""

from gateway.settings.changes import all_keys, changed_keys, value_of, with_keys_of
from gateway.settings.discovery import (
    DiscoverySettings,
    DnsSettings,
    KubernetesSettings,
    RegistrySettings,
    name_server,
)
from gateway.settings.fleet import (
    HealthSettings,
    LoadSettings,
    ModelSettings,
    WorkerSettings,
    WorkerTraits,
    default_worker_name,
    worker_url,
)
from gateway.settings.replicas import RedisSettings
from gateway.settings.requests import (
    POLICIES,
    AdmissionSettings,
    AffinitySettings,
    IndexSettings,
    PhaseSettings,
    RetrySettings,
    RoutingSettings,
    TimeoutSettings,
)
from gateway.settings.schema import json_schema, unit_of
from gateway.settings.section import WHY
from gateway.settings.server import AuthSettings, ServerSettings, TelemetrySettings, is_loopback
from gateway.settings.tree import ENV_PREFIX, Settings

__all__ = [
    "ENV_PREFIX",
    "POLICIES",
    "WHY",
    "AdmissionSettings",
    "AffinitySettings",
    "AuthSettings",
    "DiscoverySettings",
    "DnsSettings",
    "HealthSettings",
    "IndexSettings",
    "KubernetesSettings",
    "LoadSettings",
    "ModelSettings",
    "PhaseSettings",
    "RedisSettings",
    "RegistrySettings",
    "RetrySettings",
    "RoutingSettings",
    "ServerSettings",
    "Settings",
    "TelemetrySettings",
    "TimeoutSettings",
    "WorkerSettings",
    "WorkerTraits",
    "all_keys",
    "changed_keys",
    "default_worker_name",
    "is_loopback",
    "json_schema",
    "name_server",
    "unit_of",
    "value_of",
    "with_keys_of",
    "worker_url",
]
