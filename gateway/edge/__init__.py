"""The client port: uvicorn's connections, with the inference paths spliced to the workers.

Face: `Edge` and its `EdgeLimits`, `client_protocol` for `uvicorn.Config(http=...)`, `client_app` for everything that is
not inference, `request_id_maker`.
"""

from gateway.edge.app import client_app
from gateway.edge.gate import Edge, EdgeLimits, request_id_maker
from gateway.edge.protocol import client_protocol

__all__ = ["Edge", "EdgeLimits", "client_app", "client_protocol", "request_id_maker"]
