"""Made-up answers and the engine's own block names."""

from __future__ import annotations

from gateway import keys
from gateway.records import ChatPrompt
from gateway.sim.speech import DEMO_MODEL, Speech, block_names

SPEECH = Speech.load(DEMO_MODEL)


def test_an_answer_is_exact_in_length_and_the_same_for_the_same_prompt() -> None:
    first = SPEECH.answer([1, 2, 3], 40)
    assert len(first) == 40
    assert SPEECH.answer([1, 2, 3], 40) == first
    assert SPEECH.answer([1, 2, 4], 40) != first
    assert SPEECH.answer([1, 2, 3], 40, 1) != first
    assert SPEECH.answer([1, 2, 3], 10) == first[:10]


def test_an_answer_encodes_back_to_its_own_tokens() -> None:
    tokens = SPEECH.answer([9, 9], 200)
    text = "".join(SPEECH.pieces(tokens))
    assert SPEECH.encode(text, special=False) == tokens
    assert SPEECH.decode(tokens) == text


def test_the_next_turn_of_a_chat_starts_with_the_tokens_of_this_one_and_its_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    prompt = SPEECH.chat(ChatPrompt(messages))
    answer = SPEECH.answer(prompt, 30)
    said = {"role": "assistant", "content": "".join(SPEECH.pieces(answer))}
    following = SPEECH.chat(ChatPrompt([*messages, said, {"role": "user", "content": "And?"}]))
    assert following[: len(prompt) + 30] == prompt + answer


def test_block_names_are_a_chain_of_full_blocks() -> None:
    names = block_names(list(range(40)), 16)
    assert len(names) == 2
    assert block_names([*range(32), 99], 16) == names
    assert block_names([99, *range(1, 40)], 16)[1] != names[1]
    assert all(0 <= name < 1 << 64 for name in names)


def test_adapter_and_salt_separate_blocks_and_names_are_not_the_gateways_keys() -> None:
    tokens = list(range(16))
    plain = block_names(tokens, 16)
    assert len({*plain, *block_names(tokens, 16, adapter="a"), *block_names(tokens, 16, salt="a")}) == 3
    assert plain != [int(key) for key in keys.chain(keys.namespace(), tokens, 16)]
