"""How long a step takes: the compiled schedule walked, and the same in closed form."""
