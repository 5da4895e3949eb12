"""Plans that survive failures: pipeline templates, their instantiation, and what a lost node costs."""
