from __future__ import annotations

import threading
from array import array

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.prefix.tokens import BadTokenizer, PromptTokenizer, boundary_tokens


def token(text: str, *, normalized: bool = False, **kind: bool) -> AddedToken:
    return AddedToken(text, normalized=normalized, special=True, **kind)


@pytest.mark.parametrize(
    ("added", "boundaries"),
    [
        ([token("<|a|>"), token("<|b|>")], ["<|a|>", "<|b|>"]),
        ([token("<|a|>"), token("<|a|>x")], ["<|a|>x"]),  # the first is the start of the second
        ([token("ab"), token("xaby")], ["xaby"]),  # inside of another
        ([token("ab"), token("xab")], ["xab"]),  # the end of another
        ([token("bc"), token("ab")], ["ab"]),  # another may reach into it
        ([token("aba")], []),  # may overlap with itself
        ([token("<a>", lstrip=True), token("<b>", rstrip=True), token("<c>")], ["<c>"]),
        ([token("<a>", lstrip=True), token(" <b>")], []),
        ([token("<a>", single_word=True), token("<b>")], []),
        ([token("<a>", normalized=True), token("<b>")], ["<b>"]),
        ([token("  "), token("   "), token("<b>")], ["<b>"]),
        ([token("[INST]"), token("[/INST]"), token("</s>")], ["[INST]", "[/INST]", "</s>"]),
        ([], []),
    ],
    ids=str,
)
def test_only_tokens_that_nothing_can_disturb_are_boundaries(added: list[AddedToken], boundaries: list[str]) -> None:
    assert sorted(boundary_tokens(added)) == sorted(boundaries)


def test_many_added_tokens_are_quick_and_bounded() -> None:
    added = [token(f"<|reserved_special_token_{number}|>") for number in range(3_000)]
    assert len(boundary_tokens(added)) == 512


def test_every_kind_is_cut_with_the_ids_of_the_whole(tokenizer: Tokenizer) -> None:
    prompts = PromptTokenizer(tokenizer)
    assert prompts.boundary is not None
    text = "Hello  there.\n<|start|> user\n'll it's 42<|end|>\n<|start|><|end|> x" * 7
    (whole,) = prompts.encode([text])
    assert len(list(prompts.pieces(text))) > 4
    assert prompts.encode_cut(text) == list(whole)
    assert whole == array("I", tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_tokenizer_that_looks_across_is_never_cut(whole_words_tokenizer: Tokenizer) -> None:
    prompts = PromptTokenizer(whole_words_tokenizer)
    assert prompts.boundary is None
    assert list(prompts.pieces("a<|start|>" * 20)) == []
    assert prompts.next_cut("a<|start|>" * 20, 0) is None
    assert prompts.encode_cut("a word<|start|>b") == list(prompts.encode(["a word<|start|>b"])[0])


@pytest.mark.source_only
def test_a_failed_proof_means_no_cutting(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if some future library joined tokens across a boundary."""
    monkeypatch.setattr(PromptTokenizer, "encode_cut", lambda self, text: [0])
    assert PromptTokenizer(tokenizer).boundary is None


def test_tokens_around_a_text_are_found(bos_tokenizer: Tokenizer, tokenizer: Tokenizer) -> None:
    prompts = PromptTokenizer(bos_tokenizer)
    text = "Hello<|start|>there"
    full = bos_tokenizer.encode(text, add_special_tokens=True).ids
    assert list(prompts.lead + prompts.encode([text])[0] + prompts.trail) == full
    assert len(prompts.lead) == len(prompts.trail) == 1


def test_pieces_end_with_a_boundary_and_are_not_tiny(tokenizer: Tokenizer) -> None:
    prompts = PromptTokenizer(tokenizer)
    text = "<|start|><|end|>" * 100 + "tail"
    start = 0
    for end, closing in prompts.pieces(text):
        assert text[:end].endswith(closing)
        assert end - start >= 16
        start = end
    # The same cuts are found in any text that begins alike.
    cuts = list(prompts.pieces(text))
    for other in (text + "<|end|>", text[: cuts[2][0]], text[: cuts[1][0] + 5]):
        assert list(prompts.pieces(other))[:2] == cuts[:2]
    assert [end for end, _ in prompts.pieces(text, cuts[0][0])] == [end for end, _ in cuts[1:]]


def test_lone_surrogates_are_a_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        PromptTokenizer(tokenizer).encode(["\ud800"])


def test_a_tokenizer_that_cannot_encode_every_text_is_refused_at_start(broken_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadTokenizer, match="nowhere"):
        PromptTokenizer(broken_tokenizer)


def test_other_threads_run_while_a_long_text_is_encoded(bos_tokenizer: Tokenizer) -> None:
    """The library's encode() holds the interpreter lock; the call used here must not."""
    prompts = PromptTokenizer(bos_tokenizer)
    counted = 0
    thread = threading.Thread(target=prompts.encode, args=(["some words here, " * 60_000],))
    thread.start()
    while thread.is_alive():
        counted += 1
    thread.join()
    # With the lock held this loop would turn once or twice; without it, many thousand times.
    assert counted > 50
