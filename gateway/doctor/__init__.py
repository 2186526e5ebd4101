"""`kvgate doctor`: is each worker set up so that kvgate can use its cache, and if not, what to change.

Asking (`asking`, `sockets`, `running`) and judging (`checks`) are apart: a check is a pure function over a record of
what was asked. Findings come from `gateway.findings`, like those of the running gateway.

Face: `check_fleet` with `Plan` (`new_prompt`), `Tools`, `Checked`; `read_gateway`, `unseen`, `GatewaySeen`; `worst`.
"""

from gateway.doctor.asking import Plan, Tools, new_prompt
from gateway.doctor.fleet import Checked, check_fleet, worst
from gateway.doctor.running import GatewaySeen, read_gateway, unseen

__all__ = ["Checked", "GatewaySeen", "Plan", "Tools", "check_fleet", "new_prompt", "read_gateway", "unseen", "worst"]
