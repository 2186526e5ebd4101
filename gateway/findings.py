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
    what is wrong and what it costs. `sglang_fix` is used for SGLang where its flag is another one, `sglang_message`
    where less is lost there."""

    severity: Severity
    code: str
    meaning: str
    message: str
    fix: str
    sglang_fix: str | None = None
    sglang_message: str | None = None

    def found(self, engine: EngineKind = EngineKind.UNKNOWN, **details: object) -> Finding:
        """A case of it. `details` must have every name the message uses; KeyError otherwise."""
        message, fix = self.message, self.fix
        if engine is EngineKind.SGLANG:
            message, fix = self.sglang_message or message, self.sglang_fix or fix
        return Finding(self.severity, self.code, message.format(**details), fix)


# --------------------------------------------------------------------------- the worker itself

UNREACHABLE = Kind(
    Severity.ERROR,
    "unreachable",
    "The worker did not answer as an inference server does, so nothing about it is known and it gets no requests.",
    "{problem}",
    "start the worker, or correct url of this worker",
)
NEEDS_KEY = Kind(
    Severity.ERROR,
    "needs_key",
    "The worker wants an API key that kvgate does not have: it cannot be probed, and clients must send the key.",
    "requests are answered with {status}: the worker wants {key}",
    "set api_key of this worker",
)
UNFINISHED = Kind(
    Severity.WARNING,
    "unfinished",
    "The deadline passed before everything about the worker was looked at; what is missing is not judged.",
    "not everything could be checked within {deadline_s:g} s; it stopped at: {step}",
    "raise --timeout; if that does not help, look into the worker's log",
)
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
    "The worker shows no `/metrics`: load, cache size and restarts of a vLLM are unknown, of an SGLang (which tells "
    "load and size elsewhere) its hits and restarts. Routing sees less.",
    "/metrics is not to be had: load, cache size and restarts of the worker are unknown",
    "let /metrics through any proxy in between",
    sglang_fix="start SGLang with --enable-metrics",
    sglang_message="/metrics is not to be had: the worker's own count of hits and its restarts are unknown",
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
REPEAT_MISSED = Kind(
    Severity.ERROR,
    "repeat_missed",
    "The same prompt sent twice was no hit the second time: the prefix cache does not work.",
    "the same prompt of {tokens} tokens twice, and the second time {cached} tokens came from the cache",
    "start vLLM with --enable-prefix-caching; a model with Mamba or pooling layers may not support it",
    sglang_fix="start SGLang without --disable-radix-cache",
)
SALT_IGNORED = Kind(
    Severity.WARNING,
    "salt_ignored",
    "A prompt with a `cache_salt` nobody used before was a hit: the engine ignores salts, so tenants share its cache.",
    "{cached} tokens of a prompt with a cache_salt of its own came from the cache: salts separate nothing here",
    "upgrade the engine (vLLM 0.9, SGLang 0.5.3) if tenants are to be kept apart",
)
PROBE_REFUSED = Kind(
    Severity.INFO,
    "probe_refused",
    "The worker did not complete the test prompt, so hits, events and salts were not tried.",
    "the test prompt was answered with {status}: {problem}",
    "nothing for embedding and rerank models; else look into the worker's log",
)
DECODE_LOG_INTERVAL = Kind(
    Severity.INFO,
    "decode_log_interval",
    "SGLang publishes events and refreshes the load gauges of `/metrics` only every this many decode steps (40 unless "
    "set), so the index and the load are that late while it generates.",
    "events and load gauges come only every {steps} decode steps",
    "start SGLang with --decode-log-interval 5",
)
CLOCK_SKEW = Kind(
    Severity.WARNING,
    "clock_skew",
    "The worker's clock is not this machine's: time stamps of its events and logs cannot be lined up with kvgate's.",
    "the worker's clock is {seconds:.1f} s {direction} (by {by})",
    "run NTP or chrony on both machines",
)
HASHES_NOT_CHAINED = Kind(
    Severity.ERROR,
    "hashes_not_chained",
    "SGLang up to 0.5.5 names a page by its own tokens only: equal pages at different positions look the same, so its "
    "events do not say which prefixes it holds. They are not used; the worker is learned from routing.",
    "SGLang {version} announces pages by names that do not depend on what stands before them",
    "upgrade SGLang to 0.5.6 or newer",
)
SALT_HIDDEN = Kind(
    Severity.INFO,
    "salt_hidden",
    "Events of this release do not say that a prompt was salted (vLLM before 0.17, SGLang before 0.5.18): prompts with "
    "a `cache_salt` are predicted wrongly. Nothing is lost where no salts are used.",
    "events of {release} do not tell salted prompts from others",
    "upgrade vLLM to 0.17 or newer if requests carry cache_salt",
    sglang_fix="upgrade SGLang to 0.5.18 or newer if requests carry cache_salt",
)
ADAPTER_HIDDEN = Kind(
    Severity.WARNING,
    "adapter_hidden",
    "The worker serves adapters, and events of its release do not name them (vLLM before 0.14, SGLang before 0.5.23): "
    "prompts for adapters are predicted wrongly.",
    "adapters are served, and events of {release} do not name them",
    "upgrade vLLM to 0.14 or newer",
    sglang_fix="upgrade SGLang to 0.5.23 or newer",
)
HASHES_UNSEEDED = Kind(
    Severity.INFO,
    "hashes_unseeded",
    "Workers name the same block differently, because each process draws its own seed (vLLM up to 0.28, and xxhash "
    "later). kvgate's own keys do not depend on it; shared offload tiers and snapshots of the index do.",
    "block hashes differ from those of {other} for the same prompt",
    "set PYTHONHASHSEED=0 for all vLLM workers, and one --prefix-caching-hash-algo",
)
BLOCK_SIZE_WRONG = Kind(
    Severity.ERROR,
    "block_size_wrong",
    "The block size kvgate was told is not the one of the engine's events: no block matches one of a request, or only "
    "whole blocks of the engine do, where its size is a multiple.",
    "block_size {configured} is {by}, the worker's blocks have {said} tokens: few or none match",
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
    "The release cannot say where its KV events are (vLLM before 0.31), so its cache is only guessed.",
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
EVENTS_UNREACHABLE = Kind(
    Severity.ERROR,
    "events_unreachable",
    "Nobody speaks ZeroMQ at the event endpoint, as seen from where doctor runs.",
    "KV events at {endpoint}: {problem}",
    "open the port between kvgate and the worker; check endpoint of --kv-events-config, or kv_events",
)
EVENTS_SILENT = Kind(
    Severity.ERROR,
    "events_silent",
    "The worker computed a new prompt and its event endpoint did not tell of it: another process publishes there, the "
    "topic is another one, or the engine's publisher is stuck.",
    "a new prompt was computed, and within {wait_s:g} s no event about it came from {endpoint}",
    "check that endpoint and topic of --kv-events-config belong to this worker",
)
SALTS_IN_CLEAR = Kind(
    Severity.WARNING,
    "salts_in_clear",
    "Events carry cache salts in clear text, and an event socket takes any subscriber: whoever reaches it reads them.",
    "cache salts are readable in the events at {endpoint}, which takes any subscriber",
    "let only kvgate reach the event and replay ports (firewall, network policy, a separate network)",
)
NO_REPLAY = Kind(
    Severity.WARNING,
    "no_replay",
    "The engine has no replay endpoint: after a lost message, and a start of kvgate, only live events teach the index.",
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

REPLAY_UNREACHABLE = Kind(
    Severity.WARNING,
    "replay_unreachable",
    "Nobody answers replay requests at the replay endpoint; it costs what `no_replay` costs.",
    "replay at {endpoint}: {problem}",
    "open the port between kvgate and the worker; check replay_endpoint of --kv-events-config, or kv_replay",
)
REPLAY_OVERLAPS = Kind(
    Severity.ERROR,
    "replay_overlaps",
    "A data-parallel rank's event port is another rank's replay port: engines add the rank to both base ports.",
    "{endpoint} is both an event and a replay endpoint: the ranges of ports of the ranks overlap",
    "put the base ports of endpoint and replay_endpoint further apart than there are ranks (5557 and 5657)",
)

LOAD_UNHEARD = Kind(
    Severity.WARNING,
    "load_unheard",
    "The worker says where it publishes its load, and it is not heard there: a firewall is in between, another process "
    "has the port (SGLang goes on without its load socket then), or several servers name the address, so that nobody "
    "can say whose load it is. It is polled, so its load is known later.",
    "its load at {endpoint} is not heard: {problem}",
    "open the port between kvgate and the worker, and start each server of a host with a --load-publish-endpoint of "
    "its own",
)

# --------------------------------------------------------------------------- data-parallel ranks

RANKS_AS_ONE = Kind(
    Severity.WARNING,
    "ranks_as_one",
    "The release takes no header that names a data-parallel rank (vLLM before 0.11.1, SGLang before 0.5.10, or a "
    "version that is not told), so all ranks are one worker: the engine chooses the rank, and a predicted hit is what "
    "the best rank may hold.",
    "{count} data-parallel ranks are used as one worker, since {release} cannot be told which rank is meant",
    "use vLLM 0.11.1 or newer, or SGLang 0.5.10 or newer; if it is one, set ranks of this worker to each",
)
RANK_COUNT_WRONG = Kind(
    Severity.ERROR,
    "rank_count_wrong",
    "The configured number of data-parallel ranks is not the engine's: ranks are missed, or asked for in vain.",
    "data_parallel_size {configured} is configured, the worker shows {said} ranks",
    "remove data_parallel_size of this worker from the configuration",
)
RANK_EVENTS_SHARED = Kind(
    Severity.ERROR,
    "rank_events_shared",
    "Two data-parallel ranks name one address for their KV events; only one of them can have bound it.",
    "ranks {first} and {second} both name {endpoint} for their KV events",
    "start every rank with the same base port: the engine adds the rank's number",
)

# --------------------------------------------------------------------------- token ids

NO_TOKENIZER = Kind(
    Severity.WARNING,
    "no_tokenizer",
    "kvgate has no tokenizer for the model, so text prompts are not matched exactly.",
    "no tokenizer for model {model} here, so prompts are matched by their text, not by the worker's events",
    "set models[].tokenizer to the model's directory, or models[].tokenize_at to worker",
)
NO_CHAT_TEMPLATE = Kind(
    Severity.WARNING,
    "no_chat_template",
    "kvgate has no chat template for the model, so chats are not matched exactly.",
    "no chat template for model {model} here, so chats are matched by their text",
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

IDENTITY = Kind(
    Severity.ERROR,
    "identity",
    "What the worker announces and what it reports as cached do not belong together: its blocks are not those of the "
    "requests, so its hits are not found, or are predicted and do not come. Seen in answers, after eight in a row.",
    "model {model}: {what}, in {requests} requests one after another",
    "see the other findings of the worker; else compare tokenizer, chat template, block size and adapters with its own",
)

TOKENS_UNCHECKED = Kind(
    Severity.INFO,
    "tokens_unchecked",
    "kvgate's token ids were not compared with the worker's.",
    "token ids were not compared: {reason}",
    "give the tokenizer (--tokenizer DIR, or models[].tokenizer of --config)",
)

# --------------------------------------------------------------------------- seen by a running gateway

GATEWAY_UNREACHABLE = Kind(
    Severity.ERROR,
    "gateway_unreachable",
    "The gateway's admin port did not answer as it should, so nothing of what it has seen is known.",
    "{problem}",
    "see the message: `kvgate serve` has to run, --admin names its admin port, and its token comes from "
    "KVGATE_AUTH__ADMIN_TOKEN or --config",
)
NOT_JOINED = Kind(
    Severity.ERROR,
    "not_joined",
    "The gateway was told of the worker, which has not joined: it gets no requests.",
    "has not joined: {problem}",
    "see the message; a worker that is still loading joins by itself",
)
NOT_READY = Kind(
    Severity.ERROR,
    "not_ready",
    "The gateway knows the worker and sends it no requests now.",
    "gets no requests: {state} ({reason})",
    "see the reason; a worker that comes back is used again by itself",
)
ZERO_MATCHES = Kind(
    Severity.ERROR,
    "zero_matches",
    "The gateway knows blocks of the worker and not one of them ever matched a request, though the worker does not say "
    "that there was nothing to hit: tokens or identities differ.",
    "{blocks} blocks are known, and none ever matched in {requests} requests{delivered}",
    "give kvgate the worker's tokenizer and chat template (models[].tokenizer, models[].chat_template)",
)
ROUTE_MISSES = Kind(
    Severity.WARNING,
    "route_misses",
    "More than 5 % of the hits that were predicted for the worker did not come.",
    "{share:.0%} of {predictions} predicted hits did not come (most of them: {cause})",
    "see docs/concepts/trust.md for what each cause means",
)
LOW_TRUST = Kind(
    Severity.WARNING,
    "low_trust",
    "The gateway believes its index of the worker only in part, so hits there count for less.",
    "the index of this worker is trusted {trust:.0%}",
    "trust comes back by itself with hits that are delivered; else see the feed of the worker in /admin/workers",
)
FEED_ERRORS = Kind(
    Severity.WARNING,
    "feed_errors",
    "Messages of the event feed could not be read, or batches were lost and could not be replayed.",
    "{errors} messages could not be read, {lost} losses could not be repaired",
    "compare the engine's release with the ones kvgate knows; raise buffer_steps of --kv-events-config",
)

KINDS: tuple[Kind, ...] = (
    UNREACHABLE,
    NEEDS_KEY,
    UNFINISHED,
    ENGINE_UNKNOWN,
    PATH_SILENT,
    METRICS_OFF,
    PREFIX_CACHING_OFF,
    HITS_NOT_REPORTED,
    PAGE_SIZE_1,
    REPEAT_MISSED,
    SALT_IGNORED,
    PROBE_REFUSED,
    DECODE_LOG_INTERVAL,
    CLOCK_SKEW,
    HASHES_NOT_CHAINED,
    SALT_HIDDEN,
    ADAPTER_HIDDEN,
    HASHES_UNSEEDED,
    BLOCK_SIZE_WRONG,
    EVENTS_OFF,
    EVENTS_UNANNOUNCED,
    EVENTS_CONNECT,
    EVENTS_LOCAL,
    EVENTS_UNREACHABLE,
    EVENTS_SILENT,
    SALTS_IN_CLEAR,
    NO_REPLAY,
    REPLAY_LOCAL,
    REPLAY_UNREACHABLE,
    REPLAY_OVERLAPS,
    LOAD_UNHEARD,
    RANKS_AS_ONE,
    RANK_COUNT_WRONG,
    RANK_EVENTS_SHARED,
    NO_TOKENIZER,
    NO_CHAT_TEMPLATE,
    TOKENIZER_DIFFERS,
    TEMPLATE_DIFFERS,
    IDENTITY,
    TOKENS_UNCHECKED,
    GATEWAY_UNREACHABLE,
    NOT_JOINED,
    NOT_READY,
    ZERO_MATCHES,
    ROUTE_MISSES,
    LOW_TRUST,
    FEED_ERRORS,
)
"""The whole table, in the order of the reference page."""
