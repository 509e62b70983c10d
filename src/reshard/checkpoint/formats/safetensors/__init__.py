"""Safetensors files: whole tensors, boxes of tensors, or the tensors of one rank."""
