"""What is being learnt. A task makes a model and an objective over a batch; it knows nothing of meshes."""
