"""Writes docs/reference/*.md from the code: settings, commands, metrics, errors, findings, admin API.

python docs/generate_reference.py            write the pages
python docs/generate_reference.py --check    exit 1 when a page does not agree with the code
"""

from __future__ import annotations

import importlib
import json
import sys
import typing
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from random import Random

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gateway import errors
from gateway.admin.app import SCHEMA_PATH, admin_app
from gateway.admin.views import AdminViews
from gateway.cli.app import app
from gateway.findings import KINDS
from gateway.kv import KvIndex
from gateway.policy import make_policy
from gateway.pool import Fleet
from gateway.router import Router
from gateway.runtime.reload import AT_START, is_live
from gateway.settings import ENV_PREFIX, WHY, Settings, unit_of
from gateway.telemetry.metrics import describe_metrics

HERE = Path(__file__).parent / "reference"
_RAISING = ("gateway.edge.responses", "gateway.admin.app", "gateway.upstream.control")
"""Modules outside `gateway.errors` with errors of their own."""

NOTE = "<!-- Written by docs/generate_reference.py; edit the code, not this page. -->\n"


def settings_page() -> str:
    """Every key with its default, unit, whether it changes while the process runs, meaning and reason."""
    lines = [
        "# Settings",
        NOTE,
        "Keys of the file given with `kvgate serve --config kvgate.yaml`; no file is read unless it is named.",
        "Environment variables `KVGATE_SECTION__KEY` win over the file, flags of `kvgate serve` over both.",
        "Deeper keys take one more `__`: `KVGATE_ROUTING__AFFINITY__HEADER`. Lists (`models`, `workers`) are given as",
        'JSON, `KVGATE_WORKERS=\'[{"url": "http://10.0.0.1:8000"}]\'`, and replace those of the file.',
        "An unknown key stops the start and is named. `GET /admin/config` shows what is in force, secrets masked.",
        "How to check, show and change a configuration: [the guide](../guides/configuration.md).",
        "",
        "Keys with *live* are obeyed as soon as the file says something else, by the next request, poll or probe;",
        "those with *restart* wait for the next start of the process.",
    ]
    for section, field in Settings.model_fields.items():
        model, many = _model_of(field.annotation)
        lines += ["", f"## {section}{' (a list)' if many else ''}", "", (model.__doc__ or "").strip(), ""]
        lines += ["| key | default | unit | changes | meaning |", "|---|---|---|---|---|"]
        lines += [
            f"| `{key}` | {default} | {unit} | {'live' if is_live(f'{section}.{key}') else 'restart'} | {text} |"
            for key, default, unit, text in _keys(model)
        ]
        fixed = [f"`{key}`: {reason}" for key, reason in AT_START.items() if key.partition(".")[0] == section]
        if fixed:
            lines += ["", f"Why with a restart only: {'; '.join(fixed)}."]
        if not many:
            lines += ["", f"Environment: `{ENV_PREFIX}{section.upper()}__<KEY>`."]
    return "\n".join(lines) + "\n"


def _model_of(annotation: object) -> tuple[type[BaseModel], bool]:
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation, False


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, default, unit, text."""
    for name, field in sorted(model.model_fields.items(), key=lambda item: not item[1].is_required()):
        annotation = field.annotation
        inner = [one for one in (annotation, *typing.get_args(annotation)) if _is_section(one)]
        if inner and typing.get_origin(annotation) is not dict:
            many = "[]" if typing.get_origin(annotation) is tuple else ""
            if inner[0] is not annotation:
                yield prefix + name, f"`{_plain(field.default)}`", "", field.description or ""
            yield from _keys(inner[0], f"{prefix}{name}{many}.")
            continue
        default = "required" if field.default is PydanticUndefined else f"`{_plain(field.default)}`"
        choices = _choices(annotation)
        text = (field.description or "") + (f" One of {choices}." if choices else "")
        extra = field.json_schema_extra
        if isinstance(extra, dict) and WHY in extra:
            text += f" *Why: {extra[WHY]}.*"
        yield prefix + name, default, (unit_of(name) or "") if _is_number(annotation) else "", text


def _is_number(annotation: object) -> bool:
    return annotation in (int, float) or any(map(_is_number, typing.get_args(annotation)))


def _is_section(annotation: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _plain(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value.value if isinstance(value, Enum) else value)


def _choices(annotation: object) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{c}`" for c in typing.get_args(annotation))
    return ""


def cli_page() -> str:
    """Every command's own help text."""
    root: typing.Any = typer.main.get_command(app)
    lines = ["# Commands", NOTE, "```", _help(root, "kvgate"), "```"]
    for name, command in _commands(root, "kvgate"):
        lines += ["", f"## {name}", "", "```", _help(command, name), "```"]
    return "\n".join(lines) + "\n"


def _commands(group: typing.Any, name: str) -> Iterator[tuple[str, typing.Any]]:
    for word, command in sorted(group.commands.items()):
        yield f"{name} {word}", command
        if isinstance(command, typer.core.TyperGroup):
            yield from _commands(command, f"{name} {word}")


def _help(command: typing.Any, name: str) -> str:
    context = command.make_context(name, [], resilient_parsing=True, terminal_width=110, max_content_width=110)
    return "\n".join(line.rstrip() for line in command.get_help(context).strip().splitlines())


def metrics_page() -> str:
    """Every metric with its type, labels and meaning."""
    lines = [
        "# Metrics",
        NOTE,
        "At `GET /metrics` of the admin port. Labels come from the configuration and the workers, never from clients.",
        "",
    ]
    lines += ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{n}` | {t} | {', '.join(f'`{x}`' for x in labels)} | {h} |" for n, t, labels, h in describe_metrics()
    ]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Every error class with status, type, code, and whether another worker is tried."""
    lines = [
        "# Errors",
        NOTE,
        'Errors made by kvgate have OpenAI\'s shape, `{"error": {"message", "type", "code", "param"}}`,',
        "and Anthropic's on `/v1/messages`.",
        "What a worker answers passes through unchanged. Some errors carry a narrower code than the table's:",
        "`invalid_json`, `too_many_values`, `invalid_http`, `connect_timeout`, `send_timeout`, `worker_not_found`.",
        "The admin port answers a value it cannot take with 422 `invalid_value`.",
        "",
        "| error | status | type | code | another worker tried | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for module in _RAISING:
        importlib.import_module(module)
    for cls in sorted(_tree(errors.GatewayError), key=lambda cls: (cls.status, cls.__name__, cls.__module__)):
        first = (cls.__doc__ or "").strip().splitlines()[0]
        retried = "yes" if cls.retryable else "no"
        lines.append(f"| {cls.__name__} | {cls.status} | `{cls.type}` | `{cls.code}` | {retried} | {first} |")
    return "\n".join(lines) + "\n"


def _tree(cls: type[errors.GatewayError]) -> Iterator[type[errors.GatewayError]]:
    for child in cls.__subclasses__():
        if child.__module__.startswith("gateway."):
            yield child
        yield from _tree(child)


def findings_page() -> str:
    """Every finding about a worker with severity, meaning and fix."""
    lines = [
        "# Findings",
        NOTE,
        "What of a worker's set-up is wrong or could be better, as shown by `kvgate doctor`, by `/admin/workers` and",
        "in the log. A code keeps its meaning. Severity `error`: the worker is not used well at all;",
        "`warning`: it costs cache hits or detail; `info`: nothing now.",
        "",
        "| code | severity | meaning | fix |",
        "|---|---|---|---|",
    ]
    for kind in KINDS:
        fixes = [fix for fix in (kind.fix, kind.sglang_fix) if fix is not None]
        lines.append(f"| `{kind.code}` | {kind.severity} | {kind.meaning} | {'<br>'.join(fixes)} |")
    return "\n".join(lines) + "\n"


def admin_page() -> str:
    """Every path of the admin port with parameters and answer, and every answer's fields."""
    schema = _admin_schema()
    lines = [
        "# Admin API",
        NOTE,
        "Paths of the admin port (`server.admin_host`, `server.admin_port`), JSON in and out. The same as OpenAPI:",
        f"`{SCHEMA_PATH}`, for generated clients; the commands `kvgate workers`, `pools`, `sessions`, `decisions`,",
        "`drain`, `undrain`, `resync`, `reset` and `explain` are clients of it ([commands](cli.md)).",
        "With `auth.admin_token` set, everything but `/health`, `/ready` and the schema needs the header",
        "`authorization: Bearer <token>`. Errors have OpenAI's shape ([errors](errors.md)).",
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            lines += ["", f"## {method.upper()} {path}", "", operation["description"].strip(), ""]
            rows = [_parameter(parameter) for parameter in operation.get("parameters", ())]
            if rows:
                lines += ["| parameter | in | type | default | meaning |", "|---|---|---|---|---|", *rows, ""]
            if "requestBody" in operation:
                (content,) = operation["requestBody"]["content"].values()
                examples = [*content["schema"].get("examples", ()), *_values(content)]
                told = f", for example `{json.dumps(examples[0])}`" if examples else ""
                lines += [f"Body: {_type(content['schema'])}{told}.", ""]
            lines += [f"Operation `{operation['operationId']}`. Answers: {', '.join(_answers(operation))}."]
    lines += ["", "# Answers"]
    for name, model in schema["components"]["schemas"].items():
        if "properties" not in model:
            continue
        lines += ["", f"## {name}", "", *([model["description"].strip(), ""] if "description" in model else [])]
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += [
            f"| `{field}` | {_type(part)} | {_one_line(part.get('description', ''))} |"
            for field, part in model["properties"].items()
        ]
        for example in model.get("examples", ()):
            lines += ["", f"For example `{json.dumps(example)}`."]
    return "\n".join(lines) + "\n"


def _admin_schema() -> dict[str, typing.Any]:
    nothing: typing.Any = None  # nobody asks these paths anything
    router = Router(Fleet(), KvIndex(), make_policy("random", rng=Random(0)), rng=Random(0))
    views = AdminViews(
        router=router,
        admission=nothing,
        readings=nothing,
        exposition=nothing,
        hasher=nothing,
        add_worker=nothing,
        remove_worker=nothing,
        resync=nothing,
        members=nothing,
        late_after=nothing,
        config=nothing,
        ready=nothing,
        clock=nothing,
        settings=nothing,
    )
    return admin_app(views).openapi()


def _values(content: dict[str, typing.Any]) -> Iterator[typing.Any]:
    yield from (one["value"] for one in content.get("examples", {}).values())


def _parameter(parameter: dict[str, typing.Any]) -> str:
    schema = parameter["schema"]
    default = "required" if parameter["required"] else f"`{_plain(schema['default'])}`" if "default" in schema else ""
    text = _one_line(parameter.get("description", ""))
    return f"| `{parameter['name']}` | {parameter['in']} | {_type(schema)} | {default} | {text} |"


def _answers(operation: dict[str, typing.Any]) -> Iterator[str]:
    for status, answer in operation["responses"].items():
        schemas = [content["schema"] for content in answer.get("content", {}).values() if "schema" in content]
        yield f"{status} {_type(schemas[0])}" if schemas else status


def _type(schema: dict[str, typing.Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})" if "properties" in _components()[name] else _type(_components()[name])
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items", {})]
        return f"list of {', '.join(_type(item) for item in items)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(kind)


@cache
def _components() -> dict[str, typing.Any]:
    components: dict[str, typing.Any] = _admin_schema()["components"]["schemas"]
    return components


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    "admin-api.md": admin_page,
    "settings.md": settings_page,
    "cli.md": cli_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "findings.md": findings_page,
}


def stale() -> list[str]:
    """Names of pages that do not agree with the code."""
    return [name for name, page in PAGES.items() if not (HERE / name).exists() or (HERE / name).read_text() != page()]


def main() -> int:
    """Write or check the pages; the exit code."""
    if "--check" in sys.argv[1:]:
        for name in stale():
            sys.stderr.write(f"docs/reference/{name} does not agree with the code: run `make docs`\n")
        return 1 if stale() else 0
    HERE.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
