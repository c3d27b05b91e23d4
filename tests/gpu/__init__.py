"""Tests that need a CUDA device: `pytest -m gpu`."""
