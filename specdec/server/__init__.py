"""The HTTP server: OpenAI's surface over an AsyncEngine.

It knows HTTP, JSON and text; how tokens come to be is the engine's business.
"""
