"""From tokens to text while they are made."""

import codecs

from megacore.data.tokenizer import Tokenizer


class TextStream:
    """Text of tokens as they come: a character that several tokens spell appears once it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that a token completes, perhaps none."""
        return self.decoder.decode(self.tokenizer.token_bytes(token))

    def end(self) -> str:
        """What is left of a character that was never completed: U+FFFD, or nothing."""
        return self.decoder.decode(b"", final=True)
