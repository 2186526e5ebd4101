"""The composition root: makes every part once, joins them, runs them, takes them down.

Face: `Gateway` (one process's gateway), `Supervisor` (its background tasks).
"""

from gateway.runtime.gateway import Gateway, Ports
from gateway.runtime.supervisor import Supervisor

__all__ = ["Gateway", "Ports", "Supervisor"]
