"""Turns tokens into text while they are generated."""

import codecs

from megacore.tools.text.tokenizer import Tokenizer


class TextStream:
    """A stream of text from tokens. A character that several tokens spell appears when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that a token completes, perhaps none."""
        return self.decoder.decode(self.tokenizer.token_bytes(token))

    def end(self) -> str:
        """The rest of the text: U+FFFD for a character that was never completed, or nothing."""
        return self.decoder.decode(b"", final=True)
