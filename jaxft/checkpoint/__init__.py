"""Reading, checking and writing of Hugging Face checkpoints."""
