"""The one client of a running gateway's admin port: explain, doctor and the operating commands ask through it.

Rules:
1. Every failure is an `AdminError` whose message names the address and the likely fix; commands print it and end with
   code 1.
2. The address and the token are those given, else those of the configuration and its environment, as the gateway itself
   would read them.
3. Proxies and netrc of the environment are not used: the token goes to the admin port and nowhere else.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote

import typer

from gateway.cli.options import read_or_exit

if TYPE_CHECKING:
    import httpx
    from pydantic import BaseModel

    from gateway.settings import Settings

AdminOption = Annotated[
    str | None,
    typer.Option("--admin", help="Admin address of the running gateway.", show_default="from the configuration"),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        help="Admin token of the gateway. Others can read it in the list of processes: KVGATE_AUTH__ADMIN_TOKEN or "
        "--config keep it to yourself.",
        show_default="auth.admin_token of the settings",
    ),
]

_TIMEOUT_S = 30.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""A gateway that listens everywhere is asked on the machine's own address."""

_Answer = TypeVar("_Answer", bound="BaseModel")


class AdminError(Exception):
    """The gateway could not be asked, or refused. `code` is the word of its error, "" where none of its own came."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class AdminPort:
    """Requests to one gateway. `address` is its base URL, with or without `http://`."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = (address if "://" in address else f"http://{address}").rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._has_token = token is not None

    def get(self, path: str, params: Mapping[str, str | int | float] | None = None) -> str:
        """The text of an answer with a 2xx status; so for all of these. Raises AdminError."""
        return self.ask("GET", path, params=params)

    def read(self, kind: type[_Answer], path: str, params: Mapping[str, str | int | float] | None = None) -> _Answer:
        """The same as a record."""
        return self.parse(kind, self.get(path, params))

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | float] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Any request; `body` is JSON."""
        import httpx

        sent = {**self._headers, **(headers or {})}
        if body is not None:
            sent["content-type"] = "application/json"
        try:
            # The system's authorities, or those that SSL_CERT_FILE names.
            verify = ssl.create_default_context() if self.address.startswith("https:") else False
            with httpx.Client(trust_env=False, timeout=_TIMEOUT_S, verify=verify) as http:
                answer = http.request(method, self.address + path, params=params, content=body, headers=sent)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AdminError(
                f"no gateway answers at {self.address}: {error}. Is `kvgate serve` running? "
                "--admin takes its admin port, such as http://127.0.0.1:8001"
            ) from error
        if not answer.is_success:
            raise self._refused(path, answer)
        return answer.text

    def parse(self, kind: type[_Answer], text: str) -> _Answer:
        """An answer's text as a record. Raises AdminError when it is none."""
        from pydantic import ValidationError

        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise AdminError(
                f"{self.address} answered something unexpected ({where}: {first['msg']}); is this kvgate's admin port, "
                "and of the same version?"
            ) from error

    def _refused(self, path: str, answer: httpx.Response) -> AdminError:
        from pydantic import ValidationError

        from gateway.admin.answer import ErrorAnswer

        try:
            error = ErrorAnswer.model_validate_json(answer.text).error
        except ValidationError:
            return AdminError(f"{self.address}{path} answered {answer.status_code}; is this the admin port of kvgate?")
        match error.code:
            case "invalid_admin_token":
                given = "the one given is wrong" if self._has_token else "none was given"
                return AdminError(
                    f"{self.address} wants its admin token, and {given}: set KVGATE_AUTH__ADMIN_TOKEN, or give the "
                    "gateway's --config or --token",
                    code=error.code,
                )
            case "not_found":
                return AdminError(
                    f"{self.address}{path}: {error.message}; --admin takes the address of the admin port",
                    code=error.code,
                )
        return AdminError(error.message, code=error.code)


def worker_path(name: str, action: str = "") -> str:
    """Path of a worker, or of something done to it."""
    return f"/admin/workers/{quote(name, safe='')}" + (f"/{action}" if action else "")


def admin_port(admin: str | None, token: str | None, config: Path | None) -> AdminPort:
    """The port by a command's options (rule 2); a configuration with mistakes ends the command with code 2."""
    return port_of(read_or_exit(config).settings, admin, token)


def port_of(settings: Settings, admin: str | None = None, token: str | None = None) -> AdminPort:
    """The port of a gateway with these settings, unless another one is given."""
    if token is None and settings.auth.admin_token is not None:
        token = settings.auth.admin_token.get_secret_value()
    host = _ANY.get(settings.server.admin_host, settings.server.admin_host)
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.server.admin_tls.cert is not None else "http"
    return AdminPort(admin or f"{scheme}://{shown}:{settings.server.admin_port}", token)


@contextmanager
def told() -> Iterator[None]:
    """An AdminError inside is printed and ends the command with code 1."""
    try:
        yield
    except AdminError as error:
        typer.echo(f"kvgate: {error.message}", err=True)
        raise typer.Exit(1) from error
