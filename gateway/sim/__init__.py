"""Simulated engines: as arithmetic on a virtual clock (`engine`, `replay`), as workers behind real HTTP (`server`), and
in the demo (`demo`). There is no face here: who replays a trace need not load an HTTP server.
"""
