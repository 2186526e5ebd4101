"""What the admin port tells about what prompts have in common (`gateway.insight`).

Heads and prefixes are named by their block keys: numbers from which no text can be had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admin.answer import Answer, example
from gateway.insight import POSITIONS, ApplicationSeen, HotPrefix

if TYPE_CHECKING:
    from gateway.router import Router


class PartingAnswer(Answer):
    """Prompts that drifted at a position."""

    up_to_tokens: int | None
    """Upper bound of the position; null above the last."""
    prompts: int


class ApplicationAnswer(Answer):
    """Prompts for one model that begin with the same 64 tokens; counts since they were first seen."""

    model_config = example(
        model="llama",
        head="d7c011a0587b6040",
        prompts=120,
        prompt_tokens=410000,
        shared_tokens=344400,
        stable_tokens=2576,
        drifted=5,
        drift_tokens=11800,
        drift_share=0.029,
        drift_at=[{"up_to_tokens": 256, "prompts": 5}],
    )

    model: str
    head: str
    """Key of these tokens."""
    prompts: int
    prompt_tokens: int
    """In full blocks."""
    shared_tokens: int
    """Those that an earlier prompt began with too."""
    stable_tokens: int | None
    """Where most of them part: the length that can usually be shared. Null before that can be said."""
    drifted: int
    """Prompts that parted earlier."""
    drift_tokens: int
    """Prompt tokens computed for that reason."""
    drift_share: float
    """Their share of all prompt tokens."""
    drift_at: list[PartingAnswer]
    """Where they parted."""

    @classmethod
    def of(cls, seen: ApplicationSeen) -> ApplicationAnswer:
        """One application."""
        bounds = (*POSITIONS, None)
        return cls(
            model=seen.model,
            head=f"{seen.head:016x}",
            prompts=seen.requests,
            prompt_tokens=seen.prompt_tokens,
            shared_tokens=seen.shared_tokens,
            stable_tokens=seen.stable_tokens,
            drifted=seen.drifted,
            drift_tokens=seen.drift_tokens,
            drift_share=seen.drift_tokens / seen.prompt_tokens if seen.prompt_tokens else 0.0,
            drift_at=[
                PartingAnswer(up_to_tokens=bound, prompts=prompts)
                for bound, prompts in zip(bounds, seen.positions, strict=True)
                if prompts
            ],
        )


class PrefixAnswer(Answer):
    """A beginning that many prompts have in common."""

    model_config = example(
        model="llama",
        head="d7c011a0587b6040",
        key="c955f382be53d55a",
        tokens=2576,
        reuse=29.0,
        saved_tokens=74704,
        workers=["w2"],
    )

    model: str
    head: str
    """Of its application."""
    key: str
    tokens: int
    reuse: float
    """Prompts of late whose longest part in common with earlier ones it was; fades by half every 2048 prompts of the
    application."""
    saved_tokens: int
    """Reuse times tokens: what the cache saves where it is held."""
    workers: list[str]
    """Those that hold it."""

    @classmethod
    def of(cls, prefix: HotPrefix, router: Router) -> PrefixAnswer:
        """One prefix."""
        return cls(
            model=prefix.model,
            head=f"{prefix.head:016x}",
            key=f"{prefix.key:016x}",
            tokens=prefix.tokens,
            reuse=prefix.reuse,
            saved_tokens=round(prefix.reuse * prefix.tokens),
            workers=[str(worker) for worker in router.holders(prefix.model, prefix.key)],
        )


class PrefixesAnswer(Answer):
    """Applications by prompt tokens, prefixes by what they save."""

    applications: list[ApplicationAnswer]
    prefixes: list[PrefixAnswer]
    new_heads: dict[str, int]
    """Prompts whose first 64 tokens were new, by model, since the start: many of them mean that prompts begin with what
    changes, such as a date or a name."""
    positions: int
    """Positions remembered."""

    @classmethod
    def of(cls, router: Router, most: int) -> PrefixesAnswer:
        """The first `most` of each."""
        insight = router.insight
        return cls(
            applications=[ApplicationAnswer.of(seen) for seen in insight.applications()[:most]],
            prefixes=[PrefixAnswer.of(prefix, router) for prefix in insight.hottest(most)],
            new_heads={model: seen.new_heads for model, seen in insight.models.items()},
            positions=len(insight),
        )
