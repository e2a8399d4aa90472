"""Hugging Face transformers models, sharded by the plan and traced by torch_xla."""
