"""What a fleet needs for a model: each answer with its formula and its inputs."""
