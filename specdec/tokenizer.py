"""Text in, tokens out, and back: encoding, chat templates, incremental text, stop strings.

It knows one tokenizer; it knows no models, queues or protocols.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from specdec.errors import InvalidRequestError, shown

REPLACEMENT = "\ufffd"


def has_unpaired_surrogate(text: str) -> bool:
    """True where a text holds half of a surrogate pair, which is no character and has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class Tokenizer:
    """A transformers tokenizer behind the few verbs the engine needs."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.decode_one = functools.lru_cache(2**16)(self._decode_one)

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text, which `param` names should it be none."""
        if has_unpaired_surrogate(text):
            raise InvalidRequestError(f"{param} holds half of a surrogate pair; send whole characters", param=param)
        ids: list[int] = self.inner(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, nothing tidied up."""
        if self._backend is not None:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        text = self.inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _decode_one(self, token_id: int, skip_special_tokens: bool) -> str:
        return self.decode([token_id], skip_special_tokens=skip_special_tokens)

    @property
    def chat_template(self) -> str:
        """The template that turns messages into a prompt; of several, the one for tools counts as well; "" without."""
        template = getattr(self.inner, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def has_chat_template(self) -> bool:
        """True where messages can be turned into a prompt."""
        return bool(self.chat_template)

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        tools   functions in OpenAI's form, for a template that can tell of them

        The template writes every special token itself, so none is added (no second BOS).
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use completions with a prompt", param="messages"
            )
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError(f"messages holds {shown(messages)}; a conversation is a list", param="messages")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise InvalidRequestError(
                    f"messages holds {shown(message)}; it needs role and content", param="messages"
                )
        try:
            text: str = self.inner.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like on roles they do not know
            raise InvalidRequestError(f"messages do not fit the chat template: {error}", param="messages") from error
        return self.encode(text, add_special_tokens=False, param="messages")


class Detokenizer:
    """The text of a growing output, character by character whole.

    text   all text that is certain; a character whose bytes span tokens waits for its last byte
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0  # decoding restarts here, a little before what is new, for tokenizers that look back
        self._read = 0
        self.text = ""

    def push(self, token_id: int) -> str:
        """Take a token; return the text that became certain."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        new = text[len(known) :]
        self.text += new
        return new

    def flush(self) -> str:
        """The output is over: return what was held back, broken bytes included."""
        known = self._decode(self._ids[self._prefix : self._read])
        new = self._decode(self._ids[self._prefix :])[len(known) :]
        self._prefix = self._read = len(self._ids)
        self.text += new
        return new

    def _decode(self, ids: list[int]) -> str:
        if len(ids) == 1:  # every token is once the only one known, and few make up most texts
            return self._tokenizer.decode_one(ids[0], self._skip)
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class OutputText:
    """The text of one output with stop strings cut out, and what of it may be shown already.

    A stop string that is complete before `min_tokens` tokens are out is ordinary text.

    text       text shown so far plus what is held back; ends before a stop string once one is complete
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._shown = 0
        self._num_early = min_tokens - 1  # tokens still to come that may not end the output
        self.text = ""
        self.is_stopped = False

    def push(self, token_id: int) -> bool:
        """Take a token; True when it completes a stop string (the request is then over)."""
        if not self.is_stopped:
            self._append(self._detokenizer.push(token_id))
            self._num_early -= 1
        return self.is_stopped

    def _append(self, new: str) -> None:
        before = len(self.text)
        self.text += new
        if self._num_early > 0:
            return
        # Each string is looked for only where the new text can have completed it.
        places = (self.text.find(s, max(before - len(s) + 1, 0)) for s in self._stop)
        found = [at for at in places if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def finish(self) -> None:
        """No token follows: what was held back becomes text."""
        if not self.is_stopped:
            self._append(self._detokenizer.flush())

    def take(self, *, is_last: bool) -> str:
        """Text that may be shown now and was not yet; before the end a possible stop string stays back."""
        end = len(self.text) if is_last else len(self.text) - self._num_held_back()
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _num_held_back(self) -> int:
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0


def first_difference(one: Any, other: Any) -> str | None:
    """Where two tokenizers disagree, in words; None when they are the same.

    Compares the vocabularies id by id and a probe text, so that padding of either model does not matter.
    """
    left, right = one.get_vocab(), other.get_vocab()
    if left != right:
        by_id_left = {i: t for t, i in left.items()}
        by_id_right = {i: t for t, i in right.items()}
        for i in sorted(set(by_id_left) | set(by_id_right)):
            if by_id_left.get(i) != by_id_right.get(i):
                return f"id {i} is {by_id_left.get(i)!r} for the target and {by_id_right.get(i)!r} for the draft"
    probe = "Hello, World! 123 déjà vu\n\tfoo_bar(42) \u4f60\u597d \U0001f600"
    ids, others = one(probe)["input_ids"], other(probe)["input_ids"]
    if ids != others:
        at = next((i for i, (a, b) in enumerate(zip(ids, others)) if a != b), min(len(ids), len(others)))
        return f"a probe text gives {ids[at : at + 3]} for the target and {others[at : at + 3]} for the draft at {at}"
    return None
