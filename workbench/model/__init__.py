"""The model: layers of operators, modules of layers, a DAG of modules."""
