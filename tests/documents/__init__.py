"""Checks of the documents: their commands, links, examples and style.

    python -m tests.documents            # every finding, as page:line: what is wrong
    python -m tests.documents --run      # also run the commands of `bash run` fences

Every fence of a page has a language. Four of them mean something to the checks:

- `bash`: each line is a command that a reader types. Project commands are parsed by their own script's
  parser, and the files they read exist in the checkout or are made by an earlier command on the page.
- `bash run`: also executed. If a `text` fence follows directly, its lines appear in the output; `…` in such a
  line is any text.
- `bash needs WORDS`: parsed only. The words say what the page does not make: `needs a hostfile`.
- `json` and `python`: valid JSON, and Python that compiles.

In the README and the task pages, `idioms.py` also finds phrases that read like a translation.
"""
