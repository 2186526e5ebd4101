"""The client API: what the gateway reads of a request body, and the changes it makes to it.

Face: `parse_request`, `ask_for_model`, `ask_for_usage`, `ask_for_rank`, `ask_for_salt`,
`ask_for_session`, `ask_for_usual_priority`. Answers and errors are written by `edge`.
"""

from gateway.api.asking import (
    ask_for_model,
    ask_for_rank,
    ask_for_salt,
    ask_for_session,
    ask_for_usage,
    ask_for_usual_priority,
)
from gateway.api.request import parse_request

__all__ = [
    "ask_for_model",
    "ask_for_rank",
    "ask_for_salt",
    "ask_for_session",
    "ask_for_usage",
    "ask_for_usual_priority",
    "parse_request",
]
