"""The public ops, one file per family. Each file has the ops, their plans and their gradients."""
