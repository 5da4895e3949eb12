"""Elastic training: pipeline templates, their instantiation, and the cost of a lost node."""
