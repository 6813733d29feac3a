"""Train a causal character model with no framework: NumPy, or CuPy, and `attention_vjp`.

    python docs/examples/character_model.py [--library cupy] [--steps 300]

One layer of attention with a residual path, a two-layer perceptron, and cross entropy, trained by
Adam on a text in the public domain (A. Lincoln, the Gettysburg Address, 1863, in the wording of the
Bliss copy). The derivatives of all but the attention are written out below; those of the attention
come from `attention_vjp`. The loss starts at log(number of characters) and must end below BOUND.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from portable_attention import attention_vjp

BOUND = 0.5  # nats a character, on average over the last ten steps
CONTEXT, WIDTH, HEADS, HIDDEN, BATCH = 64, 64, 4, 128, 16
Parameters = dict[str, Any]


def load_text() -> tuple[np.ndarray, str]:
    """Return the text as numbers, and its characters in the order of the numbers."""
    text = (Path(__file__).parent / "gettysburg.txt").read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    return np.array([characters.index(one) for one in text]), characters


def initial_parameters(xp: Any, characters: int, dtype: str = "float32") -> Parameters:
    """Return the parameters of the model, drawn from a fixed seed."""
    rng = np.random.default_rng(0)
    shapes = {
        "token": (characters, WIDTH),
        "place": (CONTEXT, WIDTH),
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "mix": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "logit": (WIDTH, characters),
    }
    scales = {
        name: 0.5 if name in ("token", "place") else shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    return {
        name: xp.asarray((scales[name] * rng.standard_normal(shape)).astype(dtype))
        for name, shape in shapes.items()
    }


def loss_and_gradients(
    xp: Any, parameters: Parameters, tokens: Any, targets: Any
) -> tuple[float, Parameters]:
    """Return the mean cross entropy of a batch (B, L) in nats, and its gradients."""
    batch, length = tokens.shape
    p = parameters

    def heads(x: Any) -> Any:  # (B, L, WIDTH) to (B, L, HEADS, WIDTH / HEADS)
        return xp.reshape(x, (batch, length, HEADS, WIDTH // HEADS))

    def flat(x: Any) -> Any:  # (B, L, ...) to (B L, columns)
        return xp.reshape(x, (batch * length, -1))

    # Forwards.
    x = p["token"][tokens] + p["place"][:length]
    query, key, value = (heads(x @ p[name]) for name in ("query", "key", "value"))
    attended, pullback = attention_vjp(query, key, value, causal=True, layout="blhd")
    mixed = xp.reshape(attended, (batch, length, WIDTH))
    y = x + mixed @ p["mix"]
    above = y @ p["up"]
    active = xp.maximum(above, 0.0)
    z = y + active @ p["down"]
    logits = flat(z @ p["logit"])
    logits = logits - xp.max(logits, axis=-1, keepdims=True)
    log_sum = xp.log(xp.sum(xp.exp(logits), axis=-1, keepdims=True))
    rows = xp.arange(batch * length)
    wanted = xp.reshape(targets, (-1,))
    loss = -xp.mean((logits - log_sum)[rows, wanted])

    # Backwards, from the last line to the first.
    d_logits = xp.exp(logits - log_sum)
    d_logits[rows, wanted] -= 1.0
    d_logits = d_logits / (batch * length)
    gradients: Parameters = {"logit": flat(z).T @ d_logits}
    d_z = xp.reshape(d_logits @ p["logit"].T, z.shape)
    gradients["down"] = flat(active).T @ flat(d_z)
    d_above = (d_z @ p["down"].T) * (above > 0.0)
    gradients["up"] = flat(y).T @ flat(d_above)
    d_y = d_z + d_above @ p["up"].T
    gradients["mix"] = flat(mixed).T @ flat(d_y)
    d_attended = xp.reshape(d_y @ p["mix"].T, attended.shape)
    d_x = d_y
    found = pullback(d_attended)
    for name in ("query", "key", "value"):
        gradient = xp.reshape(getattr(found, name), x.shape)
        gradients[name] = flat(x).T @ flat(gradient)
        d_x = d_x + gradient @ p[name].T
    gradients["place"] = xp.zeros_like(p["place"])
    gradients["place"][:length] = xp.sum(d_x, axis=0)
    # One row for each character: a product with one-hot rows adds those that are the same.
    one_hot = xp.reshape(tokens, (-1, 1)) == xp.arange(p["token"].shape[0])
    gradients["token"] = one_hot.astype(d_x.dtype).T @ flat(d_x)
    return float(loss), gradients


def train(xp: Any, steps: int, show: bool = True) -> list[float]:
    """Train from the start, and return the loss of each step."""
    text, characters = load_text()
    parameters = initial_parameters(xp, len(characters))
    first = {name: xp.zeros_like(array) for name, array in parameters.items()}
    second = {name: xp.zeros_like(array) for name, array in parameters.items()}
    rng = np.random.default_rng(1)
    losses = []
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)[:, np.newaxis] + np.arange(CONTEXT)
        tokens, targets = xp.asarray(text[starts]), xp.asarray(text[starts + 1])
        loss, gradients = loss_and_gradients(xp, parameters, tokens, targets)
        losses.append(loss)
        for name, gradient in gradients.items():  # Adam: Kingma and Ba, 2015
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.99**step)
            parameters[name] = parameters[name] - 0.01 * mean / (xp.sqrt(square) + 1e-8)
        if show and step % 50 == 0:
            print(f"step {step:4d}  loss {loss:.3f} nats a character")
    return losses


def main() -> int:
    """Train, and say whether the loss fell below the bound."""
    parser = argparse.ArgumentParser(description="Train a character model without a framework.")
    parser.add_argument("--library", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    losses = train(importlib.import_module(arguments.library), arguments.steps)
    last = sum(losses[-10:]) / len(losses[-10:])
    print(f"loss {losses[0]:.3f} at first, {last:.3f} over the last ten steps, bound {BOUND}")
    return 0 if last < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
