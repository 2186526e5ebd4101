"""The operators' port: metrics, fleet, sessions, decisions, explain.

`app.admin_app` builds it from `views.AdminViews`. What it answers is in `..._answers`, which commands read too: nothing
is imported here, and these modules import what they are made of for its types only, so that a command that asks a
gateway does not load one.
"""
