"""Which tokenizer a model's prompts are cut with.

Rules:
1. The configuration decides: `models[].name` and its aliases, then the entry named `*`.
2. Without an entry, a worker's own model directory is used when it can be read here (`root` of `/v1/models` is the path
   the engine was started with).
3. Without a tokenizer a model is still served: token prompts are exact, others go by their text. It is looked for again
   at each probe of its workers: a directory may be mounted or completed later.
4. What was found lasts as long as somebody serves the model: who serves the name next may have other files.
5. With `tokenize_at` no tokenizer is read: engines tell the token ids (`upstream.tokenizing`).

Loading reads files and takes up to seconds for a large vocabulary, so it happens in a thread before a worker joins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from datetime import datetime
from pathlib import Path

import structlog

from gateway.config import ConfigError
from gateway.pool import ANY_MODEL
from gateway.prefix import KnownPrompts, PromptHasher
from gateway.records import EngineKind, WorkerFacts, WorkerSpec
from gateway.settings import ModelSettings, worker_url

_UNREADABLE = (ValueError, OSError)
"""What loading raises: every error of `gateway.prefix` is a ValueError, and so is a file that is no UTF-8."""

MAX_HASHERS = 256
"""Models of one gateway whose caches are kept; more are served without prefix blocks for text."""


Hashers = dict[str, PromptHasher]
"""By served name."""


class Tokenizers:
    """The hashers of all models, by served name. `now` gives local time for templates that print a date."""

    def __init__(self, models: Sequence[ModelSettings], *, now: Callable[[], datetime]) -> None:
        self._configured = {name: model for model in models for name in (model.name, *model.aliases)}
        self._now = now
        self._hashers: Hashers = {}
        self._wanting: set[str] = set()
        """Models whose tokenizer could not be had."""
        self._tried: dict[tuple[str, str | None], _Seen] = {}
        """Model and directory -> what was found there: nothing is gained by another look until that changes."""
        self._loading = asyncio.Lock()
        self._log = structlog.get_logger("kvgate.models")

    def load_configured(self) -> None:
        """Read every configured tokenizer. Raises ConfigError naming the entry that cannot be read."""
        self._hashers.update(self.load(tuple({id(m): m for m in self._configured.values()}.values())))

    def load(self, models: Sequence[ModelSettings]) -> Hashers:
        """The hashers of these entries: those in use where an entry is the same, others read now, which takes a while.
        Changes nothing. Raises ConfigError naming every entry that cannot be read."""
        hashers: Hashers = {}
        problems = []
        for model in models:
            if not model.says_how_to_cut:
                continue
            known = self._hashers.get(model.name) if self._configured.get(model.name) == model else None
            try:
                hasher = known or self._load(model.tokenizer, model)
            except _UNREADABLE as error:
                problems.append(f"models.{model.name}: {error}")
                continue
            hashers.update(dict.fromkeys((model.name, *model.aliases), hasher))
        if problems:
            raise ConfigError(problems)
        return hashers

    def apply(self, models: Sequence[ModelSettings], hashers: Hashers) -> None:
        """From now on these entries, with what `load` made of them. A model that has lost its entry has no hasher until
        its workers are probed, unless there is one for all."""
        for_all_before, for_all = self._hashers.get(ANY_MODEL), hashers.get(ANY_MODEL)
        found = {
            name: hasher
            for name, hasher in self._hashers.items()
            if not self._is_told(name) and hasher is not for_all_before
        }
        if for_all is not None:
            found = dict.fromkeys((name for name in self._hashers if name != ANY_MODEL), for_all)
        self._configured = {name: model for model in models for name in (model.name, *model.aliases)}
        self._hashers.clear()
        self._hashers.update(found | hashers)
        self._wanting -= hashers.keys()
        self._tried.clear()

    def keep(self, served: Container[str]) -> None:
        """Forget what was found for names that are not served any more (rule 4)."""
        gone = {name for name in self._hashers if name not in served and not self._is_told(name)}
        for name in gone:
            del self._hashers[name]
        self._wanting -= gone
        self._tried = {place: seen for place, seen in self._tried.items() if place[0] not in gone}

    def _is_told(self, name: str) -> bool:
        """The configuration says how its prompts are cut."""
        entry = self._configured.get(name)
        return entry is not None and entry.says_how_to_cut

    def find(self, model: str) -> PromptHasher | None:
        """The hasher of a served name; None when the worker that serves it has not joined."""
        return self._hashers.get(model)

    async def prepare(self, spec: WorkerSpec, facts: WorkerFacts) -> PromptHasher | None:
        """Make the tokenizer of a worker's model ready; what cannot be read is logged, not raised."""
        names = spec.models or facts.models
        if not all(name in self._hashers and name not in self._wanting for name in names):
            async with self._loading:  # workers of one model join together, and share it
                await self._prepare(names, facts)
        return self._hashers.get(names[0]) if names else None

    async def _prepare(self, names: Sequence[str], facts: WorkerFacts) -> None:
        missing = [name for name in names if name not in self._hashers or name in self._wanting]
        if not missing:
            return
        known = [self._hashers[name] for name in names if name not in missing]
        if known:
            hasher = known[0]
        else:
            place = names[0], facts.root
            seen = await asyncio.to_thread(_seen, facts.root)
            if names[0] in self._wanting and self._tried.get(place) == seen:
                return
            if len(self._hashers) >= MAX_HASHERS:
                self._log.warning("too many models: prompts of this one have no prefix blocks", model=names[0])
                return
            hasher, settled = await asyncio.to_thread(self._discover, names[0], facts)
            if settled:
                if len(self._tried) >= MAX_HASHERS:
                    del self._tried[next(iter(self._tried))]
                self._tried[place] = seen
            if hasher.tokenizer is None:
                self._wanting.update(missing)
                for name in missing:
                    self._hashers.setdefault(name, hasher)
                return
        self._wanting.difference_update(missing)
        self._hashers.update(dict.fromkeys(missing, hasher))

    def _discover(self, model: str, facts: WorkerFacts) -> tuple[PromptHasher, bool]:
        """The hasher, and whether another try would end the same as long as the files stay as they are."""
        for_all = self._hashers.get(ANY_MODEL)
        if for_all is not None:
            return for_all, True
        directory = _readable(facts.root)
        try:
            hasher = self._load(directory, None, facts.engine)
        except ValueError as error:
            return self._without(model, directory, facts, error), True
        except OSError as error:
            return self._without(model, directory, facts, error), False
        if directory is None:
            self._log.warning(
                "no tokenizer: prompts go by their text",
                model=model,
                fix=f"models: [{{name: {model}, tokenizer: DIRECTORY}}] or --tokenizer DIRECTORY",
            )
        else:
            self._log.info("tokenizer ready", model=model, directory=str(directory), cutting=hasher.stats().cutting)
        return hasher, True

    def _without(self, model: str, directory: Path | None, facts: WorkerFacts, reason: Exception) -> PromptHasher:
        self._log.warning("tokenizer cannot be used", model=model, directory=str(directory), reason=str(reason))
        return PromptHasher.load(None, engine=facts.engine)

    def _load(
        self, directory: Path | None, settings: ModelSettings | None, engine: EngineKind = EngineKind.VLLM
    ) -> PromptHasher:
        if settings is not None and settings.tokenize_at != "here":
            server = None if settings.tokenize_at == "worker" else worker_url(settings.tokenize_at)
            return PromptHasher(None, engine=engine, known=KnownPrompts(server=server))
        template = settings.chat_template if settings is not None else None
        return PromptHasher.load(
            directory,
            chat_template=template.read_text(encoding="utf-8") if template is not None else None,
            engine=engine,
            clock=self._now,
        )


_Seen = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file of a model directory that says how prompts are cut."""

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def _seen(root: str | None) -> _Seen:
    """What is there now; empty when nothing can be read."""
    path = Path(root) if root else None
    if path is None or not path.is_absolute():
        return ()
    found = []
    for name in _FILES:
        try:
            state = (path / name).stat()
        except OSError:
            continue
        found.append((name, state.st_size, state.st_mtime_ns))
    return tuple(found)


def _readable(root: str | None) -> Path | None:
    path = Path(root) if root else None
    return path if path is not None and path.is_absolute() and (path / "tokenizer.json").is_file() else None
