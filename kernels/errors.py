"""What kernels and their registry raise for a user's mistake."""

from __future__ import annotations


class KernelError(ValueError):
    """A call or a registration that cannot work; the text is one sentence for the user."""
