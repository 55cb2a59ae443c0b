"""A fleet of simulated engines behind real routers: which policy makes prompts wait least."""
