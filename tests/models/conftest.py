"""The tiny Llama that most tests here switch."""

import pytest

from freemoe.models.weights import find_weights
from tests.tiny import tiny_model


@pytest.fixture
def llama():
    return tiny_model("llama")


@pytest.fixture
def weights(llama):
    return find_weights(llama)
