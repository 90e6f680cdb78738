"""The OpenAI-compatible HTTP server over any engine. ``app.build_app`` is its door."""
