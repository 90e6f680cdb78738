"""Engines in other processes behind the engine port: vLLM, SGLang, and our own."""
