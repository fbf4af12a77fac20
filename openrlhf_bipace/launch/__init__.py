"""What runs where: layouts of actors over nodes, memory estimates, sbatch texts; nothing here talks to Ray."""
