"""Chat templates: which one a model has, and rendering it as `transformers` does inside the engines.

Rules:
1. Templates are the operator's, their inputs are the clients'. The environment is jinja2's immutable sandbox, set up
   as transformers 5 sets it up: trimmed blocks, loop controls, the `generation` tag, `tojson` without HTML escapes,
   `raise_exception`, `strftime_now`.
2. Whatever goes wrong while rendering is `Unrenderable("template")`: the worker judges the request, not the gateway.
3. A template that asks for the date is rendered with the clock that was passed in. Without a clock, and in any prompt
   around midnight, the worker's own date decides; `volatile` says so. No clock: `Unrenderable("volatile")`.

A template that a client sends is never run here, even if a worker would: its cost cannot be bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.prefix.messages import ContentFormat, Message, Unrenderable
from gateway.prefix.tools import Tool
from gateway.records import EngineKind

_DICT_ATTRIBUTES = frozenset(dir(dict))
_write = json.JSONEncoder(ensure_ascii=False).encode
_MAX_TEXTS = 4
"""Texts kept of one tool: a template uses one form, two at most."""
_MAX_ABSENT = 256
"""Names of keys, which are in the template's text, unless it asks for one that a client has named."""
_MISSING: object = object()
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class BadTemplate(ValueError):
    """The operator's template does not compile; the message names the line."""


class ChatTemplate:
    """One compiled template. Thread-safe: rendering keeps no state here."""

    def __init__(self, source: str, *, engine: EngineKind, clock: Callable[[], datetime] | None) -> None:
        environment = _Environment(clock)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise BadTemplate(f"chat template, line {error.lineno}: {error.message}") from error
        # Looked up once: jinja2 would merge its chain of global names anew for every rendering.
        self._globals = dict(self._template.globals)
        self.content_format = _content_format(tree, source, engine)
        self.keeps_developer = _knows_developer(source, engine)
        self.volatile = "strftime_now" in source
        self._dated = self.volatile and clock is None
        self._mentions_content = "content" in source

    def render(self, variables: Mapping[str, object]) -> str:
        """The prompt's text. `variables` are `messages`, `tools`, `documents`, `add_generation_prompt` and the rest.

        Raises Unrenderable: `template` (the template refuses or fails), `volatile` (it needs a clock).
        """
        if self._dated:
            raise Unrenderable("volatile")
        template = self._template
        try:
            context = template.new_context({**self._globals, **variables}, shared=True)
            return "".join(template.root_render_func(context))
        except _RENDER_ERRORS as error:
            raise Unrenderable("template") from error

    def render_open(self, variables: Mapping[str, object], messages: list[Message]) -> str:
        """The prompt's text up to the end of the last message, for `continue_final_message` (as transformers 5)."""
        last = messages[-1]
        content = last.get("content")
        if not self._mentions_content:
            raise Unrenderable("template")
        if type(content) is list and content:
            final = str(content[-1]["text"])
            tagged: object = [*content[:-1], {**content[-1], "text": final + _CONTINUE_TAG}]
        elif type(content) is str:
            final = content
            tagged = final + _CONTINUE_TAG
        else:
            raise Unrenderable("template")
        text = self.render({**variables, "messages": [*messages[:-1], {**last, "content": tagged}]})
        at = text.rfind(_CONTINUE_TAG.strip())
        if at < 0 or final.strip() not in text:
            raise Unrenderable("template")
        return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()


# --------------------------------------------------------------------------- environment


class _Generation(Extension):
    """`{% generation %}`: marks what the model wrote, for training; shows its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self, clock: Callable[[], datetime] | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self._absent: dict[str, Undefined] = {}
        if clock is not None:
            self.globals["strftime_now"] = lambda form: clock().strftime(form)

    def getattr(self, obj: object, attribute: str) -> object:
        """The sandbox's rule, short for the one case that makes up most of a template's work: `message.role`.

        A dict has no such attribute, so its item is what the sandbox would find after a raised AttributeError.
        """
        if (type(obj) is dict or type(obj) is Tool) and attribute not in _DICT_ATTRIBUTES:
            found = obj.get(attribute, _MISSING)
            return self._undefined(attribute) if found is _MISSING else found
        return super().getattr(obj, attribute)

    def _undefined(self, attribute: str) -> Undefined:
        """What a dict without this key has there. One for all dicts: it tells in an error what it was looked for in,
        and nothing else; most messages lack most keys that templates ask for."""
        found = self._absent.get(attribute)
        if found is None:
            found = self.undefined(name=attribute)
            if len(self._absent) < _MAX_ABSENT:
                self._absent[attribute] = found
        return found


def _tojson(
    value: object, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """The options are a template's, which may give whatever `json.dumps` takes: `indent='  '`, lists, 0 for false."""
    if type(value) is Tool:
        if type(separators) is list:
            separators = tuple(separators)
        options = (ensure_ascii, indent, separators, sort_keys)
        text = value.written.get(options)
        if text is None and len(value.written) < _MAX_TEXTS:
            text = value.written[options] = _json(value, *options)
        return _json(value, *options) if text is None else text
    return _json(value, ensure_ascii, indent, separators, sort_keys)


def _json(value: object, ensure_ascii: Any, indent: Any, separators: Any, sort_keys: Any) -> str:
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _write(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


# --------------------------------------------------------------------------- content format


def _knows_developer(source: str, engine: EngineKind) -> bool:
    """Whether the template has a case for the developer role. vLLM looks for the word in quotes."""
    if engine is EngineKind.SGLANG:
        return "developer" in source
    return '"developer"' in source or "'developer'" in source


def _content_format(tree: nodes.Template, source: str, engine: EngineKind) -> ContentFormat:
    """What the engine's automatic detection says about a template.

    vLLM: a loop over the content of an item of `messages`. SGLang: media parts are mentioned.
    """
    if engine is EngineKind.SGLANG:
        media = any(word in source for word in ("image", "audio", "video", "vision"))
        return ContentFormat.OPENAI if media else ContentFormat.STRING
    lists = _aliases(tree, "messages")
    items: set[str] = set()
    for loop in tree.find_all(nodes.For):
        if any(_refers(loop.iter, name) for name in lists):
            if not isinstance(loop.target, nodes.Name):  # the engine's detection gives up here
                return ContentFormat.STRING
            items.add(loop.target.name)
    for loop in tree.find_all(nodes.For):
        if any(_refers(loop.iter, name, "content") for name in items):
            return ContentFormat.OPENAI
    return ContentFormat.STRING


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """`name` and every variable that is set to it, to a slice of it, or to it through a filter."""
    known = {name}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        for target in _targets(tree, current):
            if target not in known:
                known.add(target)
                waiting.append(target)
    return known


def _targets(tree: nodes.Template, name: str) -> Iterator[str]:
    for assign in tree.find_all(nodes.Assign):
        if _refers(assign.node, name) and isinstance(assign.target, nodes.Name):
            yield assign.target.name


def _refers(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the expression is the variable (or its member `key`), maybe filtered, tested or sliced."""
    match node:
        case nodes.Filter() | nodes.Test():
            return _refers(node.node, name, key)
        case nodes.Getitem(arg=nodes.Slice()):
            return _refers(node.node, name, key)
        case nodes.Name(ctx="load") if key is None:
            return node.name == name
        case nodes.Getitem(arg=nodes.Const(value=value)):
            return key is not None and value == key and _refers_to_name(node.node, name)
        case nodes.Getattr():
            return key is not None and node.attr == key and _refers_to_name(node.node, name)
        case _:
            return False


def _refers_to_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
