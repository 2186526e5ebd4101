"""The operators' port: metrics, fleet, sessions, decisions, explain. `admin_app` builds it from `AdminViews`."""

from gateway.admin.app import admin_app
from gateway.admin.state_answers import ConfigAnswer, Readiness
from gateway.admin.views import AdminSettings, AdminViews

__all__ = ["AdminSettings", "AdminViews", "ConfigAnswer", "Readiness", "admin_app"]
