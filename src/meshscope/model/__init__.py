"""Model architectures: what a Hugging Face config says, and the weights that follow from it."""
