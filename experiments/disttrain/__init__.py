"""Experiments of DistTrain."""
