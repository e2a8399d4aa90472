"""The model code of serving engines, built on abstract weights in its own environment."""
