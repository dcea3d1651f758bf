"""The table of the prefix index: in C where that was built, else the one of `core.keytable`."""

from __future__ import annotations

from headwater.core.keytable import DictTable, MakeTable

try:
    from headwater._kernels import _index
except ImportError:  # installed without a compiler
    NATIVE = False
else:
    NATIVE = True

make_table: MakeTable = _index.Table if NATIVE else DictTable
"""What a `PrefixIndex` is given."""
