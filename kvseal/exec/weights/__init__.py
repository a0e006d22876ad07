"""Weights as they lie on disk: safetensors and GGUF readers, dequantisers, tensor sources, the content digest.

Never computes a forward pass and never copies a tensor that a backend could read in place.
"""
