"""What is kept: weights read from a Hugging Face folder, checkpoints saved and loaded, and the folder that is exported at the end."""
