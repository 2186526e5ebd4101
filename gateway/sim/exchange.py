"""One HTTP request inside a simulated engine: it may be several engine requests (prompts times choices), one answer.

Rules:
1. Every event of a stream goes through `_emit`, where a fault may cut, stall or garble it.
2. The last token of an answer and its finish reason share an event; usage and the end mark follow when the last
   answer is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.sim.faults import Fault, FaultKind
from gateway.sim.http_server import Reply
from gateway.sim.openai_answers import GARBAGE, Answers, Counts, Text
from gateway.sim.openai_asks import Ask


@dataclass(slots=True)
class Line:
    """One engine request: `ticket` is its number there, `choice` its index in the answer. `pieces` is the text of
    each output token."""

    ticket: int
    choice: int
    prompt: list[int]
    output: list[int]
    pieces: list[str]
    cached_tokens: int = 0
    done: int = 0
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.prompt + self.output


class Exchange:
    """Turns what the engine reports on its lines into the answer. `headers` go with the head."""

    def __init__(
        self,
        ask: Ask,
        answer: Answers,
        reply: Reply,
        lines: list[Line],
        *,
        block_size: int,
        headers: Mapping[str, str],
        fault: Fault | None,
    ) -> None:
        self.ask = ask
        self.lines = lines
        self._answer = answer
        self._reply = reply
        self._open = len(lines)
        self._block_size = block_size
        self._headers = headers
        self._fault = fault
        self._events = 0
        self._stalled = False

    @property
    def over(self) -> bool:
        """Complete, cut, or the client is gone."""
        return self._reply.done

    def begin(self) -> None:
        """A stream's head goes out at once, before the prefill."""
        if self.ask.shape.stream:
            self._reply.open_stream(headers=self._headers)

    def first_token(self, line: Line) -> None:
        """The prefill of a line is over."""
        if self.ask.shape.stream:
            opening = self._answer.opening(line.choice, line.prompt)
            if opening:
                self._emit(opening)
        self.more(line, 1)

    def more(self, line: Line, count: int) -> None:
        """The next `count` tokens of a line are out."""
        start = line.done
        line.done = end = min(start + count, len(line.output))
        if not self.ask.shape.stream:
            return
        piece = self._answer.piece(
            line.choice,
            "".join(line.pieces[start:end]),
            token_ids=line.output[start:end],
            prompt_ids=line.prompt,
            done=end,
            finish=self._finish() if end == len(line.output) else None,
            cached=line.cached_tokens,
        )
        self._emit(piece)

    def finished(self) -> bool:
        """One line is complete. True when it was the last and the answer is out."""
        self._open -= 1
        if self._open:
            return False
        counts = self._counts()
        if self.ask.shape.stream:
            self._emit(self._answer.closing(counts))
            if not self._stalled:
                self._reply.close()
        else:
            texts = [Text("".join(line.pieces), line.output, line.prompt, line.cached_tokens) for line in self.lines]
            self._reply.send(200, self._answer.whole(texts, counts), headers=self._headers)
        return True

    def _finish(self) -> str:
        return "tool_calls" if self.ask.tool_call is not None else self.ask.finish

    def _counts(self) -> Counts:
        heads = self.lines[:: self.ask.shape.choices]  # the prompt of several choices counts once
        size = self._block_size
        return Counts(
            prompt=sum(len(line.prompt) for line in heads),
            completion=sum(len(line.output) for line in self.lines),
            cached=sum(line.cached_tokens for line in heads),
            created=sum(max(0, len(line.prompt) // size * size - line.cached_tokens) for line in heads),
        )

    def _emit(self, data: bytes) -> None:
        if self._stalled:
            return
        fault = self._fault
        if fault is not None and self._events >= fault.after:
            match fault.kind:
                case FaultKind.CUT:
                    self._reply.cut()
                    return
                case FaultKind.STALL:
                    self._stalled = True
                    return
                case FaultKind.GARBLE:
                    self._fault = None
                    self._reply.write(GARBAGE)
                case _:
                    pass
        self._events += 1
        self._reply.write(data)
