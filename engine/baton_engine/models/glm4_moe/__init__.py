"""GLM-4.5: experts chosen by a sigmoid and a bias, after some dense layers; partial rope."""
