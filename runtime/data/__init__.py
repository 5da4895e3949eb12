"""What ranks are fed with: folders of samples, drawn samples, batches as tensors."""
