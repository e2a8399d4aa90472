"""The model code of serving engines, built on abstract weights in an environment of its own."""
