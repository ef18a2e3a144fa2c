"""The win probability as an integral: the definition, its closed-form twin and the sampled variants."""
