"""What gets imported, asked of a fresh process: nothing of the test tools is imported here."""

import importlib
import sys
from importlib.abc import MetaPathFinder

OPTIONAL = (
    "torch",
    "jax",
    "cupy",
    "array_api_strict",
    "matplotlib",
    "rich",
    "safetensors",
    "ml_dtypes",
)


class _Refuse(MetaPathFinder):
    """Make the optional packages impossible to import, and note who tried."""

    def __init__(self) -> None:
        self.tried: set[str] = set()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        name = fullname.partition(".")[0]
        if name in OPTIONAL:
            self.tried.add(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def loaded() -> list[str]:
    """Return the optional packages that this process has imported."""
    return [name for name in OPTIONAL if name in sys.modules]


def after_import() -> list[str]:
    importlib.import_module("portable_attention")
    return loaded()


def after_call(library: str, dtype: str) -> list[str]:
    """Return what is imported once arrays of `library` have been through every entry point."""
    xp = importlib.import_module("jax.numpy" if library == "jax" else library)
    before = set(loaded())
    _call_everything(xp, dtype)
    return [name for name in loaded() if name not in before]


def without_optional_packages() -> list[str]:
    """Import and call the package where nothing optional is installed; return what was tried."""
    refuse = _Refuse()
    sys.meta_path.insert(0, refuse)
    numpy = importlib.import_module("numpy")
    for dtype in ("float16", "float32", "float64"):
        _call_everything(numpy, dtype)
    return sorted(refuse.tried)


def _call_everything(xp: object, dtype: str) -> None:
    from portable_attention import Dropout, attention, merge_states, partial_attention

    # (2, 4, 8, 8) ones: every weight is 1/8 and every output is the value itself.
    ones = xp.ones((2, 4, 8, 8), dtype=getattr(xp, dtype))
    options = {"bias": ones * 0, "mask": ones > 0, "softcap": 5.0, "block_size": (4, 4)}
    for output in (
        attention(ones, ones, ones),
        attention(ones, ones, ones, causal=True, window=(2, 0), **options),
        merge_states(partial_attention(ones, ones, ones, **options)).output,
    ):
        assert bool(xp.all(xp.abs(output - ones) < 1e-2)), output
    attention(ones, ones, ones, dropout=Dropout(0.5, 1), return_lse=True)
