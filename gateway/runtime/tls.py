"""TLS: the certificate that clients are shown, and what is believed of workers.

Rules:
1. A file that cannot be used stops the start, by the name of its key.
2. Certificates that are replaced are used from the next handshake on: whoever renews them need not restart anything. A
   new pair that cannot be used changes nothing, and the log says why.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from gateway.config import ConfigError
from gateway.credentials import ServerTls, WorkerTls

_Made = TypeVar("_Made")


class Certificate:
    """A certificate and its key in a context; `renew` when their files have changed."""

    def __init__(self, section: str, context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
        """Loads them. Raises ConfigError."""
        self.section = section
        self._context = context
        self._files = cert, key
        self._load_into(context)
        self._log = structlog.get_logger("kvgate.tls")

    def files(self) -> list[Path]:
        """What it is made of."""
        return [path for path in self._files if path is not None]

    async def renew(self) -> None:
        """Load the files again; what cannot be used changes nothing."""
        try:
            self.load()
        except ConfigError as error:
            self._log.error("certificate not used: the one before stays in force", problem=str(error))
        else:
            self._log.info("certificate loaded again", section=self.section)

    def load(self) -> None:
        """The same. Raises ConfigError."""
        # First into another context: a certificate without its key would spoil the one in use.
        self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._load_into(self._context)

    def _load_into(self, context: ssl.SSLContext) -> None:
        cert, key = self._files
        # The password keeps OpenSSL from asking for one on the terminal: a key that needs one is an error.
        _try(f"{self.section}.cert, {self.section}.key", lambda: context.load_cert_chain(cert, key, password=""))


def server_context(tls: ServerTls, certificates: list[Certificate], *, section: str) -> ssl.SSLContext | None:
    """The context of a port, None for plain HTTP; `section` is where it is configured. Its certificate joins
    `certificates`. Raises ConfigError."""
    if tls.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    certificates.append(Certificate(section, context, tls.cert, tls.key))
    authority = tls.client_ca
    if authority is not None:
        _try(f"{section}.client_ca", lambda: context.load_verify_locations(authority))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def worker_context(tls: WorkerTls, certificates: list[Certificate]) -> ssl.SSLContext:
    """What `https://` workers are reached with: their certificates are checked against `ca`, or the system's
    authorities, and their names against the URL. Raises ConfigError."""
    authority = tls.ca
    if authority is None:
        context = ssl.create_default_context()
    else:
        context = _try("worker_tls.ca", lambda: ssl.create_default_context(cafile=authority))
    if tls.cert is not None:
        certificates.append(Certificate("worker_tls", context, tls.cert, tls.key))
    return context


def _try(key: str, make: Callable[[], _Made]) -> _Made:
    try:
        return make()
    except OSError as error:  # SSLError is one
        raise ConfigError([f"{key}: cannot be used: {error.strerror or error}"]) from error
