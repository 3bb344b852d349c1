"""Tool calls in an answer: a growing text is split into what is said and what is called.

It knows the Hermes form, JSON between tags; it knows no requests and no replies.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

from specdec.server.tools import CLOSE, OPEN, Tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function.

    arguments   a JSON object, as text
    """

    id: str
    name: str
    arguments: str


class ToolCallReader:
    """Reads one choice. What might be the beginning of a call is held back until it is known.

    A call whose JSON is broken is ordinary text; a last call may lack its closing tag. Where a call was demanded
    the whole answer is its JSON, without tags.
    """

    def __init__(self, tools: Tools) -> None:
        self.num_calls = 0
        self._is_bare = bool(tools.demanded)
        self._most = tools.most
        self._held = ""
        self._is_inside = False

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Take more of the answer; return what is certain by now."""
        self._held += text
        if self._is_bare:
            return self._read_bare() if is_last else ("", [])
        said: list[str] = []
        calls: list[ToolCall] = []
        while self._advance(said, calls, is_last):
            pass
        if self._most is not None:
            calls = calls[: max(self._most - self.num_calls, 0)]
        self.num_calls += len(calls)
        return "".join(said), calls

    def _read_bare(self) -> tuple[str, list[ToolCall]]:
        call, text, self._held = _parse(self._held), self._held, ""
        if call is None:  # cut off by a limit
            return text, []
        self.num_calls += 1
        return "", [call]

    def _advance(self, said: list[str], calls: list[ToolCall], is_last: bool) -> bool:
        """Settle one more part of what is held; False when the rest has to wait, or there is none."""
        if self._is_inside:
            return self._end_call(said, calls, is_last)
        at = self._held.find(OPEN)
        if at >= 0:
            said.append(self._held[:at].rstrip())
            self._held, self._is_inside = self._held[at + len(OPEN) :], True
            return True
        end = len(self._held) if is_last else _certain(self._held)
        rest = self._held[:end]
        if rest.strip() or not (self.num_calls or calls):  # white space around calls says nothing
            said.append(rest)
            self._held = self._held[end:]
        return False

    def _end_call(self, said: list[str], calls: list[ToolCall], is_last: bool) -> bool:
        """Find the closing tag; one inside a string of the JSON does not close it."""
        at = first = self._held.find(CLOSE)
        while at >= 0:
            call = _parse(self._held[:at])
            if call is not None:
                calls.append(call)
                self._held, self._is_inside = self._held[at + len(CLOSE) :], False
                return True
            at = self._held.find(CLOSE, at + 1)
        if not is_last:
            return False
        call = _parse(self._held)
        if call is not None:
            calls.append(call)
            self._held = ""
        else:
            end = len(self._held) if first < 0 else first + len(CLOSE)
            said.append(OPEN + self._held[:end])
            self._held = self._held[end:]
        self._is_inside = False
        return bool(self._held)


def _certain(text: str) -> int:
    """How much of a text cannot belong to a call; white space before a call is not said either."""
    size = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
    return len(text[: len(text) - size].rstrip())


def _parse(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
        arguments = value.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, AttributeError, RecursionError):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))
