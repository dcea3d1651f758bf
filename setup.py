"""The C extensions; everything else about the package is in pyproject.toml."""

import sysconfig

from setuptools import Extension, setup

# One wheel serves every CPython from 3.11 on; free-threaded builds have no limited API and get an ordinary one.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "headwater._kernels._copy",
            sources=["src/headwater/_kernels/_copy.c"],
            depends=["src/headwater/_kernels/_stream.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=LIMITED_API,
            optional=True,  # without a compiler the fallback does the same, slower
        ),
        Extension(
            "headwater._kernels._checked",
            sources=["src/headwater/_kernels/_checked.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=LIMITED_API,
            optional=True,
        ),
        Extension(
            "headwater._kernels._index",
            sources=["src/headwater/_kernels/_index.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=LIMITED_API,
            optional=True,
        ),
        Extension(
            "headwater._kernels._events",
            sources=["src/headwater/_kernels/_events.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=LIMITED_API,
            optional=True,
        ),
        Extension(
            "headwater._kernels._messages",
            sources=["src/headwater/_kernels/_messages.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=LIMITED_API,
            optional=True,
        ),
        Extension(
            "headwater._kernels._keys",
            sources=["src/headwater/_kernels/_keys.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=LIMITED_API,
            optional=True,
        ),
        Extension(
            "headwater._kernels._codec",
            sources=["src/headwater/_kernels/_codec.c"],
            depends=["src/headwater/_kernels/_planes.h", "src/headwater/_kernels/_quant.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else [],
            # A product fused into a sum rounds once, not twice: other bits than the fallback's.
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],
            py_limited_api=LIMITED_API,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
