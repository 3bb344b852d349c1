"""Text: characters come whole, stop strings never leak, pieces add up to the whole."""

from __future__ import annotations

import random

import pytest

from specdec.errors import InvalidRequestError
from specdec.tokenizer import Detokenizer, OutputText, Tokenizer, first_difference
from tests.toys import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
TEXTS = [
    "plain",
    "déjà vu",
    "你好，世界",
    "e\u0301 and \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f600 a\U0001f600",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(i) for i in TOKENIZER.encode(text, add_special_tokens=False)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == detokenizer.text == text


@pytest.mark.parametrize("skip", [True, False])
def test_tokens_remembered_one_by_one_are_decoded_as_ever(skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of single tokens changes no piece: with it, without it, and with specials skipped or not."""
    chance = random.Random(7)
    ids = [chance.choice([*range(256), 256, 257, 0xC3, 0xA9]) for _ in range(500)]
    tokenizer = Tokenizer(byte_tokenizer())
    remembered = list(map(Detokenizer(tokenizer, skip_special_tokens=skip).push, ids))
    monkeypatch.setattr(tokenizer, "decode_one", tokenizer._decode_one)
    assert remembered == list(map(Detokenizer(tokenizer, skip_special_tokens=skip).push, ids))


def test_half_a_character_at_the_end_is_shown_once() -> None:
    ids = TOKENIZER.encode("a\U0001f600", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(map(detokenizer.push, ids)) == "a"
    assert detokenizer.flush() == TOKENIZER.decode(ids)[1:] and detokenizer.flush() == ""


def test_random_bytes_decode_as_the_whole_does() -> None:
    chance = random.Random(0)
    for _ in range(200):
        ids = [chance.randrange(256) for _ in range(chance.randrange(40))]
        detokenizer = Detokenizer(TOKENIZER)
        pieces = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert pieces == detokenizer.text
        assert pieces.replace("\ufffd", "") == TOKENIZER.decode(ids).replace("\ufffd", "")


def _feed(text: str, stop: tuple[str, ...]) -> tuple[str, list[str], int]:
    """Output text, the pieces shown, and how many tokens were taken."""
    output, shown, taken = OutputText(TOKENIZER, stop), [], 0
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        taken += 1
        stopped = output.push(token_id)
        if stopped:
            break
        shown.append(output.take(is_last=False))
    output.finish()
    shown.append(output.take(is_last=True))
    assert "".join(shown) == output.text
    return output.text, shown, taken


@pytest.mark.parametrize(
    ("text", "stop", "expected", "taken"),
    [
        ("one two three", (" two",), "one", 7),
        ("one two three", ("four",), "one two three", 13),
        ("ababac", ("abac",), "ab", 6),
        ("xxEND", ("END", "xE"), "x", 3),
        ("你好世界", ("世",), "你好", 9),
        ("stop", ("stop",), "", 4),
        ("near miss: ENx END!", ("END",), "near miss: ENx ", 18),
        ("abc", ("c", "bc"), "a", 3),
    ],
)
def test_text_ends_before_the_stop_string(text: str, stop: tuple[str, ...], expected: str, taken: int) -> None:
    assert _feed(text, stop)[0::2] == (expected, taken)


def test_no_piece_ever_shows_a_stop_string_or_its_beginning() -> None:
    chance = random.Random(1)
    for _ in range(300):
        text = "".join(chance.choice("ab") for _ in range(30))
        stop = tuple("".join(chance.choice("ab") for _ in range(chance.randint(2, 6))) for _ in range(2))
        got, shown, _ = _feed(text, stop)
        ends = [text.find(s) for s in stop if s in text]
        first = min((text.find(s) + len(s) for s in stop if s in text), default=None)
        if first is None:
            assert got == text
        else:  # the earliest completed stop string ends the text, at its own beginning
            done = [s for s in stop if s in text and text.find(s) + len(s) == first]
            assert got == text[: min(text.find(s) for s in done)]
            assert min(ends) <= len(got) + max(map(len, stop))
        assert not any(s in "".join(shown) for s in stop)


def test_a_chat_gets_its_bos_once() -> None:
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(256) == 1 and TOKENIZER.decode(ids) == "<user>hi\n<assistant>"


def test_a_chat_without_a_template_is_refused() -> None:
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer(bare).encode_chat([{"role": "user", "content": "hi"}])


def test_the_first_difference_of_two_tokenizers_is_named() -> None:
    assert first_difference(byte_tokenizer(), byte_tokenizer()) is None
    other = byte_tokenizer()
    other.add_tokens(["zz"])
    assert first_difference(byte_tokenizer(), other) == "id 260 is None for the target and 'zz' for the draft"


def test_a_longer_stop_string_does_not_bring_back_early_text() -> None:
    """min_tokens exempts early text from every stop string, however long the others are."""
    ids = TOKENIZER.encode("cnqqpyijcrwp", add_special_tokens=False)
    texts = []
    for stop in (("qq",), ("qq", "QQQQQQQQQQQQ")):
        output = OutputText(TOKENIZER, stop, min_tokens=8)
        assert [output.push(i) for i in ids] == [False] * len(ids)
        output.finish()
        texts.append(output.text)
    assert texts == ["cnqqpyijcrwp"] * 2


def test_a_text_with_half_a_character_is_refused_by_name() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    with pytest.raises(InvalidRequestError, match="prompt holds half of a surrogate pair") as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match="messages holds half of a surrogate pair"):
        tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])
