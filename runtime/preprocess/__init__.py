"""Preprocessing of images apart from training: producers decode, a server hands out batches."""
