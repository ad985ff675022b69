"""Whether Triton's own interpreter runs here."""

import importlib.util
import warnings

import numpy as np

from moe_parity.harness.session.skips import skip_test
from moe_parity.references.skip import Skip, Why


def needs_interpreter() -> None:
    """Skip the running test where Triton is absent, or its interpreter meets a NumPy too new."""
    if importlib.util.find_spec("triton") is None:
        skip_test(Skip(Why.ABSENT, "needs Triton"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int(np.zeros(1))  # as it does with the bounds of a loop
    except TypeError:
        reason = f"Triton's interpreter needs NumPy below 2.5, here is {np.__version__}"
        skip_test(Skip(Why.ABSENT, reason))
