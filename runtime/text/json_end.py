"""Where a JSON object or list ends, in text that still grows."""

from __future__ import annotations

import re

NOTABLE = re.compile(r'["\\\[\]{}]')


class JsonEnd:
    """Counts brackets outside of strings. It does not check that the JSON is valid otherwise."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str, start: int = 0) -> int | None:
        """The position behind the value that begins at `start`, or None while it is not complete.

        Each call must bring the text of the call before, and more of it; the old part is not read again.
        """
        position = max(self._position, start)
        while match := NOTABLE.search(text, position):
            position = match.end()
            character = match[0]
            if character == "\\" and self._in_string:
                if position == len(text):
                    position -= 1  # what it escapes is not there yet
                    break
                position += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character != "\\":
                self._depth += 1 if character in "[{" else -1
                if self._depth <= 0:
                    self._position = position
                    return position
        else:
            position = len(text)
        self._position = position
        return None
