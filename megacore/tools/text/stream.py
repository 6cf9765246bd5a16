"""Turns tokens into text while they are generated."""

from collections.abc import Sequence

from megacore.tools.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # of the prompt: the tokenizers that look at neighbours look at the next one
INCOMPLETE = "\ufffd"  # what decoders write for a fraction of a character


class TextStream:
    """A stream of text from tokens. A character that several tokens spell appears when it is whole.

    The tokenizer decodes each token together with those before it, because its decoder may treat the first
    token of a text in another way: it drops the space of the first word, or puts spaces between words.

    Args:
        tokenizer: the tokenizer of the tokens.
        prompt: the tokens before the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._printed = tokenizer.decode(self._tokens)  # the text of `_tokens` up to `_shown`
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Return the text that a token completes, perhaps none."""
        self._tokens.append(int(token))
        text = self.tokenizer.decode(self._tokens)
        if text.endswith(INCOMPLETE):
            return ""
        return self._show(text)

    def end(self) -> str:
        """Return the rest of the text: U+FFFD for a character that was never completed, or nothing."""
        return self._show(self.tokenizer.decode(self._tokens))

    def _show(self, text: str) -> str:
        """Return what `text`, of all kept tokens, adds; then keep only the tokens that spell it."""
        new = text[len(self._printed) :]
        if not new:  # only special tokens: what follows still needs the tokens before them
            return ""
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        self._printed = self.tokenizer.decode(self._tokens)
        return new
