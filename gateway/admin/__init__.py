"""The operators' port: metrics, fleet, sessions, decisions, explain. `admin_app` builds it from `AdminViews`."""

from gateway.admin.app import admin_app
from gateway.admin.state_answers import Readiness
from gateway.admin.views import AdminViews

__all__ = ["AdminViews", "Readiness", "admin_app"]
