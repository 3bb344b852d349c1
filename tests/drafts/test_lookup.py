"""Lookup: the longest match is the longest, counts make confidence, and owners stay apart."""

from __future__ import annotations

import random
from array import array

import pytest

from specdec import SamplingParams
from specdec.batch import Plan, Row
from specdec.proposers.confidence import confidence
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.occurrences import END, MAX_MATCH, Match, Occurrences
from specdec.proposers.past_outputs import PastOutputs
from specdec.proposers.suffix import SuffixProposer, follow
from specdec.request import FinishReason, Request


def _request(name: str, prompt: list[int], output: list[int] = [], **named: str | None) -> Request:  # noqa: B006
    made = Request(name, prompt, SamplingParams(), max_output_tokens=100)
    made.extend(output)
    for key, value in named.items():
        setattr(made, key, value)
    return made


def _offer(proposer: SuffixProposer | NgramProposer, request: Request, most: int = 4) -> tuple[int, ...]:
    proposer.start(request)
    row = Row(request, request.num_tokens - 1, 1, most)
    offer = proposer.propose(Plan((row,))).offers[0]
    assert len(offer.confidences) == len(offer.token_ids) and all(0 < c < 1 for c in offer.confidences)
    return offer.token_ids


def _longest(text: list[int], tail: list[int]) -> int:
    def agreement(place: int) -> int:
        n = 0
        while n < min(place, len(tail), MAX_MATCH) and text[place - 1 - n] == tail[-1 - n]:
            n += 1
        return n

    return max((agreement(place) for place in range(1, len(text))), default=0)


@pytest.mark.parametrize("phrases", [False, True])
def test_the_match_is_the_longest_there_is(phrases: bool) -> None:
    rng = random.Random(5)
    book = [[rng.randrange(24) for _ in range(rng.randrange(3, 40))] for _ in range(12)]
    text: list[int] = []
    index = Occurrences((1, 2, 4, 8, 16))
    while len(text) < 500:
        new = rng.choice(book)[rng.randrange(3) :] if phrases else [rng.randrange(24)]
        text += new
        index.extend(new)
        match = index.find(index.text)
        assert (match.length if match else 0) == _longest(text, text)
        for place in match.places if match else ():
            assert text[place - match.length : place] == text[-match.length :]  # type: ignore[union-attr]


def test_a_match_shorter_than_the_least_depth_is_none() -> None:
    index = Occurrences((2, 4))
    index.extend([1, 2, 3, 9, 3])
    assert index.find(index.text) is None
    index.extend([9])
    assert index.find(index.text) == Match(2, (4,))


def test_an_offer_follows_the_majority_and_says_how_sure_it_is() -> None:
    text = array("i", [5, 1, 7, 5, 1, 8, 5, 1, 7, 5])
    tokens, sure = follow(text, Match(1, (7, 4, 1)), 2)
    assert tokens == [1, 7]  # of the three places behind 5, all say 1, and behind it two of three say 7
    assert sure == [confidence(1, 3, 3), confidence(2, 2, 3)]


def test_an_offer_repeats_its_own_text_and_stops_at_the_end_of_another() -> None:
    assert follow(array("i", [1, 2, 3, 1]), Match(1, (1,)), 5, wraps=True)[0] == [2, 3, 1, 2, 3]
    assert follow(array("i", [1, 2, END, 4]), Match(1, (1,)), 5)[0] == [2]


def test_confidence_grows_with_length_and_agreement() -> None:
    assert confidence(1) < confidence(2) < confidence(9) < 1
    assert confidence(2, 1, 3) < confidence(2, 2, 3) < confidence(2, 3, 3) < 1


def test_ngram_offers_are_surer_where_more_matches() -> None:
    proposer = NgramProposer(1, 3)
    assert _offer(proposer, _request("a", [1, 2, 3, 9, 1, 2, 3]), 2) == (9, 1)
    proposer.start(_request("b", [3, 9, 3]))
    rows = [Row(_request(name, prompt), len(prompt) - 1, 1, 2) for name, prompt in
            (("a", [1, 2, 3, 9, 1, 2, 3]), ("b", [3, 9, 3]))]  # fmt: skip
    long, short = proposer.propose(Plan(tuple(rows)))
    assert long.confidences[0] > short.confidences[0] == confidence(1)


def _end(proposer: SuffixProposer, request: Request, reason: FinishReason = FinishReason.STOP) -> None:
    proposer.start(request)
    request.finish_reason = reason
    proposer.stop(request)


def test_a_past_output_helps_its_owner_and_nobody_else() -> None:
    proposer = SuffixProposer(2, PastOutputs(10_000))
    secret = [11, 12, 13, 14, 15, 16]
    _end(proposer, _request("first", [1], secret, owner="key-a", cache_salt="s"))
    ask = [3, 11, 12]
    assert _offer(proposer, _request("same", ask, owner="key-a", cache_salt="s")) == (13, 14, 15, 16)
    for owner, salt in (("key-a", "t"), ("key-b", "s"), ("key-a", None), (None, "s"), (None, None)):
        assert _offer(proposer, _request(f"{owner} {salt}", ask, owner=owner, cache_salt=salt)) == ()


def test_salts_stay_apart_whatever_is_asked_and_dropped() -> None:
    """Every salt has tokens of its own; equal hashes, growth and dropped generations never mix them."""
    rng = random.Random(1)
    proposer = SuffixProposer(2, PastOutputs(3000))
    num_offers = 0
    for turn in range(200):
        salt = rng.randrange(4)
        mine = range(100 * salt, 100 * salt + 6)
        request = _request(f"r{turn}", [7777], [rng.choice(mine) for _ in range(40)], cache_salt=str(salt))
        offer = _offer(proposer, request)
        num_offers += bool(offer)
        assert all(token in mine or token == 7777 for token in offer)
        _end(proposer, request)
    assert num_offers > 100


def test_only_what_came_to_its_end_is_remembered_and_only_with_a_store() -> None:
    for store, reason in ((None, FinishReason.STOP), (PastOutputs(999), FinishReason.ABORT)):
        proposer = SuffixProposer(2, store)
        _end(proposer, _request("first", [1], [11, 12, 13, 14]), reason)
        assert _offer(proposer, _request("next", [3, 11, 12])) == ()


def test_the_store_is_bounded_and_keeps_the_latest_half() -> None:
    store = PastOutputs(2000)
    for i in range(300):
        store.add("me" if i % 3 else f"other {i}", [i, i + 1000, i + 2000, i + 3000])
        assert store.num_tokens <= 2000
    found = [i for i in range(300) if i % 3 and any(p.find(array("i", [i, i + 1000])) for p in store.parts("me"))]
    assert found and found[-1] == 299 and found == [i for i in range(found[0], 300) if i % 3]
    store.add("me", list(range(5000)))
    assert store.num_tokens <= 2000 and store.parts("me")[0].find(array("i", [4990, 4991]))


def test_a_store_too_small_for_anything_stays_empty() -> None:
    store = PastOutputs(10)
    store.add("me", [1, 2, 3])
    assert store.num_tokens == 0 and not store.parts("me")


def test_an_index_that_was_dropped_is_built_again() -> None:
    proposer = SuffixProposer(2)
    request = _request("r", [1, 2, 3, 4], [1, 2])
    assert _offer(proposer, request) == (3, 4, 1, 2)
    proposer.stop(request)  # preempted
    assert _offer(proposer, request) == (3, 4, 1, 2)
