"""What operators see of requests and of the process: metrics and logs. It consumes records and reads owners.

Face: `RequestMetrics` (counts outcomes), `Readings` (what owners say), `Exposition` (the text of `/metrics`),
`set_up_logging` and `RequestLog`, `describe_metrics` for the reference page.
"""

from gateway.telemetry.exposition import CONTENT_TYPE, Exposition
from gateway.telemetry.log import Logs, RequestLog, set_up_logging
from gateway.telemetry.metrics import describe_metrics
from gateway.telemetry.readings import (
    ClientReading,
    ConfigReading,
    FeedReading,
    IndexReading,
    LifeReading,
    LoadSocketReading,
    PeerReading,
    PoolReading,
    PrefixReading,
    Readings,
    ReplicaReading,
    SourceReading,
    WorkerReading,
)
from gateway.telemetry.requests import RequestMetrics

__all__ = [
    "CONTENT_TYPE",
    "ClientReading",
    "ConfigReading",
    "Exposition",
    "FeedReading",
    "IndexReading",
    "LifeReading",
    "LoadSocketReading",
    "Logs",
    "PeerReading",
    "PoolReading",
    "PrefixReading",
    "Readings",
    "ReplicaReading",
    "RequestLog",
    "RequestMetrics",
    "SourceReading",
    "WorkerReading",
    "describe_metrics",
    "set_up_logging",
]
