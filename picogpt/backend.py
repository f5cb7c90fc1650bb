"""Which array library an array belongs to. The only module that knows there is more than one."""

import sys
from typing import Any


def array_module(x: Any) -> Any:
    """Returns the namespace of array `x`: numpy for NumPy's arrays, and so on for others.

    Never imports a library: an array exists, so its library is loaded already.
    """
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules[type(x).__module__.partition(".")[0]]
