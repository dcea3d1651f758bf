"""The C extensions; everything else about the package is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# One wheel serves every CPython from 3.11 on; free-threaded builds have no limited API and get an ordinary one.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def kernel(name, *headers, flags=()):
    """One of headwater._kernels; without a compiler its fallback does the same, slower."""
    folder = "src/headwater/_kernels"
    return Extension(
        f"headwater._kernels.{name}",
        sources=[f"{folder}/{name}.c"],
        depends=[f"{folder}/{it}" for it in headers],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
        extra_compile_args=["-O3", "-std=gnu11", *flags],
        py_limited_api=LIMITED_API,
        optional=True,
    )


setup(
    ext_modules=[
        kernel("_copy", "_stream.h"),
        kernel("_checked"),
        kernel("_index"),
        kernel("_events", "_writer.h"),
        kernel("_messages"),
        kernel("_keys"),
        kernel("_expected"),
        # A product fused into a sum rounds once, not twice: other bits than the fallback's.
        kernel("_codec", "_planes.h", "_quant.h", flags=["-ffp-contract=off"]),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
