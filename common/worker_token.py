"""The secret by which routers prove themselves to workers: a text with one token on each line.

A worker takes any of them, a router shows the first. So a token is changed without an hour in which both sides must
change at once: first the new one is added, then it is shown, then the old one is taken out.
"""


def shown_token(text: str | None) -> str:
    """The token that a router shows; empty where there is none."""
    return next(iter(tokens_of(text)), "")


def tokens_of(text: str | None) -> list[str]:
    """The tokens, the one to show first; empty where there is none."""
    return [line.strip() for line in (text or "").splitlines() if line.strip()]
