"""The client port: uvicorn's connections, with the inference paths spliced to the workers.

Face: `Edge` with its `EdgeSettings` (`EdgeLimits`, `PhaseTimeouts` and `HedgeRules` among them), `Keys` and the
`Access` each gives, `client_protocol` for `uvicorn.Config(http=...)`, `client_app` for everything that is not
inference, `Cors`, `request_id_maker`, `Shadows`, `late_after`.
"""

from gateway.edge.app import client_app
from gateway.edge.auth import Access, Keys
from gateway.edge.gate import Edge, EdgeLimits, EdgeSettings, PhaseTimeouts, request_id_maker
from gateway.edge.hedge import HedgeRules, late_after
from gateway.edge.protocol import client_protocol
from gateway.edge.responses import Cors
from gateway.edge.shadow import Shadows

__all__ = [
    "Access",
    "Cors",
    "Edge",
    "EdgeLimits",
    "EdgeSettings",
    "HedgeRules",
    "Keys",
    "PhaseTimeouts",
    "Shadows",
    "client_app",
    "client_protocol",
    "late_after",
    "request_id_maker",
]
