"""The prefix blocks of a request: its tokens found here (new text in a thread), or what stands for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from gateway.pool import Pool
from gateway.prefix import KnownPrompts, tellable
from gateway.records import InferenceRequest, PrefixBlocks, PrefixMode
from gateway.upstream.tokenizing import Untold

if TYPE_CHECKING:
    # The edge holds the open exchanges, which come here.
    from gateway.edge.gate import Edge

_BYTES_A_TOKEN = 4
"""For the load estimate of a prompt whose tokens nobody can know."""


class PrefixWork(Protocol):
    """What it takes to find the blocks of one prompt; see `gateway.prefix.PrefixWork`."""

    @property
    def pending(self) -> bool:
        """`encode` has to run, in a thread, before `blocks`."""

    def encode(self) -> None:
        """Tokenise."""

    def blocks(self) -> PrefixBlocks:
        """What was found."""


class Hasher(Protocol):
    """Finds the prefix blocks of a model's requests; see `gateway.prefix.PromptHasher`."""

    @property
    def known(self) -> KnownPrompts | None:
        """What an engine has told of prompts, where tokens are not found here."""

    def begin(
        self,
        request: InferenceRequest,
        *,
        block_size: int,
        adapter: str | None,
        bytes_a_token: float,
        reads_extra_key: bool,
    ) -> PrefixWork:
        """Begin with a prompt."""


async def locate(
    edge: Edge, request: InferenceRequest, pool: Pool, *, body_bytes: int
) -> tuple[PrefixBlocks, Untold | None]:
    """The blocks, and what an engine may be asked to tell of them; waits for nothing but the tokenising thread."""
    hasher = edge.hashers(pool.model)
    if hasher is None:
        estimate = body_bytes // _BYTES_A_TOKEN
        return PrefixBlocks((), estimate, pool.block_size, PrefixMode.NONE, "no_tokenizer"), None
    work = hasher.begin(
        request,
        block_size=pool.block_size,
        adapter=_adapter(request, pool),
        bytes_a_token=pool.rates.bytes_a_token,
        reads_extra_key=pool.reads_extra_key,
    )
    if work.pending:
        await asyncio.get_running_loop().run_in_executor(edge.executor, work.encode)
    blocks = work.blocks()
    return blocks, None if hasher.known is None else _untold(request, blocks, hasher.known, pool)


def _untold(request: InferenceRequest, blocks: PrefixBlocks, known: KnownPrompts, pool: Pool) -> Untold | None:
    """What an engine may be asked for; None when there is nothing to learn."""
    text = blocks.text or blocks
    if not tellable(text) or not known.wants(text, block_size=pool.block_size):
        return None
    return Untold(request, text, known, _adapter(request, pool), pool.block_size)


def _adapter(request: InferenceRequest, pool: Pool) -> str | None:
    """Whose blocks these are. A name for each prompt is nobody's: such a request matches no other."""
    return ",".join(request.adapters) if request.adapters else pool.adapter
