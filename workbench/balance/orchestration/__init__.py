"""GPUs and parallel degrees for every module: pure functions of plain numbers."""
