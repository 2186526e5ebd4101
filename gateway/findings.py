"""Every finding about a worker's set-up that kvgate can make: one table for probes, doctor, admin port and docs.

Rules:
1. A code is stable: scripts and alerts may name it. `docs/reference/findings.md` is written from this table.
2. One code has one severity and one meaning; what differs from worker to worker is filled into the message.
3. A fix names what to change: the engine's flag, or the key of kvgate's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.records import EngineKind, Finding, Severity

_EVENTS = '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\''
_VLLM_EVENTS = '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", ' + _EVENTS
_SGLANG_EVENTS = '--kv-events-config \'{"publisher": "zmq", ' + _EVENTS


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table. `message` is a template (`str.format`) for the details of a case; `meaning` says in general
    what is wrong and what it costs. `sglang_fix` is used for SGLang where its flag is another one."""

    severity: Severity
    code: str
    meaning: str
    message: str
    fix: str
    sglang_fix: str | None = None

    def found(self, engine: EngineKind = EngineKind.UNKNOWN, **details: object) -> Finding:
        """A case of it. `details` must have every name the message uses; KeyError otherwise."""
        fix = self.sglang_fix if engine is EngineKind.SGLANG and self.sglang_fix is not None else self.fix
        return Finding(self.severity, self.code, self.message.format(**details), fix)


# --------------------------------------------------------------------------- the worker itself

ENGINE_UNKNOWN = Kind(
    Severity.WARNING,
    "engine_unknown",
    "The server is neither recognised as vLLM nor as SGLang, so its cache geometry and events are not read.",
    "neither vLLM nor SGLang: what it caches is unknown",
    "if it is one of them behind a proxy, set engine of this worker",
)
PATH_SILENT = Kind(
    Severity.WARNING,
    "path_silent",
    "A path that tells something about the worker gave no answer; what it told before is kept.",
    "{problem}",
    "look into the worker's log; this goes away when the path answers again",
)
METRICS_OFF = Kind(
    Severity.WARNING,
    "metrics_off",
    "The worker shows no `/metrics`: its load, cache size and restarts are unknown, so routing sees less.",
    "/metrics is not to be had: load, cache size and restarts of the worker are unknown",
    "let /metrics through any proxy in between",
    sglang_fix="start SGLang with --enable-metrics",
)
PREFIX_CACHING_OFF = Kind(
    Severity.ERROR,
    "prefix_caching_off",
    "The engine keeps no prefix cache, so no request can hit; it also publishes no KV events.",
    "prefix caching is off: every prompt is computed whole",
    "start vLLM with --enable-prefix-caching",
    sglang_fix="start SGLang without --disable-radix-cache",
)
HITS_NOT_REPORTED = Kind(
    Severity.WARNING,
    "hits_not_reported",
    "Answers do not say how many prompt tokens were cached, so predictions cannot be checked and trust rests on the "
    "event feed alone.",
    "hits are not reported with answers: predicted against delivered cannot be compared",
    "start vLLM with --enable-prompt-tokens-details",
    sglang_fix="start SGLang with --enable-cache-report",
)
PAGE_SIZE_1 = Kind(
    Severity.WARNING,
    "page_size_1",
    "The engine caches in pages of one token (SGLang's default on most back ends): an event entry a token, which is "
    "slow to publish and to read.",
    "page size 1 makes an event a token",
    "start SGLang with --page-size 16 or more",
)
BLOCK_SIZE_WRONG = Kind(
    Severity.ERROR,
    "block_size_wrong",
    "The configured block size is not the engine's: no block of the engine matches one of a request.",
    "block_size {configured} is configured, the worker says {said}: no block will match",
    "remove block_size of this worker from the configuration",
)

# --------------------------------------------------------------------------- event endpoints

EVENTS_OFF = Kind(
    Severity.WARNING,
    "events_off",
    "The engine publishes no KV events, so its cache is only guessed from what was routed there.",
    "KV events are off",
    f"start vLLM with {_VLLM_EVENTS}",
    sglang_fix=f"start SGLang with {_SGLANG_EVENTS} (0.5.13 or newer tells where)",
)
EVENTS_UNANNOUNCED = Kind(
    Severity.WARNING,
    "events_unannounced",
    "The release cannot say where its KV events are (vLLM before 0.31) and nothing is configured, so its cache is only "
    "guessed from what was routed there.",
    "this vLLM cannot say where its KV events are",
    f"start vLLM with {_VLLM_EVENTS}, and set kv_events of this worker to tcp://host:5557",
)
EVENTS_CONNECT = Kind(
    Severity.ERROR,
    "events_connect",
    "The engine's event socket connects instead of binding (vLLM does so for every address without `*` or `::`, "
    "`tcp://0.0.0.0` included), so nobody can subscribe.",
    "the event socket connects to {endpoint} instead of binding, so nobody can subscribe",
    "write the endpoint of --kv-events-config with a star, tcp://*:5557",
)
EVENTS_LOCAL = Kind(
    Severity.ERROR,
    "events_local",
    "The event endpoint can only be reached on the worker's own machine (a loopback address, `ipc://`, `inproc://`).",
    "KV events at {endpoint} cannot be reached from here",
    "write the endpoint of --kv-events-config with a star, tcp://*:5557",
)
NO_REPLAY = Kind(
    Severity.WARNING,
    "no_replay",
    "The engine has no replay endpoint: after a lost message, and after a start of kvgate, its index is learned anew "
    "from live events only.",
    "KV events have no replay",
    "add a replay_endpoint (tcp://*:5657) to --kv-events-config",
)
REPLAY_LOCAL = Kind(
    Severity.WARNING,
    "replay_local",
    "The replay endpoint can only be reached on the worker's own machine; it costs what `no_replay` costs.",
    "replay at {endpoint} cannot be reached from here",
    "write the replay_endpoint of --kv-events-config with a star, tcp://*:5657",
)

# --------------------------------------------------------------------------- token ids

NO_TOKENIZER = Kind(
    Severity.WARNING,
    "no_tokenizer",
    "kvgate has no tokenizer for the model, so text prompts are not matched exactly.",
    "no tokenizer for model {model} here, so text prompts have no prefix blocks",
    "set models[].tokenizer to the model's directory",
)
NO_CHAT_TEMPLATE = Kind(
    Severity.WARNING,
    "no_chat_template",
    "kvgate has no chat template for the model, so chats are not matched exactly.",
    "no chat template for model {model} here, so chats have no prefix blocks",
    "set models[].chat_template to the template the worker uses",
)
TOKENIZER_DIFFERS = Kind(
    Severity.ERROR,
    "tokenizer_differs",
    "The worker makes other token ids of a text than kvgate does, so nearly every prefix is missed.",
    "token ids of a text differ from this worker's from position {at} on, so prefixes are missed",
    "give kvgate the tokenizer that the worker uses (models[].tokenizer)",
)
TEMPLATE_DIFFERS = Kind(
    Severity.ERROR,
    "template_differs",
    "The worker renders a chat into other token ids than kvgate does, so prefixes of chats are missed.",
    "token ids of a chat differ from this worker's from position {at} on, so prefixes are missed",
    "give kvgate the chat template that the worker uses (models[].chat_template)",
)

KINDS: tuple[Kind, ...] = (
    ENGINE_UNKNOWN,
    PATH_SILENT,
    METRICS_OFF,
    PREFIX_CACHING_OFF,
    HITS_NOT_REPORTED,
    PAGE_SIZE_1,
    BLOCK_SIZE_WRONG,
    EVENTS_OFF,
    EVENTS_UNANNOUNCED,
    EVENTS_CONNECT,
    EVENTS_LOCAL,
    NO_REPLAY,
    REPLAY_LOCAL,
    NO_TOKENIZER,
    NO_CHAT_TEMPLATE,
    TOKENIZER_DIFFERS,
    TEMPLATE_DIFFERS,
)
"""The whole table, in the order of the reference page."""
