"""Subcommands and their options; each hands over to the part that does the work.

What a command needs is imported when it runs, not before: `kvgate --help` and the commands that ask a running gateway
need little of it, and a shell waits for them.

Exit codes: 0 done, 1 the command ran and found a failure, 2 wrong usage or configuration.
"""

from __future__ import annotations

import platform
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gateway.cli.admin_port import AdminOption, TokenOption, port_of, told
from gateway.cli.config import config_commands
from gateway.cli.options import ConfigOption, read_or_exit
from gateway.cli.traffic import add_traffic_commands
from gateway.cli.workers import add_worker_commands

app = typer.Typer(
    name="kvgate",
    help="Cache-aware, OpenAI-compatible gateway in front of vLLM and SGLang workers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(config_commands, name="config")


def main() -> None:
    """Entry point of the command."""
    app()


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        from gateway.runtime.interpreter import is_compiled

        form = "compiled" if is_compiled() else "not compiled"
        typer.echo(f"kvgate {metadata.version('kvgate')} ({form}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def kvgate(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_tell_version,
            help="Release, whether the modules on the way of a request are compiled, and Python's release.",
        ),
    ] = False,
) -> None:
    """Cache-aware, OpenAI-compatible gateway in front of vLLM and SGLang workers."""


@app.command()
def serve(
    config: ConfigOption = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            "-w",
            help="Base URL of a worker, such as http://10.0.0.1:8000; repeat it for more. They are named w1, w2, ...; "
            "engine, model, block size and event endpoints are found by probing. Replaces `workers` of the file; "
            "names, API keys and event endpoints can be given only there.",
        ),
    ] = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="[MODEL=]DIR",
            help="Directory with the model's tokenizer.json, "
            "tokenizer_config.json and chat template; needed for exact matching of text prompts. "
            "Without MODEL= it serves every model that has no entry of its own.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the client port.", show_default="0.0.0.0")] = None,
    port: Annotated[int | None, typer.Option(help="Client port.", show_default="8000")] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin port.", show_default="127.0.0.1")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Admin port: metrics, decisions, explain.", show_default="8001")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Routing policy: seconds, least_load, round_robin, random, p2c, prefix_hash.", show_default="seconds"
        ),
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="Form of the log on stderr: json or console.", show_default="json")
    ] = None,
) -> None:
    """Run the gateway.

    Try it without GPUs: `kvgate engine` in one terminal, `kvgate serve --worker http://127.0.0.1:9001` in
    another, then send any OpenAI request to http://127.0.0.1:8000/v1. What has no flag stands in the file.
    SIGTERM lets open requests finish; a second one ends at once.
    """
    from gateway.cli.serve import run, tokenizer_directories
    from gateway.config import Sources

    overrides: dict[str, Any] = {}
    server = {"host": host, "port": port, "admin_host": admin_host, "admin_port": admin_port}
    overrides["server"] = {k: v for k, v in server.items() if v is not None}
    if worker:
        overrides["workers"] = [{"url": url} for url in worker]
    if policy:
        overrides["routing"] = {"policy": policy}
    if log:
        overrides["telemetry"] = {"log": log}
    raise typer.Exit(run(Sources(config, overrides, tokenizer_directories(tokenizer or []))))


@app.command()
def explain(
    body: Annotated[
        Path, typer.Argument(help="File with the request body as JSON; - reads standard input.", allow_dash=True)
    ],
    admin: AdminOption = None,
    token: TokenOption = None,
    path: Annotated[
        str | None,
        typer.Option(
            help="Inference path the body is for.",
            show_default="/v1/completions for a body with `prompt` and no `messages`, else /v1/chat/completions",
        ),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Session id, as x-session-id would carry it.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Whose request it is, where tenants have cache salts of their own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision as JSON.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show where a request would go and why, without running it.

    Asks a running gateway. Every worker's terms are in seconds and the lowest cost wins. Example:

    echo '{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}' | kvgate explain -
    """
    from gateway.cli import explain as decisions

    text = sys.stdin.buffer.read() if str(body) == "-" else _read(body)
    settings = read_or_exit(config).settings
    headers = {} if session is None else {settings.routing.affinity.header: session}
    with told():
        port = port_of(settings, admin, token)
        path = path or decisions.path_for(text)
        decisions.explain(port, text, path=path, tenant=tenant, headers=headers, as_json=as_json)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        typer.echo(f"kvgate: {path}: {error.strerror}", err=True)
        raise typer.Exit(2) from error


@app.command()
def doctor(
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            "-w",
            help="Base URL of a worker to check; repeat it for more. Without it: `workers` of --config.",
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            help="Admin address of a running gateway, such as http://127.0.0.1:8001: its workers are checked, and what "
            "it has seen of them (zero matches, misses, trust, feeds).",
        ),
    ] = None,
    token: TokenOption = None,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="[MODEL=]DIR",
            help="Tokenizer directory to compare with the workers', as for `kvgate serve`.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Send each worker three test prompts of some hundred random token ids and max_tokens 1. Without them "
            "nothing is said about hits, about events that really arrive, about salts and about seeds.",
        ),
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(min=1, max=600, help="Seconds for everything asked of a worker; all are asked side by side."),
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    config: ConfigOption = None,
) -> None:
    """Check a running fleet: can kvgate use the workers' caches, and if not, what is to be changed.

    Checked: KV events on, bound and reachable (the ZeroMQ handshake is made), replay, block size, tokenizer and chat
    template, hits reported, hits happening, cache salts, hash seeds, clocks, metrics, engine releases. One line a
    finding: severity, worker, what, and the engine's flag or kvgate's key that mends it. All findings:
    docs/reference/findings.md.

    The test prompts are the default because most faults show only when a prompt runs; they cost a worker a few
    milliseconds and some blocks of its cache.

    Exit code: 0 nothing or only info, 1 warnings, 2 errors (a worker that does not answer is one) or wrong usage.

    \b
    kvgate doctor --worker http://10.0.0.1:8000 --tokenizer /models/llama
    kvgate doctor --config kvgate.yaml
    kvgate doctor --admin http://127.0.0.1:8001
    """
    from gateway.cli.doctor import Asked, run
    from gateway.cli.serve import tokenizer_directories

    overrides: dict[str, Any] = {"workers": [{"url": url} for url in worker]} if worker else {}
    settings = read_or_exit(config, overrides, tokenizer_directories(tokenizer or [])).settings
    asked = Asked(admin=admin, token=token, probe=probe, timeout_s=timeout, as_json=as_json)
    raise typer.Exit(run(settings, asked))


@app.command()
def key(
    tenant: Annotated[str, typer.Option(help="Who is to hold it.")] = "default",
) -> None:
    """Make an API key, and the entry for the file that auth.keys_file names.

    The key is shown once and stored nowhere: give it to the client. The file gets only its hash.
    """
    from pydantic import SecretStr, ValidationError

    from gateway.credentials import KeySettings, key_hash, make_key

    secret = make_key()
    try:
        KeySettings(tenant=tenant, hash=SecretStr(key_hash(secret)))
    except ValidationError as error:
        typer.echo("kvgate: --tenant is 1 to 64 letters, digits, dots, dashes or underscores", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"key:   {secret}\nentry: - {{tenant: {tenant}, hash: {key_hash(secret)}}}")


@app.command()
def register(
    worker: Annotated[str, typer.Option("--worker", "-w", help="Base URL at which the gateways reach the worker.")],
    redis: Annotated[
        str | None,
        typer.Option(
            help="URL of the store. Others can read it in the list of processes: a password belongs into "
            "KVGATE_REDIS__PASSWORD or the configuration.",
            show_default="redis.url of the settings",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the worker.", show_default="made of its address")] = None,
    pool: Annotated[str, typer.Option(help="Label `pool` of its metrics.")] = "default",
    engine: Annotated[str, typer.Option(help="auto, vllm or sglang.")] = "auto",
    kv_events: Annotated[str, typer.Option(help="ZMQ endpoint of its KV events, auto, or off.")] = "auto",
    kv_replay: Annotated[str, typer.Option(help="ZMQ endpoint of the event replay, auto, or off.")] = "auto",
    heartbeat: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two announcements; it is gone after three.")
    ] = 5.0,
    config: ConfigOption = None,
) -> None:
    """Announce a worker to all gateways with `discovery.registry`, as long as it answers; take it out on SIGTERM.

    \b
    kvgate register --redis redis://store:6379 --worker http://10.0.0.1:8000
    """
    from pydantic import ValidationError

    from gateway.cli.register import run
    from gateway.settings import WorkerSettings

    tree: dict[str, Any] = {"redis": {"url": redis}} if redis is not None else {}
    settings = read_or_exit(config, tree).settings
    address = settings.redis.address()
    if address is None:
        typer.echo("kvgate: no store: give --redis, or redis.url in the configuration", err=True)
        raise typer.Exit(2)
    given = {"url": worker, "pool": pool, "engine": engine, "kv_events": kv_events, "kv_replay": kv_replay}
    try:
        entry = WorkerSettings.model_validate(given | ({"name": name} if name is not None else {}))
    except ValidationError as error:
        for problem in error.errors():
            option = "--" + ".".join(map(str, problem["loc"])).replace("_", "-").replace("--url", "--worker")
            typer.echo(f"kvgate: {option}: {problem['msg'].removeprefix('Value error, ')}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(run(entry, address, prefix=settings.redis.prefix, heartbeat_s=heartbeat))


@app.command()
def engine(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="HTTP port; 0 takes a free one.")] = 9001,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    name: Annotated[str, typer.Option(help="Shown at /sim/state.")] = "engine",
    dialect: Annotated[str, typer.Option(help="What it speaks and how it caches: vllm or sglang.")] = "vllm",
    version: Annotated[
        str | None,
        typer.Option(
            help="Release it stands for: decides the form of events and replays, and which paths there are.",
            show_default="0.32.0 of vLLM, 0.5.23 of SGLang",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model it serves.")] = "demo",
    adapter: Annotated[list[str] | None, typer.Option(help="Name of an adapter it serves; repeat it for more.")] = None,
    preset: Annotated[str, typer.Option(help="Speeds and cache size: demo, 8b, 7b-a10, 70b, 70b-bigkv.")] = "demo",
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, help="Cache size in tokens, one block at least.", show_default="the preset's")
    ] = None,
    cpu_tokens: Annotated[
        int, typer.Option(min=0, help="Size of a CPU tier that gets a copy of every block; 0: none.")
    ] = 0,
    block_size: Annotated[int, typer.Option(min=1, max=65_536, help="Tokens a block, or a page of SGLang.")] = 16,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, max=64, help="Ranks, each with a cache and an event port of its own.")
    ] = 1,
    cache_report: Annotated[
        bool,
        typer.Option(
            help="Report cached tokens with answers, as --enable-prompt-tokens-details of vLLM and "
            "--enable-cache-report of SGLang make them."
        ),
    ] = True,
    speed: Annotated[float, typer.Option(min=0.001, help="Divides all times: 2 is twice as fast.")] = 1.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer directory.", show_default="the demo model's")
    ] = None,
    events: Annotated[bool, typer.Option(help="Publish KV events.")] = True,
    events_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of rank 0's KV events; 0 takes a free one.")
    ] = 0,
    replay_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of rank 0's event replay; 0 takes a free one.")
    ] = 0,
    replay: Annotated[
        str | None, typer.Option(help="Layout of replays: off, old or new.", show_default="the release's")
    ] = None,
    load_publish_endpoint: Annotated[
        str,
        typer.Option(
            help="SGLang from 0.5.19 on publishes its load: off, auto (the ports after the events'), "
            "or an address such as tcp://*:6000."
        ),
    ] = "off",
) -> None:
    """Run one simulated vLLM or SGLang worker, without a GPU.

    Real HTTP, streams, metrics and KV events; no weights. It keeps a cache as the engine does (vLLM: paged, SGLang: a
    radix tree), spends the time a prefill would take, and answers with made-up words.
    GET /sim/state shows what it holds; POST /sim/fault makes it misbehave, with a body such as {"kind": "restart"}.
    """
    from gateway.cli.engine import run
    from gateway.sim.publisher import Replay
    from gateway.sim.releases import Dialect
    from gateway.sim.settings import EngineSettings

    defaults = EngineSettings()
    settings = EngineSettings(
        dialect=_choice("dialect", dialect, Dialect),
        version=version,
        name=name,
        host=host,
        port=port,
        model=model,
        adapters=tuple(adapter or ()),
        preset=preset,
        kv_tokens=kv_tokens,
        host_tokens=cpu_tokens,
        block_size=block_size,
        data_parallel_size=data_parallel_size,
        prompt_tokens_details=cache_report,
        speed=speed,
        tokenizer=tokenizer or defaults.tokenizer,
        events=events,
        events_port=events_port,
        replay_port=replay_port,
        replay=None if replay is None else _choice("replay", replay, Replay),
        load_publish_endpoint=load_publish_endpoint,
    )
    raise typer.Exit(run(settings))


_Chosen = TypeVar("_Chosen", bound=StrEnum)


def _choice(option: str, value: str, kind: type[_Chosen]) -> _Chosen:
    """One of a few words; another ends the command with code 2."""
    try:
        return kind(value)
    except ValueError as error:
        typer.echo(f"kvgate: --{option} is one of {', '.join(kind)}, not {value!r}", err=True)
        raise typer.Exit(2) from error


@app.command()
def demo(
    duration: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds during which conversations are held.")
    ] = 40.0,
    engines: Annotated[int, typer.Option(min=1, max=16, help="Simulated engines behind each gateway.")] = 4,
    dialect: Annotated[str, typer.Option(help="What the engines are: vllm, sglang, or mixed (both in turn).")] = "vllm",
    seed: Annotated[int, typer.Option(help="Another number gives other conversations.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the figures, as one JSON object.")] = False,
) -> None:
    """Show what cache-aware routing is worth, without a GPU.

    Two equal fleets of simulated engines get the same multi-turn conversations at the same moments: one behind a
    gateway with the policy `seconds`, one behind a gateway that goes round robin. Shown are the hit rate and the time
    to first token.
    """
    from gateway.cli.demo import run
    from gateway.sim.releases import Dialect

    dialects = tuple(Dialect) if dialect == "mixed" else (_choice("dialect", dialect, Dialect),)
    raise typer.Exit(run(duration_s=duration, engines=engines, dialects=dialects, seed=seed, as_json=as_json))


add_worker_commands(app)
add_traffic_commands(app)
