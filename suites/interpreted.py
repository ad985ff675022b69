"""Whether Triton's own interpreter runs here."""

import warnings
from importlib import metadata

import numpy as np

from moe_parity.harness.session.skips import skip_test
from moe_parity.references.skip import Skip, Why


def needs_interpreter() -> None:
    """Skip the running test where Triton is absent, or 3.6, whose interpreter NumPy has left."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        skip_test(Skip(Why.ABSENT, "needs Triton"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int(np.zeros(1))  # as Triton 3.6 does with the bounds of a loop
    except TypeError:
        if version.startswith("3.6"):
            reason = f"the interpreter of Triton {version} does not run with NumPy {np.__version__}"
            skip_test(Skip(Why.ABSENT, reason))
