"""`funcops.fused` is `funcops.library.fused`."""

import sys as _sys

from funcops.library import fused as _fused
from funcops.library.fused import pack_qkv as pack_qkv

_sys.modules[__name__] = _fused
