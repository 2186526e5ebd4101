"""Certificates made for a test: an authority, and what it signed, for 127.0.0.1."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Signed:
    """A certificate and its key."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates; its own is at `ca`."""

    directory: Path
    name: str

    @property
    def ca(self) -> Path:
        """Its certificate."""
        return self.directory / f"{self.name}.pem"

    def sign(self, name: str, *, address: str = "127.0.0.1") -> Signed:
        """A new certificate for an address, usable by servers and clients."""
        signed = Signed(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        _openssl(
            f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} "
            f"-CA {self.ca} -CAkey {self.directory / self.name}.key -addext subjectAltName=IP:{address} "
            f"-addext basicConstraints=critical,CA:FALSE -out {signed.cert} -keyout {signed.key}"
        )
        return signed

    def server(self, signed: Signed) -> ssl.SSLContext:
        """A plain server's context."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(signed.cert, signed.key)
        return context

    def client(self, signed: Signed | None = None) -> ssl.SSLContext:
        """A client that believes this authority, with a certificate of its own or without."""
        context = ssl.create_default_context(cafile=self.ca)
        if signed is not None:
            context.load_cert_chain(signed.cert, signed.key)
        return context


def authority(directory: Path, name: str = "authority") -> Authority:
    """A new one."""
    made = Authority(directory, name)
    _openssl(
        f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} "
        f"-addext keyUsage=critical,keyCertSign -out {made.ca} -keyout {directory / name}.key"
    )
    return made


def _openssl(arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True, timeout=60)
