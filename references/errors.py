"""The one exception that a user reads.

Whatever a user can get wrong (a file, an option, a case, an argument of a kernel) ends in a
``ParityError`` whose text is a sentence: what, where, got and expected, what to do.  The command
prints it without a traceback and exits with status 2, the pytest plugin turns it into a usage
error, and a kernel that raises one has refused its input.
"""

from __future__ import annotations


class ParityError(ValueError):
    """A sentence for the user."""
