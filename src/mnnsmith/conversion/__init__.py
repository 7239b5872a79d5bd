"""The main job: a checkpoint and a recipe become a bundle."""
