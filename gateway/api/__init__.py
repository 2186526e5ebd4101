"""The client API: what the gateway reads of a request body, and the one change it makes to it.

Face: `parse_request`, `ask_for_usage`. Answers and errors are written by `edge`.
"""

from gateway.api.request import ask_for_usage, parse_request

__all__ = ["ask_for_usage", "parse_request"]
