"""Programs written by Hugging Face transformers, laid out by the plan, traced by torch_xla; torch lives only here."""
