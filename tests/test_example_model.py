"""The model trained without a framework: its gradients, and that it learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "docs" / "examples" / "character_model.py"


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("character_model", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_match_pytorchs_to_rounding(model):
    torch = pytest.importorskip("torch", reason="needs torch")
    text, characters = model.load_text()
    parameters = model.initial_parameters(np, len(characters), "float64")
    tokens, targets = text[:24].reshape(2, 12), text[1:25].reshape(2, 12)
    loss, gradients = model.loss_and_gradients(np, parameters, tokens, targets)

    p = {name: torch.tensor(array, requires_grad=True) for name, array in parameters.items()}
    x = p["token"][torch.tensor(tokens)] + p["place"][:12]
    query, key, value = (
        (x @ p[name]).unflatten(-1, (model.HEADS, -1)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    y = x + attended.transpose(1, 2).flatten(-2) @ p["mix"]
    z = y + torch.relu(y @ p["up"]) @ p["down"]
    expected = torch.nn.functional.cross_entropy(
        (z @ p["logit"]).flatten(0, 1), torch.tensor(targets).flatten()
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, p[name].grad.numpy(), rtol=1e-10, atol=1e-14)


def test_the_loss_falls_below_its_bound(model):
    losses = model.train(np, steps=300, show=False)
    assert losses[0] > 3.0
    assert np.mean(losses[-10:]) < model.BOUND
