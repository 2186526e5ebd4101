"""Records that stages hand to each other, and the words they use.

Rules:
1. Every record is frozen; a stage that knows more makes a new record.
2. One word means one thing (`docs/concepts/words.md`): an engine's block name is an `EngineHash`, ours is a
   `BlockKey`, and the two are never compared.
3. Times are seconds on the monotonic clock of the composition root unless a name says `unix`.
4. Token counts are prompt tokens of the request as the engine sees them.

What every request makes anew is a `Struct`: made in a fourth of a frozen dataclass's time, and, since it is part of no
cycle, of no interest to the garbage collector.

Nothing here does work; there is no logic to test apart from the small derived properties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple, NewType

from msgspec import Struct
from msgspec import field as fresh

WorkerId = NewType("WorkerId", str)
"""A worker's name: unique in the fleet, kept over restarts, safe to show to clients."""

BlockKey = NewType("BlockKey", int)
"""Our name of a prefix block and everything before it: unsigned 64-bit, see `gateway.keys`."""

EngineHash = NewType("EngineHash", int)
"""The name one worker gives a block: folded to unsigned 64-bit, meaningful for that (worker, rank) only."""

Slot = NewType("Slot", int)
"""A worker's bit in the masks of the index; given by the fleet, used again after the worker is gone."""


class Tier(StrEnum):
    """Where a block lies. Order of cost per token: gpu < cpu < disk < remote."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


class EngineKind(StrEnum):
    """The software a worker runs; decides wire formats and rendering rules."""

    VLLM = "vllm"
    SGLANG = "sglang"
    UNKNOWN = "unknown"


class Endpoint(Enum):
    """The inference paths of the client port (method POST)."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    MESSAGES = "/v1/messages"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    GENERATE = "/generate"

    __hash__ = object.__hash__
    """Members are singletons; Enum's own is a Python call for each look into a set or dict."""


# --------------------------------------------------------------------------- the request


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The parts of a chat body that decide its token ids; values are plain JSON (dict, list, str, ...). `exact_for` are
    the engines whose chat this is, where they make it of a body of another API; None: it came as it is."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    tool_choice: object = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, object]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    exact_for: frozenset[EngineKind] | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Completions: one or several texts, each a prompt of its own."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Completions: one or several prompts given as token ids."""

    token_lists: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class NoPrompt:
    """No prompt whose tokens we could know; `reason` is a short word shown in the decision."""

    reason: str


Prompt = ChatPrompt | TextPrompt | TokenPrompt | NoPrompt


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """What the gateway reads of a request body. The body itself is forwarded as bytes, never rebuilt.

    `model` is the name the client used. `usage_asked` says that the client itself asked for the usage event of
    a stream (`stream_options.include_usage`). `session` comes from the affinity header or body field.
    `stream_options` is the client's object, `body_bytes` the length of the body. `labels` are those of the workers it
    may go to, None for any. `adapters` are named in the body beside the model, as SGLang takes them (`lora_path`).
    `engine_session`: the body itself names a session for the engine. `extra_key` is SGLang's own separation of cached
    prompts, which other engines do not read. `priority_taken`: its body asks for a better priority than its key allows.
    """

    endpoint: Endpoint
    request_id: str
    model: str
    prompt: Prompt
    stream: bool = False
    usage_asked: bool = False
    session: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    max_tokens: int | None = None
    choices: int = 1
    stream_options: Mapping[str, object] | None = None
    body_bytes: int = 0
    labels: frozenset[str] | None = None
    adapters: tuple[str, ...] = ()
    engine_session: bool = False
    extra_key: str | None = None
    priority_taken: bool = False


# --------------------------------------------------------------------------- prefix blocks


class PrefixMode(StrEnum):
    """How the blocks of a request were found: from its token ids (rendered here or by the worker), or from its text."""

    EXACT = "exact"
    ENGINE = "engine"
    APPROXIMATE = "approximate"
    NONE = "none"


class Chain(NamedTuple):
    """One prompt of a request: keys of its full blocks in order, and its length in tokens."""

    keys: Sequence[BlockKey]
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """The blocks of a request, one chain a prompt (a list of prompts has several).

    `mode` is NONE when the tokens are not known: then `chains` is empty, `tokens` an estimate from the body's
    size, and `reason` says why in a word (`no_tokenizer`, `multimodal`, `endpoint`, ...).

    When it is APPROXIMATE the keys are of the prompt's text, in blocks of a fixed number of bytes; `tokens`, those of
    each chain and `block_size` are then estimates, `text_bytes` is the length they were made from (0: not to be learned
    from), and `reason` says why the tokens are not known.

    When it is ENGINE the keys are of token ids that an engine told for the beginning of the prompt, the rest of
    `tokens` is an estimate, and `text` has the blocks of the prompt's text: for workers without events, and until an
    engine has told.
    """

    chains: tuple[Chain, ...]
    tokens: int
    block_size: int
    mode: PrefixMode = PrefixMode.EXACT
    reason: str | None = None
    text_bytes: int = 0
    text: PrefixBlocks | None = None


# --------------------------------------------------------------------------- workers


class TrustState(StrEnum):
    """How far a worker's part of the index is believed; each has a factor in 0..1 on the worker's overlap."""

    TRUSTED = "trusted"
    CATCHING_UP = "catching_up"
    UNCERTAIN = "uncertain"
    BLIND = "blind"


class Severity(StrEnum):
    """How much a finding costs: `info` nothing now, `warning` hits or detail, `error` the worker is not used well at
    all or gives wrong answers."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What of a worker's set-up is wrong or could be better. `code` is a stable word, `message` one sentence that says
    what and what it costs, `fix` what to change (the engine's flag, or the key of the configuration)."""

    severity: Severity
    code: str
    message: str
    fix: str


class Role(StrEnum):
    """What a worker does in prefill/decode disaggregation."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class RankChoice(Enum):
    """How the data-parallel ranks behind one URL are used: as the engine allows, each as a worker, or all as one."""

    AUTO = "auto"
    EACH = "each"
    ONE = "one"


class Rank(NamedTuple):
    """One data-parallel rank that gets requests of its own. `member` is the name of the server it belongs to,
    `number` the rank as events, ports and metrics count it, `asked` what its request header has to say: the position
    among the ranks of this server."""

    member: WorkerId
    number: int
    asked: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as configured or discovered. `None` means: learn it by probing.

    `url` has no path and no trailing slash. `kv_events` and `kv_replay` are ZMQ endpoints to connect to
    (`tcp://host:port`), rank 0's where there are several; an empty string switches the feed off. `weight` scales its
    share under blind policies. `tenants` are those whose requests it may have, empty for everybody's. `kv_blocks` is
    the cache of all ranks together. A spec with a `rank` is made from that of its server.
    """

    name: WorkerId
    url: str
    engine: EngineKind = EngineKind.UNKNOWN
    pool: str = "default"
    role: Role = Role.BOTH
    kv_events: str | None = None
    kv_replay: str | None = None
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    models: tuple[str, ...] = ()
    tenants: frozenset[str] = frozenset()
    block_size: int | None = None
    kv_blocks: int | None = None
    data_parallel_size: int | None = None
    ranks: RankChoice = RankChoice.AUTO
    rank: Rank | None = None

    @property
    def member(self) -> WorkerId:
        """Name of the server: its own, or that of the server it is a rank of."""
        return self.name if self.rank is None else self.rank.member


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank of a worker publishes its KV events, as the gateway can reach it."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class LoadEndpoint:
    """Where one rank of a worker publishes its load, as the gateway can reach it."""

    rank: int
    endpoint: str
    topic: str


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What probing a worker found. `models` are the base models it serves, by name;
    `adapters` maps an adapter's name to its base. `kv_blocks` is the cache size in blocks of `block_size`
    tokens, None when unknown. `start_time_unix` is the process start time the worker reports. `findings`
    say what of the worker's set-up costs cache hits, and the fix. `root` is the first base model's
    directory or hub name, as the worker sees it.

    `ranks` are the numbers of the data-parallel ranks behind the URL, `(0,)` without data parallelism; `rank_routing`
    says that a request can name one. `cached_tokens_reported` and `needs_key` are None while nobody knows.
    `keeps_sessions`: it holds on to the prefixes of sessions that requests name. `loads` is empty where load is not
    published. `gateways`: it is one, itself first, then those behind it."""

    engine: EngineKind
    version: str
    models: tuple[str, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    block_size: int | None = None
    kv_blocks: int | None = None
    max_model_len: int | None = None
    events: tuple[EventSource, ...] = ()
    start_time_unix: float | None = None
    findings: tuple[Finding, ...] = ()
    root: str | None = None
    ranks: tuple[int, ...] = (0,)
    rank_routing: bool = False
    cached_tokens_reported: bool | None = None
    needs_key: bool | None = None
    keeps_sessions: bool = False
    loads: tuple[LoadEndpoint, ...] = ()
    gateways: tuple[str, ...] = ()


class LoadSource(StrEnum):
    """How a worker's load came here."""

    POLL = "poll"
    SOCKET = "socket"


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What a worker said of its load once: requests running and waiting, share of KV blocks held by running requests
    (0..1; None where it says `kv_tokens` instead: tokens held, with those that waiting requests will need, or nothing),
    and the engine's cumulative prefix-cache counters in tokens where it has them. `adapters` are those in use,
    `adapter_slots` how many it can have on its GPU; empty and None where it does not say."""

    running: float
    waiting: float
    kv_usage: float | None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    kv_blocks: int | None = None
    start_time_unix: float | None = None
    adapters: tuple[str, ...] = ()
    adapter_slots: int | None = None
    kv_tokens: int | None = None
    source: LoadSource = LoadSource.POLL


# --------------------------------------------------------------------------- decision


Standing = tuple[float, float, float, float, float, float, float, int, int, int, int, float, float]
"""What a decision in seconds reads of a worker, in the order of `Worker`'s fields: `slowdown`, `pending_s`, `head_s`,
`head_since`, `foreign_s`, `foreign_since`, requests there (ours and others'), `inflight_requests`, `kv_tokens`,
`kv_capacity`, `unindexed_tokens`, `evict_discount`, `idle_since_s`. One tuple, made anew when one of them changes: it
is read sixty times where it is made once, and a decision that keeps it can be explained later."""


class Terms(NamedTuple):
    """One worker's cost for one request, in seconds (`docs/concepts/score.md`); lowest `cost` wins.

    `hit_s` is the prefill time the overlap saves (shown, already contained in `own_s`), `wait_s` the time until
    the prefill could start, `own_s` the prefill itself, `decode_s`, `evict_s` and `kv_s` the three load prices.
    `repeat_s` is the price of computing what others compute at this moment, `adapter_s` that of adapters which the
    worker would have to load; `affinity_s` and `idle_s` are credits.
    Policies that do not price in seconds leave every term at 0 and put their own figure in `cost`.
    """

    cost: float
    hit_s: float = 0.0
    wait_s: float = 0.0
    own_s: float = 0.0
    decode_s: float = 0.0
    evict_s: float = 0.0
    kv_s: float = 0.0
    affinity_s: float = 0.0
    repeat_s: float = 0.0
    idle_s: float = 0.0
    adapter_s: float = 0.0


class Candidate(NamedTuple):
    """One worker that was considered: its usable overlap in tokens, how far it was believed, its terms."""

    worker: WorkerId
    overlap_tokens: int
    trust: float
    terms: Terms


class Decision(Struct, frozen=True, gc=False):
    """Why a request went where it went. `predicted_tokens` is the chosen worker's overlap, `available_tokens`
    the best overlap in the pool; both 0 when the tokens are unknown. `excluded` names workers that were not
    considered, with the reason. `affinity` is `none`, `kept`, `new`, or `moved_` and why (`docs/concepts/pools.md`).
    In a pool that is split, `shard` is that of the worker and `home_shard` that of the prefix."""

    request_id: str
    model: str
    pool: str
    policy: str
    worker: WorkerId
    predicted_tokens: int
    available_tokens: int
    prompt_tokens: int
    block_size: int
    mode: PrefixMode
    candidates: Sequence[Candidate]
    excluded: tuple[tuple[WorkerId, str], ...] = ()
    affinity: str = "none"
    reason: str | None = None
    decided_at: float = 0.0
    slow_tokens: Mapping[Tier, int] = fresh(default_factory=dict)
    """The part of `predicted_tokens` that lies in slower tiers only, by tier."""
    shard: int | None = None
    home_shard: int | None = None


# --------------------------------------------------------------------------- outcome


class Result(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    WORKER_FAILED = "worker_failed"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    SHUT_DOWN = "shut_down"


class MissCause(StrEnum):
    """Why a predicted hit was not delivered (`docs/concepts/trust.md`)."""

    STALE_INDEX = "stale_index"
    IDENTITY = "identity"
    EVICTED = "evicted"
    SPILLED = "spilled"
    AFFINITY = "affinity"
    RETRY = "retry"
    UNKNOWN = "unknown"


class Usage(NamedTuple):
    """What the worker reported. `cached_tokens` is None when it reports no cached tokens at all."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class StageTimes(NamedTuple):
    """Seconds the gateway itself spent before the worker had the request."""

    parse_s: float = 0.0
    prefix_s: float = 0.0
    route_s: float = 0.0
    queue_s: float = 0.0
    connect_s: float = 0.0


class Trace(NamedTuple):
    """Where a request stands in a distributed trace (W3C Trace Context): hexadecimal ids, the caller's span or None,
    and whether spans are to be recorded. `span_id` names the gateway's own span, the parent of the worker's."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool


class Ending(Struct, frozen=True, gc=False):
    """What the edge saw of a request's end; the lease turns it into the outcome.

    `status` is the HTTP status the client got (499 when it was gone before any). `chunks` counts body pieces of
    a stream. `first_byte_at` is when the first body byte of a successful answer arrived, `last_byte_at` the last.
    """

    result: Result
    status: int
    ended_at: float
    usage: Usage | None = None
    chunks: int = 0
    first_byte_at: float | None = None
    last_byte_at: float | None = None
    error_code: str | None = None
    trace: Trace | None = None


class Outcome(Struct, frozen=True, gc=False):
    """The one record of how a request ended: metrics, log line and calibration are made of it.

    `worker` is None when no worker was chosen. `missed_tokens` is predicted minus delivered where that is a
    route miss (above one block and 10 %), else 0; `delivered_tokens` is None when the worker did not say.
    """

    request_id: str
    endpoint: Endpoint | None
    model: str
    pool: str
    worker: WorkerId | None
    result: Result
    status: int
    stream: bool
    started_at: float
    ended_at: float
    prompt_tokens: int = 0
    available_tokens: int = 0
    predicted_tokens: int = 0
    promised_tokens: int = 0
    """The part of `predicted_tokens` that rests on what was sent there a moment ago: no event has told of it yet."""
    delivered_tokens: int | None = None
    completion_tokens: int | None = None
    missed_tokens: int = 0
    miss_cause: MissCause | None = None
    ttft_s: float | None = None
    inter_token_s: float | None = None
    chunks: int = 0
    retries: int = 0
    slow_tokens: Mapping[Tier, int] = fresh(default_factory=dict)
    affinity: str = "none"
    mode: PrefixMode = PrefixMode.NONE
    stages: StageTimes = fresh(default_factory=StageTimes)
    error_code: str | None = None
    tenant: str | None = None
    trace: Trace | None = None
