"""Request -> prefix blocks: render the template, find the token ids, chain the block keys.

The work of a request is a `PrefixWork`, in three steps so that the event loop never waits for a tokenizer:
`begin()` (on the loop: render, look up what is known), `encode()` (in a thread, only when `pending`: token ids of new
text), `blocks()` (on the loop: remember what is new). A turn of a long chat costs its new text only.

Rules:
1. Blocks of tokens are exact. Where the tokens cannot be known but the text says what is equal, blocks are of the text
   (`prefix.text`, `PrefixMode.APPROXIMATE`), with the reason in a word: `no_tokenizer`, `no_template`, `chat_template`
   (the client brought its own), `volatile` (the template asks for the date and there is no clock), `multimodal`, `text`
   (lone surrogates), `extra_key` (the engine keeps the prompt apart, and its events do not tell), `converted` (the
   engine makes a chat of a body of another API, and releases differ in it). Else there are none (`PrefixMode.NONE`):
   `template` (it refuses these messages), `malformed`, `too_large`, or the reason of a `NoPrompt`. Nothing raises for
   what a client sent.
2. `encode()` reads the caches and changes none of them; all writes happen in `begin()` and `blocks()`.
3. Keys depend on adapter and cache salt (`keys.namespace`) and on the tokens before them, on nothing else. SGLang also
   keeps prompts apart by `extra_key`, which is in none of its events and hashes: such a prompt has keys of text, which
   depend on it and which no event can name. So it is never taken for what was announced without one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from gateway import keys
from gateway.prefix.chains import ChainTree, Node, PieceCache
from gateway.prefix.files import ModelFiles, read_model_files
from gateway.prefix.known import KnownPrompts
from gateway.prefix.messages import Unrenderable, conversation
from gateway.prefix.run import Run
from gateway.prefix.template import ChatTemplate
from gateway.prefix.text import text_blocks
from gateway.prefix.tokens import PromptTokenizer
from gateway.prefix.tools import ToolCache
from gateway.records import (
    BlockKey,
    Chain,
    ChatPrompt,
    EngineKind,
    InferenceRequest,
    NoPrompt,
    PrefixBlocks,
    PrefixMode,
    TextPrompt,
    TokenPrompt,
)

INLINE_CHARS = 1_500
"""New text up to this is encoded at once, 0.6 ms at most: a short turn does not wait for a thread (0.1 ms, more under
load), and no longer text holds up other requests."""
LOOK_UP_INLINE_BYTES = 262_144
LOOK_UP_INLINE_PARTS = 200
"""Bodies larger than this, or with more messages (or texts), are rendered and looked up in the thread: about 1 ms."""
CHAIN_INLINE_TOKENS = 16_384
"""Token prompts above this are hashed in the thread: 0.35 us a block."""
MAX_MESSAGES = 20_000
"""More than any conversation; a template runs over all of them, at 4 us each and more."""
MAX_PROMPTS = 4_096
"""Texts or token lists of one request; each takes about 2 KB while the request is worked on."""
MAX_NEW_CHARS = 4_000_000
"""New text of one request, about a million tokens. While the library encodes, a character takes about 150 bytes: a body
of 16 MB would take 2.5 GB and many seconds."""

_TOOL_CACHE_BYTES = 4 << 20

_BYTES_PER_TOKEN = 4
"""For the estimate when the tokens are unknown."""

_APART = "extra_key"
_CONVERTED = "converted"
_BY_TEXT = frozenset(
    {"no_tokenizer", "no_template", "chat_template", "volatile", "multimodal", "text", _APART, _CONVERTED}
)
"""Why tokens are not known or of no use, where the text will do."""

_RESERVED_KWARGS = frozenset({"chat_template", "tokenize", "conversation", "messages", "tools"})


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counters since start, and sizes now. `cutting` tells whether prompts are encoded by pieces (else as a whole:
    correct, slower). `reused_chars` needed no encoding, `encoded_chars` did."""

    cutting: bool
    piece_hits: int
    piece_misses: int
    piece_bytes: int
    piece_evictions: int
    chain_nodes: int
    chain_bytes: int
    chain_evictions: int
    reused_chars: int
    encoded_chars: int


class PromptHasher:
    """Prefix blocks of one model's requests. Owned and called by one thread, except for `PrefixWork.encode`."""

    def __init__(
        self,
        files: ModelFiles | None,
        *,
        chat_template: str | None = None,
        engine: EngineKind = EngineKind.VLLM,
        clock: Callable[[], datetime] | None = None,
        known: KnownPrompts | None = None,
        piece_cache_bytes: int = 64 << 20,
        chain_cache_bytes: int = 128 << 20,
    ) -> None:
        """`known`: token ids are told by an engine, not found here; `files` are not used then."""
        self.engine = engine
        self.known = known
        self.pieces = PieceCache(piece_cache_bytes)
        self.chains = ChainTree(chain_cache_bytes)
        self.tools = ToolCache(engine, _TOOL_CACHE_BYTES)
        if known is not None:
            files = None
        self.tokenizer = PromptTokenizer(files.tokenizer) if files is not None else None
        self.reused_chars = 0
        self.encoded_chars = 0
        self._tokens: Mapping[str, object] = files.tokens if files is not None else {}
        sources = dict(files.templates) if files is not None else {}
        if chat_template is not None:
            sources = {"default": chat_template}
        self._templates = {name: ChatTemplate(source, engine=engine, clock=clock) for name, source in sources.items()}

    @classmethod
    def load(
        cls,
        directory: Path | None,
        *,
        chat_template: str | None = None,
        engine: EngineKind = EngineKind.VLLM,
        clock: Callable[[], datetime] | None = None,
        piece_cache_bytes: int = 64 << 20,
        chain_cache_bytes: int = 128 << 20,
    ) -> PromptHasher:
        """Read a model's directory (None: no tokenizer, only token prompts are exact).

        `chat_template` is the text of a template that replaces the model's own. `clock` gives local time for templates
        that print a date. Raises BadModelFiles, BadTokenizer or BadTemplate (all ValueErrors).
        """
        return cls(
            read_model_files(directory) if directory is not None else None,
            chat_template=chat_template,
            engine=engine,
            clock=clock,
            piece_cache_bytes=piece_cache_bytes,
            chain_cache_bytes=chain_cache_bytes,
        )

    def begin(
        self,
        request: InferenceRequest,
        *,
        block_size: int,
        adapter: str | None = None,
        bytes_a_token: float = _BYTES_PER_TOKEN,
        reads_extra_key: bool = False,
    ) -> PrefixWork:
        """Start a request's prefix work; `pending` of the result says whether `encode()` must run before `blocks()`.

        `bytes_a_token` is what a token of this model stands for where the tokens are not known. `reads_extra_key`: it
        may go to an engine that keeps prompts apart by that field.
        """
        apart = request.extra_key if reads_extra_key else None
        return PrefixWork(self, request, block_size, adapter, bytes_a_token, apart)

    def stats(self) -> PrefixStats:
        """Counters and sizes for telemetry."""
        pieces, chains = self.pieces, self.chains
        return PrefixStats(
            cutting=self.tokenizer is not None and self.tokenizer.boundary is not None,
            piece_hits=pieces.hits,
            piece_misses=pieces.misses,
            piece_bytes=pieces.bytes,
            piece_evictions=pieces.evictions,
            chain_nodes=len(chains),
            chain_bytes=chains.bytes,
            chain_evictions=chains.evictions,
            reused_chars=self.reused_chars,
            encoded_chars=self.encoded_chars,
        )

    @property
    def renders_chats(self) -> bool:
        """A chat template is there."""
        return bool(self._templates)

    def token_ids(self, request: InferenceRequest) -> tuple[Sequence[int], ...] | None:
        """Token ids of each of a request's prompts, encoded whole and without caches; None when they cannot be known.

        For checks against a worker's own ids, not for the request's way.
        """
        match request.prompt:
            case TokenPrompt(token_lists):
                return token_lists
            case ChatPrompt() | TextPrompt() as prompt if self.tokenizer is not None:
                try:
                    encoded = self.tokenizer.encode(self.texts(prompt))
                except (Unrenderable, ValueError):
                    return None
                if not prompt.add_special_tokens:
                    return tuple(encoded)
                return tuple(self.tokenizer.lead + ids + self.tokenizer.trail for ids in encoded)
            case _:
                return None

    def texts(self, prompt: ChatPrompt | TextPrompt, *, remember: bool = False) -> tuple[str, ...]:
        """The texts that are tokenised. Raises Unrenderable. `remember` is for the caches' own thread only."""
        return prompt.texts if isinstance(prompt, TextPrompt) else (self.render(prompt, remember=remember),)

    def render(self, prompt: ChatPrompt, *, remember: bool = False) -> str:
        """The chat as text, as the engine renders it. Raises Unrenderable. `remember` as in `texts`."""
        if prompt.chat_template is not None:
            raise Unrenderable("chat_template")
        kwargs = prompt.template_kwargs
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise Unrenderable("malformed")
        if kwargs and not _RESERVED_KWARGS.isdisjoint(kwargs):
            raise Unrenderable("malformed")
        tools = self.tools.tools(prompt.tools, prompt.tool_choice, remember=remember) if prompt.tools else None
        template = self._template(tools is not None)
        messages = conversation(
            prompt.messages,
            template.content_format,
            engine=self.engine,
            keeps_developer=template.keeps_developer,
        )
        variables: dict[str, object] = {**self._tokens, "documents": None, **kwargs}
        if prompt.documents is not None:
            variables["documents"] = prompt.documents
        if prompt.reasoning_effort is not None:
            self._reasoning(variables, prompt.reasoning_effort)
        variables["messages"] = messages
        variables["tools"] = tools
        variables["add_generation_prompt"] = prompt.add_generation_prompt
        if prompt.continue_final_message:
            return template.render_open(variables, messages)
        return template.render(variables)

    def knows_chat_of(self, prompt: ChatPrompt) -> bool:
        """Whether the engine makes this chat of the body. One that tells token ids was asked about a chat, and may have
        made another one (gpt-oss: of a body of the Responses API)."""
        return prompt.exact_for is None or (self.known is None and self.engine in prompt.exact_for)

    def root(self, adapter: str | None, salt: str | None, block_size: int, special: bool) -> Node:
        """The state in front of a prompt: the namespace's seed, and the tokens that are put before every text.

        `special` tells whether those are added (completions: yes, chats: their template prints them).
        """
        name = (adapter, salt, block_size, special)
        root = self.chains.root(name)
        if root is None:
            seed = keys.namespace(adapter, salt)
            lead = self.tokenizer.lead if special and self.tokenizer is not None else array("I")
            found = keys.chain(seed, lead, block_size)
            root = Node(
                "",
                "",
                keys=found,
                parent_key=found[-1] if found else seed,
                rest=lead[len(found) * block_size :],
                tokens=len(lead),
                root_name=name,
            )
            self.chains.add_root(root)
        return root

    def _template(self, tools: bool) -> ChatTemplate:
        templates = self._templates
        found = templates.get("tool_use") if tools else None
        if found is None:
            found = templates.get("default")
        if found is None:
            raise Unrenderable("no_template")
        return found

    def _reasoning(self, variables: dict[str, object], effort: str) -> None:
        variables["reasoning_effort"] = effort
        thinks = effort != "none"
        variables.setdefault("enable_thinking", thinks)
        if self.engine is EngineKind.SGLANG:
            variables.setdefault("thinking", thinks)


def tellable(blocks: PrefixBlocks) -> bool:
    """Blocks of one text, media none: an engine's token ids are all that its keys depend on."""
    text = blocks.mode is PrefixMode.APPROXIMATE and blocks.reason not in (_APART, _CONVERTED)
    return text and len(blocks.chains) == 1 and blocks.text_bytes > 0


class PrefixWork:
    """The prefix blocks of one request in the making."""

    __slots__ = (
        "_adapter", "_apart", "_block_size", "_bytes_a_token", "_hasher", "_later", "_request", "_result", "_runs",
    )  # fmt: skip

    def __init__(
        self,
        hasher: PromptHasher,
        request: InferenceRequest,
        block_size: int,
        adapter: str | None,
        bytes_a_token: float,
        apart: str | None,
    ) -> None:
        self._hasher = hasher
        self._adapter = adapter
        self._apart = apart
        self._bytes_a_token = bytes_a_token
        self._request = request
        self._block_size = block_size
        self._runs: Sequence[Run] = ()
        self._result: PrefixBlocks | None = None
        self._later: Callable[[], None] | None = None
        match request.prompt:
            case ChatPrompt(messages) as prompt:  # most are
                self._begin_text(prompt, adapter, too_many=len(messages) > MAX_MESSAGES, parts=len(messages))
            case TextPrompt(texts) as prompt:
                self._begin_text(prompt, adapter, too_many=len(texts) > MAX_PROMPTS, parts=len(texts))
            case TokenPrompt(token_lists):
                self._begin_tokens(token_lists, adapter)
            case NoPrompt(reason):
                self._none(reason)

    @property
    def pending(self) -> bool:
        """Whether `encode()` must run, in a thread, before `blocks()`."""
        return self._later is not None

    def encode(self) -> None:
        """Do what is pending. Thread-safe: touches only this object's data and reads the caches."""
        if self._later is not None:
            self._later()
            self._later = None

    def blocks(self) -> PrefixBlocks:
        """The request's blocks; puts into the caches what it brought. Runs `encode()` itself if that was left out.

        For the thread that owns the hasher. Gives the same blocks when called again.
        """
        self.encode()
        hasher, runs = self._hasher, self._runs
        result = self._result
        known = hasher.known
        # Here, on this thread: what is known changes with every answer of an engine.
        if known is not None and known.usable and result is not None and tellable(result):
            size, ratio = self._block_size, self._bytes_a_token
            result = self._result = known.find(result, block_size=size, bytes_a_token=ratio)
        if result is None:
            chains = tuple([run.chain for run in runs])
            result = PrefixBlocks(chains, sum([chain.tokens for chain in chains]), self._block_size)
            self._result = result
        for run in runs:
            run.remember()
            hasher.reused_chars += run.text_chars - run.unknown_chars
            hasher.encoded_chars += run.unknown_chars
        self._runs = ()
        return result

    def _begin_tokens(self, token_lists: Sequence[Sequence[int]], adapter: str | None) -> None:
        if len(token_lists) > MAX_PROMPTS:
            self._none("too_large")
            return
        if self._apart is not None:
            self._by_text(_APART, large=sum(map(len, token_lists)) > CHAIN_INLINE_TOKENS)
            return
        seed = keys.namespace(adapter, self._request.cache_salt)
        if sum(map(len, token_lists)) > CHAIN_INLINE_TOKENS:
            self._later = partial(self._hash_tokens, token_lists, seed)
        else:
            self._hash_tokens(token_lists, seed)

    def _hash_tokens(self, token_lists: Sequence[Sequence[int]], seed: BlockKey) -> None:
        chains = tuple(Chain(keys.chain(seed, ids, self._block_size), len(ids)) for ids in token_lists)
        self._result = PrefixBlocks(chains, sum(map(len, token_lists)), self._block_size)

    def _begin_text(self, prompt: ChatPrompt | TextPrompt, adapter: str | None, *, too_many: bool, parts: int) -> None:
        hasher, request = self._hasher, self._request
        large = request.body_bytes > LOOK_UP_INLINE_BYTES or parts > LOOK_UP_INLINE_PARTS
        if too_many:
            self._none("too_large")
        elif self._apart is not None:
            self._by_text(_APART, large=large)
        elif isinstance(prompt, ChatPrompt) and not hasher.knows_chat_of(prompt):
            self._by_text(_CONVERTED, large=large)
        elif hasher.tokenizer is None:
            self._by_text("no_tokenizer", large=large)
        else:
            root = hasher.root(adapter, request.cache_salt, self._block_size, prompt.add_special_tokens)
            if large:
                self._later = partial(self._look_up, prompt, hasher.tokenizer, root, in_thread=True)
            else:
                self._look_up(prompt, hasher.tokenizer, root, in_thread=False)

    def _by_text(self, reason: str, *, large: bool) -> None:
        if large:
            self._later = partial(self._none, reason)
        else:
            self._none(reason)

    def _look_up(
        self, prompt: ChatPrompt | TextPrompt, tokenizer: PromptTokenizer, root: Node, *, in_thread: bool
    ) -> None:
        """Render, follow the text through the caches, and encode the rest, later if it is long."""
        hasher = self._hasher
        try:
            texts = hasher.texts(prompt, remember=not in_thread)
        except Unrenderable as error:
            self._none(error.reason)
            return
        tree, cache = hasher.chains, hasher.pieces
        runs = [Run(text, root, tokenizer=tokenizer, tree=tree, cache=cache) for text in texts]
        trail = tokenizer.trail if prompt.add_special_tokens else None
        new_chars = sum([run.unknown_chars for run in runs])
        if new_chars > MAX_NEW_CHARS:
            self._none("too_large")
        elif in_thread or new_chars <= INLINE_CHARS:
            self._finish(runs, trail)
        else:
            self._later = partial(self._finish, runs, trail)

    def _finish(self, runs: list[Run], trail: array[int] | None) -> None:
        try:
            for run in runs:
                run.finish(self._block_size, trail)
        except ValueError:
            self._none("text")
        else:
            self._runs = runs

    def _none(self, reason: str) -> None:
        """The tokens are not known: blocks of the text where it will do."""
        request = self._request
        if reason in _BY_TEXT and not isinstance(request.prompt, NoPrompt):
            try:
                self._result = text_blocks(
                    request.prompt,
                    adapter=self._adapter,
                    salt=request.cache_salt,
                    extra_key=self._apart,
                    bytes_a_token=self._bytes_a_token,
                    reason=reason,
                )
                return
            except Unrenderable as error:
                reason = error.reason
        estimate = max(1, request.body_bytes // _BYTES_PER_TOKEN)
        self._result = PrefixBlocks((), estimate, self._block_size, PrefixMode.NONE, reason)
