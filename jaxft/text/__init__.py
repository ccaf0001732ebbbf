"""Tokenization, batching, and encoders that take texts: `SentenceEncoder` and `CrossEncoder`."""
