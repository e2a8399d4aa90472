"""What a step moves, holds and takes: in closed form from the plan, and by walking the compiled schedule."""
