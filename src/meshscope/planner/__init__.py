"""Search for the best parallel plan: legal plans, their predicted steps, and what to change."""
