"""BERT-type encoders built on the fused operations, and how their checkpoints are read and written."""
