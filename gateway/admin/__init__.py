"""The operators' port: metrics, fleet, decisions, explain. `admin_app` builds it from `AdminViews`."""

from gateway.admin.answers import Readiness
from gateway.admin.app import AdminViews, admin_app

__all__ = ["AdminViews", "Readiness", "admin_app"]
